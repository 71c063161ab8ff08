"Test MQAR: distribution of the task, grades of all tests, and jobs that depend on results."

import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from longhorn_kit.lab.claims.stats import WORDS, judge
from longhorn_kit.lab.claims.subjects.mqar import (
    EXACT_PAIRS,
    MQAR_PAIRS,
    about_mqar,
    compare_mqar,
    compare_states,
)
from longhorn_kit.lab.experiments import mqar
from longhorn_kit.lab.experiments.mqar import (
    EXPERIMENT,
    PARTS,
    PRESETS,
    SIZES,
    LMConfig,
    SequenceLM,
    Stage,
    Task,
    answer,
    cells,
    draw,
    examine,
    gap_law,
    generator_of,
    jobs,
    look_inside,
    perturb_keys,
    place_guess,
    run_job,
    state_bytes,
    summarize,
    train,
)
from longhorn_kit.lab.run import run
from longhorn_kit.lab.train import fit
from longhorn_kit.records import read_record, to_plain

TINY = replace(
    PRESETS["laptop"],
    stages=(
        Stage(16, 2, 8, models=("longhorn", "attention")),
        Stage(16, 2, 8, 1, ("longhorn_exact",), 4),
    ),
    vocab=16,
    steps=5,
    warmup=1,
    tokens=64,
    test_streams=8,
    longest=32,
)


@st.composite
def tasks(draw):
    pairs = draw(st.integers(1, 9))
    longer = draw(st.integers(0, 20))
    words = draw(st.integers(0, 30))
    rewritten = draw(st.integers(0, pairs // 2))
    power_a = draw(st.sampled_from((0.01, 0.5, 1.0, 2.0)))
    return Task(
        2 * (2 * pairs - rewritten + longer), pairs, 2 * (pairs + 1 + words), rewritten, power_a
    )


@settings(max_examples=60, deadline=None)
@given(
    task=tasks(), seed=st.integers(0, 999), block=st.integers(0, 99), part=st.sampled_from(PARTS)
)
def test_every_question_is_answered_by_the_last_value_of_its_own_key(task, seed, block, part):
    streams = draw(task, 3, generator_of(seed, part, block))
    half = task.vocab // 2
    P = task.pairs
    rows = (t.tolist() for t in streams)
    for tokens, where, answers, first in zip(*rows):
        keys = tokens[0 : 2 * P : 2]
        values = tokens[1 : 2 * P : 2]
        last = dict(zip(keys, values))
        backwards = zip(keys[::-1], values[::-1])
        earliest = dict(backwards)
        assert len(tokens) == task.length
        for key, value in zip(keys, values):
            assert 0 < key < half <= value < task.vocab
        # every key is there; values are never shared
        assert len(last) == task.keys
        assert len(set(values)) == P
        result = sorted(tokens[at] for at in where)
        assert result == sorted(last)  # each key is queried once
        assert [last[tokens[at]] for at in where] == answers
        assert [earliest[tokens[at]] for at in where] == first
        for at in where:
            assert at >= 2 * P
            assert at % 2 == 0
        for at, token in enumerate(tokens):
            if at >= 2 * P and at not in where:
                assert token == 0
    for a, b in zip(streams, draw(task, 3, generator_of(seed, part, block))):
        assert torch.equal(a, b)


def test_which_tokens_a_stream_has_says_nothing_about_their_pairs():
    streams = draw(Task(32, 4, 20), 4800, generator_of(0, "train", 0))

    def rank(tokens):
        return tokens.argsort(1).argsort(1)

    first_keys = streams.tokens[:, 0:8:2]
    keys = rank(first_keys)
    first_values = streams.tokens[:, 1:8:2]
    values = rank(first_values)
    numbers = torch.arange(4).expand(4800, 4)
    for row, column in ((keys, values), (keys, numbers), (values, torch.arange(4).expand(4800, 4))):
        cells = (4 * row + column).flatten()
        counts = torch.bincount(cells, minlength=16)
        assert chisquare(counts.numpy()).pvalue > 1e-3


def test_gaps_follow_the_law_without_replacement_and_tell_a_little():
    for power, i in ((power, np.arange(1, 43)) for power in (0.01, 1.0, 1.7)):
        # with the names of the public code
        task = Task(96, 6, 64, power_a=power)
        weights = power * i ** (power - 1)
        law = weights / weights.sum()
        places = draw(task, 20000, generator_of(1, "train", 0)).where[:, 0]
        counts = np.bincount((places - 12) // 2, minlength=42)
        assert np.allclose(gap_law(task), law)
        assert chisquare(counts, 20000 * law).pvalue > 1e-3
        assert power == 1.0 or chisquare(counts).pvalue < 1e-6  # the test can fail
    task = Task(40, 4, 64)
    rng = np.random.default_rng(0)
    places = draw(task, 6000, generator_of(2, "train", 0)).where
    local = ((places - 8) // 2).numpy()
    reference = np.stack(
        [rng.choice(16, 4, replace=False, p=gap_law(task).numpy()) for _ in range(6000)]
    )
    drawn = []  # counts of NumPy's positions, by key
    for key in range(4):
        samples = (local, reference)
        counts = [np.bincount(rows[:, key], minlength=16) for rows in samples]
        assert chi2_contingency(counts).pvalue > 1e-3
        drawn.append(counts[1])
    most = np.max(drawn, 0)
    guess = most.sum() / 24000
    assert place_guess(task) == pytest.approx(guess, abs=0.015)
    # pairs in random order: the value of the last pair is right with probability 1 / K
    assert place_guess(Task(64, 8, 64, rewritten=4)) == 1 / 4


def test_blocks_never_share_a_seed_and_give_the_streams_of_the_recorded_jobs():
    seeds = {
        generator_of(seed, part, block).initial_seed()
        for seed in (0, 1, 500, 999)
        for part in PARTS
        for block in (0, 1, 2, 1000)
    }
    rows = {
        tuple(row)
        for part in PARTS
        for block in range(3)
        for row in draw(Task(32, 4, 64), 200, generator_of(0, part, block)).tokens.tolist()
    }
    # the CPU generator ignores higher bits
    assert len(seeds) == 4 * 2 * 4
    assert max(seeds) < 2**32
    assert len(rows) == 2 * 3 * 200
    # as in version 0.1
    recorded = draw(Task(16, 3, 16, rewritten=1), 2, generator_of(3, "train", 5))
    assert recorded.tokens.tolist() == [
        [7, 8, 2, 10, 2, 12, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0],
        [5, 8, 5, 10, 4, 9, 5, 0, 0, 0, 0, 0, 4, 0, 0, 0],
    ]
    answers = recorded.answers.tolist()
    assert answers == [[12, 8], [10, 9]]
    first = recorded.first.tolist()
    assert first == [[10, 8], [8, 9]]


@pytest.mark.parametrize(
    "make, bad, says",
    [
        *(
            (Task, *row)
            for row in [
                (dict(length=64, pairs=17), "length is 64; it must be from 68"),
                (dict(length=63), "length is 63; it must be an even number"),
                (dict(vocab=255), "vocab is 255; it must be an even number"),
                (dict(vocab=16), "vocab is 16; it must be from 18"),
                (dict(pairs=0), "pairs is 0"),
                (dict(pairs=2.5), "pairs is 2.5; it must be an integer"),
                (dict(rewritten=5), "rewritten is 5; it must be from 0 to 4"),
                (dict(power_a=0), "power_a is 0"),
                (dict(power_a=float("inf")), "power_a is inf"),
                (dict(power_a=float("nan")), "power_a is nan"),
            ]
        ),
        *(
            (
                lambda **bad: generator_of(**dict(seed=0, part="test", block=0) | bad),
                bad,
                "seeds go from 0 to 999",
            )
            for bad in (dict(seed=1000), dict(seed=-1), dict(block=2**31))
        ),
        *(
            (lambda **bad: EXPERIMENT.config("laptop", **bad), *row)
            for row in [
                (dict(vocab=31), "vocab is 31; it must be an even number"),
                (dict(lrs=()), "lrs are ()"),
                (dict(seeds=()), "seeds are ()"),
                (dict(stages=()), "stages are ()"),
                (dict(seeds=(0, 0)), "seeds are (0, 0); give at least one, and each once"),
                (dict(seeds=(0, 1000)), "seeds from 0 to 999"),
                (dict(lrs=(0.1, 2.0)), "between 0 and 1"),
                (dict(late_lrs=(2e-2,)), "each once"),
                (dict(tokens=0), "tokens is 0"),
                (dict(warmup=-1), "warmup is -1"),
                (dict(warmup=1000), "warmup is 1000; it must be from 0 to 999"),
                (dict(steps=0), "steps is 0"),
                (dict(test_streams=0), "test_streams is 0"),
                (dict(stages=(Stage(20, 4, 64, models=("lstm",)),)), "known mixers"),
            ]
        ),
    ],
)
def test_impossible_settings_are_one_clear_line(make, bad, says):
    message = rf"\A.*{re.escape(says)}.*\Z"
    with pytest.raises(ValueError, match=message):
        make(**bad)


def small(mixer="longhorn", **changes):
    task = changes.pop("task", Task(16, 2, 16))
    return (
        dict(
            task=asdict(task),
            mixer=mixer,
            d_model=8,
            layers=2,
            options={},
            lr=2.2e-3,
            seed=0,
            steps=5,
            warmup=1,
            batch_size=4,
            bf16=False,
            test_streams=16,
            longest=32,
            gpu=False,
        )
        | changes
    )


def model_of(settings):
    return train(settings | {"steps": 1, "warmup": 0})[0]


@pytest.mark.parametrize(
    "mixer", ["longhorn", "longhorn_exact", "mamba", "attention", "gla", "deltanet"]
)
def test_answers_are_the_logits_of_the_language_model_and_looking_inside_agrees(mixer):
    model = model_of(small(mixer))
    streams = draw(Task(16, 2, 16), 1, generator_of(0, "test", 3))
    said = answer(model, streams.tokens, streams.where)
    inside = look_inside(model, Task(16, 2, 16))
    expected = model(streams.tokens)[[[0]], streams.where]
    assert torch.allclose(said, expected, atol=1e-5)
    assert look_inside(model, Task(128, 2, 16)) is None
    probabilities = said.softmax(-1)[0]
    answers = streams.answers[0][:, None]
    right = probabilities.gather(1, answers)[:, 0]
    columns = streams.where[0] // 2 - 1  # query at the stream's position, after `where` tokens
    assert np.shape(inside["asked"]) == (2, 8)
    local = torch.tensor(inside["asked"])
    result = local[[0, 1], columns]
    assert torch.allclose(result, right, atol=1e-6)
    moved = inside["changes"]  # from zero to the largest state
    assert moved is None if mixer == "attention" else len(moved) == 16 and sum(moved) >= 1 - 1e-5


def test_a_training_is_the_plain_loop(monkeypatch):
    monkeypatch.setattr(mqar, "CHUNK", 3)
    torch.manual_seed(0)
    plain = SequenceLM(LMConfig(16, 8, 2, "longhorn"))
    losses = []
    groups = fit.parameter_groups(plain, 0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for step in range(6):
        tokens, where, answers, _ = (
            part[8 * (step % 3) :][:8]
            for part in draw(Task(16, 2, 16), 24, generator_of(0, "train", step // 3))
        )
        fit.set_lr(optimizer, fit.fit_lr(step, 6, 1, 2.2e-3))
        rows = torch.arange(8)[:, None]
        logits = plain(tokens)[rows, where]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        parameters = plain.parameters()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    model, steps, curve = train(small(batch_size=8, steps=6))
    assert steps == [3, 6]
    result = curve[:, 0]
    first = np.mean(losses[:3])
    last = np.mean(losses[3:])
    expected = [first, last]
    assert np.allclose(result, expected, atol=1e-4)
    pairs = zip(model.parameters(), plain.parameters())
    for parameter, reference in pairs:
        assert torch.allclose(parameter, reference, atol=1e-4)


def test_a_job_tests_on_other_streams_and_keeps_few_points(monkeypatch, tmp_path):
    drawn = []
    inner = mqar.generator_of
    monkeypatch.setattr(
        mqar,
        "generator_of",
        lambda seed, part, block, device="cpu": (
            drawn.append((seed, part, block)) or inner(seed, part, block, device)
        ),
    )
    monkeypatch.setattr(mqar, "CHUNK", 2)
    run_job(small(seed=3, steps=6), tmp_path)
    trained = [(3, "train", 0), (3, "train", 1), (3, "train", 2)]
    assert drawn[:3] == trained
    # tests, perturbations, inspection of states
    tested = {(3, "test", 0), (3, "test", 1), (0, "test", 3)}
    assert set(drawn[3:]) == tested
    model = model_of(small())
    accuracy = torch.arange(120) / 256
    monkeypatch.setattr(
        mqar,
        "train",
        lambda settings: (model, list(range(1, 121)), torch.stack([accuracy, accuracy], 1)),
    )
    row = run_job(small(), tmp_path)
    steps = list(range(6, 121, 6))
    assert row["curve"]["steps"] == steps
    assert len(row["curve"]["accuracy"]) == 20
    late = accuracy[-12:].mean().item()
    assert row["late_accuracy"] == pytest.approx(late)
    assert row["steps"] == 120


@pytest.mark.parametrize("named", ["answers", "first"])
def test_every_test_grades_what_a_known_model_answers(monkeypatch, named):
    perturbations = []

    def by_rule(model, tokens, where, perturb=None):
        "Table of keys and values; with `first`, it keeps the first value of a key."
        key_tokens = tokens[:, 0:16:2]
        keys = key_tokens.tolist()
        value_tokens = tokens[:, 1:16:2]
        values = value_tokens.tolist()
        table = []
        queries = tokens.gather(1, where).tolist()
        for k, v, questions in zip(keys, values, queries):
            pairs = dict(zip(k, v) if named == "answers" else zip(k[::-1], v[::-1]))
            table.append([pairs[key] for key in questions])
        change = torch.zeros(1, 1, 64)
        if perturb:
            ones = torch.ones(*tokens.shape, 64)
            change = perturb(ones, tokens) - 1
        lengths = change[:, 0:16:2].norm(dim=-1)
        size = lengths.mean().item() / 8
        n_keys = len(set(keys[0]))
        perturbations.append((tokens.shape[1], n_keys, size))
        one_hot = F.one_hot(torch.tensor(table), 64)
        return one_hot.float()

    monkeypatch.setattr(mqar, "answer", by_rule)
    settings = small(task=Task(64, 8, 64), test_streams=64, longest=300)
    model = SequenceLM(LMConfig(64, 8, 1))
    accuracy, tests = examine(model, settings).values()
    assert accuracy == 1
    assert tests["length"] == {"128": 1, "256": 1}
    assert list(tests["rewritten"]) == ["0", "2", "4"]
    for n in (0, 2, 4):  # n of 8 - n keys have two values
        stale = 0 if named == "answers" else n / (8 - n)
        rewritten = tests["rewritten"][str(n)]
        shares = list(rewritten.values())
        assert shares == pytest.approx([1 - stale, stale])
    result = [length for length, *_ in perturbations]
    expected = [64] * 7 + [128, 256] + [64] * 3
    assert result == expected
    expected = [8] * 10 + [6, 4]
    assert [keys for _, keys, _ in perturbations] == expected
    turns = mqar.COSINES
    turned = [(2 - 2 * (1 - c) ** 0.5) ** 0.5 for c in turns]
    expected = [0, *mqar.NOISES, *turned, *[0] * 5]
    changes = [change for *_, change in perturbations]
    assert np.allclose(changes, expected, atol=0.08)


@pytest.mark.slow
def test_training_learns_and_stops_when_the_task_is_solved(tmp_path):
    result = run_job(
        small(
            "deltanet", d_model=32, lr=1e-2, steps=400, warmup=20, batch_size=32, test_streams=200
        ),
        tmp_path,
    )
    assert result["accuracy"] > 0.9
    assert result["steps"] < 400
    assert result["curve"]["accuracy"][-1] >= 0.99
    much = result["tests"]["noise"]["1"]
    little = result["tests"]["noise"]["0.25"]
    assert much <= little + 0.05
    assert result == to_plain(result)


def test_perturbed_keys_are_as_noisy_and_as_alike_as_asked():
    streams = draw(Task(64, 8, 32), 50, generator_of(0, "test", 0))
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(50, 64, 256, generator=generator)
    is_key = (streams.tokens > 0) & (streams.tokens < 16)
    noise, alike = (
        perturb_keys(kind, amount, 32, generator_of(0, "test", 1))(h, streams.tokens)
        for kind, amount in (("noise", 0.5), ("cosine", 0.75))
    )
    others = noise[~is_key]
    assert torch.equal(others, h[~is_key])
    change = (noise - h).norm(dim=-1) / h.norm(dim=-1)
    mean = change[is_key].mean()
    assert abs(mean - 0.5) < 0.02
    cosines = torch.cosine_similarity(alike[:, 0:16:2, None], alike[:, None, 0:16:2], dim=-1)[
        :, ~torch.eye(8, dtype=torch.bool)
    ]
    others = alike[~is_key]
    assert torch.equal(others, h[~is_key])
    mean = cosines.mean()
    assert abs(mean - 0.75) < 0.02


def test_state_bytes_are_counted_by_hand():
    def count(mixer="longhorn", d_model=8, **options):
        return state_bytes(SequenceLM(LMConfig(16, d_model, 2, mixer, options)), 16)

    # N, and three inputs of the convolution
    expected = 4 * 2 * 16 * (16 + 3)
    assert count() == expected
    expected = 4 * 2 * 16 * (64 + 3)
    assert count(d_state=64) == expected
    expected = 4 * 2 * 16 * 2 * 8
    assert count("attention") == expected  # keys and values of 16 tokens
    expected = 4 * 2 * 4 * 8 * 16
    assert count("gla", 64) == expected  # four heads of 8 x 16


class Done(dict):
    "Return invented results."

    def get(self, settings):
        return super().get(str(settings))

    def add(self, settings, score, steps=5):
        self[str(settings)] = dict(
            settings=settings,
            late_accuracy=score,
            accuracy=score,
            steps=steps,
            curve={},
            tests={},
            parameters=1,
            state_bytes=1,
            inside=None,
        )


def test_jobs_follow_from_results():
    late_stages = TINY.stages[1:]
    one = replace(TINY, stages=late_stages, lrs=(0.1, 0.01), late_lrs=(0.001,), seeds=(0, 1, 2))
    done = Done()
    (cell,) = cells(one)

    def jobs_of_cell(config):
        planned = jobs(config, done)
        return [(job["lr"], job["seed"]) for job in planned]

    expected = [(0.1, 0), (0.01, 0), (0.001, 0)]
    assert jobs_of_cell(one) == expected
    best_alone = replace(one, all_lrs=False)
    assert jobs_of_cell(best_alone) == [(0.1, 0)]
    done.add(cell | {"lr": 0.1, "seed": 0}, 0.2)
    # the first did not solve the task
    planned = jobs_of_cell(replace(one, all_lrs=False))
    assert planned == [(0.1, 0), (0.01, 0)]
    done.add(cell | {"lr": 0.01, "seed": 0}, 0.7, steps=4)
    # the second solved it, so no other rate is needed
    planned = jobs_of_cell(replace(one, all_lrs=False))
    expected = [(0.1, 0), (0.01, 0), (0.01, 1), (0.01, 2)]
    assert planned == expected
    expected = [(0.1, 0), (0.01, 0), (0.01, 1), (0.01, 2), (0.001, 0)]
    assert jobs_of_cell(one) == expected
    for seed in (1, 2):
        done.add(cell | {"lr": 0.01, "seed": seed}, 0.5)
    for seed in one.seeds:  # a late rate decides as soon as it has all seeds
        done.add(cell | {"lr": 0.001, "seed": seed}, 0.8)
        (summary,) = summarize(one, done)["cells"]
        assert summary["by_lr"] == {"0.001": 0.8, "0.01": 0.7, "0.1": 0.2}
        late = (0.001, [0.8] * 3)
        early = (0.01, [0.7, 0.5, 0.5])
        result = (summary["lr"], summary["accuracy"])
        assert result == (late if seed == 2 else early)
    late = replace(TINY, late_lrs=(0.3,))
    rates = [job["lr"] for job in jobs(late, Done())]
    result = rates[-3:]
    assert result == [0.3] * 3  # after all other rates


def test_a_small_run_has_the_structure_of_the_record_and_can_be_judged(tmp_path):
    stages = (
        *(Stage(16, 2, d, models=("longhorn", "mamba", "longhorn_exact")) for d in (8, 16)),
        Stage(16, 2, 8, models=("longhorn",), d_state=32),
        TINY.stages[1],
    )
    record = run(
        EXPERIMENT,
        "laptop",
        tmp_path,
        workers=0,
        **vars(TINY) | dict(stages=stages, lrs=(1e-2,), steps=2),
    )

    def shape(cell):
        tests = cell["tests"]
        curves = cell["curves"]
        return (
            cell.keys(),
            tests.keys(),
            curves[0].keys(),
            cell["tests"]["rewritten"]["0"][0].keys(),
        )

    here = record["results"]
    folder = Path(__file__).parents[1] / "nbs/lab/results/mqar"
    laptop = read_record(folder / "laptop.json")
    gpu = read_record(folder / "gpu.json")
    for old in (laptop, gpu):
        expected = to_plain(PRESETS[old["scale"]])
        assert old["settings"] == expected
        assert old.keys() == record.keys()
        keys = old["results"].keys()
        assert keys == here.keys()
        assert all(shape(cell) == shape(here["cells"][0]) for cell in old["results"]["cells"])
    inside = here["cells"][0]["inside"]
    keys = inside.keys()
    expected_inside = laptop["results"]["cells"][0]["inside"]
    expected_keys = expected_inside.keys()
    assert keys == expected_keys
    assert record["missing"] == 0
    assert len(here["cells"]) == 8
    comparisons = compare_mqar(record, MQAR_PAIRS + EXACT_PAIRS) + compare_states(record)
    assert comparisons
    for judgement in judge(comparisons):
        assert judgement.verdict in WORDS
    assert "exact against diagonal" in about_mqar(record)


def test_every_scale_has_the_sizes_of_the_public_code_and_the_published_rates():
    for scale in ("gpu", "paper"):
        config = PRESETS[scale]
        planned = cells(PRESETS[scale])
        vocabularies = {cell["task"]["vocab"] for cell in planned}
        assert vocabularies == {8192}
        assert config.gpu
        result = len({str(cell) for cell in planned})
        assert result == len(planned)
        sizes = set()
        for cell in planned:
            task = cell["task"]
            sizes.add((task["length"], cell["task"]["pairs"], cell["d_model"]))
        expected = {(*size, d) for size in SIZES for d in (64, 128, 256, 512)}
        assert sizes >= expected
        rates = {*config.lrs, *config.late_lrs}
        assert rates == {1e-4, 4.6e-4, 2.2e-3, 1e-2}
        assert len(config.seeds) >= 3


@pytest.mark.cuda
@pytest.mark.parametrize(
    "mixer", ["longhorn", "longhorn_exact", "mamba", "gla", "deltanet", "attention"]
)
def test_a_graph_trains_as_the_loop_does(mixer, monkeypatch, recwarn):
    settings = small(
        mixer, task=Task(64, 8, 64), d_model=32, steps=100, batch_size=32, lr=1e-3, gpu=True
    )
    graph = train(settings)[2]
    monkeypatch.setattr(fit, "capture", lambda step: None)
    result = graph[:, 0]
    losses = train(settings)[2]
    expected = losses[:, 0]
    assert np.allclose(result, expected, rtol=2e-3)
    assert "no CUDA graph" not in str([warning.message for warning in recwarn])
