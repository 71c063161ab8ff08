"""Longhorn Kit: state space models as online learners. Everything but the `__init__` files is exported from nbs/."""
__version__ = "0.1.0"

import importlib
import os
import sys
from glob import glob
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


if not TYPE_CHECKING:
    def __getattr__(name):
        # Names load on first use, so that `longhorn --help` does not wait for PyTorch: functions are in `scan`.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{'scan' if name.islower() else 'models'}"), name)


def __dir__():
    return [*globals(), *__all__]
