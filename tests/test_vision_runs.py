"""Vision runs: data from four sources, corrupt images, resume, whole-set accuracy, the comparison and its record."""
import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longhorn_kit import cli
from longhorn_kit.lab import vision_runs as lab
from longhorn_kit.lab.vision_runs import (
    CompareConfig, FitConfig, ImageSet, VISION_PRESETS, fit, open_data, train_vision, vision_config)
from longhorn_kit.lab.stats import WORDS
from longhorn_kit.lab.training import WorkerLost
from test_training import two_processes

NANO = "longhorn_vim_nano_patch2_8"


def picture(number, label, size=8):
    "A grey image whose brightness tells its class."
    noise = np.random.default_rng(number).integers(0, 40, (size, size))
    return Image.fromarray((noise + 150 * label).astype(np.uint8))


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def filled(root, train, val):
    "The folder, with so many images of each of two classes."
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(("dark", "light")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                picture(i + 100 * label, label).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("images"), 12, 5)


def small(out, data, **options):
    options = dict(epochs=2, batch_size=8, warmup_epochs=0, lr=2e-3) | options
    return train_vision("digits", str(data), out, quiet=True, cpu=True, **options)


# presets and settings

def test_presets_are_the_published_recipe():
    tiny, small_ = (VISION_PRESETS[f"imagenet-vim-{size}"].config for size in ("tiny", "small"))
    assert (tiny.batch_size, tiny.lr, tiny.weight_decay, tiny.drop_path) == (1024, 5e-4 * 1024 / 512, 0.1, 0.0)
    assert (small_.batch_size, small_.lr, small_.weight_decay, small_.drop_path) == (512, 1e-3, 0.05, 0.05)
    for config in (tiny, small_):
        assert (config.epochs, config.warmup_epochs, config.min_lr, config.warmup_lr) == (300, 5, 1e-5, 1e-6)
        assert (config.mixup, config.cutmix, config.smoothing, config.erase, config.repeats) == (0.8, 1.0, 0.1, 0.25, 3)
        assert config.auto_augment == "rand-m9-mstd0.5-inc1" and config.ema == 0.99996 and config.precision == "no"


@pytest.mark.parametrize("arguments, message", [
    (("imagnet-vim-tiny",), "unknown preset 'imagnet-vim-tiny'; did you mean 'imagenet-vim-tiny'"),
    (("imagenet-vim-tiny",), "preset imagenet-vim-tiny needs data"),
    (("digits", "longhorn_vim_huge"), "unknown model 'longhorn_vim_huge'"),
])
def test_unknown_names(arguments, message):
    with pytest.raises(ValueError, match=message):
        vision_config(*arguments)


@pytest.mark.parametrize("override, message", [
    (dict(batchsize=8), "unknown setting 'batchsize'; did you mean 'batch_size'"),
    (dict(epochs=0), "epochs is 0; it must be at least 1"),
    (dict(precision="fp8"), "precision is 'fp8'"),
    (dict(seed=2**41), "seed is 2199023255552; it must be from 0 to 1099511627775"),
])
def test_bad_settings(override, message):
    with pytest.raises(ValueError, match=message):
        vision_config("digits", **override)


# where images come from

def test_four_sources_hold_the_same_images(folder, tmp_path):
    import datasets
    readers = {"folder": open_data(str(folder))}
    rows = {part: [readers["folder"][i].read(j) for j in range(len(readers["folder"][i]))]
            for i, part in enumerate(("train", "val"))}
    rows = {part: [(file.read(), label) for file, label in row] for part, row in rows.items()}
    for part, row in rows.items():
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["dark", "light"]))
        table = dict(image=[dict(bytes=image, path=None) for image, _ in row], label=[label for _, label in row])
        name = {"train": "train", "val": "validation"}[part]
        (tmp_path / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(table, features=features).to_parquet(tmp_path / "hub" / f"{name}.parquet")
        with tarfile.open(tmp_path / f"{part}-000.tar", "w") as tar:
            for i, (image, label) in enumerate(row):
                for kind, data in (("cls", str(label).encode()), ("png", image)):
                    info = tarfile.TarInfo(f"{i:04d}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    readers["hub"], readers["shards"] = open_data(f"hf:{tmp_path / 'hub'}"), open_data(f"wds:{tmp_path}")
    for train, held_out in readers.values():
        assert (len(train), len(held_out), len(train.classes)) == (24, 10, 2)
        for part, reader in (("train", train), ("val", held_out)):
            for i in (0, len(reader) - 1):
                file, label = reader.read(i)
                assert (file.read(), label) == rows[part][i]


@pytest.mark.parametrize("labels", [(1, 4), ("dark", "light")])
def test_labels_of_a_data_set_need_not_count_from_zero(tmp_path, labels):
    import datasets
    for part in ("train", "validation"):
        table = dict(image=[dict(bytes=encoded(picture(i, i % 2)), path=None) for i in range(4)], label=[labels[i % 2] for i in range(4)])
        features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64" if labels == (1, 4) else "string"))
        datasets.Dataset.from_dict(table, features=features).to_parquet(tmp_path / f"{part}.parquet")
    train, held_out = open_data(f"hf:{tmp_path}")
    assert train.classes == {str(label): i for i, label in enumerate(labels)} == held_out.classes
    assert [train.read(i)[1] for i in range(4)] == [0, 1, 0, 1]


def test_hidden_labels_are_allowed_in_the_held_out_part_alone(tmp_path):
    import datasets
    for part, labels in (("train", [0, 1]), ("validation", [-1, 1])):
        table = dict(image=[dict(bytes=encoded(picture(i, i)), path=None) for i in range(2)], label=labels)
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["dark", "light"]))
        datasets.Dataset.from_dict(table, features=features).to_parquet(tmp_path / f"{part}.parquet")
    train, held_out = open_data(f"hf:{tmp_path}")
    assert [held_out.read(i)[1] for i in range(2)] == [-1, 1]
    (tmp_path / "validation.parquet").rename(tmp_path / "train.parquet")
    train_only = datasets.Dataset.from_parquet(str(tmp_path / "train.parquet"))
    train_only.to_parquet(tmp_path / "validation.parquet")
    with pytest.raises(ValueError, match="some images have no label"):
        open_data(f"hf:{tmp_path}")


def test_a_preset_can_be_tried_for_an_epoch_and_odd_parts_are_refused():
    config = lab.vision_config("imagenet-vim-tiny", data="folder", epochs=1)
    assert (config.epochs, config.warmup_epochs) == (1, 1)
    with pytest.raises(ValueError, match="a part of a step has 7 images"):
        lab.loaders([0] * 20, [0], dataclasses.replace(config, batch_size=7, accumulate=1), {}, types.SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu")))


def test_parquet_and_digits_in_memory(tmp_path):
    import pyarrow
    from pyarrow import parquet
    images = [picture(i, i % 2) for i in range(4)]
    for part in ("train", "test"):
        table = pyarrow.table({"img": [dict(bytes=encoded(image), path="x") for image in images], "label": [0, 1, 0, 1]})
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    train, test = lab.cifar10(str(tmp_path))
    assert train.images.shape == (4, 3, 8, 8) and train.labels.tolist() == [0, 1, 0, 1]
    assert torch.equal(train.images[2, 1], torch.from_numpy(np.array(images[2])))
    digits, held_out = lab.digits()
    assert len(digits.labels) == 1438 and len(held_out.labels) == 359
    assert digits.images.max() == 255 and set(held_out.labels.tolist()) == set(range(10))


def test_bad_folders(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/train does not exist"):
        open_data("nowhere")
    for part in ("train", "val"):
        (tmp_path / part / "dark").mkdir(parents=True)
    with pytest.raises(ValueError, match="train holds no images; expected .*CLASS/IMAGE.jpg"):
        open_data(str(tmp_path))
    picture(0, 0).save(tmp_path / "train" / "dark" / "0.png")
    (tmp_path / "val" / "odd").mkdir()
    picture(0, 0).save(tmp_path / "val" / "odd" / "0.png")
    with pytest.raises(ValueError, match="training and held-out images have different classes .*dark, odd"):
        open_data(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no shards match"):
        open_data(f"wds:{tmp_path}")


# training, resuming, broken images

def test_training_learns_resumes_to_the_bit_and_keeps_its_weights(folder, tmp_path):
    from safetensors.torch import load_file
    whole = small(tmp_path / "whole", folder, epochs=3, mixup=0.8, cutmix=1.0, ema=0.9)
    assert whole["images"] == 10 and whole["skipped"] == 0 and {"ema_top1", "ema_top5"} <= set(whole)
    run = lab.VisionRun(vision_config("digits", None, str(folder), epochs=3, batch_size=8, warmup_epochs=0, lr=2e-3,
                                      mixup=0.8, cutmix=1.0, ema=0.9, cpu=True), tmp_path / "parts")
    lab.resume_run(run)
    run.epoch, line = 1, lab.train_epoch(run, lab.progress(9, disable=True))
    lab.save_run(run)
    lab.write_jsonl(tmp_path / "parts" / "metrics.jsonl", [{"epoch": 1, **line}, {"epoch": 2, "torn": True}])
    resumed = small(tmp_path / "parts", folder, epochs=3, mixup=0.8, cutmix=1.0, ema=0.9)
    assert resumed["loss"] == whole["loss"] and resumed["ema_top1"] == whole["ema_top1"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    lines = lab.read_jsonl(tmp_path / "parts" / "metrics.jsonl")
    assert [line["epoch"] for line in lines] == [1, 2, 3] and "torn" not in lines[1]
    assert small(tmp_path / "whole", folder, epochs=3, mixup=0.8, cutmix=1.0, ema=0.9) == whole # nothing left to do


def test_a_folder_of_another_run_is_refused(folder, tmp_path):
    small(tmp_path / "run", folder, epochs=1)
    with pytest.raises(ValueError, match="holds a run with lr=0.002; this one has lr=0.003; use another folder"):
        small(tmp_path / "run", folder, epochs=1, lr=3e-3)
    with pytest.raises(ValueError, match="holds a run with 2 classes; digits has 10"):
        small(tmp_path / "run", "digits", epochs=1)


def test_corrupt_images_are_named_skipped_and_counted(tmp_path, capsys):
    filled(tmp_path, 9, 4)
    whole = (tmp_path / "train" / "dark" / "3.png").read_bytes()
    (tmp_path / "train" / "dark" / "3.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "val" / "light" / "1.png").write_bytes(b"not an image")
    found = small(tmp_path / "run", tmp_path, epochs=1)
    assert found["skipped"] == 2 and found["images"] == 7
    errors = capsys.readouterr().err
    assert "cannot read" in errors and "train/dark/3.png; skipped" in errors and "val/light/1.png" in errors
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the held-out images can be read"):
        small(tmp_path / "again", tmp_path, epochs=1)


class Noise:
    "A reader of 64 healthy images."
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    def __len__(self): return 64
    def name(self, i): return f"image {i}"
    def read(self, i): return self.pixels[i], i


@pytest.fixture
def recipe():
    "Training images of the ViM recipe, at 32 × 32 pixels."
    train, held_out = lab.Images(Noise(), replaces=True), lab.Images(Noise())
    config = vision_config("imagenet-vim-tiny", "longhorn_vim_tiny_patch4_32", "noise", batch_size=64, workers=0)
    alone = types.SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    lab.loaders(train, held_out, config, lab.default_cfgs[config.model].default.to_dict(), alone)
    return train


def test_no_healthy_image_is_called_broken(recipe):
    "RandAugment draws posterize with 0 bits about ten times here, which Pillow 13 refuses."
    random.seed(0), torch.manual_seed(0)
    for i in range(10_000):
        assert recipe[i % len(recipe)][1] == i % len(recipe) # and not its neighbour
    assert not recipe.broken.any()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_posterize_with_0_bits_is_black(recipe, mode):
    image = picture(0, 0).convert(mode)
    operations = {op.name: op for op in recipe.transform.transforms[2].ops}
    posterize = operations["PosterizeIncreasing"].aug_fn
    assert posterize(image, 0).getcolors() == [(64, 0 if mode == "L" else (0, 0, 0))]
    for bits in (1, 4):
        assert np.array_equal(posterize(image, bits), np.array(image) // 2 ** (8 - bits) * 2 ** (8 - bits))
    assert posterize(image, 8) is image


def test_an_error_of_the_augmentation_is_not_the_images(recipe):
    def fails(image):
        raise ValueError("a mistake in the transform")
    recipe.transform = fails
    with pytest.raises(ValueError, match="a mistake in the transform"):
        recipe[3]
    assert not recipe.broken.any()


def test_batches_that_do_not_fit(folder, tmp_path):
    with pytest.raises(ValueError, match="24 training images are fewer than batch_size=64"):
        small(tmp_path, folder, batch_size=64)
    with pytest.raises(ValueError, match="batch_size=8 cannot be shared by 1 processes with accumulate=3"):
        small(tmp_path, folder, accumulate=3)


def test_accumulated_parts_are_counted_as_one_step(folder, tmp_path):
    one = small(tmp_path / "one", folder, epochs=1, accumulate=2)
    lines = lab.read_jsonl(tmp_path / "one" / "metrics.jsonl")
    assert len(lines) == 1 and one["loss"] > 0
    run = lab.VisionRun(vision_config("digits", None, str(folder), batch_size=8, accumulate=2, cpu=True), tmp_path / "two")
    assert run.updates == 3 and len(run.loader) == 6


# one run in a folder, several processes

def command(folder, out, workers=0):
    words = ["train-vision", "--preset", "digits", "--data", folder, "--out", out, "--epochs", 3, "--batch-size", 8,
             "--workers", workers]
    return list(map(str, words))


def finished(words, launcher=()):
    "Run the command on the CPU to its end."
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return subprocess.run([sys.executable, *launcher, "-m", "longhorn_kit.cli", *words], cwd=Path(__file__).parent.parent,
                          env=environment, capture_output=True, text=True, timeout=110)


def results(out):
    "The metrics of every epoch without the speed, and the weights."
    from safetensors.torch import load_file
    lines = [{key: value for key, value in line.items() if key != "images_per_second"}
             for line in lab.read_jsonl(out / "metrics.jsonl")]
    return lines, {name: value.tolist() for name, value in load_file(out / "model.safetensors").items()}


def test_a_second_run_in_the_folder_is_refused_and_the_first_is_unharmed(folder, tmp_path, monkeypatch):
    refused, train_epoch = [], lab.train_epoch
    def with_company(run, bar):
        if run.epoch == 1:
            refused.append(finished(command(folder, tmp_path / "run")))
        return train_epoch(run, bar)
    same = dict(epochs=3, lr=4e-3, warmup_epochs=1) # as the command
    small(tmp_path / "alone", folder, **same)
    monkeypatch.setattr(lab, "train_epoch", with_company)
    small(tmp_path / "run", folder, **same)
    assert results(tmp_path / "run") == results(tmp_path / "alone")
    assert refused[0].returncode == 1 and refused[0].stdout == ""
    assert refused[0].stderr == (f"longhorn: error: another process is training in {tmp_path / 'run'}; "
                                 "wait for it, or use another folder\n")


def test_a_killed_process_that_loads_images_is_one_line(folder, tmp_path, monkeypatch):
    load, train_epoch = lab.Images.load, lab.train_epoch
    def killed(images, i):
        os.kill(os.getpid(), signal.SIGKILL)
    def kills(run, bar):
        monkeypatch.setattr(lab.Images, "load", killed if run.epoch == 1 else load)
        return train_epoch(run, bar)
    monkeypatch.setattr(lab, "train_epoch", kills)
    with pytest.raises(WorkerLost, match="a process that loads images is gone, seen at step 3 .*same command again") as lost:
        small(tmp_path / "run", folder, workers=1)
    assert str(lost.value).count("\n") == 0 and f"{tmp_path / 'run' / 'checkpoint.pt'}" in str(lost.value)
    monkeypatch.undo()
    assert small(tmp_path / "run", folder, workers=1)["epoch"] == 2


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    "A folder of images, three of them broken, and a run on it in two processes."
    folder = filled(tmp_path_factory.mktemp("together"), 8, 4)
    for path in ("train/dark/3.png", "val/dark/2.png", "val/light/1.png"): # held out: one on each process
        (folder / path).write_bytes(b"not an image")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"
    return folder, finished(command(folder, folder / "whole", workers=1), torchrun)


def test_two_processes_name_each_broken_image_once_and_count_all(together):
    folder, done = together
    assert done.returncode == 0
    lines = lab.read_jsonl(folder / "whole" / "metrics.jsonl")
    assert [(line["skipped"], line["images"]) for line in lines] == [(3, 6)] * 3
    for path in ("train/dark/3.png", "val/dark/2.png", "val/light/1.png"):
        assert done.stderr.count(f"{path}; skipped") == 1
    assert done.stdout.count("\n") == 1 and "of 6 images, 3 skipped" in done.stdout


def test_two_processes_resume_to_the_bit_and_one_resumes_alone(together, tmp_path, capfd):
    "The first process dies after its first checkpoint; the other says so."
    folder, _ = together
    trains = f"from longhorn_kit import cli; os._exit(cli.main({command(folder, tmp_path / 'two', workers=1)}))"
    dies = ("from longhorn_kit.lab import vision_runs as lab; keep = lab.save_run\n"
            "def keep_and_die(run): keep(run); os._exit(9)\n"
            "lab.save_run = keep_and_die\n")
    assert two_processes(dies + trains, tmp_path)[0] == [9, 1]
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("longhorn: error")]
    assert len(told) == 1 and "another of the 2 processes is gone, seen at step 2" in told[0]
    assert "start the same command again" in told[0] and f"{tmp_path / 'two' / 'checkpoint.pt'}" in told[0]
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    assert two_processes(trains, tmp_path)[0] == [0, 0] and results(tmp_path / "two") == results(folder / "whole")
    alone = small(tmp_path / "one", folder, epochs=3, lr=4e-3, warmup_epochs=1, workers=1) # in another order
    lines, _ = results(tmp_path / "one")
    assert alone["epoch"] == 3 and lines[0] == results(folder / "whole")[0][0] and len(lines) == 3


# images in memory

def easy(count=64):
    labels = torch.arange(count) % 10
    images = (labels * 25)[:, None, None, None].expand(count, 1, 8, 8).to(torch.uint8).contiguous()
    return ImageSet(images, labels)


def test_pictures_are_moved_mirrored_and_mixed_consistently():
    torch.manual_seed(0)
    images = ImageSet(torch.randint(1, 255, (32, 1, 8, 8), dtype=torch.uint8), torch.arange(32) % 10)
    plain = FitConfig(batch_size=8, pad=0, flip=False, cutmix=0.0, smoothing=0.0)
    seen = [(x, y) for x, y in lab.Pictures(images, 10, plain).epoch()]
    assert len(seen) == 4
    got = {bytes(x.numpy().tobytes()): int(y.argmax()) for batch in seen for x, y in zip(*batch)}
    assert got == {bytes(x.numpy().tobytes()): int(y) for x, y in zip(*images)}
    same = [lab.Pictures(images, 10, FitConfig(batch_size=8, seed=3)).epoch() for _ in range(2)]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(*same))
    ones = ImageSet(torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 1, 8, 8).contiguous(), torch.arange(8))
    mixed = lab.Pictures(ones, 8, FitConfig(batch_size=8, pad=0, cutmix=1.1, smoothing=0.0))
    for x, y in mixed.epoch(): # the share of pixels is the share of the label
        for image, label in zip(x, y):
            share = torch.stack([(image == value).float().mean() for value in range(8)])
            assert torch.allclose(share, label, atol=1e-6)


def test_accuracy_counts_every_image_once():
    class Guess(torch.nn.Module):
        pretrained_cfg = dict(mean=(0.0,), std=(1.0,))
        def forward(self, x):
            return torch.nn.functional.one_hot((x[:, 0, 0, 0] * 255 / 25).round().long(), 10).float()
    images = easy(25)
    wrong = ImageSet(images.images, (images.labels + (torch.arange(25) < 5)) % 10)
    for size in (1000, 7):
        assert lab.accuracy(Guess(), wrong, size)[0] == pytest.approx(20 / 25)


def test_the_same_seed_gives_the_same_curve_and_the_models_are_of_one_size():
    config = FitConfig(epochs=1, batch_size=16, pad=1, evaluations=1)
    results = [fit(lab.make_model("longhorn", "nano_patch2_8", 1), easy(), easy(20), config, quiet=True) for _ in range(2)]
    assert results[0]["curve"] == results[1]["curve"] and results[0]["steps"] == 4
    for size in ("nano_patch2_8", "tiny_patch4_32"):
        counts = {name: lab.count_parameters(lab.make_model(name, size)) for name in lab.MODELS}
        assert counts["deit"] == pytest.approx(counts["longhorn"], rel=0.01)
        assert counts["longhorn"] == counts["longhorn_exact"] < counts["mamba"] < 1.07 * counts["longhorn"]


def test_a_run_past_its_deadline_and_one_that_diverges():
    config = FitConfig(epochs=2, batch_size=16, evaluations=1)
    with pytest.raises(lab.OutOfTime, match="stopped after epoch 1 of 2"):
        fit(lab.make_model("deit", "nano_patch2_8"), easy(), easy(20), config, deadline=0.5, quiet=True)
    model = lab.make_model("deit", "nano_patch2_8")
    model.head.weight.data[:] = float("nan")
    with pytest.raises(RuntimeError, match="the loss is nan at step"):
        fit(model, easy(), easy(20), config, quiet=True)


# the claim

def tiny_config():
    return CompareConfig(models=("longhorn", "mamba"), seeds=(0, 1),
                         fit=FitConfig(epochs=1, batch_size=32, lr=4e-3, pad=1, flip=False, cutmix=0.0, evaluations=2))


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    sets = tuple(ImageSet(part.images[:n], part.labels[:n]) for part, n in zip(lab.digits(), (96, 40)))
    patch.setattr(lab, "digits", lambda: sets)
    folder = tmp_path_factory.mktemp("run")
    first = lab.run("laptop", folder, tiny_config(), workers=1)
    patch.setattr(lab, "fit", None) # finished cells are not run again
    assert lab.run("laptop", folder, tiny_config(), workers=1)["results"] == first["results"]
    patch.undo()
    return first


def test_record_verdict_tables_and_figures(record):
    assert record["claim"] == "vision" and record["scale"] == "laptop" and json.dumps(record)
    assert set(record["results"]["top1"]) == {"longhorn", "mamba"} and record["results"]["held_out"] == 40
    assert all(found.verdict in WORDS for _, found in lab.claims.judged("vision", record))
    for title, header, rows in lab.tables(record):
        assert title and all(len(row) == len(header) for row in rows)
    (figure, caption), = lab.figures(record)
    assert "held-out images of digits" in caption and figure.axes[0].get_xlabel() == "epoch"


def test_unknown_scale_and_missing_gpu(tmp_path):
    with pytest.raises(ValueError, match="unknown scale 'huge' for vision; there are: laptop, gpu"):
        lab.run("huge", tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="vision at scale gpu needs a GPU"):
            lab.run("gpu", tmp_path)


def test_two_workers_share_the_runs_and_make_one_record(tmp_path, monkeypatch):
    sets = tuple(ImageSet(part.images[:n], part.labels[:n]) for part, n in zip(lab.digits(), (64, 20)))
    monkeypatch.setattr(lab, "cifar10", lambda data: sets)
    monkeypatch.setattr(lab, "time_epoch", lambda *a, **b: 1.0)
    monkeypatch.setattr(lab, "wait_for", lambda paths, limit: [json.loads(p.read_text()) for p in paths if p.exists()])
    options = dict(minutes=5, seeds=1, most=1, device="cpu", size="nano_patch2_8", workers=2,
                   config=FitConfig(batch_size=32, pad=1, flip=False, evaluations=1))
    lab.write_json(tmp_path / "board" / "deit-0.claim", 1) # claimed by the other worker
    (tmp_path / "board" / "deit-0.claim").write_text("1")
    parts = [lab.gpu_worker("x", tmp_path / f"{i}.json", tmp_path / "board", worker=i, **options) for i in (0, 1)]
    assert [[run["model"] for run in part["runs"]] for part in parts] == [["longhorn", "longhorn_exact", "mamba"], ["deit"]]
    parts[0]["speeds"] = {"mamba": {"training, eager": [1.0, 2.0]}}
    parts[1]["speeds"] = {"deit": {"training, eager": [3.0]}}
    parts[1]["memories"] = {"deit": {"training": {"224": [2e9, 0.1], "1248": [None, None]}, "inference": {"224": [1e9, 0.1]}}}
    found = lab.gpu_record(parts, tmp_path / "record.json")
    assert found["results"]["seeds"] == [0] and found["scale"] == "gpu" and set(found["results"]["top1"]) == set(lab.MODELS)
    titles = [title for title, _, _ in lab.tables(found)]
    assert len(titles) == 5 and len(lab.figures(found)) == 3
    begun = lab.gpu_record(parts[:1], tmp_path / "begun.json")         # no DeiT yet
    assert set(begun["results"]["top1"]) == {"longhorn", "longhorn_exact", "mamba"}
    parts[0]["runs"] = parts[0]["runs"][:2]                             # nor Mamba
    begun = lab.gpu_record(parts[:1], tmp_path / "begun.json")
    assert lab.claims.judged("vision", begun) == [] # nothing to compare
    parts[0]["runs"][0] |= {"seed": 1}
    with pytest.raises(ValueError, match="no seed was finished by every model"):
        lab.gpu_record(parts[:1], tmp_path / "none.json")


@pytest.fixture
def small_gpu_run(monkeypatch):
    "`lab.run` at scale gpu, on a CPU and without training; returns the models that cannot be trained."
    broken = set()
    def one_run(name, size, seed, *rest):
        if name in broken:
            raise RuntimeError("out of luck\nat some place")
        return {"model": name, "seed": seed, "parameters": 1, "settings": {"epochs": 1, "lr": 0.001}, "top1": 0.5, "top5": 0.9, "loss": 1.0,
                "steps": 1, "curve": [(1, 1.0, 0.5)], "seconds": 1.0, "images_per_second": 1.0}
    sets = tuple(ImageSet(part.images[:4], part.labels[:4]) for part in lab.digits())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lab, "environment", lambda: {})
    monkeypatch.setattr(lab, "cifar10", lambda data: sets)
    monkeypatch.setattr(lab, "time_epoch", lambda *a, **b: 1.0)
    monkeypatch.setattr(lab, "one_run", one_run)
    monkeypatch.setattr(lab, "gpu_worker", partial(lab.gpu_worker, device="cpu"))
    return broken


def test_a_comparison_with_failed_runs_is_never_finished(tmp_path, monkeypatch, capsys, small_gpu_run):
    small_gpu_run.add("mamba")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "vision" / "gpu"
    for attempt in range(3): # the third finds that there were two
        assert cli.main(["reproduce", "vision", "--scale", "gpu"]) == 1
        told = capsys.readouterr().err
        assert "vision: not finished: mamba, seed 0; mamba, seed 1; mamba, seed 2 (the same command" in told
        assert "not done: vision (some of its runs are missing)" in told
        assert json.loads((folder / "partial.json").read_text())["results"]["seeds"] == [0, 1, 2]
        assert not (folder / "record.json").exists()
    small_gpu_run.clear()
    assert cli.main(["reproduce", "vision", "--scale", "gpu", "--fresh"]) == 0 and (folder / "record.json").exists()


def test_a_finished_comparison_is_not_run_again(tmp_path, monkeypatch, capsys, small_gpu_run):
    "Although its epochs were planned for the time there was, and differ from those of the settings."
    monkeypatch.chdir(tmp_path)
    for told in ("going on", "already finished"):
        (tmp_path / "runs" / "vision" / "gpu").mkdir(parents=True, exist_ok=True)
        assert cli.main(["reproduce", "vision", "--scale", "gpu"]) == 0 and told in capsys.readouterr().out


def test_a_later_call_has_its_own_time_for_what_failed(tmp_path, small_gpu_run):
    small_gpu_run.add("deit")
    lab.run("gpu", tmp_path)
    os.utime(tmp_path / "board" / "start", (0, 0))
    small_gpu_run.clear()
    assert set(lab.run("gpu", tmp_path)["results"]["top1"]) == set(lab.MODELS) and (tmp_path / "record.json").exists()


def test_without_any_run_there_is_no_record(tmp_path, capsys, small_gpu_run):
    small_gpu_run.update(lab.MODELS)
    with pytest.raises(ValueError, match="no run was finished"):
        lab.run("gpu", tmp_path)
    assert "vision: not finished: longhorn, seed 0; " in capsys.readouterr().err


def test_a_measurement_that_failed_is_named_until_another_attempt_succeeds(tmp_path):
    config = CompareConfig(models=("mamba",), seeds=(0,))
    for fails, left in ((True, ["speeds, mamba"]), (False, [])):
        attempts = lab.Attempts(tmp_path, 0)
        with attempts.at("speeds, mamba"):
            if fails:
                raise RuntimeError
        found = {"runs": [{"model": "mamba", "seed": 0}], "failed": lab.Attempts(tmp_path, 0).failed}
        assert lab.unfinished(found, config) == left


def test_a_job_gets_two_attempts(tmp_path):
    attempts = lab.Attempts(tmp_path, 0)
    for before in (0, 1):
        assert attempts.may("job") == before
        with attempts.at("job"):
            raise RuntimeError("out of luck")
    assert attempts.may("job") is None and attempts.failed == ["job"]
