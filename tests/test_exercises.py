"""The checks of the exercises of nbs/scan/10 to 14.

Two other right ways pass, and a wrong answer is refused with the reason.
"""

import ast
import json
import math
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.triton.puzzles import Check
from page_cells import define

ROOT = Path(__file__).parents[1]
LIBRARIES = {
    "F": F,
    "TorchDispatchMode": TorchDispatchMode,
    "Check": Check,
    "contextmanager": contextmanager,
    "make_fx": make_fx,
    "math": math,
    "partial": partial,
    "reference_scan": reference_scan,
    "reference_selective_scan": reference_selective_scan,
    "tl": tl,
    "torch": torch,
    "triton": triton,
}


def page(name, *wanted, change=("", ""), **space):
    """Return a space in which all definitions of these names on a page were made, in its order.

    `change` is a part of their text and what stands in its place."""
    notebook = (ROOT / f"nbs/scan/{name}.ipynb").read_text(encoding="utf-8")
    space |= LIBRARIES
    missing = set(wanted)
    for number, cell in enumerate(json.loads(notebook)["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or source.startswith(("%", "#| eval: false")):
            continue
        definitions = []
        for node in ast.parse(source).body:
            targets = getattr(node, "targets", [node])
            names = {getattr(target, "name", getattr(target, "id", None)) for target in targets}
            if names & set(wanted):
                missing -= names
                definitions.append(ast.unparse(node))
        if definitions:
            text = "\n\n".join(definitions).replace(*change)
            define(text, space, f"<{name} {number} {change}>")
    assert not missing
    return space


def assert_refused(check, answer, words):
    with pytest.raises(AssertionError) as refusal:
        check(answer)
    assert words in str(refusal.value), refusal.value


# --- every check whose exercise is a plain function -----------------------------------------------


def random64(*shapes):
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def exact_space():
    "Return the data of page 14 that its checks read, for a sequence of 3 steps."
    q, k, x, b, dy, dS = random64((3, 4), (3, 4), (3, 2), (3, 2), (3, 2), (2, 4))
    data = {"q64": q, "k64": k, "x64": x, "b64": b, "dy": dy, "dS": dS, "zero": 0 * dS}
    return {"DEVICE": "cpu", "T": 3, "D": 2, "N": 4, **data}


CHECKS = [  # page, check, what it calls
    ("10_reference", "check_attention", "Count"),
    ("10_reference", "check_eraser"),
    ("11_chunked", "check_best"),
    ("11_chunked", "check_count", "COUNTED"),
    ("12_triton_primer", "check_sums", "loads_first"),
    ("13_triton_diagonal", "check_dk"),
    ("13_triton_diagonal", "check_chunk"),
    ("14_triton_exact", "check_shared"),
    ("14_triton_exact", "check_tf32"),
    ("14_triton_exact", "check_dk", "rates", "plain_forward", "plain_substitute"),
    ("14_triton_exact", "check_parts"),
]


@pytest.mark.parametrize("name, check, needed", [(n, c, rest) for n, c, *rest in CHECKS])
def test_an_untouched_stub_is_told_so(name, check, needed):
    space = page(name, check, *needed, **exact_space())
    assert_refused(space[check], lambda *args: None, "nothing yet: your function returns None")


def test_a_kernel_that_stores_nothing_is_told_so():
    @triton.jit
    def untouched(v_ptr, out_ptr, size, BLOCK: tl.constexpr):
        tl.program_id(0)

    check = page("12_triton_primer", "check_softplus", DEVICE="cpu")["check_softplus"]
    assert_refused(check, untouched, "nothing yet: the kernel stored nothing")


# --- 10, exercise 1: linear attention without a loop over time -----------------------------------


def attention_check():
    return page("10_reference", "Count", "check_attention")["check_attention"]


def by_einsum(q, k, x, dt):
    scores = torch.einsum("btn,bsn->bts", q, k)
    later = torch.ones_like(scores).triu(1).bool()
    return torch.einsum("bts,bsd->btd", scores.masked_fill(later, 0), F.softplus(dt) * x)


def by_cumsum(q, k, x, dt):
    written = (F.softplus(dt) * x)[..., None] * k[:, :, None]
    return (written.cumsum(1) * q[:, :, None]).sum(-1)


def attention_by_loop(q, k, x, dt):
    no_decay = torch.zeros(x.shape[2], q.shape[2], dtype=q.dtype)
    return reference_selective_scan(q, k, x, dt, no_decay)[0]


@pytest.mark.parametrize("answer", [by_einsum, by_cumsum])
def test_attention_without_a_loop_passes(answer):
    attention_check()(answer)


@pytest.mark.parametrize(
    "answer, words",
    [
        (attention_by_loop, "a loop over time: 9 steps take"),
        (lambda q, k, x, dt: (q @ k.mT) @ x, "which keys may step t use"),
        (lambda q, k, x, dt: by_einsum(q, k, x, dt)[..., None], "instead of (B,T,D)"),
    ],
)
def test_other_attention_is_refused(answer, words):
    assert_refused(attention_check(), answer, words)


# --- 11, exercise 1: the best chunk; exercise 2: count multiply-adds ------------------------------


def chunk_check():
    return page("11_chunked", "check_best")["check_best"]


def count_check():
    return page("11_chunked", "COUNTED", "compare_chunks", "check_count")["check_count"]


@pytest.mark.parametrize(
    "answer", [lambda T: math.isqrt(T // 3), lambda T: torch.tensor(T / 3).sqrt().ceil()]
)
def test_a_chunk_near_the_best_passes(answer):
    chunk_check()(answer)


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda T: (T / 3) ** 0.5, "a step cannot be cut"),
        (lambda T: math.isqrt(T), "chunks of 32 steps need memory for 128 states, and 111 are"),
        (lambda T: 0, "is no part of the sequence"),
    ],
)
def test_another_chunk_is_refused(answer, words):
    assert_refused(chunk_check(), answer, words)


def count_by_sums(C, D, N):
    shared = 2 * C * C * N
    products = 3 * C * D * N + C * C * D + shared
    return products / (C * D), sum(range(C)) / C


def count_in_other_order(C, D, N):
    return [C * (1 + 2 * N / D) + 3 * N, C / 2 - 0.5]


@pytest.mark.parametrize("answer", [count_by_sums, count_in_other_order])
def test_a_right_count_passes(answer, capsys):
    count_check()(answer)
    assert "4N = 64 up to chunks of 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer, words",
    [
        (
            lambda C, D, N: (3 * C + 2 * C * N / D + N, (C - 1) / 2),
            "products at C = 16, D = 32, N = 8: 64.00 per step and channel, counted one by one "
            "48.00; which of the six have the side C twice?",
        ),
        (
            lambda C, D, N: (3 * N + C + 2 * C * N / D, C / 2),
            "8.00 per step and channel, counted one by one 7.50; row t leaves only the C - 1 - t",
        ),
        (lambda C, D, N: (3 * N + C, (C - 1) / 2), "64.00 per step and channel, counted one by"),
    ],
)
def test_another_count_is_refused(answer, words):
    assert_refused(count_check(), answer, words)


# --- 12, exercise 2: sums without a race ----------------------------------------------------------


def sums_space():
    kernels = ("_partial_sum_kernel", "column_sums", "_racing_sum_kernel", "racing_sums")
    return page("12_triton_primer", "loads_first", "check_sums", *kernels, DEVICE="cpu")


def two_launches(x):
    space = sums_space()
    T, D = x.shape
    parts = torch.empty(triton.cdiv(T, 16), D)
    total = torch.empty(1, D)
    add = space["_partial_sum_kernel"]
    add[(len(parts),)](x, parts, T, D, ROWS=16, BLOCK=32)
    add[(1,)](parts, total, len(parts), D, ROWS=8, BLOCK=32)
    return total[0]


def added_in_turn(x):
    space = sums_space()
    T, D = x.shape
    parts = torch.empty(triton.cdiv(T, 4), D)
    space["_partial_sum_kernel"][(len(parts),)](x, parts, T, D, ROWS=4, BLOCK=32)
    return sum(parts)


@pytest.mark.parametrize("answer", [two_launches, added_in_turn])
def test_sums_of_parts_pass(answer):
    sums_space()["check_sums"](answer)


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda x: x.sum(0), "kernels add the rows of x, and PyTorch may only add what they"),
        (
            lambda x: sums_space()["racing_sums"](x),
            "if all programs load before any program stores",
        ),
    ],
)
def test_other_sums_are_refused(answer, words):
    assert_refused(sums_space()["check_sums"], answer, words)


# --- 13, exercise 3: packed sequences -------------------------------------------------------------

PACKED = (
    "load_row",
    "load_step",
    "packed_reference",
    "starts_at_the_end",
    "infinite_before",
    "check_packed",
    "packed_kernel",
    "packed",
)
RESET = "S = tl.where(first > 0.5, 0.0, S)"


def packed_report(reset):
    "Return the report on the solution with another line in the place of the reset."
    space = page("13_triton_diagonal", *PACKED, change=(RESET, reset))
    return space["check_packed"].examine(space["packed"])


@pytest.mark.parametrize(
    "reset",
    [
        RESET,
        "S = tl.where(first == 1.0, tl.zeros([NP, BLOCK], tl.float32), S)",
        "S = tl.zeros([NP, BLOCK], tl.float32) if first > 0.5 else S",
    ],
)
def test_a_reset_that_chooses_passes(reset):
    report = packed_report(reset)
    assert report, report


@pytest.mark.parametrize(
    "reset, words",
    [
        ("S = (1.0 - first) * S", "as zero times infinity: tl.where chooses"),
        ("S = tl.where(first > 0.5, S, 0.0)", "are wrong"),
        ("pass", "are wrong"),
    ],
)
def test_another_reset_is_refused(reset, words):
    report = packed_report(reset)
    assert not report
    assert words in report.text, report


# --- 14, exercise 2: one rate for all channels ----------------------------------------------------


def shared_space():
    torch.manual_seed(0)
    data = {
        name: torch.randn(48, size, dtype=torch.float64) for name, size in (("k64", 16), ("x64", 8))
    }
    names = ("plain_substitute", "check_shared", "solve_shared")
    return page("14_triton_exact", *names, DEVICE="cpu", D=8, N=16, **data)


def by_dense_solve(K, X, e, S):
    system = torch.eye(len(K), dtype=K.dtype) + e * torch.tril(K @ K.T, -1)
    return torch.linalg.solve(system, e * (X - K @ S.T))


def by_doubling(K, X, e, S):
    "The inverse as a product: (I - L)(I + L^2)(I + L^4) ..., log2 of the rows many factors."
    power = e * torch.tril(K @ K.T, -1)
    U = e * (X - K @ S.T)
    U = U - power @ U
    for _ in range(len(K).bit_length() - 2):
        power = power @ power
        U = U + power @ U
    return U


def shared_by_loop(K, X, e, S):
    rates = e.expand(len(K), len(S))
    return shared_space()["plain_substitute"](K @ K.T, rates, X - K @ S.T)


@pytest.mark.parametrize("answer", [by_dense_solve, by_doubling])
def test_a_solve_without_a_loop_passes(answer):
    space = shared_space()
    assert space["check_shared"](answer) == "right"
    assert space["check_shared"](space["solve_shared"]) == "right"


@pytest.mark.parametrize(
    "answer, words",
    [
        (shared_by_loop, "a loop over rows: 8 rows take"),
        (lambda K, X, e, S: e * (X - K @ S.T), "not close"),
    ],
)
def test_another_solve_is_refused(answer, words):
    assert_refused(shared_space()["check_shared"], answer, words)
