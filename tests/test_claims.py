"""Check the published tables, readings of a record, and that every claim is complete."""

import importlib
import json
import sys
import types

import pytest

import fakes
from longhorn_kit.lab.claims import compare, looks, published
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.claim import SCALES, readers
from longhorn_kit.lab.claims.ledger import results_folder
from longhorn_kit.lab.claims.subjects import extrapolation, language, mqar, one_pass, recall, speed

RECORDED = results_folder()


def test_averages_of_the_published_recall_table_are_the_published_averages():
    averages = {
        ("read once", "mamba"): 34.82,
        ("read twice", "mamba"): 41.75,
        ("read once", "longhorn"): 35.97,
        ("read twice", "longhorn"): 45.02,
    }
    for (reading, model), average in averages.items():
        scores = published.RECALL_INTENSIVE[reading][model]
        assert len(scores) == len(published.RECALL_TASKS)
        assert sum(scores) / 6 == pytest.approx(average, abs=0.006)


def test_no_column_of_what_others_measured_is_left_out():
    longer = [
        comparison.label.split(":")[0]
        for comparison, _ in claims.find_claim("elsewhere-recall").settled()
    ]
    assert longer == [name for name in published.INDEPENDENT if "2K/4K/8K" in name]


def test_every_claim_is_complete():
    names = [claim.name for claim in claims.CLAIMS]
    assert len(set(names)) == len(names)
    for claim in claims.CLAIMS:
        assert claim.statement
        assert claim.published
        assert claim.source
        assert claim.rule
        assert bool(claim.module) <= bool(claim.compare and claim.minutes)
        assert claim.reads is None or claim.reads in names
        assert set(claim.minutes) <= set(SCALES)


def test_published_numbers_of_the_rows_are_those_of_the_tables():
    stated = {claim.name: claim.published for claim in claims.CLAIMS}
    for name, size in (("language", "120M"), ("language-350m", "350M")):
        for model in ("longhorn", "mamba", "attention", "gla"):
            assert f"{published.OPENWEBTEXT[size][model]:.3f}" in stated[name]
    number = published.OPENWEBTEXT["120M"]["longhorn_scalar"]
    assert str(number) in stated["scalar-rate"]
    number = published.OPENWEBTEXT["350M"]["mamba_input_a"]
    assert str(number) in stated["input-dependent-a"]
    for value in published.DOWNSTREAM_PERPLEXITY.values():
        assert f"{value:.2f}" in stated["downstream"]


def kernel_record(**ms):
    rows = [
        dict(
            section="main",
            shape=shape,
            form=form,
            kernels=form,
            forward_ms=ms.get(form, 1.0),
            backward_ms=0.0,
        )
        for shape in speed.SHAPES
        for form in ("diagonal", "exact", "s6")
    ]
    others = (
        "mamba_cuda",
        "official_longhorn_cuda",
        "mamba_cuda_again",
        "official_longhorn_cuda_again",
    )
    return {
        "rows": rows,
        "others_measured_before": {
            name: dict.fromkeys(speed.SHAPES, [ms.get(name, 1.0), 0]) for name in others
        },
    }


@pytest.mark.parametrize(
    "claim, ms, words",
    [
        ("exact-cost", dict(exact=2.1), ["holds"]),
        ("exact-cost", dict(exact=1.9), ["does not hold"]),
        ("kernel-time", dict(diagonal=1.01), ["holds"] * 2),
        ("kernel-time", dict(diagonal=1.5, s6=2.0), ["does not hold", "holds"]),
        ("kernel-time", dict(diagonal=1.5, mamba_cuda=2.0), ["holds", "does not hold"]),
        ("kernel-official", dict(official_longhorn_cuda=1.03), ["does not hold", "holds", "holds"]),
    ],
)
def test_kernel_rows_follow_the_times(claim, ms, words):
    result = [
        judgement.verdict for _, judgement in claims.find_claim(claim).timed(kernel_record(**ms))
    ]
    assert result == words


def test_times_of_code_that_is_not_in_the_repository_say_what_they_lack():
    why = [
        judgement.why
        for _, judgement in claims.find_claim("kernel-official").timed(kernel_record())
    ]
    for i in (0, 2):
        assert "no versions, commit, spread or raw log" in why[i]
    assert "no commit, spread" in why[1]
    claim = claims.find_claim("kernel-time")
    official, kit = claim.timed(kernel_record())
    assert "nothing in the repository runs that code" in official[1].why
    assert not kit[1].why
    judgement = speed.no_fast_kernel(kernel_record())[0][1]
    assert not judgement.why


def test_a_claim_that_holds_at_one_shape_only_is_undecided():
    uneven = kernel_record()
    uneven["rows"][0]["forward_ms"] = 3.0
    claim = claims.find_claim("kernel-time")
    comparison, judgement = claim.timed(uneven)[0]
    assert judgement.verdict == "undecided"
    assert comparison.differences == pytest.approx((1 / 3, 1, 1))
    assert judgement.low == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "best, tried, message",
    [
        ((1e-3,), [1e-3], "one learning rate"),
        ((0.03, 0.1), [0.01, 0.03, 0.1], "edge of the grid (Mamba)"),
        ((0.03, 0.03), [0.01, 0.03, 0.1], ""),
    ],
)
def test_learning_rates_have_to_be_bracketed(best, tried, message):
    assert message in compare.edge(
        {name: (rate, tried) for name, rate in zip(("longhorn", "mamba"), best)}
    )
    expected = bool(
        compare.edge({name: (rate, tried) for name, rate in zip(("longhorn", "mamba"), best)})
    )
    assert bool(message) == expected


def recall_record(lr=0.03, **scores):
    names = dict.fromkeys(name for pair in recall.RECALL_ORDER for name in pair)
    task = {
        "recall": {name: scores.get(name, [0.5, 0.51, 0.52]) for name in names},
        "lr": dict.fromkeys(names, lr),
        "grid": dict.fromkeys(names, {"0.01": 0, "0.03": 1, "0.1": 0}),
    }
    return {"results": {"search_seeds": [100, 101], "tasks": {"once": task}}}


def test_recall_is_compared_seed_by_seed_in_points():
    record = recall_record(longhorn_exact=[0.9, 0.91, 0.92])
    first, *rest = recall.compare_recall(record)
    assert first.label == "keys once: exact above diagonal"
    assert first.differences == pytest.approx((40, 40, 40))
    assert first.searched == 2
    assert len(rest) == 3
    assert not first.doubt
    assert recall.compare_recall(recall_record(lr=0.1))[0].doubt


def cell(mixer, accuracy, width=64, lr=0.01, rates=(0.001, 0.01, 0.1), **more):
    return (
        dict(
            length=64,
            pairs=4,
            d_model=width,
            mixer=mixer,
            accuracy=accuracy,
            guess=0.1,
            rewritten=0,
            options={},
            lr=lr,
            by_lr=dict.fromkeys(map(str, rates), 0.5),
        )
        | more
    )


def test_grid_counts_only_cells_that_another_rate_cannot_change():
    cells = [
        cell("longhorn", [0.9, 0.8, 0.7]),
        cell("mamba", [0.5, 0.5, 0.05]),  # both inside
        cell("longhorn", [0.99] * 3, 128, lr=0.1),
        cell("mamba", [0.995] * 3, 128),  # solved with a rate at the edge: counts as a tie
        cell("longhorn", [0.9] * 3, 256, lr=0.1),
        cell("mamba", [0.1] * 3, 256),  # at the edge
        cell("longhorn", [0.9] * 3, 512, rewritten=8),
        cell("mamba", [0.1] * 3, 512, rewritten=8),
    ]
    record = {"results": {"cells": cells}}
    (comparison,) = mqar.compare_mqar(record, (("longhorn", "mamba"),))
    assert comparison.label == "diagonal above Mamba (2 of 3 cells)"
    assert comparison.differences == pytest.approx((20, 15, 50 * (0.7 - 0.12))), (
        "limited to 1.2 guesses, averaged over two cells"
    )
    record = {"results": {"cells": cells[4:6]}}
    (alone,) = mqar.compare_mqar(record, (("longhorn", "mamba"),))
    assert alone.doubt
    assert not alone.differences
    assert "with d_model –" in mqar.about_mqar(
        {"settings": {"lrs": [0.01]}, "results": {"cells": []}}
    ), "no cell is finished"


def test_the_description_of_a_grid_counts_the_cells_of_every_rate():
    tried = {"longhorn": (0.001, 0.01, 0.1), "mamba": (0.01,), "gla": (0.01, 0.1)}
    cells = [cell(name, [0.9], rates=rates, state_bytes=0) for name, rates in tried.items()]
    record = {"settings": {"lrs": [0.01]}, "results": {"cells": cells}}
    text = mqar.about_mqar(record)
    assert "Learning rates tried: 0.001 in 1, 0.01 in 3, 0.1 in 2 of 3 cells" in text
    for name in ("mqar", "exact-mqar", "larger-state"):
        assert "chosen on seed 0, which is judged too" in claims.find_claim(name).about(
            {"settings": {}, "results": {"cells": cells}}
        )
    assert "two rows are about different cells and cannot be compared" in text


def test_a_ratio_is_stale_if_only_one_of_its_models_was_timed_again():
    def row(mixer, compile, speed):
        return dict(
            mixer=mixer,
            context=1024,
            compile=compile,
            tokens_per_second=speed,
            ms=1e5 / speed,
            commit="old",
        )

    names = ("longhorn", "longhorn_exact", "mamba")
    record = {"rows": [row(name, compile, 1000) for name in names for compile in (False, True)]}

    def newer(*mixers):
        return {
            "rows": [dict(mixer=name, compiled=False, ms=80.0, commit="new") for name in mixers]
        }

    def reasons(later):
        return [judgement.why for _, judgement in speed.compare_training(record, later)]

    diagonal, exact = reasons(newer("longhorn"))
    assert diagonal == (
        "stale: timed at commit old; at new diagonal takes 80.0 ms per eager step instead of "
        "100.0, and Mamba was not timed again"
    )
    assert exact == ""
    assert reasons(newer(*names)) == reasons(None) == ["", ""]


def run(mixer, seed, losses, tokens=(10, 20, 40), **more):
    return (
        dict(
            mixer=mixer,
            seed=seed,
            tokens=tokens[-1],
            parameters=5e6,
            model=dict(d_mlp=0),
            state_numbers=2000,
            val=dict(tokens=list(tokens), all=list(losses)),
        )
        | more
    )


def grid_record(*runs, unique=20):
    return {
        "settings": {"train": {"lr": 1e-3}},
        "results": {
            "runs": list(runs),
            "train_tokens": unique,
            "domains": ["docs"],
            "unit": "nats per token",
        },
    }


def test_repeated_text_is_compared_after_one_pass_and_at_the_end():
    record = grid_record(
        *(
            run(*r)
            for r in (
                ("longhorn", 0, (5, 3, 2)),
                ("longhorn", 1, (5, 3, 2)),
                ("longhorn", 2, (5, 3, 2)),
                ("mamba", 1, (5, 4, 1.5)),
                ("mamba", 2, (5, 4.5, 1.5)),
            )
        )
    )
    first, last = language.compare_language(record, (("longhorn", "mamba"),))
    assert first.label == "diagonal below Mamba, after one pass"
    assert first.differences == (1, 1.5)
    assert first.published == pytest.approx(0.013)
    assert last.label == "diagonal below Mamba, after 2.0 passes"
    assert last.differences == (-0.5, -0.5)
    assert "one learning rate" in last.doubt
    text = language.about_language(record)
    assert "2.0 passes" in text
    assert "diagonal 2k" in text
    assert "mixers only for diagonal, Mamba" in text
    assert "0.001 only" in text
    assert [
        c.label
        for c in language.compare_language(
            grid_record(run("longhorn", 0, (3, 2, 1)), run("mamba", 0, (3, 2, 1)), unique=40),
            (("longhorn", "mamba"),),
        )
    ] == ["diagonal below Mamba"], "one pass has one row"


@pytest.mark.parametrize(
    "losses, saved", [((4, 3, 2.0), 50.0), ((4, 3.5, 3.0), 0.0), ((5, 4.5, 4.0), None)]
)
def test_tokens_saved_are_read_off_the_curves(losses, saved):
    (comparison,) = language.compare_tokens(
        grid_record(run("longhorn", 0, losses), run("mamba", 0, (5, 4, 3.0)), unique=40)
    )
    expected = () if saved is None else (saved,)
    assert comparison.differences == expected
    assert ("not reached" in comparison.doubt) == (saved is None)


def test_lengths_tell_texts_apart_from_seeds():
    nats = {"docs": [2.0, 1.98], "prose": [2.0, 2.1]}
    texts = {text: {"by_length": {"nats": values}} for text, values in nats.items()}
    models = [{"mixer": "longhorn", "text": texts} for _ in range(3)]
    judged = claims.outcomes(
        "extrapolation", {"settings": {"multiples": [1, 16]}, "results": {"models": models}}
    )
    assert [(c.label, j.n, j.verdict) for c, j in judged] == [
        ("docs, 16 times the length: diagonal keeps", 3, "holds"),
        ("prose, 16 times the length: diagonal keeps", 3, "does not hold"),
    ]


def test_needles_are_compared_at_the_longest_text_after_lessons():
    def model(mixer, last):
        return {
            "mixer": mixer,
            "needles": {
                "fact, finetuned": {"once": {"length": [64, 128], "written": [[1, last], [1, 0]]}},
                "fact": {"once": {"length": [64], "written": [[0]]}},
            },
        }

    (comparison,) = extrapolation.compare_needles(
        {"results": {"models": [model("longhorn", 1), model("mamba", 0)]}}
    )
    assert comparison.label == "fact, finetuned, 128 tokens: diagonal above Mamba"
    assert comparison.differences == (50,)


def test_state_numbers_of_the_records_are_those_of_the_models():
    import torch

    from longhorn_kit.lab.experiments.language import state_numbers
    from longhorn_kit.models.lm import LMConfig, SequenceLM

    for name in ("gpu", "gpu_160m", "laptop"):
        record = json.loads((RECORDED / "language" / f"{name}.json").read_text())
        for run in record["results"]["runs"]:
            with torch.device("meta"):
                assert (
                    state_numbers(SequenceLM(LMConfig(**run["model"]))) == run["state_numbers"]
                ), run["mixer"]


AUDITED = {  # computed from the same record by other code, with the variance pooled over all blocks
    "diagonal N=16 below Mamba N=16": -0.0166,
    "exact N=16 below Mamba N=16": -0.0062,
    "exact N=16 below diagonal N=16": 0.0104,
    "exact N=64 below diagonal N=64": 0.034,
    "exact N=64 below Gated DeltaNet": -0.0102,
    "exact N=64 below Mamba N=64": -0.0049,
    "exact N=64, MLP below Gated DeltaNet, MLP": -0.0147,
    "exact N=64, MLP below Mamba N=64, MLP": -0.0019,
    "exact N=64, MLP below attention, MLP": 0.0104,
    "exact N=64, MLP below exact N=32, MLP": 0.0047,
    "exact N=64, MLP below DeltaNet, MLP": 0.0290,
    "exact N=64, MLP below Mamba-2, MLP": 0.0244,
}


def test_the_first_plan_read_again_gives_numbers_and_no_verdict():
    text = (RECORDED / "one-pass" / "gpu.json").read_text()
    record = json.loads(text)
    title, header, rows = one_pass.explored(record)
    printed = {row[1]: float(row[2]) for row in rows}
    assert printed == pytest.approx(AUDITED, abs=0.0005)
    assert "xploratory" in title
    assert len(header) == len(rows[0])
    text = " ".join([title, *header, *(cell for row in rows for cell in row)])
    for word in ("holds", "does not hold", "undecided", "ahead", "behind", "cannot"):
        assert word not in text
    for row in rows:
        assert 0 <= float(row[4]) <= 1
        assert row[5] in ("3", "5", "8")
    first = record["results"]["groups"]["paper"][0]
    first["runs"][0]["bits_per_byte"] = None  # diverged
    explored = one_pass.explored(record)[2]
    lost = [row for row in explored if first["name"] in row[1]]
    assert len(lost) == 2
    for row in lost:
        assert "1 of " in row[2]
        assert row[3:] == ["", "", ""]


def test_a_claim_can_read_the_records_of_a_further_experiment():
    claim = claims.find_claim("scalar-rate")
    assert set(readers(claim)) == {"language", "one-pass"}
    result = set(readers(claims.find_claim("stable")))
    assert result == set()
    first = {"experiment": "one-pass", "results": {"plan": {}}}
    assert claims.outcomes("scalar-rate", first) == [], "the first plan has no such pair"
    second = {
        "experiment": "one-pass",
        "results": {"plan": {"rule": "looks"}, "groups": {"paper": []}},
    }
    assert (
        claims.outcomes("scalar-rate", second) == claims.outcomes("other-layers-once", second) == []
    ), "its models are not part of this run"


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'recall'"):
        claims.find_claim("recal")
    with pytest.raises(ValueError, match="there are: one-pass, equal-state"):
        claims.find_claim("zzzzzzzz")


def test_every_subject_is_registered_by_name(monkeypatch):
    registered = [claim.name for subject in claims.SUBJECTS for claim in subject.CLAIMS]
    assert sorted(registered) == sorted(claims.LISTED)
    assert [claim.name for claim in claims.registered()] == list(claims.LISTED)
    monkeypatch.setattr(claims, "LISTED", (*claims.LISTED, "forgotten"))
    with pytest.raises(ValueError, match="differ: forgotten"):
        claims.registered()


def test_an_experiment_of_the_list_brings_its_claims(monkeypatch):
    module = types.ModuleType("longhorn_kit.lab.experiments.toy")
    module.CLAIMS = [fakes.claim("toy")]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(claims, "EXPERIMENTS", ("toy",))
    claims.claim_modules.cache_clear()
    assert claims.all_claims()[-1].name == "toy"
    assert claims.find_claim("toy").statement.startswith("The toy claim")
    monkeypatch.undo()
    claims.claim_modules.cache_clear()
    assert claims.all_claims() == claims.CLAIMS


def test_a_name_that_moved_to_a_subject_is_found_with_a_warning():
    for old in (compare, claims, looks):
        for module, names in old._MOVED.items():
            new = importlib.import_module(f"longhorn_kit.lab.claims.{module}")
            for name in names.split():
                with pytest.warns(DeprecationWarning, match=f"{name} is in {new.__name__} now"):
                    assert getattr(old, name) is getattr(new, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            importlib.import_module(old.__name__).__getattr__("nothing")
