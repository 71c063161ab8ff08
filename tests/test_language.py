"""Test language models: recipes, text, training, the experiment, and two baselines."""

import json
import lzma
import math
import os
import re
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longhorn_kit import cli
from longhorn_kit.lab.claims.registry import outcomes
from longhorn_kit.lab.data.text import VAL_PART
from longhorn_kit.lab.data.tokenizers import ByteTokenizer
from longhorn_kit.lab.distributed import TrainingDiverged
from longhorn_kit.lab.experiments import evaluation, language
from longhorn_kit.lab.experiments.language import (
    EXPERIMENT,
    LAPTOP,
    MAIN,
    OTHERS,
    PRESETS,
    PUBLISHED,
    SECOND,
    baselines,
    chosen_runs,
    decode_costs,
    in_order,
    jobs,
    recipe_of,
    scale_of,
    seen_windows,
    trigram,
    write_text,
)
from longhorn_kit.lab.run import Results, run
from longhorn_kit.lab.train import lm as language_training
from longhorn_kit.lab.train import loop as training
from longhorn_kit.lab.train import presets
from longhorn_kit.lab.train.lm import (
    held_out_losses,
    new_model,
    open_texts,
    stretches,
    train_lm,
    trained_tokenizer,
)
from longhorn_kit.lab.train.loop import train
from longhorn_kit.lab.train.presets import LM_PRESETS, LMPreset, find_preset, model_config, override
from longhorn_kit.lab.train.recipe import TrainConfig, learning_rate
from longhorn_kit.models import MIXERS, LMConfig, SequenceLM, files, lm
from longhorn_kit.models.lm import count_parameters
from longhorn_kit.records import read_json, read_record
from mixers import every_family
from texts import characters

RECIPE = TrainConfig(
    steps=4,
    batch_size=2,
    context=16,
    lr=1e-2,
    warmup=1,
    eval_every=2,
    log_every=1,
    save_every=2,
    cpu=True,
)
TINY = LMPreset("a test", d_model=16, n_layer=2, train=RECIPE, val=160)
TOY = scale_of(
    replace(TINY, val=None, train=replace(RECIPE, batch_size=4, loss_chunk=32)),
    tokens=1024,
    evaluations=4,
    runs=(("longhorn", 0), ("mamba", 0), ("longhorn", 1)),
)
FIRST_RUNS = in_order((), (), LAPTOP)
SMALL = scale_of(TINY, runs=FIRST_RUNS, baselines=True, sample=12, lengths=(8, 24))
RECORDS = Path(__file__).parent.parent / "nbs/lab/results/language"
END = "\n<|endoftext|>\n"


def rehearse(config, folder, workers=0, **changes):
    return run(
        replace(EXPERIMENT, presets={"laptop": config}), folder=folder, workers=workers, **changes
    )


def comparable(record):
    "Return the runs of a record without times."
    rows = []
    for row in record["results"]["runs"]:
        row = dict(row)
        for name in ("seconds", "tokens_per_second", "wall_seconds", "engine"):
            row.pop(name, None)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    "Write a folder with two domains."
    folder = tmp_path_factory.mktemp("texts")
    words = (("prose", "and then"), ("docs", "returns"))
    lengths = (("train", 400), ("val", 8))
    for (name, word), (part, lines) in product(words, lengths):
        (folder / f"{name}.{part}.txt").write_text(
            END.join(f"{word} {i * i % 89} {word}\n" for i in range(lines))
        )
    return str(folder)


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory):
    "Return the folder of a run, and its record."
    folder = tmp_path_factory.mktemp("run")
    return folder, rehearse(TOY, folder, data=texts)


COUNTS = {}  # config of one block -> parameters with one block and with two


def count_by_two(config):
    "Count a model's parameters from models with one and two blocks, since blocks are equal."
    key = str(replace(config, n_layer=1))
    if key not in COUNTS:
        COUNTS[key] = [count_parameters(replace(config, n_layer=n)) for n in (1, 2)]
    one, two = COUNTS[key]
    others = (config.n_layer - 1) * (two - one)
    return one + others


def vocabulary(preset):
    return 256 if LM_PRESETS[preset].tokenizer == "bytes" else 50257


@cache
def longhorn_parameters(preset):
    "Count the parameters of a preset's Longhorn, block by block."
    return count_parameters(model_config(LM_PRESETS[preset], "longhorn", vocabulary(preset)))


@every_family
@pytest.mark.parametrize("preset", sorted(LM_PRESETS))
def test_every_mixer_of_a_preset_has_the_same_number_of_parameters(name, preset, monkeypatch):
    "A preset's model matches Longhorn's size within 1 %, in multiples that suit GPUs."
    chosen = LM_PRESETS[preset]
    vocab = vocabulary(preset)
    whole = longhorn_parameters(preset)
    for module in (lm, presets):  # the search counts the parameters of a model dozens of times
        monkeypatch.setattr(module, "count_parameters", count_by_two)
    config = model_config(chosen, name, vocab)
    scan = name.startswith(("longhorn", "mamba"))
    assert config.mixer == name
    ratio = count_parameters(config) / whole
    assert abs(ratio - 1) <= 0.01
    expected = chosen.n_layer if scan else chosen.n_layer // 2
    assert config.n_layer == expected
    assert config.vocab_size == (256 if vocab == 256 else 50304)
    assert scan or config.d_mlp > chosen.d_model
    # multiples for a GPU's matrix products
    assert vocab == 256 or config.d_model % 4 == config.d_mlp % 8 == 0


def test_the_papers_recipe():
    def millions(name, mixer):
        config = model_config(LM_PRESETS[name], mixer, 50257)
        return round(count_parameters(config) / 1e6, 2)

    for name, sizes, steps, lr in (
        ("owt-120m", (128.56, 129.15), 5000, 6e-4),
        ("owt-350m", (369.97, 371.54), 14000, 3e-4),
    ):
        recipe = LM_PRESETS[name].train
        assert (millions(name, "longhorn"), millions(name, "mamba")) == sizes
        assert recipe.batch_size * recipe.context == 491_520
        assert recipe.context == 1024
        assert recipe.steps == steps
        assert recipe.lr == lr
        lowest = recipe.lr * recipe.min_lr_ratio
        assert lowest == pytest.approx(lr / 10)
        assert recipe.warmup == steps // 20
        assert recipe.weight_decay == 0.1
        assert recipe.beta1 == 0.9
        assert recipe.beta2 == 0.95
        assert recipe.clip == 1.0
        # batches divide evenly on one GPU and on four
        assert recipe.gradient_accumulation_steps % 4 == 0
        assert recipe.batch_size % recipe.gradient_accumulation_steps == 0
    for text in ("3.225", "3.238", "3.247"):
        assert text in LM_PRESETS["owt-120m"].description
    largest = LM_PRESETS["slimpajama-1.3b"].train
    assert largest.context == 2048
    assert largest.weight_decay == 0.01
    assert largest.lr == 3e-4
    assert largest.clip == 1.0
    tokens = largest.steps * largest.batch_size * largest.context
    assert tokens == pytest.approx(100e9, rel=1e-3)


@pytest.mark.parametrize(
    "mixer, count",
    [
        ("attention", 123_587_328),
        ("gla", 123_822_336 - 8448),
        ("longhorn", 128_563_968),
        ("mamba", 129_153_792),
    ],
)
def test_the_authors_sizes(mixer, count):
    config = model_config(override(LM_PRESETS["owt-120m"], sizes="official"), mixer, 50257)
    assert count_parameters(config) == count
    assert config.n_layer == (12 if config.d_mlp else 24)
    expected = {"n_heads": 12} if config.d_mlp else {}
    assert config.mixer_options == expected
    if config.d_mlp:
        assert 0.037 < 128_563_968 / count - 1 < 0.041
        usual = model_config(LM_PRESETS["owt-120m"], mixer, 50257)
        assert config.d_mlp < usual.d_mlp
    assert (
        model_config(override(LM_PRESETS["owt-350m"], sizes="official"), "attention", 50257).d_mlp
        == 2752
    )


def test_dropout_warmup_and_seed_of_a_preset():
    small = override(LM_PRESETS["shakespeare"], d_model=32, n_layer=2)
    dropout = {
        mixer: model_config(small, mixer, 256).dropout
        for mixer in ("longhorn", "longhorn_exact", "mamba2", "attention", "gla")
    }
    for mixer, share in dropout.items():
        expected = 0 if mixer.startswith(("longhorn", "mamba")) else 0.2
        assert share == expected
    model = new_model(model_config(small, "attention", 256), 0)
    assert model.blocks[0].dropout == 0.2
    assert override(small, steps=50).train.warmup == 5
    assert override(small, steps=50, warmup=20).train.warmup == 20
    result = override(small, seed=3).train.warmup
    assert result == small.train.warmup
    lowest = small.train.min_lr_ratio * small.train.lr
    assert math.isclose(lowest, 1e-4)
    config = model_config(TINY, "longhorn", 256)
    state = torch.get_rng_state()
    one, same, other = (new_model(config, seed).embedding.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_differences_say_what_the_code_does():
    differences = read_json(RECORDS.parents[1] / "differences.json")
    rows = {row["what"]: SimpleNamespace(**row) for row in differences}
    assert len(rows) == len(differences)
    assert all(text for row in differences for text in row.values())
    official = override(LM_PRESETS["owt-120m"], sizes="official")
    counts = [
        count_parameters(model_config(official, mixer, 50257)) for mixer in ("attention", "gla")
    ]
    row = rows["sizes of LLaMA and GLA at 120M"]
    lacks = f"lacks {123_822_336 - counts[1]:,}"
    ending = "with --sizes official {:,} and {:,}".format(*counts)
    assert row.ours.endswith(ending)
    assert lacks in row.consequence
    with torch.device("meta"):
        heads = [MIXERS[mixer](768).n_heads for mixer in ("gla", "retnet", "rwkv5")]
    assert (
        "GLA {} heads (12 with --sizes official), RetNet {}, RWKV-5 {};".format(*heads)
        in rows["GLA, RetNet and RWKV-5"].ours
    )
    medium = LM_PRESETS["owt-350m"].train
    large = LM_PRESETS["slimpajama-1.3b"]
    rates = f"{medium.lr * 1e4:.0f}e-4 to {medium.lr * medium.min_lr_ratio * 1e5:.0f}e-5"
    assert (
        rows["recipe at 350M"].ours
        == f"{rates} in {medium.steps:,} steps; the warm-up of {medium.warmup} steps is a guess"
    )
    numbers = (
        f"{large.n_layer} blocks of width {large.d_model}, beta2 {large.train.beta2}, a warm-up of "
        f"{large.train.warmup} steps"
    )
    assert numbers in rows["recipe at 1.3B"].ours
    flags = {name for row in differences for name in re.findall("--([a-z]+)", row["ours"])}
    settings = cli.TrainLM.settings_of(["--preset", "owt-120m"])
    given = settings[0]
    assert flags == {"decay", "sizes", "tasks"}
    assert {"decay", "sizes"} <= vars(given).keys() | vars(given.train).keys()
    assert "downstream" in evaluation.TASK_PRESETS
    assert LM_PRESETS["shakespeare"].tokenizer == "bytes"


@settings(max_examples=20, deadline=None)
@given(length=st.integers(64, 500), total=st.integers(0, 600))
def test_stretches_are_the_texts_own_and_reach_its_ends(length, total):
    edges = stretches(np.arange(length), total)
    assert len(edges) == min(length, total)
    assert total == 0 or edges[0] == 0
    assert total < 2 or edges[-1] == length - 1
    steps = np.diff(edges)
    assert (steps > 0).all()
    assert (steps != 1).sum() < 16


def test_domains_are_measured_apart_and_together(texts):
    opened = open_texts(texts)
    written = (Path(texts) / "docs.val.txt").read_text()
    tokens, size = opened.domains["docs"]
    result = bytes(tokens.tolist())
    text = written.replace(END, "\0").rstrip("\n")
    expected = text.encode() + b"\n\0"
    assert result == expected
    assert size == len(tokens)
    domains = opened.domains.values()
    result = sum(len(part) for part, _ in domains)
    expected = len(opened.corpus.val)
    assert result == expected
    losses = held_out_losses(opened, RECIPE)(new_model(model_config(TOY, "longhorn", 256), 0))
    domains = opened.domains.items()
    weights, parts = zip(*((len(part) - 1, losses[f"val/{name}"]) for name, (part, _) in domains))
    expected = np.average(parts, weights=weights)
    assert losses["val_loss"] == pytest.approx(expected)
    assert set(opened.domains) == {"docs", "prose"}
    opened = open_texts(str(Path(texts) / "docs.train.txt"))
    result = list(opened.domains)
    assert result == ["held out"]


def test_train_lm_leaves_a_model_that_can_be_loaded_and_continued(
    tmp_path, texts, capsys, monkeypatch
):
    monkeypatch.setitem(LM_PRESETS, "test", TINY)

    def rerun(mixer="longhorn", name="docs", steps=3, **changes):
        return train_lm(
            "test",
            mixer,
            f"{texts}/{name}.train.txt",
            tmp_path / "run",
            steps=steps,
            seed=5,
            **changes,
        )

    with pytest.raises(ValueError, match="a context of 1000000 needs at least 1000001"):
        rerun("mamba", context=10**6)  # a failed start does not reserve the folder
    result = rerun()
    folder = tmp_path / "run" / "model"
    out = capsys.readouterr().out
    assert f"{result['bits_per_byte']:.3f} bits per byte" in out
    assert result["steps"] == 3
    model = SequenceLM.from_pretrained(folder)
    assert trained_tokenizer(folder, model.config.vocab_size) == "bytes"
    assert rerun()["resumed_from"] == 3
    assert write_text(model, ByteTokenizer(), "1 times", 5, seed=1) == write_text(
        model, ByteTokenizer(), "1 times", 5, seed=1
    )
    for changes, differs in (
        ({"mixer": "longhorn_exact"}, "with mixer=longhorn, but this run has mixer=longhorn_exact"),
        ({"d_model": 8}, "with d_model=16, but this run has d_model=8"),
        ({"name": "prose"}, "on another text"),
    ):
        with pytest.raises(ValueError, match=f"contains a run {differs}"):
            rerun(**changes)
    config = read_json(tmp_path / "run" / "lm_config.json")
    assert config["mixer"] == "longhorn"


@pytest.fixture
def trained(tmp_path, texts, monkeypatch):
    "Return a function that trains a small model in a folder of this name."
    monkeypatch.setitem(LM_PRESETS, "test", TINY)

    def train(out, steps, **changes):
        return train_lm(
            "test",
            "longhorn",
            f"{texts}/docs.train.txt",
            tmp_path / out,
            steps=steps,
            seed=5,
            **changes,
        )

    return train


def test_more_steps_lengthen_a_finished_run(tmp_path, trained, monkeypatch):
    "A longer run resumes at the last checkpoint with its own learning rates, even if stopped."
    for out in ("run", "stopped"):
        short = trained(out, 3)
    longer = trained("run", 6)
    folder = tmp_path / "run"
    first = longer["history"][:3]
    added = longer["history"][3:]
    assert longer["resumed_from"] == 3
    expected = [line["loss"] for line in short["history"]]
    assert [line["loss"] for line in first] == expected
    whole = override(TINY, steps=6, seed=5).train
    expected = [learning_rate(step, whole) for step in (4, 5, 6)]
    assert [line["lr"] for line in added] == expected
    record = read_record(folder / "config.json")
    assert record["lengthened"] == [3]
    assert record["config"]["steps"] == 6
    starts = [a["from_step"] for a in record["attempts"]]
    assert starts == [0, 3]
    assert (folder / "model-3-steps" / "model.safetensors").exists()
    facts = files.run_facts(folder / "model-3-steps")
    assert facts == {}
    facts = files.run_facts(folder / "model")
    assert facts["Schedule"] == "lengthened at step 3 to 6 steps"
    step = training.train_step
    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM after step 5"),
    ):
        patched.setattr(
            training,
            "train_step",
            lambda run: (run.step == 4 and os.kill(os.getpid(), signal.SIGTERM), step(run)),
        )
        trained("stopped", 6)
    resumed = trained("stopped", 6)
    assert resumed["resumed_from"] == 5
    assert [line["loss"] for line in resumed["history"]] == [
        line["loss"] for line in longer["history"]
    ]
    assert trained("run", 8)["steps"] == 8
    config = read_record(folder / "config.json")
    assert config["lengthened"] == [3, 6]
    assert {path.name for path in folder.glob("model*")} == {
        "model",
        "model-3-steps",
        "model-6-steps",
    }
    assert (
        files.run_facts(folder / "model-3-steps") == files.run_facts(folder / "model-6-steps") == {}
    )
    facts = files.run_facts(folder / "model")
    assert facts["Schedule"] == "lengthened at step 6 to 8 steps"
    metrics = (folder / "metrics.jsonl").read_text()
    changed = re.sub(r"(val_loss\D+\d)", r"\g<1>1", metrics)
    (folder / "metrics.jsonl").write_text(changed)
    facts = files.run_facts(folder / "model")
    assert facts == {}  # the losses are damaged


def test_a_run_does_not_lie_among_its_texts(tmp_path, texts):
    "A run inside its text folder fails: the next start would read metrics as texts."
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.txt").write_text("a text")
    with pytest.raises(
        ValueError, match="is inside the folder of texts .*plain; name a folder outside of it"
    ):
        inside = plain / "runs" / "a"
        language_training.check_outside(inside, str(plain))
    for source in (
        str(plain / "a.txt"),
        str(texts),
        "hf:plain",
        "stdlib",
        "",
    ):  # these read files with certain names
        language_training.check_outside(Path(source) / "run", source)
    language_training.check_outside(tmp_path / "run", str(plain))


def test_a_run_that_is_not_finished_or_lengthened_otherwise_is_refused(
    tmp_path, trained, texts, capsys
):
    trained("run", 4)
    with pytest.raises(ValueError, match="contains a run with steps=4, but this run has steps=3"):
        trained("run", 3)
    with pytest.raises(ValueError, match="contains a run with lr="):
        trained("run", 6, lr=0.5)
    assert "lengthened" not in capsys.readouterr().err
    last = tmp_path / "run" / "checkpoints" / "step-00000004"
    shutil.rmtree(last)
    with pytest.raises(ValueError, match="contains a run with steps=4, but this run has steps=6"):
        trained("run", 6)


def test_no_experiment_takes_a_run_that_was_lengthened(tmp_path, trained, texts):
    trained("run", 3)
    trained("run", 5)
    preset = override(TINY, steps=5, seed=5)
    corpus = language_training.prepare(f"{texts}/docs.train.txt")
    with pytest.raises(
        ValueError, match="contains a run that was lengthened at step 3, and no experiment judges"
    ):
        language_training.fit(preset, "longhorn", corpus, tmp_path / "run", quiet=True)
    trained("other", 3)
    with pytest.raises(ValueError, match="contains a run with steps=3, but this run has steps=5"):
        language_training.fit(preset, "longhorn", corpus, tmp_path / "other", quiet=True)


def test_a_run_starts_from_the_weights_of_another(tmp_path, trained, monkeypatch):
    trained("run", 3)
    source = SequenceLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    starts = []
    train = language_training.train

    def noted(model, *arguments, **options):
        state = model.state_dict()
        starts.append({name: weight.clone() for name, weight in state.items()})
        assert model.training
        return train(model, *arguments, **options)

    monkeypatch.setattr(language_training, "train", noted)
    trained("from run", 2, init_from=str(tmp_path / "run" / "model"))
    for name, weight in source.items():
        expected = starts[-1][name]
        assert torch.equal(weight, expected)
    digest = read_record(tmp_path / "from run" / "start.json")["weights"]
    assert (
        files.run_facts(tmp_path / "from run" / "model")["Base"] == f"weights with SHA-256 {digest}"
    )
    result = trained("from run", 2, init_from=str(tmp_path / "run" / "model"))
    assert result["resumed_from"] == 2
    variants = ({}, {"init_from": str(tmp_path / "from run" / "model")})
    for changes in variants:
        with pytest.raises(
            ValueError, match="from run contains a run that started from other weights"
        ):
            trained("from run", 2, **changes)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text('{"model_type": "longhorn"}')
    for changes, match in (
        ({"d_model": 8}, "is a model with d_model=16, but this run has d_model=8"),
        (
            {"init_from": str(tmp_path / "export")},
            "export is a folder of transformers; name the run from which it was exported",
        ),
        (
            {"options": {"d_state": 3}},
            "is a model with mixer_options={}, but this run has mixer_options={'d_state': 3}",
        ),
        ({"init_from": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        with pytest.raises((ValueError, OSError), match=re.escape(match)):
            source = str(tmp_path / "run" / "model")
            trained("wrong", 2, **{"init_from": source, **changes})


@pytest.mark.parametrize(
    "mixer, options",
    [("longhorn", {"d_state": 3, "expand": 1}), ("mamba", {"d_state": 3}), ("gla", {"n_heads": 2})],
)
def test_options_of_the_mixer_belong_to_the_model_and_to_its_size(mixer, options):
    config = model_config(override(TINY, d_model=64), mixer, 256, options)
    assert config.mixer_options == options
    shared = {name: value for name, value in options.items() if name != "n_heads"}
    target = count_parameters(LMConfig(256, 64, TINY.n_layer, mixer_options=shared))
    ratio = count_parameters(config) / target
    assert abs(ratio - 1) < 0.01
    with pytest.raises(ValueError, match="mixer 'attention' has no option 'd_state'"):
        model_config(TINY, "attention", 256, {"d_state": 3})


@pytest.mark.parametrize("folder", [".", "{}", "~"])
def test_the_folder_of_a_vocabulary_is_found_from_anywhere(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    language_training.save_lm(
        new_model(LMConfig(300, 16, 1), 0),
        f"gpt2:{folder.format(tmp_path)}/words",
        tmp_path / "model",
    )
    result = trained_tokenizer(tmp_path / "model", 300)
    assert result == f"gpt2:{tmp_path / 'words'}"


def two_steps(data, out):
    "Return a command that trains a small model for two steps."
    words = "train-lm --preset laptop --d-model 16 --n-layer 1 --steps 2 --context 16 --cpu"
    return [*words.split(), "--data", str(data), "--out", str(out)]


def test_a_model_of_characters_keeps_its_table(tmp_path, capsys):
    characters(tmp_path / "char")
    words = two_steps(tmp_path / "char", tmp_path / "run")
    result = cli.main(words)
    assert result == 0
    out, err = capsys.readouterr()
    assert "text: 1,440 tokens of chars to train on, checked in full" in out
    assert "--prompt ' or '" in out
    assert "train.bin: read as ids of the tokenizer chars" in err
    shutil.rmtree(tmp_path / "char")  # the model has a copy of the text's files
    words = ["generate", str(tmp_path / "run"), "--prompt", "to be", "--tokens", "9"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    written = out.rstrip("\n")
    assert written.startswith("to be")
    assert set(written) <= set("to be or not to be, that is the question\n")
    for argv, says in (
        (
            ["generate", str(tmp_path / "run"), "--prompt", "The"],
            "the character 'T' is not in the tokenizer's table of 15",
        ),
        (
            ["export", str(tmp_path / "run"), str(tmp_path / "out")],
            "chars has no end mark, but transformers needs one, so its models cannot be "
            "exported or evaluated",
        ),
    ):
        assert cli.main(argv) == 1
        assert says in capsys.readouterr().err
    path = tmp_path / "run" / "model" / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"b", "e"', '"e", "b"'))
    words = ["generate", str(tmp_path / "run"), "--prompt", "to be"]
    assert cli.main(words) == 1
    assert re.search(
        "tokenizer.json is damaged; restore it or save the model again", capsys.readouterr().err
    )


def test_no_record_and_no_card_holds_a_full_path(tmp_path, monkeypatch, capsys):
    data = tmp_path / "users" / "alice" / "private text.txt"
    out = tmp_path / "users" / "alice" / "run"
    export = tmp_path / "e"
    data.parent.mkdir(parents=True)
    data.write_text("words of a text\n" * 100)
    monkeypatch.chdir(tmp_path.parent.parent)  # the working folder is a parent, such as /
    monkeypatch.setattr(os, "getcwd", lambda: "/nowhere/else")
    words = two_steps(data, out)
    monkeypatch.setattr(sys, "argv", ["longhorn", *words])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # not `python -m pytest`
    assert (
        cli.main(words)
        == cli.main(["export", str(out), str(export)])
        == cli.main(["export", str(export), str(tmp_path / "again")])
        == 0
    )
    files = [
        path
        for folder in (out, export, tmp_path / "again")
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert len(files) > 20
    named = [path for path in files if b"alice" in path.read_bytes()]
    assert not named
    attempts = read_record(out / "config.json")["attempts"]
    command = attempts[0]["command"]
    assert command.endswith("--data '.../private text.txt' --out .../run")
    card = (export / "README.md").read_text()
    assert f"`{command}`" in card


def test_a_presets_share_is_for_its_own_text(tmp_path, texts, monkeypatch):
    shares = []
    prepare = language_training.prepare
    text = f"{texts}/docs.train.txt"

    def noted(source, *args, fraction, **options):
        shares.append(fraction)
        return prepare(text, fraction=VAL_PART)

    monkeypatch.setattr(language_training, "prepare", noted)
    monkeypatch.setitem(LM_PRESETS, "test", replace(TINY, data="hf:own", fraction=0.0005))
    cases = ((None, {}), ("hf:own", {}), (text, {}), (text, {"fraction": 0.2}))
    for data, more in cases:
        train_lm("test", "longhorn", data, tmp_path / str(len(shares)), steps=2, **more)
    assert shares == [0.0005, 0.0005, VAL_PART, 0.2]


@pytest.mark.parametrize(
    "call, match",
    [
        (
            lambda folder: run(EXPERIMENT, "moon", folder),
            "language has no scale 'moon'; it has: laptop, gpu, paper",
        ),
        (lambda folder: rehearse(TOY, folder, data=""), "name the text with --data"),
        (
            lambda folder: rehearse(TOY, folder, data=str(Path(__file__).parent)),
            r"is a folder without texts; expected files that end in .txt, .*; it has .*'.py'",
        ),
        (lambda folder: rehearse(TOY, folder, data="no/*.txt"), "matches no file"),
        (lambda folder: replace(SMALL, runs=(("longhron", 0),)), "longhron"),
        (lambda folder: replace(SMALL, tokens=-1), "tokens is -1; it must be from 0"),
        (lambda folder: replace(SMALL, judged=17), "judged is 17; it must be from 0 to 16"),
        (
            lambda folder: replace(SMALL, models=("longhron",)),
            "'longhron' has no judged seeds; there are: longhorn, mamba",
        ),
        (
            lambda folder: replace(SMALL, tokenizer="gpt2"),
            "baselines are for bytes; the tokenizer is gpt2",
        ),
        (lambda folder: override(TINY, n_layer=0), "n_layer is 0"),
        (lambda folder: replace(SMALL, lengths=(0,)), "lengths is 0"),
        (lambda folder: replace(SMALL, runs=(("mamba", -1),)), "seed is -1"),
        (
            lambda folder: override(TINY, sizes="large"),
            "sizes is 'large'; it must be 'matched' or 'official'",
        ),
        (
            lambda folder: model_config(override(TINY, sizes="official"), "retnet", 256),
            "the authors' size of retnet is not available to us; there are: attention, gla",
        ),
        (
            lambda folder: train_lm("huge", "longhorn", None, folder),
            "unknown preset .huge.; there are: laptop .*shakespeare",
        ),
        (lambda folder: train_lm("laptop", "longhron", None, folder), "longhron"),
        (
            lambda folder: train_lm("laptop", "longhorn", None, folder, stepps=1),
            "no field 'stepps'; there are: async_save",
        ),
        (
            lambda folder: train_lm("shakespeare", "longhorn", None, folder),
            "preset shakespeare has no text; name one with --data",
        ),
        (
            lambda folder: train_lm("laptop", "longhorn", None, folder, seed=-(2**70)),
            "seed is -1180591620717411303424; it must be from 0 to",
        ),
        (lambda folder: override(find_preset("laptop"), steps=0), "steps is 0"),
        (
            lambda folder: trained_tokenizer(folder, 50257),
            "names no tokenizer for its 50257 tokens",
        ),
        (
            lambda folder: language_training.check_vocabulary(256, 50304),
            "the tokenizer has 256 tokens, but the model has 50304",
        ),
    ],
)
def test_bad_names_are_one_clear_line_and_leave_nothing(tmp_path, monkeypatch, call, match):
    monkeypatch.delenv("LONGHORN_TEXT", raising=False)
    with pytest.raises((ValueError, OSError), match=match) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_first_runs_of_a_scale_are_a_comparison():
    pairs = in_order()
    expected = tuple((mixer, 0) for mixer in MAIN)
    assert pairs[:4] == expected
    assert len(pairs) == 26
    seeds = {}
    for mixer, seed in sorted(pairs):
        seeds.setdefault(mixer, []).append(seed)
    expected = {*MAIN, *SECOND, *OTHERS}
    assert seeds.keys() == expected
    assert all(
        seeds[mixer] == list(range(n))
        for n, mixers in ((3, MAIN), (2, SECOND), (1, OTHERS))
        for mixer in mixers
    )
    for config in (PRESETS["gpu"], PRESETS["paper"]):  # the tokens determine the steps
        runs = chosen_runs(config)
        runs_seeds = {seed for _, seed in runs}
        assert len(runs_seeds) == len(runs) == 16
        result = [mixer for mixer, _ in runs[:4]]
        assert result == list(PUBLISHED)
        assert set(runs) < set(chosen_runs(replace(config, judged=8, models=MAIN + SECOND))), (
            "more seeds and models keep finished runs"
        )
        long = recipe_of(config)
        short = recipe_of(replace(config, tokens=config.tokens // 2))
        difference = short.steps - long.steps / 2
        assert abs(difference) <= 1
        assert short.warmup == short.steps // 8
        assert long.lr == short.lr
    recipe = recipe_of(PRESETS["laptop"])
    assert recipe == LM_PRESETS["laptop"].train


def test_what_decides_no_result_finds_the_same_jobs(texts, tmp_path, monkeypatch):
    results = Results(tmp_path)
    copy = tmp_path / "copy"

    def folders(**changes):
        return {
            results.job_folder(s) for s in jobs(replace(TOY, **{"data": texts} | changes), results)
        }

    same = folders()

    def recipe(**changes):
        return {"train": replace(TOY.train, **changes)}

    assert len(same) == 3
    assert same == folders(
        **recipe(gradient_accumulation_steps=2, loss_chunk=8, log_every=2, compile=True)
    )
    copy.mkdir()
    for path in Path(texts).iterdir():
        content = path.read_bytes()
        (copy / path.name).write_bytes(content)
    monkeypatch.setenv("LONGHORN_TEXT", str(copy))
    assert same == folders(data="")
    note = (tmp_path / "jobs/note.json").read_text()
    assert str(copy) in note
    (copy / "docs.train.txt").write_text("another text\n" * 99)
    open_texts.cache_clear()
    for changes in (
        {"data": ""},
        {"sizes": "official"},
        {"tokens": 512},
        {"sample": 1},
        recipe(decay="official"),
        recipe(lr=1e-3),
    ):
        assert not same & folders(**changes), changes


@pytest.mark.slow
def test_two_processes_make_the_record_that_one_makes(finished, texts, tmp_path):
    record = rehearse(TOY, tmp_path, 2, data=texts)
    assert comparable(record) == comparable(finished[1])


def test_a_record_has_every_run_and_its_curve_beside_its_model(finished, texts):
    folder, record = finished
    assert record["missing"] == 0
    rows = record["results"]["runs"]
    result = [(row["mixer"], row["seed"]) for row in rows]
    assert result == list(TOY.runs)
    for job, row in zip(
        jobs(replace(TOY, data=texts), Results(folder)), record["results"]["runs"], strict=True
    ):
        curve = row["val"]
        job_folder = Results(folder).job_folder(job)
        assert curve["tokens"][-1] == row["tokens"] == 1024
        assert len(curve["all"]) == 4
        expected = curve["all"][-1]
        assert row["loss"]["all"] == expected
        assert (
            SequenceLM.from_pretrained(job_folder / "model").num_parameters() == row["parameters"]
        )
        expected = 64 * row["model"]["d_model"]
        assert row["state_numbers"] == expected
        assert trained_tokenizer(job_folder / "model", 256) == "bytes"
        checkpoints = job_folder / "training" / "checkpoints"
        assert not checkpoints.exists()
    first, second = (
        row["train"]["loss"] for row in record["results"]["runs"] if row["mixer"] == "longhorn"
    )
    assert first != second
    size = (folder / "record.json").stat().st_size
    assert size < 60_000


def test_a_finished_run_is_kept_by_a_larger_one_and_divergence_is_a_result(
    finished, texts, monkeypatch
):
    folder, record = finished
    fit = Mock(
        side_effect=TrainingDiverged(
            "the loss is nan at step 3 (learning rate 1); last checkpoint: somewhere"
        )
    )
    monkeypatch.setattr(language, "fit", fit)
    for _ in range(2):
        repeated = rehearse(TOY, folder, data=texts, runs=(*TOY.runs, ("gla", 0)))
    assert fit.call_count == 1
    assert fit.call_args.args[1] == "gla"
    assert repeated["missing"] == 0
    result = comparable(repeated)[:3]
    assert result == comparable(record)
    assert (
        repeated["results"]["runs"][3]["diverged"] == "the loss is nan at step 3 (learning rate 1)"
    )
    judgement = outcomes("language", repeated)[0][1]
    assert judgement.n == 1


def test_stopped_in_the_middle_a_run_resumes_to_the_same_numbers(
    finished, texts, tmp_path, monkeypatch
):
    one = {"data": texts, "runs": TOY.runs[:1]}
    step = training.train_step
    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM after step 6"),
    ):
        patched.setattr(
            training,
            "train_step",
            lambda run: (run.step == 5 and os.kill(os.getpid(), signal.SIGTERM), step(run)),
        )
        rehearse(TOY, tmp_path, **one)
    expected = comparable(finished[1])[:1]
    assert comparable(rehearse(TOY, tmp_path, **one)) == expected
    (config,) = tmp_path.glob("jobs/*/training/config.json")
    starts = [attempt["from_step"] for attempt in read_json(config)["attempts"]]
    assert starts == [0, 6]


@pytest.fixture(scope="module")
def small_records(texts, tmp_path_factory):
    "Return records of small runs, with and without baselines."
    configs = {True: SMALL, False: replace(SMALL, baselines=False, sample=0, lengths=())}
    data = f"{texts}/docs.train.txt"
    return {
        baselines: (config, rehearse(config, tmp_path_factory.mktemp("small"), data=data))
        for baselines, config in configs.items()
    }


@pytest.mark.parametrize("name", ["laptop", "seeds", "gpu", "gpu_160m"])
def test_a_run_has_the_structure_of_the_committed_records_and_can_be_judged(
    name, texts, small_records
):
    recorded = read_record(RECORDS / f"{name}.json")
    with_baselines = bool(recorded["settings"]["baselines"])
    config, record = small_records[with_baselines]
    results = record["results"]
    then = recorded["results"]
    # newer recipes have more settings
    names = record["settings"]["train"].keys()
    expected_names = recorded["settings"]["train"].keys()
    assert names >= expected_names
    for here, there in (
        (record["settings"], recorded["settings"]),
        (results, then),
        (results["baselines"], then["baselines"]),
        (results["runs"][0]["decode"], then["runs"][0]["decode"]),
    ):
        # a setting of the rule with looks
        result = here.keys() - {"judged", "models", "passes"}
        assert result == there.keys()
    result = {frozenset(row) for row in results["runs"]}
    expected = {frozenset(row) for row in then["runs"]}
    assert result == expected
    assert texts not in json.dumps(results)
    assert all(row["sample"].startswith("    def ") for row in results["runs"]) or not config.sample
    (comparison, verdict), *_ = outcomes("language", record)
    assert comparison.unit == "bits per byte"
    assert verdict.n == 1
    assert verdict.verdict == "cannot be judged"


def by_hand(windows, tokens, size):
    "Compute Witten-Bell back-off with dictionaries, one position after another."
    grams = Counter(
        tuple(w[i : i + order])
        for w in windows
        for order in (1, 2, 3)
        for i in range(len(w) - order + 1)
    )

    def probability(context, byte):
        shorter = probability(context[1:], byte) if context else 1 / size
        counts = [grams[*context, c] for c in range(size)]
        different = sum(count > 0 for count in counts)
        if not different:
            return shorter
        weighted = grams[*context, byte] + different * shorter
        return weighted / (sum(counts) + different)

    triples = zip(tokens, tokens[1:], tokens[2:])
    return [probability((a, b), c) for a, b, c in triples]


@settings(max_examples=15, deadline=None)
@given(
    rng=st.builds(np.random.default_rng, st.integers(0, 999)),
    size=st.integers(2, 5),
    count=st.integers(1, 4),
    length=st.integers(3, 20),
)
def test_trigrams_are_a_count_by_hand(rng, size, count, length):
    windows = rng.integers(0, size, (count, length))
    tokens = rng.integers(0, size, 12)
    assert np.allclose(
        trigram(windows, tokens, size), by_hand(windows.tolist(), tokens.tolist(), size)
    )
    result = sum(trigram(windows, np.array([1, 0, c]), size)[0] for c in range(size))
    assert result == pytest.approx(1)


def test_baselines_are_given_what_training_feeds_the_model():
    generator = np.random.default_rng(0)
    data = generator.integers(0, 256, 4001, dtype=np.uint8)
    windows = data[None]
    levels = baselines(windows, data[:-1])
    assert (
        levels["xz_alone"]
        == 8 * len(lzma.compress(data[:-1].tobytes(), preset=9 | lzma.PRESET_EXTREME)) / 4000
        > 8
    )
    assert levels["xz_primed"] < 0.2  # only the distance to the first copy is stored
    probabilities = trigram(data[None], data[:-1])
    assert levels["trigram"] == pytest.approx(-np.log2(probabilities).mean())

    class Recorder(torch.nn.Linear):
        def forward(self, tokens, targets):
            windows = torch.cat([tokens, targets[:, -1:]], 1)
            batches.append(windows)
            return self.weight.sum() ** 2

    batches = []
    train(Recorder(1, 1), data, None, RECIPE, quiet=True)
    read = torch.cat(batches).numpy()
    expected = seen_windows(data, RECIPE)
    assert (read == expected).all()


@pytest.mark.parametrize("mixer", ["longhorn_exact", "attention"])
def test_the_cache_of_attention_grows_and_a_state_does_not(mixer):
    model = new_model(model_config(TINY, mixer, 256), 0)
    tokens = torch.randint(256, (1, 30))
    costs = decode_costs(model, tokens, (8, 30), rounds=1, steps=1)
    assert (
        (costs["numbers"][1] > costs["numbers"][0])
        == (mixer == "attention")
        != (language.state_numbers(model) > 0)
    )
    cache = model.prefill(tokens)[1]
    expected = language.cache_numbers(cache)
    assert costs["numbers"][1] == expected
    assert min(costs["ms"]) > 0
