"""The section *Add an experiment with its claim* of CONTRIBUTING as data: what its text adds."""

import json
import re
import textwrap
from pathlib import Path

import mixer_page

ROOT = Path(__file__).parents[1]
NOTEBOOK = "nbs/lab/42_parity.ipynb"
OPENING = "# Parity\n\n> Is the number of ones so far odd?"
ABOVE = """**5 minutes** · CPU"""
CLAIMS = "nbs/machine/claims.ipynb"
UNREGISTERED = "EXPERIMENTS: tuple[str, ...] = ()"
ROW = "| [Parity](lab/42_parity.ipynb) | is the number of ones so far odd? | 5 | `parity` |"


def section():
    "Return the section of the guide."
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return guide.partition("\n## Add an experiment with its claim\n")[2].partition("\n## ")[0]


def blocks():
    "Return the code of the section: the experiment, then the claim."
    blocks = re.findall(r"```python\n(.*?)```", section(), re.S)
    return [textwrap.dedent(block).strip("\n") for block in blocks]


def module():
    "Return the source of the module that the notebook exports."
    return mixer_page.as_exported("\n\n\n".join(blocks()))


def name_of_the_module():
    "Return the name after `default_exp` in the section."
    return re.search(r"#\| default_exp ([\w.]+)", section())[1]


def notebook():
    "Return the notebook of the section, as JSON."
    made = [("markdown", OPENING), ("markdown", ABOVE)]
    made.append(("code", f"#| default_exp {name_of_the_module()}"))
    made += [("code", f"#| export\n{block}") for block in blocks()]
    return mixer_page.notebook_of(made, "parity")


def registered():
    "Return the value of `EXPERIMENTS` that the section names."
    return re.search(r"`EXPERIMENTS` in `" + re.escape(CLAIMS) + r"`, here `([^`]+)`", section())[1]


def register(root):
    "Add the module to the list of experiments that define claims."
    path = root / CLAIMS
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if UNREGISTERED in source:
            source = source.replace(UNREGISTERED, UNREGISTERED.replace("()", registered()))
            cell["source"] = source
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def apply(root):
    "Add the notebook to the tree at `root`, its row to the map, its claim to the list."
    assert NOTEBOOK in section()
    (root / NOTEBOOK).write_text(json.dumps(notebook(), indent=1) + "\n", encoding="utf-8")
    page = root / "nbs/map.ipynb"
    book = json.loads(page.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        lines = "".join(cell["source"]).splitlines()
        last = [number for number, line in enumerate(lines) if "](lab/41_cluster.ipynb)" in line]
        if last:
            lines.insert(last[0] + 1, ROW)
            cell["source"] = "\n".join(lines)
    page.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    register(root)


def command():
    "Return the words after `longhorn` of the command that runs the experiment."
    return re.search(r"`\.venv/bin/longhorn (reproduce [^`]+)`", section())[1]
