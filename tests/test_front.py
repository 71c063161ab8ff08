"""Test the front page: wording for either leader, readable pictures, and the index notebook."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from browser import CHROMIUM, Browser
from colours import contrast
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.forest import both, forest, image, inline, legend, svg
from longhorn_kit.lab.claims.front import (
    FRONT,
    Finding,
    Shown,
    count,
    favours,
    findings,
    findings_html,
    kind,
    leader,
    picture,
    reproduced,
    statement,
    table_rows,
)
from longhorn_kit.lab.claims.ledger import Row, ledger
from longhorn_kit.lab.claims.stats import Comparison, judge, judge_ratios

ROOT = Path(__file__).parents[1]
LEADS = (0.021, 0.019, 0.020, 0.022)  # bits per byte, for the first side
OPEN = (0.03, -0.02, 0.01)
RATIOS = (2.0, 1.6, 2.5)  # times as fast as the second side


def finding(first, second, comparison, judgement):
    return Finding(
        Shown("claim", "gpu", "", "Language", "N = 16", first, second, ""),
        Row(None, comparison, judgement),
    )


def judged(first, second, values, **options):
    comparison = Comparison("x", values, "bits per byte", searched=0, **options)
    return finding(first, second, comparison, judge([comparison])[0])


def timed(first, second, ratios):
    return finding(first, second, *judge_ratios("x", ratios, 1.0))


def test_a_decided_row_has_the_same_words_whichever_side_the_claim_puts_first():
    one = judged("exact", "Mamba", LEADS)
    other = judged("Mamba", "exact", tuple(-lead for lead in LEADS))
    assert one.row.judgement.verdict == "holds"
    assert other.row.judgement.verdict == "does not hold"
    assert statement(one) == statement(other) == "exact is ahead of Mamba by 0.021"
    assert statement(one, interval=True) == statement(other, interval=True)
    assert favours(one) == favours(other) == "exact"
    assert kind(one) == kind(other) == "exact"


def test_the_faster_side_comes_first_with_its_share_of_the_time():
    one = timed("exact", "diagonal", RATIOS)
    other = timed("diagonal", "exact", tuple(1 / ratio for ratio in RATIOS))
    assert (
        statement(one, interval=True)
        == statement(other, interval=True)
        == "exact takes 0.50 of the time of diagonal (0.40 to 0.62)"
    )
    mixed = timed("exact", "diagonal", (2.0, 0.8, 2.5))
    assert count(one) == "3 of 3 shapes"
    assert count(other) == "3 of 3 shapes"
    assert count(mixed) == "2 of 3 shapes"
    assert leader(mixed) == "exact"
    assert leader(timed("exact", "diagonal", (0.5, 0.4))) == "diagonal"


def test_an_open_row_gives_its_interval_and_a_row_without_numbers_its_reason():
    row = judged("exact", "Mamba", OPEN)
    assert re.fullmatch(
        r"exact against Mamba: between \u2212\d\.\d{3} and \+\d\.\d{3}", statement(row)
    )
    assert favours(row) == "undecided"
    assert kind(row) == "undecided"
    assert leader(row) == ""
    doubted = judged("exact", "Mamba", LEADS, doubt="one learning rate was tried")
    assert favours(doubted) == "not judged"
    assert kind(doubted) == "not judged"
    assert "between" in statement(doubted)
    assert "one learning rate was tried" in table_rows([doubted])[0][-1]
    assert (
        statement(judged("exact", "Mamba", (), doubt="Mamba diverged"))
        == "exact against Mamba: Mamba diverged"
    )


def test_every_row_of_the_front_page_is_a_row_of_the_ledger():
    rows = ledger("recorded runs only")
    names = {claim.name for claim in claims.all_claims()}
    for shown in FRONT:
        same = [row for row in rows if (row.claim.name, row.scale) == (shown.claim, shown.scale)]
        labels = [row.comparison.label for row in same if row.comparison.label]
        assert (
            shown.claim not in names
            or not labels
            or any(label.startswith(shown.label) for label in labels)
        ), shown
    for finding in findings():
        assert finding.row in rows
        assert leader(finding) in (finding.shown.first, finding.shown.second, "")


def test_planned_rows_replace_the_earlier_ones_as_soon_as_they_are_judged(monkeypatch):
    rows = ledger("recorded runs only")
    old = next(
        row
        for row in rows
        if row.claim.name == "recall" and "rewritten: exact above diagonal" in row.comparison.label
    )
    planned = replace(
        old,
        claim=replace(old.claim, name="recall-rewritten"),
        comparison=replace(old.comparison, label="embedding of 32: exact above diagonal"),
    )
    waiting = replace(planned, comparison=replace(planned.comparison, waits=True))
    others = [row for row in rows if row.claim.name != "recall-rewritten"]

    def names():
        return {finding.shown.claim for finding in findings() if "rewritten" in finding.shown.topic}

    for extra, expected in ((planned, {"recall-rewritten"}), (waiting, {"recall"})):
        shown = [*others, extra]
        monkeypatch.setattr("longhorn_kit.lab.claims.front.ledger", lambda *_, rows=shown: rows)
        assert names() == expected


def test_a_judged_row_of_the_second_plan_replaces_that_of_the_first(monkeypatch):
    rows = ledger("recorded runs only")
    shown = {finding.shown.label: finding for finding in findings()}
    replaced = shown["exact N=64 below diagonal"]
    assert replaced.row.scale == "gpu (second-plan)"
    assert table_rows([replaced])[0][1].endswith(" bits per byte, 99.3 % interval")
    assert shown["exact N=16 below diagonal"].row.scale == "gpu", (
        "the second plan has not judged it"
    )

    def waits(row):
        return replace(row, comparison=replace(row.comparison, waits=True))

    earlier = [waits(row) if row == replaced.row else row for row in rows]
    monkeypatch.setattr("longhorn_kit.lab.claims.front.ledger", lambda *_: earlier)
    before = {finding.shown.label: finding for finding in findings()}
    assert before["exact N=64 below diagonal"].row.scale == "gpu"
    assert list(before) == list(shown)


@pytest.mark.parametrize("narrow", [False, True])
def test_the_picture_has_every_statement_inside_and_names_both_sides(narrow):
    results = findings() + [judged("a < b", "c & d", LEADS)]
    drawn = ElementTree.fromstring(picture(results, narrow))
    texts = [element for element in drawn.iter() if element.tag.endswith("}text")]
    words = " ".join("".join(element.itertext()) for element in texts)
    for each in results:
        assert statement(each) in words
        assert each.shown.second.removeprefix("the ") in words
    width, height = map(float, drawn.get("viewBox").split()[2:])
    for element in texts:
        assert 0 <= float(element.get("x")) <= width
        assert 0 < float(element.get("y")) <= height
    assert "a &lt; b is ahead of c &amp; d" in findings_html(results)


def test_a_picture_in_an_image_comes_back_unchanged_and_the_narrow_one_is_hidden():
    drawn = svg('what "it" shows & more', 100, 20, "<text>é</text>")
    shown = both(drawn, drawn)
    assert inline(image(drawn)) == drawn
    assert "<svg" not in shown
    assert shown.count("<img") == 2
    assert '<div class="lk-narrow" hidden="hidden">' in shown
    assert 'alt="what &quot;it&quot; shows &amp; more"' in shown
    row = judged("exact", "Mamba", LEADS).row
    assert "<svg" not in forest([row]) + legend()
    result = inline(forest([row]) + legend()).count("<svg")
    assert result == 4


def test_words_and_marks_of_the_pictures_have_enough_contrast_in_both_themes():
    style = (ROOT / "longhorn_kit/lab/claims/forest.css").read_text()
    themes = [
        dict(re.findall(r"--(\w+): (#\w+)", block))
        for block in re.findall(r"\{ (--ink[^}]*)", style)
    ]
    assert len(themes) == 4
    for theme in themes:
        for name in theme.keys() - {"page", "band"}:
            for ground in ("page", "band"):
                assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground, theme)


def test_the_minutes_of_reproduce_are_those_of_the_claims():
    for name in ("recall", "language"):
        claim = claims.find_claim(name)
        line = next(line for line in reproduced().splitlines() if f"`{name}`" in line)
        result = line.split("|")[-2].strip()
        assert result == f"{claim.minutes['laptop']:g}"
        assert claim.statement in line
    assert "`vision`" not in reproduced(), "it runs only if named"


# ---- an untrusted notebook in JupyterLab

SEEN = """[...document.querySelectorAll('.jp-OutputArea img[src^="data:image/svg+xml"]')].map(
  image => ({
    pixels: image.complete ? image.naturalWidth : 0,
    width: image.getBoundingClientRect().width}))"""


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory):
    "Start JupyterLab on copies of notebooks that it has never run, and yield its address."
    if not CHROMIUM:
        pytest.skip("needs Chromium or Chrome")
    home = tmp_path_factory.mktemp("jupyterlab")
    (home / "book").mkdir()
    index = json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))
    (home / "book/index.ipynb").write_text(json.dumps(index), encoding="utf-8")
    for cell in index["cells"]:  # replace the output by that of a notebook with inline SVG
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output["data"]["text/html"] = inline("".join(output["data"]["text/html"]))
    (home / "book/elements.ipynb").write_text(json.dumps(index), encoding="utf-8")
    settings = home / "settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    # draw every cell at once
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    folders = {
        f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")
    }
    environment = {
        **os.environ,
        **folders,
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    options = (
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={home / 'book'}",
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 120
    while not (servers := list((home / "runtime").glob("jpserver-*.json"))):
        assert time.monotonic() < limit, "JupyterLab does not start"
        assert server.poll() is None, "JupyterLab does not start"
        time.sleep(0.2)
    yield json.loads(servers[0].read_text())["url"]
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:  # the server waits for a kernel
        server.kill()


@pytest.mark.release
def test_an_untrusted_notebook_shows_the_pictures_of_the_index(jupyterlab, tmp_path):
    browser = Browser(tmp_path)
    try:
        browser.visit(f"{jupyterlab}lab/tree/index.ipynb", 1200)
        browser.wait(
            f"(seen => seen.length >= 2 && seen.every(image => image.pixels > 0))({SEEN})", 180
        )
        wide, narrow = browser.run(SEEN)
        assert wide["width"] > 400, "the first picture is for wide screens"
        assert narrow["width"] == 0, "the second picture is for phones"
        assert (
            "Mamba is ahead of"
            not in browser.run("document.querySelector('.jp-Notebook').innerText").split(
                "The same rows"
            )[0]
        )
        browser.visit(f"{jupyterlab}lab/tree/elements.ipynb", 1200)
        browser.wait(
            "document.querySelector('.jp-Notebook')?.innerText.includes('Mamba is ahead of "
            "diagonal')",
            180,
        )
        assert browser.run("document.querySelectorAll('.jp-OutputArea svg.lk').length") == 0, (
            "JupyterLab no longer removes SVG"
        )
    finally:
        browser.close()
