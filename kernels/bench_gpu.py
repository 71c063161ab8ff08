"""The GPU side of bench.py: choose, check and time the scans, and write the record.

The output, last state and all gradients of every case are first compared with the float64
reference. The check uses the batch, width and state size of the case, and as many steps as fit; the
plan of a kernel does not depend on more. Then the full forward (with the states that it keeps) and
the full backward (with every reduction) are timed on random data by `triton.testing.do_bench`, each
as a CUDA graph. The cases of EAGER are also timed as calls of the public function with gradients,
together with the host's part of a call.
"""

import contextlib
import json
import math
import multiprocessing
import pathlib
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace

import decode_times
import torch
import triton
from floors import row_floors
from peers import PEERS
from rates import measure_rates

from longhorn_kit.scan import longhorn_scan, selective_scan
from longhorn_kit.scan.reference import reference_scan, reference_selective_scan
from longhorn_kit.scan.triton import op as triton_op

SHAPES = dict(S1=(8, 2048, 2048), S2=(24, 1024, 1536), S3=(1, 32768, 4096))  # B, T, D
TOLERANCE = dict(float32=2e-5, bfloat16=6e-3, float16=1e-3)  # relative, in the Euclidean norm
PEER_TOLERANCE = 2e-2  # peers round more intermediate results
INTERPRETED = triton_op.INTERPRETED
DEVICE = "cpu" if INTERPRETED else "cuda"
EAGER = ("main", "chosen")  # sections in which public calls are timed too
MARGIN = 0.05  # variation of the same kernel from run to run
COUNTED = (
    pathlib.Path(__file__).parent / "results/sm_90.json"
)  # instructions of the compiled kernels
ORACLE_BYTES = 24e9  # limit for the tensors of autograd in float64
ANCHORS = {
    "gpu": "NVIDIA H200",
    "what": "the authors' CUDA extensions, bfloat16, N = 16, skip and gate, forward / backward "
    "in ms, medians of do_bench; "
    "measured once on this GPU model before this workbench existed and not again by this run",
    "official_longhorn_cuda": dict(
        S1=(0.862, 2.70), S2=(0.936, 2.88), S3=(4.24, 13.97)
    ),  # diagonal form, layout (B,D,T)
    "mamba_cuda": dict(S1=(0.591, 2.32), S2=(0.635, 2.59), S3=(3.01, 10.2)),  # S6
    "again": "measured once more, later, on this GPU model with torch 2.11 and CUDA 13",
    "official_longhorn_cuda_again": dict(S1=(0.859, 2.619), S2=(0.932, 2.840), S3=(4.07, 13.25)),
    "mamba_cuda_again": dict(S1=(0.589, 2.300), S2=(0.632, 2.591), S3=(2.85, 9.89)),
}


@dataclass(frozen=True)
class Case:
    section: str
    shape: str  # name in the table
    B: int
    T: int
    D: int
    N: int = 16
    form: str = "diagonal"  # "exact", "decoupled", "s6"
    path: str = "fast"  # "fast": the fastest kernels that support the case; or "portable"
    dtype: str = "bfloat16"
    z: bool = True
    state: bool = False  # use an initial state and a gradient of the last state
    checkpoint: str = "fast"
    packed: tuple = ()  # lengths of packed sequences


def cases():
    "Yield all cases of a plain run, the most important first."
    both = ("diagonal", "exact")
    S1 = SHAPES["S1"]
    B, T, D = SHAPES["S1"]
    for name, shape in SHAPES.items():
        for kind in ("fast", "portable"):
            yield from (
                Case("main", name, *shape, form=form, path=kind)
                for form in (*both, "decoupled", "s6")
            )
    for form in both:
        yield Case("options", "S1", *S1, form=form, z=False)
        yield Case("options", "S1", *S1, form=form, state=True)
        yield Case("ragged", "S1, T=2041", B, 2041, D, form=form)
        yield Case("ragged", "S1, D=2040", B, T, 2040, form=form)
        yield Case("ragged", "S1, D=2044", B, T, 2044, form=form)
        yield Case("ragged", "S1, D=2047", B, T, 2047, form=form)
        yield Case(
            "packed", "S1 packed", 1, B * T, D, form=form, packed=(1, 5000, 37, 3000, 2048, 6298)
        )
        for name, shape in SHAPES.items():
            yield Case("memory", name, *shape, form=form, checkpoint="small")
    for N in (4, 8, 32, 64, 128):
        yield from (Case("N", f"S1, N={N}", *S1, N, form) for form in both)
    yield from (
        Case("N", f"S1, N={N}", *S1, N, form, "portable") for N in (32, 64) for form in both
    )
    for T_ in (256, 512, 1024, 4096, 8192, 16384):
        yield from (Case("T", f"S1, T={T_}", B, T_, D, form=form) for form in both)
        yield Case("T", f"S1, T={T_}", B, T_, D, path="portable")
    for B_ in (1, 2, 4, 16, 32):
        yield from (Case("B", f"S1, B={B_}", B_, T, D, form=form) for form in both)
        yield Case("B", f"S1, B={B_}", B_, T, D, path="portable")
    for dtype in ("float16", "float32"):
        yield from (Case("dtype", f"S1, {dtype}", *S1, form=form, dtype=dtype) for form in both)
    yield from (
        Case("again", "S1", *S1, form=form) for form in both
    )  # the same case again, to see the variation


def sizes(case):
    return f"{case.B},{case.T},{case.D}, N={case.N}"


def shrunk(case):
    "Return the same case at a size for the interpreter."
    small = replace(
        case,
        B=min(case.B, 2),
        T=min(case.T, 16 + case.T % 16),
        D=min(case.D, 8 + case.D % 8),
        N=min(case.N, 4),
        packed=tuple(min(n, 7) for n in case.packed[:3]),
    )
    return replace(small, shape=sizes(small)) if case.section == "chosen" else small


def checked_steps(case):
    """Return the same case with as many steps as fit in the oracle's memory.

    The plan and the remainder of the steps stay the same."""
    per_step = case.B * case.D * case.N * 8 * 7
    room = ORACLE_BYTES if INTERPRETED else min(ORACLE_BYTES, torch.cuda.mem_get_info()[0] / 4)
    T = min(1088, max(320, int(room / per_step) // 64 * 64))
    if case.packed:
        return replace(case, T=560, packed=(1, 300, 37, 222)) if case.T > 560 else case
    return case if case.T <= T + 64 else replace(case, T=T + case.T % 64)


def draw(case, seed):
    """Return the arguments by name, gradients of output and last state, and bounds of sequences."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def full(*s):
        return torch.randn(s, generator=gen, device=DEVICE)

    def new(*s):
        return full(*s).to(dtype)

    B = case.B
    T = sum(case.packed) or case.T
    D = case.D
    N = case.N
    n = len(case.packed) or B
    a = dict(
        q=(full(B, T, N) / 2).to(dtype),
        k=(full(B, T, N) / 2).to(dtype),
        x=new(B, T, D),
        b=new(B, T, D),
        b_bias=full(D),
        D_skip=full(D),
        z=new(B, T, D) if case.z else None,
        A=-torch.rand((D, N), generator=gen, device=DEVICE) - 0.1 if case.form == "s6" else None,
        initial_state=full(n, D, N) if case.state else None,
    )
    bounds = [0]
    for length in case.packed:
        bounds.append(bounds[-1] + length)
    return a, new(B, T, D), full(n, D, N) if case.state else None, bounds if case.packed else None


@contextlib.contextmanager
def path(name):
    "Context manager that runs fast kernels where they support the case, or only portable ones."
    before = triton_op.FAST
    triton_op.FAST = name != "portable"
    try:
        yield
    finally:
        triton_op.FAST = before


def public(case, a, cu=None):
    "Return the output of the public function."
    rest = dict(
        initial_state=a["initial_state"],
        cu_seqlens=cu,
        backend="triton",
        checkpoint=case.checkpoint,
    )
    if case.form == "s6":
        return selective_scan(
            *(a[n] for n in ("q", "k", "x", "b", "A", "b_bias", "D_skip", "z")), **rest
        )
    return longhorn_scan(
        *(a[n] for n in ("q", "k", "x", "b", "b_bias", "D_skip", "z")), form=case.form, **rest
    )


def by_kernels(case, a, cu):
    data = (a[n] for n in ("q", "k", "x", "b", "b_bias", "D_skip", "z", "A"))
    return triton_op.triton_scan(
        *data,
        form=case.form,
        initial_state=a["initial_state"],
        cu_seqlens=cu,
        checkpoint=case.checkpoint,
    )


def by_reference(case, a, bounds):
    def one(a):
        rest = dict(initial_state=a["initial_state"])
        if case.form == "s6":
            return reference_selective_scan(
                *(a[n] for n in ("q", "k", "x", "b", "A", "b_bias", "D_skip", "z")), **rest
            )
        return reference_scan(
            *(a[n] for n in ("q", "k", "x", "b", "b_bias", "D_skip", "z")), form=case.form, **rest
        )

    if bounds is None:
        return one(a)
    parts = []
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        cut = {n: t[:, lo:hi] if n in "qkxbz" and t is not None else t for n, t in a.items()}
        parts.append(
            one(
                cut
                | dict(
                    initial_state=None
                    if a["initial_state"] is None
                    else a["initial_state"][i : i + 1]
                )
            )
        )
    return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])


def results(outputs, douts, leaves):
    "Return outputs and gradients by name."
    pairs = [(o, d) for o, d in zip(outputs, douts) if d is not None]
    names = [n for n, t in leaves.items() if t is not None]
    grads = torch.autograd.grad(
        [p[0] for p in pairs], [leaves[n] for n in names], [p[1].to(p[0].dtype) for p in pairs]
    )
    return dict(zip(("out", "last"), (o.detach() for o in outputs))) | {
        "d" + n: g for n, g in zip(names, grads)
    }


def leaves_of(a, dtype=None):
    return {
        n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
        for n, t in a.items()
    }


def errors_of(found, right):
    "Return relative errors in the Euclidean norm; infinity for a result with NaN."

    def measure(f, r):
        return ((f.double() - r.double()).norm() / r.double().norm().clamp_min(1e-30)).item()

    return {
        n: measure(found[n], r) if bool(found[n].isfinite().all()) else math.inf
        for n, r in right.items()
    }


def shown(error, digits=2):
    "Return an error for a record; None if it is infinite, which JSON cannot represent."
    return float(f"{error:.{digits}e}") if math.isfinite(error) else None


class Wrong(Exception):
    "A scan of the kit differs from the reference."


class Checker:
    """Errors of cases against float64.

    Lengths that differ only beyond the checked steps share a check."""

    def __init__(self, seed):
        self.seed = seed
        self.kept = {}
        self.done = {}

    def right(self, case):
        key = replace(case, path="", checkpoint="fast")
        if key not in self.kept:
            a, dout, dlast, bounds = draw(case, self.seed)
            r = leaves_of(a, torch.float64)
            self.kept = dict(list(self.kept.items())[-3:]) | {
                key: results(by_reference(case, r, bounds), (dout, dlast), r)
            }
        return self.kept[key]

    def __call__(self, case):
        case = replace(checked_steps(case), section="", shape="")
        if case not in self.done:
            right = self.right(case)
            a, dout, dlast, bounds = draw(case, self.seed)
            cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
            r = leaves_of(a)
            with path(case.path):
                self.done[case] = errors_of(
                    results(by_kernels(case, r, cu), (dout, dlast), r), right
                )
        return self.done[case]


def wrong(errors, tolerance):
    return {n: e for n, e in errors.items() if not e < tolerance}


def operator(name, values):
    "Call a custom operation of the kit with arguments by name."
    op = getattr(torch.ops.longhorn_kit, name)
    names = [argument.name for argument in op.default._schema.arguments]
    return lambda: op(*(values[n] for n in names))


def calls(case, seed):
    """Return (forward, backward, kept bytes per element of x, kernels that run) of a case.

    Forward and backward are functions without arguments."""
    a, dout, dlast, bounds = draw(case, seed)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    spacing = triton_op._spacing(case.checkpoint, case.N)
    with path(case.path):
        kernels = triton_op.scan_path(case.form, a["q"], a["k"], a["x"])
    values = a | dict(
        cu_seqlens=cu,
        form=case.form,
        checkpoint_every=spacing,
        save=True,
        kernels="",
        checked=True,
        dout=dout,
        dfinal=dlast,
    )
    forward = operator("scan", values)
    with path(case.path):
        values["ckpt"] = forward()[2]
    kept = values["ckpt"].numel() * values["ckpt"].element_size() / a["x"].numel()
    return forward, operator("scan_backward", values), kept, kernels


@contextlib.contextmanager
def launched():
    "Context manager that collects names of launched kernels in a set; empty in the interpreter."
    from triton.compiler import CompiledKernel

    names = set()
    before = CompiledKernel.launch_metadata

    def note(self, *args):
        names.add(self.metadata.name)
        return before(self, *args)

    CompiledKernel.launch_metadata = note
    try:
        yield names
    finally:
        CompiledKernel.launch_metadata = before


def check_path(case, kernels, names):
    """Raise Wrong if the kernels that ran are not those of the case.

    `kernels` is the choice of the operation, and `names` are the launched kernels."""
    portable = {n for n in names if n.startswith("_scan_")}
    if (
        case.path == "fast"
        and kernels == "portable"
        and not INTERPRETED
        and case.dtype == "bfloat16"
    ):
        raise Wrong(f"{label(case)}: the portable kernels were chosen")
    if names and bool(portable) != (kernels == "portable"):
        raise Wrong(
            f"{label(case)}: {kernels} kernels were chosen, but {', '.join(sorted(names))} ran"
        )


def stopwatch(run):
    "Time one call three times by the host's clock, in milliseconds; for the interpreter."
    start = time.perf_counter()
    run()
    return [1e3 * (time.perf_counter() - start)] * 3


def on_gpu(run):
    """Time a function on the GPU; return lower quartile, median and upper quartile in milliseconds.

    If a run takes long, return minimum, median and maximum of three runs."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    if time.perf_counter() - start < 0.1:
        return triton.testing.do_bench(run, warmup=10, rep=60, quantiles=[0.25, 0.5, 0.75])
    return sorted(slowly(run) for _ in range(3))


def host(run, calls=1 if INTERPRETED else 20):
    "Return the median microseconds until a call returns, without waiting for the GPU."
    found = []
    for _ in range(1 + calls // 5):
        if not INTERPRETED:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(found)


def slowly(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


quartiles = stopwatch if INTERPRETED else on_gpu


def milliseconds(run):
    return quartiles(run)[1]


def timed(case, seed, rates):
    "Return one row of the record."
    with launched() as names:
        forward, backward, kept, kernels = calls(case, seed)
        with path(case.path):
            backward()
    check_path(case, kernels, names)
    row = {n: v for n, v in asdict(case).items() if n not in ("path", "packed")} | dict(
        T=sum(case.packed) or case.T,
        kernels=kernels,
        sequences=len(case.packed) or case.B,
        kept_bytes_per_x=round(kept, 2),
    )
    hopper = not INTERPRETED and torch.cuda.get_device_capability() == (9, 0)
    counted = (
        json.loads(COUNTED.read_text()) if (hopper or INTERPRETED) and COUNTED.is_file() else None
    )
    with path(case.path):
        for way, run in (("forward", forward), ("backward", backward)):
            row |= measured(way, run if INTERPRETED else decode_times.graphed(run).replay)
            floors = row_floors(row, way, rates, counted)
            row[f"{way}_bound"] = max(floors, key=floors.get)
            row[f"{way}_share"] = round(max(floors.values()) / row[f"{way}_ms"], 3)
        if case.section in EAGER:
            row |= eager(case, seed, kernels)
    return row


def measured(name, run):
    low, middle, high = (round(ms, 4) for ms in quartiles(run))
    return {f"{name}_ms": middle, f"{name}_quartiles": [low, high]}


def eager(case, seed, kernels):
    """Time calls of the public function with gradients.

    Return milliseconds on the GPU, which include launches by the host, and the host's part."""
    a, dout, _, bounds = draw(case, seed)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    row = {}
    a = leaves_of(a)
    with torch.enable_grad():
        with launched() as names:
            out = public(case, a, cu)
            leaves = [t for t in a.values() if t is not None]

            def backward():
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)

            backward()
        check_path(case, kernels, names)
        for way, run in (("forward", lambda: public(case, a, cu)), ("backward", backward)):
            row |= measured(f"eager_{way}", run) | {f"host_{way}_us": round(host(run), 1)}
    return row


def slower(new, old, margin=MARGIN):
    """Return one sentence per time that is slower than in an earlier record.

    A time is slower if its lower quartile is above the earlier upper quartile by more than the
    margin. If a record has only medians, these are compared."""

    def rows(record):
        return {
            (row["shape"], row["form"], row["kernels"]): row
            for row in record["rows"]
            if row["section"] == "main" and "kernels" in row
        }

    before = rows(old)
    found = []
    for (shape, form, kernels), row in rows(new).items():
        was = before.get((shape, form, kernels), {})
        for what in ("forward", "backward", "eager_forward", "eager_backward"):
            if (ms := f"{what}_ms") in row and ms in was:
                (low, _), (_, high) = (r.get(f"{what}_quartiles", [r[ms]] * 2) for r in (row, was))
                if low > high * (1 + margin):
                    found.append(
                        f"{shape}, {form}, {kernels} kernels: {what.replace('_', ' call, ')} "
                        f"{row[ms]:.3f} ms, was {was[ms]:.3f}"
                    )
    return found


def warm(case):
    """Compile the kernels of a case in a separate process.

    The compiled kernels stay in Triton's cache on disk."""
    with (
        contextlib.suppress(Exception),
        path(case.path),
    ):  # a failure here happens again in the parent, which reports it
        forward, backward, *_ = calls(checked_steps(case), 0)
        forward(), backward()


def warm_peer(name, shape):
    with contextlib.suppress(Exception):
        peer = next(p for p in PEERS if p.name == name)
        parts = peer_calls(peer, shape, 0)
        parts[0](), parts[1]()


def compile_ahead(todo, jobs):
    "Compile in several processes at once, so that the parent finds all kernels in the cache."
    unique = {
        replace(t, section="", shape="", T=min(t.T, 2048)): t for t in todo if isinstance(t, Case)
    }
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        waits = [
            pool.apply_async(warm_peer, (t.name, SHAPES["S1"]))
            for t in todo
            if getattr(t, "package", "") == "fla"
        ]
        waits += [pool.apply_async(warm, (case,)) for case in unique.values()]
        end = time.monotonic() + 100
        for w in waits:
            with contextlib.suppress(Exception):
                w.get(timeout=max(0.0, end - time.monotonic()))


def peer_leaves(peer, shape, seed, dtype=torch.bfloat16):
    gen = torch.Generator(DEVICE).manual_seed(seed)

    def new(*s):
        return torch.randn(s, generator=gen, device=DEVICE).to(dtype)

    return leaves_of(peer.leaves(new, *shape, 16))


def peer_calls(peer, shape, seed):
    leaves = peer_leaves(peer, shape, seed)
    out = peer.run(**leaves)
    dout = torch.randn_like(out)
    return lambda: peer.run(**leaves), lambda: torch.autograd.grad(
        out, list(leaves.values()), dout, retain_graph=True
    )


def peer_errors(peer, shape, seed):
    "Return errors of output and gradients at the peer's full width and fewer steps."
    leaves = peer_leaves(peer, shape, seed)
    double = leaves_of(leaves, torch.float64)
    right = peer.oracle(**double)
    dout = torch.randn_like(right).bfloat16()
    return errors_of(
        results((peer.run(**leaves),), (dout,), leaves), results((right,), (dout,), double)
    )


def peer_rows(peer, args):
    """Yield the rows of a peer at S1, for attention also at other lengths.

    A wrong output has no time, and a wrong gradient has no backward time."""
    B, T, D = SHAPES["S1"] if not INTERPRETED else (2, 32, 16)
    small = (2, 272, D) if not INTERPRETED else (2, 16, D)
    errors = peer_errors(peer, small, args.seed)
    bad = wrong(errors, PEER_TOLERANCE)
    lengths = (
        (256, 512, 1024, T, 4096, 8192, 16384)
        if peer.name == "attention" and not INTERPRETED
        else (T,)
    )
    for T_ in lengths:
        row = dict(
            section="peers",
            shape="S1" if T_ == T else f"S1, T={T_}",
            B=B,
            T=T_,
            D=D,
            N=16,
            peer=peer.name,
            does=peer.does,
            error=shown(max(errors.values())),
        )
        if "out" not in bad:
            forward, backward = peer_calls(peer, (B, T_, D), args.seed)
            row["forward_ms"] = round(milliseconds(forward), 4)
            row["backward_ms"] = None if bad else round(milliseconds(backward), 4)
        if bad:
            row["wrong"] = {n: shown(e, 1) for n, e in bad.items()}
        yield row


def decode_rows(args, rates):
    "Yield rows of the convolution and of decode steps; in the interpreter, only check them."
    errors = decode_times.checks()
    for kind, name, sizes in decode_times.cases() if not INTERPRETED else []:
        found = (
            decode_times.time_conv if kind == "conv" else lambda *a: [decode_times.time_decode(*a)]
        )
        off = max(e for n, e in errors.items() if n.startswith(name if kind == "decode" else kind))
        done = 0
        try:
            for row in found(name, sizes, rates["bytes"]):
                own = (
                    row["kind"] == "decode" or row["who"] == "kit"
                )  # results of other packages are not checked
                yield dict(section="decode") | (dict(error=off) if own else {}) | row
                done += 1
        except Exception as error:
            if not (
                kind == "conv" and done
            ):  # the kit's row is first; another package may fail in any way
                raise
            print(f"convolution of another package: {type(error).__name__}", flush=True)


def report(row, anchors):
    "Print one line of the table."
    if "peer" in row:
        what = row["peer"]
        how = row["shape"]
    elif "kernels" in row:
        how = row["shape"]
        what = " ".join(
            [
                row["form"],
                row["kernels"] if row["kernels"] == "portable" else "fast",
                *(
                    w
                    for w, on in (
                        ("no gate", not row["z"]),
                        ("state", row["state"]),
                        ("small", row["checkpoint"] != "fast"),
                    )
                    if on
                ),
            ]
        )
    elif row["kind"] == "decode":
        over = ", ".join(f"{n} {row[n + '_us']:.1f}" for n in ("conv", "scan", "both"))
        print(
            f"B={row['B']} D={row['D']:<8}{'decode, ' + row['rule']:<34}{over} us, "
            f"{row['both_over_bytes']:.2f} x bytes",
            flush=True,
        )
        return
    else:
        what = "conv, " + row["who"]
        how = row["shape"]
    text = f"{how:<21} {what:<34}"
    for way in ("forward", "backward"):
        ms = row.get(f"{way}_ms")
        text += f"{'wrong' if ms is None else f'{ms:.3f}':>10}"
        rival = anchors.get(how) if row["section"] == "main" else None
        if rival:
            text += f" x{rival[way == 'backward'] / ms:<5.2f}"
        if f"{way}_share" in row:
            text += f" {100 * row[f'{way}_share']:3.0f} % of {row[f'{way}_bound']:<10}"
    if "eager_forward_ms" in row:
        text += " | " + " ".join(
            f"{row[f'eager_{way}_ms']:.3f} ({row[f'host_{way}_us']:.0f} us)"
            for way in ("forward", "backward")
        )
    if row.get("wrong"):
        text += "  wrong: " + ", ".join(row["wrong"])
    print(text, flush=True)


def chosen(args):
    "Return the cases of the command line, or those of the chosen sections."
    if args.shape is None and args.state is None and args.dtype is None and args.form is None:
        todo = [c for c in cases() if c.section in args.sections]
    else:
        forms = args.form or ["diagonal", "exact"]
        dtypes = args.dtype or ["bfloat16"]
        todo = [
            Case("chosen", "", B, T, D, N, form, dtype=dtype)
            for B, T, D in args.shape or [SHAPES["S1"]]
            for N in args.state or [16]
            for form in forms
            for dtype in dtypes
        ]
        todo = [replace(c, shape=sizes(c)) for c in todo]
    return [shrunk(c) for c in todo] if INTERPRETED else todo


def case_rows(case, args, rates, check, errors):
    found = check(case)
    bad = wrong(found, TOLERANCE[case.dtype])
    if bad:
        raise Wrong(f"{label(case)}: " + ", ".join(f"{n} off by {e:.1e}" for n, e in bad.items()))
    with torch.no_grad():
        row = timed(case, args.seed, rates)
    key = f"{case.form} {row['kernels']} {case.dtype}"
    errors[key] = max(errors.get(key, 0.0), *found.values())
    yield row


def label(task):
    if isinstance(task, Case):
        return ", ".join(
            [task.shape, task.form, task.path, *(["small"] if task.checkpoint != "fast" else [])]
        )
    return getattr(task, "name", task)


def rows_of(task, args, rates, check, errors):
    if isinstance(task, Case):
        return case_rows(task, args, rates, check, errors)
    return decode_rows(args, rates) if task == "decode" else peer_rows(task, args)


def tasks(args):
    "Return all tasks, the most important first."
    given = args.shape or args.state or args.dtype or args.form
    todo = chosen(args)
    first = [c for c in todo if c.section in ("main", "chosen")]
    if given:
        return first
    peers = (
        [p for p in PEERS if p.here and not (INTERPRETED and p.package != "torch")]
        if "peers" in args.sections
        else []
    )
    own, others = ([p for p in peers if (p.package == "torch") == mine] for mine in (True, False))
    early = [c for c in todo if c.section in ("options", "ragged", "memory", "N", "T")]
    late = [c for c in todo if c not in first and c not in early]
    return first + own + ["decode"] * ("decode" in args.sections) + early + late + others


def main(args, environment):
    "Check, time and print; return the record. Its list `wrong` has the cases without times."
    start = time.monotonic()
    torch.manual_seed(args.seed)
    todo = tasks(args)
    if args.jobs and not INTERPRETED:
        compile_ahead(todo, args.jobs)
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    with torch.no_grad():
        rates = measure_rates(milliseconds, DEVICE, small=INTERPRETED)
    gpu = environment["gpu"]
    print(
        "columns: the kernels as a CUDA graph, forward and backward, ms | eager calls with "
        "gradients, ms (host)"
    )
    print(f"{gpu}: " + ", ".join(f"{n} {r / 1e12:.3g} T/s" for n, r in rates.items()), flush=True)
    anchors = ANCHORS if gpu == ANCHORS["gpu"] else {}
    check = Checker(args.seed)
    rows = []
    errors = {}
    left_out = []
    bad = []
    for task in todo:
        if time.monotonic() - start > args.budget:
            left_out.append(f"{label(task)}: out of time")
            continue
        try:
            for row in rows_of(task, args, rates, check, errors):
                rows.append(row)
                report(
                    row,
                    anchors.get(
                        "mamba_cuda" if row.get("form") == "s6" else "official_longhorn_cuda", {}
                    ),
                )
        except (Wrong, SystemExit) as error:  # the checks of decode_times raise SystemExit
            bad.append(str(error))
            print(f"WRONG {error}", flush=True)
        except Exception as error:
            message = re.sub(r"/\S*/", "", " ".join(str(error).split()))[:160]
            said = f"{label(task)}: {type(error).__name__}: {message}"
            ours = not hasattr(task, "package")  # another package may fail in any way
            (bad if ours else left_out).append(said)
            print("FAILED " * ours + said, flush=True)
        if not INTERPRETED and (not isinstance(task, Case) or task.B * task.T * task.D > 1e8):
            check.kept = {}
            torch.cuda.empty_cache()
    return dict(
        **environment,
        seed=args.seed,
        seconds=round(time.monotonic() - start),
        measure="median of triton.testing.do_bench, warm-up 10 ms, repeat 60 ms (of three runs "
        "above 0.1 s); whole forward with "
        "kept states, whole backward, the kit's as a CUDA graph each: without the host's time "
        "to launch; eager: calls of the "
        "public function with gradients; host: the host's part of such a call; quartiles: lower "
        "and upper, over repeats",
        rates=rates,
        worst_error={n: shown(e) for n, e in errors.items()},
        left_out=left_out,
        wrong=bad,
        absent=[p.name for p in PEERS if not p.here],
        others_measured_before=anchors,
        rows=rows,
    )


def one_row_a_line(record):
    "Return JSON with one line per row, which is small and readable in a diff."
    from longhorn_kit.records import digest_of

    record = record | {"sha256": digest_of(record)}
    lines = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in record["rows"])
    head = json.dumps({n: v for n, v in record.items() if n != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
