"""A claim that runs in no time, for tests of the ledger, the report and the command line."""
import json
import sys
import types

from longhorn_kit.lab.claims import Claim
from longhorn_kit.lab.stats import Comparison

MODULE = "longhorn_tests_fake_claim"


def compare(record):
    score = record["results"]["score"]
    return [Comparison("score", (score, score, score), searched=0)]


def claim(name="fake", **options):
    fields = {"module": MODULE, "compare": compare, "minutes": {"laptop": 1}} | options
    return Claim(name, f"The {name} claim < & holds.", "1.0", "official code", "score above zero", **fields)


def record(name="fake", scale="laptop", **fields):
    return {
        "claim": name, "scale": scale, "settings": {"steps": 3, "seeds": [0]}, "results": {"score": 2}, "seconds": 1.5,
        "environment": {"torch": "2.13", "threads": 2, "gpu": None}, "command": f"longhorn reproduce {name}"} | fields


def figures(record):
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots()
    ax.plot([0, 1], [1, 0], label="exact")
    ax.set(xlabel="step", ylabel="loss", title='Loss <i> & "more"')
    return [(fig, "What to see: `a < b` & *more* <script>alert(1)</script>")]


def tables(record):
    return [("Scores <b>", ["model", "score"], [["exact <", 1.25], ["Mamba", None]])]


def samples(record):
    return [("Sample <h1>", "if a < b & c > d:\n    return '</pre><script>'")]


def run(scale, folder):
    folder.mkdir(parents=True, exist_ok=True)
    module.calls.append((scale, str(folder)))
    if module.error:
        raise module.error
    found = record(folder.parent.name, scale)
    (folder / "record.json").write_text(json.dumps(found))
    return found


module = types.ModuleType(MODULE)
module.run, module.figures, module.tables, module.samples, module.SCALES = run, figures, tables, samples, ("laptop",)
module.calls, module.error = [], None
sys.modules[MODULE] = module
