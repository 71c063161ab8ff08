#!/usr/bin/env python
"""Check that the scans are right, then time them.

    python kernels/bench.py --device cpu  # a few minutes; results/cpu.json
    python kernels/bench.py --device cpu --shape 4,256,512 --form exact --state 64 --out FILE.json
    python kernels/bench.py --device cuda  # some minutes, see --budget; results/<gpu>.json
    python kernels/bench.py --device cuda --sections main peers            # only these parts
    python kernels/bench.py --device cuda --shape 8,2048,2048 --state 16 64 --form exact
    python kernels/bench.py --device cuda --check  # compare main rows with the committed record

Without --out, only a complete run writes its record; a partial run only prints its table. Every
output and gradient is first compared with the float64 reference, except those of other packages'
convolutions. A wrong result has no time, and the exit code is then 1. On a CPU, the forward plus
backward of the plain loop, mambapy and the kit's chunked scan are timed (bench_cpu.py). On a GPU,
the kit's Triton kernels and all importable peers are timed (bench_gpu.py, peers.py).
`--device interpret` runs the GPU side in Triton's interpreter at tiny sizes, which tests this
program; its times are meaningless.

--check times the main rows and compares them with the record of this GPU. A time is slower if its
lower quartile is more than 5 % above the record's upper quartile; the exit code is then 1. Times of
different GPUs are not compared; the exit code is then 2.
"""

import argparse
import json
import os
import pathlib
import platform
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # the checkout, not another installed version

RESULTS = ROOT / "kernels" / "results"
SECTIONS = (
    "main",
    "options",
    "ragged",
    "packed",
    "memory",
    "N",
    "T",
    "B",
    "dtype",
    "peers",
    "decode",
    "again",
)
FORMS = ("diagonal", "exact", "decoupled", "s6")
CPU_DEFAULTS = dict(shape=[(4, 256, 512), (2, 1024, 768)], form=["diagonal", "exact"], state=[16])


def shape_of(text):
    try:
        B, T, D = (int(part) for part in text.split(","))
        assert min(B, T, D) > 0
    except (ValueError, AssertionError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected B,T,D as in 4,256,512") from None
    return B, T, D


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda", "interpret"], default="cpu")
    parser.add_argument(
        "--shape",
        type=shape_of,
        nargs="+",
        metavar="B,T,D",
        help="time these instead of the usual ones",
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        nargs="+",
        help="some of " + ", ".join(FORMS) + "; on a CPU the first two",
    )
    parser.add_argument(
        "--state", type=count, nargs="+", metavar="N", help="sizes of a key (default 16)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit to record if git is missing")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="file to write (default, for a run of everything: kernels/results/cpu.json or "
        "<gpu>.json)",
    )
    cpu = parser.add_argument_group("on a CPU")
    cpu.add_argument("--threads", type=count, default=min(2, os.cpu_count() or 1))
    cpu.add_argument("--rounds", type=count, default=9)
    cpu.add_argument("--memory-of", help=argparse.SUPPRESS)
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], nargs="+")
    gpu.add_argument(
        "--sections",
        choices=SECTIONS,
        nargs="+",
        default=SECTIONS,
        metavar="PART",
        help=", ".join(SECTIONS),
    )
    gpu.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="DIR",
        help="draw the roofline and times against T, B and N into DIR",
    )
    gpu.add_argument(
        "--check",
        type=pathlib.Path,
        nargs="?",
        const=pathlib.Path(),
        metavar="RECORD",
        help="compare the main rows with a record (default: that of this GPU in kernels/results)",
    )
    gpu.add_argument(
        "--budget",
        type=float,
        default=210,
        help="seconds after which no new case starts (default 210)",
    )
    gpu.add_argument(
        "--jobs",
        type=int,
        default=min(12, max(1, (os.cpu_count() or 2) * 3 // 4)),
        help="processes that compile at once; 0: compile one after the other",
    )
    args = parser.parse_args(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    for option in (
        "--out",
        "--commit",
        "--plot",
    ):  # these options do not change what a run measures
        if option in given:
            at = given.index(option)
            del given[at : at + 2]
    args.given = given
    if args.check:
        args.sections = ["main"]
    cases = args.shape or args.form or args.state or args.dtype
    sections = set(args.sections) != set(SECTIONS)
    if cases and sections:
        parser.error(
            "--sections chooses among the usual cases; --shape, --form, --state and --dtype "
            "make others"
        )
    part = cases or sections
    args.whole = not part and args.device != "interpret"
    if args.device == "cpu":
        for name, default in CPU_DEFAULTS.items():
            setattr(args, name, getattr(args, name) or default)
        if args.dtype:
            parser.error("--dtype is for a GPU: the CPU side times float32")
        if args.plot or args.check:
            parser.error("--plot and --check are for a GPU's record")
        if not set(args.form) <= set(FORMS[:2]):
            parser.error(f"on a CPU --form is of {', '.join(FORMS[:2])}")
    return args


def on_gpu(args):
    "Return the record of the GPU side."
    if args.device == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "bench.py: no GPU here; --device interpret runs the same code without times that "
            "mean anything"
        )
    import bench_gpu

    from longhorn_kit.records import commit_of_kit, version_of

    return bench_gpu.main(
        args,
        dict(
            gpu=torch.cuda.get_device_name(0) if args.device == "cuda" else "interpreter",
            python=platform.python_version(),
            torch=torch.__version__,
            triton=triton.__version__,
            fla_core=version_of("fla-core"),
            mamba_ssm=version_of("mamba-ssm"),
            commit=args.commit or commit_of_kit(),
            command=" ".join(["python kernels/bench.py", *args.given]),
        ),
    )


def destination(args, name, wrong=(), left_out=()):
    """Return the file to write, or None.

    A run that is wrong, partial or cut short never replaces a record."""
    path = args.out or (RESULTS / name if args.whole else None)
    return (
        path.with_suffix(".partial.json") if path and (wrong or left_out and not args.out) else path
    )


def write(path, text):
    "Write the file completely or not at all."
    if path is None:
        print("\nonly a part was timed: nothing is written without --out")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
    print(f"\nwritten: {os.path.relpath(path)}")


def compare(record, path):
    "Print the times that are slower than in the record at `path`; return the exit code."
    from bench_gpu import MARGIN, slower

    if not path.is_file():
        print(f"nothing to compare with: {os.path.relpath(path)} does not exist")
        return 2
    old = json.loads(path.read_text(encoding="utf-8"))
    if old["gpu"] != record["gpu"]:
        print(f"not compared: {os.path.relpath(path)} is from {old['gpu']}, not {record['gpu']}")
        return 2
    for name in ("torch", "triton"):
        if old[name] != record[name]:
            print(f"note: the record has {name} {old[name]}, this run {record[name]}")
    found = slower(record, old)
    print(
        f"against commit {old['commit']}, beyond quartiles and {100 * MARGIN:.0f} %:",
        *found or ["nothing is slower"],
        sep="\n  ",
    )
    return 1 if found or record["wrong"] else 0


def draw_record(
    record: dict,  # written by `kernels/bench.py` on a GPU
):
    """Draw the roofline at the first timed shape, and times against T, B and N if there are any."""
    import matplotlib.pyplot as plt
    from floors import OF_FORM, draw_against, draw_roofline, plain_rows

    from longhorn_kit.plots import COLORS

    fig, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    rows = [
        row
        for row in plain_rows(record)
        if row.get("section") in (None, "main") and row.get("backward_ms")
    ]
    shape = tuple(rows[0][n] for n in "BTD") if rows else (8, 2048, 2048)
    scans = []
    for row in plain_rows({"rows": rows}, **dict(zip("BTD", shape))):
        form = row["form"]
        fast = row["kernels"] == row["form"]
        name = form if fast else f"{'S6' if form == 's6' else form}, portable"
        scans.append(
            (
                name,
                form,
                16 if fast and form == "exact" else 0,
                COLORS[OF_FORM[form]],
                "-" if fast else "--",
                (row["forward_ms"], row["backward_ms"]),
            )
        )
    draw_roofline(axes[0, 0], record, shape, scans)
    axes[0, 0].set_title(f"B={shape[0]} T={shape[1]} D={shape[2]}", fontsize=9)
    for ax, axis in zip(axes.flat[1:], "TBN"):
        draw_against(ax, record, axis, (*shape, 16))
    return fig


def main(argv=None):
    args = parse(argv)
    if args.memory_of:
        import bench_cpu

        print(
            bench_cpu.memory_here(
                args.memory_of, args.form[0], *args.shape[0], args.state[0], args.seed, args.threads
            )
        )
        return 0
    if args.device == "cpu":
        import bench_cpu

        record = bench_cpu.main(args)
        if record is None:
            return 1
        write(destination(args, "cpu.json"), json.dumps(record, indent=1) + "\n")
        return 0
    record = on_gpu(args)
    from bench_gpu import one_row_a_line

    name = f"{record['gpu'].removeprefix('NVIDIA ').lower().replace(' ', '_')}.json"
    if args.plot:
        picture = args.plot / name.replace(".json", ".png")
        args.plot.mkdir(parents=True, exist_ok=True)
        draw_record(record).savefig(picture, dpi=150)
        print(f"drawn: {picture}")
    if args.check:
        return compare(record, RESULTS / name if args.check == pathlib.Path() else args.check)
    if record["rows"]:
        write(destination(args, name, record["wrong"], record["left_out"]), one_row_a_line(record))
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
