"""Test the training loop."""

import dataclasses
import errno
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from longhorn_kit import records
from longhorn_kit.lab.data.text import Sampler
from longhorn_kit.lab.distributed import TrainingDiverged
from longhorn_kit.lab.train import loop as training
from longhorn_kit.lab.train.checkpoint import checkpoints, tidy
from longhorn_kit.lab.train.loop import train
from longhorn_kit.lab.train.recipe import (
    LossOnly,
    TrainConfig,
    evaluate,
    held_out_windows,
    learning_rate,
    parameter_groups,
)
from longhorn_kit.models.recompute import chunked_cross_entropy
from longhorn_kit.records import read_json, read_jsonl, read_record, write_record
from tiny_training import (
    CONFIG,
    TOKENS,
    VAL,
    Interrupting,
    Masked,
    Tiny,
    alone,
    curve,
    failing,
    language_model,
    run,
    same_curves,
)


def losses(model, tokens=TOKENS, val=None, folder=None, end=None, **changes):
    "Train, and return the loss of every step."
    result = train(
        model, tokens, val, dataclasses.replace(CONFIG, **changes), folder, quiet=True, end=end
    )
    return [line["loss"] for line in result["history"]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(one_thread):
    "Return the history of a run without interruption."
    return curve(run()["history"])


def train_slowly(folder):
    "Train slowly, so that the process can be killed."
    slow = Interrupting(0, None)

    def next_batch():
        time.sleep(0.02)
        return Sampler.next_batch(slow)

    slow.next_batch = next_batch
    train(Tiny(), slow, VAL, CONFIG, folder, quiet=True)


# ---- resuming


def test_kill_9_and_resume_gives_the_same_metrics_to_the_bit(tmp_path, whole):
    process = multiprocessing.get_context("fork").Process(
        target=train_slowly, args=(tmp_path / "run",)
    )
    process.start()
    try:
        deadline = time.monotonic() + 120
        while not any(line["step"] > 20 for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")):
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.03)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) < CONFIG.steps
    torch.manual_seed(
        99
    )  # a resumed run starts with another random state and other initial weights
    result = run(tmp_path / "run", seed=7)
    assert result["resumed_from"] in (20, 30, 40)
    assert (
        curve(result["history"]) == whole == curve(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    )
    attempts = read_json(tmp_path / "run" / "config.json")["attempts"]
    starts = [attempt["from_step"] for attempt in attempts]
    assert starts == [0, result["resumed_from"]]


@pytest.mark.parametrize(
    "at, saved, changes",
    [
        (1, 0, {}),
        (10, 0, {}),
        (11, 10, {}),
        (60, 50, {}),
        (26, 25, dict(save_every=0, save_seconds=0.0)),
        (43, 40, dict(async_save=True)),
        (43, 40, dict(checkpoint_blocks=True)),
    ],
)  # settings that do not change a bit
def test_stopped_anywhere_a_run_ends_the_same(tmp_path, whole, at, saved, changes):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(MemoryError):
        run(tmp_path, Interrupting(at, failing(MemoryError("killed"))), config)
    names = [path.name for path in checkpoints(tmp_path)]
    result = names[-1:]
    expected = [f"step-{saved:08d}"] if saved else []
    assert result == expected
    # the initial weights matter before a checkpoint
    result = run(tmp_path, config=config, seed=3 if saved else 0)
    assert result["resumed_from"] == (saved or None)
    assert curve(result["history"]) == whole


def test_a_copy_of_a_model_that_recomputes_its_blocks_runs_its_own():
    from longhorn_kit.lab.train.recipe import checkpoint_blocks

    model = language_model()
    tokens = torch.arange(8)[None]
    checkpoint_blocks(model)
    copy = pickle.loads(pickle.dumps(model))
    for p in copy.parameters():
        p.data.zero_()
    y = copy(tokens)
    y.sum().backward()
    assert not copy(tokens).any()
    assert model(tokens).any()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "signals, at, saved, says",
    [
        (("SIGINT",), 23, 23, "stopped by SIGINT after step 23; .*same call resumes"),
        (("SIGINT", "SIGINT"), 13, 10, None),  # the second signal stops at once
        (("SIGTERM", "SIGTERM"), 13, 13, "stopped by SIGTERM after step 13"),
    ],
)  # one signal from the cluster, one from the launcher
def test_signals_leave_a_checkpoint_and_say_how_to_resume(
    tmp_path, whole, signals, at, saved, says
):
    def send():
        for name in signals:
            number = getattr(signal, name)
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt, match=says):
        run(tmp_path, Interrupting(at, send))
    last = checkpoints(tmp_path)[-1]
    assert last.name == f"step-{saved:08d}"
    if says:
        assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == list(
            range(1, saved + 1)
        )
    result = run(tmp_path)
    assert result["resumed_from"] == saved
    assert curve(result["history"]) == whole
    handler = signal.getsignal(signal.SIGINT)
    assert handler is signal.default_int_handler


def test_a_finished_run_is_not_run_again_and_has_its_last_checkpoints(tmp_path, whole):
    run(tmp_path)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-00000050", "step-00000060"]
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["step-00000050", "step-00000060"]
    repeated = run(tmp_path, Interrupting(1, failing(AssertionError("trained again"))), seed=5)
    assert curve(repeated["history"]) == whole
    expected = whole[-1]["val_loss"]
    assert repeated["val_loss"] == expected
    model = Tiny(5)
    train(model, TOKENS, VAL, CONFIG, tmp_path, quiet=True)  # with the last step's weights
    loss = evaluate(model, VAL, CONFIG.context)
    expected = whole[-1]["val_loss"]
    assert math.isclose(loss, expected, rel_tol=1e-6)


# ---- damage


def damages(folder):
    "Return ways to damage a checkpoint: (file, function of its bytes or None)."

    def cut(b):
        return b[: len(b) // 2]

    def bit(b):
        flipped = bytes([b[-9] ^ 1])
        return b[:-9] + flipped + b[-8:]

    return [
        (path.name, damage)
        for path in sorted(folder.iterdir())
        for damage in (cut, bit, lambda b: b"[]", None)
    ]


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, capsys, whole):
    run(tmp_path / "run")
    cases = damages(tmp_path / "run" / "checkpoints" / "step-00000060")
    assert len(cases) == 16
    for number, (file, damage) in enumerate(cases):
        shutil.copytree(tmp_path / "run", folder := tmp_path / str(number))
        victim = folder / "checkpoints" / "step-00000060" / file
        content = victim.read_bytes()
        victim.unlink()
        if damage:
            victim.write_bytes(damage(content))
        result = run(folder, seed=4)
        assert result["resumed_from"] == 50
        assert curve(result["history"]) == whole
        warning = capsys.readouterr().err
        if damage or file != "checkpoint.json":  # without this file, no checkpoint exists
            assert warning.count("\n") == 1
            assert "damaged" in warning
            assert "using the previous checkpoint" in warning
            assert file in warning


def test_when_all_checkpoints_are_lost_nothing_is_overwritten(tmp_path, whole):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").unlink()  # a checkpoint contains the metrics too
    assert curve(run(tmp_path)["history"]) == whole
    assert curve(read_jsonl(tmp_path / "metrics.jsonl")) == whole
    for path in checkpoints(tmp_path):
        (path / ".metadata").write_bytes(b"")
    with pytest.raises(
        ValueError, match="every checkpoint in .* is damaged .*; delete the folder"
    ) as caught:
        run(tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_folder_belongs_to_one_run(tmp_path):
    short = dataclasses.replace(CONFIG, steps=10, save_every=5)
    run(tmp_path, config=short)
    with pytest.raises(
        ValueError, match="contains a run with lr=0.01, but this run has lr=0.02"
    ) as caught:
        run(tmp_path, config=dataclasses.replace(short, lr=0.02))
    with pytest.raises(ValueError, match="does not fit this model") as misfit:
        train(Tiny(d=8), TOKENS, VAL, short, tmp_path, quiet=True)
    with pytest.raises(ValueError, match="the saved position belongs to text=2000 tokens"):
        run(tmp_path, TOKENS[:1000], short)
    for error in (caught, misfit):
        assert "\n" not in str(error.value)
    assert (
        run(tmp_path, config=dataclasses.replace(short, log_every=1, save_total_limit=1))[
            "resumed_from"
        ]
        == 10
    )


@pytest.mark.parametrize("name", ["replace", "fsync"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_while_saving_loses_nothing(tmp_path, monkeypatch, whole, name, in_background):
    real = getattr(os, name)
    config = dataclasses.replace(CONFIG, async_save=in_background)

    def full(*args, **options):
        if "step-00000030" in str(args) + str(
            [os.readlink(f"/proc/self/fd/{a}") for a in args if isinstance(a, int)]
        ):
            message = os.strerror(errno.ENOSPC)
            raise OSError(errno.ENOSPC, message)
        return real(*args, **options)

    message = "cannot write .*step-00000030.*the old contents are unchanged"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=message) as caught:
        patch.setattr(os, name, full)
        run(tmp_path, config=config)
    assert "\n" not in str(caught.value)
    assert "partial" not in str(caught.value)  # the message has the final name
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["step-00000010", "step-00000020"]
    result = run(tmp_path, seed=8, config=config)
    assert result["resumed_from"] == 20
    assert curve(result["history"]) == whole


def test_averaged_weights_are_those_of_a_plain_loop_and_resume(tmp_path):
    config = dataclasses.replace(CONFIG, ema=0.9, eval_every=1)
    observed = []
    model = Tiny()
    step = training.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training,
            "train_step",
            lambda run: (
                step(run),
                observed.append([p.detach().clone() for p in run.bare.parameters()]),
            ),
        )
        result = train(model, TOKENS, VAL, config, quiet=True)
    parameters = Tiny().parameters()
    average = [p.detach().clone() for p in parameters]
    for weights in observed:
        pairs = zip(average, weights)
        average = [0.9 * a + 0.1 * w for a, w in pairs]
    for a, p in zip(average, model.parameters()):
        assert torch.allclose(a, p, atol=1e-6)
    assert (
        math.isclose(result["ema_val_loss"], evaluate(model, VAL, CONFIG.context), rel_tol=1e-6)
        != result["val_loss"]
    )
    with pytest.raises(MemoryError):
        run(tmp_path, Interrupting(33, failing(MemoryError())), config)
    repeated = curve(run(tmp_path, config=config)["history"])
    assert repeated == curve(result["history"])


@pytest.mark.parametrize("step", [10, 7])  # step 10 is saved again, step 7 is not
def test_files_left_by_a_killed_save_are_ignored_and_replaced(tmp_path, whole, step):
    leftover = tmp_path / "checkpoints" / f".step-{step:08d}.abc123-1.partial"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert curve(run(tmp_path)["history"]) == whole
    assert not leftover.exists()


# ---- divergence


class Nan(Tiny):
    "Model whose loss or gradient is wrong at one call in training."

    def __init__(self, at, gradient_only=False):
        super().__init__()
        self.at = at
        self.calls = 0
        self.gradient_only = gradient_only

    def forward(self, tokens, targets):
        logits, loss = super().forward(tokens, targets)
        self.calls += self.training
        if self.training and self.calls == self.at:
            loss = loss + torch.sqrt(0 * loss) if self.gradient_only else loss * math.nan
        return loss


@pytest.mark.parametrize("gradient_only", [False, True])
def test_divergence_names_the_step_and_the_last_good_checkpoint(tmp_path, gradient_only):
    with pytest.raises(
        TrainingDiverged, match=r"at step 18 \(.*last checkpoint: .*step-00000010; "
    ) as caught:
        train(Nan(18, gradient_only), TOKENS, VAL, CONFIG, tmp_path, quiet=True)
    assert "\n" not in str(caught.value)
    assert ("gradient" in str(caught.value)) == gradient_only
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-00000010"]
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, 18))
    for line in lines:
        assert math.isfinite(line["loss"])
    history = run(tmp_path)["history"]
    result = curve(history)[-1]["step"]
    assert result == 60  # the earlier checkpoint is intact


def test_no_checkpoint_is_made_of_a_diverged_step(tmp_path):
    config = dataclasses.replace(CONFIG, save_every=1, log_every=50, eval_every=1000)
    with pytest.raises(TrainingDiverged, match="at step 5 "):
        train(Nan(5), TOKENS, VAL, config, tmp_path, quiet=True)
    last = checkpoints(tmp_path)[-1]
    assert last.name == "step-00000004"
    with pytest.raises(TrainingDiverged, match="last checkpoint: none"):
        train(Nan(5), TOKENS, VAL, config, quiet=True)


class SquaredWeights(Tiny):
    "Model whose loss is infinite or NaN if a weight is beyond 1e20."

    def forward(self, tokens, targets):
        logits, loss = super().forward(tokens, targets)
        penalty = self.hidden.weight.square().sum()
        return logits, loss + penalty


@pytest.mark.numeric
def test_weights_lost_in_the_last_update_are_noticed(tmp_path):
    config = dataclasses.replace(CONFIG, steps=1, warmup=0, lr=1e30)
    with pytest.raises(TrainingDiverged, match="val_loss is (nan|inf) at step 1"):
        train(SquaredWeights(0), TOKENS, VAL, config, tmp_path, quiet=True)
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize(
    "wrong, says",
    [
        *(
            (dict([pair]), "{} is {}; it must be from 0".format(*pair))
            for pair in (
                ("lr", math.nan),
                ("lr", math.inf),
                ("save_every", -1),
                ("clip", -1.0),
                ("min_lr_ratio", -3),
                ("loss_chunk", -1),
                ("seed", -1),
                ("seed", 2**70),
                ("ema", 1.5),
            )
        ),
        *(
            ({name: 0}, f"{name} is 0; it must be from 1")
            for name in ("steps", "gradient_accumulation_steps")
        ),
        (dict(warmup=60), "warmup is 60; it must be in 0 to steps-1=59"),
        (dict(precision="fp8"), "precision is 'fp8'"),
        (dict(decay="all"), "decay is 'all'; it must be 'matrices' or 'official'"),
        (
            dict(gradient_accumulation_steps=3),
            "batch_size=4 cannot be divided among 1 processes with gradient_accumulation_steps=3",
        ),
        (dict(loss_chunk=8), "loss_chunk is 8, which needs a language model, but Tiny is not one"),
        (
            dict(sharding="fsdp"),
            "sharding is 'fsdp', but there is one process; start several processes with torchrun",
        ),
        (dict(sharding="zero"), "sharding is 'zero'; it must be 'auto' or 'none' or"),
        (dict(reset_documents=True), "reset_documents needs `end`"),
        (
            dict(reset_documents=True, compile=True),
            "compile and reset_documents cannot be combined",
        ),
        (dict(context=2000), "the text has 2,000 tokens; a context of 2000 needs at least 2001"),
    ],
)
def test_impossible_settings_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says) as caught:
        run(config=dataclasses.replace(CONFIG, **wrong))
    assert "\n" not in str(caught.value)


# ---- evaluation


class Table(nn.Module):
    "Bigram table, whose loss on a text can be computed by hand for any windows."

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(32, 32, generator=generator)
        self.logits = nn.Parameter(logits)

    def forward(self, tokens, targets):
        logits = self.logits[tokens].flatten(0, 1)
        flat_targets = targets.flatten()
        return nn.functional.cross_entropy(logits, flat_targets)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 90), st.integers(1, 20), st.integers(1, 9))
def test_evaluation_is_the_mean_over_every_token_except_the_first(length, context, batch):
    model = Table()
    text = VAL[:length]
    logits_of_model = model.logits.detach()
    logits = logits_of_model.double().numpy()
    total = np.exp(logits).sum(-1, keepdims=True)
    log_p = logits - np.log(total)
    pairs = zip(text[:-1], text[1:])
    log_probabilities = [log_p[a, b] for a, b in pairs]
    by_hand = -np.mean(log_probabilities)
    assert math.isclose(evaluate(model, text, context, batch), by_hand, rel_tol=1e-5)
    windows = list(held_out_windows(np.arange(length), context, batch))
    observed = [(int(a), int(b)) for x, y in windows for a, b in zip(x.flatten(), y.flatten())]
    expected = [(i, i + 1) for i in range(length - 1)]
    assert observed == expected
    largest = max(len(x) for x, _ in windows)
    assert largest <= batch


def test_evaluation_changes_nothing_and_training_no_random_state():
    model = Tiny().train()
    other = Tiny()
    result = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    for call in (
        lambda: evaluate(model, VAL, 8),
        lambda: evaluate(model, VAL, 8),
        lambda: losses(other, steps=3, warmup=1),
    ):
        torch.manual_seed(5)
        result.append(call())
        assert torch.equal(torch.rand(3), expected)
    assert result[0] == result[1]
    assert model.training
    for p in model.parameters():
        assert p.grad is None
    with pytest.raises(ValueError, match="held-out part has 1 token; it needs at least 2"):
        evaluate(model, VAL[:1], 8)


def test_a_model_with_a_part_without_gradients_resumes(tmp_path):
    class Part(Tiny):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3)

    config = dataclasses.replace(CONFIG, steps=4, warmup=1, cpu=True)
    first = train(Part(), TOKENS, None, config, tmp_path, quiet=True)
    result = train(Part(), TOKENS, None, config, tmp_path, quiet=True)["loss"]
    assert result == first["loss"]


def test_the_number_of_evaluations_does_not_change_training(whole):
    def noisy(model):  # an evaluation that draws random numbers
        drawn = torch.rand(())
        return {"score": float(drawn)}

    often = train(
        Tiny(), TOKENS, noisy, dataclasses.replace(CONFIG, eval_every=1, log_every=7), quiet=True
    )
    result = [line["loss"] for line in often["history"]]
    assert result == [line["loss"] for line in whole]
    assert "score" in often
    for line in often["history"]:
        assert "score" in line


# ---- optimisation


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.data())
def test_schedule_rises_then_falls_to_its_end(steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    end = data.draw(st.floats(0, 1))
    config = TrainConfig(steps=steps, warmup=warmup, lr=0.5, min_lr_ratio=end)
    rates = [learning_rate(step, config) for step in range(1, steps + 1)]
    up = rates[: config.warmup]
    start = max(config.warmup - 1, 0)
    down = rates[start:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert max(rates) <= 0.5
    assert math.isclose(rates[-1], 0.5 * end, abs_tol=1e-12)
    for rate in rates[:-1]:
        assert rate > 0


def test_only_matrices_decay_and_every_parameter_is_in_one_group():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.proj = nn.Linear(4, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight  # tied
            self.conv = nn.Conv1d(4, 4, 4, groups=4)
            self.norm = nn.LayerNorm(4)
            self.A_log = nn.Parameter(torch.zeros(4, 2))
            self.conv_weight, self.raw, self.special = (
                nn.Parameter(torch.zeros(4, 4)) for _ in range(3)
            )
            self.special._no_weight_decay = True
            self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    model = Block()
    decay, rest = parameter_groups(model, 0.1)
    assert decay["names"] == ["raw", "proj.weight"]
    assert decay["weight_decay"] == 0.1
    assert rest["weight_decay"] == 0
    ids = [id(p) for group in (decay, rest) for p in group["params"]]
    assert len(ids) == len(set(ids)) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "mixer, options",
    [
        *(
            (name, {})
            for name in ("longhorn", "longhorn_exact", "mamba", "attention", "rwkv5", "rwkv6")
        ),
        ("longhorn_exact", dict(key_norm=True)),
    ],
)
def test_language_models_decay_projections_alone(mixer, options):
    model = language_model(d_model=32, n_layer=1, mixer=mixer, mixer_options=options)
    decay = parameter_groups(model, 0.1)[0]
    modules = dict(model.named_modules())
    if mixer.startswith("rwkv"):  # stacked vectors have no weight decay
        assert decay["names"]
        names = [name for name in decay["names"] if name.endswith(("mixer.mix", "mixer.bonus"))]
        assert not names
        return
    assert decay["names"]
    for name in decay["names"]:
        module = modules[name.rpartition(".")[0]]
        assert isinstance(module, nn.Linear)
    linear = {id(m.weight) for m in modules.values() if isinstance(m, nn.Linear)}
    embedded = {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding)}
    result = {id(p) for p in decay["params"]}
    assert result == linear - embedded


@pytest.mark.parametrize(
    "mixer, options, special",
    [
        ("longhorn", {}, {"conv1d.weight"}),
        ("longhorn", dict(key_norm=True), {"conv1d.weight"}),
        ("mamba", {}, {"conv1d.weight", "A_log"}),
        ("attention", {}, set()),
        ("rwkv5", {}, {"mix"}),
    ],
)
def test_officially_everything_except_vectors_decays(mixer, options, special):
    model = language_model(d_model=16, n_layer=1, mixer=mixer, mixer_options=options)
    decay, rest = parameter_groups(model, 0.1, "official")
    names = set(decay["names"])
    assert (
        set(parameter_groups(model, 0.1)[0]["names"])
        < names
        >= {"embedding.weight", *(f"blocks.0.mixer.{name}" for name in special)}
    )
    for p in decay["params"]:
        assert p.ndim >= 2
    for p in rest["params"]:
        assert p.ndim < 2
    undecayed = [name for name in names if "norm" in name or name.endswith(("bias", "D_skip"))]
    assert not undecayed
    result = len(names) + len(rest["names"])
    expected = len(list(model.parameters()))
    assert result == expected


def test_the_decay_of_a_run_is_kept_and_decides_it(tmp_path):
    result = []
    for decay in ("matrices", "official"):
        result.append(
            losses(Tiny(dropout=0.0), folder=tmp_path / decay, weight_decay=5.0, decay=decay)
        )
        config = read_json(tmp_path / decay / "config.json")["config"]
        assert config["decay"] == decay
    assert result[0][0] == result[1][0]
    last = result[0][-1]
    other_last = result[1][-1]
    assert last != other_last


def test_runs_of_earlier_versions(tmp_path):
    "Settings missing in an old run get their defaults; a checkpoint in the old format is refused."
    config = dataclasses.replace(CONFIG, save_every=5)
    whole = train(Tiny(), TOKENS, None, config, tmp_path, quiet=True)
    record = read_record(tmp_path / "config.json")
    assert record["config"].pop("decay") == "matrices"
    write_record(tmp_path / "config.json", record)
    assert (
        train(Tiny(), TOKENS, None, config, tmp_path, quiet=True)["resumed_from"] == whole["steps"]
    )
    with pytest.raises(
        ValueError, match="contains a run with decay=matrices, but this run has decay=official"
    ):
        train(
            Tiny(),
            TOKENS,
            None,
            dataclasses.replace(config, decay="official"),
            tmp_path,
            quiet=True,
        )
    manifest = tmp_path / "checkpoints" / "step-00000060" / "manifest.json"
    manifest.write_text("{}")
    with pytest.raises(
        ValueError, match="step-00000060 is from an earlier version of the kit.*use another folder"
    ):
        train(Tiny(), TOKENS, None, config, tmp_path, quiet=True)


@pytest.mark.numeric
def test_steps_are_those_of_plain_adamw_with_the_decay_where_it_belongs():
    config = dataclasses.replace(CONFIG, steps=5, warmup=2, clip=0.05, weight_decay=0.3)
    model = Tiny(dropout=0.0)
    own = Tiny(dropout=0.0)
    result = train(own, TOKENS, None, config, quiet=True)
    sampler = Sampler(TOKENS, 8, 4, 0)
    moments = {}
    expected = []
    for step in range(1, 6):  # AdamW, step by step
        model.zero_grad()
        inputs = sampler.next_batch()
        loss = model(*inputs)[1]
        loss.backward()
        expected.append(loss.item())
        squares = sum((p.grad**2).sum() for p in model.parameters())
        norm = torch.sqrt(squares)
        rate = learning_rate(step, config)
        for name, p in model.named_parameters():
            scale = min(1.0, 0.05 / float(norm))
            g = p.grad * scale
            zeros = (torch.zeros_like(p), torch.zeros_like(p))
            m, v = moments.get(name, zeros)
            moments[name] = m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            with torch.no_grad():
                if name in ("hidden.weight", "head.weight"):
                    p *= 1 - rate * 0.3
                mean = m / (1 - 0.9**step)
                root = torch.sqrt(v / (1 - 0.95**step))
                p -= rate * mean / (root + 1e-8)
    result_losses = [line["loss"] for line in result["history"]]
    assert np.allclose(result_losses, expected, rtol=1e-5)
    pairs = zip(own.parameters(), model.parameters())
    for a, b in pairs:
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("votes", [(), (True, False), (False, True)])
def test_votes_travel_with_the_count_of_targets(votes):
    "With 1,023 processes of 2**20 targets each, neither targets nor votes overflow."
    parts = [torch.zeros(1024, 768, dtype=torch.int64), torch.zeros(1024, 256, dtype=torch.int64)]
    many = SimpleNamespace(num_processes=1023, reduce=lambda local, how: local * 1023)
    weights, vote_counts = training.token_weights(parts, many, votes)
    assert weights.tolist() == [1.5, 0.5]
    assert vote_counts() == [1023 * vote for vote in votes]


class Sparse(Sampler):
    "Sampler with targets only in the first row of every other batch of 4 rows."

    def next_batch(self):
        rows = torch.arange(self.batch_size)[:, None]
        row = self.drawn + rows
        inputs, targets = super().next_batch()
        hidden = row % 8 > 0
        return inputs, targets.masked_fill(hidden, -100)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "sampler, steps, chunk",
    [(Sampler, 12, 0), (Masked, 12, 0), (Masked, 12, 5), (Sparse, 6, 0), (Sparse, 6, 5)],
)
def test_micro_batches_count_by_their_targets(sampler, steps, chunk):
    "A micro-batch without targets adds nothing."
    one = language_model()
    other = language_model()
    whole, parts = (
        losses(
            model,
            sampler(TOKENS, CONFIG.context, CONFIG.batch_size // n, CONFIG.seed),
            steps=steps,
            warmup=2,
            gradient_accumulation_steps=n,
            loss_chunk=chunk,
        )
        for model, n in ((one, 1), (other, 4))
    )
    assert np.allclose(whole, parts, rtol=1e-4)
    assert min(whole[::2]) > 0
    assert whole[1::2] == parts[1::2] == [0, 0, 0] or sampler is not Sparse
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    for a, b in pairs:
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.numeric
def test_bf16_trains_with_weights_in_float32():
    model = Tiny()
    repeated = np.tile(TOKENS[:32], 50)
    result = losses(model, repeated, precision="bf16", steps=200)
    last = np.mean(result[-10:])
    assert last < 2.0 < result[0]
    for p in model.parameters():
        assert p.dtype == torch.float32
    assert run()["steps"] == 60  # and float32 again later in the same process


def test_the_seed_changes_the_order_of_the_data(whole):
    result = losses(Tiny(), seed=1)[:5]
    expected = [line["loss"] for line in whole][:5]
    assert result != expected


def test_records_hold_no_machine_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [str(tmp_path / "bin" / "longhorn"), "train-lm", "--out", str(tmp_path / "x")]
    )
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # not `python -m pytest`
    run(tmp_path / "run", config=dataclasses.replace(CONFIG, steps=8))
    record = read_json(tmp_path / "run" / "config.json")
    assert record["attempts"][0]["command"] == "longhorn train-lm --out ./x"
    assert record["config"]["lr"] == 0.01
    paths = (tmp_path / "run").rglob("*")
    files = [path for path in paths if path.is_file()]
    assert len(files) > 5
    named = [path for path in files if os.fsencode(tmp_path) in path.read_bytes()]
    assert not named


def test_an_old_checkpoint_disappears_in_one_step(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "checkpoint.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(
            records.shutil, "rmtree", failing(KeyboardInterrupt())
        )  # process killed before the first file is removed
        with pytest.raises(KeyboardInterrupt):
            tidy(tmp_path, 1)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["step-00000002", "step-00000003"]
    tidy(tmp_path, 1)
    names = os.listdir(tmp_path / "checkpoints")
    assert names == ["step-00000003"]


# ---- on large machines


@pytest.mark.numeric
@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_sliced_loss_is_the_whole_one(chunk, bf16):
    torch.manual_seed(1)
    h = torch.randn(33, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=True)
    targets = torch.randint(11, (33,))
    targets[::5] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = nn.functional.linear(h, weight)
        expected = nn.functional.cross_entropy(logits.float(), targets)
        own = chunked_cross_entropy(h, weight, targets, chunk)
    assert own.dtype == torch.float32
    assert torch.allclose(own, expected, rtol=1e-5)
    gradients = torch.autograd.grad(3 * own, (h, weight))
    expected_gradients = torch.autograd.grad(3 * expected, (h, weight))
    for a, b in zip(gradients, expected_gradients):
        assert torch.allclose(a, b, atol=2e-2 if bf16 else 1e-6)
    with torch.no_grad():
        assert torch.allclose(chunked_cross_entropy(h, weight, targets, chunk), own, rtol=1e-2)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False, "dropout": 0.3, "mixer": "longhorn"}]
)
def test_slices_change_nothing_in_training(options):
    same_curves(
        alone(language_model(**options), steps=12, loss_chunk=10),
        alone(language_model(**options), steps=12),
    )


@pytest.mark.numeric
@pytest.mark.parametrize("chunk", [0, 5])
def test_the_state_is_reset_at_documents(chunk):
    "The loss equals that of separate documents; earlier tokens do not change it."
    model = language_model(mixer="longhorn")
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 32, (2, 25), generator=generator)
    tokens[0, [4, 5, 17]] = tokens[1, 24] = 0
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    pieces = [(0, 0, 5), (0, 5, 6), (0, 6, 18), (0, 18, 24), (1, 0, 24)]
    by_hand = (
        sum(
            model(inputs[row : row + 1, a:b], targets[row : row + 1, a:b])[1] * (b - a)
            for row, a, b in pieces
        )
        / 48
    )
    assert torch.allclose(LossOnly(model, chunk, end=0)(inputs, targets), by_hand, rtol=1e-5)
    assert not torch.allclose(LossOnly(model, chunk)(inputs, targets), by_hand, rtol=1e-5)
    resets = losses(language_model(mixer="longhorn"), steps=8, reset_documents=True, end=3)
    assert resets != losses(language_model(mixer="longhorn"), steps=8)
    assert all(map(math.isfinite, resets))


@pytest.mark.numeric
def test_compiled_blocks_keep_names_checkpoints_and_losses(tmp_path, monkeypatch):
    import functools

    eager = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", eager)
    short = dataclasses.replace(CONFIG, steps=12, save_every=6, loss_chunk=16)
    alone = train(language_model(n_layer=3), TOKENS, VAL, short, quiet=True)["history"]
    torch._dynamo.utils.counters.clear()
    model = language_model(n_layer=3)
    compiled = dataclasses.replace(short, compile=True)
    result = train(model, TOKENS, VAL, compiled, tmp_path, quiet=True)
    stats, breaks = (torch._dynamo.utils.counters[name] for name in ("stats", "graph_break"))
    assert stats["unique_graphs"] == 1
    assert not breaks  # one block for all three documents
    same_curves(result["history"], alone)
    result = list(model.state_dict())
    expected = list(language_model(n_layer=3).state_dict())
    assert result == expected
    (tmp_path / "checkpoints" / "step-00000012" / "checkpoint.json").unlink()
    plain = train(language_model(n_layer=3), TOKENS, VAL, short, tmp_path, quiet=True)
    assert plain["resumed_from"] == 6
    same_curves(plain["history"], alone)
    attempts = read_json(tmp_path / "config.json")["attempts"]
    engines = [attempt["engine"] for attempt in attempts]
    assert [engine["compile"] for engine in engines] == [True, False]
    for engine in engines:
        assert engine["scan"] == "scaled_dot_product_attention"


def test_tokens_beyond_the_vocabulary_are_one_line():
    with pytest.raises(
        ValueError, match="the data has a token 31, but the model's vocabulary ends at 19"
    ) as caught:
        train(language_model(vocab_size=20), TOKENS, None, CONFIG, quiet=True)
    assert "\n" not in str(caught.value)
