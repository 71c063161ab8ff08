"""Measure a GPU's rates: bytes, fp32 operations, special functions and bfloat16 products.

The lower bounds of `floors.py` divide work by these rates. The kernels are plain Triton, so the
interpreter runs them too.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(to_ptr, from_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + i, tl.load(from_ptr + i))


@triton.jit
def _operations_kernel(out_ptr, steps, BLOCK: tl.constexpr):
    # Run independent chains of fused multiply-adds. Every lane has several chains, so that the
    # latency of one chain is hidden.
    i = tl.arange(0, BLOCK)
    v = i.to(tl.float32)
    for _turn in range(steps):
        for _step in tl.static_range(16):
            v = v * 0.999 + 0.5
    tl.store(out_ptr + tl.program_id(0) * BLOCK + i, v)


@triton.jit
def _specials_kernel(out_ptr, steps, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = i.to(tl.float32) / BLOCK
    for _turn in range(steps):
        for _step in tl.static_range(16):
            v = tl.exp2(-v)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + i, v)


def measure_rates(milliseconds, device, small=False):
    """Return the rates per second.

    They are `bytes` (read plus written), `operations`, `specials` and `products` (multiply-adds of
    a matrix product)."""
    programs, block, steps, size, side = (
        (2, 64, 1, 1 << 12, 16) if small else (132 * 64, 1024, 64, 1 << 29, 8192)
    )
    source = torch.randn(size // 2, device=device).bfloat16().repeat(2)
    target = torch.empty_like(source)
    out = torch.empty(programs * block, device=device)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    work = {
        "bytes": (4 * size, lambda: _copy_kernel[(size // 2048 or 1,)](target, source, BLOCK=2048)),
        "operations": (
            programs * block * steps * 16,
            lambda: _operations_kernel[(programs,)](out, steps, BLOCK=block),
        ),
        "specials": (
            programs * block * steps * 16,
            lambda: _specials_kernel[(programs,)](out, steps, BLOCK=block),
        ),
        "products": (side**3, lambda: a @ b),
    }
    rates = {}
    for name, (amount, run) in work.items():
        run()
        if name == "bytes" and not torch.equal(source, target):
            raise SystemExit("rates: the copy is wrong")
        rates[name] = float(f"{1e3 * amount / milliseconds(run):.4g}")
    return rates
