"""The report page: well-formed, alone, escaped, described, and written whole or not at all."""
import base64
import errno
import re
from html.parser import HTMLParser

import fakes
import pytest

from longhorn_kit.lab import claims, report
from longhorn_kit.lab.ledger import ledger as make_ledger

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    "What a page holds; fails on a tag that is closed out of order."
    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text, self.ids = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def fake_claims(monkeypatch):
    rows = [fakes.claim(), fakes.claim("reader", module=None, reads="fake", minutes={}), fakes.claim("other", module=None, compare=None, minutes={})]
    monkeypatch.setattr(claims, "CLAIMS", rows)


@pytest.fixture
def written(fake_claims, tmp_path):
    ledger = make_ledger(tmp_path / "runs", tmp_path / "none")
    path = report.write_report([fakes.record(), fakes.record(scale="gpu")], tmp_path / "deep" / "report.html", ledger)
    return path.read_text(encoding="utf-8")


def test_page_is_well_formed_and_loads_nothing(written):
    page = Page(written)
    assert page.open == [] and written.startswith("<!doctype html>")
    assert not page.all("script") and not page.all("link")
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "poster", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", written, re.S)[1]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style and any(meta.get("name") == "viewport" for meta in page.all("meta"))


def test_every_figure_has_a_picture_alt_text_and_caption(written):
    page = Page(written)
    plot, *figures = re.findall(r"<figure>.*?</figure>", written, re.S)
    assert plot.count("<svg") == 2 and "aria-label" in plot and "laptop: score" in plot and "<figcaption>" in plot
    assert len(figures) == len(page.all("img")) == 2
    for figure, image in zip(figures, page.all("img")):
        assert base64.b64decode(image["src"].split(",")[1]).startswith(b"\x89PNG")
        assert "loss against step" in image["alt"] and "exact" in image["alt"] and 'Loss <i> & "more"' in image["alt"]
        assert re.search(r"<figcaption>.*\w.*</figcaption>", figure)


def test_text_of_a_run_is_escaped(written):
    assert "<script>" not in written and "<h1>" in written and written.count("<h1>") == 1
    text = "".join(Page(written).text)
    assert "if a < b & c > d:\n    return '</pre><script>'" in text
    assert "What to see: a < b & more <script>alert(1)</script>" in text
    assert "The fake claim < & holds." in text


def test_page_says_what_was_run_what_came_out_and_how_to_repeat_it(written):
    text = "".join(Page(written).text)
    for part in ("score: +2.0 points", "holds", "score above zero", "official code", "1.0", "longhorn reproduce fake --scale laptop --fresh", "1.5 s",
                 '"steps": 3', "torch", "2.13", "not run", "Computing time 3.0 s"):
        assert part in text, part
    assert "gpuNone" not in text


def test_links_lead_to_sections_and_ids_are_unique(written):
    page = Page(written)
    assert len(set(page.ids)) == len(page.ids)
    assert {link["href"][1:] for link in page.all("a")} <= set(page.ids) and page.all("a")


def test_no_figure_stays_open(fake_claims, tmp_path):
    import matplotlib.pyplot as plt
    before = plt.get_fignums()
    report.write_report([fakes.record()], tmp_path / "report.html")
    assert plt.get_fignums() == before


def test_page_without_records_says_so(fake_claims, tmp_path):
    text = report.write_report([], tmp_path / "report.html").read_text()
    assert Page(text).open == [] and "Nothing has been run" in text


def test_failed_write_leaves_the_earlier_page(fake_claims, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="report.html"):
        report.write_report([fakes.record()], path)
    assert path.read_text() == "earlier" and [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("seconds, text", [(0, "0.0 s"), (9.96, "10.0 s"), (12.4, "12 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3599.9, "1 h"), (90061, "25 h 1 min")])
def test_duration(seconds, text):
    assert report.duration(seconds) == text


@pytest.mark.parametrize("value, number", [("99.1 % ± 0.2", True), ("-3.2", True), ("1,024", True), ("12.5M", True), ("2.1 (0.1)", True),
                                           ("v1", False), ("3 layers wide", False), ("", False)])
def test_columns_of_numbers_are_set_right(value, number):
    assert ("class=number" in report.table_html("t", ["a"], [[value]])) == number
