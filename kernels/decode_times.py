"""Check, then time, the short convolution and decode steps on one GPU.

    python kernels/decode_times.py --out kernels/results/h200_decode.json  # a minute
    python kernels/decode_times.py --sweep  # block sizes of the convolution, one by one
    TRITON_INTERPRET=1 python kernels/decode_times.py --check  # only the checks, tiny sizes, CPU

The convolution is in bfloat16, with width 4 and SiLU. Its full forward, and its full backward with
the sum over programs, are medians of triton.testing.do_bench. Decode steps run as a CUDA graph of
24 layers. Each layer has a separate state, so that no state is still in a cache from its last step.
The time of a replay is divided by 24. Bytes are the minimum: every input is read once, and every
output is written once. The bandwidth is that of a copy, measured in the same run.
"""

import argparse
import functools
import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch
import torch.nn.functional as F

import longhorn_kit  # noqa: F401, sets the interpreter's variable where there is no GPU
from longhorn_kit.records import environment, write_json
from longhorn_kit.scan.op import longhorn_step, selective_step
from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.short_conv import causal_conv1d, torch_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = dict(S1=(8, 2048, 2048), S2=(24, 1024, 1536), S3=(1, 32768, 4096))  # B, T, D
RULES = ("diagonal", "exact", "decoupled", "s6")
LAYERS = 24
WIDTH = 4
STATE = 16
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


def cases():
    "Return (kind, name, sizes) of all timed cases."
    yield from (("conv", name, shape) for name, shape in SHAPES.items())
    for batch, d_model in ((64, 2048), (1, 2048), (64, 768)):
        yield from (("decode", rule, (batch, 2 * d_model, STATE)) for rule in RULES)


# ---- checks


def relative(a, b):
    if not torch.isfinite(a).all():
        return float("inf")
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def conv_inputs(B, T, D, dtype, gen=None):
    "Return x (one half of a wider projection, as in a layer), weight, bias, and gradient of y."

    def new(*s):
        return torch.randn(*s, device=DEVICE, generator=gen)

    return (
        new(B, T, 2 * D).to(dtype)[..., :D],
        new(D, WIDTH) / 2,
        new(D) / 2,
        new(B, T, D).to(dtype),
    )


def check_conv(dtype, shape=None):
    """Return the largest error of y and of every gradient, compared with a float64 sum.

    Raise SystemExit if it is too large."""
    B, T, D = shape or ((2, 301, 136) if DEVICE == "cuda" else (1, 9, 5))
    x, w, c, dy = conv_inputs(B, T, D, dtype)
    past = torch.randn(B, D, WIDTH - 1, device=DEVICE).to(dtype)

    def plain(x, w, c, past):
        row = torch.cat([past.transpose(1, 2), x], 1)
        v = c + sum(row[:, j : j + T] * w[:, j] for j in range(WIDTH))
        return v * torch.sigmoid(v), row[:, T:].transpose(1, 2)

    def ours(x, w, c, past):
        return causal_conv1d(x, w, c, initial_state=past, output_final_state=True, backend="triton")

    both = []
    for run, like in ((ours, None), (plain, torch.float64)):
        args = [t.detach().to(like or t.dtype).requires_grad_() for t in (x, w, c, past)]
        out = run(*args)
        both.append(
            [*out, *torch.autograd.grad(out, args, (dy.to(out[0].dtype), past.to(out[1].dtype)))]
        )
    worst = max(relative(a, b) for a, b in zip(*both))
    if not worst < LIMIT[dtype]:
        raise SystemExit(
            f"the convolution is wrong in {dtype}, no times: relative error {worst:.1e}"
        )
    return worst


def decode_inputs(rule, B, D, N, dtype):
    def new(*s):
        return torch.randn(*s, device=DEVICE)

    a = dict(
        q=new(B, N).to(dtype),
        k=(new(B, N) / 2).to(dtype),
        x=new(B, D).to(dtype),
        b=new(B, D).to(dtype),
    )
    rest = dict(bias=new(D), skip=new(D), z=new(B, D).to(dtype))
    return a, (-torch.rand(D, N, device=DEVICE) - 0.1 if rule == "s6" else None), rest


def step(rule, a, A, rest, state, **options):
    "Run one decode step of the public operation."
    if A is None:
        return longhorn_step(
            *a.values(), state, rest["bias"], rest["skip"], rest["z"], form=rule, **options
        )
    try:
        return selective_step(
            *a.values(), A, state, rest["bias"], rest["skip"], rest["z"], **options
        )
    except TypeError:  # selective_step lacks these options, so call its kernel
        from longhorn_kit.scan.triton.step import triton_step

        return triton_step(
            "s6", *a.values(), A, state, rest["bias"], rest["skip"], rest["z"], options["inplace"]
        )


def check_decode(rule, dtype):
    """Return the largest error of output and state after three steps in place.

    The reference is the float64 loop. Raise SystemExit if the error is too large."""
    B, D, N = (3, 300, STATE) if DEVICE == "cuda" else (2, 5, 3)
    state = torch.randn(B, D, N, device=DEVICE)
    truth = state.double()
    worst = 0.0
    for _ in range(3):
        a, A, rest = decode_inputs(rule, B, D, N, dtype)
        out, _ = step(rule, a, A, rest, state, inplace=True, backend="triton")
        one = [t.double()[:, None] for t in a.values()]
        given = (rest["bias"].double(), rest["skip"].double(), rest["z"].double()[:, None])
        want, truth = (
            reference_scan(*one, *given, form=rule, initial_state=truth)
            if A is None
            else reference_selective_scan(*one, A.double(), *given, initial_state=truth)
        )
        worst = max(worst, relative(out, want[:, 0]), relative(state, truth))
    if not worst < LIMIT[dtype]:
        raise SystemExit(
            f"the decode step ({rule}, {dtype}) is wrong, no times: relative error {worst:.1e}"
        )
    return worst


def checks():
    "Return relative errors of all timed cases, by name."
    torch.manual_seed(0)
    found = {f"conv {str(t)[6:]}": check_conv(t) for t in LIMIT}
    found |= {f"{rule} {str(t)[6:]}": check_decode(rule, t) for rule in RULES for t in LIMIT}
    return {name: float(f"{e:.1e}") for name, e in found.items()}


# ---- launches for ahead-of-time compilation (kernels/aot.py), with meta tensors


def launches(record, dtype=torch.bfloat16, width=WIDTH, state=True):
    """Yield (name, launches) of the convolution in both directions and of the decode steps.

    `record` is that of kernels/aot.py."""
    from longhorn_kit.scan.triton.conv import conv_backward, conv_forward, conv_step
    from longhorn_kit.scan.triton.step import launch_step

    def new(*s, like=dtype):
        return torch.empty(s, dtype=like, device="meta")

    def full(*s):
        return new(*s, like=torch.float32)

    B, T, D = SHAPES["S1"]
    x = new(B, T, 2 * D)[..., :D]
    w = full(D, width)
    c = full(D)
    past = new(B, D, width - 1)
    given = past if state else None

    def conv():
        conv_forward(x, w, c, given, None, True, state)
        conv_backward(x, given, x, w, c, given, None, True)
        conv_backward(x, None, x, w, c, None, None, True, also=x)
        conv_step(x[:, 0], past, past, w, c, True)

    yield "conv", record(conv)
    for rule in RULES:
        k = new(64, STATE)
        v = new(64, 4096)
        S = full(64, 4096, STATE)
        A = full(4096, STATE) if rule == "s6" else None
        weights = (full(4096), full(4096))
        step = functools.partial(launch_step, rule, k, k, v, v, A, S, S, *weights, v)
        yield f"step {rule}", record(step)


# ---- times


def bench(run, grads=()):
    from triton.testing import do_bench

    run()
    return do_bench(run, warmup=10, rep=60, return_mode="median", grad_to_none=list(grads) or None)


def copy_bandwidth():
    "Return bytes per second of a copy of 256 MiB; reads and writes both count."
    a = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / bench(lambda: b.copy_(a)) * 1e3


def conv_candidates(x, w, c, dy):
    """Return name -> (forward, backward), functions without arguments.

    Packages that cannot be imported are left out."""
    from longhorn_kit.scan.triton.conv import conv_backward, conv_forward

    def with_autograd(run):
        args = [t.detach().requires_grad_() for t in (x, w, c)]
        y = run(*args)
        g = dy if y.shape == dy.shape else dy.transpose(1, 2)
        return (lambda: run(x, w, c)), (lambda: torch.autograd.grad(y, args, g, retain_graph=True))

    ours = (
        (lambda: conv_forward(x, w, c, None, None, True, False)),
        (lambda: conv_backward(dy, None, x, w, c, None, None, True)),
    )
    yield "kit", *(graphed(run).replay for run in ours)
    yield (
        "F.conv1d + F.silu, from (B,T,D)",
        *with_autograd(lambda x, w, c: torch_conv(x, w, c, None)[0]),
    )

    def channels_first(x):
        return x.transpose(1, 2).contiguous()

    xt = channels_first(x).requires_grad_()
    low = w[:, None].to(x.dtype).requires_grad_()
    lowc = c.to(x.dtype).requires_grad_()

    def plain(x):
        return F.silu(F.conv1d(x, low, lowc, padding=WIDTH - 1, groups=len(w))[..., : x.shape[-1]])

    y = plain(xt)
    g = channels_first(dy)
    yield (
        "F.conv1d + F.silu, from (B,D,T)",
        (lambda: plain(xt)),
        (lambda: torch.autograd.grad(y, (xt, low, lowc), g, retain_graph=True)),
    )
    try:
        theirs = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    except ImportError:
        return

    def run(x, w, c):
        return theirs(x=x, weight=w, bias=c, activation="silu", backend="triton")[0]

    yield "flash-linear-attention", *with_autograd(lambda x, w, c: run(x, w, c))


def time_conv(name, shape, bandwidth):
    "Return rows of one shape: forward and backward milliseconds, and the time to move the bytes."
    B, T, D = shape
    torch.manual_seed(0)
    x, w, c, dy = conv_inputs(B, T, D, torch.bfloat16)
    floors = [n * B * T * D * 2 / bandwidth * 1e3 for n in (2, 3)]
    for who, forward, backward in conv_candidates(x, w, c, dy):
        try:
            with torch.no_grad():
                ahead = bench(forward)
            back = bench(backward)
        except torch.OutOfMemoryError:
            continue
        yield dict(
            kind="conv",
            shape=name,
            B=B,
            T=T,
            D=D,
            width=WIDTH,
            who=who,
            forward_ms=round(ahead, 4),
            backward_ms=round(back, 4),
            forward_over_bytes=round(ahead / floors[0], 2),
            backward_over_bytes=round(back / floors[1], 2),
        )
        torch.cuda.empty_cache()


def decode_bytes(B, D, N, A, each=4):
    "Return bytes that (scan step, convolution step) must move; state numbers have `each` bytes."
    scan = (
        2 * each * B * D * N
        + 4 * 2 * B * D
        + 2 * 2 * B * N
        + 2 * 4 * D
        + (0 if A is None else 4 * D * N)
    )
    conv = 2 * 2 * B * D * (WIDTH - 1) + 2 * 2 * B * D + 4 * D * (WIDTH + 1)
    return scan, conv


def graphed(run):
    "Return a CUDA graph of run()."
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_decode(rule, sizes, bandwidth):
    """Return one row of microseconds per layer.

    It contains the scan step (with float32 and bfloat16 states), the convolution step, both
    together, and PyTorch."""
    from longhorn_kit.scan.short_conv import causal_conv1d_step

    B, D, N = sizes
    torch.manual_seed(0)
    a, A, rest = decode_inputs(rule, B, D, N, torch.bfloat16)
    w = torch.randn(D, WIDTH, device=DEVICE)
    c = torch.randn(D, device=DEVICE)
    states = {"": torch.randn(LAYERS, B, D, N, device=DEVICE)}
    states["_bf16"] = states[""].bfloat16()
    pasts = torch.randn(LAYERS, B, D, WIDTH - 1, device=DEVICE).bfloat16()

    def scan(kind="", backend="triton"):
        return [step(rule, a, A, rest, s, inplace=True, backend=backend) for s in states[kind]]

    def conv(backend="triton"):
        return [causal_conv1d_step(a["x"], p, w, c, inplace=True, backend=backend) for p in pasts]

    def both(kind):
        return scan(kind), conv()

    def each(run, *args):
        return bench(graphed(functools.partial(run, *args)).replay) / LAYERS * 1e3

    with torch.no_grad():
        micro = dict(conv=each(conv))
        for kind in states:
            micro |= {f"scan{kind}": each(scan, kind), f"both{kind}": each(both, kind)}
        floors = {
            kind: [
                n / bandwidth * 1e6 for n in decode_bytes(B, D, N, A, states[kind].element_size())
            ]
            for kind in states
        }
        if rule in ("diagonal", "exact"):
            micro["scan_by_pytorch"] = each(lambda: scan(backend="reference"))
            micro["conv_by_pytorch"] = each(lambda: conv("torch"))
        eager = bench(scan) / LAYERS * 1e3
    need = decode_bytes(B, D, N, A)
    ratios = dict(conv_over_bytes=round(micro["conv"] / floors[""][1], 2))
    for kind, (of_scan, of_conv) in floors.items():
        ratios[f"scan{kind}_over_bytes"] = round(micro[f"scan{kind}"] / of_scan, 2)
        ratios[f"both{kind}_over_bytes"] = round(micro[f"both{kind}"] / (of_scan + of_conv), 2)
    return dict(
        kind="decode",
        rule=rule,
        B=B,
        D=D,
        N=N,
        layers=LAYERS,
        bytes=sum(need),
        **ratios,
        **{f"{n}_us": round(t, 2) for n, t in micro.items()},
        scan_without_graph_us=round(eager, 2),
    )


def sweep(bandwidth):
    "Time other block sizes, which helps to choose the plan."
    from longhorn_kit.scan.triton.conv import ConvPlan, conv_backward, conv_forward

    for name in ("S1", "S3"):
        B, T, D = SHAPES[name]
        x, w, c, dy = conv_inputs(B, T, D, torch.bfloat16)
        more = torch.randn_like(dy)
        for plan in (
            ConvPlan(L, U, BD, 1, warps)
            for L in (32, 64, 128)
            for U in (8, 16)
            for BD, warps in ((128, 1), (256, 1), (256, 2))
        ):
            run = functools.partial(conv_forward, x, w, c, None, None, True, False, plan)
            t = bench(run)
            print(
                f"{name} forward  {plan}  {t:.4f} ms  "
                f"{t / (4 * B * T * D / bandwidth * 1e3):.2f} x bytes",
                flush=True,
            )
        for plan in (
            ConvPlan(L, U, BD, R, R * BD // 128)
            for L in (32, 64, 128)
            for U in (4, 8)
            for R in (1, 2, 4)
            for BD in (128, 256)
        ):
            for gradients in (1, 2):
                also = more if gradients == 2 else None
                inputs = (dy, None, x, w, c, None, None)
                t = bench(functools.partial(conv_backward, *inputs, True, plan, also))
                floor = 2 * (2 + gradients) * B * T * D / bandwidth * 1e3
                print(
                    f"{name} backward {plan} of {gradients} gradients  {t:.4f} ms  "
                    f"{t / floor:.2f} x bytes",
                    flush=True,
                )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="only check, without times")
    parser.add_argument("--sweep", action="store_true", help="time other block sizes")
    args = parser.parse_args()
    errors = checks()
    print("relative errors against float64:", errors, flush=True)
    if args.check:
        return
    if DEVICE == "cpu":
        raise SystemExit("decode_times.py: no GPU here; --check runs only the checks")
    bandwidth = copy_bandwidth()
    print(f"a copy moves {bandwidth / 1e12:.2f} TB/s", flush=True)
    if args.sweep:
        sweep(bandwidth)
        return
    rows = []
    for kind, name, sizes in cases():
        for row in (
            time_conv(name, sizes, bandwidth)
            if kind == "conv"
            else [time_decode(name, sizes, bandwidth)]
        ):
            rows.append(row)
            print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    record = dict(
        environment=environment(),
        command="python kernels/decode_times.py",
        seed=0,
        dtype="bfloat16",
        copy_terabytes_per_second=round(bandwidth / 1e12, 3),
        relative_errors=errors,
        rows=rows,
    )
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()
