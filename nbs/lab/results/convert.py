"""Convert records of version 0.1 to what `longhorn_kit.records.read_record` and today's experiments read; each was converted once.

    python nbs/lab/results/convert.py FILE.json ...
"""
import json
import sys
from pathlib import Path

from longhorn_kit.records import digest_of, to_plain, write_record


def renamed(record):
    "Name the experiment, as every record of version 0.2 does."
    return {"experiment" if name == "claim" else name: value for name, value in record.items()}


def vision(record):
    "Lay the recipe flat, always have a place for speeds and memories, and keep what was measured later beside the results."
    settings, results, gpu = dict(record["settings"]), record["results"], record["scale"] == "gpu"
    settings |= {"gpu": gpu, "data": "uoft-cs/cifar10" if gpu else "digits"}
    results = results | {name: results.get(name, {}) for name in ("speeds", "memories")}
    recipe = {"min_lr_ratio" if name == "lr_final" else name: value for name, value in settings.pop("fit").items() if name != "seed"}
    later = {"measured_again": results.pop("measured_again")} if "measured_again" in results else {}
    return renamed(record) | {"settings": settings | recipe, "results": results, **later}


MQAR = ("length", "pairs", "rewritten", "guess", "d_model", "mixer", "options", "lr", "by_lr", "accuracy", "tests", "steps",
        "curves", "parameters", "state_bytes")


def mqar(record):
    "Keep what is read of the grid's cells; settings, devices and commits stand where a run writes them today."
    found, scale = record["results"], record["scale"]
    inside = lambda cell: cell["inside"] and {name: cell["inside"][name] for name in ("asked", "changes")}
    return renamed(record) | {
        "settings": record["settings"] | {"layers": 2, "gpu": scale != "laptop"},
        "results": {"cells": [{name: cell[name] for name in MQAR} | {"inside": inside(cell)} for cell in found["cells"]]},
        "missing": {"laptop": 0, "gpu": 25}[scale], # counted in the lines of all jobs, which were kept beside the record
        "made": {"commit": found.get("commits", [record["environment"]["commit"]]),
                 "device": [name.replace("CPU", "cpu") for name in found["devices"]]},
        "seconds": found["run_seconds"], "command": f"longhorn reproduce mqar --scale {scale}"}


CONVERT = {"recall": renamed, "mqar": mqar, "language": renamed, "extrapolation": renamed, "vision": vision}


def main(paths):
    for path in map(Path, paths):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("sha256") == digest_of(record):
            continue
        record = CONVERT.get(record.get("claim"), dict)(record)
        if "kernels" in path.resolve().parts: # one row per line, as kernels/bench.py writes them
            text = path.read_text(encoding="utf-8").rstrip()
            path.write_text(f'{text[:-1].rstrip()},\n "sha256": "{digest_of(to_plain(record))}"\n}}\n', encoding="utf-8")
        else:
            write_record(path, record)


main(sys.argv[1:])
