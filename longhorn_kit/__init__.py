"""Longhorn Kit: state space models as online learners. Everything but the `__init__` files is exported from nbs/."""
__version__ = "0.1.0"

import importlib
import os
import sys
from glob import glob

# Triton asks once, when it is first imported: on a Linux machine without a GPU its kernels run in its interpreter.
if sys.platform == "linux" and not any(map(glob, ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where the public names live; they load on first use, so that `longhorn --help` does not wait for PyTorch.
_HOMES = {
    "longhorn_scan": "scan", "longhorn_step": "scan", "selective_scan": "scan", "selective_step": "scan",
    "causal_conv1d": "scan", "causal_conv1d_step": "scan",
    "Longhorn": "models", "MIXERS": "models", "LMConfig": "models", "SequenceLM": "models",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return [*globals(), *__all__]
