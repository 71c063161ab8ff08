"""Check the project's form: lines, statements, functions, imports, pages, wording.

No test here counts the lines or characters of the source: a page or a function more is welcome.
`LIMITS` are above the current values, with room for the next function of a contributor.
"""

import ast
import io
import json
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import experiment_guide
import form
import mixer_page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "longhorn_kit"
# a module imports from its own level or a lower one
FLOORS = ["ground", "theory", "scan", "models", "lab", "top"]
RULES = ("E501", "E701", "E702", "E703", "C901")  # 100 columns, a statement per line, complexity
# limits: in the package, in the tests
LIMITS = {
    "E501": (30, 70),
    "E701": (0, 0),
    "E702": (0, 0),
    "E703": (0, 0),
    "C901": (10, 1),
    "packed": (25, 80),
    "long functions": (15, 46),  # of more than FUNCTION lines
    "long kernels": (3, 1),  # of more than KERNEL lines
}
FUNCTION = 40
KERNEL = 150
WORDING = 20  # sentences with an odd phrase
NOUN = (
    "byte|token|second|seed|width|channel|head|step|size|layer|model|row|task|page|claim|chunk|"
    "parameter|epoch|file|job|cell|line|image|element"
)
COUNTED = (
    "bit|byte|token|dot|panel|row|line|number|time|step|second|point|image|curve"  # before "a step"
)
# write: per; separate; starts; resumes; prints, raises; if missing; unused
ODD = re.compile(
    rf"\b(?:{COUNTED})s? an? (?:{NOUN})\b"
    r"|\bof (?:its|their) own\b"
    r"|\b(?:begins?|begun)\b"
    r"|\bgo(?:es)? on (?:where|with|from)\b"
    r"|\b(?:is|are|was) (?:said|told)\b|\bsays? so\b"
    r"|\b(?:nobody|somebody|anyone)\b"
    r"|\bin one line\b"
    r"|\b(?:where|if|when) there (?:is|are) none\b"
    r"|^\W*What\b(?!.*\?)|^\W*Inside,"  # a docstring starts with a verb
)
ONE_PLACE = {  # mechanism -> pattern
    "file lock": r"\bflock\(|\bFileLock\(|\bO_EXCL\b",
    "process start": r"\bProcess\(|\bPopen\(|\bspawn\(|\bProcessPoolExecutor\(|\bLocalExecutor\(",
    "CUDA graph capture": r"\bCUDAGraph\(|\bcuda\.graph\(",
    "interval or verdict": r"\bt\.ppf\(|\bstudent_t|\bstdtrit\(|def (?:verdict|judge)\w*\(",
}


# ---- modules of the package and of the guides for contributors


@cache
def modules():
    "Return the source of every module of the package and of the guides: name -> source."
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "_modidx.py":
            name = path.relative_to(PACKAGE).with_suffix("").as_posix()
            result[name] = path.read_text(encoding="utf-8")
    return result | {
        "models/efla": mixer_page.module(),
        "models/decay": mixer_page.as_exported(mixer_page.plain_mixer()),
        "lab/experiments/parity": experiment_guide.module(),
    }


@cache
def files_of_tests():
    "Return the source of every file of tests: name -> source."
    paths = sorted((ROOT / "tests").glob("*.py"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


SIDES = pytest.mark.parametrize("side", [0, 1], ids=["package", "tests"])


def sources_of(side):
    return files_of_tests() if side else modules()


# ---- lines, statements, functions


@SIDES
def test_lines_are_narrow_hold_one_statement_and_functions_are_simple(side, tmp_path):
    findings = form.ruff(sources_of(side), RULES, tmp_path)
    counts = form.per_rule(findings)
    for rule in RULES:
        shown = [finding for finding in findings if finding[1] == rule]
        assert counts[rule] <= LIMITS[rule][side], shown


@SIDES
def test_few_statements_are_packed(side):
    result = [
        (name, *construct)
        for name, source in sources_of(side).items()
        for construct in form.packed(source)
    ]
    assert len(result) <= LIMITS["packed"][side], result


@SIDES
@pytest.mark.parametrize("kernels", [False, True], ids=["functions", "kernels"])
def test_few_functions_are_long(side, kernels):
    most = KERNEL if kernels else FUNCTION
    limit = LIMITS["long kernels" if kernels else "long functions"][side]
    result = [
        (name, *function)
        for name, source in sources_of(side).items()
        for function in form.long_functions(source, most, kernels)
    ]
    assert len(result) <= limit, result


# ---- imports


def floor(name):
    "Return the level of a module: its folder, or for a single file the lowest or highest level."
    room = name.split("/")[0]
    if room in ("cli", "timm"):
        return "top"
    return room if "/" in name else "ground"


def imported_names(node, package):
    "Return the dotted names that one node imports, or names in a string."
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        parts = [node.module] if node.module else []
        if node.level:  # from .. import: each dot after the first removes a part of the package
            parts = package[: len(package) - node.level + 1] + parts
        base = ".".join(parts)
        return {base} | {f"{base}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return set()


@cache
def imports():
    "Return for each module the modules of the package that it imports, or names in a string."
    files = {name: text for name, text in modules().items() if not name.endswith("__init__")}
    by_dotted_name = {"longhorn_kit." + name.replace("/", "."): name for name in files}
    graph = {}
    for name, text in files.items():
        package = f"longhorn_kit/{name}".split("/")[:-1]
        dotted = set()
        for node in ast.walk(ast.parse(text)):
            dotted |= imported_names(node, package)
        graph[name] = {by_dotted_name[word] for word in dotted if word in by_dotted_name} - {name}
    return graph


def test_imports_go_from_higher_floors_to_lower_ones():
    rank = {name: FLOORS.index(floor(name)) for name in imports()}
    upward = [
        (name, other)
        for name, others in imports().items()
        for other in others
        if rank[other] > rank[name]
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    left = {name: set(others) for name, others in imports().items()}
    while True:
        free = [name for name, others in left.items() if not others & left.keys()]
        if not free:
            break
        for name in free:
            del left[name]
    assert left == {}


def test_only_pages_use_the_module_of_their_figures():
    assert "plots" in imports()
    assert [name for name, others in imports().items() if "plots" in others] == []


@pytest.mark.parametrize("mechanism", ONE_PLACE)
def test_a_mechanism_stands_in_one_place(mechanism):
    pattern = ONE_PLACE[mechanism]
    assert len([name for name, text in modules().items() if re.search(pattern, text)]) <= 1


# ---- annotations


def unannotated(function, bound):
    "Return the arguments and `return` without annotation; kernels need no annotations."
    if form.is_kernel(function):
        return []
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    if bound:
        named = named[1:]  # self or cls
    named += [arg for arg in (args.vararg, args.kwarg) if arg]
    lacking = [arg.arg for arg in named if arg.annotation is None]
    # as for mypy: an `__init__` with annotated arguments needs no `-> None`
    typed = function.returns is not None or (function.name == "__init__" and named)
    return lacking if typed else [*lacking, "return"]


def public_names(body):
    "Return the names in the `__all__` of a module."
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def public_functions(body):
    "Yield (name, function, whether it is bound) for public functions and methods of a module."
    public = public_names(body)
    for node in body:
        if getattr(node, "name", None) not in public:
            continue
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, False
            continue
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            if method.name == "__init__" or not method.name.startswith("_"):
                decorators = map(ast.unparse, method.decorator_list)
                yield f"{node.name}.{method.name}", method, "staticmethod" not in decorators


@pytest.mark.parametrize(
    "name", [name for name in modules() if name != "scan/triton/gluon_cpu"]
)  # its signatures are those of Gluon
def test_public_functions_are_annotated(name):
    lacking = {}
    for title, function, bound in public_functions(ast.parse(modules()[name]).body):
        if arguments := unannotated(function, bound):
            lacking[title] = arguments
    assert lacking == {}


# ---- pages

PAGES = [
    path
    for path in sorted((ROOT / "nbs").rglob("*.ipynb"))
    if ".ipynb_checkpoints" not in path.parts
]
EVERY_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


@cache
def cells(path):
    "Return the cells of a page, as JSON with each source as one text."
    page = json.loads(path.read_text(encoding="utf-8"))
    return [cell | {"source": "".join(cell["source"])} for cell in page["cells"]]


def is_exported(cell):
    is_code = cell["cell_type"] == "code"
    return is_code and re.search(r"^#\| *export", cell["source"], re.M) is not None


def is_prose(cell):
    "Check whether a cell contains an explanation; a heading is not enough."
    words = re.findall(r"[A-Za-z]{2,}", cell["source"])
    return cell["cell_type"] == "markdown" and len(words) >= 12


@EVERY_PAGE
def test_no_three_exported_cells_stand_without_a_sentence_between(path):
    run = 0
    for cell in cells(path):
        if is_prose(cell):
            run = 0
        run += is_exported(cell)
        assert run <= 2, cell["source"][:200]


@EVERY_PAGE
def test_no_output_holds_an_svg_element_that_an_untrusted_notebook_loses(path):
    advice = "show it as an <img>, see `lab.claims.forest.image`"
    for cell in cells(path):
        for output in cell.get("outputs", []):
            html = "".join(output.get("data", {}).get("text/html", ""))
            assert "<svg" not in html, f"{advice}:\n{cell['source'][:200]}"
            assert "<style" not in html, f"{advice}:\n{cell['source'][:200]}"


@EVERY_PAGE
def test_a_folded_solution_begins_with_a_line_that_gives_nothing_away(path):
    for cell in cells(path):
        if "solution" in cell["metadata"].get("tags", ()):
            first = cell["source"].partition("\n")[0]
            advice = f"JupyterLab shows the first line of a folded cell: {first}"
            assert first == "# solution", advice


# ---- wording


def words_of_markdown(text):
    "Return the lines of a text without code and formulas."
    apart = r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|`[^`\n]+`|<!--.*?-->"
    return re.sub(apart, " ", text, flags=re.S).splitlines()


def words_of_code(source):
    "Yield comments, docstrings and messages of four words or more."
    source = re.sub(r"^[%!].*$", "", source, flags=re.M)
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            is_sentence = token.type in strings and token.string.count(" ") >= 3
            if token.type == tokenize.COMMENT or is_sentence:
                yield token.string.lstrip("#frbu\"' ")
    except (tokenize.TokenError, SyntaxError):  # a stub or a shell command
        return


def prose(path):
    "Yield the prose of a file: lines without code, comments, docstrings, messages."
    if path.suffix == ".md":
        yield from words_of_markdown(path.read_text(encoding="utf-8"))
    elif path.suffix == ".py":
        yield from words_of_code(path.read_text(encoding="utf-8"))
    else:
        for cell in cells(path):
            read = words_of_markdown if cell["cell_type"] == "markdown" else words_of_code
            yield from read(cell["source"])


def test_wording():
    patterns = ("*.md", "tests/*.py", "kernels/*.py", "kernels/README.md", "docs/*.py")
    files = PAGES + [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    files.remove(Path(__file__))  # this file quotes the odd phrases
    result = []
    for path in files:
        result += [(path.name, line) for line in prose(path) if ODD.search(line)]
    assert len(result) <= WORDING, result
    assert [line for name, line in result if name in ("README.md", "index.ipynb")] == []
