"""The exact forward with other shares of shared memory and L1 cache, by width and ring.

    python kernels/variants/exact_cache.py [--out FILE.json]      # about two minutes on an H200

Copies of less than 16 bytes, needed for widths that are not a multiple of 8, pass through the L1
cache, which gets the memory of a multiprocessor that shared memory leaves free. In column `driver`
nothing is requested. The other columns are requests, in per cent of 228 KiB; the driver takes the
next of its settings (100, 132, 164, 196 KiB). Each ring is compared with the default before it is
timed.
"""

import argparse
import json
import pathlib
from unittest.mock import patch

import torch
import triton
from shared import SHAPES, inputs
from triton.testing import do_bench_cudagraph

from longhorn_kit.records import commit_of_kit
from longhorn_kit.scan.triton import exact as triton_exact

SIZES = {
    f"{name}, D={D}": (*SHAPES[name][:2], D, 16)
    for name, widths in (
        ("S1", (2048, 2040, 2044, 2046)),
        ("S2", (1536, 1532)),
        ("S3", (4096, 4092)),
    )
    for D in widths
}
PERCENT = {"driver": -1, "100": 30, "132": 44, "164": 58, "196": 72}
RINGS = (3, 4, 6)


def divide(percent):
    "Express a wish for every exact forward that has been compiled."
    for kernels, *_ in triton_exact._exact_fwd_kernel.device_caches.values():
        for kernel in kernels.values():
            triton_exact._divide(kernel, percent)


def measure(size, slots):
    "Milliseconds for each division, the better of two rounds."
    B, T, D, N = SIZES[size]
    a = inputs(B, T, D, N, "exact")[0]
    plan = triton_exact.exact_plan(B, T, D, N)

    def forward():
        return triton_exact.exact_forward(plan, *a.values(), None, None)

    right = forward()[0]
    found = {name: [] for name in PERCENT}
    with patch.object(triton_exact, "_ring", lambda plan: slots):
        if (
            not (
                difference := (
                    (forward()[0].float() - right.float()).norm() / right.float().norm()
                ).item()
            )
            < 5e-3
        ):
            raise SystemExit(f"{size} with {slots} slots is wrong by {difference:.1e}: no time")
        for name, percent in 2 * list(PERCENT.items()):
            divide(percent)
            found[name].append(do_bench_cudagraph(forward, rep=20, return_mode="median"))
    return {name: round(min(ms), 4) for name, ms in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    triton_exact._leave_to_cache = lambda kernel, programs: None  # the default's own wish
    rows = []
    for size in SIZES:
        for slots in RINGS:
            rows.append(dict(size=size, slots=slots, forward_ms=measure(size, slots)))
            print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    if args.out:
        record = dict(
            gpu=torch.cuda.get_device_name(0),
            torch=torch.__version__,
            triton=triton.__version__,
            commit=commit_of_kit(),
            command="python kernels/variants/exact_cache.py",
            seed=0,
            rows=rows,
        )
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
