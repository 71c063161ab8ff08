import json, lzma, math, re
from pathlib import Path
from collections import Counter
from dataclasses import replace
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from longhorn_kit import cli
from longhorn_kit.lab import evaluation, language
from longhorn_kit.lab.claims import judged
from longhorn_kit.lab.data import HELD_OUT, ByteTokenizer
from longhorn_kit.lab.language import (
    DIFFERENCES, LM_PRESETS, LanguageConfig, LMPreset, TrigramModel, cache_numbers, caches_at, decode_times, figures,
    find_preset, model_config, override, run, samples, seen_windows, stretches, tables, train_lm, trained_tokenizer, write_text, xz_bits,
)
from longhorn_kit.lab.training import TrainConfig, train
from longhorn_kit.records import read_json, without_later, write_json
from longhorn_kit.models import LMConfig, MIXERS, SequenceLM, lm
from longhorn_kit.models.lm import count_parameters

RECIPE = TrainConfig(steps=4, batch_size=2, context=16, lr=1e-2, warmup=1, eval_every=2, log_every=1, save_every=2, cpu=True)
TINY = LMPreset("a test", d_model=16, n_layer=2, train=RECIPE, held_out=160)
GRID = LanguageConfig(TINY, mixers=("longhorn_exact", "longhorn", "mamba", "attention"), lengths=(8, 24), sample=12, rounds=2)


@pytest.fixture
def text(tmp_path, monkeypatch):
    "A text file of its own, and a cache beside it."
    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i % 7} is {i * (i % 7)}\n" for i in range(400)))
    return str(path)


def by_hand(windows, tokens, size):
    "Witten-Bell back-off with dictionaries, one position after another."
    counts = [Counter(), Counter(), Counter()]
    for window in windows:
        for order in range(3):
            counts[order].update(tuple(window[i:i + order + 1]) for i in range(len(window) - order))
    def probability(context, byte):
        shorter = probability(context[1:], byte) if context else 1 / size
        following = {c: n for c in range(size) if (n := counts[len(context)][(*context, c)])}
        total = sum(following.values())
        return (following.get(byte, 0) + len(following) * shorter) / (total + len(following)) if total else shorter
    return [probability((a, b), c) for a, b, c in zip(tokens, tokens[1:], tokens[2:])]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), size=st.integers(2, 5), count=st.integers(1, 4), length=st.integers(3, 20))
def test_trigram_model_is_a_count_by_hand(seed, size, count, length):
    rng = np.random.default_rng(seed)
    windows, tokens = rng.integers(0, size, (count, length)), rng.integers(0, size, 12)
    model = TrigramModel(windows, size)
    expected = by_hand(windows.tolist(), tokens.tolist(), size)
    assert np.allclose(model.probabilities(tokens), expected)
    assert model.bits(tokens) == pytest.approx(-np.log2(expected).mean())
    for a in range(size):
        assert sum(model.probabilities(np.array([a, 0, c]))[0] for c in range(size)) == pytest.approx(1)


def test_xz_alone_and_after_the_same_bytes():
    data = bytes(np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8))
    assert xz_bits(data) == 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / 4000 > 8
    assert xz_bits(data, training=data) < 0.2 # only the distance to the first copy is left


@settings(max_examples=20, deadline=None)
@given(length=st.integers(64, 500), total=st.integers(0, 600))
def test_stretches_are_the_texts_own_and_reach_its_ends(length, total):
    tokens = np.arange(length)
    found = stretches(tokens, total)
    if total >= length:
        assert (found == tokens).all()
    else:
        assert len(found) == total and (total == 0 or found[0] == 0) and (total < 2 or found[-1] == length - 1)
        assert (np.diff(found) > 0).all() and (np.diff(found) != 1).sum() < 16


def test_seen_windows_are_what_training_feeds_the_model():
    class Recorder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []
        def forward(self, tokens, targets):
            self.seen.append(torch.cat([tokens, targets[:, -1:]], 1))
            return self.weight.sum() ** 2
    recorder, tokens = Recorder(), np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    train(recorder, tokens, None, RECIPE, quiet=True)
    assert (torch.cat(recorder.seen).numpy() == seen_windows(tokens, RECIPE)).all()


def count_by_two(config, known={}):
    "Parameters of a model from one with one block and one with two: blocks are alike."
    key = str(replace(config, n_layer=1))
    if key not in known:
        known[key] = [count_parameters(replace(config, n_layer=n)) for n in (1, 2)]
    one, two = known[key]
    return one + (config.n_layer - 1) * (two - one)


@pytest.mark.parametrize("preset", sorted(LM_PRESETS))
def test_every_mixer_of_a_preset_has_the_same_number_of_parameters(preset, monkeypatch):
    chosen = LM_PRESETS[preset]
    vocab = 256 if chosen.tokenizer == "bytes" else 50257
    whole = count_parameters(model_config(chosen, "longhorn", vocab))
    monkeypatch.setattr(lm, "count_parameters", count_by_two) # the search counts a model dozens of times
    monkeypatch.setattr(language, "count_parameters", count_by_two)
    assert len(MIXERS) == 15
    for mixer in MIXERS:
        config = model_config(chosen, mixer, vocab)
        assert config.mixer == mixer and abs(count_parameters(config) / whole - 1) <= 0.01
        scan = mixer.startswith(("longhorn", "mamba"))
        assert config.n_layer == (chosen.n_layer if scan else chosen.n_layer // 2)
        assert config.vocab_size == (256 if vocab == 256 else 50304) and (scan or config.d_mlp > chosen.d_model)
        assert vocab == 256 or config.d_model % 4 == config.d_mlp % 8 == 0 # what a GPU's matrix products want


def test_the_papers_recipe():
    for name, millions, steps, lr in (("owt-120m", 128.56, 5000, 6e-4), ("owt-350m", 369.97, 14000, 3e-4)):
        preset = LM_PRESETS[name]
        assert round(count_parameters(model_config(preset, "longhorn", 50257)) / 1e6, 2) == millions
        recipe = preset.train
        assert recipe.batch_size * recipe.context == 491_520 and recipe.context == 1024 and recipe.steps == steps
        assert (recipe.lr, recipe.lr * recipe.lr_final, recipe.warmup) == (lr, pytest.approx(lr / 10), steps // 20)
        assert (recipe.weight_decay, recipe.beta1, recipe.beta2, recipe.clip) == (0.1, 0.9, 0.95, 1.0)
        assert recipe.accumulate % 4 == 0 and recipe.batch_size % recipe.accumulate == 0 # parts are whole on one GPU and on four
    assert round(count_parameters(model_config(LM_PRESETS["owt-120m"], "mamba", 50257)) / 1e6, 2) == 129.15
    assert round(count_parameters(model_config(LM_PRESETS["owt-350m"], "mamba", 50257)) / 1e6, 2) == 371.54
    largest = LM_PRESETS["slimpajama-1.3b"].train
    assert largest.steps * largest.batch_size * largest.context == pytest.approx(100e9, rel=1e-3)
    assert (largest.context, largest.weight_decay, largest.lr, largest.clip) == (2048, 0.01, 3e-4, 1.0)
    assert all(text in LM_PRESETS["owt-120m"].about for text in ("3.225", "3.238", "3.247"))


@pytest.mark.parametrize("mixer, count", [("attention", 123_587_328), ("gla", 123_822_336 - 8448), ("longhorn", 128_563_968), ("mamba", 129_153_792)])
def test_the_authors_sizes(mixer, count):
    theirs = override(LM_PRESETS["owt-120m"], sizes="official")
    config = model_config(theirs, mixer, 50257)
    assert count_parameters(config) == count
    assert config.n_layer == (12 if config.d_mlp else 24) and config.mixer_options == ({"n_heads": 12} if config.d_mlp else {})
    assert 0.037 < 128_563_968 / count - 1 < 0.041 if config.d_mlp else True
    assert config.d_mlp == 0 or config.d_mlp < model_config(LM_PRESETS["owt-120m"], mixer, 50257).d_mlp
    assert model_config(override(LM_PRESETS["owt-350m"], sizes="official"), "attention", 50257).d_mlp == 2752


def test_sizes_that_are_unknown_are_refused():
    with pytest.raises(ValueError, match="the authors' size of retnet is not available to us; there are: attention, gla"):
        model_config(override(TINY, sizes="official"), "retnet", 256)
    with pytest.raises(ValueError, match="sizes is 'large'; it must be 'matched' or 'official'"):
        override(TINY, sizes="large")


def test_longhorn_and_mamba_train_without_dropout():
    small = override(LM_PRESETS["shakespeare"], d_model=32, n_layer=2)
    dropout = {mixer: model_config(small, mixer, 256).dropout for mixer in MIXERS}
    assert {mixer for mixer, share in dropout.items() if share == 0} == {mixer for mixer in MIXERS if mixer.startswith(("longhorn", "mamba"))}
    assert dropout["attention"] == 0.2 and set(dropout.values()) == {0, 0.2}
    model = language.new_model(model_config(small, "attention", 256), 0)
    assert model.blocks[0].dropout == 0.2


def test_differences_say_what_the_code_does():
    rows = {row.what: row for row in DIFFERENCES}
    assert len(rows) == len(DIFFERENCES) and all(isinstance(text, str) and text for row in DIFFERENCES for text in row)
    official = override(LM_PRESETS["owt-120m"], sizes="official")
    counts = [count_parameters(model_config(official, mixer, 50257)) for mixer in ("attention", "gla")]
    assert rows["sizes of LLaMA and GLA at 120M"].ours.endswith("with --sizes official {:,} and {:,}".format(*counts))
    assert "lacks 8,448" in rows["sizes of LLaMA and GLA at 120M"].consequence and 123_822_336 - counts[1] == 8448
    with torch.device("meta"):
        heads = [MIXERS[mixer](768).n_heads for mixer in ("gla", "retnet", "rwkv5")]
    assert "GLA {} heads (12 with --sizes official), RetNet {}, RWKV-5 {};".format(*heads) in rows["GLA, RetNet and RWKV-5"].ours
    medium, large = LM_PRESETS["owt-350m"].train, LM_PRESETS["slimpajama-1.3b"]
    assert (medium.lr, medium.steps, medium.warmup) == (3e-4, 14000, 700)
    assert rows["recipe at 350M"].ours == "3e-4 to 3e-5 in 14,000 steps; the warm-up of 700 steps is a guess"
    assert (large.n_layer, large.d_model, large.train.beta2, large.train.warmup) == (48, 2048, 0.95, 477)
    assert all(word in rows["recipe at 1.3B"].ours for word in ("48 blocks", "2048", "0.95", "477"))
    flags = {name for row in DIFFERENCES for name in re.findall("--([a-z]+)", row.ours)}
    assert flags == {"decay", "sizes", "tasks"} and {"decay", "sizes"} <= set(vars(cli.TrainLM(preset="owt-120m")))
    assert "downstream" in evaluation.TASK_PRESETS and LM_PRESETS["shakespeare"].tokenizer == "bytes"


def test_results_and_runs_older_than_a_setting_still_count(tmp_path, text, monkeypatch):
    run("laptop", tmp_path, GRID, text, workers=1)
    for path in (*tmp_path.glob("*/result.json"), tmp_path / "decode.json"): # as before `decay` and `sizes`
        record = read_json(path)
        write_json(path, record | {"settings": without_later(record["settings"])})
        assert '"decay"' in json.dumps(record["settings"]) and '"decay"' not in path.read_text()
    with monkeypatch.context() as patched:
        for name in ("train", "decode_times"):
            patched.setattr(language, name, lambda *args, **options: pytest.fail("a finished result was computed again"))
        run("laptop", tmp_path, GRID, text, workers=1)
    with pytest.raises(ValueError, match="holds a run with decay=matrices; this one has decay=official"):
        run("laptop", tmp_path, replace(GRID, preset=override(GRID.preset, decay="official")), text, workers=1)


def test_run_cut_short_goes_on_with_what_is_finished(tmp_path, text, monkeypatch):
    wrote, inner = [], language.write_text
    def interrupted(*args, **options):
        if len(wrote) == 2:
            raise KeyboardInterrupt
        wrote.append(1)
        return inner(*args, **options)
    monkeypatch.setattr(language, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("laptop", tmp_path / "a", GRID, text, workers=1)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*/result.json")}
    assert len(kept) == 2 and not (tmp_path / "a" / "record.json").exists()
    monkeypatch.setattr(language, "write_text", inner)
    resumed, fresh = run("laptop", tmp_path / "a", GRID, text, workers=1), run("laptop", tmp_path / "b", GRID, text, workers=2)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    for key in ("bits_per_byte", "train", "held_out", "samples", "parameters", "trigram", "xz_alone", "xz_primed"):
        assert resumed["results"][key] == fresh["results"][key], key
    monkeypatch.setattr(language, "train", lambda *args, **options: pytest.fail("a finished model was trained again"))
    again = run("laptop", tmp_path / "a", GRID, text, workers=1)
    assert again["results"] == resumed["results"] and again["seconds"] == pytest.approx(resumed["seconds"], abs=2)


def test_record_can_be_drawn_and_judged(tmp_path, text):
    record = run("laptop", tmp_path / "a", replace(GRID, seeds=(0, 1)), text, workers=1)
    assert {"claim", "scale", "settings", "results", "environment", "seconds", "command"} <= set(record)
    assert all(len(bits) == 2 for bits in record["results"]["bits_per_byte"].values())
    assert (tmp_path / "a" / "record.json").stat().st_size < 60_000
    assert all(caption for _, caption in figures(record)) and all(text.startswith("    def ") for _, text in samples(record))
    for title, header, rows in tables(record):
        assert rows and all(len(row) == len(header) for row in rows)
    assert [(found.n, found.verdict) for _, found in judged("language", record)][:2] == [(2, "cannot be judged")] * 2 # one learning rate


def test_caches_at_several_lengths_are_those_of_reading_at_once():
    for mixer in ("longhorn_exact", "attention"):
        model = language.new_model(model_config(TINY, mixer, 256), 0).eval()
        tokens = torch.randint(256, (1, 30))
        short, long = caches_at(model, tokens, [8, 30])
        with torch.no_grad():
            whole = model.prefill(tokens)[1]
            assert torch.allclose(model.step(tokens[:, 0], long)[0], model.step(tokens[:, 0], whole)[0], atol=1e-5)
        assert (cache_numbers(long) > cache_numbers(short)) == (mixer == "attention")
        times, sizes = decode_times({mixer: model}, tokens, [8, 30], rounds=1, steps=1)
        assert all(ms > 0 for ms in times[mixer]) and sizes[mixer] == [cache_numbers(short), cache_numbers(long)]


def test_train_lm_leaves_a_model_that_can_be_loaded_and_continued(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setitem(LM_PRESETS, "test", TINY)
    result = train_lm("test", "longhorn", text, tmp_path / "run", steps=3, seed=5)
    assert f"{result['bits_per_byte']:.3f} bits a byte" in capsys.readouterr().out and result["steps"] == 3
    folder = tmp_path / "run" / "model"
    model = SequenceLM.from_pretrained(folder)
    assert trained_tokenizer(folder, model.config.vocab_size) == "bytes"
    assert write_text(model, ByteTokenizer(), "1 times", 5, seed=1) == write_text(model, ByteTokenizer(), "1 times", 5, seed=1)
    assert train_lm("test", "longhorn", text, tmp_path / "run", steps=3, seed=5)["resumed_from"] == 3
    with pytest.raises(ValueError, match="holds a run with mixer=longhorn; this one has mixer=longhorn_exact"):
        train_lm("test", "longhorn_exact", text, tmp_path / "run", steps=3, seed=5)
    with pytest.raises(ValueError, match="holds a run with d_model=16; this one has d_model=8"):
        train_lm("test", "longhorn", text, tmp_path / "run", steps=3, seed=5, d_model=8)
    assert LMConfig.from_dict(read_json(tmp_path / "run" / "lm_config.json")).mixer == "longhorn" # the planner reads it
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text().swapcase())
    with pytest.raises(ValueError, match="holds a run on another text"):
        train_lm("test", "longhorn", str(other), tmp_path / "run", steps=3, seed=5)


@pytest.mark.parametrize("place", [".", "{}", "~"])
def test_the_folder_of_a_vocabulary_is_found_from_anywhere(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    language.save_lm(language.new_model(LMConfig(300, 16, 1), 0), f"gpt2:{place.format(tmp_path)}/words", tmp_path / "model")
    assert trained_tokenizer(tmp_path / "model", 300) == f"gpt2:{tmp_path / 'words'}"


def test_a_start_that_failed_does_not_claim_the_folder(tmp_path, text, monkeypatch):
    monkeypatch.setitem(LM_PRESETS, "test", TINY)
    with pytest.raises(ValueError):
        train_lm("test", "longhorn", text, tmp_path, steps=3, context=10**6)
    assert train_lm("test", "mamba", text, tmp_path, steps=3)["steps"] == 3


def test_a_presets_share_is_for_its_own_text(tmp_path, text, monkeypatch):
    shares, prepare = [], language.prepare
    def noted(source, *args, fraction, **options):
        shares.append(fraction)
        return prepare(text, *args, fraction=HELD_OUT)
    monkeypatch.setattr(language, "prepare", noted)
    monkeypatch.setitem(LM_PRESETS, "test", replace(TINY, data="hf:own", fraction=0.0005))
    for number, (data, more) in enumerate(((None, {}), ("hf:own", {}), (text, {}), (text, {"fraction": 0.2}))):
        train_lm("test", "longhorn", data, tmp_path / str(number), steps=2, **more)
    assert shares == [0.0005, 0.0005, HELD_OUT, 0.2]


def test_seed_decides_the_weights_and_leaves_torchs_state_alone():
    config, state = model_config(TINY, "longhorn", 256), torch.get_rng_state()
    one, same, other = (language.new_model(config, seed).embedding.weight for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other) and torch.equal(torch.get_rng_state(), state)


def test_files_that_are_no_text_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path / "cache"))
    for name, data, says in (("empty.txt", b"", "is empty"), ("binary.txt", b"a\0b" * 99, "contains NUL bytes")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}.* {says}") as caught:
            train_lm("laptop", "longhorn", str(tmp_path / name), tmp_path / "run")
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    (tmp_path / "short.txt").write_text("short text, hardly a line\n" * 100)
    with pytest.raises(ValueError, match="a context of 4096 needs at least 4097"):
        train_lm("laptop", "longhorn", str(tmp_path / "short.txt"), tmp_path / "run", context=4096, steps=2)


@pytest.mark.parametrize("call, match", [
    (lambda folder: run("moon", folder), "unknown scale 'moon' for language; there are: laptop"),
    (lambda folder: train_lm("huge", "longhorn", None, folder), "unknown preset .huge.; there are: laptop .*shakespeare"),
    (lambda folder: train_lm("laptop", "longhron", None, folder), "longhron"),
    (lambda folder: train_lm("laptop", "longhorn", None, folder, stepps=1), "no field 'stepps'; there are: accumulate"),
    (lambda folder: train_lm("shakespeare", "longhorn", None, folder), "preset shakespeare brings no text; give it with --data"),
    (lambda folder: train_lm("small", "mamba", None, folder), "preset small brings no text; give it with --data"),
    (lambda folder: train_lm("laptop", "longhorn", None, folder, seed=-2**70), "seed is -1180591620717411303424; it must be from 0 to"),
    (lambda folder: override(find_preset("laptop"), steps=0), "steps is 0"),
    (lambda folder: trained_tokenizer(folder, 50257), "does not say which tokenizer"),
    (lambda folder: language.check_vocabulary(256, 50304), "the tokenizer has 256 tokens, the model 50304"),
    (lambda folder: language.check_vocabulary(50257, 256), "the tokenizer has 50257 tokens, the model 256"),
])
def test_bad_names_are_one_clear_line_and_leave_nothing(tmp_path, call, match):
    with pytest.raises(ValueError, match=match) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_shorter_run_warms_up_for_a_shorter_time():
    preset = find_preset("shakespeare")
    assert override(preset, steps=50).train.warmup == 5 and override(preset, steps=50, warmup=20).train.warmup == 20
    assert override(preset, seed=3).train.warmup == preset.train.warmup and math.isclose(preset.train.lr_final * preset.train.lr, 1e-4)
