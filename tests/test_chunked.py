"""Compare chunked scans with the reference: values, gradients, odd sizes, extreme numbers."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from longhorn_kit.scan import chunked
from longhorn_kit.scan.chunked import chunked_scan, chunked_selective_scan
from scan_cases import call, gradients, inputs, leaves
from sweep import slow_case

pytestmark = pytest.mark.numeric

FORMS = tuple(chunked.MACHINES)


def make(*sizes, form="diagonal", scalar=False, key_scale=1.0):
    a, *_ = inputs(*sizes, form, scalar=scalar, key_scale=key_scale)
    return {n: t if t is None else t.double().cpu() for n, t in a.items()}


def run(form, t, reference=False, chunk=None):
    if reference:
        return call(t, form, oracle=True)
    scan, rates = (
        (partial(chunked_scan, form=form), ())
        if t["A"] is None
        else (chunked_selective_scan, (t["A"],))
    )
    given = dict(dt_softplus=False) if form == "s6_given" else {}
    return scan(
        *(t[n] for n in "qkxb"),
        *rates,
        t["b_bias"],
        t["D_skip"],
        t["z"],
        initial_state=t["initial_state"],
        chunk=chunk,
        **given,
    )


def everything(form, t, weights=(1, 1), **options):
    "Return values and gradients of all inputs, for a random projection of output and state."
    t = leaves(t)
    gen = torch.Generator().manual_seed(9)
    out, state = run(form, t, **options)
    results = []
    projections = []
    for weight, result in zip(weights, (out, state)):
        if weight:
            projection = torch.randn(result.shape, generator=gen, dtype=torch.float64)
            results.append(result)
            projections.append(projection.to(result.dtype))
    values = dict(out=out.detach(), state=state.detach())
    return values | gradients(results, projections, t)


def agree(results, references, tolerance):
    for name, expected in references.items():
        assert results[name].shape == expected.shape, name
        if expected.numel():
            wide = expected.double()
            difference = (results[name].double() - wide).abs().max()
            size = expected.abs().max().clamp(min=1)
            error = (difference / size).item()
            assert error <= tolerance, (name, error)


# N D is below and above SMALL_PRODUCT, from where `bmm` replaces a product and a sum over states
SIZES = [
    (1, 1, 1, 1, None),
    (3, 37, 5, 4, 8),
    (2, 64, 7, 16, None),
    (1, 33, 3, 128, None),
    (2, 5, 130, 3, 2),
    (1, 130, 2, 2, 64),
    (2, 19, 40, 16, None),
    (2, 5, 140, 3, 2),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("B, T, D, N, chunk", SIZES)
def test_values_and_all_gradients_equal_the_reference(form, B, T, D, N, chunk):
    t = make(B, T, D, N, form=form)
    agree(everything(form, t, chunk=chunk), everything(form, t, reference=True), 1e-12)


@pytest.mark.parametrize("N, D", [(8, 32), (3, 133), (4, 100), (16, 40), (1, 1), (5, 0)])
@pytest.mark.parametrize("given_out", [False, True])
def test_sums_over_states_equal_a_sum_of_products(N, D, given_out):
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(3, 2, N, generator=generator, dtype=torch.float64)
    M = torch.randn(3, 2, N, D, generator=generator, dtype=torch.float64)
    out = torch.empty(5, 2, D, dtype=torch.float64)[1:4] if given_out else None
    result = chunked.over_states(row, M, out)
    assert out is None or result.data_ptr() == out.data_ptr()
    assert_close(result, torch.einsum("lbn,lbnd->lbd", row, M), rtol=0, atol=1e-13)


@given(
    st.sampled_from(FORMS),
    st.integers(0, 64),
    st.integers(0, 2**16),
    st.integers(0, 4096),
    st.integers(1, 128),
)
def test_chunks_are_short_unless_checkpoints_would_outnumber_the_buffers(form, B, T, D, N):
    steps = chunked.chunk_length(form, B, T, D, N)
    assert 1 <= steps <= 64
    assert steps <= max(1, T)
    if form == "exact":
        assert steps == max(1, min(32, T))
    elif steps < T:
        assert steps >= 8
        assert steps == 8 or steps * B * D * N <= chunked.LARGEST_BUFFER
        longest = 2 * steps > 64 or 2 * steps * B * D * N > chunked.LARGEST_BUFFER
        assert 2 * steps >= T**0.5 or longest  # T / steps checkpoints are at most 4 buffers


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(FORMS),
    st.integers(0, 3),
    st.integers(0, 19),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 24),
    st.booleans(),
    st.permutations([0, 1, 2]),
    st.sampled_from([(1, 1), (1, 0), (0, 1)]),
)
def test_any_shape_chunk_strides_and_outputs_in_use(
    form, B, T, D, N, chunk, scalar, order, weights
):
    t = make(B, T, D, N, form=form, scalar=scalar)
    back = [order.index(i) for i in range(3)]

    def restride(v):  # the same values in another memory order
        if v is None or v.dim() != 3:
            return v
        permuted = v.permute(order).contiguous()
        return permuted.permute(back)

    moved = {n: restride(v) for n, v in t.items()}
    agree(
        everything(form, moved, weights, chunk=chunk),
        everything(form, t, weights, reference=True),
        1e-12,
    )


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e3])
@pytest.mark.parametrize("logit", [-1e4, -80.0, 80.0, 1e4, 0.0])
def test_extreme_keys_and_rates(form, scale, logit):
    t = make(1, 50, 3, 8, form=form, key_scale=scale)
    t["b"] = t["b"].sign() * logit + t["b"] * (logit == 0)
    agree(everything(form, t, chunk=16), everything(form, t, reference=True), 1e-11)
    single = everything(form, leaves(t, torch.float32), chunk=16)
    exact = everything(form, t, reference=True)
    for value in single.values():
        assert torch.isfinite(value).all()
    agree(single, {n: exact[n] for n in ("out", "state", "x")}, 2e-5)


@pytest.mark.parametrize("form", FORMS[:3])
def test_a_step_size_of_zero_changes_nothing_and_passes_gradients_on(form):
    t = make(2, 40, 3, 4, form=form)
    t["b"] = torch.full_like(t["b"], -1e4)
    results = everything(form, t, weights=(0, 1), chunk=16)
    assert torch.equal(results["state"], t["initial_state"])
    largest = results["x"].abs().max()
    assert largest < 1e-30
    smallest = results["initial_state"].abs().min()
    assert smallest > 0


def test_long_run_of_nearly_equal_keys_in_float32():
    t = make(1, 700, 4, 16, form="exact", key_scale=0.02)
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(16, generator=generator)
    t["k"] = t["k"] + 5 * common.double()
    results = everything("exact", leaves(t, torch.float32))
    references = everything("exact", t, reference=True)
    for name, expected in references.items():
        errors = (results[name].double() - expected).abs()
        difference = errors.max()
        largest = expected.abs().max()
        error = difference / largest
        assert error < 1e-3, (name, error)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("N", [1, 16, 64])
def test_float32_at_layer_like_sizes(form, N):
    t = make(2, 96, 40, N, form=form, key_scale=N**-0.5)
    results = everything(form, leaves(t, torch.float32))
    references = everything(form, t, reference=True)
    for name, expected in references.items():
        errors = (results[name].double() - expected).abs()
        difference = errors.max()
        largest = expected.abs().max()
        assert difference <= 2e-5 * largest, name


@pytest.mark.parametrize("form", FORMS)
def test_no_second_derivative_is_taken_for_zero(form):
    "`torch.autograd.grad` with only some inputs must find a dependence on each of them."
    t = leaves(make(2, 5, 3, 2, form=form))
    given = {n: v for n, v in t.items() if v is not None}
    outside = ("D_skip", "z")  # applied to the read-outs outside the scan
    refusal = "no second derivative; use the reference scan: .*set layer.scan = functools"
    for first in (v for n, v in given.items() if n not in outside):
        for second in given.values():
            out, _ = run(form, t)
            loss = out.square().sum()
            (grad,) = torch.autograd.grad(loss, first, create_graph=True)
            first_loss = grad.square().sum()
            second_loss = second.square().sum()
            loss = first_loss + second_loss
            with pytest.raises(RuntimeError, match=refusal + ".partial"):
                torch.autograd.grad(loss, second)


def opaque_inputs(form, packed, B=2):
    B = 1 if packed else B
    T = 37
    D = 5
    N = 4
    torch.manual_seed(0)
    inputs = [torch.randn(B, T, width) for width in (N, N, D, D)]
    shapes = dict(s6=(D, N), s6_given=(D, N), s6_time_varying=(B, T, N))
    shape = shapes.get(form)
    A = None if shape is None else -torch.rand(shape)
    S = torch.randn(3 if packed else B, D, N)
    tensors = (*inputs, A, S)
    return [t if t is None else t.requires_grad_() for t in tensors]


@pytest.mark.parametrize(
    "packed, keep", [(True, True), (False, False), slow_case(True, False), slow_case(False, True)]
)
@pytest.mark.parametrize(
    "form", ["exact", "s6", *(slow_case(form) for form in FORMS if form not in ("exact", "s6"))]
)
def test_the_opaque_operation_is_well_formed(form, packed, keep):
    "PyTorch's test of schema, gradients, fake tensors and tracing with dynamic shapes passes."
    bounds = torch.tensor([0, 5, 5, 30]) if packed else None
    arguments = (*opaque_inputs(form, packed), bounds, form, 8, keep)
    operation = torch.ops.longhorn_kit.chunked_scan.default
    torch.library.opcheck(operation, arguments)


@pytest.mark.parametrize("B, packed", [slow_case(1, False), (2, False), (1, True)])
@pytest.mark.parametrize(
    "form", ["exact", "s6", *(slow_case(form) for form in FORMS if form not in ("exact", "s6"))]
)
def test_compiled_chunks_equal_eager_ones_and_wrong_bounds_do_no_harm(form, B, packed):
    from longhorn_kit.scan.op import longhorn_scan, selective_scan

    torch._dynamo.reset()
    *tensors, S = opaque_inputs(form, packed, B)
    q, k, x, b, A = tensors
    skip = torch.randn(5)
    z = torch.randn(1, 37, 5)
    leaves = [t for t in (*tensors, S) if t is not None]
    options = dict(D_skip=skip, initial_state=S, output_final_state=True, backend="chunked")

    def scan(bounds):
        z_by_row = z.expand(B, -1, -1)
        more = dict(z=z_by_row, cu_seqlens=bounds, **options)
        if A is None:
            return longhorn_scan(q, k, x, b, form=form, **more)
        return selective_scan(q, k, x, b, A, **more)

    def everything_of(scan, bounds):
        out, state = scan(bounds and torch.tensor(bounds))
        out_loss = out.square().sum()
        state_loss = state.square().sum()
        loss = out_loss + state_loss
        return [out, state, *torch.autograd.grad(loss, leaves)]

    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")

    def compare(bounds, expected_bounds):
        results = everything_of(compiled, bounds)
        for result, expected in zip(results, everything_of(scan, expected_bounds)):
            assert_close(result, expected, rtol=1e-4, atol=1e-5)

    if not packed:
        compare(None, None)
        return
    compare([0, 5, 20, 37], [0, 5, 20, 37])
    compare([-3, 20, 7, 99], [0, 20, 20, 37])  # clamped to the range
    for part in everything_of(compiled, [3, 20, 20, 30]):
        if part.dim() == 3 and part.shape[1] == 37:
            before = part[:, :3]
            assert before.eq(0).all()
            behind = part[:, 30:]
            assert behind.eq(0).all()
            between = part[:, 3:30]
            assert between.ne(0).any()


@pytest.mark.parametrize("way", ["eager", slow_case("compiled"), "recomputed"])
@pytest.mark.parametrize(
    "form",
    [
        "diagonal",
        "exact",
        "s6",
        *(slow_case(form) for form in FORMS if form not in ("diagonal", "exact", "s6")),
    ],
)
def test_finite_differences_confirm_the_operation(form, way):
    """PyTorch's gradcheck passes in float64, with the initial and the final state.

    It also passes compiled, and recomputed inside a compiled function."""
    from longhorn_kit.scan.op import longhorn_scan, selective_scan

    t = leaves(make(1, 5, 2, 2, form=form))
    given_tensors = {n: v for n, v in t.items() if v is not None}
    names, given = zip(*given_tensors.items())

    def scan(*tensors):
        a = dict(zip(names, tensors))
        if "A" not in a:
            return longhorn_scan(**a, form=form, output_final_state=True)
        dt = a.pop("b")
        bias = a.pop("b_bias", None)
        return selective_scan(**a, dt=dt, dt_bias=bias, output_final_state=True)

    def recomputed(*tensors):
        return checkpoint(scan, *tensors, use_reentrant=False)

    torch._dynamo.reset()
    function = recomputed if way == "recomputed" else scan
    if way != "eager":
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.autograd.gradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_checkpoints_without_gradients(form, monkeypatch):
    machine = chunked.MACHINES[form]
    tapes = []

    def recorded(*arguments):
        out, state, tape = machine.run(*arguments)
        tapes.append(tape)
        return out, state, tape

    monkeypatch.setitem(chunked.MACHINES, form, machine._replace(run=recorded))
    t = make(1, 20, 2, 3, form=form)
    run(form, t, chunk=4)
    with torch.no_grad():
        run(form, leaves(t), chunk=4)
    sizes = [tape[-1].numel() for tape in tapes]
    assert sizes == [0, 0]
    run(form, leaves(t), chunk=4)
    shape = tapes[-1][-1].shape
    assert shape == (5, 1, 3, 2)


@pytest.mark.parametrize("form", FORMS)
def test_only_some_inputs_need_gradients(form):
    t = make(1, 9, 2, 3, form=form)
    k = t["k"].requires_grad_()

    def gradient(reference):
        out, _ = run(form, t, reference, 4)
        return torch.autograd.grad(out.sum(), k)[0]

    assert_close(gradient(False), gradient(True), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled"])
def test_batched_gradients_are_refused_in_one_line(form):
    from longhorn_kit import longhorn_scan

    q, k, x, b = (torch.randn(1, 5, n, requires_grad=True) for n in (4, 4, 3, 3))
    out = longhorn_scan(q, k, x, b, form=form, backend="chunked")
    with pytest.raises(RuntimeError, match="^this scan has no batched gradients"):
        directions = torch.randn(2, *out.shape)
        torch.autograd.grad(out, q, directions, is_grads_batched=True)
