"MQAR: the task keeps its law, a table solves it and a bag of tokens does not, and a grid goes on where it was killed."
import json, os, shutil, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from longhorn_kit.lab import mqar, mqar_grid
from longhorn_kit.lab.mqar import (
    PARTS, Run, Task, Training, alike_keys, answer, bag_of_tokens, draw, examine, finish, gap_law, generator_of, learning_rates,
    look_inside, look_up, noisy_keys, place_guess, probe, repeat_gain, state_bytes, train_chunks, train_run,
)
from longhorn_kit.lab.mqar_grid import LAPTOP, Results, Stage, Turns, agenda, cells, key_of, missing, next_run, run, work
from longhorn_kit.records import read_json, read_jsonl
from longhorn_kit.lab.stats import WORDS

TINY = replace(LAPTOP, stages=(Stage(16, 2, 8, models=("longhorn", "attention")), Stage(16, 2, 8, 1, models=("longhorn_exact",), d_state=4)), vocab=16,
               steps=5, warmup=1, tokens=64, test_streams=8, longest=32, seeds=(0, 1))


@st.composite
def tasks(draw):
    pairs = draw(st.integers(1, 9))
    rewritten = draw(st.integers(0, pairs // 2))
    least = 2 * (2 * pairs - rewritten)
    return Task(least + 2 * draw(st.integers(0, 20)), pairs, 2 * (pairs + 1) + 2 * draw(st.integers(0, 30)), rewritten, draw(st.sampled_from((0.01, 0.5, 1.0, 2.0))))


@settings(max_examples=60, deadline=None)
@given(task=tasks(), seed=st.integers(0, 999), block=st.integers(0, 99), part=st.sampled_from(PARTS))
def test_every_question_is_answered_by_the_last_value_of_its_own_key(task, seed, block, part):
    streams = draw(task, 3, generator_of(seed, part, block))
    half, P = task.vocab // 2, task.pairs
    for tokens, where, answers, first in zip(*(t.tolist() for t in streams)):
        assert len(tokens) == task.length
        last, earliest = {}, {}
        for key, value in zip(tokens[0:2 * P:2], tokens[1:2 * P:2]):
            assert 0 < key < half <= value < task.vocab
            last[key] = value
            earliest.setdefault(key, value)
        assert len(last) == task.keys and len(set(tokens[1:2 * P:2])) == P # every key is there; values are never shared
        assert sorted(tokens[at] for at in where) == sorted(last)          # each is asked for once
        assert [last[tokens[at]] for at in where] == answers and [earliest[tokens[at]] for at in where] == first
        assert all(at >= 2 * P and at % 2 == 0 for at in where)
        assert all(token == 0 for at, token in enumerate(tokens) if at >= 2 * P and at not in where)
    assert torch.equal(look_up(streams.tokens, streams.where, P), streams.answers) # the table of pairs: 100 %
    again = draw(task, 3, generator_of(seed, part, block))
    assert all(torch.equal(a, b) for a, b in zip(streams, again))


def test_which_tokens_a_stream_has_says_nothing_about_their_pairs():
    from scipy.stats import chisquare
    streams = draw(Task(32, 4, 20), 4800, generator_of(0, "train", 0))
    rank = lambda tokens: tokens.argsort(1).argsort(1)
    keys, values = rank(streams.tokens[:, 0:8:2]), rank(streams.tokens[:, 1:8:2])
    for row, column in ((keys, values), (keys, torch.arange(4).expand(4800, 4)), (values, torch.arange(4).expand(4800, 4))):
        assert chisquare(torch.bincount((4 * row + column).flatten(), minlength=16).numpy()).pvalue > 1e-3
    named = bag_of_tokens(streams.tokens, streams.where, 20)
    assert ((named == streams.answers).sum(1) == 1).all() # so a bag of tokens is right once in P, whichever it names


def test_place_of_a_question_tells_a_little():
    # by the race of waiting times: the integral over the time at which a slot rings as number r, maximal over r
    law, t = gap_law(Task(20, 4, 32)), torch.linspace(-12, 12, 4001, dtype=torch.float64).exp()
    ranks = torch.zeros(len(law), 4, dtype=torch.float64)
    for slot, rate in enumerate(law):
        rung = torch.zeros(4, len(t), dtype=torch.float64)
        rung[0] = 1
        for other in law[torch.arange(len(law)) != slot]:
            p = 1 - (-other * t).exp()
            rung = rung * (1 - p) + torch.cat([torch.zeros_like(rung[:1]), rung[:-1]]) * p
        ranks[slot] = (rung * rate * (-rate * t).exp() * t).sum(1) * 24 / 4000
    assert abs(ranks.sum() - 4) < 1e-3
    assert place_guess(Task(20, 4, 32)) == pytest.approx(ranks.max(1).values.sum().item() / 4, abs=4e-3)
    assert place_guess(Task(64, 8, 64, rewritten=4)) == 1 / 4 # pairs in random order: the last one's value is right once in K


@pytest.mark.parametrize("power", [0.01, 1.0, 1.7])
def test_gaps_follow_the_law(power):
    from scipy.stats import chisquare
    task = Task(96, 6, 64, power=power)
    slots = (draw(task, 20000, generator_of(1, "train", 0)).where - 12) // 2
    i = np.arange(1, 43)
    law = power * i ** (power - 1) / (power * i ** (power - 1)).sum() # the stated law, in the words of the public code
    assert np.allclose(gap_law(task), law)
    assert chisquare(np.bincount(slots[:, 0], minlength=42), 20000 * law).pvalue > 1e-3
    uniform = np.full(42, 20000 / 42)
    assert power == 1.0 or chisquare(np.bincount(slots[:, 0], minlength=42), uniform).pvalue < 1e-6 # the test can fail


def test_later_gaps_are_drawn_without_replacement_as_numpy_does():
    from scipy.stats import chi2_contingency
    task = Task(40, 4, 64)
    ours = ((draw(task, 6000, generator_of(2, "train", 0)).where - 8) // 2).numpy()
    rng = np.random.default_rng(0)
    theirs = np.stack([rng.choice(16, 4, replace=False, p=gap_law(task).numpy()) for _ in range(6000)])
    for place in range(4):
        assert chi2_contingency([np.bincount(rows[:, place], minlength=16) for rows in (ours, theirs)]).pvalue > 1e-3


def test_no_two_blocks_share_a_seed():
    seeds = [generator_of(seed, part, block).initial_seed() for seed in (0, 1, 500, 999) for part in PARTS for block in (0, 1, 2, 1000)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**32 # the CPU generator ignores higher bits
    task = Task(32, 4, 64)
    rows = [tuple(row) for part in PARTS for block in range(3) for row in draw(task, 200, generator_of(0, part, block)).tokens.tolist()]
    assert len(set(rows)) == len(rows)
    for bad in (dict(seed=1000), dict(seed=-1), dict(block=2**31)):
        with pytest.raises(ValueError, match="expected"):
            generator_of(**dict(seed=0, part="test", block=0) | bad)


@pytest.mark.parametrize("bad, says", [
    (dict(length=64, pairs=17), "length is 64; 17 pairs and 17 questions need at least 68 tokens"),
    (dict(length=63), "length is 63; expected an even number"),
    (dict(vocab=255), "vocab is 255; expected an even number"),
    (dict(vocab=16), "vocab is 16; 8 pairs need at least 18"),
    (dict(pairs=0), "pairs is 0; expected an integer of at least 1"),
    (dict(pairs=2.5), "pairs is 2.5"),
    (dict(rewritten=5), "rewritten is 5; at most half of the 8 pairs can be"),
    (dict(power=0), "power is 0; expected a number above 0"), (dict(power=float("inf")), "power is inf"), (dict(power=float("nan")), "power is nan"),
])
def test_impossible_tasks_are_one_clear_line(bad, says):
    with pytest.raises(ValueError) as caught:
        Task(**bad)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bad, says", [
    (dict(steps=0), "steps is 0"), (dict(warmup=2000), "warmup is 2000; expected 0 to steps - 1 = 1999"), (dict(lr=0), "lr is 0"),
    (dict(mixer="lstm"), "known mixers"), (dict(options={"d_stat": 3}), "no option 'd_stat'"), (dict(test_streams=0), "test_streams is 0"),
    (dict(clip=-1), "clip is -1; it must be from 0 to inf"), (dict(stop_at=float("nan")), "stop_at is nan"), (dict(weight_decay=-5), "weight_decay is -5"),
    (dict(seed=1000), "seed is 1000; it must be from 0 to 999")])
def test_impossible_runs_are_one_clear_line(bad, says):
    with pytest.raises(ValueError) as caught:
        Run(**bad)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def small(mixer="longhorn", **changes):
    return Run(**dict(task=Task(16, 2, 16), mixer=mixer, d_model=8, steps=5, warmup=1, batch_size=4, chunk=2, test_streams=16) | changes)


@pytest.mark.parametrize("mixer", ["longhorn", "longhorn_exact", "mamba", "attention", "gla", "deltanet"])
def test_answers_are_the_logits_of_the_language_model(mixer):
    training = Training(small(mixer))
    streams = draw(training.run.task, 3, generator_of(0, "test", 0))
    everywhere = training.model(streams.tokens)
    rows = torch.arange(3)[:, None]
    assert torch.allclose(answer(training.model, streams.tokens, streams.where), everywhere[rows, streams.where], atol=1e-5)


def test_a_training_is_the_plain_loop():
    run = small(batch_size=8, steps=6, chunk=3, weight_decay=0.0, clip=1e9, stop_at=2.0)
    training = Training(run)
    plain = Training(run).model
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    losses = []
    for step in range(6):
        block = draw(run.task, 24, generator_of(0, "train", step // 3))
        tokens, where, answers, _ = (part[8 * (step % 3):][:8] for part in block)
        optimizer.param_groups[0]["lr"] = mqar.learning_rates(run)[step].item()
        logits = plain(tokens)[torch.arange(8)[:, None], where]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    curve = finish(train_chunks(training))
    assert curve["steps"] == [3, 6] and np.allclose(curve["loss"], [np.mean(losses[:3]), np.mean(losses[3:])], atol=1e-4)
    for ours, theirs in zip(training.model.parameters(), plain.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_learning_rates_are_those_written_out():
    rates = learning_rates(small(lr=0.1, steps=8, warmup=4))
    assert np.allclose(rates, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1 * (0.1 + 0.45 * (1 + 2**-0.5)), 0.055, 0.1 * (0.1 + 0.45 * (1 - 2**-0.5))])


def test_streams_of_training_and_testing_are_never_the_same(monkeypatch):
    drawn, inner = [], mqar.generator_of
    monkeypatch.setattr(mqar, "generator_of", lambda seed, part, block, device="cpu": drawn.append((seed, part, block)) or inner(seed, part, block, device))
    finish(train_run(small(seed=3, steps=6, chunk=2), longest=32))
    assert drawn[:3] == [(3, "train", 0), (3, "train", 1), (3, "train", 2)] and {part for _, part, _ in drawn[3:]} == {"test"}
    assert set(drawn[3:]) == {(3, "test", 0), (3, "test", 1), (3, "test", 2), (0, "test", 3)} # tests, disturbances, probe, a look inside


@pytest.mark.parametrize("named", ["answers", "first"])
def test_every_test_grades_what_a_known_model_answers(monkeypatch, named):
    task, vocab, seen = Task(64, 8, 64), 64, []
    def known(model, tokens, where, disturb=None): # a table; the other one keeps the first value of a key
        keys, values = tokens[:, 0:16:2], tokens[:, 1:16:2]
        order = slice(None) if named == "answers" else slice(None, None, -1)
        kept = [dict(zip(k[order].tolist(), v[order].tolist())) for k, v in zip(keys.numpy(), values.numpy())]
        table = torch.tensor([[pairs[key] for key in asked] for pairs, asked in zip(kept, tokens.gather(1, where).tolist())])
        change = disturb(torch.ones(*tokens.shape, 64)) - 1 if disturb else torch.zeros(1, 1, 64)
        seen.append((tokens.shape[1], len(set(keys[0].tolist())), change[:, 0:16:2].norm(dim=-1).mean().item() / 8))
        return torch.nn.functional.one_hot(table, vocab).float()
    monkeypatch.setattr(mqar, "answer", known)
    run = small(task=task, test_streams=64)
    found = mqar.to_plain(examine(Training(run).model, run, longest=300))
    assert (found["accuracy"], found["stale"]) == (1, 0) and found["length"] == {"128": 1, "256": 1} and list(found["rewritten"]) == ["0", "2", "4"]
    old = {n: 0 if named == "answers" else n / (8 - n) for n in (0, 2, 4)} # n of 8 - n keys have two values
    assert [found["rewritten"][str(n)] for n in old] == [{"right": pytest.approx(1 - share), "stale": pytest.approx(share)} for share in old.values()]
    assert [length for length, *_ in seen] == [64] * 7 + [128, 256] + [64] * 3 and [keys for _, keys, _ in seen] == [8] * 10 + [6, 4]
    apart = [(2 - 2 * (1 - c) ** 0.5) ** 0.5 for c in mqar.COSINES]
    assert np.allclose([change for *_, change in seen], [0, *mqar.NOISES, *apart, 0, 0, 0, 0, 0], atol=0.08)


def test_probe_reads_the_last_layer_where_the_values_stand():
    run, inputs = small("longhorn_exact", options={"d_state": 4}), []
    model = Training(run).model
    found = probe(model, run, streams=5)
    mixer = model.blocks[-1].mixer
    hook = mixer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.no_grad():
        model(draw(run.task, 5, generator_of(run.seed, "test", 2)).tokens)
        k, beta, eps = mixer.rates(inputs[0])
    hook.remove()
    k, beta, eps = (part[:, [1, 3]] for part in (k, beta, eps)) # two pairs: values are tokens 1 and 3
    squared = k.square().sum(-1)
    assert found["key_length2"] == pytest.approx(squared.mean().item(), rel=1e-5) and found["beta"] == pytest.approx(beta.mean().item(), rel=1e-5)
    assert found["gain"]["1"] == pytest.approx((eps * squared[..., None]).mean().item(), rel=1e-5)
    assert found["coordinates_used"] == pytest.approx((squared**2 / (k**4).sum(-1)).mean().item(), rel=1e-5)


def test_training_learns_and_stops_when_the_task_is_solved():
    run = small("deltanet", task=Task(16, 2, 16), d_model=32, lr=1e-2, steps=400, warmup=20, batch_size=32, chunk=25, test_streams=200)
    result = finish(train_run(run, longest=32))
    assert result["accuracy"] > 0.9 and result["steps"] < 400 and result["curve"]["accuracy"][-1] >= 0.99
    assert list(result["length"]) == ["32"] and result["settings"] == run.settings()
    assert result["noise"]["1"] <= result["noise"]["0.25"] + 0.05 and set(result["rewritten"]) == {"0", "1"}


def test_disturbed_keys_are_as_noisy_and_as_alike_as_asked():
    task = Task(64, 8, 32)
    streams = draw(task, 50, generator_of(0, "test", 0))
    h = torch.randn(50, 64, 256, generator=torch.Generator().manual_seed(0))
    is_key = (streams.tokens > 0) & (streams.tokens < 16)
    noise = noisy_keys(0.5, 32)(h, streams, generator_of(0, "test", 1)) - h
    assert not noise[~is_key].any() and abs((noise.norm(dim=-1) / h.norm(dim=-1))[is_key].mean() - 0.5) < 0.02
    alike = alike_keys(0.75, 32)(h, streams, generator_of(0, "test", 1))
    keys = torch.nn.functional.normalize(alike[:, 0:16:2], dim=-1)
    cosines = (keys @ keys.mT)[:, ~torch.eye(8, dtype=torch.bool)]
    assert torch.equal(alike[~is_key], h[~is_key]) and abs(cosines.mean() - 0.75) < 0.02


@pytest.mark.parametrize("form", ["exact", "diagonal"])
def test_gain_of_repeats_is_that_of_the_update(form):
    from longhorn_kit.theory.closed_forms import diagonal_step, exact_step
    from longhorn_kit.theory.exact_vs_diagonal import run_stream
    torch.manual_seed(0)
    k, x, beta = torch.randn(1, 1, 5, dtype=torch.float64), torch.randn(1, 1, 3, dtype=torch.float64), torch.rand(1, 1, 3, dtype=torch.float64)
    states = run_stream({"exact": exact_step, "diagonal": diagonal_step}[form], k.expand(1, 400, 5), x.expand(1, 400, 3), beta.expand(1, 400, 3))
    eps = beta / (1 + beta * k.square().sum(-1, keepdim=True))
    for times in (1, 3, 400):
        direct = ((states[0, times] @ k[0, 0]) / x[0, 0]).mean().item()
        assert repeat_gain(form, k, eps, times) == pytest.approx(direct)
    assert repeat_gain(form, k, eps, 10**6) == pytest.approx(1 if form == "exact" else 5) # x, or N x


@pytest.mark.parametrize("mixer", ["longhorn", "deltanet", "attention"])
def test_looking_inside_agrees_with_the_model(mixer):
    run = small(mixer)
    model = Training(run).model
    inside = look_inside(model, run)
    streams = draw(run.task, 1, generator_of(0, "test", 3))
    said = answer(model, streams.tokens, streams.where).softmax(-1)[0]
    assert inside["tokens"] == streams.tokens[0].tolist() and np.shape(inside["asked"]) == (2, 8)
    for key in range(2): # asked where the stream asks it: after `where` tokens
        column = streams.where[0, key].item() // 2 - 1
        assert inside["asked"][key][column] == pytest.approx(said[key, streams.answers[0, key]].item(), abs=1e-6)
    if mixer == "attention":
        assert inside["changes"] is None
    else: # a whole read moves the state from zero to where prefill ends
        _, cache = model.prefill(streams.tokens)
        assert len(inside["changes"]) == 16 and sum(inside["changes"]) >= 1 - 1e-5 and cache[-1].S.norm() > 0


def test_state_bytes_are_counted_by_hand():
    inner, layers = 16, 2
    assert state_bytes(small()) == 4 * layers * inner * (16 + 3)                      # N = 16, and three inputs of the convolution
    assert state_bytes(small(options={"d_state": 64})) == 4 * layers * inner * (64 + 3)
    assert state_bytes(small("attention")) == 4 * layers * 16 * 2 * 8                 # keys and values of 16 tokens
    assert state_bytes(small("gla", d_model=64)) == 4 * layers * 4 * 8 * 16           # four heads of 8 x 16


# The grid

def fake(run, score, steps=None):
    return {"settings": run.settings(), "curve": {"steps": [1], "accuracy": [score]}, "accuracy": score,
            "late_accuracy": score, "steps": steps or run.steps}


def test_a_kept_run_has_few_points_and_the_mean_of_all_late_ones(tmp_path, monkeypatch):
    grid, accuracy = replace(TINY, stages=TINY.stages[1:], lrs=(0.1,), seeds=(0,)), [i / 256 for i in range(120)]
    def one(run, *rest):
        yield
        return fake(run, 0.5) | {"curve": {"steps": list(range(1, 121)), "loss": accuracy, "accuracy": accuracy}}
    monkeypatch.setattr(mqar_grid, "one_run", one)
    work(grid, tmp_path)
    (row,) = read_jsonl(tmp_path / "runs.jsonl")
    assert row["curve"]["steps"] == list(range(6, 121, 6)) and set(row["curve"]) == {"steps", "accuracy"}
    assert row["late_accuracy"] == pytest.approx(np.mean(accuracy[-12:]), abs=1e-4)
    assert mqar_grid.thin(row["curve"]) == row["curve"]


def test_the_committed_runs_make_the_committed_record(tmp_path):
    folder = Path(__file__).parent.parent / "nbs" / "lab" / "results" / "mqar"
    shutil.copytree(folder / "gpu", tmp_path / "gpu")
    assert max(len(row["curve"]["steps"]) for row in read_jsonl(tmp_path / "gpu" / "runs.jsonl")) <= 20
    record, committed = mqar_grid.record_of("gpu", mqar_grid.GPU, tmp_path / "gpu"), read_json(folder / "gpu.json")
    assert record["results"] == committed["results"]


def test_other_seeds_run_only_with_the_best_learning_rate(tmp_path):
    grid = replace(TINY, lrs=(0.1, 0.01), late_lrs=(0.001,), seeds=(0, 1, 2))
    results, first = Results(tmp_path), cells(grid)[0]
    todo = missing(first, grid.lrs, grid, results)
    assert [(run.lr, run.seed) for run in todo] == [(0.1, 0), (0.01, 0)]
    for tried, score in zip(todo, (0.2, 0.7)):
        results.add(fake(tried, score))
    todo = missing(first, grid.lrs, grid, results.refresh())
    assert [(run.lr, run.seed) for run in todo] == [(0.01, 1), (0.01, 2)]
    for tried in todo:
        results.add(fake(tried, 0.5))
    assert missing(first, grid.lrs, grid, results.refresh()) == []
    late = (*grid.lrs, *grid.late_lrs)
    assert [run.lr for run in missing(first, late, grid, results)] == [0.001]
    assert agenda(grid)[-1] == (cells(grid)[-1], late)


def test_no_learning_rate_is_tried_after_one_that_solves_the_task(tmp_path):
    grid = replace(TINY, lrs=(0.1, 0.01, 0.5), late_lrs=(0.001,), seeds=(0, 1), all_lrs=False)
    results, first = Results(tmp_path), cells(grid)[0]
    todo = lambda lrs=grid.lrs: [(run.lr, run.seed) for run in missing(first, lrs, grid, results.refresh())]
    assert todo() == [(0.1, 0)]               # one after another: the first may be enough
    results.add(fake(first, 0.2))
    assert todo() == [(0.01, 0)]
    results.add(fake(replace(first, lr=0.01), 0.99, steps=first.steps - 1))
    assert todo() == todo((*grid.lrs, *grid.late_lrs)) == [(0.01, 1)]
    assert missing(first, grid.lrs, replace(grid, all_lrs=True), results)[0].lr == 0.5


def test_a_late_learning_rate_decides_a_cell_only_with_all_its_seeds(tmp_path):
    grid = replace(TINY, lrs=(0.1,), late_lrs=(0.001,), seeds=(0, 1, 2))
    results, first, tests = Results(tmp_path), cells(grid)[0], dict.fromkeys(("noise", "cosine", "length", "rewritten"), {})
    full = lambda run, score: fake(run, score) | tests | {"stale": 0, "seconds": 1, "parameters": 1, "state_bytes": 1}
    for seed, score in enumerate((0.5, 0.6, 0.7)):
        results.add(full(replace(first, seed=seed), score))
    for seed in grid.seeds:
        results.add(full(replace(first, lr=0.001, seed=seed), 0.8))
        found = mqar_grid.best_of_cell(first, grid, results.refresh())
        assert found["by_lr"] == {"0.001": 0.8, "0.1": 0.5} # what was tried is shown at once
        assert (found["lr"], found["accuracy"]) == ((0.001, [0.8] * 3) if seed == 2 else (0.1, [0.5, 0.6, 0.7]))


@pytest.mark.parametrize("bad, says", [
    (dict(vocab=31), "vocab is 31; expected an even number"), (dict(lrs=()), "lrs is empty"), (dict(seeds=()), "seeds is empty"),
    (dict(stages=()), "stages is empty"), (dict(seeds=(0, 0)), "seeds are 0, 0; expected each once"), (dict(seeds=(0, 1000)), "seed is 1000"),
    (dict(lrs=(0.1, 2.0)), "lr is 2.0"), (dict(late_lrs=(2e-2,)), "learning rates are 0.02, 0.0022, 0.02; expected each once"),
    (dict(tokens=0), "tokens is 0; expected at least 1"), (dict(warmup=-1), "warmup is -1")])
def test_impossible_grids_are_one_clear_line(bad, says):
    with pytest.raises(ValueError) as caught:
        replace(LAPTOP, **bad)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bad, says", [(dict(workers=-1), "workers is -1; expected at least 0"), (dict(lanes=0), "lanes is 0"), (dict(minutes=float("nan")), "minutes is nan")])
def test_impossible_ways_to_run_are_one_clear_line(tmp_path, bad, says):
    with pytest.raises(ValueError, match=says):
        run("laptop", tmp_path / "x", TINY, **bad)
    assert not (tmp_path / "x").exists()


def slow_fakes(monkeypatch, steps):
    "Runs that only give way; the most that were under way together."
    going, most = [], []
    def one(run, *rest):
        going.append(run)
        for _ in range(steps):
            most.append(len(going))
            time.sleep(0.01)
            yield
        going.remove(run)
        return fake(run, 0.5)
    monkeypatch.setattr(mqar_grid, "one_run", one)
    monkeypatch.setattr(mqar_grid, "WAIT", 0.05)
    return most


def test_lanes_wait_for_a_learning_rate_to_be_chosen(tmp_path, monkeypatch):
    grid = replace(TINY, stages=TINY.stages[1:], lrs=(0.1,), seeds=(0, 1, 2))
    most = slow_fakes(monkeypatch, 20)
    work(grid, tmp_path, lanes=3)
    assert len(read_jsonl(tmp_path / "runs.jsonl")) == 3 and max(most) == 2 # the other two seeds side by side


def test_a_process_waits_for_another_without_burning_a_core(tmp_path, monkeypatch):
    grid = replace(TINY, stages=TINY.stages[1:], lrs=(0.1,), seeds=(0, 1))
    code = ("import sys, time; from dataclasses import replace; from longhorn_kit.lab.mqar_grid import *; from tests.test_mqar import TINY\n"
            "grid = replace(TINY, stages=TINY.stages[1:], lrs=(0.1,), seeds=(0, 1)); turns = Turns(sys.argv[1])\n"
            "print(next_run(grid, Results(sys.argv[1]), turns).seed, flush=True); time.sleep(3)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "0\n"
        slow_fakes(monkeypatch, 1)
        begun, computed = time.monotonic(), time.process_time()
        work(grid, tmp_path, lanes=2) # the other process leaves without a result: its run is free again
        waited = time.monotonic() - begun
        assert waited > 2 and time.process_time() - computed < waited / 3
    finally:
        process.kill()
        process.wait()
    assert [row["settings"]["seed"] for row in read_jsonl(tmp_path / "runs.jsonl")] == [0, 1]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    code = ("import sys; from dataclasses import replace; from longhorn_kit.lab import mqar_grid; from tests.test_mqar import TINY\n"
            "mqar_grid.run('laptop', sys.argv[1], replace(TINY, steps=10**6), workers=2)")
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL)
    def at_work(): # processes that have the file of turns open
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if int(place.name) != parent.pid and any(os.readlink(fd) == str(tmp_path / ".turns") for fd in (place / "fd").iterdir()):
                    found.append(int(place.name))
            except OSError: # ended, or not ours
                pass
        return found
    try:
        deadline = time.monotonic() + 60
        while len(workers := at_work()) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while (left := at_work()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(workers) == 2 and not left
    finally:
        parent.kill()
        for pid in at_work():
            os.kill(pid, signal.SIGKILL)


def test_a_grid_with_failed_runs_says_so_and_is_unfinished(tmp_path, monkeypatch, capsys):
    def broken(run, *rest):
        raise RuntimeError("no room")
        yield
    monkeypatch.setattr(mqar_grid, "one_run", broken)
    record = run("laptop", tmp_path, replace(TINY, lrs=(0.1,)), workers=0)
    assert "mqar: 3 runs failed (failed.jsonl), 3 missing; the same command goes on\n" in capsys.readouterr().err
    assert all(found.verdict == "not run" for _, found in mqar_grid.claims.judged("mqar", record)) and (tmp_path / "partial.json").exists()


def test_a_run_is_taken_once_and_comes_back_when_its_process_dies(tmp_path):
    code = ("import sys, time; from longhorn_kit.lab.mqar_grid import *; from tests.test_mqar import TINY\n"
            "turns = Turns(sys.argv[1]); run = next_run(TINY, Results(sys.argv[1]), turns); print(run.mixer, run.lr, flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
    try:
        theirs = process.stdout.readline().split()
        results, turns = Results(tmp_path), Turns(tmp_path)
        mine = [next_run(TINY, results, turns) for _ in range(6)]
        assert mine[5] is None and len({key_of(run.settings()) for run in mine[:5]}) == 5 # 3 cells with 2 learning rates; one is theirs
        assert theirs not in [[run.mixer, str(run.lr)] for run in mine[:5]]
    finally:
        process.kill()
        process.wait()
    assert [next_run(TINY, results, turns).mixer] == theirs[:1]


def test_killed_grid_goes_on_and_gives_the_same_numbers(tmp_path):
    code = ("import sys, time; from longhorn_kit.lab import mqar_grid; from tests.test_mqar import TINY\n"
            "inner = mqar_grid.one_run\n"
            "def slow(*args):\n    time.sleep(0.3); result = yield from inner(*args); return result\n"
            "mqar_grid.one_run = slow; mqar_grid.run('laptop', sys.argv[1], TINY, workers=0)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], cwd=Path(__file__).parent.parent,
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    file, deadline = tmp_path / "a" / "runs.jsonl", time.monotonic() + 60
    while len(read_jsonl(file)) < 4 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = file.read_bytes()
    assert 4 <= len(read_jsonl(file)) < 9 and not (tmp_path / "a" / "record.json").exists()
    resumed, fresh = (run("laptop", tmp_path / name, TINY, workers=0) for name in "ab")
    assert file.read_bytes().startswith(kept) and len(read_jsonl(file)) == 9 # 3 cells: 2 learning rates, 1 more seed
    without_time = lambda record: [{k: v for k, v in cell.items() if k != "seconds"} for cell in record["results"]["cells"]]
    assert without_time(resumed) == without_time(fresh) and len(resumed["results"]["cells"]) == 3
    assert read_json(tmp_path / "a" / "record.json") == resumed


def test_two_workers_share_a_grid(tmp_path):
    grid = replace(TINY, stages=TINY.stages[:1], seeds=(0,))
    record = run("laptop", tmp_path, grid, workers=2)
    rows = read_jsonl(tmp_path / "runs.jsonl")
    assert len(rows) == 4 == len({key_of(row["settings"]) for row in rows}) and len(record["results"]["cells"]) == 2
    assert {row["commit"] for row in rows} == {mqar_grid.commit_of_kit()} and record["results"]["commits"] == [str(mqar_grid.commit_of_kit())]
    again = run("laptop", tmp_path, grid, workers=0)
    assert read_jsonl(tmp_path / "runs.jsonl") == rows and again["results"]["cells"] == record["results"]["cells"]


def test_out_of_time_leaves_a_partial_record(tmp_path):
    record = run("laptop", tmp_path, TINY, workers=0, minutes=0)
    assert record["results"]["cells"] == [] and (tmp_path / "partial.json").exists() and not (tmp_path / "record.json").exists()


def test_a_run_that_fails_is_noted_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    inner = mqar_grid.one_run
    def broken(run, *rest):
        if run.mixer == "attention":
            raise RuntimeError("no room\nfor this")
        result = yield from inner(run, *rest)
        return result
    monkeypatch.setattr(mqar_grid, "one_run", broken)
    work(TINY, tmp_path)
    assert {row["settings"]["mixer"] for row in read_jsonl(tmp_path / "runs.jsonl")} == {"longhorn", "longhorn_exact"}
    noted = read_jsonl(tmp_path / "failed.jsonl")
    assert len(noted) == 2 and all(row["error"] == "RuntimeError: no room for this" for row in noted) and "no room" in capsys.readouterr().err


def test_larger_scales_need_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="mqar at scale gpu needs a GPU, and there is none; scale laptop does not"):
        run("gpu", tmp_path / "x")
    with pytest.raises(ValueError, match="unknown scale 'moon' for mqar; there are: laptop, gpu, paper"):
        run("moon", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("scale", mqar_grid.SCALES)
def test_every_run_of_every_scale_can_be_built(scale):
    grid = mqar_grid.settings_for(scale)
    known = [key_of(run.settings()) for run in cells(grid)]
    assert len(known) == len(set(known))
    assert mqar_grid.grid_from(json.loads(json.dumps(mqar_grid.to_plain(mqar_grid.asdict(grid))))) == grid
    if scale != "laptop":
        assert {run.task.vocab for run in cells(grid)} == {8192}
        assert {(run.task.length, run.task.pairs, run.d_model) for run in cells(grid)} >= {(*size, d) for size in mqar_grid.SIZES for d in (64, 128, 256, 512)}
        assert {*grid.lrs, *grid.late_lrs} == {1e-4, 4.6e-4, 2.2e-3, 1e-2} and len(grid.seeds) >= 3


@pytest.mark.cuda
@pytest.mark.parametrize("mixer", ["longhorn", "longhorn_exact", "mamba", "gla", "deltanet", "attention"])
def test_a_graph_trains_as_the_loop_does(mixer):
    run = small(mixer, task=Task(64, 8, 64), d_model=32, steps=40, chunk=20, batch_size=32, lr=1e-3)
    plain = finish(train_chunks(Training(run, "cuda")))
    with torch.cuda.stream(torch.cuda.Stream()):
        training = Training(run, "cuda")
        training.refill()
        step = mqar_grid.graphed(training)
        training.chunks = 0
        replayed = finish(train_chunks(training, step))
    assert plain["steps"] == replayed["steps"] and np.allclose(plain["loss"], replayed["loss"], rtol=2e-3)


def test_record_can_be_drawn_and_judged(tmp_path):
    from longhorn_kit.lab import claims
    import matplotlib.pyplot as plt
    grid = replace(TINY, stages=tuple(Stage(16, 2, d, models=("longhorn", "mamba", "gla", "longhorn_exact")) for d in (8, 16)) + (
        Stage(16, 2, 8, models=("longhorn",), d_state=32), Stage(16, 2, 8, 1, models=("longhorn",))), steps=2, seeds=(0, 1), lrs=(1e-2,))
    record = run("laptop", tmp_path, grid, workers=0)
    drawn = mqar_grid.figures(record)
    assert len(drawn) == 6 and all(caption for _, caption in drawn)
    for title, header, rows in mqar_grid.tables(record):
        assert rows and all(len(row) == len(header) for row in rows)
    for fig, _ in drawn:
        plt.close(fig)
    judged = claims.judged("mqar", record)
    assert judged and all(found.verdict in WORDS for _, found in judged)
    only = replace(grid, stages=grid.stages[:1])
    for fig, _ in mqar_grid.figures(run("laptop", tmp_path, only, workers=0)): # one width: dots
        plt.close(fig)
    assert mqar_grid.figures(record | {"results": record["results"] | {"cells": []}}) == []


def test_recorded_grid_is_what_its_runs_say():
    folder = Path(__file__).parent.parent / "nbs" / "lab" / "results" / "mqar"
    record = read_json(folder / "gpu.json")
    again = mqar_grid.record_of("gpu", mqar_grid.GPU, folder / "gpu")
    for part in ("settings", "results", "environment"):
        assert json.loads(json.dumps(again[part])) == record[part]
