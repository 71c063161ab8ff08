"""Every baseline against an independent implementation on shared weights, outputs and all gradients: mamba.py and
transformers for the Mambas, flash-linear-attention's naive operations for the matrix states, a plain softmax with
complex rotations for attention."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from mambapy.mamba import MambaBlock, MambaConfig

from fla_files import naive
from longhorn_kit.compat import mend_torchvision
from longhorn_kit.models import LMConfig, SequenceLM, lm
from longhorn_kit.models.baselines import (
    Attention,
    Mamba,
    MambaInputA,
    default_heads,
    mask_options,
    rotate,
)
from longhorn_kit.models.files import match_parameters
from longhorn_kit.models.lm import count_parameters
from longhorn_kit.models.matrix_mixers import (
    GLA,
    HGRN2,
    RWKV5,
    RWKV6,
    DeltaNet,
    GatedDeltaNet,
    Mamba2,
    RetNet,
    head_sizes,
    scan_backend,
)
from longhorn_kit.models.mixer import Mixer, build_mixer
from mixers import MATRICES, SCANS, every_family, every_matrix, every_mixer
from sweep import slow_case

pytestmark = pytest.mark.numeric


def pair(d_model=24, d_state=5, d_conv=3, expand=2, seed=0):
    "Our layer and mamba.py's, with the same weights; nothing left at a value that could hide a missing term."
    torch.manual_seed(seed)
    ours = Mamba(d_model, d_state=d_state, d_conv=d_conv, expand=expand)
    theirs = MambaBlock(
        MambaConfig(d_model, 1, d_state=d_state, d_conv=d_conv, expand_factor=expand)
    )
    for parameter in ours.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.load_state_dict({"D" if n == "D_skip" else n: p for n, p in ours.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("steps", [1, 2, 13, 32])
def test_mamba_equals_mambapy(steps):
    ours, theirs = pair()
    h = torch.randn(2, steps, 24)
    dy = torch.randn(2, steps, 24)
    a = h.clone().requires_grad_()
    b = h.clone().requires_grad_()
    ya = ours(a)
    yb = theirs(b)
    torch.testing.assert_close(ya, yb, atol=1e-5, rtol=1e-4)
    ya.backward(dy)
    yb.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    theirs_grads = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other = theirs_grads["D" if name == "D_skip" else name].grad
        torch.testing.assert_close(
            parameter.grad, other, atol=2e-4, rtol=1e-3, msg=lambda m: f"{name}: {m}"
        )


def test_mamba_decodes_like_mambapy():
    ours, theirs = pair(d_conv=4)
    h = torch.randn(2, 6, 24)
    cache = (None, torch.zeros(2, 48, 3))
    state = ours.empty_cache(2)
    with torch.no_grad():
        for t in range(6):
            y, state = ours.step(h[:, t], state)
            expected, cache = theirs.step(h[:, t], cache)
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state.S, cache[0], atol=1e-5, rtol=1e-4)


def test_rates_of_a_float64_mamba_are_not_rounded():
    layer = build_mixer("mamba", 8).double()
    assert torch.equal(layer.rates(None), -layer.A_log.exp())


def test_mamba_starts_with_time_scales_from_ten_to_a_thousand_tokens():
    layer = Mamba(512)
    delta = F.softplus(layer.dt_proj.bias)
    assert 0.99e-3 < delta.min() < 2e-3 and 0.05 < delta.max() < 0.101
    assert abs(delta.log().mean() - torch.tensor(1e-2).log()) < 0.2
    torch.testing.assert_close(layer.A_log.exp()[7], torch.arange(1.0, 17))


def naive_attention(layer, h):
    "One query at a time, in float64; rotary positions as multiplication by complex numbers."
    B, T, d = h.shape
    H = layer.n_heads
    P = d // layer.n_heads
    q, k, v = (h.double() @ layer.qkv_proj.weight.double().T).view(B, T, 3, H, P).unbind(2)
    angle = torch.arange(T)[:, None] * layer.rope_base ** (
        -torch.arange(0, P, 2, dtype=torch.float64) / P
    )
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    q, k = (torch.complex(t[..., : P // 2], t[..., P // 2 :]) * turn for t in (q, k))
    y = torch.zeros(B, T, H, P, dtype=torch.float64)
    for t in range(T):
        scores = torch.einsum("bhp,bshp->bhs", q[:, t], k[:, : t + 1].conj()).real / P**0.5
        y[:, t] = torch.einsum("bhs,bshp->bhp", scores.softmax(-1), v[:, : t + 1])
    return y.flatten(2) @ layer.out_proj.weight.double().T


@pytest.mark.parametrize(
    "d_model, n_heads, T", [(12, 1, 7), (12, 3, 1), (32, 4, 19), (128, None, 6)]
)
def test_attention_equals_a_plain_softmax(d_model, n_heads, T):
    torch.manual_seed(0)
    layer = Attention(d_model, n_heads=n_heads, rope_base=50.0)
    h = torch.randn(2, T, d_model)
    expected = naive_attention(layer, h)
    torch.testing.assert_close(layer(h).double(), expected, atol=1e-5, rtol=1e-4)
    _, cache = layer.prefill(h[:, : T // 2])
    late = layer.prefill(h[:, T // 2 :], cache)[0]
    torch.testing.assert_close(late.double(), expected[:, T // 2 :], atol=1e-5, rtol=1e-4)
    if T > 1:  # a single token looks at itself, whatever its query
        agree(layer, layer, lambda h: naive_attention(layer, h).float(), h)


def test_attention_caches_one_column_a_token():
    layer = Attention(32, n_heads=2)
    cache = None
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


@pytest.mark.parametrize(
    "d_model, heads", [(2, 1), (64, 1), (96, 2), (128, 2), (768, 12), (1024, 16), (134, 1)]
)
def test_heads_are_of_a_size_near_64(d_model, heads):
    assert default_heads(d_model) == heads


# The matrix mixers ---------------------------------------------------------------------------------------------


def split(t, heads, *sizes):
    "(B,T,C) -> pieces (B,T,H,F) of these sizes a head."
    pieces = t.split([heads * size for size in sizes], -1)
    return [piece.reshape(*t.shape[:2], heads, size) for piece, size in zip(pieces, sizes)]


def rms(y, weight=1.0):
    return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def short_conv(layer, t):
    "The causal convolution as a sum of shifted copies."
    weight = layer.conv1d.weight[:, 0]
    T = t.shape[1]
    taps = weight.shape[1]
    padded = torch.cat([torch.zeros(len(t), taps - 1, t.shape[2]), t], 1)
    return F.silu(sum(padded[:, i : i + T] * weight[:, i] for i in range(taps)))


def previous(h):
    return torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)


def their_retnet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v, g = split(h @ layer.in_proj.weight.T, H, N, N, P, P)
    angle = torch.arange(h.shape[1])[:, None] * layer.rope_base ** (-torch.arange(0, N, 2) / N)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def turned(t):
        t = torch.complex(t[..., : N // 2], t[..., N // 2 :]) * turn
        return torch.cat([t.real, t.imag], -1).transpose(1, 2)

    y = naive("retention/naive", "naive_retention")(
        turned(q), turned(k), v.transpose(1, 2)
    ).transpose(1, 2)
    return (rms(y) * F.silu(g)).flatten(2) @ layer.out_proj.weight.T


def their_gla(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v, g = split(h @ layer.in_proj.weight.T, H, N, N, P, P)
    down, up = layer.decay_proj
    gate = torch.sigmoid(h @ down.weight.T @ up.weight.T + up.bias).log() / layer.temperature
    y, _ = naive("gla/naive", "naive_recurrent_gla")(q, k, v, gate.view(q.shape))
    return (rms(y, layer.norm_weight) * F.silu(g)).flatten(2) @ layer.out_proj.weight.T


def their_hgrn2(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, f, v = split(h @ layer.in_proj.weight.T, H, N, N, P)
    decay = layer.lower_bound + (1 - layer.lower_bound) * torch.sigmoid(f)
    y, _ = naive("gla/naive", "naive_recurrent_gla")(F.silu(q), 1 - decay, v, decay.log())
    return rms(y.flatten(2), layer.norm_weight) @ layer.out_proj.weight.T


def their_deltanet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v = (
        t.transpose(1, 2) for t in split(short_conv(layer, h @ layer.in_proj.weight.T), H, N, N, P)
    )
    q, k = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (q, k))
    beta = torch.sigmoid(h @ layer.beta_proj.weight.T).transpose(1, 2)
    y, _ = naive("delta_rule/naive", "delta_rule_recurrence")(q, k, v, beta)
    return rms(y.transpose(1, 2), layer.norm_weight).flatten(2) @ layer.out_proj.weight.T


def their_gated_deltanet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    qkv, g = (h @ layer.in_proj.weight.T).split([H * (2 * N + P), H * P], -1)
    q, k, v = split(short_conv(layer, qkv), H, N, N, P)
    q, k = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (q, k))
    beta, dt = (h @ layer.rate_proj.weight.T).chunk(2, -1)
    decay = -layer.A_log.exp() * torch.log1p((dt + layer.dt_bias).exp())
    y, _ = naive("gated_delta_rule/naive", "naive_recurrent_gated_delta_rule")(
        q, k, v, beta.sigmoid(), decay
    )
    return (rms(y, layer.norm_weight) * F.silu(g.view(y.shape))).flatten(
        2
    ) @ layer.out_proj.weight.T


def their_rwkv(layer, h, r, k, v, g, log_decay, bonus):
    H = layer.n_heads
    N = layer.d_key
    r, k, v, log_decay = (t.view(*h.shape[:2], H, N).transpose(1, 2) for t in (r, k, v, log_decay))
    y, _ = naive("rwkv6/recurrent_naive", "naive_recurrent_rwkv6")(
        r, k, v, log_decay, bonus, scale=1.0
    )
    y = y.transpose(1, 2)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 64e-5).sqrt()
    y = y.flatten(2) * layer.norm.weight + layer.norm.bias
    return (y * F.silu(g)) @ layer.out_proj.weight.T


def their_rwkv5(layer, h):
    def mixed(i):
        return h + (previous(h) - h) * layer.mix[i]

    k, v, r, g = (
        mixed(i) @ getattr(layer, f"{name}_proj").weight.T for i, name in enumerate("kvrg")
    )
    decay = -layer.decay.exp().repeat_interleave(layer.d_key).expand(k.shape)
    return their_rwkv(layer, h, r, k, v, g, decay, layer.bonus[:, None].expand(-1, layer.d_key))


def their_rwkv6(layer, h):
    delta = previous(h) - h
    mixed = []
    low = torch.tanh((h + delta * layer.mix[0]) @ layer.mix_down.weight.T).chunk(5, -1)
    for i in range(5):
        mixed.append(h + delta * (layer.mix[i + 1] + low[i] @ layer.mix_up[i]))
    w = (
        torch.tanh(mixed[0] @ layer.decay_down.weight.T) @ layer.decay_up.weight.T
        + layer.decay_up.bias
    )
    k, v, r, g = (t @ getattr(layer, f"{name}_proj").weight.T for t, name in zip(mixed[1:], "kvrg"))
    return their_rwkv(layer, h, r, k, v, g, -w.exp(), layer.bonus)


def their_mamba_input_a(layer, h):
    "The parts of mamba.py, whose scan takes any A that can be broadcast."
    x, z = (h @ layer.in_proj.weight.T).chunk(2, -1)
    taps = layer.conv1d.weight[:, 0]
    T = h.shape[1]
    padded = torch.cat([torch.zeros(len(h), taps.shape[1] - 1, x.shape[2]), x], 1)
    x = F.silu(
        layer.conv1d.bias + sum(padded[:, i : i + T] * taps[:, i] for i in range(taps.shape[1]))
    )
    dt_low_rank, k, q = (x @ layer.x_proj.weight.T).split(
        [layer.rank, layer.d_state, layer.d_state], -1
    )
    A = -torch.log1p((x @ layer.A_proj.weight.T + layer.A_proj.bias).exp())
    theirs = MambaBlock(MambaConfig(layer.d_model, 1, d_state=layer.d_state))
    delta = torch.log1p((dt_low_rank @ layer.dt_proj.weight.T + layer.dt_proj.bias).exp())
    y = theirs.selective_scan_seq(x, delta, A[:, :, None], k, q, layer.D_skip)
    return (y * F.silu(z)) @ layer.out_proj.weight.T


THEIRS = {
    "retnet": (their_retnet, dict(n_heads=2, expand=1.5, rope_base=50.0)),
    "gla": (their_gla, dict(n_heads=3, gate_rank=5)),
    "hgrn2": (their_hgrn2, dict(n_heads=2)),
    "deltanet": (their_deltanet, dict(n_heads=2, d_conv=3)),
    "gated_deltanet": (their_gated_deltanet, dict(n_heads=2)),
    "rwkv5": (their_rwkv5, dict(n_heads=3)),
    "rwkv6": (their_rwkv6, dict(n_heads=2, mix_rank=4, decay_rank=6)),
    "mamba_input_a": (their_mamba_input_a, dict(d_state=5)),
}


def perturbed(name, d_model, seed=0, **options):
    torch.manual_seed(seed)
    layer = build_mixer(name, d_model, **options)
    for parameter in layer.parameters():  # nothing left at a value that could hide a missing term
        parameter.data += 0.2 * torch.randn_like(parameter)
    return layer


def agree(layer, ours, theirs, h):
    "Outputs and the gradients of the input and of every parameter."
    dy = torch.randn(*h.shape)
    results = []
    for function in (ours, theirs):
        x = h.clone().requires_grad_()
        y = function(x)
        named = dict(layer.named_parameters())
        results.append((y, *torch.autograd.grad(y, [x, *named.values()], dy)))
    for what, a, b in zip(["output", "input", *named], *results):
        assert (a - b).norm() <= 1e-4 * b.norm() and b.norm() > 0, what


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("steps", [3, 70])
def test_a_mixer_equals_the_naive_operation(name, steps):
    theirs, options = THEIRS[name]
    layer = perturbed(name, 24, **options)
    agree(layer, layer, lambda h: theirs(layer, h), torch.randn(2, steps, 24))


def test_hgrn2_with_a_lower_bound():
    layer = perturbed("hgrn2", 24, n_heads=2, lower_bound=0.7)
    agree(layer, layer, lambda h: their_hgrn2(layer, h), torch.randn(2, 30, 24))


@cache
def from_transformers(kind):
    "transformers' layer and configuration."
    mend_torchvision()
    pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    from transformers import Mamba2Config, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    return {"mamba": (MambaMixer, MambaConfig), "mamba2": (Mamba2Mixer, Mamba2Config)}[kind]


def beside(kind, d_model, **options):
    "Our layer, theirs as a function that runs on our parameters."
    Theirs, Config = from_transformers(kind)
    layer = perturbed(kind, d_model, **options)
    config = dict(
        hidden_size=d_model,
        state_size=options["d_state"],
        expand=2,
        conv_kernel=options["d_conv"],
        use_bias=False,
        use_conv_bias=True,
        num_hidden_layers=1,
    )
    if kind == "mamba2":
        config |= dict(num_heads=layer.n_heads, head_dim=layer.d_value, n_groups=1, chunk_size=8)
    else:
        config |= dict(time_step_rank=layer.rank)
    module = Theirs(Config(**config), layer_idx=0)
    renamed = {"D_skip": "D", "norm_weight": "norm.weight"}

    def run(h):
        weights = {renamed.get(name, name): p for name, p in layer.named_parameters()}
        assert weights.keys() == dict(module.named_parameters()).keys()
        return torch.func.functional_call(module, weights, (h,))

    return layer, run


@pytest.mark.parametrize(
    "kind, options",
    [
        ("mamba", dict(d_state=5, d_conv=3)),
        ("mamba2", dict(d_state=5, d_conv=4, n_heads=3)),
        ("mamba2", dict(d_state=8, d_conv=2)),
    ],
)
@pytest.mark.parametrize("steps", [2, 70])
def test_the_mambas_equal_those_of_transformers(kind, options, steps):
    layer, theirs = beside(kind, 24, **options)
    agree(layer, layer, theirs, torch.randn(2, steps, 24))


# Properties of all baselines ----------------------------------------------------------------------------


@every_mixer
def test_changing_a_token_changes_nothing_before_it(name):
    "Changing a token changes no output before it, and all outputs from there on."
    layer = perturbed(name, 32)
    h = torch.randn(1, 90, 32)
    other = h.clone()
    other[:, 67] += 1.0
    with torch.no_grad():
        a = layer(h)
        b = layer(other)
    assert torch.equal(a[:, :67], b[:, :67]), "an output before the token changed"
    assert (a[:, 67:] - b[:, 67:]).abs().amax((0, 2)).min() > 0, (
        "an output from the token on did not change"
    )


@every_matrix
def test_a_state_given_in_the_cache_is_where_decoding_begins(name):
    "Decoding starts from the state in the cache, and gradients reach that state."
    layer = perturbed(name, 32)
    h = torch.randn(2, 9, 32)
    empty = layer.empty_cache(2)
    cache = empty._replace(S=torch.randn_like(empty.S).requires_grad_())
    with torch.no_grad():
        assert not torch.allclose(layer.prefill(h, cache)[0], layer.prefill(h, empty)[0], atol=1e-3)
    (grad,) = torch.autograd.grad(layer.prefill(h, cache)[0].square().sum(), cache.S)
    assert (grad.flatten(1).norm(dim=1) > 0).all()


@every_matrix
def test_sequences_may_be_at_different_positions(name):
    "Two sequences of different lengths continue in one batch, as beam search and padding need it."
    layer = perturbed(name, 32)
    h = torch.randn(2, 12, 32)
    with torch.no_grad():
        _, long = layer.prefill(h[:1, :9])
        _, short = layer.prefill(h[1:, 4:9])
        both = type(long)(*(torch.cat(pair) for pair in zip(long, short)))
        y, _ = layer.prefill(h[:, 9:], both)
        torch.testing.assert_close(y[:1], layer(h[:1])[:, 9:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(y[1:], layer(h[1:, 4:])[:, 5:], atol=1e-5, rtol=1e-5)


@every_mixer
def test_gradients_are_finite_after_a_long_sequence_of_large_inputs(name):
    "After 300 large inputs all gradients are finite."
    layer = perturbed(name, 16)
    h = 30 * torch.randn(1, 300, 16)
    layer(h).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


SIZES = {
    "small": (8192, 512, 12),
    "owt-120m": (50304, 768, 24),
    "owt-350m": (50304, 1024, 48),
    "slimpajama-1.3b": (50304, 2048, 48),
}


def config_at(size, name):
    "Longhorn and Mamba in the paper's shape; the others half as many blocks, each with an MLP."
    vocab, d_model, n_layer = SIZES[size]
    if name.startswith(("longhorn", "mamba")):
        return LMConfig(vocab, d_model, n_layer, name)
    return LMConfig(vocab, d_model, n_layer // 2, name, d_mlp=8 * d_model // 3)


@cache
def one_block(config):
    with torch.device("meta"):
        return SequenceLM(LMConfig.from_dict(json.loads(config)))


def count_alike(config):
    "`count_parameters` without building every block: they are all alike."
    one = one_block(json.dumps(replace(config, n_layer=1).to_dict()))
    return one.num_parameters() + (config.n_layer - 1) * sum(
        p.numel() for p in one.blocks.parameters()
    )


@every_family
@pytest.mark.parametrize(
    "size", ["small", slow_case("owt-120m"), slow_case("owt-350m"), "slimpajama-1.3b"]
)
def test_all_models_of_a_size_have_the_same_number_of_parameters(name, size, monkeypatch):
    "A model of the paper's sizes can be matched to Longhorn's parameters within 1 %, and to its width within 2 %."
    monkeypatch.setattr(lm, "count_parameters", count_alike)
    target = count_parameters(config_at(size, "longhorn"))
    assert target == count_alike(config_at(size, "longhorn"))
    matched = match_parameters(config_at(size, name), target)
    assert abs(count_alike(matched) / target - 1) <= 0.01
    assert abs(matched.d_model / SIZES[size][1] - 1) <= 0.02
    assert replace(matched, d_model=SIZES[size][1], d_mlp=0) == replace(
        config_at(size, name), d_mlp=0
    )


@every_family
def test_every_model_learns_a_short_text_and_goes_on_with_it(name):
    "A model of one block learns a text of 36 tokens in 60 steps, and continues it without a mistake."
    torch.manual_seed(0)
    model = SequenceLM(
        LMConfig(16, 32, 1, name, d_mlp=0 if name.startswith(("longhorn", "mamba")) else 48)
    )
    tokens = torch.randint(16, (1, 12)).repeat(1, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        optimizer.step()
    found = model.generate(tokens[:, :24], 12, temperature=0)[0, 24:]
    assert torch.equal(found, tokens[0, :12]), (
        f"it continues with {found.tolist()} at a loss of {loss.item():.2f} nats"
    )


def test_starting_values_are_those_of_the_sources():
    layer = Mamba2(768)
    assert (layer.n_heads, layer.d_value, layer.d_key) == (24, 64, 128)
    assert layer.A_log.exp().min() >= 1 and layer.A_log.exp().max() <= 16
    assert (RetNet(768).n_heads, RetNet(768).d_key, RetNet(768).d_value) == (3, 256, 512)
    assert (GLA(1024).n_heads, GLA(1024).d_key, GLA(1024).d_value) == (4, 128, 256)
    assert (DeltaNet(1024).n_heads, DeltaNet(1024).d_key, DeltaNet(1024).d_value) == (8, 128, 128)
    assert (
        GatedDeltaNet(2048).n_heads,
        GatedDeltaNet(2048).d_key,
        GatedDeltaNet(2048).d_value,
    ) == (6, 256, 512)
    assert (HGRN2(1024).n_heads, HGRN2(1024).d_key) == (8, 128)
    assert (
        (RWKV6(768).n_heads, RWKV6(768).d_key) == (RWKV5(768).n_heads, RWKV5(768).d_key) == (12, 64)
    )
    x = torch.zeros(1, 1, 64)
    torch.testing.assert_close(MambaInputA(32).rates(x)[0, 0], -torch.arange(1.0, 17))


def test_heads_are_found_for_every_width():
    for d_model in range(1, 200):
        heads, key, value = head_sizes(d_model, None, 0.5, 1, 32)
        assert heads >= 1 and key >= 1 and abs(heads * value - d_model) <= heads / 2
    assert head_sizes(768, 4, 0.5, 1, 128) == (4, 96, 192)


def test_the_backend_can_be_told():
    assert {scan_backend(build_mixer(name, 16)) for name in SCANS + MATRICES} == {"chunked"}
    assert scan_backend(build_mixer("attention", 16)) == "scaled_dot_product_attention"

    class Other(Mixer):
        def __init__(self, d_model):
            super().__init__(d_model)
            self.out_proj = torch.nn.Linear(d_model, d_model)

        run = empty_cache = None

    assert scan_backend(Other(16)) == "Other.run"


@every_matrix
def test_the_backend_is_told_for_what_each_mixer_passes(name, monkeypatch):
    "`scan_backend` picks the backend from what the layer passes to its scan."
    from longhorn_kit.scan import matrix

    asked = []
    monkeypatch.setattr(
        matrix, "fla_obstacle", lambda q, x, beta: asked.append(beta is None) or "no GPU"
    )
    layer = build_mixer(name, 16)
    layer(torch.randn(1, 4, 16))
    passed = set(asked)
    asked.clear()
    scan_backend(layer)
    assert len(passed) == 1 and set(asked) == passed


def test_the_backend_on_a_gpu_follows_the_dtype(monkeypatch):
    from longhorn_kit.models import matrix_mixers

    asked = []
    monkeypatch.setattr(
        matrix_mixers, "pick_matrix_backend", lambda *args: asked.append(args) or "chunked"
    )
    layer = build_mixer("deltanet", 16)
    scan_backend(layer)
    scan_backend(layer, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        scan_backend(layer)
    scan_backend(build_mixer("gla", 16).bfloat16())
    assert [args[2].dtype for args in asked] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.bfloat16,
    ]
    assert [args[3] is None for args in asked] == [False, False, False, True]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: Attention(65), "d_model is 65; rotary positions need an even size"),
        (lambda: Attention(64, n_heads=3), "d_model is 64; expected a multiple of 2 n_heads = 6"),
        (lambda: Attention(64, n_heads=0), "n_heads is 0; expected an integer of at least 1"),
        (lambda: Mamba(16, d_state=-1), "d_state is -1; expected an integer of at least 1"),
        (lambda: GLA(64, n_heads=0), "n_heads is 0; expected an integer of at least 1"),
        (lambda: GLA(64, gate_rank=1.5), "gate_rank is 1.5; expected an integer of at least 1"),
        (lambda: DeltaNet(64, d_conv=0), "d_conv is 0; expected an integer of at least 1"),
        (lambda: Mamba2(64, d_state="64"), "d_state is '64'; expected an integer of at least 1"),
        (
            lambda: HGRN2(64, lower_bound=1.0),
            "lower_bound is 1.0; expected a number of at least 0 and below 1",
        ),
        (lambda: RetNet(64, expand=0), "expand is 0; expected a number above 0"),
        (lambda: GLA(64, temperature=-1), "temperature is -1; expected a number above 0"),
        (lambda: RWKV6(64, mix_rank=0), "mix_rank is 0; expected an integer of at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
