"""The checks of nbs/scan/12b_triton_puzzles.ipynb.

Right answers pass, and wrong answers are rejected with an explanation.
"""

import ast
import contextlib
import io
import json
import linecache
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from longhorn_kit.scan.triton.puzzles import Check, Watch
from mutants import impostors, mutants
from page_cells import define
from puzzle_answers import ANSWERS
from sweep import slow_case

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "nbs/scan/12b_triton_puzzles.ipynb"
GOAL = 0.995  # share of the mutants that are not equivalent and that a check must reject
MOST_EQUIVALENT = 0.03
SAMPLE = 40  # mutants in `make test`
SEED = 0
LINES = 15  # of a solution's kernels, without decorators and empty lines
LAST_LINES = 25  # the diagonal forward and the exact chunk
LAST = (17, 18)
NUMBERS = range(1, 20)
SHOWS = ("draw_programs(", "double_kernel[", "if DEVICE")  # in cells without names


def puzzle_number(tags):
    return next(int(tag.removeprefix("puzzle-")) for tag in tags if tag.startswith("puzzle-"))


@cache
def page():
    """Run the page without figures and checks.

    Return its names, and for every puzzle check, name, stub and solution."""
    space = {"__name__": "page"}
    puzzles = {number: SimpleNamespace() for number in NUMBERS}
    text = PAGE.read_text(encoding="utf-8")
    for i, cell in enumerate(json.loads(text)["cells"]):
        source = "".join(cell["source"])
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or any(part in source for part in SHOWS):
            continue
        if "stub" in tags:
            puzzle = puzzles[puzzle_number(tags)]
            lines = source.rsplit("\n", 1)
            puzzle.stub = lines[0] + "\n"
            continue
        if "solution" in tags:
            puzzle = puzzles[puzzle_number(tags)]
            source, call = source.rsplit("assert ", 1)
            words = call.strip().rstrip(")")
            puzzle.check_name, puzzle.name = words.split("(")
            text = source.removeprefix("# solution\n").strip()
            puzzle.solution = text + "\n"
        with contextlib.redirect_stdout(io.StringIO()):
            define(source, space, f"<page {i}>")
    for puzzle in puzzles.values():
        puzzle.check = space[puzzle.check_name]
        puzzle.answer = space[puzzle.name]
    return space, puzzles


def examine(number, source, label):
    "Return the report of a puzzle's check on an answer given as source."
    space, puzzles = page()
    puzzle = puzzles[number]
    name = f"<puzzle {number} {label}>"
    answer = define(source, dict(space), name)[puzzle.name]
    report = puzzle.check.examine(answer)
    linecache.cache.pop(name)
    return report


@cache
def plain_lines(number):
    tree = ast.parse(page()[1][number].solution)
    return ast.unparse(tree).splitlines()


def changed_lines(number, mutant):
    "Return the changed lines of a mutant as `before -> after`."
    pairs = zip(plain_lines(number), mutant.splitlines())
    return "; ".join(f"{a.strip()} -> {b.strip()}" for a, b in pairs if a != b)


@cache
def equivalents():
    "Return puzzle -> changes that keep an answer right. The file contains the reasons."
    result = {number: set() for number in NUMBERS}
    text = (ROOT / "tests/puzzle_equivalents.json").read_text(encoding="utf-8")
    reasons = json.loads(text)
    for changes in reasons.values():
        for number, lines in changes.items():
            result[int(number)].update(lines)
    return result


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_an_untouched_stub_fails_in_words(number):
    space, puzzles = page()
    report = examine(number, puzzles[number].stub, "stub")
    assert not report
    assert not report.started
    assert "Is the stub still untouched?" in report.text


@pytest.mark.parametrize("answer", [None, ..., 3])
def test_what_is_no_function_is_named(answer):
    check = page()[1][1].check
    report = check.examine(answer)
    assert not report
    assert not report.started
    assert repr(answer) in report.text


def test_a_kernel_instead_of_its_launch_is_named():
    space, puzzles = page()
    report = puzzles[1].check.examine(space["copy_kernel"])
    assert not report
    assert "copy_kernel is a kernel" in report.text


@pytest.mark.parametrize(
    "number", [number if number in (2, 8) else slow_case(number) for number in NUMBERS]
)
def test_solution_and_two_other_right_answers_pass(number):
    puzzle = page()[1][number]
    for answer in (puzzle.answer, *ANSWERS[number]):
        report = puzzle.check.examine(answer)
        assert report, f"{answer.__name__}: {report}"
    assert len(set(ANSWERS[number])) == 2


@pytest.mark.parametrize(
    "number", [number if number in (1, 5) else slow_case(number) for number in NUMBERS]
)
def test_answers_that_are_right_once_fail(number):
    puzzle = page()[1][number]
    n_outputs = len(puzzle.check.outputs)
    for kind, answer in impostors(puzzle.answer, n_outputs):
        assert not puzzle.check.examine(answer), kind


LOWER = "tl.where(t[:, None] >= t[None, :], A, 0.0)"
ROW = "tl.sum(tl.where((t == s)[:, None], U, 0.0), 0)"
LIKELY_MISTAKES = {  # what a reader may well write -> puzzle, change of the solution, reason
    "no grid": (
        1,
        ("copy_kernel[(len(x) // 4,)](", "copy_kernel("),
        "A launch has the grid in square brackets before the arguments: copy_kernel[grid](...)",
    ),
    "a grid rounded down": (
        2,
        ("triton.cdiv(n, 4)", "n // 4"),
        "The grid (0,) has no programs, so nothing ran.",
    ),
    "a mask that is never true": (
        2,
        (", mask=i < n)", ", mask=i < 0)"),
        "is its mask true anywhere?",
    ),
    "a number as a grid": (
        3,
        ("(triton.cdiv(D, 4), triton.cdiv(N, 2))", "triton.cdiv(D, 4) * triton.cdiv(N, 2)"),
        "The grid is a tuple of one to three whole numbers, such as (5,) or (2, 3)",
    ),
    "a function that returns a number": (
        3,
        ("(triton.cdiv(D, 4), triton.cdiv(N, 2))", "lambda meta: triton.cdiv(D, 4)"),
        "The grid is a tuple of one to three whole numbers",
    ),
    "a fraction in a grid": (
        3,
        ("triton.cdiv(D, 4), triton.cdiv(N, 2)", "D / 4, N / 2"),
        "Here it is (0.25, 0.5).",
    ),
    "a list as a grid": (
        3,
        ("(triton.cdiv(D, 4), triton.cdiv(N, 2))", "[D, N]"),
        "Here it is [1, 1].",
    ),
    "an index at a pointer": (
        7,
        ("tl.load(s0_ptr + d, mask=d < D, other=0.0)", "s0_ptr[d]"),
        "A pointer takes no index.",
    ),
    "a product with a mask": (11, (LOWER, "A * (t[:, None] >= t[None, :])"), "zero times infinity"),
    "and": (14, ("(d < D) & (t < T)", "(d < D) and (t < T)"), "Combine masks with & and |"),
    "no brackets": (14, ("(d < D) & (t < T)", "d < D & t < T"), "put each comparison in brackets"),
    "not": (2, (", mask=i < n)", ", mask=not (i >= n))"), "cannot be used with and, or, not or if"),
    "an index": (15, (ROW, "U[s]"), "A tile has no rows to index"),
    "an index and a colon": (15, (ROW, "U[s, :]"), "A tile has no rows to index"),
    "an index that is assigned to": (
        15,
        ("U -= column[:, None] * row[None, :]", "U[s] = row"),
        "put one in with tl.where",
    ),
    "a load above the diagonal": (
        15,
        ("mask=(t > s) & (t < T)", "mask=t < T"),
        "A load reads L[0, 0], which is NaN.",
    ),
    "a load without a value": (5, (", mask=inside, other=0.0", ", mask=inside"), "pass other="),
    "a strict mask": (18, (LOWER, LOWER.replace(">=", ">")), "S is right."),
    "a product with infinity": (
        18,
        ("tl.where(U - U == 0.0, U, 0.0)", "U"),
        "zero times infinity: tl.where chooses",
    ),
    "U is not filled": (18, ("        U += u\n", ""), "S equals the input S0."),
}


@pytest.mark.parametrize("mistake", LIKELY_MISTAKES)
def test_a_likely_mistake_is_refused_with_its_reason(mistake):
    number, change, reason = LIKELY_MISTAKES[mistake]
    solution = page()[1][number].solution
    assert change[0] in solution
    report = examine(number, solution.replace(*change), mistake)
    assert not report
    assert report.started
    assert reason in report.text, report.text


def test_a_sample_of_mutants_is_rejected():
    space, puzzles = page()
    chosen = random.Random(SEED)
    everything = [
        (number, text)
        for number in chosen.sample(NUMBERS, 6)
        for _, text in mutants(puzzles[number].solution, keep=lambda: chosen.random() < 0.1)
    ]
    sample = chosen.sample(everything, SAMPLE)
    accepted = [
        (number, changed_lines(number, text))
        for i, (number, text) in enumerate(sample)
        if examine(number, text, f"sample {i}")
    ]
    wrong = [(number, text) for number, text in accepted if text not in equivalents()[number]]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_all_mutants_of_a_solution_are_rejected(number):
    solution = page()[1][number].solution
    made = list(mutants(solution))
    accepted = {
        changed_lines(number, text)
        for i, (_, text) in enumerate(made)
        if examine(number, text, f"mutant {i}")
    }
    wrong = accepted - equivalents()[number]
    different = len(made) - len(accepted) + len(wrong)
    most = (1 - GOAL) * different
    assert len(wrong) <= most, sorted(wrong)


@pytest.mark.slow
def test_equivalent_changes_are_few_and_each_is_a_mutant():
    total = 0
    for number in NUMBERS:
        solution = page()[1][number].solution
        changes = {changed_lines(number, text) for _, text in mutants(solution)}
        known_changes = equivalents()[number]
        assert known_changes <= changes, sorted(equivalents()[number] - changes)
        total += len(changes)
    count = sum(map(len, equivalents().values()))
    assert count <= MOST_EQUIVALENT * total


@pytest.mark.parametrize("number", NUMBERS)
def test_kernels_of_a_solution_are_short(number):
    solution = page()[1][number].solution
    tree = ast.parse(solution)
    kernels = [node for node in tree.body if node.decorator_list]
    lines = solution.splitlines()
    count = sum(
        bool(line.strip()) for node in kernels for line in lines[node.lineno - 1 : node.end_lineno]
    )
    signatures = sum(node.body[0].lineno - node.lineno - 1 for node in kernels)  # wrapped arguments
    assert count - signatures <= (LAST_LINES if number in LAST else LINES)


@pytest.mark.slow
def test_every_picture_fits_on_its_paper():
    matplotlib = pytest.importorskip("matplotlib")
    space = dict(page()[0])
    pictures = 0
    text = PAGE.read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if "draw_programs(" not in source:
            continue
        exec(source, space)
        axes = matplotlib.pyplot.gca()
        width = axes.get_xlim()[1]
        boxes = [patch.get_bbox() for patch in axes.patches if hasattr(patch, "get_bbox")]
        for box in boxes:
            assert box.x0 >= 0, source
            assert box.x1 <= width, source
        matplotlib.pyplot.close()
        pictures += 1
    assert pictures == len(NUMBERS) + 1  # and one before the first puzzle


# --- errors that the interpreter accepts ----------------------------------------------------------


@triton.jit
def shift_kernel(x_ptr, y_ptr, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    i = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + SHIFT, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x, mask=i < n)


@triton.jit
def unmasked_sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    total = tl.sum(x, 0)
    tl.store(y_ptr + i, x + 0.0 * total, mask=i < n)


@triton.jit
def dot_kernel(x_ptr, y_ptr, n, INNER: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, 16)
    j = tl.arange(0, INNER)
    first = j[None, :] == 0
    x = tl.load(x_ptr + i[:, None] + j[None, :], mask=(i < n)[:, None] & first, other=0.0)
    at_start = (j[:, None] == 0) & (i[None, :] == 0)
    one = tl.where(at_start, 1.0, 0.0)
    y = tl.sum(tl.dot(x, one, input_precision=PRECISION), 1)
    tl.store(y_ptr + i, y, mask=i < n)


@triton.jit
def growing_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    s = 0.0
    for _ in range(1):
        x = tl.load(x_ptr + i, mask=i < n, other=0.0)
        s = s + x
        s = s + 0.0
    tl.store(y_ptr + i, s, mask=i < n)


@triton.jit
def atomic_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 0.0, mask=i < n)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.atomic_add(y_ptr + i, x, mask=i < n)


@triton.jit
def row_kernel(x_ptr, y_ptr, stride, D, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * stride + d, mask=d < D)
    tl.store(y_ptr + t * D + d, x, mask=d < D)


def shifted(shift):
    return lambda x, y: shift_kernel[(triton.cdiv(len(x), 4),)](x, y, len(x), SHIFT=shift, BLOCK=4)


def through_new_array(x, y):
    copied = torch.empty(len(x))
    grid = (triton.cdiv(len(x), 4),)
    shift_kernel[grid](x, copied, len(x), SHIFT=0, BLOCK=4)
    y.copy_(copied)


FAULTS = {
    "beyond the end of x": shifted(1),
    "before the start of x": shifted(-1),
    "no value unless you pass other=": lambda x, y: unmasked_sum_kernel[(1,)](
        x, y, len(x), BLOCK=16
    ),
    "inner side of at least 16, but here it is 8": lambda x, y: dot_kernel[(1,)](
        x, y, len(x), INNER=8, PRECISION="ieee"
    ),
    "rounds float32 numbers to TF32": lambda x, y: dot_kernel[(1,)](
        x, y, len(x), INNER=16, PRECISION="tf32"
    ),
    "The order of atomic operations": lambda x, y: atomic_kernel[(1,)](x, y, len(x), BLOCK=16),
    "allocated without a device": through_new_array,
    "never stored": lambda x, y: shift_kernel[(1,)](x, y, len(x), SHIFT=0, BLOCK=4),
    "the grid is larger than needed": lambda x, y: shift_kernel[(5,)](
        x, y, len(x), SHIFT=0, BLOCK=4
    ),
    "stores to x, which is an input": lambda x, y: shift_kernel[(1,)](
        y, x, len(x), SHIFT=0, BLOCK=16
    ),
    "Python stopped with ZeroDivisionError": lambda x, y: y.fill_(1 / 0),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_named(words):
    check = Check("x[n] -> y[n]", lambda x: x, n=(6,))
    report = check.examine(FAULTS[words])
    assert not report, report.text
    assert words in report.text, report.text


def test_faultless_answers_pass():
    check = Check("x[n] -> y[n]", lambda x: x, n=(3, 6, 9))
    assert check.examine(shifted(0))
    assert check.examine(lambda x, y: dot_kernel[(1,)](x, y, len(x), INNER=16, PRECISION="ieee"))


def test_a_load_between_two_rows_is_named():
    check = Check("x[T,D] -> y[T,D]", lambda x: x, gaps={"x": 3}, T=(2,), D=(5,))

    def launch(stride):
        return lambda x, y: row_kernel[(2,)](x, y, stride(x), 5, BLOCK=8)

    report = check.examine(launch(lambda x: x.stride(0)))
    assert report
    report = check.examine(launch(lambda x: x.shape[1]))
    assert "in the gap between two rows" in report.text


def test_a_check_counts_calls_and_names_too_many():
    def steps(x, y):
        stride = x.stride(0)
        row_kernel[(len(x),)](x, y, stride, x.shape[1], BLOCK=8)

    for most, passes in ((2, True), (1, False)):
        check = Check("x[T,D] -> y[T,D]", lambda x: x, most_calls=most, T=(2,), D=(5,))
        report = check.examine(steps)
        assert report.passed == passes
        assert passes or "one program makes 2 loads and stores" in report.text


def test_watch_counts_and_restores_the_interpreter():
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = (GridExecutor.__call__, InterpreterBuilder.create_masked_load)
    x = torch.randn(6)
    y = torch.zeros(6)
    with Watch({"x": x, "y": y}, read_only=("x",)) as watch:
        shifted(0)(x, y)
    assert torch.equal(x, y)
    assert watch.launches == 1
    assert watch.programs == 2
    assert watch.loads == 6
    assert watch.stores == 6
    assert before == (GridExecutor.__call__, InterpreterBuilder.create_masked_load)


# --- the GPU --------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("number", NUMBERS)
def test_a_solution_passes_on_the_gpu_with_its_time(number, capsys):
    puzzle = page()[1][number]
    assert puzzle.check(puzzle.answer)
    out = capsys.readouterr().out
    printed = " ".join(out.split())
    assert "The GPU agrees." in printed
    assert not puzzle.check.large or "a copy of the same number of bytes takes" in printed


COMPILED = """
import sys
sys.path.insert(0, "tests")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from test_puzzles import NUMBERS, dot_kernel, page

space, puzzles = page()
names = {name for puzzle in puzzles.values() for name in puzzle.answer.__code__.co_names}


def build(kernel, **constants):
    types = {}
    for parameter in kernel.params:
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
        else:
            types[parameter.name] = "*fp32" if parameter.name.endswith("_ptr") else "i32"
    values = {name: constants.get(name, 16) for name, kind in types.items() if kind == "constexpr"}
    triton.compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32))


for name in sorted(names):
    if isinstance(space.get(name), triton.JITFunction):
        build(space[name])
        print("compiled", name)
for number in (2, 8, 13, 18):
    assert puzzles[number].check.examine(puzzles[number].answer), number
try:
    build(dot_kernel, INNER=8, PRECISION="ieee")
except Exception as error:
    print("refused an inner side of 8")
"""


@pytest.mark.slow
def test_solutions_compile_for_a_gpu_and_are_judged_in_the_interpreter_there(tmp_path):
    "Run without TRITON_INTERPRET, as on a machine with a GPU."
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    compiled = [line for line in lines if line.startswith("compiled ")]
    assert len(compiled) == len(NUMBERS) + 1  # puzzle 8 has two kernels
    assert "refused an inner side of 8" in done.stdout
