"""Trackers show the lines of metrics.jsonl: TensorBoard's reader, and stand-ins for the rest."""

import dataclasses
import sys

import numpy as np
import pytest

from longhorn_kit import cli
from longhorn_kit.extras import pip_command
from longhorn_kit.records import read_json, read_jsonl
from sweep import slow_case
from tiny_training import CONFIG, Interrupting, curve, failing, run

TRACKERS = ("tensorboard", "wandb", "trackio")
COMMANDS = {
    "train-lm": "--preset laptop --d-model 16 --n-layer 1 --context 32 --batch-size 4 --steps 4 "
    "--eval-every 2 --data text.txt",
    "train-vision": "--preset digits --epochs 1 --batch-size 256",
}
STAND_IN = """
calls = []
class Run:
    def log(self, values, step): calls.append(values | {"step": step})
    def finish(self): calls.append("finished")
def init(**options):
    if options["config"]["seed"] == 7:
        raise PermissionError("no key;\\nlog in first")
    calls.append(options)
    return Run()
"""


def events(folder):
    "Return the numbers that TensorBoard shows of a run, as lines of metrics."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    lines = {}
    for name in reader.Tags()["scalars"]:
        for event in reader.Scalars(name):
            line = lines.setdefault(event.step, {"step": event.step})
            assert name not in line, f"{name} appears twice at step {event.step}"
            line[name] = event.value
    return [lines[step] for step in sorted(lines)]


def as_shown(folder):
    "Return the lines of metrics.jsonl in TensorBoard's precision and characters."
    lines = []
    for line in read_jsonl(folder / "metrics.jsonl"):
        shown = {name.replace(" ", "_"): float(np.float32(value)) for name, value in line.items()}
        lines.append(shown | {"step": line["step"]})
    return lines


def tracked(name, **changes):
    return dataclasses.replace(CONFIG, track=name, **changes)


@pytest.mark.parametrize("first", ["none", "tensorboard"])
def test_tensorboard_shows_the_metrics_of_a_run_that_was_stopped_and_resumed(tmp_path, first):
    "A run killed at step 38 resumes at 30, tracked from its first or second start."
    with pytest.raises(MemoryError):
        run(tmp_path, Interrupting(38, failing(MemoryError("stopped"))), tracked(first))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 36
    assert first == "none" or events(tmp_path) == as_shown(tmp_path)
    assert run(tmp_path, config=tracked("tensorboard"))["resumed_from"] == 30
    assert events(tmp_path) == as_shown(tmp_path)
    assert len(events(tmp_path)) == CONFIG.steps


@pytest.mark.parametrize("command", ["train-lm", slow_case("train-vision")])
def test_the_commands_write_what_tensorboard_reads(tmp_path, monkeypatch, command):
    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(
        "".join(f"{i} times {i % 7} is {i * (i % 7)}\n" for i in range(2000))
    )
    assert (
        cli.main(
            [command, *COMMANDS[command].split(), "--cpu", "--track", "tensorboard", "--out", "run"]
        )
        == 0
    )
    lines = events(tmp_path / "run")
    assert lines == as_shown(tmp_path / "run")
    assert len(lines) >= 4
    assert lines[-1].keys() & {"val_loss", "top1"}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    "Return a function: name of a tracker -> the calls of its stand-in."
    for name in ("wandb", "trackio"):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: sys.modules[name].calls
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_continues_its_run_and_repeats_no_step(tmp_path, calls, name):
    folder = tmp_path / "run"
    with pytest.raises(MemoryError):
        run(folder, Interrupting(38, failing(MemoryError("stopped"))), tracked(name))
    with pytest.raises(MemoryError):  # killed again before it reaches that step
        run(folder, Interrupting(33, failing(MemoryError("stopped"))), tracked(name))
    run(folder, config=tracked(name))
    starts = [call for call in calls(name) if "project" in call]
    observed = [call for call in calls(name) if "step" in call]
    metadata = starts[0]
    key = read_json(folder / "config.json")["id"]
    assert len(starts) == 3
    assert metadata == starts[1] == starts[2]
    assert metadata["project"] == "longhorn"
    assert metadata["name"] == f"run-{key}"
    assert metadata["resume"] == "allow"
    assert metadata.get("id", key) == key
    assert metadata["config"]["lr"] == CONFIG.lr
    assert calls(name).count("finished") == 3

    expected = curve(read_jsonl(folder / "metrics.jsonl"))
    assert curve(observed) == expected
    assert len(observed) == CONFIG.steps


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_does_not_start_is_one_sentence(tmp_path, calls, name):
    with pytest.raises(ValueError, match=f"{name} does not start: no key; log in first$"):
        run(tmp_path / "run", config=tracked(name, seed=7))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_refused_first(tmp_path, monkeypatch, capsys, command, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    result = cli.main([command, *COMMANDS[command].split(), "--track", name, "--out", "run"])
    assert result == 1
    assert not list(tmp_path.iterdir())
    command = pip_command("track") if name == "tensorboard" else f"pip install {name}"
    assert (
        capsys.readouterr().err
        == f"longhorn: error: track is '{name}', but its package is missing: {command}\n"
    )
