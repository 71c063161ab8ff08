"""Every baseline against an independent implementation: outputs and all gradients.

The Mambas run beside mamba.py and transformers, the matrix states beside
flash-linear-attention's naive operations, attention beside a softmax with complex rotations."""

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
    "The kit's layer and mamba.py's with the same weights, none of which can hide a missing term."
    torch.manual_seed(seed)
    layer = Mamba(d_model, d_state=d_state, d_conv=d_conv, expand=expand)
    options = dict(d_state=d_state, d_conv=d_conv, expand_factor=expand)
    reference = MambaBlock(MambaConfig(d_model, 1, **options))
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    state = layer.state_dict()
    state["D"] = state.pop("D_skip")
    reference.load_state_dict(state)
    return layer, reference


@pytest.mark.parametrize("steps", [1, 2, 13, 32])
def test_mamba_equals_mambapy(steps):
    layer, reference = pair()
    h = torch.randn(2, steps, 24)
    dy = torch.randn(2, steps, 24)
    inputs = h.clone().requires_grad_()
    reference_inputs = h.clone().requires_grad_()
    y = layer(inputs)
    expected = reference(reference_inputs)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(inputs.grad, reference_inputs.grad, atol=1e-4, rtol=1e-4)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    gradients["D"] = gradients.pop("D_skip")
    expected = {name: p.grad for name, p in reference.named_parameters()}
    torch.testing.assert_close(gradients, expected, atol=2e-4, rtol=1e-3)


def test_mamba_decodes_like_mambapy():
    layer, reference = pair(d_conv=4)
    h = torch.randn(2, 6, 24)
    cache = (None, torch.zeros(2, 48, 3))
    state = layer.empty_cache(2)
    with torch.no_grad():
        for t in range(6):
            y, state = layer.step(h[:, t], state)
            expected, cache = reference.step(h[:, t], cache)
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state.S, cache[0], atol=1e-5, rtol=1e-4)


def test_rates_of_a_float64_mamba_are_not_rounded():
    layer = build_mixer("mamba", 8).double()
    assert torch.equal(layer.rates(None), -layer.A_log.exp())


def test_mamba_starts_with_time_scales_from_ten_to_a_thousand_tokens():
    layer = Mamba(512)
    delta = F.softplus(layer.dt_proj.bias)
    assert 0.99e-3 < delta.min() < 2e-3
    assert 0.05 < delta.max() < 0.101
    assert abs(delta.log().mean() - torch.tensor(1e-2).log()) < 0.2
    torch.testing.assert_close(layer.A_log.exp()[7], torch.arange(1.0, 17))


def naive_attention(layer, h):
    "One query at a time, in float64; rotary positions as multiplication by complex numbers."
    B, T, d = h.shape
    H = layer.n_heads
    P = d // layer.n_heads
    q, k, v = (h.double() @ layer.qkv_proj.weight.double().T).view(B, T, 3, H, P).unbind(2)
    frequency = layer.rope_base ** (-torch.arange(0, P, 2, dtype=torch.float64) / P)
    angle = torch.arange(T)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    q = torch.complex(q[..., : P // 2], q[..., P // 2 :]) * turn
    k = torch.complex(k[..., : P // 2], k[..., P // 2 :]) * turn
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
        agree(layer, lambda h: naive_attention(layer, h).float(), h)


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
    columns = torch.arange(7)
    for t, row in enumerate(mask):
        assert torch.equal(row, columns <= 4 + t)
    assert mask_options(3, 0) == {"is_causal": True}
    assert mask_options(1, 9) == {"is_causal": False}


@pytest.mark.parametrize(
    "d_model, heads", [(2, 1), (64, 1), (96, 2), (128, 2), (768, 12), (1024, 16), (134, 1)]
)
def test_heads_are_of_a_size_near_64(d_model, heads):
    assert default_heads(d_model) == heads


# The matrix mixers


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


def naive_retnet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v, g = split(h @ layer.in_proj.weight.T, H, N, N, P, P)
    angle = torch.arange(h.shape[1])[:, None] * layer.rope_base ** (-torch.arange(0, N, 2) / N)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def turned(t):
        t = torch.complex(t[..., : N // 2], t[..., N // 2 :]) * turn
        return torch.cat([t.real, t.imag], -1).transpose(1, 2)

    retention = naive("retention/naive", "naive_retention")
    y = retention(turned(q), turned(k), v.transpose(1, 2)).transpose(1, 2)
    return (rms(y) * F.silu(g)).flatten(2) @ layer.out_proj.weight.T


def naive_gla(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v, g = split(h @ layer.in_proj.weight.T, H, N, N, P, P)
    down, up = layer.decay_proj
    logits = h @ down.weight.T @ up.weight.T + up.bias
    gate = torch.sigmoid(logits).log() / layer.temperature
    y, _ = naive("gla/naive", "naive_recurrent_gla")(q, k, v, gate.view(q.shape))
    return (rms(y, layer.norm_weight) * F.silu(g)).flatten(2) @ layer.out_proj.weight.T


def naive_hgrn2(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, f, v = split(h @ layer.in_proj.weight.T, H, N, N, P)
    decay = layer.lower_bound + (1 - layer.lower_bound) * torch.sigmoid(f)
    y, _ = naive("gla/naive", "naive_recurrent_gla")(F.silu(q), 1 - decay, v, decay.log())
    return rms(y.flatten(2), layer.norm_weight) @ layer.out_proj.weight.T


def naive_deltanet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    convolved = short_conv(layer, h @ layer.in_proj.weight.T)
    q, k, v = (t.transpose(1, 2) for t in split(convolved, H, N, N, P))
    q = q / q.square().sum(-1, keepdim=True).sqrt()
    k = k / k.square().sum(-1, keepdim=True).sqrt()
    beta = torch.sigmoid(h @ layer.beta_proj.weight.T).transpose(1, 2)
    y, _ = naive("delta_rule/naive", "delta_rule_recurrence")(q, k, v, beta)
    return rms(y.transpose(1, 2), layer.norm_weight).flatten(2) @ layer.out_proj.weight.T


def naive_gated_deltanet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    qkv, g = (h @ layer.in_proj.weight.T).split([H * (2 * N + P), H * P], -1)
    q, k, v = split(short_conv(layer, qkv), H, N, N, P)
    q = q / q.square().sum(-1, keepdim=True).sqrt()
    k = k / k.square().sum(-1, keepdim=True).sqrt()
    beta, dt = (h @ layer.rate_proj.weight.T).chunk(2, -1)
    decay = -layer.A_log.exp() * torch.log1p((dt + layer.dt_bias).exp())
    rule = naive("gated_delta_rule/naive", "naive_recurrent_gated_delta_rule")
    y, _ = rule(q, k, v, beta.sigmoid(), decay)
    y = rms(y, layer.norm_weight) * F.silu(g.view(y.shape))
    return y.flatten(2) @ layer.out_proj.weight.T


def naive_rwkv(layer, h, r, k, v, g, log_decay, bonus):
    H = layer.n_heads
    N = layer.d_key
    r, k, v, log_decay = (t.view(*h.shape[:2], H, N).transpose(1, 2) for t in (r, k, v, log_decay))
    rwkv6 = naive("rwkv6/recurrent_naive", "naive_recurrent_rwkv6")
    y, _ = rwkv6(r, k, v, log_decay, bonus, scale=1.0)
    y = y.transpose(1, 2)
    variance = y.var(-1, keepdim=True, unbiased=False)
    y = (y - y.mean(-1, keepdim=True)) / (variance + 64e-5).sqrt()
    y = y.flatten(2) * layer.norm.weight + layer.norm.bias
    return (y * F.silu(g)) @ layer.out_proj.weight.T


def naive_rwkv5(layer, h):
    def mixed(i):
        return h + (previous(h) - h) * layer.mix[i]

    k, v, r, g = (
        mixed(i) @ getattr(layer, f"{name}_proj").weight.T for i, name in enumerate("kvrg")
    )
    decay = -layer.decay.exp().repeat_interleave(layer.d_key).expand(k.shape)
    bonus = layer.bonus[:, None].expand(-1, layer.d_key)
    return naive_rwkv(layer, h, r, k, v, g, decay, bonus)


def naive_rwkv6(layer, h):
    delta = previous(h) - h
    mixed = []
    low = torch.tanh((h + delta * layer.mix[0]) @ layer.mix_down.weight.T).chunk(5, -1)
    for i in range(5):
        mixed.append(h + delta * (layer.mix[i + 1] + low[i] @ layer.mix_up[i]))
    low = torch.tanh(mixed[0] @ layer.decay_down.weight.T)
    w = low @ layer.decay_up.weight.T + layer.decay_up.bias
    k, v, r, g = (t @ getattr(layer, f"{name}_proj").weight.T for t, name in zip(mixed[1:], "kvrg"))
    return naive_rwkv(layer, h, r, k, v, g, -w.exp(), layer.bonus)


def naive_mamba_input_a(layer, h):
    "The parts of mamba.py, whose scan takes any A that can be broadcast."
    x, z = (h @ layer.in_proj.weight.T).chunk(2, -1)
    taps = layer.conv1d.weight[:, 0]
    T = h.shape[1]
    padded = torch.cat([torch.zeros(len(h), taps.shape[1] - 1, x.shape[2]), x], 1)
    copies = [padded[:, i : i + T] * taps[:, i] for i in range(taps.shape[1])]
    x = F.silu(layer.conv1d.bias + sum(copies))
    sizes = [layer.rank, layer.d_state, layer.d_state]
    dt_low_rank, k, q = (x @ layer.x_proj.weight.T).split(sizes, -1)
    rate = x @ layer.A_proj.weight.T + layer.A_proj.bias
    A = -torch.log1p(rate.exp())
    reference = MambaBlock(MambaConfig(layer.d_model, 1, d_state=layer.d_state))
    delta = dt_low_rank @ layer.dt_proj.weight.T + layer.dt_proj.bias
    delta = torch.log1p(delta.exp())
    y = reference.selective_scan_seq(x, delta, A[:, :, None], k, q, layer.D_skip)
    return (y * F.silu(z)) @ layer.out_proj.weight.T


REFERENCES = {
    "retnet": (naive_retnet, dict(n_heads=2, expand=1.5, rope_base=50.0)),
    "gla": (naive_gla, dict(n_heads=3, gate_rank=5)),
    "hgrn2": (naive_hgrn2, dict(n_heads=2)),
    "deltanet": (naive_deltanet, dict(n_heads=2, d_conv=3)),
    "gated_deltanet": (naive_gated_deltanet, dict(n_heads=2)),
    "rwkv5": (naive_rwkv5, dict(n_heads=3)),
    "rwkv6": (naive_rwkv6, dict(n_heads=2, mix_rank=4, decay_rank=6)),
    "mamba_input_a": (naive_mamba_input_a, dict(d_state=5)),
}


def perturbed(name, d_model, seed=0, **options):
    torch.manual_seed(seed)
    layer = build_mixer(name, d_model, **options)
    for parameter in layer.parameters():  # nothing left at a value that could hide a missing term
        parameter.data += 0.2 * torch.randn_like(parameter)
    return layer


def agree(layer, reference, h):
    "Outputs and the gradients of the input and of every parameter; reference: (B,T,D) -> same."
    dy = torch.randn(*h.shape)

    def with_gradients(function):
        x = h.clone().requires_grad_()
        y = function(x)
        named = {"input": x, **dict(layer.named_parameters())}
        gradients = torch.autograd.grad(y, list(named.values()), dy)
        return {"output": y, **dict(zip(named, gradients))}

    results = with_gradients(layer)
    for name, expected in with_gradients(reference).items():
        assert (results[name] - expected).norm() <= 1e-4 * expected.norm(), name
        assert expected.norm() > 0, name


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("steps", [3, 70])
def test_a_mixer_equals_the_naive_operation(name, steps):
    reference, options = REFERENCES[name]
    layer = perturbed(name, 24, **options)
    agree(layer, lambda h: reference(layer, h), torch.randn(2, steps, 24))


def test_hgrn2_with_a_lower_bound():
    layer = perturbed("hgrn2", 24, n_heads=2, lower_bound=0.7)
    agree(layer, lambda h: naive_hgrn2(layer, h), torch.randn(2, 30, 24))


@cache
def from_transformers(kind):
    "transformers' layer and configuration."
    mend_torchvision()
    pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    from transformers import Mamba2Config, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    return {"mamba": (MambaMixer, MambaConfig), "mamba2": (Mamba2Mixer, Mamba2Config)}[kind]


def with_reference(kind, d_model, **options):
    "The kit's layer, and transformers' as a function that runs on the parameters of the first."
    Block, Config = from_transformers(kind)
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
    module = Block(Config(**config), layer_idx=0)
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
    layer, reference = with_reference(kind, 24, **options)
    agree(layer, reference, torch.randn(2, steps, 24))


# Properties of all baselines


@every_mixer
def test_changing_a_token_changes_nothing_before_it(name):
    "Changing a token changes no output before it, and all outputs from there on."
    layer = perturbed(name, 32)
    h = torch.randn(1, 90, 32)
    other = h.clone()
    other[:, 67] += 1.0
    with torch.no_grad():
        y = layer(h)
        y_other = layer(other)
    assert torch.equal(y[:, :67], y_other[:, :67]), "an output before the token changed"
    changes = (y - y_other)[:, 67:].abs().amax((0, 2))
    assert changes.min() > 0, "an output from the token on did not change"


@every_matrix
def test_a_state_given_in_the_cache_is_where_decoding_begins(name):
    "Decoding starts from the state in the cache, and gradients reach that state."
    layer = perturbed(name, 32)
    h = torch.randn(2, 9, 32)
    empty = layer.empty_cache(2)
    cache = empty._replace(S=torch.randn_like(empty.S).requires_grad_())
    y, _ = layer.prefill(h, cache)
    y_empty, _ = layer.prefill(h, empty)
    assert not torch.allclose(y, y_empty, atol=1e-3)
    (grad,) = torch.autograd.grad(y.square().sum(), cache.S)
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
    per_block = sum(parameter.numel() for parameter in one.blocks.parameters())
    return one.num_parameters() + (config.n_layer - 1) * per_block


@every_family
@pytest.mark.parametrize(
    "size", ["small", slow_case("owt-120m"), slow_case("owt-350m"), "slimpajama-1.3b"]
)
def test_all_models_of_a_size_have_the_same_number_of_parameters(name, size, monkeypatch):
    "Models of the paper's sizes match Longhorn's parameters within 1 %, its width within 2 %."
    monkeypatch.setattr(lm, "count_parameters", count_alike)
    target = count_parameters(config_at(size, "longhorn"))
    assert target == count_alike(config_at(size, "longhorn"))
    config = config_at(size, name)
    matched = match_parameters(config, target)
    assert abs(count_alike(matched) / target - 1) <= 0.01
    _, d_model, _ = SIZES[size]
    assert abs(matched.d_model / d_model - 1) <= 0.02
    assert replace(matched, d_model=d_model, d_mlp=0) == replace(config, d_mlp=0)


@every_family
def test_every_model_learns_a_short_text_and_goes_on_with_it(name):
    "A model of one block learns a text of 36 tokens in 60 steps, and continues it."
    torch.manual_seed(0)
    d_mlp = 0 if name.startswith(("longhorn", "mamba")) else 48
    model = SequenceLM(LMConfig(16, 32, 1, name, d_mlp=d_mlp))
    tokens = torch.randint(16, (1, 12)).repeat(1, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        optimizer.step()
    continued = model.generate(tokens[:, :24], 12, temperature=0)[0, 24:]
    assert torch.equal(continued, tokens[0, :12]), (
        f"it continues with {continued.tolist()} at a loss of {loss.item():.2f} nats"
    )


def sizes_of_heads(layer):
    return layer.n_heads, layer.d_key, layer.d_value


def test_starting_values_are_those_of_the_sources():
    layer = Mamba2(768)
    assert sizes_of_heads(layer) == (24, 128, 64)
    assert layer.A_log.exp().min() >= 1
    assert layer.A_log.exp().max() <= 16
    assert sizes_of_heads(RetNet(768)) == (3, 256, 512)
    assert sizes_of_heads(GLA(1024)) == (4, 128, 256)
    assert sizes_of_heads(DeltaNet(1024)) == (8, 128, 128)
    assert sizes_of_heads(GatedDeltaNet(2048)) == (6, 256, 512)
    assert sizes_of_heads(HGRN2(1024)) == (8, 128, 128)
    assert sizes_of_heads(RWKV5(768)) == (12, 64, 64)
    assert sizes_of_heads(RWKV6(768)) == (12, 64, 64)
    x = torch.zeros(1, 1, 64)
    torch.testing.assert_close(MambaInputA(32).rates(x)[0, 0], -torch.arange(1.0, 17))


def test_heads_are_found_for_every_width():
    for d_model in range(1, 200):
        heads, key, value = head_sizes(d_model, None, 0.5, 1, 32)
        assert heads >= 1
        assert key >= 1
        assert abs(heads * value - d_model) <= heads / 2
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

    without_beta = []

    def no_gpu(q, x, beta):
        without_beta.append(beta is None)
        return "no GPU"

    monkeypatch.setattr(matrix, "fla_obstacle", no_gpu)
    layer = build_mixer(name, 16)
    layer(torch.randn(1, 4, 16))
    of_layer = set(without_beta)
    without_beta.clear()
    scan_backend(layer)
    assert len(of_layer) == 1
    assert set(without_beta) == of_layer


def test_the_backend_on_a_gpu_follows_the_dtype(monkeypatch):
    from longhorn_kit.models import matrix_mixers

    calls = []

    def chunked(*args):
        calls.append(args)
        return "chunked"

    monkeypatch.setattr(matrix_mixers, "pick_matrix_backend", chunked)
    layer = build_mixer("deltanet", 16)
    scan_backend(layer)
    scan_backend(layer, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        scan_backend(layer)
    scan_backend(build_mixer("gla", 16).bfloat16())
    dtypes = [q.dtype for _, _, q, _ in calls]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    assert [beta is None for *_, beta in calls] == [False, False, False, True]


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
