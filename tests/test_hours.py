"""Test the ledger's GPU hours: each record counts once, and shared GPUs give a range."""

import json
from pathlib import Path

import pytest

from longhorn_kit.lab.claims.hours import gpu_parts, hours_text, totals
from longhorn_kit.records import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"


def record(experiment, results, seconds, devices=(H200,), missing=0, scale="gpu"):
    return {
        "experiment": experiment,
        "scale": scale,
        "results": results,
        "seconds": seconds,
        "missing": missing,
        "made": {"device": list(devices)},
    }


def parts_of(tmp_path, files):
    for name, content in files.items():
        write_json(tmp_path / name, content)
    return gpu_parts(tmp_path)


def test_runs_are_added_up_by_card_and_searches_without_a_card_stand_apart(tmp_path):
    def run(seconds, device):
        return {"seconds": seconds, "made": {"device": device}}

    models = [
        {
            "runs": [run(3600, H100), run(1800, H200), run(1800, H200)],
            "bracket": {"0.1": 1.0, "0.2": None},
            "bracket_seconds": 900,
        },
        {"runs": [], "bracket": {"0.1": None}, "bracket_seconds": 360},
    ]
    kept = record("one-pass", {"groups": {"paper": models}}, 8460, (H100, H200), missing=3)
    parts = parts_of(tmp_path, {"nbs/lab/results/one-pass/gpu.json": kept})
    both = f"{H100} or {H200}"
    assert [(part.card, part.runs, hours_text([part]), part.note) for part in parts] == [
        (H100, 1, "1.00", "3 jobs not finished"),
        (H200, 2, "1.00", ""),
        (both, 2, "0.25", "searches"),
        (both, 1, "0.10", "no judged run yet"),
    ]
    assert totals(parts) == [["one-pass", 1, 6, "2.35", 0], ["all", 1, 6, "2.35", 0]]


def test_jobs_that_share_a_gpu_have_a_range(tmp_path):
    cells = [{"by_lr": {"0.1": 0.5, "0.2": 0.6}, "accuracy": [0.6, 0.7, None]}]
    (part,) = parts_of(
        tmp_path, {"nbs/lab/results/mqar/gpu.json": record("mqar", {"cells": cells}, 8 * 3600)}
    )
    assert part.runs == 4
    assert part.hours() == (1.0, 8.0)
    assert hours_text([part]) == "1.00 to 8.00"


def test_an_experiment_that_no_claim_has_is_counted_as_a_whole(tmp_path):
    (part,) = parts_of(
        tmp_path, {"nbs/lab/results/one-off/gpu.json": record("one-off", {}, 7200, missing=1)}
    )
    assert part.experiment == "one-off"
    assert part.card == H200
    assert part.runs is None
    assert hours_text([part]) == "2.00"
    assert part.note == "1 job not finished"


def test_what_is_not_recorded_is_not_guessed(tmp_path):
    parts = parts_of(
        tmp_path,
        {
            "nbs/lab/results/recall/laptop.json": record(
                "recall", {}, 50.0, ["cpu"], scale="laptop"
            ),
            "nbs/lab/results/language/steps.json": {"rows": [1, 2], "environment": {"gpu": H100}},
            "nbs/lab/results/language/throughput.json": {
                "rows": [1, 2],
                "failed": [1],
                "seconds": 360,
                "environment": {"gpu": H200},
            },
            "nbs/lab/results/language/gpus/two/config.json": {
                "attempts": [{"environment": {"gpu": H200}}]
            },
            "kernels/results/cpu.json": {"rows": [], "seconds": 10, "environment": {"gpu": None}},
            "kernels/results/h200.json": {"rows": [1], "gpu": H200},
        },
    )
    assert [
        (part.record.split("/")[-1], part.runs, part.seconds, part.card, part.note)
        for part in parts
    ] == [
        ("config.json", None, None, H200, "no time recorded"),
        ("steps.json", 2, None, H100, "no time recorded"),
        ("throughput.json", 3, 360, H200, "1 of them failed"),
        ("h200.json", None, None, H200, "no time recorded"),
    ]
    assert totals(parts)[-1] == ["all", 4, 5, "0.10", 3]


@pytest.mark.parametrize(
    "total, hours, note",
    [(9000, ["2.00", "0.50"], ""), (3600, ["2.00"], "the record's own total is 1.00 h")],
)
def test_a_total_that_is_not_the_sum_of_the_runs_is_said(total, hours, note, tmp_path):
    runs = [{"wall_seconds": 3600, "device": H200}] * 2
    parts = parts_of(
        tmp_path, {"nbs/lab/results/language/gpu.json": record("language", {"runs": runs}, total)}
    )
    assert [hours_text([part]) for part in parts] == hours
    assert parts[0].note == note
    assert parts[0].runs == 2


def test_every_committed_record_of_a_gpu_is_counted_once():
    counted = {part.record for part in gpu_parts(ROOT)}
    names = [
        path
        for folder in ("nbs/lab/results", "kernels/results")
        for path in (ROOT / folder).rglob("*.json")
    ]
    with_gpu = {
        path.relative_to(ROOT).as_posix()
        for path in names
        if '"gpu": "NVIDIA' in path.read_text() or "NVIDIA H" in str(read_json(path).get("made"))
    }
    assert with_gpu <= counted
    for name in counted:
        assert (ROOT / name).exists()
    plan = json.loads((ROOT / "nbs/lab/results/one-pass/gpu.json").read_text())
    own = [part for part in gpu_parts(ROOT) if part.record.endswith("one-pass/gpu.json")]
    assert sum(part.seconds for part in own) == pytest.approx(plan["seconds"], abs=1)
    result = sum(part.runs for part in own)
    expected = sum(
        len(model["bracket"]) + len(model["runs"])
        for models in plan["results"]["groups"].values()
        for model in models
    )
    assert result == expected
