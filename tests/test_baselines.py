"""Mamba against mamba.py on shared weights; attention against a plain softmax with complex rotations."""
import pytest
import torch
import torch.nn.functional as F
from mambapy.mamba import MambaBlock, MambaConfig

from longhorn_kit.models.baselines import Attention, Mamba, default_heads, mask_options, rotate


def pair(d_model=24, d_state=5, d_conv=3, expand=2, seed=0):
    "Our layer and mamba.py's, with the same weights; nothing left at a value that could hide a missing term."
    torch.manual_seed(seed)
    ours = Mamba(d_model, d_state=d_state, d_conv=d_conv, expand=expand)
    theirs = MambaBlock(MambaConfig(d_model, 1, d_state=d_state, d_conv=d_conv, expand_factor=expand))
    for parameter in ours.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.load_state_dict({"D" if n == "D_skip" else n: p for n, p in ours.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("steps", [1, 2, 13, 32])
def test_mamba_equals_mambapy(steps):
    ours, theirs = pair()
    h, dy = torch.randn(2, steps, 24), torch.randn(2, steps, 24)
    a, b = h.clone().requires_grad_(), h.clone().requires_grad_()
    ya, yb = ours(a), theirs(b)
    torch.testing.assert_close(ya, yb, atol=1e-5, rtol=1e-4)
    ya.backward(dy)
    yb.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    theirs_grads = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other = theirs_grads["D" if name == "D_skip" else name].grad
        torch.testing.assert_close(parameter.grad, other, atol=2e-4, rtol=1e-3, msg=lambda m: f"{name}: {m}")


def test_mamba_decodes_like_mambapy():
    ours, theirs = pair(d_conv=4)
    h, cache = torch.randn(2, 6, 24), (None, torch.zeros(2, 48, 3))
    state = ours.empty_cache(2)
    with torch.no_grad():
        for t in range(6):
            y, state = ours.step(h[:, t], state)
            expected, cache = theirs.step(h[:, t], cache)
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state.S, cache[0], atol=1e-5, rtol=1e-4)


def test_mamba_starts_with_time_scales_from_ten_to_a_thousand_tokens():
    layer = Mamba(512)
    delta = F.softplus(layer.dt_proj.bias)
    assert 0.99e-3 < delta.min() < 2e-3 and 0.05 < delta.max() < 0.101
    assert abs(delta.log().mean() - torch.tensor(1e-2).log()) < 0.2
    torch.testing.assert_close(layer.A_log.exp()[7], torch.arange(1.0, 17))


def naive_attention(layer, h):
    "One query at a time, in float64; rotary positions as multiplication by complex numbers."
    B, T, d = h.shape
    H, P = layer.n_heads, d // layer.n_heads
    q, k, v = (h.double() @ layer.qkv_proj.weight.double().T).view(B, T, 3, H, P).unbind(2)
    angle = torch.arange(T)[:, None] * layer.rope_base ** (-torch.arange(0, P, 2, dtype=torch.float64) / P)
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    q, k = (torch.complex(t[..., : P // 2], t[..., P // 2 :]) * turn for t in (q, k))
    y = torch.zeros(B, T, H, P, dtype=torch.float64)
    for t in range(T):
        scores = torch.einsum("bhp,bshp->bhs", q[:, t], k[:, : t + 1].conj()).real / P**0.5
        y[:, t] = torch.einsum("bhs,bshp->bhp", scores.softmax(-1), v[:, : t + 1])
    return y.flatten(2) @ layer.out_proj.weight.double().T


@pytest.mark.parametrize("d_model, n_heads, T", [(12, 1, 7), (12, 3, 1), (32, 4, 19), (128, None, 6)])
def test_attention_equals_a_plain_softmax(d_model, n_heads, T):
    torch.manual_seed(0)
    layer, h = Attention(d_model, n_heads=n_heads, rope_base=50.0), torch.randn(2, T, d_model)
    expected = naive_attention(layer, h)
    torch.testing.assert_close(layer(h).double(), expected, atol=1e-5, rtol=1e-4)
    _, cache = layer.prefill(h[:, : T // 2])
    late = layer.prefill(h[:, T // 2 :], cache)[0]
    torch.testing.assert_close(late.double(), expected[:, T // 2 :], atol=1e-5, rtol=1e-4)


def test_attention_caches_one_column_a_token():
    layer, cache = Attention(32, n_heads=2), None
    for length in (3, 1, 5):
        _, cache = layer.prefill(torch.randn(2, length, 32), cache)
    assert cache.k.shape == cache.v.shape == (2, 2, 9, 16)
    assert layer.empty_cache(4).k.shape == (4, 2, 0, 16)


def test_rotation_keeps_lengths_and_sees_only_distances():
    x = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(rotate(x, 100).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotate(x, 0)[:, :, 0], x[:, :, 0])
    later = torch.cat([torch.zeros(2, 3, 2, 8), x], 2)
    torch.testing.assert_close(rotate(x, 2), rotate(later, 0)[:, :, 2:])


def test_mask_lets_new_tokens_see_the_past_and_themselves():
    mask = mask_options(3, 4)["attn_mask"]
    assert [[bool(s <= 4 + t) for s in range(7)] for t in range(3)] == mask.tolist()
    assert mask_options(3, 0) == {"is_causal": True} and mask_options(1, 9) == {"is_causal": False}


@pytest.mark.parametrize("d_model, heads", [(2, 1), (64, 1), (96, 2), (128, 2), (768, 12), (1024, 16), (134, 1)])
def test_heads_are_of_a_size_near_64(d_model, heads):
    assert default_heads(d_model) == heads


@pytest.mark.parametrize("wrong, message", [
    (lambda: Attention(65), "d_model is 65; rotary positions need an even size"),
    (lambda: Attention(64, n_heads=3), "d_model is 64; expected a multiple of 2 n_heads = 6"),
    (lambda: Attention(64, n_heads=0), "n_heads is 0; expected an integer of at least 1"),
    (lambda: Mamba(16, d_state=-1), "d_state is -1; expected an integer of at least 1"),
])
def test_mistakes_are_told_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
