"""Test the timing of training steps: kinds of kernels, and the experiment without a GPU."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from longhorn_kit.lab.claims.registry import find_claim
from longhorn_kit.lab.experiments import throughput
from longhorn_kit.lab.experiments.throughput import EXPERIMENT, Throughput, jobs, kind_of
from longhorn_kit.lab.run import Results, run
from longhorn_kit.records import read_record

RECORDS = Path(__file__).parent.parent / "nbs/lab/results/language"
FAST = dict(gpu=False, preset="laptop", tokens=1024, contexts=(1024,))


def test_kernels_are_told_apart_by_their_names():
    kernels = (
        "_diagonal_fwd_kernel _diagonal_adjoint_kernel _exact_bwd_kernel _scan_fwd_kernel "
        "_sum_kernel _rows_kernel chunk_gla_fwd_kernel_inter recompute_w_u_fwd_kernel "
        "chunk_fwd_kernel_o"
    )
    assert {kind_of(name) for name in kernels.split()} == {"scan"}
    names = {
        "_conv_fwd_kernel": "convolution",
        "triton_per_fused_mean_2": "compiled",
        "Memcpy HtoD": "pointwise and the rest",
        "sm90_xmma_gemm_bf16f32_tn_n_execute_segment_k_off_kernel__5x_cublas": "matrix products",
        "cudnn_generated_fort_native_sdpa_sm90_knob_7_kernel0_0": "attention",
        "void multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>": "optimiser",
        "void cublasLt::splitKreduce_kernel<32, 16>": "matrix products",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>": "pointwise and the rest",
    }
    assert {name: kind_of(name) for name in names} == names


@pytest.mark.slow
def test_a_run_has_the_rows_of_the_committed_record_and_can_be_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "time_step", partial(throughput.time_step, steps=1, warm=1))
    with torch.compiler.set_stance("force_eager"):  # compiling takes minutes on a CPU
        record = run(
            EXPERIMENT,
            "gpu",
            tmp_path,
            workers=0,
            mixers=("longhorn", "longhorn_exact", "mamba"),
            **FAST,
        )
    rows = record["results"]["rows"]
    recorded = read_record(RECORDS / "throughput.json")["rows"]
    assert record["missing"] == 0
    assert {frozenset(row) for row in rows} == {frozenset(row) for row in recorded}
    expected = [False] * 3 + [True] * 3
    assert [row["compile"] for row in rows] == expected
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["engine"]["scan"]
    labels = [comparison.label for comparison, _ in find_claim("training-speed").timed(record)]
    assert labels == [
        "diagonal against Mamba, eager and compiled",
        "exact against Mamba, eager and compiled",
    ]


def test_all_mixers_come_before_a_longer_context_and_a_full_memory_is_a_result(
    tmp_path, monkeypatch
):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 768.00 MiB\nand so on")
    monkeypatch.setattr(throughput, "time_step", Mock(side_effect=error))
    settings = [
        tuple(s.values())[:3]
        for s in jobs(Throughput(mixers=("mamba", "gla"), contexts=(8, 16)), Results(tmp_path))
    ]
    assert settings[:5] == [
        ("mamba", 8, False),
        ("gla", 8, False),
        ("mamba", 16, False),
        ("gla", 16, False),
        ("mamba", 8, True),
    ]
    record = run(
        EXPERIMENT, "gpu", tmp_path, workers=0, mixers=("mamba2",), compiled=(False,), **FAST
    )
    (failed,) = record["results"]["failed"]
    (then,) = read_record(RECORDS / "throughput.json")["failed"]
    keys = failed["settings"].keys()
    expected_keys = then["settings"].keys()
    assert keys == expected_keys
    assert failed["error"] == then["error"]
    assert record["missing"] == 0
    with pytest.raises(ValueError, match="contexts is 128; it must be from 1 to 64"):
        Throughput(tokens=64, contexts=(128,))
