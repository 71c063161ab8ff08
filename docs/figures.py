"""Compress the figures in the notebooks to PNG with 256 colours, less than half the size.

`make outputs` runs this program. A figure has few colours, and many blends of these colours at
edges. The 128 most frequent colours stay exact. All others are replaced by the nearest of these and
of 128 colours that an octree chooses. A photograph keeps all its colours.
"""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOGRAPH = 20_000  # colours


def pack(data: bytes) -> bytes:
    """Return a PNG with at most 256 colours.

    A PNG that has at most 256 colours, or that shows a photograph, is returned unchanged."""
    image = Image.open(io.BytesIO(data))
    if image.mode == "P":
        return data
    pixels = np.array(image.convert("RGBA"))
    colors, place, counts = np.unique(
        pixels.view("u4").ravel(), return_inverse=True, return_counts=True
    )
    if len(colors) > PHOTOGRAPH:
        return data
    tree = np.frombuffer(Image.fromarray(pixels).quantize(128).palette.tobytes(), "u4")
    kept = np.concatenate([colors[np.argsort(-counts, kind="stable")[: 256 - len(tree)]], tree])
    parts = kept.view("u1").reshape(-1, 4).astype("i4")
    nearest = [
        ((parts - color) ** 2).sum(1).argmin()
        for color in colors.view("u1").reshape(-1, 4).astype("i4")
    ]
    packed = Image.fromarray(np.array(nearest, "u1")[place].reshape(pixels.shape[:2]))
    packed.putpalette(kept.tobytes(), "RGBA")
    packed.save(file := io.BytesIO(), "png", optimize=True)
    return file.getvalue()


def shows_photograph(output: dict) -> bool:
    """Check whether a PNG output keeps all its colours.

    A compressed PNG has a palette, which is type 3 in its header."""
    return base64.b64decode("".join(output["data"]["image/png"]))[25] != 3


def pictures(*cells: dict) -> list:
    "Return the PNG outputs of cells."
    return [
        output
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


if __name__ == "__main__":
    for path in Path(__file__).resolve().parent.parent.glob("nbs/**/*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        changed = False
        for output in pictures(*notebook["cells"]):
            old = base64.b64decode("".join(output["data"]["image/png"]))
            if (new := pack(old)) != old:
                output["data"]["image/png"] = base64.b64encode(new).decode()
                changed = True
        if changed:
            path.write_text(
                json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
