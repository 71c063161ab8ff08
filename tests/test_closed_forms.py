import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longhorn_kit.theory.closed_forms import (
    decoupled_step,
    diagonal_step,
    effective_rate,
    effective_rate_from_logits,
    exact_step,
    explicit_step,
)
from test_objective import problem

pytestmark = pytest.mark.numeric

STEPS = [explicit_step, exact_step, diagonal_step, decoupled_step]


def row_by_row(S, k, x, beta, form):
    """The same updates from dense linear systems in numpy, one row at a time."""
    S, k, x, beta = (t.double().numpy() for t in (S, k, x, beta))
    identity = np.eye(len(k))
    outer = np.outer(k, k)
    diagonal = np.diag(k * k)
    out = np.empty(S.shape)
    for d, (s, value, rate) in enumerate(zip(S, x, beta)):
        if form == "exact":
            out[d] = np.linalg.solve(identity + rate * outer, s + rate * value * k)
        elif form == "decoupled":
            out[d] = np.linalg.solve(identity + rate * diagonal, s + rate * value * k)
        elif form == "diagonal":
            rate = 1 / (1 / rate + k @ k)
            out[d] = (identity - rate * diagonal) @ s + rate * value * k
        else:
            out[d] = (identity - rate * outer) @ s + rate * value * k
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
    torch.testing.assert_close(step(S, k, x, beta), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("step", STEPS)
def test_batch_dimensions_and_a_shared_beta_or_a_number_broadcast(step):
    S, k, x, beta = problem(2, 5)
    batched = step(S, k, x, beta)
    assert batched.shape == S.shape
    alone = step(*(t[1, 3] for t in (S, k, x, beta)))
    torch.testing.assert_close(batched[1, 3], alone)
    shared = beta[..., :1]
    torch.testing.assert_close(step(S, k, x, shared), step(S, k, x, shared.expand_as(beta)))
    assert torch.equal(step(S, k, x, 0.5), step(S, k, x, torch.full_like(beta, 0.5)))


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
    torch.testing.assert_close(
        out.double(), step(*(t.double() for t in low)), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_size_zero_and_a_zero_key_change_nothing(step):
    S, k, x, beta = problem()
    assert torch.equal(step(S, k, x, torch.zeros_like(beta)), S)
    assert torch.equal(step(S, torch.zeros_like(k), x, beta), S)


@pytest.mark.parametrize("step", [exact_step, diagonal_step, decoupled_step])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_long_streams_stay_bounded_whatever_the_key_length(step, scale):
    torch.manual_seed(0)
    S = torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(500):
        S = step(
            S,
            scale * torch.randn(4).double(),
            scale * torch.randn(3).double(),
            torch.rand(3).double(),
        )
    assert S.isfinite().all()
    assert S.abs().max() < 1e3


def test_rate_lies_between_zero_and_beta_and_below_the_inverse_square_of_the_key():
    _, k, _, beta = problem(200, scale=10)
    rate = effective_rate(k, beta)
    assert (rate > 0).all()
    assert (rate <= beta).all()
    assert (rate * k.square().sum(-1, keepdim=True) < 1).all()


@settings(max_examples=60, deadline=None)
@given(v=st.floats(-300, 300, width=32), exponent=st.floats(-12, 18))
def test_rate_from_logits_is_finite_and_right_for_any_logit_and_length(v, exponent):
    k = torch.tensor([10.0**exponent, 0.0]).requires_grad_()
    logit = torch.tensor([v]).requires_grad_()
    rate = effective_rate_from_logits(k, logit)
    rate.backward()
    assert rate.isfinite()
    assert k.grad.isfinite().all()
    assert logit.grad.isfinite()
    expected = 1 / (1 + float(k[0].detach()) ** 2 + np.exp(-max(v, -80.0)))
    assert float(rate.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-37)


def test_rate_from_logits_agrees_with_the_sigmoid_form_and_its_gradients():
    torch.manual_seed(0)
    k = torch.randn(20, 4).double().requires_grad_()
    v = (6 * torch.randn(20, 3)).double().requires_grad_()
    weight = torch.rand(20, 3).double()
    rates = effective_rate_from_logits(k, v), effective_rate(k, torch.sigmoid(v))
    torch.testing.assert_close(*rates)
    grads = [torch.autograd.grad((weight * rate).sum(), (k, v)) for rate in rates]
    torch.testing.assert_close(grads[0], grads[1])


def test_gates_in_float32_are_never_negative():
    torch.manual_seed(0)
    k = torch.logspace(-3, 18, 20_000)[:, None, None] * torch.randn(20_000, 1, 3)
    for v in (-80.0, -1.0, 0.0, 20.0):
        gates = (
            1
            - effective_rate_from_logits(k, torch.full((1,), v))[..., None]
            * k[..., None, :].square()
        )
        assert gates.min() >= 0
        assert gates.max() <= 1
