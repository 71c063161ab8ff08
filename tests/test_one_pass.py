"""Test the one-pass experiment: the first plan's comparisons, and jobs that repeat bit for bit."""

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import one_pass_record
from longhorn_kit import cli
from longhorn_kit.lab.claims.looks import LOOKS, rows_of_claim
from longhorn_kit.lab.claims.one_pass_plan import (
    FIRST_PLAN,
    GROUPS,
    RATES,
    compare_losses,
    compare_tokens_saved,
    tokens_saved,
)
from longhorn_kit.lab.claims.registry import find_claim, outcomes
from longhorn_kit.lab.experiments import one_pass
from longhorn_kit.lab.experiments.measures import load_arrays
from longhorn_kit.lab.experiments.one_pass import EXPERIMENT, OnePass, check_layer, plan_of, windows
from longhorn_kit.lab.experiments.retrain import (
    archived_jobs,
    check_plan,
    compare_first,
    config_of,
    recorded_losses,
    recorded_runs,
    retrain,
    settings_of,
)
from longhorn_kit.lab.run import Results, run
from longhorn_kit.lab.train.lm import new_model, open_texts
from longhorn_kit.models import LMConfig
from longhorn_kit.records import read_record, to_plain, write_record

TINY = dict(d_model=16, context=32, rows=8, points=4, rates=(1e-3, 1e-2, 1e-1))
END = "\n<|endoftext|>\n"
RECORDS = Path(__file__).parents[1] / "nbs/lab/results/one-pass"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for part, lines in (("train", 200), ("val", 20)):
        (folder / f"toy.{part}.txt").write_text(
            END.join(f"and then {i * i % 89} and" for i in range(lines))
        )
    return str(folder)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, run(EXPERIMENT, "laptop", folder, workers=0, data=text, **TINY)


def test_plan_is_the_committed_one():
    "A change of models, comparisons, rates, rule or recipe needs a new, committed plan."
    gpu = EXPERIMENT.presets["gpu"]
    steps = one_pass.STEPS
    expected = one_pass.PLAN | {"rule": "looks"}
    assert plan_of(gpu, steps) == expected
    assert plan_of(gpu, steps - 1)["commit"] is None
    assert (
        plan_of(replace(gpu, groups=("paper",), data="other"), steps)["commit"]
        == one_pass.PLAN["commit"]
    )
    changes = (dict(rows=64), dict(d_model=768), dict(rates=RATES[:5]), dict(sd=0.01))
    for change in changes:
        assert plan_of(replace(gpu, **change), steps)["commit"] is None


def test_names_of_models_are_unique_and_every_pair_is_planned():
    names = [model.name for group in GROUPS.values() for model in group.models]
    assert len(set(names)) == len(names)
    for group in GROUPS.values():
        assert {
            name for pair in (*group.below, *group.as_good, *group.fewer) for name in pair
        } <= set(names)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(40, 400))
def test_windows_read_no_byte_twice(seed, rows, size):
    batches = list(windows(torch.arange(size), 8, rows, seed))
    read = torch.cat([inputs.flatten() for inputs, _ in batches]).tolist() if batches else []
    assert len(set(read)) == len(read) == (size - 1) // 8 // rows * rows * 8
    for inputs, targets in batches:
        assert (targets == inputs + 1).all()


def test_a_finished_run_has_every_model_with_its_search_and_its_looks(text, finished):
    folder, record = finished
    assert record["missing"] == 0
    assert record["results"]["plan"]["commit"] is None
    models = record["results"]["groups"]["laptop"]
    for number, model in zip((61, 62, 63), models):
        judged = [one["seed"] for one in model["runs"]]
        first = 1000 * number + 4
        expected = list(range(first, 1000 * number + 4 + len(judged)))
        assert judged == expected
        assert len(judged) in LOOKS
        seeds = {run["seed"] - 1000 * number for run in model["search"]}
        assert seeds == {1, 2, 3}
        result = [run["lr"] for run in model["search"] if run["place"] == model["place"]]
        expected = [model["lr"]] * 3
        assert result == expected
        assert model["function"] == "chunked"
        assert model["output_error"] < 1e-4
        assert model["state_numbers"] == 2 * 32 * 4
        losses = model["runs"][0]["val"]["all"]
        assert len(losses) == 4
        val = model["runs"][0]["val"]
        result = val["tokens"][-1]
        assert result == 12 * 8 * 32
    assert [c.label for c, _ in rows_of_claim(record, "one-pass")][
        0
    ] == "diagonal N=4 below Mamba N=4"
    config = EXPERIMENT.config("laptop", data=text, **TINY)
    result = one_pass.summarize(config, Results(folder))
    assert result == record["results"]


def test_a_run_keeps_what_its_model_would_be_asked_for(finished):
    folder, record = finished
    model = record["results"]["groups"]["laptop"][0]
    run = model["runs"][0]
    assert len(run["first_losses"]) == 12, "every step of this short run"
    assert run["first_losses"][0] == pytest.approx(8, abs=0.2), "bits per byte of a new model"
    assert {"by_length", "layers", "parts"} <= run["measured"].keys()
    assert run["memory"] is None
    arrays = [load_arrays(path) for path in Path(folder).glob("jobs/*/measures.npz")]
    finite = [
        one
        for models in record["results"]["groups"].values()
        for model in models
        for one in (*model["search"], *model["runs"])
        if one["bits_per_byte"] is not None
    ]
    assert len(arrays) == len(finite)
    for part in arrays:
        assert len(part)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_numbers(text, finished, tmp_path, monkeypatch):
    count = []
    train = one_pass.fit

    def killed(*args, **options):
        count.append(1)
        if len(count) == 6:
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(one_pass, "fit", killed)
    with pytest.raises(KeyboardInterrupt):
        run(EXPERIMENT, "laptop", tmp_path, workers=0, data=text, **TINY)
    repeated = run(EXPERIMENT, "laptop", tmp_path, workers=0, data=text, **TINY)

    def numbers(record):
        rows = []
        for model in record["results"]["groups"]["laptop"]:
            row = [model["name"], model["lr"], model["bracket"]]
            rows.append(row)
            for one in model["runs"]:
                row = [one["val"], one["measured"], one["first_losses"]]
                rows.append(row)
        return rows

    expected = 1 + len(list(Path(finished[0]).glob("jobs/*/metrics.json")))
    assert len(count) == expected
    assert numbers(repeated) == numbers(finished[1])


def test_another_text_is_refused(text, finished, tmp_path):
    (
        (tmp_path / "other.train.txt").write_text("b" * 3000),
        (tmp_path / "other.val.txt").write_text("b" * 300),
    )
    settings = next(
        iter(
            one_pass.jobs(EXPERIMENT.config("laptop", data=text, **TINY), Results(tmp_path / "run"))
        )
    )
    # another note
    list(
        one_pass.jobs(
            EXPERIMENT.config("laptop", data=str(tmp_path), **TINY), Results(tmp_path / "run")
        )
    )
    with pytest.raises(ValueError, match="is not the text of this job"):
        folder = Results(tmp_path / "run").job_folder(settings)
        one_pass.run_job(settings, folder)
    with pytest.raises(ValueError, match="name the text with --data"):
        planned = one_pass.jobs(OnePass(), Results(tmp_path / "none"))
        list(planned)
    with pytest.raises(ValueError, match="no group 'papers'"):
        OnePass(groups=("papers",))
    wrong_values = (("val", 0), ("d_model", 0), ("rates", (1e-3, float("nan"))))
    for name, value in wrong_values:
        with pytest.raises(ValueError, match=f"^{name} is"):
            OnePass(**{name: value})


def test_a_wrong_layer_stops_before_it_trains(monkeypatch):
    layer = (
        new_model(LMConfig(256, 32, 1, "gated_deltanet", dict(n_heads=2, d_key=8, d_value=8)), 0)
        .blocks[0]
        .mixer
    )
    assert 0 < check_layer(layer, 40, True)["gradient_error"] < 0.03
    right = type(layer).run

    def wrong(self, x, *arguments):
        y, _ = right(self, x)
        factor = 1.2 if x.dtype == torch.float32 else 1
        return y * factor, None

    monkeypatch.setattr(type(layer), "run", wrong)
    with pytest.raises(RuntimeError, match="chunked is wrong"):
        check_layer(layer, 40, True)


def test_divergence_is_a_result_and_gets_no_verdict(text, tmp_path):
    wild = run(
        EXPERIMENT,
        "laptop",
        tmp_path,
        workers=0,
        data=text,
        **TINY | dict(rates=(1e30, 1e31, 1e32), points=2),
    )
    models = wild["results"]["groups"]["laptop"]
    assert wild["missing"] == 0
    for model in models:
        assert None in model["bracket"].values()
        assert model["why"]
    assert {judgement.verdict for _, judgement in rows_of_claim(wild, "one-pass")} == {
        "cannot be judged"
    }


def toy(losses, seeds=(1, 2, 3, 4, 5), group="equal-state"):
    def val(loss):
        return {"tokens": [50, 100], "all": [loss + 1, loss]}

    def runs(loss):
        return [dict(seed=seed, val=val(loss + seed * seed / 100)) for seed in seeds]

    models = [
        dict(name=name, lr=5e-3, bracket={"0.0032": 1, "0.005": 0, "0.008": 1}, runs=runs(loss))
        for name, loss in losses.items()
    ]
    return one_pass_record({group: models})


@pytest.mark.parametrize("gated, word", [(1.5, "holds"), (1.0, "does not hold")])
def test_either_side_may_win(gated, word):
    record = toy(
        {"exact N=64": 1.25, "Gated DeltaNet": gated, "Mamba N=64": 2.0, "diagonal N=64": 2.0}
    )
    verdicts = {
        comparison.label: str(verdict) for comparison, verdict in outcomes("equal-state", record)
    }
    assert (
        verdicts["exact N=64 below Gated DeltaNet"]
        == verdicts["exact N=64 as good as Gated DeltaNet"]
        == word
    )


def test_a_model_that_diverges_does_not_ease_the_other_verdicts():
    record = toy(
        {
            name: 1.25 + 0.25 * (i > 0)
            for i, name in enumerate(
                ("exact N=64", "Mamba N=64", "diagonal N=64", "Gated DeltaNet")
            )
        }
    )
    models = record["results"]["groups"]["equal-state"]
    for model, push in zip(models, (0, 3, 3, 5)):
        for one in model["runs"]:
            sign = one["seed"] % 2 - 0.4
            one["val"]["all"][-1] += push * sign / 100
    before = {c.label: judgement.p for c, judgement in outcomes("equal-state", record)}
    record["results"]["groups"]["equal-state"][3]["runs"][2]["diverged"] = 7
    after = {c.label: judgement for c, judgement in outcomes("equal-state", record)}
    assert after["exact N=64 below Gated DeltaNet"].verdict == "cannot be judged"
    for name in ("exact N=64 below Mamba N=64", "exact N=64 below diagonal N=64"):
        assert after[name].p >= before[name]
    absent = compare_losses(record, "others")  # planned for the same claim, but not run
    assert [c.planned for c in absent] == [True] * 3
    for c in absent:
        assert not c.differences
    assert (
        compare_losses(record, "laptop")
        == []
        == compare_losses(record | {"scale": "laptop"}, "paper")
    )


def test_a_seed_of_another_group_takes_no_verdict_away():
    record = toy({"exact N=64": 1.0, "one rate N=64": 2.0}, group="others")
    record["results"]["groups"]["others"][0]["runs"][4]["diverged"] = (
        7  # seed 5; this group has three
    )
    assert outcomes("other-layers-once", record)[0][1].verdict == "holds"
    assert "exact N=64" in find_claim("other-layers-once").about(
        record
        | {
            "results": record["results"]
            | {
                "groups": {
                    "others": [
                        model | dict(parameters=1e6, state_numbers=1000, function="f")
                        for model in record["results"]["groups"]["others"]
                    ]
                }
            }
        }
    )


def test_a_text_that_is_too_short_for_a_step_is_one_sentence(tmp_path):
    (tmp_path / "short.txt").write_text("a few words\n" * 40)
    with pytest.raises(ValueError, match=r"the text has \d+ bytes to train on; one step reads 513"):
        run(
            EXPERIMENT,
            "laptop",
            tmp_path / "run",
            workers=0,
            data=str(tmp_path / "short.txt"),
            **TINY | dict(context=64, rows=8, val=64),
        )


def test_missing_models_count_in_the_correction():
    two = {"exact N=64": 1.25, "Mamba N=64": 1.5}
    four = two | {"diagonal N=64": 1.5, "Gated DeltaNet": 1.5}
    alone, whole = (compare_losses(toy(losses), "equal-state") for losses in (two, four))
    for c in alone + whole:
        assert c.planned
    assert [bool(c.differences) for c in alone] == [False, True, False, False]
    assert [c.waits for c in alone] == [True, False, True, True]
    for c in whole:
        assert not c.waits
    early = compare_losses(toy({"exact N=64": 1.0, "Mamba N=64": 2.0}, (1, 2)), "equal-state")[1]
    assert early.waits
    assert early.doubt == "2 of 5 seeds so far"


def test_a_pair_chosen_after_the_runs_is_judged_apart_from_the_plan():
    record = toy(
        {"Mamba N=64, MLP": 1.0, "Mamba-2, MLP": 1.5}, seeds=(1, 2, 3, 4), group="others-mlp"
    )
    ((comparison, judgement),) = outcomes("mamba2", record)
    assert comparison.differences == (0.5, 0.5, 0.5)
    assert not comparison.planned
    assert judgement.verdict == "holds"
    for c, _ in outcomes("other-layers-once", record):
        assert "Mamba-2, MLP below" not in c.label, "the planned claim does not change"
        assert "Mamba N=64, MLP below" not in c.label, "the planned claim does not change"
    assert (
        outcomes("mamba2", toy({"Mamba N=64, MLP": 1.0}, group="equal-state-mlp"))[0][1].verdict
        == "not run"
    )


@given(st.floats(1, 2), st.floats(1, 2))
def test_token_factor_is_antisymmetric(a, b):
    first, second = ({"val": {"tokens": [50, 100], "all": [loss + 1, loss]}} for loss in (a, b))
    saved = tokens_saved(first, second)
    assert saved == pytest.approx(-tokens_saved(second, first), abs=1e-9)
    assert (saved >= 0) == (a <= b)
    assert abs(saved) <= 50.001
    assert (
        compare_tokens_saved(toy({"diagonal N=16": a, "Mamba N=16": b}, group="paper"), "paper")[
            0
        ].published
        == 45
    )


def test_recorded_runs_name_the_plan():
    for path in RECORDS.glob("*.json"):
        record = read_record(path)
        plan = one_pass.PLAN if path.stem == "second-plan" else FIRST_PLAN
        assert record["results"]["plan"]["commit"] == (
            plan["commit"] if record["scale"] == "gpu" else None
        )
    assert find_claim("one-pass").commands["gpu"].endswith("--groups paper --data FOLDER")


def test_a_recorded_run_is_trained_again_to_the_bit(text, finished, tmp_path, capsys):
    "The exported folder has the weights of the recorded loss, and documents their origin."
    from longhorn_kit.lab.experiments.evaluation import load_pair
    from longhorn_kit.models.transformers import from_transformers

    folder, record = finished
    model = record["results"]["groups"]["laptop"][1]
    kept = model["runs"][1]
    words = [
        "retrain",
        str(folder / "record.json"),
        model["name"],
        "--seed",
        str(kept["seed"]),
        "--data",
        text,
        "--out",
        str(tmp_path / "weights"),
    ]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert (
        f"seed {kept['seed']}, learning rate {model['lr']:g}: {kept['bits_per_byte']:.4f} bits per "
        "byte" in shown
    )
    assert "they differ by 0.0000 at the first step and by 0.0000 on average over 12 steps" in shown
    loaded, tokenizer = load_pair(tmp_path / "weights")
    source = one_pass.text_of(config_of(record, text))
    bits = one_pass.held_out(
        from_transformers(loaded),
        open_texts(**source),
        SimpleNamespace(gpu=False, context=32, rows=8),
    )
    assert bits["all"] == pytest.approx(kept["bits_per_byte"], abs=1e-6)
    assert tokenizer.decode(tokenizer("and then").input_ids) == "and then"
    card = (tmp_path / "weights/README.md").read_text()
    assert f"{model['name']}, seed {kept['seed']}" in card
    assert record["results"]["corpus"] in card
    assert "3,072 seen in training" in card


def test_first_losses_that_differ_are_said(text, finished, tmp_path):
    folder, record = finished
    other = retrain(folder / "record.json", "Mamba N=4", tmp_path / "first", data=text)
    assert other.sentence.startswith("the first losses are the record's")
    assert other.bits_per_byte == other.recorded
    for model in record["results"]["groups"]["laptop"]:
        for one in model["runs"]:
            one["first_losses"] = [loss + 0.1 for loss in one["first_losses"]]
    path = write_record(tmp_path / "changed.json", record)
    assert retrain(path, "Mamba N=4", tmp_path / "weights", data=text).sentence.startswith(
        "THE FIRST LOSSES ARE NOT THE RECORD'S: they differ by 0.1"
    )
    text = compare_first([8.0, math.nan], [8.0, 2.0])
    assert text.startswith("THE FIRST")
    assert compare_first([8.003, 2.0], [8.0, 2.0]).startswith("THE FIRST")
    assert compare_first([8.001, 2.05], [8.0, 2.0]).startswith("the first")


def test_a_search_run_and_another_text_have_no_losses_to_compare(text, finished, tmp_path):
    folder, record = finished
    model = record["results"]["groups"]["laptop"][0]
    tried = next(run for run in model["search"] if run["bits_per_byte"])
    result = retrain(
        folder / "record.json", model["name"], tmp_path / "search", tried["seed"], tried["lr"], text
    )
    assert result.sentence == "the record has no first losses of this run, so nothing was compared"
    assert result.bits_per_byte == tried["bits_per_byte"]
    (
        (tmp_path / "other.train.txt").write_text("a b c " * 700),
        (tmp_path / "other.val.txt").write_text("a b c " * 100),
    )
    with pytest.raises(
        ValueError,
        match="is not the text of the record, whose SHA-256 is .*--other-text trains without a "
        "comparison",
    ):
        retrain(folder / "record.json", model["name"], tmp_path / "other", data=str(tmp_path))
    result = retrain(
        folder / "record.json",
        model["name"],
        tmp_path / "other",
        data=str(tmp_path),
        other_text=True,
    )
    assert result.sentence == "the text is not the record's, so its losses were not compared"


@pytest.mark.parametrize(
    "model, options, says",
    [
        ("exact N=5", {}, "the record has no model 'exact N=5'; did you mean 'exact N=4'"),
        ("exact N=4", dict(seed=7), "no such run of exact N=4; it has: seed 61004 at"),
        ("exact N=4", dict(lr=7.0), "no such run of exact N=4; it has: seed 61004 at"),
        ("exact N=4", dict(data="nowhere"), "nowhere"),
    ],
)
def test_a_run_that_cannot_be_made_again_is_one_sentence(
    model, options, says, text, finished, tmp_path
):
    with pytest.raises((ValueError, OSError), match=says):
        retrain(
            finished[0] / "record.json", model, tmp_path / "weights", **{"data": text} | options
        )
    assert not (tmp_path / "weights").exists()


def test_a_changed_plan_a_diverged_run_and_a_full_folder_are_refused(text, finished, tmp_path):
    folder, record = finished
    (tmp_path / "full").mkdir(), (tmp_path / "full/thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="contains other files; export to a new folder"):
        retrain(folder / "record.json", "exact N=4", tmp_path / "full", data=text)
    record["results"]["groups"]["laptop"][0]["runs"][0]["bits_per_byte"] = None
    with pytest.raises(ValueError, match="diverged; there is no model to make again"):
        retrain(
            write_record(tmp_path / "diverged.json", record),
            "exact N=4",
            tmp_path / "weights",
            data=text,
        )
    record["results"]["plan"]["hash"] = "0123456789abcdef"
    with pytest.raises(
        ValueError,
        match="hash 0123456789abcdef, and this version of the kit has .* use the commit that made "
        "it",
    ):
        retrain(
            write_record(tmp_path / "changed.json", record),
            "Mamba N=4",
            tmp_path / "weights",
            data=text,
        )
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="need a GPU, and this machine has none"):
            retrain(RECORDS / "gpu.json", "exact N=16", tmp_path / "weights", data=text)


def recorded_text(record):
    "Return stand-ins for a record's texts, with summary and number of tokens."
    names = ("unit", "corpus", "tokenizer", "train_tokens", "domains", "long")
    summary = {name: record["results"][name] for name in names if name in record["results"]}
    return SimpleNamespace(
        summary=lambda: summary,
        corpus=SimpleNamespace(train=range(record["results"]["train_tokens"])),
    )


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_every_recorded_run_has_the_settings_of_its_job(path):
    "The record determines models, recipe and rates of every run, as in archived jobs."
    record = read_record(path)
    config = config_of(record, "FOLDER")
    texts = recorded_text(record)
    archived = [job["settings"] for job in archived_jobs(path)]
    runs = list(recorded_runs(record))
    for one in runs:
        settings = settings_of(record, one, config, texts)
        check_plan(record, config, settings.steps)
        assert LMConfig(**settings.model).mixer
        assert settings.lr == one["lr"]
        assert settings.seed == one["seed"]
        if archived and (settings.seed, settings.lr) in {
            (job["seed"], job["lr"]) for job in archived
        }:
            assert to_plain(vars(settings)) in archived
            assert len(recorded_losses(path, one, settings)) == 50
    assert len(runs) >= max(len(archived), 1)


@pytest.mark.cuda
@pytest.mark.skipif(
    not os.environ.get("LONGHORN_TEXT"),
    reason="needs the text of the second plan: a folder in LONGHORN_TEXT",
)
def test_gpu_first_losses_are_the_recorded_ones():
    job = next(archived_jobs(RECORDS / "second-plan.json"))
    settings = SimpleNamespace(**job["settings"])
    source = one_pass.text_of(OnePass())
    texts = open_texts(**source)
    result = to_plain(texts.summary())
    assert result == settings.text, "LONGHORN_TEXT contains another text"
    _, summary = one_pass.train_run(settings, texts, source, points=1)
    assert len(summary["first_losses"]) == 50
    sentence = compare_first(summary["first_losses"], job["first_losses"])
    assert sentence.startswith("the first losses are the record's"), sentence
