"""Run the kernel tests on a GPU in several processes at once: most of their time is the compiler's, and it has many cores.

    python tests/gpu.py                    # all kernel tests, as many processes as half the cores, at most 12
    python tests/gpu.py -n 4 -k exact      # what follows goes to pytest
    compute-sanitizer --target-processes all --tool memcheck python tests/gpu.py -n 1 -k "every_dtype and bfloat16"

Tests that need most of the GPU's memory run by themselves, after the others.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
FILES = ("test_triton_portable.py", "test_triton_fast.py", "test_triton_composes.py", "test_op.py", "test_decode.py",
         "test_short_conv.py", "test_matrix.py", "test_models_cuda.py")
BIG = re.compile("two_to_the_31")


def pytest(*arguments, stdout=subprocess.PIPE, **options):
    return subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], cwd=FOLDER.parent,
                            stdout=stdout, stderr=subprocess.STDOUT, text=True, **options)


def collect(rest):
    "Names of all tests, those that run alone apart."
    files = [str(FOLDER / f) for f in FILES if (FOLDER / f).exists()]
    said = pytest("--collect-only", *files, *rest).communicate()[0]
    names = [line for line in said.splitlines() if "::" in line]
    if not names:
        sys.exit(said[-2000:])
    return [n for n in names if not BIG.search(n)], [n for n in names if BIG.search(n)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=max(1, min(12, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--logs", type=pathlib.Path, default=None, help="folder for what each process prints, as it goes")
    args, rest = parser.parse_known_args()
    start, logs = time.time(), args.logs or pathlib.Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    small, big = collect(rest)
    shares = [share for i in range(args.n) if (share := small[i :: args.n])]
    report, failed = ("--durations=3", "--tb=short"), 0
    env = os.environ | dict(OMP_NUM_THREADS="1")
    files = [open(logs / f"{i}.txt", "w+") for i in range(len(shares))]
    running = [pytest("-v", *report, *share, env=env, stdout=file) for share, file in zip(shares, files)]
    codes = [process.wait() for process in running]
    said = [(logs / f"{i}.txt").read_text() for i in range(len(shares))]
    if big:
        process = pytest(*report, *big)
        said.append(process.communicate()[0])
        codes.append(process.returncode)
    counts = {}
    for text, code in zip(said, codes):
        failed += code != 0
        print(text[-4000:] if code else "\n".join(text.splitlines()[-8:]), flush=True)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text.splitlines()[-1] if text else ""):
            counts[word] = counts.get(word, 0) + int(number)
    print(", ".join(f"{n} {word}" for word, n in sorted(counts.items())), f"in {time.time() - start:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
