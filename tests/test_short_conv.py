"""Compare both backends of the short convolution with float64, interpreted and on a GPU."""

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from longhorn_kit.scan.short_conv import causal_conv1d, causal_conv1d_step
from longhorn_kit.scan.triton import conv as triton_conv
from longhorn_kit.scan.triton.conv import ConvPlan, conv_backward, conv_forward
from rounding import bound
from scan_cases import DEVICE, captured, error, gradients, leaves, poisoned, within
from sweep import slow_case

pytestmark = pytest.mark.numeric

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
BACKENDS = ("torch", "triton")


def inputs(B, T, D, W, sequences=None, dtype=torch.float32, bias=True, state=True, seed=0):
    "Return arguments, and the gradients of y and of the final state."
    gen = torch.Generator().manual_seed(seed)

    def new(*s):
        drawn = torch.randn(*s, generator=gen)
        return drawn.to(DEVICE)

    n = B if sequences is None else sequences
    a = dict(x=new(B, T, D).to(dtype), weight=new(D, W))
    a["bias"] = new(D) if bias else None
    a["initial_state"] = new(n, D, W - 1).to(dtype) if state else None
    dy = new(B, T, D).to(dtype)
    dfinal = new(n, D, W - 1).to(dtype)
    return a, dy, dfinal


def summed(x, weight, bias, initial_state, activation="silu"):
    "Return y and the final state of one batch; each output is a sum over its window."
    B, T, D = x.shape
    W = weight.shape[1]
    past = x.new_zeros(B, D, W - 1) if initial_state is None else initial_state
    past_rows = past.transpose(1, 2)
    row = torch.cat([past_rows, x], 1)
    y = sum(row[:, j : j + T] * weight[:, j] for j in range(W))
    if bias is not None:
        y = y + bias
    if activation:
        y = y * torch.sigmoid(y)
    last_rows = row[:, T:]
    return y, last_rows.transpose(1, 2)


def results(run, a, dy, dfinal):
    "Return y, final state and gradients by name; zeros if no output depends on an argument."
    out = run(**a)
    y_slope = dy.to(out[0].dtype)
    final_slope = dfinal.to(out[1].dtype)
    grads = gradients(out, (y_slope, final_slope), a)
    y = out[0].detach()
    final = out[1].detach()
    return dict(y=y, final=final, **grads)


def oracle(a, dy, dfinal, activation="silu", bounds=None):
    def run(x, weight, bias, initial_state):
        if bounds is None:
            return summed(x, weight, bias, initial_state, activation)
        outs = []
        finals = []
        pairs = zip(bounds, bounds[1:])
        for i, (lo, hi) in enumerate(pairs):
            past = None if initial_state is None else initial_state[i : i + 1]
            part = x[:, lo:hi]
            out, final = summed(part, weight, bias, past, activation)
            outs.append(out)
            finals.append(final)
        return torch.cat(outs, 1), torch.cat(finals)

    wide = leaves(a, torch.float64)
    return results(run, wide, dy.double(), dfinal.double())


def by_kit(a, dy, dfinal, backend="triton", bounds=None, **options):
    if isinstance(bounds, list):
        bounds = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    options |= dict(cu_seqlens=bounds, output_final_state=True, backend=backend)

    def run(**t):
        return causal_conv1d(**t, **options)

    return results(run, leaves(a), dy, dfinal)


def assert_right(
    B, T, D, W, backend="triton", bounds=None, activation="silu", dtype=torch.float32, **made
):
    sequences = None if bounds is None else len(bounds) - 1
    a, dy, dfinal = inputs(B, T, D, W, sequences, dtype, **made)
    got = by_kit(a, dy, dfinal, backend, bounds, activation=activation)
    want = oracle(a, dy, dfinal, activation, bounds)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert error(got[name], expected) < TOLERANCE[dtype], name
    # `view` works for any shape
    assert got["y"].is_contiguous()
    assert got["final"].is_contiguous()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("activation", ("silu", None))
def test_sixteen_bits_are_rounded_once(activation, dtype):
    "Outputs are rounded once; gradients of float32 taps are not rounded to 16 bits."
    a, dy, dfinal = inputs(2, 200, 16, 3, dtype=dtype)
    got = by_kit(a, dy, dfinal, "torch", activation=activation)
    want = oracle(a, dy, dfinal, activation)
    for name in ("y", "x", "initial_state"):
        result = error(got[name], want[name])
        rounding = error(want[name].to(dtype), want[name])
        assert result < 1.01 * rounding
    assert error(got["weight"], want["weight"]) < 3e-6
    assert error(got["bias"], want["bias"]) < 3e-6
    assert got["final"].dtype is dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_keep_wide_states_and_round_once(backend):
    a, *_ = inputs(64, 1, 8, 4, dtype=torch.bfloat16)
    x = a["x"][:, 0]
    state = a["initial_state"].float() + 1e-3  # not representable in bfloat16
    with torch.no_grad():
        y, after = causal_conv1d_step(x, state, a["weight"], a["bias"], backend=backend)
    tensors = (a["x"], a["weight"], a["bias"], state)
    want, _ = summed(*(t.double() for t in tensors))
    want = want[:, 0]
    result = error(y, want)
    rounding = error(want.bfloat16(), want)
    assert result < 1.01 * rounding
    shifted = state[..., 1:]
    newest = x.float()[..., None]
    expected = torch.cat([shifted, newest], -1)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("B, T", ((0, 5), (2, 0), (0, 0)))
def test_empty_inputs_give_gradients_of_zeros(B, T, backend):
    a = leaves(inputs(B, T, 3, 4)[0])
    y, final = causal_conv1d(**a, output_final_state=True, backend=backend)
    assert y.shape == (B, T, 3)
    assert final.shape == (B, 3, 3)
    y.sum().backward()
    for t in a.values():
        assert t.grad.shape == t.shape
        assert not t.grad.any()


@pytest.fixture
def small(monkeypatch):
    "Use small plans, so that short inputs need many programs."
    monkeypatch.setattr(
        triton_conv,
        "conv_plan",
        lambda B, T, D, way="forward", *_: ConvPlan(4, 2, 4, 2 if way == "backward" else 1),
    )


CASES = [
    (shape, {})
    for shape in (
        (2, 11, 5, 4),
        (1, 2, 3, 8),
        (1, 1, 3, 2),
        (1, 7, 2, 1),
        (1, 9, 1, 3),
        (1, 0, 3, 4),
        (0, 4, 3, 4),
        (2, 3, 0, 4),
    )
]
CASES += [
    ((1, 9, 3, 4), options)
    for options in (
        dict(activation=None),
        dict(bias=False),
        dict(state=False),
        dict(dtype=torch.bfloat16),
    )
]
CASES += [((1, 21, 3, 4), dict(bounds=[0, 0, 2, 14, 15, 21]))]  # short or empty


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape, options", CASES)
def test_outputs_and_gradients(shape, options, backend, small):
    assert_right(*shape, "triton" if "dtype" in options else backend, **options)


@pytest.mark.parametrize("shape", [(1, 18, 33, 4), (1, 0, 3, 4), (0, 4, 3, 4), (2, 3, 0, 4)])
def test_plans_for_real_shapes(shape):
    assert_right(*shape)


def assert_packed_as_alone(backend, bounds, D, dtype=torch.float32, names=("y", "x", "final")):
    a, dy, dfinal = inputs(1, bounds[-1], D, 4, len(bounds) - 1, dtype)
    packed = by_kit(a, dy, dfinal, backend, bounds)
    pairs = zip(bounds, bounds[1:])
    for i, (lo, hi) in enumerate(pairs):
        one = slice(i, i + 1)
        x = a["x"][:, lo:hi]
        start = a["initial_state"][one]
        cut = {**a, "x": x, "initial_state": start}
        part = dy[:, lo:hi]
        alone = by_kit(cut, part, dfinal[one], backend)
        for name in names:
            whole = packed[name]
            expected = whole[:, lo:hi] if name in "xy" else whole[one]
            assert torch.equal(alone[name], expected), (i, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_bit_identical_to_alone(backend, small):
    assert_packed_as_alone(backend, [0, 9, 11, 20], 3, names=("y", "x", "final", "initial_state"))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=2, max_size=4), W=st.integers(2, 5))
def test_going_on_from_a_final_state_is_one_convolution(backend, lengths, W):
    a, *_ = inputs(2, sum(lengths), 3, W)
    whole = causal_conv1d(**a, output_final_state=True, backend=backend)
    parts = []
    past = a["initial_state"]
    options = dict(output_final_state=True, backend=backend)
    for piece in a["x"].split(lengths, 1):
        y, past = causal_conv1d(piece, a["weight"], a["bias"], initial_state=past, **options)
        parts.append(y)
    assert_close(torch.cat(parts, 1), whole[0])
    assert torch.equal(past, whole[1])


def test_strides_do_not_matter(small):
    a, dy, dfinal = inputs(1, 5, 6, 4)
    wide = dict(a)
    twice = torch.cat([a["x"], a["x"]], -1)
    wide["x"] = twice[..., :6]
    transposed = a["weight"].t().contiguous()
    wide["weight"] = transposed.t()
    channels_first = a["x"].mT.contiguous()
    last = {**a, "x": channels_first.mT}
    plain = by_kit(a, dy, dfinal)
    time_first = dy.transpose(0, 1).contiguous()
    strided_dy = time_first.transpose(0, 1)
    for variant in (wide, last):
        got = by_kit(variant, strided_dy, dfinal)
        for n in plain:
            assert torch.equal(got[n], plain[n])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_may_have_any_stride(backend, small):
    a, dy, dfinal = inputs(1, 12, 3, 4, 2)
    table = torch.tensor([[0, 9], [5, 1], [12, 3]], dtype=torch.int32, device=DEVICE)
    bounds = table[:, 0]
    assert not bounds.is_contiguous()
    got = by_kit(a, dy, dfinal, backend, bounds)
    want = by_kit(a, dy, dfinal, backend, bounds.clone())
    for n in want:
        assert torch.equal(got[n], want[n])


def test_conv1d_weights_are_taken_as_they_are():
    a, *_ = inputs(1, 5, 3, 4)
    expected = causal_conv1d(a["x"], a["weight"], a["bias"])
    filters = a["weight"][:, None]
    result = causal_conv1d(a["x"], filters, a["bias"])
    assert torch.equal(result, expected)


def test_bits_do_not_depend_on_the_plan():
    a, dy, dfinal = inputs(1, 13, 3, 4)
    x, w, c, h = a.values()
    runs = []
    for plan in (ConvPlan(4, 2, 2), ConvPlan(8, 4, 4, 2), ConvPlan(16, 8, 8)):
        outputs = conv_forward(x, w, c, h, None, True, True, plan)
        dx, _, _, dh = conv_backward(dy, dfinal, x, w, c, h, None, True, plan)
        runs.append((*outputs, dx, dh))
    first, *others = runs
    for other in others:
        assert all(map(torch.equal, first, other))


def test_memory_around_and_before_is_not_read(monkeypatch, small):
    "Results are right if buffers start as NaN and inputs are windows into tensors of NaN."
    a, dy, dfinal = inputs(1, 5, 3, 4)
    want = by_kit(a, dy, dfinal)
    poisoned(monkeypatch)
    windows = {n: within(t) for n, t in a.items()}
    got = by_kit(windows, dy, dfinal)
    for n in want:
        assert error(got[n], want[n]) < 1e-6


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy warns, a GPU does not
def test_extremes_stay_finite(small):
    a, dy, dfinal = inputs(1, 8, 3, 4)
    extremes = torch.tensor([1e4, -1e4, 0.0], device=DEVICE)
    a["x"][0, 1:4] = extremes
    for t in by_kit(a, dy, dfinal).values():
        assert torch.isfinite(t).all()


def test_one_output_without_the_other():
    a, dy, dfinal = inputs(1, 5, 3, 4)
    for backend in BACKENDS:
        r = leaves(a)
        y = causal_conv1d(**r, backend=backend)
        _, final = causal_conv1d(**r, output_final_state=True, backend=backend)
        inputs_of_final = (r["x"], r["initial_state"])
        g = torch.autograd.grad(final, inputs_of_final, dfinal)
        result = g[0][:, 2:]
        assert torch.equal(result, dfinal.transpose(1, 2))
        before = g[0][:, :2]
        assert not before.any()
        assert not g[1].any()
        assert y.shape == (1, 5, 3)


def assert_readers_added(backend, *shape, bounds=None, dtype=torch.float32, **made):
    "With two readers of the output, or one of two, gradients are those of the sum."
    sequences = None if bounds is None else len(bounds) - 1
    a, dy, dfinal = inputs(*shape, sequences, dtype, **made)
    r = leaves(a)
    names = [n for n, t in r.items() if t is not None]
    cu = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    options = dict(cu_seqlens=cu, backend=backend)
    (y, copy), last = causal_conv1d(**r, output_final_state=True, twice=True, **options)
    assert y.data_ptr() == copy.data_ptr()
    assert torch.equal(y, causal_conv1d(**r, **options))
    limit = TOLERANCE[dtype]
    if backend == "torch" and dtype == torch.bfloat16:
        # taps, outputs, activations and three gradients are rounded, by half of eps each
        limit = bound(dtype, 6 / 2)
    no_final = torch.zeros_like(dfinal)
    for first, second, third in (
        (dy, dy.cos(), None),
        (dy, dy.cos(), dfinal),
        (None, dy, None),
        (dy, None, None),
    ):
        weights = ((y, first), (copy, second), (last, third))
        outputs = [t for t, g in weights if g is not None]
        grads = [g for _, g in weights if g is not None]
        tensors = [r[n] for n in names]
        got = torch.autograd.grad(outputs, tensors, grads, retain_graph=True)
        slopes = (first, second)
        total = sum(g.double() for g in slopes if g is not None)
        want = oracle(a, total, no_final if third is None else third, bounds=bounds)
        for name, grad in zip(names, got):
            assert error(grad, want[name]) < limit, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_two_readers_are_added(backend, small):
    variants = (dict(), dict(state=False), dict(state=False, bias=False, dtype=torch.bfloat16))
    for options in variants:
        assert_readers_added(backend, 1, 7, 3, 4, **options)
    assert_readers_added(backend, 1, 7, 3, 4, bounds=[0, 2, 2, 7])


def test_operations_are_well_formed(small):
    a, dy, dfinal = inputs(1, 2, 2, 2)
    r = leaves(a)
    cu = torch.tensor([0, 1, 2], device=DEVICE)
    arguments = (*r.values(), None, True, True)
    torch.library.opcheck(triton_conv._short_conv, arguments)
    packed = {**r, "initial_state": None}
    arguments = (*packed.values(), cu, False, False)
    torch.library.opcheck(triton_conv._short_conv, arguments)
    arguments = (dy, dfinal, *a.values(), None, True)
    torch.library.opcheck(triton_conv._short_conv_backward, arguments)


@pytest.mark.parametrize("twice", (slow_case(False), True))
def test_eager_skips_the_operation_and_keeps_its_bits(twice, monkeypatch, small):
    a, dy, dfinal = inputs(2, 7, 5, 4)
    cu = None if twice else torch.tensor([0, 3, 7], device=DEVICE)
    a = a if twice else {**a, "x": a["x"][:1]}
    ran = []
    monkeypatch.setattr(
        triton_conv,
        "conv_forward",
        lambda *args, inner=conv_forward: (ran.append("forward"), inner(*args))[1],
    )
    monkeypatch.setattr(
        triton_conv,
        "conv_backward",
        lambda *args, inner=conv_backward, **o: (ran.append("backward"), inner(*args, **o))[1],
    )

    def run():
        r = leaves(a)
        y, last = causal_conv1d(
            **r, cu_seqlens=cu, output_final_state=True, backend="triton", twice=twice
        )
        y, *copy = y if twice else (y,)
        outputs = [y, *copy, last]
        weights = [t.cos() for t in outputs]
        tensors = list(r.values())
        grads = torch.autograd.grad(outputs, tensors, weights)
        return y.grad_fn.name(), [*outputs, *grads]

    calls = [run(), run()]  # the second call launches compiled kernels
    names, results = zip(*calls)
    monkeypatch.setattr(triton_conv, "in_eager", lambda *_: False)
    operation, want = run()
    assert ran == ["forward", "backward"] * 3
    assert twice or "longhorn_kit_short_conv" in operation
    for name in names:
        assert "longhorn_kit" not in name
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, want, strict=True))


def test_compiles_without_graph_breaks(small):
    a, dy, _ = inputs(1, 4, 2, 3)
    r = leaves(a)

    def once(x, w, c, h):
        y = causal_conv1d(x, w, c, initial_state=h, backend="triton")
        return y.sin().sum()

    def twice(x, w, c, h):
        y, copy = causal_conv1d(x, w, c, initial_state=h, backend="triton", twice=True)
        first = y.sin().sum()
        second = copy.cos().sum()
        return first + second

    args = list(r.values())
    for run in (once, twice):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        outputs = compiled(*args)
        gradients = torch.autograd.grad(outputs, args)
        expected = run(*args)
        expected_gradients = torch.autograd.grad(expected, args)
        assert_close(gradients, expected_gradients)


def test_second_derivative_by_torch_and_refused_by_triton(small):
    a, *_ = inputs(1, 3, 2, 3)
    for backend in BACKENDS:
        r = leaves(a)
        loss = causal_conv1d(**r, backend=backend).square().sum()
        (g,) = torch.autograd.grad(loss, r["x"], create_graph=True)
        if backend == "torch":
            gradient = torch.autograd.grad(g.sum(), r["weight"])[0]
            assert gradient.abs().sum() > 0
        else:
            with pytest.raises(RuntimeError, match="no second derivative"):
                g.sum().backward()


def test_autocast_and_mixed_types():
    a, *_ = inputs(1, 5, 3, 4)
    low = a["x"].bfloat16()
    for backend in BACKENDS:
        y, final = causal_conv1d(
            low, a["weight"], a["bias"], output_final_state=True, backend=backend
        )
        assert y.dtype == final.dtype == torch.bfloat16
        assert_close(
            y.float(), causal_conv1d(low.float(), a["weight"], a["bias"]), atol=0.05, rtol=0.05
        )
        expected = causal_conv1d(a["x"], a["weight"], a["bias"], backend=backend)
        with torch.autocast(DEVICE, torch.bfloat16):
            result = causal_conv1d(a["x"], a["weight"], a["bias"], backend=backend)
            assert_close(result, expected)


def test_forward_mode_takes_pytorch():
    a, *_ = inputs(1, 5, 3, 4)

    def tangent(**options):
        def conv(x):
            return causal_conv1d(x, a["weight"], a["bias"], **options)

        x = a["x"]
        _, direction = torch.func.jvp(conv, (x,), (a["x"],))
        return direction

    expected = tangent(backend="torch")
    largest = expected.abs().max()
    assert largest > 0.1
    assert_close(tangent(), expected)


X = torch.zeros(2, 5, 3, device=DEVICE)
WEIGHT = torch.zeros(3, 4, device=DEVICE)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: causal_conv1d(X, WEIGHT.T),
            r"weight has shape \(4, 3\); expected \(3, W\) or \(3, 1, W\) to match x",
        ),
        (lambda: causal_conv1d(X[0], WEIGHT), r"x has shape \(5, 3\); expected \(B, T, D\)"),
        (
            lambda: causal_conv1d(X, WEIGHT, torch.zeros(4, device=DEVICE)),
            r"bias has shape \(4,\); expected \(3,\)",
        ),
        (
            lambda: causal_conv1d(X, WEIGHT, activation="relu"),
            "activation is 'relu'; expected one of 'silu', 'swish', None",
        ),
        (
            lambda: causal_conv1d(X, WEIGHT, backend="cuda"),
            "backend is 'cuda'; expected one of 'auto', 'triton', 'torch'",
        ),
        (
            lambda: causal_conv1d(X, WEIGHT, initial_state=torch.zeros(2, 3, 4, device=DEVICE)),
            r"initial_state has shape \(2, 3, 4\); expected \(2, 3, 3\)",
        ),
        (
            lambda: causal_conv1d(X.double(), WEIGHT, backend="triton"),
            "cannot run this: Triton kernels take float32, bfloat16 and float16",
        ),
        (
            lambda: causal_conv1d(X, torch.zeros(3, 9, device=DEVICE), backend="triton"),
            "filters may have up to 8 taps; weight has 9",
        ),
        (
            lambda: causal_conv1d(X, WEIGHT, cu_seqlens=torch.tensor([0, 5])),
            r"with cu_seqlens the batch size is 1",
        ),
        (
            lambda: causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor([0, 3, 2, 5])),
            "cu_seqlens decreases from 3 to 2; expected bounds that never decrease",
        ),
        (
            lambda: causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor([0, 6])),
            "cu_seqlens ends at 6; expected 5, the length of x",
        ),
        (
            lambda: causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor([0.0, 5.0])),
            "expected an int32 or int64 tensor",
        ),
        (
            lambda: causal_conv1d_step(X[:, 0], X[..., :2], WEIGHT),
            r"state has shape \(2, 5, 2\); expected \(2, 3, 3\) to match x_t and weight",
        ),
        (
            lambda: causal_conv1d_step(X[0, 0], X, WEIGHT),
            r"x_t has shape \(3,\); expected \(B, D\)",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as problem:
        call()
    assert "\n" not in str(problem.value)


SHAPES = [
    (2, 67, 40, 4),
    (1, 1300, 129, 3),
    (3, 33, 31, 2),
    (2, 500, 96, 8),
    (1, 4097, 64, 5),
    (2, 41, 1030, 4),
    (1, 17, 1, 1),
    (4, 1, 256, 4),
]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape, dtype", [*zip(SHAPES, cycle((torch.bfloat16, torch.float32, torch.float16)))]
)
def test_gpu_parity(shape, dtype):
    assert_right(*shape, dtype=dtype)
    assert_right(*shape, dtype=dtype, state=False, bias=False, activation=None)
    assert_readers_added("triton", *shape, dtype=dtype, state=False)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gpu_packed(dtype):
    bounds = [0, 1, 1, 300, 333, 1200]
    assert_right(1, 1200, 72, 4, bounds=bounds, dtype=dtype)
    assert_packed_as_alone("triton", bounds, 72, dtype)


@pytest.mark.cuda
def test_gpu_gradients_repeat_bit_for_bit():
    a, dy, dfinal = inputs(4, 1000, 300, 4, dtype=torch.bfloat16)
    first = by_kit(a, dy, dfinal)
    second = by_kit(a, dy, dfinal)
    for n in first:
        assert torch.equal(first[n], second[n])


@pytest.mark.cuda
def test_gpu_offsets_beyond_two_to_the_31():
    D = 2048
    x = torch.randn(1, 1_100_000, D, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(D, 4, device=DEVICE)
    c = torch.randn(D, device=DEVICE)
    y = causal_conv1d(x, w, c)
    end = x[:, -70:]
    tail = causal_conv1d(end, w, c)
    result = y[:, -60:]
    expected = tail[:, -60:]
    assert torch.equal(result, expected)
    dx, *_ = conv_backward(y, None, x, w, c, None, None, True)
    end_dy = y[:, -70:]
    end_x = x[:, -70:]
    near, *_ = conv_backward(end_dy, None, end_x, w, c, None, None, True)
    result = dx[:, -60:]
    expected = near[:, -60:]
    assert torch.equal(result, expected)


@pytest.mark.cuda
def test_gpu_cuda_graph_and_inductor():
    a, dy, dfinal = inputs(2, 300, 64, 4, dtype=torch.bfloat16)
    want = by_kit(a, dy, dfinal)
    compiled = torch.compile(causal_conv1d, fullgraph=True)

    def run(**t):
        return compiled(**t, output_final_state=True)

    got = results(run, leaves(a), dy, dfinal)
    for n in want:
        assert torch.equal(got[n], want[n])
    with torch.no_grad():
        causal_conv1d(**a)
        graph, y = captured(lambda: causal_conv1d(**a))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, want["y"])
