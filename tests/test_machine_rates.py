"""Test the measurement of a machine's rates; a record keeps values that are not measured again."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from longhorn_kit.records import write_json

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_machine_rates_measures_and_keeps_what_it_did_not_measure(gpus, tmp_path):
    path = tmp_path / "machine.json"
    script = ROOT / "kernels/machine_rates.py"
    command = [sys.executable, script, "--device", "cpu", "--gpus", str(gpus), "--out", path]
    subprocess.run(command, check=True)
    record = json.loads(path.read_text())
    assert record["launch_us"] > 0
    result = {row["gpus"] for row in record["collectives"]}
    expected = {2} if gpus == 2 else set()
    assert result == expected
    for row in record["collectives"]:
        assert row["ms"] > 0

    merged = runpy.run_path(str(script))["merged"]
    versions = {"gpu": "a", "torch": "b", "cuda": "c"}
    four = {"gpus": 4, "ms": 2}
    write_json(path, versions | {"launch_us": 1.0, "collectives": [{"gpus": 2, "ms": 1}, four]})
    now = versions | {"launch_us": 3.0, "collectives": [{"gpus": 2, "ms": 5}]}
    assert merged(now | {"torch": "d"}, path) == now | {
        "torch": "d"
    }  # with another version, no old values are kept
    expected = now | {"collectives": [{"gpus": 2, "ms": 5}, four]}
    assert merged(now, path) == expected
