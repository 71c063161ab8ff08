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
from torch.testing import assert_close

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
from mixers import MATRICES, SCANS, every_family, every_matrix, every_mixer, perturbed, rms
from sweep import slow_case

pytestmark = pytest.mark.numeric


def pair(d_model=24, d_state=5, d_conv=3, expand=2, seed=0):
    "Return the kit's and mamba.py's layer with equal weights that cannot hide a missing term."
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
    assert_close(y, expected, atol=1e-5, rtol=1e-4)
    y.backward(dy)
    expected.backward(dy)
    assert_close(inputs.grad, reference_inputs.grad, atol=1e-4, rtol=1e-4)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    gradients["D"] = gradients.pop("D_skip")
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert_close(gradients, expected, atol=2e-4, rtol=1e-3)


def test_mamba_decodes_like_mambapy():
    layer, reference = pair(d_conv=4)
    h = torch.randn(2, 6, 24)
    cache = (None, torch.zeros(2, 48, 3))
    state = layer.empty_cache(2)
    with torch.no_grad():
        for t in range(6):
            token = h[:, t]
            y, state = layer.step(token, state)
            expected, cache = reference.step(token, cache)
            assert_close(y, expected, atol=1e-5, rtol=1e-4)
    assert_close(state.S, cache[0], atol=1e-5, rtol=1e-4)


def test_rates_of_a_float64_mamba_are_not_rounded():
    layer = build_mixer("mamba", 8).double()
    expected = -layer.A_log.exp()
    assert torch.equal(layer.rates(None), expected)


def test_mamba_starts_with_time_scales_from_ten_to_a_thousand_tokens():
    layer = Mamba(512)
    delta = F.softplus(layer.dt_proj.bias)
    assert 0.99e-3 < delta.min() < 2e-3
    assert 0.05 < delta.max() < 0.101
    centre = torch.tensor(1e-2).log()
    distance = delta.log().mean() - centre
    assert abs(distance) < 0.2
    result = layer.A_log.exp()[7]
    assert_close(result, torch.arange(1.0, 17))


def naive_attention(layer, h):
    "Attend one query at a time, in float64; rotate positions by complex multiplication."
    B, T, d = h.shape
    H = layer.n_heads
    P = d // layer.n_heads
    weight = layer.qkv_proj.weight.double()
    projected = h.double() @ weight.T
    q, k, v = projected.view(B, T, 3, H, P).unbind(2)
    even = torch.arange(0, P, 2, dtype=torch.float64)
    frequency = layer.rope_base ** (-even / P)
    positions = torch.arange(T)[:, None]
    angle = positions * frequency
    complex_numbers = torch.polar(torch.ones_like(angle), angle)
    turn = complex_numbers[None, :, None]
    real = q[..., : P // 2]
    imag = q[..., P // 2 :]
    q = torch.complex(real, imag) * turn
    real = k[..., : P // 2]
    imag = k[..., P // 2 :]
    k = torch.complex(real, imag) * turn
    y = torch.zeros(B, T, H, P, dtype=torch.float64)
    for t in range(T):
        past_keys = k[:, : t + 1].conj()
        products = torch.einsum("bhp,bshp->bhs", q[:, t], past_keys)
        scores = products.real / P**0.5
        weights = scores.softmax(-1)
        past_values = v[:, : t + 1]
        y[:, t] = torch.einsum("bhs,bshp->bhp", weights, past_values)
    weight = layer.out_proj.weight.double()
    return y.flatten(2) @ weight.T


@pytest.mark.parametrize(
    "d_model, n_heads, T", [(12, 1, 7), (12, 3, 1), (32, 4, 19), (128, None, 6)]
)
def test_attention_equals_a_plain_softmax(d_model, n_heads, T):
    torch.manual_seed(0)
    layer = Attention(d_model, n_heads=n_heads, rope_base=50.0)
    h = torch.randn(2, T, d_model)
    expected = naive_attention(layer, h)
    assert_close(layer(h).double(), expected, atol=1e-5, rtol=1e-4)
    first_half = h[:, : T // 2]
    _, cache = layer.prefill(first_half)
    second_half = h[:, T // 2 :]
    late = layer.prefill(second_half, cache)[0]
    expected_half = expected[:, T // 2 :]
    assert_close(late.double(), expected_half, atol=1e-5, rtol=1e-4)
    if T > 1:  # a single token attends only to itself, for any query
        agree(layer, lambda h: naive_attention(layer, h).float(), h)


def test_attention_caches_one_column_a_token():
    layer = Attention(32, n_heads=2)
    cache = None
    for length in (3, 1, 5):
        h = torch.randn(2, length, 32)
        _, cache = layer.prefill(h, cache)
    assert cache.k.shape == cache.v.shape == (2, 2, 9, 16)
    empty = layer.empty_cache(4)
    assert empty.k.shape == (4, 2, 0, 16)


def test_rotation_keeps_lengths_and_sees_only_distances():
    x = torch.randn(2, 3, 5, 8)
    result = rotate(x, 100).norm(dim=-1)
    expected = x.norm(dim=-1)
    assert_close(result, expected)
    result = rotate(x, 0)[:, :, 0]
    expected = x[:, :, 0]
    assert torch.equal(result, expected)
    zeros = torch.zeros(2, 3, 2, 8)
    later = torch.cat([zeros, x], 2)
    expected = rotate(later, 0)[:, :, 2:]
    assert_close(rotate(x, 2), expected)


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


# matrix mixers


def split(t, heads, *sizes):
    "Split (B,T,C) into pieces (B,T,H,F) with these sizes per head."
    pieces = t.split([heads * size for size in sizes], -1)
    B, T, _ = t.shape
    return [piece.reshape(B, T, heads, size) for piece, size in zip(pieces, sizes)]


def project(h, linear):
    "Multiply by the weight of a linear layer, without the bias."
    return h @ linear.weight.T


def unit(v):
    "Divide keys or queries by their length."
    length = v.square().sum(-1, keepdim=True).sqrt()
    return v / length


def short_conv(layer, t):
    "Compute the causal convolution as a sum of shifted copies."
    weight = layer.conv1d.weight[:, 0]
    T = t.shape[1]
    taps = weight.shape[1]
    zeros = torch.zeros(len(t), taps - 1, t.shape[2])
    padded = torch.cat([zeros, t], 1)
    copies = [padded[:, i : i + T] * weight[:, i] for i in range(taps)]
    return F.silu(sum(copies))


def previous(h):
    zeros = torch.zeros_like(h[:, :1])
    earlier = h[:, :-1]
    return torch.cat([zeros, earlier], 1)


def naive_retnet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v, g = split(project(h, layer.in_proj), H, N, N, P, P)
    positions = torch.arange(h.shape[1])[:, None]
    frequency = layer.rope_base ** (-torch.arange(0, N, 2) / N)
    angle = positions * frequency
    complex_numbers = torch.polar(torch.ones_like(angle), angle)
    turn = complex_numbers[:, None]

    def turned(t):
        real = t[..., : N // 2]
        imag = t[..., N // 2 :]
        t = torch.complex(real, imag) * turn
        halves = torch.cat([t.real, t.imag], -1)
        return halves.transpose(1, 2)

    retention = naive("retention/naive", "naive_retention")
    v_by_head = v.transpose(1, 2)
    y = retention(turned(q), turned(k), v_by_head).transpose(1, 2)
    gated = rms(y) * F.silu(g)
    return project(gated.flatten(2), layer.out_proj)


def naive_gla(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, k, v, g = split(project(h, layer.in_proj), H, N, N, P, P)
    down, up = layer.decay_proj
    logits = project(project(h, down), up) + up.bias
    log_gate = torch.sigmoid(logits).log()
    gate = log_gate / layer.temperature
    y, _ = naive("gla/naive", "naive_recurrent_gla")(q, k, v, gate.view(q.shape))
    gated = rms(y, layer.norm_weight) * F.silu(g)
    return project(gated.flatten(2), layer.out_proj)


def naive_hgrn2(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    q, f, v = split(project(h, layer.in_proj), H, N, N, P)
    share = (1 - layer.lower_bound) * torch.sigmoid(f)
    decay = layer.lower_bound + share
    y, _ = naive("gla/naive", "naive_recurrent_gla")(F.silu(q), 1 - decay, v, decay.log())
    normed = rms(y.flatten(2), layer.norm_weight)
    return project(normed, layer.out_proj)


def naive_deltanet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    convolved = short_conv(layer, project(h, layer.in_proj))
    q, k, v = (t.transpose(1, 2) for t in split(convolved, H, N, N, P))
    q = unit(q)
    k = unit(k)
    beta = torch.sigmoid(project(h, layer.beta_proj)).transpose(1, 2)
    y, _ = naive("delta_rule/naive", "delta_rule_recurrence")(q, k, v, beta)
    normed = rms(y.transpose(1, 2), layer.norm_weight)
    return project(normed.flatten(2), layer.out_proj)


def naive_gated_deltanet(layer, h):
    H = layer.n_heads
    N = layer.d_key
    P = layer.d_value
    sizes = [H * (2 * N + P), H * P]
    qkv, g = project(h, layer.in_proj).split(sizes, -1)
    q, k, v = split(short_conv(layer, qkv), H, N, N, P)
    q = unit(q)
    k = unit(k)
    beta, dt = project(h, layer.rate_proj).chunk(2, -1)
    rate = layer.A_log.exp()
    step = torch.log1p((dt + layer.dt_bias).exp())
    decay = -rate * step
    rule = naive("gated_delta_rule/naive", "naive_recurrent_gated_delta_rule")
    y, _ = rule(q, k, v, beta.sigmoid(), decay)
    gate = F.silu(g.view(y.shape))
    y = rms(y, layer.norm_weight) * gate
    return project(y.flatten(2), layer.out_proj)


def naive_rwkv(layer, h, r, k, v, g, log_decay, bonus):
    H = layer.n_heads
    N = layer.d_key
    r, k, v, log_decay = (t.view(*h.shape[:2], H, N).transpose(1, 2) for t in (r, k, v, log_decay))
    rwkv6 = naive("rwkv6/recurrent_naive", "naive_recurrent_rwkv6")
    y, _ = rwkv6(r, k, v, log_decay, bonus, scale=1.0)
    y = y.transpose(1, 2)
    variance = y.var(-1, keepdim=True, unbiased=False)
    centred = y - y.mean(-1, keepdim=True)
    y = centred / (variance + 64e-5).sqrt()
    scaled = y.flatten(2) * layer.norm.weight
    y = scaled + layer.norm.bias
    gated = y * F.silu(g)
    return project(gated, layer.out_proj)


def naive_rwkv5(layer, h):
    def mixed(i):
        change = previous(h) - h
        return h + change * layer.mix[i]

    k, v, r, g = (
        project(mixed(i), getattr(layer, f"{name}_proj")) for i, name in enumerate("kvrg")
    )
    rate = layer.decay.exp().repeat_interleave(layer.d_key)
    decay = -rate.expand(k.shape)
    column = layer.bonus[:, None]
    bonus = column.expand(-1, layer.d_key)
    return naive_rwkv(layer, h, r, k, v, g, decay, bonus)


def naive_rwkv6(layer, h):
    delta = previous(h) - h
    mixed = []
    mixed_input = h + delta * layer.mix[0]
    low = torch.tanh(project(mixed_input, layer.mix_down)).chunk(5, -1)
    for i in range(5):
        shift = layer.mix[i + 1] + low[i] @ layer.mix_up[i]
        mixed.append(h + delta * shift)
    low = torch.tanh(project(mixed[0], layer.decay_down))
    w = project(low, layer.decay_up) + layer.decay_up.bias
    k, v, r, g = (project(t, getattr(layer, f"{name}_proj")) for t, name in zip(mixed[1:], "kvrg"))
    return naive_rwkv(layer, h, r, k, v, g, -w.exp(), layer.bonus)


def naive_mamba_input_a(layer, h):
    "Combine the parts of mamba.py, whose scan takes any broadcastable A."
    x, z = project(h, layer.in_proj).chunk(2, -1)
    taps = layer.conv1d.weight[:, 0]
    T = h.shape[1]
    zeros = torch.zeros(len(h), taps.shape[1] - 1, x.shape[2])
    padded = torch.cat([zeros, x], 1)
    copies = [padded[:, i : i + T] * taps[:, i] for i in range(taps.shape[1])]
    convolved = layer.conv1d.bias + sum(copies)
    x = F.silu(convolved)
    sizes = [layer.rank, layer.d_state, layer.d_state]
    dt_low_rank, k, q = project(x, layer.x_proj).split(sizes, -1)
    rate = project(x, layer.A_proj) + layer.A_proj.bias
    A = -torch.log1p(rate.exp())
    reference = MambaBlock(MambaConfig(layer.d_model, 1, d_state=layer.d_state))
    delta = project(dt_low_rank, layer.dt_proj) + layer.dt_proj.bias
    delta = torch.log1p(delta.exp())
    A_by_channel = A[:, :, None]
    y = reference.selective_scan_seq(x, delta, A_by_channel, k, q, layer.D_skip)
    gated = y * F.silu(z)
    return project(gated, layer.out_proj)


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


def agree(layer, reference, h):
    "Compare outputs and gradients of input and parameters; reference: (B,T,D) -> (B,T,D)."
    dy = torch.randn(*h.shape)

    def with_gradients(function):
        x = h.clone().requires_grad_()
        y = function(x)
        named = {"input": x, **dict(layer.named_parameters())}
        tensors = list(named.values())
        gradients = torch.autograd.grad(y, tensors, dy)
        return {"output": y, **dict(zip(named, gradients))}

    results = with_gradients(layer)
    for name, expected in with_gradients(reference).items():
        difference = (results[name] - expected).norm()
        assert difference <= 1e-4 * expected.norm(), name
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
    "Return transformers' layer and configuration."
    mend_torchvision()
    pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    from transformers import Mamba2Config, MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    return {"mamba": (MambaMixer, MambaConfig), "mamba2": (Mamba2Mixer, Mamba2Config)}[kind]


def with_reference(kind, d_model, **options):
    "Return the kit's layer, and transformers' layer as a function of the same parameters."
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
        parameters = layer.named_parameters()
        weights = {renamed.get(name, name): p for name, p in parameters}
        expected_keys = dict(module.named_parameters()).keys()
        assert weights.keys() == expected_keys
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


# properties of all baselines


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
    result = y[:, :67]
    expected = y_other[:, :67]
    assert torch.equal(result, expected), "an output before the token changed"
    later = (y - y_other)[:, 67:]
    changes = later.abs().amax((0, 2))
    assert changes.min() > 0, "an output from the token on did not change"


@every_matrix
def test_a_state_given_in_the_cache_is_where_decoding_begins(name):
    "Decoding starts from the state in the cache, and gradients reach that state."
    layer = perturbed(name, 32)
    h = torch.randn(2, 9, 32)
    empty = layer.empty_cache(2)
    state = torch.randn_like(empty.S)
    cache = empty._replace(S=state.requires_grad_())
    y, _ = layer.prefill(h, cache)
    y_empty, _ = layer.prefill(h, empty)
    assert not torch.allclose(y, y_empty, atol=1e-3)
    loss = y.square().sum()
    (grad,) = torch.autograd.grad(loss, cache.S)
    sizes = grad.flatten(1).norm(dim=1)
    assert (sizes > 0).all()


@every_matrix
def test_sequences_may_be_at_different_positions(name):
    "Two sequences of different lengths continue in one batch, as in beam search and padding."
    layer = perturbed(name, 32)
    h = torch.randn(2, 12, 32)
    with torch.no_grad():
        first = h[:1, :9]
        _, long = layer.prefill(first)
        second = h[1:, 4:9]
        _, short = layer.prefill(second)
        pairs = zip(long, short)
        both = type(long)(*(torch.cat(pair) for pair in pairs))
        last = h[:, 9:]
        y, _ = layer.prefill(last, both)
        outputs = layer(h[:1])
        expected = outputs[:, 9:]
        assert_close(y[:1], expected, atol=1e-5, rtol=1e-5)
        outputs = layer(h[1:, 4:])
        expected = outputs[:, 5:]
        assert_close(y[1:], expected, atol=1e-5, rtol=1e-5)


@every_mixer
def test_gradients_are_finite_after_a_long_sequence_of_large_inputs(name):
    "After 300 large inputs, all gradients are finite."
    layer = perturbed(name, 16)
    h = 30 * torch.randn(1, 300, 16)
    loss = layer(h).square().mean()
    loss.backward()
    for p in layer.parameters():
        assert p.grad.isfinite().all()


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
        settings = json.loads(config)
        return SequenceLM(LMConfig.from_dict(settings))


def count_alike(config):
    "Count parameters without building every block, because all blocks are equal."
    settings = replace(config, n_layer=1).to_dict()
    one = one_block(json.dumps(settings))
    per_block = sum(parameter.numel() for parameter in one.blocks.parameters())
    other_blocks = (config.n_layer - 1) * per_block
    return one.num_parameters() + other_blocks


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
    ratio = count_alike(matched) / target
    assert abs(ratio - 1) <= 0.01
    _, d_model, _ = SIZES[size]
    ratio = matched.d_model / d_model
    assert abs(ratio - 1) <= 0.02
    assert replace(matched, d_model=d_model, d_mlp=0) == replace(config, d_mlp=0)


@every_family
def test_every_model_learns_a_short_text_and_goes_on_with_it(name):
    "A model of one block learns a text of 36 tokens in 60 steps, and continues it."
    torch.manual_seed(0)
    d_mlp = 0 if name.startswith(("longhorn", "mamba")) else 48
    model = SequenceLM(LMConfig(16, 32, 1, name, d_mlp=d_mlp))
    part = torch.randint(16, (1, 12))
    tokens = part.repeat(1, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        loss = model(inputs, targets)[1]
        loss.backward()
        optimizer.step()
    prompt = tokens[:, :24]
    result = model.generate(prompt, 12, temperature=0)
    continued = result[0, 24:]
    expected = tokens[0, :12]
    assert torch.equal(continued, expected), (
        f"the model continues with {continued.tolist()} at a loss of {loss.item():.2f} nats"
    )


def sizes_of_heads(layer):
    return layer.n_heads, layer.d_key, layer.d_value


def test_starting_values_are_those_of_the_sources():
    layer = Mamba2(768)
    assert sizes_of_heads(layer) == (24, 128, 64)
    rates = layer.A_log.exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert sizes_of_heads(RetNet(768)) == (3, 256, 512)
    assert sizes_of_heads(GLA(1024)) == (4, 128, 256)
    assert sizes_of_heads(DeltaNet(1024)) == (8, 128, 128)
    assert sizes_of_heads(GatedDeltaNet(2048)) == (6, 256, 512)
    assert sizes_of_heads(HGRN2(1024)) == (8, 128, 128)
    assert sizes_of_heads(RWKV5(768)) == (12, 64, 64)
    assert sizes_of_heads(RWKV6(768)) == (12, 64, 64)
    x = torch.zeros(1, 1, 64)
    rates = MambaInputA(32).rates(x)
    result = rates[0, 0]
    expected = -torch.arange(1.0, 17)
    assert_close(result, expected)


def test_heads_are_found_for_every_width():
    for d_model in range(1, 200):
        heads, key, value = head_sizes(d_model, None, 0.5, 1, 32)
        assert heads >= 1
        assert key >= 1
        assert abs(heads * value - d_model) <= heads / 2
    assert head_sizes(768, 4, 0.5, 1, 128) == (4, 96, 192)


def test_the_backend_can_be_told():
    backends = {scan_backend(build_mixer(name, 16)) for name in SCANS + MATRICES}
    assert backends == {"chunked"}
    assert scan_backend(build_mixer("attention", 16)) == "scaled_dot_product_attention"

    class Other(Mixer):
        def __init__(self, d_model):
            super().__init__(d_model)
            self.out_proj = torch.nn.Linear(d_model, d_model)

        run = empty_cache = None

    assert scan_backend(Other(16)) == "Other.run"


@every_matrix
def test_the_backend_is_told_for_what_each_mixer_passes(name, monkeypatch):
    "`scan_backend` chooses the backend by the arguments that the layer passes to its scan."
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
    expected = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    assert dtypes == expected
    without_beta = [beta is None for *_, beta in calls]
    assert without_beta == [False, False, False, True]


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
