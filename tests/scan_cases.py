"""Inputs, a float64 oracle, error measures and checks that tests of the kernels share."""

import pytest
import torch

from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.triton_op import triton_scan
from rounding import error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
PER_CHANNEL = ("b_bias", "D_skip")
ROWS = ("q", "k", "x", "b", "z")


def inputs(
    B,
    T,
    D,
    N,
    form="diagonal",
    dtype=torch.float32,
    z=True,
    state=True,
    bias=True,
    skip=True,
    scalar=False,
    sequences=None,
    key_scale=0.5,
    seed=0,
):
    "A dictionary of arguments (None where left out), the output's gradient and the final state's."
    gen = torch.Generator().manual_seed(seed)

    def new(*s):
        return torch.randn(*s, generator=gen).to(DEVICE)

    def rates(*s):
        return -(torch.rand(*s, generator=gen) + 0.1).to(DEVICE)

    n = B if sequences is None else sequences
    a = dict(
        q=new(B, T, N).to(dtype),
        k=(new(B, T, N) * key_scale).to(dtype),
        x=new(B, T, D).to(dtype),
        b=new(B, T, 1 if scalar else D).to(dtype),
        A=dict(s6=rates(D, N), s6_given=rates(D, N), s6_time_varying=rates(B, T, N).to(dtype)).get(
            form
        ),
        b_bias=new(D) if bias else None,
        D_skip=new(D) if skip else None,
        z=new(B, T, D).to(dtype) if z else None,
        initial_state=new(n, D, N) if state else None,
    )
    if form == "s6_given":  # step sizes, most of them positive
        a |= dict(b=a["b"].abs(), b_bias=a["b_bias"] / 9 if bias else None)
    return a, new(B, T, D).to(dtype), new(n, D, N)


def call(a, form, cu_seqlens=None, oracle=False, **options):
    "One scan, by the kernels or by the reference."
    rest = dict(D_skip=a["D_skip"], z=a["z"], initial_state=a["initial_state"], **options)
    data = [a[n] for n in "qkxb"]
    if form == "s6_given":
        rest |= dict(dt_softplus=False)
    if not oracle:
        return triton_scan(*data, a["b_bias"], A=a["A"], form=form, cu_seqlens=cu_seqlens, **rest)
    if a["A"] is not None:
        return reference_selective_scan(*data, a["A"], a["b_bias"], **rest)
    return reference_scan(*data, a["b_bias"], form=form, **rest)


def one_sequence(a, form, i, lo, hi):
    "Sequence i of a packed batch as a separate batch."

    def cut(name, t):
        if t is None or name in PER_CHANNEL or (name == "A" and form in ("s6", "s6_given")):
            return t
        return t[i : i + 1] if name == "initial_state" else t[:, lo:hi]

    return {name: cut(name, t) for name, t in a.items()}


def gradients(outputs, grads, a):
    "Gradients by argument name; zeros for an argument that no output depends on."
    names = [n for n, t in a.items() if t is not None]
    found = torch.autograd.grad(outputs, [a[n] for n in names], grads, allow_unused=True)
    return {n: torch.zeros_like(a[n]) if g is None else g for n, g in zip(names, found)}


def leaves(a, dtype=None):
    return {
        n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
        for n, t in a.items()
    }


def oracle(a, dout, dfinal, form, bounds=None):
    "Output, final state and gradients in float64, one step at a time; small steps on the CPU, which starts them sooner."
    if a["x"].is_cuda and a["x"].numel() * a["q"].shape[-1] <= 10**7:
        cpu = {n: None if t is None else t.detach().cpu() for n, t in a.items()}
        out, final, grads = oracle(cpu, dout.cpu(), dfinal.cpu(), form, bounds)
        return out.to(DEVICE), final.to(DEVICE), {n: g.to(DEVICE) for n, g in grads.items()}
    r = leaves(a, torch.float64)
    if bounds is None:
        out, final = call(r, form, oracle=True)
    else:
        parts = [
            call(one_sequence(r, form, i, lo, hi), form, oracle=True)
            for i, (lo, hi) in enumerate(zip(bounds, bounds[1:]))
        ]
        out = torch.cat([p[0] for p in parts], 1)
        final = torch.cat([p[1] for p in parts], 0)
    return (
        out.detach(),
        final.detach(),
        gradients((out, final), (dout.double(), dfinal.double()), r),
    )


def kernels(a, dout, dfinal, form, bounds=None, **options):
    "Output, final state and gradients by the kernels."
    r = leaves(a)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    out, final = call(r, form, cu, **options)
    return out.detach(), final.detach(), gradients((out, final), (dout.to(out.dtype), dfinal), r)


def beyond(found, right, relative, absolute=1e-6):
    "Names of what is off by more than a share of its norm and, where what is right vanishes, so much an element."
    off = {n: (found[n].double() - r.double()).norm().item() for n, r in right.items()}
    return {
        n: off[n]
        for n, r in right.items()
        if not off[n] <= relative * r.norm() + absolute * r.numel() ** 0.5
    }


def off(got, want):
    "Errors of one (output, final state, gradients) against another."
    return dict(
        out=error(got[0], want[0]),
        final=error(got[1], want[1]),
        **{n: error(got[2][n], g) for n, g in want[2].items()},
    )


def errors(B, T, D, N, form, bounds=None, options=None, **made):
    "Errors of every output and gradient against the oracle."
    a, dout, dfinal = inputs(
        B, T, D, N, form, sequences=None if bounds is None else len(bounds) - 1, **made
    )
    return off(
        kernels(a, dout, dfinal, form, bounds, **(options or {})),
        oracle(a, dout, dfinal, form, bounds),
    )


def assert_close(found, dtype=torch.float32, factor=1.0):
    "Every error under the dtype's tolerance."
    bad = {n: f"{e:.1e}" for n, e in found.items() if not e < TOLERANCE[dtype] * factor}
    assert not bad, bad


def assert_same_bits(got, want):
    "Output, final state and gradients, to the bit."
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert all(torch.equal(got[2][n], want[2][n]) for n in want[2])


def assert_packed_as_alone(a, dout, dfinal, form, bounds, start=False, **options):
    "A packed batch has the bits of each sequence alone, with `start` in the gradients of initial states too; what it gave."
    packed = out, final, grads = kernels(a, dout, dfinal, form, bounds, **options)
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, last, g = kernels(
            one_sequence(a, form, i, lo, hi), dout[:, lo:hi], dfinal[i : i + 1], form, **options
        )
        assert torch.equal(alone, out[:, lo:hi]) and torch.equal(last, final[i : i + 1]), i
        assert all(torch.equal(g[n], grads[n][:, lo:hi]) for n in ROWS), i
        assert not start or torch.equal(g["initial_state"], grads["initial_state"][i : i + 1]), i
    return packed


def assert_ends_agree(B, T, D, N, gib, near, margin, scalar=False, **options):
    "Forward and backward beyond 2^31 elements: what is far away is forgotten, so both ends agree with short runs."
    if (free := torch.cuda.mem_get_info()[0] >> 30) < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free} GiB are free")

    def new(*s):
        return torch.randn(*s, device=DEVICE, dtype=torch.bfloat16)

    a = dict(q=new(B, T, N), k=new(B, T, N) / 2, x=new(B, T, D), b=new(B, T, 1 if scalar else D))
    runs = {}
    for name, part in dict(
        whole=slice(None), start=slice(0, margin), end=slice(T - margin, None)
    ).items():
        leaf = {n: t[:, part].detach().requires_grad_() for n, t in a.items()}
        out, final = triton_scan(**leaf, **options)
        # every element is its own weight in the loss, so a wrong address shows
        runs[name] = dict(out=out.detach(), final=final.detach()) | gradients(
            (out,), (out.detach(),), leaf
        )
        del leaf, out, final
    found = {"final": error(runs["whole"].pop("final"), runs["end"].pop("final"))}
    for end, at in dict(start=slice(0, near), end=slice(-near, None)).items():
        found |= {
            f"{n} {end}": error(t[:, at], runs[end][n][:, at]) for n, t in runs["whole"].items()
        }
    assert_close(found, torch.bfloat16)


def poisoned(monkeypatch):
    "New memory holds what is no number."
    empty = torch.empty

    def fill(t):
        return t.fill_(float("nan")) if t.is_floating_point() and t.device.type == DEVICE else t

    monkeypatch.setattr(torch, "empty", lambda *size, **options: fill(empty(*size, **options)))


def within(t, margin=3):
    "`t` as a window into a larger new tensor."
    big = torch.empty(*(s + 2 * margin + 1 for s in t.shape), device=t.device, dtype=t.dtype)
    return big[tuple(slice(margin, margin + s) for s in t.shape)].copy_(t)


def captured(run):
    "A CUDA graph of a call that has run before, and what it returned while it was recorded."
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
