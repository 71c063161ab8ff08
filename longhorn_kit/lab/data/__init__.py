"""Texts, tokens, corpora and images."""

import importlib
import warnings


def __getattr__(name):
    "`lab.data` was one module: its names work here in this version, with a warning."
    if not name.startswith("__"):
        for part in ("text", "tokenizers"):
            module = importlib.import_module(f"{__name__}.{part}")
            if name in vars(module):
                message = f"{__name__}.{name} is in {module.__name__} now"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
