"""Arguments of `matrix_scan`: every kind of decay, with the delta rule or a bonus."""

import itertools

import torch

CASES = [
    case
    for case in itertools.product(("none", "head", "key"), (False, True), (False, True))
    if not (case[1] and case[2])
]  # decay, delta rule, bonus


def draw(
    decay, delta, bonus, B=2, T=37, H=3, N=5, P=4, strongest=10.0, dtype=torch.float64, seed=0
):
    "Draw arguments of `matrix_scan`: unit keys, and mostly small log decays of 0 to -strongest."
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    shape = {"none": None, "head": (B, T, H), "key": (B, T, H, N)}[decay]
    t = dict(
        q=randn(B, T, H, N),
        k=torch.nn.functional.normalize(randn(B, T, H, N), dim=-1),
        x=randn(B, T, H, P),
        log_decay=None if shape is None else -strongest * rand(*shape) ** 6,
        beta=rand(B, T, H) if delta else None,
        bonus=randn(H, N) if bonus else None,
        initial_state=randn(B, H, P, N),
    )
    return {name: tensor.to(dtype) for name, tensor in t.items() if tensor is not None}
