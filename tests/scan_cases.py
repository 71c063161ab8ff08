"""Inputs, a float64 oracle and error measures for tests of the scan kernels."""
import torch

from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.triton_op import triton_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
PER_CHANNEL = ("b_bias", "D_skip")


def inputs(B, T, D, N, form="diagonal", dtype=torch.float32, z=True, state=True, bias=True, skip=True, scalar=False,
           sequences=None, key_scale=0.5, seed=0):
    "A dictionary of arguments (None where left out), the output's gradient and the final state's."
    gen = torch.Generator().manual_seed(seed)
    new = lambda *s: torch.randn(*s, generator=gen).to(DEVICE)
    rates = lambda *s: -(torch.rand(*s, generator=gen) + 0.1).to(DEVICE)
    n = B if sequences is None else sequences
    a = dict(q=new(B, T, N).to(dtype), k=(new(B, T, N) * key_scale).to(dtype), x=new(B, T, D).to(dtype),
             b=new(B, T, 1 if scalar else D).to(dtype), A=dict(s6=rates(D, N), s6_timed=rates(B, T, N).to(dtype)).get(form),
             b_bias=new(D) if bias else None, D_skip=new(D) if skip else None, z=new(B, T, D).to(dtype) if z else None,
             initial_state=new(n, D, N) if state else None)
    return a, new(B, T, D).to(dtype), new(n, D, N)


def call(a, form, cu_seqlens=None, oracle=False, **options):
    "One scan, by the kernels or by the reference."
    rest = dict(D_skip=a["D_skip"], z=a["z"], initial_state=a["initial_state"], **options)
    data = [a[n] for n in "qkxb"]
    if not oracle:
        return triton_scan(*data, a["b_bias"], A=a["A"], form=form, cu_seqlens=cu_seqlens, **rest)
    if a["A"] is not None:
        return reference_selective_scan(*data, a["A"], a["b_bias"], **rest)
    return reference_scan(*data, a["b_bias"], form=form, **rest)


def one_sequence(a, form, i, lo, hi):
    "Sequence i of a packed batch as a batch of its own."
    def cut(name, t):
        if t is None or name in PER_CHANNEL or (name == "A" and form == "s6"):
            return t
        return t[i : i + 1] if name == "initial_state" else t[:, lo:hi]
    return {name: cut(name, t) for name, t in a.items()}


def gradients(outputs, grads, a):
    "Gradients by argument name; zeros for an argument that no output depends on."
    names = [n for n, t in a.items() if t is not None]
    found = torch.autograd.grad(outputs, [a[n] for n in names], grads, allow_unused=True)
    return {n: torch.zeros_like(a[n]) if g is None else g for n, g in zip(names, found)}


def leaves(a, dtype=None):
    return {n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for n, t in a.items()}


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
        parts = [call(one_sequence(r, form, i, lo, hi), form, oracle=True) for i, (lo, hi) in enumerate(zip(bounds, bounds[1:]))]
        out, final = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 0)
    return out.detach(), final.detach(), gradients((out, final), (dout.double(), dfinal.double()), r)


def kernels(a, dout, dfinal, form, bounds=None, **options):
    "Output, final state and gradients by the kernels."
    r = leaves(a)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    out, final = call(r, form, cu, **options)
    return out.detach(), final.detach(), gradients((out, final), (dout.to(out.dtype), dfinal), r)


def error(a, b):
    "Relative error in the Euclidean norm; not a number never passes."
    if not torch.isfinite(a).all():
        return float("inf")
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item() if a.numel() else 0.0


def beyond(found, right, relative, absolute=1e-6):
    "Names of what is off by more than a share of its norm and, where what is right vanishes, so much an element."
    off = {n: (found[n].double() - r.double()).norm().item() for n, r in right.items()}
    return {n: off[n] for n, r in right.items() if not off[n] <= relative * r.norm() + absolute * r.numel() ** 0.5}


def errors(B, T, D, N, form, bounds=None, options=None, **made):
    "Errors of every output and gradient against the oracle."
    a, dout, dfinal = inputs(B, T, D, N, form, sequences=None if bounds is None else len(bounds) - 1, **made)
    out, final, grads = kernels(a, dout, dfinal, form, bounds, **(options or {}))
    out_, final_, grads_ = oracle(a, dout, dfinal, form, bounds)
    return dict(out=error(out, out_), final=error(final, final_), **{n: error(grads[n], g) for n, g in grads_.items()})


def assert_close(found, dtype=torch.float32, factor=1.0):
    "Every error under the dtype's tolerance."
    bad = {n: f"{e:.1e}" for n, e in found.items() if not e < TOLERANCE[dtype] * factor}
    assert not bad, bad
