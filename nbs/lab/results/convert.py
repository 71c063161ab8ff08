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
    "Name the models of the toy task."
    record["settings"] = {"tasks": record["settings"].pop("tasks"), "models": list(record["results"]["parameters"])} | record["settings"]
    return renamed(record)


CONVERT = {"recall": recall, "mqar": renamed, "language": renamed, "extrapolation": renamed, "vision": renamed}


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
