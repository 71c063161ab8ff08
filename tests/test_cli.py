"""The command line: exit codes, one line for every failure, and resuming without loss."""

import dataclasses
import errno
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fakes
from command_line import fails
from longhorn_kit import __version__, cli
from longhorn_kit.lab import use
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.run import Estimate, Here
from longhorn_kit.lab.train.presets import LM_PRESETS, LMPreset
from longhorn_kit.lab.train.recipe import TrainConfig
from longhorn_kit.lab.train.vision import VISION_PRESETS, VisionConfig
from longhorn_kit.models import MIXERS, SequenceLM
from longhorn_kit.records import read_jsonl, read_record
from sweep import slow_case

LONGHORN = [sys.executable, "-m", "longhorn_kit.cli"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    "Use an empty working folder, with two quick claims instead of the paper's."
    rows = [
        fakes.claim(),
        fakes.claim("second"),
        fakes.claim("idle", module=None, compare=None, minutes={}),
    ]
    monkeypatch.setattr(claims, "CLAIMS", rows)
    monkeypatch.setattr("longhorn_kit.lab.claims.ledger.results_folder", lambda: None)
    monkeypatch.setattr("longhorn_kit.lab.run.engine_for", lambda *_: Here())
    fakes.calls.clear()
    fakes.errors.clear()
    fakes.during.clear()
    monkeypatch.delenv("LONGHORN_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# errors of the command line: exit code 2


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "Missing subcommand"),
        (["reproduc"], "did you mean 'reproduce'?"),
        (["zzz"], "there are: reproduce, claims, prepare, train-lm, generate"),
        (["--oops"], "--oops"),
        (["claims", "--oops"], "--oops"),
        (["reproduce", "--sclae", "laptop"], "--scale"),
        (["reproduce", "--scale", "huge"], "invalid choice 'huge'"),
        (["reproduce", "fak"], "unknown claim 'fak'; did you mean 'fake'?"),
        (["reproduce", "fake", "nothing-like-it"], "unknown claim 'nothing-like-it'"),
        (["reproduce", "fake", "--step", "4"], "--steps"),
        (["reproduce", "fake", "second", "--steps", "4"], "--steps"),
        (["reproduce", "fake", "--workers", "-1"], "--workers is -1; it must be 0 or more"),
        (["reproduce", "fake", "--slurm", "a=b"], "--launcher slurm; got 'a=b' with local"),
        (["reproduce", "fake", "--slurm", "moon"], "--slurm takes NAME=VALUE"),
        (["reproduce", "fake", "--minutes", "-1"], "--minutes is -1.0; it must be 0 or more"),
        (["claims", "fak"], "unknown claim 'fak'; did you mean 'fake'?"),
        (["generate"], "CHECKPOINT"),
        (["generate", "x", "--tokens", "many"], "many"),
        (["train-lm"], "--preset"),
        (["train-lm", "--preset", "laptop", "--out", "o", "--step", "3"], "--steps"),
        (["train-lm", "--preset", "laptop", "--out", "o", "--steps", "3.5"], "3.5"),
        (["train-lm", "--preset", "laptop", "--out", "o", "--d-model", "-8"], "d_model is -8"),
        (["train-lm", "--preset", "laptop", "--out", "o", "--steps", "0"], "steps is 0"),
        (["train-lm", "--preset", "laptop", "--out", "o", "--val", "1"], "val is 1"),
        (
            ["train-lm", "--preset", "laptop", "--out", "o", "--steps", "4", "--warmup", "9"],
            "warmup is 9",
        ),
        (
            ["train-lm", "--preset", "owt-120m", "--out", "o", "--sharding", "zero"],
            "invalid choice 'zero'",
        ),
        (["train-vision", "--preset", "digits", "--out", "o", "--epocs", "3"], "--epochs"),
        (["train-vision", "--preset", "digit", "--out", "o"], "did you mean 'digits'?"),
    ],
)
def test_mistake_in_the_command_line(here, capsys, argv, says):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert list(here.iterdir()) == []
    assert argv[:1] != ["train-lm"] or "longhorn train-lm --help" in err


def test_each_of_several_processes_prints_a_mistake_as_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli.command, "agreed", lambda function, argv: function(argv))
    assert cli.main(["claims", "--oops"]) == 2
    err = capsys.readouterr().err
    (line,) = err.splitlines()
    assert line.startswith("longhorn: error: Unrecognized options")
    assert "Unrecognized options: --oops" in line
    assert "│" not in line
    assert "---" not in line


@pytest.mark.parametrize("argv", [["--help"], ["-h"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_goes_to_stdout_and_explains_every_flag(argv, capsys):
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "usage: longhorn" in out
    assert err == ""
    fields = dataclasses.fields(cli.COMMANDS[argv[0]]) if argv[0] in cli.COMMANDS else ()
    for words in (
        field.name.replace("_", "-") for field in fields if field.name != "settings"
    ):  # the fields are the flags
        assert f"--{words}" in out or words.upper() in out


@pytest.mark.parametrize(
    "command, presets, settings",
    [
        ("train-lm", LM_PRESETS, [*dataclasses.fields(LMPreset), *dataclasses.fields(TrainConfig)]),
        ("train-vision", VISION_PRESETS, dataclasses.fields(VisionConfig)),
    ],
)
def test_help_lists_presets_mixers_and_what_a_preset_fills_in(
    command, presets, settings, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    shown = re.sub("[│╭╮╰╯─]", " ", out)
    words = " ".join(shown.split()).partition("settings options")[2]
    for name, preset in presets.items():
        assert f"  {name}: {preset.description}" in out
    assert command != "train-lm" or f"Mixers: {', '.join(MIXERS)}\n" in out
    without_flag = {"train", "description"}
    if command == "train-vision":
        without_flag |= {"steps", "warmup", "eval_every"}
    for name in {field.name for field in settings} - without_flag:
        explanation, _ = re.search(
            rf"--{name.replace('_', '-')} (.*?)\(default: (.*?)\)", words
        ).groups()
        assert len(explanation.split()) > 1, name
    assert "default: None" not in out
    assert "--description" not in out
    shown = {"train-lm": "laptop", "train-vision": "digits"}[command]
    other = next(name for name in reversed(presets) if name != shown)
    assert f"The settings below have the values of --preset {shown}.\n" in out
    assert cli.main([command, "--preset", other, "--help"]) == 0
    named = capsys.readouterr().out
    assert f"The settings below have the values of --preset {other}.\n" in named
    for name, text in ((shown, out), (other, named)):
        learning_rate = re.search(r"highest learning rate.*?\(default: (.*?)\)", text)[1]
        preset = presets[name]
        expected = (preset.train if command == "train-lm" else preset.config).lr
        assert float(learning_rate) == expected


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out == f"longhorn {__version__}\n"


# reproduce


def test_reproduce_runs_reports_and_does_not_repeat(here, capsys):
    assert cli.main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert fakes.calls == ["fake", "second"]
    assert "at scale laptop: fake, second; about 2 min on two CPU cores" in out
    assert out.count("score: +2.0 points, n = 3, holds") == 2
    last = out.splitlines()[-1]
    assert last == f"report: {Path('runs/report.html')}"
    assert (here / "runs" / "report.html").exists()
    assert cli.main(["reproduce"]) == 0
    assert len(fakes.calls) == 2
    out = capsys.readouterr().out
    assert out.count("already finished") == 2


def test_the_first_finding_stands_in_the_page_while_the_second_claim_runs(here, capsys):
    pages = []
    shown = []

    def look():
        text = (here / "runs" / "report.html").read_text(encoding="utf-8")
        pages.append(text)
        shown.append(capsys.readouterr().out)

    fakes.during["second"] = look
    assert cli.main(["reproduce"]) == 0
    assert len(pages) == 1
    assert pages[0].count('<section id="fake-laptop">') == 1
    assert '<section id="second-laptop">' not in pages[0]
    assert (
        pages[0].index('<section id="fake-laptop">')
        < pages[0].index("<svg")
        < pages[0].index("</figure>")
    )
    assert "still to come when this page was written: second." in pages[0]
    assert pages[0].rstrip().endswith("</html>")
    assert f"report so far: {Path('runs/report.html')}" in shown[0]
    last = (here / "runs" / "report.html").read_text(encoding="utf-8")
    assert "still to come" not in last
    assert '<section id="second-laptop">' in last


def test_an_interrupt_between_claims_leaves_a_readable_page(here, capsys):
    fakes.errors["second"] = KeyboardInterrupt()
    assert "the same command resumes" in fails(capsys, ["reproduce"], 130)
    page = (here / "runs" / "report.html").read_text(encoding="utf-8")
    assert '<section id="fake-laptop">' in page
    assert "still to come when this page was written: second." in page
    fakes.errors.clear()
    assert cli.main(["reproduce"]) == 0
    assert fakes.calls == ["fake", "second", "second"]
    assert "still to come" not in (here / "runs" / "report.html").read_text(encoding="utf-8")


def printed_times(claim, options, later, *estimates, capsys, out=Path("runs")):
    "Return the lines that a series of estimates prints."
    show = cli.time_printer(claim, options, out, later)
    for left, whole, workers, jobs in estimates:
        show(Estimate(left, whole, workers, jobs))
    return capsys.readouterr().out.splitlines()


def test_the_time_left_is_printed_once_with_the_claims_that_follow(here, capsys):
    first = fakes.claim(minutes={"laptop": 2})
    second = fakes.claim("second", minutes={"laptop": 3})
    local = cli.Reproduce()
    slurm = cli.Reproduce(launcher="slurm")
    # the first claim takes twice its recorded time here, so the second should take 6 minutes
    lines = printed_times(first, local, (second,), (180, 240, 2, 6), (60, 240, 2, 2), capsys=capsys)
    assert lines == [
        "  about 9 min left on this machine (2 jobs at a time), of which fake about 3 min"
    ]
    assert printed_times(first, local, (), (20, 60, 1, 1), capsys=capsys) == [
        "  less than a minute left on this machine (1 job at a time)"
    ]
    assert printed_times(first, slurm, (), (9000, 9000, 64, 80), capsys=capsys) == [
        "  about 2 h left after the wait in the queue (up to 64 jobs at a time)"
    ]
    assert printed_times(first, local, (), (0, 60, 2, 0), capsys=capsys) == []
    too_short_for_the_clock = (0.0, 0.0, 1, 2)
    lines = printed_times(first, local, (), too_short_for_the_clock, capsys=capsys)
    assert lines == ["  less than a minute left on this machine (1 job at a time)"]
    done = here / "runs" / "second" / "laptop"
    done.mkdir(parents=True)
    (done / "record.json").write_text("{}")
    lines = printed_times(first, local, (second,), (180, 240, 2, 6), capsys=capsys)
    assert lines == ["  about 3 min left on this machine (2 jobs at a time)"]
    lines = printed_times(
        first, cli.Reproduce(fresh=True), (second,), (180, 240, 2, 6), capsys=capsys
    )
    assert lines == [
        "  about 9 min left on this machine (2 jobs at a time), of which fake about 3 min"
    ]


def test_reproduce_prints_the_time_left_after_the_first_job(here, capsys):
    assert cli.main(["reproduce", "fake", "--seeds", "0", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("  less than a minute left on this machine (1 job at a time)") == 1
    assert cli.main(["reproduce", "fake", "--seeds", "7"]) == 0  # no job is left
    assert " left " not in capsys.readouterr().out


def test_reproduce_runs_only_what_is_missing(here, capsys):
    cli.main(["reproduce", "second"])
    cli.main(["reproduce"])
    assert fakes.calls == ["second", "fake"]


def test_fresh_touches_its_own_claim_only_and_keeps_the_earlier_run(here, capsys):
    cli.main(["reproduce"])
    second = here / "runs" / "second" / "laptop" / "record.json"
    note = here / "runs" / "fake" / "laptop" / "note"
    note.write_text("mine")
    before = second.read_bytes()
    at = second.stat().st_mtime_ns
    assert cli.main(["reproduce", "fake", "--fresh"]) == 0
    assert fakes.calls == ["fake", "second", "fake"]
    assert second.read_bytes() == before
    assert second.stat().st_mtime_ns == at
    text = (here / "runs" / "fake" / "laptop.previous" / "note").read_text()
    assert text == "mine"
    note = here / "runs" / "fake" / "laptop" / "note"
    assert not note.exists()
    assert cli.main(["reproduce", "fake", "--fresh"]) == 0
    note = here / "runs" / "fake" / "laptop.previous" / "note"
    assert not note.exists()


def test_damaged_record_is_summarized_again(here, capsys):
    cli.main(["reproduce", "fake"])
    path = here / "runs" / "fake" / "laptop" / "record.json"
    before = read_record(path)["results"]
    path.write_text("{")
    assert cli.main(["claims"]) == 0
    assert "cannot be judged" in capsys.readouterr().out
    assert cli.main(["reproduce", "fake"]) == 0
    assert read_record(path)["results"] == before
    assert fakes.calls == ["fake"]


def test_settings_are_flags_and_make_a_trial(here, capsys):
    assert cli.main(["reproduce", "fake", "--help"]) == 0
    assert re.search(r"--steps INT\s+steps to take \(default: 3\)", capsys.readouterr().out)
    assert cli.main(["reproduce", "fake", "--seeds", "5", "6", "--steps", "4"]) == 0
    record = read_record(here / "runs" / "fake" / "laptop.trial" / "record.json")
    assert record["settings"] == {"steps": 4, "seeds": [5, 6]}
    assert fakes.calls == ["fake", "fake"]
    out = capsys.readouterr().out
    assert "at scale laptop: fake; settings are changed, so the time is estimated after" in out
    assert "on two CPU cores" not in out
    assert "+4.0 points" in out
    assert "  a trial: the settings differ from those of the scale, " in out
    for row in cli.ledger("runs"):
        assert not row.file
    page = (here / "runs" / "report.html").read_text(encoding="utf-8")
    assert '<section id="fake-laptop-trial">' in page
    assert "does not count it: steps 3 -&gt; 4, seeds [0] -&gt; [5, 6]." in page
    for names in ([], ["fake"]):
        assert cli.main(["claims", *names]) == 0
        trial = f"trial, not counted in the ledger above: {Path('runs/fake/laptop.trial')}\n"
        assert f"{trial}  steps 3 -> 4, seeds [0] -> [5, 6]\n" in capsys.readouterr().out
    assert cli.main(["claims", "second"]) == 0
    assert "trial" not in capsys.readouterr().out
    damaged = here / "runs" / "fake" / "gpu.trial" / "record.json"
    damaged.parent.mkdir()
    damaged.write_text("{}")
    assert cli.main(["claims", "fake"]) == 0
    assert re.search(
        r"warning: a trial is left out: .*gpu.trial.record.json; restore the file",
        capsys.readouterr().err,
    )
    damaged.unlink()
    assert cli.main(["reproduce", "fake", "--steps", "5"]) == 0
    assert read_record(here / "runs/fake/laptop.trial/record.json")["settings"]["steps"] == 5
    kept = f"record-{record['sha256'][:8]}.json"
    assert (
        f"steps 4 -> 5, seeds [5, 6] -> [0]; that record is kept as {kept}"
        in capsys.readouterr().err
    )
    assert read_record(here / "runs/fake/laptop.trial" / kept) == record


def test_claim_without_a_run_names_those_that_have_one(here, capsys):
    assert (
        fails(capsys, ["reproduce", "fake", "idle"])
        == "idle has no run at scale laptop; claims that have one: fake, second"
    )
    assert "at scale laptop: fake, second" in fails(capsys, ["reproduce", "--scale", "paper"])
    assert fakes.calls == []


@pytest.mark.parametrize(
    "error, says",
    [
        (ValueError("k has shape (2,);\n expected (3,)"), "k has shape (2,); expected (3,)"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/fake/model"),
            "no space left on device: runs/fake/model",
        ),
        (RuntimeError("the loss is nan at step 3"), "the loss is nan at step 3"),
        (KeyError("width"), "LONGHORN_DEBUG=1"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_failure_of_a_run_is_one_line(here, capsys, error, says):
    fakes.errors["second"] = error
    assert says in fails(capsys, ["reproduce", "second"])
    assert not (here / "runs" / "report.html").exists()


def test_a_failed_claim_does_not_stop_the_others(here, capsys, monkeypatch):
    monkeypatch.setattr(claims, "CLAIMS", [*claims.CLAIMS, fakes.claim("third")])
    fakes.errors |= {name: RuntimeError(f"no room for {name}") for name in ("fake", "third")}
    assert cli.main(["reproduce"]) == 1
    out, err = capsys.readouterr()
    assert err.endswith(
        "longhorn: error: not done: fake (no room for fake), third (no room for third); "
        "finished jobs are kept\n"
    )
    assert "score: +2.0 points, n = 3, holds" in out
    assert f"report: {Path('runs/report.html')}" in out
    records_of_run = here.glob("runs/*/*/record.json")
    result = [path.parts[-3] for path in records_of_run]
    assert result == ["second"]


def test_jobs_that_are_left_are_a_failure(here, capsys):
    assert "1 job not done; the same command resumes" in fails(
        capsys, ["reproduce", "second", "--minutes", "0"]
    )
    partial = here / "runs" / "second" / "laptop" / "partial.json"
    assert partial.exists()
    assert cli.main(["reproduce", "second"]) == 0


def test_interrupt_says_how_to_go_on(here, capsys):
    fakes.errors["fake"] = KeyboardInterrupt()
    assert "the same command resumes" in fails(capsys, ["reproduce"], 130)


def test_debug_shows_the_traceback(here, monkeypatch):
    monkeypatch.setenv("LONGHORN_DEBUG", "1")
    fakes.errors["fake"] = ValueError("inside")
    with pytest.raises(ValueError, match="inside"):
        cli.main(["reproduce"])


@pytest.mark.parametrize("out", ["file", "file/deeper", "/proc/runs", "", "x" * 300])
def test_folder_that_cannot_be_written_fails_before_anything_runs(here, capsys, out):
    (here / "file").write_text("mine")
    if out == "":
        assert cli.main(["reproduce", "--out", ""]) == 0  # the current folder
        return
    assert "cannot write to" in fails(capsys, ["reproduce", "--out", out])
    assert fakes.calls == []
    assert (here / "file").read_text() == "mine"


def test_a_recipe_runs_its_command_and_reports_its_failure(here, capsys, monkeypatch):
    recipes = dict(
        done="echo trained > model && echo evaluated > scores",
        broken="exit 7",
        filled="longhorn eval --model FOLDER",
    )
    monkeypatch.setattr(
        claims,
        "CLAIMS",
        [
            fakes.claim(name, module=None, minutes={}, commands={"paper": text})
            for name, text in recipes.items()
        ],
    )
    assert cli.main(["reproduce", "done", "--scale", "paper"]) == 0
    assert (here / "scores").read_text() == "evaluated\n"
    assert "the full recipe" in capsys.readouterr().out
    assert "broken (the command of the claim ended with code 7)" in fails(
        capsys, ["reproduce", "broken", "--scale", "paper"]
    )
    assert "it has a recipe: --scale paper" in fails(capsys, ["reproduce", "done"])
    assert "has no run at scale paper; claims" in fails(
        capsys, ["reproduce", "filled", "--scale", "paper"]
    )


def test_downstream_trains_and_evaluates_every_model():
    command = cli.recipe(claims.find_claim("downstream"), "paper")
    assert "for mixer in longhorn mamba gla" in command
    assert command.index("train-lm") < command.index("longhorn eval")
    assert "--tasks downstream" in command


def test_report_that_cannot_be_written_keeps_the_runs(here, capsys):
    (here / "runs" / "report.html").mkdir(parents=True)
    assert "report.html" in fails(capsys, ["reproduce"])
    assert len(fakes.calls) == 2
    record = here / "runs" / "fake" / "laptop" / "record.json"
    assert record.exists()


def test_claims_prints_what_was_found(here, capsys):
    cli.main(["reproduce", "fake"])
    capsys.readouterr()
    assert cli.main(["claims"]) == 0
    out = capsys.readouterr().out
    assert "laptop: score" in out
    assert "+2.0 points" in out
    assert "not run" in out
    assert "longhorn reproduce CLAIM" in out
    assert cli.main(["claims", "second", "--out", "elsewhere"]) == 0
    out, err = capsys.readouterr()
    assert "not run" in out
    assert "second: The second claim" in out
    assert "The fake claim" not in out
    assert "folder elsewhere does not exist" in err


STOPPED = """
import sys
import fakes, toy
from longhorn_kit import cli
from longhorn_kit.lab.claims import registry as claims
if __name__ == "__main__":
    claims.CLAIMS = [fakes.claim("toy", module="toy")]
    sys.exit(cli.main(["reproduce", "toy", "--workers", "2", "--pause", "0.5"]))
"""


@pytest.mark.slow
def test_sigterm_ends_reproduce_with_one_line(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    folders = [str(Path(__file__).parent), *sys.path]
    path = os.pathsep.join(folders)
    child = subprocess.Popen(
        [sys.executable, "stopped.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "LONGHORN_DEBUG": "0"},
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("runs/toy/*/jobs/*/steps.txt"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGTERM)  # SLURM and `timeout` also signal the workers
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in out + err
    errors = [line for line in err.splitlines() if line.startswith("longhorn: error: ")]
    expected = (
        "longhorn: error: stopped by SIGTERM; finished jobs are kept, and the same command resumes"
    )
    assert errors == [expected]
    assert "BrokenPipe" not in err, err
    assert "a job failed" not in err, err


@pytest.mark.parametrize("kind", cli.COMMANDS.values(), ids=cli.COMMANDS)
def test_sigterm_ends_every_command_with_one_line(kind, monkeypatch, capsys):
    class Stopped(kind):
        def __init__(self):
            pass

        def __call__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    monkeypatch.setattr(cli.command, "parse", lambda argv: Stopped())
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["stopped"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    reported = capsys.readouterr().err
    assert re.fullmatch("longhorn: error: stopped by SIGTERM(; [a-z, ]+)?\n", reported)
    assert ("resumes" in reported) == (
        kind in (cli.Reproduce, cli.Prepare, cli.TrainLM, cli.TrainVision)
    )


def test_a_forked_process_of_a_command_ends_as_usual():
    "Run in a new process, because a fork may wait for a lock of another thread."
    script = """
import multiprocessing, time
from longhorn_kit import cli

def work(messages):
    messages.send("started") # Python drops a signal that arrives while it forks
    time.sleep(30)

with cli.sigterm_interrupts():
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,))
    child.start()
    ours.recv()
    child.terminate()
    child.join(20)
print(child.exitcode)
"""
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    result = shown.stdout.strip()
    expected = str(-signal.SIGTERM)
    assert result == expected, shown.stderr


# generate


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch

    from longhorn_kit.models import LMConfig, SequenceLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    SequenceLM(LMConfig(vocab_size=256, d_model=8, n_layer=1)).save_pretrained(folder)
    return folder


def test_generate_prints_prompt_and_text_and_repeats_with_a_seed(model, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert (
            cli.main(
                [
                    "generate",
                    str(model),
                    "--prompt",
                    "état",
                    "--tokens",
                    "20",
                    "--top-k",
                    "50",
                    "--seed",
                    seed,
                ]
            )
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("état")
    assert cli.main(["generate", str(model), "--tokens", "0", "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "a\n"


def test_generate_agrees_with_the_model(model, capsys):
    import torch

    from longhorn_kit.lab.claims.report import readable
    from longhorn_kit.lab.data.tokenizers import get_tokenizer
    from longhorn_kit.models import SequenceLM

    cli.main(["generate", str(model), "--prompt", "abc", "--tokens", "12", "--temperature", "0"])
    tokens = (
        SequenceLM.from_pretrained(model)
        .eval()
        .generate(torch.tensor([list(b"abc")]), 12, temperature=0)
    )
    result = capsys.readouterr().out
    text = get_tokenizer("bytes").decode(tokens[0].tolist())
    expected = readable(text) + "\n"
    assert result == expected


def test_generate_reads_what_export_wrote(model, tmp_path, capsys):
    pytest.importorskip("transformers")
    result = cli.main(["export", str(model), str(tmp_path / "out")])
    assert result == 0
    capsys.readouterr()
    texts = set()
    for folder in (model, tmp_path / "out"):
        assert (
            cli.main(
                ["generate", str(folder), "--prompt", "état", "--tokens", "12", "--top-k", "40"]
            )
            == 0
        )
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_generate_and_export_tell_checkpoints_apart_alike(model, tmp_path, capsys):
    pytest.importorskip("transformers")
    weights = (model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    config = json.loads((model / "config.json").read_text()) | {
        "mixer_options": {"model_type": "longhorn"}
    }
    for text in (json.dumps(config), json.dumps(["model_type"]), "7", '{"model_type": '):
        (tmp_path / "config.json").write_text(text)
        said = {
            fails(capsys, [*command, str(tmp_path), *more])
            for command, more in ((["generate"], []), (["export"], [str(tmp_path / "out")]))
        }
        assert len(said) == 1
        assert "config.json" in said.pop()


def test_generate_refuses_the_tokenizer_of_another_model(tmp_path, capsys):
    from longhorn_kit.models import LMConfig, SequenceLM

    for size in (128, 50304):
        SequenceLM(LMConfig(vocab_size=size, d_model=8, n_layer=1)).save_pretrained(
            tmp_path / str(size)
        )
        says = fails(capsys, ["generate", str(tmp_path / str(size)), "--tokenizer", "bytes"])
        assert f"the tokenizer has 256 tokens, but the model has {size}; name the tokenizer" in says


def test_generate_sends_no_control_characters(model, capsys):
    cli.main(["generate", str(model), "--prompt", "\x1b[2J", "--tokens", "300"])
    out = capsys.readouterr().out
    assert out.startswith("\ufffd[2J")
    for letter in out:
        assert not (ord(letter) < 32 and letter not in "\n\t")


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-k", "0"], "top_k"),
        (["--top-p", "0"], "top_p"),
        (["--top-p", "1.5"], "top_p"),
        (["--tokens", "-3"], "tokens is -3"),
        (["--tokenizer", "words"], "words"),
        (["--seed", str(2**64)], "seed is 18446744073709551616; expected"),
        (["--seed", str(-(2**70))], "seed is -1180591620717411303424; expected"),
    ],
)
def test_generate_refuses_impossible_settings(model, capsys, flags, says):
    assert says in fails(capsys, ["generate", str(model), *flags])


def test_generate_reads_a_prompt_from_standard_input(model, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("from a file\n"))
    assert cli.main(["generate", str(model), "--prompt", "-", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("from a file\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for prompt in ("-", ""):
        assert "the prompt is empty" in fails(
            capsys, ["generate", str(model), "--prompt", prompt], 2
        )


def test_generate_refuses_a_prompt_that_is_not_utf_8(model, capsys, monkeypatch):
    import io

    reported = "the prompt is not UTF-8 text"
    assert reported in fails(
        capsys, ["generate", str(model), "--prompt", os.fsdecode(b"caf\xe9")], 2
    )
    for errors in ("strict", "surrogateescape"):  # the second is for the locale C
        stream = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors)
        monkeypatch.setattr("sys.stdin", stream)
        assert reported in fails(capsys, ["generate", str(model), "--prompt", "-"], 2)


def test_checkpoints_that_are_missing_or_damaged(model, tmp_path, capsys):
    weights = (model / "model.safetensors").read_bytes()
    config = (model / "config.json").read_text()
    assert "nowhere does not exist" in fails(capsys, ["generate", str(tmp_path / "nowhere")])
    assert "contains no model" in fails(capsys, ["generate", str(tmp_path)])
    (tmp_path / "config.json").write_text(config)
    half = weights[: len(weights) // 2]
    (tmp_path / "model.safetensors").write_bytes(half)
    assert "model.safetensors" in fails(capsys, ["generate", str(tmp_path)])
    (tmp_path / "model.safetensors").write_bytes(weights)
    for damaged in (
        config.replace('"longhorn"', '"longhorm"'),
        config.replace('"d_model": 8', '"d_model": 9'),
    ):
        (tmp_path / "config.json").write_text(damaged)
        fails(capsys, ["generate", str(tmp_path)])
    assert "contains no model" in fails(capsys, ["generate", str(tmp_path / "config.json")])


@pytest.mark.parametrize(
    "data, text",
    [(text.encode(), text) for text in ("plain", "état → β 😀", "")]
    + [(b"a\xff\xfeb\xe2\x86", "ab")],
)
def test_streamed_text_never_holds_half_a_character_and_passes_over_bytes_that_are_no_text(
    data, text
):
    from longhorn_kit.lab.data.tokenizers import get_tokenizer

    pieces = []
    use.stream_text(data, get_tokenizer("bytes"), pieces.append)
    result = "".join(pieces).replace("\ufffd", "" if text == "ab" else "\ufffd")
    assert result == text


# with the real command


def command(*words, **options):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LONGHORN_DEBUG": "0",
        **options.pop("env", {}),
    }
    return subprocess.Popen(
        [*LONGHORN, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def test_help_is_quick_and_starts_no_torch():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "longhorn_kit.cli", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "usage: longhorn" in done.stdout
    lines = done.stderr.splitlines()
    imported = {line.split("|")[-1].strip() for line in lines}
    assert "tyro" in imported
    assert not imported & {"torch", "matplotlib", "numpy", "datasets"}
    assert time.monotonic() - start < 10  # generous limit: it takes 0.2 s on a quiet machine


def test_closed_pipe_is_silent():
    child = command("claims")
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(60) in (0, 1)


@pytest.mark.parametrize(
    "closed, words, code",
    [
        (">&- 2>&-", "claims recall", 0),
        slow_case(">&-", "claims", 0),
        slow_case(">&-", "claims recal", 2),
        ("2>&-", "claims recal", 2),
    ],
)
def test_a_closed_output_is_no_failure(closed, words, code):
    done = subprocess.run(
        ["sh", "-c", f"exec '{sys.executable}' -m longhorn_kit.cli {words} {closed}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_closed_streams_are_empty(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    cli.open_closed_streams()
    assert sys.stdin.read() == ""
    assert sys.stdout.write("x") == sys.stderr.write("x") == 1


def test_a_terminal_without_all_characters_shows_the_others_and_a_mistake_ends_with_code_2():
    out, err = (child := command("claims", env={"PYTHONIOENCODING": "ascii"})).communicate(
        timeout=60
    )
    assert child.returncode == 0
    assert err == ""
    assert " ? " in out
    assert "Run one: longhorn reproduce" in out
    out, err = (child := command("reproduce", "recal")).communicate(timeout=60)
    assert child.returncode == 2
    assert out == ""
    assert err == "longhorn: error: unknown claim 'recal'; did you mean 'recall'?\n"


# training, interrupting and resuming


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        content = f"the cow says moo {i} times\n" * 40
        (folder / f"{i}.txt").write_text(content)
    return folder


def tiny(text, out, *flags):
    return [
        "train-lm",
        "--preset",
        "laptop",
        "--data",
        f"{text}/*.txt",
        "--out",
        str(out),
        "--d-model",
        "8",
        "--n-layer",
        "1",
        "--batch-size",
        "2",
        "--context",
        "16",
        "--steps",
        "4",
        *flags,
    ]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "Prepare text in a separate folder; use one thread, since models are too small for two."
    import torch

    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_train_then_generate(text, tmp_path, cache, capsys):
    assert cli.main(tiny(text, tmp_path / "a run")) == 0
    out = capsys.readouterr().out
    assert f"longhorn generate '{tmp_path}/a run/model' --prompt" in out
    for checkpoint in (tmp_path / "a run", tmp_path / "a run" / "model"):
        assert cli.main(["generate", str(checkpoint), "--prompt", "the", "--tokens", "5"]) == 0
        assert capsys.readouterr().out.startswith("the")
    config = json.loads((tmp_path / "a run" / "config.json").read_text())
    result = config["config"]["steps"]
    assert result == 4
    assert "contains a run of train-lm" in fails(
        capsys, ["train-vision", "--preset", "digits", "--out", str(tmp_path / "a run")]
    )
    assert "contains a language model" in fails(
        capsys, ["eval-vision", str(tmp_path / "a run"), "--data", "digits"]
    )
    with pytest.raises(
        ValueError, match=f"the model of this run is in {tmp_path / 'a run' / 'model'}"
    ):
        SequenceLM.from_pretrained(tmp_path / "a run")


def test_train_lm_reads_the_named_column_of_records(tmp_path, cache, capsys):
    (tmp_path / "a.jsonl").write_text(
        "".join(
            json.dumps({"id": i, "body": f"the cow says moo {i} times\n" * 40}) + "\n"
            for i in range(40)
        )
    )
    words = tiny(tmp_path, tmp_path / "run", "--data", str(tmp_path / "a.jsonl"))
    assert (
        fails(capsys, words)
        == f"{tmp_path}/a.jsonl, line 1 has no column 'text' or 'content'; it has id, body"
    )
    assert not (tmp_path / "run").exists()
    assert cli.main([*words, "--text-column", "body"]) == 0
    path = next((tmp_path / "cache").glob("*/index.json"))
    index = json.loads(path.read_text())
    assert index["train"]["documents"] == index["val"]["documents"] == 40
    assert (
        next((tmp_path / "cache").glob("*/train.bin"))
        .read_bytes()
        .startswith(b"the cow says moo 0 times\n")
    )
    capsys.readouterr()
    assert "column 'id' has a value of type int, not text" in fails(
        capsys, [*words, "--text-column", "id"]
    )


def test_hold_out_moves_long_documents_and_names_a_mistake(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    parts = (("train", (3, 500, 20, 600)), ("val", (5,)))
    for part, sizes in parts:
        (tmp_path / "text" / f"toy.{part}.txt").write_text(
            "".join("x" * size + "\n<|endoftext|>\n" for size in sizes)
        )
    words = [
        "hold-out",
        str(tmp_path / "text"),
        str(tmp_path / "out"),
        "--count",
        "2",
        "--least",
        "100",
    ]
    assert cli.main(words) == 0
    assert (
        capsys.readouterr().out
        == f"toy: 2 documents held out, 1,100 bytes\nwritten: {tmp_path / 'out'}\n"
    )
    with lzma.open(tmp_path / "out/toy.train.txt.xz") as file:
        content = file.read()
    assert content == b"xxx\n<|endoftext|>\n" + b"x" * 20 + b"\n<|endoftext|>\n"
    assert cli.main(words) == 1
    assert (
        capsys.readouterr().err
        == f"longhorn: error: {tmp_path / 'out'} exists; name a new folder\n"
    )


def test_prepared_text_is_data_wherever_its_folder_lies(tmp_path, cache, capsys):
    source = tmp_path / "a.jsonl"
    words = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--text-column",
        "body",
        "--cache",
        str(tmp_path / "ours"),
    ]
    source.write_text(
        "".join(
            json.dumps({"body": f"the cow says moo {i} times\n" * 40}) + "\n" for i in range(200)
        )
    )
    assert cli.main([*words, "--limit", "150", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    trained, held, kind, folder = out.splitlines()
    assert trained.startswith("to train on: ")
    assert " tokens of 1" in trained
    assert held.startswith("held out: ")
    assert kind == "tokenizer: bytes; checked in full"
    assert folder.startswith("prepared: ")
    (tmp_path / "ours").rename(tmp_path / "theirs")
    source.unlink()
    folder = next((tmp_path / "theirs").iterdir())
    words = tiny(tmp_path, tmp_path / "run", "--data", str(folder))
    assert cli.main(words) == 0
    assert not (tmp_path / "cache").exists()
    assert "checked by size and samples" in capsys.readouterr().out
    words = tiny(tmp_path, tmp_path / "again", "--data", str(folder), "--verify")
    assert cli.main(words) == 0
    assert "checked in full" in capsys.readouterr().out
    (folder / "val.bin").write_bytes(b"moo")
    assert "val.bin is missing or has the wrong size" in fails(
        capsys, tiny(tmp_path, tmp_path / "other", "--data", str(folder))
    )


def test_a_run_on_another_column_is_not_continued(tmp_path, cache, capsys):
    (tmp_path / "a.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{i} moo\n" * 99, "body": f"{i} baa\n" * 99}) + "\n"
            for i in range(20)
        )
    )
    words = tiny(tmp_path, tmp_path / "run", "--data", str(tmp_path / "a.jsonl"))
    assert cli.main(words) == 0
    capsys.readouterr()
    assert "contains a run on another text" in fails(capsys, [*words, "--text-column", "body"])


@pytest.mark.parametrize(
    "flags, code, says",
    [
        (["--preset", "laptob"], 2, "unknown preset 'laptob'; did you mean 'laptop'?"),
        (["--mixer", "mambo"], 2, "unknown mixer 'mambo'; did you mean 'mamba'?"),
        (["--data", "nowhere/*.txt"], 1, "nowhere"),
        (["--data", "nowhere.txt"], 1, "nowhere.txt"),
        (["--data", ""], 1, "source ''"),
        (["--tokenizer", "words"], 1, "words"),
        (["--out", "images"], 1, "contains a run of train-vision"),
        (["--out", "file"], 1, "file"),
        (["--out", "file/deeper"], 1, "file"),
        (["--out", ""], 2, "--out FOLDER is missing"),
        (["--d-model", "1000000"], 1, "GB; lower d_model, n_layer, batch_size or context"),
        (["--d-model", str(2**30)], 1, "less than 2**24"),
        (["--n-layer", "10000000"], 1, "training needs at least"),
        (["--batch-size", str(2**31 - 1), "--n-layer", "100"], 1, "training needs at least"),
    ],
)
def test_training_that_cannot_start_says_why(
    text, tmp_path, cache, capsys, monkeypatch, flags, code, says
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "images.json").touch()
    message = fails(capsys, [*tiny(text, "run"), *flags], code)
    assert says in message
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 160 bytes. Error code 12"
        ),
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
        ),
    ],
)
def test_too_little_memory_is_one_sentence(error):
    assert re.fullmatch(
        r"not enough memory: PyTorch tried to allocate (160 bytes|2.00 GiB); "
        r"use a smaller model or a smaller batch",
        cli.one_line(error),
    )


def test_zero_is_a_value_and_not_a_missing_flag(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "longhorn_kit.lab.train.lm.train_lm", lambda *words, **options: given.update(options)
    )
    assert (
        cli.main(
            [
                "train-lm",
                "--preset",
                "laptop",
                "--out",
                "o",
                "--seed",
                "0",
                "--warmup",
                "0",
                "--save-every",
                "0",
                "--compile",
                "--loss-chunk",
                "0",
                "--weight-decay",
                "0",
            ]
        )
        == 0
    )
    assert given == {
        "warmup": 0,
        "save_every": 0,
        "compile": True,
        "weight_decay": 0,
    }  # other settings come from the preset


def test_options_of_the_mixer_and_first_weights_reach_the_run(monkeypatch, tmp_path, capsys):
    given = []
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).touch()
    monkeypatch.setattr(
        "longhorn_kit.lab.train.lm.train_lm", lambda *words, **options: given.append(words[6:])
    )
    words = ["train-lm", "--preset", "laptop", "--out", "o"]
    assert cli.main(words) == 0
    assert (
        cli.main(
            [
                *words,
                "--d-state",
                "32",
                "--expand",
                "0",
                "--key-norm",
                "--init-from",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    expected = [({}, ""), ({"d_state": 32, "expand": 0, "key_norm": True}, str(model))]
    assert given == expected
    assert "checkpoint nowhere does not exist" in fails(capsys, [*words, "--init-from", "nowhere"])


def test_the_authors_switches_reach_the_run(text, tmp_path, cache, capsys):
    words = tiny(
        text, tmp_path / "run", "--mixer", "attention", "--decay", "official", "--sizes", "official"
    )
    assert cli.main(words) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    result = config["config"]["decay"]
    assert result == "official"
    result = json.loads((tmp_path / "run" / "lm_config.json").read_text())["d_mlp"]
    assert result == 64
    capsys.readouterr()
    assert "contains a run with decay=official, but this run has decay=matrices" in fails(
        capsys, [*words, "--decay", "matrices"]
    )
    assert "contains a run with mixer_options=" in fails(capsys, [*words, "--sizes", "matched"])
    assert "the authors' size of retnet" in fails(
        capsys, tiny(text, tmp_path / "other", "--mixer", "retnet", "--sizes", "official")
    )


@pytest.mark.parametrize(
    "flags, says",
    [
        ([], "--out"),
        (["--out", "o", "--gpus", "2"], "--gpus"),
        (["--out", "o", "--mixer", "mambo"], "did you mean 'mamba'?"),
    ],
)
def test_flags_that_start_no_run(tmp_path, monkeypatch, capsys, flags, says):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train-lm", "--preset", "owt-120m", *flags]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_folder_of_another_run_is_not_overwritten(text, tmp_path, cache, capsys):
    cli.main(tiny(text, tmp_path / "run"))
    capsys.readouterr()
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert "contains a run with" in fails(capsys, tiny(text, tmp_path / "run", "--lr", "0.5"))
    assert "contains a run with" in fails(
        capsys, tiny(text, tmp_path / "run", "--mixer", "attention")
    )
    content = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert content == weights


def test_divergence_is_one_line(text, tmp_path, cache, capsys):
    assert "learning rate" in fails(
        capsys, tiny(text, tmp_path / "run", "--lr", "1e30", "--steps", "40", "--warmup", "1")
    )


def no_leftovers(folder):
    assert not [
        path.name
        for path in Path(folder).rglob("*")
        if "partial" in path.name or path.suffix in (".part", ".tmp", ".old")
    ]


@pytest.mark.slow
def test_interrupted_training_goes_on_and_ends_as_if_it_had_not_been(text, tmp_path, cache, capsys):
    words = tiny(text, tmp_path / "run", "--steps", "120", "--save-every", "20")
    child = command(*words, env={"LONGHORN_CACHE": str(tmp_path / "cache")})
    until = time.monotonic() + 60
    while (
        not read_jsonl(tmp_path / "run" / "metrics.jsonl")
        and child.poll() is None
        and time.monotonic() < until
    ):
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    result = [line for line in err.splitlines() if line.startswith("longhorn: error: ")][-1].count(
        "resumes from it"
    )
    assert result == 1
    assert "Traceback" not in err
    no_leftovers(tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    assert re.search(
        "contains no model: its run stopped at step .* of 120; the same training command",
        fails(capsys, ["generate", str(tmp_path / "run")]),
    )
    assert cli.main(words) == 0
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(
        range(1, 121)
    )


@pytest.mark.slow
def test_interrupted_reproduction_leaves_whole_files_only(tmp_path):
    child = command("reproduce", "recall", "--out", str(tmp_path / "runs"))
    while "[1/1] recall" not in child.stdout.readline():
        assert child.poll() is None
    time.sleep(2)  # the process is importing or in the first run
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    # If the interrupt arrives inside `exec`, as in an import, the signal ends Python; a shell shows
    # 130 in both cases.
    assert child.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err
    assert (
        err.splitlines()[-1]
        == "longhorn: error: interrupted; finished jobs are kept, and the same command resumes"
    )
    record = tmp_path / "runs" / "recall" / "laptop" / "record.json"
    assert not record.exists()
    no_leftovers(tmp_path / "runs")
    for path in (tmp_path / "runs").rglob("*.json"):
        json.loads(path.read_text())
