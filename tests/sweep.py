"""Sweeps of cases: `make test` runs some that cover every path, and `make test-slow` the rest."""

import pytest
import torch


def slow_case(*values, **options):
    """Return the parameters of a case for `make test-slow`.

    On a GPU, where kernels are compiled, it runs with all other cases."""
    marks = [] if torch.cuda.is_available() else [pytest.mark.slow]
    return pytest.param(*values, marks=marks, **options)
