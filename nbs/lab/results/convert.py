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


CONVERT = {"recall": renamed, "mqar": renamed, "language": renamed, "extrapolation": extrapolation, "vision": renamed}


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
