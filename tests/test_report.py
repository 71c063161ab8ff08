"""Test the report page: well-formed, self-contained, escaped, described, written atomically."""

import errno
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fakes
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims import report
from longhorn_kit.lab.claims.ledger import ledger
from longhorn_kit.records import write_record


class Page(HTMLParser):
    "Parser that collects a page's content and fails if tags are closed out of order."

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tags = []
        self.text = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        self.open += [] if tag in ("meta", "br", "link", "input", "hr") else [tag]

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += [] if self.open and self.open[-1] in ("style", "script") else [data]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(autouse=True)
def fake_claims(monkeypatch):
    reader = fakes.claim(
        "reader",
        module=None,
        reads="fake",
        minutes={},
        about=lambda record: record["settings"].get("data", ""),
    )
    monkeypatch.setattr(
        claims,
        "CLAIMS",
        [fakes.claim(), reader, fakes.claim("other", module=None, compare=None, minutes={})],
    )


@pytest.fixture
def written(tmp_path):
    write_record(tmp_path / "nbs/fake/gpu.json", fakes.record(scale="gpu", results={"score": -1}))
    settings = {"train": {"lr": 0.003, "seeds": [0, 1]}, "data": "</pre><script>1</script>\x07"}
    records = [fakes.record(settings=settings), fakes.record(scale="gpu")]
    recorded = ledger(tmp_path / "runs", tmp_path / "nbs")
    runs = [report.run_of(record) for record in records]
    path = report.write_report(runs, tmp_path / "deep/report.html", recorded)
    return path.read_text(encoding="utf-8")


def test_page_is_well_formed_and_loads_nothing(written):
    page = Page(written)
    assert page.open == []
    assert written.strip().startswith("<!doctype html>")
    assert {"script", "link", "img"}.isdisjoint(tag for tag, _ in page.tags)
    for _, there in page.tags:
        for name in ("src", "href", "srcset", "data", "poster", "action"):
            assert there.get(name, "#").startswith("#")
    assert "url(" not in written
    assert "@import" not in written
    assert '<meta name="viewport"' in written
    for words in ("prefers-color-scheme: dark", "max-width: 34rem"):
        assert f"@media ({words})" in written
    assert "@media print" in written
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    links = [attributes["href"][1:] for tag, attributes in page.tags if tag == "a"]
    assert len(set(ids)) == len(ids)
    assert links == ["fake-laptop", "fake-gpu"]
    assert set(links) <= set(ids)


def test_text_of_a_run_is_escaped_and_readable(written):
    text = "".join(Page(written).text)
    assert "<script>" not in written
    assert written.count("<h1>") == 1
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", written)
    assert text.count("</pre><script>1</script>\ufffd") == 2
    assert "The fake claim < & holds." in text


def test_page_says_what_was_run_what_came_out_and_how_to_repeat_it(written):
    text = " ".join(" ".join(Page(written).text).split())
    for part in (
        "laptop: score",
        "+2.0 points",
        "2 × holds (1.5 s)",
        "score above zero",
        "official code",
        "1.0",
        "Computing time 3.0 s",
        "not run",
        "longhorn reproduce fake --scale laptop --fresh",
        "train.lr 0.003 train.seeds 0, 1 data",
        "device cpu commit abc torch 2.13",
    ):
        assert part in text, part
    plots = re.findall(r"<figure>.*?</figure>", written, re.S)
    assert len(plots) == 2
    for plot in plots:
        assert plot.count("<svg") == 2
        assert "aria-label" in plot
        assert "<figcaption>" in plot
    assert "beside recorded GPU runs" in plots[0]
    assert "−1.0" in plots[0]
    assert "gpu None" not in text


def test_page_names_what_is_still_to_come_and_what_is_a_trial(tmp_path):
    path = tmp_path / "report.html"
    trial = report.run_of(fakes.record(), trial="steps 3 -> 20")
    runs = [report.run_of(fakes.record()), trial]
    report.write_report(runs, path, later=["other", "<b>"])
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert page.open == []
    assert ids == ["fake-laptop", "fake-laptop-trial"]
    words = " ".join(" ".join(page.text).split())
    assert "still to come when this page was written: other, <b>." in words
    assert "the same command resumes" in words
    assert "fake, laptop scale (trial)" in words
    assert words.count("does not count it: steps 3 -> 20.") == 1
    text = report.write_report([report.run_of(fakes.record())], path).read_text(encoding="utf-8")
    assert "still to come" not in text
    assert "trial" not in text


def test_page_without_records_and_a_failed_write(tmp_path, monkeypatch):
    path = report.write_report([], tmp_path / "report.html")
    text = path.read_text()
    assert Page(text).open == []
    assert "Nothing has been run" in text
    monkeypatch.setattr(
        "os.fsync",
        lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")),
    )
    with pytest.raises(OSError, match="report.html"):
        report.write_report([report.run_of(fakes.record())], path)
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_durations_and_that_the_package_carries_templates_and_style():
    texts = [report.duration(seconds) for seconds in (0, 9.96, 12.4, 59.6, 61, 3599.9, 90061)]
    assert texts == ["0.0 s", "10.0 s", "12 s", "1 min", "1 min 1 s", "1 h", "25 h 1 min"]
    root = Path(report.__file__).parents[2]
    globs = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["longhorn_kit"]
    assert {"ledger.html.j2", "report.html.j2", "report.css"} <= {
        path.name for glob in globs for path in root.glob(glob)
    }


def test_the_rows_of_a_record_can_still_be_asked_for():
    with pytest.warns(DeprecationWarning, match="run_of"):
        rows = report.rows_of(fakes.record())
    assert rows == report.run_of(fakes.record()).rows
    assert [row.claim.name for row in rows] == ["fake", "reader"]
