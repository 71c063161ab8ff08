"""The benchmark: no time on a wrong result, what it writes can be repeated, and the GPU side runs without a GPU."""
import dataclasses
import importlib
import json
import math
import pathlib
import sys
import types

import pytest
import torch


KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
sys.path.insert(0, str(KERNELS))
bench, bench_cpu, gpu, peers, table = map(importlib.import_module, ("bench", "bench_cpu", "bench_gpu", "peers", "table"))
SMALL = ["--shape", "1,9,3", "--state", "2", "--rounds", "2"]
INTERPRET = ["--device", "interpret", "--shape", "1,9,8", "--state", "2", "--form", "diagonal"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("words, wrong, time", [
    ([*SMALL, "--form", "exact"], "WRONG chunked, exact", "ms"), pytest.param(INTERPRET, "WRONG", "% of", marks=without_gpu)])
def test_a_wrong_scan_prints_no_time_and_fails(words, wrong, time, monkeypatch, capsys, tmp_path):
    right = gpu.by_kernels
    monkeypatch.setattr(gpu, "by_kernels", lambda *a: tuple(t * 1.1 for t in right(*a)))
    monkeypatch.setitem(bench_cpu.CANDIDATES, "chunked", lambda *inputs, form: bench_cpu.chunked_scan(*inputs, form=form)[0] * 1.001)
    assert bench.main([*words, "--out", str(tmp_path / "new.json")]) == 1
    printed = capsys.readouterr().out
    assert wrong in printed and time not in printed and not list(tmp_path.iterdir())


def test_results_name_versions_command_and_ratios(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_cpu, "memory", lambda *a: 1.0)
    file = tmp_path / "cpu.json"
    assert bench.main([*SMALL, "--form", "diagonal", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["environment"]["torch"] == torch.__version__ and "--rounds 2" in found["environment"]["command"]
    assert found["results"][0]["candidates"]["chunked"]["ratio"] > 0
    assert "parity with float64 checked" in capsys.readouterr().out


def test_only_a_run_of_everything_takes_the_place_of_a_record(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_cpu, "memory", lambda *a: 1.0)
    record = tmp_path / "cpu.json"
    record.write_text("{}")
    for part in (SMALL, ["--form", "exact", "--shape", "1,9,3"], ["--state", "2", "--shape", "1,9,3"]):
        assert bench.main([*part, "--rounds", "1"]) == 0
        assert "nothing is written without --out" in capsys.readouterr().out and record.read_text() == "{}"
    monkeypatch.setattr(bench, "CPU_DEFAULTS", dict(shape=[(1, 9, 3)], form=["diagonal"], state=[2]))
    assert bench.main(["--rounds", "1"]) == 0
    assert json.loads(record.read_text())["results"] and [f.name for f in tmp_path.iterdir()] == ["cpu.json"]


def test_a_gpu_run_of_a_part_or_cut_short_does_not_take_the_place_of_a_record():
    where = lambda *words, **found: bench.destination(bench.parse(["--device", "cuda", *words]), "gpu.json", **found)
    assert where() == bench.RESULTS / "gpu.json"
    for part in (["--sections", "main"], ["--form", "s6"], ["--shape", "1,9,3"], ["--state", "4"], ["--dtype", "float16"]):
        assert where(*part) is None and where(*part, "--out", "mine.json") == pathlib.Path("mine.json")
    for found in (dict(wrong=["S1"]), dict(left_out=["S1: out of time"])):
        assert where(**found) == bench.RESULTS / "gpu.partial.json"
    assert where("--out", "mine.json", left_out=["S1"]) == pathlib.Path("mine.json")
    assert bench.destination(bench.parse(["--device", "interpret"]), "interpreter.json") is None


@pytest.mark.parametrize("words, says", [
    *((["--shape", shape], "expected B,T,D as in 4,256,512") for shape in ("4,256", "a,b,c", "0,1,1")),
    (["--form", "s6"], "on a CPU --form is of diagonal, exact")])
def test_a_bad_shape_and_a_form_that_the_device_does_not_time_are_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert stop.value.code == 2 and says in capsys.readouterr().err


@without_gpu
def test_without_a_gpu_the_gpu_side_says_so():
    with pytest.raises(SystemExit, match="no GPU here"):
        bench.main(["--device", "cuda"])


@without_gpu
@pytest.mark.parametrize("form", ["diagonal", "exact", "decoupled", "s6"])
def test_the_gpu_side_writes_rows_of_every_form_with_times_floors_and_versions(form, tmp_path):
    file = tmp_path / "gpu.json"
    assert bench.main([*INTERPRET, "--form", form, "--commit", "abc", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["commit"] == "abc" and found["triton"] and found["seed"] == 0 and "--device interpret" in found["command"]
    (row,) = found["rows"]
    assert row["form"] == form and row["forward_ms"] > 0 and row["backward_ms"] > 0 and row["forward_share"] > 0 and row["kept_bytes_per_x"] > 0
    assert found["worst_error"] == {f"{form} portable bfloat16": pytest.approx(0, abs=6e-3)}


@without_gpu
def test_a_record_is_drawn(tmp_path):
    assert bench.main([*INTERPRET, "--plot", str(tmp_path / "new")]) == 0
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".png"]
    committed = json.loads((bench.RESULTS / "h200.json").read_text())
    roof, *sizes = bench.draw_record(committed).axes
    assert {text.get_text() for text in roof.texts} >= {"exact", "diagonal", "exact, portable", "memory"}
    for ax, axis in zip(sizes, "TBN"):
        lines = {line.get_label(): line for line in ax.get_lines()}
        for form in ("exact", "diagonal"):
            right = {row[axis]: row["forward_ms"] + row["backward_ms"] for row in committed["rows"]
                     if row.get("kernels") == form and row["section"] == axis and (axis == "N" or row["N"] == 16)}
            drawn = dict(zip(*lines[form].get_data()))
            assert right and all(drawn[size] == ms for size, ms in right.items())


@without_gpu
def test_every_case_is_in_a_section_and_peers_match_their_oracles():
    found = list(gpu.cases())
    assert {c.section for c in found} | {"peers", "decode"} == set(bench.SECTIONS) and len(set(found)) == len(found)
    for peer in gpu.PEERS:
        if peer.package == "torch":
            errors = gpu.peer_errors(peer, (2, 9, 4), seed=0)
            assert not gpu.wrong(errors, gpu.PEER_TOLERANCE), (peer.name, errors)


@without_gpu
def test_the_delta_rule_oracle_is_the_exact_recurrence():
    a, *_ = gpu.draw(gpu.Case("chosen", "", 2, 7, 3, 4, "exact", dtype="float32", z=False), 0)
    a = {n: None if t is None else t.double() for n, t in a.items()}
    rate = 1 / (1 + a["k"].square().sum(-1, keepdim=True) + torch.exp(-a["b"] - a["b_bias"]))
    found = peers.matrix_loop(*(a[n][:, :, None] for n in "qkx"), rate[:, :, None])[:, :, 0] + a["D_skip"] * a["x"]
    torch.testing.assert_close(found, gpu.by_reference(gpu.Case("chosen", "", 2, 7, 3, 4, "exact"), a, None)[0])


def test_an_error_that_is_no_number_is_wrong():
    errors = gpu.errors_of(dict(a=torch.tensor([math.nan])), dict(a=torch.ones(1)))
    assert gpu.wrong(errors, 1.0) == {"a": math.inf}


@without_gpu
def test_a_peer_without_a_number_has_a_row_that_json_can_hold(monkeypatch):
    peer = next(p for p in gpu.PEERS if p.package == "torch")
    monkeypatch.setattr(gpu, "INTERPRETED", True) # small
    nothing = dataclasses.replace(peer, run=lambda **leaves: peer.run(**leaves) * math.nan)
    row, *_ = gpu.peer_rows(nothing, types.SimpleNamespace(seed=0))
    assert row["error"] is None and row["wrong"]["out"] is None and "forward_ms" not in row
    assert json.loads(gpu.one_row_a_line(dict(seed=0, rows=[row])))["rows"] == [row]


def test_the_tables_of_the_readme_are_what_the_records_say_and_nothing_else_is_rewritten():
    assert table.readme() == (KERNELS / "README.md").read_text(encoding="utf-8"), "run python kernels/table.py"
    text = "a\n<!-- cpu: written by table.py -->\nold\n<!-- end of cpu -->\nb\n"
    assert table.filled(text, "cpu", ["new"]) == text.replace("old", "new")


def test_the_anchors_in_the_readme_are_those_of_the_benchmark():
    text = " ".join((KERNELS / "README.md").read_text(encoding="utf-8").split())
    for name in ("official_longhorn_cuda", "mamba_cuda"):
        for forward, backward in gpu.ANCHORS[name].values():
            assert f"{forward:g} / {backward:g}" in text.replace("2.70", "2.7")
