"""Test the teaching kernels of pages 13 and 14, and the layouts of Gluon's page."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl

from sweep import slow_case

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "kernels"))
import rungs  # noqa: E402

PAGES = ("13_triton_diagonal", "14_triton_exact", "17_gluon")
CALL = re.compile(r"\b(?:tl|triton)\.[a-z_0-9]+(?=\()")
LONGEST = 40  # lines of a kernel that readers can write


def code_cells(page):
    cells = json.loads((ROOT / f"nbs/scan/{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("page", PAGES)
def test_no_kernel_of_a_ladder_is_longer_than_a_reader_would_write(page):
    kernels = 0
    for source in code_cells(page):
        if ".jit\n" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                kernels += 1
                assert node.end_lineno - node.lineno < LONGEST, node.name
    assert kernels >= 5


@pytest.mark.parametrize("form", ("exact", slow_case("diagonal")))
def test_rungs_are_right_in_the_script_that_times_them(form):
    errors = rungs.check((form,))
    assert len(errors) >= 3
    assert max(errors.values()) < 1e-5


def test_a_wrong_rung_is_not_timed(monkeypatch):
    def wrong(page, q, k, x, b, dy):
        return {"y": torch.full_like(x, float("nan"))}

    monkeypatch.setattr(rungs, "RUNGS", [("exact", "wrong", wrong, ["S1"])])
    with pytest.raises(SystemExit, match="nothing is timed"):
        rungs.check(("exact",))


KERNEL_PAGES = ("12_triton_primer", "12b_triton_puzzles", *PAGES[:2])


@pytest.mark.parametrize("page", KERNEL_PAGES)
def test_the_primer_lists_every_call_of_the_pages_on_kernels(page):
    cells = json.loads((ROOT / "nbs/scan/12_triton_primer.ipynb").read_text(encoding="utf-8"))
    texts = ["".join(cell["source"]) for cell in cells["cells"]]
    (text,) = (text for text in texts if "## The calls of Triton" in text)
    listed = set(CALL.findall(text.partition("## The calls of Triton")[2]))
    used = set(CALL.findall("\n".join(code_cells(page))))
    assert len(used) > 10
    assert used <= listed


COUNT_SHUFFLES = """
import sys
sys.path.insert(0, "kernels")
import aot, rungs, torch, triton

def shuffles(launcher):
    (launch,) = aot.record(launcher)
    options = {"num_warps": launch[2]["num_warps"]}
    built = triton.compile(aot.source(*launch), target=aot.TARGETS["sm_90"], options=options)
    return built.asm["ptx"].count("shfl.")

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

B, T, D, N = 2, 64, 64, 16
q, k, x, b, y = (meta(B, T, size) for size in (N, N, D, D, D))
state = meta(B, D, N, dtype=torch.float32)
kept = meta(B, T // 16, D, N, dtype=torch.float32)
diagonal = rungs.page_module("diagonal")
exact = rungs.page_module("exact")
print(shuffles(lambda: diagonal.by_tile(q, k, x, b, y)))
print(shuffles(lambda: diagonal.with_states(q, k, x, b, state, y, kept, state, C=16)))
print(shuffles(lambda: exact.by_step(q, k, x, b, state, y, state)))
"""


@pytest.mark.slow
def test_a_state_in_memory_spreads_a_channel_over_lanes_as_page_13_says():
    environment = os.environ | {"PYTHONPATH": str(rungs.ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COUNT_SHUFFLES]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=rungs.ROOT, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    tile, states, step = map(int, run.stdout.split())
    assert tile == 0
    assert states == 10
    assert step == 20


def page_owners():
    "Return the function `owners` of the page on Gluon."
    space = {"np": np}
    (source,) = (cell for cell in code_cells("17_gluon") if cell.startswith("def owners("))
    exec(source, space)
    return space["owners"]


def compiled_owners(layout, shape):
    "Return the lane and register of every element in Triton's compiler."
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    lane = np.full(shape, -1)
    register = np.full(shape, -1)
    for r in reversed(range(2 ** len(linear.reg_bases))):  # the first owner is written last
        for one in reversed(range(2 ** len(linear.lane_bases))):
            at = np.zeros(len(shape), int)
            for number, bases in ((r, linear.reg_bases), (one, linear.lane_bases)):
                for bit, base in enumerate(bases):
                    if number >> bit & 1:
                        at ^= np.array(base)
            lane[tuple(at)] = one
            register[tuple(at)] = r
    return lane, register


@pytest.mark.parametrize(
    "lists, shape",
    [
        (([16, 1], [1, 32], [1, 1], [1, 0]), (16, 32)),
        (([1, 4], [4, 8], [1, 1], [1, 0]), (16, 32)),
        (([1, 16], [32, 1], [1, 1], [1, 0]), (16, 16)),
        (([1, 16], [32, 1], [1, 1], [1, 0]), (32, 16)),
        (([1, 8], [4, 8], [1, 1], [1, 0]), (16, 64)),
        (([2, 2], [8, 4], [1, 1], [0, 1]), (32, 32)),
    ],
)
def test_the_page_on_gluon_draws_the_layouts_of_the_compiler(lists, shape):
    layout = gl.BlockedLayout(*lists)
    expected = compiled_owners(layout, shape)
    for result, correct in zip(page_owners()(layout, shape), expected, strict=True):
        assert (result == correct).all()
