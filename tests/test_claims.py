"""The claims ledger: its arithmetic against the published table, and every state a record file can be in."""
import json
import re
import subprocess
import sys

import fakes
import pytest

from longhorn_kit.lab import claims


@pytest.fixture
def two_claims(monkeypatch):
    rows = [fakes.claim(), fakes.claim("other", module=None, check=None, minutes={}),
            fakes.claim("reader", module=None, reads="fake", minutes={})]
    monkeypatch.setattr(claims, "CLAIMS", rows)
    return rows


def put(folder, text, name="fake"):
    path = folder / name / "laptop" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_averages_of_the_published_recall_table_are_the_published_averages():
    published = {("read once", "mamba"): 34.82, ("read twice", "mamba"): 41.75, ("read once", "longhorn"): 35.97,
                 ("read twice", "longhorn"): 45.02}
    for (reading, model), average in published.items():
        scores = claims.RECALL_INTENSIVE[reading][model]
        assert len(scores) == len(claims.RECALL_TASKS)
        assert sum(scores) / 6 == pytest.approx(average, abs=0.006)


def test_read_twice_gain_does_not_hold_and_is_3_27():
    ours, verdict = claims.find_claim("read-twice").settled()
    assert verdict == "does not hold" and "+3.27" in ours


def test_independent_numbers_are_reported_on_both_sides():
    verdicts = {c.name: c.settled()[1] for c in claims.CLAIMS if c.name.startswith("elsewhere")}
    assert verdicts["elsewhere-accuracy"] == "does not hold"
    assert verdicts["elsewhere-perplexity"] == "mixed"
    assert verdicts["elsewhere-recall"] == "holds"


def test_every_claim_is_complete():
    names = [claim.name for claim in claims.CLAIMS]
    assert len(set(names)) == len(names)
    for claim in claims.CLAIMS:
        assert claim.statement and claim.published and claim.source and claim.holds_if
        assert bool(claim.module) <= bool(claim.check and claim.minutes)
        assert claim.reads is None or claim.reads in names


@pytest.mark.parametrize("first, second, lower, verdict", [
    ([1.0, 2.0], [1.1, 2.1], True, "holds"), ([1.0, 2.2], [1.1, 2.1], True, "mixed"),
    ([1.2, 2.2], [1.1, 2.1], True, "does not hold"), ([1.2, 2.2], [1.1, 2.1], False, "holds"),
    ([1.0, 1.0, 1.0], [1.01, 1.01, 2.0], True, "mixed"), # always ahead, but by less than the spread
    ([0.9], [0.8], False, "mixed"), ([0.8, 0.8], [0.8, 0.8], False, "mixed"),
])
def test_verdict_by_seed(first, second, lower, verdict):
    assert claims.compare_seeds(first, second, lower) == verdict


@pytest.mark.parametrize("first, second", [([], []), ([1.0], [1.0, 2.0])])
def test_seeds_that_cannot_be_paired_are_refused(first, second):
    with pytest.raises(ValueError, match="as many of each"):
        claims.compare_seeds(first, second)


def test_nothing_ran(two_claims, tmp_path):
    rows = claims.ledger(tmp_path / "missing", tmp_path / "missing too")
    assert [row.verdict for row in rows] == ["not run"] * 3


def test_fresh_record_comes_before_the_recorded_one(two_claims, tmp_path):
    put(tmp_path / "runs", json.dumps(fakes.record(results={"score": -1})))
    (tmp_path / "results" / "fake").mkdir(parents=True)
    (tmp_path / "results" / "fake" / "laptop.json").write_text(json.dumps(fakes.record()))
    rows = claims.ledger(tmp_path / "runs", tmp_path / "results")
    assert [(row.claim.name, row.verdict) for row in rows] == [
        ("fake", "does not hold"), ("fake", "holds"), ("other", "not run"), ("reader", "does not hold"), ("reader", "holds")]
    assert rows[0].file == "runs/fake/laptop/record.json"
    text = str(rows)
    assert text.count("The fake claim") == 1 and "score -1" in text and "score 2" in text


@pytest.mark.parametrize("text", [
    b"", b"{", b"\xff\xfe\x00garbage", b"[1, 2]", b"null", b'{"claim": "other"}', b'{"claim": "fake"}',
    b'{"claim": "fake", "results": null}', b'{"claim": "fake", "results": {"score": "high"}}', b"\x00" * 64,
])
def test_damaged_record_is_a_row_and_not_a_crash(two_claims, tmp_path, text):
    put(tmp_path, text)
    rows = claims.ledger(tmp_path, tmp_path / "none")
    assert [row.verdict for row in rows] == ["unreadable", "not run", "unreadable"]
    assert rows[0].ours.startswith("record.json ") and "\n" not in rows[0].ours


def test_record_that_is_a_folder_is_unreadable(two_claims, tmp_path):
    (tmp_path / "fake" / "laptop" / "record.json").mkdir(parents=True)
    assert claims.ledger(tmp_path, tmp_path)[0].verdict == "unreadable"


def test_run_without_record_is_unfinished_and_an_earlier_one_set_aside_is_ignored(two_claims, tmp_path):
    (tmp_path / "fake" / "laptop").mkdir(parents=True)
    assert claims.ledger(tmp_path, tmp_path)[0].verdict == "not run"
    (tmp_path / "fake" / "laptop" / "metrics.jsonl").write_text("")
    assert claims.ledger(tmp_path, tmp_path)[0].verdict == "unfinished"
    (tmp_path / "fake" / "laptop").rename(tmp_path / "fake" / "laptop.previous")
    assert claims.ledger(tmp_path, tmp_path)[0].verdict == "not run"


@pytest.mark.parametrize("width", [20, 36, 60, 83, 84, 90, 100, 200])
def test_terminal_table_keeps_to_its_width_and_loses_no_word(width):
    rows = claims.ledger("no runs", "no results")
    text = claims.ledger_text(rows, width)
    assert max(map(len, text.splitlines())) <= max(36, min(width, 100))
    words = set(re.findall("[A-Za-z]+", text))
    for row in rows:
        assert set(re.findall("[A-Za-z]+", " ".join([row.claim.statement, row.claim.published, row.ours]))) <= words


def test_html_and_markdown_are_escaped(two_claims, tmp_path):
    put(tmp_path, json.dumps(fakes.record(results={"score": 2})))
    rows = claims.ledger(tmp_path, tmp_path / "none")
    assert "claim &lt; &amp; holds" in rows._repr_html_() and "claim < &" not in rows._repr_html_()
    lines = claims.ledger_markdown([claims.Row(rows[0].claim, "holds", "a | b")]).splitlines()
    assert len(lines) == 3 and lines[2].replace("\\|", "").count("|") == 5


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'recall'"):
        claims.find_claim("recal")
    with pytest.raises(ValueError, match="there are: recall, language"):
        claims.find_claim("zzzzzzzz")


def test_reading_the_ledger_imports_no_torch_and_no_matplotlib():
    code = "import sys; from longhorn_kit.lab.claims import ledger; str(ledger('x')); print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recall_is_judged_as_its_own_module_judges_it():
    from longhorn_kit.lab import recall
    models = ("longhorn_exact", "longhorn", "gla", "attention")
    for scores in ([(0.9, 0.91), (0.7, 0.72), (0.5, 0.51), (0.6, 0.6)], [(0.9, 0.91), (0.7, 0.72), (0.75, 0.6), (0.6, 0.6)],
                   [(0.1, 0.12), (0.2, 0.2), (0.3, 0.3), (0.6, 0.6)], [(0.9, 0.91), (0.7, 0.72), (0.5, 0.51), (0.95, 0.97)]):
        record = {"results": {"tasks": {"once": {"recall": dict(zip(models, map(list, scores)))}}}}
        assert claims.judge_recall(record)[1] == recall.verdict(record)[1]


def test_published_numbers_of_the_rows_are_those_of_the_tables():
    published = {claim.name: claim.published for claim in claims.CLAIMS}
    for name, size in (("language", "120M"), ("language-350m", "350M")):
        for model in ("longhorn", "mamba", "attention", "gla"):
            assert f"{claims.OPENWEBTEXT[size][model]:.3f}" in published[name]
    assert str(claims.OPENWEBTEXT["120M"]["longhorn_scalar"]) in published["scalar-rate"]
    assert str(claims.OPENWEBTEXT["350M"]["mamba_input_a"]) in published["input-dependent-a"]
    assert all(f"{value:.2f}" in published["downstream"] for value in claims.DOWNSTREAM_PERPLEXITY.values())


@pytest.mark.parametrize("longhorn, mamba, attention", [
    ([2.1], [2.2], [2.3]), ([2.1], [2.13], [2.3]), ([2.3], [2.2], [2.1]), ([2.1, 2.2], [2.2, 2.3], [2.3, 2.35]),
    ([2.1, 2.2], [2.2, 2.1], [2.3, 2.4]), ([2.4, 2.4], [2.2, 2.25], [2.3, 2.3])])
def test_language_is_judged_as_its_own_module_judges_it(longhorn, mamba, attention):
    from longhorn_kit.lab import language
    bits = {"longhorn": longhorn, "mamba": mamba, "attention": attention, "longhorn_exact": longhorn}
    record = {"results": {"bits_per_byte": bits}}
    assert claims.judge_language(record) == language.verdict(record)
    assert claims.ONE_SEED == language.ONE_SEED
