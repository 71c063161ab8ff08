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


def recall(record):
    "Name the models of the toy task, and what made the record."
    settings, made = record["settings"], {"commit": [record["environment"]["commit"]], "device": ["cpu"]}
    models = {"tasks": settings["tasks"], "models": list(record["results"]["parameters"])}
    return renamed(record) | {"settings": models | settings, "missing": 0, "made": made}


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


def extrapolation(record):
    "Write settings as fields of today's preset, the commits of single models under `made`, and commands of today."
    record = renamed(record)
    if "results" not in record: # times of decoding
        return record
    old, results, environment = record["settings"], record["results"], record["environment"]
    on_gpu, small = bool(environment["gpu"]), old["preset"] is not None
    settings = {name: value for name, value in old.items() if name != "precision"} | {"bf16": old.get("precision") == "bf16", "gpu": on_gpu}
    settings |= {"checkpoints": "", "data": "stdlib"} if small else {
        "mixers": [], "seeds": [], "checkpoints": "runs/language/gpu", "data": "texts"}
    commits = {model.pop("commit", environment["commit"]) for model in results["models"]}
    command = record["command"] if small else (
        "longhorn reproduce extrapolation --scale gpu --checkpoints runs/language/gpu --data texts"
        + " --multiples 1 --needles" * (settings["multiples"] == [1]))
    return record | {"settings": settings, "missing": len(results["not_run"]), "command": command,
                     "made": {"commit": sorted(commits), "device": [environment["gpu"] or "cpu"]}}


CONVERT = {"recall": recall, "mqar": mqar, "language": renamed, "extrapolation": extrapolation, "vision": vision}


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
