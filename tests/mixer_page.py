"""Files, changed lines and commands of the page *Add a mixer*."""

import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "nbs/models/26_add_a_mixer.ipynb"
NOTEBOOK = "nbs/models/27_efla.ipynb"  # notebook that the text creates


@cache
def cells():
    "Return the cells of the page as (type, source)."
    page = json.loads(PAGE.read_text(encoding="utf-8"))
    return [(cell["cell_type"], "".join(cell["source"])) for cell in page["cells"]]


def blocks(language):
    "Return the fenced blocks of one language in the page's prose."
    prose = "\n".join(source for kind, source in cells() if kind == "markdown")
    return re.findall(rf"^```{language}\n(.*?)^```$", prose, re.M | re.S)


def parts_of(file):
    "Return the cells whose first line names this file, without that line."
    first = f"# {file}\n"
    return [source.removeprefix(first) for kind, source in cells() if source.startswith(first)]


def notebook_of(cells, name):
    "Return a notebook of (type, source) pairs, as JSON; ids of cells start with `name`."
    code = {"execution_count": None, "outputs": []}
    cells = [
        {"cell_type": kind, "id": f"{name}-{number}", "metadata": {}, "source": source.rstrip("\n")}
        | (code if kind == "code" else {})
        for number, (kind, source) in enumerate(cells)
    ]
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def notebook():
    "Return the notebook that the text creates, as JSON."
    made = [("markdown", source) for source in blocks("markdown")]
    made += [("code", source) for source in blocks("python")]
    first = f"# {NOTEBOOK}\n"
    for (_, before), (_, source) in zip(cells(), cells()[1:]):
        if source.startswith(first):
            if "```" not in before:  # otherwise the fence is about the files, not about the code
                made.append(("markdown", before))
            made.append(("code", source.replace(first, "#| export\n")))
    return notebook_of(made, "efla")


def as_exported(source):
    "Return the source of a module with its public names."
    public = re.findall(r"^(?:class|def) ([A-Za-z]\w+)", source, re.M)
    return f"__all__ = {public}\n{source}"


def module():
    "Return the source of the module that the notebook exports."
    return as_exported("\n\n".join(parts_of(NOTEBOOK)))


def plain_mixer():
    "Return the source of the page's layer that is a plain subclass of `Mixer`."
    return next(source for _, source in cells() if '@register_mixer("decay")' in source)


def changes():
    "Return the changes to other files: (file, old text, new text)."
    changed_texts = []
    for block in blocks("diff"):
        header, *lines = block.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] in " -")
        new = "\n".join(line[1:] for line in lines if line[0] in " +")
        changed_texts.append((header.removeprefix("--- "), old, new))
    return changed_texts


def changed(text, file, old, new):
    "Return the text of a file after a change; a notebook is changed cell by cell."
    if not file.endswith(".ipynb"):
        assert text.count(old) == 1, f"{file} has this text {text.count(old)} times: {old}"
        return text.replace(old, new)
    page = json.loads(text)
    sources = ["".join(cell["source"]) for cell in page["cells"]]
    places = [number for number, source in enumerate(sources) if old in source]
    assert len(places) == 1, f"{file} has this text in {len(places)} cells: {old}"
    page["cells"][places[0]]["source"] = sources[places[0]].replace(old, new)
    return json.dumps(page, indent=1, ensure_ascii=False) + "\n"


def apply(root):
    "Apply the text to the tree at `root`."
    (root / NOTEBOOK).write_text(json.dumps(notebook(), indent=1), encoding="utf-8")
    test = "\n".join(parts_of("tests/test_efla.py")) + "\n"
    (root / "tests/test_efla.py").write_text(test, encoding="utf-8")
    for file, old, new in changes():
        text = (root / file).read_text(encoding="utf-8")
        (root / file).write_text(changed(text, file, old, new), encoding="utf-8")


def commands():
    "Return the commands of the page, in order."
    return "".join(blocks("sh")).splitlines()
