"""`longhorn train-vision`: presets, data from four sources, broken images, resume, one run per folder, several processes."""
import dataclasses, io, os, random, shutil, signal, subprocess, sys, tarfile, types
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from longhorn_kit.lab import vision_training as lab
from longhorn_kit.lab.training import WorkerLost
from longhorn_kit.lab.vision_training import VISION_PRESETS, open_data, train_vision, vision_config
from longhorn_kit.models.vision import default_cfgs
from test_training import two_processes

ALONE = types.SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))


def picture(number, label):
    "A grey image whose brightness tells its class."
    noise = np.random.default_rng(number).integers(0, 40, (8, 8))
    return Image.fromarray((noise + 150 * label).astype(np.uint8))


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
    return train_vision("digits", out, quiet=True, data=str(data), cpu=True, **options)


def test_presets_are_the_published_recipe():
    tiny, small_ = (VISION_PRESETS[f"imagenet-vim-{size}"].config for size in ("tiny", "small"))
    assert (tiny.batch_size, tiny.lr, tiny.weight_decay, tiny.drop_path) == (1024, 5e-4 * 1024 / 512, 0.1, 0.0)
    assert (small_.batch_size, small_.lr, small_.weight_decay, small_.drop_path) == (512, 1e-3, 0.05, 0.05)
    for config in (tiny, small_):
        assert (config.epochs, config.warmup_epochs, config.min_lr, config.warmup_lr) == (300, 5, 1e-5, 1e-6)
        assert (config.mixup, config.cutmix, config.smoothing, config.erase, config.repeats) == (0.8, 1.0, 0.1, 0.25, 3)
        assert config.auto_augment == "rand-m9-mstd0.5-inc1" and config.ema == 0.99996 and config.precision == "no"
    assert vision_config("imagenet-vim-tiny", data="folder", epochs=1).warmup_epochs == 1 # the preset has 5


@pytest.mark.parametrize("arguments, override, message", [
    (["imagnet-vim-tiny"], {}, "unknown preset 'imagnet-vim-tiny'; did you mean 'imagenet-vim-tiny'"),
    (["imagenet-vim-tiny"], {}, "preset imagenet-vim-tiny needs data"),
    (["digits"], dict(model="longhorn_vim_huge"), "unknown model 'longhorn_vim_huge'"),
    (["digits"], dict(batchsize=8), "unknown setting 'batchsize'; did you mean 'batch_size'"),
    (["digits"], dict(epochs=0), "epochs is 0; it must be from 1 to"),
    (["digits"], dict(precision="fp8"), "precision is 'fp8'"),
    (["digits"], dict(seed=2**41), "seed is 2199023255552; it must be from 0 to 1099511627775"),
])
def test_bad_names_and_settings(arguments, override, message):
    with pytest.raises(ValueError, match=message):
        vision_config(*arguments, **override)


def parquet(path, images, labels, column):
    "Write a data set of encoded images; `column` is the kind of its labels."
    features = datasets.Features(image=datasets.Image(), label=column)
    table = dict(image=[dict(bytes=image, path=None) for image in images], label=list(labels))
    path.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(table, features=features).to_parquet(path)


def encoded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_four_sources_hold_the_same_images(folder, tmp_path):
    readers, rows = {"folder": open_data(str(folder))}, {}
    for part, reader, name in zip(("train", "val"), readers["folder"], ("train", "validation")):
        row = rows[part] = [(file.read(), label) for file, label in map(reader.read, range(len(reader)))]
        parquet(tmp_path / "hub" / f"{name}.parquet", *zip(*row), datasets.ClassLabel(names=["dark", "light"]))
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


def test_labels_need_not_count_from_zero_and_only_held_out_ones_may_be_hidden(tmp_path):
    images, names = [encoded(picture(i, i % 2)) for i in range(2)], datasets.ClassLabel(names=["dark", "light"])
    for labels, kind in (((1, 4), datasets.Value("int64")), (("dark", "light"), datasets.Value("string")), ((0, 1), names)):
        for part in ("train", "validation"):
            parquet(tmp_path / f"{part}.parquet", images, labels, kind)
        train, held_out = open_data(f"hf:{tmp_path}")
        assert list(train.classes.items()) == [(name, i) for i, name in enumerate(held_out.classes)]
        assert [train.read(i)[1] for i in range(2)] == [0, 1] and len(train.classes) == 2
    parquet(tmp_path / "validation.parquet", images, [-1, 1], names)
    assert [open_data(f"hf:{tmp_path}")[1].read(i)[1] for i in range(2)] == [-1, 1]
    parquet(tmp_path / "train.parquet", images, [-1, 1], names)
    with pytest.raises(ValueError, match="some images have no label"):
        open_data(f"hf:{tmp_path}")


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


def test_training_resumes_to_the_bit_keeps_its_weights_and_refuses_other_settings(folder, tmp_path):
    options = dict(epochs=3, mixup=0.8, cutmix=1.0, ema=0.9)
    whole = small(tmp_path / "whole", folder, **options)
    assert whole["images"] == 10 and whole["skipped"] == 0 and {"ema_top1", "ema_top5"} <= set(whole)
    run = lab.VisionRun(vision_config("digits", data=str(folder), batch_size=8, warmup_epochs=0, lr=2e-3, cpu=True, **options),
                        tmp_path / "parts")
    lab.resume_run(run)
    run.epoch, line = 1, lab.train_epoch(run, lab.progress(9, disable=True))
    lab.save_run(run)
    lab.write_jsonl(tmp_path / "parts" / "metrics.jsonl", [{"epoch": 1, **line}, {"epoch": 2, "torn": True}])
    resumed = small(tmp_path / "parts", folder, **options)
    assert resumed["loss"] == whole["loss"] and resumed["ema_top1"] == whole["ema_top1"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    lines = lab.read_jsonl(tmp_path / "parts" / "metrics.jsonl")
    assert [line["epoch"] for line in lines] == [1, 2, 3] and "torn" not in lines[1]
    assert small(tmp_path / "whole", folder, **options) == whole # nothing left to do
    with pytest.raises(ValueError, match="holds a run with lr=0.002; this one has lr=0.003; use another folder"):
        small(tmp_path / "whole", folder, **options, lr=3e-3)
    with pytest.raises(ValueError, match="holds a run with 2 classes; digits has 10"):
        small(tmp_path / "whole", "digits", **options)


def test_corrupt_images_are_named_skipped_and_counted(tmp_path, capsys):
    filled(tmp_path, 9, 4)
    cut = tmp_path / "train" / "dark" / "3.png"
    cut.write_bytes(cut.read_bytes()[:60])
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
    config = vision_config("imagenet-vim-tiny", model="longhorn_vim_tiny_patch4_32", data="noise", batch_size=64, workers=0)
    lab.loaders(train, held_out, config, default_cfgs[config.model].default.to_dict(), ALONE)
    return train


def test_no_healthy_image_is_called_broken(recipe):
    "RandAugment draws posterize with 0 bits about ten times here, which Pillow 13 refuses."
    random.seed(0), torch.manual_seed(0)
    for i in range(10_000):
        assert recipe[i % len(recipe)][1] == i % len(recipe) # and not its neighbour
    recipe.transform = lambda image: image.no_such_method # an error of the augmentation is not the image's
    with pytest.raises(AttributeError, match="no_such_method"):
        recipe[3]
    assert not recipe.broken.any()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_posterize_with_0_bits_is_black(recipe, mode):
    image = picture(0, 0).convert(mode)
    posterize = {op.name: op for op in recipe.transform.transforms[2].ops}["PosterizeIncreasing"].aug_fn
    assert posterize(image, 0).getcolors() == [(64, 0 if mode == "L" else (0, 0, 0))]
    for bits in (1, 4):
        assert np.array_equal(posterize(image, bits), np.array(image) // 2 ** (8 - bits) * 2 ** (8 - bits))
    assert posterize(image, 8) is image


def test_batches_that_do_not_fit_and_accumulated_parts(folder, tmp_path):
    with pytest.raises(ValueError, match="24 training images are fewer than batch_size=64"):
        small(tmp_path, folder, batch_size=64)
    with pytest.raises(ValueError, match="batch_size=8 cannot be shared by 1 processes with accumulate=3"):
        small(tmp_path, folder, accumulate=3)
    config = dataclasses.replace(VISION_PRESETS["imagenet-vim-tiny"].config, batch_size=7)
    with pytest.raises(ValueError, match="a part of a step has 7 images"):
        lab.loaders([0] * 20, [0], config, {}, ALONE)
    one = small(tmp_path / "one", folder, epochs=1, accumulate=2)
    assert len(lab.read_jsonl(tmp_path / "one" / "metrics.jsonl")) == 1 and one["loss"] > 0
    run = lab.VisionRun(vision_config("digits", data=str(folder), batch_size=8, accumulate=2, cpu=True), tmp_path / "two")
    assert run.updates == 3 and len(run.loader) == 6


def command(folder, out, workers=0):
    return ["train-vision", "--preset", "digits", "--data", str(folder), "--out", str(out), "--epochs", "3",
            "--batch-size", "8", "--workers", str(workers)]


def finished(words, launcher=()):
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return subprocess.run([sys.executable, *launcher, "-m", "longhorn_kit.cli", *words], cwd=Path(__file__).parent.parent,
                          env=environment, capture_output=True, text=True, timeout=110)


def results(out):
    "The metrics of every epoch without the speed, and the weights."
    lines = [line | {"images_per_second": None} for line in lab.read_jsonl(out / "metrics.jsonl")]
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
    told = f"longhorn: error: another process is training in {tmp_path / 'run'}; wait for it, or use another folder\n"
    assert (refused[0].returncode, refused[0].stdout, refused[0].stderr) == (1, "", told)


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
    lines = lab.read_jsonl(folder / "whole" / "metrics.jsonl")
    assert done.returncode == 0 and [(line["skipped"], line["images"]) for line in lines] == [(3, 6)] * 3
    for path in ("train/dark/3.png", "val/dark/2.png", "val/light/1.png"):
        assert done.stderr.count(f"{path}; skipped") == 1
    assert done.stdout.count("\n") == 1 and "of 6 images, 3 skipped" in done.stdout


def test_two_processes_resume_to_the_bit_and_one_resumes_alone(together, tmp_path, capfd):
    "The first process dies after its first checkpoint; the other names the checkpoint."
    folder, _ = together
    trains = f"from longhorn_kit import cli; os._exit(cli.main({command(folder, tmp_path / 'two', workers=1)}))"
    dies = ("from longhorn_kit.lab import vision_training as lab; keep = lab.save_run\n"
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
