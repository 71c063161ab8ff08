"""Longhorn Kit: state space models as online learners. Everything but the `__init__` files is exported from nbs/."""
__version__ = "0.1.0"

import importlib
import os
import sys
import warnings
from glob import glob
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

# Triton asks once, when it is first imported: on a Linux machine without a GPU its kernels run in its interpreter.
# Child processes inherit the variable. One that finds a GPU, such as a job of a batch system, takes it back.
if sys.platform == "linux" and "triton" not in sys.modules:
    if any(map(glob, ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"))):
        if os.environ.pop("LONGHORN_KIT_INTERPRETS", None):
            os.environ.pop("TRITON_INTERPRET", None)
    elif "TRITON_INTERPRET" not in os.environ:
        os.environ.update(TRITON_INTERPRET="1", LONGHORN_KIT_INTERPRETS="1")

# The public names, for type checkers.
if TYPE_CHECKING:
    from .models import LMConfig, Longhorn, MIXERS, SequenceLM
    from .scan import causal_conv1d, causal_conv1d_fn, causal_conv1d_step, causal_conv1d_update
    from .scan import causal_conv1d_varlen_states, longhorn_scan, longhorn_step, mamba_inner_fn, selective_scan
    from .scan import selective_scan_fn, selective_state_update, selective_step

__all__ = ["longhorn_scan", "longhorn_step", "selective_scan", "selective_step", "causal_conv1d", "causal_conv1d_step",
           "Longhorn", "MIXERS", "LMConfig", "SequenceLM", "selective_scan_fn", "mamba_inner_fn", "causal_conv1d_fn",
           "causal_conv1d_update", "causal_conv1d_varlen_states", "selective_state_update"]


# Modules that moved, old name -> new one: the old names work in this version, with a warning.
_ROOMS = {
    "claims": "stats published compare looks ledger forest front report hours logbook",
    "data": "corpus images",
    "experiments": "recall mqar language one_pass extrapolation throughput vision vision_speed rewritten "
    "measures retrain evaluation",
    "train": "recipe checkpoint trackers fit presets",
}
_KERNELS = (
    "conv diagonal diagonal_backward diagonal_forward exact exact_backward gluon op pointwise portable "
    "portable_backward selective step"
)
_MOVED = {
    "lab.language_training": "lab.train.lm",
    "lab.plan": "lab.claims.one_pass_plan",
    "lab.processes": "lab.distributed",
    "lab.training": "lab.train.loop",
    "lab.vision_training": "lab.train.vision",
    "models.memory": "models.recompute",
    "scan.gluon_cpu": "scan.triton.gluon_cpu",
    "scan.launch": "scan.triton.launch",
    "start": "cli.__main__",
}
for _room, _names in _ROOMS.items():
    _MOVED.update({f"lab.{name}": f"lab.{_room}.{name}" for name in _names.split()})
_MOVED.update({f"scan.triton_{name}": f"scan.triton.{name}" for name in _KERNELS.split()})


class _Moved(MetaPathFinder, Loader):
    "Import a module that moved under its old name."

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.partition(".")
        if package == __name__ and name in _MOVED:
            return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec):
        new = f"{__name__}.{_MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Moved())  # asked only for what no other finder knows

if not TYPE_CHECKING:

    def __getattr__(name):
        # Names load on first use, so that `longhorn --help` does not wait for PyTorch: functions are in `scan`.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{'scan' if name.islower() else 'models'}"), name)


def __dir__():
    return [*globals(), *__all__]
