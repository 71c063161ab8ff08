"""Compare decode kernels with the reference, in place or not; prefill plus steps is one pass."""

import json
import os
import pathlib
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan.op import FORMS, longhorn_step, selective_step
from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.short_conv import causal_conv1d, causal_conv1d_step
from longhorn_kit.scan.triton import conv as triton_conv
from longhorn_kit.scan.triton import step as step_module
from longhorn_kit.scan.triton.step import triton_step
from rounding import bound
from scan_cases import DEVICE, captured, error

pytestmark = pytest.mark.numeric

RULES = (*FORMS, "s6", "s6_time_varying")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
BACKENDS = ("reference", "triton")


def inputs(B, D, N, rule="diagonal", T=1, dtype=torch.float32, scalar=False, seed=0):
    "Return arguments with a time axis of T steps, by name."
    gen = torch.Generator().manual_seed(seed)

    def new(*s):
        drawn = torch.randn(*s, generator=gen)
        return drawn.to(DEVICE)

    a = dict(q=new(B, T, N).to(dtype))
    k = new(B, T, N) / 2
    a["k"] = k.to(dtype)
    a["x"] = new(B, T, D).to(dtype)
    b = new(B, T, 1 if scalar else D)
    a["b"] = b.to(dtype)
    shapes = dict(s6=(D, N), s6_time_varying=(B, T, N))
    rates = shapes.get(rule)
    a["A"] = None if rates is None else -(new(*rates).abs() + 0.1)
    a["bias"] = new(D)
    a["skip"] = new(D)
    a["z"] = new(B, T, D).to(dtype)
    return a, new(B, D, N)


def at(a, t):
    "Return the arguments of one step."
    of_step = {n: a[n][:, t] for n in "qkxbz"}
    now = a | of_step
    if a["A"] is not None and a["A"].dim() == 3:
        now["A"] = a["A"][:, t : t + 1]
    return now


def reference(a, state, rule):
    "Return output and last state in float64."
    d = {n: None if t is None else t.double() for n, t in a.items()}
    rest = dict(D_skip=d["skip"], z=d["z"], initial_state=state.double())
    data = [d[n] for n in "qkxb"]
    if d["A"] is None:
        return reference_scan(*data, d["bias"], form=rule, **rest)
    return reference_selective_scan(*data, d["A"], d["bias"], **rest)


def assert_steps(B, D, N, rule, T=3, **made):
    "Run steps by the kernel, alternately into a new state and in place."
    a, first = inputs(B, D, N, rule, T, **made)
    want, last = reference(a, first, rule)
    state = first.clone()
    outs = []
    for t in range(T):
        kept = state.clone()
        out, after = triton_step(rule, **at(a, t), state=state, inplace=t % 2 == 1)
        assert (after is state) == (t % 2 == 1)
        assert t % 2 == 1 or torch.equal(state, kept)
        state = after
        outs.append(out)
    result = torch.stack(outs, 1)
    errors = error(result, want), error(state, last)
    assert out.dtype == a["x"].dtype
    assert state.dtype == torch.float32
    assert max(errors) < TOLERANCE[out.dtype], errors


@pytest.mark.parametrize(
    "B, D, N, rule, made",
    [
        *((2, 5, 3, rule, {}) for rule in RULES),
        (2, 5, 3, "diagonal", dict(scalar=True)),
        (2, 5, 3, "diagonal", dict(dtype=torch.bfloat16)),
        (1, 1, 1, "exact", dict(T=2)),
        (3, 37, 16, "exact", dict(T=2)),
        (1, 9, 128, "exact", dict(T=2)),
        (1, 70, 5, "exact", dict(T=2)),
        (0, 4, 2, "exact", dict(T=2)),
    ],
)
def test_every_rule_size_and_precision(B, D, N, rule, made):
    assert_steps(B, D, N, rule, **made)


def test_optional_arguments_left_out_and_strided_rows():
    a, state = inputs(2, 6, 4)
    now = {n: None if n in ("bias", "skip", "z") else t for n, t in at(a, 0).items()}
    want, last = reference(a | dict(bias=None, skip=None, z=None), state, "diagonal")
    wide = dict(now)
    twice = torch.stack([now["x"]] * 2, -1)
    wide["x"] = twice[..., 0]
    twice = torch.cat([now["k"]] * 2, -1)
    wide["k"] = twice[:, :4]
    strided_state = state.mT.contiguous().mT
    for given in (now, wide):
        out, after = triton_step("diagonal", **given, state=strided_state)
        expected = want[:, 0]
        assert error(out, expected) < 1e-6
        assert error(after, last) < 1e-6


def a_pool(*size, dtype, gaps):
    "Return seven contiguous states, adjacent in memory or from one of two layers."
    generator = torch.Generator().manual_seed(1)
    layers = torch.randn(7, 2 if gaps else 1, *size, generator=generator)
    converted = layers.to(DEVICE, dtype)
    return converted[:, -1]


def both_steps(backend, rule, now, weight, bias, states, pasts, rows, **options):
    "Run a step of the convolution and one of the scan, for some rows of the batch."
    x, z, q, k, b = [now[n][rows] for n in "xzqkb"]
    A = now["A"] if rule == "s6" or now["A"] is None else now["A"][rows]
    conv_backend = "torch" if backend == "reference" else backend
    conv = causal_conv1d_step(x, pasts, weight, bias, backend=conv_backend, **options)
    weights = (now["bias"], now["skip"], z)
    options["backend"] = backend
    if A is None:
        return conv, longhorn_step(q, k, x, b, states, *weights, form=rule, **options)
    return conv, selective_step(q, k, x, b, A, states, *weights, **options)


def assert_pool_steps(
    backend,
    rule,
    D=5,
    N=3,
    dtype=torch.float32,
    state=torch.float32,
    slots=(4, -1, 0, 7, 6),
    gaps=True,
    graph=False,
):
    """Steps by slot equal steps of separate rows; no other memory is read or written.

    The kernels treat all rows equally and give the same bits. PyTorch processes numbers in vectors,
    but the last numbers of a tensor one by one, and the two ways round sigmoid, silu and softplus
    differently."""
    dtype_of_slots = torch.int32 if gaps else torch.int64
    slots = torch.tensor(slots, device=DEVICE, dtype=dtype_of_slots)
    a, _ = inputs(len(slots), D, N, rule, dtype=dtype)
    now = at(a, 0)
    weight, c = torch.randn(2, D, 4, device=DEVICE)
    pool = a_pool(D, N, dtype=state, gaps=gaps)
    past = a_pool(D, 3, dtype=state, gaps=gaps)
    numbers = slots.tolist()
    real = [i for i, slot in enumerate(numbers) if 0 <= slot < 7]
    padding = [i for i in range(len(slots)) if i not in real]
    used = slots[real].long()
    unused = [slot for slot in range(7) if slot not in slots.tolist()]
    for n in "qkxbz":
        now[n][padding] = float("nan")
    run = partial(both_steps, backend, rule, now, weight, c[:, 0])
    (y, windows), (out, states) = run(pool[used], past[used], real)
    assert windows.dtype == states.dtype == state
    assert y.dtype == out.dtype == dtype
    past_before = past.clone()
    pool_before = pool.clone()

    def step():
        return run(pool, past, slice(None), inplace=True, state_indices=slots)

    if graph:
        recorded, outputs = captured(step)
        past.copy_(past_before)
        pool.copy_(pool_before)
        recorded.replay()
    else:
        outputs = step()
    conv, scan = outputs
    # sums of 4 taps and N products, and up to 8 functions of a number
    tolerance = None if backend == "triton" else bound(torch.float32, 4 + N + 8)
    for (result, same), given, before, value, after in (
        (conv, past, past_before, y, windows),
        (scan, pool, pool_before, out, states),
    ):
        expected = torch.zeros_like(result)
        expected[real] = value
        changed = before.clone()
        changed[used] = after
        assert same is given
        assert torch.equal(given[unused], before[unused])
        assert_near(result, expected, tolerance)
        assert_near(given, changed, tolerance)


def assert_near(result, expected, tolerance):
    "Compare bit for bit, or within a tolerance plus the rounding of the result to its dtype."
    if tolerance is None:
        assert torch.equal(result, expected)
    else:
        limit = tolerance + bound(result.dtype, 1)
        assert error(result, expected) < limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rule, options",
    [
        *((rule, {}) for rule in RULES),
        ("diagonal", dict(state=torch.bfloat16, dtype=torch.bfloat16)),
        ("exact", dict(state=torch.float16, gaps=False)),
        ("s6", dict(slots=(-1, -5, 2**30))),
        ("diagonal", dict(slots=(3,), D=40, N=17)),
    ],
)
def test_steps_by_slot(rule, options, backend):
    assert_pool_steps(backend, rule, **options)


def assert_conv_steps(
    B,
    T,
    D,
    W,
    inplace,
    dtype=torch.float32,
    bias=True,
    first=True,
    backend="auto",
    activation="silu",
):
    "Check that steps, in place if `inplace(t)`, equal the convolution."
    x = torch.randn(B, T, D, device=DEVICE).to(dtype)
    weight = torch.randn(D, W, device=DEVICE)
    c = torch.randn(D, device=DEVICE) if bias else None
    draw = torch.randn if first else torch.zeros
    state = draw(B, D, W - 1, device=DEVICE, dtype=dtype)
    states = dict(initial_state=state.clone(), output_final_state=True)
    scan_backend = "torch" if first else "auto"
    whole, last = causal_conv1d(x, weight, c, activation=activation, backend=scan_backend, **states)
    step = partial(causal_conv1d_step, activation=activation, backend=backend)
    for t in range(T):
        given = state.clone()
        token = x[:, t]
        y, after = step(token, state, weight, c, inplace=inplace(t))
        assert (after is state) == inplace(t)
        assert inplace(t) or torch.equal(state, given)
        assert_close(y, whole[:, t])
        state = after
    assert torch.equal(state, last)


@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize(
    "W, D, activation, bias",
    [(4, 5, "silu", True), (2, 3, None, False), (1, 3, "silu", True), (8, 40, "silu", True)],
)
def test_convolution_steps_equal_the_convolution(W, D, activation, bias, backend, inplace):
    assert_conv_steps(
        2, 6, D, W, activation=activation, bias=bias, backend=backend, inplace=lambda t: inplace
    )


def test_steps_learn_where_gradients_are_wanted():
    "On any device, the differentiable step is PyTorch's; steps without gradients raise an error."
    a, state = inputs(1, 3, 2)
    now = at(a, 0)
    args = [now[n].requires_grad_() for n in "qkxb"]
    out, after = longhorn_step(*args, state, now["bias"], now["skip"], now["z"])
    total = out.sum() + after.sum()
    grads = torch.autograd.grad(total, args)
    for g in grads:
        assert g is not None
    x = torch.randn(1, 3, device=DEVICE)
    past = torch.randn(1, 3, 3, device=DEVICE)
    weight = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    y, _ = causal_conv1d_step(x, past, weight)
    gradient = torch.autograd.grad(y.sum(), weight)[0]
    assert gradient.any()
    refusal = r"has no gradients; call it under torch.no_grad\(\)"
    for options in (dict(inplace=True), dict(backend="triton")):
        with pytest.raises(ValueError, match=refusal):
            longhorn_step(*args, state, **options)
        with pytest.raises(ValueError, match=refusal):
            causal_conv1d_step(x, past, weight, **options)
    with torch.no_grad():
        longhorn_step(*args, state, inplace=True)


def test_operations_are_well_formed():
    a, state = inputs(1, 3, 2, "s6")
    n = at(a, 0)
    args = ("s6", n["q"], n["k"], n["x"], n["b"], n["A"], state, n["bias"], n["skip"], n["z"])
    checks = ("test_schema", "test_faketensor")
    for op in (step_module._step, step_module._step_):
        torch.library.opcheck(op, args, test_utils=checks)
    slots = torch.tensor([-1], device=DEVICE)
    arguments = (*args, slots)
    torch.library.opcheck(step_module._step_, arguments, test_utils=checks)
    past = torch.randn(1, 3, 3, device=DEVICE)
    weight = torch.randn(3, 4, device=DEVICE)
    conv = (n["x"], past, weight, None, True)
    for op in (triton_conv._step, triton_conv._step_):
        torch.library.opcheck(op, conv, test_utils=checks)


@pytest.mark.parametrize("slots", (None, [2], [-1]))
def test_compiles_without_graph_breaks(slots):
    a, state = inputs(1, 3, 2)
    n = at(a, 0)
    slots = None if slots is None else torch.tensor(slots, device=DEVICE)
    pool = state if slots is None else state.repeat(3, 1, 1)
    weight = torch.randn(3, 3, device=DEVICE)
    options = dict(inplace=True, state_indices=slots, backend="triton")

    def two_steps(state, past):
        for _ in range(2):
            x, past = causal_conv1d_step(n["x"], past, weight, **options)
            out, state = longhorn_step(
                n["q"], n["k"], x, n["b"], state, n["bias"], n["skip"], n["z"], **options
            )
        return out

    states = (pool.clone(), pool.clone())
    eager_states = (pool.clone(), pool.clone())
    out = torch.compile(two_steps, fullgraph=True, backend="aot_eager")(*states)
    assert torch.equal(out, two_steps(*eager_states))
    assert all(map(torch.equal, states, eager_states))
    only_padding = slots is not None and int(slots) < 0
    for state in states:
        assert torch.equal(state, pool) == only_padding


@pytest.mark.parametrize(
    "name, options",
    [
        ("longhorn", {}),
        ("longhorn_exact", {}),
        ("longhorn_decoupled", {}),
        ("longhorn_scalar", {}),
        ("mamba", {}),
        ("mamba_input_a", {}),
        ("longhorn_exact", dict(key_norm=True)),
    ],
)
def test_a_layer_steps_in_place(name, options):
    torch.manual_seed(0)
    layer = build_mixer(name, 16, **options).to(DEVICE)
    h = torch.randn(2, 12, 16, device=DEVICE)
    with torch.no_grad():
        whole = layer(h)
        start = h[:, :7]
        _, cache = layer.prefill(start)
        held = [t.data_ptr() for t in cache]
        for t in range(7, 12):
            token = h[:, t]
            y, same = layer.step(token, cache, inplace=True)
            assert_close(y, whole[:, t], atol=1e-5, rtol=1e-5)
        assert same is cache
        assert held == [t.data_ptr() for t in cache]


@pytest.mark.parametrize("state_dtype", (None, torch.bfloat16))
@pytest.mark.parametrize(
    "name, options",
    [("longhorn", {}), ("longhorn", dict(key_norm=True)), ("mamba", {}), ("mamba_input_a", {})],
)
def test_a_layer_serves_from_a_pool(name, options, state_dtype):
    "Sequences enter and leave a pool between steps without affecting other sequences."
    torch.manual_seed(0)
    layer = build_mixer(name, 16, **options).to(DEVICE)
    h = torch.randn(3, 6, 16, device=DEVICE)
    pool = layer.empty_cache(4, state_dtype=state_dtype)
    alone = [layer.empty_cache(1, state_dtype=state_dtype) for _ in h]
    assert pool.S.dtype == (state_dtype or torch.float32)
    plan = [{0: 2}, {0: 2, 1: 3}, {1: 3, 2: 0}, {2: 0}, {0: 2, 1: 3, 2: 0}]  # sequence: slot
    tolerance = 1e-2 if state_dtype else 1e-5
    with torch.no_grad():
        for t, slots in enumerate(plan):
            rows = [*slots, 0]  # the last row is padding
            x = torch.stack([h[i, t] for i in rows])
            with_gap = [*slots.values(), -1]
            indices = torch.tensor(with_gap, device=DEVICE)
            y, same = layer.step(x, pool, inplace=True, state_indices=indices)
            assert same is pool
            for y_t, i in zip(y, slots):
                token = h[i : i + 1, t]
                want, alone[i] = layer.step(token, alone[i])
                assert_close(y_t[None], want, atol=tolerance, rtol=1e-5)
    for i, slot in plan[-1].items():
        for t, kept in zip(pool, alone[i]):
            assert_close(t[slot], kept[0], atol=1e-6, rtol=tolerance)
    assert not pool.S[1].any()
    assert not pool.conv[1].any()


def wrong_slots(slots, pool):
    "Yield (arguments of a step, message)."
    unfit = "its elements share memory"
    no_integers = (
        (([0, 1],), "state_indices is list; expected an int32 or int64 tensor"),
        ((slots.float(),), "state_indices is torch.float32; expected an int32 or int64 tensor"),
    )
    one_slot = r"state_indices has shape \(1,\) on \S+; expected \(2,\) on \S+ to match x_t"
    four_rows = r"state has shape \(7, 4, 3\); expected \(7, 5, 3\) to match x_t|q_t"
    shapes = (
        ((slots[:1],), one_slot),
        ((slots, True, pool[0]), r"state has shape \(5, 3\); expected \(slots, D, N\)"),
        ((slots, True, pool[:, :4]), four_rows),
    )
    shared = (
        ((slots, False), "state_indices needs inplace=True, since a pool"),
        ((slots, True, pool[:1].expand(7, -1, -1)), unfit + " and cannot be updated in place"),
        ((slots, True, pool.as_strided((7, 5, 3), (14, 3, 1))), unfit),
        ((slots, True, pool[:, :1].expand(-1, 5, -1)), unfit),
        ((slots, True, pool[..., :1].expand(-1, -1, 3)), unfit),
    )
    yield from (*no_integers, *shapes, *shared)


def test_wrong_slots_are_one_sentence():
    a = inputs(2, 5, 3)[0]
    pool = torch.zeros(7, 5, 3, device=DEVICE)
    now = [at(a, 0)[n] for n in "qkxb"]
    slots = torch.tensor([0, -1], device=DEVICE)

    def scan(slots, inplace=True, state=pool):
        return longhorn_step(*now, state, inplace=inplace, state_indices=slots)

    def conv(slots, inplace=True, state=pool):
        weight = torch.zeros(5, 4, device=DEVICE)
        return causal_conv1d_step(now[2], state, weight, inplace=inplace, state_indices=slots)

    strided = torch.zeros(5, 7, 3, device=DEVICE).transpose(0, 1)
    layers = torch.zeros(7, 9, 5, 3, device=DEVICE)
    part = layers[:, 0]
    for step in (scan, conv):
        for arguments, message in wrong_slots(slots, pool):
            with pytest.raises(ValueError, match=message):
                step(*arguments)
        for state in (strided, part):  # elements of these states share no memory
            step(slots, state=state)


COMPILE = """
import sys; sys.path.insert(0, "kernels")
import json, aot, decode_times, torch
variants = [{}, dict(state=False), dict(dtype=torch.float32), dict(width=2)]
for options in variants[:1] if len(sys.argv) == 2 else variants:
    for name, launches in decode_times.launches(aot.record, **options):
        for launch in launches:
            for target in sys.argv[1].split(","):
                _, facts = aot.build(launch, target)
                kernel = launch[0].__name__
                print(json.dumps(dict(case=name, kernel=kernel, target=target, **facts)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("sm_90",), ("sm_80,sm_90,sm_100,gfx942", "all")])
def test_kernels_compile_for_hopper_and_other_targets(arguments):
    path = pathlib.Path(__file__).resolve()
    root = path.parents[1]
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert {r["kernel"] for r in rows} == {
        "_conv_fwd_kernel",
        "_conv_bwd_kernel",
        "_conv_bwd_state_kernel",
        "_conv_step_kernel",
        "_step_kernel",
        "_rows_kernel",
    }
    for row in rows:
        assert row["spill"] <= 16, row
        assert row["registers"] <= 255, row
        assert row["shared"] <= 8192, row


# ---- complete models, on a GPU
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "B, D, N",
    [
        (64, 4096, 16),
        (1, 4096, 16),
        (3, 129, 5),
        (2, 1000, 64),
        (5, 96, 128),
        (1, 17, 1),
        (7, 250, 33),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_gpu_parity(rule, B, D, N, dtype):
    assert_steps(B, D, N, rule, dtype=dtype, T=4)


@pytest.mark.cuda
@pytest.mark.parametrize("graph", (False, True))
@pytest.mark.parametrize("state", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("rule", RULES)
def test_gpu_steps_by_slot(rule, state, graph):
    for D, N in ((4096, 16), (129, 5)):
        assert_pool_steps("triton", rule, D, N, torch.bfloat16, state, graph=graph)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("W", (1, 2, 3, 4, 8))
def test_gpu_convolution_steps_are_the_convolution(W, dtype):
    assert_conv_steps(5, 20, 300, W, dtype=dtype, first=False, inplace=lambda t: t % 2 == 0)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name, options",
    [
        ("longhorn", {}),
        ("longhorn_exact", {}),
        ("longhorn_decoupled", {}),
        ("longhorn_exact", dict(key_norm=True)),
    ],
)
def test_gpu_layer_in_a_cuda_graph(name, options):
    "A recorded step resumes from the cache, token after token."
    torch.manual_seed(0)
    layer = build_mixer(name, 64, **options).to(DEVICE)
    h = torch.randn(3, 12, 64, device=DEVICE)
    with torch.no_grad():
        whole = layer(h)
        start = h[:, :4]
        _, cache = layer.prefill(start)
        kept = [t.clone() for t in cache]
        fifth = h[:, 4]
        token = fifth.clone()
        result = captured(lambda: layer.step(token, cache, inplace=True))
        graph, (y, _) = result
        for t, k in zip(cache, kept):
            t.copy_(k)
        for t in range(4, 12):
            following = h[:, t]
            token.copy_(following)
            graph.replay()
            assert_close(y, whole[:, t], atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
def test_gpu_offsets_beyond_two_to_the_31():
    B = 33
    D = 2**19
    N = 128  # 2.2e9 numbers of state, and of its copy
    a, _ = inputs(B, 8, N)
    for n in ("x", "b", "z", "bias", "skip"):
        a[n] = a[n].repeat_interleave(D // 8, -1)
    state = torch.ones(B, D, N, device=DEVICE)
    out, _ = triton_step("diagonal", **at(a, 0), state=state, inplace=True)
    few = dict(a)  # the last row, and the last channels of this row
    for n in "qkxbz":
        last = a[n][-1:]
        few[n] = last
    for n in ("x", "b", "z", "bias", "skip"):
        few[n] = few[n][..., -8:]
    ones = torch.ones(1, 8, N, device=DEVICE)
    small, after = triton_step("diagonal", **at(few, 0), state=ones)
    result = out[-1:, -8:]
    assert_close(result, small)
    result = state[-1:, -8:]
    assert_close(result, after)


def test_states_that_share_memory_are_not_updated_in_place():
    x = torch.randn(3, 6, device=DEVICE)
    weight = torch.randn(6, 4, device=DEVICE)
    with pytest.raises((ValueError, RuntimeError), match="share memory|single memory location"):
        causal_conv1d_step(
            x,
            torch.zeros(1, 6, 3, device=DEVICE).expand(3, -1, -1),
            weight,
            inplace=True,
            backend="triton",
        )
