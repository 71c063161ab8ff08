"""Write the tables of README.md from the records, or check that they agree with the records.

python kernels/table.py            # rewrite the text between the markers
python kernels/table.py --check    # exit 1 if that would change anything
"""

import argparse
import functools
import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]
from floors import row_floors

SCANS = (  # form, kernels in the record, name, notebook, module, runs on
    ("exact", "exact", "exact, Gluon", "14_triton_exact", "triton_exact", "NVIDIA, sm_80 on"),
    (
        "diagonal",
        "diagonal",
        "diagonal, Gluon",
        "13_triton_diagonal",
        "triton_diagonal",
        "NVIDIA, sm_80 on",
    ),
    (
        "decoupled",
        "decoupled",
        "decoupled, Gluon",
        "triton_selective",
        "triton_selective",
        "NVIDIA, sm_80 on",
    ),
    ("s6", "s6", "Mamba's S6, Gluon", "triton_selective", "triton_selective", "NVIDIA, sm_80 on"),
    (
        "exact",
        "portable",
        "exact, portable",
        "triton_portable",
        "triton_portable",
        "any GPU, interpreter",
    ),
    (
        "diagonal",
        "portable",
        "diagonal, portable",
        "triton_portable",
        "triton_portable",
        "any GPU, interpreter",
    ),
    (
        "decoupled",
        "portable",
        "decoupled, portable",
        "triton_portable",
        "triton_portable",
        "any GPU, interpreter",
    ),
    (
        "s6",
        "portable",
        "Mamba's S6, portable",
        "triton_portable",
        "triton_portable",
        "any GPU, interpreter",
    ),
)
TORCH = (
    ("loop, diagonal", "loop (the oracle)", "10_reference", "reference"),
    ("chunks, diagonal", "diagonal in chunks", "11_chunked", "chunked"),
    ("chunks, exact", "exact in chunks", "11_chunked", "chunked"),
)


def times(row, digits=3, name="{}_ms"):
    found = (row.get(name.format(w)) for w in ("forward", "backward"))
    return " / ".join("–" if value is None else f"{value:.{digits}f}" for value in found)


def shares(row, rates, compiled):
    "Return the share of the largest lower bound, and the name of that bound."
    floors = {w: row_floors(row, w, rates, compiled) for w in ("forward", "backward")}
    bound = {w: max(floors[w], key=floors[w].get) for w in floors}
    return " / ".join(
        f"{100 * floors[w][bound[w]] / row[f'{w}_ms']:.0f} % {bound[w]}" for w in floors
    )


def linked(notebook):
    folder = "scan" if notebook[:2].isdigit() else "machine"
    return f"[{notebook}](../nbs/{folder}/{notebook}.ipynb)"


def gpu_table(record, compiled=None):
    """Return the table of kernels, one line per kernel.

    It has notebook, module, devices, times at the three shapes, and the share of the nearest lower
    bound at S1. Eager calls have columns if the record contains them."""
    main = {
        (r["form"], r["kernels"], r["shape"]): r for r in record["rows"] if r["section"] == "main"
    }
    called = any("eager_forward_ms" in row for row in main.values())
    columns = [
        "kernel",
        "notebook",
        "module `longhorn_kit.scan.`",
        "runs on",
        "S1",
        "S2",
        "S3",
        *["eager call, S1", "host's part, S1 (µs)"] * called,
        "share of the floor, S1",
    ]
    lines = [
        f"The table shows forward / backward in milliseconds on one {record['gpu']} "
        f"(torch {record['torch']}, triton {record['triton']}, commit {record['commit']}).",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for form, kernels, name, notebook, module, where in SCANS:
        rows = [main[form, kernels, shape] for shape in ("S1", "S2", "S3")]
        cells = [
            *map(times, rows),
            *[times(rows[0], name="eager_{}_ms"), times(rows[0], 0, "host_{}_us")] * called,
        ]
        cells.append(shares(rows[0], record["rates"], compiled))
        lines.append(
            f"| {name} | {linked(notebook)} | `{module}` | {where} | {' | '.join(cells)} |"
        )
    empty = " |" * (4 + 2 * called)
    peers = {r["peer"]: r for r in record["rows"] if r.get("peer") and r["shape"] == "S1"}
    for peer, name, notebook, module in TORCH:
        if peer in peers:
            lines.append(
                f"| {name}, PyTorch | {linked(notebook)} | `{module}` | any device | "
                f"{times(peers[peer], 1)}{empty}"
            )
    convolution = {
        r["shape"]: r for r in record["rows"] if r.get("kind") == "conv" and r["who"] == "kit"
    }
    if convolution:
        share = " / ".join(
            f"{100 / convolution['S1'][f'{w}_over_bytes']:.0f} %" for w in ("forward", "backward")
        )
        lines.append(
            f"| short convolution and SiLU | {linked('triton_conv')} | `triton_conv` | any GPU, "
            "interpreter | "
            + " | ".join(times(convolution[s]) for s in ("S1", "S2", "S3"))
            + " | " * (1 + 2 * called)
            + f"{share} bytes |"
        )
    steps = [r for r in record["rows"] if r.get("kind") == "decode"]
    if steps:
        rules = list(dict.fromkeys(r["rule"] for r in steps))
        lines += [
            "",
            "The next table shows the time of a decoding step "
            f"({linked('18_triton_step')}: convolution and scan of one layer in a CUDA graph) in "
            "microseconds and, in brackets, its ratio to the floor of the bytes.",
            "",
            "| B, D, N | " + " | ".join(rules) + " |",
            "|---" * (1 + len(rules)) + "|",
        ]
        for size in dict.fromkeys((r["B"], r["D"], r["N"]) for r in steps):
            cells = [
                f"{r['both_us']:.1f} ({r['both_over_bytes']:.2f})"
                for r in steps
                if (r["B"], r["D"], r["N"]) == size
            ]
            lines.append(f"| {', '.join(map(str, size))} | " + " | ".join(cells) + " |")
    return lines


def ratio_cell(against, rival, what):
    "Return a ratio to a rival, or a dash if it was not measured."
    ratio = against.get(rival, {}).get(what)
    return "–" if ratio is None else f"{ratio:.2f}"


def cpu_table(record):
    "Return the table of time and memory relative to the loop and mambapy, by form and shape."
    lines = [
        "| form | (B, T, D), N | time against the loop | against mambapy | extra memory against "
        "the loop | against mambapy |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["results"]:
        s = row["shape"]
        against = row["chunked_against"]
        lines.append(
            f"| {row['form']} | ({s['B']}, {s['T']}, {s['D']}), {s['N']} | "
            + " | ".join(
                ratio_cell(against, rival, what)
                for what in ("time", "memory")
                for rival in ("loop", "mambapy")
            )
            + " |"
        )
    e = record["environment"]
    busy = max(r.get("cores_used_by_others", 0.0) for r in record["results"])
    missed = [
        f"{r['form']} at ({r['shape']['B']}, {r['shape']['T']}, {r['shape']['D']}) against {name}"
        for r in record["results"]
        for name, a in r["chunked_against"].items()
        if a["time"] > a["time_target"]
    ]
    lines += [
        "",
        f"The run had {e['rounds']} rounds and {e['threads']} threads (torch {e['torch']}, commit "
        f"{str(e['commit'])[:7]}), and other programs used up to {busy:.1f} cores. The goals are "
        "0.20 of the loop's time, 0.25 of mambapy's time, and half of their memory. "
        + (f"They are missed in these cases: {', '.join(missed)}." if missed else "All are met."),
    ]
    return lines


def releases_table(record):
    "Return the table of tested Triton releases, one line per release."
    lines = [
        f"The table shows the result at commit {record['commit']}, for sm_90.",
        "",
        "| Triton | kernels that compile | kernels that fail | kernels with spills | "
        "most bytes spilled |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['triton']} | {r['compiled']} | {len(r['failed'])} | {r['spilling']} | {r['most']} |"
        for r in record["rows"]
    ]


def filled(text, name, lines):
    "Return README's text with these lines between a pair of markers."
    begin = f"<!-- {name}: written by table.py -->"
    end = f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def readme(folder=FOLDER):
    "Return the correct text of README.md."
    text = (folder / "README.md").read_text(encoding="utf-8")

    def path(name):
        return folder / "results" / f"{name}.json"

    def read(name):
        return json.loads(path(name).read_text(encoding="utf-8"))

    for name, make in (
        ("h200", functools.partial(gpu_table, compiled=read("sm_90"))),
        ("cpu", cpu_table),
        ("triton", releases_table),
    ):
        text = filled(text, name, make(read(name))) if path(name).exists() else text
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = readme()
    path = FOLDER / "README.md"
    if wanted == path.read_text(encoding="utf-8"):
        return 0
    if args.check:
        print("kernels/README.md differs from kernels/results/: run python kernels/table.py")
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
