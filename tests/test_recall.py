import os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import pytest
import torch
from hypothesis import given, settings, strategies as st
from longhorn_kit.lab import recall
from longhorn_kit.lab.recall import (
    MEMORIES, RecallConfig, RecallModel, draw_streams, figures, grade, guess_level, late_recall, look_up, run, run_model, tables, train_recall,
)
from longhorn_kit.lab import claims
from longhorn_kit.records import read_json
from longhorn_kit.lab.stats import WORDS

TINY = RecallConfig(pairs=4, key_size=4, values=6, d_state=4, width=6, batch_size=4, steps=6, warmup=1, lrs=(0.05,), seeds=(0, 1),
                    search_seeds=(100,),
                    test_streams=8, test_pairs=(2, 4), points=3)


@settings(max_examples=20, deadline=None)
@given(task=st.sampled_from(sorted(recall.WRITES)), half=st.integers(1, 9), size=st.integers(2, 5), values=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_question_has_its_answer_in_the_stream(task, half, size, values, seed):
    config = replace(TINY, key_size=size, values=values)
    pairs = 2 * half
    keys, symbols, answers = draw_streams(task, 3, pairs, config, torch.Generator().manual_seed(seed))
    for row in range(3):
        memory, shown = {}, []
        for key, symbol in zip(keys[row, :pairs].tolist(), symbols[row, :pairs].tolist()):
            memory[tuple(key)] = symbol
            shown.append(tuple(key))
        asked = [tuple(key) for key in keys[row, pairs:].tolist()]
        assert [memory[key] for key in asked] == answers[row].tolist()
        assert set(symbols[row, pairs:].tolist()) == {values} and symbols[row, :pairs].max() < values
        assert sorted(asked) == sorted(memory) and all(shown.count(key) == recall.WRITES[task] for key in memory)


@pytest.mark.parametrize("task", sorted(recall.WRITES))
def test_a_table_answers_everything_and_blind_answers_are_at_chance(task):
    config = replace(TINY, values=16)
    keys, symbols, answers = draw_streams(task, 4000, 8, config, torch.Generator().manual_seed(3))
    assert (look_up(keys, symbols, 16) == answers).all()
    blind = torch.randint(16, answers.shape, generator=torch.Generator().manual_seed(4))
    assert abs((blind == answers).float().mean().item() - 1 / 16) < 0.01
    assert 1 / 16 < guess_level(task, 8, config) < 0.4


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_every_model_starts_at_ln_v_and_reads_only_the_past(name):
    model = RecallModel(name, TINY)
    keys, symbols, answers = (part[None].repeat(2, *[1] * part.dim()) for part in draw_streams("once", 3, 4, TINY, torch.Generator().manual_seed(0)))
    assert grade(model, keys, symbols, answers)[0].allclose(torch.tensor(6.0).log())
    torch.nn.init.normal_(model.out, generator=torch.Generator().manual_seed(0))
    before, later = model(keys, symbols), keys.clone()
    later[:, :, 5] += 1
    after = model(later, symbols)
    assert torch.allclose(before[:, :, :5], after[:, :, :5], atol=1e-5) and not torch.allclose(before[:, :, 5:], after[:, :, 5:], atol=1e-3)


@pytest.mark.parametrize("name", ["longhorn_exact", "gla", "attention"])
def test_a_seed_trains_the_same_alone_and_beside_others(name):
    together = train_recall("rewritten", name, 0.02, TINY)[1]
    alone = train_recall("rewritten", name, 0.02, replace(TINY, seeds=(1,)))[1]
    assert torch.allclose(together[:, 0, 1], alone[:, 0, 0], atol=1e-4)


def test_memories_without_forgetting_agree():
    q, k, x = (torch.randn(2, 7, n, dtype=torch.float64) for n in (4, 4, 3))
    never = torch.full((2, 7, 4), 60.0, dtype=torch.float64) # gates of 1
    assert torch.allclose(MEMORIES["gla"](q, k, x, never), MEMORIES["linear_attention"](q, k, x))
    unit = torch.eye(7, dtype=torch.float64).expand(2, 7, 7) # orthogonal keys: nothing to correct, so one pass stores all
    b = torch.full((2, 7, 3), 60.0, dtype=torch.float64)
    exact, diagonal = (MEMORIES[name](unit, unit, x, b) for name in ("longhorn_exact", "longhorn"))
    assert torch.allclose(exact, x / 2) and torch.allclose(diagonal, x / 2)



def test_killed_run_goes_on_and_gives_the_same_numbers(tmp_path):
    code = ("from dataclasses import replace; from longhorn_kit.lab import recall; from tests.test_recall import TINY as tiny; import sys, time\n"
            "TINY = replace(tiny, tasks=('once',))\n"
            "inner = recall.run_model\n"
            "def slow(*args):\n    time.sleep(0.3); return inner(*args)\n"
            "recall.run_model = slow; recall.run('laptop', sys.argv[1], TINY, workers=1)")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], cwd=os.path.dirname(os.path.dirname(__file__)),
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "a").glob("cells/*.json"))) < 5 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("cells/*.json")}
    assert 5 <= len(kept) < 2 * len(MEMORIES) and not (tmp_path / "a" / "record.json").exists()
    once = replace(TINY, tasks=("once",))
    resumed, fresh = run("laptop", tmp_path / "a", once, workers=1), run("laptop", tmp_path / "b", once, workers=2)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    for name in MEMORIES:
        ours, theirs = (record["results"]["tasks"]["once"]["curves"][name]["loss"] for record in (resumed, fresh))
        assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=2e-3)


def test_finished_cells_are_not_run_again_unless_settings_change(tmp_path, monkeypatch):
    trained, inner = [], recall.train_recall
    monkeypatch.setattr(recall, "train_recall", lambda *args: trained.append(args[1]) or inner(*args))
    config = replace(TINY, tasks=("once",))
    record = run("laptop", tmp_path, config, workers=1)
    again = run("laptop", tmp_path, config, workers=1)
    assert len(trained) == 2 * len(MEMORIES) and record["results"] == again["results"] and read_json(tmp_path / "record.json") == again
    run("laptop", tmp_path, replace(config, steps=7), workers=1)
    assert len(trained) == 4 * len(MEMORIES)
    run("laptop", tmp_path, replace(config, steps=7, lrs=(0.05, 1e30)), workers=1) # one more rate: one more search cell each
    assert len(trained) == 5 * len(MEMORIES)


def test_record_is_small_and_drawable(tmp_path):
    record = run("laptop", tmp_path, TINY, workers=1)
    assert {"claim", "scale", "settings", "results", "environment", "seconds", "command"} <= set(record)
    assert (tmp_path / "record.json").stat().st_size < 60_000
    assert all(caption for _, caption in figures(record))
    for title, header, rows in tables(record):
        assert rows and all(len(row) == len(header) for row in rows)
    judged = claims.judged("recall", record)
    assert len(judged) == 8 and all(found.n == 2 and found.verdict in WORDS for _, found in judged)


def test_learning_rate_is_chosen_on_the_search_seeds_by_training_not_by_the_test(tmp_path, monkeypatch):
    late, calls = {0.1: 0.4, 0.2: 0.6, 0.3: 0.5}, []
    def made_up(task, name, lr, config, folder):
        calls.append((lr, config.seeds))
        recall = [[0.0] * 9 + [late[lr] if config.seeds == (100, 101) else 1 - late[lr]]]
        return {"settings": {"lr": lr}, "steps": [1] * 10, "loss": [[1.0] * 10], "recall": recall, "test": {"4": [1 - late[lr]]}, "seconds": 1}
    monkeypatch.setattr(recall, "run_cell", made_up)
    found = run_model("once", "gla", replace(TINY, lrs=tuple(late), search_seeds=(100, 101)), tmp_path)
    assert found["settings"]["lr"] == 0.2 and found["grid"] == {"0.1": 0.4, "0.2": 0.6, "0.3": 0.5} and found["seconds"] == 4
    assert calls == [(0.1, (100, 101)), (0.2, (100, 101)), (0.3, (100, 101)), (0.2, (0, 1))]
    found = run_model("once", "gla", replace(TINY, lrs=(0.3,), search_seeds=()), tmp_path)
    assert found["grid"] == {} and calls[4:] == [(0.3, (0, 1))] # nothing to choose


def test_a_run_that_diverges_is_the_worst(tmp_path):
    found = run_model("once", "longhorn", replace(TINY, lrs=(1e30, 1e-9)), tmp_path)
    assert found["settings"]["lr"] == 1e-9 and found["grid"]["1e+30"] == 0
    cell = {"steps": [1] * 10, "recall": [[0.9] * 10] * 2, "loss": [[1.0] * 10, [recall.DIVERGED] + [1.0] * 9]}
    assert late_recall(cell) == pytest.approx(0.9) # a seed that came back
    cell["loss"][1][-1] = recall.DIVERGED
    assert late_recall(cell) == 0


@pytest.mark.parametrize("name", ["laptop", "narrow"])
def test_recorded_learning_rates_lie_inside_their_grid(name):
    record = read_json(Path(__file__).parent.parent / "nbs" / "lab" / "results" / "recall" / f"{name}.json")
    results = record["results"]
    assert len(results["search_seeds"]) == 3 and not set(results["search_seeds"]) & set(record["settings"]["seeds"])
    for found in results["tasks"].values():
        for model, grid in found["grid"].items():
            rates = sorted(grid, key=float)
            assert f"{found['lr'][model]:g}" == max(grid, key=grid.get) and max(grid, key=grid.get) not in (rates[0], rates[-1])
            assert len(found["recall"][model]) == len(record["settings"]["seeds"]) == 8


def test_unknown_scale_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="unknown scale 'moon' for recall; there is: laptop") as caught:
        run("moon", tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong, says", [
    (dict(pairs=12), "pairs is 12; expected one of test_pairs"), (dict(lrs=()), "lrs is empty"), (dict(seeds=()), "seeds is empty"),
    (dict(tasks=()), "tasks is empty"), (dict(batch_size=0), "batch_size is 0"), (dict(points=0), "points is 0"),
    (dict(test_streams=0), "test_streams is 0"), (dict(lrs=(0.1, 0.2), search_seeds=()), "search_seeds is empty, with 2"),
    (dict(search_seeds=(1, 2)), "seeds and search_seeds share 1")])
def test_settings_are_checked_before_anything_is_trained(wrong, says):
    with pytest.raises(ValueError, match=says):
        replace(TINY, **wrong)


def test_settings_that_make_no_task_are_refused():
    with pytest.raises(ValueError, match="key_size is 1"): # on a line two keys are often the same
        RecallConfig(key_size=1)
    with pytest.raises(ValueError, match="pairs is 5"):
        RecallConfig(pairs=5)
    with pytest.raises(ValueError, match="unknown task 'twice'"):
        RecallConfig(tasks=("twice",))
