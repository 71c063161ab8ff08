"""Draw random problems for the tests of theory/."""

import torch


def problem(*lead, D=3, N=4, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*lead, *shape, generator=g, dtype=torch.float64)

    S = draw(D, N)
    k = scale * draw(N)
    x = draw(D)
    beta = torch.rand(*lead, D, generator=g, dtype=torch.float64)
    return S, k, x, beta


def draw(seed, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
