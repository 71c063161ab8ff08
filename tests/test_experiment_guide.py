"""The section *Add an experiment with its claim* adds an experiment to a copy of the kit."""

import json
import sys
import types

import pytest

import experiment_guide
import mixer_page
from longhorn_kit.lab.run import run
from longhorn_kit.records import read_record
from tree_copy import assert_form, copy_of_the_tree, run_in


@pytest.fixture
def parity(monkeypatch):
    "Return the guide's module, as if the package contained it."
    name = f"longhorn_kit.{experiment_guide.name_of_the_module()}"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(experiment_guide.module(), module.__dict__)
    return module


def test_the_experiment_of_the_guide_runs_and_its_claim_reads_the_record(parity, tmp_path):
    record = run(parity.EXPERIMENT, folder=tmp_path, workers=0, steps=2, seeds=(0, 1))
    assert record["missing"] == 0
    exact = record["results"]["longhorn_exact"]
    diagonal = record["results"]["longhorn"]
    assert len(exact) == len(diagonal) == 2
    (comparison,) = parity.CLAIMS[0].compare(record)
    assert comparison.differences == pytest.approx([100 * (a - b) for a, b in zip(exact, diagonal)])


def test_a_task_of_the_guide_is_the_parity_of_the_bits_so_far(parity):
    bits, odd = next(parity.batches(5, seed=0))
    assert bits.shape == odd.shape == (32, 5)
    for row, expected in zip(bits.tolist(), odd.tolist()):
        assert expected == [sum(row[: t + 1]) % 2 for t in range(5)]


def test_the_change_of_the_guide_fits_the_list_of_experiments():
    assert (
        experiment_guide.with_name("EXPERIMENTS: tuple = ()") == 'EXPERIMENTS: tuple = ("parity",)'
    )
    pages = ("nbs/machine/claims.ipynb", "nbs/map.ipynb")
    for page, change in zip(pages, (experiment_guide.with_name, experiment_guide.with_row)):
        cells = json.loads((experiment_guide.ROOT / page).read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        assert len([source for source in sources if change(source) != source]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_copy_with_the_mixer_and_the_experiment_of_the_guides_keeps_the_form(tmp_path):
    "Then the experiment runs from the command line, and the ledger lists its claim."
    kit = copy_of_the_tree(tmp_path)
    mixer_page.apply(kit)
    experiment_guide.apply(kit)
    done = run_in(kit, ".venv/bin/nbdev_export")
    assert done.returncode == 0, done.stderr
    assert_form(kit)
    site = "tests/test_site.py -k 'map_names or 27_efla or 42_parity'"
    done = run_in(kit, f".venv/bin/python -m pytest -q -o addopts= {site}")
    assert done.returncode == 0, done.stdout

    command = f".venv/bin/python -m longhorn_kit.cli {experiment_guide.command()}"
    done = run_in(kit, f"{command} --steps 20 --workers 0")
    assert done.returncode == 0, done.stderr
    assert "parity: exact above diagonal" in done.stdout
    record = read_record(kit / "runs/parity/laptop.trial/record.json")
    assert record["settings"]["steps"] == 20
    done = run_in(kit, ".venv/bin/python -m longhorn_kit.cli claims parity")
    assert "The exact form learns parity" in done.stdout, done.stderr
