"""Other implementations of similar recurrences, timed beside the kit's kernels if importable.

A peer consists of a function of separate tensors and a float64 oracle of the same function. A
backward is timed only if every gradient agrees with that of the oracle.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from longhorn_kit.scan.chunked import chunked_scan
from longhorn_kit.scan.reference import reference_scan, reference_selective_scan


@dataclass(frozen=True)
class Peer:
    name: str  # short description
    package: str  # name of the package to import
    does: str  # recurrence that it runs, and missing parts
    leaves: Callable  # (new, B, T, D, N) -> tensors; `new` draws normal numbers
    run: Callable  # tensors -> output
    oracle: Callable  # the same function for float64 tensors

    @property
    def here(self):
        return find_spec(self.package) is not None


def matrix_loop(q, k, v, beta=None, log_decay=None):
    """Run a recurrence with matrix states, one step after the other.

    Shapes: q, k (B,T,H,N), v (B,T,H,D), beta (B,T,H,D or 1), log_decay (B,T,H,N or 1)."""
    S = v.new_zeros(*v.shape[:1], *v.shape[2:], k.shape[-1])
    reads = []
    for t in range(v.shape[1]):
        k_t = k[:, t, :, None]
        x = v[:, t, ..., None]
        if log_decay is not None:
            S = S * log_decay[:, t, :, None].exp()
        if beta is not None:
            x = beta[:, t, ..., None] * (x - (S * k_t).sum(-1, keepdim=True))
        S = S + x * k_t
        reads.append((S * q[:, t, :, None]).sum(-1))
    return torch.stack(reads, 1)


def delta_leaves(wide):
    """Return a function that draws keys of the length of a Longhorn layer, and suitable rates.

    There is one rate per channel if `wide`, otherwise one for all channels."""

    def leaves(new, B, T, D, N):
        k = new(B, T, 1, N) / 2
        rate = torch.sigmoid(new(B, T, 1, D if wide else 1))
        rate = rate / (1 + rate * k.float().square().sum(-1, keepdim=True))
        return dict(q=new(B, T, 1, N) / 2, k=k, v=new(B, T, 1, D), beta=rate.to(k.dtype))

    return leaves


def decay_leaves(wide):
    def leaves(new, B, T, D, N):
        decay = F.logsigmoid(new(B, T, 1, N if wide else 1).float() + 2)
        return dict(q=new(B, T, 1, N) / 2, k=new(B, T, 1, N) / 2, v=new(B, T, 1, D), g=decay)

    return leaves


def fla_run(module, function, squeeze=()):
    def run(**a):
        a = {n: t[..., 0] if n in squeeze else t for n, t in a.items()}
        found = getattr(__import__(f"fla.ops.{module}", fromlist=[function]), function)
        return found(scale=1.0, **a)[0]

    return run


def in_heads(run, width=32):
    "Run the same recurrence with channels split into heads that share keys and queries."

    def cut(q, k, v, beta):
        H = v.shape[-1] // width
        q, k = (t.expand(-1, -1, H, -1).contiguous() for t in (q, k))
        v, beta = (t.unflatten(-1, (H, width))[:, :, 0] for t in (v, beta))
        return run(q=q, k=k, v=v, beta=beta).flatten(2)[:, :, None]

    return cut


def heads(new, B, T, D, N):
    width = min(64, D)
    return {n: new(B, T, D // width, width) for n in "qkv"}


def attention(q, k, v):
    return F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
    ).transpose(1, 2)


def attention_oracle(q, k, v):
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], device=q.device).triu(1).bool()
    return torch.einsum("bhij,bjhc->bihc", scores.masked_fill(later, -math.inf).softmax(-1), v)


def layer(new, B, T, D, N):
    "Return the inputs of a Longhorn scan."
    return dict(
        q=new(B, T, N) / 2,
        k=new(B, T, N) / 2,
        x=new(B, T, D),
        b=new(B, T, D),
        b_bias=new(D).float(),
        D_skip=new(D).float(),
        z=new(B, T, D),
    )


def time_last(new, B, T, D, N):
    "Return the inputs in the layout of the CUDA scans, (B,D,T)."
    return {n: t.mT.contiguous() if t.dim() == 3 else t for n, t in layer(new, B, T, D, N).items()}


def steps_first(a):
    return {n: t.mT if t.dim() == 3 else t for n, t in a.items()}


def official(q, k, x, b, b_bias, D_skip, z):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_online7_fn

    return selective_scan_online7_fn(x, q, k, b, D=D_skip, t_bias=b_bias, z=z)


def mamba_leaves(new, B, T, D, N):
    return time_last(new, B, T, D, N) | dict(A=-torch.rand(D, N, device=new(1).device) - 0.1)


def mamba(q, k, x, b, b_bias, D_skip, z, A):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(x, b, A, k, q, D=D_skip, z=z, delta_bias=b_bias, delta_softplus=True)


def mamba_oracle(b_bias, **a):
    a = steps_first(dict(a))
    return reference_selective_scan(
        a["q"], a["k"], a["x"], a["b"], a["A"], b_bias, a["D_skip"], a["z"]
    )[0].mT


def scan_of(scan, form):
    return lambda **a: scan(**a, form=form)[0]


CORE = "the recurrence alone: no rate, skip or gate to compute"
PEERS = (
    Peer(
        "loop, diagonal",
        "torch",
        "the whole operation, one step after the other in PyTorch",
        layer,
        scan_of(reference_scan, "diagonal"),
        scan_of(reference_scan, "diagonal"),
    ),
    Peer(
        "chunks, diagonal",
        "torch",
        "the whole operation in chunks in PyTorch",
        layer,
        scan_of(chunked_scan, "diagonal"),
        scan_of(reference_scan, "diagonal"),
    ),
    Peer(
        "chunks, exact",
        "torch",
        "the whole operation in chunks in PyTorch",
        layer,
        scan_of(chunked_scan, "exact"),
        scan_of(reference_scan, "exact"),
    ),
    Peer(
        "attention",
        "torch",
        "causal softmax attention of the same width, heads of 64",
        heads,
        attention,
        attention_oracle,
    ),
    Peer(
        "fla fused_recurrent_delta_rule",
        "fla",
        f"exact Longhorn's recurrence with given rates, {CORE}",
        delta_leaves(True),
        fla_run("delta_rule", "fused_recurrent_delta_rule"),
        matrix_loop,
    ),
    Peer(
        "fla fused_recurrent_delta_rule, heads of 32",
        "fla",
        f"the same with the channels cut into heads, {CORE}",
        delta_leaves(True),
        in_heads(fla_run("delta_rule", "fused_recurrent_delta_rule")),
        matrix_loop,
    ),
    Peer(
        "fla chunk_delta_rule",
        "fla",
        f"one rate for all channels, {CORE}",
        delta_leaves(False),
        fla_run("delta_rule", "chunk_delta_rule", ("beta",)),
        matrix_loop,
    ),
    Peer(
        "fla chunk_gla",
        "fla",
        f"gated linear attention: a decay for each state coordinate, no correction, {CORE}",
        decay_leaves(True),
        fla_run("gla", "chunk_gla"),
        lambda q, k, v, g: matrix_loop(q, k, v, log_decay=g),
    ),
    Peer(
        "fla chunk_simple_gla",
        "fla",
        f"one decay for all, no correction, {CORE}",
        decay_leaves(False),
        fla_run("simple_gla", "chunk_simple_gla", ("g",)),
        lambda q, k, v, g: matrix_loop(q, k, v, log_decay=g),
    ),
    Peer(
        "official Longhorn CUDA",
        "online_selective_scan_cuda",
        "the whole operation, diagonal, in its layout (B,D,T)",
        time_last,
        lambda **a: official(**a),
        lambda **a: reference_scan(**steps_first(a))[0].mT,
    ),
    Peer(
        "mamba_ssm selective_scan",
        "selective_scan_cuda",
        "Mamba's S6, whole operation, in its layout (B,D,T)",
        mamba_leaves,
        lambda **a: mamba(**a),
        mamba_oracle,
    ),
)
