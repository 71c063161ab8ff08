import importlib.util, json, math, subprocess, sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

from longhorn_kit.lab import planner
from longhorn_kit.lab.language import find_preset, model_config
from longhorn_kit.lab.planner import (
    Machine,
    Trace,
    Work,
    between,
    black_boxes,
    collective_seconds,
    compare,
    compare_run,
    fused_traffic,
    link_notes,
    load_machine,
    one_part,
    plan,
    plan_model,
    plan_text,
    product_seconds,
    scan_seconds,
    trace_model,
)
from longhorn_kit.records import append_jsonl, write_json
from longhorn_kit.lab.training import LossOnly, TrainConfig
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.models.lm import Block, count_parameters

MIXERS = ("longhorn", "longhorn_exact", "longhorn_scalar", "longhorn_decoupled", "mamba", "mamba_input_a", "attention")
TRAIN = TrainConfig(steps=10, batch_size=16, context=64, precision="bf16", warmup=1)


def small(mixer="longhorn", n_layer=2):
    return LMConfig(97, 48, n_layer, mixer, d_mlp=40 if mixer == "attention" else 0)


def scan_row(form, B, T, D, forward, backward, N=16, section="main"):
    return dict(section=section, form=form, dtype="bfloat16", z=True, state=False, checkpoint="fast", kernels=form,
                B=B, T=T, D=D, N=N, forward_ms=forward, backward_ms=backward, kept_bytes_per_x=8.0 * N / 16)


def machine(**changes):
    rows = [scan_row("diagonal", 8, 2048, 2048, 0.2, 0.8), scan_row("diagonal", 1, 4096, 4096, 0.2, 0.8)]
    rows += [scan_row("diagonal", 8, 2048, 2048, 0.3, 1.6, N=32, section="N")]
    rows += [dict(section="decode", kind="conv", who="kit", B=8, T=2048, D=2048, forward_ms=0.05, backward_ms=0.1)]
    rows += [dict(peer="attention", B=8, T=T, D=2048, forward_ms=T * 1e-4, backward_ms=T * 3e-4) for T in (512, 1024)]
    rates = dict(bytes=4e12, operations=3e13, products=4e14)
    return replace(Machine("NVIDIA Test", 100e9, rates, rows), **changes)


# ---- the trace


@pytest.mark.parametrize("mixer", ["longhorn", "longhorn_scalar", "mamba_input_a", "attention"])
def test_traced_products_are_those_that_pytorch_counts(mixer):
    config = small(mixer)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with black_boxes(Trace(), lambda form, N: 1), FlopCounterMode(display=False) as counter:
        LossOnly(SequenceLM(config))(tokens, tokens).backward()
    work = trace_model(config, 2, 32, precision="no").work
    traced = sum(2 * math.prod(w.size) for w in work if w.kind == "product")
    assert traced == counter.get_total_flops() > 0


def saved_bytes(run, model):
    known, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(t):
        found[t.untyped_storage().data_ptr()] = t  # held, so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in known)


@pytest.mark.parametrize(
    "mixer, precision", [("longhorn", "no"), *((name, "bf16") for name in MIXERS if name != "longhorn_exact")]
)
def test_what_a_block_keeps_is_what_autograd_saves(mixer, precision):
    tokens, saved = torch.zeros(2, 32, dtype=torch.int64), {}
    for layers in (2, 3):
        model = SequenceLM(small(mixer, layers))

        def run():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                LossOnly(model)(tokens, tokens)

        with black_boxes(Trace(), lambda form, N: 5):
            saved[layers] = saved_bytes(run, model)
    traced = [trace_model(small(mixer, n), 2, 32, precision, kept=lambda form, N: 5).saved for n in (2, 3)]
    extra = traced[1] - traced[0] - (saved[3] - saved[2])
    # alive but not saved: at most casts of vectors that autocast keeps in its cache
    assert 0 <= extra <= 0.02 * (saved[3] - saved[2])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter, of values that do not matter
def test_the_black_box_keeps_what_the_real_kernels_keep():
    "The Triton scan and convolution in the interpreter, on real tensors, against the trace."
    from longhorn_kit.models import mixer

    tokens, saved = torch.zeros(1, 16, dtype=torch.int64), {}
    for layers in (1, 2):
        model = SequenceLM(LMConfig(50, 16, layers))
        with (
            patch.object(mixer, "longhorn_scan", partial(mixer.longhorn_scan, backend="triton")),
            patch.object(mixer, "causal_conv1d", partial(mixer.causal_conv1d, backend="triton")),
            patch("torch.nn.functional.rms_norm", norm_like_the_fused_one),
        ):
            saved[layers] = saved_bytes(lambda: LossOnly(model)(tokens, tokens), model)
    traced = [trace_model(LMConfig(50, 16, n), 1, 16, "no", kept=lambda form, N: 8.0).saved for n in (1, 2)]
    assert abs((traced[1] - traced[0]) / (saved[2] - saved[1]) - 1) < 0.02


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, torch.empty(h.shape[:-1]), weight)
        return h * weight

    @staticmethod
    def backward(ctx, dy):
        raise AssertionError("forward only")


def norm_like_the_fused_one(h, shape, weight, eps):
    return FusedNorm.apply(h, weight)


def test_peak_and_what_is_alive_follow_the_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), Trace() as trace:
        a = torch.zeros(1000)  # 4000 bytes
        b = a + 1  # 8000
        del a
        c = b.view(10, 100) * 2  # a view is no memory
        assert (trace.now, trace.peak) == (8000, 8000)
        d = c.bfloat16()
        del b, c
    assert (trace.now, trace.peak) == (2000, 10000) and d.numel() == 1000
    assert [w.traffic for w in trace.work] == [4000, 8000, 8000, 6000]


@pytest.mark.parametrize("mixer, compiled, checkpointing",
                         [("longhorn", False, False), ("longhorn_scalar", True, False), ("attention", True, False),
                          ("attention", False, True)])
def test_one_layer_says_what_three_need(mixer, compiled, checkpointing):
    config, m = small(mixer, 3), machine()
    train = replace(TRAIN, compile=compiled)
    few, trace = one_part(config, m, 2, train, checkpointing, True), trace_model(
        config, 2, 64, checkpointing=checkpointing, gradients=True, kept=partial(planner.kept_bytes, m),
        compiled=compiled
    )
    assert few.saved == pytest.approx(trace.saved, rel=1e-4) and few.peak == pytest.approx(trace.peak, rel=0.02)
    spent = planner.seconds_of(trace.work, m, "bf16", compiled)
    assert all(math.isclose(few.seconds[name], spent[name], rel_tol=1e-9) for name in spent if spent[name])
    ahead = planner.seconds_of([w for w in trace.work if w.phase == "forward"], m, "bf16", compiled)
    assert few.backward == pytest.approx(planner.device_seconds(spent) - planner.device_seconds(ahead))


def test_gradients_take_the_place_of_few_activations():
    config = small("longhorn", 5)
    few, trace = one_part(config, machine(), 1, replace(TRAIN, context=2), False, False), trace_model(
        config, 1, 2, kept=partial(planner.kept_bytes, machine())
    )
    assert trace.peak <= few.peak < 1.05 * trace.peak  # no activations to speak of: the peak is at the end


def test_checkpointing_keeps_less_and_computes_more():
    plain, kept_less = (trace_model(small(n_layer=4), 4, 64, checkpointing=flag) for flag in (False, True))
    assert kept_less.saved < 0.6 * plain.saved and kept_less.peak < plain.peak
    scans = lambda trace: sum(w.kind == "scan" for w in trace.work)
    assert (scans(plain), scans(kept_less)) == (8, 12)


def test_slices_of_the_loss_save_the_memory_of_the_logits():
    config = LMConfig(5000, 32, 2)
    whole, sliced = (trace_model(config, 8, 64, loss_chunk=chunk).peak for chunk in (0, 64))
    assert sliced < 0.3 * whole


@pytest.mark.parametrize("compiled", [False, True])
def test_of_many_slices_of_the_loss_three_are_traced_and_all_are_counted(monkeypatch, compiled):
    def traced(slices):
        trace = trace_model(small(), 2, 32, loss_chunk=-(-64 // slices), compiled=compiled)
        return (trace.peaks, trace.saved, trace.grown, trace.left,
                [(w.phase, w.kind, w.name, w.size, w.traffic, w.elements, w.like, w.graph) for w in trace.work])
    inner, calls = planner.softmax_gap, []
    monkeypatch.setattr(planner, "softmax_gap", lambda *both: calls.append(both[0].shape[0]) or inner(*both))
    few = [traced(slices) for slices in (1, 2, 3, 4, 10, 64)]  # of ten slices the last is shorter
    assert compiled or calls == [64, 32, 32, 22, 22, 20, 16, 16, 16, 7, 7, 1, 1, 1, 1]
    monkeypatch.setattr(planner, "some_slices", lambda trace, *places: range(*places))
    assert few == [traced(slices) for slices in (1, 2, 3, 4, 10, 64)]


def op(reads, writes, kind="pointwise", graph=1):
    sized = lambda names: tuple((name, 10) for name in names)
    moved = 10.0 * len(reads + writes)
    return Work("forward", kind, "op", (1, 1, 1, 1), moved, sized(reads), sized(writes), graph=graph)


def test_fusing_moves_only_what_enters_and_leaves():

    chain = [op("a", "b"), op("b", "c"), op("ac", "d"), op("d", "e", "product"), op("e", "f")]
    assert sum(w.traffic for w in chain if w.kind == "pointwise") == 90
    # a is read once, d is written for the product; then e is read, f written (nobody reads it here: it leaves)
    assert fused_traffic(chain) == 40
    # the border of a graph is one too: b is written and read again
    assert fused_traffic([op("a", "b"), op("b", "c"), op("c", "d", graph=2)]) == 40
    assert fused_traffic([op("a", "b", graph=0)]) == 0
    work = [w for w in trace_model(small(), 2, 64).work if w.graph]
    assert 0 < fused_traffic(work) < sum(w.traffic for w in work)


def test_every_block_has_a_graph_forward_and_one_backward():
    work = trace_model(small("attention", 3), 2, 32, loss_chunk=32, compiled=True).work
    graphs = {phase: sorted({w.graph for w in work if w.phase == phase} - {0}) for phase in ("forward", "backward")}
    assert graphs == {"forward": [1, 2, 3], "backward": [4, 5, 6]}
    assert {w.kind for w in work if w.graph == 5} == {"product", "attention", "pointwise"}
    assert sum(w.kind == "attention" for w in work if w.graph in (2, 5)) == 2
    outside = [w.name for w in work if not w.graph and w.kind == "pointwise"]
    assert "probabilities minus the targets" in outside


def test_a_compiled_block_keeps_what_the_partitioner_keeps():
    "The oracle is PyTorch's own partitioner, on the CPU; attention and norms keep the same few bytes there."
    config = LMConfig(97, 64, 1, "attention", d_mlp=96)
    block, found = Block(config), {}
    compiled = torch.compile(block, backend="aot_eager_decomp_partition", dynamic=False)
    known = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def note(t):
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(2, 32, 64, requires_grad=True))
    sizes = [t.untyped_storage().nbytes() for key, t in found.items() if key not in known]
    weights = sum(2 * p.numel() for p in block.parameters() if p.dim() == 2)
    traced = [trace_model(replace(config, n_layer=n), 2, 32, compiled=flag).saved
              for flag in (True, False) for n in (1, 2)]
    assert traced[1] - traced[0] - weights == sum(sizes) - weights
    assert (traced[3] - traced[2]) - (traced[1] - traced[0]) == 64 * 2 * (96 + 64)  # the gate, half of the stream


def test_a_compiled_loss_has_two_arrays_of_logits():
    config = LMConfig(5000, 32, 1)
    peaks = [trace_model(config, 8, 64, loss_chunk=512, compiled=compiled).peak for compiled in (False, True)]
    # eager: the logits, their copy in fp32 and log p; compiled: the logits and the result
    assert peaks[0] - peaks[1] == pytest.approx(512 * 5000 * (10 - 4), rel=0.02)


# ---- how operations walk


def test_an_operation_walks_like_one_that_was_timed():
    a, h = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(8, 16)
    half, row = a[:, :8], torch.zeros(8, dtype=torch.bfloat16)
    for name, inputs, made, like in [
        ("aten.mul.Tensor", [a, a], a, ""),
        ("aten.mul.Tensor", [h, torch.tensor(2.0)], h, ""),
        ("aten.add.Tensor", [h, a], h, "residual"),
        ("aten._to_copy.default", [h], a, "cast to bf16"),
        ("aten._to_copy.default", [a], h, "cast to fp32"),
        ("aten.silu.default", [half], half.contiguous(), "cast to fp32"),
        ("aten.mul.Tensor", [half, half.contiguous()], half.contiguous(), "residual"),
        ("aten.mul.Tensor", [a[:, :8].contiguous(), row], half.contiguous(), "residual"),
        ("aten.clone.default", [a.T], a.T.contiguous(), "cast to fp32"),
        ("aten.cat.default", [a, a], torch.cat([a, a]), "join"),
        ("aten.sum.default", [h], h.sum(0), ""),
    ]:
        assert planner.like_of(name, inputs, [made]) == like, name


def test_one_rate_for_all_channels_is_copied_to_them():
    m = machine()
    wide = [[w for w in trace_model(small(name), 2, 64).work if w.kind == "widen"]
            for name in ("longhorn", "longhorn_scalar")]
    assert not wide[0] and [w.phase for w in wide[1]] == ["forward"] * 2 + ["backward"] * 2
    n = 8192
    copy, back = (planner.one_price(m, "widen", (n,), phase, "bf16") for phase in ("forward", "backward"))
    assert math.isclose(copy, 6 * n / 4e12) and math.isclose(back, 12 * n / 4e12)


# ---- rates


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-3, 1e3)), min_size=1, max_size=5,
                unique_by=lambda p: p[0]))
def test_interpolation_meets_what_was_measured(points):
    for size, ms in points:
        assert math.isclose(between(points, size), ms, rel_tol=1e-6)
    most = max(points)
    assert math.isclose(between(points, 2 * most[0]), 2 * most[1], rel_tol=1e-6)


def test_scan_times_are_the_measured_ones():
    m, at = machine(), lambda *size, phase="backward": scan_seconds(m, ("diagonal", *size), phase)
    assert math.isclose(at(8, 2048, 2048, 16), 0.8e-3) and math.isclose(at(8, 2048, 2048, 16, phase="forward"), 0.2e-3)
    assert math.isclose(at(8, 4096, 2048, 16), 1.6e-3)  # time is in proportion
    assert math.isclose(at(16, 2048, 2048, 16), 1.6e-3)  # more channels than were measured: full already
    assert math.isclose(at(1, 2048, 2048, 16), 0.4e-3)  # fewer: half as wide takes as long as the narrowest
    assert math.isclose(at(8, 2048, 2048, 32), 1.6e-3) and math.isclose(at(8, 2048, 2048, 64), 3.2e-3)
    with pytest.raises(ValueError, match="has no time of the s6 scan"):
        scan_seconds(m, ("s6", 8, 2048, 2048, 16), "forward")


def test_a_thin_product_is_bound_by_its_bytes():
    m = machine()
    assert math.isclose(product_seconds(m, (1, 8192, 8192, 8192), "bf16"), 8192**3 / 4e14)
    assert math.isclose(product_seconds(m, (1, 65536, 16, 64), "bf16"), 2 * (65536 * 80 + 16 * 64) / 4e12)
    assert product_seconds(m, (1, 8192, 8192, 8192), "no") == 8192**3 / 3e13
    row = dict(M=1000, K=1000, N=1000, dtype="bfloat16", ms=0.01)  # 1e14 a second
    measured = machine(products=[row, row | {"M": 10**6, "ms": 2.0}])
    assert math.isclose(product_seconds(measured, (1, 1100, 900, 1000), "bf16"), 1100 * 900 * 1000 / 1e14)


@pytest.mark.parametrize("side", [0, 2])
def test_a_longer_product_takes_the_line_through_the_last_two(side):
    size = lambda n: [n, 1000, 1000] if side == 0 else [1000, 1000, n]
    rows = [dict(zip("MKN", size(n)), dtype="bfloat16", ms=ms)
            for n, ms in ((10**4, 0.2), (2 * 10**4, 0.3), (10**5, 1.1))]
    m = machine(products=rows)
    at = lambda n: 1e3 * product_seconds(m, (1, *size(n)), "bf16")
    assert [at(n * 10**5) for n in (1, 2, 3)] == pytest.approx([1.1, 2.1, 3.1])
    assert at(10**4) == pytest.approx(0.2) and at(5 * 10**3) == pytest.approx(0.1)
    slow = machine(products=[dict(rows[0], ms=2.0), rows[1]])  # not even faster: then no more than flat
    assert 1e3 * product_seconds(slow, (1, *size(4 * 10**4)), "bf16") == pytest.approx(0.3)


def test_pointwise_work_has_the_rate_of_its_like():
    rows = [dict(name=name, bytes=10**8, ms=ms) for name, ms in
            [("rms_norm", 0.05), ("rms_norm backward", 0.1), ("residual", 0.05)]]
    m = machine(pointwise=rows)
    assert planner.pointwise_rate(m, "rms_norm") == pytest.approx(2e12)
    assert planner.pointwise_rate(m) == planner.pointwise_rate(machine(), "rms_norm") == 4e12
    norms = [Work(phase, "pointwise", "rms_norm", (), 1e9, like=like)
             for phase, like in (("forward", "rms_norm"), ("backward", "rms_norm backward"))]
    assert planner.pointwise_seconds(norms, m) == pytest.approx(1.5e-3)
    thin = Work("forward", "pointwise", "mul", (), 6e8, elements=10**8, like="residual")
    assert planner.pointwise_seconds([thin], m) == pytest.approx(10 * 1e8 / 2e12)  # elements count, not bytes
    inside = replace(thin, graph=1, reads=(("a", 4e8),), writes=(("b", 2e8),))
    assert planner.pointwise_seconds([inside], m, True) == pytest.approx(6e8 / 4e12)


def test_collectives():
    m = machine()
    assert collective_seconds(m, "all_reduce", 1e9, 1) == 0
    assert math.isclose(collective_seconds(m, "all_reduce", 3e9, 4), 3e9 * 1.5 / 3e11)
    assert math.isclose(collective_seconds(m, "all_gather", 3e9, 4), 3e9 * 0.75 / 3e11)
    assert math.isclose(collective_seconds(m, "all_reduce", 64e9, 64, network=1e10), 126 / 80)  # eight cards a node
    assert math.isclose(collective_seconds(m, "all_reduce", 64e9, 64, network=1e12), 126 / 300)  # the links within a node
    assert math.isclose(collective_seconds(m, "all_reduce", 9e9, 9, network=1e9), 16)  # one GPU in the second node, one card
    assert "all-reduce rate not measured" in link_notes(m, 2)[0] and not link_notes(m, 1)
    rows = [dict(op="all_reduce", gpus=2, bytes=10**8 * k, ms=0.5 * k) for k in (1, 10)]
    m = machine(collectives=rows)
    assert math.isclose(collective_seconds(m, "all_reduce", 5e8, 2), 2.5e-3) and not link_notes(m, 2)
    assert math.isclose(collective_seconds(m, "all_reduce", 4e8, 4), 4e8 * 1.5 / 2e11)
    assert link_notes(m, 4) == ["all-reduce measured on 2 GPUs, not on 4"]
    assert any("between nodes" in note and "assumed" in note for note in link_notes(m, 16))
    assert any("given" in note for note in link_notes(m, 16, network=1e10))


# ---- plans


def test_memory_is_weights_gradients_optimiser_and_the_trace():
    config, P = small(), count_parameters(small())
    one = plan_model(config, TRAIN, accumulate=2, machine=machine())
    trace = trace_model(config, 8, 64, gradients=True, kept=partial(planner.kept_bytes, machine()))
    assert one.peak == pytest.approx(16 * P + trace.peak, rel=0.005) and one.rows == 8 and one.parameters == P
    ddp = plan_model(config, TRAIN, gpus=2, accumulate=1, machine=machine())
    assert ddp.memory["gradients"] == 4 * P and ddp.rows == 8
    fsdp = plan_model(config, TRAIN, gpus=2, accumulate=1, sharding="fsdp", machine=machine())
    assert fsdp.memory["weights"] == 2 * P and fsdp.memory["optimiser"] == 4 * P and fsdp.peak < ddp.peak


def test_the_largest_part_that_fits_is_chosen():
    config, P = small(), count_parameters(small())
    roomy = plan_model(config, TRAIN, machine=machine())
    assert (roomy.rows, roomy.accumulate) == (16, 1) and roomy.peak < 0.9 * roomy.capacity
    tight = plan_model(config, TRAIN, machine=machine(memory=roomy.peak * 0.8))
    assert tight.rows < 16 and tight.peak <= 0.9 * tight.capacity
    never = plan_model(config, TRAIN, accumulate=1, machine=machine(memory=8.0 * P))
    assert never.binds == "memory: it does not fit"


def test_communication_is_hidden_behind_the_backward():
    config, rows = small(), [dict(op="all_reduce", gpus=2, bytes=1000, ms=1e-9)]
    fast = plan_model(config, TRAIN, gpus=2, accumulate=1, machine=machine(collectives=rows))
    assert fast.seconds["communication"] < 1e-3 * fast.step_seconds
    slow = plan_model(config, TRAIN, gpus=2, accumulate=1, machine=machine(collectives=[rows[0] | {"ms": 10.0}]))
    whole = 4 * count_parameters(config) / 1000 * 1e-2
    assert slow.binds == "communication" and 0.9 * whole < slow.seconds["communication"] < whole
    assert fast.tokens_per_second > 100 * slow.tokens_per_second


def test_a_slow_host_is_what_binds():
    unknown, fast, slow = (
        plan_model(small(), TRAIN, accumulate=1, machine=machine(launch=launch)) for launch in (0.0, 1e-9, 1e-3)
    )
    assert "host" not in fast.seconds and slow.binds.startswith("the host") and slow.step_seconds > 0.05
    assert any("host" in note for note in unknown.notes) and not any("host" in note for note in fast.notes)


@pytest.mark.parametrize("mixer", ["longhorn_exact", "mamba", "attention"])
def test_the_record_of_the_kit_plans_the_presets(mixer):
    p = plan(find_preset("owt-120m"), mixer, accumulate=20)
    assert 1e5 < p.tokens_per_second < 2e6 and 10e9 < p.peak < 140e9
    assert p.hours == pytest.approx(p.steps * p.step_seconds / 3600)


def test_odd_sides_are_named_and_compared_with_their_like():
    even, odd = LMConfig(64, 128, 2), small("longhorn_scalar")
    def told(config, m):
        notes = plan_model(config, TRAIN, accumulate=1, machine=m).notes
        return any("no multiple of 8" in note for note in notes)

    assert not told(even, machine()) and told(odd, machine())
    rows = [dict(M=64, K=1536, N=N, dtype="bfloat16", ms=ms) for N, ms in ((80, 1.0), (81, 5.0))]
    m = machine(products=rows)
    at = lambda *size: 1e3 * product_seconds(m, (1, *size), "bf16")
    assert at(64, 1536, 80) == pytest.approx(1.0) and at(64, 1536, 84) == pytest.approx(5.0 * 84 / 81)
    assert at(64, 1536, 124) < 2 and at(64, 1537, 84) < 2   # unlike those: the rate of even sides
    assert told(odd, m) and told(LMConfig(64, 100, 2), load_machine()) and not told(even, load_machine())


def test_with_fsdp_a_step_waits_for_the_slower_of_gpu_and_host():
    step = lambda **known: plan_model(small(), TRAIN, gpus=2, accumulate=1, sharding="fsdp", machine=machine(**known))
    free, held = step(sharded=0.0), step(sharded=0.02)
    assert held.step_seconds == pytest.approx(0.02 * (small().n_layer + 1)) and held.binds.startswith("the host")
    assert free.step_seconds < held.step_seconds
    assert any("20.0 ms a block" in note for note in held.notes) and any("keep up with FSDP" in note for note in free.notes)
    plain = plan_model(small(), TRAIN, gpus=2, accumulate=1, sharding="ddp", machine=machine(sharded=0.02))
    assert "host" not in plain.seconds and not any("FSDP" in note or "block" in note for note in plain.notes)


@pytest.mark.parametrize("steps, words", [(1, "seconds"), (3000, "minutes"), (10**6, "hours")])
def test_times_are_told_in_a_unit_that_shows_them(steps, words):
    preset = replace(find_preset("small"), train=replace(find_preset("small").train, steps=steps, warmup=0))
    line = next(line for line in plan_text(preset, "longhorn", accumulate=2).splitlines() if "in all" in line)
    number = float(line.split(" tokens, ")[1].split()[0].replace(",", ""))
    assert words in line and number >= 0.1


def test_the_plan_as_text():
    text = plan_text("owt-120m", "longhorn", accumulate=20)
    assert "on 1 x NVIDIA H200" in text and "accumulate=20" in text and "\n  speed " in text
    own = find_preset("owt-120m").train.accumulate
    assert f"train with --accumulate 40; the preset says {own}" in plan_text("owt-120m", "longhorn", accumulate=40)
    assert "train with" not in plan_text("owt-120m", "longhorn", accumulate=own)


def test_what_cannot_be_planned_is_one_line(tmp_path):
    preset = find_preset("owt-120m")
    for options, says in [
        (dict(gpus=7), "a batch of 480 sequences cannot be shared by 7 GPUs; by 6 or 8 it can"),
        (dict(gpus=4, accumulate=7), "cannot be shared by 4 GPUs in 7 parts"),
        (dict(gpus=0), "cannot be shared by 0 GPUs"),
        (dict(gpu="NVIDIA A100"), "no measured rates of 'NVIDIA A100'.*there are: .*NVIDIA H200"),
        (dict(gpus=2, sharding="zero"), "sharding is 'zero'; it must be 'ddp' or 'fsdp'"),
    ]:
        with pytest.raises(ValueError, match=says) as caught:
            plan(preset, "longhorn", **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no scan of this mixer has been measured"):
        plan(preset, "gla")
    with pytest.raises(ValueError, match="mixer is 'nope'"):
        plan(preset, "nope")
    with pytest.raises(ValueError, match="there are: none"):
        load_machine(folder=tmp_path)


# ---- predictions against runs


def run_folder(path, speed, peak=None, gpus=2):
    config = small()
    about = {"engine": {"processes": gpus, "distributed": "MULTI_GPU"}, "environment": {"gpu": "NVIDIA Test"}}
    write_json(path / "config.json", {"config": asdict(TRAIN), "attempts": [about]})
    write_json(path / "lm_config.json", config.to_dict())
    for step in range(1, 11):
        line = {"step": step, "tokens_per_second": speed if step > 1 else 1.0}
        append_jsonl(path / "metrics.jsonl", line | ({"peak_bytes": peak} if peak else {}))
    return plan_model(config, TRAIN, gpus=gpus, accumulate=1, machine=machine())


def test_a_run_is_compared_with_its_own_prediction(tmp_path):
    predicted = run_folder(tmp_path, 1.0)
    (tmp_path / "metrics.jsonl").unlink()
    run_folder(tmp_path, predicted.tokens_per_second / 1.1, predicted.peak / 0.9)
    found = compare_run(tmp_path, machine())
    assert found["tokens_per_second"]["error"] == pytest.approx(0.1)
    assert found["peak_bytes"]["error"] == pytest.approx(-0.1, abs=1e-6) and found["within_15_percent"]
    assert not compare(predicted, predicted.tokens_per_second * 1.3)["within_15_percent"]


def test_timed_steps_are_compared_with_their_predictions():
    m = load_machine()
    train = replace(find_preset("small").train, batch_size=16, context=4096, accumulate=1, compile=True)
    expected = plan(replace(find_preset("small"), train=train), "longhorn", machine=m, accumulate=1)
    row = dict(preset="small", mixer="longhorn", context=4096, compile=True, tokens=65536)
    row |= dict(tokens_per_second=expected.tokens_per_second / 1.2, peak_gb=expected.peak / 1e9, ms=100.0)
    row |= dict(shares={"compiled": 0.25, "scan": 0.5, "pointwise and the rest": 0.05, "matrix products": 0.2})
    record = {"environment": {"gpu": "NVIDIA H200"}, "rows": [row, row | {"mixer": "gla"}]}
    found, other = planner.compare_throughput(record)
    assert found["tokens_per_second"]["error"] == pytest.approx(0.2) and not found["within_15_percent"]
    assert found["peak_bytes"]["error"] == pytest.approx(0) and "no scan of this mixer" in other["left_out"]
    spent = {name: 1e3 * expected.seconds[name] for name in ("pointwise", "scan", "product")}
    assert {name: pair[0] for name, pair in found["parts"].items()} == pytest.approx(spent)
    measured = {"pointwise": 30, "scan": 50, "product": 20}
    assert {name: pair[1] for name, pair in found["parts"].items()} == pytest.approx(measured)
    title, header, rows = planner.comparison_table([found, other])
    assert len(rows) == 1 and rows[0][6:] == ["+20%", "+0.0%"] and len(header) == len(rows[0])


def test_a_run_that_cannot_be_compared_says_why(tmp_path):
    run_folder(tmp_path, 1000.0)
    with pytest.raises(ValueError, match="no measured rates of 'NVIDIA Test'"):
        compare_run(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    record["attempts"][0]["environment"]["gpu"] = None
    write_json(tmp_path / "config.json", record)
    with pytest.raises(ValueError, match="was trained without a GPU"):
        compare_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="has no steps beyond the first 10%"):
        compare_run(tmp_path, machine())


# ---- the record of a machine


def workbench():
    path = Path(planner.records_folder()).parent / "machine_rates.py"
    spec = importlib.util.spec_from_file_location("machine_rates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_machine_rates_writes_what_the_planner_reads(tmp_path, monkeypatch):
    out = tmp_path / "machine_cpu.json"
    assert workbench().main(["--device", "cpu", "--gpus", "1", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["launch_us"] > 0 and record["products"] and record["pointwise"] and not record["collectives"]
    write_json(tmp_path / "cpu_kernels.json", {"gpu": record["gpu"], "rates": machine().rates, "rows": machine().rows})
    m = load_machine(record["gpu"], tmp_path)
    assert m.notes == [] and m.launch > 0 and m.memory == math.inf
    assert plan_model(small(), TRAIN, machine=m).tokens_per_second > 0


def test_a_record_of_one_question_does_not_take_the_place_of_the_machines(tmp_path):
    write_json(tmp_path / "gpu.json", {"gpu": "a", "rates": machine().rates, "rows": machine().rows})
    write_json(tmp_path / "gpu_ragged.json", {"gpu": "a", "rates": {"bytes": 1.0}, "rows": []})
    m = load_machine("a", tmp_path)
    assert m.rates == machine().rates and m.rows == machine().rows


def test_measuring_again_keeps_what_was_not_measured(tmp_path):
    path, about = tmp_path / "machine.json", dict(gpu="a", torch="b", cuda="c")
    write_json(path, about | {"fsdp_block_ms": 8.0, "launch_us": 1.0, "collectives": [{"gpus": 2, "ms": 1}, {"gpus": 4, "ms": 2}]})
    now = about | {"launch_us": 3.0, "collectives": [{"gpus": 2, "ms": 5}]}
    found = workbench().merged(json.loads(json.dumps(now)), path)
    assert found["fsdp_block_ms"] == 8.0 and found["launch_us"] == 3.0
    assert found["collectives"] == [{"gpus": 2, "ms": 5}, {"gpus": 4, "ms": 2}]
    assert workbench().merged(now | {"torch": "d"}, path) == now | {"torch": "d"} # another version: nothing of the old


def test_products_of_the_presets_are_among_those_that_are_measured():
    shapes = set(workbench().product_shapes())
    for name in ("small", "owt-120m", "slimpajama-1.3b"):
        preset = find_preset(name)
        config = replace(model_config(preset, "longhorn", 50257), n_layer=2)
        train = preset.train
        work = trace_model(config, max(1, 24576 // train.context), train.context, loss_chunk=8192).work
        used = {w.size[1:] for w in work if w.kind == "product"}
        assert used <= shapes


@pytest.mark.slow
def test_collectives_rehearse_on_two_processes(tmp_path):
    out = tmp_path / "machine_cpu.json"
    script = planner.records_folder().parent / "machine_rates.py"
    subprocess.run([sys.executable, script, "--device", "cpu", "--gpus", "2", "--out", out], check=True)
    rows = json.loads(out.read_text())["collectives"]
    assert {row["gpus"] for row in rows} == {2} and all(row["ms"] > 0 for row in rows)
