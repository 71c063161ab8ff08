"""Test the scans in C++: values, gradients, odd sizes, extreme numbers, and no compiler."""

import shutil

import pytest
import torch
from torch.testing import assert_close

from longhorn_kit.scan import chunked, native
from longhorn_kit.scan.chunked import chunked_scan, chunked_selective_scan
from scan_cases import call, gradients, inputs, leaves

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]

FORMS = tuple(chunked.IN_CPP)


def scan(form, t, chunk=None):
    rest = dict(initial_state=t["initial_state"], chunk=chunk)
    data = [t[name] for name in "qkxb"]
    if t["A"] is None:
        return chunked_scan(*data, t["b_bias"], t["D_skip"], t["z"], form=form, **rest)
    return chunked_selective_scan(
        *data, t["A"], t["b_bias"], t["D_skip"], t["z"], dt_softplus=form == "s6", **rest
    )


def everything(results, t):
    "Return values and gradients of all inputs, for a random projection of output and state."
    generator = torch.Generator().manual_seed(9)
    weights = []
    for result in results:
        weight = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        weights.append(weight.to(result.dtype))
    out, state = results
    values = dict(out=out.detach(), state=state.detach())
    return values | gradients(results, weights, t)


def make(*sizes, form, **options):
    a, _, _ = inputs(*sizes, form, **options)
    tensors = a.items()
    return {name: t if t is None else t.cpu() for name, t in tensors}


def errors(form, t, chunk):
    "Return the largest error of values and gradients, relative to the largest float64 entry."
    single = leaves(t)
    double = leaves(t, torch.float64)
    results = everything(scan(form, single, chunk), single)
    exact = everything(call(double, form, oracle=True), double)
    assert all(results[name].shape == exact[name].shape for name in exact)
    by_name = {}
    for name, expected in exact.items():
        if expected.numel():
            exact_values = results[name].double()
            errors_of_name = (exact_values - expected).abs()
            error = errors_of_name.max()
            size = expected.abs().max().clamp(min=1)
            by_name[name] = (error / size).item()
    return by_name


def test_the_library_compiles_and_runs_float32_of_a_cpu():
    assert native.library() is not None
    double = torch.zeros(1, dtype=torch.float64)
    meta = torch.zeros(1, device="meta")
    for form in FORMS:
        machine = chunked.machine_of(form, torch.zeros(1))
        assert machine is chunked.IN_CPP[form]
        machine = chunked.machine_of(form, double)
        assert machine is chunked.MACHINES[form]
        machine = chunked.machine_of(form, meta)
        assert machine is chunked.MACHINES[form]
    machine = chunked.machine_of("decoupled", torch.zeros(1))
    assert machine is chunked.MACHINES["decoupled"]


# channels: less than a block, one block, blocks and a remainder; lengths: the same for chunks
@pytest.mark.parametrize(
    "B, T, D, N, chunk",
    [
        (1, 1, 1, 1, None),
        (3, 37, 5, 4, 8),
        (2, 16, 16, 3, 8),
        (2, 33, 37, 16, 8),
        (1, 65, 130, 2, 64),
        (2, 9, 33, 130, 4),
        (2, 0, 5, 3, 8),
        (0, 4, 5, 3, 8),
        (2, 4, 0, 3, 8),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_all_gradients_equal_the_reference(form, B, T, D, N, chunk):
    measured = errors(form, make(B, T, D, N, form=form, key_scale=N**-0.5), chunk)
    assert max(measured.values(), default=0) < 1e-5, measured


@pytest.mark.parametrize("form", ["diagonal", "exact"])
def test_one_rate_for_all_channels(form):
    measured = errors(form, make(2, 19, 20, 4, form=form, scalar=True), 8)
    assert max(measured.values()) < 1e-5, measured


@pytest.mark.parametrize("form", FORMS)
def test_it_agrees_with_pytorch_in_float32(form, monkeypatch):
    t = leaves(make(2, 40, 24, 8, form=form))
    compiled = everything(scan(form, t), t)
    monkeypatch.setattr(native, "compiles", lambda: False)
    machine = chunked.machine_of(form, t["x"])
    assert machine is chunked.MACHINES[form]
    exact = everything(scan(form, t), t)
    for name, expected in exact.items():
        assert_close(compiled[name], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_threads_changes_no_bit(form):
    t = leaves(make(5, 20, 20, 4, form=form))
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            runs.append(everything(scan(form, t), t))
    finally:
        torch.set_num_threads(before)
    first, *others = runs
    for other in others:
        for name, expected in first.items():
            assert torch.equal(other[name], expected), name


def test_the_exponential_is_right_to_the_last_bits_over_all_of_float32():
    x = torch.linspace(-87, 88, 20001)
    q = torch.ones(1, 1, 1)
    k = torch.zeros(1, 1, 1)
    zero = torch.zeros(1, 1, len(x))
    rates = torch.ones(1, len(x))
    first = torch.ones(1, 1, len(x))
    row = x.view(1, 1, -1)
    _, state, _ = native.forward("s6", 1, False, q, k, zero, row, rates, first)
    exact = x.double().exp()
    wide = state.flatten().double()
    difference = (wide - exact).abs()
    error = difference / exact
    largest = error.max()
    assert largest < 4 * 2**-23


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_reaches_no_earlier_token_and_no_other_row(form, bad):
    t = make(2, 12, 20, 4, form=form)
    clean = scan(form, t)[0]
    for name in "qkxb":
        changed = {name: t[name].clone()}
        spoiled = dict(t, **changed)
        spoiled[name][0, 7] = bad
        out = scan(form, spoiled)[0]
        result = out[0, :7]
        expected = clean[0, :7]
        assert torch.equal(result, expected)
        assert torch.equal(out[1], clean[1])
        assert name == "b" or not out[0, 7].isfinite().all()


def test_inputs_are_not_changed():
    for form in FORMS:
        t = leaves(make(2, 12, 20, 4, form=form))
        before = {name: part.detach().clone() for name, part in t.items() if part is not None}
        everything(scan(form, t), t)
        for name, part in before.items():
            result = t[name].detach()
            assert torch.equal(result, part)


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_working_compiler_there_is_no_library(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path))
    assert native.library.__wrapped__() is None
    left = list(tmp_path.iterdir())
    assert left == []


def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path))
    path = native.build('extern "C" int answer() { return 42; }')
    assert path.parent == tmp_path
    assert path.exists()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert native.build('extern "C" int answer() { return 42; }') == path
