"""Compare the portable Triton kernels with a float64 loop.

A small part runs in the interpreter on a CPU; all tests run on a GPU."""

from itertools import product

import pytest
import torch

from longhorn_kit.scan.op import longhorn_scan, selective_scan
from longhorn_kit.scan.triton import op as triton_op
from longhorn_kit.scan.triton import portable as triton_portable
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
from sweep import slow_case

FORMS = ("diagonal", "exact", "decoupled", "s6", "s6_given", "s6_time_varying")
small = pytest.mark.skipif(
    DEVICE == "cuda", reason="the tests marked cuda check the same at larger sizes"
)


@pytest.fixture(autouse=True)
def portable_only(monkeypatch):
    "Use the portable kernels, even where faster kernels would be chosen."
    monkeypatch.setattr(triton_op, "FAST", False, raising=False)


@pytest.fixture
def segments(monkeypatch):
    monkeypatch.setattr(triton_portable, "SEGMENT", 8)


@small
@pytest.mark.parametrize("form", FORMS)
def test_every_form_with_odd_sizes_states_and_gate(form):
    assert_close(errors(1, 9, 3, 3, form))


@small
@pytest.mark.parametrize("form", ("diagonal", "s6"))
def test_segments_of_time_change_nothing(form, segments):
    assert_close(errors(2, 19, 3, 2, form))


@small
def test_packed_sequences_with_empty_ones(segments):
    assert_close(errors(1, 21, 2, 2, "diagonal", bounds=[0, 0, 3, 20, 21]))


@small
def test_packed_is_bit_identical_to_alone(segments):
    a, dout, dfinal = inputs(1, 20, 2, 3, "diagonal", sequences=2)
    assert_packed_as_alone(a, dout, dfinal, "diagonal", [0, 11, 20])


def test_scalar_rate_strided_inputs_and_many_states():
    a, dout, dfinal = inputs(2, 5, 33, 20, "exact", scalar=True, z=False)
    wide = dict(a)
    for name in ("q", "k", "x"):
        twice = torch.stack([a[name], a[name]], -1)
        wide[name] = twice[..., 0]
    time_first = a["b"].transpose(0, 1).contiguous()
    wide["b"] = time_first.transpose(0, 1)
    assert_same_bits(*(kernels(v, dout, dfinal, "exact", checkpoint=4) for v in (a, wide)))
    assert_close(errors(1, 5, 33, 20, "exact", scalar=True, z=False, options=dict(checkpoint=4)))


@small
def test_bfloat16_inputs():
    assert_close(errors(1, 6, 3, 4, "diagonal", dtype=torch.bfloat16), torch.bfloat16)


@small
@pytest.mark.parametrize("N", (1, 24, 100, 128))
def test_any_number_of_states_from_1_to_128(N):
    assert_close(errors(1, 2, 2, N, "diagonal", z=False, key_scale=N**-0.5))


@pytest.mark.parametrize("T", (0, 1))
def test_empty_and_single_step_sequences(T):
    assert_close(errors(1, T, 2, 2, "diagonal"))


def test_optional_arguments_left_out():
    assert_close(errors(1, 3, 2, 2, "exact", z=False, state=False, bias=False, skip=False))


@pytest.mark.parametrize("form", ("diagonal", "exact", "decoupled"))
def test_extremes_are_right(form):
    a, dout, dfinal = inputs(1, 12, 3, 4, form)
    a["k"][0, :4] *= torch.tensor([[0.0], [1e3], [1e-3], [30.0]], device=DEVICE)
    a["b"][0, :7] = torch.tensor([80.0, -80.0, 500.0, 1.0, 0.0, -95.0, -60.0], device=DEVICE)[
        :, None
    ]
    a["z"][0, 0] = 100.0
    a["z"][0, 1] = -100.0
    out, final, grads = kernels(a, dout, dfinal, form)
    out_, final_, grads_ = oracle(a, dout, dfinal, form)
    assert not beyond(
        dict(out=out, final=final, **grads), dict(out=out_, final=final_, **grads_), 1e-5
    )


@pytest.mark.parametrize(
    "form",
    [
        "diagonal",
        "exact",
        *(slow_case(form) for form in FORMS if form not in ("diagonal", "exact")),
    ],
)
def test_a_logit_that_is_no_number_shows_in_its_channel_alone(form):
    a, dout, dfinal = inputs(1, 9, 3, 3, form)
    right = kernels(a, dout, dfinal, form)
    a["b"][0, 4, 1] = float("nan")
    out, final, grads = kernels(a, dout, dfinal, form)
    assert out[0, 4:, 1].isnan().all()
    assert final[0, 1].isnan().all()
    assert all(grads[n][0, 4, 1].isnan() for n in "xb")
    assert grads["b_bias"][1].isnan()
    assert grads["initial_state"][0, 1].isnan().all()
    others = torch.tensor([0, 2], device=DEVICE)
    assert_channels_are_equal((out, final, grads), right, others)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(b=(1, 3, 5)), r"b has shape \(1, 3, 5\); expected \(1, 3, 2\) or \(1, 3, 1\)"),
        (dict(form="full"), "form is 'full'"),
        (dict(x=torch.float64), "float32, bfloat16 and float16, not float64"),
        (dict(checkpoint=5), "checkpoint is 5"),
        (dict(q=(1, 3, 129), k=(1, 3, 129)), "1 to 128 coordinates, but q has 129"),
        (dict(A=(3, 3)), "A has shape"),
        (dict(cu_seqlens=torch.zeros(2)), "cu_seqlens is torch.float32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    a = {n: t for n, t in inputs(1, 3, 2, 2, state=False)[0].items() if n in "qkxb"}
    for name, value in change.items():
        if isinstance(value, tuple):
            value = torch.zeros(value, device=DEVICE)
        if isinstance(value, torch.dtype):
            value = a[name].to(value)
        a[name] = value
    if "A" in a:
        a["dt"] = a.pop("b")
    with pytest.raises(ValueError, match=message):
        (selective_scan if "A" in a else longhorn_scan)(**a, backend="triton")


# ---- all cases, on a GPU. Each kernel is compiled for its options and sizes, which takes seconds.
# So float16 has one shape, bfloat16 has all shapes, and float32 is used if arguments are omitted.
FULL = (2, 67, 40, 16)
SHAPES = [
    (1, 300, 129, 16),
    (3, 33, 31, 5),
    (2, 50, 96, 64),
    (1, 40, 64, 128),
    (1, 40, 33, 100),
    (2, 41, 70, 32),
    (1, 17, 1, 1),
]


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_gpu_parity_in_float16(form):
    result = errors(*FULL, form, dtype=torch.float16)
    assert_close(result, torch.float16)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "form, shape",
    [
        *product(("diagonal", "exact", "s6"), SHAPES),
        *product(("decoupled", "s6_time_varying"), SHAPES[::2]),
    ],
)
def test_gpu_parity_at_every_shape(form, shape):
    result = errors(*shape, form, dtype=torch.bfloat16)
    assert_close(result, torch.bfloat16)


@pytest.mark.cuda
@pytest.mark.parametrize("left_out", ("z", "state", "bias", "skip"))
@pytest.mark.parametrize("form", ("decoupled", "s6"))
def test_gpu_parts_left_out(form, left_out):
    assert_close(errors(*FULL, form, **{left_out: False}))


@pytest.mark.cuda
@pytest.mark.parametrize("every", (4, 64))
@pytest.mark.parametrize("form", FORMS)
def test_gpu_checkpoint_spacing(form, every):
    assert_close(errors(2, 150, 65, 16, form, options=dict(checkpoint=every), scalar=True, z=False))


@pytest.mark.cuda
@pytest.mark.parametrize("form", ("diagonal", "exact"))
def test_gpu_checkpoint_spacing_with_many_states(form):
    assert_close(errors(2, 300, 65, 40, form, options=dict(checkpoint="small")))


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_gpu_packed(form):
    bounds = [0, 1, 1, 300, 333, 1200]
    dtype = torch.bfloat16
    a, dout, dfinal = inputs(1, 1200, 72, 16, form, dtype=dtype, sequences=5)
    packed = assert_packed_as_alone(a, dout, dfinal, form, bounds)
    assert_close(off(packed, oracle(a, dout, dfinal, form, bounds)), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_gpu_gradients_repeat_bit_for_bit(form):
    a, dout, dfinal = inputs(2, 600, 200, 16, form, dtype=torch.bfloat16)
    assert_same_bits(*(kernels(a, dout, dfinal, form) for _ in range(2)))


@pytest.mark.cuda
@pytest.mark.parametrize("form", ("exact", "s6"))
def test_gpu_ignores_what_lies_around_its_memory(form, monkeypatch):
    "Results are right if buffers start as NaN and inputs are windows into tensors of NaN."
    poisoned(monkeypatch)
    a, dout, dfinal = inputs(2, 43, 37, 13, form)
    inside = {n: within(t) for n, t in a.items() if t is not None and n != "A"}
    got = kernels({**a, **inside}, dout, dfinal, form)
    monkeypatch.undo()
    want = kernels(a, dout, dfinal, form)  # other kernels: equal except for rounding
    assert error(got[0], want[0]) < 1e-6
    assert error(got[1], want[1]) < 1e-6
    for n in want[2]:
        assert error(got[2][n], want[2][n]) < 1e-5


@pytest.mark.cuda
def test_gpu_offsets_beyond_two_to_the_31():
    """Scan 2.25 billion elements.

    x, out and their gradients have 4.2 GiB each. Gradients of logits and checkpoints are in
    float32, with 2 to 4 times as many bytes."""
    assert_ends_agree(
        1, 1_100_000, 2048, 4, gib=50, near=64, margin=512, scalar=True, checkpoint="small"
    )
