"""Other blocks, segments, checkpoint spacings and lane layouts of the scan kernels: none won.

    python kernels/variants/plans.py [--out FILE.json]      # about two minutes on an H200

Each variant is checked against the default plan before it is timed (forward / backward, ms, as in
kernels/bench.py).
"""

import argparse
import dataclasses
import json
import pathlib

import torch
import triton
from shared import SHAPES, inputs
from triton.testing import do_bench

from longhorn_kit.scan.triton import op as triton_op

PORTABLE = [
    dict(segment=0),
    dict(segment=128),
    dict(segment=512),
    dict(block=16),
    dict(block=32),
    dict(block=64),
    dict(checkpoint_every=4),
    dict(checkpoint_every=16),
    dict(checkpoint_every=32),
]
EXACT = [dict(block=8), dict(block=16), dict(block=32), dict(block=64), dict(checkpoint_every=16)]
FAST_FORWARD = [
    dict(BD=32, warps=1),
    dict(BD=64, warps=2),
]  # one lane a channel / two lanes a channel


def run(plan, backward_plan, forward, backward, a, dout):
    out, final, ckpt = forward(plan, *a.values(), None, None)
    return (
        out,
        lambda: forward(plan, *a.values(), None, None),
        lambda: backward(backward_plan, dout, None, ckpt, *a.values(), None),
    )


def measure(shape, form, path, change):
    "Largest relative difference from the default plan, and milliseconds (forward, backward)."
    B, T, D, N = SHAPES[shape]
    a, _, dout, _ = inputs(*SHAPES[shape], form)
    if path == "portable":
        plan, forward, backward = triton_op._path_kernels("portable", form)

        def make(way, **kw):
            return triton_op.portable_plan(form, B, T, D, N, direction=way, **kw)

        plans = [[make(way), make(way, **change)] for way in ("forward", "backward")]
    else:
        plan, forward, backward = triton_op._path_kernels(form, form)
        plans = [[plan(B, T, D, N, None, way)] * 2 for way in ("forward", "backward")]
        plans[0][1] = dataclasses.replace(plans[0][1], **change)
    (f0, f1), (b0, b1) = plans
    right, _, back0 = run(f0, b0, forward, backward, a, dout)
    out, ahead, back = run(f1, b1, forward, backward, a, dout)
    pairs = [(out, right), *((x, y) for x, y in zip(back(), back0()) if x is not None)]
    difference = max(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in pairs)
    if not difference < 1e-2:
        raise SystemExit(f"{shape} {form} {path} {change} is wrong by {difference:.1e}: no time")
    return difference, [
        round(do_bench(f, warmup=5, rep=25, return_mode="median"), 3) for f in (ahead, back)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    for shape in ("S1", "S3"):
        cases = [("diagonal", "portable", c) for c in PORTABLE] + [
            ("exact", "portable", c) for c in EXACT if shape == "S1"
        ]
        cases += [("diagonal", "fast", c) for c in FAST_FORWARD]
        for form, path, change in cases:
            difference, ms = measure(shape, form, path, change)
            rows.append(
                dict(
                    shape=shape,
                    form=form,
                    kernels=path,
                    change=change,
                    forward_ms=ms[0],
                    backward_ms=ms[1],
                )
            )
            print(
                f"{shape} {form:<8} {path:<8} {str(change):<28} {ms[0]:7.3f} / {ms[1]:7.3f} ms   "
                f"difference {difference:.0e}",
                flush=True,
            )
            torch.cuda.empty_cache()
    if args.out:
        record = dict(
            gpu=torch.cuda.get_device_name(0),
            torch=torch.__version__,
            triton=triton.__version__,
            command="python kernels/variants/plans.py",
            seed=0,
            rows=rows,
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
