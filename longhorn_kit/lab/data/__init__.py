"""Texts, corpora and images."""

import importlib
import warnings


def __getattr__(name):
    "`lab.data` was one module, now `lab.data.text`: its names work here in this version, with a warning."
    if not name.startswith("__"):
        module = importlib.import_module(f"{__name__}.text")
        if hasattr(module, name):
            warnings.warn(f"{__name__}.{name} is in {module.__name__} now", DeprecationWarning, stacklevel=2)
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
