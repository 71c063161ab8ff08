"""Test the site: every notebook has a page, every function has an entry, every link has a target.

The tests need no network. Preparing the pages, and testing them, does not need the extra `docs`;
building and crawling the complete site does.
"""

import ast
import base64
import importlib.metadata
import io
import json
import posixpath
import re
import shlex
from pathlib import Path
from urllib.parse import quote, unquote
from xml.etree import ElementTree

import pytest
from bs4 import BeautifulSoup

import longhorn_kit
from browser import MISSING, Browser
from colours import contrast
from site_build import ROOT, api, build, figures
from sweep import slow_case

NOTEBOOKS = [p.relative_to(build.NOTEBOOKS).with_suffix("") for p in build.notebooks()]
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"
)  # of Sphinx's extensions


def text_of(name):
    "Return the sources of all cells of a page."
    cells = build.read(build.NOTEBOOKS / f"{name}.ipynb")["cells"]
    return "\n".join(cell["source"] for cell in cells)


class Page:
    "Read a page: its anchors, links, loaded files, pictures and text outside of <script>."

    def __init__(self, path):
        soup = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        tags = soup.find_all(id=True)
        anchors = soup.find_all("a")
        self.ids = {tag["id"] for tag in tags} | {tag.get("name") for tag in anchors}
        anchors = soup.find_all("a", href=True)
        self.links = [tag["href"] for tag in anchors]
        self.pictures = soup.find_all("img")
        self.loaded = [
            tag["src"]
            for tag in soup.find_all(
                ("script", "img", "iframe", "video", "source", "audio"), src=True
            )
        ]
        self.loaded += [
            tag["href"]
            for tag in soup.find_all("link")
            if not {"index", "search", "next", "prev", "canonical"} & {*tag.get("rel", ())}
        ]
        for code in soup.select("code.literal, pre"):
            if not code.find_parent(class_="cell"):  # code may show such markup
                code.decompose()
        self.text = soup.get_text()  # without <script> and <style>


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return folder, build.write_pages(folder)


SOME = (
    "index",
    "theory/00_notation",
    "theory/01_objective",
    "theory/02_closed_forms",
    "scan/15_op",
    "machine/official_layout",
    "machine/operation",
    "api",
    "stable",
)


def build_some(site, work):
    "Build only the pages of SOME; Sphinx ignores links to other pages."
    from sphinx.cmd.build import main as sphinx

    build.write_pages(work)
    for path in (work / "pages").rglob("*.*"):
        name = path.relative_to(work / "pages").with_suffix("")
        if name.as_posix() not in SOME:
            path.unlink()
    absent = "suppress_warnings=toc.not_readable,myst.xref_missing"
    return sphinx(
        [
            "-q",
            "-W",
            "--keep-going",
            "-b",
            "html",
            "-c",
            str(build.HERE),
            "-d",
            str(work / "doctrees"),
            "-D",
            absent,
            str(work / "pages"),
            str(site),
        ]
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(pages, marks=pytest.mark.slow) for pages in ("some pages", "all pages")],
)
def site(request, tmp_path_factory):
    "Return the folder of a built site."
    pytest.importorskip("myst_nb", reason="needs the extra 'docs'")
    folder = tmp_path_factory.mktemp("site") / request.param.replace(" ", "-")
    make = build_some if request.param == "some pages" else build.build
    assert make(folder / "site", folder / "work") == 0, (
        "Sphinx reports errors or warnings; `make docs` shows them"
    )
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site):
    paths = sorted(site.rglob("*.html"))
    return {path.relative_to(site).as_posix(): Page(path) for path in paths}


def test_pages_have_no_directives_and_no_hidden_cells(prepared):
    folder, _ = prepared
    for name in NOTEBOOKS:
        page = json.loads((folder / "pages" / f"{name}.ipynb").read_text())
        for cell in page["cells"]:
            source = cell["source"]
            shown = re.sub(r"```.*?```|`[^`\n]+`", "", source, flags=re.S)  # except code
            assert "#|" not in shown, f"{name}: {source[:80]}"


def test_every_exported_public_function_has_an_entry(prepared):
    _, names = prepared
    for path in build.notebooks():
        module = build.module_of(build.read(path))
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text() if module else "")
        expected = {
            f"{module}.{node.name}"
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        }
        defined = {*names["definitions"]}
        assert expected <= defined, f"{path.name}: {expected - {*names['definitions']}}"


def test_the_page_of_the_package_begins_with_the_public_names(site, pages):
    soup = BeautifulSoup((site / "api.html").read_text(encoding="utf-8"), "html.parser")
    public = soup.find(id="public-names")
    internal = soup.find(id="internal-modules")
    assert internal in public.find_all_next()
    assert "any version can change them" in internal.get_text()
    assert {tag["id"] for tag in public.find_all("dt", id=True)} >= {
        f"longhorn_kit.{name}" for name in longhorn_kit.__all__
    }
    scan = public.find(id="longhorn_kit.longhorn_scan").parent.get_text()
    assert "form='diagonal'" in scan
    assert "(B,T,N) queries" in scan
    assert "(B,D,N), or (n,D,N) with cu_seqlens; zeros if None" in scan
    model = public.find(id="longhorn_kit.SequenceLM").parent
    assert "sizes, mixer, options" in model.get_text(), "the constructor is that of a base class"
    methods = {
        tag["id"].removeprefix("longhorn_kit.SequenceLM.") for tag in model.find_all("dt", id=True)
    }
    assert {"forward", "generate", "save_pretrained", "from_pretrained"} <= methods
    assert "load_state_dict" not in methods
    rows = {row.find("code").get_text(): row for row in internal.select("tbody tr")}
    assert "…" in rows["round_width"].get_text(), "dots in a list must not end a sentence"
    assert rows["symbol_table"].find("a")["title"] == "longhorn_kit.theory.notation.symbol_table"
    assert len(rows) > 1000


def test_parameters_are_folded_except_those_of_the_public_names(site):
    soup = BeautifulSoup(
        (site / "machine/operation.html").read_text(encoding="utf-8"), "html.parser"
    )
    public = set(build.public_names().values())
    assert {"longhorn_kit.scan.op.longhorn_scan", "longhorn_kit.models.lm.SequenceLM"} <= public
    for entry in soup.find_all("dt", class_="sig"):
        details = entry.parent.find("details", class_="api")
        if details:
            is_public = entry["id"] in public
            assert details.has_attr("open") == is_public, entry["id"]
    assert soup.find("details", class_="api", open=True)
    assert soup.find("details", class_="api", open=False)


def test_the_page_on_stability_gives_the_citation_of_the_paper_and_of_a_row(monkeypatch, capsys):
    text = (build.NOTEBOOKS / "stable.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for words in re.findall(r"^  (?:title|year|note) +=\s+\{(?:arXiv:)?(.*?)\}", text, re.M):
        assert words in citation, words
    monkeypatch.chdir(ROOT)
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    exec(code)
    out = capsys.readouterr().out
    sha, commit = out.split()
    assert len(sha) == 64
    assert re.fullmatch("[0-9a-f]{12}", commit)


def test_the_contents_are_in_the_order_of_the_map_and_titles_have_the_number_of_their_page(
    prepared,
):
    folder, _ = prepared
    listed = re.findall(r"\]\((\w+/\w+)\.ipynb\) \|", text_of("map"))
    contents = build.contents()
    assert [line for line in contents.splitlines() if "/" in line] == listed
    for name in NOTEBOOKS:
        first = json.loads((folder / "pages" / f"{name}.ipynb").read_text())["cells"][0]["source"]
        number = re.match(r"(\d+b?)_", name.stem)
        own = build.read(build.NOTEBOOKS / f"{name}.ipynb")["cells"][0]["source"].splitlines()[0]
        title = first.splitlines()[0]
        assert title == (f"# {number[1]}. {own.lstrip('# ')}" if number else own)


def test_two_entries_of_one_word_can_be_linked_to():
    source = build.with_anchors(
        "- **checkpoint** (of a scan): kept\n- **checkpoint** (of a run): all\n"
        "- **key** $k$: a vector"
    )
    assert [
        f'id="term-{name}"' in source
        for name in ("checkpoint-of-a-scan", "checkpoint-of-a-run", "key")
    ] == [True] * 3


def test_links_out_of_a_notebook_lead_to_the_repository_or_name_the_file_or_are_refused(
    monkeypatch,
):
    cell = {
        "cell_type": "markdown",
        "id": "a",
        "metadata": {},
        "source": "# T\n\n[gone](nowhere/99.ipynb)",
    }
    with pytest.raises(ValueError, match="nowhere/99.ipynb leads nowhere"):
        build.page({"cells": [cell]}, build.NOTEBOOKS / "index.ipynb")
    for address, shown in (
        ("https://r", f"[bench](https://r/blob/{build.COMMIT}/kernels/bench.py)"),
        ("", "bench (`kernels/bench.py`)"),
    ):
        monkeypatch.setattr(build, "REPOSITORY", address)
        assert (
            build.local_links("[bench](../kernels/bench.py)", build.NOTEBOOKS / "index.ipynb")
            == shown
        )
    code = "```diff\n+[gone](nowhere/99.ipynb)\n```"
    assert build.local_links(code, build.NOTEBOOKS / "index.ipynb") == code


@pytest.mark.parametrize("published", [slow_case(False), True])
def test_the_address_is_one_setting_and_shows_only_once_published(published, tmp_path, monkeypatch):
    settings = (ROOT / "settings.ini").read_text()
    settings = re.sub(r"^published = .*", f"published = {published}", settings, flags=re.M)
    (tmp_path / "settings.ini").write_text(
        re.sub(r"^user = .*", "user = someone", settings, flags=re.M)
    )
    repository = build.repository(tmp_path / "settings.ini")
    monkeypatch.setattr(build, "REPOSITORY", repository)
    build.write_pages(tmp_path)
    build.write_colab(tmp_path / "pages/colab") if published else None
    shown = {
        path: path.read_text() for path in (tmp_path / "pages").rglob("*.ipynb")
    } | build.addressed()
    own = r"(?:github\.com|/github)/([\w-]+)/longhorn-kit"
    texts = shown.items()
    result = {name: set(re.findall(own, text)) for name, text in texts}
    least = len(NOTEBOOKS) * (1 + published)
    assert len(result) > least
    for users in result.values():
        assert users == ({"someone"} if published else set())
    assert not [path for path, text in shown.items() if re.search(r'(href=\\"|\]\()/', text)], (
        "no address before the path"
    )
    root_pages = ROOT.glob("*.md")
    kernel_pages = ROOT.glob("kernels/**/*.md")
    others = [*root_pages, *kernel_pages, *build.notebooks()]
    assert not [p for p in others if p.name != "README.md" and re.search(own, p.read_text())], (
        "beside the setting"
    )


FUNCTION = """
def read(
    q, k,     # (B,T,N) queries and keys
    x=None,   # (B,T,D) values | none
    *others: int,
    form: str = "a|b", # which
              # form
) -> int:     # how *many*
    "Read `q`, see `<k>`."
"""


def test_parameters_and_their_comments_are_read_from_the_source():
    (entry,) = api.exported(FUNCTION, "longhorn_kit.scan.op")
    assert entry.comments == {
        "q": "(B,T,N) queries and keys",
        "k": "(B,T,N) queries and keys",
        "x": "(B,T,D) values | none",
        "others": "",
        "form": "which form",
    }
    assert entry.returns == "how *many*"
    assert api.restructured("`q` | *many* $a_1$") == r"``q`` \| \*many\* :math:`a_1`"
    source = (
        "class A(B):\n"
        "    def __init__(self, n=3): pass # N\n"
        "    def f(self, x, y=1): # (B,), rate\n"
        '        "F."'
    )
    (entry,) = api.exported(source, "m")  # a method loses self
    assert [entry.comments, *(method.comments for method in entry.members)] == [
        {"n": "N"},
        {"x": "(B,)", "y": "rate"},
    ]


def test_comments_stay_with_their_parameters_when_a_formatter_moves_them():
    wrapped = 'def f(\n    path, count\n) -> str:  # count: of rows -> text\n    "F."'
    (entry,) = api.exported(wrapped, "m")
    assert entry.comments == {"path": "", "count": "of rows -> text"}
    assert entry.returns == ""
    split = (
        "def f(\n"
        "    q: Tensor,\n"
        "    k: Tensor,  # (B,N) query, (B,N) key\n"
        "    n: int,  # rows\n"
        '):\n    "F."'
    )
    (entry,) = api.exported(split, "m")
    assert entry.comments == {"q": "(B,N) query", "k": "(B,N) key", "n": "rows"}
    fields = (
        "@dataclass\n"
        "class A:\n"
        "    n: int = 1  # rows\n"
        "    # of the text,\n"
        "    # in characters\n"
        "    size: int = 2"
    )
    (entry,) = api.exported(fields, "m")
    assert entry.comments == {"n": "rows", "size": "of the text, in characters"}


@pytest.mark.parametrize(
    "line, notes, result",
    [
        ("def f(mixer, bf16, most): # most: largest error", ["", "", "largest error"], ""),
        (
            "def f(x, w, s): # x (B,T) input; w, s: of a job",
            ["(B,T) input", "of a job", "of a job"],
            "",
        ),
        (
            "def f(b, bias=None): # (B,T) logits, or (B,1), (D,) added",
            ["(B,T) logits, or (B,1)", "(D,) added"],
            "",
        ),
        (
            "def f(model, tokens: Tensor, s): # (B,T), settings -> (n,)",
            ["", "(B,T)", "settings"],
            "(n,)",
        ),
        ("def f(task, seeds): # (B,K)", ["", ""], "(B,K)"),
        ("def f(config, group): # -> model, its walk", ["", ""], "model, its walk"),
        ("def f(a, b, c): # as in `fit`", ["as in `fit`"] * 3, ""),
    ],
)
def test_the_comment_of_a_line_goes_to_those_it_speaks_of(line, notes, result):
    (entry,) = api.exported(f"{line}\n    'F.'", "m")
    comments = list(entry.comments.values())
    assert comments == notes
    assert entry.returns == result


def test_notebooks_for_colab_install_the_kit_first(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "REPOSITORY", "https://github.com/someone/longhorn-kit")
    build.write_colab(tmp_path)
    for name in NOTEBOOKS:
        text = (tmp_path / f"{name}.ipynb").read_text()
        book = json.loads(text)
        first = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
        assert "longhorn-kit[colab]" in first["source"]
        folder = f"nbs/{name.parent}".rstrip("/.")
        assert folder in first["source"]
        result = len({cell["id"] for cell in book["cells"]})
        assert result == len(book["cells"])
        assert book["nbformat"] == 4


def test_every_pin_is_tested_and_takes_every_python_that_the_kit_takes():
    from packaging.specifiers import SpecifierSet

    text = (ROOT / "constraints.txt").read_text()
    lines = text.splitlines()
    text = (ROOT / "pyproject.toml").read_text()
    colab = re.search(r"^colab = \[(.*?)^\]$", text, re.M | re.S)[1]
    assert (result := re.findall(r'"([\w-]+==[^";]+)"', colab))
    assert set(result) <= set(lines)
    pins = dict(line.split("==") for line in lines if "==" in line)
    distributions = importlib.metadata.distributions()
    installed = {d.metadata["Name"]: d for d in distributions}
    needs = {
        name: d.metadata.get("Requires-Python") or ""
        for name, d in installed.items()
        if pins.get(name) == d.version
    }
    assert len(needs) > 100
    for name, need in needs.items():
        for version in ("3.11.0", "3.12.0", "3.13.0", "3.14.0"):
            assert version in SpecifierSet(need), (name, need)


def test_readme_shows_what_index_and_ledger_say_and_files_have_the_address_of_the_setting():
    for name, text in build.addressed().items():
        content = (ROOT / name).read_text()
        assert content == text, f"{name}: run `make readme`"
    text = (ROOT / "README.md").read_text()
    for mark, block in build.readme_blocks().items():
        assert f"<!-- {mark}: make readme -->\n{block}\n<!-- end {mark} -->" in text, (
            "run `make readme`"
        )
    assert "(docs/static/film.svg)" in text
    size = (ROOT / "docs/static/film.svg").stat().st_size
    assert size < 60_000


def test_the_film_of_the_front_page_moves_and_can_be_read_on_a_dark_page():
    film = ElementTree.parse(ROOT / "docs/static/film.svg").getroot()
    elements = film.iter()
    words = [element for element in elements if element.tag.endswith("}text")]
    names = {"".join(element.itertext()) for element in words}
    assert {*"ABCDE", "exact", "diagonal", "answers", "state"} <= names
    assert "background:#fff" in film.get("style")
    text = "".join(film.itertext())
    assert "@keyframes" in text
    assert "prefers-reduced-motion" in text
    colours = {element.get("fill", film.get("fill")) for element in words}
    for colour in colours:
        assert contrast(colour, "#ffffff") >= 4.5, colours


def test_front_page_is_what_the_ledger_says_now():
    from longhorn_kit.lab.claims.front import (
        FRONT,
        findings,
        findings_html,
        findings_picture,
        reproduced,
        speed,
        users,
    )

    result = findings()
    assert 9 < len(result) <= 16
    assert len(result) <= len(FRONT)
    for name, svg in build.front_files().items():
        assert (ROOT / "docs/static" / name).read_text(encoding="utf-8") == svg + "\n", (
            "run `make readme`"
        )
    assert build.index_shows("index-009", "text/html") == findings_picture(result), (
        "run `make readme`"
    )
    assert findings_html(result) in build.index_shows("index-010t", "text/html"), (
        "run `make readme`"
    )
    tables = {"index-012": users(), "index-reproduced": reproduced(), "index-speed-c": speed()}
    assert {name: build.index_shows(name, "text/markdown") for name in tables} == tables, (
        "run `make readme`"
    )


def test_the_site_has_the_pictures_of_the_kit_as_elements(prepared):
    for name in ("index", "lab/39_ledger", "lab/36_one_pass"):
        path = prepared[0] / "pages" / f"{name}.ipynb"
        text = path.read_text()
        shown = [
            "".join(output.get("data", {}).get("text/html", ""))
            for cell in json.loads(text)["cells"]
            for output in cell.get("outputs", [])
        ]
        assert any("<svg xmlns" in html and 'class="lk-narrow"' in html for html in shown), name
        for html in shown:
            assert "data:image/svg+xml" not in html, name


def test_front_pages_are_sparing_with_numbers():
    readme = (ROOT / "README.md").read_text()
    index = "\n".join(
        c["source"]
        for c in build.read(build.NOTEBOOKS / "index.ipynb")["cells"]
        if c["cell_type"] == "markdown"
    )
    number = r"(?<![\w.])[-+−]?\d+(?:\.\d+)?(?![\w.]*\w)"
    for text in (readme, index):
        for row in re.findall(r"^\|.*\|$", text, re.M):
            for cell in row.split("|"):
                assert len(re.findall(number, cell)) <= 3, row
    prose = re.sub(
        r"```.*?```|<details>.*?</details>|<!--.*?-->|<[^>]+>|\]\([^)]*\)|^\|.*$",
        "",
        readme,
        flags=re.S | re.M,
    )
    allowed = ("Python 3.11 to 3.14", "Apache-2.0", "ICLR 2025", "bfloat16, state size 16")
    for sentence in re.split(r"(?<=[.:!?])\s", prose):
        assert len(re.findall(number, sentence)) <= 1 or any(
            words in " ".join(sentence.split()) for words in allowed
        ), sentence


def test_the_python_of_the_readme_works():
    text = (ROOT / "README.md").read_text()
    scope = {}
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    exec(code, scope)
    assert scope["y"].shape == (2, 100, 128)
    assert scope["state"].shape == (2, 64, 16)


def server_root():
    "Return the folder that JupyterLab serves by `make lab`, from Makefile and server rules."
    app = pytest.importorskip("jupyter_server.serverapp").ServerApp()
    command = re.search(
        r"^lab:.*\n\t@\$\(BIN\)/jupyter lab (.*)$", (ROOT / "Makefile").read_text(), re.M
    )[1]
    app.parse_command_line(shlex.split(command))
    return Path(app.root_dir).resolve()


PAGES = [
    *build.notebooks(),
    build.NOTEBOOKS / "stable.md",
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]


def markdown_of(path):
    "Return a page's text outside of code, and the HTML of its outputs."
    cells = (
        build.read(path)["cells"]
        if path.suffix == ".ipynb"
        else [{"cell_type": "markdown", "source": path.read_text(encoding="utf-8")}]
    )
    shown = [c["source"] for c in cells if c["cell_type"] == "markdown"]
    shown += [
        "".join(o.get("data", {}).get("text/html", "")) for c in cells for o in c.get("outputs", ())
    ]
    text = "\n".join(shown)
    return re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.S)


def headings(path):
    "Return the anchors of a page's headings, in the forms of JupyterLab and GitHub."
    result = re.findall(r"^#+ +(.*?) *$", markdown_of(path), re.M)
    in_jupyter = {h.replace(" ", "-") for h in result}
    in_github = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in result}
    return in_jupyter | in_github


def test_every_link_and_image_works_under_make_lab_and_on_github(monkeypatch):
    monkeypatch.chdir(ROOT)
    root = server_root()
    dead = []
    count = 0
    for path in PAGES:
        text = markdown_of(path)
        targets = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(
            r'<(?:a|img|iframe|source|video)\b[^>]*?\s(?:href|src|srcset)="([^"]+)"', text
        )
        for target in targets:
            file, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / file).resolve() if file else path
            count += 1
            if (
                not there.exists()
                or not there.is_relative_to(root)
                or anchor
                and anchor not in headings(there)
            ):
                dead.append(f"{path.relative_to(ROOT)}: {target}")
    assert not dead, "\n".join(dead)
    assert count > 500, "\n".join(dead)


DRAWS = re.compile(
    r"\bplt\.|\b(?:ax|axes|fig)\b[.\[]|\.(?:set|imshow|bar|axis|set_title)\(|"
    r"\b(?:label_ends|plot_\w+|draw_\w+)\("
)
TEACHES = re.compile(r"\bassert\b|\bprint\(|\bshow_\w+\(|^(?:def|class) ", re.M)


def only_draws(cell):
    "Check whether a cell of six lines or more only draws a figure."
    lines = cell["source"].splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    drawing = [line for line in code if DRAWS.search(line)]
    return (
        len(code) >= 6
        and 2 * len(drawing) > len(code)
        and not TEACHES.search(cell["source"])
        and bool(figures.pictures(cell))
    )


def test_solutions_and_drawing_code_are_folded_in_jupyterlab_and_on_the_site(prepared):
    folded = []
    sites = 0
    for path in build.notebooks():
        for cell in (cell for cell in build.read(path)["cells"] if cell["cell_type"] == "code"):
            jupyter = cell["metadata"].get("jupyter", {})
            hidden = jupyter.get("source_hidden", False)
            assert "code-fold" not in build.directives(cell), (
                "JupyterLab ignores this mark: set `jupyter.source_hidden` in the cell's metadata"
            )
            expected = (
                "solution" in cell["metadata"].get("tags", ())
                or only_draws(cell)
                and path.stem != "plots"
            )
            assert hidden or not expected, (
                f"{path.stem}: collapse this cell in JupyterLab and save\n{cell['source']}"
            )
            folded += [(path, cell["id"])] * hidden
        text = (prepared[0] / "pages" / path.relative_to(build.NOTEBOOKS)).read_text()
        made = json.loads(text)["cells"]
        sites += sum(
            c["metadata"].get("mystnb", {}).get("code_prompt_show") in ("Code", "Solution")
            for c in made
        )
    assert len(folded) == sites > 150


WRITE = {"text", "annotate", "words", "bar_label", "legend", "suptitle", "tick_params"}
WRITE |= {"set_title", "set_xlabel", "set_ylabel"}


def can_be_read(colour):
    "Check whether a colour is ink, black, white, made readable, or a dark model colour."
    from longhorn_kit.plots import COLORS

    text = ast.unparse(colour)
    if isinstance(colour, ast.Subscript) and isinstance(colour.slice, ast.Constant):
        name = colour.slice.value
        return text.startswith("COLORS[") and contrast(COLORS[name], "#ffffff") >= 4.5
    return text in ("INK", "'black'", "'white'") or text.startswith(("readable(", "letters_on("))


def drawing_cells():
    "Yield page, source and syntax tree of every cell that draws."
    for path in build.notebooks():
        for cell in build.read(path)["cells"]:
            source = re.sub(r"^[%!].*$", "", cell["source"], flags=re.M)
            draws = cell["cell_type"] == "code" and re.search(r"\bplt\.|\bax\b|axes", source)
            is_exported = path.stem == "plots" and "export" in build.directives(cell)
            if draws and not is_exported:
                yield path.stem, source, ast.parse(source)


def test_pages_write_words_in_colours_that_can_be_read():
    count = 0
    for page, _, tree in drawing_cells():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in WRITE:
                for keyword in call.keywords:
                    if keyword.arg in ("color", "labelcolor", "colors"):
                        count += 1
                        message = f"{page}: write color=readable(...)\n{ast.unparse(call)}"
                        assert can_be_read(keyword.value), message
    assert count > 20


PANELS = re.compile(r"subplots\(\s*(?!1, 1\b)(?:\d|len\(|rows\b)|subplot_mosaic\(")
TITLE = re.compile(r"\btitle=|set_title\(|suptitle\(")


def test_panels_have_titles():
    titled = {}  # page -> functions that set titles
    panels = 0
    for page, source, tree in drawing_cells():
        functions = titled.setdefault(page, set())
        definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        has_title = TITLE.search(source) or called & functions
        if has_title:
            functions |= {node.name for node in definitions}
        if PANELS.search(source):
            panels += 1
            assert has_title, f"{page}: give each panel a title\n{source}"
    assert panels > 30


def test_the_idea_is_drawn_for_phones_and_for_wider_screens_and_has_one_caption(prepared):
    text = (prepared[0] / "pages/index.ipynb").read_text()
    made = json.loads(text)["cells"]
    options_of_cells = [cell["metadata"].get("mystnb", {}) for cell in made]
    shown = [options for options in options_of_cells if "image" in options]
    classes = [options["image"].get("classes") for options in shown]
    assert classes == ["phone", "desk"]
    assert ["figure" in options for options in shown] == [False, True]


def test_figures_have_twice_the_pixels_and_few_bytes():
    from PIL import Image

    for path in build.notebooks():
        cells = build.read(path)["cells"]
        for output in figures.pictures(*cells):
            text = "".join(output["data"]["image/png"])
            data = base64.b64decode(text)
            image = Image.open(io.BytesIO(data))
            size = output["metadata"].get("image/png", {})
            remedy = (
                f"{path.stem}: call `use_style` and run `make outputs NB={path.relative_to(ROOT)}`"
            )
            width = 2 * size.get("width", 0)
            assert abs(image.width - width) <= 1, remedy
            height = 2 * size["height"]
            assert abs(image.height - height) <= 1, remedy
            assert figures.pack(data) == data, remedy
        size = path.stat().st_size
        assert size < 1e6, path.stem


def test_a_packed_figure_looks_the_same():
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[:200, :300]
    channels = [rows, columns // 3, 255 - rows, 255 - columns // 2]
    pixels = np.stack(channels, -1).astype("u1")  # thousands of colours
    colours = np.array([[10, 20, 30, 0], [178, 24, 43, 255]], "u1")
    bands = np.arange(200) // 100
    pixels[:, :150] = colours[bands][:, None]
    image = Image.fromarray(pixels)
    image.save(file := io.BytesIO(), "png")
    content = figures.pack(file.getvalue())
    image = Image.open(io.BytesIO(content))
    packed = np.array(image.convert("RGBA"))
    left = packed[:, :150]
    expected = pixels[:, :150]
    assert (left == expected).all()
    difference = abs(packed.astype(int) - pixels)
    assert difference.mean() < 6


def test_every_cited_paper_is_on_the_page_of_references():
    cited = set()
    listed = set()
    for path in build.notebooks():
        for cell in build.read(path)["cells"]:
            result = set(
                re.findall(r"(?:arXiv[: ]|arxiv\.org/abs/|[\"'])(\d{4}\.\d{4,5})\b", cell["source"])
            )
            (listed if path.stem == "references" else cited).update(result)
    assert cited <= listed, f"not on the page of references: {sorted(cited - listed)}"


def test_map_names_every_notebook_and_its_minutes():
    text = text_of("map")
    missing = [
        str(name)
        for name in NOTEBOOKS
        if f"({name.as_posix()}.ipynb)" not in text and name.stem not in ("index", "map")
    ]
    assert not missing, f"not in nbs/map.ipynb: {missing}"
    for path, minutes in re.findall(r"\]\(([^)]+)\) \|.*\| (\d+) \|", text):
        source = build.read(build.NOTEBOOKS / path)["cells"][1]["source"]
        assert f"{minutes} minutes" in source, f"{path}: run `make readme`"


def test_no_page_states_fewer_minutes_than_it_takes_to_read():
    short = {}
    for path in build.notebooks():
        notebook = build.read(path)
        stated = re.search(r"(\d+) minutes", notebook["cells"][1]["source"])
        needed = build.reading_minutes(notebook)
        if stated and int(stated[1]) < needed:
            short[path.stem] = needed
    assert not short, f"run `make readme`: {short}"


def test_reading_minutes_count_words_code_and_equations_but_no_exercises():
    def cell(kind, source, **metadata):
        return {"cell_type": kind, "source": source, "metadata": metadata}

    words = cell("markdown", "word " * 1000)
    code = cell("code", "x = 1\n" * 100)
    equations = cell("markdown", "$$a \\tag{1}$$ $$b \\tag{2}$$")
    exercise = cell("markdown", "## Exercises\n" + "word " * 1000)
    folded = cell("code", "x = 1\n" * 1000, jupyter={"source_hidden": True})
    assert build.reading_minutes({"cells": [words]}) == 5
    assert build.reading_minutes({"cells": [words, code]}) == 10
    assert build.reading_minutes({"cells": [words, code, equations]}) == 15
    assert build.reading_minutes({"cells": [words, code, folded, exercise, code]}) == 10


STUB = re.compile(r"#\| eval: false\n(?!.*#\| export).*\.\.\.", re.S)


@pytest.mark.parametrize("path", build.notebooks(), ids=lambda path: path.stem)
def test_every_exercise_says_how_hard_it_is_and_has_a_folded_solution(path):
    text = ""
    stub = None  # text since the last solution, and a stub without solution
    for cell in build.read(path)["cells"]:
        folded = cell["metadata"].get("jupyter", {}).get("source_hidden") and "solution" in cell[
            "metadata"
        ].get("tags", ())
        if cell["cell_type"] == "markdown":
            text += cell["source"]
        elif STUB.match(cell["source"]):
            assert stub is None, f"no folded solution of\n{stub}"
            assert re.search(r"\((easy|medium|hard), \d+ minutes\)", text), (
                f"difficulty or time is missing:\n{cell['source']}"
            )
            stub = cell["source"]
        elif folded:
            assert stub, f"a solution without a stub:\n{cell['source']}"
            text = ""
            stub = None
    assert stub is None, f"no folded solution of\n{stub}"


def test_glossary_is_in_order_and_says_where_each_word_is_explained():
    groups = re.split(r"^## ", text_of("glossary"), flags=re.M)
    for group in groups[1:]:
        terms = re.findall(r"^- \*\*(.+?)\*\*.*$", group, flags=re.M)
        expected = sorted(terms, key=str.lower)
        assert terms == expected, group.splitlines()[0]
    for line in re.findall(r"^- \*\*.*$", text_of("glossary"), flags=re.M):
        assert ".ipynb" in line, line


def built(site):
    "Return the names of a site's notebooks."
    return SOME if site.parent.name == "some-pages" else [name.as_posix() for name in NOTEBOOKS]


def test_every_notebook_has_a_page_and_the_search_an_index_in_a_small_site(site, pages):
    names = {f"{name}.html" for name in built(site)}
    assert names <= set(pages)
    assert "search.html" in pages
    paths = site.rglob("*")
    size = sum(path.stat().st_size for path in paths if path.is_file())
    assert size < 60e6, f"the site has {size / 1e6:.0f} MB"


@pytest.mark.parametrize(
    "site, words, name",
    [
        pytest.param(
            "some pages",
            "longhorn scan packed sequences form",
            "longhorn_kit.scan.op.longhorn_scan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all pages",
            "longhorn scan packed sequences form",
            "longhorn_kit.scan.op.longhorn_scan",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all pages",
            "learning rate warm cosine",
            "longhorn_kit.lab.train.recipe.lr_at",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all pages",
            "compile block",
            "longhorn_kit.lab.train.recipe.compile_blocks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "all pages",
            "exact update step",
            "longhorn_kit.theory.closed_forms.exact_step",
            marks=pytest.mark.slow,
        ),
    ],
    indirect=["site"],
)
def test_the_search_finds_a_function_by_name_and_by_what_it_does(site, words, name):
    stemmer = pytest.importorskip("sphinx.search.en").SearchEnglish({})
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[len("Search.setIndex(") : -1])

    def listed(result):
        return set(result if isinstance(result, list) else [result])

    def pages_of(stem):
        in_texts = listed(index["terms"].get(stem, []))
        in_titles = listed(index["titleterms"].get(stem, []))
        return in_texts | in_titles

    by_words = set.intersection(*(pages_of(stemmer.stem(word)) for word in words.split()))
    module, function = name.rsplit(".", 1)
    rows = index["objects"][module]
    by_name = {row[0] for row in rows if row[4] == function}
    assert by_name, (by_name, by_words)
    assert by_name <= by_words, (by_name, by_words)


def test_the_sidebar_has_numbers_and_a_page_leads_to_the_one_before_and_after_it(site):
    def soup_of(name):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        return BeautifulSoup(text, "html.parser")

    entries = [link.get_text() for link in soup_of("scan/15_op").select(".sidebar-tree a")]
    lessons = [Path(name) for name in build.in_order() if name in built(site)]
    numbers = [path.stem.partition("_")[0] for path in lessons if path.parts[0] != "machine"]
    assert [entry.partition(".")[0] for entry in entries[: len(numbers)]] == numbers
    order = [name for name in (*build.in_order(), *build.REFERENCE) if name in built(site)]
    for before, name, after in zip(["index", *order], order, order[1:]):
        links = soup_of(name).select(".related-pages a")
        targets = {
            link["class"][0]: posixpath.normpath(
                posixpath.join(posixpath.dirname(name), link["href"])
            )
            for link in links
        }
        assert targets.get("prev-page", "").removesuffix(".html") == before, name
        assert targets["next-page"] == f"{after}.html", name


def test_words_count_by_their_place():
    pytest.importorskip("sphinx", reason="needs the extra 'docs'")
    import relevance

    assert relevance.words("Loads `tl.dot` of key_norm") == [
        "load",
        "tl.dot",
        "tl",
        "dot",
        "of",
        "key_norm",
    ]
    assert relevance.phrases("The associative scan is the scan.") == ["associ scan"]
    counts = {
        "scan/1_teaches": {"tl.dot": 60, "tile": 40},
        "scan/2_uses": {"tl.dot": 3, "tile": 97},
        "machine/also": {"tl.dot": 60, "tile": 40},
        "scan/3_long": {"tl.dot": 60, "tile": 900},
        "scan/4_other": {"key": 100},
    }
    scores = relevance.scores(counts)["tl.dot"]
    order = ["scan/1_teaches", "scan/3_long", "machine/also", "scan/2_uses"]
    assert sorted(scores, key=scores.get, reverse=True) == order
    assert relevance.scores(counts)["key"]["scan/4_other"] > scores["scan/1_teaches"], "rare words"


def test_the_search_has_a_score_of_every_page_for_the_words_that_it_explains(prepared, site):
    text = (site / "_static/relevance.js").read_text()
    table = json.loads(text.removeprefix("const RELEVANCE = ").rstrip(";\n"))
    assert set(built(site)) <= set(table["pages"])

    def best(word):
        flat = table["words"][word]
        return table["pages"][max(zip(flat[1::2], flat[::2]))[1]]

    for module, name in (("theory.closed_forms", "exact_step"), ("scan.op", "longhorn_scan")):
        assert best(name) == prepared[1]["definitions"][f"longhorn_kit.{module}.{name}"]
    assert "Scorer.score" in (site / "_static/language_data.js").read_text()


def leads_to_a_page_left_out(site, page, href):
    "Check whether a link leads to a notebook without a page in a partial site."
    target = re.match(
        r"#?(.*)\.(?:ipynb|html)", href
    )  # Sphinx writes a link without a page as #NOTEBOOK.ipynb
    if not target or built(site) is not SOME:
        return False
    folder = posixpath.dirname(page)
    name = posixpath.normpath(posixpath.join(folder, target[1]))
    return Path(name) in NOTEBOOKS and name not in SOME


def test_every_local_link_and_anchor_has_a_target(site, pages):
    broken = []
    for name, page in pages.items():
        for href in page.links + page.loaded:
            if re.match(r"[a-z]+:", href) or leads_to_a_page_left_out(site, name, href):
                continue
            address = unquote(href.split("?")[0])
            path, _, anchor = address.partition("#")
            target = (site / name).parent / path if path else site / name
            if not target.is_file():
                broken.append((name, href))
            elif anchor and target.suffix == ".html" and name != "search.html":
                target_name = target.resolve().relative_to(site.resolve())
                if anchor not in pages[target_name.as_posix()].ids:
                    broken.append((name, href))
    assert not broken


def test_no_page_shows_markup_or_the_network_and_figures_say_what_they_are(site, pages):
    "No page links to an unpublished repository."
    own = [
        link
        for page in pages.values()
        for link in page.links
        if re.search(r"github.*/longhorn-kit/|^/", link)
    ]
    assert bool(own) == bool(build.REPOSITORY)
    for link in own:
        assert build.REPOSITORY.partition(".com")[2] in link
    for name, page in pages.items():
        remote = [url for url in page.loaded if re.match(r"(https?:)?//", url)]
        assert not remote, name
        marks = [mark for mark in ("#|", ":::", "{py:") if mark in page.text]
        assert not marks, name
        for picture in page.pictures:
            if "_images" in picture.get("src", ""):
                assert picture.get("alt"), name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", text), sheet.name


def test_every_entry_stands_where_its_notebook_defines_it_and_names_and_equations_are_linked(
    prepared, site, pages
):
    definitions = prepared[1]["definitions"]
    for full_name, doc in definitions.items():
        assert doc not in built(site) or full_name in pages[f"{doc}.html"].ids, full_name
    elsewhere = {
        link
        for name, page in pages.items()
        if name not in ("machine/operation.html", "api.html")
        for link in page.links
    }
    assert any(
        link.endswith("operation.html#longhorn_kit.scan.op.longhorn_scan") for link in elsewhere
    )
    assert "#equation-1" in {link for page in pages.values() for link in page.links}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if MISSING:
        pytest.skip(MISSING)
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


CONTRAST = """(() => {
  document.querySelectorAll("details").forEach(details => { details.open = true; });
  const parse = text => {
    const n = text.match(/[\\d.]+/g).map(Number);
    return [n[0], n[1], n[2], n[3] ?? 1];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const shares = [0.2126, 0.7152, 0.0722];
  const luminance = rgb => shares.reduce((sum, share, i) => sum + share * linear(rgb[i] / 255), 0);
  const background = e => parse(getComputedStyle(e).backgroundColor);
  const layers = e => e ? [...layers(e.parentElement), background(e)] : [];
  const opacity = e => e ? opacity(e.parentElement) * getComputedStyle(e).opacity : 1;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const pale = [];
  let count = 0;
  while (walk.nextNode()) {
    const text = walk.currentNode.data.trim();
    const e = walk.currentNode.parentElement;
    if (!text || e.closest("script, style, noscript")) continue;
    if (!e.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(e);
    const ground = layers(e).reduce((below, top) => over(top, below), [255, 255, 255]);
    const ink = parse(e instanceof SVGElement ? style.fill : style.color);
    ink[3] *= opacity(e);
    const [dark, light] = [luminance(over(ink, ground)), luminance(ground)].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05);
    count += 1;
    if (contrast < 4.5) pale.push([text.slice(0, 40), e.tagName, e.className, contrast]);
  }
  return [count, pale];
})()"""


@pytest.mark.release
@pytest.mark.parametrize("site", ["all pages"], indirect=True)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_a_contrast_of_four_and_a_half(browser, site, theme):
    names = [
        "search",
        "api",
        "theory/03_exact_vs_diagonal",
        "scan/14_triton_exact",
        "lab/39_ledger",
    ]
    for name in ["index", "map", "machine/cli", *names]:
        browser.open(site / f"{name}.html", 1200, theme)
        count, pale = browser.run(CONTRAST)
        assert count > 50, name
        assert pale == [], name


def test_code_in_both_themes_has_a_contrast_of_four_and_a_half():
    pygments = pytest.importorskip("pygments.styles")
    from pygments.token import Token

    configuration = (ROOT / "docs/conf.py").read_text()
    names = re.findall(r'^pygments_(?:dark_)?style = "(.*)"', configuration, re.M)
    assert len(names) == 2
    unseen = (Token.Text.Whitespace, Token.Error)
    for name in names:
        style = pygments.get_style_by_name(name)
        for token, look in style:
            if look["color"] and token not in unseen:
                ground = look["bgcolor"] or style.background_color.lstrip("#")
                assert contrast(f"#{look['color']}", f"#{ground}") >= 4.5, (name, token)


BLOCKS = """(() => {
  document.querySelectorAll("details").forEach(details => { details.open = true; });
  focusScrollers();
  return [...document.querySelectorAll("article pre")].map(block => {
    const style = getComputedStyle(block);
    const button = block.parentElement.querySelector("button.copybtn");
    const gradients = style.backgroundImage.split("linear-gradient").length - 1;
    return {
      columns: Math.max(...block.innerText.split("\\n").map(line => line.length)),
      scrolls: block.scrollWidth > block.clientWidth,
      shown: gradients == 4 && style.scrollbarWidth == "thin",
      input: !!block.closest(".cell_input"),
      copied: !!button && button.checkVisibility({opacityProperty: true, visibilityProperty: true})
        && getComputedStyle(button).opacity == "1" && button.getBoundingClientRect().width > 15,
      text: block.innerText.slice(0, 60),
    };
  });
})()"""
LONG = ["scan/13_triton_diagonal", "scan/14_triton_exact", "scan/16_speed", "machine/plots"]


@pytest.mark.release
@pytest.mark.parametrize("site", ["all pages"], indirect=True)
@pytest.mark.parametrize("width", [390, 1200, 1366, 1600])
def test_code_of_a_hundred_columns_is_not_cut_and_what_scrolls_shows_it(browser, site, width):
    for name in LONG:
        browser.open(site / f"{name}.html", width)
        blocks = browser.run(BLOCKS)
        assert len(blocks) > 10
        for block in blocks:
            assert block["shown"] == block["scrolls"], (name, block)
            assert block["copied"] or not block["input"], (name, block)
            if width >= 1200:
                assert not block["scrolls"] or block["columns"] > 100, (name, block)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), name


@pytest.mark.release
@pytest.mark.parametrize("site", ["all pages"], indirect=True)
@pytest.mark.parametrize(
    "words, first",
    [
        ("key_norm", r"models/20_mixer\.html"),
        (
            "selective_scan_fn",
            r"machine/mamba\.html.*#longhorn_kit\.scan\.mamba\.selective_scan_fn",
        ),
        ("tl.dot", r"scan/12b?_triton"),
        ("longhorn_scan", r"machine/operation\.html.*#longhorn_kit\.scan\.op\.longhorn_scan"),
        ("short convolution", r"scan/09_short_conv\.html"),
        ("Sherman–Morrison", r"theory/02_closed_forms\.html"),
    ],
)
def test_the_page_that_defines_or_teaches_a_word_is_the_first_result(browser, site, words, first):
    address = (site / "search.html").resolve().as_uri()
    browser.visit(f"{address}?q={quote(words)}", 1200)
    link = browser.wait("document.querySelector('ul.search li a')?.getAttribute('href')")
    assert re.match(first, link), link


@pytest.mark.release
@pytest.mark.parametrize("site", ["all pages"], indirect=True)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "name",
    [
        "index",
        "map",
        "search",
        "theory/01_objective",
        "scan/15_op",
        "models/20_mixer",
        "lab/32_recall",
        "lab/39_ledger",
        "machine/plots",
    ],
)
def test_axe_finds_nothing_serious(browser, site, name, theme):
    for width in (390, 1200):
        address = site / f"{name}.html"
        browser.open(address, width, theme)
        assert [
            result for result in browser.findings() if result[1] in ("serious", "critical")
        ] == [], width


FOCUS = """(() => {
  const e = document.activeElement;
  const r = e.getBoundingClientRect();
  const s = getComputedStyle(e);
  const parent = getComputedStyle(e.parentElement);
  const outlined = s.outlineStyle != "none" || parent.outlineStyle != "none";
  const shown = s.visibility == "visible" && s.opacity == "1";
  const inside = r.right > 0 && r.left < innerWidth && r.bottom > 0 && r.top < innerHeight;
  return {
    tag: e.tagName,
    name: e.ariaLabel || e.innerText || "",
    kind: e.className,
    place: e.closest("article, aside, header")?.tagName,
    seen: outlined && shown && inside,
  };
})()"""


@pytest.mark.release
@pytest.mark.parametrize("site", ["all pages"], indirect=True)
@pytest.mark.parametrize("width", [390, 1200])
def test_pages_work_by_keyboard(browser, site, width):
    def tab():
        browser.press("Tab")
        return browser.run(FOCUS)

    browser.open(site / "machine/plots.html", width)
    assert (first := tab())["name"].strip() == "Skip to content"
    assert first["seen"]
    if width == 390:  # the search field is in a drawer
        assert tab()["name"] == "Pages"
        browser.press("Enter")
    steps = [tab() for _ in range(6)]
    assert "sidebar-search" in [step["kind"] for step in steps]
    for step in steps:
        assert step["seen"]
    browser.press("Escape")
    browser.open(site / "machine/plots.html", width)
    tab()
    browser.press("Enter")
    steps = [tab() for _ in range(20)]
    places = {step.get("place") for step in steps}
    assert places == {"ARTICLE"}
    for step in steps:
        assert step["seen"]
    scrolled = {"PRE"} if width == 390 else set()
    assert {"SUMMARY", "BUTTON", "A"} | scrolled <= {step["tag"] for step in steps}
    browser.run("document.querySelector('article summary').focus()")
    browser.press("Enter")
    assert browser.run("document.activeElement.parentElement.open")
