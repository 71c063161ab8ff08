"""The fast diagonal forward with everything overlapped: checked against the one that won, timed.

    python kernels/variants/diagonal_pipelined.py      # well under a minute on an H200

The idea: with two sets of shared buffers, one stretch of code without a barrier holds the steps of
a chunk, what the next chunk needs (rates, conversions) and the output of the chunk before, so that
a lone warp always has something to issue. The compiler does interleave them. Slower all the same,
wherever it was measured (one H200, triton 3.6, ms, without segments):

    S1 0.253 against 0.217, S2 0.281 against 0.253 (4 warps, 64 channels)
    S3 2.27 against 1.78 (4 warps, 32 channels)

Two chunks with all their steps unrolled are one loop of 1000 to 1900 instructions, against 620 with
a loop of 350 inside. The likely reason is the instruction cache: in the backward, too, halving the
loop's body made it faster though it does more work.
"""

import functools
import sys

import torch
from shared import SHAPES, inputs
from torch import empty
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.testing import do_bench

from longhorn_kit.scan.triton.diagonal import diagonal_forward, diagonal_plan
from longhorn_kit.scan.triton.diagonal_forward import _rate, _tile_out
from longhorn_kit.scan.triton.gluon import LOG2E, _stack8

CHUNK = gl.constexpr(16)


@gluon.jit
def _sixteen_steps(S, se, sx, sk, sq, sy, ckpt, nd, D):
    # Equation (1) sixteen times, a checkpoint every eight; `sy` is (2, 8, warps, channels).
    N: gl.constexpr = S.shape[0]
    BD: gl.constexpr = S.shape[1]
    NW: gl.constexpr = sy.shape[2]
    OVER_N: gl.constexpr = gl.SliceLayout(1, S.type.layout)
    OVER_D: gl.constexpr = gl.SliceLayout(0, S.type.layout)
    halves = ()
    for h in gl.static_range(2):
        gl.store(ckpt + h * N * D + nd, S)
        ys = ()
        for u in gl.static_range(8):
            kn = sk.index(8 * h + u).load(OVER_N)[:, None]
            ek = kn * se.index(8 * h + u).load(OVER_D)[None, :]
            S = S + ek * (sx.index(8 * h + u).load(OVER_D)[None, :] - kn * S)
            qS = sq.index(8 * h + u).load(OVER_N)[:, None] * S
            ys = ys + (gl.sum(gl.reshape(qS, [NW, N // NW, BD]), 1),)
        halves = halves + (_stack8(ys),)
    sy.store(gl.permute(gl.join(halves[0], halves[1]), (3, 0, 1, 2)))
    return S


@gluon.jit
def _buffers(N: gl.constexpr, BD: gl.constexpr, NW: gl.constexpr):
    # One set: eps, x, k, q, y as tiles.
    rows2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    return (
        gl.allocate_shared_memory(gl.float32, [CHUNK, BD], rows2),
        gl.allocate_shared_memory(gl.float32, [CHUNK, BD], rows2),
        gl.allocate_shared_memory(gl.float32, [CHUNK, N], rows2),
        gl.allocate_shared_memory(gl.float32, [CHUNK, N], rows2),
        gl.allocate_shared_memory(gl.float32, [2, 8, NW, BD], rows4),
    )


@gluon.jit
def _rows(tile, WIDTH: gl.constexpr):
    return tile._reinterpret(gl.float32, [CHUNK, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _tile_in(x, b, k, q, bias, se, sx, sk, sq):
    kf = k.to(gl.float32)
    kk = gl.convert_layout(gl.sum(kf * kf, 1), gl.SliceLayout(1, x.type.layout))[:, None]
    se.store(_rate(b, bias, kk, None, False))
    sx.store(x.to(gl.float32))
    sk.store(kf)
    sq.store(q.to(gl.float32))


@gluon.jit
def _pipelined_fwd_kernel(
    x,
    b,
    z,
    k,
    q,
    bias,
    skip,
    out,
    ckpt,
    hT,
    T,
    D,
    N: gl.constexpr,
    BD: gl.constexpr,
    NW: gl.constexpr,
):
    STATE: gl.constexpr = gl.BlockedLayout([N // NW, BD // 32], [1, 32], [NW, 1], [1, 0])
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BD, BD // 4], [NW, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [NW, 1], [1, 0])
    PARTS: gl.constexpr = gl.BlockedLayout(
        [1, NW, 4], [128 // BD, 1, BD // 4], [NW, 1, 1], [2, 1, 0]
    )
    rows3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    pd = gl.program_id(0)
    batch = gl.program_id(1).to(gl.int64)
    d2 = pd * BD + gl.arange(0, BD, gl.SliceLayout(0, STATE))
    n2 = gl.arange(0, N, gl.SliceLayout(1, STATE))
    nd = n2[:, None] * D + d2[None, :]
    dT = pd * BD + gl.arange(0, BD, gl.SliceLayout(0, TILE))
    oT = gl.arange(0, CHUNK, gl.SliceLayout(1, TILE))[:, None] * D + dT[None, :]
    oK = (
        gl.arange(0, CHUNK, gl.SliceLayout(1, KEYS))[:, None] * N
        + gl.arange(0, N, gl.SliceLayout(0, KEYS))[None, :]
    )
    bi = -LOG2E * gl.load(bias + dT)[None, :]
    ds = gl.load(skip + dT)[None, :]
    se0, sx0, sk0, sq0, sy0 = _buffers(N, BD, NW)
    se1, sx1, sk1, sq1, sy1 = _buffers(N, BD, NW)
    ry0 = sy0._reinterpret(gl.float32, [CHUNK, NW, BD], rows3)
    ry1 = sy1._reinterpret(gl.float32, [CHUNK, NW, BD], rows3)
    S = gl.zeros([N, BD], gl.float32, STATE)
    x += batch * T * D
    b += batch * T * D
    z += batch * T * D
    out += batch * T * D
    k += batch * T * N
    q += batch * T * N
    ckpt += batch * (T // 8) * N * D
    chunks = T // CHUNK  # even
    x0 = gl.load(x + oT)
    z0 = gl.load(z + oT)
    _tile_in(x0, gl.load(b + oT), gl.load(k + oK), gl.load(q + oK), bi, se0, sx0, sk0, sq0)
    x1 = x0  # x of the chunk before, of this one, of the next one
    x2 = gl.load(x + CHUNK * D + oT)
    b2 = gl.load(b + CHUNK * D + oT)
    k2 = gl.load(k + CHUNK * N + oK)
    q2 = gl.load(q + CHUNK * N + oK)
    for c in range(0, chunks, 2):
        _tile_in(x2, b2, k2, q2, bi, se1, sx1, sk1, sq1)
        t64 = gl.minimum(c + 2, chunks - 1).to(gl.int64) * CHUNK
        x3 = gl.load(x + t64 * D + oT)
        b2 = gl.load(b + t64 * D + oT)
        k2 = gl.load(k + t64 * N + oK)
        q2 = gl.load(q + t64 * N + oK)
        t64 = c.to(gl.int64) * CHUNK
        z1 = gl.load(z + t64 * D + oT)
        _tile_out(
            ry1,
            x0,
            z0,
            ds,
            out + (t64 - CHUNK) * D,
            oT,
            (c > 0) & (dT[None, :] < D),
            PARTS,
            True,
            True,
        )
        S = _sixteen_steps(
            S,
            _rows(se0, BD),
            _rows(sx0, BD),
            _rows(sk0, N),
            _rows(sq0, N),
            sy0,
            ckpt + t64 // 8 * N * D,
            nd,
            D,
        )
        _tile_in(x3, b2, k2, q2, bi, se0, sx0, sk0, sq0)
        t64 = gl.minimum(c + 3, chunks - 1).to(gl.int64) * CHUNK
        x4 = gl.load(x + t64 * D + oT)
        b2 = gl.load(b + t64 * D + oT)
        k2 = gl.load(k + t64 * N + oK)
        q2 = gl.load(q + t64 * N + oK)
        t64 = (c + 1).to(gl.int64) * CHUNK
        z0 = gl.load(z + t64 * D + oT)
        _tile_out(ry0, x1, z1, ds, out + (t64 - CHUNK) * D, oT, dT[None, :] < D, PARTS, True, False)
        S = _sixteen_steps(
            S,
            _rows(se1, BD),
            _rows(sx1, BD),
            _rows(sk1, N),
            _rows(sq1, N),
            sy1,
            ckpt + t64 // 8 * N * D,
            nd,
            D,
        )
        x0 = x2
        x1 = x3
        x2 = x4
    _tile_out(
        ry1,
        x0,
        z0,
        ds,
        out + (chunks - 1).to(gl.int64) * CHUNK * D,
        oT,
        dT[None, :] < D,
        PARTS,
        True,
        False,
    )
    gl.store(hT + batch * N * D + d2[None, :] * N + n2[:, None], S)


def pipelined(q, k, x, b, bias, skip, z, BD, warps):
    "Output, last state and checkpoints; contiguous tensors, T in steps of 32, D in steps of BD."
    B, T, D = x.shape
    N = k.shape[-1]

    def new(*s):
        return empty(s, device=x.device, dtype=torch.float32)

    out = torch.empty_like(x)
    ckpt = new(B * T // 8, N, D)
    final = new(B, D, N)
    _pipelined_fwd_kernel[(D // BD, B)](
        x, b, z, k, q, bias, skip, out, ckpt, final, T, D, N=N, BD=BD, NW=warps, num_warps=warps
    )
    return out, final, ckpt


def won(a, B, T, D, N, segment=None):
    "The kernel that won."
    plan = diagonal_plan(B, T, D, N, segment=segment)
    return diagonal_forward(plan, *a.values(), None, None)


def main():
    for name, (B, T, D, N) in SHAPES.items():
        a, _, _, _ = inputs(B, T, D, N)
        rival = functools.partial(won, a, B, T, D, N)
        right = rival()
        for BD, warps in ((64, 4), (32, 4), (32, 2)):
            run = functools.partial(pipelined, *a.values(), BD, warps)
            worst = max(
                ((m.double() - r.double()).norm() / r.double().norm()).item()
                for m, r in zip(run(), right)
            )
            if not worst < 6e-3:
                sys.exit(f"{name} {BD} channels, {warps} warps: wrong by {worst:.1e}, no time")
            ms = [
                do_bench(f, warmup=10, rep=40, return_mode="median")
                for f in (run, rival, functools.partial(rival, 0))
            ]
            print(
                f"{name}  {BD} channels, {warps} warps: pipelined {ms[0]:.3f} ms, "
                f"won {ms[1]:.3f}, won without segments {ms[2]:.3f}"
            )


if __name__ == "__main__":
    main()
