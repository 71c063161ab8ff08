"""Figures and tables of pages: a mean with its range, names beside the ends of lines, cells in Markdown."""

import pytest

pytest.importorskip("matplotlib")
import IPython.display
import matplotlib.pyplot as plt
import numpy as np

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
    assert (
        line.get_ydata().tolist() == [2.0, 6.0, 0.5]
        and line.get_color() == COLORS["longhorn_exact"]
    )
    assert line.get_label() == LABELS["longhorn_exact"]
    band = ax.collections[0].get_paths()[0].vertices
    low = np.atleast_2d(runs).min(0)
    high = np.atleast_2d(runs).max(0)
    for step in range(3):
        there = band[band[:, 0] == step, 1]
        assert (there.min(), there.max()) == (low[step], high[step])


def test_a_model_without_a_colour_is_an_error(ax):
    with pytest.raises(KeyError, match="longhorm"):
        plot_seeds(ax, [0, 1], [[1.0, 2.0]], "longhorm")


def test_ends_of_lines_get_their_labels_and_do_not_overlap(ax):
    for height in (1.0, 1.001, 3.0):
        ax.plot([0, 1], [0, height], label=f"to {height}")
    label_ends(ax)
    ax.figure.canvas.draw()
    words = [text for text in ax.texts if text.get_text().startswith("to ")]
    assert {text.get_text() for text in words} == {"to 1.0", "to 1.001", "to 3.0"}
    boxes = sorted((text.get_window_extent() for text in words), key=lambda box: box.y0)
    assert all(
        below.y1 <= above.y0 + 1 for below, above in zip(boxes, boxes[1:])
    )  # a pixel for rounding


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
    assert lines[:-4] == ([f"**{title}**", ""] if title else [])
