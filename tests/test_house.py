"""The project keeps its shape: imports, one place per mechanism, pages, wording."""

import ast
import io
import json
import re
import textwrap
import tokenize
from functools import cache
from pathlib import Path

import pytest

import mixer_page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "longhorn_kit"
FLOORS = [
    "ground",
    "theory",
    "scan",
    "models",
    "lab",
    "top",
]  # a module imports its own floor or a lower one
WORDING = 20  # sentences with an odd phrase
NOUN = "byte|token|second|seed|width|channel|head|step|size|layer|model|row|task|page|claim|chunk|parameter|epoch|file|job|cell|line|image|element"
ODD = re.compile(  # write: per; separate; starts; resumes; prints, raises; if missing; unused; and start a docstring with a verb
    rf"\b(?:bit|byte|token|dot|panel|row|line|number|time|step|second|point|image|curve)s? an? (?:{NOUN})\b|\bof (?:its|their) own\b"
    r"|\b(?:begins?|begun)\b|\bgo(?:es)? on (?:where|with|from)\b|\b(?:is|are|was) (?:said|told)\b|\bsays? so\b"
    r"|\b(?:nobody|somebody|anyone)\b|\bin one line\b|\b(?:where|if|when) there (?:is|are) none\b|^\W*What\b(?!.*\?)|^\W*Inside,"
)
ONE_PLACE = {  # mechanism -> pattern
    "file lock": r"\bflock\(|\bFileLock\(|\bO_EXCL\b",
    "process start": r"\bProcess\(|\bPopen\(|\bspawn\(|\bProcessPoolExecutor\(|\bLocalExecutor\(",
    "CUDA graph capture": r"\bCUDAGraph\(|\bcuda\.graph\(",
    "interval or verdict": r"\bt\.ppf\(|\bstudent_t|\bstdtrit\(|def (?:verdict|judge)\w*\(",
}


def guide_examples():
    "Return the modules that guides show, as nbdev would export them: name -> source."
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Add an experiment with its claim\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    source = "\n".join(textwrap.dedent(block) for block in blocks)
    return {
        "models/efla": mixer_page.module(),
        "models/decay": mixer_page.as_exported(mixer_page.plain_mixer()),
        "lab/experiments/parity": mixer_page.as_exported(source),
    }


@cache
def modules():
    "Return the source of every module of the package and of the guide for contributors."
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_modidx.py"]
    package = {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in paths
    }
    return package | guide_examples()


def floor(name):
    if "/" not in name:
        return "top" if name in ("cli", "start", "timm") else "ground"
    return name.split("/")[0]


@cache
def imports():
    "Return for each module the modules of the package that it imports, or names in a string."
    dotted = {
        "longhorn_kit." + name.replace("/", "."): name
        for name in modules()
        if not name.endswith("__init__")
    }
    graph = {}
    for name, text in modules().items():
        package = ("longhorn_kit/" + name).split("/")[:-1]
        result = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                result |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = (
                    ".".join(
                        [
                            *package[: len(package) - node.level + 1],
                            *([node.module] if node.module else []),
                        ]
                    )
                    if node.level
                    else node.module
                )
                result |= {base} | {f"{base}.{alias.name}" for alias in node.names}
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("longhorn_kit.")
            ):
                result.add(node.value)
        if not name.endswith("__init__"):
            graph[name] = {dotted[word] for word in result if word in dotted} - {name}
    return graph


def test_no_line_is_over_120_columns():
    def written(text):
        return [
            line for line in text.splitlines() if not line.startswith("__all__ = ")
        ]  # nbdev wraps that one

    wide = {
        name: [line for line in written(text) if len(line) > 120]
        for name, text in modules().items()
    }
    assert not {name: result for name, result in wide.items() if result}


def test_imports_go_one_way_and_in_no_circle():
    rank = {name: FLOORS.index(floor(name)) for name in imports()}
    assert [(a, b) for a, result in imports().items() for b in result if rank[b] > rank[a]] == []
    left = {name: set(result) for name, result in imports().items()}
    while free := [
        name for name, result in left.items() if not result & left.keys()
    ]:  # modules that import nothing from the rest
        for name in free:
            del left[name]
    assert left == {}


def test_only_pages_use_the_module_of_their_figures():
    assert "plots" in imports()
    assert [name for name, result in imports().items() if "plots" in result] == []


@pytest.mark.parametrize("mechanism", ONE_PLACE)
def test_a_mechanism_stands_in_one_place(mechanism):
    assert (
        len([name for name, text in modules().items() if re.search(ONE_PLACE[mechanism], text)])
        <= 1
    )


def without_types(function, bound):
    "Return the arguments, and `return`, that have no annotation; kernels need none."
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return []
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs][bound:] + [
        arg for arg in (args.vararg, args.kwarg) if arg
    ]
    lacking = [arg.arg for arg in named if arg.annotation is None]
    typed = function.returns is not None or (function.name == "__init__" and named)  # as for mypy
    return lacking + ["return"] * (not typed)


@pytest.mark.parametrize(
    "name", [name for name in modules() if name != "scan/triton/gluon_cpu"]
)  # it has the signatures of Gluon
def test_public_functions_are_annotated(name):
    body = ast.parse(modules()[name]).body
    lacking = {}
    public = {
        name
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    for node in (node for node in body if getattr(node, "name", None) in public):
        for function in [node] if isinstance(node, ast.FunctionDef) else node.body:
            if isinstance(function, ast.FunctionDef) and (
                function.name == "__init__" or not function.name.startswith("_")
            ):
                bound = function is not node and "staticmethod" not in map(
                    ast.unparse, function.decorator_list
                )
                lacking[f"{node.name}.{function.name}"] = without_types(function, bound)
    assert {function: names for function, names in lacking.items() if names} == {}


@cache
def cells(path):
    return [
        (cell["cell_type"], "".join(cell["source"]))
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]


PAGES = [
    path
    for path in sorted((ROOT / "nbs").rglob("*.ipynb"))
    if ".ipynb_checkpoints" not in path.parts
]


def is_exported(source):
    return re.search(r"^#\| *export", source, re.M) is not None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_three_exported_cells_stand_without_a_sentence_between(path):
    run = 0
    for kind, source in cells(path):
        if kind == "markdown" and len(re.findall(r"[A-Za-z]{2,}", source)) >= 12:
            run = 0
        run += kind == "code" and is_exported(source)
        assert run <= 2, source[:200]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_output_holds_an_svg_element_that_an_untrusted_notebook_loses(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            html = "".join(output.get("data", {}).get("text/html", ""))
            assert "<svg" not in html and "<style" not in html, (
                f"show it as an <img>, see `lab.claims.forest.image`:\n{''.join(cell['source'])[:200]}"
            )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_folded_solution_begins_with_a_line_that_gives_nothing_away(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if "solution" in cell["metadata"].get("tags", ()):
            first = "".join(cell["source"]).partition("\n")[0]
            assert first == "# solution", (
                f"JupyterLab shows the first line of a folded cell: {first}"
            )


def prose(path):
    "Return a file's Markdown without code, and its comments, docstrings and long messages."
    text = path.read_text(encoding="utf-8")

    def strip(part):
        return re.sub(
            r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|`[^`\n]+`|<!--.*?-->", " ", part, flags=re.S
        )

    for kind, source in (
        cells(path)
        if path.suffix == ".ipynb"
        else [("markdown" if path.suffix == ".md" else "code", text)]
    ):
        if kind == "markdown":
            yield from strip(source).splitlines()
            continue
        source = re.sub(r"^[%!].*$", "", source, flags=re.M)
        strings = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
        try:
            yield from (
                token.string.lstrip("#frbu\"' ")
                for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type in strings
                and (token.type == tokenize.COMMENT or token.string.count(" ") >= 3)
            )
        except (tokenize.TokenError, SyntaxError):  # a stub or a shell command
            continue


def test_wording():
    files = [
        *PAGES,
        *ROOT.glob("*.md"),
        *ROOT.glob("tests/*.py"),
        *ROOT.glob("kernels/*.py"),
        *ROOT.glob("docs/*.py"),
        ROOT / "kernels/README.md",
    ]
    result = [
        (path.name, line)
        for path in files
        if path.name != "test_house.py"
        for line in prose(path)
        if ODD.search(line)
    ]
    assert len(result) <= WORDING, result[:20]
    assert [line for name, line in result if name in ("README.md", "index.ipynb")] == []
