"""Run every test that needs a GPU, in several processes at once, and write the record tests/gpu.json.

    make test-gpu                                   # all of them, with the Python that is found; nothing is installed
    python tests/gpu.py -n 4 -k exact --out /tmp/r.json     # what follows goes to pytest, and the record elsewhere
    compute-sanitizer --target-processes all --tool memcheck python tests/gpu.py -n 1 -k "parity_in_bfloat16 and exact" --out /tmp/r.json
    python tests/gpu.py --stale                     # one line if kernels or models differ from those of the record

Most of the time is the compiler's. Tests that compile the same kernels stay in one process, and the seconds of the last
record say how to spread them. Tests that need most of the GPU's memory follow each other in the first process.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu.json"
WATCHED = ("longhorn_kit/scan", "longhorn_kit/models")
FILES = (
    "test_causality.py",
    "test_triton_portable.py",
    "test_triton_fast.py",
    "test_triton_composes.py",
    "test_triton_pointwise.py",
    "test_op.py",
    "test_decode.py",
    "test_short_conv.py",
    "test_mamba.py",
    "test_matrix.py",
    "test_models_cuda.py",
)
MARKED = (
    "test_vision.py",
    "test_mqar.py",
    "test_one_pass.py",
    "test_puzzles.py",
)  # mostly tests for the CPU: only those marked cuda
BIG = re.compile("two_to_the_31")
SHARED = re.compile("test_(op|decode|matrix).py")  # one size in most of the file


def pytest(*arguments, stdout=subprocess.PIPE, **env):
    env = os.environ | dict(OMP_NUM_THREADS="1", TRITON_DISABLE_LINE_INFO="1") | env
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )


def collect(rest):
    "Names of all tests."
    started = [
        pytest("--collect-only", *(f"tests/{f}" for f in files), *more, *rest)
        for files, more in ((FILES, ()), (MARKED, ("-m", "cuda")))
    ]
    said = [process.communicate()[0] for process in started]
    names = [
        [line for line in text.splitlines() if "::" in line and not line.startswith("ERROR")]
        for text in said
    ]
    if started[0].returncode not in (0, 5) or not any(names):
        sys.exit(said[0][-3000:])
    if started[1].returncode not in (0, 5):
        print(
            f"left out, as they cannot be imported here: {', '.join(MARKED)} ({said[1].strip().splitlines()[-1]})",
            flush=True,
        )
        return names[0]
    return names[0] + names[1]


def group(name):
    "Tests of one group compile the same kernels: one form and, where functions have separate sizes, one function."
    if BIG.search(name):
        return "big"
    function, _, parameters = name.partition("[")
    words = set(re.findall(r"[a-z0-9_]+", parameters)) & {
        "portable",
        "diagonal",
        "exact",
        "decoupled",
        "s6",
        "s6_time_varying",
        "timed",
    }
    return " ".join(
        [function.partition("::")[0] if SHARED.search(function) else function, *sorted(words)]
    )


def spread(names, known, n):
    "Names for each of n processes, about the same seconds each; `known`: seconds of a test by its group."
    groups = collections.defaultdict(list)
    for name in names:
        groups[group(name)].append(name)

    def guess(g):
        return (
            15.0 if g == "big" else 6.0 if "portable" in g or "exact" in g else 2.0
        )  # what takes the compiler longest

    def cost(g):
        return known.get(g, guess(g)) * len(groups[g])

    shares = [[] for _ in range(n)]
    load = [0.0] * n
    for g in sorted(groups, key=lambda g: (g != "big", -cost(g))):
        least = min(range(n), key=load.__getitem__)
        shares[least] += groups[g]
        load[least] += cost(g)
    return [share for share in shares if share]


def outcomes(path):
    "(name, outcome, seconds) of every test in a report of pytest's."
    for case in xml.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        yield name, next(iter(kinds), "passed"), float(case.get("time"))


def hashes():
    "sha256 of every file that the record speaks for."
    files = sorted(path for folder in WATCHED for path in (ROOT / folder).glob("*.py"))
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def commit():
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return git.stdout.strip() or "unknown"


def stale():
    "Print one line if files differ from those of the record."
    record = json.loads(RECORD.read_text()) if RECORD.exists() else dict(files={}, commit="none")
    now = hashes()
    changed = sorted(
        f for f in now.keys() | record["files"].keys() if now.get(f) != record["files"].get(f)
    )
    if changed:
        print(
            f"warning: {len(changed)} files differ from those that last passed on a GPU (commit {record['commit']}): "
            f"{', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}; run 'make test-gpu' on a GPU and commit tests/gpu.json"
        )


def run(shares, folder, gpus):
    "All results, and what the processes printed, of those that failed in full; `gpus`: their numbers, which take turns."
    files = [open(folder / f"{i}.txt", "w+") for i in range(len(shares))]
    running = [
        pytest(
            "-vv",
            "--tb=short",
            f"--junitxml={folder}/{i}.xml",
            *share,
            stdout=file,
            CUDA_VISIBLE_DEVICES=gpus[i % len(gpus)],
        )
        for i, (share, file) in enumerate(zip(shares, files))
    ]
    results = []
    lost = 0
    for i, process in enumerate(running):
        code = process.wait()
        if code not in (0, 5):
            print((folder / f"{i}.txt").read_text()[-4000:], flush=True)
        if (folder / f"{i}.xml").exists():
            results += outcomes(folder / f"{i}.xml")
        else:  # the process died
            lost += len(shares[i])
    return results, lost


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-n", type=int, default=max(1, min(16, os.cpu_count() or 2)), help="processes"
    )
    parser.add_argument(
        "--logs", type=pathlib.Path, help="folder for what each process prints, as it goes"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=RECORD, help="the record (default: tests/gpu.json)"
    )
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument(
        "--stale", action="store_true", help="run nothing; one line if the record is of other files"
    )
    args, rest = parser.parse_known_args()
    if args.stale:
        return stale()
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit("tests/gpu.py: PyTorch sees no GPU here; run it on a machine with an NVIDIA GPU")
    start = time.time()
    folder = args.logs or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads(RECORD.read_text())["seconds"] if RECORD.exists() else {}
    gpus = (
        os.environ.get("CUDA_VISIBLE_DEVICES")
        or ",".join(map(str, range(torch.cuda.device_count())))
    ).split(",")
    results, lost = run(spread(collect(rest), known, args.n), folder, gpus)
    counts = collections.Counter(kind for _, kind, _ in results)
    spent = collections.defaultdict(list)
    for name, _, seconds in results:
        spent[group(name)].append(seconds)
    record = dict(
        commit=args.commit or commit(),
        gpu=torch.cuda.get_device_name(),
        command=" ".join(["python tests/gpu.py", *sys.argv[1:]]),
        versions=dict(
            python=platform.python_version(), torch=torch.__version__, triton=triton.__version__
        ),
        seconds_in_all=round(time.time() - start),
        processes=args.n,
        counts=dict(sorted(counts.items())) | (dict(lost=lost) if lost else {}),
        failures=sorted(name for name, kind, _ in results if kind in ("failure", "error")),
        files=hashes(),
        seconds={
            g: round(sum(s) / len(s), 2)
            for g, s in sorted(spent.items())
            if sum(s) / len(s) >= 0.05
        },
    )
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    bad = counts["failure"] + counts["error"] + lost
    print(
        f"{counts['passed']} passed, {bad} failed, {counts['skipped']} skipped in {record['seconds_in_all']} s on {record['gpu']}: {args.out}"
    )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
