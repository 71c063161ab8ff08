"""Test `longhorn train-vision` and `eval-vision`.

Subjects are sources, order, broken images, resuming, and timm's script.
"""

import argparse
import dataclasses
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from longhorn_kit import cli
from longhorn_kit.lab.data import images as images_module
from longhorn_kit.lab.data.images import (
    Augmented,
    ImageBatches,
    Images,
    open_data,
    open_part,
    posterize,
    transforms,
)
from longhorn_kit.lab.train import vision as lab
from longhorn_kit.lab.train.vision import (
    VISION_PRESETS,
    eval_vision,
    make_model,
    train_vision,
    vision_config,
)
from longhorn_kit.models.vision import default_cfgs, timm
from longhorn_kit.records import as_recorded, read_json, read_jsonl
from pictures import encoded, filled, parquet, picture
from pool import Pool
from sweep import slow_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("images"), 12, 5)


def small(out, data, **options):
    options = dict(epochs=2, batch_size=8, warmup_epochs=0, lr=2e-3) | options
    return train_vision("digits", out, quiet=True, data=str(data), cpu=True, **options)


def results(out):
    "Return the metrics without measured times, and the weights."

    def untimed(line):
        return {
            name: value
            for name, value in line.items()
            if not name.endswith("per_second") and name != "waiting_percent"
        }

    lines = [untimed(line) for line in read_jsonl(out / "metrics.jsonl")]
    weights = load_file(out / "model" / "model.safetensors")
    return lines, {name: value.tolist() for name, value in weights.items()}


def test_presets_are_the_published_recipe():
    for size, own in (
        ("tiny", (1024, 5e-4 * 1024 / 512, 0.1, 0.0)),
        ("small", (512, 1e-3, 0.05, 0.05)),
    ):
        config = VISION_PRESETS[f"imagenet-vim-{size}"].config
        settings = (config.batch_size, config.lr, config.weight_decay, config.drop_path)
        assert settings == own
        assert config.epochs == 300
        assert config.warmup_epochs == 5
        assert config.beta1 == 0.9
        assert config.beta2 == 0.999
        assert config.clip == 0
        lowest = config.lr * config.min_lr_ratio
        assert lowest == pytest.approx(1e-5)
        assert config.mixup == 0.8
        assert config.cutmix == 1.0
        assert config.smoothing == 0.1
        assert config.erase == 0.25
        assert config.repeats == 3
        assert config.auto_augment == "rand-m9-mstd0.5-inc1"
        assert config.ema == 0.99996
        assert config.precision == "no"
    stored = lab.with_steps(vision_config("imagenet-vim-tiny", data="folder", epochs=2), 10_000)
    assert stored.eval_every == 9
    assert stored.steps == 18
    assert stored.warmup == 17  # all steps except one: five epochs of warm-up exceed two


@pytest.mark.parametrize(
    "arguments, override, message",
    [
        (
            ["imagnet-vim-tiny"],
            {},
            "unknown preset 'imagnet-vim-tiny'; did you mean 'imagenet-vim-tiny'",
        ),
        (["imagenet-vim-tiny"], {}, "preset imagenet-vim-tiny needs data"),
        (["digits"], dict(model="longhorn_vim_huge"), "unknown model 'longhorn_vim_huge'"),
        (["digits"], dict(batchsize=8), "unknown setting 'batchsize'; did you mean 'batch_size'"),
        (["digits"], dict(steps=9), "unknown setting 'steps'"),
        (["digits"], dict(epochs=0), "epochs is 0; it must be from 1 to"),
        (["digits"], dict(flip=7.0), "flip is 7.0"),
        (["digits"], dict(crop_pct=0.0), "crop_pct is 0.0"),
        (["digits"], dict(precision="fp8"), "precision is 'fp8'"),
    ],
)
def test_bad_names_and_settings(arguments, override, message):
    with pytest.raises(ValueError, match=message):
        vision_config(*arguments, **override)


def shards(folder, part, rows):
    with tarfile.open(folder / f"{part}-000.tar", "w") as tar:
        for i, (image, label) in enumerate(rows):
            members = (("cls", str(label).encode()), ("png", image))
            for kind, data in members:
                info = tarfile.TarInfo(f"./v1.0/{i:04d}.{kind.upper() if i % 2 else kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_four_sources_hold_the_same_images(folder, tmp_path):
    readers = {"folder": open_data(str(folder))}
    rows = {}
    parts = zip(("train", "val"), readers["folder"], ("train", "validation"))
    for part, reader, name in parts:
        row = rows[part] = [
            (file.read(), label) for file, label in map(reader.__getitem__, range(len(reader)))
        ]
        parquet(
            tmp_path / "hub" / f"{name}.parquet",
            *zip(*row),
            datasets.ClassLabel(names=["dark", "light"]),
        )
        shards(tmp_path, part, row)
    readers["hub"] = open_data(f"hf:{tmp_path / 'hub'}")
    readers["shards"] = open_data(f"wds:{tmp_path}")
    for train, val in readers.values():
        assert len(train) == 24
        assert len(val) == 10
        assert len(train.classes) == 2
        for part, reader in (("train", train), ("val", val)):
            for i in (0, len(reader) - 1):
                file, label = reader[i]
                result = (file.read(), label)
                assert result == rows[part][i]
                assert reader.filename(i, absolute=True)
    summaries = (
        small(tmp_path / "run", f"wds:{tmp_path}", epochs=1),
        small(tmp_path / "same", folder, epochs=1),
    )
    loss = summaries[0]["loss"]
    other_loss = summaries[1]["loss"]
    assert loss == other_loss
    assert results(tmp_path / "run") == results(tmp_path / "same")


def test_labels_need_not_count_from_zero_and_only_held_out_ones_may_be_hidden(tmp_path):
    images = [encoded(picture(i, i % 2)) for i in range(2)]
    names = datasets.ClassLabel(names=["dark", "light"])
    for labels, kind in (
        ((1, 4), datasets.Value("int64")),
        (("dark", "light"), datasets.Value("string")),
        ((0, 1), names),
    ):
        for part in ("train", "validation"):
            parquet(tmp_path / f"{part}.parquet", images, labels, kind)
        train, val = open_data(f"hf:{tmp_path}")
        result = list(train.classes.items())
        expected = [(name, i) for i, name in enumerate(val.classes)]
        assert result == expected
        labels = [train[i][1] for i in range(2)]
        assert labels == [0, 1]
        assert len(train.classes) == 2
    parquet(tmp_path / "validation.parquet", images, [-1, 1], names)
    data = open_data(f"hf:{tmp_path}")
    hidden = Images(data[1], np.asarray)
    rows = [hidden[i][1:] for i in range(2)]
    assert rows == [(-100, []), (1, [])]
    parquet(tmp_path / "train.parquet", images, [-1, 1], names)
    with pytest.raises(ValueError, match="some images have no label"):
        open_data(f"hf:{tmp_path}")


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/train does not exist"):
        open_data("nowhere")
    for part in ("train", "val"):
        (tmp_path / part / "dark").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match="train contains no images; expected .*CLASS/IMAGE.jpg"
    ):
        open_data(str(tmp_path))
    path = tmp_path / "train" / "dark" / "0.png"
    picture(0, 0).save(path)
    (tmp_path / "val" / "odd").mkdir()
    path = tmp_path / "val" / "odd" / "0.png"
    picture(0, 0).save(path)
    with pytest.raises(
        ValueError,
        match="the class folder .*val/dark has no image that can be read; it has no files",
    ):
        open_data(str(tmp_path))
    (tmp_path / "val" / "dark").rmdir()
    with pytest.raises(
        ValueError, match="training and held-out images have different classes .*dark, odd"
    ):
        open_data(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no shards match"):
        open_data(f"wds:{tmp_path}")


ENDINGS = {
    "png": "png",
    "jpg": "jpg",
    "JPEG": "jpg",
    "webp": "webp",
    "tif": "tif",
    "tiff": "tif",
    "bmp": "bmp",
    "gif": "gif",
    "ppm": "ppm",
}


def test_every_format_of_pillow_is_read_and_other_files_are_counted_and_named(tmp_path, capsys):
    for part in ("train", "val"):
        for i, (ending, kind) in enumerate(ENDINGS.items()):
            folder = tmp_path / part / f"class {ending}"
            folder.mkdir(parents=True)
            path = tmp_path / part / f"class {ending}" / f"x [{i}].{ending}"
            format_name = {"jpg": "jpeg", "tif": "tiff"}.get(kind, kind)
            picture(i, i % 2).save(path, format_name)
    for name in (
        "class png/a.heic",
        "class png/b.heic",
        "class gif/drawing.eps",
        "class gif/notes",
        "stray.png",
        ".hidden.png",
        "class gif/._x.png",
        "class gif/Thumbs.db",
    ):
        (tmp_path / "train" / name).write_text("x")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "train" / "class png" / "again").symlink_to(
        tmp_path / "train"
    )  # the same images again
    train, val = open_data(str(tmp_path))
    assert len(train) == len(val) == 9
    expected = sorted(train.classes, key=str.lower)
    assert list(train.classes) == expected
    assert len(train.classes) == 9
    result = {Path(train.filename(i)).suffix[1:] for i in range(9)}
    assert result == set(ENDINGS)
    assert all(Images(train, None).load(i) for i in range(9))
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "left out 5 files that are not images in a class folder (.heic: 2, " in err
    assert all(part in err for part in (".eps: 1", "no ending: 1", ".png: 1", "such as"))
    (tmp_path / "train" / "stray.png").unlink()
    (tmp_path / "train" / "class png" / "again").unlink()
    (tmp_path / "train" / "class gif" / "drawing.eps").unlink()
    hub = open_data(f"hf:{tmp_path}")  # `datasets` reads the same images
    assert [len(part) for part in hub] == [9, 9]
    result = list(hub[0].classes)
    assert result == sorted(train.classes)
    assert ".heic: 2" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "hub", "shards"])
def test_a_class_without_one_readable_image_is_an_error(tmp_path, kind):
    good = encoded(picture(0, 0))
    rows = [[b"no image", 1], [b"no image", 1]]
    sources = {"folder": f"{tmp_path}", "hub": f"hf:{tmp_path}", "shards": f"wds:{tmp_path}"}
    source = sources[kind]

    def write():
        for part in ("train", "val"):
            both = [(good, 0), *rows]
            if kind == "hub":
                parquet(
                    tmp_path / f"{'validation' if part == 'val' else part}.parquet",
                    *zip(*both),
                    datasets.ClassLabel(names=["zero", "one"]),
                )
            elif kind == "shards":
                shards(tmp_path, part, both)
            for i, (image, label) in enumerate(both if kind == "folder" else ()):
                class_folder = tmp_path / part / ("zero", "one")[label]
                class_folder.mkdir(parents=True, exist_ok=True)
                path = tmp_path / part / ("zero", "one")[label] / f"{i}.png"
                path.write_bytes(image)

    write()
    name = "1" if kind == "shards" else "one"
    message = f"none of the 2 images of class {name} can be read; the first is .*1"
    with pytest.raises(ValueError, match=message) as caught:
        open_data(source)
    assert "\n" not in str(caught.value)
    rows[1][0] = good  # one intact image is enough
    write()
    train, _ = open_data(source)
    assert len(train) == 3
    result = sum(Images(train, None).load(i) is None for i in range(3))
    assert result == 1


def test_a_folder_that_cannot_be_listed_is_not_left_out(folder, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("light"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="light"):
        open_data(str(folder))


def test_folders_of_the_same_name_are_not_one_class_in_silence(tmp_path):
    folders = (("train", "cats/small"), ("train", "dogs/small"), ("val", "cats/small"))
    for part, name in folders:
        (tmp_path / part / name).mkdir(parents=True)
        path = tmp_path / part / name / "0.png"
        picture(0, 0).save(path)
    with pytest.raises(
        ValueError, match="cats/small and .*dogs/small would both be the class small; rename one"
    ):
        open_data(str(tmp_path))
    for folder in (tmp_path, tmp_path / "train"):  # `datasets` assigns them no labels
        with pytest.raises(ValueError, match="has the columns image; expected one of label"):
            open_part(f"hf:{folder}", "train")
    with pytest.raises(ValueError, match="`datasets` treats .* as a pattern; rename the folder"):
        (tmp_path / "a [1]").mkdir()
        open_data(f"hf:{tmp_path / 'a [1]'}")


def test_a_row_without_an_image_is_a_broken_one(tmp_path):
    good = encoded(picture(0, 0))
    column = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    rows = [
        {"image": image, "label": i % 2}
        for i, image in enumerate(
            [*[{"bytes": good, "path": None}] * 3, {"bytes": b"no image", "path": None}, None]
        )
    ]
    for part in ("train", "validation"):
        dataset = datasets.Dataset.from_list(rows, column)
        dataset.to_parquet(tmp_path / f"{part}.parquet")
    data = open_data(f"hf:{tmp_path}")
    images = Images(data[0], np.asarray)
    broken = [images[i][2] for i in range(5)]
    assert broken == [[], [], [], [3], [4]]


@pytest.mark.parametrize(
    "labels, says",
    [
        ([0.5, 1.5], "'label' contains a float, not a class"),
        ([[0], [1]], "'label' contains a list, not a class"),
        (range(70), "more than 50 classes"),
    ],
)
def test_a_column_that_is_no_class_is_refused(tmp_path, monkeypatch, labels, says):
    monkeypatch.setattr(images_module, "LARGEST_CLASS", 50)
    good = encoded(picture(0, 0))
    datasets.Dataset.from_list([{"image": good, "label": label} for label in labels]).to_parquet(
        tmp_path / "train.parquet"
    )
    with pytest.raises(
        ValueError, match=f"train: the column {says}|train: the column 'label' has {says}"
    ):
        open_data(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"num_classes": 10**12}, "sizes are missing or out of range"),
        ({"num_classes": "10"}, "sizes are missing"),
        ({"num_classes": -1}, "sizes are missing"),
        ({"pretrained_cfg": {"input_size": [1, 10**9, 10**9]}}, "sizes are missing"),
        ({"pretrained_cfg": {"input_size": [1]}}, "sizes are missing"),
        ({"pretrained_cfg": 3}, "sizes are missing"),
        ([], "sizes are missing"),
    ],
)
def test_sizes_of_a_foreign_model_are_checked_before_it_is_built(tmp_path, change, says):
    config = vision_config("digits")
    model = make_model(config, 10)
    names = [str(i) for i in range(10)]
    lab.save_model(model, config, names, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(read_json(path) | change if isinstance(change, dict) else change))
    with pytest.raises(
        ValueError, match=f"config.json does not describe a model of train-vision: its {says}"
    ):
        eval_vision(tmp_path / "model", "digits", workers=0, cpu=True)


def test_evaluation_reads_settings_and_weights_of_one_model(tmp_path, monkeypatch):
    config = vision_config("digits")
    real = lab.with_weights
    observed = []
    for i, name in enumerate("ab"):
        model = make_model(dataclasses.replace(config, seed=i), 10)
        names = [str((9 * i + n) % 10) for n in range(10)]
        lab.save_model(model, config, names, tmp_path / name)

    def read(name, path, **options):
        lab.save_model(
            make_model(config, 10), config, list("0123456789"), tmp_path / "b"
        ) if not observed else None  # another process trains from the start
        observed.append(path)
        return real(name, path, **options)

    monkeypatch.setattr(lab, "with_weights", read)
    repeated = eval_vision(
        tmp_path / "b", "digits", workers=0, cpu=True
    )  # the classes of the first model would raise an error
    monkeypatch.undo()
    assert len(observed) == 2
    assert repeated == eval_vision(tmp_path / "a", "digits", workers=0, cpu=True)


def tar(path, *members):
    "Write members (name, content or type of member) to a tar file."
    with tarfile.open(path, "w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes) and len(content) > 1 or content == b"":
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
            else:
                info.type = content
                info.linkname = "a.png"
                file.addfile(info)
    return path.read_bytes()


PNG = encoded(picture(0, 0))


def grey_levels(bits, dtype=np.uint16):
    "Return a picture with equally many black and white pixels."
    levels = np.repeat([0, 2**bits - 1], 128)
    return levels.astype(dtype).reshape(16, 16)


# one file per way to store black and white; the last three do not state their range
PIXELS = {
    "grey16.png": lambda: Image.fromarray(grey_levels(16)),
    "grey16.tif": lambda: Image.fromarray(grey_levels(16)),
    "big-endian.tif": lambda: Image.fromarray(grey_levels(16, ">u2")),
    "grey16.jp2": lambda: Image.fromarray(grey_levels(16)),
    "grey16.pgm": lambda: b"P5 16 16 65535\n" + grey_levels(16, ">u2").tobytes(),
    "grey12.pgm": lambda: b"P5 16 16 4095\n" + grey_levels(12, ">u2").tobytes(),
    "cmyk.jpg": lambda: Image.fromarray(grey_levels(8, np.uint8)).convert("CMYK"),
    "lab.tif": lambda: Image.fromarray(grey_levels(8, np.uint8)).convert("RGB").convert("LAB"),
    "palette.gif": lambda: Image.fromarray(grey_levels(8, np.uint8)).convert("P"),
    "alpha.png": lambda: Image.fromarray(grey_levels(8, np.uint8)).convert("LA"),
    "bits.png": lambda: Image.fromarray(grey_levels(8, np.uint8)).convert("1"),
    "float.tif": lambda: Image.fromarray(grey_levels(1, np.float32)),
    "float.pfm": lambda: Image.fromarray(grey_levels(1, np.float32)),
    "int32.tif": lambda: Image.fromarray(grey_levels(16, np.int32)),
}


@pytest.mark.parametrize("name", PIXELS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_black_and_white_stay_so_or_the_image_is_broken(tmp_path, name, mode):
    made = PIXELS[name]()
    if isinstance(made, bytes):
        (tmp_path / name).write_bytes(made)
    else:
        made.save(tmp_path / name)
    items = [(str(tmp_path / name), 0)]
    reader = images_module.FolderImages(items, {"x": 0}, "x")
    stored = name not in list(PIXELS)[-3:]
    loaded = Images(reader, None, mode).load(0)
    assert images_module.can_decode(reader, 0) == (loaded is not None) == stored
    if stored:
        grey = loaded[0].convert("L")
        values = np.asarray(grey, int).reshape(-1)
        assert loaded[0].mode == mode
        assert values[:128].max() <= 2
        assert values[128:].min() >= 253


@pytest.mark.parametrize(
    "ending, content",
    [
        ("qoi", b"qoif\0\0\0\x20\0\0\0\x20\x03\0\xfe\x01"),
        ("dds", b"DDS " + bytes([124, 0, 0, 0]) + b"\0" * 120),
        ("png", b""),
        ("jpg", b"\xff\xd8\xff"),
    ],
)
def test_a_damaged_image_is_broken_whatever_its_decoder_raises(tmp_path, ending, content):
    (tmp_path / f"x.{ending}").write_bytes(content)
    items = [(str(tmp_path / f"x.{ending}"), 0)]
    reader = images_module.FolderImages(items, {"x": 0}, "x")
    assert Images(reader, None).load(0) is None
    assert not images_module.can_decode(reader, 0)


def test_classes_have_one_order_and_no_class_is_inside_another(tmp_path, capsys):
    def write(name):
        for part in ("train", "val"):
            (tmp_path / part / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / part / name).write_bytes(PNG)

    names = [
        "01",
        "1",
        "2",
        "10",
        "a10",
        "Cat",
        "cat",
        "²",
    ]  # 01 and 1, Cat and cat differ in neither number nor word
    for name in names[::-1]:
        write(f"{name}/x.png")
    classes = open_part(str(tmp_path), "train").classes
    assert list(classes) == names
    write("2/clip.mpg"), write("2/table.h5")  # Pillow cannot decode these types
    result = len(open_part(str(tmp_path), "train"))
    assert result == len(names)
    assert "left out 2 files" in capsys.readouterr().err
    write("cat/small/x.png")
    with pytest.raises(
        ValueError,
        match="train/cat/small is in the class folder .*train/cat, but would become another class",
    ):
        open_data(str(tmp_path))


def test_links_that_lead_in_circles_end(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(PNG)
        (tmp_path / name / "link").symlink_to(tmp_path / other)
    folders = [
        folder.relative_to(tmp_path).as_posix() for folder, *_ in images_module.walked(tmp_path)
    ]
    assert sorted(folders) == [".", "a", "a/link", "b", "b/link"]


def test_shards_that_belong_to_no_part_are_counted(tmp_path, capsys):
    for name in ("Train-0.tar", "train-1.tar", "VAL.tar", "shard-0.tar", "extra.tgz"):
        tar(tmp_path / name, ("a.png", PNG), ("a.cls", b"0\n"))
    sizes = [len(part) for part in open_data(f"wds:{tmp_path}")]
    assert sizes == [2, 1]
    assert (
        capsys.readouterr().err.count(
            "left out 2 shards without train, val or test in the name, such as extra.tgz"
        )
        == 1
    )
    tar(tmp_path / "train-2.tzst")
    with pytest.raises(ValueError, match="train-2.tzst is compressed"):
        open_data(f"wds:{tmp_path}")


@pytest.mark.parametrize(
    "members, says",
    [
        *(
            (
                [("a.png", PNG), ("a.cls", label)],
                "train.tar, a.cls: the label b'.*' is not a class from 0 to 262,143",
            )
            for label in (
                b"3000000000",
                b"cat",
                b"",
                b"9" * 5000,
                b"-1",
                b"1_0",
                "٣".encode(),
                b"262144",
                b"0 1",
                b"\x1b[31m",
            )
        ),
        *(
            ([("a.png", PNG), ("a.cls", kind)], "train.tar, a.cls is a link, a folder or sparse")
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        ),
        (
            [("a.png", tarfile.SYMTYPE), ("a.cls", b"00")],
            "train.tar, a.png is a link, a folder or sparse",
        ),
        (
            [("a.png", PNG), ("a.png", PNG), ("a.cls", b"00")],
            "train.tar, a.png is a second image for the same key",
        ),
        (
            [("a.png", PNG), ("a.jpg", PNG), ("a.cls", b"00")],
            "train.tar, a.jpg is a second image for the same key",
        ),
        (
            [("a.png", PNG), ("a.cls", b"00"), ("a.cls", b"01")],
            "train.tar, a.cls is a second label for the same key",
        ),
    ],
)
def test_a_shard_that_is_wrong_is_named_with_its_key(tmp_path, members, says):
    for part in ("train", "val"):
        tar(tmp_path / f"{part}.tar", *members)
    with pytest.raises(ValueError, match=says) as caught:
        open_data(f"wds:{tmp_path}")
    assert len(str(caught.value)) < 300
    assert "\x1b" not in str(caught.value)


def test_damaged_and_doubled_shards_are_named(tmp_path, capsys):
    whole = tar(
        tmp_path / "train.tar",
        *(member for i in range(30) for member in ((f"{i}.png", PNG), (f"{i}.cls", b"00"))),
    )
    tar(tmp_path / "val.tar", ("a.png", PNG), ("a.cls", b"00"))
    middle = whole.index(b"20.png")
    for data, says in (
        (b"no tar" * 200, "is damaged or not a tar file"),
        (whole[: middle + 700], "is damaged or not a tar file"),
        (b"", "is damaged or not a tar file"),
        (
            whole[:middle] + b"\xff" + whole[middle + 1 :],
            "is damaged, or consists of several tar files: it cannot be read after byte",
        ),
        (whole + whole, ".* several tar files"),
    ):
        (tmp_path / "train.tar").write_bytes(data)
        with pytest.raises(ValueError, match=f"train.tar {says}"):
            open_data(f"wds:{tmp_path}")
    (tmp_path / "train.tar").write_bytes(whole[:middle])  # between two files
    train = open_data(f"wds:{tmp_path}")[0]
    assert len(train) == 20
    assert "train.tar has no end mark; the file may be truncated" in capsys.readouterr().err
    (tmp_path / "train.tar").write_bytes(whole)
    (tmp_path / "train-1.tar.gz").write_bytes(b"")
    with pytest.raises(
        ValueError,
        match="train-1.tar.gz is compressed, but images are read from the middle of a shard",
    ):
        open_data(f"wds:{tmp_path}")
    (tmp_path / "train-1.tar.gz").rename(tmp_path / "other.tar.gz")
    (tmp_path / "val.tar").rename(tmp_path / "train-val.tar")
    with pytest.raises(ValueError, match="the name of .*train-val.tar matches both parts"):
        open_data(f"wds:{tmp_path}")


def test_keys_alone_are_counted_and_a_folder_with_brackets_is_no_pattern(tmp_path, capsys):
    for folder, rows in (("mask [1]", 2), ("mask 1", 1)):
        (tmp_path / folder).mkdir()
        for part in ("TRAIN-train.TAR", "test.tar"):
            tar(
                tmp_path / folder / part,
                *(
                    (f"\x1b[31m{i}.{kind}", content)
                    for i in range(rows)
                    for kind, content in (("tif", PNG), ("cls", b"00"))
                ),
                ("b.png", PNG),
                ("c.cls", b"00"),
                ("d.json", b"{}"),
            )
    train, val = open_data(f"wds:{tmp_path}/mask [1]")
    assert len(train) == len(val) == 2
    assert "mask [1]" in train.filename(0)
    train = open_data(f"wds:{tmp_path}/mask ?")[0]
    assert len(train) == 1
    err = capsys.readouterr().err
    assert err.count("left out 2 keys with only an image or only a label, such as") == 4
    assert "\x1b" not in err


class Noise:
    "Reader of 64 intact images that counts the images read."

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)

    def __init__(self):
        self.read = []

    def __len__(self):
        return 64

    def filename(self, i, absolute):
        return f"image {i}"

    def __getitem__(self, i):
        return self.read.append(i) or self.pixels[i], i


def batches(rank=0, world=1, **options):
    "Return batches of the ViM recipe at 32 × 32 pixels: 4 epochs of 5 steps."
    config = vision_config(
        "imagenet-vim-tiny",
        model="longhorn_vim_tiny_patch4_32",
        data="noise",
        **dict(batch_size=12, epochs=4, workers=0, seed=3) | options,
    )
    config = lab.with_steps(config, 64)
    default = default_cfgs[config.model].default
    augment, *_ = transforms(config, default.to_dict())
    return ImageBatches(Augmented(Noise(), augment, "RGB", config), config, rank, world)


def test_order_and_pixels_depend_on_seed_and_place_alone():
    one = batches()
    whole = [one.next_batch() for _ in range(20)]
    for options in (
        dict(world=2, workers=2),
        dict(world=3, gradient_accumulation_steps=2),
        dict(gradient_accumulation_steps=3),
    ):
        config = dict(options)
        world = config.pop("world", 1)
        parts = config.get("gradient_accumulation_steps", 1)
        for rank in range(world):
            random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
            local = batches(rank, world, **config)
            local.load_state_dict({"drawn": 7 * 12, "broken": []})  # inside the second epoch
            for images, labels in whole[7:]:
                for part in range(parts):
                    got, names = local.next_batch()
                    size = 12 // parts
                    rows = slice(part * size + rank, (part + 1) * (12 // parts), world)
                    assert torch.equal(got, images[rows])
                    assert torch.equal(names, labels[rows])
            assert local.drawn == 20 * 12
            assert config.get("workers") or len(local.images.reader.read) == 13 * 12 // world
    labels = batches(seed=4).next_batch()[1]
    assert labels.tolist() != whole[0][1].tolist()


def test_an_epoch_is_a_permutation_and_copies_of_an_image_are_neighbours():
    plain = batches(repeats=1)
    copies = batches(repeats=3)
    epochs = []
    for _ in range(2):
        labels_of_epoch = [plain.next_batch()[1] for _ in range(5)]
        epochs.append(torch.cat(labels_of_epoch).tolist())
    for epoch in epochs:
        assert len(set(epoch)) == 60
    assert epochs[0] != epochs[1]
    images, labels = copies.next_batch()
    for copy in range(3):
        assert labels[copy::3].tolist() == epochs[0][:4]
    assert not torch.equal(images[0], images[1])


def test_no_intact_image_is_reported_broken():
    "Pillow 13 refuses to posterize with 0 bits, which RandAugment draws in 1 of 600 images."
    images = batches(repeats=1, batch_size=64, epochs=200).images
    bits = []
    augment = next(
        part
        for part in images.transform.transforms
        if isinstance(part, timm.data.auto_augment.RandAugment)
    )
    augment.ops = [operation for operation in augment.ops if operation.name.startswith("Posterize")]

    def noted(image, kept, **options):
        bits.append(kept)
        return posterize(image, kept, **options)

    for operation in augment.ops:
        assert operation.aug_fn is posterize
        operation.aug_fn = noted
    for position in range(500):
        result = images[position][1:]
        expected = (images.number(position), [])
        assert result == expected  # not the adjacent image
    assert bits.count(0) > 3

    def failing(image):
        return image.no_such_method

    images.transform = failing  # an error of the augmentation does not mean a broken image
    with pytest.raises(AttributeError, match="no_such_method"):
        images[3]


def test_sixteen_bits_are_scaled_and_an_enormous_image_is_a_broken_one(tmp_path, monkeypatch):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        ramp = np.arange(0, 65536, 1024, np.uint16)
        path = tmp_path / part / "a" / "0.png"
        Image.fromarray(ramp.reshape(8, 8)).save(path)
    images = Images(open_data(str(tmp_path))[0], None)
    pixels = np.asarray(images.load(0)[0])
    result = pixels[..., 0].flatten()
    assert np.array_equal(result, np.arange(0, 256, 4))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)
    assert images.load(0) is None


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_posterize_with_0_bits_is_black(mode):
    image = picture(0, 0).convert(mode)
    for bits in (0, 1, 4, 8):
        factor = 2 ** (8 - bits)
        expected = np.array(image, int) // factor * 2 ** (8 - bits)
        assert np.array_equal(posterize(image, bits), expected)


def interrupted(monkeypatch, step, what):
    "Call a function before a step of the next run in this process."
    draw = ImageBatches.next_batch

    def next_batch(self):
        if self.drawn == step * self.config.batch_size:
            monkeypatch.setattr(ImageBatches, "next_batch", draw)
            what()
        return draw(self)

    monkeypatch.setattr(ImageBatches, "next_batch", next_batch)


@pytest.mark.parametrize("workers", [slow_case(0), 2])
def test_training_resumes_inside_an_epoch_to_the_bit_and_refuses_other_settings(
    folder, tmp_path, monkeypatch, workers
):
    options = dict(epochs=3, mixup=0.8, cutmix=1.0, ema=0.9, drop_path=0.5, save_every=4)
    whole = small(tmp_path / "whole", folder, **options)
    assert whole["epoch"] == 3
    assert whole["val_images"] == 10
    assert whole["skipped"] == 0
    assert whole["steps"] == 9
    assert "ema_top5" in whole
    assert whole["engine"]["scan"] == "chunked"
    interrupted(monkeypatch, 5, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small(tmp_path / "parts", folder, **options, workers=workers)
    model = tmp_path / "parts" / "model"
    assert not model.exists()
    shutil.copytree(folder, tmp_path / "moved")  # data and workers may change
    assert (
        small(tmp_path / "parts", tmp_path / "moved", **options, workers=workers)["resumed_from"]
        == 4
    )
    result = results(tmp_path / "parts")
    expected = results(tmp_path / "whole")
    assert result == expected
    small(tmp_path / "whole", folder, **options)  # nothing left to do
    result = results(tmp_path / "parts")
    expected = results(tmp_path / "whole")
    assert result == expected
    with pytest.raises(
        ValueError,
        match="contains a run with lr=0.002, but this run has lr=0.003; use another folder",
    ):
        small(tmp_path / "whole", folder, **options, lr=3e-3)
    with pytest.raises(
        ValueError,
        match="contains a run with train=24, but this run has train=1438; use another folder",
    ):
        small(tmp_path / "whole", "digits", **options)


def test_sigterm_to_all_processes_is_a_checkpoint(folder, tmp_path, monkeypatch):
    "A scheduler sends SIGTERM also to the processes that load images."

    def ends():
        processes = (*multiprocessing.active_children(), multiprocessing.current_process())
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)

    interrupted(monkeypatch, 4, ends)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM after step 5"):
        small(tmp_path / "run", folder, workers=2)
    assert small(tmp_path / "run", folder)["resumed_from"] == 5
    assert small(tmp_path / "whole", folder)
    result = results(tmp_path / "run")
    expected = results(tmp_path / "whole")
    assert result == expected


def ends_while_loading(out, folder, **options):
    "Train while the process that loads images exits, reading ahead in step 5."
    # otherwise the change below would not affect the process
    multiprocessing.set_start_method("fork", force=True)
    number = Augmented.number

    def killed(images, position):
        if position == 6 * 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return number(images, position)

    Augmented.number = killed
    small(out, folder, **options)


@pytest.mark.slow
def test_a_killed_process_that_loads_images_is_one_line(folder, tmp_path):
    "Run in another process, since torch may later raise an error about lost loaders anywhere."
    options = dict(workers=1, save_every=4, epochs=4)
    pool = Pool(1, daemon=False)
    try:
        (message,) = pool.run(ends_while_loading, tmp_path / "run", folder, **options)
    finally:
        pool.close()
    assert re.match(
        "WorkerLost: a process that loads images has died, detected at step [456] .*same command",
        message,
    )
    assert "\n" not in message
    assert f"resumes from {tmp_path / 'run' / 'checkpoints' / 'step-00000004'}" in message
    assert small(tmp_path / "run", folder, **options)["resumed_from"] == 4
    assert small(tmp_path / "whole", folder, epochs=4)
    result = results(tmp_path / "run")
    expected = results(tmp_path / "whole")
    assert result == expected


def test_corrupt_images_are_named_skipped_and_counted_once_over_a_restart(
    tmp_path, capsys, monkeypatch
):
    filled(tmp_path, 9, 4)
    cut = tmp_path / "train" / "dark" / "3.png"
    start = cut.read_bytes()[:60]
    cut.write_bytes(start)
    path = tmp_path / "val" / "light" / "1.png"
    path.write_bytes(b"not an image")
    whole = small(tmp_path / "whole", tmp_path)
    assert whole["skipped"] == 2
    assert whole["val_images"] == 7
    errors = capsys.readouterr().err
    assert errors.count("train/dark/3.png; skipped") == 1
    assert errors.count("val/light/1.png; skipped") == 1
    interrupted(monkeypatch, 3, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small(tmp_path / "parts", tmp_path, save_every=1)
    small(tmp_path / "parts", tmp_path, save_every=1)
    result = results(tmp_path / "parts")
    expected = results(tmp_path / "whole")
    assert result == expected
    err = capsys.readouterr().err
    assert err.count("dark/3.png") == 1
    monkeypatch.setattr(
        images_module, "check_readable", lambda *_: None
    )  # images that break during a run
    for part, message in (
        ("val", "none of the held-out images can be read"),
        ("train", "^none of 18 images can be read; the first is .*0.png$"),
    ):
        for path in (tmp_path / part).rglob("*.png"):
            path.write_bytes(b"")
        with pytest.raises(ValueError, match=message):
            small(tmp_path / "again", tmp_path, epochs=1, workers=1)


def test_a_record_gives_back_classes_of_any_name():
    "A run with labels that look like paths, such as /m/09x0r, resumes."
    images = {"train": 2, "val": 1, "classes": ["a\x1b[31m", "/m/09x0r"]}
    assert (
        lab.facts_of(images)
        == lab.facts_of(as_recorded(images))
        != lab.facts_of(images | {"classes": ["a", "b"]})
    )


def test_batches_that_do_not_fit_and_accumulated_parts(folder, tmp_path):
    for options, says in (
        (dict(batch_size=64), "24 training images are fewer than batch_size=64"),
        (
            dict(gradient_accumulation_steps=3),
            "batch_size=8 cannot be divided among 1 processes with gradient_accumulation_steps=3",
        ),
        (dict(img_size=2**20), "GB; lower img_size or batch_size"),
        (dict(batch_size=7, mixup=0.8), "a micro-batch has 7 images"),
    ):
        with pytest.raises(ValueError, match=says):
            small(tmp_path, folder, **options)
    one = small(tmp_path / "one", folder)
    two = small(tmp_path / "two", folder, gradient_accumulation_steps=2)
    expected = pytest.approx(one["loss"], rel=1e-5)
    assert two["loss"] == expected
    assert two["steps"] == 6


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, small(out, folder, ema=0.5)


def test_a_trained_model_is_evaluated_and_read_by_timm(trained, folder, tmp_path, capsys):
    out, result = trained
    for weights in (out, out / "model", out / "model" / "model.safetensors"):
        repeated = eval_vision(weights, str(folder), workers=0, cpu=True, batch_size=3)
        assert repeated == {"top1": result["ema_top1"], "top5": 1.0, "val_images": 10, "skipped": 0}
    result = timm.create_model(f"local-dir:{out / 'model'}", pretrained=True).pretrained_cfg[
        "input_size"
    ]
    assert result == (1, 8, 8)
    assert (
        cli.main(["eval-vision", str(out), "--data", str(folder), "--img-size", "12", "--cpu"]) == 0
    )
    assert "of 10 images, 0 skipped" in capsys.readouterr().out
    image = encoded(picture(0, 1))
    shards(tmp_path, "val", [(image, 1)])
    filled(tmp_path / "more", 1, 1, ("dark", "dim", "light"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"nothing")
    for words, says in (
        ([str(tmp_path), "--data", str(folder)], f"checkpoint {tmp_path} contains no model"),
        ([str(out), "--data", "nowhere"], "nowhere/val does not exist"),
        ([str(out), "--data", f"wds:{tmp_path}"], "class '0' of wds:"),
        (
            [str(out), "--data", str(tmp_path / "more")],
            "class 'dim' of .*more is not number 1 of the 2 classes",
        ),
        (
            [str(out), "--data", str(folder), "--img-size", "9"],
            "img_size is 9; it must be a multiple of the patch, 2 pixels",
        ),
        ([str(tmp_path / "a" / "model.safetensors"), "--data", str(folder)], "has no config.json"),
    ):
        assert cli.main(["eval-vision", *words]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert re.search(says, error), error
    commands = (["generate", str(out)], ["export", str(out), str(tmp_path / "export")])
    for words in commands:
        assert cli.main(words) == 1
        err = capsys.readouterr().err
        assert f"{out / 'model'} contains a vision model; expected" in err


def test_a_run_starts_from_weights_of_another_size_and_head(trained, folder, tmp_path, monkeypatch):
    out, _ = trained
    config = dataclasses.replace(VISION_PRESETS["digits"].config, init_from=str(out), img_size=12)
    weights = load_file(out / "model" / "model.safetensors")
    same = make_model(config, 2)
    other = make_model(config, 10)
    assert torch.equal(same.head.weight, weights["head.weight"])
    assert other.head.out_features == 10
    first = timm.create_model(config.model, num_classes=2)
    first.load_state_dict(weights)
    first.set_input_size(12)
    for model in (same, other):
        assert torch.equal(model.pos_embed, first.pos_embed)
        assert torch.equal(model.norm.weight, weights["norm.weight"])
    start = small(tmp_path / "fine", folder, img_size=12, init_from=str(out), lr=1e-5)
    assert start["top1"] == 1.0
    assert read_json(tmp_path / "fine" / "model" / "config.json")["pretrained_cfg"][
        "input_size"
    ] == [1, 12, 12]
    result = eval_vision(tmp_path / "fine", str(folder), workers=0, cpu=True)["top1"]
    assert result == start["top1"]
    shutil.copytree(out / "model", tmp_path / "model")
    (tmp_path / "run" / "checkpoints").mkdir(
        parents=True
    )  # from a run that was killed before its first checkpoint
    for here, name in (
        (tmp_path, "model"),
        (tmp_path / "fine", "../model"),
        (folder, tmp_path / "model"),
    ):  # a resumed run does not read them again
        monkeypatch.chdir(here)
        small(tmp_path / "run", folder, epochs=1, lr=0.0, init_from=str(name))
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
    result = results(tmp_path / "run")[1]
    assert result == results(out)[1]


@pytest.mark.parametrize(
    "damage, says",
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"nothing"),
            "model.safetensors is damaged; train the model again",
        ),
        (
            lambda folder: (
                (folder / "manifest.json").unlink(),
                (folder / "model.safetensors").write_bytes(b"nothing"),
            ),
            "does not fit longhorn_vim_nano_patch2_8",
        ),
        (lambda folder: shutil.rmtree(folder), "contains no model"),
        (
            lambda folder: (
                (folder / "manifest.json").unlink(),
                lab.save_for_hf(
                    timm.create_model("longhorn_vim_nano_patch2_8", img_size=(4, 16)),
                    folder,
                    safe_serialization=True,
                ),
            ),
            "_patch2_8: its positions are those of images with 4x16 pixels; expected a square",
        ),
        (dict(model="longhorn_vim_nano_patch2_8", scan="mamba"), None),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence(trained, tmp_path, damage, says):
    shutil.copytree(trained[0], tmp_path / "run")
    config = dataclasses.replace(VISION_PRESETS["digits"].config, init_from=str(tmp_path / "run"))
    if says:
        damage(tmp_path / "run" / "model")
    else:  # Mamba's weights have more tensors; three classes, so that timm is not strict
        config = dataclasses.replace(config, model="mamba_vim_nano_patch2_8")
        says = "does not fit mamba_vim_nano_patch2_8: only one of them has blocks.0"
    with pytest.raises((ValueError, OSError), match=says) as error:
        make_model(config, 3)
    assert "\n" not in str(error.value)


def start(*words, launcher=()):
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "longhorn_kit.cli", *words],
        cwd=Path(__file__).parent.parent,
        env=os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process):
    output, errors = process.communicate(timeout=100)
    return process.returncode, output, errors


@pytest.mark.slow
def test_two_processes_name_each_broken_image_once_count_all_and_write_whole_weights(tmp_path):
    folder = filled(tmp_path, 8, 4)
    broken = "train/dark/3.png", "val/dark/2.png", "val/light/1.png"  # held-out: one per process
    for path in broken:
        (folder / path).write_bytes(b"not an image")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"
    code, output, errors = finished(
        start(
            "train-vision",
            "--preset",
            "digits",
            "--data",
            str(folder),
            "--out",
            str(folder / "whole"),
            "--epochs",
            "3",
            "--batch-size",
            "8",
            "--workers",
            "1",
            "--sharding",
            "fsdp",
            launcher=torchrun,
        )
    )
    lines = [line for line in read_jsonl(folder / "whole" / "metrics.jsonl") if "top1" in line]
    assert code == 0, errors
    assert [(line["skipped"], line["val_images"], line["epoch"]) for line in lines] == [
        (3, 6, 1),
        (3, 6, 2),
        (3, 6, 3),
    ]
    assert all(errors.count(f"{path}; skipped") == 1 for path in broken)
    assert output.count("\n") == 2
    assert "of 6 images, 3 skipped" in output
    assert "was spent waiting for images" in output
    one = small(folder / "one", folder, epochs=3, lr=4e-3, warmup_epochs=1)
    local, whole = (
        load_file(folder / name / "model" / "model.safetensors") for name in ("one", "whole")
    )
    for name in whole:
        assert torch.allclose(local[name], whole[name], atol=1e-4)
    assert local.keys() == whole.keys()
    expected = lines[-1]["top1"]
    assert one["top1"] == expected


@pytest.mark.slow
def test_a_thousand_classes_train_are_killed_inside_an_epoch_resume_and_are_evaluated(tmp_path):
    data = tmp_path / "imagenet"
    classes = [f"n{i:08d}" for i in range(1000)]
    for part, count in (("train", 2), ("val", 1)):
        for label, name in enumerate(classes):
            (data / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.random.default_rng((label, i)).integers(
                    0, 256, (4, 4, 3), dtype=np.uint8
                )
                Image.fromarray(pixels).resize((40, 32)).save(data / part / name / f"{i}.JPEG")

    def words(out):
        return [
            "train-vision",
            "--preset",
            "imagenet-vim-tiny",
            "--model",
            "longhorn_vim_nano_patch2_8",
            "--img-size",
            "16",
            "--data",
            str(data),
            "--out",
            str(out),
            "--epochs",
            "2",
            "--batch-size",
            "100",
            "--workers",
            "2",
            "--ema",
            "0.9",
            "--save-every",
            "3",
            "--log-every",
            "1",
        ]

    killed = start(*words(tmp_path / "killed"))
    while not any(line["step"] >= 26 for line in read_jsonl(tmp_path / "killed" / "metrics.jsonl")):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    assert finished(killed)[0] == -signal.SIGKILL
    assert not (tmp_path / "killed" / "model").exists()
    outputs = [finished(start(*words(tmp_path / name))) for name in ("killed", "whole")]
    assert [code for code, *_ in outputs] == [0, 0]
    result = outputs[0][1].split(";")[0]
    expected = outputs[1][1].split(";")[0]
    assert result == expected
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert len(results(tmp_path / "whole")[0]) == 40
    assert read_json(tmp_path / "killed" / "config.json")["attempts"][1]["from_step"] >= 24
    code, output, _ = finished(
        start("eval-vision", str(tmp_path / "killed"), "--data", str(data), "--cpu")
    )
    assert code == 0
    expected = outputs[0][1].split("epoch 2: ")[1].split(";")[0]
    assert output.strip() == expected


def test_the_names_that_timms_script_uses(folder, tmp_path):
    "timm's train.py creates model, data, loader and checkpoints with these calls."
    from timm.data import create_dataset, create_loader, resolve_data_config
    from timm.models import resume_checkpoint, safe_model_name
    from timm.optim import create_optimizer_v2
    from timm.utils import CheckpointSaver

    model = timm.create_model(
        "longhorn_vim_nano_patch2_8",
        pretrained=False,
        in_chans=1,
        num_classes=2,
        drop_rate=0.0,
        drop_path_rate=None,
        global_pool=None,
        bn_momentum=None,
        bn_eps=None,
        scriptable=False,
        checkpoint_path="",
    )
    config = resolve_data_config(dict(img_size=None, input_size=None, crop_pct=None), model=model)
    data = create_dataset(
        "", root=str(folder), split="train", is_training=True, batch_size=8, input_img_mode="L"
    )
    images, labels = next(
        iter(
            create_loader(
                data,
                config["input_size"],
                8,
                is_training=True,
                use_prefetcher=False,
                num_workers=0,
                mean=config["mean"],
                std=config["std"],
                device=torch.device("cpu"),
            )
        )
    )
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    arguments = argparse.Namespace(model=safe_model_name("longhorn_vim_nano_patch2_8"))
    saver = CheckpointSaver(
        model, optimizer, args=arguments, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)
    )
    saver.save_checkpoint(0, metric=1.0)
    other = timm.create_model("longhorn_vim_nano_patch2_8", num_classes=2)
    assert resume_checkpoint(other, str(tmp_path / "last.pth.tar"), log_info=False) == 1
    config = dataclasses.replace(
        VISION_PRESETS["digits"].config, init_from=str(tmp_path / "last.pth.tar")
    )
    for local in (other, make_model(config, 2)):  # `--init-from` accepts it too
        for name, value in model.state_dict().items():
            expected = local.state_dict()[name]
            assert torch.equal(value, expected)
