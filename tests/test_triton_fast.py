"""Compare the fast kernels (Gluon, NVIDIA) with a float64 loop and with the portable kernels.

All tests need a GPU."""

import warnings

import pytest
import torch

from longhorn_kit.scan.triton import diagonal as triton_diagonal
from longhorn_kit.scan.triton import op as triton_op
from scan_cases import (
    DEVICE,
    assert_channels_are_equal,
    assert_close,
    assert_ends_agree,
    assert_packed_as_alone,
    assert_same_bits,
    beyond,
    error,
    errors,
    inputs,
    kernels,
    off,
    oracle,
    poisoned,
    within,
)

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16
FP32 = torch.float32
FP16 = torch.float16
FORMS = ("diagonal", "exact", "decoupled", "s6", "s6_time_varying")
OWN_RATES = FORMS[2:]  # every state has a separate gate
SHAPES = [
    (2, 64, 64, 16),
    (2, 67, 40, 16),
    (1, 300, 136, 16),
    (3, 33, 8, 5),
    (1, 1, 24, 1),
    (2, 16, 2048, 16),
    (1, 2500, 72, 16),
    (2, 67, 132, 16),
    (1, 40, 134, 5),
    (2, 67, 33, 16),
    (3, 33, 1, 5),
    (1, 1100, 67, 16),
    (2, 19, 2047, 16),
]  # the last four cases have odd widths, which are not copied


@pytest.fixture(autouse=True)
def fast_runs(request):
    "Check that scans run on the fast kernels."
    if DEVICE == "cuda":
        for width in (8, 7):
            x = torch.zeros(1, 1, width, device="cuda", dtype=BF16)
            for form in FORMS:
                assert triton_op.scan_path(form, x, x, x) == form


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_parity_in_bfloat16(form, shape):
    assert_close(errors(*shape, form, dtype=BF16), BF16)


@pytest.mark.parametrize("left_out", ("z", "state", "bias", "skip"))
@pytest.mark.parametrize("form", FORMS)
def test_parity_with_parts_left_out(form, left_out):
    assert_close(errors(2, 83, 72, 16, form, dtype=BF16, **{left_out: False}), BF16)


@pytest.mark.parametrize(
    "shape, dtype", [*zip(SHAPES[1:4] + SHAPES[9:12:2], (FP32, FP32, FP16, FP16, FP32))]
)
@pytest.mark.parametrize("form", ("diagonal", *OWN_RATES))
def test_parity_in_other_dtypes(form, shape, dtype):
    assert_close(errors(*shape, form, dtype=dtype), dtype, factor=2)


@pytest.mark.parametrize("D", (72, 69))
@pytest.mark.parametrize("N", (3, 17, 32, 40, 64, 100, 128))
def test_parity_of_exact_with_more_states(N, D):
    results = errors(2, 100, D, N, "exact", dtype=BF16, key_scale=2 * N**-0.5)
    assert_close(results, BF16)


@pytest.mark.parametrize("N", (16, 64, 128))
def test_exact_at_ragged_ends(N):
    "Results are right for short sequences, single chunks, and a last block of 8 channels."
    assert_close(
        errors(
            1, 61, 40, N, "exact", bounds=[0, 1, 16, 32, 32, 61], dtype=BF16, key_scale=2 * N**-0.5
        ),
        BF16,
    )


@pytest.mark.parametrize("D, N", ((2040, 16), (2046, 16), (2047, 16), (2040, 128)))
def test_exact_in_wide_blocks_of_ragged_widths(D, N):
    """Results are right and repeat bit for bit, with blocks of 32 channels; the last starts early.

    Lengths are multiples of a chunk, or not."""
    for T in (64, 67):
        results = errors(5, T, D, N, "exact", dtype=BF16, key_scale=2 * N**-0.5)
        assert_close(results, BF16)
    a, dout, dfinal = inputs(5, 67, D, N, "exact", dtype=BF16, key_scale=2 * N**-0.5)
    assert_same_bits(*(kernels(a, dout, dfinal, "exact") for _ in range(2)))


@pytest.mark.parametrize(
    "form, D, N, bounds, start",
    [
        *(
            ("exact", D, 16, [0, 1, 1, 16, 31, 47, 64, 64, 163], True) for D in (8488, 8489)
        ),  # wide blocks with ragged widths
        *(("diagonal", 72, N, [0, 1, 1, 300, 1500, 1600], False) for N in (32, 100)),
    ],
)
def test_packed_in_wide_blocks_or_with_more_states_is_bit_identical_to_alone(
    form, D, N, bounds, start
):
    a, dout, dfinal = inputs(
        1, bounds[-1], D, N, form, dtype=BF16, sequences=len(bounds) - 1, key_scale=2 * N**-0.5
    )
    assert_packed_as_alone(a, dout, dfinal, form, bounds, start=start)


@pytest.mark.parametrize(
    "form, N",
    [
        *(("diagonal", N) for N in (3, 17, 64, 100)),
        *((form, N) for form in OWN_RATES for N in (3, 32, 40)),
    ],
)
def test_parity_with_more_states(form, N):
    "Results are right with one segment and several, ragged in time and channels."
    shapes = [(2, 100, 72, N), (1, 1100, 40, N)]
    if form == "diagonal":
        shapes.append((2, 100, 69, N))
    for shape in shapes:
        results = errors(*shape, form, dtype=BF16, key_scale=2 * N**-0.5)
        assert_close(results, BF16)
    results = errors(2, 43, 40, N, form, dtype=FP32, key_scale=2 * N**-0.5)
    assert_close(results, FP32, factor=2)


@pytest.mark.parametrize("form", FORMS)
def test_accuracy_within_is_that_of_float32(form):
    """The products of split tiles lose less than 1e-4, with bfloat16 only in keys and queries."""
    a, dout, dfinal = inputs(2, 200, 64, 16, form)
    a["q"] = a["q"].bfloat16()
    a["k"] = a["k"].bfloat16()
    results = off(kernels(a, dout, dfinal, form), oracle(a, dout, dfinal, form))
    others = {n: e for n, e in results.items() if n not in "qk"}
    assert_close(others, FP32, factor=5)


@pytest.mark.parametrize("D", (2048, 2044))
def test_wide_programs_of_the_diagonal_forward_have_the_same_bits(D):
    a, _, _ = inputs(33, 37, D, 16, "diagonal", dtype=BF16)
    wide, usual = (
        triton_diagonal.diagonal_plan(33, 37, D, 16, wide=wide) for wide in (True, False)
    )
    assert wide.BD == 128
    assert usual.BD == 32
    rest = [a[n] for n in ("q", "k", "x", "b", "b_bias", "D_skip", "z", "initial_state")]
    twice = torch.cat((a["z"], a["z"]), -1)
    strided = twice[..., D:]  # a larger row stride than x, so no wide programs
    gates = ((wide, a["z"]), (usual, a["z"]), (wide, strided))
    runs = [
        triton_diagonal.diagonal_forward(plan, *rest[:6], z, rest[7], None) for plan, z in gates
    ]
    for run in runs[1:]:
        for first, other in zip(runs[0], run):
            assert torch.equal(first, other)


@pytest.mark.parametrize("D", (64, 63))
@pytest.mark.parametrize("form", FORMS)
def test_scalar_rate_and_strided_inputs(form, D):
    assert_close(errors(2, 50, D, 16, form, dtype=BF16, scalar=True), BF16)
    a, dout, dfinal = inputs(2, 50, D, 16, form, dtype=BF16)
    x_and_z = torch.cat([a["x"], a["z"]], -1)
    time_last = a["b"].transpose(1, 2).contiguous()
    k_and_q = torch.cat([a["k"], a["q"]], -1)
    wide = dict(
        a, x=x_and_z[..., :D], z=x_and_z[..., D:], b=time_last.transpose(1, 2), k=k_and_q[..., :16]
    )
    assert_same_bits(*(kernels(v, dout, dfinal, form) for v in (a, wide)))


@pytest.mark.parametrize(
    "form, D, dtype",
    [
        *((form, *kind) for form in FORMS[:2] for kind in ((72, BF16), (69, FP32))),
        ("decoupled", 72, BF16),
        ("s6", 69, FP32),
        ("s6_time_varying", 69, BF16),
    ],
)
def test_packed_agrees_and_is_bit_identical_to_alone(form, D, dtype):
    bounds = [0, 1, 1, 300, 333, 600, 1240]
    assert_close(errors(1, 1240, D, 16, form, bounds=bounds, dtype=dtype), dtype)
    a, dout, dfinal = inputs(1, 1240, D, 16, form, dtype=dtype, sequences=6)
    assert_packed_as_alone(a, dout, dfinal, form, bounds)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_repeat_bit_for_bit(form):
    a, dout, dfinal = inputs(2, 600, 200, 16, form, dtype=BF16)
    assert_same_bits(*(kernels(a, dout, dfinal, form) for _ in range(2)))


@pytest.mark.parametrize("B, D", ((2, 40), (5, 2040)))
@pytest.mark.parametrize("form", FORMS)
def test_what_lies_around_its_memory_does_not_matter(form, B, D, monkeypatch):
    a, dout, dfinal = inputs(B, 43, D, 13, form, dtype=BF16)
    want = kernels(a, dout, dfinal, form)
    poisoned(monkeypatch)
    inside = {n: within(a[n], 8) for n in ("x", "b", "z")}
    got = kernels({**a, **inside}, dout, dfinal, form)
    assert_same_bits(got, want)


@pytest.mark.parametrize("scale", (0.0, 1e-3, 6.0, 1e3))
@pytest.mark.parametrize("form", FORMS)
def test_key_scales_and_extreme_logits(form, scale):
    a, dout, dfinal = inputs(2, 96, 40, 16, form, dtype=BF16)
    a["k"] = (a["k"] * scale).bfloat16()
    a["b"][:, ::7] = 80.0
    a["b"][:, 1::7] = -80.0
    a["z"][:, ::5] = 100.0
    a["z"][:, 1::5] = -100.0
    got = kernels(a, dout, dfinal, form)
    want = oracle(a, dout, dfinal, form)
    assert error(got[0], want[0]) < 6e-3
    assert error(got[1], want[1]) < 6e-3
    assert not beyond(got[2], want[2], 2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_logit_that_is_no_number_shows_in_its_channel_alone(form):
    t, d = 37, 5
    a, dout, dfinal = inputs(2, 83, 72, 16, form, dtype=BF16)
    right = kernels(a, dout, dfinal, form)
    others = [c for c in range(72) if c != d]
    logits = a["b"].clone()
    bias = a["b_bias"].clone()
    logits[0, t, d] = bias[d] = float("nan")
    for wrong in (dict(b=logits), dict(b_bias=bias)):
        out, final, grads = kernels({**a, **wrong}, dout, dfinal, form)
        later = out[0, t:, d]
        assert later.isnan().all()
        state = final[0, d]
        assert state.isnan().all()
        gradient = grads["initial_state"][0, d]
        assert gradient.isnan().all()
        assert all(grads[n][0, t, d].isnan() for n in "xb")
        assert grads["b_bias"][d].isnan()
        assert_channels_are_equal((out, final, grads), right, others)


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_that_is_no_number_stays_out_of_the_state(form):
    a, dout, dfinal = inputs(2, 83, 72, 16, form, dtype=BF16)
    a["z"][0, 37, 5] = float("nan")
    out, final, grads = kernels(a, dout, dfinal, form)
    assert out[0, 37, 5].isnan()
    assert out.isnan().sum() == 1
    assert final.isfinite().all()
    assert grads["z"][0, 37, 5].isnan()


@pytest.mark.parametrize("form", FORMS)
def test_one_key_repeated(form):
    a, dout, dfinal = inputs(1, 512, 64, 16, form, dtype=BF16)
    for scale in (0.25, 1.0, 4.0):
        keys = torch.ones_like(a["k"]) * scale
        noise = torch.randn_like(a["k"]) * 0.05 * scale
        a["k"] = (keys + noise).bfloat16()
        got = kernels(a, dout, dfinal, form)
        want = oracle(a, dout, dfinal, form)
        assert error(got[0], want[0]) < 6e-3
        assert error(got[1], want[1]) < 1e-3
        for n in want[2]:
            assert error(got[2][n], want[2][n]) < 2e-2, scale


@pytest.mark.parametrize("form", FORMS[:2])
def test_offsets_beyond_two_to_the_31(form):
    torch.manual_seed(0)
    B, T, D, N = 1, 1_100_000, 2048, 16

    def new(*s):
        return torch.randn(*s, device=DEVICE, dtype=BF16)

    q = new(B, T, N)
    k = new(B, T, N) / 2
    b_of_step = new(B, 1, D)
    b = b_of_step.expand(B, T, D).contiguous()
    x_of_step = new(B, 1, D)
    x = x_of_step.expand(B, T, D).contiguous()
    with torch.no_grad():
        out, final = triton_op.triton_scan(q, k, x, b, form=form)
        tail = 2048  # the state forgets, so a scan of the last steps agrees with the full scan
        short, last = triton_op.triton_scan(
            q[:, -tail:], k[:, -tail:], x[:, -tail:], b[:, -tail:], form=form
        )
    result = out[:, -64:]
    expected = short[:, -64:]
    assert error(result, expected) < 6e-3
    assert error(final, last) < 1e-3


@pytest.mark.parametrize("form", FORMS[:2])
def test_backward_offsets_beyond_two_to_the_31(form):
    """Scan 2.15 billion elements.

    x, b, out and gradients have 4 GiB each, states 16, and parts of the keys' gradients 8."""
    assert_ends_agree(1, 2**20 + 2048, 2048, 16, gib=48, near=64, margin=1024, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_batch_strides_beyond_two_to_the_31(form):
    """The second batch row may be 2^31 elements after the first.

    The inputs are parts of one wide tensor of 4 GiB, most of which is unused."""
    B = 2
    T = 600
    D = 64
    far = 2**31
    a, dout, dfinal = inputs(B, T, D, 16, form, dtype=BF16)
    want = kernels(a, dout, dfinal, form)
    memory = torch.empty(far + T * 4 * D, device=DEVICE, dtype=BF16)
    wide = memory.as_strided((B, T, 4 * D), (far, 4 * D, 1))
    values = (a["x"], a["b"], a["z"], dout)
    parts = [part.copy_(t) for part, t in zip(wide.split(D, -1), values)]
    for part in parts:
        assert part.stride() == (far, 4 * D, 1)
    moved = {**a, **dict(zip("xbz", parts))}
    got = kernels(moved, parts[3], dfinal, form)
    results = off(got, want)
    assert max(results.values()) < 1e-3, results


@pytest.mark.parametrize("D", (64, 2044, 33))
@pytest.mark.parametrize("form", FORMS)
def test_tensors_that_begin_anywhere(form, D):
    """Contiguous inputs need not start at a multiple of 16 bytes.

    Examples are a packed batch without its first token, and a view into a flat buffer."""
    a, dout, dfinal = inputs(1, 50, D, 16, form, dtype=BF16)
    want = kernels(a, dout, dfinal, form)

    def moved(t):
        flat = torch.empty(t.numel() + 1, device=DEVICE, dtype=t.dtype)
        moved_view = flat[1:].view(t.shape)
        return moved_view.copy_(t)

    shifted = {n: moved(a[n]) for n in ("q", "k", "x", "b", "z", "initial_state")}
    assert all(t.is_contiguous() and t.data_ptr() % 16 for t in shifted.values())
    got = kernels({**a, **shifted}, moved(dout), moved(dfinal), form)
    assert_same_bits(got, want)


def test_an_unknown_triton_is_tried_form_by_form_and_never_while_a_graph_records(monkeypatch):
    x = torch.zeros(1, device=DEVICE)

    def works(record=False):
        triton_op.fast_kernels_work.cache_clear()
        triton_op._portable_instead.cache_clear()

        def ask():
            return [
                triton_op.fast_kernels_work(0, form, wide)
                for form in ("diagonal", "exact")
                for wide in (False, True)
            ]

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if record:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    ask(), x.add_(1)
            verdicts = ask()
            messages = " ".join(str(w.message) for w in said)
            return verdicts, messages, len(said)

    monkeypatch.setattr(triton_op, "KNOWN_TRITON", ("0.0",))
    expected = ([True] * 4, "", 0)
    assert works() == expected
    trusted, why, count = works(record=True)  # and the verdict is kept after the capture
    assert trusted == [False] * 4
    assert count == 2
    assert "call one scan of form 'exact' before" in why
    with monkeypatch.context() as broken:
        broken.setattr(triton_op, "exact_forward", lambda *a: 1 / 0)
        trusted, why, count = works()
        assert trusted == [True, True, False, False]
        assert count == 1
        assert "ZeroDivisionError" in why
    right = triton_diagonal._own_and_carry
    with monkeypatch.context() as broken:  # as if each segment started from a zero state
        broken.setattr(triton_diagonal, "_own_and_carry", lambda *a: torch.zeros_like(right(*a)))
        trusted, why, count = works()
        assert trusted == [False, False, True, True]
        assert count == 1
        assert "'diagonal' are wrong" in why
    monkeypatch.undo()
    assert all(works()[0])


def test_what_goes_to_the_portable_kernels_is_warned_of_once_a_reason():
    triton_op._portable_instead.cache_clear()

    def new(*s):
        return torch.zeros(1, 3, *s, device=DEVICE, dtype=BF16)

    cases = (
        ("exact", new(16).half(), new(8)),
        ("s6", new(65), new(8)),
        ("s6_time_varying", new(65), new(8)),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for form, k, x in cases:
                assert triton_op.scan_path(form, k, k, x) == "portable"
            path = triton_op.scan_path("exact", new(16), new(16), new(8))
            assert path == "exact"
    said = [str(w.message) for w in caught]
    assert len(said) == len(set(said)) == len(cases)
    for line in said:
        assert "the portable scan kernels run" in line
