import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from longhorn_kit.theory.closed_forms import (
    decoupled_step,
    diagonal_step,
    effective_rate,
    effective_rate_from_logits,
    exact_step,
    explicit_step,
)
from theory_cases import problem

pytestmark = pytest.mark.numeric

STEPS = [explicit_step, exact_step, diagonal_step, decoupled_step]


def row_by_row(S, k, x, beta, form):
    """Compute the same updates from dense linear systems in NumPy, one row at a time."""
    S, k, x, beta = (t.double().numpy() for t in (S, k, x, beta))
    identity = np.eye(len(k))
    outer = np.outer(k, k)
    diagonal = np.diag(k * k)
    out = np.empty(S.shape)
    for d, (s, value, rate) in enumerate(zip(S, x, beta)):
        if form == "exact":
            system = identity + rate * outer
            target = s + rate * value * k
            out[d] = np.linalg.solve(system, target)
        elif form == "decoupled":
            system = identity + rate * diagonal
            target = s + rate * value * k
            out[d] = np.linalg.solve(system, target)
        elif form == "diagonal":
            rate = 1 / (1 / rate + k @ k)
            kept = identity - rate * diagonal
            out[d] = kept @ s + rate * value * k
        else:
            kept = identity - rate * outer
            out[d] = kept @ s + rate * value * k
    return torch.from_numpy(out)


@settings(max_examples=40, deadline=None)
@given(
    D=st.integers(1, 4),
    N=st.integers(1, 6),
    step=st.sampled_from(STEPS),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_every_step_equals_dense_linear_algebra(D, N, step, scale, seed):
    S, k, x, beta = problem(D=D, N=N, scale=scale, seed=seed)
    expected = row_by_row(S, k, x, beta, step.__name__.removesuffix("_step"))
    assert_close(step(S, k, x, beta), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("step", STEPS)
def test_batch_dimensions_and_a_shared_beta_or_a_number_broadcast(step):
    S, k, x, beta = problem(2, 5)
    batched = step(S, k, x, beta)
    assert batched.shape == S.shape
    one = [t[1, 3] for t in (S, k, x, beta)]
    alone = step(*one)
    assert_close(batched[1, 3], alone)
    shared = beta[..., :1]
    expected = step(S, k, x, shared.expand_as(beta))
    assert_close(step(S, k, x, shared), expected)
    expected = step(S, k, x, torch.full_like(beta, 0.5))
    assert torch.equal(step(S, k, x, 0.5), expected)


@pytest.mark.parametrize("step", STEPS)
def test_gradients_through_a_step_are_right(step):
    inputs = [t.requires_grad_() for t in problem(2, D=2, N=3)]
    assert torch.autograd.gradcheck(step, inputs)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_lower_precision_stays_near_float64_and_keeps_its_dtype(step, dtype, tolerance):
    low = [t.to(dtype) for t in problem()]
    out = step(*low)
    assert out.dtype == dtype
    wide = [t.double() for t in low]
    assert_close(out.double(), step(*wide), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_size_zero_and_a_zero_key_change_nothing(step):
    S, k, x, beta = problem()
    zeros = torch.zeros_like(beta)
    assert torch.equal(step(S, k, x, zeros), S)
    zeros = torch.zeros_like(k)
    assert torch.equal(step(S, zeros, x, beta), S)


@pytest.mark.parametrize("step", [exact_step, diagonal_step, decoupled_step])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_long_streams_stay_bounded_whatever_the_key_length(step, scale):
    torch.manual_seed(0)
    S = torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(500):
        k = scale * torch.randn(4).double()
        x = scale * torch.randn(3).double()
        beta = torch.rand(3).double()
        S = step(S, k, x, beta)
    assert S.isfinite().all()
    largest = S.abs().max()
    assert largest < 1e3


def test_rate_lies_between_zero_and_beta_and_below_the_inverse_square_of_the_key():
    _, k, _, beta = problem(200, scale=10)
    rate = effective_rate(k, beta)
    assert (rate > 0).all()
    assert (rate <= beta).all()
    length = k.square().sum(-1, keepdim=True)
    assert (rate * length < 1).all()


@settings(max_examples=60, deadline=None)
@given(v=st.floats(-300, 300, width=32), exponent=st.floats(-12, 18))
def test_rate_from_logits_is_finite_and_right_for_any_logit_and_length(v, exponent):
    key = torch.tensor([10.0**exponent, 0.0])
    k = key.requires_grad_()
    logit = torch.tensor([v]).requires_grad_()
    rate = effective_rate_from_logits(k, logit)
    rate.backward()
    assert rate.isfinite()
    assert k.grad.isfinite().all()
    assert logit.grad.isfinite()
    length = float(k[0].detach()) ** 2
    inverse = np.exp(-max(v, -80.0))
    expected = 1 / (1 + length + inverse)
    result = float(rate.detach())
    assert result == pytest.approx(expected, rel=1e-6, abs=1e-37)


def test_rate_from_logits_agrees_with_the_sigmoid_form_and_its_gradients():
    torch.manual_seed(0)
    keys = torch.randn(20, 4).double()
    k = keys.requires_grad_()
    logits = (6 * torch.randn(20, 3)).double()
    v = logits.requires_grad_()
    weight = torch.rand(20, 3).double()
    from_logits = effective_rate_from_logits(k, v)
    from_beta = effective_rate(k, torch.sigmoid(v))
    rates = from_logits, from_beta
    assert_close(*rates)
    losses = [(weight * rate).sum() for rate in rates]
    grads = [torch.autograd.grad(loss, (k, v)) for loss in losses]
    assert_close(grads[0], grads[1])


def test_gates_in_float32_are_never_negative():
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 18, 20_000)[:, None, None]
    k = sizes * torch.randn(20_000, 1, 3)
    for v in (-80.0, -1.0, 0.0, 20.0):
        rates = effective_rate_from_logits(k, torch.full((1,), v))
        squares = k[..., None, :].square()
        gates = 1 - rates[..., None] * squares
        assert gates.min() >= 0
        assert gates.max() <= 1
