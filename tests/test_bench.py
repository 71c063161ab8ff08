"""The benchmark times no wrong result, its records can be repeated, and it runs without a GPU."""

import dataclasses
import importlib
import json
import math
import pathlib
import sys
import types

import pytest
import torch
from torch.testing import assert_close
from triton.compiler import CompiledKernel

KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
sys.path.insert(0, str(KERNELS))
bench, bench_cpu, gpu, peers, table = map(
    importlib.import_module, ("bench", "bench_cpu", "bench_gpu", "peers", "table")
)
SMALL = ["--shape", "1,9,3", "--state", "2", "--rounds", "2"]
INTERPRET = ["--device", "interpret", "--shape", "1,9,8", "--state", "2", "--form", "diagonal"]
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "words, wrong, time",
    [
        ([*SMALL, "--form", "exact"], "WRONG chunked, exact", "ms"),
        pytest.param(INTERPRET, "WRONG", "% of", marks=without_gpu),
    ],
)
def test_a_wrong_scan_prints_no_time_and_fails(words, wrong, time, monkeypatch, capsys, tmp_path):
    right = gpu.by_kernels
    monkeypatch.setattr(gpu, "by_kernels", lambda *a: tuple(t * 1.1 for t in right(*a)))
    monkeypatch.setitem(
        bench_cpu.CANDIDATES,
        "chunked",
        lambda *inputs, form: bench_cpu.chunked_scan(*inputs, form=form)[0] * 1.001,
    )
    words_with_out = [*words, "--out", str(tmp_path / "new.json")]
    result = bench.main(words_with_out)
    assert result == 1
    printed = capsys.readouterr().out
    assert wrong in printed
    assert time not in printed
    assert not list(tmp_path.iterdir())


def test_results_name_versions_command_and_ratios(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_cpu, "memory", lambda *a: 1.0)
    file = tmp_path / "cpu.json"
    words = [*SMALL, "--form", "diagonal", "--out", str(file)]
    assert bench.main(words) == 0
    results = json.loads(file.read_text())
    assert results["environment"]["torch"] == torch.__version__
    assert "--rounds 2" in results["environment"]["command"]
    candidates = results["results"][0]["candidates"]
    assert candidates["chunked"]["ratio"] > 0
    assert "parity with float64 checked" in capsys.readouterr().out


def test_only_a_run_of_everything_takes_the_place_of_a_record(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_cpu, "memory", lambda *a: 1.0)
    record = tmp_path / "cpu.json"
    record.write_text("{}")
    for part in (
        SMALL,
        ["--form", "exact", "--shape", "1,9,3"],
        ["--state", "2", "--shape", "1,9,3"],
    ):
        assert bench.main([*part, "--rounds", "1"]) == 0
        assert "nothing is written without --out" in capsys.readouterr().out
        assert record.read_text() == "{}"
    monkeypatch.setattr(
        bench, "CPU_DEFAULTS", dict(shape=[(1, 9, 3)], form=["diagonal"], state=[2])
    )
    assert bench.main(["--rounds", "1"]) == 0
    assert json.loads(record.read_text())["results"]
    names = [f.name for f in tmp_path.iterdir()]
    assert names == ["cpu.json"]


def test_a_gpu_run_of_a_part_or_cut_short_does_not_take_the_place_of_a_record():
    def where(*words, **results):
        options = bench.parse(["--device", "cuda", *words])
        return bench.destination(options, "gpu.json", **results)

    assert where() == bench.RESULTS / "gpu.json"
    for part in (
        ["--sections", "main"],
        ["--form", "s6"],
        ["--shape", "1,9,3"],
        ["--state", "4"],
        ["--dtype", "float16"],
    ):
        assert where(*part) is None
        assert where(*part, "--out", "mine.json") == pathlib.Path("mine.json")
    for results in (dict(wrong=["S1"]), dict(left_out=["S1: out of time"])):
        assert where(**results) == bench.RESULTS / "gpu.partial.json"
    assert where("--out", "mine.json", left_out=["S1"]) == pathlib.Path("mine.json")
    options = bench.parse(["--device", "interpret"])
    assert bench.destination(options, "interpreter.json") is None


@pytest.mark.parametrize(
    "words, says",
    [
        *(
            (["--shape", shape], "expected B,T,D as in 4,256,512")
            for shape in ("4,256", "a,b,c", "0,1,1")
        ),
        (["--form", "s6"], "on a CPU --form is of diagonal, exact"),
    ],
)
def test_a_bad_shape_and_a_form_that_the_device_does_not_time_are_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(words)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@without_gpu
def test_without_a_gpu_the_gpu_side_says_so():
    with pytest.raises(SystemExit, match="no GPU here"):
        bench.main(["--device", "cuda"])


@without_gpu
@pytest.mark.slow
@pytest.mark.parametrize("form", ["exact", "diagonal", "decoupled", "s6"])
def test_the_gpu_side_writes_rows_of_every_form_with_times_floors_and_versions(form, tmp_path):
    file = tmp_path / "gpu.json"
    words = [*INTERPRET, "--form", form, "--commit", "abc", "--out", str(file)]
    assert bench.main(words) == 0
    results = json.loads(file.read_text())
    assert results["commit"] == "abc"
    assert results["triton"]
    assert results["seed"] == 0
    assert "--device interpret" in results["command"]
    (row,) = results["rows"]
    assert row["form"] == form
    assert row["forward_share"] > 0
    assert row["kept_bytes_per_x"] > 0
    for way in ("forward", "backward"):
        for what in (way, f"eager_{way}"):
            low, high = row[f"{what}_quartiles"]
            ms = row[f"{what}_ms"]
            assert 0 < low <= ms <= high
        assert row[f"host_{way}_us"] > 0
    expected = {f"{form} portable bfloat16": pytest.approx(0, abs=6e-3)}
    assert results["worst_error"] == expected


def main_row(**other):
    return (
        dict(
            section="main",
            shape="S1",
            form="exact",
            kernels="exact",
            forward_ms=1.0,
            backward_ms=2.0,
            forward_quartiles=[0.9, 1.1],
        )
        | other
    )


@pytest.mark.parametrize(
    "new, results",
    [
        (dict(forward_ms=1.3, forward_quartiles=[1.15, 1.5]), 0),  # 1.1 and 5 % are 1.155
        (dict(forward_ms=1.3, forward_quartiles=[1.16, 1.5]), 1),
        (dict(backward_ms=2.09), 0),
        (dict(backward_ms=2.11), 1),
        (dict(eager_forward_ms=9.0, host_forward_us=9.0), 0),  # the earlier record has no such time
        (dict(kernels="portable", forward_ms=9.0, backward_ms=9.0), 0),
        (dict(section="T", forward_ms=9.0, forward_quartiles=[9.0, 9.0]), 0),
    ],
)
def test_slower_is_beyond_the_quartiles_and_the_margin(new, results):
    new_record = dict(rows=[main_row(**new)])
    old_record = dict(rows=[main_row()])
    said = gpu.slower(new_record, old_record)
    assert len(said) == results
    for line in said:
        assert line.startswith("S1, exact, exact kernels: ")


@without_gpu
def test_check_compares_the_main_rows_with_a_record_of_the_same_gpu(monkeypatch, tmp_path, capsys):
    cases = [gpu.Case(section, "S1", 1, 5, 4, 2, path="portable") for section in ("main", "T")]
    monkeypatch.setattr(gpu, "cases", lambda: cases)
    record = tmp_path / "old.json"
    words = ["--device", "interpret", "--check", str(tmp_path / "old.json")]
    made = bench.on_gpu(bench.parse(words))
    assert [row["section"] for row in made["rows"]] == ["main"]
    monkeypatch.setattr(bench, "on_gpu", lambda args: made)

    def check():
        return (bench.main(words), capsys.readouterr().out)

    status, said = check()
    assert status == 2
    assert "nothing to compare with" in said
    times = {
        f"{what}_ms": 1e9 for what in ("forward", "backward", "eager_forward", "eager_backward")
    }
    rows = [
        main_row(form="diagonal", kernels="portable") | times | dict(forward_quartiles=[1e9, 1e9])
    ]
    old = dict(gpu="interpreter", torch="2.0", triton=None, commit="abc", rows=rows)
    record.write_text(json.dumps(old))
    status, said = check()
    assert status == 0
    assert "against commit abc" in said
    assert "nothing is slower" in said
    assert "the record has torch 2.0" in said
    rows[0]["eager_backward_ms"] = 1e-9
    record.write_text(json.dumps(old))
    status, said = check()
    assert status == 1
    assert "S1, diagonal, portable kernels: eager call, backward" in said
    assert said.count("was 0.000") == 1
    record.write_text(json.dumps(old | dict(gpu="NVIDIA H100")))
    status, said = check()
    assert status == 2
    assert "is from NVIDIA H100, not interpreter" in said
    names = {f.name for f in tmp_path.iterdir()}
    assert names == {"old.json"}


def test_a_time_is_of_the_kernels_that_it_is_named_for(monkeypatch):
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    fast = gpu.Case("main", "S1", 8, 2048, 2048)
    portable = gpu.Case("main", "S1", 8, 2048, 2048, path="portable")
    gpu.check_path(fast, "diagonal", {"_diagonal_fwd_kernel", "_sum_kernel"})
    gpu.check_path(portable, "portable", {"_scan_fwd_kernel", "_token_kernel"})
    gpu.check_path(
        dataclasses.replace(fast, form="exact", dtype="float16"), "portable", {"_scan_fwd_kernel"}
    )
    for case, kernels, names in (
        (fast, "portable", {"_scan_fwd_kernel"}),
        (fast, "diagonal", {"_scan_fwd_kernel"}),
        (portable, "portable", {"_diagonal_fwd_kernel"}),
    ):
        with pytest.raises(gpu.Wrong, match="were chosen"):
            gpu.check_path(case, kernels, names)

    def kernel(name):
        return types.SimpleNamespace(metadata=types.SimpleNamespace(name=name))

    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda self, *args: args)
    with gpu.launched() as names:
        assert CompiledKernel.launch_metadata(kernel("_exact_fwd_kernel"), 1, 2) == (1, 2)
    CompiledKernel.launch_metadata(kernel("later"))
    assert names == {"_exact_fwd_kernel"}


def test_eager_calls_have_columns_once_a_record_has_them():
    text = (bench.RESULTS / "h200.json").read_text()
    record = json.loads(text)
    text = (bench.RESULTS / "sm_90.json").read_text()
    compiled = json.loads(text)
    for row in record["rows"]:
        for name in [name for name in row if name.startswith(("eager", "host"))]:
            del row[name]
    old = table.gpu_table(record, compiled)
    row = next(
        r
        for r in record["rows"]
        if (r["section"], r["shape"], r.get("form"), r.get("kernels"))
        == ("main", "S1", "exact", "exact")
    )
    row |= dict(
        eager_forward_ms=0.2345,
        eager_backward_ms=0.5678,
        host_forward_us=71.4,
        host_backward_us=123.4,
    )
    new = table.gpu_table(record, compiled)
    for line in old:
        assert "eager" not in line
    assert "| eager call, S1 | host's part, S1 (µs) | share" in new[2]
    assert "| 0.234 / 0.568 | 71 / 123 | " in next(
        line for line in new if line.startswith("| exact, Gluon")
    )
    assert "| – / – | – / – | " in next(
        line for line in new if line.startswith("| diagonal, Gluon")
    )
    cells = {line.count("|") for line in new[2 : new.index("", 2)]}
    assert len(cells) == 1
    expected = {len(new[2].split("|")) - 1}
    assert cells == expected


@without_gpu
@pytest.mark.slow
def test_a_record_is_drawn(tmp_path):
    words = [*INTERPRET, "--plot", str(tmp_path / "new")]
    result = bench.main(words)
    assert result == 0
    endings = [path.suffix for path in (tmp_path / "new").iterdir()]
    assert endings == [".png"]
    text = (bench.RESULTS / "h200.json").read_text()
    committed = json.loads(text)
    roof, *sizes = bench.draw_record(committed).axes
    assert {text.get_text() for text in roof.texts} >= {
        "exact",
        "diagonal",
        "exact, portable",
        "memory",
    }
    for ax, axis in zip(sizes, "TBN"):
        lines = {line.get_label(): line for line in ax.get_lines()}
        for form in ("exact", "diagonal"):
            right = {
                row[axis]: row["forward_ms"] + row["backward_ms"]
                for row in committed["rows"]
                if row.get("kernels") == form
                and row["section"] == axis
                and (axis == "N" or row["N"] == 16)
            }
            drawn = dict(zip(*lines[form].get_data()))
            assert right
            for size, ms in right.items():
                assert drawn[size] == ms


@without_gpu
def test_every_case_is_in_a_section_and_peers_match_their_oracles():
    results = list(gpu.cases())
    result = {c.section for c in results} | {"peers", "decode"}
    assert result == set(bench.SECTIONS)
    assert len(set(results)) == len(results)
    for peer in gpu.PEERS:
        if peer.package == "torch":
            errors = gpu.peer_errors(peer, (2, 9, 4), seed=0)
            assert not gpu.wrong(errors, gpu.PEER_TOLERANCE), (peer.name, errors)


@without_gpu
def test_the_delta_rule_oracle_is_the_exact_recurrence():
    case = gpu.Case("chosen", "", 2, 7, 3, 4, "exact", dtype="float32", z=False)
    a, *_ = gpu.draw(case, 0)
    a = {n: None if t is None else t.double() for n, t in a.items()}
    length = a["k"].square().sum(-1, keepdim=True)
    inverse = torch.exp(-a["b"] - a["b_bias"])
    rate = 1 / (1 + length + inverse)
    columns = rate[:, :, None]
    skip = a["D_skip"] * a["x"]
    results = peers.matrix_loop(*(a[n][:, :, None] for n in "qkx"), columns)[:, :, 0] + skip
    expected = gpu.by_reference(gpu.Case("chosen", "", 2, 7, 3, 4, "exact"), a, None)[0]
    assert_close(results, expected)


def test_an_error_that_is_no_number_is_wrong():
    wrong = dict(a=torch.tensor([math.nan]))
    right = dict(a=torch.ones(1))
    errors = gpu.errors_of(wrong, right)
    assert gpu.wrong(errors, 1.0) == {"a": math.inf}


@without_gpu
def test_a_peer_without_a_number_has_a_row_that_json_can_hold(monkeypatch):
    peer = next(p for p in gpu.PEERS if p.package == "torch")
    monkeypatch.setattr(gpu, "INTERPRETED", True)  # small
    nothing = dataclasses.replace(peer, run=lambda **leaves: peer.run(**leaves) * math.nan)
    row, *_ = gpu.peer_rows(nothing, types.SimpleNamespace(seed=0))
    assert row["error"] is None
    assert row["wrong"]["out"] is None
    assert "forward_ms" not in row
    text = gpu.one_row_a_line(dict(seed=0, rows=[row]))
    result = json.loads(text)["rows"]
    assert result == [row]


def test_the_tables_of_the_readme_are_what_the_records_say_and_nothing_else_is_rewritten():
    assert table.readme() == (KERNELS / "README.md").read_text(encoding="utf-8"), (
        "run python kernels/table.py"
    )
    text = "a\n<!-- cpu: written by table.py -->\nold\n<!-- end of cpu -->\nb\n"
    result = table.filled(text, "cpu", ["new"])
    assert result == text.replace("old", "new")


def test_the_anchors_in_the_readme_are_those_of_the_benchmark():
    page = (KERNELS / "README.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    for name in ("official_longhorn_cuda", "mamba_cuda"):
        for forward, backward in gpu.ANCHORS[name].values():
            assert f"{forward:g} / {backward:g}" in text.replace("2.70", "2.7")
