"""Checks of every mixer: `python -m pytest -m mixer -k NAME` runs all checks of one mixer.

The message of a failure starts with the docstring of its check."""

import pytest
import torch

from longhorn_kit.models import MIXERS
from longhorn_kit.models.matrix_mixers import MatrixMixer
from longhorn_kit.models.mixer import ScanMixer, build_mixer
from sweep import slow_case

NAMES = sorted(MIXERS)
KINDS = {name: getattr(MIXERS[name], "func", MIXERS[name]) for name in NAMES}
KIT = [name for name in NAMES if KINDS[name].__module__.startswith("longhorn_kit.")]
SCANS = [name for name in NAMES if issubclass(KINDS[name], ScanMixer)]
MATRICES = [name for name in NAMES if issubclass(KINDS[name], MatrixMixer)]
GROWING = ("attention",)  # caches that grow with every token
OPTIONS = ("longhorn+key_norm", "longhorn_exact+key_norm")  # mixers with an option enabled


def parts(name):
    "Return the mixer's name and its options."
    name, _, option = name.partition("+")
    return name, {option: True} if option else {}


def every(
    names,
    quick=None,  # names that `make test` checks; None: all. `make test-slow` checks the rest
):
    "Return a decorator that runs a check for mixers; the check's docstring is the requirement."
    cases = [name if quick is None or name in quick else slow_case(name) for name in names]

    def mark(check):
        assert (check.__doc__ or "").strip().endswith("."), (
            f"the docstring of {check.__name__} must state its requirement"
        )
        return pytest.mark.mixer(pytest.mark.parametrize("name", cases)(check))

    return mark


every_mixer = every(NAMES)
every_scan = every(SCANS)
every_matrix = every(MATRICES)
# not required of external layers: tracing at any length, keys, padding in one pass
every_mixer_of_kit = every(KIT)
every_layer = every([*NAMES, *OPTIONS])  # names for `parts`
# for long checks: `make test` runs one mixer of each family of code
FAMILIES = ("longhorn", "longhorn_exact", "mamba", "deltanet", "attention")
every_family = every(NAMES, FAMILIES)
every_family_of_kit = every(KIT, FAMILIES)


def rms(y, weight=1.0):
    "Return a tensor divided by its root mean square, times `weight`."
    variance = y.square().mean(-1, keepdim=True)
    return y / (variance + 1e-5).sqrt() * weight


def perturbed(name, d_model, seed=0, **options):
    "Build a layer in which no parameter has a value that could hide a missing term."
    torch.manual_seed(seed)
    layer = build_mixer(name, d_model, **options)
    for parameter in layer.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return layer
