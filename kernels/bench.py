#!/usr/bin/env python
"""Time the scans, after checking that they are right.

    python kernels/bench.py --device cpu
    python kernels/bench.py --device cpu --shape 4,256,512 --form exact --state 64

Forward plus backward of the whole operation (rate, scan, skip, gate) for three candidates: the plain
loop under autograd, mambapy's parallel scan (if installed; diagonal recurrence only), and the kit's
chunked scan. Every candidate's output and gradients are compared with the float64 reference first; on a
wrong result no time is printed and the exit code is 1. Candidates run in turn, round by round, on the
same inputs; the ratio is the median over rounds of the ratio within a round. Extra memory is the growth
of the peak resident size during one forward plus backward, in a fresh process.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))   # the checkout, not another installed version

from longhorn_kit.scan.chunked import chunked_scan
from longhorn_kit.scan.reference import reference_scan

NAMES = ("q", "k", "x", "b", "b_bias", "D_skip", "z")
TARGETS = {"loop": (0.2, 0.5), "mambapy": (0.25, 0.5)}   # time and memory of the chunked scan against each


def make_inputs(B, T, D, N, seed, dtype=torch.float32):
    "The seven inputs, with gradients, and a gradient of the output; the same numbers for every dtype."
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, N), (B, T, N), (B, T, D), (B, T, D), (D,), (D,), (B, T, D))
    inputs = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    return inputs, torch.randn(B, T, D, generator=generator).to(dtype)


def rate(k, b, b_bias):
    beta = torch.sigmoid(b + b_bias)
    return beta / (1 + beta * k.square().sum(-1, keepdim=True))


def loop(q, k, x, b, b_bias, D_skip, z, form):
    "The code one would write first: the rates at once, then one token at a time under autograd."
    eps = rate(k, b, b_bias)
    S, reads = x.new_zeros(x.shape[0], x.shape[2], k.shape[2]), []
    for t in range(x.shape[1]):
        k_t, e_t, x_t = k[:, t, None, :], eps[:, t, :, None], x[:, t, :, None]
        if form == "exact":
            S = S + e_t * (x_t - (S * k_t).sum(-1, keepdim=True)) * k_t
        else:
            S = (1 - e_t * k_t.square()) * S + e_t * x_t * k_t
        reads.append((S * q[:, t, None, :]).sum(-1))
    return (torch.stack(reads, 1) + D_skip * x) * F.silu(z)


def mambapy(q, k, x, b, b_bias, D_skip, z, form):
    "The diagonal recurrence through mambapy's parallel scan: gates and inputs (B,T,D,N), then its `pscan`."
    from mambapy.pscan import pscan
    eps = rate(k, b, b_bias)[..., None]
    states = pscan(1 - eps * k[:, :, None].square(), eps * x[..., None] * k[:, :, None])
    return ((states @ q[..., None])[..., 0] + D_skip * x) * F.silu(z)


def chunked(*inputs, form):
    return chunked_scan(*inputs, form=form)[0]


CANDIDATES = {"loop": loop, "mambapy": mambapy, "chunked": chunked}


def version(name):
    from importlib import metadata
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run(candidate, form, inputs, dout):
    "Output and gradients of one forward plus backward."
    for t in inputs:
        t.grad = None
    out = candidate(*inputs, form=form)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in inputs)]


def parity(candidate, form, B, T, D, N, seed, tolerance=1e-4):
    "What is wrong: (name, relative error) against the float64 reference; empty if all is right."
    double, dout = make_inputs(B, T, D, N, seed, torch.float64)
    expected = run(lambda *a, form: reference_scan(*a, form=form)[0], form, double, dout)
    actual = run(candidate, form, *make_inputs(B, T, D, N, seed))
    wrong = []
    for name, a, e in zip(("out", *NAMES), actual, expected):
        error = ((a - e).abs().max() / e.abs().max()).item()
        if not error < tolerance:   # NaN is wrong too
            wrong.append((name, error))
    return wrong


def measure(candidates, form, B, T, D, N, rounds, seed):
    "Seconds per candidate, one entry a round; the order turns from round to round."
    inputs, dout = make_inputs(B, T, D, N, seed)
    seconds, names = {name: [] for name in candidates}, list(candidates)
    for i in range(-1, rounds):     # round -1 warms up
        for name in names[i % len(names):] + names[: i % len(names)]:
            start = time.perf_counter()
            run(CANDIDATES[name], form, inputs, dout)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def others():
    "Processor seconds used by other processes so far, or None where the system does not tell."
    if not pathlib.Path("/proc/stat").exists():
        return None
    fields = [int(v) for v in open("/proc/stat").readline().split()[1:9]]
    own = os.times()
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def resident(key):
    "A field of /proc/self/status in MB."
    line = next(l for l in open("/proc/self/status") if l.startswith(key + ":"))
    return int(line.split()[1]) / 1024


def memory_here(name, form, B, T, D, N, seed):
    "Growth of this process's peak resident size during one forward plus backward, in MB."
    run(CANDIDATES[name], form, *make_inputs(1, 4, 4, N, seed))   # imports, thread pools: not counted
    inputs, dout = make_inputs(B, T, D, N, seed)
    before = resident("VmHWM")
    run(CANDIDATES[name], form, inputs, dout)
    return resident("VmHWM") - before


def memory(name, form, shape, args):
    "`memory_here` in a fresh process, or None where the system does not tell."
    if not pathlib.Path("/proc/self/status").exists():
        return None
    options = dict(shape=",".join(map(str, shape)), form=form, state=args.state, threads=args.threads,
                   seed=args.seed)
    command = [sys.executable, __file__, "--memory-of", name]
    command += [word for key, value in options.items() for word in ("--" + key, str(value))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench.py: measuring the memory of {name} failed:\n{done.stderr}")
    return float(done.stdout)


def environment(args):
    "Versions, processor, commit and command: what a reader needs to repeat the numbers."
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    cpu = platform.processor() or platform.machine()
    if pathlib.Path("/proc/cpuinfo").exists():
        named = [l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")]
        cpu = named[0] if named else cpu
    return dict(
        command=" ".join(["python kernels/bench.py", *args.given]), commit=git.stdout.strip() or None,
        cpu=cpu, threads=args.threads, python=platform.python_version(), system=platform.system(),
        torch=torch.__version__, mambapy=version("mambapy"), seed=args.seed, rounds=args.rounds)


def compare(form, shape, args):
    "Check, time and print one form at one shape: the row of the results file, or None if wrong."
    B, T, D, N = *shape, args.state
    names = [n for n in CANDIDATES if n != "mambapy" or version("mambapy")]
    for name in names:
        # mambapy has no exact form: it is checked, and timed, on the diagonal recurrence.
        wrong = parity(CANDIDATES[name], "diagonal" if name == "mambapy" else form, B, T, D, N, args.seed)
        if wrong:
            print(f"WRONG {name}, {form}, {shape}: " + ", ".join(f"{n} off by {e:.1e}" for n, e in wrong))
            return None
    before, start = others(), time.perf_counter()
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
            ratio=round(statistics.median(ratios), 4), memory_mb=memory(name, form, shape, args))
    report(row, seconds)
    return row


def report(row, seconds):
    "Print the table of one row and put the ratios against each rival, with targets, into it."
    s, found = row["shape"], row["candidates"]
    print(f"\n{row['form']}, B={s['B']} T={s['T']} D={s['D']} N={s['N']}: forward + backward; "
          "parity with float64 checked")
    print(f"{'':24s}{'ms':>10s}{'ratio':>9s}{'extra MB':>11s}{'ratio':>9s}")
    for name in CANDIDATES:
        label = "mambapy (diagonal)" if name == "mambapy" else name
        if name not in found:
            print(f"{label:24s}{'not installed':>21s}")
            continue
        c, base = found[name], found["loop"]["memory_mb"]
        c["memory_ratio"] = round(c["memory_mb"] / base, 4) if base else None
        space = f"{c['memory_mb']:11.0f}{c['memory_ratio']:9.3f}" if base else f"{'unknown':>11s}"
        print(f"{label:24s}{c['ms']:10.1f}{c['ratio']:9.3f}{space}")
    busy = row.get("cores_used_by_others", 0)
    if busy > 0.2:
        print(f"other processes used {busy:.1f} cores meanwhile: times and ratios are unreliable")
    row["chunked_against"] = {}
    for rival, (time_target, memory_target) in TARGETS.items():
        if rival in found:
            ratio = statistics.median(a / b for a, b in zip(seconds["chunked"], seconds[rival]))
            against = dict(time=round(ratio, 4), time_target=time_target, memory_target=memory_target)
            if found[rival]["memory_mb"]:
                against["memory"] = round(found["chunked"]["memory_mb"] / found[rival]["memory_mb"], 4)
            row["chunked_against"][rival] = against
            print(f"chunked / {rival}: time {ratio:.3f} (target {time_target}), memory "
                  f"{against.get('memory', 'unknown')} (target {memory_target})")


def shape_of(text):
    try:
        B, T, D = (int(part) for part in text.split(","))
        assert min(B, T, D) > 0
    except (ValueError, AssertionError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected B,T,D as in 4,256,512") from None
    return B, T, D


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--shape", type=shape_of, nargs="+", metavar="B,T,D",
                        default=[(4, 256, 512), (2, 1024, 768)])
    parser.add_argument("--form", choices=["diagonal", "exact"], nargs="+", default=["diagonal", "exact"])
    parser.add_argument("--state", type=int, default=16, help="N, the size of a key (default 16)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "kernels" / "results" / "cpu.json")
    parser.add_argument("--memory-of", choices=list(CANDIDATES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.given = sys.argv[1:] if argv is None else argv
    return args


def main(argv=None):
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(memory_here(args.memory_of, args.form[0], *args.shape[0], args.state, args.seed))
        return 0
    rows = [compare(form, shape, args) for shape in args.shape for form in args.form]
    if None in rows:
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = args.out.with_suffix(".part")
    part.write_text(json.dumps(dict(environment=environment(args), results=rows), indent=1) + "\n")
    os.replace(part, args.out)
    print(f"\nwritten: {os.path.relpath(args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
