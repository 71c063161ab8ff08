"""The fast kernels (Gluon, NVIDIA) against a float64 loop and against the portable ones. All of it needs a GPU."""
import logging

import pytest
import torch

from scan_cases import DEVICE, assert_close, error, errors, inputs, kernels, one_sequence
from longhorn_kit.scan import triton_op

pytestmark = pytest.mark.cuda
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
FORMS = ("diagonal", "exact")
SHAPES = [(2, 64, 64, 16), (2, 67, 40, 16), (1, 300, 136, 16), (3, 33, 8, 5), (1, 1, 24, 1), (2, 16, 2048, 16), (1, 2500, 72, 16), (2, 67, 132, 16), (1, 40, 134, 5)]


@pytest.fixture(autouse=True)
def fast_runs(request):
    "The tests here are about the fast path: make sure that it is the one that runs."
    if DEVICE == "cuda":
        x = torch.zeros(1, 1, 8, device="cuda", dtype=BF16)
        assert triton_op.scan_path("exact", x, x, x) == "exact" and triton_op.scan_path("diagonal", x, x, x) == "diagonal"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_parity_in_bfloat16(form, shape):
    assert_close(errors(*shape, form, dtype=BF16), BF16)


@pytest.mark.parametrize("left_out", ("z", "state", "bias", "skip"))
@pytest.mark.parametrize("form", FORMS)
def test_parity_with_parts_left_out(form, left_out):
    assert_close(errors(2, 83, 72, 16, form, dtype=BF16, **{left_out: False}), BF16)


@pytest.mark.parametrize("dtype", (FP32, FP16))
@pytest.mark.parametrize("shape", SHAPES)
def test_parity_of_diagonal_in_other_dtypes(shape, dtype):
    assert_close(errors(*shape, "diagonal", dtype=dtype), dtype, factor=2)


@pytest.mark.parametrize("N", (3, 17, 32, 40, 64))
def test_parity_of_exact_with_more_states(N):
    assert_close(errors(2, 100, 72, N, "exact", dtype=BF16, key_scale=2 * N**-0.5), BF16)


@pytest.mark.parametrize("N", (16, 64))
def test_exact_at_ragged_ends(N):
    "Sequences shorter than a chunk, of just one, and a last channel block with 8 of 32."
    assert_close(errors(1, 61, 40, N, "exact", bounds=[0, 1, 16, 32, 32, 61], dtype=BF16, key_scale=2 * N**-0.5), BF16)


@pytest.mark.parametrize("N", (3, 17, 32, 40, 64, 100, 128))
def test_parity_of_diagonal_with_more_states(N):
    "One segment and several, ragged in time and channels."
    for shape in ((2, 100, 72, N), (1, 1100, 40, N)):
        assert_close(errors(*shape, "diagonal", dtype=BF16, key_scale=2 * N**-0.5), BF16)
    assert_close(errors(2, 43, 40, N, "diagonal", dtype=FP32, key_scale=2 * N**-0.5), FP32, factor=2)


@pytest.mark.parametrize("N", (32, 100))
def test_packed_diagonal_with_more_states_is_bit_identical_to_alone(N):
    bounds = [0, 1, 1, 300, 1500, 1600]
    a, dout, dfinal = inputs(1, 1600, 72, N, "diagonal", dtype=BF16, sequences=5, key_scale=2 * N**-0.5)
    out, final, grads = kernels(a, dout, dfinal, "diagonal", bounds)
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, last, g = kernels(one_sequence(a, "diagonal", i, lo, hi), dout[:, lo:hi], dfinal[i : i + 1], "diagonal")
        assert torch.equal(alone, out[:, lo:hi]) and torch.equal(last, final[i : i + 1]), i
        assert all(torch.equal(g[n], grads[n][:, lo:hi]) for n in ("q", "k", "x", "b", "z")), i


@pytest.mark.parametrize("form", FORMS)
def test_accuracy_within_is_that_of_float32(form):
    "bfloat16 keys and queries, everything else float32: what the products of split halves lose is below 1e-4."
    a, dout, dfinal = inputs(2, 200, 64, 16, form)
    a["q"], a["k"] = a["q"].bfloat16(), a["k"].bfloat16()
    from scan_cases import oracle
    (out, final, grads), (out_, final_, grads_) = kernels(a, dout, dfinal, form), oracle(a, dout, dfinal, form)
    found = dict(out=error(out, out_), final=error(final, final_), **{n: error(grads[n], grads_[n]) for n in grads_ if n not in "qk"})
    assert_close(found, FP32, factor=5)


@pytest.mark.parametrize("form", FORMS)
def test_scalar_rate_and_strided_inputs(form):
    assert_close(errors(2, 50, 64, 16, form, dtype=BF16, scalar=True), BF16)
    a, dout, dfinal = inputs(2, 50, 64, 16, form, dtype=BF16)
    wide = dict(a, x=torch.cat([a["x"], a["z"]], -1)[..., :64], z=torch.cat([a["x"], a["z"]], -1)[..., 64:],
                b=a["b"].transpose(1, 2).contiguous().transpose(1, 2), k=torch.cat([a["k"], a["q"]], -1)[..., :16])
    first, second = (kernels(v, dout, dfinal, form) for v in (a, wide))
    assert torch.equal(first[0], second[0]) and all(torch.equal(first[2][n], second[2][n]) for n in first[2])


@pytest.mark.parametrize("form", FORMS)
def test_packed_agrees_and_is_bit_identical_to_alone(form):
    bounds = [0, 1, 1, 300, 333, 1200, 2480]
    assert_close(errors(1, 2480, 72, 16, form, bounds=bounds, dtype=BF16), BF16)
    a, dout, dfinal = inputs(1, 2480, 72, 16, form, dtype=BF16, sequences=6)
    out, final, grads = kernels(a, dout, dfinal, form, bounds)
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone, last, g = kernels(one_sequence(a, form, i, lo, hi), dout[:, lo:hi], dfinal[i : i + 1], form)
        assert torch.equal(last, final[i : i + 1]), i
        assert torch.equal(alone, out[:, lo:hi]), i
        assert all(torch.equal(g[n], grads[n][:, lo:hi]) for n in ("q", "k", "x", "b", "z")), i


@pytest.mark.parametrize("form", FORMS)
def test_gradients_repeat_bit_for_bit(form):
    a, dout, dfinal = inputs(2, 600, 200, 16, form, dtype=BF16)
    first, second = (kernels(a, dout, dfinal, form) for _ in range(2))
    assert torch.equal(first[0], second[0]) and all(torch.equal(first[2][n], second[2][n]) for n in first[2])


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_around_its_memory_does_not_matter(form, monkeypatch):
    empty = torch.empty
    def poisoned(*size, **options):
        t = empty(*size, **options)
        return t.fill_(float("nan")) if t.is_floating_point() else t
    a, dout, dfinal = inputs(2, 43, 40, 13, form, dtype=BF16)
    want = kernels(a, dout, dfinal, form)
    monkeypatch.setattr(torch, "empty", poisoned)
    inside = {}
    for n in ("x", "b", "z"):
        big = poisoned(2, 50, 56, device=DEVICE, dtype=BF16)
        inside[n] = big[:, 3:46, 8:48].copy_(a[n])
    got = kernels({**a, **inside}, dout, dfinal, form)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert all(torch.equal(got[2][n], want[2][n]) for n in want[2])


@pytest.mark.parametrize("scale", (0.0, 1e-3, 6.0, 1e3))
@pytest.mark.parametrize("form", FORMS)
def test_key_scales_and_extreme_logits(form, scale):
    a, dout, dfinal = inputs(2, 96, 40, 16, form, dtype=BF16)
    a["k"] = (a["k"] * scale).bfloat16()
    a["b"][:, ::7], a["b"][:, 1::7], a["z"][:, ::5], a["z"][:, 1::5] = 80.0, -80.0, 100.0, -100.0
    got = kernels(a, dout, dfinal, form)
    assert all(torch.isfinite(t).all() for t in (got[0], got[1], *got[2].values()))
    from scan_cases import oracle
    want = oracle(a, dout, dfinal, form)
    assert error(got[0], want[0]) < 6e-3 and error(got[1], want[1]) < 6e-3
    assert all(error(got[2][n], want[2][n]) < 2e-2 for n in ("x", "q", "D_skip", "z"))


@pytest.mark.parametrize("form", FORMS)
def test_one_key_repeated(form):
    a, dout, dfinal = inputs(1, 512, 64, 16, form, dtype=BF16)
    for scale in (0.25, 1.0, 4.0):
        a["k"] = (torch.ones_like(a["k"]) * scale + torch.randn_like(a["k"]) * 0.05 * scale).bfloat16()
        from scan_cases import oracle
        got, want = kernels(a, dout, dfinal, form), oracle(a, dout, dfinal, form)
        assert error(got[0], want[0]) < 6e-3 and error(got[1], want[1]) < 1e-3
        assert all(error(got[2][n], want[2][n]) < 2e-2 for n in want[2]), scale


@pytest.mark.parametrize("form", FORMS)
def test_offsets_beyond_two_to_the_31(form):
    torch.manual_seed(0)
    B, T, D, N = 1, 1_100_000, 2048, 16
    new = lambda *s: torch.randn(*s, device=DEVICE, dtype=BF16)
    q, k, b = new(B, T, N), new(B, T, N) / 2, new(B, 1, D).expand(B, T, D).contiguous()
    x = new(B, 1, D).expand(B, T, D).contiguous()
    with torch.no_grad():
        out, final = triton_op.triton_scan(q, k, x, b, form=form)
        tail = 2048                      # the state forgets: a scan of the last steps agrees with the whole
        short, last = triton_op.triton_scan(q[:, -tail:], k[:, -tail:], x[:, -tail:], b[:, -tail:], form=form)
    assert error(out[:, -64:], short[:, -64:]) < 6e-3 and error(final, last) < 1e-3


def test_an_unknown_triton_is_checked_not_trusted(monkeypatch, caplog):
    monkeypatch.setattr(triton_op, "KNOWN_TRITON", ("0.0",))
    triton_op.fast_kernels_work.cache_clear()
    assert triton_op.fast_kernels_work(0)
    monkeypatch.setattr(triton_op, "exact_forward", lambda *a: 1 / 0)
    triton_op.fast_kernels_work.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not triton_op.fast_kernels_work(0) and not triton_op.fast_kernels_work(0)
    assert len(caplog.records) == 1 and "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    triton_op.fast_kernels_work.cache_clear()
