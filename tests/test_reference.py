"""Compare the reference scans with oracles that share no code with them."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from longhorn_kit.scan.reference import reference_scan, reference_selective_scan

pytestmark = pytest.mark.numeric

B = 2
T = 11
D = 3
N = 4


@pytest.fixture
def tensors():
    torch.manual_seed(0)

    def new(*s):
        drawn = torch.randn(*s, dtype=torch.float64)
        return drawn.requires_grad_()

    return dict(
        q=new(B, T, N),
        k=new(B, T, N),
        x=new(B, T, D),
        b=new(B, T, D),
        b_bias=new(D),
        D_skip=new(D),
        z=new(B, T, D),
        initial_state=new(B, D, N),
    )


def from_gates(a, i, q, S0):
    "Compute read-outs and last state of S <- a S + i by sums of log gates; a, i (B,T,D,N)."
    log = a.log().cumsum(1)
    steps = torch.arange(a.shape[1])
    in_time = steps[:, None] >= steps
    earlier = in_time[None, :, :, None, None]
    later = log[:, :, None]
    decay = (later - log[:, None]).exp()
    weight = decay * earlier
    written = (weight * i[:, None]).sum(2)
    started = log.exp() * S0[:, None]
    S = written + started
    read = torch.einsum("btdn,btn->btd", S, q)
    return read, S[:, -1]


def finish(y, t):
    skip = t["D_skip"] * t["x"]
    gate = torch.sigmoid(t["z"])
    return (y + skip) * t["z"] * gate


def same(results, expected, tensors):
    "Return values, and gradients of every tensor for one random projection."
    weights = [torch.randn_like(o) for o in results]
    for a, b in zip(results, expected):
        assert_close(a, b, rtol=1e-11, atol=1e-11)

    def gradients(outputs):
        pairs = zip(weights, outputs)
        loss = sum((w * o).sum() for w, o in pairs)
        return torch.autograd.grad(loss, tensors)

    for a, b in zip(gradients(results), gradients(expected)):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["diagonal", "decoupled"])
def test_elementwise_forms_are_sums_over_products_of_gates(form, tensors):
    t = tensors
    rates = torch.sigmoid(t["b"] + t["b_bias"])
    beta = rates[..., None]
    k = t["k"][:, :, None]
    x = t["x"][..., None]
    shared = (k * k).sum(-1, keepdim=True) if form == "diagonal" else k * k
    eps = beta / (1 + beta * shared)
    kept = 1 - eps * k * k
    written = eps * x * k
    y, S = from_gates(kept, written, t["q"], t["initial_state"])
    result = reference_scan(**t, form=form)
    same(result, (finish(y, t), S), list(t.values()))


def test_exact_is_a_dense_solve_a_step(tensors):
    t = tensors
    S = t["initial_state"]
    rates = torch.sigmoid(t["b"] + t["b_bias"])
    identity = torch.eye(N).double()
    reads = []
    for i in range(T):
        beta = rates[:, i, :, None]
        x = t["x"][:, i, :, None]
        k = t["k"][:, i, None]
        outer = torch.einsum("ban,bam->banm", k, k)
        system = identity + beta[..., None] * outer
        target = S + beta * x * k
        S = torch.linalg.solve(system, target)
        query = t["q"][:, i]
        reads.append(torch.einsum("bdn,bn->bd", S, query))
    expected = (finish(torch.stack(reads, 1), t), S)
    result = reference_scan(**t, form="exact")
    same(result, expected, list(t.values()))


@pytest.mark.parametrize("timed", [False, True])
def test_s6_is_a_sum_over_products_of_gates(timed, tensors):
    t = dict(tensors)
    shape = (B, T, N) if timed else (D, N)
    drawn = torch.rand(shape, dtype=torch.float64)
    A = (-drawn).requires_grad_()
    rates = F.softplus(t["b"] + t["b_bias"])
    delta = rates[..., None]
    rates = A[:, :, None] if timed else A
    gate = torch.exp(delta * rates)
    x = t["x"][..., None]
    k = t["k"][:, :, None]
    written = delta * x * k
    first = t["initial_state"]
    y, S = from_gates(gate, written, t["q"], first)
    inputs = [t[n] for n in "qkxb"]
    weights = (t["b_bias"], t["D_skip"], t["z"])
    result = reference_selective_scan(*inputs, A, *weights, initial_state=first)
    same(result, (finish(y, t), S), [*t.values(), A])


@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled"])
def test_scalar_rate_is_one_column_for_all_channels(form, tensors):
    t = {name: tensors[name].detach() for name in "qkx"}
    b = torch.randn(B, T, 1, dtype=torch.float64)
    one, _ = reference_scan(**t, b=b, form=form)
    many, _ = reference_scan(**t, b=b.expand(B, T, D), form=form)
    assert_close(one, many, rtol=1e-13, atol=1e-13)
