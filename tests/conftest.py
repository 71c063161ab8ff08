"""Where there is no GPU, Triton's interpreter runs the kernels: the variable must be set before triton is imported."""
import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A shell that starts a job in the background makes it deaf to ctrl-C, and its children with it; some tests press ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def two_configurations_a_kernel():
    "flash-linear-attention times all configurations of a kernel before it first runs it, for minutes; to be right, two will do."
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            from triton.runtime.autotuner import Autotuner
            prune = Autotuner.prune_configs
            patch.setattr(Autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:2])
        yield


def pytest_configure(config):
    config.addinivalue_line("markers", "mixer: what every mixer must do; -k NAME runs the checks of one")
    config.addinivalue_line("markers", "numeric: compares numbers that processors round differently; also run with ATEN_CPU_CAPABILITY=default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    "The failure of a mixer's check starts with the sentence that says what it demands."
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash and item.get_closest_marker("mixer"):
        demand = " ".join(item.function.__doc__.split())
        crash.message = f"{demand} {crash.message}"
        report.longrepr.addsection("What every mixer must do", demand)
    return report


def pytest_collection_modifyitems(config, items):
    "Skip what this machine cannot run (`cuda`), and what takes long unless its mark is asked for (`-m slow`, `-m release`)."
    asked = config.getoption("-m")
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        for mark in ("slow", "faults", "release"):
            if mark in item.keywords and mark not in asked:
                item.add_marker(pytest.mark.skip(reason=f"{mark}: run with -m {mark}"))
