"""Long contexts: streamed losses are the model's, memory stays flat, needles lie where they should, and runs go on where they stopped."""
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longhorn_kit.lab import extrapolation as ex
from longhorn_kit.lab.data import get_tokenizer
from longhorn_kit.lab.language import cache_numbers, new_model, save_lm
from longhorn_kit.models import MIXERS, LMConfig

BYTES = get_tokenizer("bytes")
TEXT = np.frombuffer(("The quick sleek fox jumps over the lazy dog; 12345 times. " * 60).encode(), np.uint8)
CONFIG = ex.ExtrapolationConfig(
    16, multiples=(1, 2, 4), windows=2, chunk=16, tokens_at_once=64, needles=("passkey",), taught=("fact",),
    needle_lengths=(96, 128), twice_lengths=(96,), depths=(0.0, 1.0), trials=3, choices=4, teach_lengths=(64, 80),
    teach_steps=4, teach_rows=2)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(mixer="longhorn", **options):
    return new_model(LMConfig(256, 16, 1, mixer=mixer, **options), 0).eval()


# Losses

@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_streamed_losses_are_those_of_the_whole_text(mixer):
    lm = model(mixer)
    windows = torch.randint(256, (2, 38), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = F.cross_entropy(lm(windows[:, :-1]).transpose(1, 2), windows[:, 1:], reduction="none")
    for chunk in (1, 7, 16, 100):
        pieces = torch.cat([losses for losses, _ in ex.stream_losses(lm, windows, chunk)], 1)
        torch.testing.assert_close(pieces, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [8, 16, 64])
def test_every_window_length_predicts_the_same_tokens(length):
    windows = ex.cut(TEXT, length, 64)
    assert windows[:, 1:].flatten().tolist() == TEXT[1:65].tolist() and windows[:, :-1].flatten().tolist() == TEXT[:64].tolist()


def test_losses_by_hand_with_the_state_reset_and_carried():
    lm = model("longhorn_exact")
    found = {length: ex.losses_at(lm, TEXT, length, 64, chunk=16, rows=3) for length in (16, 64)}
    for length, losses in found.items():
        assert losses.shape == (64 // length, length)
        for row, start in zip(losses, range(0, 64, length)):
            ids = torch.from_numpy(TEXT[start:start + length + 1].astype(np.int64))[None]
            with torch.no_grad():
                assert row.mean() == pytest.approx(float(lm(ids[:, :-1], ids[:, 1:])[1]), rel=1e-4)
    np.testing.assert_allclose(found[16][0], found[64][0, :16], rtol=1e-4)


def test_what_the_state_adds_is_nothing_in_the_first_stretch():
    lm = model("longhorn_exact")
    carried, reset = (ex.losses_at(lm, TEXT, length, 128, chunk=16, rows=3) for length in (64, 16))
    found = ex.added(carried, reset)
    by_hand = [np.mean([carried[w, 16 * i:16 * (i + 1)] - reset[4 * w + i] for w in range(2)]) for i in range(4)]
    np.testing.assert_allclose(found, by_hand, atol=1e-5)
    assert abs(found[0]) < 1e-4 < abs(found[1])


def test_sliding_windows_predict_each_token_once_with_half_a_window_before_it():
    class Spy(torch.nn.Module):
        "A model whose loss tells nothing but which tokens it was asked for."
        embedding = torch.nn.Embedding(1, 1)
        def prefill(self, tokens, cache):
            asked.append(tokens)
            return torch.zeros(*tokens.shape, 256), cache
    asked = []
    assert ex.sliding_loss(Spy(), np.arange(70) % 256, 16, 64, 3) == pytest.approx(math.log(256))
    scored = sorted(int(token) + 1 for part in asked for row in part for token in row[8:])
    assert scored == list(range(9, 65))


def test_short_text_is_told():
    with pytest.raises(ValueError, match="65 are needed"):
        ex.cut(TEXT[:64], 16, 64)
    with pytest.raises(ValueError, match="needle and its question"):
        ex.haystack(TEXT, BYTES, "passkey", 60, 0.5, 0)
    with pytest.raises(ValueError, match="does not fit"):
        ex.haystack(TEXT[:50], BYTES, "passkey", 200, 0.5, 0)


@pytest.mark.parametrize("longest", [16, 100, 4096])
def test_position_bins_cover_every_position_once(longest):
    edges = ex.position_bins(longest)
    assert edges[0] == 0 and edges[-1] == longest and (np.diff(edges) > 0).all()
    losses = np.random.default_rng(0).random((2, longest))
    curve = ex.by_position(losses)
    assert np.average(curve["nats"], weights=np.diff(edges)) == pytest.approx(losses.mean(), abs=1e-4)


# Memory

def resident():
    "Bytes of memory that this process holds."
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("mixer", ["longhorn", "mamba"])
def test_memory_is_flat_while_a_long_text_goes_by(mixer):
    lm = model(mixer)
    text, sizes, memory = torch.zeros(1, 60_001, dtype=torch.uint8), set(), []
    for _, cache in ex.stream_losses(lm, text, 1000):
        sizes.add(cache_numbers(cache))
        memory.append(resident())
    assert len(sizes) == 1
    assert max(memory[20:]) - memory[19] < 8e6 # the losses and states of 40,000 tokens would be 100 MB


def test_attention_keeps_every_token_and_its_noise_cache_has_the_real_shape():
    lm = model("attention")
    *_, (_, cache) = ex.stream_losses(lm, torch.zeros(1, 33, dtype=torch.uint8), 8)
    assert [part.shape for layer in cache for part in layer] == [part.shape for layer in ex.noise_cache(lm, 32) for part in layer]


def test_decoding_reads_what_it_says():
    found = ex.decoding((64, 256), largest=64)
    assert found["read"] == {"longhorn": 256, "attention": 0} and len(found["ms"]["attention"]) == 1
    assert len(set(found["numbers"]["longhorn"])) == 1


# Needles

@pytest.mark.parametrize("kind", ex.NEEDLES)
@pytest.mark.parametrize("twice", [False, True])
def test_the_needle_is_in_the_text_at_its_depth(kind, twice):
    for seed, depth in enumerate((0.0, 0.3, 1.0)):
        sentence, question, answers = ex.needle(kind, seed, 8)
        found = ex.haystack(TEXT, BYTES, kind, 300, depth, seed, 8, twice)
        text, size = BYTES.decode(found.context), 300 - len(question)
        assert text.count(sentence) == 1 + twice and text.endswith(question)
        assert text.index(sentence) == round(depth * (size - len(sentence)))
        assert len(found.context) == (2 * size + len(question) if twice else 300)
        assert twice is False or text[:size] == text[size:2 * size]
        assert [BYTES.decode(answer) for answer in found.answers] == answers and len(set(answers)) == 8
        assert answers[0] in sentence and not any(answer in text for answer in answers[1:])


def test_right_colours_are_balanced():
    assert len({ex.needle("fact", seed, 8)[2][0] for seed in range(10)}) == 10


def test_scores_of_answers_of_different_lengths_are_the_models():
    lm, rng = model("attention"), np.random.default_rng(0)
    contexts = torch.from_numpy(rng.integers(256, size=(2, 20)))
    answers = [[rng.integers(256, size=size) for size in (1, 3, 2)] for _ in range(2)]
    scores, _ = ex.answer_scores(lm, contexts, answers, chunk=7)
    for row in range(2):
        for i, answer in enumerate(answers[row]):
            ids = torch.cat([contexts[row], torch.from_numpy(answer)])[None]
            with torch.no_grad():
                log = lm(ids[:, :-1]).log_softmax(-1)[0, 19:]
            assert scores[row, i] == pytest.approx(float(log.gather(1, ids[0, 20:, None]).sum()), rel=1e-4)


def test_written_is_what_greedy_decoding_writes():
    lm = model("longhorn_exact")
    contexts = torch.randint(256, (4, 12), generator=torch.Generator().manual_seed(1))
    greedy = lm.generate(contexts, 3, temperature=0)[:, 12:].numpy()
    other = greedy.copy()
    other[:, 1] = (other[:, 1] + 1) % 256
    assert ex.answer_scores(lm, contexts, [[row] for row in greedy])[1].all()
    assert not ex.answer_scores(lm, contexts, [[row] for row in other])[1].any()


def test_lessons_ask_for_the_answer_alone_and_never_for_a_test_needle():
    inputs, targets = ex.lesson(TEXT, BYTES, "fact", 96, 4, step=3)
    for row_in, row_out in zip(inputs, targets):
        asked = (row_out != -100).nonzero()[:, 0]
        answer = BYTES.decode(row_out[asked])
        assert asked[0] == 95 and answer.strip() in ex.COLOURS and f"is{answer}.\n" in BYTES.decode(row_in)
    again = ex.lesson(TEXT, BYTES, "fact", 96, 4, step=3)
    assert torch.equal(inputs, again[0]) and not torch.equal(inputs, ex.lesson(TEXT, BYTES, "fact", 96, 4, step=4)[0])


def test_teaching_leaves_the_model_alone():
    lm = model()
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    with torch.no_grad():
        taught, loss = ex.teach(lm, TEXT, BYTES, CONFIG)
    assert all(torch.equal(before[name], tensor) for name, tensor in lm.state_dict().items()) and math.isfinite(loss)
    assert not torch.equal(taught.embedding.weight, lm.embedding.weight) and not taught.training


def test_bf16_is_close_to_float32():
    texts = ex.Texts(BYTES, TEXT, {"held out": TEXT})
    found = [ex.measure(new_model(LMConfig(256, 16, 1, mixer="longhorn_exact"), 0), texts, replace(CONFIG, needles=(), taught=(), precision=precision))
             for precision in ("float32", "bf16")]
    wide, narrow = (result["text"]["held out"]["by_length"]["nats"] for result in found)
    assert wide != narrow and wide == pytest.approx(narrow, abs=0.02)


def test_what_is_taught_in_bf16_is_what_is_read(monkeypatch):
    read, tokens = [], torch.arange(48).view(2, 24)
    monkeypatch.setattr(ex, "retrieval_maps", lambda model, *rest: read.append((model, model(tokens))) or {})
    texts = ex.Texts(BYTES, TEXT, {"held out": TEXT})
    with torch.no_grad():
        ex.measure(model(), texts, replace(CONFIG, needles=("fact",), taught=("fact",), precision="bf16"))
        (untaught, before), (taught, after) = read
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(untaught(tokens), before, rtol=0, atol=0)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(taught(tokens), after, rtol=0, atol=0)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("wrong", [dict(context=15), dict(context=0), dict(choices=11), dict(choices=1)])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is"):
        replace(CONFIG, **wrong)


# Runs

@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    "What a language grid leaves: trained models by name, and a text of two domains."
    folder = tmp_path_factory.mktemp("grid")
    for mixer, seed in (("longhorn", 0), ("longhorn", 1), ("attention", 0)):
        save_lm(new_model(LMConfig(256, 16, 1, mixer=mixer), seed), "bytes", folder / f"{mixer}-seed{seed}" / "model")
    text = tmp_path_factory.mktemp("text")
    for domain in ("prose", "docs"):
        for part, times in (("train", 40), ("val", 20)):
            (text / f"{domain}.{part}.txt").write_text(f"This is {domain}, and nothing but {domain}. " * times)
    return folder, text


def test_run_over_checkpoints_goes_on_judges_and_draws(grid, tmp_path, monkeypatch):
    folder, text = grid
    measured, measure = [], ex.measure
    monkeypatch.setattr(ex, "measure", lambda *words: measured.append(1) or measure(*words))
    part = ex.run("gpu", tmp_path, CONFIG, checkpoints=folder, data=str(text), minutes=0)
    assert measured == [] and len(part["results"]["not_run"]) == 3
    record = ex.run("gpu", tmp_path, CONFIG, checkpoints=folder, data=str(text))
    assert len(measured) == 3 and set(record["results"]["text"]) == {"prose", "docs"} and record["results"]["not_run"] == []
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert ex.run("gpu", tmp_path, CONFIG, checkpoints=folder, data=str(text))["results"] == record["results"] and len(measured) == 3
    less = replace(CONFIG, windows=1, needles=(), taught=())
    ex.run("gpu", tmp_path / "less", less, checkpoints=folder, data=str(text))
    ex.run("gpu", tmp_path / "less", replace(less, chunk=8), checkpoints=folder, data=str(text))
    assert len(measured) == 9 # other settings are measured again
    other = tmp_path / "other" / "longhorn-seed0" / "model"
    save_lm(new_model(LMConfig(256, 16, 1), 7), "bytes", other)
    rows = [ex.run("gpu", tmp_path / place, less, checkpoints=other.parents[1], data=str(text))["results"]["models"]
            for place in ("less", "fresh")] # a model of the same name, where another was measured and where none was
    assert rows[0][0]["text"] == rows[1][0]["text"] and len(measured) == 11
    judged = ex.claims.judged("extrapolation", record)
    assert judged and all(found.n == 2 for _, found in judged)
    assert len(ex.growth(record, "longhorn", "prose")) == 2
    titles = [title for title, header, rows in ex.tables(record) if all(len(row) == len(header) for row in rows)]
    assert len(titles) == 5

    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    drawn = ex.figures(record)
    assert len(drawn) == 2 * 2 + 2 * 2
    for fig, caption in drawn:
        fig.savefig(tmp_path / "figure.png", dpi=40)
        assert caption.endswith(".")
    plt.close("all")


def test_what_cannot_be_run_is_one_line(grid, tmp_path):
    with pytest.raises(ValueError, match="unknown scale 'huge'"):
        ex.run("huge", tmp_path)
    with pytest.raises(ValueError, match="checkpoints=FOLDER"):
        ex.run("gpu", tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ex.run("gpu", tmp_path, checkpoints=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no trained model"):
        ex.run("gpu", tmp_path, checkpoints=tmp_path / "empty")
    save_lm(model("attention"), "bytes", tmp_path / "other" / "longhorn-seed0" / "model")
    with pytest.raises(ValueError, match="holds a model with mixer attention; its folder's name says longhorn"):
        ex.run("gpu", tmp_path, CONFIG, checkpoints=tmp_path / "other", data=str(grid[1]))
    with pytest.raises(ValueError, match="are needed"):
        ex.run("gpu", tmp_path / "x", replace(CONFIG, windows=10**4), checkpoints=grid[0], data=str(grid[1]))


def test_copies_of_a_run_are_not_taken_for_runs(tmp_path):
    for name in ("longhorn-seed0", "longhorn-seed0.old", "mamba-seed1 (copy)"):
        save_lm(model(), "bytes", tmp_path / name / "model")
    assert ex.find_checkpoints(tmp_path) == [("longhorn", 0, tmp_path / "longhorn-seed0" / "model")]


def test_laptop_models_come_from_the_language_run_only_if_they_are_the_same(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from longhorn_kit.lab.language import LM_PRESETS, asdict, override, to_plain
    from longhorn_kit.records import write_json
    trained, preset = [], LM_PRESETS["laptop"]
    corpus = SimpleNamespace(index={"source_sha256": "abc"})
    config = replace(ex.SETTINGS["laptop"], preset=preset)
    monkeypatch.setattr(ex, "run_model", lambda mixer, seed, config, corpus, path: trained.append(path) or save_lm(model(mixer), "bytes", path / "model"))
    here, there = tmp_path / "extrapolation" / "laptop", tmp_path / "language" / "laptop" / "longhorn-seed0"
    save_lm(model(), "bytes", there / "model")
    settings = to_plain(asdict(override(preset, seed=0)) | {"mixer": "longhorn", "corpus": "abc"})
    write_json(there / "result.json", {"settings": settings})
    ex.laptop_model("longhorn", 0, config, corpus, here)
    assert trained == []
    write_json(there / "result.json", {"settings": settings | {"corpus": "xyz"}})
    ex.laptop_model("longhorn", 0, config, corpus, here)
    assert trained == [here / "models" / "longhorn-seed0"]
