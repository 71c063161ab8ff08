"""Test the claims ledger: all states of a record file, and all views of the rows."""

import ast
import json
import re
import shlex
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import fakes
from longhorn_kit import cli
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.claim import BASES, PLATFORM
from longhorn_kit.lab.claims.compare import contrast_rows, looks_of
from longhorn_kit.lab.claims.forest import WIDE, axis, forest, inline, mark, picture
from longhorn_kit.lab.claims.front import Finding, Shown, favours, front, leader
from longhorn_kit.lab.claims.ledger import (
    Records,
    Row,
    cells,
    coverage,
    ledger,
    ledger_html,
    ledger_json,
    ledger_markdown,
    ledger_summary,
    ledger_text,
    reason,
    section,
)
from longhorn_kit.lab.claims.one_pass_plan import models_of
from longhorn_kit.lab.claims.report import run_of
from longhorn_kit.lab.claims.stats import LEVEL, Comparison, Contrast, Judgement, judge
from longhorn_kit.records import read_record, records_root, write_record
from sweep import slow_case


@pytest.fixture
def three_claims(monkeypatch):
    other = fakes.claim("other", module=None, compare=None, minutes={})
    reader = fakes.claim("reader", module=None, reads="fake", minutes={})
    monkeypatch.setattr(claims, "CLAIMS", [fakes.claim(), other, reader])


def put(folder, content, name="fake", file="laptop/record.json"):
    "Write a record, the bytes of a damaged record, or (None) a folder instead."
    path = folder / name / file
    path.parent.mkdir(parents=True)
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_record(path, content)


def words(rows):
    return [row.judgement.verdict for row in rows]


def test_nothing_ran(three_claims, tmp_path):
    rows = ledger(tmp_path / "missing", tmp_path / "missing too")
    assert words(rows) == ["not run", "no code", "not run"]  # no code judges the second claim
    assert rows[0].command == "longhorn reproduce fake --scale laptop"
    assert "1 min on two CPU cores" in rows[0].judgement.why
    assert rows[1].command == "" == rows[2].command


def test_scale_without_a_run_is_a_row_beside_the_one_that_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(
        claims, "CLAIMS", [fakes.claim(minutes={"laptop": 1, "gpu": 20, "paper": 3000})]
    )
    put(tmp_path, fakes.record())
    rows = ledger(tmp_path, tmp_path / "none")
    assert [(row.scale, row.judgement.verdict) for row in rows] == [
        ("laptop", "holds"),
        ("gpu", "not run"),
        ("paper", "not run"),
    ]
    assert "50 h on four" in rows[2].judgement.why
    assert rows[1].command == "longhorn reproduce fake --scale gpu"


def test_variant_is_listed_with_the_command_that_its_record_holds(three_claims, tmp_path):
    folder = tmp_path / "results" / "fake"
    write_record(folder / "seeds.json", fakes.record(command="longhorn reproduce fake --seeds 0 1"))
    write_record(folder / "times.json", {"experiment": "other"})
    row, *others = ledger(tmp_path / "none", tmp_path / "results")
    assert row.scale == "laptop (seeds)"
    assert row.judgement.verdict == "holds"
    assert row.file == "nbs/lab/results/fake/seeds.json"
    assert row.command == "longhorn reproduce fake --seeds 0 1"
    not_run = words(other for other in others if other.claim.name == "fake")
    assert not_run == ["not run"]


@pytest.mark.parametrize(
    "content", [b'{"cla', b'{"anything": 1}', fakes.record(results={"score": None})]
)
def test_a_variant_that_cannot_be_read_is_a_row_and_not_silence(three_claims, tmp_path, content):
    put(tmp_path / "results", content, file="seeds.json")
    row, *_ = ledger(tmp_path / "none", tmp_path / "results")
    assert row.judgement.verdict == "cannot be judged"
    assert row.file == "nbs/lab/results/fake/seeds.json"
    assert row.command == ""  # no command is known that gives this variant
    assert str(tmp_path) not in row.judgement.why


def test_recorded_commands_can_be_typed_into_a_shell():
    rows = ledger("no runs")
    for command in {row.command for row in rows}:  # many rows share a command
        parts = [part for part in shlex.split(command) if not part.startswith("LONGHORN_TEXT=")]
        if "-c" in parts:
            code = parts[parts.index("-c") + 1]
            tree = ast.parse(code)
            names = {}
            exec(
                "\n".join(
                    ast.unparse(node) for node in tree.body if isinstance(node, ast.ImportFrom)
                ),
                names,
            )
            for node in ast.walk(tree):
                if isinstance(node, (ast.Name, ast.Attribute)):
                    eval(ast.unparse(node), names)
        for words in re.findall(r"(?:^|do |&& |FOLDER )longhorn ([^;&]*)", command):
            assert cli.parse(shlex.split(words))
        assert not parts or parts[0] in ("longhorn", "python", "python3", "for")
        assert ";" not in command or parts[0] == "for" or "-c" in parts  # only commands
        assert subprocess.run(["sh", "-n", "-c", command]).returncode == 0
    for row in rows:
        measured = row.comparison.differences and row.scale not in BASES
        assert not measured or row.command and row.file, (
            "every measured row links its record and the command that repeats it"
        )


def test_kernel_record_that_is_missing_or_damaged_leaves_the_ledger_standing(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "CLAIMS", [claims.find_claim("kernel-time")])
    results = tmp_path / "nbs" / "lab" / "results"
    results.mkdir(parents=True)
    assert words(ledger("x", results)) == ["not run"]
    path = tmp_path / claims.Claim.times
    path.parent.mkdir(parents=True)
    for text in ("", "[]", '{"rows": []}', '{"rows": 3}'):
        path.write_text(text)
        rows = ledger("x", results)
        assert words(rows) == ["cannot be judged"], text
        assert claims.Claim.times in rows[0].judgement.why, text


def test_fresh_record_comes_before_the_recorded_one(three_claims, tmp_path):
    record = fakes.record(results={"score": -1})
    put(tmp_path / "runs", record)
    path = tmp_path / "results" / "fake" / "laptop.json"
    write_record(path, fakes.record())
    rows = ledger(tmp_path / "runs", tmp_path / "results")
    assert words(rows) == ["does not hold", "holds", "no code", "does not hold", "holds"]
    assert rows[0].file == "runs/fake/laptop/record.json"
    text = str(rows)
    assert text.count("The fake claim") == 1
    assert "-1.0 points" in text
    assert "+2.0 points" in text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00garbage",
        b"[1, 2]",
        b"null",
        b"\x00" * 64,
        json.dumps(fakes.record()).encode(),
        {"experiment": "other"},
        {"experiment": "fake"},
        None,
        {"experiment": "fake", "results": None},
        fakes.record(results={"score": "high"}),
        fakes.record(results={"score": None}),
    ],
)
def test_damaged_record_is_a_row_and_not_a_crash(three_claims, tmp_path, content):
    put(tmp_path, content)
    rows = ledger(tmp_path, tmp_path / "none")
    assert words(rows) == ["cannot be judged", "no code", "cannot be judged"]
    assert "record" in rows[0].judgement.why
    assert "\n" not in rows[0].judgement.why
    assert "record.json" in ledger_text(rows)
    assert "record.json" in rows._repr_html_()


def test_run_without_record_is_started_and_an_earlier_one_set_aside_is_ignored(
    three_claims, tmp_path
):
    (tmp_path / "fake" / "laptop").mkdir(parents=True)
    assert "about 1 min" in ledger(tmp_path, tmp_path)[0].judgement.why
    (tmp_path / "fake" / "laptop" / "metrics.jsonl").write_text("")
    row = ledger(tmp_path, tmp_path)[0]
    assert row.judgement.verdict == "not run"
    assert row.judgement.why == "started, no record yet"
    folder = tmp_path / "fake" / "laptop"
    folder.rename(tmp_path / "fake" / "laptop.previous")
    assert "about 1 min" in ledger(tmp_path, tmp_path)[0].judgement.why


@pytest.mark.parametrize("width", [20, 80, *map(slow_case, (72, 120, 200))])
def test_terminal_table_keeps_to_its_width_and_loses_no_word(width):
    rows = ledger("no runs")
    text = ledger_text(rows, width)
    longest = max(map(len, text.splitlines()))
    assert longest <= max(72, width)
    shown = set(re.findall("[A-Za-z]+", text))
    for row in rows:
        claim = row.claim
        texts = [claim.statement, claim.published, row.judgement.why, row.file, row.command]
        every = [*texts, *cells(row)]
        expected = set(re.findall("[A-Za-z]+", " ".join(every)))
        assert expected <= shown
        assert re.search(rf"^{claim.name}\b", text, re.M)


def test_json_holds_everything():
    rows = ledger("no runs")
    lines = json.loads(ledger_json(ledger("no runs")))
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines):
        assert line["claim"] == row.claim.name
        assert line["verdict"] == row.judgement.verdict
        assert line["file"] == row.file
        assert line["command"] == row.command
        assert line["n"] == row.judgement.n
        expected = list(row.comparison.differences)
        assert line["differences"] == expected
        assert {"paper", "rule", "why", "about", "published", "unit"} <= line.keys()


def test_html_and_markdown_are_escaped(three_claims, tmp_path):
    put(tmp_path, fakes.record())
    rows = ledger(tmp_path, tmp_path / "none")
    assert "claim &lt; &amp; holds" in rows._repr_html_()
    assert "claim < &" not in rows._repr_html_()
    assert "claim &lt; &amp; holds" in section("fake", rows)
    lines = ledger_markdown(
        [Row(rows[0].claim, Comparison("a | b", (1.0,)), judge([Comparison("a", (1.0,))])[0])]
    ).splitlines()
    assert len(lines) == 3
    line = lines[2].replace("\\|", "")
    assert line.count("|") == 6


def measured(*comparisons):
    return [Row(fakes.claim(), *pair) for pair in zip(comparisons, judge(list(comparisons)))]


@pytest.mark.parametrize("narrow", [False, True])
def test_plot_is_text_that_names_every_row_and_verdict(narrow):
    rows = measured(
        Comparison("a < b & c", (2.0, 2.1, 2.2), published=1.0, searched=0),
        Comparison("far", (1.0, -40.0, 42.0)),
        Comparison("one", (0.5,)),
    )
    svg = picture(rows, narrow)
    root = ElementTree.fromstring(svg)
    texts = [e for e in root.iter() if e.tag.endswith("text")]
    words = ["".join(e.itertext()) for e in texts]
    assert {"a < b & c", "far", "one", "undecided", "cannot be judged"} <= set(words)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    size = root.get("viewBox").split()[2:]
    width, height = map(float, size)
    for e in texts:
        assert 0 <= float(e.get("x")) <= width
        assert 0 < float(e.get("y")) <= height
    assert "prefers-color-scheme: dark" in svg, "a ring and a disc"
    assert svg.count("<circle") == 2, "a ring and a disc"


def test_a_claim_as_good_has_its_line_at_the_margin():
    rows = measured(
        Comparison("as good", (-0.002, -0.0021, -0.0019), margin=0.005, searched=0),
        Comparison("below", (0.001, 0.0011, 0.0009)),
    )
    to_pixels, _ = axis(rows, "points", WIDE["plot"])
    lines = [float(x) for x in re.findall(r'd="M([\d.]+) \d+v', picture(rows))]
    expected = [to_pixels(-0.005), to_pixels(0)]
    assert lines == pytest.approx(expected, abs=0.1)
    assert lines[0] < to_pixels(-0.002) < lines[1]


def test_the_axis_puts_the_claims_side_to_the_right_and_keeps_within_its_ends():
    first = Comparison("x", (1.0, 2.0, 3.0))
    second = Comparison("y", (-90.0, 95.0, -2.0))
    rows = measured(first, second)
    to_pixels, ticks = axis(rows, "points", (100, 200))
    assert to_pixels(0) == 150 < to_pixels(1)
    assert to_pixels(-1e9) >= 100
    assert to_pixels(1e9) <= 200
    assert ticks[1] == 0 == ticks[0] + ticks[2]
    times = measured(Comparison("x", (2.0, 4.0, 3.0), "times as fast", searched=0))
    to_pixels, ticks = axis(times, "times as fast", (0, 100))
    assert to_pixels(1) == 50
    one = to_pixels(2) - to_pixels(1)
    half = to_pixels(1) - to_pixels(0.5)
    assert one == pytest.approx(half)
    assert 1 in ticks
    rows = [row for row in ledger("no runs") if row.comparison.differences and row.judgement.n]
    html = inline(forest(rows))  # one row per measured comparison
    assert html.count("<svg") == 2
    for row in rows:
        count = html.count(f">{row.judgement.verdict}<")
        assert count >= 2


def test_the_front_page_keeps_a_row_whose_model_diverged_at_every_seed(monkeypatch, tmp_path):
    record = read_record(records_root() / "nbs/lab/results/one-pass/gpu.json")
    for run in models_of(record)["Mamba N=16"]["runs"]:
        run["diverged"] = 7
    write_record(tmp_path / "one-pass" / "gpu.json", record)
    monkeypatch.setattr("longhorn_kit.lab.claims.ledger.results_folder", lambda: tmp_path)
    for text in (ledger_markdown(rows := front()), picture(rows), picture(rows, narrow=True)):
        assert "diagonal below Mamba" in text
        assert "exact below Mamba" in text
        assert text.count("Mamba N=16 diverged") == 2
    assert "+0.000" not in picture(rows[:2])
    assert rows[0].judgement.verdict == "cannot be judged"
    models_of(record)["Mamba N=16"]["runs"] = []
    del models_of(record)["diagonal N=16"]["runs"][5:]  # models without all seeds are not shown
    write_record(tmp_path / "one-pass" / "gpu.json", record)
    for row in front():
        assert row.claim.name != "one-pass"


def test_reading_the_ledger_imports_no_torch_and_no_matplotlib():
    code = (
        "import sys; from longhorn_kit.lab.claims.ledger import ledger; str(ledger('x')); "
        "ledger('x')._repr_html_(); print([m for m in ('torch', 'matplotlib') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_record_without_the_models_of_a_claim_says_nothing_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(
        claims,
        "CLAIMS",
        [
            claims.find_claim(name)
            for name in ("scalar-rate", "sample-efficiency", "one-pass", "language")
        ],
    )
    runs = [
        {
            "mixer": mixer,
            "seed": 0,
            "tokens": 1e6,
            "parameters": 1e6,
            "model": {"d_mlp": 0},
            "state_numbers": 0,
            "val": {"tokens": [1e6], "all": [bits]},
        }
        for mixer, bits in (("longhorn", 1.0), ("mamba", 2.0), ("attention", 3.0))
    ]
    results = {
        "runs": runs,
        "train_tokens": 1e6,
        "unit": "bits per byte",
        "domains": {"held out": {}},
    }
    record = fakes.record("language", results=results, settings={"train": {"lr": 0.003}})
    put(tmp_path, record, "language")
    rows = ledger(tmp_path, tmp_path / "none")
    assert [
        row.judgement.verdict
        for row in rows
        if (row.claim.name, row.scale) == ("language", "laptop")
    ] == ["cannot be judged"] * 2
    for row in rows:
        if row.claim.name == "language" and row.scale == "laptop":
            assert "one learning rate" in row.judgement.why
    result = {row.judgement.verdict for row in rows if row.claim.name != "language"}
    assert result == {"not run"}


def test_a_claim_that_no_code_judges_says_so_apart_from_one_that_was_not_run(monkeypatch, tmp_path):
    recipe = fakes.claim(
        "recipe", module=None, compare=None, minutes={}, commands={"paper": "longhorn train-lm"}
    )
    idea = fakes.claim("idea", module=None, compare=None, minutes={})
    limited = fakes.claim("limited", limits={"laptop": "one seed of each model"})
    monkeypatch.setattr(claims, "CLAIMS", [fakes.claim(), recipe, idea, limited])
    rows = ledger(tmp_path, tmp_path)
    why = {row.claim.name: (row.judgement.verdict, row.judgement.why) for row in rows}
    cost = f"about 1 min on {PLATFORM['laptop']}"
    assert why == {
        "fake": ("not run", cost),
        "recipe": ("no code", "the full recipe; no code judges its runs"),
        "idea": ("no code", "no code runs or judges it"),
        "limited": ("not run", f"{cost}; one seed of each model"),
    }
    assert ledger_summary(rows) == "4 claims, 4 rows: 2 × not run, 2 × no code"
    assert [line["verdict"] for line in json.loads(ledger_json(rows))] == [
        "not run",
        "no code",
        "no code",
        "not run",
    ]
    html = rows._repr_html_()
    text = str(rows)
    assert html.count("verdict no-code") == 2 == html.count("verdict not-run")
    assert text.count("no code ") >= 2
    assert "| no code (no code runs or judges it)" in ledger_markdown(rows)
    assert len({mark(5, 5, word) for word in ("undecided", "no code", "cannot be judged")}) == 3
    style = (records_root() / "longhorn_kit/lab/claims/report.css").read_text()
    assert re.search(r"^\.no-code::before", style, re.M)


def test_only_the_claims_without_code_say_so():
    rows = ledger("recorded runs only")
    names = {row.claim.name for row in rows if row.judgement.verdict == "no code"}
    assert names == fakes.NO_CODE


def looked(exact, mamba, kind="better", published=None):
    "Return a row judged by the rule with looks, with one look per seed."
    outcomes = {"exact": exact, "Mamba": mamba}
    contrast = Contrast("exact | Mamba", (("exact", -1), ("Mamba", 1)), kind, published=published)
    looks, missing = looks_of(outcomes, dict.fromkeys(outcomes, len(exact)))
    (pair,) = contrast_rows([contrast], looks, dict.fromkeys(outcomes, "all"), missing)
    return Row(fakes.claim(), *pair)


FOUR = (0.0, 0.001, 0.002, 0.003)
EIGHT = (0.0, 0.001, 0.002, 0.003) * 2


def test_a_row_with_looks_says_who_is_ahead_at_which_look_and_what_stands_beside():
    row = looked([1.30 + d for d in EIGHT], [1.32 + d for d in EIGHT], published=0.0044)
    label, paper, here, n, verdict = cells(row)
    assert paper == "+0.0044"
    assert n == "4"
    assert verdict == "holds"
    assert here.startswith("+0.0200 [")
    assert here.endswith(", 98 % interval")
    text = reason(row)
    assert text.startswith(" (ahead, at 4 seeds; ")
    assert "all 8 seeds: +0.0200 [" in text
    assert "rank test p = 0.029" in text
    assert "a fresh run of exact beats one of Mamba: 100% of pairs" in text
    assert "excludes the published +0.0044" in text
    for text in (
        " ".join(ledger_text([row], 200).split()),
        ledger_markdown([row]),
        ledger_html([row]),
    ):
        assert "holds" in text
        assert "ahead, at 4 seeds" in text
        assert "98 % interval" in text
        assert "rank test p = 0.029" in text
    (line,) = json.loads(ledger_json([row]))
    assert line["side"] == "ahead"
    assert line["look"] == 4
    assert line["level"] == 0.02
    assert "all 8 seeds" in line["beside"]
    low, high = (
        f"{end:.1f}"
        for end in map(axis([row], "bits per byte", WIDE["plot"])[0], (line["low"], line["high"]))
    )
    assert f"M{low} " in picture([row]), "the bar is the interval of the verdict"
    assert f"H{high}" in picture([row]), "the bar is the interval of the verdict"


def test_equality_stands_beside_a_claim_of_better_and_decides_one_of_as_good():
    close = [1.3 + d / 10 for d in FOUR]
    better = looked(close, close)
    as_good = looked(close, close, "as good")
    assert better.judgement.verdict == "undecided"
    assert as_good.judgement.verdict == "holds"
    for row in (better, as_good):
        assert reason(row).startswith(" (equal within the margin, at 4 seeds; ")
    finding = Finding(Shown("fake", "gpu", "", "Language", "", "exact", "Mamba", ""), as_good)
    assert leader(finding) == "", "neither side is ahead"
    assert favours(finding) == "equal within the margin", "neither side is ahead"
    behind = looked([d + 0.1 for d in close], close)
    assert reason(behind).startswith(" (behind, at 4 seeds; ")
    assert behind.judgement.verdict == "does not hold"


def test_a_row_before_its_look_says_how_many_seeds_are_there():
    row = looked([1.3] * 4, [1.4] * 3)
    assert row.judgement.verdict == "not run"
    assert cells(row)[2:4] == ("–", "–")
    assert row.comparison.waits
    assert reason(row) == " (3 of 4 seeds so far)"


def test_old_rows_say_nothing_of_looks():
    rows = ledger("recorded runs only")
    new = [row for row in rows if row.scale == "gpu (second-plan)" and row.judgement.n]
    old = [row for row in rows if row not in new]
    for row in old:
        assert not (
            row.judgement.side
            or row.judgement.look
            or row.judgement.beside
            or row.judgement.level != LEVEL
        )
        assert coverage(row.judgement) == ""
    assert new
    for row in new:
        assert "rank test" in row.judgement.beside
        assert re.fullmatch(r", 99(\.\d)? % interval", coverage(row.judgement))


@pytest.mark.parametrize(
    "name, basis, words",
    [
        ("read-twice", "published", "published numbers alone"),
        ("elsewhere-vision", "published", "published numbers alone"),
        ("equal-sizes", "counted", "counted from the official code"),
        ("stable", "derived", "derived, and tested in theory/"),
    ],
)
def test_a_row_without_a_run_names_its_basis(name, basis, words):
    rows = [row for row in ledger("no runs") if row.claim.name == name]
    assert rows
    result = {(row.scale, row.about) for row in rows}
    assert result == {(basis, words)}
    result = f"{basis}: {rows[0].comparison.label}"
    expected = cells(rows[0])[0]
    assert result == expected


def test_an_unfinished_record_says_how_many_jobs_are_missing(three_claims, tmp_path):
    put(tmp_path, fakes.record(missing=7))
    row = ledger(tmp_path, tmp_path / "none")[0]
    assert row.judgement.verdict == "holds"
    assert row.about.endswith("7 jobs of this run are missing")


def test_counts_agree_with_their_nouns():
    rows = [Row(fakes.claim()), Row(fakes.claim()), Row(fakes.claim("second"))]
    assert ledger_summary(rows[:1]) == "1 claim, 1 row: 1 × not run"
    assert ledger_summary(rows) == "2 claims, 3 rows: 3 × not run"


def test_measured_minutes_are_ranges_with_their_machines(monkeypatch, tmp_path):
    from longhorn_kit.lab.claims import ledger as module

    monkeypatch.setattr(module, "results_folder", lambda: tmp_path)
    assert module.measured_minutes() == ""
    write_record(
        tmp_path / "minutes.json",
        {"rows": [{"machine": "a", "seconds": [150, 281]}, {"machine": "b", "seconds": [544]}]},
    )
    assert module.measured_minutes() == "2 to 5 min on a; 9 min on b"


def test_a_record_is_read_and_judged_once_per_command(three_claims, tmp_path, monkeypatch):
    judged = []

    def compare(record):
        judged.append(record["experiment"])
        return fakes.compare(record)

    read = []

    def counted_read(path):
        read.append(path)
        return read_record(path)

    monkeypatch.setattr(claims, "CLAIMS", [fakes.claim(compare=compare)])
    monkeypatch.setattr("longhorn_kit.lab.claims.ledger.read_record", counted_read)
    put(tmp_path, fakes.record())
    records = Records()
    (row,) = ledger(tmp_path, tmp_path / "none", records)
    run = run_of(records.load(tmp_path / "fake/laptop/record.json", "fake"), records)
    assert run.rows[0].judgement == row.judgement
    assert len(read) == len(judged) == 1
    path = tmp_path / "fake/laptop/record.json"
    write_record(path, fakes.record(results={"score": -3}))
    (row,) = ledger(tmp_path, tmp_path / "none", records)
    assert row.judgement.verdict == "does not hold", "a file that was replaced is read again"
    assert len(read) == len(judged) == 2


def test_a_section_folds_the_comparisons_that_cannot_be_judged(monkeypatch):
    monkeypatch.setattr(claims, "CLAIMS", [fakes.claim()])
    (claim,) = claims.CLAIMS
    judged = Row(claim, Comparison("first"), Judgement(3, 1.0, verdict="holds"))
    why = dict(verdict="cannot be judged", why="one learning rate was tried")
    folded = Row(claim, Comparison("second"), Judgement(1, 2.0, **why))
    before, _, inside = section("fake", [judged, folded]).partition("<details>")
    assert "first" in before
    assert "second" not in before
    assert "second" in inside.partition("</details>")[0]
    assert "1 comparison that cannot be judged: one learning rate was tried" in inside
    assert "<details>" not in section("fake", [judged])
