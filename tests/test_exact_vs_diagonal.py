"""Check limits, fixed points and symmetries of the updates against independent formulas."""

import base64
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longhorn_kit.theory.closed_forms import (
    decoupled_step,
    diagonal_step,
    exact_step,
    explicit_step,
)
from longhorn_kit.theory.exact_vs_diagonal import (
    LEARNERS,
    best_scale,
    correlated_keys,
    linear_attention_step,
    random_keys,
    recall_error,
    recall_matrix,
    run_stream,
    transition_eigenvalues,
    transition_matrix,
)
from rounding import bound, error
from theory_cases import draw

pytestmark = pytest.mark.numeric

IMPLICIT_STEPS = [exact_step, diagonal_step, decoupled_step]
seeds = st.integers(0, 10_000)


@pytest.mark.parametrize("step", IMPLICIT_STEPS)
@given(seed=seeds, log_length=st.floats(-6, 4), beta=st.floats(0, 1), state_size=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_eigenvalues_of_implicit_steps_lie_between_zero_and_one(
    step, seed, log_length, beta, state_size
):
    values = transition_eigenvalues(step, 10**log_length * draw(seed, state_size), beta)
    assert values.shape == (state_size,)
    assert values.min() > -1e-12
    assert values.max() < 1 + 1e-12


def test_transition_of_a_batch_of_keys_is_the_transition_of_each():
    keys = draw(0, 2, 3, 5)
    for step in (*IMPLICIT_STEPS, explicit_step):
        of_all = transition_matrix(step, keys)[1, 2]
        of_one = transition_matrix(step, keys[1, 2])
        assert error(of_all, of_one) < bound(of_one.dtype, 5 + 5)  # |k|^2 and S k


@given(seed=seeds, zeros=st.integers(0, 6), beta=st.floats(0.3, 1))
@settings(max_examples=20, deadline=None)
def test_repeated_pair_goes_to_x_or_to_the_number_of_nonzero_coordinates_times_x(seed, zeros, beta):
    source = torch.Generator().manual_seed(seed)
    k = (0.7 + torch.rand(7, generator=source, dtype=torch.float64)) * torch.randn(
        7, generator=source
    ).sign()
    k[:zeros] = 0
    x = draw(seed + 1, 3)
    stream = k.expand(800, 7), x.expand(800, 3)
    assert torch.allclose(run_stream(exact_step, *stream, beta)[-1] @ k, x, atol=1e-6)
    for step in (diagonal_step, decoupled_step):
        result = run_stream(step, *stream, beta)[-1] @ k
        assert torch.allclose(result, (7 - zeros) * x, atol=1e-4)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_exact_does_not_depend_on_the_basis_of_the_keys_and_diagonal_does(seed):
    rotation = torch.linalg.qr(draw(seed, 6, 6))[0]
    keys = draw(seed + 1, 4, 6)
    assert torch.allclose(
        recall_matrix(exact_step, keys), recall_matrix(exact_step, keys @ rotation.T)
    )
    assert not torch.allclose(
        recall_matrix(diagonal_step, keys), recall_matrix(diagonal_step, keys @ rotation.T)
    )


def test_exact_solves_the_linear_system_when_pairs_repeat():
    keys = draw(3, 5, 8)
    values = draw(4, 5, 3)
    S = run_stream(exact_step, keys.repeat(400, 1), values.repeat(400, 1))[-1]
    expected = torch.linalg.lstsq(keys, values).solution.T
    assert torch.allclose(S, expected, atol=1e-5)


def test_run_stream_takes_initial_state_batches_and_one_rate_per_step_and_channel():
    keys = draw(5, 2, 7, 4)
    values = draw(6, 2, 7, 3)
    beta = torch.rand(2, 7, 3).double()
    start = draw(7, 3, 4)
    states = run_stream(exact_step, keys, values, beta, start)
    assert states.shape == (2, 8, 3, 4)
    assert torch.equal(states[1, 0], start)
    A = torch.eye(4, dtype=keys.dtype) + beta[1, 0, 2] * torch.outer(keys[1, 0], keys[1, 0])
    row = torch.linalg.solve(A, start[2] + beta[1, 0, 2] * values[1, 0, 2] * keys[1, 0])
    assert torch.allclose(states[1, 1, 2], row)


def test_run_stream_takes_one_rate_per_channel_and_no_pairs():
    shape = run_stream(exact_step, torch.zeros(0, 4), torch.zeros(0, 3)).shape
    assert shape == (1, 3, 4)
    keys = draw(5, 2, 7, 4)
    values = draw(6, 2, 7, 3)
    beta = torch.rand(3).double()
    assert torch.equal(
        run_stream(exact_step, keys, values, beta),
        run_stream(exact_step, keys, values, beta.expand(2, 7, 3)),
    )
    assert torch.equal(
        run_stream(exact_step, keys, values, beta[0]),
        run_stream(exact_step, keys, values, beta[0].item()),
    )


def test_recall_of_linear_attention_is_the_gram_matrix_and_its_error_is_relative():
    keys = draw(8, 3, 5, 6)
    expected = 2 * keys @ keys.mT
    assert torch.allclose(recall_matrix(linear_attention_step, keys, passes=2), expected)
    assert recall_error(torch.eye(5)) == 0
    assert recall_error(torch.zeros(5, 5)) == 1


def test_no_scale_is_better_than_the_best_scale():
    M = recall_matrix(diagonal_step, random_keys(20, 6, 8, torch.Generator().manual_seed(0)))
    best = recall_error(M, best_scale(M)).mean()
    for factor in (0.9, 0.999, 1.001, 1.1):
        assert recall_error(M, best_scale(M) * factor).mean() > best


@given(cosine=st.floats(-1, 1), state_size=st.integers(2, 20))
@settings(max_examples=20, deadline=None)
def test_correlated_keys_have_the_cosine_and_the_length(cosine, state_size):
    a, b = correlated_keys(cosine, 10, state_size, torch.Generator().manual_seed(0)).unbind(1)
    result = (a * b).sum(-1) / state_size
    expected = torch.tensor(cosine, dtype=a.dtype)
    assert torch.allclose(result, expected, atol=1e-5)
    result = b.square().sum(-1)
    expected = torch.tensor(float(state_size))
    assert torch.allclose(result, expected, rtol=1e-4)


def test_learners_that_want_unit_keys_do_not_see_the_length_of_keys():
    keys = draw(9, 4, 6)
    for name, learner in LEARNERS.items():
        same = torch.allclose(learner.prepare(keys), learner.prepare(5 * keys))
        assert same == (name in ("deltanet", "linear_attention"))


# --- film and sliders of the notebook

NOTEBOOK = Path(__file__).parent.parent / "nbs" / "theory" / "03_exact_vs_diagonal.ipynb"


def outputs():
    return [
        o.get("data", {})
        for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        for o in c.get("outputs", [])
    ]


def test_committed_outputs_hold_pictures_and_no_widget():
    "Sliders work in a running notebook; a static page shows curves instead."
    kinds = {kind for data in outputs() for kind in data}
    assert "image/png" in kinds
    assert not [kind for kind in kinds if "widget" in kind]
    assert "widgets" not in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["metadata"]


def test_the_film_is_small_needs_no_network_and_can_stand_still():
    (film,) = [
        svg
        for data in outputs()
        for svg in re.findall(
            r"data:image/svg\+xml;base64,([^\"]+)", "".join(data.get("text/html", ""))
        )
    ]
    svg = base64.b64decode(film).decode()
    assert len(film) < 100_000
    assert "prefers-reduced-motion" in svg
    assert "script" not in svg
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    ElementTree.fromstring(svg)
