"""The toy recall task: streams, memories, the search for a learning rate, and the records."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.stats import WORDS
from longhorn_kit.lab.experiments import recall
from longhorn_kit.lab.experiments.recall import (
    EXPERIMENT,
    MEMORIES,
    WRITES,
    RecallConfig,
    RecallModel,
    draw_streams,
    grade,
    guess_level,
    look_up,
    train_recall,
)
from longhorn_kit.lab.run import Results, run
from longhorn_kit.records import read_record

pytestmark = pytest.mark.numeric

TINY = dict(
    pairs=4,
    key_size=4,
    values=6,
    d_state=4,
    width=6,
    batch_size=4,
    steps=6,
    warmup=1,
    lrs=(0.05, 1e30),
    seeds=(0, 1),
    search_seeds=(100,),
    test_streams=8,
    test_pairs=(2, 4),
    points=3,
)
CONFIG = RecallConfig(**TINY)
RECORDS = [
    read_record(Path(__file__).parent.parent / f"nbs/lab/results/recall/{name}.json")
    for name in ("laptop", "narrow")
]


@settings(max_examples=20, deadline=None)
@given(
    task=st.sampled_from(sorted(WRITES)),
    half=st.integers(1, 9),
    size=st.integers(2, 5),
    values=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_question_has_its_answer_in_the_stream(task, half, size, values, seed):
    pairs = 2 * half
    keys, symbols, answers = draw_streams(
        task, 3, pairs, size, values, torch.Generator().manual_seed(seed)
    )
    for row in range(3):
        shown = [tuple(key) for key in keys[row, :pairs].tolist()]
        memory = dict(zip(shown, symbols[row, :pairs].tolist()))  # the last value of a key stays
        questions = [tuple(key) for key in keys[row, pairs:].tolist()]
        assert [memory[key] for key in questions] == answers[row].tolist()
        assert set(symbols[row, pairs:].tolist()) == {values}
        assert symbols[row, :pairs].max() < values
        assert sorted(questions) == sorted(memory)
        assert all(shown.count(key) == WRITES[task] for key in memory)


@pytest.mark.parametrize("task", sorted(WRITES))
def test_a_seeds_streams_do_not_depend_on_the_other_seeds(task):
    several = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    alone = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    for _ in range(2):  # the second draw continues every generator
        together = draw_streams(task, 5, 6, 3, 4, *several)
        parts = [draw_streams(task, 5, 6, 3, 4, generator) for generator in alone]
        for whole, pieces in zip(together, zip(*parts)):
            assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("task", sorted(WRITES))
def test_a_table_answers_everything_and_blind_answers_are_at_chance(task):
    keys, symbols, answers = draw_streams(task, 4000, 8, 4, 16, torch.Generator().manual_seed(3))
    assert (look_up(keys, symbols, 16) == answers).all()
    blind = torch.randint(16, answers.shape, generator=torch.Generator().manual_seed(4))
    assert abs((blind == answers).float().mean().item() - 1 / 16) < 0.01
    assert 1 / 16 < guess_level(task, 8, 4, 16) < 0.4


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_every_model_starts_at_ln_v_and_reads_only_the_past(name):
    model = RecallModel(name, CONFIG)
    stream = draw_streams("once", 3, 4, 4, 6, torch.Generator().manual_seed(0))
    keys, symbols, answers = (part[None].repeat(2, *[1] * part.dim()) for part in stream)
    assert grade(model, keys, symbols, answers)[1][0].allclose(torch.tensor(6.0).log())
    torch.nn.init.normal_(model.out, generator=torch.Generator().manual_seed(0))
    before = model(keys, symbols)
    later = keys.clone()
    later[:, :, 5] += 1
    after = model(later, symbols)
    assert torch.allclose(before[:, :, :5], after[:, :, :5], atol=1e-5)
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:], atol=1e-3)


@pytest.mark.parametrize("name", ["longhorn_exact", "gla", "attention"])
def test_a_seed_trains_the_same_alone_and_beside_others(name):
    together = train_recall("rewritten", name, 0.02, CONFIG)[2]
    alone = train_recall("rewritten", name, 0.02, replace(CONFIG, seeds=(1,)))[2]
    assert torch.allclose(together[:, 0, 1], alone[:, 0, 0], atol=1e-4)


def test_memories_without_forgetting_agree():
    q, k, x = (torch.randn(2, 7, n, dtype=torch.float64) for n in (4, 4, 3))
    never = torch.full((2, 7, 4), 60.0, dtype=torch.float64)  # gates of 1
    assert torch.allclose(MEMORIES["gla"](q, k, x, never), MEMORIES["linear_attention"](q, k, x))
    # orthogonal keys: nothing to correct, so one pass stores all
    unit = torch.eye(7, dtype=torch.float64).expand(2, 7, 7)
    b = torch.full((2, 7, 3), 60.0, dtype=torch.float64)
    exact, diagonal = (MEMORIES[name](unit, unit, x, b) for name in ("longhorn_exact", "longhorn"))
    assert torch.allclose(exact, x / 2)
    assert torch.allclose(diagonal, x / 2)


def structure(value):
    "The keys of nested dictionaries; the learning rates of a search may differ."
    return (
        {key: {} if key == "grid" else structure(inner) for key, inner in value.items()}
        if isinstance(value, dict)
        else None
    )


def test_a_tiny_run_has_the_structure_of_the_record_and_is_judged(tmp_path):
    record = run(
        EXPERIMENT, folder=tmp_path, workers=0, **TINY | {"test_pairs": (4, 8, 16, 24, 32)}
    )
    assert record["missing"] == 0
    assert structure(record["results"]) == structure(RECORDS[0]["results"])
    assert record["settings"].keys() == RECORDS[0]["settings"].keys()
    assert (tmp_path / "record.json").stat().st_size < 60_000
    for task in record["results"]["tasks"].values():
        # it diverged
        assert set(task["lr"].values()) == {0.05}
        assert all(grid["1e+30"] == 0 for grid in task["grid"].values())
    judged = claims.outcomes("recall", record)
    assert len(judged) == 8
    assert all(judgement.n == 2 and judgement.verdict in WORDS for _, judgement in judged)


def test_the_learning_rate_is_chosen_on_the_search_seeds_by_training_not_by_the_test(tmp_path):
    config = replace(
        CONFIG,
        tasks=("once",),
        models=("gla", "attention"),
        lrs=(0.1, 0.2, 0.3),
        search_seeds=(100, 101),
    )
    calls = []

    def made_up(settings, folder):
        calls.append((settings["lr"], settings["seeds"], settings["test_pairs"]))
        late = {0.1: 0.4, 0.2: 0.6, 0.3: 0.5}[settings["lr"]]
        return {
            "steps": [1],
            "loss": [],
            "recall": [],
            "test": {"4": [1 - late]},
            "late_recall": late,
        }

    run(replace(EXPERIMENT, run_job=made_up), folder=tmp_path, workers=0, **vars(config))
    search = [(lr, (100, 101), ()) for lr in (0.1, 0.2, 0.3)]
    assert calls == (search + [(0.2, (0, 1), (2, 4))]) * 2
    result = recall.summarize(config, Results(tmp_path))["tasks"]["once"]
    assert result["lr"] == {"gla": 0.2, "attention": 0.2}
    assert result["grid"]["gla"] == {"0.1": 0.4, "0.2": 0.6, "0.3": 0.5}
    single = replace(config, lrs=(0.3,), search_seeds=(), models=("gla",))  # nothing to choose
    assert [(s["lr"], s["seeds"]) for s in recall.jobs(single, Results(tmp_path))] == [
        (0.3, (0, 1))
    ]
    # nothing is done
    assert recall.summarize(single, Results(tmp_path))["tasks"]["once"]["recall"] == {}


@pytest.mark.parametrize("record", RECORDS, ids=["laptop", "narrow"])
def test_recorded_learning_rates_lie_inside_their_grid(record):
    assert len(record["results"]["search_seeds"]) == 3
    assert RecallConfig(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in record["settings"].items()}
    )
    for result in record["results"]["tasks"].values():
        for model, grid in result["grid"].items():
            rates = sorted(grid, key=float)
            best = max(grid, key=grid.get)
            assert f"{result['lr'][model]:g}" == best
            assert best not in (rates[0], rates[-1])
            assert len(result["recall"][model]) == len(record["settings"]["seeds"]) == 8


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(pairs=12), "pairs is 12; it must be one of test_pairs"),
        (dict(pairs=5), "pairs is 5; it must be even"),
        (dict(lrs=()), "lrs is empty"),
        (dict(seeds=()), "seeds is empty"),
        (dict(tasks=()), "tasks is empty"),
        (dict(tasks=("twice",)), "unknown tasks twice"),
        (dict(models=("lstm",)), "unknown models lstm"),
        (dict(batch_size=0), "batch_size is 0"),
        (dict(points=0), "points is 0"),
        (dict(test_streams=0), "test_streams is 0"),
        (dict(key_size=1), "key_size is 1"),
        (dict(warmup=6), "warmup is 6; it must be from 1 to 5"),
        (dict(width=-3), "width is -3"),
        (dict(values=0), "values is 0"),
        (dict(d_state=-2), "d_state is -2"),
        (dict(embed=0), "embed is 0"),
        (dict(rank=0), "rank is 0"),
        (dict(lrs=(0.1, float("nan"))), "lrs is nan"),
        (dict(lrs=(0,)), "lrs is 0"),
        (dict(lrs=(0.1, 0.2), search_seeds=()), "search_seeds is empty, with 2"),
        (dict(search_seeds=(1, 2)), "seeds and search_seeds share 1"),
    ],
)
def test_settings_are_checked_before_anything_is_trained(wrong, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **wrong)
