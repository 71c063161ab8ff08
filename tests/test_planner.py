import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longhorn_kit.lab import planner
from longhorn_kit.lab.planner import (
    LANGUAGE,
    PARTS,
    ROOT,
    plan,
    plan_text,
    record,
    recorded_runs,
    recorded_steps,
    waits,
)
from longhorn_kit.lab.presets import find_preset
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.records import write_json

SMALL = find_preset("owt-120m")


def changed(name, **changes):
    return replace(find_preset(name), train=replace(find_preset(name).train, **changes))


def preset_of(row):
    return changed(
        row["preset"],
        batch_size=row["tokens"] // row["context"],
        context=row["context"],
        compile=row["compile"],
    )


def printed(text, unit):
    return [
        float(n.replace(",", ""))
        for n in re.search(rf"([\d.,]+) to ([\d.,]+) {unit}", text).groups()
    ]


def inside(values, pair, slack=1e-6):
    return all(
        pair[0] * (1 - slack) <= value <= pair[1] * (1 + slack) for value in np.atleast_1d(values)
    )


@pytest.mark.parametrize(
    "row", recorded_steps(), ids=lambda row: f"{row['mixer']}-{row['context']}-{row['compile']}"
)
def test_every_timed_step_lies_in_the_range_that_is_printed_for_it(row):
    text = plan_text(preset_of(row), row["mixer"], micro_batches=1)
    assert inside(row["tokens_per_second"], printed(text, "tokens/s"), 0) and "assumed" not in text
    assert inside(row["peak_gb"], printed(text, "GB per"), 0)


def test_every_run_lies_in_its_range():
    assert recorded_runs().keys() == {
        path.parent.name for path in (ROOT / LANGUAGE).rglob("metrics.jsonl")
    }
    for name, (p, seconds, peak) in recorded_runs().items():
        assert (
            inside(seconds, p.step_seconds)
            and inside(peak, p.peak)
            and p.peak[1] / p.peak[0] < 1.36
            and not p.assumed
        )  # recorded with an earlier loss
        assert p.config == LMConfig.from_dict(record(f"{LANGUAGE}/gpus/{name}/lm_config.json"))
    shared = [
        run
        for name in ("gpu", "gpu_160m")
        for run in record(f"{LANGUAGE}/{name}.json")["results"]["runs"]
    ]
    plans = {
        mixer: plan(changed("small", compile=True), mixer, micro_batches=2)
        for mixer in {run["mixer"] for run in shared}
    }
    for (
        run
    ) in shared:  # other jobs used their GPUs too: they may be slower than planned, not faster
        assert plans[run["mixer"]].config == LMConfig.from_dict(run["model"])
        assert run["tokens_per_second"] < plans[run["mixer"]].tokens_per_second[1]


def test_ranges_are_no_wider_than_repeats_and_held_out_steps_need():
    plans = {
        row["mixer"]: plan(preset_of(row), row["mixer"], micro_batches=1)
        for row in recorded_steps(compile=True, context=1024)
    }
    again = [
        (row["mixer"], ms) for row in record(f"{LANGUAGE}/steps.json")["rows"] for ms in row["ms"]
    ]
    low, high = np.transpose([ms / 1e3 / plans[mixer].step_seconds for mixer, ms in again])
    assert min(low) == pytest.approx(1) and max(high) == pytest.approx(1)
    ratios = np.array(list(planner.val().values()))
    assert (
        len(ratios) == 16
        and max(*ratios, *(1 / ratios)) == plan(find_preset("owt-350m"), "longhorn").margin
    )
    assert plan(SMALL, "longhorn", micro_batches=10).margin == 1


def test_matrix_products_are_six_operations_per_parameter_and_token():
    config = LMConfig(512, 128, 4, "attention", d_mlp=256)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        SequenceLM(config)(tokens, tokens)[1].backward()
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    work = planner.work_of(config, SequenceLM(config).num_parameters(), tokens.numel(), 16)
    assert counted["aten.mm"] == pytest.approx(work["matrix products"], rel=0.02)


def test_parts_of_a_step_add_up_and_grow_with_their_own_work():
    (row,) = recorded_steps(mixer="attention", context=1024, compile=True)
    parts = planner.parts_of(row)
    work = planner.recorded_work(row)
    assert sum(parts.values()) == pytest.approx(row["ms"] / 1e3) and min(parts.values()) >= 0
    for name in work:
        assert planner.scaled_parts(row, work | {name: 2 * work[name]}) == pytest.approx(
            parts | {name: 2 * parts[name]}
        )
    here, there = (
        plan(SMALL, "longhorn", gpu=gpu, micro_batches=20)
        for gpu in ("H200", "NVIDIA H100 80GB HBM3")
    )
    for name, ratio in ("matrix products", 1), ("scan", 4.8 / 3.35):  # as published
        assert there.work[name] == pytest.approx(
            ratio * here.work[name] * [1 / there.margin, there.margin]
        )
    assert planner.GPUS[here.gpu]["memory"] == pytest.approx(
        record(planner.MACHINE)["memory_bytes"], rel=1e-3
    )


def test_memory_is_shared_by_fsdp_and_cut_by_parts_slices_and_recomputing():
    def of(parts, kind, gpus=4, loss_chunk=8192, again=False):
        preset = changed(
            "owt-120m",
            batch_size=480 + 32 * (kind == "hsdp"),
            loss_chunk=loss_chunk,
            sharding=kind,
            checkpoint_blocks=again,
        )
        return plan(preset, "longhorn", gpus, micro_batches=parts)

    ddp = of(5, "auto")
    fsdp = of(5, "fsdp")
    more = of(10, "ddp")
    whole = of(5, "ddp", loss_chunk=2**20)
    again = of(5, "ddp", again=True)
    P = ddp.parameters
    tiny = plan(changed("owt-120m", batch_size=1, context=8), "longhorn")
    assert ddp.sharding == "ddp" and ddp.memory["Adam"][0] == 8 * P == 4 * fsdp.memory["Adam"][0]
    assert [of(1, "hsdp", gpus).memory["Adam"][0] for gpus in (16, 64)] == [
        P,
        P,
    ]  # 8 GPUs of a node share
    assert (
        ddp.memory["gradients"][0] == 8 * P
        and fsdp.memory["gradients"][0] == 5 * P
        and ddp.peak[0] > fsdp.peak[0]
    )
    assert (
        whole.memory["loss"][1] > 2 * ddp.memory["loss"][1]
        and 2 * more.memory["activations"][0] == ddp.memory["activations"][0]
    )
    assert sum(tiny.memory[name] for name in ("gradients", "activations", "loss")) == pytest.approx(
        4 * P
    )  # when the pass ends
    alpha = planner.kept_per_channel(ddp.like[0])
    width = again.tokens * again.config.d_model
    assert again.memory["activations"][0] == pytest.approx((2 * alpha + 4 * 24) * width)
    assert 5 * again.memory["activations"][0] < ddp.memory["activations"][0]
    assert {
        name: tuple(again.work[name] / ddp.work[name] * [again.margin, 1 / again.margin])
        for name in ("scan", "loss")
    } == {"scan": pytest.approx((1.25, 1.5)), "loss": pytest.approx((1, 1))}


@pytest.mark.parametrize(
    "gpus, network, rate, says",
    [
        (4, None, 1e3, "within a node"),
        (8, 1.5, 1e3, "the network is not used"),
        (64, None, 8 * 40, "assumed    40.0 GB/s"),
        (64, 1.5, 8 * 1.5, "given      1.5 GB/s"),
        (9, 1.0, 1.0, "given      1.0 GB/s"),
    ],
)  # of nine GPUs one is alone in its node
def test_communication_takes_the_slowest_link(gpus, network, rate, says):
    preset = changed("owt-120m", batch_size=576, gradient_accumulation_steps=1)
    p, text = (do(preset, "longhorn_exact", gpus=gpus, network=network) for do in (plan, plan_text))
    fast, slow = p.work["communication"]
    assert (
        slow
        == pytest.approx(
            (gpus - 1) / gpus * 8 * p.parameters / min(planner.link_rate(), 1e9 * rate)
        )
        and fast < slow
    )
    assert says in text and ("assumed" in text) == (gpus > 4)


def test_hsdp_gathers_within_a_node_and_sends_gradients_of_a_shard_between_nodes():
    preset = changed("owt-120m", batch_size=512, sharding="hsdp")
    P = plan(SMALL, "longhorn").parameters
    for gpus, nodes in (16, 2), (64, 8):
        p = plan(preset, "longhorn", gpus, micro_batches=2, network=2.0)
        within = 7 / 8 * (4 + 8 * 2) * P / planner.link_rate()
        between = (1 - 1 / nodes) * 8 * P / 8 / 2e9
        assert p.shards == 8 and p.work["communication"][1] == pytest.approx(within + between)


def test_gpus_wait_for_a_slow_host_and_get_the_largest_part_that_fits():
    tiny = plan(changed("laptop"), "longhorn")
    sharded = plan(changed("laptop", sharding="fsdp"), "longhorn", gpus=2)
    assert tiny.step_seconds[1] == pytest.approx(5 * waits()["none"][1])
    assert sharded.step_seconds == pytest.approx(5 * waits()["fsdp"])
    p = plan(SMALL, "longhorn")
    large = plan(find_preset("slimpajama-1.3b"), "longhorn", gpu="H100")
    assert (
        p.tokens <= PARTS[1] < p.tokens * p.micro_batches / (p.micro_batches - 1)
        and large.peak[1] < 0.9 * 80e9
    )
    assert (
        f"train with --gradient-accumulation-steps {p.micro_batches}; the preset says 20"
        in plan_text("owt-120m", "longhorn")
    )
    for parts, fit in ((128, ": fits"), (16, ": does not fit")):
        assert fit in plan_text("slimpajama-1.3b", "longhorn", micro_batches=parts)


def test_assumed_stands_beside_every_number_that_no_record_holds():
    text = plan_text(
        changed("owt-350m", sharding="fsdp", checkpoint_blocks=True),
        "longhorn",
        gpus=16,
        gpu="H100",
    )
    lines = [line.strip() for line in text.splitlines()]
    assert all(
        "(assumed)" in line
        for line in lines
        if line.startswith(("memory", "of it", "time", "speed", "in all"))
    )
    for text in (
        "370.0M parameters",
        "NVIDIA H100, scaled by published",
        "fsdp on 16 GPUs",
        "40.0 GB/s",
        "a factor of 1.21",
        "227 GB/s per GPU within",
        "ms per block with FSDP",
        "recomputed blocks need 1.25 to 1.5",
    ):
        assert any(line.startswith("assumed") and text in line for line in lines), text
    for steps, unit in (1, "seconds"), (3000, "minutes"), (10**6, "hours"):  # that shows the number
        assert (
            printed(plan_text(changed("small", steps=steps, warmup=0), "longhorn"), unit)[1] >= 0.1
        )


@pytest.mark.parametrize(
    "mixer, options, says",
    [
        (
            "longhorn",
            dict(gpus=64),
            "a batch of 480; a batch of 448 or a batch of 512 or 48 GPUs or 60 GPUs would do",
        ),
        (
            "longhorn",
            dict(gpus=4, micro_batches=7),
            "share a batch of 480 in 7 parts; a batch of 476 or a batch of 504 would do",
        ),
        (
            "longhorn",
            dict(gpus=500),
            "500 GPUs cannot share a batch of 480; a batch of 500 or 240 GPUs or 480 GPUs would do",
        ),
        *(
            ("longhorn", dict(gpus=n), f"{n} GPUs cannot train; there must be 1 or more")
            for n in (0, -8)
        ),
        *(
            (
                "longhorn",
                dict(micro_batches=n),
                f"gradient_accumulation_steps is {n}; it must be 1 or more",
            )
            for n in (0, -8)
        ),
        *(
            ("longhorn", dict(network=rate), f"network is {rate}; it must be more than 0 GB/s")
            for rate in (0, -1.0, np.nan, np.inf)
        ),
        (
            "longhorn",
            dict(gpu="NVIDIA A100"),
            "unknown GPU 'NVIDIA A100'; the planner knows NVIDIA H200 and NVIDIA H100",
        ),
        *(
            (
                "longhorn",
                dict(gpus=n, sharding=kind),
                f"sharding is '{kind}', impossible with {n} GPUs",
            )
            for n, kind in ((2, "none"), (1, "fsdp"))
        ),
        *(
            (
                "longhorn",
                dict(gpus=n, sharding="hsdp"),
                f"hsdp needs several nodes of 8 GPUs, not {n}",
            )
            for n in (8, 12)
        ),
        ("nope", {}, "mixer is 'nope'"),
        ("mamba2", {}, "no step of mamba2 with compile=False was recorded"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(mixer, options, says, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        plan(changed("owt-120m", sharding=options.pop("sharding", "auto")), mixer, **options)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(planner, "ROOT", tmp_path)  # an installation without records
    with pytest.raises(ValueError, match="is missing; the planner reads this record of the kit"):
        record("kernels/results/other.json")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_machine_rates_measures_and_keeps_what_it_did_not_measure(gpus, tmp_path):
    path = tmp_path / "machine.json"
    script = ROOT / "kernels/machine_rates.py"
    about = dict(gpu="a", torch="b", cuda="c")
    subprocess.run(
        [sys.executable, script, "--device", "cpu", "--gpus", str(gpus), "--out", path], check=True
    )
    found = json.loads(path.read_text())
    assert found["launch_us"] > 0 and {
        (row["gpus"], row["ms"] > 0) for row in found["collectives"]
    } == {(2, True)} & {(gpus, True)}
    merged = runpy.run_path(str(script))["merged"]
    write_json(
        path,
        about | {"launch_us": 1.0, "collectives": [{"gpus": 2, "ms": 1}, {"gpus": 4, "ms": 2}]},
    )
    now = about | {"launch_us": 3.0, "collectives": [{"gpus": 2, "ms": 5}]}
    assert merged(now | {"torch": "d"}, path) == now | {
        "torch": "d"
    }  # another version: nothing of the old
    assert merged(now, path) == now | {"collectives": [{"gpus": 2, "ms": 5}, {"gpus": 4, "ms": 2}]}
