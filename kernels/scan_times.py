"""Times of the scan kernels on one GPU, after a check of every output and gradient; writes one small JSON file.

    python kernels/scan_times.py --out kernels/results/h200_scan.json      # about three minutes on an H200

Whole forward (with the states kept for the backward) and whole backward (with every reduction), bfloat16 in and out, gate
and skip, median of triton.testing.do_bench. A wrong result stops the run: no time is reported for it.
"""
import argparse
import json
import pathlib
import platform
import subprocess
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(__file__).resolve().parents[1] / "tests")]

import torch
import triton
from triton.testing import do_bench

from longhorn_kit.scan import triton_op
from scan_cases import TOLERANCE, errors

SHAPES = dict(S1=(8, 2048, 2048, 16), S2=(24, 1024, 1536, 16), S3=(1, 32768, 4096, 16))      # B, T, D, N
OFFICIAL = dict(S1=(0.862, 2.70), S2=(0.936, 2.88), S3=(4.24, 13.97))                        # CUDA, diagonal, same GPU model
MAMBA = dict(S1=(0.591, 2.32), S2=(0.635, 2.59), S3=(3.01, 10.2))                            # CUDA, S6


def parity(form, path):
    "Largest error of an output or gradient at a small odd shape; raises if any is too large."
    triton_op.FAST = path == "fast"
    worst = 0.0
    for shape in ((2, 300, 136, 16), (1, 1100, 64, 16)):
        found = errors(*shape, form, dtype=torch.bfloat16)
        worst = max(worst, *found.values())
        if not worst < TOLERANCE[torch.bfloat16]:
            raise SystemExit(f"{form} ({path}) is wrong, no times: {found}")
    return worst


def inputs(B, T, D, N, form):
    new = lambda *s: torch.randn(*s, device="cuda")
    low = lambda *s: new(*s).bfloat16()
    a = dict(q=(new(B, T, N) / 2).bfloat16(), k=(new(B, T, N) / 2).bfloat16(), x=low(B, T, D), b=low(B, T, D), bias=new(D),
             skip=new(D), z=low(B, T, D))
    A = dict(A=-torch.rand(D, N, device="cuda") - 0.1) if form == "s6" else {}
    return a, A, low(B, T, D), new(B, D, N)


def times(shape, form, path, z=True, state=False):
    "Milliseconds of (forward, backward), and bytes kept for the backward per element of x."
    torch.manual_seed(0)
    B, T, D, N = shape
    a, A, dout, h0 = inputs(*shape, form)
    a["z"] = a["z"] if z else None
    triton_op.FAST = path == "fast"
    name = triton_op.scan_path(form, a["q"], a["k"], a["x"])
    plan, forward, backward = triton_op._path_kernels(name, form)
    ahead, back = plan(B, T, D, N, None, "forward"), plan(B, T, D, N, None, "backward")
    h0 = h0 if state else None
    run = lambda: forward(ahead, *a.values(), h0, None, **A)
    ckpt = run()[2]
    again = lambda: backward(back, dout, h0, ckpt, *a.values(), None, **A)
    again()
    timed = [do_bench(f, warmup=10, rep=60, return_mode="median") for f in (run, again)]
    return name, timed, ckpt.numel() * 4 / a["x"].numel()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default=None, help="what to record where there is no git")
    args = parser.parse_args()
    commit = args.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows, checks = [], {}
    cases = [(s, form, path, True, False) for path, forms in
             (("fast", ("diagonal", "exact")), ("portable", ("diagonal", "exact", "decoupled", "s6"))) for form in forms for s in SHAPES]
    cases += [("S1", form, "fast", z, state) for form in ("diagonal", "exact") for z, state in ((False, False), (True, True))]
    extra = dict(S1=SHAPES["S1"], **{"S1, T=2041": (8, 2041, 2048, 16), "S1, D=2040": (8, 2048, 2040, 16),
                                     "S1, N=32": (8, 2048, 2048, 32), "S1, N=64": (8, 2048, 2048, 64)})
    cases += [(s, form, "fast", True, False) for form in ("diagonal", "exact") for s in extra if s != "S1"]
    for name, form, path, z, state in cases:
        if (form, path) not in checks:
            checks[form, path] = parity(form, path)
        shape = {**SHAPES, **extra}[name]
        ran, (forward, backward), kept = times(shape, form, path, z, state)
        row = dict(shape=name, B=shape[0], T=shape[1], D=shape[2], N=shape[3], form=form, kernels=ran, z=z, state=state,
                   forward_ms=round(forward, 4), backward_ms=round(backward, 4), kept_bytes_per_x=round(kept, 2))
        rows.append(row)
        rival = (MAMBA if form == "s6" else OFFICIAL).get(name)
        against = "" if rival is None else f"  x{rival[0] / forward:.2f} / x{rival[1] / backward:.2f} of CUDA"
        print(f"{name:<11} {form:<10} {ran:<9} z={z!s:<5} state={state!s:<5} {forward:7.3f} / {backward:7.3f} ms{against}", flush=True)
        torch.cuda.empty_cache()
    record = dict(gpu=torch.cuda.get_device_name(0), python=platform.python_version(), torch=torch.__version__,
                  triton=triton.__version__, commit=commit, command="python kernels/scan_times.py",
                  seed=0, dtype="bfloat16", measure="median of triton.testing.do_bench, warmup 10 ms, repeat 60 ms",
                  worst_error={f"{form} {path}": float(f"{e:.2e}") for (form, path), e in checks.items()},
                  others_measured_before=dict(official_longhorn_cuda=OFFICIAL, mamba_cuda=MAMBA), rows=rows)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
