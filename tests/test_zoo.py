"""Test the zoo's rows: independent oracles, shapes, and the contents of the table."""

import math
import re
from dataclasses import replace

import pytest
import torch

from fla_files import naive
from longhorn_kit.theory.zoo import (
    FAMILIES,
    GATED,
    ZOO,
    draw_gates,
    gated_deltanet_step,
    gla_step,
    hgrn2_step,
    mamba2_step,
    mamba_input_a_step,
    mamba_step,
    rglru_step,
    rwkv7_step,
    verify,
    zoo_markdown,
)
from longhorn_kit.theory.zoo_steps import gated_step
from theory_cases import draw

pytestmark = pytest.mark.numeric

D = 5
N = 7
eye = torch.eye(N, dtype=torch.float64)


def rate(seed, *size):
    return torch.rand(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


S = draw(0, D, N)
k = draw(1, N)
x = draw(2, D)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (2, 9)])
def test_every_row_equals_its_oracle_at_odd_shapes(name, shape):
    assert verify(ZOO[name], trials=3, seed=11, shape=shape) < 1e-11


@pytest.mark.parametrize("name", ZOO)
def test_a_wrong_update_is_noticed(name):
    layer = ZOO[name]
    broken = replace(layer, step=lambda S, k, x, **gates: layer.step(S, k, x, **gates) + 1e-6 * S)
    assert verify(broken) > 1e-8


def test_nan_is_not_taken_for_agreement():
    layer = replace(ZOO["RetNet"], step=lambda S, *args, **gates: S * float("nan"))
    assert math.isnan(verify(layer))


@pytest.mark.parametrize("name", ZOO)
def test_a_batch_of_states_gives_the_same_as_one_at_a_time(name):
    layer = ZOO[name]
    pairs = (layer.batch,) if layer.batch > 1 else ()
    keys = layer.keys(draw(3, 4, *pairs, N))
    values = draw(4, 4, *pairs, D)
    states = draw(5, 4, D, keys.shape[-1])
    gates = {
        name: gate.double()
        for name, gate in draw_gates(layer, D, N, torch.Generator().manual_seed(6)).items()
    }
    together = layer.step(states, keys, values, **gates)
    for i in range(4):
        assert torch.allclose(
            together[i], layer.step(states[i], keys[i], values[i], **gates), atol=1e-12
        )


def test_gates_keep_every_fading_row_stable():
    for layer in ZOO.values():
        if layer.family == "fades":
            gates = {name: gate.double() for name, gate in draw_gates(layer, D, N).items()}
            key = layer.keys(k)
            kept = layer.step(torch.ones(D, len(key), dtype=k.dtype), key, 0 * x, **gates)
            assert (kept > 0).all(), layer.name
            assert (kept <= 1).all(), layer.name


# published recurrences, written as matrix products


def test_gla_and_hgrn2_and_retnet_as_matrices():
    alpha = rate(7, N)
    expected = S @ torch.diag(alpha) + torch.outer(x, k)
    assert torch.allclose(gla_step(S, k, x, alpha), expected)
    key = rate(8, N)
    expected = S @ (eye - torch.diag(key)) + torch.outer(x, key)
    assert torch.allclose(hgrn2_step(S, key, x), expected)


def test_mamba_is_the_discretised_state_equation():
    dt = rate(9, D)
    A = -rate(10, D, N)
    after = mamba_step(S, k, x, dt, A)
    for d in range(D):
        transition = torch.linalg.matrix_exp(dt[d] * torch.diag(A[d]))
        expected = transition @ S[d] + dt[d] * k * x[d]
        assert torch.allclose(after[d], expected)
    shared = -rate(11, N)
    expected = mamba_step(S, k, x, dt, shared.expand(D, N))
    assert torch.allclose(mamba_input_a_step(S, k, x, dt, -shared), expected)
    same_dt = torch.full((D,), 0.3).double()
    same_A = torch.full((D, N), -2.0).double()
    expected = mamba_step(S, k, x, same_dt, same_A)
    for number in (0.3, torch.tensor([0.3])):
        assert torch.allclose(mamba2_step(S, k, x, number, -2.0), expected)


def test_gated_delta_rule_as_matrices():
    key = k / k.norm()
    beta = torch.tensor([0.4], dtype=torch.float64)
    forget = eye - 0.4 * torch.outer(key, key)
    write = 0.4 * torch.outer(x, key)
    expected = 0.9 * S @ forget + write
    assert torch.allclose(gated_deltanet_step(S, key, x, 0.9, beta), expected)


def test_rwkv7_is_that_of_flash_linear_attention():
    T = 6
    erased = torch.nn.functional.normalize(draw(30, 6, N), dim=-1)
    r = draw(31, 6, N).sigmoid()
    log_w = -math.exp(-0.5) * draw(32, T, N).sigmoid()
    keys = draw(33, T, N)
    values = draw(34, T, D)  # as in fla.layers.rwkv7
    state = S
    for t in range(T):
        state = rwkv7_step(state, keys[t], values[t], log_w[t].exp(), erased[t], r[t])

    def wide(t):
        return t[None, None].float()

    recurrence = naive("generalized_delta_rule/dplr/naive", "dplr_recurrence")
    arguments = (keys, keys, values, -erased, erased * r, log_w, S.T)
    _, states = recurrence(*map(wide, arguments))
    assert torch.allclose(states[0, 0].T.double(), state, atol=1e-5)


def test_rglru_keeps_unit_variance():
    state = torch.randn(200_000, 1, generator=torch.Generator().manual_seed(0))
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    new = rglru_step(state, torch.ones(1), values, torch.tensor(0.8))
    assert abs(new.var().item() - 1) < 0.02


def test_the_lemma_at_gate_zero_forgets_everything():
    assert torch.allclose(GATED.minimise(S, k, x, a=0.0, c=1.0), torch.outer(x, k))
    assert torch.allclose(gated_step(S, k, x, 0.0), torch.outer(x, k))


def test_the_table_is_complete():
    needed = [
        "Linear attention",
        "RetNet",
        "GLA",
        "RWKV-5",
        "RWKV-6",
        "HGRN2",
        "Mamba (S6)",
        "Mamba, input-dependent A",
        "Mamba-2 (SSD)",
        "mLSTM (xLSTM)",
        "Griffin (RG-LRU)",
        "DeltaNet",
        "Gated DeltaNet",
        "RWKV-7",
        "TTT-Linear",
        "Longhorn, exact",
        "Longhorn, diagonal",
        "Longhorn, decoupled",
    ]
    assert list(ZOO) == needed
    for name, layer in ZOO.items():
        assert layer.name == name
        assert layer.family in FAMILIES
        assert layer.arxiv or layer.source == "this book"
        for number in layer.arxiv:
            assert re.fullmatch(r"\d{4}\.\d{5}", number)
    result = zoo_markdown().count("\n")
    assert result == len(ZOO) + 1


def test_the_formulas_are_valid_for_matplotlib():
    from matplotlib.mathtext import MathTextParser

    for layer in ZOO.values():
        for formula in filter(None, (layer.objective, layer.where, layer.update)):
            MathTextParser("path").parse(f"${formula}$")
