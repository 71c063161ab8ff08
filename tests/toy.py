"""The hardest agenda of the lab as a toy: all rates with one seed, the best with the others."""

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
    "Return the settings of the search over rates, and the best of them once all are done."
    settings = []
    for lr in config.lrs:
        settings.append({"model": model, "lr": lr, "seed": config.seeds[0], "pause": config.pause})
    rows = [results.get(s) for s in settings]
    if not all(rows):
        return settings, None
    best = max(rows, key=lambda row: row["accuracy"])
    return settings, best["settings"]


def jobs(config, results):
    for model in config.models:
        settings, best = tried(config, results, model)
        yield from settings + [best | {"seed": seed} for seed in config.seeds[1:] if best]


def later(config, results):
    for model in config.models:
        settings, best = tried(config, results, model)
        yield from [] if best else [settings[0] | {"seed": seed} for seed in config.seeds[1:]]


def run_job(settings, folder):
    "Five steps with a checkpoint; notes every start, and every start after the end."
    with open(folder / "starts.txt", "a") as file:
        file.write("again\n" if (folder / "metrics.json").exists() else "start\n")
    steps = folder / "steps.txt"
    done = int(steps.read_text() or 0) if steps.exists() else 0
    for step in range(done, 5):
        time.sleep(settings["pause"])
        if settings["model"] == os.environ.get("TOY_FAILS"):
            raise ValueError("the toy is broken")
        steps.write_text(str(step + 1))
    name = f"{settings['model']} {settings['lr']} {settings['seed']}"
    return {"accuracy": random.Random(name).random()}


def summarize(config, results):
    accuracies = {model: [] for model in config.models}
    for model, values in accuracies.items():
        _, best = tried(config, results, model)
        if best is None:
            continue
        for seed in config.seeds:
            row = results.get(best | {"seed": seed})
            if row:
                values.append(row["accuracy"])
    return accuracies


EXPERIMENT = Experiment("toy", {"laptop": Config()}, jobs, run_job, summarize, later)
