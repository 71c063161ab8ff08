"""Test the Triton scans inside PyTorch: compilers, export, autocast, graphs, sharding, memory.

The same tests run in the interpreter on a CPU (portable kernels, tiny sizes) and on a GPU (portable
and fast kernels)."""

import contextlib
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from longhorn_kit.scan.chunked import chunked_scan
from longhorn_kit.scan.op import longhorn_scan, longhorn_step, selective_scan, selective_step
from longhorn_kit.scan.short_conv import causal_conv1d, causal_conv1d_step
from longhorn_kit.scan.triton import op as triton_op
from longhorn_kit.scan.triton.pointwise import add_norm, to_length
from pool import Pool
from scan_cases import (
    DEVICE,
    assert_close,
    assert_packed_as_alone,
    call,
    captured,
    error,
    gradients,
    inputs,
    kernels,
    leaves,
    one_sequence,
    poisoned,
)
from sweep import slow_case

pytestmark = pytest.mark.numeric

GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
SIZES = (2, 128, 64, 16) if GPU else (1, 3, 2, 2)  # B, T, D, N
COMPILER = "inductor" if GPU else "aot_eager"
NAMES = ("q", "k", "x", "b", "b_bias", "D_skip", "z")


@pytest.fixture
def path(request, monkeypatch):
    """Select the kernels: portable on a CPU; on a GPU fast, or both if requested."""
    chosen = getattr(request, "param", "fast" if GPU else "portable")
    monkeypatch.setattr(triton_op, "FAST", chosen == "fast")
    torch._dynamo.reset()
    return chosen


both_paths = pytest.mark.parametrize(
    "path", ("portable", "fast") if GPU else ("portable",), indirect=True
)


def arguments(form="diagonal", sizes=SIZES, **options):
    "Return leaves, and the gradients of both outputs."
    a, dout, dfinal = inputs(*sizes, form, dtype=DTYPE, **options)
    return leaves(a), dout, dfinal


def scan(a, form="diagonal", **options):
    "Run the public operation on the Triton kernels."
    return longhorn_scan(
        *(a[n] for n in NAMES),
        form=form,
        initial_state=a["initial_state"],
        output_final_state=True,
        backend="triton",
        **options,
    )


def assert_same(got, want):
    different = [n for n in want if not torch.equal(got[n], want[n])]
    assert not different


@both_paths
@pytest.mark.parametrize(
    "form, options",
    (("diagonal", {}), ("s6", dict(sequences=2)))
    if not GPU
    else [
        (f, o)
        for f in ("diagonal", "exact", "decoupled", "s6", "s6_time_varying")
        for o in ({}, dict(sequences=2))
    ],
)
def test_the_operation_is_well_formed(form, options, path):
    """PyTorch's test of schema, gradients, fake tensors and tracing with dynamic shapes passes."""
    B, T, D, N = SIZES
    a, *_ = arguments(form, (1, T, D, N), **options)
    bounds = torch.tensor([0, 1, T], dtype=torch.int32, device=DEVICE) if options else None
    spacing = 16 if options else 0
    tensors = [a[n] for n in (*NAMES, "A", "initial_state")]
    args = (*tensors, bounds, form, spacing, True, "")
    # In a packed batch, some slots for kept states stay unwritten. The last of the four checks
    # would compare them.
    checks = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    tests = checks[:3] if options else checks
    torch.library.opcheck(triton_op._scan, args, test_utils=tests)


def test_the_kernels_of_open_sizes_are_chosen_like_those_of_numbers(monkeypatch):
    "The verdict on the fast kernels is cached without symbols, which cannot be keys."
    mode = FakeTensorMode(shape_env=ShapeEnv())
    requests = []

    @cache
    def fast_kernels_work(device, form, wide):
        requests.append(wide)
        return True

    monkeypatch.setattr(triton_op, "fast_kernels_work", fast_kernels_work)
    for T in (8, 9):
        k, x = (
            mode.from_tensor(
                torch.zeros(2, T, n),
                symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3),
            )
            for n in (32, 64)
        )
        on_gpu = SimpleNamespace(
            is_cuda=True, device=torch.device("cuda:0"), shape=x.shape, dtype=x.dtype, numel=x.numel
        )
        assert triton_op.scan_path("diagonal", k, k, on_gpu) == "diagonal"
    assert requests == [True]


@both_paths
@pytest.mark.parametrize("form", ("diagonal", "exact", "s6"))
def test_eager_skips_the_operation_and_keeps_its_bits(form, path, monkeypatch):
    def run():
        a, dout, dfinal = arguments(form)
        outputs = call(a, form)
        return outputs[0].grad_fn.name(), dict(
            gradients(outputs, (dout, dfinal), a), out=outputs[0], final=outputs[1]
        )

    twice = [run() for _ in range(2)]  # the second run launches compiled kernels directly
    monkeypatch.setattr(triton_op, "in_eager", lambda *_: False)
    operation, want = run()
    assert "longhorn_kit_scan" in operation
    assert all("longhorn_kit_scan" not in name for name, _ in twice)
    for _, got in twice:
        assert_same(got, want)


# tensors with the opposite sign in memory


def negative(t):
    "Return a contiguous tensor equal to t, with the negative bit."
    if t is None:
        return None
    other_sign = -t.detach()
    return torch._neg_view(other_sign).requires_grad_(t.requires_grad)


@both_paths
@pytest.mark.parametrize(
    "bounds", (slow_case(None, id="rows"), pytest.param([0, 1, SIZES[1]], id="packed"))
)
@pytest.mark.parametrize("form", (slow_case("diagonal"), "exact", slow_case("s6")))
def test_scans_of_tensors_with_the_negative_bit_have_right_signs(form, bounds, path):
    cu = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    sizes = SIZES if bounds is None else (1, *SIZES[1:])
    a, *grads = arguments(form, sizes, sequences=None if bounds is None else 2)
    signed = {n: negative(t) for n, t in a.items()}
    signed_grads = [negative(g) for g in grads]
    for n, t in signed.items():
        assert t is None or t.is_neg() and torch.equal(t, a[n])
    outputs = call(signed, form, cu)
    want = call(a, form, cu)
    assert all(map(torch.equal, outputs, want))
    assert_same(gradients(outputs, signed_grads, signed), gradients(want, grads, a))
    want = call(a, form, cu)
    assert_same(gradients(call(a, form, cu), signed_grads, a), gradients(want, grads, a))


def test_columns_of_conjugated_numbers_have_right_signs():
    "Public functions return contiguous tensors with the bit if an axis has one element."
    a, *_ = inputs(1, 5, 3, 4)
    numbers = torch.randn(1, 5, 1, dtype=torch.complex64, device=DEVICE)
    column = numbers.conj().imag
    assert column.is_neg()

    def run(b):
        return longhorn_scan(a["q"], a["k"], a["x"], b, backend="triton")

    result = run(column)
    expected = run(column.clone())
    assert torch.equal(result, expected)


def small_kernels():
    """Return calls of the other kernels, as functions of a dictionary of tensors.

    Each call returns its outputs and the tensors that it wrote in place."""
    one = dict(backend="triton")

    def step(t):
        return (t["k"], t["k"], t["x"], t["x"])

    def rest(t):
        return (t["S"], t["bias"], t["bias"], t["x"])

    rows = torch.tensor([1, -1], device=DEVICE)

    def conv(t, **more):
        return causal_conv1d(t["rows"], t["w"], t["bias"], initial_state=t["past"], **more, **one)

    def conv_step(t, **more):
        return causal_conv1d_step(t["x"], t["past"], t["w"], t["bias"], **more, **one)

    return {
        "step": lambda t: longhorn_step(*step(t), *rest(t), **one),
        "selective step": lambda t: selective_step(*step(t), t["A"], *rest(t), **one),
        "step in place": lambda t: longhorn_step(*step(t), *rest(t), inplace=True, **one),
        "step of a pool": lambda t: longhorn_step(
            *step(t), *rest(t), inplace=True, state_indices=rows, **one
        ),
        "convolution": lambda t: conv(t, output_final_state=True),
        "convolution twice": lambda t: conv(t, twice=True),
        "step of a convolution": conv_step,
        "step of a convolution in place": lambda t: conv_step(t, inplace=True),
        "to_length": lambda t: [to_length(t["k"], t["bias"][:1])],
        "add_norm": lambda t: add_norm(t["x"], t["x"].flip(0), t["bias"], 1e-5, torch.float32),
    }


@pytest.mark.parametrize("name", small_kernels())
def test_small_kernels_of_tensors_with_the_negative_bit_have_right_signs(name):
    shapes = dict(
        x=(2, 3),
        k=(2, 4),
        bias=(3,),
        S=(2, 3, 4),
        A=(3, 4),
        rows=(2, 5, 3),
        w=(3, 3),
        past=(2, 3, 2),
    )
    torch.manual_seed(0)
    plain = {n: torch.randn(*shape, device=DEVICE) for n, shape in shapes.items()}
    learns = "step" not in name
    results = []
    for make in (torch.clone, negative):
        tensors = {n: make(t).requires_grad_(learns) for n, t in plain.items()}
        outputs = small_kernels()[name](tensors)
        if learns:
            slopes = [make(out.detach().cos()) for out in outputs]
            outputs = [
                *outputs,
                *torch.autograd.grad(outputs, list(tensors.values()), slopes, allow_unused=True),
            ]
        results.append([t for t in outputs if t is not None])
    assert len(results[0]) >= 2
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("form", ("diagonal", "exact") if GPU else ("exact",))
def test_compiles_as_one_graph(form, path, monkeypatch):
    a, dout, dfinal = arguments(form)
    compiled = torch.compile(lambda a: scan(a, form), fullgraph=True, backend=COMPILER)
    ran = []
    plan = triton_op._plan
    monkeypatch.setattr(triton_op, "_plan", lambda *sizes: ran.append(sizes[-1]) or plan(*sizes))
    got = gradients(compiled(a), (dout, dfinal), a)
    assert ran == ["forward", "backward"]  # the states are kept, not computed again
    assert_same(got, gradients(scan(a, form), (dout, dfinal), a))


@both_paths
def test_compiles_packed_sequences_as_one_graph(path):
    B, T, D, N = SIZES
    a, dout, dfinal = arguments(sizes=(1, T, D, N), sequences=2)
    bounds = torch.tensor([0, 1, T], device=DEVICE)
    compiled = torch.compile(
        lambda a, bounds: scan(a, cu_seqlens=bounds), fullgraph=True, backend=COMPILER
    )
    out, final = compiled(a, bounds)
    want = scan(a, cu_seqlens=bounds)
    assert torch.equal(out, want[0])
    assert torch.equal(final, want[1])
    with pytest.raises(Exception, match="this backend needs the values"):
        torch.compile(
            lambda a: longhorn_scan(*(a[n] for n in NAMES), cu_seqlens=bounds, backend="reference"),
            fullgraph=True,
            backend="eager",
        )(a)


# given bounds -> bounds of a scan that cannot check them
MOVED = (
    ([2, 3, -4], [2, 3, -4]),
    ([0, 5, 3, -1], [0, 5, 5, -1]),
    ([-9, 4, 99999], [0, 4, None]),
    ([3, 3, 3], [3, 3, 3]),
)


def bound_at(end, T):
    "Draw bounds; None is the length, and small negative numbers count from the length."
    if end is None:
        return T
    return T + end if -9 < end < 0 else end


def bounds_of(ends, T):
    bounds = [bound_at(end, T) for end in ends]
    return torch.tensor(bounds, dtype=torch.int32, device=DEVICE)


def one_by_one(a, form, dout, dfinal, bounds):
    """Return output, last states and gradients of separately run sequences.

    Rows that belong to no sequence are zero."""
    out = torch.zeros_like(a["x"])
    grads = {n: t if t is None else torch.zeros_like(t) for n, t in a.items()}
    finals = []
    edges = bounds.tolist()
    for i, (lo, hi) in enumerate(zip(edges, bounds.tolist()[1:])):
        part = leaves(one_sequence(a, form, i, lo, hi))
        y, final = call(part, form)
        finals.append(final.detach())
        out[:, lo:hi] = y.detach()
        places = one_sequence(grads, form, i, lo, hi)  # views
        part_dout = dout[:, lo:hi]
        part_dfinal = dfinal[i : i + 1]
        for n, g in gradients((y, final), (part_dout, part_dfinal), part).items():
            places[n].add_(g)
    kept = {n: g for n, g in grads.items() if g is not None}
    return out, torch.cat(finals), kept


@pytest.mark.parametrize(
    "path, form",
    [("fast", form) for form in ("diagonal", "exact", "decoupled", "s6", "s6_time_varying")]
    + [("portable", "diagonal"), ("portable", "s6_time_varying")]
    if GPU
    else [slow_case("portable", "exact"), slow_case("portable", "s6_time_varying")],
    indirect=["path"],
)
@pytest.mark.parametrize("bounds", [MOVED[::2], slow_case(MOVED[1::2])], ids=["first", "second"])
def test_compiled_bounds_stay_in_range_and_rows_outside_are_zero(form, path, bounds, monkeypatch):
    T, D, N = (600, 40, 16) if GPU else (12, 2, 2)
    for given, moved in bounds:
        a, dout, dfinal = inputs(1, T, D, N, form, dtype=DTYPE, sequences=len(given) - 1)
        want = one_by_one(a, form, dout, dfinal, bounds_of(moved, T))
        with monkeypatch.context() as patch:
            poisoned(patch)
            compiled = torch.compile(
                lambda a, cu: call(a, form, cu), fullgraph=True, backend="aot_eager"
            )
            r = leaves(a)
            outputs = compiled(r, bounds_of(given, T))
            grads = gradients(outputs, (dout, dfinal), r)
        assert torch.equal(outputs[0], want[0]), given
        assert torch.equal(outputs[1], want[1]), given
        per_row = [
            n for n in want[2] if a[n].dim() == 3 and (n != "A" or form == "s6_time_varying")
        ]
        result = {n: grads[n] for n in per_row}
        expected = {n: want[2][n] for n in per_row}
        assert_same(result, expected)
        result = {n: error(grads[n], g) for n, g in want[2].items()}
        assert_close(result, DTYPE)


@pytest.mark.parametrize("given, moved", [MOVED[0], *(slow_case(*case) for case in MOVED[1:])])
def test_compiled_bounds_of_the_convolution_stay_in_range(given, moved, path, monkeypatch):
    from longhorn_kit.scan.short_conv import causal_conv1d

    T, D = (600, 40) if GPU else (12, 2)
    gen = torch.Generator().manual_seed(0)
    shapes = ((1, T, D), (D, 4), (1, T, D))
    x, weight, dy = (torch.randn(*s, generator=gen).to(DEVICE) for s in shapes)
    ends = bounds_of(moved, T).tolist()
    want = torch.zeros_like(x)
    dx = torch.zeros_like(x)
    for lo, hi in zip(ends, ends[1:]):
        rows = x[:, lo:hi]
        part = rows.detach().requires_grad_()
        y = causal_conv1d(part, weight, backend="triton")
        want[:, lo:hi] = y.detach()
        slope = dy[:, lo:hi]
        (dx[:, lo:hi],) = torch.autograd.grad(y, part, slope)
    poisoned(monkeypatch)
    conv = torch.compile(
        lambda x, cu: causal_conv1d(x, weight, cu_seqlens=cu, backend="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    x.requires_grad_()
    y = conv(x, bounds_of(given, T))
    assert torch.equal(y, want)
    result = torch.autograd.grad(y, x, dy)[0]
    assert torch.equal(result, dx)


def test_one_compiled_graph_serves_every_length(path):
    B, T, D, N = SIZES
    count = CompileCounter()
    compiled = torch.compile(
        lambda q, k, x, b: longhorn_scan(q, k, x, b, backend="triton"),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    for steps in (T, T + 1, T + 16):
        a = inputs(B, steps, D, N, dtype=DTYPE)[0]
        args = [a[n] for n in "qkxb"]
        result = compiled(*args)
        expected = longhorn_scan(*args, backend="triton")
        assert torch.equal(result, expected)
    assert count.frame_count == 1


class Layer(nn.Module):
    "Scan between two projections, a minimal mixer."

    def __init__(self, D, N, form="diagonal"):
        super().__init__()
        self.D = D
        self.N = N
        self.form = form
        width = 3 * D + 2 * N
        self.into = nn.Linear(D, width)
        self.out = nn.Linear(D, D)
        self.skip = nn.Parameter(torch.ones(D))

    def forward(self, u):
        sizes = [self.D, self.D, self.D, self.N, self.N]
        x, b, z, q, k = self.into(u).split(sizes, -1)
        return self.out(
            longhorn_scan(q, k, x, b, None, self.skip, z, form=self.form, backend="triton")
        )


def layer_and_input(form="diagonal"):
    B, T, D, N = SIZES
    torch.manual_seed(0)
    layer = Layer(D, N, form).to(DEVICE)
    return layer, torch.randn(B, T, D, device=DEVICE)


@pytest.mark.parametrize(
    "form, learning",
    (
        slow_case("exact", True),
        slow_case("diagonal", False),
        slow_case("diagonal", True),
        slow_case("exact", False),
    ),
)
def test_exports(form, learning, path):
    "Exports have open batch and length, and run with or without gradients."
    layer, u = layer_and_input(form)
    with torch.set_grad_enabled(learning):
        example = u.expand(2, -1, -1).contiguous()
        program = torch.export.export(
            layer, (example,), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        )
    calls = [str(n.target) for n in program.graph.nodes if "longhorn" in str(n.target)]
    assert calls == ["longhorn_kit.scan.default"]
    exported = program.module()
    longer = torch.cat([u, u, u], 1)
    wider = u.repeat(3, 1, 1)
    for other in (u, longer, wider):
        with torch.no_grad():
            assert torch.equal(exported(other), layer(other))
        grads = []
        for module in (exported, layer):
            module.zero_grad()
            loss = module(other).square().sum()
            loss.backward()
            grads.append({n: p.grad for n, p in module.named_parameters()})
        assert_same(*grads)


@pytest.mark.parametrize("form", ("diagonal", "exact"))
def test_autocast_reaches_the_scan_in_half_precision_and_trains(form, path):
    """Under autocast, projections and scan inputs are bfloat16, and the skip weight is float32."""
    layer, u = layer_and_input(form)
    whole = layer(u)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = layer(u)
    assert out.dtype == torch.bfloat16
    assert error(out, whole) < 2e-2
    loss = out.float().square().sum()
    loss.backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    loss = whole.square().sum()
    loss.backward()
    for g, p in zip(grads, layer.parameters()):
        assert g.dtype == torch.float32
        assert error(g, p.grad) < 5e-2


class Dtypes(TorchDispatchMode):
    "Record the dtypes of queries and keys of every scan."

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.longhorn_kit.scan.default:
            dtypes = {args[0].dtype, args[1].dtype}
            self.seen.append(dtypes)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("form", ("diagonal", "exact"))
def test_float32_queries_and_keys_follow_autocast_to_the_fast_exact_kernels(form, path):
    a, *_ = inputs(*SIZES, form, dtype=torch.float32)
    keys = a["k"].bfloat16()
    a = leaves(a | dict(k=keys))
    with torch.autocast(DEVICE, dtype=torch.bfloat16), Dtypes() as dtypes:
        out, state = call(a, form)
    expected = [{torch.bfloat16} if form == "exact" else {torch.float32, torch.bfloat16}]
    assert dtypes.seen == expected
    total = out.square().sum() + state.sum()
    total.backward()
    assert a["q"].grad.dtype == out.dtype == torch.float32
    dtype = a["k"].grad.dtype
    assert dtype == torch.bfloat16
    with Dtypes() as dtypes:
        assert error(out, call(a, form)[0]) < 2e-2
    expected = [{torch.float32, torch.bfloat16}]
    assert dtypes.seen == expected  # autocast alone decides


def bytes_kept(run, given):
    "Return bytes that autograd keeps for the backward, in addition to existing tensors."
    kept = {}
    before = {t.untyped_storage().data_ptr() for t in given if t is not None}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in before:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept.values())


@pytest.mark.parametrize("form", ("diagonal", "exact", slow_case("decoupled"), slow_case("s6")))
@pytest.mark.parametrize("N", (16, 5, 64) if GPU else (3,))
def test_small_checkpoints_keep_a_byte_an_element(form, N, path):
    sizes = (2, 2048, 64, N) if GPU else (1, 32, 2, N)
    a, *_ = arguments(form, sizes)
    n_elements = a["x"].numel()
    kept = {}
    for checkpoint_kind in ("fast", "small"):
        run = partial(call, a, form, checkpoint=checkpoint_kind)
        kept[checkpoint_kind] = bytes_kept(run, a.values()) / n_elements
    assert kept["small"] <= 1 < kept["fast"], kept
    with torch.no_grad():
        kept = bytes_kept(lambda: call(a, form), a.values())
        assert kept == 0


@pytest.mark.parametrize("bounds", (slow_case(None), slow_case([0, 0, 3, 20, 21])))
@pytest.mark.parametrize("form", ("diagonal", "exact", "s6") if GPU else ("diagonal",))
def test_rebuilt_states_give_the_same_gradients(form, bounds, path):
    sizes = (1, 21, 64, 16) if GPU else (1, 21, 2, 3)
    a, dout, dfinal = inputs(*sizes, form, dtype=DTYPE, sequences=None if bounds is None else 4)
    fast, small = (
        kernels(a, dout, dfinal, form, bounds, checkpoint=c)
        for c in ("fast", "small" if not GPU else 128)
    )
    assert torch.equal(fast[0], small[0])
    assert torch.equal(fast[1], small[1])
    if GPU:  # block sizes differ, which changes the order of a sum
        result = {n: error(small[2][n], g) for n, g in fast[2].items()}
        assert_close(result, DTYPE)
    else:
        assert_same(small[2], fast[2])


@pytest.mark.cuda
@pytest.mark.parametrize(
    "form, shape",
    [
        *product(
            ("diagonal", "exact"),
            (
                (2, 1000, 64, 16),
                (1, 4096, 64, 16),
                (1, 1001, 40, 7),
                (2, 640, 64, 40),
                (3, 256, 5000, 16),
                (2, 640, 63, 16),
            ),
        ),
        *product(
            ("decoupled", "s6", "s6_time_varying"),
            ((1, 1001, 40, 7), (2, 640, 64, 40), (3, 256, 5000, 16)),
        ),
    ],
)
def test_gpu_small_checkpoints_agree_at_every_kind_of_shape(form, shape, path):
    a, dout, dfinal = inputs(*shape, form, dtype=DTYPE)
    fast, small = (kernels(a, dout, dfinal, form, checkpoint=c) for c in ("fast", "small"))
    assert torch.equal(fast[0], small[0])
    result = {n: error(small[2][n], g) for n, g in fast[2].items()}
    assert_close(result, DTYPE)


@pytest.mark.cuda
@pytest.mark.parametrize("form", ("diagonal", "exact", "decoupled", "s6", "s6_time_varying"))
def test_gpu_small_checkpoints_packed_is_bit_identical_to_alone(form, path):
    a, dout, dfinal = inputs(1, 1300, 64, 16, form, dtype=DTYPE, sequences=3)
    assert_packed_as_alone(a, dout, dfinal, form, [0, 640, 641, 1300], checkpoint="small")


def test_every_backend_takes_the_argument_and_names_a_wrong_one():
    a, *_ = arguments(sizes=(1, 3, 2, 2))
    args = [a[n].float() for n in NAMES]
    for backend in ("reference", "chunked"):
        assert torch.equal(
            longhorn_scan(*args, backend=backend, checkpoint="small"),
            longhorn_scan(*args, backend=backend),
        )
    for wrong in ("tiny", 5, 0, None):
        with pytest.raises(
            ValueError, match="checkpoint is .*; expected one of 'fast', 'small', 4, 8"
        ):
            longhorn_scan(*args, checkpoint=wrong)
    with pytest.raises(ValueError, match="checkpoint is 12"):
        A = torch.zeros(2, 2, device=DEVICE)
        selective_scan(*args[:4], A, checkpoint=12)


@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpointing(reentrant, path):
    a, *_ = arguments()

    def run(x):
        out = scan({**a, "x": x})[0]
        squares = out.float().square()
        return squares.sum()

    run(a["x"]).backward()
    plain = {n: a[n].grad.clone() for n in NAMES}
    for t in a.values():
        if t is not None:
            t.grad = None
    checkpoint(run, a["x"], use_reentrant=reentrant).backward()
    assert_same({n: a[n].grad for n in NAMES}, plain)


def test_second_derivative_is_refused_in_words(path):
    a, *_ = arguments()
    total = scan(a)[0].sum()
    (grad,) = torch.autograd.grad(total, a["x"], create_graph=True)
    with pytest.raises(
        RuntimeError, match="no second derivative; use the reference scan: longhorn_scan"
    ):
        grad.sum().backward()
    with torch.no_grad():
        out = scan(a)[0]
    assert not out.requires_grad


@both_paths
@pytest.mark.cuda
@pytest.mark.parametrize("bounds", (None, (0, 50, 128)))
@pytest.mark.parametrize("checkpoint", ("fast", "small"))
@pytest.mark.parametrize("form", ("diagonal", "exact"))
def test_gpu_forward_and_backward_in_a_cuda_graph(form, checkpoint, bounds, path):
    B, T, D, N = SIZES
    a, dout, dfinal = arguments(
        form, (1, T, D, N) if bounds else SIZES, sequences=len(bounds) - 1 if bounds else None
    )
    cu = torch.tensor(bounds, device=DEVICE, dtype=torch.int32) if bounds else None

    def run():
        # no part of autograd's graph may outlive a call: its nodes reference the stream on which
        # they were created
        outputs = scan(a, form, cu_seqlens=cu, checkpoint=checkpoint)
        grads = gradients(outputs, (dout, dfinal), a)
        return [t.detach() for t in outputs], grads

    want, want_grads = run()
    graph, (got, grads) = captured(run)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert_same(grads, want_grads)


@both_paths
@pytest.mark.cuda
@pytest.mark.parametrize("form", ("diagonal", "exact", "s6"))
def test_gpu_a_cuda_graph_reads_its_bounds_at_every_replay(form, path, monkeypatch):
    "Even with wrong bounds, rows of no sequence are zero, and no access is out of range."
    T, D, N = 600, 40, 16
    a, dout, dfinal = inputs(1, T, D, N, form, dtype=DTYPE, sequences=2)
    cu = torch.tensor([0, 300, T], dtype=torch.int32, device=DEVICE)
    r = leaves(a)

    def run():
        outputs = call(r, form, cu)
        return [t.detach() for t in outputs], gradients(outputs, (dout, dfinal), r)

    graph, (got, grads) = captured(run)
    for given, moved in (
        ([0, 7, None], [0, 7, None]),
        ([2, 3, -4], [2, 3, -4]),
        ([0, 99999, 5], [0, None, None]),
    ):
        cu.copy_(bounds_of(given, T))
        for t in (*got, *grads.values()):
            t.fill_(float("nan"))
        graph.replay()
        want = one_by_one(a, form, dout, dfinal, bounds_of(moved, T))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        result = {n: error(grads[n], g) for n, g in want[2].items()}
        assert_close(result, DTYPE)


@pytest.mark.cuda
def test_gpu_bounds_are_read_once(path):
    "A call synchronizes with the GPU only if a tensor of bounds is new or was changed."
    from longhorn_kit.scan.short_conv import causal_conv1d

    sizes = (1, *SIZES[1:])
    a, dout, dfinal = arguments(sizes=sizes, sequences=2)
    cu = torch.tensor([0, 50, SIZES[1]], device=DEVICE)
    weight = torch.ones(SIZES[2], 4, device=DEVICE, dtype=DTYPE)

    def step():
        causal_conv1d(a["x"], weight, cu_seqlens=cu)
        gradients(scan(a, cu_seqlens=cu), (dout, dfinal), a)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        cu[1].fill_(200)
        with pytest.raises(RuntimeError, match="synchroniz"):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="cu_seqlens decreases from 200 to 128"):
        step()


def shard_and_train(**where):
    "Run one process of the sharded run; return gradients of a layer with sharded parameters."
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl" if GPU else "gloo", **where)
    layer, u = layer_and_input()
    fully_shard(layer)
    rank = dist.get_rank()
    part = u[:, rank:]
    y = layer(part)
    loss = y.square().sum()
    loss.backward()
    grads = {n: p.grad.full_tensor().cpu() for n, p in layer.named_parameters()}
    dist.destroy_process_group()
    return grads


@pytest.mark.parametrize("processes", (1 if GPU else slow_case(2),))
def test_sharded_parameters_train(path, processes):
    "With FSDP2, gradients are the mean over processes."
    if GPU:
        grads = shard_and_train(store=dist.HashStore(), rank=0, world_size=1)
    else:
        with contextlib.closing(Pool(processes)) as pool:
            grads, _ = pool.run(shard_and_train)
    layer, u = layer_and_input()
    for rank in range(processes):
        part = u[:, rank:]
        y = layer(part)
        loss = y.square().sum()
        (loss / processes).backward()
    for name, p in layer.named_parameters():
        expected = p.grad.cpu()
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ("diagonal", "exact"))
def test_long_sequence_against_chunked_float64(form, path, monkeypatch):
    "A million steps run on a GPU; fewer in the interpreter, which is slow."
    T, D, N = (2**20, 8, 4) if GPU else (130, 2, 2)
    a, dout, dfinal = inputs(1, T, D, N, form, dtype=DTYPE, z=False)
    on_cpu = {n: t if t is None else t.cpu() for n, t in a.items()}
    want = leaves(on_cpu, torch.float64)
    out, final, grads = kernels(a, dout, dfinal, form) if GPU else (*call(a, form), {})
    out_, final_ = chunked_scan(
        *(want[n] for n in NAMES), form=form, initial_state=want["initial_state"], chunk=256
    )
    out_error = error(out.cpu(), out_.detach())
    final_error = error(final.cpu(), final_.detach())
    errors = dict(out=out_error, final=final_error)
    if grads:
        gradient_out = dout.cpu().double()
        gradient_final = dfinal.cpu().double()
        right = gradients((out_, final_), (gradient_out, gradient_final), want)
        errors |= {n: error(grads[n].cpu(), g) for n, g in right.items()}
    assert_close(errors, DTYPE)


def drawer(device, dtype):
    "Return a function of sizes that draws a leaf with the same numbers on every device."
    gen = torch.Generator("cpu").manual_seed(0)

    def new(*s):
        drawn = torch.randn(*s, generator=gen, device="cpu")
        return drawn.to(device, dtype).requires_grad_()

    return new


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", ("diagonal", "exact", "decoupled"))
def test_gpu_tensors_of_another_gpu_than_the_current_one(form):
    from longhorn_kit.scan.op import longhorn_step
    from longhorn_kit.scan.short_conv import causal_conv1d

    results = []
    for device in ("cuda:0", "cuda:1"):
        new = drawer(device, torch.bfloat16)
        a = dict(
            q=new(2, 37, 16), k=new(2, 37, 16), x=new(2, 37, 40), b=new(2, 37, 40), z=new(2, 37, 40)
        )
        out = longhorn_scan(**a, form=form)
        squares = out.float().square()
        total = squares.sum()
        tensors = list(a.values())
        grads = torch.autograd.grad(total, tensors)
        x = a["x"].detach()
        taps = new(40, 4).detach()
        y = causal_conv1d(x, taps, backend="triton")
        step = longhorn_step(
            *(a[n][:, 0].detach() for n in "qkxb"), torch.zeros(2, 40, 16, device=device), form=form
        )
        tensors = (out, *grads, y, *step)
        results.append([t.cpu() for t in tensors])
        assert torch.cuda.current_device() == 0
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_scratch_of_the_portable_backward_is_bounded(monkeypatch):
    "Several launches of few programs give the same bits as one launch."
    from longhorn_kit.scan.triton import portable as triton_portable
    from longhorn_kit.scan.triton import portable_backward as triton_portable_backward

    torch.manual_seed(0)
    results = []
    for most in (2048, 3):
        monkeypatch.setattr(triton_portable_backward, "SCRATCHES", most)
        new = drawer(DEVICE, torch.float32)
        q = new(2, 2, 40)
        a = dict(q=q, k=new(2, 2, 40), x=new(2, 2, 70), dt=new(2, 2, 70))
        out = selective_scan(**a, A=-torch.ones(70, 40, device=DEVICE), backend="triton")
        total = out.square().sum()
        tensors = list(a.values())
        result = torch.autograd.grad(total, tensors)
        results.append(result)
    assert not triton_portable.portable_plan("s6", 2, 2, 70, 40, direction="backward").in_registers
    assert all(map(torch.equal, *results))
