"""A run that cannot fit in memory fails with one sentence before its model is built."""

from dataclasses import replace

import pytest

from longhorn_kit.lab.train import memory_check
from longhorn_kit.lab.train.memory_check import check_memory
from longhorn_kit.lab.train.recipe import Recipe

RECIPE = Recipe(cpu=True)
GB = 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    "Simulate a machine with 32 GB."

    class Memory:
        total = 32 * GB

    monkeypatch.setattr(memory_check.psutil, "virtual_memory", Memory)


def refused(*arguments):
    with pytest.raises(ValueError) as caught:
        check_memory(*arguments)
    return str(caught.value)


def test_a_parameter_needs_16_bytes():
    check_memory(2 * GB, 0, RECIPE, "n_layer")
    sentence = refused(2 * GB + 1, 0, RECIPE, "n_layer")
    assert sentence == "training needs at least 32 GB, but this machine has 32 GB; lower n_layer"


def test_activations_count_once_per_micro_batch():
    assert "at least 40 GB" in refused(GB, 24 * GB, RECIPE, "batch_size")
    check_memory(GB, 24 * GB, replace(RECIPE, gradient_accumulation_steps=2), "batch_size")


@pytest.mark.parametrize("sharding, fits", [("fsdp", True), ("hsdp", True), ("ddp", False)])
def test_only_sharding_divides_the_parameters_among_processes(sharding, fits, monkeypatch):
    monkeypatch.setattr(memory_check, "distributed", lambda: True)
    monkeypatch.setattr(memory_check.torch.distributed, "get_world_size", lambda: 4)
    recipe = replace(RECIPE, sharding=sharding)
    check_memory(GB, 60 * GB, recipe, "d_model")  # activations are always divided
    if fits:
        check_memory(8 * GB, 0, recipe, "d_model")
    else:
        assert "at least 128 GB" in refused(8 * GB, 0, recipe, "d_model")


def test_the_memory_of_a_gpu_counts_where_the_run_uses_it(monkeypatch):
    monkeypatch.setattr(memory_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory_check.torch.cuda, "mem_get_info", lambda: (GB, 8 * GB))
    check_memory(GB, 0, RECIPE, "d_model")
    sentence = refused(GB, 0, replace(RECIPE, cpu=False), "d_model")
    assert sentence == "training needs at least 16 GB, but this GPU has 8 GB; lower d_model"
