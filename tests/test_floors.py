"""The counts behind lower bounds agree with tensors, compiled kernels, and each other."""

import json
import pathlib
import sys

import pytest
import torch

from longhorn_kit.scan.op import longhorn_scan

KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
sys.path.insert(0, str(KERNELS))
from floors import (
    code_floors,
    row_floors,
    scan_bytes,
    scan_floors,
    scan_operations,
    scan_products,
    scan_specials,
)

RESULTS = KERNELS / "results"
RATES = dict(bytes=4e12, operations=30e12, specials=4e12, products=400e12)


@pytest.mark.parametrize("dtype, gated", [(torch.bfloat16, True), (torch.float32, False)])
def test_bytes_are_those_of_the_tensors_of_a_call(dtype, gated):
    B, T, D, N = 2, 8, 6, 4

    def new(*s):
        return torch.randn(s).to(dtype).requires_grad_()

    q = new(B, T, N)
    k = new(B, T, N)
    x = new(B, T, D)
    b = new(B, T, D)
    z = new(B, T, D) if gated else None
    given = [t for t in (q, k, x, b, z) if t is not None]
    out = longhorn_scan(q, k, x, b, z=z)
    grads = torch.autograd.grad(out, given, torch.ones_like(out))

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    sizes = dict(z=gated, itemsize=x.element_size(), kept=0.0)
    expected = size([*given, out])
    assert scan_bytes(B, T, D, N, **sizes) == expected
    assert scan_bytes(B, T, D, N, "backward", **sizes) == size(
        [*given, out, *grads]
    )  # dout is as large as out
    states = 4 * B * D * N * T // 4  # one fp32 state every 4 steps
    result = scan_bytes(B, T, D, N, **sizes | dict(kept=4 * N / 4))
    expected = size([*given, out]) + states
    assert result == expected


def test_the_diagonal_count_is_that_of_its_compiled_kernel():
    rows = json.loads((RESULTS / "sm_90.json").read_text())["rows"]
    results = {
        r["kernel"]: r["instructions_per_step"]
        for r in rows
        if r["case"] == "fast diagonal" and r["instructions_per_step"]
    }
    for kernel, way in (("_diagonal_fwd_kernel", "forward"), ("_diagonal_bwd_kernel", "backward")):
        counted = (
            results[kernel]["fp32"] + results[kernel]["other"]
        )  # conversions are not fp32 instructions
        assert 0.8 < scan_operations("diagonal", 16, way) / counted < 1.25
    assert scan_specials("diagonal", 16) == results["_diagonal_fwd_kernel"]["special"]


def test_exact_by_products_is_the_least_work_and_the_floor_is_the_largest_part():
    assert (
        scan_operations("exact", 16, chunk=16)
        < scan_operations("exact", 16)
        < scan_operations("diagonal", 16)
    )
    assert (
        scan_products("exact", 16, chunk=16)
        > 0
        == scan_products("exact", 16)
        == scan_products("diagonal", 16, chunk=16)
    )
    floors = scan_floors("s6", 8, 2048, 2048, 16, "forward", RATES)
    assert max(floors, key=floors.get) == "specials"


def test_floors_of_the_code_add_up_over_kernels():
    """A scheduler issues at most one instruction per cycle for 32 lanes.

    Four schedulers share one pipe."""
    cycle = 1e3 * 32 / RATES["operations"]  # milliseconds per instruction, over all schedulers
    counts = [
        dict(total=60, wavefronts=7),
        dict(total=40),
    ]  # the second bound is for a record without wavefronts
    assert code_floors(1, 32, 32, counts, RATES) == pytest.approx(
        dict(issue=32 * 100 * cycle, wavefronts=32 * 4 * 7 * cycle)
    )


PLAIN = dict(
    B=8,
    T=2048,
    D=2048,
    N=16,
    form="diagonal",
    kernels="diagonal",
    shape="S1",
    z=True,
    state=False,
    checkpoint="fast",
    dtype="bfloat16",
    kept_bytes_per_x=4.0,
)


def test_the_floors_of_a_row_have_its_states_and_the_code_of_its_kernels():
    def count(case, way, n):
        return dict(case=case, way=way, instructions_per_step=n and dict(total=n, wavefronts=1.0))

    compiled = dict(
        rows=[count("fast diagonal", "backward", n) for n in (100, 300, None)]
        + [
            count("fast diagonal", "forward", 7),
            count("fast diagonal S2", "backward", 7),
            count("fast exact", "backward", 7),
        ]
    )
    size = 8, 2048, 2048
    floors = row_floors(PLAIN, "backward", RATES, compiled)
    expected = code_floors(*size, [dict(total=400)], RATES)["issue"]
    assert floors["issue"] == expected
    expected = 1e3 * scan_bytes(*size, 16, "backward", kept=4.0) / RATES["bytes"]
    assert floors["bytes"] == expected
    for other in (
        dict(kernels="portable"),
        dict(z=False),
        dict(dtype="float32"),
        dict(shape="S1, T=2041"),
        dict(N=64),
    ):
        assert "issue" not in row_floors(PLAIN | other, "backward", RATES, compiled)
    assert "issue" not in row_floors(PLAIN, "backward", RATES)


def test_a_ragged_width_is_planned_like_the_next_whole_block():
    from longhorn_kit.scan.triton.diagonal import diagonal_plan

    for direction in ("forward", "backward"):
        for D in (256, 2048, 4096, 16384):
            ragged, whole = (
                diagonal_plan(8, 4096, width, 16, direction=direction) for width in (D - 8, D)
            )
            assert ragged.segmented == whole.segmented
            assert ragged.LS == whole.LS
            assert ragged.BD == whole.BD
