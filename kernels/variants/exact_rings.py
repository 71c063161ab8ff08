"""The exact kernels with other rings of copies, and few channels spread otherwise: why neither won.

    python kernels/variants/exact_rings.py [--out FILE.json]      # under a minute on an H200

A ring of n slots has n - 1 chunks on their way from memory. Each variant is compared with the
default before it is timed (forward / backward, ms, as in kernels/bench.py). In the backward two
slots beat three at S1 and S2: a chunk takes longer than a copy, the slot's number is one bit, and
at S2 one more program finds room on a multiprocessor.
"""

import argparse
import json
import pathlib

import torch
import triton
from shared import SHAPES, inputs
from triton.testing import do_bench

from longhorn_kit.scan.triton import exact as triton_exact
from longhorn_kit.scan.triton import exact_backward as triton_exact_backward

RINGS = dict(forward=(3, 4, 5, 6, 8), backward=(2, 3, 4))
# also rows that do not start at a sector of memory, and copies of 8 bytes
SIZES = SHAPES | {f"S1, D={D}": (*SHAPES["S1"][:2], D, 16) for D in (2040, 2044)}
modules = dict(forward=triton_exact, backward=triton_exact_backward)
default_ring = {way: module._ring for way, module in modules.items()}


def run(shape, rings, few):
    """Forward and backward as functions, with the given rings and the given choice for few
    channels (None: the default)."""
    B, T, D, N = SIZES[shape]
    a, _, dout, _ = inputs(B, T, D, N, "exact")
    plans = [
        triton_exact.exact_plan(B, T, D, N, None, way, few=few) for way in ("forward", "backward")
    ]

    def with_ring(f):
        for way, module in modules.items():
            module._ring = lambda plan, way=way: rings.get(way) or default_ring[way](plan)
        try:
            return f()
        finally:
            for way, module in modules.items():
                module._ring = default_ring[way]

    def forward():
        return with_ring(lambda: triton_exact.exact_forward(plans[0], *a.values(), None, None))

    ckpt = forward()[2]

    def backward():
        return with_ring(
            lambda: triton_exact_backward.exact_backward(
                plans[1], dout, None, ckpt, *a.values(), None
            )
        )

    return forward, backward


def measure(shape, right, rings, few=None):
    "Largest relative difference from the default, and milliseconds (forward, backward)."
    forward, backward = run(shape, rings, few)
    results = [t for t in (forward()[0], *backward()) if t is not None]
    difference = max(
        ((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(results, right)
    )
    if not difference < 5e-3:
        raise SystemExit(f"{shape} {rings} few={few} is wrong by {difference:.1e}: no time")
    return difference, [
        round(do_bench(f, warmup=5, rep=25, return_mode="median"), 4) for f in (forward, backward)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    for shape in SIZES:
        forward, backward = run(shape, {}, None)
        right = [t for t in (forward()[0], *backward()) if t is not None]
        variants = [({}, None)] + [
            ({way: n}, None) for way, depths in RINGS.items() for n in depths
        ]
        variants.append(({}, shape != "S3"))  # the other choice for few channels
        for rings, few in variants:
            difference, ms = measure(shape, right, rings, few)
            rows.append(
                dict(shape=shape, rings=rings, few=few, forward_ms=ms[0], backward_ms=ms[1])
            )
            what = str(rings) if rings else "default rings"
            print(
                f"{shape} {what:<16} few={few!s:<5} {ms[0]:7.4f} / {ms[1]:7.4f} ms   "
                f"difference {difference:.0e}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if args.out:
        record = dict(
            gpu=torch.cuda.get_device_name(0),
            torch=torch.__version__,
            triton=triton.__version__,
            command="python kernels/variants/exact_rings.py",
            seed=0,
            rows=rows,
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
