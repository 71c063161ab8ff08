"""Small pictures of two classes, in folders and in Parquet files."""

import io

import datasets
import numpy as np
from PIL import Image


def picture(number, label):
    "Return a grey image whose brightness encodes its class."
    generator = np.random.default_rng(number)
    noise = generator.integers(0, 40, (8, 8))
    pixels = (noise + 150 * label).astype(np.uint8)
    return Image.fromarray(pixels)


def filled(root, train, val, classes=("dark", "light")):
    "Fill a folder with a number of images per class, and return it."
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                path = root / part / name / f"{i}.png"
                picture(i + 100 * label, label % 2).save(path)
    return root


def parquet(path, images, labels, column):
    "Write a data set of encoded images; `column` is the kind of labels."
    features = datasets.Features(image=datasets.Image(), label=column)
    table = dict(image=[dict(bytes=image, path=None) for image in images], label=list(labels))
    path.parent.mkdir(exist_ok=True)
    dataset = datasets.Dataset.from_dict(table, features=features)
    dataset.to_parquet(path)


def encoded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
