"""Every mixer decodes what it trains and looks only back; Longhorn against a restatement with a dense solve."""

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
)
from rounding import bound, error
from sweep import slow_case
from test_baselines import perturbed

pytestmark = pytest.mark.numeric


def make(name, d_model=16, **options):
    name, on = parts(name)
    return perturbed(name, d_model, 0.1, **options | on)


def in_pieces(layer, h, lengths, cache=None):
    parts = []
    start = 0
    for length in lengths:
        if length == 0:
            y_t, cache = layer.step(
                h[:, start], cache or layer.empty_cache(len(h), h.device, h.dtype)
            )
            y = y_t[:, None]
            length = 1
        else:
            y, cache = layer.prefill(h[:, start : start + length], cache)
        parts.append(y)
        start += length
    assert start == h.shape[1]
    return torch.cat(parts, 1), cache


@every_mixer
def test_shapes(name):
    "Outputs have the shape (B,T,d_model) of the inputs, a step's (B,d_model), and every tensor of a cache starts with the batch."
    layer = make(name)
    h = torch.randn(3, 7, 16)
    y, cache = layer.prefill(h[:, :6])
    y_t, after = layer.step(h[:, 6], cache)
    assert (layer(h).shape, y.shape, y_t.shape) == (h.shape, h[:, :6].shape, h[:, 6].shape)
    assert {len(tensor) for known in (layer.empty_cache(3), cache, after) for tensor in known} == {
        3
    }


@every_layer
@settings(max_examples=6, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), batch=st.integers(1, 3))
@example(lengths=[71, 0, 0, 0, 0, 0, 74], batch=2)  # across chunks
def test_any_split_into_prefills_and_steps_equals_one_pass(name, lengths, batch):
    "Any split into prefills and steps (a length of zero stands for a `step`) gives the outputs of one pass: the cache carries the whole state."
    layer = make(name)
    h = torch.randn(batch, sum(max(length, 1) for length in lengths), 16)
    with torch.no_grad():
        pieces, _ = in_pieces(layer, h, lengths)
        torch.testing.assert_close(pieces, layer(h), atol=2e-5, rtol=2e-5)


@every([*SCANS, *OPTIONS], FAMILIES)
def test_compiled_halves_of_the_input_projection_are_the_whole(name):
    "A compiled scan layer has the gradients of the eager one."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = (
        torch.autograd.grad(run(h).square().sum(), list(layer.parameters()))
        for run in (compiled, layer)
    )
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("longhorn", "mamba"))
def test_a_layer_compiles_to_few_kernels_and_steps_as_fast_as_eager(name, monkeypatch, tmp_path):
    """One scan is one operation: traced through, its loop took 88 s to compile and 17 times the time per step.

    Times are of the CPU, which other programs disturb less than the clock. PyTorch first builds headers once per machine."""
    resource = pytest.importorskip("resource")
    metrics = pytest.importorskip("torch._inductor.metrics")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def spent():
        return sum(
            sum(resource.getrusage(who)[:2])
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )

    layer = make(name, 64)
    h = torch.randn(1, 127, 64)

    def step(run):
        return run(h).square().sum().backward()

    torch.compiler.reset()
    with torch._inductor.config.patch(compile_threads=1):
        torch.compile(torch.sin)(h)
        metrics.reset()
        before = spent()
        compiled = torch.compile(layer, fullgraph=True)
        step(compiled)
    assert spent() - before < 20 and metrics.generated_kernel_count < 30
    seconds = {layer: [], compiled: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other take CPU time
    for _ in range(60):
        for run, times in seconds.items():
            start = time.process_time()
            step(run)
            times.append(time.process_time() - start)
    torch.set_num_threads(threads)
    assert statistics.median(seconds[compiled]) < 1.1 * statistics.median(seconds[layer])


class Added(torch.nn.Module):
    "A layer with something added to its output, as LoRA adds."

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
        request.addfinalizer(hooks[how](lambda *_: called.append(1)).remove)
    elif how == "own forward":
        plain.forward = lambda h: called.append(1) or F.linear(h, plain.weight)
    elif how == "wrapped":
        layer.in_proj = Added(plain, 0.0)
    elif how == "other class":
        plain.__class__ = type(
            "Other",
            (torch.nn.Linear,),
            {"forward": lambda self, h: called.append(1) or F.linear(h, self.weight)},
        )
    else:
        plain.weight = torch.nn.Parameter(
            plain.weight.as_subclass(type("Packed", (torch.Tensor,), {}))
        )
    assert not is_plain(layer.in_proj)
    whole = layer(h)
    whole.sum().backward()
    torch.testing.assert_close(torch.as_tensor(whole), halves, atol=1e-6, rtol=1e-5)
    assert called or how in ("wrapped", "other weight")
    if how == "wrapped":
        layer.in_proj.delta = 1.0
        assert not torch.allclose(layer(h), halves)


@every([name for name in NAMES if hasattr(build_mixer(name, 16), "conv1d")])
def test_a_convolution_that_is_not_plain_is_called(name):
    "A pruned convolution, whose weight a hook computes, gives what a plain one with its zeros gives."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    bounds = torch.tensor([0, 2, 2, 9])
    prune.l1_unstructured(layer.conv1d, "weight", 0.5)
    with torch.no_grad():
        layer.conv1d.weight_orig += 1  # the hook has to compute the weight anew

    def runs():
        return [
            layer(h),
            in_pieces(layer, h, [5, 0, 1, 0, 1])[0],
            layer(h[:1], bounds),
            layer(h[:, :0]),
        ]

    found = runs()
    for _ in range(2):  # each backward has a new graph
        runs()[0].sum().backward()
    assert not is_plain(layer.conv1d)
    prune.remove(layer.conv1d, "weight")
    assert is_plain(layer.conv1d)
    torch.testing.assert_close(found, runs())


@every_scan
@torch.no_grad()
def test_a_convolution_that_is_called_steps_in_place_and_in_a_pool(name):
    "A hooked convolution updates its cache in place, and at the slots of a pool."
    layer = make(name)
    h = torch.randn(2, 16)
    slots = torch.tensor([3, -1])

    def runs():
        return [
            layer.step(h, layer.empty_cache(2), inplace=True),
            layer.step(h, layer.empty_cache(5), inplace=True, state_indices=slots),
        ]

    plain = runs()
    called = []
    layer.conv1d.register_forward_hook(lambda *_: called.append(1))
    found = runs()
    assert len(called) == 2
    (y, cache), (y_pool, pool) = found
    torch.testing.assert_close(
        (y, *cache, y_pool[0], *pool), (plain[0][0], *plain[0][1], plain[1][0][0], *plain[1][1])
    )


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
        torch.testing.assert_close(pieces, layer(h), atol=1e-5, rtol=1e-5)


@every_layer
def test_gradients_flow_through_the_cache(name):
    "Two prefills in a row have the gradients of one pass: the cache passes them on."
    # a normalised key near zero enlarges every rounding of float32
    layer = make(name).double()
    h = torch.randn(2, 11, 16, dtype=torch.float64)
    whole = h.clone().requires_grad_()
    cut = h.clone().requires_grad_()
    layer(whole)[:, 6:].square().sum().backward()
    whole_weights = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    _, cache = layer.prefill(cut[:, :6])
    layer.prefill(cut[:, 6:], cache)[0].square().sum().backward()
    torch.testing.assert_close(cut.grad, whole.grad, atol=1e-8, rtol=1e-8)
    for n, p in layer.named_parameters():
        torch.testing.assert_close(
            p.grad, whole_weights[n], atol=1e-8, rtol=1e-8, msg=lambda m: f"{n}: {m}"
        )


@every_layer
@pytest.mark.parametrize("lengths", [[1, 71, 0, 7, 1, 1, 20], [9]])
def test_packed_documents_are_documents_alone(name, lengths):
    "Packed documents have the outputs and gradients that they have alone; a bound that comes twice is a document of no tokens."
    layer = make(name).double()
    h, dy = torch.randn(2, 1, sum(lengths), 16, dtype=torch.float64)
    h = h.requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    alone = torch.cat([layer(part) for part in h.split(lengths, 1) if part.shape[1]], 1)
    for what, a, b in zip(
        ["output", "input", *dict(layer.named_parameters())],
        *(
            [y, *torch.autograd.grad(y, [h, *layer.parameters()], dy)]
            for y in (layer(h, bounds), alone)
        ),
    ):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8, msg=lambda m: f"{what}: {m}")


@every_layer
def test_a_cache_can_be_continued_twice(name):
    "A cache can be continued twice: `prefill` and `step` return a new cache and leave the given one as it is."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    with torch.no_grad():
        _, cache = layer.prefill(h[:, :5])
        before = copy.deepcopy(cache)
        first = layer.step(h[:, 5], cache)[0]
        layer.prefill(h[:, 5:], cache)
        assert all(torch.equal(a, b) for a, b in zip(before, cache))
        assert torch.equal(layer.step(h[:, 5], cache)[0], first)


@every_layer
def test_sequences_of_a_batch_are_independent(name):
    "A sequence has the outputs in a batch that it has alone."
    layer = make(name).double()
    h = torch.randn(3, 8, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(h)[1:2], layer(h[1:2]), atol=1e-8, rtol=1e-8)


def dense_longhorn(layer, h, form):
    "The layer in float64 from its defining objective: a linear solve for every channel, no closed form, no scan."
    w = {name: tensor.double() for name, tensor in layer.named_parameters()}
    h, (T, D, N) = h.double(), (h.shape[0], layer.d_inner, layer.d_state)
    S = torch.zeros(D, N, dtype=torch.float64)
    outputs = []
    raw = h @ w["in_proj.weight"].T
    taps = w["conv1d.weight"].shape[-1]
    for t in range(T):
        x = w["conv1d.bias"].clone()
        for j in range(taps):
            if t - j >= 0:
                x += w["conv1d.weight"][:, 0, taps - 1 - j] * raw[t - j, :D]
        x = x * torch.sigmoid(x)
        dt_low_rank, k, q = (w["x_proj.weight"] @ x).split([layer.rank, N, N])
        if "key_scale" in w:
            k = w["key_scale"] * k / torch.sqrt((k * k).sum())
        beta = torch.sigmoid(w["b_proj.weight"] @ dt_low_rank + w["b_proj.bias"]).expand(D)
        new = torch.empty_like(S)
        for d in range(D):
            if form == "exact":  # (I + beta k k^T) s = s' + beta x k
                matrix = torch.eye(N, dtype=torch.float64) + beta[d] * torch.outer(k, k)
                new[d] = torch.linalg.solve(matrix, S[d] + beta[d] * x[d] * k)
            elif form == "decoupled":  # the same for every coordinate by itself
                new[d] = (S[d] + beta[d] * x[d] * k) / (1 + beta[d] * k * k)
            else:
                eps = beta[d] / (1 + beta[d] * (k @ k))
                new[d] = (1 - eps * k * k) * S[d] + eps * x[d] * k
        S = new
        z = raw[t, D:]
        outputs.append(w["out_proj.weight"] @ ((S @ q + w["D_skip"] * x) * z * torch.sigmoid(z)))
    return torch.stack(outputs), S


@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled"])
@pytest.mark.parametrize("rate", ["vector", "scalar"])
@pytest.mark.parametrize("key_norm", [False, True])
def test_longhorn_is_the_minimiser_of_its_objective(form, rate, key_norm):
    layer = make("longhorn", 9, form=form, rate=rate, d_state=3, key_norm=key_norm)
    h = torch.randn(1, 7, 9, requires_grad=True)
    expected, state = dense_longhorn(layer, h[0], form)
    y, cache = layer.prefill(h)
    torch.testing.assert_close(y[0].double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache.S[0].double(), state, atol=1e-5, rtol=1e-4)
    dy = torch.randn(7, 9)
    named = {"input": h, **dict(layer.named_parameters())}
    ours, theirs = (
        torch.autograd.grad((out * dy).sum(), [*named.values()]) for out in (layer(h)[0], expected)
    )
    for name, a, b in zip(named, ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() and b.norm() > 0, name


@pytest.mark.parametrize("rate", ["vector", "scalar"])
@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled"])
def test_normalised_keys_are_exact_in_float64(form, rate):
    "Outputs and all gradients, that of the length included, of the layer and of the plain formula."
    layer = make("longhorn", 9, form=form, rate=rate, d_state=3, key_norm=True).double()
    h = torch.randn(1, 7, 9, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, 9, dtype=torch.float64)
    expected, state = dense_longhorn(layer, h[0], form)
    y, cache = layer.prefill(h)
    torch.testing.assert_close((y[0], cache.S[0]), (expected, state), atol=1e-12, rtol=1e-11)
    named = {"input": h, **dict(layer.named_parameters())}
    ours, theirs = (
        torch.autograd.grad((out * dy).sum(), [*named.values()]) for out in (layer(h)[0], expected)
    )
    for name, a, b in zip(named, ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm() and b.norm() > 0, name


def test_keys_get_their_length_and_zeros_stay_zero():
    "Also where the length in the dtype of the keys would overflow or vanish; a key of zeros passes no gradient."
    torch.manual_seed(0)
    k = torch.randn(2, 5, 3, dtype=torch.float64)
    s = torch.tensor([-1.7], dtype=torch.float64)
    k[1, 2] = 0
    inputs = k.requires_grad_(), s.requires_grad_()
    found = to_length(*inputs)
    rows = [
        -1.7 * row / math.sqrt(row @ row) if row.any() else row for row in k.detach().flatten(0, 1)
    ]
    torch.testing.assert_close(found.flatten(0, 1), torch.stack(rows), atol=1e-14, rtol=1e-14)
    dk, ds = torch.autograd.grad(found.square().sum() + found.sum(), inputs)
    assert not dk[1, 2].any() and dk.isfinite().all() and ds.isfinite().all() and ds.any()
    kept = k.detach()[k.any(-1)].requires_grad_()
    assert torch.autograd.gradcheck(to_length, (kept, s)) and torch.autograd.gradgradcheck(
        to_length, (kept, s)
    )
    for dtype, size in (
        (torch.float16, 1e4),
        (torch.float16, 1e-5),
        (torch.bfloat16, 1e15),
        (torch.bfloat16, 1e-10),
    ):
        short = (size * k.detach()[0]).to(dtype)
        assert to_length(short, s.float()).dtype is dtype
        assert error(to_length(short, s.float()), to_length(short.double(), s)) < bound(dtype, 1)


def test_normalised_keys_are_an_option_with_one_parameter():
    "Off, the layer is as before: the same weights from the same seed, and no further one in its file."
    plain, on = (make("longhorn_exact", key_norm=key_norm) for key_norm in (False, True))
    torch.manual_seed(0)
    fresh = [
        build_mixer("longhorn_exact", 16, key_norm=key_norm).state_dict()
        for key_norm in (False, True)
    ]
    assert set(fresh[1]) - set(fresh[0]) == {"key_scale"} and fresh[1]["key_scale"].tolist() == [
        2.0
    ]
    assert sum(p.numel() for p in on.parameters()) == sum(p.numel() for p in plain.parameters()) + 1
    half = Longhorn(16, key_norm=True, dtype=torch.bfloat16)
    assert half.key_scale.dtype is torch.float32 and half.x_proj.weight.dtype is torch.bfloat16
    h = torch.randn(2, 7, 16)
    k, beta, eps = on.rates(h)
    torch.testing.assert_close(k.norm(dim=-1), on.key_scale.abs().expand(2, 7))
    torch.testing.assert_close(eps, beta / (1 + beta * on.key_scale.square()))
    assert not plain.rates(h)[0].norm(dim=-1).allclose(on.key_scale.abs())
    with torch.no_grad():
        on.key_scale.fill_(3.0)
        on.x_proj.weight *= 100  # a longer key changes no more than its rate
    torch.testing.assert_close(on.rates(h)[0].norm(dim=-1), torch.full((2, 7), 3.0))


def test_names_choose_form_and_rate_and_belong_to_one_class():
    class Other(Longhorn):
        pass

    with pytest.raises(ValueError, match="'longhorn' is already registered"):
        register_mixer("longhorn")(Other)
    assert MIXERS["longhorn"] is Longhorn
    kinds = {
        name: (MIXERS[name](16).form, MIXERS[name](16).rate)
        for name in NAMES
        if name.startswith("longhorn")
    }
    assert kinds == {
        "longhorn": ("diagonal", "vector"),
        "longhorn_exact": ("exact", "vector"),
        "longhorn_decoupled": ("decoupled", "vector"),
        "longhorn_scalar": ("diagonal", "scalar"),
    }


def test_step_sizes_start_at_one_half_and_rates_are_those_of_the_formula():
    layer = Longhorn(32)
    torch.nn.init.zeros_(layer.conv1d.bias)
    k, beta, eps = layer.rates(torch.zeros(1, 4, 32))
    assert (
        torch.equal(beta, torch.full((1, 4, 64), 0.5)) and torch.equal(eps, beta) and (k == 0).all()
    )
    layer = make("longhorn_scalar")
    h = torch.randn(2, 5, 16)
    k, beta, eps = layer.rates(h)
    assert beta.shape == (2, 5, 1)
    torch.testing.assert_close(eps, beta / (1 + beta * k.square().sum(-1, keepdim=True)))


@every_layer
def test_state_is_float32_when_weights_are_bfloat16(name):
    "With bfloat16 weights outputs are bfloat16, and a scan's state stays in float32."
    layer = make(name).to(torch.bfloat16)
    h = torch.randn(2, 6, 16, dtype=torch.bfloat16)
    y, cache = layer.prefill(h)
    y_t, cache = layer.step(h[:, 0], cache)
    assert y.dtype is y_t.dtype is torch.bfloat16
    if isinstance(cache, ScanCache):
        assert cache.S.dtype is torch.float32 and layer.empty_cache(1).S.dtype is torch.float32
        assert make(name).double().empty_cache(1).S.dtype is torch.float64


@every_family_of_kit
def test_a_traced_layer_runs_and_learns_at_another_length(name):
    "A traced layer passes the checks that `torch.jit.trace` makes by default, and equals the layer at another length, with gradients."
    torch.manual_seed(0)
    layer = MIXERS[name](16)
    longer = torch.randn(2, 37, 16, requires_grad=True)
    traced = torch.jit.trace(layer, torch.randn(2, 9, 16))
    torch.testing.assert_close(traced(longer), layer(longer), rtol=1e-4, atol=1e-5)
    got, want = (
        torch.autograd.grad(run(longer).square().sum(), longer)[0] for run in (traced, layer)
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * want.abs().max().item())


@every_mixer_of_kit
@pytest.mark.parametrize("batch, steps", ((0, 5), (2, 0)))
def test_an_empty_batch_gives_every_parameter_a_gradient_of_zeros(name, batch, steps):
    "Every parameter gets a gradient of zeros from a batch without rows or without tokens: processes that share gradients wait for each."
    layer = MIXERS[name](16)
    layer(torch.zeros(batch, steps, 16)).sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is None or p.grad.any()] == []


@every_mixer
def test_device_and_dtype_are_arguments_as_in_pytorch(name):
    "Device and dtype hold for every parameter of a layer or block, except that A_log and D_skip keep float32, with the values of the same seed; the layer decodes what it trains."

    def drawn(**place):
        torch.manual_seed(0)
        return MIXERS[name](16, **place)

    plain = drawn().state_dict()
    half = drawn(dtype=torch.bfloat16)
    far = drawn(device="meta", dtype=torch.float64).state_dict()
    for key, value in half.state_dict().items():
        assert torch.equal(
            value, plain[key].to(torch.float32 if key in ("A_log", "D_skip") else torch.bfloat16)
        ), key
        assert far[key].is_meta and far[key].dtype is torch.float64
    h = torch.randn(2, 7, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(in_pieces(half, h, [4, 0, 2])[0], half(h), atol=0.02, rtol=0.02)
    far = lm.Block(
        lm.LMConfig(d_model=16, mixer=name), device="meta", dtype=torch.bfloat16
    ).mixer.parameters()
    assert all(p.is_meta and p.dtype is q.dtype for p, q in zip(far, half.parameters()))


@every_layer
def test_autocast_trains_and_decodes(name):
    "Under autocast outputs are bfloat16 and close to those in float32, decoding agrees, and every weight gets a finite float32 gradient."
    layer = make(name)
    h = torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(h)
        pieces, cache = in_pieces(layer, h, [4, 0, 3, 0])
    assert y.dtype is torch.bfloat16
    # inputs, weights and results of four products in a row are rounded, by half of eps each
    assert error(y, layer(h)) < bound(torch.bfloat16, 4 * 3 / 2)
    assert error(pieces, y) < 2 * bound(torch.bfloat16, 4 * 3 / 2)
    if isinstance(cache, ScanCache):
        assert cache.S.dtype is torch.float32
    y.float().square().mean().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.dtype is torch.float32
        for p in layer.parameters()
    )


def test_a_prompt_read_in_bfloat16_can_be_continued_in_float32():
    layer = make("longhorn")
    h = torch.randn(1, 9, 16)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            _, cache = layer.prefill(h[:, :8])
        y_t, cache = layer.step(h[:, 8], cache)
        assert error(y_t, layer(h)[:, 8]) < bound(torch.bfloat16, 4 * 3 / 2)


@every([name for name in NAMES if name not in GROWING])
def test_decoding_takes_constant_memory(name):
    "The cache has the same size after any number of tokens; a mixer whose cache grows belongs in GROWING of tests/mixers.py."
    layer = make(name)

    def bytes_held(cache):
        return sum(t.untyped_storage().nbytes() for t in cache)

    with torch.no_grad():
        sizes = {bytes_held(layer.prefill(torch.randn(1, length, 16))[1]) for length in (1, 40, 90)}
    assert sizes == {bytes_held(layer.empty_cache(1))}


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
            r"x has shape \(2, 4, 16\); expected \(1, T, d_model\): with cu_seqlens",
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
    assert all(issubclass(getattr(mixer, "func", mixer), Mixer) for mixer in MIXERS.values())


def test_low_rank_is_a_sixteenth_rounded_up():
    assert [Longhorn(d).rank for d in (1, 16, 17, 768)] == [
        math.ceil(d / 16) for d in (1, 16, 17, 768)
    ]


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
    "Whether gradients were on at the export or are on at the run."
    torch.manual_seed(0)
    name, options = parts(name)
    assert_exported_equals_eager(
        build_mixer(name, 32, **options), lambda B, T: torch.randn(B, T, 32), learning, 100
    )


def emptied(build):
    "A module built without memory, which then holds NaN."
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    return module


@every_layer
def test_a_layer_without_memory_is_drawn_as_by_its_constructor(name):
    "After `to_empty`, `reset_parameters` gives the parameters that the constructor gives with the same seed."
    name, options = parts(name)

    def build():
        return build_mixer(name, 24, **options)

    layer = emptied(build)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    fresh = build().state_dict()
    assert all(torch.equal(value, fresh[key]) for key, value in layer.state_dict().items())


@every_layer
def test_resetting_every_submodule_gives_the_starting_values(name):
    "Resetting all submodules of a layer in turn, also of a copy, keeps what the layer asks of its projections."
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
    kinds = {key: value.dtype for key, value in layer.state_dict().items()}
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    fresh = Longhorn(16, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, fresh[key]) for key, value in layer.state_dict().items())
    assert kinds == {key: value.dtype for key, value in fresh.items()}
    layer.to("meta").reset_parameters()
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_wrapped_layer_is_not_drawn_again():
    layer = Longhorn(16)
    layer.in_proj = Added(layer.in_proj, 0.0)
    with pytest.raises(
        ValueError,
        match="Longhorn has a parameter in_proj.* call reset_parameters before the layer is wrapped",
    ):
        layer.reset_parameters()


@pytest.mark.parametrize("name", ("longhorn_exact", "mamba", "attention"))
def test_a_layer_can_be_traced_and_refuses_to_be_scripted(name):
    layer = make(name).eval()
    traced = torch.jit.trace(layer, torch.randn(2, 9, 16))
    h = torch.randn(3, 20, 16)
    torch.testing.assert_close(traced(h), layer(h))
    grads = [
        torch.autograd.grad(
            f(h).square().sum(),
            layer.in_proj.weight if hasattr(layer, "in_proj") else layer.qkv_proj.weight,
        )[0]
        for f in (traced, layer)
    ]
    torch.testing.assert_close(*grads)
    for module in (layer, lm.SequenceLM(lm.LMConfig(20, 16, 1, name))):
        with pytest.raises(
            RuntimeError,
            match="^torch.jit.script cannot compile [A-Z][a-z]+; torch.export.export and torch.jit.trace can$",
        ):
            torch.jit.script(module)


@pytest.mark.parametrize("name", ("longhorn", "mamba"))
def test_a_second_derivative_comes_by_the_way_that_the_message_names(name):
    layer = make(name).double()
    h = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(layer(h).square().sum(), h, create_graph=True)
        return torch.autograd.grad(first.square().sum(), h)[0]

    with pytest.raises(RuntimeError) as error:
        second()
    way = re.search(r"a layer by layer\.scan = (functools\.partial\(.*\))$", str(error.value))[1]
    layer.scan = eval(way, {"functools": functools, "layer": layer})
    found = second()
    step = 1e-6
    direction = torch.randn_like(h)
    ahead, behind = (
        torch.autograd.grad(layer(h + side * step * direction).square().sum(), h)[0].square().sum()
        for side in (1, -1)
    )
    torch.testing.assert_close(
        (found * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6
    )
