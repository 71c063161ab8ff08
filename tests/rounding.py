"""Bounds of rounding errors, derived from the arithmetic."""

import torch


def bound(dtype, terms):
    """Return the largest relative difference between two orders of a sum, on any processor.

    Every addition and product rounds by at most half of eps. So the error of a sum of n products is
    at most n/2 eps times the sum of their sizes, and two orders differ by twice as much (Higham
    2002, section 4.2). The bounds of successive sums add up, so pass the total number of terms. If
    terms cancel, the result is smaller than the sum of their sizes, by the square root of n if
    their signs are random; the rounding errors then cancel as well."""
    return terms * torch.finfo(dtype).eps


def error(a, b):
    "Return the relative error in the Euclidean norm; NaN never passes a comparison."
    if not torch.isfinite(a).all():
        return float("inf")
    if not a.numel():
        return 0.0
    difference = (a.double() - b.double()).norm()
    return (difference / b.double().norm().clamp_min(1e-30)).item()
