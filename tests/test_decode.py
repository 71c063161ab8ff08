"""Decode steps: kernels against the reference, in place or not, and a prefill followed by steps
against one pass."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

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
    "Arguments with a time axis of T steps, by name."
    gen = torch.Generator().manual_seed(seed)

    def new(*s):
        return torch.randn(*s, generator=gen).to(DEVICE)

    A = dict(s6=(D, N), s6_time_varying=(B, T, N)).get(rule)
    return dict(
        q=new(B, T, N).to(dtype),
        k=(new(B, T, N) / 2).to(dtype),
        x=new(B, T, D).to(dtype),
        b=new(B, T, 1 if scalar else D).to(dtype),
        A=None if A is None else -(new(*A).abs() + 0.1),
        bias=new(D),
        skip=new(D),
        z=new(B, T, D).to(dtype),
    ), new(B, D, N)


def at(a, t):
    "The arguments of one step."
    cut = {n: a[n][:, t] for n in "qkxbz"}
    return {
        **a,
        **cut,
        "A": a["A"][:, t : t + 1] if a["A"] is not None and a["A"].dim() == 3 else a["A"],
    }


def reference(a, state, rule):
    "Output and last state in float64."
    d = {n: None if t is None else t.double() for n, t in a.items()}
    rest = dict(D_skip=d["skip"], z=d["z"], initial_state=state.double())
    if d["A"] is None:
        return reference_scan(d["q"], d["k"], d["x"], d["b"], d["bias"], form=rule, **rest)
    return reference_selective_scan(d["q"], d["k"], d["x"], d["b"], d["A"], d["bias"], **rest)


def assert_steps(B, D, N, rule, T=3, **made):
    "Steps by the kernel, alternately into a new state and in place."
    a, first = inputs(B, D, N, rule, T, **made)
    want, last = reference(a, first, rule)
    state = first.clone()
    outs = []
    for t in range(T):
        kept = state.clone()
        out, after = triton_step(rule, **at(a, t), state=state, inplace=t % 2 == 1)
        assert (after is state) == (t % 2 == 1) and (t % 2 == 1 or torch.equal(state, kept))
        state = after
        outs.append(out)
    results = error(torch.stack(outs, 1), want), error(state, last)
    assert out.dtype == a["x"].dtype and state.dtype == torch.float32
    assert max(results) < TOLERANCE[out.dtype], results


@pytest.mark.parametrize(
    "B, D, N, rule, made",
    [
        *((2, 5, 3, rule, {}) for rule in RULES),
        (2, 5, 3, "diagonal", dict(scalar=True)),
        (2, 5, 3, "diagonal", dict(dtype=torch.bfloat16)),
        *(
            (*sizes, "exact", dict(T=2))
            for sizes in [(1, 1, 1), (3, 37, 16), (1, 9, 128), (1, 70, 5), (0, 4, 2)]
        ),
    ],
)
def test_every_rule_size_and_precision(B, D, N, rule, made):
    assert_steps(B, D, N, rule, **made)


def test_optional_arguments_left_out_and_strided_rows():
    a, state = inputs(2, 6, 4)
    now = {n: None if n in ("bias", "skip", "z") else t for n, t in at(a, 0).items()}
    want, last = reference({**a, "bias": None, "skip": None, "z": None}, state, "diagonal")
    wide = {
        **now,
        "x": torch.stack([now["x"]] * 2, -1)[..., 0],
        "k": torch.cat([now["k"]] * 2, -1)[:, :4],
    }
    for given in (now, wide):
        out, after = triton_step(
            "diagonal", **given, state=state.transpose(1, 2).contiguous().transpose(1, 2)
        )
        assert error(out, want[:, 0]) < 1e-6 and error(after, last) < 1e-6


def a_pool(*size, dtype, apart):
    "Seven states, each contiguous, next to one another or one layer of two."
    layers = torch.randn(
        7, 2 if apart else 1, *size, generator=torch.Generator().manual_seed(1)
    ).to(DEVICE, dtype)
    return layers[:, -1]


def assert_pool_steps(
    backend,
    rule,
    D=5,
    N=3,
    dtype=torch.float32,
    state=torch.float32,
    slots=(4, -1, 0, 7, 6),
    apart=True,
    graph=False,
):
    """Steps of both kinds by slot are steps of the rows alone; nothing else is read or written.

    The kernels treat every row alike and give the same bits. PyTorch takes groups of numbers as
    wide as the processor's vectors and the last ones of a tensor one by one, and rounds
    sigmoid, silu and softplus in two ways."""
    slots = torch.tensor(slots, device=DEVICE, dtype=torch.int32 if apart else torch.int64)
    a, _ = inputs(len(slots), D, N, rule, dtype=dtype)
    now = at(a, 0)
    weight, c = torch.randn(2, D, 4, device=DEVICE)
    pool = a_pool(D, N, dtype=state, apart=apart)
    past = a_pool(D, 3, dtype=state, apart=apart)
    real = [i for i, slot in enumerate(slots.tolist()) if 0 <= slot < 7]
    before = (pool.clone(), past.clone())
    others = [slot for slot in range(7) if slot not in slots.tolist()]
    for t in [now[n] for n in "qkxbz"]:
        t[[i for i in range(len(slots)) if i not in real]] = float("nan")

    def run(rows, states, pasts, **options):
        x, z, q, k, b = [now[n][rows] for n in "xzqkb"]
        A = now["A"] if rule == "s6" or now["A"] is None else now["A"][rows]
        conv = causal_conv1d_step(
            x,
            pasts,
            weight,
            c[:, 0],
            backend="torch" if backend == "reference" else backend,
            **options,
        )
        step = (dict(form=rule), longhorn_step, ()) if A is None else ({}, selective_step, (A,))
        return conv, step[1](
            q,
            k,
            x,
            b,
            *step[2],
            states,
            now["bias"],
            now["skip"],
            z,
            backend=backend,
            **step[0],
            **options,
        )

    (y, windows), (out, states) = run(real, pool[slots[real].long()], past[slots[real].long()])
    assert windows.dtype == states.dtype == state and y.dtype == out.dtype == dtype
    every = slice(None)

    def step():
        return run(every, pool, past, inplace=True, state_indices=slots)

    if graph:
        recorded, results = captured(step)
        for t, kept in zip((pool, past), before):
            t.copy_(kept)
        recorded.replay()
    else:
        results = step()
    for (got, same), given, kept, value, after in zip(
        results, (past, pool), before[::-1], (y, out), (windows, states)
    ):
        want = torch.zeros_like(got)
        changed = kept.clone()
        want[real] = value
        changed[slots[real].long()] = after
        assert same is given and torch.equal(given[others], kept[others])
        if backend == "triton":
            assert torch.equal(got, want) and torch.equal(given, changed)
        else:  # sums of 4 taps and N products, up to 8 functions of one number, and the result in its dtype
            assert error(got, want) < bound(torch.float32, 4 + N + 8) + bound(got.dtype, 1)
            assert error(given, changed) < bound(torch.float32, 4 + N + 8) + bound(given.dtype, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rule, options",
    [
        *((rule, {}) for rule in RULES),
        ("diagonal", dict(state=torch.bfloat16, dtype=torch.bfloat16)),
        ("exact", dict(state=torch.float16, apart=False)),
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
    "Steps of the convolution, in place where `inplace(t)`, are the convolution."
    x = torch.randn(B, T, D, device=DEVICE).to(dtype)
    weight = torch.randn(D, W, device=DEVICE)
    c = torch.randn(D, device=DEVICE) if bias else None
    state = (torch.randn if first else torch.zeros)(B, D, W - 1, device=DEVICE, dtype=dtype)
    whole, last = causal_conv1d(
        x,
        weight,
        c,
        activation=activation,
        initial_state=state.clone(),
        output_final_state=True,
        backend="torch" if first else "auto",
    )
    for t in range(T):
        given = state.clone()
        y, after = causal_conv1d_step(
            x[:, t], state, weight, c, activation=activation, inplace=inplace(t), backend=backend
        )
        assert (after is state) == inplace(t) and (inplace(t) or torch.equal(state, given))
        torch.testing.assert_close(y, whole[:, t])
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
    "On any device the differentiable step is PyTorch's, and refuses what has no gradient."
    a, state = inputs(1, 3, 2)
    now = at(a, 0)
    args = [now[n].requires_grad_() for n in "qkxb"]
    out, after = longhorn_step(*args, state, now["bias"], now["skip"], now["z"])
    assert all(g is not None for g in torch.autograd.grad(out.sum() + after.sum(), args))
    x = torch.randn(1, 3, device=DEVICE)
    past = torch.randn(1, 3, 3, device=DEVICE)
    weight = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    y, _ = causal_conv1d_step(x, past, weight)
    assert torch.autograd.grad(y.sum(), weight)[0].any()
    for call in (
        lambda **o: longhorn_step(*args, state, **o),
        lambda **o: causal_conv1d_step(x, past, weight, **o),
    ):
        for options in (dict(inplace=True), dict(backend="triton")):
            with pytest.raises(
                ValueError, match=r"has no gradients; call it under torch.no_grad\(\)"
            ):
                call(**options)
    with torch.no_grad():
        longhorn_step(*args, state, inplace=True)


def test_operations_are_well_formed():
    a, state = inputs(1, 3, 2, "s6")
    n = at(a, 0)
    args = ("s6", n["q"], n["k"], n["x"], n["b"], n["A"], state, n["bias"], n["skip"], n["z"])
    checks = ("test_schema", "test_faketensor")
    for op in (step_module._step, step_module._step_):
        torch.library.opcheck(op, args, test_utils=checks)
    torch.library.opcheck(
        step_module._step_, (*args, torch.tensor([-1], device=DEVICE)), test_utils=checks
    )
    conv = (
        n["x"],
        torch.randn(1, 3, 3, device=DEVICE),
        torch.randn(3, 4, device=DEVICE),
        None,
        True,
    )
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

    one, two = [(pool.clone(), pool.clone()) for _ in range(2)]
    out = torch.compile(two_steps, fullgraph=True, backend="aot_eager")(*one)
    assert torch.equal(out, two_steps(*two)) and all(map(torch.equal, one, two))
    assert (
        torch.equal(one[0], pool)
        == torch.equal(one[1], pool)
        == (slots is not None and int(slots) < 0)
    )


@pytest.mark.parametrize(
    "name, options",
    [
        *(
            (name, {})
            for name in (
                "longhorn",
                "longhorn_exact",
                "longhorn_decoupled",
                "longhorn_scalar",
                "mamba",
                "mamba_input_a",
            )
        ),
        ("longhorn_exact", dict(key_norm=True)),
    ],
)
def test_a_layer_steps_in_place(name, options):
    torch.manual_seed(0)
    layer = build_mixer(name, 16, **options).to(DEVICE)
    h = torch.randn(2, 12, 16, device=DEVICE)
    with torch.no_grad():
        whole = layer(h)
        _, cache = layer.prefill(h[:, :7])
        held = [t.data_ptr() for t in cache]
        for t in range(7, 12):
            y, same = layer.step(h[:, t], cache, inplace=True)
            torch.testing.assert_close(y, whole[:, t], atol=1e-5, rtol=1e-5)
        assert same is cache and held == [t.data_ptr() for t in cache]


@pytest.mark.parametrize("state_dtype", (None, torch.bfloat16))
@pytest.mark.parametrize(
    "name, options",
    [("longhorn", {}), ("longhorn", dict(key_norm=True)), ("mamba", {}), ("mamba_input_a", {})],
)
def test_a_layer_serves_from_a_pool(name, options, state_dtype):
    "Sequences enter and leave a pool between steps, and no step sees the others."
    torch.manual_seed(0)
    layer = build_mixer(name, 16, **options).to(DEVICE)
    h = torch.randn(3, 6, 16, device=DEVICE)
    pool = layer.empty_cache(4, state_dtype=state_dtype)
    alone = [layer.empty_cache(1, state_dtype=state_dtype) for _ in h]
    assert pool.S.dtype == (state_dtype or torch.float32)
    plan = [{0: 2}, {0: 2, 1: 3}, {1: 3, 2: 0}, {2: 0}, {0: 2, 1: 3, 2: 0}]  # sequence: slot
    with torch.no_grad():
        for t, slots in enumerate(plan):
            rows = [*slots, None]  # the last row is padding
            x = torch.stack([h[0, t] if i is None else h[i, t] for i in rows])
            y, same = layer.step(
                x,
                pool,
                inplace=True,
                state_indices=torch.tensor([*slots.values(), -1], device=DEVICE),
            )
            assert same is pool
            for y_t, i in zip(y, slots):
                want, alone[i] = layer.step(h[i : i + 1, t], alone[i])
                torch.testing.assert_close(
                    y_t[None], want, atol=1e-2 if state_dtype else 1e-5, rtol=1e-5
                )
    for i, slot in plan[-1].items():
        for t, kept in zip(pool, alone[i]):
            torch.testing.assert_close(
                t[slot], kept[0], atol=1e-6, rtol=1e-2 if state_dtype else 1e-5
            )
    assert not pool.S[1].any() and not pool.conv[1].any()


def test_wrong_slots_are_one_sentence():
    a = inputs(2, 5, 3)[0]
    pool = torch.zeros(7, 5, 3, device=DEVICE)
    now = [at(a, 0)[n] for n in "qkxb"]
    slots = torch.tensor([0, -1], device=DEVICE)

    def scan(slots, inplace=True, state=pool):
        return longhorn_step(*now, state, inplace=inplace, state_indices=slots)

    def conv(slots, inplace=True, state=pool):
        return causal_conv1d_step(
            now[2], state, torch.zeros(5, 4, device=DEVICE), inplace=inplace, state_indices=slots
        )

    for step in (scan, conv):
        for call, message in (
            (lambda: step([0, 1]), "state_indices is list; expected an int32 or int64 tensor"),
            (
                lambda: step(slots.float()),
                "state_indices is torch.float32; expected an int32 or int64 tensor",
            ),
            (
                lambda: step(slots[:1]),
                r"state_indices has shape \(1,\) on \S+; expected \(2,\) on \S+ to match x_t",
            ),
            (
                lambda: step(slots, inplace=False),
                "state_indices needs inplace=True: the states of a pool",
            ),
            (
                lambda: step(slots, state=pool[:1].expand(7, -1, -1)),
                "its elements share memory and cannot be updated in place",
            ),
            (
                lambda: step(slots, state=pool.as_strided((7, 5, 3), (14, 3, 1))),
                "its elements share memory",
            ),
            (lambda: step(slots, state=pool[:, :1].expand(-1, 5, -1)), "its elements share memory"),
            (
                lambda: step(slots, state=pool[..., :1].expand(-1, -1, 3)),
                "its elements share memory",
            ),
            (
                lambda: step(slots, state=pool[0]),
                r"state has shape \(5, 3\); expected \(slots, D, N\)",
            ),
            (
                lambda: step(slots, state=pool[:, :4]),
                r"state has shape \(7, 4, 3\); expected \(7, 5, 3\) to match x_t|q_t",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        step(slots, state=torch.zeros(5, 7, 3, device=DEVICE).transpose(0, 1))  # strided, but apart
        step(slots, state=torch.zeros(7, 9, 5, 3, device=DEVICE)[:, 0])


COMPILE = """
import sys; sys.path.insert(0, "kernels")
import json, aot, decode_times, torch
for options in [{}] if len(sys.argv) == 2 else [{}, dict(state=False), dict(dtype=torch.float32), dict(width=2)]:
    for name, launches in decode_times.launches(aot.record, **options):
        for launch in launches:
            for target in sys.argv[1].split(","):
                print(json.dumps(dict(case=name, kernel=launch[0].__name__, target=target, **aot.build(launch, target)[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("sm_90",), ("sm_80,sm_90,sm_100,gfx942", "all")])
def test_kernels_compile_for_hopper_and_other_targets(arguments):
    root = pathlib.Path(__file__).resolve().parents[1]
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments],
        capture_output=True,
        text=True,
        env=env,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["kernel"] for r in rows} == {
        "_conv_fwd_kernel",
        "_conv_bwd_kernel",
        "_conv_bwd_state_kernel",
        "_conv_step_kernel",
        "_step_kernel",
        "_rows_kernel",
    }
    for row in rows:
        assert row["spill"] <= 16 and row["registers"] <= 255 and row["shared"] <= 8192, row


# ---- the whole, on a GPU
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
        _, cache = layer.prefill(h[:, :4])
        kept = [t.clone() for t in cache]
        token = h[:, 4].clone()
        graph, (y, _) = captured(lambda: layer.step(token, cache, inplace=True))
        for t, k in zip(cache, kept):
            t.copy_(k)
        for t in range(4, 12):
            token.copy_(h[:, t])
            graph.replay()
            torch.testing.assert_close(y, whole[:, t], atol=1e-5, rtol=1e-5)


@pytest.mark.cuda
def test_gpu_offsets_beyond_two_to_the_31():
    B = 33
    D = 2**19
    N = 128  # 2.2e9 numbers of state, and of its copy
    a, _ = inputs(B, 8, N)
    a = {
        n: None if t is None else t.repeat_interleave(D // 8, -1) if t.shape[-1] == 8 else t
        for n, t in a.items()
    }
    state = torch.ones(B, D, N, device=DEVICE)
    out, _ = triton_step("diagonal", **at(a, 0), state=state, inplace=True)
    few = {
        n: t[-1:, ..., -8:] if n in "xbz" else t[-1:] if n in "qk" else t if t is None else t[-8:]
        for n, t in a.items()
    }
    small, after = triton_step("diagonal", **at(few, 0), state=torch.ones(1, 8, N, device=DEVICE))
    torch.testing.assert_close(out[-1:, -8:], small)
    torch.testing.assert_close(state[-1:, -8:], after)


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
