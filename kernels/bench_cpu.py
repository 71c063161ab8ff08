"""The CPU side of bench.py: time forward plus backward of three implementations of the operation.

The operation consists of rate, scan, skip and gate. The candidates are the plain loop under
autograd, mambapy's parallel scan (if installed; only the diagonal recurrence), and the kit's
chunked scan. Every candidate's output and gradients are first compared with the float64 reference.
Candidates run in turn, round by round, on the same inputs. A ratio is the median over rounds of the
ratio within a round. Extra memory is the growth of the peak resident size during one forward plus
backward, in a fresh process.
"""

import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from longhorn_kit.records import commit_of_kit, cpu_name, version_of
from longhorn_kit.scan.chunked import chunked_scan
from longhorn_kit.scan.reference import reference_scan

BENCH = pathlib.Path(__file__).with_name("bench.py")

NAMES = ("q", "k", "x", "b", "b_bias", "D_skip", "z")
TARGETS = {
    "loop": (0.2, 0.5),
    "mambapy": (0.25, 0.5),
}  # goals: time and memory of the chunked scan relative to each candidate


def make_inputs(B, T, D, N, seed, dtype=torch.float32):
    """Return the seven inputs, with gradients, and a gradient of the output.

    The numbers are the same for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, N), (B, T, N), (B, T, D), (B, T, D), (D,), (D,), (B, T, D))
    inputs = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    return inputs, torch.randn(B, T, D, generator=generator).to(dtype)


def rate(k, b, b_bias):
    beta = torch.sigmoid(b + b_bias)
    return beta / (1 + beta * k.square().sum(-1, keepdim=True))


def loop(q, k, x, b, b_bias, D_skip, z, form):
    "Run the simplest code: all rates at once, then one token at a time under autograd."
    eps = rate(k, b, b_bias)
    S = x.new_zeros(x.shape[0], x.shape[2], k.shape[2])
    reads = []
    for t in range(x.shape[1]):
        k_t = k[:, t, None, :]
        e_t = eps[:, t, :, None]
        x_t = x[:, t, :, None]
        if form == "exact":
            S = S + e_t * (x_t - (S * k_t).sum(-1, keepdim=True)) * k_t
        else:
            S = (1 - e_t * k_t.square()) * S + e_t * x_t * k_t
        reads.append((S * q[:, t, None, :]).sum(-1))
    return (torch.stack(reads, 1) + D_skip * x) * F.silu(z)


def mambapy(q, k, x, b, b_bias, D_skip, z, form):
    """Run the diagonal recurrence with mambapy's `pscan`, on gates and inputs (B,T,D,N)."""
    from mambapy.pscan import pscan

    eps = rate(k, b, b_bias)[..., None]
    states = pscan(1 - eps * k[:, :, None].square(), eps * x[..., None] * k[:, :, None])
    return ((states @ q[..., None])[..., 0] + D_skip * x) * F.silu(z)


def chunked(*inputs, form):
    return chunked_scan(*inputs, form=form)[0]


CANDIDATES = {"loop": loop, "mambapy": mambapy, "chunked": chunked}


def run(candidate, form, inputs, dout):
    "Return output and gradients of one forward plus backward."
    for t in inputs:
        t.grad = None
    out = candidate(*inputs, form=form)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in inputs)]


def parity(candidate, form, B, T, D, N, seed, tolerance=1e-4):
    """Return (name, relative error) of wrong results, compared with the float64 reference.

    The list is empty if all results are right."""
    double, dout = make_inputs(B, T, D, N, seed, torch.float64)
    expected = run(lambda *a, form: reference_scan(*a, form=form)[0], form, double, dout)
    actual = run(candidate, form, *make_inputs(B, T, D, N, seed))
    wrong = []
    for name, a, e in zip(("out", *NAMES), actual, expected):
        error = ((a - e).abs().max() / e.abs().max()).item()
        if not error < tolerance:  # NaN is wrong too
            wrong.append((name, error))
    return wrong


def measure(candidates, form, B, T, D, N, rounds, seed):
    "Return seconds per candidate, one entry per round; the order rotates from round to round."
    inputs, dout = make_inputs(B, T, D, N, seed)
    seconds = {name: [] for name in candidates}
    names = list(candidates)
    for i in range(-1, rounds):  # round -1 warms up
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            run(CANDIDATES[name], form, inputs, dout)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def others():
    "Return processor seconds used by other processes so far, or None if unknown."
    counters = pathlib.Path("/proc/stat")
    if not counters.exists():
        return None
    total = counters.read_text().splitlines()[0]
    fields = [int(v) for v in total.split()[1:9]]
    own = os.times()
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def resident(key):
    "Return a field of /proc/self/status in MB."
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(l for l in status.splitlines() if l.startswith(key + ":"))
    return int(line.split()[1]) / 1024


def memory_here(name, form, B, T, D, N, seed, threads):
    "Return the growth of peak resident size during one forward plus backward, in MB."
    torch.set_num_threads(threads)
    run(
        CANDIDATES[name], form, *make_inputs(1, 4, 4, N, seed)
    )  # imports, thread pools: not counted
    inputs, dout = make_inputs(B, T, D, N, seed)
    before = resident("VmHWM")
    run(CANDIDATES[name], form, inputs, dout)
    return resident("VmHWM") - before


def memory(name, form, shape, N, args):
    "Run `memory_here` in a fresh process; return None if the system does not report memory."
    if not pathlib.Path("/proc/self/status").exists():
        return None
    options = dict(
        shape=",".join(map(str, shape)), form=form, state=N, threads=args.threads, seed=args.seed
    )
    command = [sys.executable, str(BENCH), "--memory-of", name]
    command += [word for key, value in options.items() for word in ("--" + key, str(value))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench.py: measuring the memory of {name} failed:\n{done.stderr}")
    return float(done.stdout)


def environment(args):
    "Return versions, processor, commit and command, which are needed to repeat the numbers."
    return dict(
        command=" ".join(["python kernels/bench.py", *args.given]),
        commit=args.commit or commit_of_kit(),
        cpu=cpu_name(),
        threads=args.threads,
        python=platform.python_version(),
        system=platform.system(),
        torch=torch.__version__,
        mambapy=version_of("mambapy"),
        seed=args.seed,
        rounds=args.rounds,
    )


def compare(form, shape, N, args):
    "Check, time and print one form at one shape; return its row, or None if a result is wrong."
    B, T, D = shape
    names = [n for n in CANDIDATES if n != "mambapy" or version_of("mambapy")]
    for name in names:
        # mambapy has no exact form, so it is checked and timed on the diagonal recurrence
        wrong = parity(
            CANDIDATES[name], "diagonal" if name == "mambapy" else form, B, T, D, N, args.seed
        )
        if wrong:
            print(
                f"WRONG {name}, {form}, {shape}: "
                + ", ".join(f"{n} off by {e:.1e}" for n, e in wrong)
            )
            return None
    before = others()
    start = time.perf_counter()
    seconds = measure(names, form, B, T, D, N, args.rounds, args.seed)
    row = dict(form=form, shape=dict(B=B, T=T, D=D, N=N), candidates={})
    if before is not None:
        share = (others() - before) / (time.perf_counter() - start)
        row["cores_used_by_others"] = round(max(0.0, share), 2)
    for name in names:
        ratios = [s / l for s, l in zip(seconds[name], seconds["loop"])]
        row["candidates"][name] = dict(
            ms=round(1e3 * statistics.median(seconds[name]), 2),
            least_ms=round(1e3 * min(seconds[name]), 2),
            ratio=round(statistics.median(ratios), 4),
            memory_mb=memory(name, form, shape, N, args),
        )
    report(row, seconds)
    return row


def report(row, seconds):
    "Print the table of one row, and add the ratios to each rival, with targets, to the row."
    s = row["shape"]
    found = row["candidates"]
    print(
        f"\n{row['form']}, B={s['B']} T={s['T']} D={s['D']} N={s['N']}: forward + backward; "
        "parity with float64 checked"
    )
    print(f"{'':24s}{'ms':>10s}{'ratio':>9s}{'extra MB':>11s}{'ratio':>9s}")
    for name in CANDIDATES:
        label = "mambapy (diagonal)" if name == "mambapy" else name
        if name not in found:
            print(f"{label:24s}{'not installed':>21s}")
            continue
        c = found[name]
        base = found["loop"]["memory_mb"]
        c["memory_ratio"] = round(c["memory_mb"] / base, 4) if base else None
        space = f"{c['memory_mb']:11.0f}{c['memory_ratio']:9.3f}" if base else f"{'unknown':>11s}"
        print(f"{label:24s}{c['ms']:10.1f}{c['ratio']:9.3f}{space}")
    busy = row.get("cores_used_by_others", 0)
    if busy > 0.2:
        print(f"other processes used {busy:.1f} cores: times and ratios are unreliable")
    row["chunked_against"] = {}
    for rival, (time_target, memory_target) in TARGETS.items():
        if rival in found:
            ratio = statistics.median(a / b for a, b in zip(seconds["chunked"], seconds[rival]))
            against = dict(
                time=round(ratio, 4), time_target=time_target, memory_target=memory_target
            )
            if found[rival]["memory_mb"]:
                against["memory"] = round(
                    found["chunked"]["memory_mb"] / found[rival]["memory_mb"], 4
                )
            row["chunked_against"][rival] = against
            print(
                f"chunked / {rival}: time {ratio:.3f} (target {time_target}), memory "
                f"{against.get('memory', 'unknown')} (target {memory_target})"
            )


def main(args):
    "Return the record of all rows, or None if a result is wrong."
    torch.set_num_threads(args.threads)
    rows = [
        compare(form, shape, N, args)
        for shape in args.shape
        for N in args.state
        for form in args.form
    ]
    return None if None in rows else dict(environment=environment(args), results=rows)
