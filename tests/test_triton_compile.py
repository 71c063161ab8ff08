"""Every scan kernel compiles ahead of time, without a GPU, within bounds of registers, spills and shared memory."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# bytes of stack (NVIDIA) or spilled registers (AMD) that a kernel may use; all others none to speak of
SPILL = {"_scan_fwd_kernel": 96, "_scan_bwd_kernel": 512, "_adjoint_kernel": 128, "_diagonal_bwd_kernel": 96, "_exact_bwd_kernel": 192}
MANY_STATES = {"_exact_bwd_kernel": 256}
SHARED = {"_diagonal_bwd_kernel": 110}     # KiB with 64 states, two programs a multiprocessor; all others 60


def compiled(what, targets, only=""):
    "What kernels/aot.py reports, one dictionary a kernel and target."
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "kernels" / "aot.py"), "--json", "--what", what, "--only", only, "--target", *targets]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_bounded(rows):
    for row in rows:
        limit = SPILL.get(row["kernel"], 32)
        if "N=64" in row["case"]:
            limit = max(limit, MANY_STATES.get(row["kernel"], 64))
        assert row["spill"] <= limit, row
        assert row["registers"] <= (512 if row["target"].startswith("gfx") else 255), row
        room = SHARED.get(row["kernel"], 60) if "N=64" in row["case"] else 60
        assert row["shared"] <= room * 1024, row
        assert row["unwaited"] == 0, row


def test_fast_kernels_compile_for_hopper():
    rows = compiled("fast", ["sm_90"], only="^fast (diagonal|exact)$")
    assert {r["kernel"] for r in rows} >= {"_diagonal_fwd_kernel", "_diagonal_adjoint_kernel", "_diagonal_bwd_kernel",
                                           "_exact_fwd_kernel", "_exact_bwd_kernel"}
    assert_bounded(rows)


def test_portable_kernels_compile_for_amd():
    rows = compiled("portable", ["gfx942"], only="^s6_timed N=16$")
    assert {r["kernel"] for r in rows} >= {"_token_kernel", "_scan_fwd_kernel", "_carry_kernel", "_adjoint_kernel", "_scan_bwd_kernel"}
    assert_bounded(rows)


@pytest.mark.slow
@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100"))
def test_all_fast_kernels_compile(target):
    assert_bounded(compiled("fast", [target]))


@pytest.mark.slow
@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "gfx942"))
def test_all_portable_kernels_compile(target):
    assert_bounded(compiled("portable", [target]))
