"""No output depends on a later step, on a packed neighbour, or on padding after a text."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan.matrix import matrix_scan
from longhorn_kit.scan.op import FORMS, longhorn_scan
from longhorn_kit.scan.triton import op as triton_op
from matrix_cases import CASES, draw
from scan_cases import DEVICE
from sweep import slow_case

pytestmark = pytest.mark.numeric

GPU = DEVICE == "cuda"
BF16 = torch.bfloat16
FP32 = torch.float32
INPUTS = ("q", "k", "x", "b", "z")
# contents of a step: other numbers, numbers whose products overflow, the largest number, NaN
CONTENTS = ("random", "large", "huge", "inf", "-inf", "nan")


def make(B, T, D, N, dtype=FP32, gate=True, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def new(*s):
        drawn = torch.randn(*s, generator=gen)
        return drawn.to(DEVICE)

    a = dict(q=new(B, T, N), k=new(B, T, N) / 2, x=new(B, T, D), b=new(B, T, D))
    a["z"] = new(B, T, D) if gate else None
    a = {n: t if t is None else t.to(dtype) for n, t in a.items()}
    return a | dict(b_bias=new(D), D_skip=new(D))


def fill(t, content, seed=0):
    "Replace contents of `t` in place."
    gen = torch.Generator().manual_seed(seed)
    drawn = torch.randn(t.shape, generator=gen)
    values = drawn.to(t)
    if content in ("large", "huge"):
        values = values.sign() * (4e18 if content == "large" else 3e38)
    elif content != "random":
        values = torch.full_like(t, float(content))
    t.copy_(values)


def spoiled(a, names, rows, content, seed=0):
    "Return arguments with other contents in some rows of some of them."
    a = {n: t if t is None else t.clone() for n, t in a.items()}
    for i, name in enumerate(names):
        if a[name] is not None:
            part = a[name][:, rows]
            fill(part, content, seed + i)
    return a


def same_bits(one, other):
    bits = one.contiguous().view(torch.uint8)
    other_bits = other.contiguous().view(torch.uint8)
    return torch.equal(bits, other_bits)


def assert_causal(scan, a, steps, inputs=(INPUTS,), contents=CONTENTS, seed=0):
    "Outputs before a step have the same bits for any inputs from this step on."
    want = scan(a)
    for at, content, names in product(steps, contents, inputs):
        got = scan(spoiled(a, names, slice(at, None), content, seed))
        before = got[:, :at]
        expected = want[:, :at]
        assert same_bits(before, expected), (names, at, content)


cases = st.tuples(
    st.lists(st.sampled_from(INPUTS), min_size=1, max_size=5, unique=True),
    st.sampled_from(CONTENTS),
    st.integers(0, 99),
)


@pytest.mark.skipif(GPU, reason="for the CPU's scans")
@pytest.mark.parametrize("N", (4, slow_case(16), 64))
@pytest.mark.parametrize("backend", ("chunked", "reference"))
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=cases, at=st.integers(0, 69), gate=st.booleans(), dtype=st.sampled_from((FP32, BF16)))
@example(
    case=(["k"], "nan", 0), at=20, gate=True, dtype=FP32
)  # these contents once changed earlier outputs of the chunk
@example(case=(["x"], "inf", 0), at=20, gate=False, dtype=FP32)
@example(case=(["b", "k"], "huge", 0), at=33, gate=True, dtype=BF16)
def test_later_steps_change_no_output(form, backend, N, case, at, gate, dtype):
    a = make(2, 70, 3, N, dtype, gate)
    assert_causal(
        lambda a: longhorn_scan(**a, form=form, backend=backend),
        a,
        [at],
        [case[0]],
        [case[1]],
        case[2],
    )


@pytest.mark.skipif(GPU, reason="for the CPU's scans")
@pytest.mark.parametrize("gate", (True, slow_case(False)))
@pytest.mark.parametrize("form", FORMS)
def test_later_steps_change_no_output_of_the_portable_kernels(form, gate):
    "The kernels of the interpreter are causal too."
    assert_causal(
        lambda a: longhorn_scan(**a, form=form, backend="triton"),
        make(1, 11, 3, 4, FP32, gate),
        [6],
    )


RULES = pytest.mark.parametrize("decay, delta, bonus", CASES)


@pytest.mark.skipif(GPU, reason="for the CPU's scans")
@RULES
@pytest.mark.parametrize("backend", ("chunked", "reference"))
def test_later_steps_change_no_output_of_a_matrix_scan(backend, decay, delta, bonus):
    a = draw(decay, delta, bonus, B=1, T=70, H=2, N=16, P=16, dtype=FP32)
    inputs = [name for name in a if name not in ("bonus", "initial_state")]

    def scan(a):
        return matrix_scan(**a, backend=backend)

    assert_causal(scan, a, (1, 20, 67), [inputs, *([name] for name in inputs)])


@pytest.mark.skipif(GPU, reason="for the CPU's scans")
@RULES
def test_later_steps_change_no_output_of_a_matrix_scan_that_a_transform_traces(decay, delta, bonus):
    "A scan that a transform traces is causal too; it cannot read values."
    a = draw(decay, delta, bonus, B=1, T=40, H=2, dtype=FP32)

    def scan(a):
        batch = {n: t[None] for n, t in a.items()}
        return torch.func.vmap(lambda a: matrix_scan(**a, backend="chunked"))(batch)[0]

    assert_causal(scan, a, (20,), (("k",), ("x",)))


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="for the CPU's scans")
@pytest.mark.parametrize("N", (4, 16, 64))
@pytest.mark.parametrize("form", FORMS)
def test_later_steps_change_no_output_compiled(form, N):
    "A scan that a compiler fuses with other operations is causal."
    torch._dynamo.reset()

    def step(a):
        return longhorn_scan(
            **{n: t if t is None else 2 * t for n, t in a.items()}, form=form, backend="chunked"
        ).sin()

    scan = torch.compile(step, fullgraph=True)
    for dtype, gate in product((FP32, BF16), (True, False)):
        a = make(2, 70, 3, N, dtype, gate)
        assert_causal(scan, a, (1, 20, 33, 64), (INPUTS, ("k",)))


@pytest.mark.cuda
@pytest.mark.parametrize("N", (4, 16, 64))
@pytest.mark.parametrize("dtype", (BF16, FP32))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ("fast", "portable"))
def test_gpu_later_steps_change_no_output(path, form, dtype, N, monkeypatch):
    """Kernels are causal at chunk borders and inside chunks, with or without gate and segments.

    The fast exact form takes keys in bfloat16."""
    monkeypatch.setattr(triton_op, "FAST", path == "fast")
    keys = BF16 if path == "fast" and form == "exact" else dtype
    scan = partial(longhorn_scan, form=form, backend="triton")
    sizes = ((40, 67), (2056, 35)) if dtype is BF16 else ((40, 67),)
    for (D, T), gate in product(sizes, (True, False)):
        a = make(2, T, D, N, dtype, gate)
        for name in ("q", "k"):
            a[name] = a[name].to(keys)
        changed = (INPUTS, ("k",), ("b",))
        assert_causal(lambda a: scan(**a), a, (1, 7, 16, 17, 31), changed)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_gpu_later_steps_change_no_output_of_another_segment(form):
    "A sequence with few channels, which is cut into segments of 256 steps, is causal."
    scan = partial(longhorn_scan, form=form, backend="triton")
    a = make(1, 600, 40, 16, BF16)
    assert_causal(lambda a: scan(**a), a, (255, 256, 300, 512))


BACKENDS = ("triton",) if GPU else ("chunked", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_earlier_outputs_by_later_inputs_are_zero(form, backend):
    for at in (1, 16, 20, 33):
        a = make(2, 70, 40, 16, BF16 if GPU else FP32)
        leaves = {n: a[n].requires_grad_() for n in INPUTS}
        out = longhorn_scan(**a, form=form, backend=backend)
        before = out[:, :at].float()
        loss = before.square().sum()
        tensors = list(leaves.values())
        grads = torch.autograd.grad(loss, tensors)
        for name, grad in zip(INPUTS, grads):
            later = grad[:, at:]
            assert later.eq(0).all(), (name, at)
            earlier = grad[:, :at]
            assert earlier.ne(0).any(), (name, at)


@pytest.mark.skipif(GPU, reason="for the CPU's scans")
@RULES
def test_gradients_of_earlier_outputs_of_a_matrix_scan(decay, delta, bonus):
    """Gradients of outputs by later inputs are zero, and those by earlier inputs do not change.

    This also holds if the product of an early query and a later key overflows."""
    a = draw(decay, delta, bonus, B=1, T=70, H=2, dtype=FP32)
    a["q"][:, :36] *= 1e10

    def gradients(a, at):
        leaves = {n: t.requires_grad_() for n, t in a.items()}
        out = matrix_scan(**leaves, backend="chunked")
        loss = out[:, :at].sum()
        tensors = list(leaves.values())
        grads = torch.autograd.grad(loss, tensors)
        return dict(zip(leaves, grads))

    for at in (16, 20, 33):
        want = gradients(a, at)
        other = {n: t.detach().clone() for n, t in a.items()}
        other["k"][:, 40] *= 1 if delta else 1e30  # the delta rule would square it
        got = gradients(other, at)
        for name in set(a) - {"bonus", "initial_state"}:
            later = want[name][:, at:]
            assert later.eq(0).all(), (name, at)
            earlier = want[name][:, :at]
            assert earlier.ne(0).any(), (name, at)
            assert same_bits(got[name], want[name]), (name, at)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_neighbours_in_a_packed_batch_change_nothing(form, backend):
    "Results and gradients of a sequence do not depend on the sequences before and after it."
    bounds = [0, 5, 25, 25, 70]
    a = make(1, 70, 40, 16, BF16 if GPU else FP32)
    packing = dict(cu_seqlens=torch.tensor(bounds, device=DEVICE), output_final_state=True)
    scan = partial(longhorn_scan, form=form, backend=backend, **packing)

    def run(a, rows):
        leaves = {n: a[n].detach().requires_grad_() for n in INPUTS}
        out, final = scan(**(a | leaves))
        squares = out[:, rows].float().square()
        loss = squares.sum()
        tensors = list(leaves.values())
        grads = torch.autograd.grad(loss, tensors)
        parts = [g[:, rows] for g in grads]
        return out.detach()[:, rows], final.detach(), parts

    pairs = zip(bounds, bounds[1:])
    for i, (lo, hi) in enumerate(pairs):
        out, final, grads = run(a, slice(lo, hi))
        for content in CONTENTS:
            others = spoiled(a, INPUTS, slice(0, lo), content)
            others = spoiled(others, INPUTS, slice(hi, None), content, seed=9)
            other_out, other_final, other_grads = run(others, slice(lo, hi))
            assert same_bits(other_out, out), (i, content)
            assert same_bits(other_final[i], final[i]), (i, content)
            # a zero gradient times NaN is NaN, in any neighbour
            if content == "random":
                assert all(map(same_bits, other_grads, grads)), i


@pytest.mark.parametrize(
    "name, options",
    [
        ("longhorn", {}),
        ("longhorn_exact", {}),
        ("longhorn_decoupled", {}),
        ("longhorn_scalar", {}),
        ("longhorn", dict(key_norm=True)),
        ("longhorn_exact", dict(key_norm=True)),
    ],
)
def test_padding_behind_a_text_changes_no_output_of_a_layer(name, options):
    torch.manual_seed(0)
    layer = build_mixer(name, 24, **options).to(DEVICE)
    u = torch.randn(3, 70, 24, device=DEVICE)
    for autocast in (nullcontext(), torch.autocast(DEVICE, dtype=BF16)):
        with torch.no_grad(), autocast:
            want = layer(u)
            for at, content in product((1, 17, 20, 64), CONTENTS):
                padded = u.clone()
                behind = padded[:, at:]
                fill(behind, content)
                before = layer(padded)[:, :at]
                expected = want[:, :at]
                assert same_bits(before, expected), (at, content)
