"""The CPU benchmark: no time is printed on a wrong result, and what it writes can be repeated."""
import importlib.util
import json
import pathlib

import pytest
import torch

spec = importlib.util.spec_from_file_location("bench", pathlib.Path(__file__).parent.parent / "kernels" / "bench.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
SMALL = ["--shape", "1,9,3", "--state", "2", "--rounds", "2"]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_wrong_scan_prints_no_time_and_fails(monkeypatch, capsys, tmp_path):
    def wrong(*inputs, form):
        return bench.chunked_scan(*inputs, form=form)[0] * 1.001
    monkeypatch.setitem(bench.CANDIDATES, "chunked", wrong)
    assert bench.main([*SMALL, "--form", "exact", "--out", str(tmp_path / "cpu.json")]) == 1
    printed = capsys.readouterr().out
    assert "WRONG chunked, exact" in printed and "ms" not in printed and not list(tmp_path.iterdir())


def test_results_name_versions_command_and_ratios(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "memory", lambda *a: 1.0)
    file = tmp_path / "cpu.json"
    assert bench.main([*SMALL, "--form", "diagonal", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["environment"]["torch"] == torch.__version__ and "--rounds 2" in found["environment"]["command"]
    assert found["results"][0]["candidates"]["chunked"]["ratio"] > 0
    assert "parity with float64 checked" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["4,256", "a,b,c", "0,1,1"])
def test_a_bad_shape_is_one_line(shape, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--shape", shape])
    assert stop.value.code == 2 and "expected B,T,D as in 4,256,512" in capsys.readouterr().err
