"""Test the public operation: exact packing, dtypes, autocast, steps, and errors."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.testing import assert_close

from longhorn_kit.scan.arguments import read_bounds
from longhorn_kit.scan.op import (
    BACKENDS,
    FORMS,
    longhorn_scan,
    longhorn_step,
    selective_scan,
    selective_step,
)
from sweep import slow_case

pytestmark = pytest.mark.numeric

RUNS = (*FORMS, "s6", "timed s6")
B = 2
T = 9
D = 5
N = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_the_gpu_if_there_is_one():
    with torch.device(DEVICE):
        yield


def make(B=B, T=T, D=D, N=N, seed=0, dtype=torch.float32):
    gen = torch.Generator("cpu").manual_seed(seed)

    def new(*s):
        return torch.randn(*s, generator=gen, device="cpu").to(DEVICE, dtype)

    return dict(
        q=new(B, T, N),
        k=new(B, T, N),
        x=new(B, T, D),
        b=new(B, T, D),
        b_bias=new(D),
        D_skip=new(D),
        z=new(B, T, D),
    )


def rates(form, t):
    gen = torch.Generator("cpu").manual_seed(5)
    B, T, N = t["q"].shape
    D = t["x"].shape[2]
    shape = (B, T, N) if form == "timed s6" else (D, N)
    drawn = torch.rand(shape, generator=gen, device="cpu")
    return -drawn.to(t["x"])


def run(form, t, A=None, **options):
    if form in FORMS:
        return longhorn_scan(**t, form=form, **options)
    A = rates(form, t) if A is None else A
    inputs = [t[n] for n in "qkxb"]
    return selective_scan(*inputs, A, t["b_bias"], t["D_skip"], t["z"], **options)


def everything(form, t, A=None, more=(), **options):
    "Return output, final state, and gradients of the arguments of `run` and of `more`."
    named = t.items()
    leaves = {n: v.detach().requires_grad_() for n, v in named}
    out, ends = run(form, leaves, A, output_final_state=True, **options)
    out_loss = out.square().sum()
    ends_loss = ends.square().sum()
    loss = out_loss + ends_loss
    inputs = [*leaves.values(), *more]
    grads = torch.autograd.grad(loss, inputs)
    return out, ends, *grads


@pytest.mark.parametrize("form", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [False, slow_case(True)])
def test_steps_equal_the_scan(form, backend, inplace):
    t = make()
    first = torch.randn(B, D, N)
    out, end = run(form, t, initial_state=first, output_final_state=True, backend=backend)
    A = rates(form, t)
    state = first.clone()
    options = dict(inplace=inplace, backend=backend)
    for i in range(T):
        now = [t[n][:, i] for n in "qkxb"]
        z = t["z"][:, i]
        weights = (t["b_bias"], t["D_skip"], z)
        if form in FORMS:
            o, new = longhorn_step(*now, state, *weights, form=form, **options)
        else:
            A_t = A[:, i : i + 1] if form == "timed s6" else A
            o, new = selective_step(*now, A_t, state, *weights, **options)
        assert (new is state) == inplace
        state = new
        assert_close(o, out[:, i], rtol=1e-5, atol=1e-5)
    assert_close(state, end, rtol=1e-5, atol=1e-5)


# a GPU compiles each size, which takes seconds: one size on a GPU, any in the interpreter
WIDTHS = st.just((5, 4)) if DEVICE == "cuda" else st.tuples(st.integers(1, 19), st.integers(1, 9))


def every_second_channel(t):
    "Return a tensor of equal values that is not contiguous."
    pairs = torch.stack([t, t + 1], -1)
    flat = pairs.flatten(-2)
    return flat[..., ::2]


def run_with_gradients(form, t, A, weight, **options):
    "Return output, final states, and gradients of q, k, x, b, z from a weighted sum of both."
    leaves = {n: t[n].detach().requires_grad_() for n in "qkxbz"}
    out, ends = run(form, t | leaves, A, output_final_state=True, **options)
    weighted = (out * weight).sum()
    loss = weighted + ends.sum()
    inputs = list(leaves.values())
    grads = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return out, ends, dict(zip(leaves, grads))


@settings(max_examples=6 if DEVICE == "cuda" else 25, deadline=None, derandomize=True)
@given(
    st.sampled_from(RUNS),
    st.sampled_from(["auto", "reference"]),
    st.lists(st.integers(0, 41), min_size=1, max_size=4),
    WIDTHS,
    st.booleans(),
)
def test_packed_sequences_have_the_bits_they_have_alone(form, backend, lengths, widths, strided):
    total = sum(lengths)
    D, N = widths
    t = make(1, total, D, N)
    if strided:
        t = {n: every_second_channel(v) if v.dim() == 3 else v for n, v in t.items()}
    A = rates(form, t)
    first = torch.randn(len(lengths), D, N)
    weight = torch.randn(1, total, D)
    lengths_from_zero = torch.tensor([0, *lengths])
    bounds = lengths_from_zero.cumsum(0)
    packed = dict(initial_state=first, cu_seqlens=bounds.to(torch.int32), backend=backend)
    out, ends, grads = run_with_gradients(form, t, A, weight, **packed)
    pairs = zip(bounds[:-1], bounds[1:])
    for i, (a, e) in enumerate(pairs):
        cut = {n: v[:, a:e].detach().clone() if v.dim() == 3 else v for n, v in t.items()}
        cut_A = A[:, a:e].clone() if form == "timed s6" else A
        options = dict(initial_state=first[i : i + 1], backend=backend)
        part = weight[:, a:e]
        alone, end, alone_grads = run_with_gradients(form, cut, cut_A, part, **options)
        part = out[:, a:e]
        assert torch.equal(part, alone)
        end_state = ends[i : i + 1]
        assert torch.equal(end_state, end)
        for name, grad in grads.items():
            result = grad[:, a:e]
            assert torch.equal(result, alone_grads[name]), name


@pytest.mark.parametrize("form", RUNS)
def test_gradients_of_states_and_parameters_flow_through_packing(form):
    t = make(1, 12, dtype=torch.float64)
    first = torch.randn(2, D, N, dtype=torch.float64, requires_grad=True)
    options = dict(initial_state=first, cu_seqlens=torch.tensor([0, 5, 12]))
    results = everything(form, t, None, [first], backend="auto", **options)
    expected = everything(form, t, None, [first], backend="reference", **options)
    for a, b in zip(results, expected):
        assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", RUNS)
def test_strides_do_not_change_a_bit(form):
    t = make(3, 37, D, N)
    expected = run(form, t)
    for order in ((1, 0, 2), (2, 0, 1), (2, 1, 0)):
        back = [order.index(i) for i in range(3)]
        moved = {}
        for n, v in t.items():
            moved[n] = v.permute(order).contiguous().permute(back) if v.dim() == 3 else v
        assert torch.equal(run(form, moved), expected)


@pytest.mark.parametrize(
    "form",
    ["diagonal", "s6", *(slow_case(form) for form in RUNS if form not in ("diagonal", "s6"))],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_may_have_any_stride(form, backend):
    "Bounds from a table's column are not contiguous, but kernels read them by position."
    t = make(1, 5)
    table = torch.tensor([[0, 9], [2, 1], [5, 3]], dtype=torch.int32)
    bounds = table[:, 0]
    assert not bounds.is_contiguous()
    results = everything(form, t, cu_seqlens=bounds, backend=backend)
    expected = everything(form, t, cu_seqlens=bounds.clone(), backend=backend)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("backend", ("triton", "chunked"))
@pytest.mark.parametrize("kind", ("sliced", slow_case("expanded"), slow_case("transposed")))
def test_rates_may_have_any_stride(kind, backend):
    "S6 has correct gradients with one row of rates for all channels, and with strided rates."
    t = make()

    def make_A(scale):
        if kind == "expanded":
            rates = -torch.arange(1.0, N + 1) * scale
            return rates.expand(D, N)
        if kind == "sliced":
            values = torch.linspace(-2, -0.1, D * 2 * N)
            wide = values.view(D, 2 * N)
            return (wide * scale)[:, N:]
        values = torch.linspace(-2, -0.1, D * N)
        rates = values.view(N, D)
        return (rates * scale).t()

    scale = torch.ones((), requires_grad=True)
    assert not make_A(1.0).is_contiguous()
    results = everything("s6", t, make_A(scale), [scale], backend=backend)
    expected = everything("s6", t, make_A(scale), [scale], backend="reference")
    for a, b in zip(results, expected):
        assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "form",
    ["diagonal", "exact", *(slow_case(form) for form in RUNS if form not in ("diagonal", "exact"))],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [slow_case(torch.float16), torch.bfloat16, torch.float32, torch.float64]
)
def test_dtypes(form, backend, dtype):
    inputs = make(T=4, dtype=dtype)
    t = {n: v.requires_grad_() for n, v in inputs.items()}
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(ValueError, match="backend 'triton' cannot run this.*not float64"):
            run(form, t, backend=backend)
        return
    out, state = run(form, t, output_final_state=True, backend=backend)
    without = t | dict(b_bias=None, D_skip=None, z=None)
    bare = run(form, without, output_final_state=True, backend=backend)
    for result in (out, state, *bare):
        assert result.is_contiguous()  # so that `view` works for any shape
    squares = out.double().square()
    total = squares.sum()
    total.backward()
    double = {n: v.detach().double().requires_grad_() for n, v in t.items()}
    expected = run(form, double, rates(form, t).double(), backend="reference")
    total = expected.square().sum()
    total.backward()
    assert out.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # a half-precision output is rounded once, and gradients depend on that rounding
    rounding = 4 * torch.finfo(dtype).eps
    unit = max(rounding, 1e-13 if dtype == torch.float64 else 2e-6)
    errors = (out.double() - expected).abs()
    difference = errors.max()
    largest = expected.abs().max()
    assert difference <= unit * largest
    for name in t:
        assert t[name].grad.dtype == dtype
        expected = double[name].grad
        result = t[name].grad.double()
        error = (result - expected).abs().max()
        largest = expected.abs().max()
        assert error <= 4 * unit * largest, name


@pytest.mark.parametrize("form", RUNS)
def test_autocast_neither_lowers_the_arithmetic_nor_the_gradients(form):
    t = make()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = everything(form, t)  # including the backward, as in some trainers
    if form == "exact" and DEVICE == "cuda":  # for tensor cores
        t |= {n: t[n].detach().bfloat16().requires_grad_() for n in "qk"}
    outside = everything(form, t)
    for a, b in zip(inside, outside):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_mixed_dtypes_as_autocast_makes_them():
    t = make()
    half = {n: v.bfloat16() if n in ("q", "k", "x", "z") else v for n, v in t.items()}
    out, state = longhorn_scan(**half, output_final_state=True)
    named = half.items()
    wide = {n: v.double() for n, v in named}
    expected = longhorn_scan(**wide)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    difference = (out - expected).abs().max()
    largest = expected.abs().max()
    assert difference < 1e-2 * largest


@pytest.mark.parametrize("form", RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch, steps", [(0, 4), (2, 0), (0, 0)])
def test_empty_inputs_have_empty_outputs_and_gradients(form, backend, batch, steps):
    inputs = make(batch, steps)
    t = {n: v.requires_grad_() for n, v in inputs.items()}
    first = torch.randn(batch, D, N, requires_grad=True)
    out, state = run(form, t, initial_state=first, output_final_state=True, backend=backend)
    assert out.shape == (batch, steps, D)
    assert torch.equal(state, first)
    total = out.sum() + 2 * state.sum()
    total.backward()
    twos = torch.full_like(first, 2)
    assert torch.equal(first.grad, twos)
    shape = t["x"].grad.shape
    assert shape == (batch, steps, D)
    for n, v in t.items():
        assert v.grad is not None, n
        assert v.grad.shape == v.shape, n
        assert not v.grad.any(), n
    with torch.no_grad():
        _, copy = run(form, t, initial_state=first, output_final_state=True, backend=backend)
    assert batch == 0 or copy.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("form", ["exact", *(slow_case(form) for form in RUNS if form != "exact")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_with_the_negative_bit_have_right_signs(form, backend):
    "Tensors with the negative bit give right results, although kernels read the other sign."
    results = []
    for changed in (False, True):
        torch.manual_seed(0)
        t = make() | dict(initial_state=torch.randn(B, D, N))
        t = {n: (torch._neg_view(-v) if changed else v).requires_grad_() for n, v in t.items()}
        *inputs, first = t
        options = dict(initial_state=t[first], output_final_state=True, backend=backend)
        outputs = run(form, {n: t[n] for n in inputs}, **options)
        weights = [torch._neg_view(-o.detach().cos()) for o in outputs]
        inputs = list(t.values())
        grads = torch.autograd.grad(outputs, inputs, weights)
        results.append((*outputs, *grads))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("form", RUNS)
def test_inputs_and_states_are_not_changed_and_no_grad_works(form):
    t = make()
    first = torch.randn(B, D, N)
    copies = {n: v.clone() for n, v in t.items()}
    state = first.clone()
    with torch.no_grad():
        inputs = {n: v.requires_grad_() for n, v in t.items()}
        out = run(form, inputs, initial_state=first)
    assert not out.requires_grad
    assert torch.equal(first, state)
    for n in t:
        assert torch.equal(t[n], copies[n])


def message(text):
    return pytest.raises(ValueError, match=re.escape(text))


BAD = {
    "q (2, 9)": (dict(q=torch.zeros(2, 9)), "q has shape (2, 9); expected (B, T, N)"),
    "k": (dict(k=torch.zeros(2, 9, 3)), "k has shape (2, 9, 3); expected (2, 9, 4) to match q"),
    "x": (dict(x=torch.zeros(2, 8, 5)), "x has shape (2, 8, 5); expected (2, 9, D) to match q"),
    "b": (
        dict(b=torch.zeros(2, 9, 4)),
        "b has shape (2, 9, 4); expected (2, 9, 5) or (2, 9, 1) to match x",
    ),
    "b_bias": (dict(b_bias=torch.zeros(1)), "b_bias has shape (1,); expected (5,) to match x"),
    "D_skip": (dict(D_skip=torch.zeros(2, 5)), "D_skip has shape (2, 5); expected (5,) to match x"),
    "z": (dict(z=torch.zeros(2, 1, 5)), "z has shape (2, 1, 5); expected (2, 9, 5) to match x"),
    "integers": (
        dict(k=torch.zeros(2, 9, 4, dtype=torch.int64)),
        "k has dtype torch.int64; expected a floating-point dtype",
    ),
    "complex": (
        dict(x=torch.zeros(2, 9, 5, dtype=torch.complex64)),
        "x has dtype torch.complex64; expected a floating-point dtype",
    ),
    "storage": (
        dict(x=torch.zeros(2, 9, 5).to(torch.float8_e4m3fn)),
        "x has dtype torch.float8_e4m3fn; expected float64, float32, bfloat16 or float16",
    ),
    "sparse": (
        dict(x=torch.zeros(2, 9, 5).to_sparse()),
        "x has the layout torch.sparse_coo; expected a dense tensor of shape (2, 9, D) to match q",
    ),
    "mkldnn": (
        dict(k=torch.zeros(2, 9, 4).to_mkldnn()),
        "k has the layout torch._mkldnn; expected a dense tensor",
    ),
    "nested": (
        dict(x=torch.nested.nested_tensor([torch.zeros(9, 5)] * 2)),
        "x has the layout nested; expected a dense tensor",
    ),
    "uninitialized": (
        dict(D_skip=torch.nn.UninitializedParameter()),
        "D_skip is UninitializedParameter, which has no shape yet; expected a tensor of shape (5,)",
    ),
    "device": (
        dict(z=torch.zeros(2, 9, 5, device="meta")),
        f"z is on device meta; expected {torch.empty(0, device=DEVICE).device} to match x",
    ),
    "not a tensor": (
        dict(b=0.5),
        "b is float; expected a tensor of shape (2, 9, 5) or (2, 9, 1) to match x",
    ),
    "none": (dict(k=None), "k is NoneType; expected a tensor of shape (2, 9, 4) to match q"),
    "state": (
        dict(initial_state=torch.zeros(2, 4, 5)),
        "initial_state has shape (2, 4, 5); expected (2, 5, 4) to match q and x",
    ),
    "form": (dict(form="diag"), "form is 'diag'; expected one of 'diagonal', 'exact', 'decoupled'"),
    "backend": (
        dict(backend="cuda"),
        "backend is 'cuda'; expected one of 'auto', 'triton', 'chunked', 'reference'",
    ),
    "rows": (
        dict(q=torch.zeros(2, 9, 4), cu_seqlens=torch.tensor([0, 9])),
        "q has shape (2, 9, 4); expected (1, T, N), because with cu_seqlens the batch size is 1",
    ),
    "states": (
        dict(initial_state=torch.zeros(1, 5, 4), cu_seqlens=torch.tensor([0, 4, 9])),
        "initial_state has shape (1, 5, 4); expected (2, 5, 4) to match cu_seqlens",
    ),
    "start": (dict(cu_seqlens=torch.tensor([1, 9])), "cu_seqlens starts at 1; expected 0"),
    "order": (dict(cu_seqlens=torch.tensor([0, 5, 3, 9])), "cu_seqlens decreases from 5 to 3"),
    "end": (
        dict(cu_seqlens=torch.tensor([0, 5])),
        "cu_seqlens ends at 5; expected 9, the length of q",
    ),
    "dtype": (
        dict(cu_seqlens=torch.tensor([0.0, 9.0])),
        "cu_seqlens is torch.float32; expected an int32 or int64 tensor",
    ),
    "list": (dict(cu_seqlens=[0, 9]), "cu_seqlens is list; expected an int32 or int64 tensor"),
    "axes": (
        dict(cu_seqlens=torch.tensor([[0, 9]])),
        "cu_seqlens has shape (1, 2); expected (n+1,) for n >= 1 sequences",
    ),
    "nothing": (
        dict(cu_seqlens=torch.tensor([0])),
        "cu_seqlens has shape (1,); expected (n+1,) for n >= 1 sequences",
    ),
}


@pytest.mark.parametrize("change, text", BAD.values(), ids=BAD)
def test_bad_arguments_are_named(change, text):
    with message(text):
        inputs = make(1 if "cu_seqlens" in change else 2)
        longhorn_scan(**inputs | change)


class Far:
    "Stand-in for a tensor of bounds on a GPU, with the methods that `read_bounds` calls."

    device = torch.device("cuda")
    values = [0, 4, 9]
    _version = 0
    reads = 0

    def is_inference(t):
        return False

    def tolist(self):
        self.reads += 1
        return self.values


def test_bounds_are_read_once_and_again_when_they_change():
    far = Far()
    assert read_bounds(far) == read_bounds(far) == [0, 4, 9]
    assert far.reads == 1
    far.values = [0, 6, 9]
    far._version = 1
    assert read_bounds(far) == [0, 6, 9]
    assert far.reads == 2
    inputs = make(1)
    t = {name: tensor.cpu() for name, tensor in inputs.items()}
    values = np.array([0, 4, 9])
    first = longhorn_scan(**t, cu_seqlens=torch.from_numpy(values))
    bounds = torch.from_numpy(values)
    assert torch.equal(longhorn_scan(**t, cu_seqlens=bounds), first)
    values[1] = 6  # a change that PyTorch does not count
    assert not torch.equal(longhorn_scan(**t, cu_seqlens=bounds), first)
    bounds[2] = 5
    for _ in range(2):  # wrong bounds raise an error at every call
        with message("cu_seqlens decreases from 6 to 5"):
            longhorn_scan(**t, cu_seqlens=bounds)
    with torch.inference_mode():  # inference mode counts no changes
        bounds = torch.tensor([0, 4, 9])
        longhorn_scan(**t, cu_seqlens=bounds)
        bounds[2] = 5
        with message("cu_seqlens ends at 5; expected 9"):
            longhorn_scan(**t, cu_seqlens=bounds)


def test_bad_arguments_of_the_other_functions_are_named():
    t = make()
    token = {n + "_t": t[n][:, 0] for n in "qkxb"}
    s = token | dict(state=torch.zeros(2, 5, 4))

    def step(**change):
        return longhorn_step(**s | change)

    def scan(dt, A):
        return selective_scan(t["q"], t["k"], t["x"], dt, A)

    with message("state has shape (2, 5, 3); expected (2, 5, 4) to match q_t and x_t"):
        step(state=torch.zeros(2, 5, 3))
    with message("state is NoneType; expected a tensor of shape (B, D, N)"):
        step(state=None)
    with message("x_t has shape (2, 9, 5); expected (2, D) to match q_t"):
        step(x_t=t["x"])
    with message("form is 'Exact'"):
        step(form="Exact")
    with message("A has shape (4, 5); expected (5, 4) or (2, 9, 4) to match x and q"):
        scan(t["b"], torch.zeros(4, 5))
    with message("dt has shape (2, 5); expected (2, 9, 5) or (2, 9, 1) to match x"):
        b = t["b"][:, 0]
        A = torch.zeros(5, 4)
        scan(b, A)
    inputs = (s["q_t"], s["k_t"], s["x_t"])
    with message("dt_t has shape (5,); expected (2, 5) or (2, 1) to match x_t"):
        b = s["b_t"][0]
        A = torch.zeros(5, 4)
        selective_step(*inputs, b, A, torch.zeros(2, 5, 4))


@pytest.mark.parametrize("form", RUNS)
def test_transforms_that_kernels_cannot_follow_take_the_reference(form):
    t = make(dtype=torch.float64)
    A = rates(form, t)

    def scan(backend):
        return lambda q: run(form, t | {"q": q}, A, backend=backend)

    point = (t["q"],)
    direction = (t["k"],)
    results = torch.func.jvp(scan("auto"), point, direction)
    references = torch.func.jvp(scan("reference"), point, direction)
    for result, expected in zip(results, references):
        assert_close(result, expected)
        largest = expected.abs().max()
        assert largest > 0.1
    two = torch.stack([t["q"], t["k"]])
    one_by_one = torch.stack([scan("auto")(q) for q in two])
    batched = torch.func.vmap(scan("auto"))(two)
    assert_close(batched, one_by_one)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(t["q"], t["k"])
        pair = scan("auto")(dual)
        tangent = forward_ad.unpack_dual(pair).tangent
        largest = tangent.abs().max()
        assert largest > 0.1
        for backend in ("chunked", "triton"):
            with message(f"backend '{backend}' cannot run under torch.func or forward-mode"):
                scan(backend)(dual)


@pytest.mark.parametrize(
    "transform, form",
    [
        slow_case("grad", "diagonal"),
        ("jvp", "diagonal"),
        ("vmap", "diagonal"),
        slow_case("dual numbers", "diagonal"),
        ("grad", "s6"),
        slow_case("jvp", "s6"),
        slow_case("vmap", "s6"),
        slow_case("dual numbers", "s6"),
    ],
)
def test_compiled_transforms_take_the_reference_too(transform, form):
    "Compiled transforms use the reference, because the operation has no forward mode."
    t = make(T=2, dtype=torch.float64)  # a compiler unrolls the steps of the reference
    A = rates(form, t)
    q = t["q"]
    u = t["k"]

    def scan(q):
        return run(form, t | {"q": q}, A)

    def transformed(q):
        if transform == "grad":
            return torch.func.grad(lambda q: scan(q).square().sum())(q)
        if transform == "jvp":
            _, tangent = torch.func.jvp(scan, (q,), (u,))
            return tangent
        if transform == "vmap":
            batch = torch.stack([q, u])
            return torch.func.vmap(scan)(batch)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, u)
            return forward_ad.unpack_dual(scan(dual)).tangent

    torch._dynamo.reset()
    result = torch.compile(transformed, fullgraph=True, backend="aot_eager")(q)
    expected = transformed(q)
    assert_close(result, expected)
    largest = expected.abs().max()
    assert largest > 0.05


@pytest.mark.parametrize("form", FORMS)
def test_shapes_can_be_asked_of_tensors_without_data(form):
    inputs = make()
    t = {name: value.to("meta") for name, value in inputs.items()}
    assert longhorn_scan(**t, form=form).shape == (B, T, D)
