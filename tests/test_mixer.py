"""Every mixer decodes as it trains, and is causal; Longhorn equals a dense solve."""

import copy
import functools
import math
import re
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.utils import prune
from torch.testing import assert_close

from exported import assert_exported_equals_eager
from longhorn_kit.models import MIXERS, Longhorn, lm
from longhorn_kit.models.mixer import (
    Mixer,
    ScanCache,
    build_mixer,
    mixer_options,
    register_mixer,
    to_length,
)
from longhorn_kit.models.recompute import is_plain
from mixers import (
    FAMILIES,
    GROWING,
    NAMES,
    OPTIONS,
    SCANS,
    every,
    every_family_of_kit,
    every_layer,
    every_mixer,
    every_mixer_of_kit,
    every_scan,
    parts,
    perturbed,
)
from rounding import bound, error
from sweep import slow_case

pytestmark = pytest.mark.numeric


def make(name, d_model=16, **options):
    name, on = parts(name)
    return perturbed(name, d_model, 0.1, **options | on)


def in_pieces(layer, h, lengths, cache=None):
    parts = []
    start = 0
    for length in lengths:
        if length == 0:
            cache = cache or layer.empty_cache(len(h), h.device, h.dtype)
            token = h[:, start]
            y_t, cache = layer.step(token, cache)
            y = y_t[:, None]
            length = 1
        else:
            part = h[:, start : start + length]
            y, cache = layer.prefill(part, cache)
        parts.append(y)
        start += length
    assert start == h.shape[1]
    return torch.cat(parts, 1), cache


@every_mixer
def test_shapes(name):
    "Outputs have the shape of the inputs, and every tensor of a cache starts with the batch."
    layer = make(name)
    h = torch.randn(3, 7, 16)
    start = h[:, :6]
    y, cache = layer.prefill(start)
    token = h[:, 6]
    y_t, after = layer.step(token, cache)
    assert layer(h).shape == h.shape
    expected_shape = h[:, :6].shape
    assert y.shape == expected_shape
    expected_shape = h[:, 6].shape
    assert y_t.shape == expected_shape
    empty = layer.empty_cache(3)
    tensors = [*empty, *cache, *after]
    assert {len(tensor) for tensor in tensors} == {3}


@every_layer
@settings(max_examples=6, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), batch=st.integers(1, 3))
@example(lengths=[71, 0, 0, 0, 0, 0, 74], batch=2)  # across chunks
def test_any_split_into_prefills_and_steps_equals_one_pass(name, lengths, batch):
    "Any split into prefills and steps (a length of zero) gives the outputs of one pass."
    layer = make(name)
    steps = sum(max(length, 1) for length in lengths)
    h = torch.randn(batch, steps, 16)
    with torch.no_grad():
        pieces, _ = in_pieces(layer, h, lengths)
        assert_close(pieces, layer(h), atol=2e-5, rtol=2e-5)


@every([*SCANS, *OPTIONS], FAMILIES)
def test_compiled_halves_of_the_input_projection_are_the_whole(name):
    "A compiled scan layer has the gradients of the eager one."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    weights = list(layer.parameters())
    loss = compiled(h).square().sum()
    gradients = torch.autograd.grad(loss, weights)
    loss = layer(h).square().sum()
    expected = torch.autograd.grad(loss, weights)
    assert_close(gradients, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("longhorn", "mamba"))
def test_a_layer_compiles_to_few_kernels_and_steps_as_fast_as_eager(name, monkeypatch, tmp_path):
    """One scan is one operation.

    When the compiler traced its loop, compiling took 88 s and a step took 17 times as long. Times
    are processor time, which depends less on other programs than wall time. PyTorch first builds
    headers once per machine."""
    resource = pytest.importorskip("resource")
    metrics = pytest.importorskip("torch._inductor.metrics")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def spent():
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        usages = map(resource.getrusage, kinds)
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    layer = make(name, 64)
    h = torch.randn(1, 127, 64)

    def step(run):
        loss = run(h).square().sum()
        return loss.backward()

    torch.compiler.reset()
    with torch._inductor.config.patch(compile_threads=1):
        torch.compile(torch.sin)(h)
        metrics.reset()
        before = spent()
        compiled = torch.compile(layer, fullgraph=True)
        step(compiled)
    assert spent() - before < 20
    assert metrics.generated_kernel_count < 30
    seconds = {layer: [], compiled: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads use CPU time
    for _ in range(60):
        for run, times in seconds.items():
            start = time.process_time()
            step(run)
            times.append(time.process_time() - start)
    torch.set_num_threads(threads)
    time_compiled = statistics.median(seconds[compiled])
    time_eager = statistics.median(seconds[layer])
    assert time_compiled < 1.1 * time_eager


class Added(torch.nn.Module):
    "Layer with a term added to its output, as in LoRA."

    def __init__(self, layer, delta):
        super().__init__()
        self.layer = layer
        self.delta = delta

    def forward(self, h):
        return self.layer(h) + self.delta


@pytest.mark.parametrize(
    "how",
    [
        "forward hook",
        "pre-hook",
        "backward hook",
        "global hook",
        "own forward",
        "wrapped",
        "other class",
        "other weight",
    ],
)
def test_an_input_projection_that_is_not_plain_is_called(how, monkeypatch, request):
    layer = make("longhorn")
    h = torch.randn(2, 9, 16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain = layer.in_proj
    halves = layer(h)
    called = []
    assert is_plain(plain)
    hooks = {
        "forward hook": plain.register_forward_hook,
        "pre-hook": plain.register_forward_pre_hook,
        "backward hook": plain.register_full_backward_hook,
        "global hook": torch.nn.modules.module.register_module_forward_hook,
    }
    if how in hooks:
        hook = hooks[how](lambda *_: called.append(1))
        request.addfinalizer(hook.remove)
    elif how == "own forward":

        def forward(h):
            called.append(1)
            return F.linear(h, plain.weight)

        plain.forward = forward
    elif how == "wrapped":
        layer.in_proj = Added(plain, 0.0)
    elif how == "other class":

        class Other(torch.nn.Linear):
            def forward(self, h):
                called.append(1)
                return F.linear(h, self.weight)

        plain.__class__ = Other
    else:

        class Packed(torch.Tensor):
            pass

        packed = plain.weight.as_subclass(Packed)
        plain.weight = torch.nn.Parameter(packed)
    assert not is_plain(layer.in_proj)
    whole = layer(h)
    whole.sum().backward()
    assert_close(torch.as_tensor(whole), halves, atol=1e-6, rtol=1e-5)
    assert called or how in ("wrapped", "other weight")
    if how == "wrapped":
        layer.in_proj.delta = 1.0
        assert not torch.allclose(layer(h), halves)


@every([name for name in NAMES if hasattr(build_mixer(name, 16), "conv1d")])
def test_a_convolution_that_is_not_plain_is_called(name):
    "A pruned convolution, whose weight a hook computes, equals a plain one with the same zeros."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    bounds = torch.tensor([0, 2, 2, 9])
    prune.l1_unstructured(layer.conv1d, "weight", 0.5)
    with torch.no_grad():
        layer.conv1d.weight_orig += 1  # the hook must compute the weight again

    def runs():
        return [
            layer(h),
            in_pieces(layer, h, [5, 0, 1, 0, 1])[0],
            layer(h[:1], bounds),
            layer(h[:, :0]),
        ]

    called = runs()
    for _ in range(2):  # each backward has a new graph
        y = runs()[0]
        y.sum().backward()
    assert not is_plain(layer.conv1d)
    prune.remove(layer.conv1d, "weight")
    assert is_plain(layer.conv1d)
    assert_close(called, runs())


@every_scan
@torch.no_grad()
def test_a_convolution_that_is_called_steps_in_place_and_in_a_pool(name):
    "A hooked convolution updates its cache in place, and at the slots of a pool."
    layer = make(name)
    h = torch.randn(2, 16)
    slots = torch.tensor([3, -1])

    def tensors():
        empty = layer.empty_cache(2)
        y, cache = layer.step(h, empty, inplace=True)
        empty = layer.empty_cache(5)
        y_pool, pool = layer.step(h, empty, inplace=True, state_indices=slots)
        return [y, *cache, y_pool[0], *pool]

    expected = tensors()
    called = []
    layer.conv1d.register_forward_hook(lambda *_: called.append(1))
    assert_close(tensors(), expected)
    assert len(called) == 2


@every_scan
@pytest.mark.parametrize(
    "options",
    [dict(d_state=3, d_conv=1, expand=1), dict(d_state=5, d_conv=2, expand=3), dict(d_conv=7)],
)
def test_odd_sizes_decode_too(name, options):
    "A scan layer of odd sizes decodes what one pass computes."
    layer = make(name, 13, **options)
    h = torch.randn(2, 9, 13)
    with torch.no_grad():
        pieces, _ = in_pieces(layer, h, [1, 0, 3, 0, 2, 0])
        assert_close(pieces, layer(h), atol=1e-5, rtol=1e-5)


@every_layer
def test_gradients_flow_through_the_cache(name):
    "Two prefills in a row have the gradients of one pass: the cache passes them on."
    # a normalised key near zero amplifies every rounding error of float32
    layer = make(name).double()
    h = torch.randn(2, 11, 16, dtype=torch.float64)
    whole = h.clone().requires_grad_()
    cut = h.clone().requires_grad_()
    late = layer(whole)[:, 6:]
    late.square().sum().backward()
    named = layer.named_parameters()
    whole_weights = {n: p.grad.clone() for n, p in named}
    layer.zero_grad()
    start = cut[:, :6]
    _, cache = layer.prefill(start)
    late = layer.prefill(cut[:, 6:], cache)[0]
    late.square().sum().backward()
    assert_close(cut.grad, whole.grad, atol=1e-8, rtol=1e-8)
    pieces_weights = {n: p.grad for n, p in layer.named_parameters()}
    assert_close(pieces_weights, whole_weights, atol=1e-8, rtol=1e-8)


@every_layer
@pytest.mark.parametrize("lengths", [[1, 71, 0, 7, 1, 1, 20], [9]])
def test_packed_documents_are_documents_alone(name, lengths):
    "Packed documents, also one without tokens, have the outputs and gradients they have alone."
    layer = make(name).double()
    steps = sum(lengths)
    h, dy = torch.randn(2, 1, steps, 16, dtype=torch.float64)
    h = h.requires_grad_()
    lengths_from_zero = torch.tensor([0, *lengths])
    bounds = lengths_from_zero.cumsum(0).int()
    inputs = {"input": h, **dict(layer.named_parameters())}

    def with_gradients(y):
        tensors = list(inputs.values())
        gradients = torch.autograd.grad(y, tensors, dy)
        return {"output": y, **dict(zip(inputs, gradients))}

    outputs = [layer(part) for part in h.split(lengths, 1) if part.shape[1]]
    alone = torch.cat(outputs, 1)
    packed = with_gradients(layer(h, bounds))
    assert_close(packed, with_gradients(alone), atol=1e-8, rtol=1e-8)


@every_layer
def test_a_cache_can_be_continued_twice(name):
    "A cache can be continued twice: `prefill` and `step` return a new cache and keep the old."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    with torch.no_grad():
        start = h[:, :5]
        _, cache = layer.prefill(start)
        before = copy.deepcopy(cache)
        token = h[:, 5]
        first, _ = layer.step(token, cache)
        rest = h[:, 5:]
        layer.prefill(rest, cache)
        assert all(map(torch.equal, before, cache))
        token = h[:, 5]
        second, _ = layer.step(token, cache)
        assert torch.equal(second, first)


@every_layer
def test_sequences_of_a_batch_are_independent(name):
    "A sequence has the outputs in a batch that it has alone."
    layer = make(name).double()
    h = torch.randn(3, 8, 16, dtype=torch.float64)
    with torch.no_grad():
        result = layer(h)[1:2]
        expected = layer(h[1:2])
        assert_close(result, expected, atol=1e-8, rtol=1e-8)


def dense_longhorn(layer, h, form):
    "Compute the layer in float64 from its objective: a linear solve per channel, no scan."
    named = layer.named_parameters()
    w = {name: tensor.double() for name, tensor in named}
    D = layer.d_inner
    N = layer.d_state
    S = torch.zeros(D, N, dtype=torch.float64)
    outputs = []
    raw = h.double() @ w["in_proj.weight"].T
    taps = w["conv1d.weight"].shape[-1]
    for t in range(len(h)):
        x = w["conv1d.bias"].clone()
        for j in range(taps):
            if t - j >= 0:
                tap = w["conv1d.weight"][:, 0, taps - 1 - j]
                x += tap * raw[t - j, :D]
        x = x * torch.sigmoid(x)
        projected = w["x_proj.weight"] @ x
        dt_low_rank, k, q = projected.split([layer.rank, N, N])
        if "key_scale" in w:
            length = torch.sqrt((k * k).sum())
            k = w["key_scale"] * k / length
        logits = w["b_proj.weight"] @ dt_low_rank + w["b_proj.bias"]
        beta = torch.sigmoid(logits).expand(D)
        rows = [dense_write(S[d], k, x[d], beta[d], form) for d in range(D)]
        S = torch.stack(rows)
        z = raw[t, D:]
        read = S @ q + w["D_skip"] * x
        gated = read * z * torch.sigmoid(z)
        outputs.append(w["out_proj.weight"] @ gated)
    return torch.stack(outputs), S


def dense_write(s, k, x, beta, form):
    "Return one row of the state after a write."
    if form == "exact":  # (I + beta k k^T) s = s' + beta x k
        identity = torch.eye(len(k), dtype=torch.float64)
        matrix = identity + beta * torch.outer(k, k)
        target = s + beta * x * k
        return torch.linalg.solve(matrix, target)
    if form == "decoupled":  # the same for each coordinate separately
        written = s + beta * x * k
        return written / (1 + beta * k * k)
    eps = beta / (1 + beta * (k @ k))
    kept = (1 - eps * k * k) * s
    return kept + eps * x * k


def assert_gradients(layer, h, expected, dy, tolerance):
    "Compare the gradients of a layer with those of its restatement, by norm."
    named = {"input": h, **dict(layer.named_parameters())}
    inputs = list(named.values())
    (y,) = layer(h)
    loss = (y * dy).sum()
    gradients = torch.autograd.grad(loss, inputs)
    loss = (expected * dy).sum()
    references = torch.autograd.grad(loss, inputs)
    for name, gradient, reference in zip(named, gradients, references, strict=True):
        difference = (gradient - reference).norm()
        assert difference <= tolerance * reference.norm(), name
        assert reference.norm() > 0, name


@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled"])
@pytest.mark.parametrize("rate", ["vector", "scalar"])
@pytest.mark.parametrize("key_norm", [False, True])
def test_longhorn_is_the_minimiser_of_its_objective(form, rate, key_norm):
    layer = make("longhorn", 9, form=form, rate=rate, d_state=3, key_norm=key_norm)
    h = torch.randn(1, 7, 9, requires_grad=True)
    expected, state = dense_longhorn(layer, h[0], form)
    y, cache = layer.prefill(h)
    assert_close(y[0].double(), expected, atol=1e-5, rtol=1e-4)
    result = cache.S[0].double()
    assert_close(result, state, atol=1e-5, rtol=1e-4)
    assert_gradients(layer, h, expected, torch.randn(7, 9), 1e-4)


@pytest.mark.parametrize("rate", ["vector", "scalar"])
@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled"])
def test_normalised_keys_are_exact_in_float64(form, rate):
    "The layer has the outputs and gradients of the plain formula, including that of the length."
    layer = make("longhorn", 9, form=form, rate=rate, d_state=3, key_norm=True).double()
    h = torch.randn(1, 7, 9, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, 9, dtype=torch.float64)
    expected, state = dense_longhorn(layer, h[0], form)
    y, cache = layer.prefill(h)
    result = (y[0], cache.S[0])
    assert_close(result, (expected, state), atol=1e-12, rtol=1e-11)
    assert_gradients(layer, h, expected, dy, 1e-10)


def test_keys_get_their_length_and_zeros_stay_zero():
    "Keys are normalised even if the length overflows or underflows; zeros pass no gradient."
    torch.manual_seed(0)
    k = torch.randn(2, 5, 3, dtype=torch.float64)
    s = torch.tensor([-1.7], dtype=torch.float64)
    k[1, 2] = 0
    inputs = k.requires_grad_(), s.requires_grad_()
    keys = to_length(*inputs)
    rows = []
    for row in k.detach().flatten(0, 1):
        rows.append(-1.7 * row / math.sqrt(row @ row) if row.any() else row)
    assert_close(keys.flatten(0, 1), torch.stack(rows), atol=1e-14, rtol=1e-14)
    loss = keys.square().sum() + keys.sum()
    dk, ds = torch.autograd.grad(loss, inputs)
    assert not dk[1, 2].any()
    assert dk.isfinite().all()
    assert ds.isfinite().all()
    assert ds.any()
    nonzero = k.detach()[k.any(-1)]
    kept = nonzero.requires_grad_()
    assert torch.autograd.gradcheck(to_length, (kept, s))
    assert torch.autograd.gradgradcheck(to_length, (kept, s))
    for dtype, size in (
        (torch.float16, 1e4),
        (torch.float16, 1e-5),
        (torch.bfloat16, 1e15),
        (torch.bfloat16, 1e-10),
    ):
        scaled = size * k.detach()[0]
        short = scaled.to(dtype)
        assert to_length(short, s.float()).dtype is dtype
        result = to_length(short, s.float())
        expected = to_length(short.double(), s)
        assert error(result, expected) < bound(dtype, 1)


def test_normalised_keys_are_an_option_with_one_parameter():
    "Without the option, a layer has no parameter of it."
    plain = make("longhorn_exact", key_norm=False)
    on = make("longhorn_exact", key_norm=True)
    torch.manual_seed(0)
    plain_state = build_mixer("longhorn_exact", 16, key_norm=False).state_dict()
    on_state = build_mixer("longhorn_exact", 16, key_norm=True).state_dict()
    names = on_state.keys() - plain_state.keys()
    assert names == {"key_scale"}
    assert on_state["key_scale"].tolist() == [2.0]
    size = sum(p.numel() for p in plain.parameters())
    result = sum(p.numel() for p in on.parameters())
    assert result == size + 1
    half = Longhorn(16, key_norm=True, dtype=torch.bfloat16)
    assert half.key_scale.dtype is torch.float32
    assert half.x_proj.weight.dtype is torch.bfloat16
    h = torch.randn(2, 7, 16)
    k, beta, eps = on.rates(h)
    result = k.norm(dim=-1)
    scale = on.key_scale.abs()
    expected = scale.expand(2, 7)
    assert_close(result, expected)
    square = on.key_scale.square()
    expected = beta / (1 + beta * square)
    assert_close(eps, expected)
    length = plain.rates(h)[0].norm(dim=-1)
    assert not length.allclose(on.key_scale.abs())
    with torch.no_grad():
        on.key_scale.fill_(3.0)
        on.x_proj.weight *= 100  # a longer key changes only the rate
    keys = on.rates(h)[0]
    result = keys.norm(dim=-1)
    expected = torch.full((2, 7), 3.0)
    assert_close(result, expected)


def test_names_choose_form_and_rate_and_belong_to_one_class():
    class Other(Longhorn):
        pass

    with pytest.raises(ValueError, match="'longhorn' is already registered"):
        register_mixer("longhorn")(Other)
    assert MIXERS["longhorn"] is Longhorn
    kinds = {}
    for name in NAMES:
        if name.startswith("longhorn"):
            layer = MIXERS[name](16)
            kinds[name] = layer.form, layer.rate
    assert kinds == {
        "longhorn": ("diagonal", "vector"),
        "longhorn_exact": ("exact", "vector"),
        "longhorn_decoupled": ("decoupled", "vector"),
        "longhorn_scalar": ("diagonal", "scalar"),
    }


def test_step_sizes_start_at_one_half_and_rates_are_those_of_the_formula():
    layer = Longhorn(32)
    torch.nn.init.zeros_(layer.conv1d.bias)
    h = torch.zeros(1, 4, 32)
    k, beta, eps = layer.rates(h)
    expected = torch.full((1, 4, 64), 0.5)
    assert torch.equal(beta, expected)
    assert torch.equal(eps, beta)
    assert (k == 0).all()
    layer = make("longhorn_scalar")
    h = torch.randn(2, 5, 16)
    k, beta, eps = layer.rates(h)
    assert beta.shape == (2, 5, 1)
    squares = k.square().sum(-1, keepdim=True)
    expected = beta / (1 + beta * squares)
    assert_close(eps, expected)


@every_layer
def test_state_is_float32_when_weights_are_bfloat16(name):
    "With bfloat16 weights outputs are bfloat16, and a scan's state stays in float32."
    layer = make(name).to(torch.bfloat16)
    h = torch.randn(2, 6, 16, dtype=torch.bfloat16)
    y, cache = layer.prefill(h)
    token = h[:, 0]
    y_t, cache = layer.step(token, cache)
    assert y.dtype is y_t.dtype is torch.bfloat16
    if isinstance(cache, ScanCache):
        assert cache.S.dtype is torch.float32
        empty = layer.empty_cache(1)
        assert empty.S.dtype is torch.float32
        empty = make(name).double().empty_cache(1)
        assert empty.S.dtype is torch.float64


@every_family_of_kit
def test_a_traced_layer_runs_and_learns_at_another_length(name):
    "A traced layer passes `torch.jit.trace`'s checks, and equals the layer at another length."
    torch.manual_seed(0)
    layer = MIXERS[name](16)
    longer = torch.randn(2, 37, 16, requires_grad=True)
    example = torch.randn(2, 9, 16)
    traced = torch.jit.trace(layer, example)
    assert_close(traced(longer), layer(longer), rtol=1e-4, atol=1e-5)
    loss = traced(longer).square().sum()
    (gradient,) = torch.autograd.grad(loss, longer)
    loss = layer(longer).square().sum()
    (expected,) = torch.autograd.grad(loss, longer)
    largest = expected.abs().max().item()
    atol = 1e-5 * largest
    assert_close(gradient, expected, rtol=1e-3, atol=atol)


@every_mixer_of_kit
@pytest.mark.parametrize("batch, steps", ((0, 5), (2, 0)))
def test_an_empty_batch_gives_every_parameter_a_gradient_of_zeros(name, batch, steps):
    "Every parameter gets a gradient of zeros from a batch without rows or without tokens."
    layer = MIXERS[name](16)
    h = torch.zeros(batch, steps, 16)
    layer(h).sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        # processes that share gradients wait for each
        assert parameter.grad is not None, parameter_name
        assert not parameter.grad.any(), parameter_name


@every_mixer
def test_device_and_dtype_are_arguments_as_in_pytorch(name):
    "Every parameter gets device and dtype, except that A_log and D_skip keep float32."

    def drawn(**options):
        torch.manual_seed(0)
        return MIXERS[name](16, **options)

    plain = drawn().state_dict()
    half = drawn(dtype=torch.bfloat16)
    on_meta = drawn(device="meta", dtype=torch.float64).state_dict()
    for key, value in half.state_dict().items():
        dtype = torch.float32 if key in ("A_log", "D_skip") else torch.bfloat16
        expected = plain[key].to(dtype)
        assert torch.equal(value, expected), key
        assert on_meta[key].is_meta
        assert on_meta[key].dtype is torch.float64
    h = torch.randn(2, 7, 16, dtype=torch.bfloat16)
    pieces, _ = in_pieces(half, h, [4, 0, 2])
    assert_close(pieces, half(h), atol=0.02, rtol=0.02)
    config = lm.LMConfig(d_model=16, mixer=name)
    block = lm.Block(config, device="meta", dtype=torch.bfloat16)
    pairs = zip(block.mixer.parameters(), half.parameters())
    for of_block, of_layer in pairs:
        assert of_block.is_meta
        assert of_block.dtype is of_layer.dtype


@every_layer
def test_autocast_trains_and_decodes(name):
    "Under autocast outputs are bfloat16, near those in float32, and gradients are float32."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(h)
        pieces, cache = in_pieces(layer, h, [4, 0, 3, 0])
    assert y.dtype is torch.bfloat16
    # inputs, weights and results of four successive products are rounded, by half of eps each
    limit = bound(torch.bfloat16, 4 * 3 / 2)
    assert error(y, layer(h)) < limit
    limit = 2 * limit
    assert error(pieces, y) < limit
    if isinstance(cache, ScanCache):
        assert cache.S.dtype is torch.float32
    loss = y.float().square().mean()
    loss.backward()
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.dtype is torch.float32


def test_a_prompt_read_in_bfloat16_can_be_continued_in_float32():
    layer = make("longhorn")
    h = torch.randn(1, 9, 16)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            start = h[:, :8]
            _, cache = layer.prefill(start)
        token = h[:, 8]
        y_t, cache = layer.step(token, cache)
        expected = layer(h)[:, 8]
        limit = bound(torch.bfloat16, 4 * 3 / 2)
        assert error(y_t, expected) < limit


@every([name for name in NAMES if name not in GROWING])
def test_decoding_takes_constant_memory(name):
    "A cache does not grow with the text; list a mixer whose cache does in GROWING of mixers.py."
    layer = make(name)

    def bytes_held(cache):
        return sum(t.untyped_storage().nbytes() for t in cache)

    expected = bytes_held(layer.empty_cache(1))
    for length in (1, 40, 90):
        with torch.no_grad():
            h = torch.randn(1, length, 16)
            _, cache = layer.prefill(h)
        assert bytes_held(cache) == expected


def hooked(layer):
    layer.conv1d.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda: build_mixer("longhorm", 16),
            "mixer is 'longhorm'; known mixers: attention, deltanet",
        ),
        (
            lambda: build_mixer("longhorn", 16, d_stat=8),
            "no option 'd_stat'; its options: d_state, d_conv",
        ),
        (lambda: build_mixer("longhorn_exact", 16, form="diagonal"), "no option 'form'"),
        *(
            (lambda wrong=wrong: Longhorn(**dict(d_model=16) | wrong), message)
            for wrong, message in [
                (dict(form="fast"), "form is 'fast'; expected one of diagonal, exact, decoupled"),
                (dict(rate="matrix"), "rate is 'matrix'; expected vector or scalar"),
                (dict(key_norm="yes"), "key_norm is 'yes'; expected one of True, False"),
                (dict(d_model=0), "d_model is 0; expected an integer of at least 1"),
                (dict(d_state=2.5), "d_state is 2.5; expected an integer of at least 1"),
                (dict(expand=True), "expand is True; expected an integer"),
            ]
        ),
        (
            lambda: make("gla")(torch.randn(2, 4, 16), torch.tensor([0, 4])),
            r"x has shape \(2, 4, 16\); expected \(1, T, d_model\), because with cu_seqlens",
        ),
        (
            lambda: make("longhorn")(torch.randn(1, 4, 16), torch.tensor([0, 3])),
            "cu_seqlens ends at 3; expected 4, the length of x",
        ),
        (
            lambda: hooked(make("longhorn")).run(
                torch.randn(1, 4, 16), cu_seqlens=torch.tensor([0, 4])
            ),
            "cu_seqlens needs a plain conv1d",
        ),
        (
            lambda: Longhorn(16)(torch.randn(2, 3, 17)),
            r"x has shape \(2, 3, 17\); expected \(B, T, 16\)",
        ),
        (
            lambda: Longhorn(16).prefill(torch.randn(3, 16)),
            r"x has shape \(3, 16\); expected \(B, T, 16\)",
        ),
        (
            lambda: Longhorn(16).step(torch.randn(2, 3, 16), None),
            r"x has shape \(2, 3, 16\); expected \(B, 16\)",
        ),
        (
            lambda: make("gla").step(torch.randn(2, 16).double(), make("gla").empty_cache(2)),
            "x has dtype torch.float64; expected torch.float32",
        ),
        (lambda: make("gla").step(None, None), "x is NoneType"),
    ],
)
def test_mistakes_are_told_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        wrong()
    assert "\n" not in str(error.value)


def test_options_are_listed_without_the_fixed_ones():
    assert mixer_options("longhorn") == ["d_state", "d_conv", "expand", "form", "rate", "key_norm"]
    assert mixer_options("longhorn_scalar") == ["d_state", "d_conv", "expand", "form", "key_norm"]
    for mixer in MIXERS.values():
        assert issubclass(getattr(mixer, "func", mixer), Mixer)


def test_low_rank_is_a_sixteenth_rounded_up():
    for d_model in (1, 16, 17, 768):
        expected = math.ceil(d_model / 16)
        assert Longhorn(d_model).rank == expected


@pytest.mark.parametrize("learning", (slow_case(False), True))
@pytest.mark.parametrize(
    "name",
    (
        "longhorn",
        "longhorn_exact+key_norm",
        "mamba",
        "attention",
        *map(
            slow_case,
            (
                "longhorn_exact",
                "longhorn_decoupled",
                "longhorn_scalar",
                "longhorn+key_norm",
                "mamba_input_a",
            ),
        ),
    ),
)
def test_exported_layers_equal_eager_ones_at_any_batch_and_length(name, learning):
    "An exported layer runs with or without gradients, independent of the export."
    torch.manual_seed(0)
    name, options = parts(name)
    assert_exported_equals_eager(
        build_mixer(name, 32, **options), lambda B, T: torch.randn(B, T, 32), learning, 100
    )


def emptied(build):
    "Build a module on the meta device, then give it memory filled with NaN."
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    return module


@every_layer
def test_a_layer_without_memory_is_drawn_as_by_its_constructor(name):
    "After `to_empty`, `reset_parameters` gives the values of the constructor with the same seed."
    name, options = parts(name)

    def build():
        return build_mixer(name, 24, **options)

    layer = emptied(build)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    fresh = build().state_dict()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, fresh[key])


@every_layer
def test_resetting_every_submodule_gives_the_starting_values(name):
    "Resetting all submodules in turn, also of a copy, keeps the layer's starting values."
    name, options = parts(name)

    def build():
        return build_mixer(name, 64, **options)

    layer = copy.deepcopy(emptied(build))
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    one = build().state_dict()
    two = build().state_dict()
    for key, value in layer.state_dict().items():
        if torch.equal(one[key], two[key]):  # no random numbers
            assert torch.equal(value, one[key]), key
        else:
            assert value.isfinite().all(), key
            assert value.numel() < 100 or 0.8 < value.std() / one[key].std() < 1.25, key


def test_device_and_dtype_are_kept_when_parameters_are_drawn_again():
    layer = Longhorn(16, dtype=torch.bfloat16)
    state = layer.state_dict()
    kinds = {key: value.dtype for key, value in state.items()}
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    fresh = Longhorn(16, dtype=torch.bfloat16).state_dict()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, fresh[key])
    expected = {key: value.dtype for key, value in fresh.items()}
    assert kinds == expected
    layer.to("meta").reset_parameters()
    for parameter in layer.parameters():
        assert parameter.is_meta


def test_a_wrapped_layer_is_not_drawn_again():
    layer = Longhorn(16)
    layer.in_proj = Added(layer.in_proj, 0.0)
    message = "has a parameter in_proj.* call reset_parameters before the layer is wrapped"
    with pytest.raises(ValueError, match=f"Longhorn {message}"):
        layer.reset_parameters()


REFUSAL = "torch.jit.script cannot compile [A-Z][a-z]+; torch.export.export and torch.jit.trace can"


@pytest.mark.parametrize("name", ("longhorn_exact", "mamba", "attention"))
def test_a_layer_can_be_traced_and_refuses_to_be_scripted(name):
    layer = make(name).eval()
    example = torch.randn(2, 9, 16)
    traced = torch.jit.trace(layer, example)
    h = torch.randn(3, 20, 16)
    assert_close(traced(h), layer(h))
    projection = layer.qkv_proj if name == "attention" else layer.in_proj
    loss = traced(h).square().sum()
    gradients = torch.autograd.grad(loss, projection.weight)
    loss = layer(h).square().sum()
    expected = torch.autograd.grad(loss, projection.weight)
    assert_close(gradients, expected)
    model = lm.SequenceLM(lm.LMConfig(20, 16, 1, name))
    for module in (layer, model):
        with pytest.raises(RuntimeError) as error:
            torch.jit.script(module)
        assert re.fullmatch(REFUSAL, str(error.value))


@pytest.mark.parametrize("name", ("longhorn", "mamba"))
def test_a_second_derivative_comes_by_the_way_that_the_message_names(name):
    layer = make(name).double()
    h = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)

    def second():
        loss = layer(h).square().sum()
        (first,) = torch.autograd.grad(loss, h, create_graph=True)
        squared = first.square().sum()
        return torch.autograd.grad(squared, h)[0]

    with pytest.raises(RuntimeError) as error:
        second()
    message = str(error.value)
    way = re.search(r"a layer set layer\.scan = (functools\.partial\(.*\))$", message)[1]
    layer.scan = eval(way, {"functools": functools, "layer": layer})
    along = torch.randn_like(h)
    slope = (second() * along).sum()

    def squared_gradient(inputs):
        loss = layer(inputs).square().sum()
        (gradient,) = torch.autograd.grad(loss, h)
        return gradient.square().sum()

    step = 1e-6
    ahead = squared_gradient(h + step * along)
    behind = squared_gradient(h - step * along)
    assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)
