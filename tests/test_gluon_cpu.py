"""Run the fast kernels' source on a CPU: compare with float64, check the interpreter's errors."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longhorn_kit.scan.triton import diagonal as triton_diagonal
from longhorn_kit.scan.triton import exact as triton_exact
from longhorn_kit.scan.triton import exact_backward as triton_exact_backward
from longhorn_kit.scan.triton import portable_backward as triton_portable_backward
from longhorn_kit.scan.triton.gluon_cpu import gluon_on_cpu
from longhorn_kit.scan.triton.selective import selective_plan
from scan_cases import inputs, off, oracle
from sweep import slow_case

BF16 = torch.bfloat16
FP32 = torch.float32
ARGUMENTS = ("q", "k", "x", "b", "b_bias", "D_skip", "z", "A", "initial_state")


def collect(p, q, k, x, b, z, bias, skip, A, written, scalar):
    "Compute `_collect` in PyTorch, without a GPU and without Triton's interpreter."
    by_row = written.dtok.sum(0).view(*k.shape[:2], p.width, p.NP)
    by_token = by_row[..., : p.N]
    dk, dq, *dA_by_token = by_token.unbind(2)
    if written.drate is not None:
        rates = written.drate.sum(0).view(*k.shape[:2], 1)
        dk = 2 * (dk - k.float() * rates)
    dA = None
    if A is not None:
        dA = dA_by_token[0] if dA_by_token else written.dA.sum(0)[..., : p.N]
    return (
        dq,
        dk,
        written.dx,
        written.db.sum(-1, keepdim=True) if scalar else written.db,
        written.dbias.sum(0),
        written.dskip.sum(0),
        written.dz,
        dA,
        written.dinitial[..., : p.N],
    )


@pytest.fixture(autouse=True)
def collected_in_pytorch(monkeypatch):
    for module in (triton_diagonal, triton_exact_backward):
        monkeypatch.setattr(module, "_collect", collect)


@pytest.mark.parametrize("form", ("diagonal", "s6", "s6_time_varying"))
def test_sums_over_programs(form):
    "The kernels' sums agree with PyTorch's, even with states that only fill a block."
    B = 2
    T = 5
    D = 6
    N = 3
    slots = 70
    p = kernels(form)[0](B, T, D, N)
    new = torch.randn
    a = dict(
        q=new(B, T, N),
        k=new(B, T, N),
        x=new(B, T, D),
        b=new(B, T, D),
        z=None,
        bias=new(D).double(),
        skip=new(D),
        A=dict(s6=new(D, N), s6_time_varying=new(B, T, N)).get(form),
    )
    written = triton_portable_backward.KernelGradients(
        dx=new(B, T, D),
        db=new(B, T, D),
        dz=None,
        dtok=new(11, B * T, p.width * p.NP),
        dbias=new(slots, D),
        dskip=new(slots, D),
        dA=new(slots, D, p.NP) if form == "s6" else None,
        dinitial=new(B, D, p.NP),
        drate=new(11, B * T) if form == "diagonal" else None,
    )
    assert p.NP > N
    result = triton_portable_backward._collect(p, *a.values(), written, scalar=False)
    expected = collect(p, *a.values(), written, scalar=False)
    assert result[4].dtype == torch.float64
    for t in result:
        assert t is None or t.is_contiguous()
    assert_close(
        [t.float() for t in result if t is not None], [t for t in expected if t is not None]
    )


def kernels(form):
    "Return plan, forward and backward."
    if form in ("s6", "s6_given", "s6_time_varying", "decoupled"):
        return (
            partial(selective_plan, form),
            triton_diagonal.diagonal_forward,
            triton_diagonal.diagonal_backward,
        )
    if form == "exact":
        return (
            triton_exact.exact_plan,
            triton_exact.exact_forward,
            triton_exact_backward.exact_backward,
        )
    return (
        triton_diagonal.diagonal_plan,
        triton_diagonal.diagonal_forward,
        triton_diagonal.diagonal_backward,
    )


def scanned(form, a, dout, dfinal, bounds=None, **plan):
    "Return output, final state and gradients."
    make, forward, backward = kernels(form)
    N = a["q"].shape[2]
    sizes = (*a["x"].shape, N)
    given = [a[name] for name in ARGUMENTS[:7]]
    rest = {} if a["A"] is None else dict(A=a["A"])
    n, cu = (
        (None, None)
        if bounds is None
        else (len(bounds) - 1, torch.tensor(bounds, dtype=torch.int32))
    )
    with gluon_on_cpu():
        out, final, kept = forward(make(*sizes, n, **plan), *given, a["initial_state"], cu, **rest)
        grads = backward(
            make(*sizes, n, "backward", **plan), dout, dfinal, kept, *given, cu, **rest
        )
    return out, final, dict(zip(ARGUMENTS, grads))


def errors(form, B, T, D, N, bounds=None, dtype=BF16, scalar=False, **plan):
    made = inputs(
        B,
        T,
        D,
        N,
        form,
        dtype=dtype,
        scalar=scalar,
        sequences=None if bounds is None else len(bounds) - 1,
    )
    result = scanned(form, *made, bounds, **plan)
    expected = oracle(*made, form, bounds)
    return off(result, expected)


# lengths around the 8, 16 and 32 steps of the diagonal form's halves, chunks and segments
LENGTHS = [0, 0, 1, 8, 16, 25, 40, 56, 73, 97, 128, 160, 193]
# every form, every width of the state, segments, packed sequences, widths that are no multiple of a
# block
COVERING = [
    ("exact", dict(B=1, T=37, D=40, N=16)),
    ("exact", dict(B=1, T=37, D=40, N=64)),
    ("exact", dict(B=1, T=20, D=40, N=128)),
    ("exact", dict(B=2, T=3, D=1, N=1)),
    ("exact", dict(B=1, T=45, D=67, N=5, bounds=[0, 1, 16, 45], few=False)),
    ("diagonal", dict(B=1, T=21, D=136, N=16, wide=True)),
    ("diagonal", dict(B=2, T=37, D=33, N=16)),
    ("diagonal", dict(B=1, T=21, D=33, N=64, dtype=FP32)),
    ("diagonal", dict(B=1, T=40, D=8, N=128, dtype=FP32)),
    ("diagonal", dict(B=2, T=3, D=1, N=1, dtype=FP32)),
    (
        "diagonal",
        dict(B=1, T=61, D=67, N=16, dtype=FP32, segment=16, bounds=[0, 1, 16, 32, 32, 61]),
    ),
    ("s6", dict(B=1, T=21, D=40, N=64, dtype=FP32)),
    ("s6_given", dict(B=1, T=19, D=34, N=32, dtype=FP32, scalar=True)),
    ("s6_time_varying", dict(B=1, T=21, D=33, N=16)),
    ("decoupled", dict(B=2, T=48, D=40, N=16, dtype=FP32, segment=16)),
]
REST = [
    ("exact", dict(B=2, T=16, D=24, N=5)),
    ("exact", dict(B=1, T=61, D=40, N=16, bounds=[0, 1, 16, 32, 32, 61])),
    ("diagonal", dict(B=2, T=37, D=36, N=5, dtype=FP32)),
    ("s6_given", dict(B=1, T=21, D=33, N=16)),
    ("decoupled", dict(B=1, T=21, D=33, N=16)),
    ("exact", dict(B=1, T=20, D=72, N=16, few=False)),
    ("exact", dict(B=2, T=37, D=33, N=16)),
    ("exact", dict(B=1, T=20, D=7, N=64)),
    ("diagonal", dict(B=1, T=37, D=40, N=16)),
    ("diagonal", dict(B=2, T=48, D=40, N=16, dtype=FP32, segment=16)),
    ("diagonal", dict(B=1, T=21, D=40, N=64, dtype=FP32)),
    (
        "diagonal",
        dict(B=1, T=61, D=40, N=16, dtype=FP32, segment=16, bounds=[0, 1, 16, 32, 32, 61]),
    ),
    ("diagonal", dict(B=1, T=193, D=8, N=16, dtype=FP32, bounds=LENGTHS)),
    ("diagonal", dict(B=1, T=193, D=8, N=64, dtype=FP32, segment=32, bounds=LENGTHS)),
    ("diagonal", dict(B=1, T=40, D=32, N=16)),
    ("diagonal", dict(B=2, T=64, D=32, N=64, dtype=FP32)),
    ("diagonal", dict(B=1, T=96, D=32, N=64, segment=32)),
]
REST += [
    (form, dict(B=1, T=193, D=8, N=N, dtype=FP32, bounds=LENGTHS))
    for form in ("s6", "s6_time_varying", "decoupled")
    for N in (5, 40)
]
# widths that are no multiple of a block: what two blocks have in common counts once, wherever it
# starts in its vector of copies
REST += [
    ("exact", dict(B=2, T=33, N=16, few=False) | case)
    for case in (
        dict(D=40),
        dict(D=44),
        dict(D=47),
        dict(D=33),
        dict(D=72, N=64),
        dict(D=44, N=32, scalar=True),
        dict(B=1, D=47, T=97, bounds=[0, 0, 1, 16, 32, 49, 49, 97]),
        dict(B=1, D=72, T=97, bounds=[0, 0, 1, 16, 32, 49, 49, 97]),
    )
]
REST += [
    (form, case)
    for form in ("s6", "s6_given", "s6_time_varying", "decoupled")
    for case in (
        dict(B=1, T=37, D=40, N=16),
        dict(B=2, T=37, D=36, N=5, dtype=FP32),
        dict(B=2, T=48, D=40, N=16, dtype=FP32, segment=16),
        dict(B=1, T=21, D=40, N=64, dtype=FP32),
        dict(B=1, T=19, D=34, N=32, dtype=FP32, scalar=True),
        dict(B=1, T=61, D=40, N=16, dtype=FP32, segment=16, bounds=[0, 1, 16, 32, 32, 61]),
        dict(B=2, T=37, D=33, N=16),
    )
    if (form, case) not in COVERING
]


def named(form, case):
    return f"{form} {case}"


@pytest.mark.parametrize(
    "form, case",
    [
        *(pytest.param(*both, id=named(*both)) for both in COVERING),
        *(slow_case(*both, id=named(*both)) for both in REST),
    ],
)
def test_fast_kernels_are_right(form, case):
    results = errors(form, **case)
    in_bfloat16 = case.get("dtype", BF16) == BF16
    rounded = {"out", "x", "b", "z"} if in_bfloat16 else set()
    usual = 5e-5 if form == "exact" else 1e-6
    bad = {}
    for name, e in results.items():
        limit = 6e-3 if name in rounded else usual
        if not e < limit:
            bad[name] = e
    assert not bad


@pytest.mark.parametrize("form", ["exact", "diagonal", "decoupled", "s6", "s6_time_varying"])
def test_a_logit_that_is_no_number_shows_in_its_channel_alone(form):
    a, dout, _ = inputs(1, 20, 40, 16, form, dtype=BF16, state=False, bias=False, skip=False)
    a["b"][0, 5, 3] = float("nan")
    out, final, grads = scanned(form, a, dout, None)
    other = [d for d in range(40) if d != 3]
    later = out[0, 6:, 3]
    assert later.isnan().all()
    state = final[0, 3]
    assert state.isnan().all()
    gradient = grads["b"][0, 5, 3]
    assert gradient.isnan()
    others = out[0, :, other]
    assert not others.isnan().any()
    others = final[0, other]
    assert not others.isnan().any()
    for name in "xbz":
        others = grads[name][0, :, other]
        assert not others.isnan().any()


def cut(name, values, tokens, which):
    "Return an argument for some tokens and some sequences."
    if name in ("b_bias", "D_skip"):
        return values
    if name in ("initial_state", "dfinal"):
        return values[which].mT
    return values[:, tokens]


def exact_gradients(
    D, lengths, few=False, channels=slice(None), changed=lambda a: None, packed=False
):
    """Return the results of exact sequences of these lengths, packed or each alone.

    The kernels receive only some of the D channels."""
    gen = torch.Generator().manual_seed(0)

    def new(*s, like=BF16):
        drawn = torch.randn(*s, generator=gen)
        return drawn.to(like)

    T = sum(lengths)
    n = len(lengths)
    lengths_from_zero = torch.tensor([0, *lengths])
    bounds = lengths_from_zero.cumsum(0).tolist()
    a = dict(q=new(1, T, 16), k=new(1, T, 16) / 2) | {
        name: new(1, T, D) for name in ("x", "b", "z", "dout")
    }
    a |= dict(b_bias=new(D, like=FP32), D_skip=new(D, like=FP32))
    for name in ("initial_state", "dfinal"):
        a[name] = new(n, D, 16, like=FP32).mT  # channels in the last dimension
    changed(a)
    a = {name: t if name in "qk" else t[..., channels].contiguous() for name, t in a.items()}

    def run(tokens, which, bounds=None):
        t = {name: cut(name, values, tokens, which) for name, values in a.items()}
        return scanned("exact", t | {"A": None}, t["dout"], t["dfinal"], bounds, few=few)[2]

    if packed:
        return run(slice(None), slice(None), bounds)
    return [
        run(slice(*ends), slice(i, i + 1))
        for i, ends in enumerate(zip(bounds, bounds[1:]))
        if ends[0] < ends[1]
    ]


@pytest.mark.parametrize("D", (slow_case(40), slow_case(47)))
def test_a_packed_exact_sequence_has_the_bits_it_has_alone(D):
    lengths = [0, 1, 15, 16, 17, 0, 48, 33]
    packed = exact_gradients(D, lengths, packed=True)
    alone = exact_gradients(D, lengths)
    some = torch.tensor(lengths) > 0
    for name in ("q", "k", "x", "b", "z"):
        expected = torch.cat([one[name] for one in alone], 1)
        assert torch.equal(packed[name], expected), name
    assert torch.equal(
        packed["initial_state"][some], torch.cat([one["initial_state"] for one in alone])
    )
    for name in ("b_bias", "D_skip"):
        right = torch.zeros(len(lengths), D)
        right[some] = torch.stack([one[name] for one in alone])
        assert torch.equal(packed[name], right.sum(0)), name


@pytest.mark.parametrize("D, few", ((47, False), slow_case(40, False), slow_case(40, True)))
def test_channels_of_two_blocks_have_the_same_bits_in_both(D, few):
    "Compare the full width, whose last block starts early, with the first 32 channels."
    (whole,) = exact_gradients(D, [37], few)
    (part,) = exact_gradients(D, [37], few, slice(32))
    for name in ("x", "b", "z", "b_bias", "D_skip"):
        result = whole[name][..., :32]
        assert torch.equal(result, part[name])
    result = whole["initial_state"][:, :32]
    assert torch.equal(result, part["initial_state"])


@pytest.mark.parametrize("D", (slow_case(40), 47))
@pytest.mark.parametrize(
    "name, value",
    (
        ("x", float("nan")),
        slow_case("dout", float("inf")),
        slow_case("initial_state", float("nan")),
    ),
)
def test_what_is_no_number_spreads_from_a_channel_of_two_blocks_as_from_any(D, name, value):
    "Compare with a width of complete blocks, whose additional channels are zeros."

    def changed(a):
        for t in a.values():
            t[..., D:] = 0
        a[name][0, 5, 20] = value

    (ragged,) = exact_gradients(64, [37], channels=slice(D), changed=changed)
    (whole,) = exact_gradients(64, [37], changed=changed)
    for n in ARGUMENTS[:7]:
        right = whole[n] if n in "qk" else whole[n][..., :D]
        assert_close(ragged[n].float(), right.float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert ragged["q"].isnan().any()


@gluon.jit
def _copy_kernel(
    x_ptr, out_ptr, size, BLOCK: gl.constexpr, PENDING: gl.constexpr, MASK: gl.constexpr
):
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, LANES)
    shared = gl.allocate_shared_memory(gl.float32, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if MASK:
        async_copy.async_copy_global_to_shared(shared, x_ptr + i, mask=i < size)
    else:
        async_copy.async_copy_global_to_shared(shared, x_ptr + i)
    async_copy.commit_group()
    async_copy.wait_group(PENDING)
    gl.store(out_ptr + i, shared.load(LANES), mask=i < size)


@gluon.jit
def _unknown_kernel(x_ptr):
    gl.store(x_ptr, gl.erf(gl.load(x_ptr)))


@gluon.jit
def _two_layouts_kernel(x_ptr, out_ptr, STORED: gl.constexpr, READ: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    i = (
        gl.arange(0, 2, gl.SliceLayout(1, LANES))[:, None] * 4
        + gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    )
    shared = gl.allocate_shared_memory(
        gl.float32, [2, 4], gl.SharedLinearLayout(STORED), gl.load(x_ptr + i)
    )
    gl.store(
        out_ptr + i,
        shared._reinterpret(gl.float32, [2, 4], gl.SharedLinearLayout(READ)).load(LANES),
    )


def copied(pending=0, mask=True):
    x = torch.arange(50.0)
    out = torch.zeros(50)
    with gluon_on_cpu():
        _copy_kernel[(2,)](x, out, 50, BLOCK=32, PENDING=pending, MASK=mask, num_warps=1)
    return out


def test_a_copy_arrives_when_it_is_waited_for_and_a_place_outside_a_tensor_is_an_error():
    assert torch.equal(copied(), torch.arange(50.0))
    assert copied(pending=1).isnan().all()
    with pytest.raises(IndexError, match="program 1 accesses memory outside a tensor"):
        copied(mask=False)


def test_what_is_stored_in_one_layout_and_read_in_another_changes_places():
    def read(stored, then):
        x = torch.arange(8.0)
        out = torch.zeros(8)
        with gluon_on_cpu():
            _two_layouts_kernel[(1,)](x, out, stored, then, num_warps=1)
        return out.tolist()

    plain = [[0, 1], [0, 2], [1, 0]]
    up = [[0, 1], [0, 2], [1, 3]]
    assert read(plain, plain) == read(up, up) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert read(up, plain) == [0, 1, 2, 3, 7, 6, 5, 4]
    assert read(plain, [[1, 0], [0, 1], [0, 2]]) == [0, 2, 4, 6, 1, 3, 5, 7]
    with pytest.raises(ValueError, match="a separate position"):
        read(plain, [[0, 1], [0, 2], [0, 3]])


def test_an_operation_that_is_not_known_is_named():
    with gluon_on_cpu(), pytest.raises(AttributeError, match="gl.erf is not supported"):
        _unknown_kernel[(1,)](torch.zeros(1), num_warps=1)


def test_afterwards_kernels_are_compiled_again():
    run = gluon.jit(_copy_kernel.fn).run
    with gluon_on_cpu():
        assert _copy_kernel.run.__func__ is not run.__func__
    assert _copy_kernel.run.__func__ is run.__func__


@pytest.mark.parametrize("N", (16, slow_case(64)))
@pytest.mark.parametrize("form", ("exact", "diagonal", slow_case("decoupled")))
def test_later_steps_change_no_output(form, N):
    """Later steps affect no output in their chunk or before it, with a gate.

    A state computed without outputs has the same bits as with outputs."""
    a = inputs(1, 37, 40, N, form, dtype=BF16, state=False, bias=False, skip=False)[0]
    make, forward, _ = kernels(form)

    def run(a, **options):
        return forward(
            make(1, 37, 40, N), *(a[name] for name in ARGUMENTS[:7]), None, None, **options
        )

    with gluon_on_cpu():
        want, final, _ = run(a)
        for content in (float("nan"), float("inf"), 4e18):
            for name in ("k", "x", "b", "z"):
                changed = a[name].clone()
                changed[:, 20:] = content
                got = run(a | {name: changed})[0]
                result = got[:, :20]
                expected = want[:, :20]
                assert torch.equal(result, expected), (name, content)
        if form == "exact":
            assert torch.equal(run(a, read=False)[1], final)
