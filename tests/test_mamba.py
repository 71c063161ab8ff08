"""Compare Mamba's functions with float64 definitions for all sizes, options, layouts, dtypes."""

import gc
import importlib
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from longhorn_kit import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_inner_fn,
    selective_scan_fn,
    selective_state_update,
)
from longhorn_kit.compat import mend_torchvision
from longhorn_kit.scan import mamba
from longhorn_kit.scan.mamba import causal_conv1d_varlen_states, patch_mamba
from rounding import bound, error

pytestmark = pytest.mark.numeric

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
FULL = torch.float64


def drawer(seed=0):
    gen = torch.Generator().manual_seed(seed)
    return lambda *s, dtype=torch.float32: torch.randn(*s, generator=gen).to(DEVICE, dtype)


def softplus(v):
    zero = torch.zeros((), dtype=v.dtype, device=v.device)
    return torch.logaddexp(v, zero)


def scan_by_definition(u, delta, A, B, C, D, z, bias, use_softplus):
    "Compute h' = exp(Delta A) h + Delta B u, y = C h + D u, gated by z, on tensors (B,D,N,L)."
    batch, width, L = u.shape
    N = A.shape[1]
    step = delta if bias is None else delta + bias[:, None]
    step = softplus(step) if use_softplus else step

    def wide(M):
        if M.dim() == 2:
            return M[None, :, :, None].expand(batch, width, N, L)
        M = M if M.dim() == 4 else M[:, None]
        heads = width // M.shape[1]
        copies = M[:, :, None].expand(-1, -1, heads, -1, -1)
        return copies.reshape(batch, width, N, L)

    h = torch.zeros(batch, width, N, dtype=u.dtype, device=u.device)
    ys = []
    B = wide(B)
    C = wide(C)
    for t in range(L):
        step_t = step[:, :, t, None]
        u_t = u[:, :, t, None]
        decay = torch.exp(step_t * A)
        write = step_t * B[..., t] * u_t
        h = decay * h + write
        read = C[..., t] * h
        ys.append(read.sum(-1))
    y = torch.stack(ys, -1)
    if D is not None:
        y = y + D[:, None] * u
    if z is not None:
        y = y * z / (1 + torch.exp(-z))
    return y, h


def conv_by_definition(x, weight, bias, seq_idx, past, activation):
    "Compute y_t = sum of w_j x_(t-W+1+j), over inputs of the same sequence."
    W = weight.shape[1]
    L = x.shape[2]
    if past is None:
        past = torch.zeros(*x.shape[:2], W - 1, dtype=x.dtype, device=x.device)
    whole = torch.cat([past, x], -1)
    y = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    for j in range(W):
        shifted = whole[..., j : j + L]
        tap = weight[:, j, None] * shifted
        if seq_idx is not None:
            padded = F.pad(seq_idx, (W - 1, 0), value=-1)
            source = padded[:, j : j + L]
            same = source == seq_idx
            tap = tap * same[:, None]
        y = y + tap
    y = y / (1 + torch.exp(-y)) if activation else y
    y = y if seq_idx is None else y * (seq_idx >= 0)[:, None]
    return y, whole[..., L:]


def compare(function, definition, tensors, tolerance, layout="rows"):
    "Compare all outputs and gradients of `function` with the definition in float64."

    def leaf(t, dtype):
        t = t.detach().to(dtype)
        t = t.mT.contiguous().mT if layout == "rows" and t.dim() == 3 else t.clone()
        return t.requires_grad_()

    def everything(run, dtype):
        leaves = [None if t is None else leaf(t, dtype or t.dtype) for t in tensors]
        outputs = run(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = drawer(9)
        loss = sum((o.double() * weights(*o.shape).double()).sum() for o in outputs)
        learned = [t for t in leaves if t is not None]
        gradients = torch.autograd.grad(loss, learned)
        return [*outputs, *gradients]

    results = everything(function, None)
    expected = everything(definition, FULL)
    errors = [error(a, b) for a, b in zip(results, expected)]
    assert max(errors) < tolerance, errors


def scan_case(
    batch=2,
    width=6,
    N=8,
    L=19,
    kinds=("shared", "shared"),
    dtype=torch.float32,
    D=True,
    z=True,
    bias=True,
):
    new = drawer(L * 10 + N)

    def shape(kind):
        return dict(shared=(batch, N, L), constant=(width, N)).get(kind) or (batch, int(kind), N, L)

    def like(kind):
        return dtype if kind != "constant" else max(dtype, torch.float32, key=lambda d: d.itemsize)

    wide = max(dtype, torch.float32, key=lambda d: d.itemsize)
    u = new(batch, width, L, dtype=dtype)
    delta = new(batch, width, L, dtype=dtype) / 2
    generator = torch.Generator().manual_seed(1)
    rates = -0.5 * torch.rand(width, N, generator=generator)
    A = rates.to(DEVICE, wide)
    B, C = (new(*shape(kind), dtype=like(kind)) for kind in kinds)
    return [
        u,
        delta,
        A,
        B,
        C,
        new(width, dtype=wide) if D else None,
        new(batch, width, L, dtype=dtype) if z else None,
        new(width, dtype=wide) / 2 if bias else None,
    ]


def check_scan(case, layout="rows", given=False):
    if given:  # most step sizes are positive
        case[1] = case[1].abs()
        case[7] = None if case[7] is None else case[7] / 4
    compare(
        lambda *t: selective_scan_fn(*t, delta_softplus=not given, return_last_state=True),
        lambda *t: scan_by_definition(*t, not given),
        case,
        TOLERANCE[case[0].dtype],
        layout,
    )


LENGTHS = (128, 256, 512, 1024, 2048, 4096) if DEVICE == "cuda" else (1, 2, 8, 33, 130)


@pytest.mark.parametrize("layout", ("rows", "time"))
@pytest.mark.parametrize("groups", ("shared", "1", "2"))
@pytest.mark.parametrize("L", LENGTHS)
def test_scan_over_lengths_and_groups(L, groups, layout):
    check_scan(scan_case(width=4, L=L, kinds=(groups, groups)), layout)


@pytest.mark.parametrize("D, z, bias, given", [*itertools.product((True, False), repeat=4)])
def test_scan_with_every_option(D, z, bias, given):
    check_scan(scan_case(D=D, z=z, bias=bias), given=given)


@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("kinds", [*itertools.product(("constant", "shared", "3"), repeat=2)])
def test_scan_with_constant_and_grouped_keys(kinds, given):
    check_scan(scan_case(kinds=kinds, L=11), given=given)


@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width, N", ((72, 16), (33, 5)))
def test_scan_in_every_dtype(width, N, dtype, given):
    for layout in ("rows", "time"):
        check_scan(scan_case(width=width, N=N, L=21, dtype=dtype), layout, given)


def test_outputs_are_views_of_rows_and_gradients_have_the_layout_of_the_inputs():
    new = drawer()
    for order in ("rows", "time"):
        wide = new(2, 11, 16).mT if order == "rows" else new(2, 16, 11)
        both = wide.requires_grad_()
        x, z = both.chunk(2, 1)
        out, last = selective_scan_fn(
            x,
            x,
            -torch.ones(8, 4, device=DEVICE),
            new(2, 4, 11),
            new(2, 4, 11),
            z=z,
            return_last_state=True,
        )
        y = causal_conv1d_fn(x, new(8, 4))
        assert out.shape == y.shape == (2, 8, 11)
        assert last.shape == (2, 8, 4)
        assert out.mT.is_contiguous()
        assert y.mT.is_contiguous()
        total = out.sum() + y.sum()
        for grad in torch.autograd.grad(total, (x, z)):
            assert DEVICE == "cpu" or grad.is_contiguous() == (order == "time")


@pytest.mark.parametrize("layout", ("rows", "time"))
@pytest.mark.parametrize(
    "bias, states, activation",
    [*itertools.product((True, False), (True, False), (None, "silu", "swish"))],
)
@pytest.mark.parametrize("width", (2, 3, 4))
@pytest.mark.parametrize("L", (1, 2, 8, 33, 151) if DEVICE == "cpu" else (1, 8, 130, 1134, 4096))
def test_convolution(L, width, bias, states, activation, layout):
    new = drawer(L)
    case = [
        new(2, 24, L),
        new(24, width),
        new(24) if bias else None,
        new(2, 24, width - 1) if states else None,
    ]
    compare(
        lambda x, w, b, s: causal_conv1d_fn(x, w, b, None, s, states, None, activation),
        lambda x, w, b, s: conv_by_definition(x, w, b, None, s, activation)[: 1 + states],
        case,
        3e-5,
        layout,
    )


@pytest.mark.parametrize("activation", (None, "silu"))
@pytest.mark.parametrize("width", (2, 3, 4))
def test_convolution_keeps_sequences_apart(width, activation):
    "Return sequences of many lengths in any order, one in two rows, with padding at the end."
    seq_idx = torch.tensor(
        [[3, 3, 3, 0, 1, 1, 5, 5, 5, 5, -1, -1], [5, 5, 2, 2, 2, 2, 2, 7, 9, 9, 9, 9]],
        device=DEVICE,
        dtype=torch.int32,
    )
    new = drawer()
    compare(
        lambda x, w, b: causal_conv1d_fn(x, w, b, seq_idx, activation=activation),
        lambda x, w, b: conv_by_definition(x, w, b, seq_idx, None, activation)[0],
        [new(2, 8, 12), new(8, width), new(8)],
        3e-5,
    )


@pytest.mark.parametrize("activation", (None, "silu"))
@pytest.mark.parametrize("width", (2, 4))
def test_states_belong_to_the_first_and_the_last_sequence_of_each_row(width, activation):
    """Convolve each row's sequences separately; only the first uses the initial state.

    Return outputs, final states and gradients."""
    rows = [[3, 3, 3, 0, 1, 1, 5, 5], [5, 2, 2, 2, 2, 2, 2, 7], [4] * 8]
    seq_idx = torch.tensor(rows, device=DEVICE, dtype=torch.int32)
    cuts = [(3, 4, 6), (1, 7), ()]

    def run_by_run(x, w, b, past):
        outputs = []
        finals = []
        for row, ends in enumerate(cuts):
            state = past[row : row + 1]
            parts = []
            row_of_x = x[row : row + 1]
            for part in row_of_x.tensor_split(ends, 2):
                y, final = conv_by_definition(part, w, b, None, state, activation)
                parts.append(y)
                state = torch.zeros_like(state)
            outputs.append(torch.cat(parts, 2))
            finals.append(final)
        return torch.cat(outputs), torch.cat(finals)

    new = drawer()
    tensors = [new(3, 8, 8), new(8, width), new(8), new(3, 8, width - 1)]

    def conv(x, w, b, past, final=False):
        return causal_conv1d_fn(x, w, b, seq_idx, past, final, activation=activation)

    compare(lambda *t: conv(*t, final=True), run_by_run, tensors, 3e-5)
    compare(conv, lambda *t: run_by_run(*t)[0], tensors, 3e-5)
    *inputs, past = tensors
    buffer = torch.zeros_like(past)
    out, final = causal_conv1d_fn(*inputs, seq_idx, past, True, buffer)
    assert final is buffer
    _, expected = causal_conv1d_fn(*inputs, seq_idx, past, True)
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("state_len", (0, 1, 3, 20))
def test_states_of_packed_sequences(state_len, dtype):
    "Compare with a loop: sequences shorter than the state, an empty sequence, and no tokens."
    x = drawer()(9, 5, dtype=dtype)
    for bounds in ((0, 2, 2, 9), (0, 9), (0, 0)):
        n_tokens = bounds[-1]
        tokens = x[:n_tokens].requires_grad_()
        states = causal_conv1d_varlen_states(
            tokens, torch.tensor(bounds, device=DEVICE, dtype=torch.int32), state_len
        )
        expected = (len(bounds) - 1, 5, state_len)
        assert states.shape == expected
        assert states.dtype == dtype
        for state, lo, hi in zip(states, bounds, bounds[1:]):
            first = max(lo, hi - state_len)
            kept = tokens[first:hi].T
            missing = state_len - kept.shape[1]
            expected = F.pad(kept, (missing, 0))
            assert torch.equal(state, expected)


def test_final_states_are_written():
    new = drawer()
    x = new(2, 8, 7)
    buffer = torch.zeros(2, 8, 3, device=DEVICE)
    out, final = causal_conv1d_fn(x, new(8, 4), return_final_states=True, final_states_out=buffer)
    assert final is buffer
    expected = x[..., -3:]
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("indexed", (False, True))
@pytest.mark.parametrize("S", (None, 1, 4, 5))
@pytest.mark.parametrize("width, M", ((2, 1), (3, 4), (4, 3), (4, 12)))
def test_convolution_update(width, M, S, indexed):
    "Update rows of a pool, with more tokens than places, and with a padded row."
    new = drawer(M)
    B = 5
    D = 8
    x = new(B, D, S or 1)
    pool = new(9, D, M)
    weight = new(D, width)
    bias = new(D)
    rows = [7, 2, -1, 0, 5] if indexed else range(B)
    want = pool.clone()
    expected = torch.zeros(B, D, S or 1, device=DEVICE, dtype=FULL)
    for i, row in enumerate(rows):
        if row >= 0:
            channels = pool[row]
            line = torch.cat([channels, x[i]], -1)
            state = line[:, M + 1 - width : M]
            past, full = (t.double()[None] for t in (state, x[i]))
            expected[i] = conv_by_definition(
                full, weight.double(), bias.double(), None, past, "silu"
            )[0][0]
            want[row] = line[:, -M:]
    state = pool if indexed else pool[:B]
    y = causal_conv1d_update(
        x[..., 0] if S is None else x,
        state,
        weight,
        bias,
        "silu",
        None,
        torch.tensor(rows, device=DEVICE) if indexed else None,
    )
    one_token = x[..., 0] if S is None else x
    expected_shape = one_token.shape
    assert y.shape == expected_shape
    result = y.reshape(expected.shape)
    assert error(result, expected) < 3e-6
    assert torch.equal(pool, want)


@pytest.mark.parametrize("rows", (None, [2, -1]))
@pytest.mark.parametrize("M", (3, 5))
def test_convolution_update_without_tokens_changes_nothing(M, rows):
    new = drawer(M)
    pool = new(4 if rows else 2, 8, M)
    before = pool.clone()
    slots = rows and torch.tensor(rows, device=DEVICE)
    y = causal_conv1d_update(new(2, 8, 0), pool, new(8, 4), conv_state_indices=slots)
    assert y.shape == (2, 8, 0)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "groups, tied", ((None, False), (1, False), (1, True), (2, False), (4, True))
)
@pytest.mark.parametrize(
    "indexed, z, given", ((False, True, False), (True, False, False), (True, True, True))
)
def test_state_update(groups, tied, indexed, z, given, dtype):
    new = drawer(3)
    B = 4
    H = 4
    P = 8
    N = 16
    lead = (H * P,) if groups is None else (H, P)

    def full(*s):
        return new(*s[:-1], 1).expand(*s) if tied else new(*s)

    state = new(11, *lead, N, dtype=dtype)
    x = new(B, *lead, dtype=dtype)
    drawn = full(B, *lead)
    dt = drawn.to(dtype).expand(B, *lead)
    if tied:
        sizes = new(H, 1, 1).abs() + 0.5
        A = -sizes.expand(H, P, N)
    else:
        A = -new(*lead, N).abs() - 0.5
    keys, queries = (new(B, N) if groups is None else new(B, groups, N) for _ in "BC")
    D = new(*lead)
    bias = full(*lead) - 2
    gate = new(B, *lead, dtype=dtype) if z else None
    if given:
        dt = dt.abs()
        bias = bias.abs() / 4
    rows = torch.tensor([9, 0, -1, 4], device=DEVICE, dtype=torch.int32) if indexed else None
    slots = [9, 0, 3, 4] if indexed else list(range(B))
    real = [0, 1, 3] if indexed else [0, 1, 2, 3]
    pool = state.clone() if indexed else state[:B].clone()
    out = selective_state_update(pool, x, dt, A, keys, queries, D, gate, bias, not given, rows)
    step = dt.double() + bias.double()
    step = step if given else softplus(step)
    y, h = step_by_definition(state[slots], x, step, A, keys, queries, D, gate)
    assert out.dtype == dtype
    assert error(out[real], y[real]) < TOLERANCE[dtype]
    kept = pool[[slots[i] for i in real]]
    assert error(kept, h[real]) < TOLERANCE[dtype]
    if indexed:
        untouched = [i for i in range(11) if i not in (9, 0, 4)]
        assert not out[2].any()
        assert torch.equal(pool[untouched], state[untouched])


def step_by_definition(h, x, step, A, B, C, D, z):
    "Return y and the next state of one float64 step; h (B,D,N) or, with heads, (B,H,P,N)."
    batch, *lead, N = h.shape
    groups = B.shape[1] if B.dim() == 3 else 1
    x = x.double()

    def wide(M):
        M = M.double().reshape(batch, groups, 1, N)
        repeats = math.prod(lead) // groups
        return M.expand(-1, -1, repeats, -1).reshape(h.shape)

    step = step[..., None]
    decay = torch.exp(step * A.double())
    write = step * wide(B) * x[..., None]
    h = decay * h.double() + write
    read = (h * wide(C)).sum(-1)
    skip = D.double() * x
    y = read + skip
    if z is not None:
        y = y * z.double() * torch.sigmoid(z.double())
    return y, h


def inner_by_definition(xz, cw, cb, xp, dp, ow, ob, A, D, bias, Bb, Cb, Bw, Cw, dw, B=None, C=None):
    x, z = xz.chunk(2, 1)
    x, _ = conv_by_definition(x, cw[:, 0], cb, None, None, "silu")

    def normed(t, w):
        return t if w is None else t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    columns = x.mT @ xp.T
    R = dp.shape[1]
    N = A.shape[1]
    if B is None:
        keys = columns[..., R : R + N]
        biased = keys if Bb is None else keys + Bb
        B = normed(biased, Bw).mT
    if C is None:
        queries = columns[..., -N:]
        biased = queries if Cb is None else queries + Cb
        C = normed(biased, Cw).mT
    projected = columns[..., :R] @ dp.T
    delta = normed(projected, dw).mT
    y, _ = scan_by_definition(x, delta, A, B, C, D, z, bias, True)
    out = y.mT @ ow.T
    return out if ob is None else out + ob


@pytest.mark.parametrize("level", (0, 1))
@pytest.mark.parametrize(
    "extras", ("none", "biases", "norms", "constant B", "constant C", "constant both")
)
def test_inner_function(extras, level):
    new = drawer(4)
    B = 2
    D = 12
    L = 17
    N = 8
    R = 3
    E = 5
    from_x = {"constant B": 1, "constant C": 1, "constant both": 0}.get(extras, 2)

    def only(condition, *shape):
        return new(*shape) if condition else None

    biases = extras == "biases"
    norms = extras == "norms"
    xz = new(B, 2 * D, L)
    conv = (new(D, 1, 3), only(biases, D))
    projections = (new(R + from_x * N, D), new(D, R), new(E, D), only(biases, E))
    scan = (-new(D, N).exp(), new(D), new(D))
    key_biases = (only(biases, N), only(biases, N))
    key_norms = (only(norms, N), only(norms, N))
    step_norm = only(norms, D)
    constant_B = only(extras in ("constant B", "constant both"), D, N)
    constant_C = only(extras in ("constant C", "constant both"), D, N)
    constants = (constant_B, constant_C)
    case = [xz, *conv, *projections, *scan, *key_biases, *key_norms, step_norm, *constants]

    def by_kit(xz, cw, cb, xp, dp, ow, ob, A, D, bias, Bb, Cb, Bw, Cw, dw, B, C):
        return mamba_inner_fn(
            xz, cw, cb, xp, dp, ow, ob, A, B, C, D, bias, Bb, Cb, True, level, Bw, Cw, dw
        )

    compare(by_kit, inner_by_definition, case, 1e-4)


@pytest.mark.skipif(DEVICE != "cpu", reason="float64 on one device is enough")
def test_inner_function_normalizes_in_float64():
    new = partial(drawer(4), dtype=torch.float64)
    xz = new(2, 24, 17)
    conv = (new(12, 1, 3), None)
    projections = (new(3 + 16, 12), new(12, 3), new(5, 12), None)
    A = -new(12, 8).exp()
    norms = (new(8), new(8), new(12))
    names = ("b_rms_weight", "c_rms_weight", "dt_rms_weight")
    options = dict(zip(names, norms))
    result = mamba_inner_fn(xz, *conv, *projections, A, **options)
    no_options = (None, None, None, None)  # D and biases
    expected = inner_by_definition(xz, *conv, *projections, A, *no_options, *norms)
    assert_close(result, expected, atol=1e-12, rtol=1e-12)


def inner_arguments(new):
    "Return the arguments of `mamba_inner_fn` without options."
    return [
        new(2, 128, 40),
        new(64, 1, 4),
        None,
        new(4 + 8, 64),
        new(64, 4),
        new(32, 64),
        None,
        -torch.ones(64, 4, device=DEVICE),
    ]


@pytest.mark.parametrize("level", (0, 1))
def test_level_1_computes_the_convolution_and_the_step_sizes_again(level, monkeypatch):
    new = drawer()
    calls = []

    def counted(*args, **options):
        calls.append(torch.is_grad_enabled())
        return causal_conv1d_fn(*args, **options)

    monkeypatch.setattr(mamba, "causal_conv1d_fn", counted)
    args = inner_arguments(new)
    out = mamba_inner_fn(
        *[t if t is None else t.requires_grad_() for t in args], checkpoint_lvl=level
    )
    assert calls == [True]
    out.sum().backward()
    expected = [True, False][: 1 + level]
    assert calls == expected


@pytest.mark.slow
def test_what_is_computed_again_notices_changes_and_leaves_nothing_behind():
    new = drawer()
    args = inner_arguments(new)
    args[1:] = (t if t is None else t.requires_grad_() for t in args[1:])

    def run(xz):
        y = mamba_inner_fn(xz, *args[1:])
        return y.square().sum()

    for changed in (args[1], args[3], args[4], args[7]):
        loss = run(args[0])
        with torch.no_grad():
            changed.mul_(1.5)
        with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
            loss.backward()

    def tensors():
        return gc.collect() and sum(isinstance(t, torch.Tensor) for t in gc.get_objects())

    alive = [[run(args[0]), gc.collect(), tensors()][-1] for _ in range(4)]  # no backward
    assert alive[1] == alive[3]
    plain = torch.autograd.grad(run(x := args[0].clone().requires_grad_()), x)[0]
    gradient = torch.func.grad(run)(args[0])
    assert error(gradient, plain) < 1e-3


def test_compilers_see_one_graph():
    new = drawer()
    args = (
        new(2, 12, 9),
        new(6, 1, 4),
        None,
        new(3 + 8, 6),
        new(6, 3),
        new(5, 6),
        None,
        -torch.ones(6, 4, device=DEVICE),
    )
    state = new(2, 6, 4)
    x = new(2, 6)
    keys = new(2, 4)
    for run in (
        lambda: mamba_inner_fn(*args),
        lambda: selective_state_update(state.clone(), x, x, args[-1], keys, keys, dt_softplus=True),
    ):
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        # sums of 6, 3, 4 and 6 terms and 9 steps, which a compiler may reorder
        limit = bound(torch.float32, 6 + 3 + 4 + 6 + 9)
        assert error(compiled(), run()) < limit


def scan_mistakes():
    new = drawer()
    u = new(2, 6, 9)
    A = -torch.ones(6, 4, device=DEVICE)
    keys = new(2, 4, 9)

    def scan(delta=u, A=A, B=keys, C=keys, **options):
        return selective_scan_fn(u, delta, A, B, C, **options)

    yield "A is torch.complex64; only real rates", lambda: scan(A=A.to(torch.complex64))
    yield ("delta has shape (2, 6, 8); expected (2, 6, 9) to match u", lambda: scan(u[..., 1:]))
    yield (
        "B has shape (2, 3, 9); expected (6, 4) or (2, 4, 9) or (2, G, 4, 9)",
        lambda: scan(B=keys[:, 1:]),
    )
    yield ("C has 4 groups; expected a divisor of the 6 channels", lambda: scan(C=new(2, 4, 4, 9)))
    yield "z has shape (2, 9, 6)", lambda: scan(z=u.mT)
    yield "D is list; expected a tensor", lambda: scan(D=[1.0])


def conv_mistakes():
    new = drawer()
    x = new(2, 6, 9)
    w = new(6, 4)
    now = new(2, 6)
    idx = torch.tensor([[0, 0, 1, 0, 0, 0, 2, 2, 2]] * 2, device=DEVICE)

    def conv(x=x, w=w, **options):
        return causal_conv1d_fn(x, w, **options)

    yield "x has shape (2, 6); expected (B, D, L)", lambda: conv(now)
    yield (
        "activation is 'gelu'; expected one of 'silu', 'swish', None",
        lambda: conv(activation="gelu"),
    )
    yield (
        "initial_states has shape (2, 6, 2); expected (2, 6, 3) to match x and weight",
        lambda: conv(seq_idx=idx, initial_states=new(2, 6, 2)),
    )
    yield (
        "weight is str; expected a tensor of shape (6, W) or (6, 1, W) to match x",
        lambda: conv(w="w", seq_idx=idx),
    )
    yield "weight is str; expected a tensor of shape (6, W)", lambda: conv(w="w")
    yield (
        "seq_idx is torch.int64 (2, 8); expected integers (2, 9)",
        lambda: conv(seq_idx=idx[:, 1:]),
    )
    yield "seq_idx is of type list (); expected integers (2, 9)", lambda: conv(seq_idx=[0])
    yield "seq_idx returns to a sequence within 2 tokens", lambda: conv(seq_idx=idx)
    yield (
        "state_len is -1; expected an integer of at least 0",
        lambda: causal_conv1d_varlen_states(x[0], torch.tensor([0, 6], device=DEVICE), -1),
    )
    yield (
        "cu_seqlens ends at 5; expected 6, the length of x",
        lambda: causal_conv1d_varlen_states(x[0], torch.tensor([0, 5], device=DEVICE), 3),
    )


def conv_update_mistakes():
    new = drawer()
    now = new(2, 6)
    w = new(6, 4)
    slots = torch.zeros(9, dtype=torch.int64, device=DEVICE)

    def update(x=now, state=None, w=w, **options):
        return causal_conv1d_update(x, new(2, 6, 3) if state is None else state, w, **options)

    yield "weight is str; expected a tensor of shape (6, W)", lambda: update(w="w")
    yield "weight has shape (6,); expected (6, W) or (6, 1, W)", lambda: update(w=w[:, 0])
    yield (
        "conv_state_indices is list; expected an int32 or int64",
        lambda: update(new(2, 6, 9), conv_state_indices=[0, 1]),
    )
    yield (
        "conv_state_indices has shape (9,)",
        lambda: update(state=new(2, 6, 5), conv_state_indices=slots),
    )
    yield (
        "conv_state keeps 2 inputs; filters of 4 taps need at least 3",
        lambda: update(state=new(2, 6, 2)),
    )
    yield (
        "cache_seqlens is given; a ring of inputs is not supported",
        lambda: update(cache_seqlens=slots[:2]),
    )
    yield (
        "elements share memory and cannot be updated in place",
        lambda: update(state=new(1, 6, 5).expand(3, -1, -1), conv_state_indices=slots[:2]),
    )


def state_update_mistakes():
    new = drawer()
    A = -torch.ones(6, 4, device=DEVICE)
    now = new(2, 6)
    state = new(2, 6, 4)
    keys = new(2, 4)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def step(state=state, x=now, dt=now, A=A, keys=keys, **options):
        return selective_state_update(state, x, dt, A, keys, keys, **options)

    def step_of_transposed_heads():
        inputs = new(2, 2, 3)
        state = new(2, 3, 2, 4).transpose(1, 2)
        rates = A.view(2, 3, 4)
        return step(state, inputs, inputs, rates)

    yield "A is torch.complex64; only real rates", lambda: step(A=A.to(torch.complex64))
    yield (
        "its elements share memory and cannot be updated in place",
        lambda: step(new(1, 6, 4).expand(3, -1, -1), state_batch_indices=slots),
    )
    yield "x has shape (2, 5); expected (B, 6) to match state", lambda: step(x=now[:, 1:])
    yield (
        "B has shape (2, 3); expected (2, 4) or (2, G, 4) to match state",
        lambda: step(keys=keys[:, 1:]),
    )
    yield (
        "B has shape (2, 5, 4) and C (2, 5, 4); expected equal numbers of groups",
        lambda: step(keys=new(2, 5, 4)),
    )
    yield "its heads must be adjacent in memory", step_of_transposed_heads


def inner_mistakes():
    new = drawer()
    u = new(2, 6, 9)
    A = -torch.ones(6, 4, device=DEVICE)
    xz = new(2, 12, 9)
    w = new(6, 4)

    def inner(x_proj, *rest):
        return mamba_inner_fn(xz, w, None, x_proj, new(6, 3), u, u, A, *rest)

    def inner_with(delta_proj):
        return mamba_inner_fn(xz, u, u, u, delta_proj, u, u, A)

    yield (
        "checkpoint_lvl is 2; expected one of 0, 1",
        lambda: mamba_inner_fn(*[u] * 7, A, checkpoint_lvl=2),
    )
    yield (
        "xz has shape (2, 6, 9); expected (B, 12, L) to match A",
        lambda: mamba_inner_fn(*[u] * 7, A),
    )
    yield (
        "A is NoneType; expected a tensor of shape (D, N)",
        lambda: mamba_inner_fn(*[u] * 7, None),
    )
    yield (
        "delta_proj_weight is NoneType; expected a tensor of shape (6, R)",
        lambda: inner_with(None),
    )
    yield (
        "delta_proj_weight has shape (1, 3); expected (6, R) to match A",
        lambda: inner_with(new(1, 3)),
    )
    yield ("x_proj_weight has shape (10, 6); expected (11, 6) to match", lambda: inner(new(10, 6)))
    yield (
        "x_proj_weight has shape (11, 6); expected (7, 6) to match",
        lambda: inner(new(11, 6), new(2, 4, 9)),
    )


MISTAKES = [
    *scan_mistakes(),
    *conv_mistakes(),
    *conv_update_mistakes(),
    *state_update_mistakes(),
    *inner_mistakes(),
    (
        "modeling is module torch; expected an imported module with Mamba's functions",
        lambda: patch_mamba(torch),
    ),
    (
        "modeling is str; expected an imported module with Mamba's functions",
        lambda: patch_mamba("transformers.models.mamba"),
    ),
]


@pytest.mark.parametrize("message, call", MISTAKES, ids=[message for message, _ in MISTAKES])
def test_mistakes_are_named(message, call):
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


JAMBA = dict(
    mamba_d_state=4,
    mamba_dt_rank=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
    attn_layer_offset=1,
    num_experts=2,
)


@pytest.mark.parametrize("filter", ("silu", "gelu", "relu"))
@pytest.mark.parametrize(
    "kind, options",
    (("mamba", dict(state_size=4)), ("falcon_mamba", dict(state_size=4)), ("jamba", JAMBA)),
)
def test_models_of_transformers_run_on_these_functions(kind, options, filter):
    "Logits, tokens and every gradient equal those of transformers' PyTorch path, with any filter."
    mend_torchvision()
    transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    name = kind.title().replace("_", "")
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, hidden_act=filter, **options
    )
    torch.manual_seed(0)
    make_model = getattr(transformers, f"{name}ForCausalLM")
    model = make_model(config).to(DEVICE)
    tokens = torch.randint(50, (2, 21), device=DEVICE)

    def everything():
        model.zero_grad()
        prompt = tokens[:, :7]
        text = model.eval().generate(prompt, max_new_tokens=9, do_sample=False)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        loss = model.train()(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        return text, logits, gradients

    before = everything()
    original = dict(vars(modeling))
    try:
        patch_mamba(modeling)
        assert modeling.causal_conv1d_fn.__wrapped__ is causal_conv1d_fn
        after = everything()
        modes = {module.training for module in model.modules()}
        assert modes == {True}
    finally:
        vars(modeling).update(original)
    assert torch.equal(before[0], after[0])
    assert error(after[1], before[1]) < 1e-5
    largest = max(error(after[2][n], g) for n, g in before[2].items())
    assert largest < 1e-4
