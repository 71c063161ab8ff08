"""Test the planned run on rewritten keys: plan, jobs, choice of a rate, and judgement."""

from dataclasses import asdict, replace

import pytest

from longhorn_kit.lab.claims.ledger import results_folder
from longhorn_kit.lab.claims.registry import find_claim, outcomes
from longhorn_kit.lab.experiments import recall, rewritten
from longhorn_kit.lab.experiments.rewritten import EXPERIMENT, PLAN, RewrittenConfig, plan_of
from longhorn_kit.lab.run import Results, run
from longhorn_kit.records import read_record, to_plain

PLANNED = EXPERIMENT.presets["laptop"]
TINY = dict(
    pairs=4,
    key_size=4,
    values=6,
    embed=(6, 3),
    d_state=4,
    width=6,
    batch_size=4,
    steps=6,
    warmup=1,
    lrs=(0.01, 0.05, 0.1),
    search_seeds=(1, 2, 3),
    seeds=(4, 5, 6, 7, 8),
    seeds_per_job=2,
    test_streams=8,
    test_pairs=(2, 4),
    points=3,
)


def made_up(late):
    "Return a stand-in for `run_job`: late recall by (seeds, rate), and recall by seed."

    def run_job(settings, folder):
        seeds = settings["seeds"]
        shares = [seed / 100 for seed in seeds]
        tests = {str(pairs): shares for pairs in settings["test_pairs"]}
        return {
            "late_recall": late(seeds, settings["lr"]),
            "recall": [[0.5]] * len(seeds),
            "test": tests,
        }

    return replace(EXPERIMENT, run_job=run_job)


def test_the_settings_are_the_committed_plan():
    "A change of designs, seeds, rates or layer needs a new plan, committed before its run."
    assert plan_of(PLANNED) == PLAN
    assert PLANNED.search_seeds == tuple(range(20001, 20013))
    assert PLANNED.seeds == tuple(range(20101, 20133))
    for change in (
        dict(embed=(32,)),
        dict(seeds=PLANNED.seeds[:31]),
        dict(steps=300),
        dict(seeds_per_job=8),
    ):
        assert plan_of(replace(PLANNED, **change))["commit"] is None
    usual = asdict(recall.RecallConfig())
    changed = {
        name for name, value in asdict(PLANNED).items() if name in usual and usual[name] != value
    }
    assert changed == {"tasks", "models", "embed", "search_seeds", "seeds"}


def test_every_seed_is_trained_once_per_rate_and_judged_once(tmp_path):
    experiment = made_up(lambda seeds, lr: 0.5)
    record = run(experiment, folder=tmp_path, workers=0, **TINY)
    jobs = [read_record(path)["settings"] for path in tmp_path.glob("jobs/*/metrics.json")]
    for design in record["results"]["designs"]:
        for model in PLANNED.models:
            own = [job for job in jobs if (job["embed"], job["model"]) == (design["embed"], model)]
            for lr in TINY["lrs"]:
                searched = [
                    job["seeds"] for job in own if job["lr"] == lr and not job["test_pairs"]
                ]
                assert sorted(searched) == [[1, 2], [3]]
            seeds = [[4, 5], [6, 7], [8]]
            assert sorted(job["seeds"] for job in own if job["test_pairs"]) == seeds
            assert (
                design["recall"][model]
                == [0.04, 0.05, 0.06, 0.07, 0.08]
                == design["test"][model]["2"]
            )
    assert record["results"]["plan"] == plan_of(RewrittenConfig(**TINY))
    assert record["results"]["plan"]["commit"] is None


def test_the_rate_is_best_over_all_search_seeds_and_none_of_them_diverges(tmp_path):
    table = {
        ((1, 2), 0.01): 0.6,
        ((3,), 0.01): 0.0,  # seed 3 diverges
        ((1, 2), 0.05): 0.2,
        ((3,), 0.05): 0.8,  # mean over seeds 0.4
        ((1, 2), 0.1): 0.4,
        ((3,), 0.1): 0.5,
    }  # mean over seeds 0.433
    experiment = made_up(lambda seeds, lr: table.get((tuple(seeds), lr), 0.5))
    result = run(experiment, folder=tmp_path, workers=0, **TINY)["results"]["designs"][0]
    expected = dict.fromkeys(PLANNED.models, 0.1)
    assert result["lr"] == expected
    grid = result["grid"]["longhorn"]
    assert grid == pytest.approx({"0.01": 0, "0.05": 0.4, "0.1": 1.3 / 3})


def test_no_verdict_before_the_last_seed_of_both_models(tmp_path):
    config = RewrittenConfig(**TINY)
    results = Results(tmp_path)
    experiment = made_up(lambda seeds, lr: {0.05: 0.6}.get(lr, 0.5))
    record = run(experiment, folder=tmp_path, workers=0, **TINY)
    last = next(rewritten.cells(replace(config, embed=(3,), models=("longhorn",)))) | {
        "lr": 0.05,
        "seeds": (8,),
    }
    (results.job_folder(last) / "metrics.json").unlink()
    partial = record | {"results": to_plain(rewritten.summarize(config, results))}
    first, second = outcomes("recall-rewritten", partial)
    counts = [first[1].n, second[1].n]
    assert counts == [5, 0]
    assert second[1].verdict == "not run"
    assert second[0].waits
    for comparison, _ in (first, second):
        assert comparison.planned
        assert comparison.searched == 3


@pytest.mark.parametrize(
    "lead, words", [(0.2, ["holds"] * 2), (-0.2, ["does not hold"] * 2), (0.004, ["undecided"] * 2)]
)
def test_both_sides_may_win(lead, words):
    exact = [0.5 + lead + 0.01 * (seed % 5) for seed in range(32)]
    diagonal = [0.5 + 0.01 * (seed % 7) for seed in range(32)]
    grid = {"0.01": 0.1, "0.03": 0.2, "0.1": 0.1}
    designs = [
        {
            "embed": embed,
            "recall": {"longhorn_exact": exact, "longhorn": diagonal},
            "lr": dict.fromkeys(PLANNED.models, 0.03),
            "grid": dict.fromkeys(PLANNED.models, grid),
        }
        for embed in (32, 8)
    ]
    record = {
        "settings": {"pairs": 16, "tasks": ["rewritten"]},
        "results": {"designs": designs, "search_seeds": [1], "plan": PLAN},
    }
    judged = outcomes("recall-rewritten", record)
    assert [judgement.verdict for _, judgement in judged] == words
    assert [comparison.label[:15] for comparison, _ in judged] == [
        "embedding of 32",
        "embedding of 8:",
    ]
    designs[1]["lr"]["longhorn"] = 0.1  # the highest rate
    first, second = outcomes("recall-rewritten", record)
    assert "edge of the grid (diagonal)" in second[0].doubt
    assert second[1].verdict == "cannot be judged"
    expected = judged[0][1].p
    assert first[1].p == expected, "the correction must include the other comparison"
    assert "exact 0.03, diagonal 0.1 with an embedding of 8" in find_claim(
        "recall-rewritten"
    ).about(record)


def test_jobs_of_a_few_seeds_give_the_numbers_of_one_job(tmp_path):
    settings = dict(**TINY | dict(lrs=(0.05,), search_seeds=(), steps=30, embed=(6,)))
    together = run(
        EXPERIMENT, folder=tmp_path / "one", workers=0, **settings | dict(seeds_per_job=5)
    )["results"]
    few = run(EXPERIMENT, folder=tmp_path / "few", workers=0, **settings)["results"]
    for model in PLANNED.models:
        result = together["designs"][0]["recall"][model]
        expected = few["designs"][0]["recall"][model]
        assert result == expected


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(embed=()), "embed is empty"),
        (dict(embed=(8, 0)), "embed is 0"),
        (dict(seeds_per_job=0), "seeds_per_job is 0"),
        (dict(tasks=("once", "rewritten")), "this run has one task"),
        (dict(seeds=(20001,)), "seeds and search_seeds share 20001"),
        (dict(tasks=("twice",)), "unknown tasks twice"),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        replace(PLANNED, **wrong)


def test_a_recorded_run_is_the_planned_one():
    for path in (results_folder() / "recall-rewritten").glob("*.json"):
        record = read_record(path)
        assert record["results"]["plan"] == PLAN
        assert PLAN["commit"]
        assert record["missing"] == 0
        assert record["settings"] == to_plain(asdict(PLANNED))
        for design in record["results"]["designs"]:
            for shares in design["recall"].values():
                assert len(shares) == 32
