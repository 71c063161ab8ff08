"""Build the site from the notebooks: `make docs`, or `python docs/build.py`; the result is docs/_site/index.html.

The pages are the committed notebooks with their committed outputs. This script rewrites each notebook for a reader who
does not run it (nbdev's directives and hidden cells go, solutions are folded) and hands the result to Sphinx, which
conf.py configures. Nothing is executed and nothing is fetched.
"""
import json
import re
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).resolve().parent
NOTEBOOKS, SITE = HERE.parent / "nbs", HERE / "_site"
WORK = HERE / "_build"  # pages as Sphinx reads them, and what it leaves beside its result
PARTS = {"theory": "Theory", "scan": "Scans", "models": "Models", "lab": "Lab"}
DIRECTIVE = re.compile(r"^#\|\s*(\w+).*\n?", re.MULTILINE)


def page(notebook: dict) -> dict:
    "The notebook as a reader of the site should see it."
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            directives = set(DIRECTIVE.findall(source))
            if directives & {"hide", "default_exp"}:
                continue
            cell["metadata"]["tags"] = ["hide-input"] if cell["metadata"].get("jupyter", {}).get("source_hidden") else []
            source = DIRECTIVE.sub("", source)
        cells.append({**cell, "source": source})
    return {**notebook, "cells": cells}


def contents() -> str:
    "The table of contents in Markdown, one entry a part of the book."
    parts = {title: sorted(p.stem for p in (NOTEBOOKS / part).glob("*.ipynb")) for part, title in PARTS.items()}
    lists = [":::{toctree}\n:hidden:\n:caption: %s\n\n%s\n:::" % (title, "\n".join(f"{part}/{name}" for name in parts[title]))
             for part, title in PARTS.items()]
    lists.append(":::{toctree}\n:hidden:\n:caption: Reference\n\ncli\ncompat\nplots\n:::")
    return "\n\n".join(lists)


def write_pages(folder: Path) -> None:
    "Every notebook of the book as a page in `folder`."
    for path in sorted(NOTEBOOKS.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        notebook = page(json.loads(path.read_text(encoding="utf-8")))
        if path == NOTEBOOKS / "index.ipynb":
            notebook["cells"].append({"cell_type": "markdown", "id": "contents", "metadata": {}, "source": contents()})
        target = folder / path.relative_to(NOTEBOOKS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(notebook), encoding="utf-8")


def build() -> int:
    "Build the site; returns Sphinx's exit status. The old site stays until the new one is complete."
    shutil.rmtree(WORK, ignore_errors=True)
    write_pages(WORK / "pages")
    status = sphinx(["-q", "-b", "html", "-c", str(HERE), str(WORK / "pages"), str(WORK / "site")])
    if status == 0:
        shutil.rmtree(SITE, ignore_errors=True)
        (WORK / "site").rename(SITE)
    return status


if __name__ == "__main__":
    status = build()
    if status == 0:
        print(f"The site is {SITE.relative_to(Path.cwd()) if SITE.is_relative_to(Path.cwd()) else SITE}/index.html")
    sys.exit(status)
