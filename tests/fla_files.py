"Read or run single files of flash-linear-attention: importing the package takes seconds."

import importlib.util
from functools import cache
from pathlib import Path

import pytest


def ops_folder():
    "Return the folder of its operations; skip the test if the package is missing."
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("needs flash-linear-attention (the extra fla)")
    return Path(spec.origin).parent / "ops"


@cache
def naive(path, name):
    "Return a function of one of its plain PyTorch files."
    spec = importlib.util.spec_from_file_location(
        "naive_" + path.replace("/", "_"), ops_folder() / f"{path}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
