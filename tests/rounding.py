"""How much rounding may change a result, from the arithmetic alone."""

import torch


def bound(dtype, terms):
    """Largest relative difference between two orders of a sum, whatever the processor.

    Every addition and product rounds by at most half of eps, so a sum of n products is off by at
    most n/2 eps times the sum of their sizes, and two orders differ by twice that (Higham 2002,
    section 4.2). The bounds of sums that follow one another add up: pass the number of all their
    terms. Where terms cancel, the result is smaller than the sum of their sizes, by the square
    root of n if their signs are random; the roundings then cancel as well."""
    return terms * torch.finfo(dtype).eps


def error(a, b):
    "Relative error in the Euclidean norm; not a number never passes."
    if not torch.isfinite(a).all():
        return float("inf")
    if not a.numel():
        return 0.0
    difference = (a.double() - b.double()).norm()
    return (difference / b.double().norm().clamp_min(1e-30)).item()
