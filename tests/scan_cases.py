"""Inputs, a float64 oracle, error measures and checks for tests of the kernels."""

import pytest
import torch

from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.triton.op import triton_scan
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
    "Return arguments by name (None if omitted), and gradients of output and final state."
    gen = torch.Generator().manual_seed(seed)

    def new(*s):
        drawn = torch.randn(*s, generator=gen)
        return drawn.to(DEVICE)

    def rates(*s):
        sizes = torch.rand(*s, generator=gen) + 0.1
        return -sizes.to(DEVICE)

    n = B if sequences is None else sequences
    a = dict(q=new(B, T, N).to(dtype))
    k = new(B, T, N) * key_scale
    a["k"] = k.to(dtype)
    a["x"] = new(B, T, D).to(dtype)
    b = new(B, T, 1 if scalar else D)
    a["b"] = b.to(dtype)
    # all are drawn for every form, so that later random numbers do not depend on the form
    shared = dict(s6=rates(D, N), s6_given=rates(D, N))
    timed = rates(B, T, N).to(dtype)
    a["A"] = (shared | dict(s6_time_varying=timed)).get(form)
    a["b_bias"] = new(D) if bias else None
    a["D_skip"] = new(D) if skip else None
    a["z"] = new(B, T, D).to(dtype) if z else None
    a["initial_state"] = new(n, D, N) if state else None
    if form == "s6_given":  # step sizes, most of them positive
        a["b"] = a["b"].abs()
        a["b_bias"] = a["b_bias"] / 9 if bias else None
    dout = new(B, T, D).to(dtype)
    dfinal = new(n, D, N)
    return a, dout, dfinal


def call(a, form, cu_seqlens=None, oracle=False, **options):
    "Run one scan by the kernels or by the reference."
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
    "Return sequence i of a packed batch as a separate batch."

    def cut(name, t):
        if t is None or name in PER_CHANNEL or (name == "A" and form in ("s6", "s6_given")):
            return t
        if name == "initial_state":
            return t[i : i + 1]
        return t[:, lo:hi]

    return {name: cut(name, t) for name, t in a.items()}


def gradients(outputs, grads, a):
    "Return gradients by argument name; zeros for an argument that no output depends on."
    names = [n for n, t in a.items() if t is not None]
    tensors = [a[n] for n in names]
    gradients = torch.autograd.grad(outputs, tensors, grads, allow_unused=True)
    return {n: torch.zeros_like(a[n]) if g is None else g for n, g in zip(names, gradients)}


def leaves(a, dtype=None):
    def leaf(t):
        converted = t.detach().to(dtype or t.dtype)
        return converted.requires_grad_()

    return {n: None if t is None else leaf(t) for n, t in a.items()}


def oracle(a, dout, dfinal, form, bounds=None):
    "Return output, final state and gradients of the float64 loop; small cases run on the CPU."
    n_states = a["x"].numel() * a["q"].shape[-1]
    if a["x"].is_cuda and n_states <= 10**7:
        cpu = {n: None if t is None else t.detach().cpu() for n, t in a.items()}
        dout_on_cpu = dout.cpu()
        dfinal_on_cpu = dfinal.cpu()
        out, final, grads = oracle(cpu, dout_on_cpu, dfinal_on_cpu, form, bounds)
        moved = {n: g.to(DEVICE) for n, g in grads.items()}
        return out.to(DEVICE), final.to(DEVICE), moved
    r = leaves(a, torch.float64)
    if bounds is None:
        out, final = call(r, form, oracle=True)
    else:
        outs = []
        finals = []
        pairs = zip(bounds, bounds[1:])
        for i, (lo, hi) in enumerate(pairs):
            out, final = call(one_sequence(r, form, i, lo, hi), form, oracle=True)
            outs.append(out)
            finals.append(final)
        out = torch.cat(outs, 1)
        final = torch.cat(finals, 0)
    slopes = (dout.double(), dfinal.double())
    grads = gradients((out, final), slopes, r)
    return out.detach(), final.detach(), grads


def kernels(a, dout, dfinal, form, bounds=None, **options):
    "Return output, final state and gradients of the kernels."
    r = leaves(a)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    out, final = call(r, form, cu, **options)
    slopes = (dout.to(out.dtype), dfinal)
    grads = gradients((out, final), slopes, r)
    return out.detach(), final.detach(), grads


def beyond(results, expected, relative, absolute=1e-6):
    "Return names of tensors that differ by more than a share of their norm (or per element)."
    differences = {}
    for n, r in expected.items():
        wide = results[n].double()
        difference_of = wide - r.double()
        difference = difference_of.norm().item()
        by_norm = relative * r.norm()
        by_element = absolute * r.numel() ** 0.5
        allowed = by_norm + by_element
        if not difference <= allowed:
            differences[n] = difference
    return differences


def off(got, want):
    "Return the errors of one (output, final state, gradients) relative to another."
    gradients = {n: error(got[2][n], g) for n, g in want[2].items()}
    out_error = error(got[0], want[0])
    final_error = error(got[1], want[1])
    return dict(out=out_error, final=final_error, **gradients)


def errors(B, T, D, N, form, bounds=None, options=None, **made):
    "Return the errors of every output and gradient relative to the oracle."
    a, dout, dfinal = inputs(
        B, T, D, N, form, sequences=None if bounds is None else len(bounds) - 1, **made
    )
    return off(
        kernels(a, dout, dfinal, form, bounds, **(options or {})),
        oracle(a, dout, dfinal, form, bounds),
    )


def assert_close(errors, dtype=torch.float32, factor=1.0):
    "Check that every error is below the dtype's tolerance."
    limit = TOLERANCE[dtype] * factor
    bad = {n: f"{e:.1e}" for n, e in errors.items() if not e < limit}
    assert not bad, bad


def assert_same_bits(got, want):
    "Check that output, final state and gradients are equal bit for bit."
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    for n in want[2]:
        assert torch.equal(got[2][n], want[2][n])


def assert_packed_as_alone(a, dout, dfinal, form, bounds, start=False, **options):
    "Check that packing changes no bit; `start`: check gradients of initial states too."
    out, final, grads = kernels(a, dout, dfinal, form, bounds, **options)
    pairs = zip(bounds, bounds[1:])
    for i, (lo, hi) in enumerate(pairs):
        one = slice(i, i + 1)
        alone = one_sequence(a, form, i, lo, hi)
        part = dout[:, lo:hi]
        alone_out, last, alone_grads = kernels(alone, part, dfinal[one], form, **options)
        expected = out[:, lo:hi]
        assert torch.equal(alone_out, expected), i
        assert torch.equal(last, final[one]), i
        for n in ROWS:
            whole = grads[n]
            expected = whole[:, lo:hi]
            assert torch.equal(alone_grads[n], expected), (i, n)
        if start:
            start_gradient = alone_grads["initial_state"]
            expected = grads["initial_state"][one]
            assert torch.equal(start_gradient, expected), i
    return out, final, grads


def assert_ends_agree(B, T, D, N, gib, near, margin, scalar=False, **options):
    """Check forward and backward beyond 2^31 elements.

    The scan forgets distant steps, so both ends agree with short runs."""
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free} GiB are free")

    def new(*s):
        return torch.randn(*s, device=DEVICE, dtype=torch.bfloat16)

    k = new(B, T, N) / 2
    a = dict(q=new(B, T, N), k=k, x=new(B, T, D), b=new(B, T, 1 if scalar else D))
    parts = dict(whole=slice(None), start=slice(0, margin), end=slice(T - margin, None))
    runs = {}
    for name, part in parts.items():
        leaf = {n: t[:, part].detach().requires_grad_() for n, t in a.items()}
        out, final = triton_scan(**leaf, **options)
        # every element has a different weight in the loss, so a wrong address changes gradients
        grads = gradients((out,), (out.detach(),), leaf)
        outputs = dict(out=out.detach(), final=final.detach())
        runs[name] = outputs | grads
        del leaf, out, final, grads
    whole = runs["whole"]
    final = whole.pop("final")
    expected = runs["end"].pop("final")
    errors = {"final": error(final, expected)}
    ends = dict(start=slice(0, near), end=slice(-near, None))
    for end, rows in ends.items():
        for n, t in whole.items():
            result = t[:, rows]
            expected = runs[end][n][:, rows]
            errors[f"{n} {end}"] = error(result, expected)
    assert_close(errors, torch.bfloat16)


def poisoned(monkeypatch):
    "Fill new memory with NaN."
    empty = torch.empty

    def fill(t):
        return t.fill_(float("nan")) if t.is_floating_point() and t.device.type == DEVICE else t

    monkeypatch.setattr(torch, "empty", lambda *size, **options: fill(empty(*size, **options)))


def within(t, margin=3):
    "Return `t` as a window into a larger new tensor."
    sizes = [s + 2 * margin + 1 for s in t.shape]
    big = torch.empty(*sizes, device=t.device, dtype=t.dtype)
    inside = tuple(slice(margin, margin + s) for s in t.shape)
    return big[inside].copy_(t)


def captured(run):
    "Record a CUDA graph of a call that has run before; return the graph and its results."
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def assert_channels_are_equal(result, expected, channels):
    "Compare output, final state and gradients of some channels, bit for bit."
    out, final, grads = result
    right_out, right_final, right_grads = expected
    assert torch.equal(out[..., channels], right_out[..., channels])
    assert torch.equal(final[:, channels], right_final[:, channels])
    for name in ("x", "b", "z", *PER_CHANNEL):
        assert torch.equal(grads[name][..., channels], right_grads[name][..., channels])
