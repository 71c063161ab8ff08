"""Copies and slices of a model train equally, resume each other's checkpoints, and end together."""

import dataclasses
import math
import os
import shutil
import socket
import sys
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from longhorn_kit.lab.data.text import Sampler
from longhorn_kit.lab.distributed import leave, make_accelerator, only_run_in, see_folder, together
from longhorn_kit.lab.train import checkpoint
from longhorn_kit.lab.train import loop as training
from longhorn_kit.lab.train.checkpoint import checkpoints
from longhorn_kit.lab.train.lm import gather_full_model
from longhorn_kit.lab.train.loop import train
from longhorn_kit.lab.train.recipe import evaluate
from longhorn_kit.lab.use import UsageError
from longhorn_kit.records import read_json, read_jsonl
from pool import Alone, Pool
from rounding import bound
from sweep import slow_case
from tiny_training import CONFIG, TOKENS, VAL, Masked, Tiny, alone, language_model, run, same_curves

SHORT = dataclasses.replace(CONFIG, steps=20)
LAYOUTS = {
    "one": (1, "none"),
    "two copies": (2, "ddp"),
    "two slices": (2, "fsdp"),
    "four slices": (4, "fsdp"),
}


class Pools:
    "Return pools by their number of processes; each is started at its first use."

    def __init__(self):
        self.started = {}

    def __call__(self, count):
        if count not in self.started:
            self.started[count] = Alone() if count == 1 else Pool(count)
        return self.started[count]

    def drop(self, count):
        "End the processes of a pool, so that the next call starts new ones."
        self.started.pop(count).close()


@pytest.fixture(scope="module")
def pools():
    pools = Pools()
    yield pools
    for count in list(pools.started):
        pools.drop(count)


def no_error(result):
    assert not [text for text in result if isinstance(text, str)], result
    return result


def curve(folder):
    return [
        {
            name: line.get(name)
            for name in (
                "step",
                "loss",
                "grad_norm",
                "lr",
                "val_loss",
                "ema_val_loss",
                "top1",
                "ema_top1",
                "epoch",
            )
        }
        for line in read_jsonl(folder / "metrics.jsonl")
    ]


# ---- all changes of layout


def language(folder, sharding, stop=None):
    "Train a language model with all kinds of weights until an error at step `stop`."
    torch.manual_seed(0)
    config = dataclasses.replace(
        SHORT, batch_size=8, sharding=sharding, ema=0.9, loss_chunk=5, eval_every=5, save_every=8
    )
    train(
        language_model(mixer="longhorn", tie_embeddings=False),
        failing(sampled(Sampler, 8), stop) if stop else TOKENS,
        VAL,
        config,
        folder,
        quiet=True,
    )


def failing(sampler, at):
    "Make a sampler raise an error at a step, or never."
    draw = sampler.next_batch

    def next_batch():
        if at is not None and sampler.drawn == 8 * at:
            raise MemoryError("stopped")
        return draw()

    sampler.next_batch = next_batch
    return sampler


def sampled(kind, rows, gradient_accumulation_steps=1):
    "Return a sampler of this process's rows of a step."
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    return kind(
        TOKENS,
        CONFIG.context,
        rows // world // gradient_accumulation_steps,
        CONFIG.seed,
        rank,
        world,
    )


def images(folder, sharding, stop=None):
    "Train on images equally in any layout, without Mixup, which pairs images of a process."
    from longhorn_kit.lab.data import (
        images as lab_images,  # takes seconds that other tests' processes save
    )
    from longhorn_kit.lab.experiments import vision as lab_vision
    from longhorn_kit.lab.train import vision as vision_training

    accelerator = make_accelerator(cpu=True)
    options = dict(epochs=4, batch_size=8, ema=0.9, repeats=2, save_every=8)
    config = vision_training.vision_config(
        "digits", cpu=True, sharding=sharding, log_every=4, **options
    )

    def digits(part):
        return lab_images.digit_images(
            lab_vision.ImageSet(*(tensor[:40] for tensor in lab_vision.digits()[part == "val"]))
        )

    with patch.object(lab_images, "open_part", lambda _, part: digits(part)):
        model, batches, val, metadata = vision_training.run_parts(config, folder, accelerator)
    validate = vision_training.measure(batches, val, accelerator)
    train(
        model,
        failing(batches, stop),
        validate,
        batches.config,
        folder,
        quiet=True,
        beside={"images.json": metadata},
    )


KINDS = {"language": language, "images": images}
# slices are stopped and resumed bit for bit, and as copies
QUICK = [("language", "two slices", "two copies"), ("language", "two slices", "two slices")]
CHANGES = [
    change if change in QUICK else slow_case(*change) for change in product(KINDS, LAYOUTS, LAYOUTS)
]


@pytest.fixture(scope="module")
def trained(pools, tmp_path_factory):
    "Return a function that trains in a layout, up to step `at`, and returns the folder of the run."

    @cache
    def folder(kind, layout, at=None):
        out = tmp_path_factory.mktemp(kind) / "run"
        count, sharding = LAYOUTS[layout]
        messages = pools(count).run(KINDS[kind], out, sharding, at)
        assert messages == [at and "MemoryError: stopped"] * count, messages
        result = [path.name for path in checkpoints(out)][:1]
        expected = [f"step-000000{'08' if at else '16'}"]
        assert result == expected
        return out

    return folder


@pytest.mark.parametrize("kind, before, after", CHANGES)
def test_a_run_resumes_with_other_processes_and_sharding(
    trained, pools, tmp_path, kind, before, after
):
    shutil.copytree(trained(kind, before, 10), tmp_path / "run")
    count, sharding = LAYOUTS[after]
    no_error(pools(count).run(KINDS[kind], tmp_path / "run", sharding))
    result = curve(tmp_path / "run")
    whole = curve(trained(kind, "one"))
    if before == after:
        assert result == curve(trained(kind, before))
    assert (
        [line["step"] for line in result] == [line["step"] for line in whole] == list(range(1, 21))
    )
    for line, expected in zip(result, whole):
        for name, value in expected.items():
            assert value is None or math.isclose(line[name], value, rel_tol=1e-5, abs_tol=1e-5), (
                name,
                line,
                expected,
            )
    metadata = read_json(tmp_path / "run" / "config.json")["attempts"]
    result = [attempt["engine"]["sharding"] for attempt in metadata]
    expected = [LAYOUTS[before][1], sharding]
    assert result == expected
    assert [attempt["from_step"] for attempt in metadata] == [0, 8]


class Counting(checkpoint.Reader):
    bytes = 0

    def _slice_file(self, file, piece):
        Counting.bytes += piece.length
        return super()._slice_file(file, piece)


def large(folder, sharding):
    "Train a measurably large model; return the bytes of checkpoints that this process read."
    Counting.bytes = 0
    with patch.object(checkpoint, "Reader", Counting):
        plain(
            folder, language_model, options={"d_model": 128}, sharding=sharding, steps=2, warmup=1
        )
    return Counting.bytes


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_process_reads_and_writes_its_share_alone(pools, tmp_path, sharding):
    "With copies, a process writes half and reads all; with slices, it reads its own files."
    assert no_error(pools(2).run(large, tmp_path, sharding)) == [0, 0]
    stored = [path.stat().st_size for path in checkpoints(tmp_path)[0].glob("*.distcp")]
    shares = no_error(pools(2).run(large, tmp_path, sharding))
    half = sum(stored) / 2
    assert len(stored) == 2
    assert max(stored) <= 1.03 * half
    for share in shares:
        assert math.isclose(share, half * (2 if sharding == "ddp" else 1), rel_tol=0.03)


# ---- two processes as one


def plain(folder, model=Tiny, tokens=TOKENS, options=None, **changes):
    model = model(**options or {"dropout": 0.0})
    tokens = (
        sampled(tokens, 4, changes.get("gradient_accumulation_steps", 1))
        if callable(tokens)
        else tokens
    )
    train(model, tokens, VAL, dataclasses.replace(SHORT, **changes), folder, quiet=True)
    return evaluate(gather_full_model(model), VAL, 8) if hasattr(model, "config") else None


@pytest.mark.numeric
@pytest.mark.parametrize(
    "options",
    [
        dict(track="tensorboard"),
        dict(gradient_accumulation_steps=2, tokens=Masked),
        dict(async_save=True),
        slow_case(
            dict(
                sharding="fsdp",
                model=language_model,
                options={},
                checkpoint_blocks=True,
                async_save=True,
                gradient_accumulation_steps=2,
            )
        ),
        dict(sharding="fsdp", model=language_model, options={"mixer": "longhorn_exact"}),
    ],
)
def test_two_processes_train_as_one_would(pools, tmp_path, options):
    result = no_error(pools(2).run(plain, tmp_path, **options))
    assert len(list(tmp_path.rglob("events.out.*"))) == ("track" in options)  # of the main process
    fields = {"sharding": options.get("sharding", "ddp"), "processes": 2}
    assert fields.items() <= read_json(tmp_path / "config.json")["attempts"][0]["engine"].items()
    model = options.get("model", Tiny)(**options.get("options", {"dropout": 0.0}))
    tokens = options.get("tokens", TOKENS)
    whole = alone(model, Masked(TOKENS, 8, 4, 0) if callable(tokens) else tokens)
    same_curves(read_jsonl(tmp_path / "metrics.jsonl"), whole)
    for loss in result:  # each process gathers the full weights
        assert loss is None or math.isclose(loss, whole[-1]["val_loss"], rel_tol=1e-5)


@pytest.mark.numeric
def test_in_bf16_slices_round_where_copies_round(pools, tmp_path):
    """Copies and slices multiply the same numbers in the same shapes: their losses have equal bits.

    A sum of two gradients does not depend on the order. A norm of all gradients does, so gradients
    are not clipped here. All sizes are multiples of 16, so that no processor computes the end of a
    slice differently. A single process multiplies twice as many rows. Its products may be summed in
    another order, and a bfloat16 result may be rounded to the adjacent number. Nine products follow
    one another, and a loss changes by at most twice as much as logits, which are below 1/2 at the
    start. Later losses have no such bound, because every training step enlarges the difference."""
    options = dict(precision="bf16", clip=0)
    losses = {}
    for kind in ("ddp", "fsdp"):
        no_error(
            pools(2).run(
                plain,
                tmp_path / kind,
                language_model,
                options={"d_model": 32},
                sharding=kind,
                **options,
            )
        )
        losses[kind] = [line["loss"] for line in read_jsonl(tmp_path / kind / "metrics.jsonl")]
    one = [line["loss"] for line in alone(language_model(d_model=32), **options)]
    assert len(one) == 20
    assert losses["ddp"] == losses["fsdp"]
    assert abs(losses["fsdp"][0] - one[0]) < bound(torch.bfloat16, 9)


# ---- errors of one process


class Unpicklable(ValueError):
    "Error whose constructor needs more than a message."

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


ERRORS = (
    (checkpoint.Damaged, "step-00000010 is damaged"),
    (FileNotFoundError, "no such text"),
    (UsageError, "name one text"),
)


def raised(kind, *arguments):
    "Raise an error in process 1 and return the error that this process raises."
    try:
        with together():
            if os.environ["RANK"] == "1":
                raise kind(*arguments)
    except Exception as error:
        return type(error), str(error)


def test_an_error_of_another_process_keeps_its_class(pools):
    for kind, message in ERRORS:
        other, own = pools(2).run(raised, kind, message)
        assert own == (kind, message)
        expected = (kind, f"process 1 on {socket.gethostname()}: {message}")
        assert other == expected


def test_an_error_that_needs_more_than_a_message_becomes_a_value_error(pools):
    for kind, arguments in ((Unpicklable, ("no text", 7)), (KeyError, ("text",))):
        other, own = pools(2).run(raised, kind, *arguments)
        assert own[0] is kind
        assert other[0] is ValueError
        assert other[1].startswith(f"process 1 on {socket.gethostname()}: ")


# ---- refusals


def other_checkpoint(attempt, *others):
    attempt.checkpoints = attempt.checkpoints[:-1]
    return facts_of(attempt, *others)


facts_of = training.facts_of


def changed(**changes):
    return dict(config=dataclasses.replace(SHORT, **changes))


# only process 1 differs; both processes differ
DIFFERS = ("settings", "model", "text", "val", "checkpoint", "same")
ALL = ("checkpoint", "busy", "none", "hsdp", "mpi")
OTHER_TOKENS = TOKENS.copy()
OTHER_TOKENS[777] = 5
CASES = dict(  # name=(change, message of both processes)
    settings=(changed(log_every=5), "log_every: 5; process 0"),
    model=(dict(model=8), "model: "),
    text=(dict(tokens=OTHER_TOKENS), "text: 2000 tokens "),
    val=(dict(val=VAL[:-1]), "held-out text: 203 tokens"),
    short=(dict(tokens=TOKENS[:4]), "the text has 4 tokens"),
    folder=(
        dict(folder="b/run"),
        "PATH/b/run on HOST is not the folder of process 0, PATH/a/run on HOST",
    ),
    checkpoint=(dict(folder="known"), "checkpoints: step-00000010 "),
    same=(dict(same={"mixer": "longhorn"}), "mixer: longhorn; "),
    busy=(
        dict(folder="busy"),
        "another process is training in PATH/busy; wait for its end or use another folder",
    ),
    none=(
        changed(sharding="none"),
        "sharding is 'none', but there are 2 processes; expected ddp, fsdp or hsdp",
    ),
    hsdp=(
        changed(sharding="hsdp"),
        "sharding is 'hsdp', which needs several machines with several processes each, but "
        "there are 2 processes, 2 on this",
    ),
    mpi=(
        changed(sharding="fsdp"),
        "sharding is 'fsdp', which the mpi backend does not support; expected",
    ),
    launcher=(
        {},
        "FSDP of `accelerate launch` is not supported; use `torchrun` and --sharding fsdp",
    ),
)


def refused(name, folder):
    own = os.environ["RANK"] == "1"
    case, _ = CASES[name]
    local = dict(
        model=16, tokens=TOKENS, val=VAL, config=SHORT, folder="a/run", same={"mixer": "mamba"}
    )
    local |= case if own or name in ALL else {}
    see_folder.__defaults__ = (0.3,)
    with (
        patch.object(
            training, "facts_of", other_checkpoint if own and name == "checkpoint" else facts_of
        ),
        patch.object(
            torch.distributed, "get_backend", return_value=name if name == "mpi" else "gloo"
        ),
        patch.dict(os.environ, ACCELERATE_USE_FSDP=str(name == "launcher")),
    ):
        train(
            Tiny(d=local["model"]),
            local["tokens"],
            local["val"],
            local["config"],
            folder / local["folder"],
            quiet=True,
            same=local["same"],
        )


def test_processes_that_differ_are_refused_in_every_one_and_leave_nothing(pools, tmp_path):
    run(tmp_path / "known", config=SHORT)
    (tmp_path / "busy").mkdir()

    def files():
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    before = files()
    with only_run_in(tmp_path / "busy"):
        messages = {name: pools(2).run(refused, name, tmp_path) for name in CASES}
    assert files() == before
    host = socket.gethostname()
    for name, lines in messages.items():
        says = CASES[name][1].replace("HOST", host).replace("PATH", str(tmp_path))
        for line in lines:
            assert says in line, (name, lines)
            assert "\n" not in line, (name, lines)
        assert name not in DIFFERS or all(
            f"process 1 on {host} (folder {tmp_path}" in line for line in lines
        )
    assert all(f"process 1 on {host}: " in messages[name][0] for name in ("short", "folder"))


# ---- full disks, damage and lost processes


def full_disk(folder, rank, in_background):
    "Train while the disk of one process is full at step 20."
    write = checkpoint.Writer.write_data

    def write_data(self, *parts):
        if os.environ["RANK"] == rank and "step-00000020" in str(self.path):
            raise OSError(28, os.strerror(28))
        return write(self, *parts)

    with patch.object(checkpoint.Writer, "write_data", write_data):
        plain(folder, async_save=in_background)


@pytest.mark.parametrize(
    "rank, in_background", [slow_case("0", False), slow_case("1", False), ("1", True)]
)
def test_a_full_disk_of_any_process_is_one_sentence_in_all(pools, tmp_path, rank, in_background):
    for line in pools(2).run(full_disk, tmp_path, rank, in_background):
        assert f"process {rank}: cannot write" in line
        assert "step-00000020: No space left on device" in line
        assert "\n" not in line
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000010"]
    no_error(pools(2).run(plain, tmp_path))
    same_curves(read_jsonl(tmp_path / "metrics.jsonl"), alone(Tiny(dropout=0.0)))


def test_damage_is_found_by_the_process_that_reads_it(pools, tmp_path):
    no_error(pools(2).run(plain, tmp_path, language_model, options={}, sharding="fsdp"))
    newest = checkpoints(tmp_path)[-1]
    for victim in sorted(newest.glob("*.distcp")):
        data = victim.read_bytes()
        victim.write_bytes(data[: len(data) // 2])
        no_error(pools(2).run(plain, tmp_path, language_model, options={}, sharding="fsdp"))
        warned = pools(2).printed
        assert f"{victim.name} is damaged; using the previous checkpoint" in warned[0]
        assert not warned[1]
        assert Path(newest).exists()
        result = read_json(tmp_path / "config.json")["attempts"][-1]["from_step"]
        assert result == 10


def lost(folder, where):
    "Train while process 1 exits: at a batch, during a checkpoint, or before the first step."

    def gone():
        if os.environ["RANK"] == "1":
            os._exit(9)

    draw = Sampler.next_batch
    write = checkpoint.Writer.write_data
    resume = training.resume_run

    def next_batch(self):
        if self.drawn >= 13 * 4:
            gone()
        return draw(self)

    def write_data(self, *parts):
        if "step-00000020" in str(self.path):
            gone()
        return write(self, *parts)

    def resume_run(run):
        gone()
        return resume(run)

    if where == "step":
        Sampler.next_batch = next_batch
    elif where == "checkpoint":
        checkpoint.Writer.write_data = write_data
    else:
        training.resume_run = resume_run
    plain(folder)


@pytest.mark.parametrize(
    "where, step", [("step", 13), slow_case("checkpoint", 20), slow_case("start", 0)]
)
def test_a_lost_process_is_one_sentence_and_the_run_resumes(pools, tmp_path, where, step):
    try:
        message, gone = pools(2).run(lost, tmp_path, where)
    finally:
        pools.drop(2)
    assert gone is None
    assert message.startswith("WorkerLost: another of the 2 processes has died, detected at step ")
    assert "\n" not in message
    assert f"detected at step {step} " in message
    assert "start the same command again; it resumes from" in message
    assert ("step-00000010" if step else "the start") in message
    assert run(tmp_path, config=SHORT)["resumed_from"] == (10 if step else None)


@pytest.mark.skipif(sys.platform != "linux", reason="the threads are read from /proc")
def test_no_thread_of_a_connection_outlives_it():
    "Test a connection of one process; test_cluster.py tests two processes that end."

    def threads():
        return {
            path.parent.name
            for path in Path("/proc/self/task").glob("*/comm")
            if "gloo" in path.read_text()
        }

    before = threads()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    cycle = [torch.distributed.group.WORLD]  # as a trained model references it
    cycle.append(cycle)
    del cycle
    torch.distributed.all_reduce(torch.ones(9))
    assert threads() > before
    leave()
    assert threads() == before
