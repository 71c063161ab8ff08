"""Build the site from the notebooks: `make docs`, or `python docs/build.py`.

The result is docs/_site/index.html. The pages are the committed notebooks with their committed
outputs. This script rewrites each notebook for a reader who does not run it: it removes nbdev's
directives and hidden cells, folds solutions and imports, and gives figures their captions. Exported
functions get an entry by Sphinx's autodoc, to which conf.py adds the comments of their parameters.
No page is executed, and nothing is downloaded.
"""

import ast
import base64
import configparser
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOTEBOOKS = HERE.parent / "nbs"
SITE = HERE / "_site"
WORK = HERE / "_build"  # pages for Sphinx, notebooks for Colab, and Sphinx's other output
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(ROOT))
import api  # noqa: E402
import longhorn_kit  # noqa: E402
from figures import pictures, shows_photograph  # noqa: E402

PARTS = {
    "theory": "Theory",
    "scan": "Scans",
    "models": "Models",
    "lab": "Lab",
    "machine": "For contributors",
}
REFERENCE = ("map", "glossary", "references", "api", "stable")
DIRECTIVE = re.compile(r"^#\|\s*([\w-]+):?[ \t]*(.*)\n?", re.MULTILINE)
LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)"
)
WIDE = 640  # pixels; small screens scroll wider figures, so that text stays legible
CAPTION = re.compile(r"\A\*(?!\*)((?:[^*]|\*\*|\*[^*\n]+\*(?=\S))+?)\*[ \t]*(?:\n\n|\n?\Z)")


def repository(settings: Path = ROOT / "settings.ini") -> str:
    "Return the address of the repository, or an empty string while `published` is False."
    parser = configparser.ConfigParser()
    parser.read(settings)
    return parser["DEFAULT"]["git_url"] if parser["DEFAULT"].getboolean("published") else ""


REPOSITORY = repository()
COMMIT = os.environ.get("GITHUB_SHA", "main")


def notebooks() -> list:
    "Return the notebooks of the book, in the order of their paths."
    return [p for p in sorted(NOTEBOOKS.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]


def page_name(path: Path) -> str:
    "Return Sphinx's name for the page of a notebook, such as scan/15_op."
    return path.relative_to(NOTEBOOKS).with_suffix("").as_posix()


def read(path: Path) -> dict:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def directives(cell: dict) -> dict:
    "Return the nbdev directives of a code cell: name -> arguments."
    return dict(DIRECTIVE.findall(cell["source"])) if cell["cell_type"] == "code" else {}


def module_of(notebook: dict) -> str | None:
    "Return the module that the notebook exports, or None."
    for cell in notebook["cells"]:
        if name := directives(cell).get("default_exp"):
            return f"longhorn_kit.{name.strip()}"
    return None


def entries_of(cell: dict, module: str | None) -> list:
    "Return the API entries of a code cell."
    wanted = module and {"export", "exporti", "exports"} & set(directives(cell))
    return api.exported(DIRECTIVE.sub("", cell["source"]), module) if wanted else []


def only_imports(source: str) -> bool:
    "Check whether a cell contains only imports and setup calls."
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic or a shell command
        return False
    imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
    return any(imports) and all(
        found or isinstance(node, (ast.Expr, ast.If)) for node, found in zip(body, imports)
    )


def imported_names(notebook: dict) -> dict:
    "Return name -> full name of everything that a notebook imports from the package."
    found = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "longhorn_kit" in cell["source"]:
            try:
                nodes = list(ast.walk(ast.parse(DIRECTIVE.sub("", cell["source"]))))
            except SyntaxError:
                continue
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "longhorn_kit"
                ):
                    found.update(
                        {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
                    )
    return found


def with_number(source: str, path: Path) -> str:
    "Return the first cell of a page, with the number from its file name in the title."
    number = re.match(r"(\d+[a-z]?)_", path.stem)
    return source.replace("# ", f"# {number[1]}. ", 1) if number else source


def markdown_cell(name: str, source: str) -> dict:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}


# --- links and captions ---------------------------------------------------------------------------


def local_links(source: str, path: Path) -> str:
    "Link files to the repository, or replace links by file names; keep fenced code."

    def replace(match):
        text = match[1]
        target = match[2]
        anchor = match[3] or ""
        file = (path.parent / target).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            raise ValueError(f"{path.relative_to(ROOT)}: the link to {target} leads nowhere")
        if file.suffix in (".ipynb", ".md") and file.is_relative_to(NOTEBOOKS):
            return match[0]
        kind = "tree" if file.is_dir() else "blob"
        name = file.relative_to(ROOT).as_posix()
        if not REPOSITORY:
            return text if text == name else f"{text} (`{name}`)"
        return f"[{text}]({REPOSITORY}/{kind}/{COMMIT}/{name}{anchor})"

    parts = re.split(r"(^```.*?^```$)", source, flags=re.M | re.S)  # every second part is code
    return "".join(part if n % 2 else LINK.sub(replace, part) for n, part in enumerate(parts))


def with_elements(output: dict) -> dict:
    """Return an output with the pictures of the kit as SVG elements.

    The text of such pictures can be searched, and their colours adapt to the page."""
    from longhorn_kit.lab.claims.forest import inline

    data = output.get("data", {})
    if "text/html" not in data:
        return output
    return {**output, "data": {**data, "text/html": inline("".join(data["text/html"]))}}


def plain(markdown: str) -> str:
    "Convert Markdown to plain text, for the `alt` of a figure."
    return re.sub(r"\s+", " ", re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`$\\]", r"\1", markdown)).strip()


def give_captions(cells: list) -> None:
    """Turn the italic paragraph after a figure into its caption.

    Screen readers read the first sentence of the caption."""
    heading = ""
    phone = False
    for cell, following in zip(cells, [*cells[1:], None]):
        if cell["cell_type"] == "markdown":
            found = re.findall(r"^#+ (.*)$", cell["source"], re.MULTILINE)
            heading = found[-1] if found else heading
        if not (shown := pictures(cell)):
            continue
        options = cell["metadata"].setdefault("mystnb", {})
        options["image"] = {"alt": f"Figure: {plain(heading)}"}
        classes = ["photograph"] * any(shows_photograph(output) for output in shown)
        if phone or "phone" in cell["metadata"]:  # the figure is drawn twice
            classes.append("desk" if phone else "phone")
            phone = not phone
        elif max(o["metadata"].get("image/png", {}).get("width", 0) for o in shown) > WIDE:
            classes.append("wide")
        if classes:
            options["image"]["classes"] = " ".join(classes)
        alone = len(shown) == 1 and not any(
            "text/html" in o.get("data", {}) for o in cell["outputs"]
        )
        if (
            alone
            and following
            and following["cell_type"] == "markdown"
            and (match := CAPTION.match(following["source"]))
        ):
            text = " ".join(match[1].split())
            options["image"]["alt"] = plain(re.split(r"(?<=[a-z)])\. ", text)[0])
            options["figure"] = {"caption": text}
            following["source"] = following["source"][match.end() :].lstrip("\n")


# --- a page ---------------------------------------------------------------------------------------


def fold(cell: dict, prompt: str) -> None:
    "Hide the source of a cell behind a line that opens it."
    cell["metadata"]["tags"] = ["hide-input"]
    cell["metadata"]["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}


def join_imports(cells: list) -> list:
    "Join adjacent cells of imports."
    joined = []
    for cell in cells:
        prompts = [
            c["metadata"].get("mystnb", {}).get("code_prompt_show") for c in (*joined[-1:], cell)
        ]
        if prompts == ["Imports", "Imports"] and not joined[-1].get("outputs"):
            joined[-1] = {**cell, "source": joined[-1]["source"].rstrip() + "\n\n" + cell["source"]}
        else:
            joined.append(cell)
    return joined


def colab_address(path: Path) -> str:
    "Return the address at which Colab opens a notebook of the branch `colab`."
    colab = REPOSITORY.replace("https://github.com", "https://colab.research.google.com/github")
    return f"{colab}/blob/colab/{path.relative_to(NOTEBOOKS).as_posix()}"


def furniture(path: Path, module: str | None) -> str:
    """Return the line under the title.

    It marks pages for contributors and, once published, links to Colab, notebook and module."""
    name = path.relative_to(NOTEBOOKS).as_posix()
    code = f"Module <code>{module}</code>"
    links = ['<span class="machine">For contributors</span>'] * name.startswith("machine/")
    if not REPOSITORY:
        links += [f"<span>{code}</span>"] * bool(module)
        return f'<p class="furniture">{" ".join(links)}</p>' if links else ""
    links += [
        f'<a class="colab" href="{colab_address(path)}">Open in Colab</a>',
        f'<a href="{REPOSITORY}/blob/{COMMIT}/nbs/{name}">Notebook</a>',
    ]
    if module:
        links.append(
            f'<a href="{REPOSITORY}/blob/{COMMIT}/{module.replace(".", "/")}.py">{code}</a>'
        )
    return f'<p class="furniture">{" ".join(links)}</p>'


def for_reader(cell: dict, path: Path) -> dict:
    "Return a cell without directives, with setup and solutions folded and links to the site."
    old = cell["metadata"]
    cell = {**cell, "metadata": {}}
    if cell["cell_type"] != "code":
        cell.pop("outputs", None)
        cell["source"] = local_links(cell["source"], path)
        return cell
    cell["outputs"] = [with_elements(output) for output in cell.get("outputs", [])]
    cell["source"] = DIRECTIVE.sub("", cell["source"])
    tags = old.get("tags", ())
    if "phone" in tags:
        cell["metadata"]["phone"] = True
    if old.get("jupyter", {}).get("source_hidden"):  # JupyterLab folds cells with this mark
        fold(cell, "Solution" if "solution" in tags else "Code")
    elif not cell["outputs"] and only_imports(cell["source"]):
        fold(cell, "Imports")
    return cell


def page(notebook: dict, path: Path) -> dict:
    "Return the notebook as the site shows it."
    cells = []
    module = module_of(notebook)
    for number, cell in enumerate(notebook["cells"]):
        if {"hide", "default_exp"} & set(directives(cell)):
            continue
        entries = entries_of(cell, module)
        cell = for_reader(cell, path)
        if number == 0:
            cell["source"] = with_number(cell["source"], path)
        constants = [f'<span id="{e.full_name}"></span>' for e in entries if e.kind == "data"]
        if constants:
            cells.append(markdown_cell(f"names-{number}", "".join(constants)))
        cells.append(cell)
        cards = [api.directive(e.full_name, e.kind) for e in entries if e.kind != "data"]
        if cards:
            cells.append(markdown_cell(f"api-{number}", api.myst(*cards)))
        if number == 0:
            cells.append(markdown_cell("furniture", furniture(path, module)))
    give_captions(cells)
    cells = [cell for cell in cells if cell["source"].strip() or cell.get("outputs")]
    return {**notebook, "cells": join_imports(cells)}


def with_anchors(source: str) -> str:
    "Add anchors to entries of glossary and references: #term-state, #arxiv-2407.14207."
    source = re.sub(
        # two terms with the same spelling, such as "checkpoint (of a run)"
        r"^- \*\*(.+?)\*\*( \((of an? [^)]+)\))?",
        lambda m: (
            f'- <span id="term-{slug(m[1] + " " + (m[3] or ""))}"></span>**{m[1]}**{m[2] or ""}'
        ),
        source,
        flags=re.M,
    )
    return re.sub(
        r"^- (?=.*arxiv\.org/abs/(\d{4}\.\d{4,5}))",
        r'- <span id="arxiv-\1"></span>',
        source,
        flags=re.M,
    )


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def in_order() -> list:
    "Return the names of the pages that the map lists, in the order of the map."
    text = "\n".join(cell["source"] for cell in read(NOTEBOOKS / "map.ipynb")["cells"])
    return re.findall(r"^\| \[[^\]]*\]\((\w+/\w+)\.ipynb\)", text, re.M)


def contents() -> str:
    "Return the table of contents in Markdown, one entry per part, in the order of the map."
    parts = {
        title: [name for name in in_order() if name.startswith(f"{part}/")]
        for part, title in PARTS.items()
    }
    parts["Reference"] = list(REFERENCE)
    return "\n\n".join(
        f":::{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n:::"
        for title, names in parts.items()
    )


# --- the package ----------------------------------------------------------------------------------


def public_names() -> dict:
    "Return name -> full name of the public names of `longhorn_kit`, except constants."
    things = {
        name: getattr(longhorn_kit, name) for name in longhorn_kit.__all__ if not name.isupper()
    }
    return {name: f"{thing.__module__}.{thing.__qualname__}" for name, thing in things.items()}


def survey(books: dict) -> dict:
    "Return all link targets: definitions, modules, imports and equations of every page."
    names = {
        "definitions": {},
        "modules": {},
        "imports": {},
        "equations": {},
        "public": public_names(),
    }
    for path, notebook in books.items():
        doc = page_name(path)
        module = module_of(notebook)
        names["imports"][doc] = imported_names(notebook)
        text = "\n".join(c["source"] for c in notebook["cells"] if c["cell_type"] == "markdown")
        names["equations"][doc] = re.findall(r"\\tag\{(\w+)\}", text)
        if not module:
            continue
        names["modules"][module] = doc
        for cell in notebook["cells"]:
            for entry in entries_of(cell, module):
                for item in [entry, *entry.members]:
                    names["definitions"].setdefault(item.full_name, doc)
    return names


def public_section() -> str:
    "Return the public names, described by autodoc."
    cards = []
    for name in longhorn_kit.__all__:
        kind = "data" if name.isupper() else "function" if name.islower() else "class"
        inherited = "   :inherited-members: Module\n" if kind == "class" else ""
        cards.append(api.directive(f"longhorn_kit.{name}", kind) + inherited)
    return api.myst(*cards)


def package_page(books: dict) -> str:
    "Return the page of public names with signatures, then internal names by module."
    lines = [
        "# The package",
        "",
        "> The public names of `longhorn_kit`, then every internal function and class, "
        "with the notebook that defines it.",
        "",
        "## Public names",
        "",
        "`from longhorn_kit import ...` offers these names, and they are [stable](stable.md).",
        "",
        public_section(),
        "",
        "## Internal modules",
        "",
        "The names below are internal: [any version can change them](stable.md).",
        "",
    ]
    parts = [*PARTS, "."]  # modules in the order of the book
    for path in sorted(
        books, key=lambda p: (parts.index(p.parent.relative_to(NOTEBOOKS).as_posix()), p.stem)
    ):
        notebook = books[path]
        module = module_of(notebook)
        found = [
            e for cell in notebook["cells"] for e in entries_of(cell, module) if e.kind != "data"
        ]
        if not found:
            continue
        title = notebook["cells"][0]["source"].splitlines()[0].lstrip("# ")
        lines += [
            f"### {module.removeprefix('longhorn_kit.')}",
            "",
            f"From [{title}]({page_name(path)}.ipynb).",
            "",
            api.myst(api.table([entry.full_name for entry in found])),
            "",
        ]
    return "\n".join(lines)


# --- all pages ------------------------------------------------------------------------------------


def write_pages(folder: Path) -> dict:
    """Write every notebook as a page to `folder`/pages.

    Return the result of `survey`, which is also written to `folder`/names.json."""
    pages = folder / "pages"
    books = {path: read(path) for path in notebooks()}
    for path, notebook in books.items():
        target = pages / path.relative_to(NOTEBOOKS)
        target.parent.mkdir(parents=True, exist_ok=True)
        made = page(notebook, path)
        if path == NOTEBOOKS / "index.ipynb":
            made["cells"].append(markdown_cell("contents", contents()))
        if path.stem in ("glossary", "references"):
            made["cells"] = [
                {**cell, "source": with_anchors(cell["source"])} for cell in made["cells"]
            ]
        target.write_text(json.dumps(made), encoding="utf-8")
    (pages / "api.md").write_text(package_page(books), encoding="utf-8")
    stable = NOTEBOOKS / "stable.md"
    (pages / stable.name).write_text(
        local_links(stable.read_text(encoding="utf-8"), stable), encoding="utf-8"
    )
    names = survey(books)
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
    return names


COLAB = """# Colab only: fetch the kit as it was when this notebook was published, \
and install what Colab lacks.
!git clone -q {repository} /content/longhorn-kit \
&& git -C /content/longhorn-kit checkout -q {commit}
%cd -q /content/longhorn-kit/{folder}
%pip install -q -e "/content/longhorn-kit[colab]"
import sys; sys.path.insert(0, "/content/longhorn-kit")"""


def write_colab(folder: Path) -> None:
    """Write the notebooks with a first cell that installs the kit in Colab.

    The workflow commits them to the branch `colab`."""
    for path in notebooks():
        notebook = read(path)
        place = path.relative_to(NOTEBOOKS)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":  # links to notebooks open them in Colab

                def absolute(m, path=path):
                    return f"[{m[1]}]({colab_address((path.parent / m[2]).resolve())}{m[3] or ''})"

                cell["source"] = LINK.sub(absolute, local_links(cell["source"], path))
        source = COLAB.format(
            repository=REPOSITORY, commit=COMMIT, folder=path.parent.relative_to(ROOT).as_posix()
        )
        cell = {
            "cell_type": "code",
            "id": "colab",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": source,
        }
        notebook["cells"].insert(1, cell)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(
            json.dumps(notebook, indent=1, ensure_ascii=False), encoding="utf-8"
        )


# --- README ---------------------------------------------------------------------------------------


def index_cell(name: str) -> dict:
    "Return a cell of nbs/index.ipynb by its id."
    return next(cell for cell in read(NOTEBOOKS / "index.ipynb")["cells"] if cell["id"] == name)


def index_shows(name: str, kind: str) -> str:
    "Return the committed output of a cell of nbs/index.ipynb."
    return "".join(
        next(
            output["data"][kind]
            for output in index_cell(name)["outputs"]
            if kind in output.get("data", {})
        )
    )


FILM = re.compile(r'src="data:image/svg\+xml;base64,([^"]+)"')


def film() -> str:
    "Return the film of page 03, with a white background so that it is legible on any page."
    cells = read(NOTEBOOKS / "theory" / "03_exact_vs_diagonal.ipynb")["cells"]
    shown = [
        "".join(o["data"]["text/html"])
        for cell in cells
        for o in cell.get("outputs", [])
        if "text/html" in o.get("data", {})
    ]
    return base64.b64decode(next(match for html in shown for match in FILM.findall(html))).decode()


def front_files() -> dict:
    "Return name -> SVG of every picture in docs/static: drawings of the ledger, and the film."
    from longhorn_kit.lab.claims.front import findings, picture

    found = findings()
    return {
        "findings.svg": picture(found),
        "findings-narrow.svg": picture(found, narrow=True),
        "film.svg": film(),
    }


def from_root(markdown: str) -> str:
    "Return Markdown of nbs/index.ipynb with links relative to the repository's root."
    return LINK.sub(lambda match: f"[{match[1]}](nbs/{match[2]}{match[3] or ''})", markdown)


def readme_blocks() -> dict:
    "Return mark -> text of every generated block of the README."
    from longhorn_kit.lab.claims.front import reproduced, users
    from longhorn_kit.lab.claims.ledger import measured_minutes

    rows = from_root(index_cell("index-008")["source"])
    found = from_root(index_cell("index-010")["source"])
    return {
        "users": users(),
        "rows": rows.partition("\n\n")[2],
        "found": found,
        "reproduce": reproduced(),
        "minutes": f"`longhorn reproduce` took {measured_minutes()}. "
        "After its first job it prints how long your machine takes.",
    }


def reading_minutes(notebook: dict) -> int:
    """Return the minutes that it takes to read a page.

    A minute is 200 words, 20 lines of code, or one equation. Exercises state their times, and
    folded cells are not counted. Above five minutes, the result is a multiple of five."""
    words = 0
    lines = 0
    equations = 0
    in_exercises = False
    for cell in notebook["cells"]:
        source = cell["source"]
        if cell["cell_type"] == "markdown":
            heading = re.search(r"^## (.*)", source, re.M)
            in_exercises = heading[1].startswith("Exercise") if heading else in_exercises
            equations += 0 if in_exercises else len(re.findall(r"\\tag\{", source))
            text = re.sub(r"\$\$.*?\$\$|\]\([^)]*\)", " ", source, flags=re.S)
            words += 0 if in_exercises else len(text.split())
        elif not in_exercises and not cell["metadata"].get("jupyter", {}).get("source_hidden"):
            lines += len([line for line in source.splitlines() if line.strip()])
    minutes = math.ceil(words / 200 + lines / 20 + equations)
    return minutes if minutes <= 5 else 5 * math.ceil(minutes / 5)


def write_minutes() -> None:
    "Raise the minutes of pages that take longer to read, and copy all minutes to map and index."
    for path in notebooks():
        text = path.read_text(encoding="utf-8")
        needed = reading_minutes(read(path))
        stated = re.search(r"(\d+) minutes", read(path)["cells"][1]["source"])
        if stated and int(stated[1]) < needed:
            changed = text.replace(f"{stated[0]}", f"{needed} minutes", 1)
            path.write_text(changed, encoding="utf-8")

    def replace(match):
        given = re.search(r"(\d+) minutes", read(NOTEBOOKS / match[1])["cells"][1]["source"])
        return f"]({match[1]}) |{match[2]}| {given[1]} |"

    for name in ("map", "index"):
        path = NOTEBOOKS / f"{name}.ipynb"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\]\(([^)\s]+\.ipynb)\) \|(.*?)\| \d+ \|", replace, text)
        path.write_text(text, encoding="utf-8")


def addressed() -> dict:
    "Return README.md, pyproject.toml and CITATION.cff with the published repository's address."
    badge = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    badge = (
        f"{badge}({colab_address(NOTEBOOKS / 'index.ipynb')})\n"
        "opens the book without installing anything; its first cell installs the kit there.\n"
    )
    lines = {
        "README.md": (r"(<!-- badge -->\n)(?:.*\n)*?(?=<!-- end badge -->)", badge),
        "pyproject.toml": (
            r"(\[project\.urls\]\n)(?:Repository = .*\n)?",
            f'Repository = "{REPOSITORY}"\n',
        ),
        "CITATION.cff": (
            r"(license: .*\n)(?:repository-code: .*\n)?",
            f"repository-code: {REPOSITORY}\n",
        ),
    }
    return {
        name: re.sub(
            pattern,
            lambda m, line=line: m[1] + (line if REPOSITORY else ""),
            (ROOT / name).read_text("utf-8"),
        )
        for name, (pattern, line) in lines.items()
    }


def write_readme() -> None:
    "Update the map's minutes, the repository's address, and the README's pictures and tables."
    write_minutes()
    for name, text in addressed().items():
        (ROOT / name).write_text(text, encoding="utf-8")
    for name, svg in front_files().items():
        (HERE / "static" / name).write_text(svg + "\n", encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark, block in readme_blocks().items():
        text = re.sub(
            rf"(<!-- {mark}: make readme -->\n).*?(<!-- end {mark} -->)",
            lambda m, block=block: f"{m[1]}{block}\n{m[2]}",
            text,
            flags=re.S,
        )
    (ROOT / "README.md").write_text(text, encoding="utf-8")


# --- build ----------------------------------------------------------------------------------------


def build(site: Path = SITE, work: Path = WORK) -> int:
    """Build the site; return Sphinx's exit status.

    The old site is replaced only after the new site is complete."""
    from sphinx.cmd.build import main as sphinx

    shutil.rmtree(work, ignore_errors=True)
    write_pages(work)
    if REPOSITORY:
        write_colab(work / "colab")
    folders = [
        "-c",
        str(HERE),
        "-d",
        str(work / "doctrees"),
        str(work / "pages"),
        str(work / "site"),
    ]
    status = sphinx(["-q", "-W", "--keep-going", "-b", "html", *folders])
    if status == 0:
        shutil.rmtree(site, ignore_errors=True)
        (work / "site").rename(site)
    return status


if __name__ == "__main__":
    if sys.argv[1:] == ["readme"]:
        sys.exit(write_readme())
    status = build()
    if status == 0:
        shown = SITE.relative_to(Path.cwd()) if SITE.is_relative_to(Path.cwd()) else SITE
        print(f"The site is {shown}/index.html")
    sys.exit(status)
