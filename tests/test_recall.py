"""Test the toy recall task: streams, memories, the search for a learning rate, and records."""

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
        shown_keys = keys[row, :pairs].tolist()
        shown = [tuple(key) for key in shown_keys]
        shown_symbols = symbols[row, :pairs].tolist()
        memory = dict(zip(shown, shown_symbols))  # the last value of a key stays
        requested_keys = keys[row, pairs:].tolist()
        questions = [tuple(key) for key in requested_keys]
        expected = answers[row].tolist()
        assert [memory[key] for key in questions] == expected
        others = symbols[row, pairs:]
        result = set(others.tolist())
        assert result == {values}
        largest = symbols[row, :pairs].max()
        assert largest < values
        assert sorted(questions) == sorted(memory)
        for key in memory:
            assert shown.count(key) == WRITES[task]


@pytest.mark.parametrize("task", sorted(WRITES))
def test_a_seeds_streams_do_not_depend_on_the_other_seeds(task):
    several = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    alone = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    for _ in range(2):  # the second draw continues each generator
        together = draw_streams(task, 5, 6, 3, 4, *several)
        parts = [draw_streams(task, 5, 6, 3, 4, generator) for generator in alone]
        for whole, pieces in zip(together, zip(*parts)):
            assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("task", sorted(WRITES))
def test_a_table_answers_everything_and_blind_answers_are_at_chance(task):
    generator = torch.Generator().manual_seed(3)
    keys, symbols, answers = draw_streams(task, 4000, 8, 4, 16, generator)
    assert (look_up(keys, symbols, 16) == answers).all()
    generator = torch.Generator().manual_seed(4)
    blind = torch.randint(16, answers.shape, generator=generator)
    hits = (blind == answers).float()
    assert abs(hits.mean().item() - 1 / 16) < 0.01
    assert 1 / 16 < guess_level(task, 8, 4, 16) < 0.4


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_every_model_starts_at_ln_v_and_reads_only_the_past(name):
    model = RecallModel(name, CONFIG)
    generator = torch.Generator().manual_seed(0)
    stream = draw_streams("once", 3, 4, 4, 6, generator)
    keys, symbols, answers = (part[None].repeat(2, *[1] * part.dim()) for part in stream)
    loss = grade(model, keys, symbols, answers)[1][0]
    expected = torch.tensor(6.0).log()
    assert loss.allclose(expected)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(model.out, generator=generator)
    before = model(keys, symbols)
    later = keys.clone()
    later[:, :, 5] += 1
    after = model(later, symbols)
    result = before[:, :, :5]
    expected = after[:, :, :5]
    assert torch.allclose(result, expected, atol=1e-5)
    result = before[:, :, 5:]
    expected = after[:, :, 5:]
    assert not torch.allclose(result, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["longhorn_exact", "gla", "attention"])
def test_a_seed_trains_the_same_alone_and_beside_others(name):
    together = train_recall("rewritten", name, 0.02, CONFIG)[2]
    alone = train_recall("rewritten", name, 0.02, replace(CONFIG, seeds=(1,)))[2]
    result = together[:, 0, 1]
    expected = alone[:, 0, 0]
    assert torch.allclose(result, expected, atol=1e-4)


def test_memories_without_forgetting_agree():
    q, k, x = (torch.randn(2, 7, n, dtype=torch.float64) for n in (4, 4, 3))
    never = torch.full((2, 7, 4), 60.0, dtype=torch.float64)  # gates of 1
    result = MEMORIES["gla"](q, k, x, never)
    expected = MEMORIES["linear_attention"](q, k, x)
    assert torch.allclose(result, expected)
    # with orthogonal keys, nothing must be corrected, so one pass stores all pairs
    identity = torch.eye(7, dtype=torch.float64)
    unit = identity.expand(2, 7, 7)
    b = torch.full((2, 7, 3), 60.0, dtype=torch.float64)
    exact, diagonal = (MEMORIES[name](unit, unit, x, b) for name in ("longhorn_exact", "longhorn"))
    assert torch.allclose(exact, x / 2)
    assert torch.allclose(diagonal, x / 2)


def structure(value):
    "Return the keys of nested dictionaries; the learning rates of a search may differ."
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
    expected = structure(RECORDS[0]["results"])
    assert structure(record["results"]) == expected
    keys = record["settings"].keys()
    expected_keys = RECORDS[0]["settings"].keys()
    assert keys == expected_keys
    size = (tmp_path / "record.json").stat().st_size
    assert size < 60_000
    for task in record["results"]["tasks"].values():
        # it diverged
        rates = set(task["lr"].values())
        assert rates == {0.05}
        for grid in task["grid"].values():
            assert grid["1e+30"] == 0
    judged = claims.outcomes("recall", record)
    assert len(judged) == 8
    for _, judgement in judged:
        assert judgement.n == 2
        assert judgement.verdict in WORDS


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
        call = (settings["lr"], settings["seeds"], settings["test_pairs"])
        calls.append(call)
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
    judged = (0.2, (0, 1), (2, 4))
    expected = (search + [judged]) * 2
    assert calls == expected
    summary = recall.summarize(config, Results(tmp_path))
    result = summary["tasks"]["once"]
    assert result["lr"] == {"gla": 0.2, "attention": 0.2}
    assert result["grid"]["gla"] == {"0.1": 0.4, "0.2": 0.6, "0.3": 0.5}
    single = replace(config, lrs=(0.3,), search_seeds=(), models=("gla",))  # no rate to choose
    planned = recall.jobs(single, Results(tmp_path))
    result = [(s["lr"], s["seeds"]) for s in planned]
    assert result == [(0.3, (0, 1))]
    # nothing is done
    summary = recall.summarize(single, Results(tmp_path))
    result = summary["tasks"]["once"]["recall"]
    assert result == {}


@pytest.mark.parametrize("record", RECORDS, ids=["laptop", "narrow"])
def test_recorded_learning_rates_lie_inside_their_grid(record):
    assert len(record["results"]["search_seeds"]) == 3
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in record["settings"].items()}
    assert RecallConfig(**settings)
    for result in record["results"]["tasks"].values():
        for model, grid in result["grid"].items():
            rates = sorted(grid, key=float)
            best = max(grid, key=grid.get)
            assert f"{result['lr'][model]:g}" == best
            assert best not in (rates[0], rates[-1])
            n_runs = len(result["recall"][model])
            n_seeds = len(record["settings"]["seeds"])
            assert n_runs == n_seeds == 8


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
