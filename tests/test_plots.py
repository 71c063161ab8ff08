"""Figures and tables of pages.

Means with ranges, names beside the ends of lines, and cells in Markdown are checked.
"""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import IPython.display
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from colours import contrast
from longhorn_kit import plots
from longhorn_kit.plots import COLORS, LABELS, label_ends, plot_seeds, show_table, use_style

ROOT = Path(__file__).parents[1]


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


def leaders(ax):
    """Return label -> (end of the curve, position of the label), as fractions of the axes.

    The value is None for a label without a leader line."""
    return {
        text.get_text(): (text.xy, text.get_position()) if text.arrow_patch else None
        for text in ax.texts
    }


def test_a_label_that_moved_or_is_far_from_its_curve_has_a_leader_to_its_end(ax):
    ax.plot([0, 1], [0, 1.0], label="low")
    ax.plot([0, 1], [0, 1.001], label="close")
    ax.plot([0, 0.5], [0, 0.5], label="short")
    ax.plot([0, 1], [0, np.nan], label="starts only")
    ax.set(xlim=(0, 1), ylim=(0, 2))
    label_ends(ax)
    result = leaders(ax)
    assert result["short"][0] == pytest.approx((0.5, 0.25))
    assert result["low"][0] == pytest.approx((1, 0.5))
    assert result["close"][0] == pytest.approx((1, 0.5005))
    heights = [result[name][1][1] for name in ("low", "close")]
    assert heights == pytest.approx([0.50025 - 0.0325, 0.50025 + 0.0325])
    places = {position[0] for _, position in result.values()}
    assert len(places) == 1, "the labels are aligned"
    styles = {text.get_text(): text.arrow_patch.get_linestyle() for text in ax.texts}
    assert styles["short"] == ":", "the leader must not look like a curve"
    assert styles["low"] == "-"


def test_labels_at_their_curves_have_no_leaders(ax):
    for height in (0.2, 0.6):
        ax.plot([0, 1], [0, height], label=str(height))
    ax.plot([0, 1], [0, 5], label="_unnamed")
    label_ends(ax)
    assert leaders(ax) == {"0.2": None, "0.6": None}


def test_labels_move_as_little_as_possible():
    rng = np.random.default_rng(0)
    for _ in range(20):
        heights = np.sort(rng.random(5))
        result = np.array(plots.spread(list(heights), 0.1))
        assert (np.diff(result) > 0.1 - 1e-9).all()
        assert result.min() >= 0
        assert result.max() <= 1
        least = ((result - heights) ** 2).sum()
        for trial in result + 0.02 * rng.standard_normal((300, 5)):
            if (np.diff(trial) >= 0.1).all() and trial.min() >= 0 and trial.max() <= 1:
                assert ((trial - heights) ** 2).sum() > least - 1e-9
    assert plots.spread([0.5, 0.5, 0.5], 0.6) == pytest.approx([-0.2, 0.4, 1]), "wrong direction"


def in_the_dark_theme(colour):
    "Return a figure's colour after the filter of docs/conf.py."
    channels = 0.94 - 0.88 * np.array(mpl.colors.to_rgb(colour))
    turned = 2 * (channels @ [0.213, 0.715, 0.072]) - channels
    return mpl.colors.to_hex((1.25 * turned.clip(0, 1)).clip(0, 1))


def test_the_dark_theme_is_the_one_of_the_site():
    configuration = (ROOT / "docs/conf.py").read_text()
    assert "invert(0.94) hue-rotate(180deg) brightness(1.25)" in configuration
    assert contrast(in_the_dark_theme("white"), "#131416") < 1.01, "not the page's colour"


@pytest.mark.parametrize("colour", [*COLORS.values(), plots.INK, "#000000", "#ffff00"])
def test_words_in_figures_can_be_read_in_both_themes(colour):
    words = plots.readable(colour)
    assert contrast(words, "#ffffff") >= 4.5
    assert contrast(in_the_dark_theme(words), in_the_dark_theme("white")) >= 4.5
    if colour in COLORS.values():  # colour of a line
        assert contrast(in_the_dark_theme(colour), in_the_dark_theme("white")) >= 4.5
    letters = mpl.colors.to_hex(plots.letters_on(colour))
    assert contrast(letters, colour) >= 4.5
    if contrast(colour, "#ffffff") >= 4.6:
        assert words == colour.lower()
    hue, hue_of_words = (mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(c))[0] for c in (colour, words))
    assert abs(hue - hue_of_words) < 0.03, "the hue changed"


def test_a_colour_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="oragne"):
        plots.readable("oragne")


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
    heading = [f"**{title}**", ""] if title else []
    assert lines[:-4] == heading


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
            face = patch.get_facecolor()
            colour = mpl.colors.to_hex(face).upper()
            size = (patch.get_width(), patch.get_height())
            filled.setdefault(colour, []).append(size)
    # the complete block of both steps, the block of the marked step; the last is the colour key
    loaded = filled[plots.LOADED][:-1]
    stored = filled[plots.STORED][:-1]
    assert loaded == stored == [(2, 2), (2, 1)]
    carried = filled[plots.CARRIED][:-1]
    assert carried == [(4, 1)]
    texts = [text.get_text() for text in axes.texts]
    assert {"grid (2,)", "the input", "y", "loaded by program 1", "carried", "masked off"} <= set(
        texts
    )


def test_a_picture_of_tiles_in_registers_has_these_words():
    def program(p):
        return {"gram": np.s_[0:2, 0:1]}, {"U": np.s_[0:2, 0:2]}

    plots.draw_programs(
        {"gram": (2, 2), "U": (2, 2), "R": (2, 2)},
        grid=(1,),
        program=program,
        show=(0,),
        layout=[["grid", "gram", "R", "U"]],
        carry=("R",),
        verbs=("used", "final"),
    )
    texts = {text.get_text() for text in plt.gca().texts}
    plt.close()
    assert {"used by program 0", "final", "in registers"} <= texts
    assert not {"loaded by program 0", "stored", "carried", "kept"} & texts


def test_a_picture_of_programs_refuses_an_array_without_a_shape():
    with pytest.raises(KeyError, match="unknown"):
        plots.draw_programs({}, (1,), lambda p: ({}, {}), (0,), [["unknown"]])
    plt.close()


def test_the_hull_of_blocks_contains_all():
    blocks = [np.s_[2:3, 0:4], np.s_[5:6, 4:8]]
    assert plots.block_hull(blocks) == (2, 6, 0, 8)
    result = plots.block_hull([np.s_[3:5]])
    assert result == (0, 1, 3, 5)
