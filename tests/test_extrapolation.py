"""Test long contexts: streamed losses, constant memory, positions of needles, stored weights."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from longhorn_kit.lab.claims.subjects.extrapolation import (
    about_length,
    compare_length,
    compare_needles,
)
from longhorn_kit.lab.data.tokenizers import get_tokenizer
from longhorn_kit.lab.experiments import extrapolation as ex
from longhorn_kit.lab.experiments.language import cache_numbers
from longhorn_kit.lab.run import run
from longhorn_kit.lab.train.lm import new_model, save_lm
from longhorn_kit.lab.train.presets import override
from longhorn_kit.models import LMConfig
from longhorn_kit.records import read_record, write_record
from mixers import every_mixer
from rounding import bound

pytestmark = pytest.mark.numeric

BYTES = get_tokenizer("bytes")
TEXT = np.frombuffer(
    ("The quick sleek fox jumps over the lazy dog; 12345 times. " * 60).encode(), np.uint8
)
TINY = dict(
    multiples=(1, 2, 4),
    windows=2,
    chunk=16,
    tokens_at_once=64,
    needles=("passkey",),
    finetuned=("fact",),
    needle_lengths=(96, 128),
    twice_lengths=(96,),
    depths=(0.0, 1.0),
    trials=3,
    choices=4,
    finetune_lengths=(64, 80),
    finetune_steps=4,
    finetune_rows=2,
    context=16,
    bf16=False,
    gpu=False,
)
CONFIG = ex.Config(**TINY)
TEXTS = SimpleNamespace(
    corpus=SimpleNamespace(tokenizer=BYTES, train=TEXT), domains={"held out": (TEXT, len(TEXT))}
)
RECORDS = Path(__file__).parent.parent / "nbs/lab/results/extrapolation"


def model(mixer="longhorn", seed=0):
    return new_model(LMConfig(256, 16, 1, mixer=mixer), seed).eval()


@every_mixer
def test_streamed_losses_are_those_of_the_whole_text(name):
    "A text read in chunks has the losses of the complete text."
    lm = model(name)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(256, (2, 38), generator=generator)
    with torch.no_grad():
        scores = lm(windows[:, :-1]).transpose(1, 2)
        targets = windows[:, 1:]
        whole = F.cross_entropy(scores, targets, reduction="none")
    for chunk in (1, 7, 16, 100):
        parts = [losses for losses, _ in ex.stream_losses(lm, windows, chunk)]
        pieces = torch.cat(parts, 1)
        assert_close(pieces, whole, rtol=1e-3, atol=1e-4)


def test_losses_by_hand_with_the_state_reset_and_carried():
    lm = model("longhorn_exact")
    s = replace(CONFIG, tokens_at_once=48)
    windows = {length: ex.cut(TEXT, length, 128) for length in (8, 16, 64)}
    # the same tokens are predicted
    for cut in windows.values():
        after_start = cut[:, 1:]
        result = after_start.flatten().tolist()
        expected = TEXT[1:129].tolist()
        assert result == expected
    cuts = windows.items()
    losses = {length: ex.window_losses(lm, cut, s) for length, cut in cuts}
    for length, loss in losses.items():
        assert loss.shape == (128 // length, length)
        with torch.no_grad():
            inputs = windows[length][:, :-1]
            targets = windows[length][:, 1:]
            expected = float(lm(inputs, targets)[1])
            assert loss.mean() == pytest.approx(expected, rel=1e-4)
    added = ex.added(losses[64], losses[16])  # in the first stretch, the state adds nothing
    by_hand = []
    for i in range(4):
        stretch = slice(16 * i, 16 * (i + 1))
        changes = [losses[64][w, stretch] - losses[16][4 * w + i] for w in range(2)]
        by_hand.append(np.mean(changes))
    np.testing.assert_allclose(added, by_hand, atol=1e-5)
    assert abs(added[0]) < 1e-4 < abs(added[1])
    for longest in (16, 100, 4096):  # bins of positions cover every position once
        edges = ex.position_bins(longest)
        generator = np.random.default_rng(0)
        noise = generator.random((2, longest))
        assert edges[0] == 0
        assert edges[-1] == longest
        widths = np.diff(edges)
        assert (widths > 0).all()
        nats = ex.by_position(noise)["nats"]
        result = np.average(nats, weights=widths)
        expected = noise.mean()
        assert result == pytest.approx(expected, abs=1e-4)


def test_sliding_windows_predict_each_token_once_with_half_a_window_before_it():
    class Spy(torch.nn.Module):
        "Model with the same loss everywhere, which records its input tokens."

        embedding = torch.nn.Embedding(1, 1)

        def prefill(self, tokens, cache):
            sizes.append(tokens)
            return torch.zeros(*tokens.shape, 256), cache

    sizes = []
    tokens = np.arange(70) % 256
    loss = ex.sliding_loss(Spy(), tokens, 64, CONFIG)
    # the mean of 56 terms
    tolerance = bound(torch.float32, 56)
    assert loss == pytest.approx(math.log(256), rel=tolerance)
    result = sorted(int(token) + 1 for part in sizes for row in part for token in row[8:])
    assert result == list(range(9, 65))


@pytest.mark.parametrize("mixer", ["longhorn", "mamba"])
def test_memory_is_flat_while_a_long_text_goes_by(mixer):
    def resident():
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096

    lm = model(mixer)
    text = torch.zeros(1, 60_001, dtype=torch.uint8)
    sizes = set()
    memory = []
    for _, cache in ex.stream_losses(lm, text, 1000):
        sizes.add(cache_numbers(cache))
        memory.append(resident())
    # the losses and states of 40,000 tokens would be 100 MB
    assert len(sizes) == 1
    growth = max(memory[20:]) - memory[19]
    assert growth < 8e6


@pytest.mark.parametrize("kind, times", [*product(ex.NEEDLES, (1, 2))])
def test_the_needle_is_in_the_text_at_its_depth(kind, times):
    for seed, depth in enumerate((0.0, 0.3, 1.0)):
        sentence, question, answers = ex.needle(kind, seed, 8)
        context, tokens = ex.haystack(TEXT, BYTES, kind, seed, 300, depth, 8, times)
        text = BYTES.decode(context)
        size = 300 - len(question)
        assert text.count(sentence) == times
        assert text.endswith(question)
        end = len(question)
        expected = text[-end - size : -len(question)]
        assert text[:size] == expected
        expected = round(depth * (size - len(sentence)))
        assert text.index(sentence) == expected
        expected = times * size + len(question)
        assert len(context) == expected
        assert [BYTES.decode(answer) for answer in tokens] == answers
        assert len(set(answers)) == 8
        lengths = {len(answer) for answer in tokens}
        assert lengths == {ex.LONGEST}
        assert answers[0] in sentence
        for answer in answers[1:]:
            assert answer not in text
    # right colours are balanced
    facts = {ex.needle("fact", seed, 8)[2][0] for seed in range(10)}
    result = len(facts)
    assert result == 10


def test_scores_of_answers_are_the_models_and_written_is_what_greedy_decoding_writes():
    lm = model("attention")
    rng = np.random.default_rng(0)
    numbers = rng.integers(256, size=(2, 20))
    contexts = torch.from_numpy(numbers)
    answers = []
    for _ in contexts:
        answers.append([rng.integers(256, size=size) for size in (1, 3, 2)])
    trials = [(context.numpy(), row) for context, row in zip(contexts, answers)]
    for scores, _ in (
        ex.answer_scores(lm, contexts, answers, chunk=7),
        ex.score_trials(lm, trials, replace(CONFIG, chunk=7)),
    ):
        for context, row, row_scores in zip(contexts, answers, scores):
            for answer, score in zip(row, row_scores):
                text = torch.cat([context, torch.from_numpy(answer)])
                ids = text[None]
                with torch.no_grad():
                    logits = lm(ids[:, :-1])
                    log = logits.log_softmax(-1)[0, 19:]
                chosen = log.gather(1, ids[0, 20:, None])
                assert score == pytest.approx(float(chosen.sum()), rel=1e-4)
    tokens = lm.generate(contexts, 3, temperature=0)
    greedy = tokens[:, 20:].numpy()
    right = ex.answer_scores(lm, contexts, [[row] for row in greedy])[1]
    assert right.all()
    changed = (greedy + [0, 1, 0]) % 256
    rows = [[row] for row in changed]
    wrong = ex.answer_scores(lm, contexts, rows)[1]
    assert not wrong.any()


def test_finetuning_asks_for_the_answer_alone_and_never_for_a_test_needle():
    s = replace(CONFIG, finetune_lengths=(80, 96), finetuned=ex.NEEDLES)
    batches = list(ex.lessons(TEXT, BYTES, s, "cpu"))
    shapes = {inputs.shape for inputs, _ in batches}
    assert len(shapes) == 1  # as a CUDA graph needs it
    expected_lengths = (80, 80, 96, 96)
    for step, length, (inputs, targets) in zip(range(4), expected_lengths, batches):
        for row_in, row_out in zip(inputs, targets):
            learned = (row_out != -100).nonzero()
            positions = learned[:, 0].tolist()
            kind = ex.NEEDLES[step % 2]
            answer = BYTES.decode(row_out[positions])
            text = BYTES.decode(row_in)
            start = length - 1
            expected = list(range(start, length - 1 + len(answer)))
            assert positions == expected
            assert f"is{answer}." in text
            assert answer[1:].isdigit() if kind == "passkey" else answer[1:] in ex.COLOURS
    lesson = list(ex.lessons(TEXT, BYTES, s, "cpu"))[1]
    result = lesson[0]
    assert torch.equal(result, batches[1][0])
    first = batches[0][0]
    third = batches[2][0]
    assert not torch.equal(first, third)


def test_what_is_finetuned_in_bf16_is_what_is_read_and_the_model_stays(monkeypatch):
    read = []
    tokens = torch.arange(48).view(2, 24)
    lm = model()
    monkeypatch.setattr(
        ex, "retrieval_maps", lambda model, *rest: read.append((model, model(tokens))) or {}
    )
    start = lm.embedding.weight.clone()
    with torch.no_grad():
        result = ex.measure(lm, TEXTS, replace(CONFIG, needles=("fact",), bf16=True))
        (base, before), (finetuned, after) = read
        for reader, logits in read:
            with torch.autocast("cpu", torch.bfloat16):
                assert_close(reader(tokens), logits, rtol=0, atol=0)
    assert torch.equal(start, lm.embedding.weight)
    weight = finetuned.embedding.weight
    assert not torch.equal(start, weight)
    assert not finetuned.training
    assert math.isfinite(result["finetune_loss"])
    assert not torch.equal(before, after)
    wide = ex.perplexities(lm, TEXT, CONFIG)["by_length"]["nats"]
    narrow = result["text"]["held out"]["by_length"]["nats"]
    assert wide != narrow
    assert wide == pytest.approx(narrow, abs=0.02)


def test_what_cannot_be_is_refused():
    for name, value in (
        ("context", 15),
        ("context", 0),
        ("choices", 11),
        ("choices", 1),
        ("trials", 0),
        ("needles", ("x",)),
        ("chunk", 0),
        ("multiples", (1, 0)),
        ("depths", (0, 2)),
        ("needle_lengths", (-1,)),
        ("finetune_steps", 0),
        ("finetune_lr", 0),
        ("finetune_lr", math.nan),
    ):
        with pytest.raises(
            ValueError, match="unknown needle 'x'" if name == "needles" else f"^{name} is"
        ):
            replace(CONFIG, **{name: value})
    with pytest.raises(ValueError, match="65 are needed"):
        ex.cut(TEXT[:64], 16, 64)
    cases = ((TEXT, 40), (TEXT[:50], 200))
    for text, length in cases:
        with pytest.raises(ValueError, match="does not fit: the needle and its question"):
            ex.haystack(text, BYTES, "fact", 0, length, 0.5)


def save_job(run, mixer, seed, weights, done=True):
    "Write the files of a job of the language experiment."
    folder = run / "jobs" / f"{mixer}{seed}" / "model"
    save_lm(model(mixer, weights), "bytes", folder)
    if done:
        write_record(
            run / "jobs" / f"{mixer}{seed}" / "metrics.json",
            {"settings": {"mixer": mixer, "seed": seed}},
        )


@pytest.mark.slow
def test_results_belong_to_weights_and_text_and_resume(tmp_path, monkeypatch):
    trained = (("longhorn", 1), ("longhorn", 0), ("mamba", 0), ("attention", 0))
    for mixer, seed in trained:
        save_job(tmp_path / "grid", mixer, seed, seed, done=mixer != "attention")
    for domain in ("prose", "docs"):
        for part, times in (("train", 40), ("val", 20)):
            text = f"This is {domain}, and nothing but {domain}. " * times
            (tmp_path / f"{domain}.{part}.txt").write_text(text)
    measured = []
    measure = ex.measure
    monkeypatch.setattr(ex, "measure", lambda *words: measured.append(1) or measure(*words))
    folders = dict(checkpoints=str(tmp_path / "grid"), data=str(tmp_path))
    here = TINY | folders

    def go(minutes=math.inf, **more):
        return run(
            ex.EXPERIMENT, "gpu", tmp_path / "here", workers=0, minutes=minutes, **here | more
        )

    left = go(minutes=-1)["results"]["not_run"]
    assert len(left) == 3
    assert measured == []
    record = go()
    assert len(measured) == 3
    seeds = [row["seed"] for row in record["results"]["models"]]
    assert seeds == [0, 0, 1]
    domains = set(record["results"]["text"])
    assert domains == {"prose", "docs"}
    assert record["results"]["not_run"] == []
    assert [
        len(comparison.differences)
        for comparison in compare_length(record, ("longhorn",)) + compare_needles(record)
    ] == [2, 2, 1]
    assert about_length(record).startswith("0.0")
    # the location of the models does not matter
    moved_folder = (tmp_path / "grid").rename(tmp_path / "moved")
    moved = str(moved_folder)
    assert go(checkpoints=moved)["results"] == record["results"]
    assert len(measured) == 3
    save_job(tmp_path / "other", "longhorn", 0, weights=7)  # a model of the same name
    other = go(checkpoints=str(tmp_path / "other"))
    assert other["results"]["models"][0]["text"] != record["results"]["models"][0]["text"]
    go(checkpoints=moved, windows=1)
    assert len(measured) == 7
    for wrong, message in (
        (dict(data=""), "--data FOLDER"),
        (dict(checkpoints="nowhere"), "nowhere holds no trained model"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            go(**wrong)


@pytest.mark.slow
def test_tiny_run_has_the_structure_of_the_committed_records(tmp_path):
    preset = override(ex.LM_PRESETS["laptop"], d_model=16, n_layer=1, steps=2, context=16)
    record = run(
        ex.EXPERIMENT,
        "laptop",
        tmp_path,
        workers=0,
        **TINY,
        preset=preset,
        mixers=("longhorn", "mamba"),
    )
    lengths = compare_length(record, ("longhorn",))
    assert len(lengths) == len(compare_needles(record)) == 1
    for path in RECORDS.glob("*.json"):
        recorded = read_record(path)
        fields = set(record["settings"]) - {"preset"}
        names = set(recorded["settings"]) - {"preset"}
        assert names == fields
        keys = recorded["results"].keys()
        expected_keys = record["results"].keys()
        assert keys == expected_keys
        model = record["results"]["models"][0]
        reference = recorded["results"]["models"][0]
        assert model.keys() == reference.keys()
        keys = model["text"]["held out"].keys()
        text = next(iter(reference["text"].values()))
        expected_keys = text.keys()
        assert keys == expected_keys
        for maps in reference["needles"].values():
            keys = maps["once"].keys()
            once = model["needles"]["fact, finetuned"]["once"]
            expected_keys = once.keys()
            assert keys == expected_keys
