"""Settings of all tests: Triton's interpreter without a GPU, marks, samples, long tests."""

import hashlib
import json
import os
import signal
from collections import defaultdict

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported


# A background job of a shell and its children ignore ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def two_configurations_a_kernel():
    "Let flash-linear-attention time two configurations of a kernel, not all for minutes."
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            from triton.runtime.autotuner import Autotuner

            prune = Autotuner.prune_configs
            patch.setattr(Autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:2])
        yield


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    "Write GPT-2's two files with four merges; unprintable bytes are numbered from 256."
    folder = tmp_path_factory.mktemp("bpe")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    with_space = (letter[32], "the")
    merges = [("t", "h"), ("th", "e"), with_space, ("i", "n")]
    (folder / "vocab.bpe").write_text(
        "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8"
    )
    single = [letter[b] for b in printable + others]
    merged = [a + b for a, b in merges]
    names = single + merged
    ids = {name: i for i, name in enumerate(names)} | {"<|endoftext|>": 50256}
    (folder / "encoder.json").write_text(json.dumps(ids))
    return folder


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "mixer: what every mixer must do; -k NAME runs the checks of one"
    )
    config.addinivalue_line(
        "markers",
        "numeric: compares numbers that processors round differently; "
        "also run with ATEN_CPU_CAPABILITY=default",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    "Start the failure message of a mixer's check with the docstring of the check."
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash and item.get_closest_marker("mixer"):
        demand = " ".join(item.function.__doc__.split())
        crash.message = f"{demand} {crash.message}"
        report.longrepr.addsection("What every mixer must do", demand)
    return report


LONG = ("slow", "faults", "release")
LONG_SECONDS = 1200  # a longer test is stuck, even on a machine that is three times as slow
# Files with long tests run first, so that no worker idles at the end.
FIRST = (
    "test_site",
    "test_distributed",
    "test_cluster",
    "test_train_vision",
    "test_aot",
    "test_gluon_cpu",
)
# Long tests that no sample contains, with reasons.
NOT_SAMPLED = {
    "test_all_kernels_compile": "up to an hour",
    "test_fast_kernels_compile_with_every_release_of_triton": "downloads up to 300 MB per release",
    "test_all_command_lines": "test_some_command_lines has the first of its seeds",
    "test_all_calls": "test_some_calls has the first of its seeds",
}


def pytest_addoption(parser):
    parser.addoption(
        "--sample", metavar="SEED", help="run one case of every test, chosen by this seed"
    )


def one_case_per_test(
    cases,  # test -> names of its cases, in any order
    seed,
):
    "Return one case of every test, chosen by a seed."

    def draw(name):
        return hashlib.sha256(f"{seed} {name}".encode()).digest()

    return {min(names, key=draw) for names in cases.values()}


def sampled(items, seed):
    "Return the items of a sample; UsageError if NOT_SAMPLED names a test that does not exist."
    unknown = NOT_SAMPLED.keys() - {item.originalname for item in items}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise pytest.UsageError(
            f"NOT_SAMPLED in tests/conftest.py names {names}, not a test of this run"
        )
    cases = defaultdict(list)
    for item in items:
        if item.originalname not in NOT_SAMPLED:
            cases[item.path, item.originalname].append(item.nodeid)
    chosen = one_case_per_test(cases, seed)
    return [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    "Skip tests that cannot run here, and long tests unless -m names their mark; sample."
    requested = config.getoption("-m")
    seed = config.getoption("--sample")
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        for mark in LONG:
            if mark in item.keywords and mark not in requested:
                item.add_marker(pytest.mark.skip(reason=f"{mark}: run with -m {mark}"))
        if any(mark in item.keywords for mark in LONG) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if seed is not None:
        chosen = sampled(items, seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_terminal_summary(terminalreporter, config):
    "Print the names of long tests that no sample contains."
    if config.getoption("--sample") is not None:
        terminalreporter.section("not in any sample")
        for name, reason in NOT_SAMPLED.items():
            terminalreporter.write_line(f"{name}: {reason}")
