"""Plans, statistics, claims of the paper, and the ledger."""

import importlib
import warnings


def __getattr__(name):
    "Names of `lab.claims.registry` work here in this version, with a warning."
    if not name.startswith("__"):
        module = importlib.import_module(f"{__name__}.registry")
        if hasattr(module, name):
            message = f"{__name__}.{name} is in {module.__name__} now"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
