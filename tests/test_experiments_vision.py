"""Test the vision experiment: images, accuracy, equal sizes, jobs, and a tiny run's record."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Value
from PIL import Image

from longhorn_kit.lab.claims.registry import outcomes
from longhorn_kit.lab.experiments import vision as lab
from longhorn_kit.lab.experiments.vision import (
    EXPERIMENT,
    MODELS,
    PRESETS,
    Config,
    ImageSet,
    batches,
    learn,
    make_model,
)
from longhorn_kit.lab.run import Results, run
from longhorn_kit.records import read_record, to_plain
from pictures import encoded, parquet

PLAIN = Config(batch_size=8, pad=0, smoothing=0.0, cutmix=0.0)


def easy(count=64):
    labels = torch.arange(count) % 10
    pixels = (labels * 25)[:, None, None, None].expand(count, 1, 8, 8)
    return ImageSet(pixels.to(torch.uint8).contiguous(), labels)


def test_cifar10_from_a_folder_and_digits(tmp_path):
    images = [
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8))
        for i in range(4)
    ]
    for part in ("train", "test"):
        encoded_images = map(encoded, images)
        parquet(tmp_path / f"{part}.parquet", encoded_images, [0, 1, 0, 1], Value("int64"))
    train, _ = lab.cifar10(str(tmp_path))
    assert train.images.shape == (4, 3, 8, 8)
    labels = train.labels.tolist()
    assert labels == [0, 1, 0, 1]
    result = train.images[2, 1]
    pixels = np.array(images[2])
    expected = torch.from_numpy(pixels)
    assert torch.equal(result, expected)
    digits, val = lab.digits()
    assert len(digits.labels) == 1438
    assert len(val.labels) == 359
    assert digits.images.max() == 255
    classes = val.labels.unique()
    assert len(classes) == 10


def test_pictures_are_moved_mirrored_and_mixed_consistently():
    torch.manual_seed(0)
    images = ImageSet(
        torch.randint(1, 255, (32, 1, 8, 8), dtype=torch.uint8), torch.arange(32) % 10
    )

    def code(image):
        array = image.contiguous().numpy()
        return array.tobytes()

    got = {
        code(x): int(y.argmax())
        for batch in islice(batches(images, PLAIN), 4)
        for x, y in zip(*batch)
    }
    pairs = zip(*images)
    expected = {code(x): int(y) for x, y in pairs}
    assert got == expected
    same = [
        islice(batches(images, replace(PLAIN, pad=4, flip=True, cutmix=0.5), seed=3), 9)
        for _ in range(2)
    ]
    for a, b in zip(*same):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    mirrored = {
        code(x) for x, _ in islice(batches(images, replace(PLAIN, flip=True, batch_size=1)), 32)
    }
    assert mirrored < {code(part) for x in images.images for part in (x, x.flip(-1))}
    assert mirrored != set(got)
    numbers = torch.arange(8, dtype=torch.uint8)[:, None, None, None]
    pictures = numbers.expand(8, 1, 8, 8).contiguous()
    ones = ImageSet(pictures, torch.arange(8))
    images, labels = next(batches(ones, replace(PLAIN, cutmix=1.0), classes=8))
    # errors of pixels, and of the label
    numbers = torch.arange(8)[:, None, None]
    shares = (images == numbers).float().mean((2, 3))
    assert torch.allclose(shares, labels, atol=1e-6)
    assert len(shares.unique()) > 2


def test_accuracy_counts_every_image_once():
    class Guess(torch.nn.Module):
        pretrained_cfg = dict(mean=(0.0,), std=(1.0,))

        def forward(self, x):
            brightness = x[:, 0, 0, 0] * 255 / 25
            one_hot = F.one_hot(brightness.round().long(), 10)
            return one_hot.float()

    labels = torch.arange(25)
    changed = torch.arange(25) < 5
    wrong = ImageSet(easy(25).images, (labels + changed) % 10)
    for size in (1000, 7):
        share = lab.accuracy(Guess(), wrong, size)[0]
        assert share == pytest.approx(20 / 25)


def test_the_same_seed_gives_the_same_curve_and_the_models_are_of_one_size():
    config = replace(PRESETS["laptop"], epochs=1, batch_size=16, evaluations=2)
    runs = [
        learn(make_model("longhorn", "nano_patch2_8", 1), easy(), easy(20), config)
        for _ in range(2)
    ]
    curve = runs[0]["curve"]
    assert curve == runs[1]["curve"]
    assert runs[0]["loss"] == runs[1]["loss"]
    assert runs[0]["epochs"] == [0.5, 1.0]
    for size in ("nano_patch2_8", "tiny_patch4_32"):
        counts = {}
        for name in MODELS:
            parameters = make_model(name, size).parameters()
            counts[name] = sum(parameter.numel() for parameter in parameters)
        assert counts["deit"] == pytest.approx(counts["longhorn"], rel=0.01)
        assert (
            counts["longhorn"]
            == counts["longhorn_exact"]
            < counts["mamba"]
            < 1.07 * counts["longhorn"]
        )


def test_a_run_that_diverges():
    model = make_model("mamba", "nano_patch2_8")
    model.head.weight.data[:] = float("nan")
    with pytest.raises(RuntimeError, match="the loss is nan at evaluation 1"):
        learn(model, easy(), easy(20), replace(PLAIN, epochs=1))


@pytest.mark.parametrize(
    "override, message",
    [
        (
            dict(models=("longhorn", "mambo")),
            "unknown: mambo; there are: longhorn, longhorn_exact, mamba, deit",
        ),
        (dict(batch_size=5000), "batch_size is 5000; it must be from 1 to 1438"),
        (dict(lr=float("nan")), "lr is nan"),
        (dict(clip=-1), "clip is -1"),
        (dict(min_lr_ratio=2), "min_lr_ratio is 2"),
        (dict(size="huge"), "unknown: huge; there are: tiny_patch4_32"),
    ],
)
def test_settings_that_cannot_be(override, message):
    with pytest.raises(ValueError, match=message):
        EXPERIMENT.config("laptop", **override)


def test_jobs_are_ordered_by_seed_and_only_a_gpu_measures(tmp_path):
    planned = {
        scale: list(lab.jobs(config, Results(tmp_path))) for scale, config in PRESETS.items()
    }
    result = [(s["model"], s["seed"]) for s in planned["laptop"]]
    expected = [(name, 1000 * m + 4 + i) for i in range(4) for m, name in enumerate(MODELS, 1)]
    assert result == expected
    result = [s["job"] for s in planned["gpu"]]
    expected = ["training"] * 16 + ["speed"] * 4 + ["memory"] * 5
    assert result == expected
    last = planned["gpu"][-1]
    assert last["model"] == "deit, plain attention"
    for s in planned["gpu"]:
        assert s["gpu"]


def test_a_tiny_run_has_the_structure_of_the_committed_records_and_can_be_judged(
    tmp_path, monkeypatch
):
    parts = zip(lab.digits(), (96, 40))
    sets = tuple(ImageSet(part.images[:n], part.labels[:n]) for part, n in parts)
    monkeypatch.setattr(lab, "digits", lambda: sets)
    tiny = dict(workers=0, epochs=1, evaluations=2, judged=2)
    partial = run(EXPERIMENT, folder=tmp_path, **tiny, minutes=0)
    assert partial["missing"] == 8
    assert partial["results"]["seeds"] == []
    assert outcomes("vision", partial) == []
    record = run(EXPERIMENT, folder=tmp_path, **tiny)
    for committed in (
        read_record(Path(lab.__file__).parents[3] / f"nbs/lab/results/vision/{scale}.json")
        for scale in PRESETS
    ):
        names = set(record["results"])
        expected_names = set(committed["results"])
        assert names == expected_names
        for key in ("top1", "top5", "loss", "curves", "seconds", "images_per_second", "parameters"):
            assert list(record["results"][key]) == list(committed["results"][key]) == list(MODELS)
        expected = {
            name: value
            for name, value in to_plain(PRESETS[committed["scale"]]).items()
            if name != "judged"
        } | {"seeds": [0, 1, 2]}
        assert committed["settings"] == expected
    judged = outcomes("vision", record)
    assert [c.label for c, _ in judged] == [
        f"{name} as good as Mamba, at one rate for all" for name in ("diagonal", "exact")
    ]
    verdicts = {(j.verdict, j.why) for _, j in judged}
    assert verdicts == {("not run", "4 seeds are needed")}
