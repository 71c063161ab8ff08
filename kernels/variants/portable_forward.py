"""The portable forward with other block sizes, and the cost of its memory mode.

    python kernels/variants/portable_forward.py [--out FILE.json]

Takes about two minutes on an H200, most of it the compiler's. Each is checked against the default
plan, then timed: forward / backward in ms as in kernels/bench.py. "small" lines time the whole
operation with one byte an element kept (`checkpoint="small"`) against the default, for the portable
and the fast kernels.
"""

import argparse
import functools
import json
import pathlib

import torch
import triton
from shared import OFFICIAL, SHAPES, inputs
from triton.testing import do_bench

from longhorn_kit.scan.triton import op as triton_op
from longhorn_kit.scan.triton.portable import portable_forward, portable_plan
from longhorn_kit.scan.triton.portable_backward import portable_backward

BLOCKS = {"exact": (16, 32), "diagonal": (32, 64), "decoupled": (32, 64), "s6": (32, 64)}


def median(f):
    return round(do_bench(f, warmup=5, rep=30, return_mode="median"), 3)


def apart(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def blocks(shape, form):
    "Rows: forward times for each block size, the default's backward with the first."
    a, A, dout, _ = inputs(*SHAPES[shape], form)
    B, T, D, N = SHAPES[shape]
    extra = A.get("A")
    rows = []

    def run(plan):
        return portable_forward(plan, *a.values(), extra, None, None)

    plan = portable_plan(form, B, T, D, N)
    right, _, ckpt = run(plan)
    back = portable_plan(form, B, T, D, N, direction="backward")
    backward = median(lambda: portable_backward(back, dout, None, ckpt, *a.values(), extra, None))
    for block in BLOCKS[form]:
        other = portable_plan(form, B, T, D, N, block=block)
        difference = apart(run(other)[0], right)
        if not difference < 1e-2:
            raise SystemExit(f"{shape} {form} block {block} is wrong by {difference:.1e}: no time")
        rows.append(
            dict(
                shape=shape,
                form=form,
                what=f"block {block}" + (" (default)" if other == plan else ""),
                forward_ms=median(functools.partial(run, other)),
                backward_ms=backward if other == plan else None,
            )
        )
    return rows


def memory(shape, form, path):
    "Rows: forward and backward of the operation with what the fastest and the small mode keep."
    triton_op.FAST = path == "fast"
    a, _, dout, _ = inputs(*SHAPES[shape], form)
    leaf = {n: t.detach().requires_grad_() for n, t in a.items()}
    rows = []
    grads = {}
    for checkpoint in ("fast", "small"):
        options = dict(form=form, checkpoint=checkpoint)
        run = functools.partial(triton_op.triton_scan, *leaf.values(), **options)
        out, _ = run()
        into = (list(leaf.values()), dout)
        back = functools.partial(torch.autograd.grad, out, *into, retain_graph=True)
        grads[checkpoint] = back()
        rows.append(
            dict(
                shape=shape,
                form=form,
                what=f"{path}, checkpoint={checkpoint}",
                forward_ms=median(run),
                backward_ms=median(back),
            )
        )
    worst = max(apart(s, f) for s, f in zip(grads["small"], grads["fast"]))
    if not worst < 1e-2:
        raise SystemExit(
            f"{shape} {form} {path}: gradients of the small mode are off by {worst:.1e}: no time"
        )
    first, second = (r["forward_ms"] + r["backward_ms"] for r in rows)
    rows[-1]["against_fast"] = round(second / first, 3)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    jobs = [lambda s=s, f=f: blocks(s, f) for f in BLOCKS for s in SHAPES]
    jobs += [
        lambda s=s, f=f, p=p: memory(s, f, p)
        for p in ("fast", "portable")
        for f in ("diagonal", "exact")
        for s in SHAPES
    ]
    for job in jobs:
        for row in job():
            rows.append(row)
            rival = OFFICIAL[row["shape"]]
            against = (
                f"  {row['against_fast']:.2f} of fast"
                if "against_fast" in row
                else f"  x{rival[0] / row['forward_ms']:.2f} of CUDA"
            )
            times = f"{row['forward_ms']:7.3f} / {row['backward_ms'] or '':>7} ms"
            print(f"{row['shape']} {row['form']:<9} {row['what']:<28} {times}{against}", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        record = dict(
            gpu=torch.cuda.get_device_name(0),
            torch=torch.__version__,
            triton=triton.__version__,
            command="python kernels/variants/portable_forward.py",
            seed=0,
            rows=rows,
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
