"""Toy experiment with staged jobs: all learning rates with one seed, the best with more."""

import os
import random
import time
from dataclasses import dataclass

from longhorn_kit.lab.run import Experiment


@dataclass(frozen=True)
class Config:
    models: tuple = ("exact", "diagonal", "mamba")
    lrs: tuple = (0.001, 0.003, 0.01)
    seeds: tuple = (0, 1, 2)
    pause: float = 0.05  # seconds per step


def tried(config, results, model):
    settings = [
        {"model": model, "lr": lr, "seed": config.seeds[0], "pause": config.pause}
        for lr in config.lrs
    ]
    done = [results.get(s) for s in settings]
    return settings, max(done, key=lambda row: row["accuracy"])["settings"] if all(done) else None


def jobs(config, results):
    for model in config.models:
        settings, best = tried(config, results, model)
        yield from settings
        if best:
            yield from [best | {"seed": seed} for seed in config.seeds[1:]]


def later(config, results):
    for model in config.models:
        settings, best = tried(config, results, model)
        if not best:
            yield from [settings[0] | {"seed": seed} for seed in config.seeds[1:]]


def run_job(settings, folder):
    "Run five steps with a checkpoint; record every start, and every start after the end."
    with open(folder / "starts.txt", "a") as file:
        file.write("again\n" if (folder / "metrics.json").exists() else "start\n")
    steps = folder / "steps.txt"
    for step in range(int(steps.read_text() or 0) if steps.exists() else 0, 5):
        time.sleep(settings["pause"])
        if settings["model"] == os.environ.get("TOY_FAILS"):
            raise ValueError("the toy is broken")
        steps.write_text(str(step + 1))
    return {
        "accuracy": random.Random(
            f"{settings['model']} {settings['lr']} {settings['seed']}"
        ).random()
    }


def accuracies(config, results, settings):
    "Return accuracies of the finished jobs with these settings, by seed."
    rows = [results.get(settings | {"seed": seed}) for seed in config.seeds]
    return [row["accuracy"] for row in rows if row]


def summarize(config, results):
    best = {model: tried(config, results, model)[1] for model in config.models}
    return {
        model: accuracies(config, results, settings) if settings else []
        for model, settings in best.items()
    }


EXPERIMENT = Experiment("toy", {"laptop": Config()}, jobs, run_job, summarize, later)
