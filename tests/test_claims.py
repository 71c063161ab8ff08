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
        assert set(claim.minutes) <= set(claims.SCALES)


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
    assert rows[0].command == "longhorn reproduce fake --scale laptop" and "1 min on two CPU cores" in rows[0].ours
    assert rows[1].command == "" == rows[2].command


def test_scale_without_a_run_is_a_row_beside_the_one_that_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "CLAIMS", [fakes.claim(minutes={"laptop": 1, "gpu": 20, "paper": 3000})])
    put(tmp_path, json.dumps(fakes.record()))
    rows = claims.ledger(tmp_path, tmp_path / "none")
    assert [(row.scale, row.verdict) for row in rows] == [("laptop", "holds"), ("gpu", "not run"), ("paper", "not run")]
    assert "50 h on four" in rows[2].ours and rows[1].command == "longhorn reproduce fake --scale gpu"


def test_variant_is_listed_with_the_command_that_its_record_holds(two_claims, tmp_path):
    folder = tmp_path / "results" / "fake"
    folder.mkdir(parents=True)
    (folder / "seeds.json").write_text(json.dumps(fakes.record(command='python -c run("laptop", "x", replace(SETTINGS["laptop"], seeds=(0, 1)))')))
    (folder / "notes.json").write_text('{"anything": 1}')
    (folder / "damaged.json").write_text('{"cla')
    row, *others = claims.ledger(tmp_path / "none", tmp_path / "results")
    assert (row.scale, row.verdict, row.file) == ("laptop (seeds)", "holds", "nbs/lab/results/fake/seeds.json")
    assert row.command.startswith("python -c 'from dataclasses import replace; from longhorn_tests_fake_claim import *; run(")
    assert [other.verdict for other in others if other.claim.name == "fake"] == ["not run"]


def test_recorded_commands_can_be_typed_into_a_shell():
    import ast
    import shlex
    for row in claims.ledger("no runs"):
        words = [word for word in shlex.split(row.command) if not word.startswith("LONGHORN_TEXT=")]
        if "-c" in words:
            ast.parse(words[words.index("-c") + 1])
        assert not words or words[0] in ("longhorn", "python", "python3", "for")
        assert ";" not in row.command or words[0] == "for" or "-c" in words # no prose behind it
        if row.command:
            assert subprocess.run(["sh", "-n", "-c", row.command]).returncode == 0


def kernel_record(**ms):
    rows = [dict(section="main", shape=shape, form=form, kernels=kernels, forward_ms=ms.get(form, 1.0), backward_ms=0.0)
            for shape in claims.SHAPES for form, kernels in (("diagonal", "diagonal"), ("exact", "exact"), ("s6", "portable"))]
    others = {name: dict.fromkeys(claims.SHAPES, [ms.get(name, 1.0), 0]) for name in ("mamba_cuda", "official_longhorn_cuda")}
    return {"rows": rows, "others_measured_before": others}


def test_kernel_rows_follow_the_times():
    assert claims.judge_exact_kernel(kernel_record(exact=2.0))[1] == "holds"
    assert claims.judge_exact_kernel(kernel_record(exact=1.9))[1] == "does not hold"
    assert claims.judge_kernel_time(kernel_record(diagonal=1.01))[1] == "holds"
    assert claims.judge_kernel_time(kernel_record(diagonal=1.5, s6=2.0))[1] == "does not hold" # slower than Mamba's CUDA
    assert claims.judge_kernel_time(kernel_record(diagonal=1.5, mamba_cuda=2.0))[1] == "does not hold" # slower than our S6
    faster = kernel_record(diagonal=1.5, s6=2.0, mamba_cuda=2.0)
    assert claims.judge_kernel_time(faster)[1] == "holds"
    faster["rows"] += [row | dict(kernels="s6", forward_ms=1.4) for row in faster["rows"] if row["form"] == "s6"]
    assert claims.judge_kernel_time(faster)[1] == "does not hold" # slower than the fast S6, where it was timed
    assert claims.judge_official_kernel(kernel_record(official_longhorn_cuda=1.03))[1] == "does not hold"
    uneven = kernel_record()
    uneven["rows"][0]["forward_ms"] = 3.0
    assert claims.judge_kernel_time(uneven)[1] == "mixed"


def test_kernel_record_that_is_missing_or_damaged_leaves_the_ledger_standing(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "CLAIMS", [claims.find_claim("kernel-time")])
    results = tmp_path / "nbs" / "lab" / "results"
    results.mkdir(parents=True)
    assert [row.verdict for row in claims.ledger("x", results)] == ["not run"]
    path = tmp_path / claims.KERNELS
    path.parent.mkdir(parents=True)
    for text in ("", "[]", '{"rows": []}', '{"rows": 3}'):
        path.write_text(text)
        assert [row.verdict for row in claims.ledger("x", results)] == ["unreadable"], text


def test_recorded_kernel_times_say_what_the_text_says():
    row = {row.claim.name: row for row in claims.ledger("x") if row.file == claims.KERNELS}
    assert "0.60 at 8×2048×2048" in row["exact-cost"].ours and "1.14 at 1×32768×4096" in row["exact-cost"].ours
    assert (row["exact-cost"].verdict, row["kernel-time"].verdict, row["kernel-official"].verdict) == (
        "does not hold", "holds", "does not hold")


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


@pytest.mark.parametrize("width", [20, 36, 60, 80, 107, 108, 120, 200])
def test_terminal_table_keeps_to_its_width_and_loses_no_word(width):
    rows = claims.ledger("no runs")
    text = claims.ledger_text(rows, width)
    assert max(map(len, text.splitlines())) <= max(36, min(width, 130))
    words = set(re.findall("[A-Za-z]+", text))
    for row in rows:
        assert set(re.findall("[A-Za-z]+", " ".join([row.claim.statement, row.claim.published, row.ours]))) <= words
        if width >= 60:
            assert set(re.findall("[A-Za-z]+", f"{row.command} {row.file}")) <= words
    for name in {row.claim.name for row in rows}:
        assert width < 60 or re.search(rf"^{name}\b", text, re.M)


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
    code = "import sys; from longhorn_kit.lab.claims import ledger; str(ledger('x')); ledger('x')._repr_html_(); print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
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


def language_record(bits, seeds=None, runs=()):
    speeds = dict.fromkeys(bits, 1.0)
    return {"results": {"bits_per_byte": bits, "tokens_per_second": speeds, "runs": list(runs)} | ({"seeds": seeds} if seeds else {})}


def test_models_of_a_grid_are_compared_seed_by_seed():
    bits = {"longhorn": [1.0, 1.3, 1.1], "mamba": [1.5, 1.2], "attention": [1.4, 1.5], "gla": [9.0, 9.1]}
    seeds = {"longhorn": [0, 1, 2], "mamba": [1, 2], "attention": [0, 2], "gla": [0, 1]}
    assert claims.common_seeds({"bits_per_byte": bits, "seeds": seeds}, "longhorn", "mamba") == ([1.3, 1.1], [1.5, 1.2])
    assert claims.judge_language(language_record(bits, seeds))[1] == "holds"
    bits["gla"] = [0.9, 1.0]
    assert claims.judge_language(language_record(bits, seeds))[1] == "mixed"


def test_record_without_the_models_of_a_claim_says_nothing_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "CLAIMS", [claims.find_claim(name) for name in ("scalar-rate", "sample-efficiency", "exact-cost", "language")])
    record = fakes.record("language") | language_record({"longhorn": [1.0], "mamba": [2.0], "attention": [3.0]})
    put(tmp_path, json.dumps(record), "language")
    rows = claims.ledger(tmp_path, tmp_path / "none")
    assert {row.scale: row.verdict for row in rows if row.claim.name == "language"}["laptop"] == "holds"
    assert {row.verdict for row in rows if row.claim.name != "language"} == {"not run"}
    record["results"]["bits_per_byte"]["longhorn_scalar"] = [1.5]
    put(tmp_path / "again", json.dumps(record), "language")
    row = claims.ledger(tmp_path / "again", tmp_path / "none")[0]
    assert (row.claim.name, row.verdict, row.ours) == ("scalar-rate", "holds", "diagonal 1.0000, scalar rate 1.5000 bits a byte")


def test_rows_of_a_grid_say_its_size_and_text_and_compare_no_speeds(tmp_path, monkeypatch):
    bits = {"longhorn": [1.0], "mamba": [2.0], "attention": [3.0], "longhorn_exact": [1.0]}
    record = fakes.record("language", "gpu", command="LONGHORN_TEXT=texts python -c \"run('gpu', 'x', tokens=9)\"")
    record |= language_record(bits, runs=[{"mixer": "longhorn", "seed": 0, "parameters": 52_600_000, "tokens": 59_900_000}])
    record["results"]["domains"] = {"docs": 1, "prose": 2}
    (tmp_path / "language").mkdir()
    (tmp_path / "language" / "gpu.json").write_text(json.dumps(record))
    rows = {row.claim.name: row for row in claims.ledger("no runs", tmp_path) if row.scale == "gpu"}
    assert rows["language"].ours.startswith("52.6M parameters, 59.9M tokens of docs and prose: diagonal 1.000")
    assert rows["language"].command == record["command"] # with its own settings
    assert "exact-cost" not in rows
    record["command"] = "longhorn reproduce language --scale gpu"
    (tmp_path / "language" / "gpu.json").write_text(json.dumps(record))
    row = next(row for row in claims.ledger("no runs", tmp_path) if (row.claim.name, row.scale) == ("language", "gpu"))
    assert row.command == "LONGHORN_TEXT=FOLDER longhorn reproduce language --scale gpu"


def test_extrapolation_tells_texts_apart_from_seeds():
    nats = {"docs": ([2.0, 1.98], [2.0, 1.98]), "prose": ([2.0, 2.1], [2.0, 2.1])}
    models = [{"mixer": "longhorn", "text": {text: {"by_length": {"nats": seeds[i]}} for text, seeds in nats.items()}}
              for i in (0, 1)]
    ours, verdict = claims.judge_extrapolation({"settings": {"multiples": [1, 16]}, "results": {"models": models}})
    assert ours.endswith("on docs, diagonal -2.0 ± 0.0 %; on prose, diagonal 10.5 ± 0.0 %") and verdict == "mixed"


@pytest.mark.parametrize("losses, verdict, told", [
    ([4, 3, 2.0], "holds", "2.00"), ([4, 3.5, 3.0], "does not hold", "1.00"), ([5, 4.5, 4.0], "does not hold", "never")])
def test_sample_efficiency_is_read_off_the_curves(losses, verdict, told):
    runs = [{"mixer": mixer, "seed": 0, "held_out": {"tokens": [10, 20, 40], "all": curve}}
            for mixer, curve in (("longhorn", losses), ("mamba", [5, 4, 3.0]))]
    ours, found = claims.judge_efficiency(language_record({"longhorn": [1]}, runs=runs))
    assert found == verdict and ours.endswith(told)


def test_extrapolation_is_judged_as_its_own_module_judges_it():
    from longhorn_kit.lab import extrapolation
    for longhorn in ([2.0, 1.99], [2.0, 2.3], [2.0, 2.009]):
        models = [{"mixer": mixer, "text": {"held out": {"by_length": {"nats": nats}}}} for mixer, nats in (("longhorn", longhorn), ("mamba", [2.0, 2.5]))]
        record = {"settings": {"multiples": [1, 16]}, "results": {"models": models, "text": {"held out": 1}}}
        assert claims.judge_extrapolation(record)[1] == extrapolation.verdict(record)[1]


@pytest.mark.parametrize("longhorn, mamba, attention", [
    ([2.1], [2.2], [2.3]), ([2.1], [2.13], [2.3]), ([2.3], [2.2], [2.1]), ([2.1, 2.2], [2.2, 2.3], [2.3, 2.35]),
    ([2.1, 2.2], [2.2, 2.1], [2.3, 2.4]), ([2.4, 2.4], [2.2, 2.25], [2.3, 2.3])])
def test_language_is_judged_as_its_own_module_judges_it(longhorn, mamba, attention):
    from longhorn_kit.lab import language
    bits = {"longhorn": longhorn, "mamba": mamba, "attention": attention, "longhorn_exact": longhorn}
    record = {"results": {"bits_per_byte": bits}}
    assert claims.judge_language(record)[1] == language.verdict(record)[1]
    assert claims.ONE_SEED == language.ONE_SEED
    del bits["attention"]  # of a grid that goes on
    assert claims.judge_language(record)[1] == "unfinished"
