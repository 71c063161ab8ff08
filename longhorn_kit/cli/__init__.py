"""The command line."""

import importlib


def __getattr__(name):
    # Names load on first use: `longhorn` says which packages are missing before it imports any.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.command")
    return module if name == "command" else getattr(module, name)
