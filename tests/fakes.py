"""A claim that runs instantly, for tests of the ledger, the report and the command line."""

import os
import sys
import types
from dataclasses import dataclass

from longhorn_kit.lab.claims.registry import Claim
from longhorn_kit.lab.claims.stats import Comparison
from longhorn_kit.lab.run import Experiment

calls = []
errors = {}  # names of the experiments that ran; name -> error that its job raises
during = {}  # name -> function that its job calls


def kills(most):
    "Return the numbers of the kills, from 1; CI uses every third."
    return range(1, most + 1, int(os.environ.get("LONGHORN_EVERY", 1)))


@dataclass(frozen=True)
class Config:
    steps: int = 3  # steps to take
    seeds: tuple = (0,)  # seeds to use


def experiment(name):
    def jobs(config, results):
        return [{"seed": seed, "steps": config.steps} for seed in config.seeds]

    def run_job(settings, folder):
        calls.append(name)
        during.get(name, lambda: None)()
        if name in errors:
            raise errors[name]
        return {"score": 2}

    def summarize(config, results):
        rows = [results.get(settings) for settings in jobs(config, results)]
        return {"score": sum(row["score"] for row in rows if row)}

    return Experiment(name, {"laptop": Config()}, jobs, run_job, summarize)


def compare(record):
    score = record["results"]["score"]
    return [Comparison("score", (score, score, score), searched=0)]


def claim(name="fake", **options):
    module = types.ModuleType(f"longhorn_tests_{name}")
    module.EXPERIMENT = experiment(name)
    sys.modules[module.__name__] = module
    fields = {"module": module.__name__, "compare": compare, "minutes": {"laptop": 1}} | options
    return Claim(
        name, f"The {name} claim < & holds.", "1.0", "official code", "score above zero", **fields
    )


def record(name="fake", scale="laptop", **fields):
    return {
        "experiment": name,
        "scale": scale,
        "settings": {"steps": 3, "seeds": [0]},
        "results": {"score": 2},
        "seconds": 1.5,
        "missing": 0,
        "made": {"commit": ["abc"], "device": ["cpu"]},
        "environment": {"torch": "2.13", "threads": 2, "gpu": None},
        "command": f"longhorn reproduce {name}",
    } | fields


# claims that need more than this repository contains
NO_CODE = {
    "one-pass-width",
    "language-size",
    "language-350m",
    "sample-efficiency-size",
    "downstream",
    "value-projection",
    "step-size",
    "heads",
}


def one_pass_record(groups):
    "Return a record of the first one-pass plan with these groups of models."
    return {
        "experiment": "one-pass",
        "scale": "gpu",
        "settings": {"tokens": 90},
        "results": {
            "plan": {"commit": None},
            "unit": "bits per byte",
            "train_tokens": 100,
            "domains": {},
            "groups": groups,
        },
    }
