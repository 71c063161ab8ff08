"""Every claim can get either verdict from invented results of its command's runs."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from fakes import NO_CODE, one_pass_record
from longhorn_kit import cli
from longhorn_kit.lab.claims import published
from longhorn_kit.lab.claims.claim import readers
from longhorn_kit.lab.claims.one_pass_plan import GROUPS
from longhorn_kit.lab.claims.registry import all_claims, find_claim, find_experiment, outcomes
from longhorn_kit.lab.claims.second_plan import QUESTIONS
from longhorn_kit.lab.claims.subjects import others, theory
from longhorn_kit.lab.claims.subjects.one_pass import pools_of
from longhorn_kit.lab.experiments import extrapolation, language, one_pass
from longhorn_kit.records import read_record, to_plain
from sweep import slow_case

RECORDS = Path(__file__).parents[1] / "nbs/lab/results"


def noise(seed):
    "Return an invented deviation of a seed, between -1 and 1, the same for every model."
    return (seed % 1000 * 3 % 5 - 2) / 2


@dataclass
class Invented:
    "Return results in which every job is done; a function of the settings gives the metrics."

    metrics: Callable
    folder: object = None

    def get(self, settings):
        return self.metrics(settings)


def commanded(command):
    "Return (claim, scale, settings) of every `longhorn reproduce` in a command."
    words = shlex.split(command)
    parts = []
    part = []
    for word in [*words, "&&"]:
        if word == "&&":
            parts.append(part)
            part = []
        elif not word.startswith("LONGHORN_TEXT="):
            part.append(word)
    parsed = []
    for part in parts:
        if part[:2] == ["longhorn", "reproduce"]:
            options = cli.parse(part[1:])
            (name,) = options.claims
            parsed.append((name, options.scale, options.settings))
    return parsed


def record_of(name, scale, config, metrics, tmp_path):
    "Return the record of a run in which all jobs have invented metrics."
    experiment = find_experiment(find_claim(name))
    (tmp_path / "jobs").mkdir(exist_ok=True)
    results = Invented(metrics, tmp_path / "jobs")
    assert list(experiment.jobs(config, results))
    return {
        "experiment": name,
        "scale": scale,
        "settings": to_plain(vars(config)),
        "results": experiment.summarize(config, results),
    }


def text_of(tokens):
    "Return a text with a number of tokens, but without the tokens."
    corpus = SimpleNamespace(train=range(tokens), tokenizer=SimpleNamespace(name="gpt2"))
    summary = {"unit": "nats per token", "train_tokens": tokens, "domains": {"held out": {}}}
    return SimpleNamespace(corpus=corpus, domains={}, summary=lambda: dict(summary))


def language_metrics(losses, late=None):  # mixer -> loss; late: losses after the last pass
    def metrics(settings):
        steps = settings["preset"]["train"]["steps"]
        whole = (
            steps
            * settings["preset"]["train"]["batch_size"]
            * settings["preset"]["train"]["context"]
        )
        first = losses.get(settings["mixer"], 4.0) + 0.002 * noise(settings["seed"])
        last = (
            first
            if late is None
            else late.get(settings["mixer"], 4.0) + 0.002 * noise(settings["seed"])
        )
        curve = {"tokens": [whole // 4, whole // 2, whole], "all": [first, first, last]}
        return {
            "loss": {"all": last},
            "val": curve,
            "tokens": whole,
            "bits_per_byte": last / 3,
            "parameters": 5e7,
            "model": {"d_mlp": 0},
            "state_numbers": 1000,
            "train_seconds": 1.0,
        }

    return metrics


LANGUAGE = {
    "language": ("longhorn", ("mamba", "attention", "gla")),
    "exact-language": ("longhorn_exact", ("longhorn",)),
    "scalar-rate": ("longhorn", ("longhorn_scalar",)),
    "input-dependent-a": ("mamba", ("mamba_input_a",)),
    "other-layers": ("longhorn", ("retnet", "rwkv5", "rwkv6")),
}


@pytest.mark.parametrize("tokens", [40_000_000, 9_000_000_000])
@pytest.mark.parametrize("scale", ["gpu", "paper"])
@pytest.mark.parametrize(
    "name", [name if name == "language" else slow_case(name) for name in LANGUAGE]
)
def test_a_claim_about_one_rate_is_decided_by_its_command(
    name, scale, tokens, monkeypatch, tmp_path
):
    monkeypatch.setenv("LONGHORN_TEXT", "texts")
    monkeypatch.setattr(language, "open_texts", lambda **source: text_of(tokens))
    first, others = LANGUAGE[name]
    command_lines = commanded(find_claim(name).commands[scale])
    ((command, at, config),) = command_lines
    assert command == "language"
    assert at == scale
    assert set(config.models) == {first, *others}
    for lead, word in ((0.1, "holds"), (-0.1, "does not hold")):
        record = record_of(
            "language",
            scale,
            config,
            language_metrics({first: 3.5} | dict.fromkeys(others, 3.5 + lead)),
            tmp_path,
        )
        rows = outcomes(name, record)
        result = [(c.unit, j.n, j.verdict, j.look) for c, j in rows]
        expected = [("nats per token", 4, word, 4)] * len(others)
        assert result == expected
        for c, _ in rows:
            assert "at one rate for all" in c.label
            assert not c.doubt
        assert outcomes("repetition", record) == [], "read once"
        assert find_claim(name).about(record)


def test_of_two_equal_models_neither_is_ahead_and_the_next_look_can_decide(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGHORN_TEXT", "texts")
    monkeypatch.setattr(language, "open_texts", lambda **source: text_of(40_000_000))
    command_lines = commanded(find_claim("exact-language").commands["gpu"])
    ((_, _, config),) = command_lines
    level = record_of(
        "language",
        "gpu",
        config,
        language_metrics({"longhorn": 3.5, "longhorn_exact": 3.5}),
        tmp_path,
    )
    ((_, judgement),) = outcomes("exact-language", level)
    assert judgement.verdict == "undecided"
    assert judgement.side == "equal within the margin"

    def wide(settings):
        return language_metrics(
            {"longhorn": 3.5, "longhorn_exact": 3.47 + 0.06 * noise(settings["seed"])}
        )(settings)

    looks = [
        outcomes(
            "exact-language",
            record_of("language", "gpu", replace(config, judged=n), wide, tmp_path),
        )[0][1]
        for n in (4, 8)
    ]
    assert looks[0].verdict == "undecided"
    assert not looks[0].side
    assert looks[1].n == 8

    def half(settings):
        return wide(settings) if settings["seed"] % 1000 < 4 + 6 else None

    ((_, waiting),) = outcomes(
        "exact-language", record_of("language", "gpu", replace(config, judged=8), half, tmp_path)
    )
    assert waiting.n == 4
    assert waiting.why == "6 of 8 seeds so far"

    def few(settings):
        return wide(settings) if settings["seed"] % 1000 < 4 + 3 else None

    ((early, unseen),) = outcomes(
        "exact-language", record_of("language", "gpu", config, few, tmp_path)
    )
    assert unseen.verdict == "not run"
    assert unseen.why == "3 of 4 seeds so far"
    assert early.differences == ()
    assert early.waits is True


def test_a_laptop_gets_a_verdict_with_four_seeds_which_is_no_trial(monkeypatch, tmp_path):
    short = text_of(7_600_000)

    def summary():
        domains = {"held out": {}}
        return {"unit": "bits per byte", "train_tokens": 7_600_000, "domains": domains}

    short.summary = summary
    monkeypatch.setattr(language, "open_texts", lambda **source: short)
    ((_, scale, config),) = commanded("longhorn reproduce language --judged 4")
    preset = language.PRESETS[scale]
    for field in fields(preset):
        if getattr(config, field.name) != getattr(preset, field.name):
            assert field.metadata.get("place")
    usual = language_metrics(
        {"longhorn_exact": 2.5, "longhorn": 2.6, "mamba": 2.4, "attention": 3.6}
    )

    def metrics(settings):
        if settings["mixer"] == "baselines":
            return {"trigram": 3.0}
        return usual(settings) if settings["mixer"] in config.models else None

    record = record_of("language", scale, config, metrics, tmp_path)
    assert record["results"]["baselines"] == {"trigram": 3.0}
    assert [j.verdict for _, j in outcomes("language", record)] == [
        "does not hold",
        "holds",
        "not run",
    ], "GLA is not among the laptop's models"
    verdicts = [j.verdict for _, j in outcomes("exact-language", record)]
    assert verdicts == ["holds"]
    unjudged = record_of("language", scale, preset, metrics, tmp_path)
    assert {j.why for _, j in outcomes("language", unjudged)} == {
        "one learning rate was tried (0.003)"
    }, "as in the recorded run"


def test_a_model_that_diverges_at_the_one_rate_gets_no_verdict(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGHORN_TEXT", "texts")
    monkeypatch.setattr(language, "open_texts", lambda **source: text_of(40_000_000))
    command_lines = commanded(find_claim("language").commands["gpu"])
    ((_, _, config),) = command_lines
    usual = language_metrics({"longhorn": 3.4, "mamba": 3.5, "attention": 3.6, "gla": 3.7})

    def metrics(settings):
        if (settings["mixer"], settings["seed"]) == ("gla", 6005):
            return {"diverged": "the loss is nan", "model": {}, "parameters": 5e7}
        return usual(settings)

    rows = {
        c.label.split(" below ")[1].split(",")[0]: j
        for c, j in outcomes("language", record_of("language", "gpu", config, metrics, tmp_path))
    }
    assert {name: j.verdict for name, j in rows.items()} == {
        "Mamba": "holds",
        "attention": "holds",
        "GLA": "cannot be judged",
    }
    assert rows["GLA"].why == "GLA: 1 of 4 runs exploded"


@pytest.mark.parametrize("name", [*LANGUAGE, "repetition"])
def test_the_expected_minutes_follow_from_recorded_seconds(name):
    claim = find_claim(name)
    recorded = read_record(RECORDS / "language/gpu_160m.json")["results"]
    wall = {}
    for run in recorded["runs"]:
        seconds = run["wall_seconds"] / run["tokens"]
        wall.setdefault(run["mixer"], []).append(seconds)
    speeds = {
        row["mixer"]: row["tokens_per_second"]
        for row in read_record(RECORDS / "language/throughput.json")["rows"]
        if row["context"] == 1024 and row["compile"]
    }
    for scale, command in claim.commands.items():
        ((_, _, config),) = commanded(command)
        gpus = {"gpu": 1, "paper": 4}[scale]
        tokens = config.tokens if scale == "paper" else config.passes * recorded["train_tokens"]
        seconds = tokens * sum(
            1 / speeds[mixer] if scale == "paper" else mean(wall[mixer]) for mixer in config.models
        )
        assert claim.minutes[scale] == pytest.approx(
            config.judged * seconds / gpus / 60, rel=0.02, abs=0.6
        )


def test_repetition_is_decided_by_its_command(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGHORN_TEXT", "texts")
    monkeypatch.setattr(language, "open_texts", lambda **source: text_of(40_000_000))
    command_lines = commanded(find_claim("repetition").commands["gpu"])
    ((command, scale, config),) = command_lines
    order = {mixer: 3.5 + 0.1 * i for i, mixer in enumerate(config.models)}
    turned = {mixer: 3.5 - 0.1 * i for i, mixer in enumerate(config.models)}
    for late, words in (
        (order, {"holds"}),
        (turned, {"does not hold"}),
        (dict.fromkeys(order, 3.5), {"undecided"}),
    ):
        record = record_of(command, scale, config, language_metrics(order, late), tmp_path)
        rows = outcomes("repetition", record)
        assert len(rows) == 9
        assert {j.verdict for _, j in rows} == words
        for c, j in rows:
            assert "after one pass " in j.beside
            assert "after 4.0 passes" in c.label
        for name in LANGUAGE:
            assert outcomes(name, record) == [], "read several times"


@pytest.mark.parametrize("lead, word", [(0.02, "holds"), (0.0, "holds"), (-0.02, "does not hold")])
@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_vision_is_decided_by_its_command(scale, lead, word, tmp_path):
    def metrics(settings):
        is_longhorn = settings["model"].startswith("longhorn")
        top1 = 0.76 + lead * is_longhorn + 0.0005 * noise(settings.get("seed", 0))
        training = dict(
            top1=top1,
            top5=0.9,
            loss=1.0,
            seconds=1.0,
            images_per_second=1.0,
            curve=[top1],
            epochs=[1],
        )
        return {"training": training, "parameters": 3e6, "val": 10000, "speed": {}, "memory": {}}

    ((name, _, config),) = commanded(f"longhorn reproduce vision --scale {scale}")
    rows = outcomes("vision", record_of(name, scale, config, metrics, tmp_path))
    result = [(c.label, j.verdict) for c, j in rows]
    expected = [
        (f"{form} as good as Mamba, at one rate for all", word) for form in ("diagonal", "exact")
    ]
    assert result == expected
    result = all(j.side == "equal within the margin" for _, j in rows)
    assert result == (lead == 0)


@pytest.mark.parametrize("sign, word", [(1, "holds"), slow_case(-1, "does not hold")])
@pytest.mark.parametrize("name", ["mqar", slow_case("exact-mqar"), slow_case("larger-state")])
def test_the_grid_of_recall_is_decided_by_its_command(name, sign, word, tmp_path):
    best = {"mqar": "longhorn", "exact-mqar": "longhorn_exact"}

    def metrics(settings):
        is_longhorn = (
            settings["options"].get("d_state", 16) > 16
            if name == "larger-state"
            else settings["mixer"] == best[name]
        )
        right = (
            0.6
            + 0.2 * sign * is_longhorn
            + 0.01 * noise(settings["seed"])
            - 0.05 * (settings["lr"] != 2.2e-3)
        )
        return {
            "settings": settings,
            "late_accuracy": right,
            "accuracy": right,
            "steps": settings["steps"],
            "tests": {},
            "curve": [],
            "parameters": 1,
            "state_bytes": 1024,
            "inside": {},
        }

    ((command, scale, config),) = commanded("longhorn reproduce mqar --scale gpu")
    rows = outcomes(name, record_of(command, scale, config, metrics, tmp_path))
    assert rows
    result = {j.verdict for _, j in rows}
    assert result == {word}


@pytest.mark.parametrize("sign, word", [(1, "holds"), (-1, "does not hold")])
@pytest.mark.parametrize("name", ["recall", "recall-rewritten"])
def test_the_toy_task_is_decided_by_its_command(name, sign, word, tmp_path):
    order = ("longhorn_exact", "longhorn", "gla", "attention", "attention_without_positions")

    def metrics(settings):
        rank = order.index(settings["model"]) if settings["model"] in order else 5
        share = 0.5 - 0.05 * sign * rank - 0.02 * (settings["lr"] != sorted(config.lrs)[1])
        each = [share + 0.002 * noise(seed) for seed in settings["seeds"]]
        return {
            "late_recall": share,
            "recall": [each],
            "steps": [1],
            "loss": [each],
            "test": {str(pairs): each for pairs in settings["test_pairs"]},
        }

    ((command, scale, config),) = commanded(f"longhorn reproduce {name}")
    rows = outcomes(name, record_of(command, scale, config, metrics, tmp_path))
    assert len(rows) >= 2
    result = {j.verdict for _, j in rows}
    assert result == {word}


@pytest.mark.parametrize("sign, word", [(1, "holds"), (-1, "does not hold")])
@pytest.mark.parametrize(
    "name", ["extrapolation", slow_case("extrapolation-delta"), slow_case("passkeys")]
)
def test_long_texts_are_decided_by_the_command_that_trains_first(
    name, sign, word, monkeypatch, tmp_path
):
    (trains, _, training), (reading, scale, config) = commanded(find_claim(name).commands["gpu"])
    assert trains == "language"
    assert reading == "extrapolation"
    assert config.checkpoints == "runs/language/gpu"
    models = [
        ({"mixer": mixer, "seed": seed, "model": {"weights": str(seed)}}, f"{mixer}/{seed}", "gpt2")
        for mixer, seed in language.chosen_runs(training)
    ]
    monkeypatch.setattr(extrapolation, "models_of", lambda config: iter(models))
    monkeypatch.setattr(
        extrapolation,
        "texts_of",
        lambda data, tokenizer: SimpleNamespace(
            corpus=SimpleNamespace(tokenizer=SimpleNamespace(name="gpt2")),
            domains={"docs": ([0] * 9, 9)},
        ),
    )
    monkeypatch.setattr(extrapolation, "tokens_hash", lambda corpus: "hash")
    monkeypatch.setattr(Invented, "job_folder", lambda self, settings: tmp_path, raising=False)

    def metrics(settings):
        grows = {"deltanet": sign}.get(settings["mixer"], -sign)
        grown = 3.0 + 0.05 * grows + 0.002 * noise(settings["seed"])
        nats = [3.0, grown]
        share = (
            0.5
            + 0.3 * sign * settings["mixer"].startswith("longhorn")
            + 0.01 * noise(settings["seed"])
        )
        needle = {"once": {"length": [16384], "written": [[share]]}}
        return {
            "parameters": 5e7,
            "text": {"docs": {"by_length": {"nats": nats}}},
            "seconds": 1.0,
            "finetune_loss": 1.0,
            "needles": {"passkey, finetuned": needle, "fact, finetuned": needle},
        }

    rows = outcomes(name, record_of(reading, scale, config, metrics, tmp_path))
    assert rows
    result = {(j.n, j.verdict) for _, j in rows}
    assert result == {(4, word)}


# all other groups: 4
RANKS = {
    "longhorn_exact": 0,
    "longhorn": 1,
    "longhorn_scalar": 2,
    "longhorn_decoupled": 2,
    "mamba": 3,
}
SECOND_PLAN = (
    "one-pass",
    "equal-state",
    "equal-state-mlp",
    "approximation",
    "key-norm",
    "key-norm-others",
    "control",
    "scalar-rate",
    "sample-efficiency",
    "extrapolation-once",
    "other-layers-once",
    "mamba2",
)


def one_pass_metrics(sign):  # 1: in favour of the claims
    "Return losses in the claims' order or the opposite order, with a best rate of 5e-3."

    def metrics(settings):
        model = settings["model"]
        options = model["mixer_options"]
        exact = model["mixer"] == "longhorn_exact"
        lead = (
            0.02 * bool(options.get("key_norm"))
            + 0.0004 * options.get("d_state", 16) * exact
            - 0.05 * RANKS.get(model["mixer"], 4)
        )
        loss = (
            1.6
            - sign * lead
            + 0.02 * abs(math.log(settings["lr"] / 5e-3))
            + 0.001 * noise(settings["seed"])
        )
        lengths = {
            "length": [1024, 16384],
            "docs": {"documents": 100, "bits_per_byte": [loss, loss - 0.1 * sign]},
        }
        return {
            "settings": settings,
            "bits_per_byte": loss,
            "val": {"tokens": [50, 100], "all": [loss + 1, loss]},
            "diverged": False,
            "measured": {"by_length": lengths},
            "seconds": 1.0,
            "made": {},
            "train": [],
            "first_losses": [],
            "tokens_per_second": 1,
            "memory": None,
            "parameters": 1e7,
            "state_numbers": 1000,
            "function": "f",
            "output_error": 0,
            "gradient_error": 0,
        }

    return metrics


@pytest.mark.parametrize("sign, word", [(1, "holds"), (-1, "does not hold")])
@pytest.mark.parametrize(
    "name", [name if name == "one-pass" else slow_case(name) for name in SECOND_PLAN]
)
def test_one_pass_is_decided_by_its_command(name, sign, word, monkeypatch, tmp_path):
    monkeypatch.setattr(one_pass, "open_texts", lambda **source: text_of(169_500_000))
    claim = find_claim(name)
    pools = " ".join(pools_of(name))
    command = f"longhorn reproduce one-pass --scale gpu --groups {pools} --data FOLDER"
    if "one-pass" in claim.commands.get("gpu", ""):
        command = next(iter(claim.commands.values()))
    ((experiment, scale, config),) = commanded(command)
    record = record_of(experiment, scale, config, one_pass_metrics(sign), tmp_path)
    rows = outcomes(name, record)
    assert rows
    result = {(j.verdict, j.look) for _, j in rows}
    assert result == {(word, 4)}
    question = QUESTIONS[name]
    expected = len(question.contrasts) * len(QUESTIONS[name].families)
    assert len(rows) == expected
    _, describe = readers(claim)["one-pass"]
    for model in QUESTIONS[name].models():
        assert f"; {model}: " in describe(record)


def first_plan_record(losses):
    "Return a record of the first one-pass plan with invented losses."

    def val(loss):
        return {"tokens": [50, 100], "all": [loss + 1, loss]}

    def runs(model, seeds):
        return [
            dict(seed=seed, val=val(losses(model.name) + 0.001 * noise(seed)))
            for seed in range(1, seeds + 1)
        ]

    bracket = {"0.0032": 1, "0.005": 0, "0.008": 1}
    groups = {}
    for name, group in GROUPS.items():
        if name != "laptop":
            groups[name] = [
                dict(name=model.name, lr=5e-3, bracket=bracket, runs=runs(model, group.seeds))
                for model in group.models
            ]
    return one_pass_record(groups)


@pytest.mark.parametrize("sign, word", [(1, "holds"), (-1, "does not hold")])
@pytest.mark.parametrize(
    "name",
    [
        "one-pass",
        "equal-state",
        "equal-state-mlp",
        "other-layers-once",
        "mamba2",
        "sample-efficiency",
    ],
)
def test_records_of_the_first_plan_are_still_read(name, sign, word):
    order = ("exact N=64", "exact N=32", "exact N=16", "diagonal", "Mamba N=")

    def loss(model):
        rank = next((i for i, start in enumerate(order) if model.startswith(start)), len(order))
        return 1.3 + 0.05 * sign * rank

    rows = outcomes(name, first_plan_record(loss))
    assert rows
    result = {j.verdict for _, j in rows}
    assert result == {word}


def judged_tables(monkeypatch, longhorn, mamba):
    "Replace the single published entries by entries of four runs each."
    runs = {
        "longhorn": [longhorn + 0.1 * i for i in range(4)],
        "mamba": [mamba + 0.1 * i for i in range(4)],
    }
    monkeypatch.setattr(others, "INDEPENDENT", dict.fromkeys(published.INDEPENDENT, runs))


def test_a_table_of_others_is_judged_once_it_has_four_runs_of_each_model(monkeypatch):
    names = [claim.name for claim in all_claims() if claim.name.startswith("elsewhere-")]
    assert len(names) == 4
    for longhorn, mamba in ((50.0, 40.0), (40.0, 50.0)):
        judged_tables(monkeypatch, longhorn, mamba)
        for name in names:
            for comparison, judgement in find_claim(name).settled():
                better = (longhorn < mamba) == (comparison.label in published.LOWER_IS_BETTER)
                assert judgement.verdict == ("holds" if better else "does not hold"), (
                    comparison.label
                )


@pytest.mark.parametrize(
    "name, table, words",
    [
        ("recall-intensive", {"longhorn": (60,) * 6, "mamba": (50,) * 6}, ["holds"] * 2),
        (
            "recall-intensive",
            {"longhorn": (60,) * 5 + (40,), "mamba": (50,) * 6},
            ["does not hold"] * 2,
        ),
        ("read-twice", {"longhorn": (54.25,) * 6, "mamba": (50,) * 6}, ["holds"]),
        ("read-twice", {"longhorn": (54,) * 6, "mamba": (50,) * 6}, ["does not hold"]),
    ],
)
def test_arithmetic_follows_the_published_table(name, table, words, monkeypatch):
    monkeypatch.setattr(
        published, "RECALL_INTENSIVE", dict.fromkeys(("read once", "read twice"), table)
    )
    settled = find_claim(name).settled()
    result = [judgement.verdict for _, judgement in settled]
    assert result == words


@pytest.mark.parametrize(
    "name, setting, words",
    [
        (
            "equal-sizes",
            ("OFFICIAL_PARAMETERS", {"longhorn": 1000, "attention": 995, "gla": 1100}),
            ["holds", "does not hold"],
        ),
        ("fewer-parameters", ("_SAVED", 5), ["holds"]),
        ("fewer-parameters", ("_SAVED", -5), ["does not hold"]),
    ],
)
def test_counts_follow_the_sizes(name, setting, words, monkeypatch):
    monkeypatch.setattr(theory, *setting)
    settled = find_claim(name).settled()
    result = [judgement.verdict for _, judgement in settled]
    assert result == words


# tests/test_claims.py: both verdicts follow the times
TIMED = {"exact-cost", "kernel-time", "kernel-official"}


@pytest.mark.parametrize("speed, word", [(1100, "holds"), (900, "does not hold")])
def test_training_speed_follows_the_times(speed, word):
    rows = [
        dict(
            mixer=name,
            context=1024,
            compile=compiled,
            tokens_per_second=1000 if name == "mamba" else speed,
        )
        for name in ("mamba", "longhorn", "longhorn_exact")
        for compiled in (False, True)
    ]
    result = {
        judgement.verdict for _, judgement in find_claim("training-speed").timed({"rows": rows})
    }
    assert result == {word}


def test_no_claim_is_left_out():
    tested = {
        *LANGUAGE,
        "repetition",
        "vision",
        "mqar",
        "exact-mqar",
        "larger-state",
        "recall",
        "recall-rewritten",
        "extrapolation",
        "extrapolation-delta",
        "passkeys",
        *SECOND_PLAN,
        "recall-intensive",
        "read-twice",
        "equal-sizes",
        "fewer-parameters",
        "training-speed",
        *TIMED,
    }
    tested |= {claim.name for claim in all_claims() if claim.name.startswith("elsewhere-")}
    # the theory pages test derivations
    derived = {claim.name for claim in all_claims() if claim.basis == "derived"}
    expected = {claim.name for claim in all_claims()}
    assert tested | derived | NO_CODE == expected
    without_code = {claim.name for claim in all_claims() if not claim.has_code}
    assert without_code == NO_CODE
