import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from longhorn_kit.theory.objective import (
    EXPLICIT,
    IMPLICIT,
    Objective,
    gradient_of,
    implicit_gradient,
    minimise_descent,
    minimise_quadratic,
    proximity,
    recall_loss,
    tangent_loss,
    trajectory,
)
from theory_cases import problem

pytestmark = pytest.mark.numeric


def random_quadratic(M, seed=0):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(M, M, generator=g).double()
    linear = torch.randn(M, generator=g).double()
    identity = torch.eye(M).double()
    H = root @ root.T + identity

    def f(S):
        s = S.flatten(-2)
        curvature = ((s @ H) * s).sum(-1) / 2
        return curvature + s @ linear

    return f, H, linear


def test_both_minimisers_solve_an_arbitrary_quadratic():
    f, H, linear = random_quadratic(6)
    flat = torch.linalg.solve(H, -linear)
    solution = flat.view(2, 3)
    start = torch.ones(2, 3).double()
    with torch.device("meta"):  # the default device differs from that of the state
        assert_close(minimise_quadratic(f, start), solution, rtol=1e-10, atol=1e-10)
    assert_close(minimise_descent(f, start), solution, rtol=1e-7, atol=1e-7)


@settings(max_examples=20, deadline=None)
@given(
    D=st.integers(1, 4),
    N=st.integers(1, 5),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
)
def test_solve_and_descent_agree_for_every_shape(D, N, lead, scale):
    S, k, x, beta = problem(*lead, D=D, N=N, scale=scale)
    solved = IMPLICIT.minimise(S, k, x, beta=beta)
    assert solved.shape == S.shape
    descended = IMPLICIT.minimise(S, k, x, method="descend", beta=beta)
    assert_close(descended, solved, rtol=1e-6, atol=1e-6)
    nearby = solved + 1e-2 * torch.randn_like(solved)
    nearby_loss = IMPLICIT(nearby, S, k, x, beta=beta)
    loss = IMPLICIT(solved, S, k, x, beta=beta)
    assert (nearby_loss > loss).all()


@pytest.mark.parametrize("method", ["solve", "descend"])
@pytest.mark.parametrize("many", ["S k x beta", "k x beta", "beta"])
def test_a_batch_of_any_arguments_is_as_many_problems(many, method):
    names = ("S", "k", "x", "beta")
    batched = many.split()
    given = dict(zip(names, problem()))
    batch = dict(zip(names, problem(7)))
    given |= {n: batch[n] for n in batched}

    def solve(S, k, x, beta):
        return IMPLICIT.minimise(S, k, x, method=method, beta=beta)

    one_by_one = []
    for i in range(7):
        row = given | {n: given[n][i] for n in batched}
        one_by_one.append(solve(**row))
    assert_close(solve(**given), torch.stack(one_by_one), rtol=1e-7, atol=1e-7)
    S, k, x, beta = given.values()
    gradient = IMPLICIT.gradient(S, S, k, x, beta=beta)
    assert gradient.shape == (7, 3, 4)


def test_the_gradient_passes_a_finite_difference_check():
    S, k, x, beta = problem()
    at = torch.randn_like(S)
    directions = torch.eye(12).double()
    h = 1e-5 * directions.view(12, 3, 4)
    above = IMPLICIT(at + h, S, k, x, beta=beta)
    below = IMPLICIT(at - h, S, k, x, beta=beta)
    rise = above - below
    expected = (rise / 2e-5).view(3, 4)
    by_autograd = IMPLICIT.gradient(at, S, k, x, beta=beta)
    by_formula = implicit_gradient(at, S, k, x, beta)
    assert_close(by_autograd, expected, rtol=1e-7, atol=1e-7)
    assert_close(by_formula, expected, rtol=1e-7, atol=1e-7)


def test_the_tangent_plane_touches_the_loss_and_lies_below_it():
    S, k, x, beta = problem()
    assert_close(tangent_loss(S, S, k, x, beta), recall_loss(S, k, x, beta))
    candidates = torch.randn(50, 3, 4).double()
    loss = recall_loss(candidates, k, x, beta)
    plane = tangent_loss(candidates, S, k, x, beta)
    assert (plane <= loss + 1e-12).all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_on_a_consistent_stream_the_implicit_learner_never_leaves_its_teacher(scale):
    torch.manual_seed(0)
    teacher = torch.randn(2, 3).double()
    k = scale * torch.randn(25, 3).double()
    start = torch.zeros(2, 3).double()
    beta = torch.rand(2).double()
    states = trajectory(IMPLICIT.minimise, start, k, k @ teacher.T, beta=beta)
    assert states.shape == (26, 2, 3)
    errors = states - teacher
    distances = errors.norm(dim=(-2, -1))
    steps = distances.diff()
    assert (steps <= 1e-9).all()


def test_any_distance_and_loss_can_be_combined():
    def gated(S, S_prev, a):
        change = a * (S - S_prev) ** 2
        size = (1 - a) * S**2
        return (change + size).sum((-2, -1))

    def agreement(S, k, x, c):
        written = x[..., None] * k[..., None, :]
        product = (S * written).sum((-2, -1))
        return -2 * c * product

    S, k, x, _ = problem()
    a = torch.rand(4).double()
    solved = Objective(gated, agreement).minimise(S, k, x, a=a, c=0.3)
    written = torch.outer(x, k)
    expected = a * S + 0.3 * written
    assert_close(solved, expected, rtol=1e-12, atol=1e-12)

    def minibatch(S, k, x):
        errors = k @ S.mT - x
        return errors.square().sum((-2, -1))

    keys = torch.randn(2, 4).double()
    values = torch.randn(2, 3).double()
    state = Objective(proximity, minibatch).minimise(S, keys, values)
    assert state.shape == (3, 4)


def test_one_state_may_meet_many_pairs():
    S, k, x, beta = problem(5)
    states = S[:1].expand(5, -1, -1)
    expected = EXPLICIT.minimise(states, k, x, beta=beta)
    assert_close(EXPLICIT.minimise(S[0], k, x, beta=beta), expected)


def test_descent_that_begins_at_the_minimum_or_beside_it_ends():
    for seed in range(10):
        torch.manual_seed(seed)
        S = torch.randn(3, 16).double()
        k = torch.randn(16).double()
        for offset in (0, 1e-6):
            x = S @ k + offset
            beta = torch.tensor(0.5).double()
            descended = IMPLICIT.minimise(S, k, x, method="descend", beta=beta)
            solved = IMPLICIT.minimise(S, k, x, beta=beta)
            assert_close(descended, solved, rtol=1e-9, atol=1e-9)


def test_descent_is_as_good_for_small_problems():
    k = torch.tensor([1.0, 2.0, 0.0])
    x = torch.tensor([1e-11, 2e-11])
    empty = torch.zeros(2, 3)
    beta = torch.tensor(0.5)
    small = IMPLICIT.minimise(empty, k, x, method="descend", beta=beta)
    assert_close(small, IMPLICIT.minimise(empty, k, x, beta=beta), rtol=1e-6, atol=0)


def test_minimise_works_in_float64_without_grad_and_leaves_no_graph():
    S, k, x, beta = (t.float() for t in problem())
    S.requires_grad_()
    with torch.no_grad():
        for method in ("solve", "descend"):
            solved = IMPLICIT.minimise(S, k, x, method=method, beta=beta)
            assert solved.dtype == torch.float64
            assert not solved.requires_grad
    assert S.grad is None
    assert not EXPLICIT.gradient(S, S, k, x, beta=beta).requires_grad


QUARTIC = Objective(lambda S, S_prev: (S - S_prev).pow(4).sum((-2, -1)), recall_loss, "quartic")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda S, k, x, beta: IMPLICIT.minimise(S, k, x, betta=beta),
            r"takes the parameters \['beta'\]; got \['betta'\]",
        ),
        (lambda S, k, x, beta: IMPLICIT(S, S, k, x), r"got \[\]"),
        (
            lambda S, k, x, beta: IMPLICIT.minimise(S, k, x, method="newton", beta=beta),
            "'solve' or 'descend'",
        ),
        (
            lambda S, k, x, beta: IMPLICIT(S, S, k[:3], x, beta=beta),
            r"k has shape \(3,\), x \(3,\); expected \(...,4\) and \(...,3\)",
        ),
        (
            lambda S, k, x, beta: QUARTIC.minimise(S, k, x, beta=beta),
            "f is not quadratic or has no minimum",
        ),
        (
            lambda S, k, x, beta: minimise_quadratic(lambda S: S.sum((-2, -1)), S),
            "has no minimum|no unique minimum",
        ),
        (
            lambda S, k, x, beta: minimise_quadratic(lambda S: -S.square().sum((-2, -1)), S),
            "no unique minimum",
        ),
    ],
)
def test_wrong_arguments_and_problems_without_a_solution_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(*problem())


def test_descent_without_an_end_stops():
    with pytest.raises(RuntimeError, match="steps of descent"):
        minimise_descent(lambda S: S.sum((-2, -1)), problem()[0], max_steps=50)


def test_descent_minimises_a_loss_that_is_not_quadratic():
    def log_cosh(S, k, x):
        read = (S * k[..., None, :]).sum(-1)
        residual = read - x
        return residual.cosh().log().sum(-1)

    S, k, x, _ = problem()
    robust = Objective(proximity, log_cosh)
    solved = robust.minimise(S, k, x, method="descend")
    gradient = torch.outer(torch.tanh(solved @ k - x), k)
    expected = S - 0.5 * gradient  # from a gradient of zero
    assert_close(solved, expected, rtol=1e-8, atol=1e-8)
    assert (
        gradient_of(lambda S: robust(S, solved, k, x), solved).abs().max() > 1e-3
    )  # another S_prev has another minimum
