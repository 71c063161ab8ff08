"""What the scripts of this folder share: shapes, inputs of a scan, the official kernels' times."""

import pathlib
import sys

KERNELS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(KERNELS.parent), str(KERNELS), str(KERNELS.parent / "tests")]

import torch

if not torch.cuda.is_available():
    raise SystemExit(f"{pathlib.Path(sys.argv[0]).name}: no GPU here")

from bench_gpu import ANCHORS, Case, draw
from bench_gpu import SHAPES as BTD

SHAPES = {name: (*shape, 16) for name, shape in BTD.items()}  # B, T, D, N
OFFICIAL = ANCHORS["official_longhorn_cuda"]  # (forward, backward) in ms on one H200, diagonal


def inputs(B, T, D, N, form="diagonal", dtype="bfloat16", seed=0):
    """(arguments up to z in the operation's order, dict(A=...) for S6, gradient of the output, a
    state)."""
    a, dout, state, _ = draw(Case("variants", "", B, T, D, N, form, dtype=dtype, state=True), seed)
    a.pop("initial_state")
    A = a.pop("A")
    return a, {} if A is None else dict(A=A), dout, state
