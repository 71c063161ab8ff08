"""Figures and tables of pages.

A mean with its range, names beside the ends of lines, cells in Markdown.
"""

import pytest

pytest.importorskip("matplotlib")
import IPython.display
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from longhorn_kit import plots
from longhorn_kit.plots import COLORS, LABELS, label_ends, plot_seeds, show_table, use_style


@pytest.fixture
def ax():
    with plt.rc_context():
        use_style()
        figure, ax = plt.subplots()
        yield ax
        plt.close(figure)


@pytest.mark.parametrize("runs", [[[1.0, 4.0, 0.0], [3.0, 8.0, 1.0]], [2.0, 6.0, 0.5]])
def test_a_line_is_the_mean_over_seeds_and_its_band_the_range(ax, runs):
    line = plot_seeds(ax, [0, 1, 2], runs, "longhorn_exact")
    heights = line.get_ydata().tolist()
    assert heights == [2.0, 6.0, 0.5]
    assert line.get_color() == COLORS["longhorn_exact"]
    assert line.get_label() == LABELS["longhorn_exact"]
    path = ax.collections[0].get_paths()[0]
    band = path.vertices
    low = np.atleast_2d(runs).min(0)
    high = np.atleast_2d(runs).max(0)
    for step in range(3):
        at_step = band[:, 0] == step
        there = band[at_step, 1]
        assert there.min() == low[step]
        assert there.max() == high[step]


def test_a_model_without_a_colour_is_an_error(ax):
    with pytest.raises(KeyError, match="longhorm"):
        plot_seeds(ax, [0, 1], [[1.0, 2.0]], "longhorm")


def test_ends_of_lines_get_their_labels_and_do_not_overlap(ax):
    for height in (1.0, 1.001, 3.0):
        ax.plot([0, 1], [0, height], label=f"to {height}")
    label_ends(ax)
    ax.figure.canvas.draw()
    words = [text for text in ax.texts if text.get_text().startswith("to ")]
    labels = {text.get_text() for text in words}
    assert labels == {"to 1.0", "to 1.001", "to 3.0"}
    boxes = sorted((text.get_window_extent() for text in words), key=lambda box: box.y0)
    for below, above in zip(boxes, boxes[1:]):
        assert below.y1 <= above.y0 + 1  # a pixel for rounding


@pytest.mark.parametrize("title", ["", "Losses"])
def test_a_table_keeps_its_cells_also_with_bars_in_them(title, monkeypatch):
    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    show_table(title, ["model", "|d|"], [["exact", 1], ["diagonal", 0.5]])
    lines = shown[0].data.splitlines()
    assert lines[-4:] == [
        "| model | \\|d\\| |",
        "| --- | --- |",
        "| exact | 1 |",
        "| diagonal | 0.5 |",
    ]
    result = lines[:-4]
    heading = [f"**{title}**", ""] if title else []
    expected = heading
    assert result == expected


def draw_two_programs(**options):
    "Draw a kernel whose last block leaves its arrays by two columns; return the axes."

    def program(p, t):
        block = np.s_[t : t + 1, 4 * p : 4 * p + 4]
        return {"x": block}, {"y": block}

    plots.draw_programs(
        {"x": (2, 6), "s": (4,), "y": (2, 6)},
        grid=(2,),
        program=program,
        show=(1,),
        layout=[["grid", "x"], ["s", "y"]],
        carry=("s",),
        steps=2,
        step=1,
        **options,
    )
    axes = plt.gca()
    plt.close()
    return axes


def test_a_picture_of_programs_fills_what_one_program_uses():
    axes = draw_two_programs(labels={"x": "the input"})
    filled = {}
    for patch in axes.patches:
        if isinstance(patch, plt.Rectangle) and patch.get_fill():
            colour = mpl.colors.to_hex(patch.get_facecolor()).upper()
            size = (patch.get_width(), patch.get_height())
            filled.setdefault(colour, []).append(size)
    # the whole block of both steps, the block of the marked step; the last is the key of the colour
    loaded = filled[plots.LOADED][:-1]
    stored = filled[plots.STORED][:-1]
    assert loaded == stored == [(2, 2), (2, 1)]
    carried = filled[plots.CARRIED][:-1]
    assert carried == [(4, 1)]
    texts = [text.get_text() for text in axes.texts]
    assert {"grid (2,)", "the input", "y", "loaded by program 1", "carried", "masked off"} <= set(
        texts
    )


def test_a_picture_of_programs_refuses_an_array_without_a_shape():
    with pytest.raises(KeyError, match="unknown"):
        plots.draw_programs({}, (1,), lambda p: ({}, {}), (0,), [["unknown"]])
    plt.close()


def test_the_hull_of_blocks_contains_all():
    blocks = [np.s_[2:3, 0:4], np.s_[5:6, 4:8]]
    assert plots.block_hull(blocks) == (2, 6, 0, 8)
    result = plots.block_hull([np.s_[3:5]])
    assert result == (0, 1, 3, 5)
