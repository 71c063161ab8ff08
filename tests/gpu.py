"""Run every test that needs a GPU, in several processes, and write the record tests/gpu.json.

    # all tests; installs nothing
    make test-gpu
    # other words go to pytest; --out names another record
    python tests/gpu.py -n 4 -k exact --out /tmp/r.json
    compute-sanitizer --target-processes all --tool memcheck \\
        python tests/gpu.py -n 1 -k "parity_in_bfloat16 and exact" --out /tmp/r.json
    # print one line if kernels or models differ from those of the record
    python tests/gpu.py --stale

Compiling takes most of the time. Tests that compile the same kernels stay in one process, and the
seconds of the last record balance the processes. Tests that need most of the GPU's memory run one
after the other in the first process.
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
    "test_triton_op.py",
    "test_triton_pointwise.py",
    "test_op.py",
    "test_step.py",
    "test_short_conv.py",
    "test_mamba.py",
    "test_matrix.py",
    "test_models_cuda.py",
)
MARKED = (
    "test_vision_timm.py",
    "test_mqar.py",
    "test_one_pass.py",
    "test_puzzles.py",
)  # mostly tests for the CPU: run only those marked cuda
BIG = re.compile("two_to_the_31")
SHARED = re.compile("test_(op|step|matrix).py")  # most tests of these files share one size


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


def start_collecting(files, *options):
    "Start a process that prints the names of the tests of some files."
    paths = [f"tests/{name}" for name in files]
    return pytest("--collect-only", *paths, *options)


def collected(output):
    "Return the names of tests in pytest's output."
    lines = [line for line in output.splitlines() if "::" in line]
    return [line for line in lines if not line.startswith("ERROR")]


def collect(rest):
    "Return the names of all tests."
    gpu_files = start_collecting(FILES, *rest)
    marked_files = start_collecting(MARKED, "-m", "cuda", *rest)
    output = gpu_files.communicate()[0]
    marked_output = marked_files.communicate()[0]
    names = collected(output)
    marked_names = collected(marked_output)
    if gpu_files.returncode not in (0, 5) or not (names or marked_names):
        sys.exit(output[-3000:])
    if marked_files.returncode not in (0, 5):
        reason = marked_output.strip().splitlines()[-1]
        left_out = ", ".join(MARKED)
        print(f"left out, as they cannot be imported here: {left_out} ({reason})", flush=True)
        return names
    return names + marked_names


def group(name):
    """Return the name of a test's group.

    Tests of a group compile the same kernels: one form and, if functions have separate sizes, one
    function."""
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
    file = function.partition("::")[0]
    start = file if SHARED.search(function) else function
    return " ".join([start, *sorted(words)])


def spread(
    names,  # names of tests
    recorded,  # group -> seconds of one of its tests
    n,  # number of processes
):
    "Return the names for each of n processes, with about the same seconds per process."
    groups = collections.defaultdict(list)
    for name in names:
        groups[group(name)].append(name)

    def guess(g):
        if g == "big":
            return 15.0
        # these take longest to compile
        return 6.0 if "portable" in g or "exact" in g else 2.0

    def cost(g):
        return recorded.get(g, guess(g)) * len(groups[g])

    shares = [[] for _ in range(n)]
    load = [0.0] * n
    for g in sorted(groups, key=lambda g: (g != "big", -cost(g))):
        least = min(range(n), key=load.__getitem__)
        shares[least] += groups[g]
        load[least] += cost(g)
    return [share for share in shares if share]


def outcomes(path):
    "Return (name, outcome, seconds) of every test in a report of pytest."
    for case in xml.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        yield name, next(iter(kinds), "passed"), float(case.get("time"))


def mean_seconds(results):
    "Return the seconds of a test, by group."
    spent = collections.defaultdict(list)
    for name, _, seconds in results:
        spent[group(name)].append(seconds)
    return {name: sum(seconds) / len(seconds) for name, seconds in sorted(spent.items())}


def hashes():
    "Return the sha256 of every file that the record covers."
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
        names = ", ".join(changed[:3]) + (" ..." if len(changed) > 3 else "")
        print(
            f"warning: {len(changed)} files differ from those that last passed on a GPU "
            f"(commit {record['commit']}): {names}; "
            "run 'make test-gpu' on a GPU and commit tests/gpu.json"
        )


def start_share(
    names,  # names of tests
    number,  # number of the process
    folder,  # folder for output and report
    gpu,  # number of the GPU
):
    "Start a process that runs some tests."
    with open(folder / f"{number}.txt", "w+") as file:  # the process inherits its handle
        return pytest(
            "-vv",
            "--tb=short",
            f"--junitxml={folder}/{number}.xml",
            *names,
            stdout=file,
            CUDA_VISIBLE_DEVICES=gpu,
        )


def run(
    shares,  # names of tests for each process
    folder,
    gpus,  # numbers of the GPUs, which processes use in turn
):
    "Run all tests; return results and the number of lost tests; print output of failures."
    running = [start_share(share, i, folder, gpus[i % len(gpus)]) for i, share in enumerate(shares)]
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


def options():
    "Return the options of this program and the words for pytest."
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
    parser.add_argument("--commit", help="commit to record if git is missing")
    parser.add_argument(
        "--stale", action="store_true", help="run nothing; one line if the record is of other files"
    )
    return parser.parse_known_args()


def main():
    args, rest = options()
    if args.stale:
        return stale()
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit("tests/gpu.py: PyTorch sees no GPU here; run it on a machine with an NVIDIA GPU")
    start = time.time()
    folder = args.logs or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    recorded = json.loads(RECORD.read_text())["seconds"] if RECORD.exists() else {}
    every_gpu = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or every_gpu).split(",")
    shares = spread(collect(rest), recorded, args.n)
    results, lost = run(shares, folder, gpus)
    counts = collections.Counter(kind for _, kind, _ in results)
    means = mean_seconds(results)
    versions = dict(
        python=platform.python_version(), torch=torch.__version__, triton=triton.__version__
    )
    outcome = dict(sorted(counts.items())) | (dict(lost=lost) if lost else {})
    failures = sorted(name for name, kind, _ in results if kind in ("failure", "error"))
    record = dict(
        commit=args.commit or commit(),
        gpu=torch.cuda.get_device_name(),
        command=" ".join(["python tests/gpu.py", *sys.argv[1:]]),
        versions=versions,
        seconds_in_all=round(time.time() - start),
        processes=args.n,
        counts=outcome,
        failures=failures,
        files=hashes(),
        seconds={name: round(mean, 2) for name, mean in means.items() if mean >= 0.05},
    )
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    bad = counts["failure"] + counts["error"] + lost
    print(
        f"{counts['passed']} passed, {bad} failed, {counts['skipped']} skipped "
        f"in {record['seconds_in_all']} s on {record['gpu']}: {args.out}"
    )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
