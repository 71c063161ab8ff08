"flash-linear-attention's files, one by one: importing the package itself takes seconds."

import importlib.util
from functools import cache
from pathlib import Path

import pytest


def ops_folder():
    "The folder of its operations; skips the test where it is not installed."
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("needs flash-linear-attention (the extra fla)")
    return Path(spec.origin).parent / "ops"


@cache
def naive(path, name):
    "A function of one of its plain PyTorch files."
    spec = importlib.util.spec_from_file_location(
        "naive_" + path.replace("/", "_"), ops_folder() / f"{path}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
