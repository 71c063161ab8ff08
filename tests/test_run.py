"""Experiments give the same record on every engine and after every failure."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import fakes
import toy
from longhorn_kit.lab import run as lab_run
from longhorn_kit.lab.run import Lost, Results, StayingProcesses, run
from longhorn_kit.records import read_record
from sweep import slow_case

TESTS = Path(__file__).parent
EXPECTED = {"diagonal", "exact", "mamba"}
QUICK = {"pause": 0.001}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    record = run(toy.EXPERIMENT, folder=tmp_path_factory.mktemp("here"), workers=0, **QUICK)
    assert record["missing"] == 0
    assert record["results"].keys() == EXPECTED
    counts = {len(seeds) for seeds in record["results"].values()}
    assert counts == {3}
    return record["results"]


def starts(folder):
    return [path.read_text() for path in (folder / "jobs").glob("*/starts.txt")]


@pytest.mark.slow
def test_processes_give_the_same_record_and_nothing_is_run_twice(tmp_path, expected):
    for _ in range(2):
        record = run(toy.EXPERIMENT, folder=tmp_path, workers=2, **QUICK)
        assert record["results"] == expected
        assert record["missing"] == 0
        assert record["made"]["device"] == ["cpu"]
        assert starts(tmp_path) == ["start\n"] * 15
    assert read_record(tmp_path / "record.json") == record
    assert not (tmp_path / "partial.json").exists()


def test_a_job_that_fails_is_tried_again_noted_and_given_up(
    tmp_path, monkeypatch, capsys, expected
):
    monkeypatch.setenv("TOY_FAILS", "diagonal")
    record = run(toy.EXPERIMENT, folder=tmp_path, workers=2, **QUICK)
    assert record["missing"] == 3
    assert record["results"] == expected | {"diagonal": []}
    assert not (tmp_path / "record.json").exists()
    assert read_record(tmp_path / "partial.json") == record
    errors = capsys.readouterr().err
    assert errors.count("ValueError: the toy is broken") == 6
    assert "error-1.txt" in errors
    for note in tmp_path.glob("jobs/*/error-*.txt"):
        note.unlink()
    monkeypatch.delenv("TOY_FAILS")
    assert run(toy.EXPERIMENT, folder=tmp_path, workers=2, **QUICK)["results"] == expected


def test_in_this_process_errors_are_raised(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_FAILS", "mamba")
    with pytest.raises(ValueError, match="the toy is broken"):
        run(toy.EXPERIMENT, folder=tmp_path, workers=0, **QUICK)


@pytest.fixture
def staying(monkeypatch):
    "Let runs use persistent processes, as on a machine with two GPUs."
    engine = StayingProcesses(["0", "1"])
    monkeypatch.setattr(lab_run, "engine_for", lambda *_: engine)
    return engine


def test_processes_that_stay_give_the_same_record(tmp_path, staying, expected):
    record = run(toy.EXPERIMENT, folder=tmp_path, **QUICK)
    assert record["results"] == expected
    assert record["missing"] == 0
    assert starts(tmp_path) == ["start\n"] * 15
    processes = [worker.process for worker in staying.processes.values()]
    assert len(processes) == 2
    for process in processes:
        assert not process.is_alive()


def test_a_process_that_stays_goes_on_after_an_error(tmp_path, staying, monkeypatch, capsys):
    monkeypatch.setenv("TOY_FAILS", "mamba")
    record = run(toy.EXPERIMENT, folder=tmp_path, **QUICK)
    assert record["missing"] == 3
    err = capsys.readouterr().err
    assert err.count("ValueError: the toy is broken") == 6
    for note in tmp_path.glob("jobs/*/error-*.txt"):
        assert "Traceback" in note.read_text()


def test_a_process_that_dies_is_replaced(staying, tmp_path):
    try:
        lost = staying.submit(die, None, {"model": "a"}, tmp_path)
        with pytest.raises(Lost, match="the process ended with code 7"):
            wait(lost)
        after = staying.submit(leave_mark, None, {"model": "a"}, tmp_path)
        assert wait(after) is None
        assert (tmp_path / "mark").exists()
    finally:
        staying.close()


def die(*_):
    os._exit(7)


def leave_mark(_, settings, folder):
    (folder / "mark").touch()


def wait(job):
    while not job.done():
        time.sleep(0.01)
    return job.result()


def test_a_free_process_takes_the_model_that_it_holds():
    engine = StayingProcesses(["0", "1"])

    def worker(model, free):
        return SimpleNamespace(model=model, free=lambda: free)

    engine.processes = {"0": worker("a", False), "1": worker("b", True)}

    def jobs(*models):
        return [{"model": model} for model in models]

    assert engine.choose(jobs("c", "a", "b")) == 2, "a process prefers jobs of its model"
    assert engine.choose(jobs("a", "c")) == 1, "then a model that no process has loaded"
    assert engine.choose(jobs("a", "a")) == 0
    assert engine.choose(jobs(*"acccccccb")) == 1, "a job must not be far ahead of its turn"


def test_a_deadline_stops_the_jobs_and_the_same_call_finishes(tmp_path, expected):
    first = run(toy.EXPERIMENT, folder=tmp_path, workers=2, minutes=1 / 60, pause=0.1)
    assert 0 < first["missing"] <= 9
    second = run(toy.EXPERIMENT, folder=tmp_path, workers=4, pause=0.1)
    assert second["results"] == expected
    assert second["missing"] == 0


def test_no_job_starts_that_would_end_after_the_deadline():
    stored = {lab_run.kind_of({"model": "a", "lr": 1}): [50.0, 70.0]}
    now = time.time()
    assert lab_run.ends_in_time({"model": "a", "lr": 2}, stored, now + 65)
    assert not lab_run.ends_in_time({"model": "a", "lr": 2}, stored, now + 55)
    assert lab_run.ends_in_time({"model": "a", "lr": 2}, {}, now + 1), "the first job always starts"


def test_an_engine_tells_a_lost_process_from_an_error_of_the_job():
    from concurrent.futures import CancelledError

    from distributed import KilledWorker
    from submitit.core.utils import FailedJobError, UncompletedJobError

    slurm = lab_run.Slurm.__new__(lab_run.Slurm)
    dask = lab_run.Dask.__new__(lab_run.Dask)
    assert lab_run.Here().is_loss(Lost("gone"))
    assert slurm.is_loss(UncompletedJobError("preempted"))
    assert not slurm.is_loss(FailedJobError("the job raised an error"))
    assert dask.is_loss(KilledWorker("task", None, 3))
    assert dask.is_loss(CancelledError())
    for engine in (lab_run.Here(), slurm, dask):
        assert not engine.is_loss(ValueError("the toy is broken"))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"scale": "moon"}, "toy has no scale 'moon'; it has: laptop"),
        ({"launcher": "ray"}, "launcher is 'ray'; expected local, slurm or dask"),
        ({"launcher": "dask"}, "set DASK_SCHEDULER"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(tmp_path, monkeypatch, options, says):
    monkeypatch.delenv("DASK_SCHEDULER", raising=False)
    with pytest.raises(ValueError, match=says):
        run(toy.EXPERIMENT, folder=tmp_path, **options)


def test_a_missing_cluster_library_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match='submitit needs the extra "cluster"'):
        lab_run.cluster_library("submitit")


def test_damaged_metrics_are_named(tmp_path):
    run(toy.EXPERIMENT, folder=tmp_path, workers=0, **QUICK)
    path = next(tmp_path.glob("jobs/*/metrics.json"))
    text = path.read_text()
    path.write_text(text.replace("accuracy", "accurate"))
    (tmp_path / "record.json").unlink()
    message = f"{path.parent.name}/metrics.json is damaged"
    with pytest.raises(ValueError, match=message):
        run(toy.EXPERIMENT, folder=tmp_path, workers=0, **QUICK)


def test_results_are_found_by_settings_whatever_their_order_and_kind(tmp_path):
    results = Results(tmp_path)
    result = results.job_folder({"a": 1, "b": (1, 2)})
    expected = results.job_folder({"b": [1, 2], "a": 1})
    assert result == expected
    folder = results.job_folder({"a": 1})
    other_folder = results.job_folder({"a": 2})
    assert folder != other_folder


DRIVER = (
    "import sys, toy; from longhorn_kit.lab.run import run\n"
    "options = {'cluster': 'local'} if sys.argv[2] == 'slurm' else None\n"
    "if __name__ == '__main__': run(toy.EXPERIMENT, folder=sys.argv[1], launcher=sys.argv[2], "
    "workers=2, options=options, pause=0.3)"
)


PATH = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}


def driver(folder, launcher="local", **variables):
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), launcher],
        env=os.environ | PATH | variables,
        start_new_session=True,
    )


def processes_in(folder):
    "Return the processes that name a folder in their command line, and their children."
    import psutil

    def tree(parent):
        try:
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:  # the process has just ended
            return []

    result = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(p.info["cmdline"] or [])
    ]
    return list({p.pid: p for parent in result for p in tree(parent)}.values())


@pytest.mark.parametrize("number", [slow_case(signal.SIGINT), slow_case(signal.SIGKILL)])
def test_ctrl_c_and_a_killed_driver_leave_no_process(tmp_path, number):
    process = driver(tmp_path)
    end = time.monotonic() + 180
    while (
        len(helpers := processes_in(tmp_path)) < 5 and time.monotonic() < end
    ):  # driver, two servers, two jobs
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(180)
    end = time.monotonic() + 60
    while (
        any(p.is_running() and p.status() != "zombie" for p in helpers) and time.monotonic() < end
    ):
        time.sleep(0.1)
    assert len(helpers) >= 5
    for p in helpers:
        assert not (p.is_running() and p.status() != "zombie")


@pytest.fixture
def dask_cluster(tmp_path):
    "Start a scheduler and two workers with one thread each, which nannies restart."
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    begin = (
        [sys.executable, "-m", "distributed.cli.dask_scheduler"],
        [sys.executable, "-m", "distributed.cli.dask_worker"],
    )
    quiet = dict(
        env=os.environ | PATH,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    scheduler = subprocess.Popen([*begin[0], "--host", address, "--no-dashboard"], **quiet)
    folder = str(tmp_path / "dask")
    worker = subprocess.Popen(
        [
            *begin[1],
            address,
            "--nworkers",
            "2",
            "--nthreads",
            "1",
            "--no-dashboard",
            "--local-directory",
            folder,
        ],
        **quiet,
    )
    yield {"DASK_SCHEDULER": address}, worker.pid
    for process in (worker, scheduler):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["local", "slurm", "dask"])
def test_killed_twenty_times_at_random_the_record_is_the_same(
    tmp_path, expected, launcher, request
):
    variables, nanny = request.getfixturevalue("dask_cluster") if launcher == "dask" else ({}, None)
    chance = random.Random(launcher)
    kills = 0
    process = None
    end = time.monotonic() + 1500
    while time.monotonic() < end and not (tmp_path / "record.json").exists():
        if process is None or process.poll() is not None:
            process = driver(tmp_path, launcher, **variables)
        time.sleep(chance.uniform(0.3, 1.2))
        running = processes_in(tmp_path)
        victims = [p for p in running if p.pid not in (process.pid, nanny)]
        if kills < len(fakes.kills(20)) and list(tmp_path.glob("jobs/*/starts.txt")):
            victim = process if chance.random() < 0.4 or not victims else chance.choice(victims)
            try:
                victim.kill()
                kills += 1
            except Exception:  # the process has just ended
                pass
    process.wait(180)
    record = read_record(tmp_path / "record.json")
    assert record["results"] == expected
    assert kills == len(fakes.kills(20))
    for text in starts(tmp_path):
        assert "again" not in text


def job(model, lr, seconds=None, **more):
    settings = {"model": model, "lr": lr, "seed": 0} | more
    return settings if seconds is None else {"settings": settings, "seconds": seconds}


def test_a_job_is_expected_to_take_the_time_of_the_finished_ones_most_like_it():
    stored = {}
    for row in (
        job("a", 1, 10.0, size=1),
        job("a", 2, 20.0, size=1),
        job("b", 1, 50.0, size=1),
        job("b", 1, 70.0, size=2),
    ):
        kind = lab_run.kind_of(row["settings"])
        stored.setdefault(kind, []).append(row["seconds"])

    def likely(**settings):
        return lab_run.likely_seconds(lab_run.kind_of(settings), stored)

    assert likely(model="a", size=1, lr=9, seed=5) == 15  # neither rate nor seed changes the time
    assert likely(model="b", size=2) == 70
    assert likely(model="a", size=2) == 15  # the model counts more than the rest
    assert likely(model="c", size=2) == 70
    assert likely(model="c", size=3) == 37.5  # the mean of all jobs


@pytest.mark.parametrize(
    "running, waiting, workers, left",
    [
        ([], [], 2, 0),
        ([3.0], [], 2, 3),
        ([], [4.0, 3.0, 2.0], 1, 9),
        ([], [4.0, 3.0, 2.0], 2, 5),
        ([5.0, 1.0], [1.0, 1.0], 2, 5),
        ([], [4.0, 3.0], 64, 4),
    ],
)
def test_the_time_left_is_that_of_the_last_worker(running, waiting, workers, left):
    assert lab_run.time_left(running, waiting, workers) == left


def test_an_estimate_counts_what_a_running_job_has_done(monkeypatch):
    monkeypatch.setattr(lab_run.time, "monotonic", lambda: 104.0)
    done = [job("a", 1, 10.0)]
    running = [(job("a", 2), 100.0), (job("b", 1), 60.0)]
    waiting = [job("a", 3)]
    result = lab_run.estimate(done, running, waiting, 2)
    assert result.left == 10
    assert result.whole == 20
    assert result.workers == 2  # 6 s of the first job, the second is late, 10 s of the third
    estimate = lab_run.estimate(done, [], [], 64)
    assert estimate.whole == 10


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0, "less than a minute"),
        (44, "less than a minute"),
        (46, "about 1 min"),
        (239, "about 4 min"),
        (7000, "about 117 min"),
        (9000, "about 2 h"),
    ],
)
def test_estimates_are_round(seconds, words):
    assert lab_run.roughly(seconds) == words


def test_jobs_that_wait_for_results_are_counted_from_the_start(tmp_path, monkeypatch):
    totals = []
    estimates = []

    class Bar(contextlib.nullcontext):
        n = 0

        def __enter__(self):
            return self

        def set_postfix_str(self, text, refresh):
            assert text.endswith(" left") == (self.n < 14)

        def update(self, more):
            self.n += more
            totals.append((self.n, self.total))

    monkeypatch.setattr(lab_run, "progress", lambda **_: Bar())
    run(toy.EXPERIMENT, folder=tmp_path, workers=0, on_estimate=estimates.append, **QUICK)
    assert totals == [(n, 15) for n in range(16)]
    lefts = [result.left for result in estimates]
    assert len(lefts) == 15
    assert lefts[0] > 0
    assert lefts[-1] == 0
    assert estimates[0].workers == 1
    assert (
        run(toy.EXPERIMENT, folder=tmp_path, workers=0, on_estimate=estimates.append, **QUICK)[
            "missing"
        ]
        == 0
    )
    assert len(estimates) == 15  # a finished run is not estimated


def test_a_resumed_run_is_estimated_before_its_first_job(tmp_path):
    estimates = []
    run(toy.EXPERIMENT, folder=tmp_path, workers=0, models=("exact",), **QUICK)
    run(toy.EXPERIMENT, folder=tmp_path, workers=0, on_estimate=estimates.append, **QUICK)
    assert len(estimates) == 11  # five of 15 jobs were done


def test_a_free_gpu_gets_the_next_job(monkeypatch):
    class Job:
        def __init__(self, context, function, arguments, variables):
            self.gpu = variables["CUDA_VISIBLE_DEVICES"]
            self.ended = False

        def done(self):
            return self.ended

    monkeypatch.setattr(lab_run, "LocalJob", Job)
    engine = lab_run.Processes(2, ["3", "5"], "json")
    long = engine.submit(print)
    short = engine.submit(print)
    short.ended = True
    result = [long.gpu, short.gpu, engine.submit(print).gpu]
    assert result == ["3", "5", "5"]
