"""Files and changes of the section *Add an experiment with its claim* of CONTRIBUTING."""

import json
import re
import textwrap
from pathlib import Path

import mixer_page

ROOT = Path(__file__).parents[1]
NOTEBOOK = "nbs/lab/42_parity.ipynb"
OPENING = "# Parity\n\n> Is the number of ones so far odd?"
ABOVE = """**5 minutes** · CPU"""
ROW = "| [Parity](lab/42_parity.ipynb) | is the number of ones so far odd? | 5 | `parity` |"


def section():
    "Return the section of the guide."
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return guide.partition("\n## Add an experiment with its claim\n")[2].partition("\n## ")[0]


def blocks():
    "Return the code of the section: first the experiment, then the claim."
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


def change_page(path, change):
    "Rewrite each cell of a notebook by a function of its source."
    page = json.loads(path.read_text(encoding="utf-8"))
    for cell in page["cells"]:
        cell["source"] = change("".join(cell["source"]))
    path.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def with_row(source):
    "Return a cell of the map with the row of the notebook."
    return re.sub(r"^.*\]\(lab/41_cluster\.ipynb\).*$", rf"\g<0>\n{ROW}", source, flags=re.M)


def with_name(source):
    "Return a cell of the claims' page with the experiment in its list."
    names = re.search(r"`EXPERIMENTS` in `nbs/machine/claims\.ipynb`, here `(\(.*?\))`", section())
    return re.sub(r"^(EXPERIMENTS.* = )\(\)", rf"\g<1>{names[1]}", source, flags=re.M)


def apply(root):
    "Apply the section to the tree at `root`, and add a row to the map."
    assert NOTEBOOK in section()
    (root / NOTEBOOK).write_text(json.dumps(notebook(), indent=1) + "\n", encoding="utf-8")
    change_page(root / "nbs/machine/claims.ipynb", with_name)
    change_page(root / "nbs/map.ipynb", with_row)


def command():
    "Return the words after `longhorn` of the command that runs the experiment."
    return re.search(r"`\.venv/bin/longhorn (reproduce [^`]+)`", section())[1]
