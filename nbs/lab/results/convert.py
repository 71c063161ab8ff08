"""Convert older records to what `longhorn_kit.records.read_record` and today's experiments read; each was converted once.

python nbs/lab/results/convert.py FILE.json ...
"""

import json
import sys
from pathlib import Path

from longhorn_kit.records import digest_of, to_plain, write_json, write_record


def renamed(record):
    "Name the experiment, as every record of version 0.2 does."
    return {"experiment" if name == "claim" else name: value for name, value in record.items()}


UNTIMED = {"length": [], "ms": [], "numbers": []}


def language(record):
    "Bring the runs of all scales to one structure; what was not recorded is None, or as long as tokens / speed."
    from longhorn_kit.lab.language import Language
    from longhorn_kit.lab.training import TrainConfig

    asked, old = dict(record["settings"]), record["results"]
    preset, laptop = asked.pop("preset"), "runs" not in old
    runs, text = (laptop_runs if laptop else gpu_runs)(record)
    recipe = TrainConfig(
        **preset["train"] | {"compile": not laptop and runs[0]["engine"]["compile"]}
    )
    pairs = [(run["mixer"], run["seed"]) for run in runs]
    more = {
        name: asked[name]
        for name in ("prompt", "sample", "lengths", "tokens", "evaluations")
        if name in asked
    }
    config = Language(
        **preset | {"train": recipe, "data": asked.get("data", ""), "runs": pairs} | more,
        baselines=laptop,
        gpu=not laptop,
    )
    levels = {name: old[name] for name in ("trigram", "xz_alone", "xz_primed") if laptop}
    made = {name: sorted({run[name] for run in runs}) for name in ("commit", "device")}
    new = {
        "settings": to_plain(config),
        "results": text | {"baselines": levels, "runs": runs},
        "missing": 0,
        "made": made,
    }
    if "(" in record["command"]:
        what = (
            f"'gpu', tokens={asked['tokens']}, judged=0"
            if not laptop
            else "folder='runs/language/seeds', runs=language.in_order(language.LAPTOP, (), ())"
        )
        new["command"] = (
            f'python -c "from longhorn_kit.lab import language, run; run.run(language.EXPERIMENT, {what})"'
        )
        new["command"] = "LONGHORN_TEXT=texts " * (not laptop) + new["command"]
    return renamed(record) | new


def gpu_runs(record):
    "Return the runs, each with the numbers of its state, and the text."
    old = record["results"]
    text = {name: old[name] for name in ("corpus", "tokenizer", "train_tokens", "domains")} | {
        "unit": "nats per token"
    }

    def more(run):
        return {
            "state_numbers": old["state_numbers"].get(run["mixer"], 0),
            "decode": UNTIMED,
            "sample": "",
        }

    return [run | more(run) for run in old["runs"]], text


def laptop_runs(record):
    "Return one run per model and seed, in bits per byte, and the text."
    import torch

    from longhorn_kit.lab.corpus import prepare
    from longhorn_kit.lab.language import state_numbers
    from longhorn_kit.models import LMConfig, SequenceLM

    old, corpus, runs = record["results"], prepare("stdlib"), []
    assert corpus.index["text_sha256"] == old["corpus"], "the library of Python 3.11.7 is needed"
    text = {
        "corpus": old["corpus"],
        "tokenizer": "bytes",
        "unit": "bits per byte",
        "train_tokens": len(corpus.train),
        "domains": {"held out": {"tokens": old["held_out_bytes"], "bytes": old["held_out_bytes"]}},
    }
    for place, seed in enumerate(record["settings"]["seeds"]):
        for mixer, bits in old["bits_per_byte"].items():
            curve, train, speed = (
                old["held_out"][mixer][place],
                old["train"][mixer][place],
                old["tokens_per_second"][mixer],
            )
            with torch.device("meta"):
                state = state_numbers(SequenceLM(LMConfig(**old["models"][mixer])))
            times = {
                "length": old["decode"]["lengths"],
                "ms": old["decode"]["ms"][mixer],
                "numbers": old["decode"]["cache"][mixer],
            }
            runs.append(
                {
                    "mixer": mixer,
                    "seed": seed,
                    "model": old["models"][mixer],
                    "parameters": old["parameters"][mixer],
                    "tokens": old["tokens"],
                    "steps": record["settings"]["preset"]["train"]["steps"],
                    "engine": None,
                    "loss": {"held out": bits[place], "all": bits[place]},
                    "bits_per_byte": bits[place],
                    "held_out": {
                        "tokens": curve["tokens"],
                        "held out": curve["bits"],
                        "all": curve["bits"],
                    },
                    "train": {"tokens": train["tokens"], "loss": train["bits"]},
                    "largest_gradient": None,
                    "seconds": round(old["tokens"] / speed, 1),
                    "wall_seconds": None,
                    "tokens_per_second": round(speed),
                    "state_numbers": state,
                    "decode": UNTIMED if place else times,
                    "sample": "" if place else old["samples"][mixer],
                    "device": "cpu",
                    "commit": record["environment"]["commit"],
                }
            )
    return runs, text


def recall(record):
    "Name the models of the toy task, and what made the record."
    settings, made = (
        record["settings"],
        {"commit": [record["environment"]["commit"]], "device": ["cpu"]},
    )
    models = {"tasks": settings["tasks"], "models": list(record["results"]["parameters"])}
    return renamed(record) | {"settings": models | settings, "missing": 0, "made": made}


def vision(record):
    "Lay the recipe flat, always have a place for speeds and memories, and keep what was measured later beside the results."
    settings, results, gpu = dict(record["settings"]), record["results"], record["scale"] == "gpu"
    settings |= {"gpu": gpu, "data": "uoft-cs/cifar10" if gpu else "digits"}
    results = results | {name: results.get(name, {}) for name in ("speeds", "memories")}
    recipe = {
        "min_lr_ratio" if name == "lr_final" else name: value
        for name, value in settings.pop("fit").items()
        if name != "seed"
    }
    later = {"measured_again": results.pop("measured_again")} if "measured_again" in results else {}
    made = {
        "commit": [record["environment"]["commit"]],
        "device": [record["environment"]["gpu"] or "cpu"],
    }
    return renamed(record) | {
        "settings": settings | recipe,
        "results": results,
        "missing": 0,
        "made": made,
        **later,
    }


MQAR = (
    "length",
    "pairs",
    "rewritten",
    "guess",
    "d_model",
    "mixer",
    "options",
    "lr",
    "by_lr",
    "accuracy",
    "tests",
    "steps",
    "curves",
    "parameters",
    "state_bytes",
)


def mqar(record):
    "Keep what is read of the grid's cells; settings, devices and commits stand where a run writes them today."
    found, scale = record["results"], record["scale"]

    def inside(cell):
        return cell["inside"] and {name: cell["inside"][name] for name in ("asked", "changes")}

    return renamed(record) | {
        "settings": record["settings"] | {"layers": 2, "gpu": scale != "laptop"},
        "results": {
            "cells": [
                {name: cell[name] for name in MQAR} | {"inside": inside(cell)}
                for cell in found["cells"]
            ]
        },
        "missing": {"laptop": 0, "gpu": 25}[
            scale
        ],  # counted in the lines of all jobs, which were kept beside the record
        "made": {
            "commit": found.get("commits", [record["environment"]["commit"]]),
            "device": [name.replace("CPU", "cpu") for name in found["devices"]],
        },
        "seconds": found["run_seconds"],
        "command": f"longhorn reproduce mqar --scale {scale}",
    }


def extrapolation(record):
    "Write settings as fields of today's preset, the commits of single models under `made`, and commands of today."
    record = renamed(record)
    if "results" not in record:  # times of decoding
        return record
    old, results, environment = record["settings"], record["results"], record["environment"]
    on_gpu, small = bool(environment["gpu"]), old["preset"] is not None
    settings = {name: value for name, value in old.items() if name != "precision"} | {
        "bf16": old.get("precision") == "bf16",
        "gpu": on_gpu,
    }
    settings |= (
        {"checkpoints": "", "data": "stdlib"}
        if small
        else {"mixers": [], "seeds": [], "checkpoints": "runs/language/gpu", "data": "texts"}
    )
    commits = {model.pop("commit", environment["commit"]) for model in results["models"]}
    command = (
        record["command"]
        if small
        else (
            "longhorn reproduce extrapolation --scale gpu --checkpoints runs/language/gpu --data texts"
            + " --multiples 1 --needles" * (settings["multiples"] == [1])
        )
    )
    return record | {
        "settings": settings,
        "missing": len(results["not_run"]),
        "command": command,
        "made": {"commit": sorted(commits), "device": [environment["gpu"] or "cpu"]},
    }


CONVERT = {
    "recall": recall,
    "mqar": mqar,
    "language": language,
    "extrapolation": extrapolation,
    "vision": vision,
}


NAMES = {
    "accumulate": "gradient_accumulation_steps",
    "lr_final": "min_lr_ratio",
    "keep": "save_total_limit",
    "held_out": "val",
    "about": "description",
    "s6_timed": "s6_time_varying",
    "taught": "finetuned",
    "fact, taught": "fact, finetuned",
    "passkey, taught": "passkey, finetuned",
    "teach_lengths": "finetune_lengths",
    "teach_steps": "finetune_steps",
    "teach_lr": "finetune_lr",
    "teach_rows": "finetune_rows",
    "lesson_loss": "finetune_loss",
}


def current_names(value):
    "Return the record with today's names of settings and results; no number changes."
    if isinstance(value, dict):
        return {
            NAMES.get(name, name): current_names(inner)
            for name, inner in value.items()
            if name != "sha256"
        }
    return [current_names(inner) for inner in value] if isinstance(value, list) else value


def main(paths):
    for path in map(Path, paths):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":  # one run per line
            path.write_text(
                "".join(
                    json.dumps(current_names(json.loads(line))) + "\n" for line in text.splitlines()
                ),
                encoding="utf-8",
            )
            continue
        record = json.loads(text)
        signed = record.get("sha256") == digest_of(record)
        if "kernels" in path.resolve().parts:  # one row per line, as kernels/bench.py writes them
            if not signed:
                path.write_text(
                    f'{text.rstrip()[:-1].rstrip()},\n "sha256": "{digest_of(to_plain(record))}"\n}}\n',
                    encoding="utf-8",
                )
        elif path.name == "config.json":  # of a run
            write_json(path, current_names(record))
        else:
            record = current_names(
                record if signed else CONVERT.get(record.get("claim"), dict)(record)
            )
            write_record(path, record)


main(sys.argv[1:])
