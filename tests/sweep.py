"""Sweeps of cases: `make test` runs some that cover every path, `make test-slow` the rest."""

import pytest
import torch


def slow_case(*values, **options):
    """Return the parameters of a case for `make test-slow`.

    On a GPU it runs with the others: there the kernels are compiled."""
    marks = [] if torch.cuda.is_available() else [pytest.mark.slow]
    return pytest.param(*values, marks=marks, **options)
