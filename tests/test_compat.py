"""Test the workarounds for incompatible libraries."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from longhorn_kit.compat import mend_interpreter
from scan_cases import DEVICE


@triton.jit
def sum_kernel(out_ptr, T):
    total = 0
    for t in range(T):
        total += t
    tl.store(out_ptr, total)


def counted(T):
    out = torch.zeros(1, dtype=torch.int32)
    sum_kernel[(1,)](out, T)
    return out.item()


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled on a GPU")
def test_the_interpreter_of_triton_3_6_counts_loops_with_a_new_numpy(monkeypatch):
    replace_methods = interpreter._patch_lang_tensor

    def as_in_triton_3_6(tensor, scope):
        replace_methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", as_in_triton_3_6)
    with pytest.raises(InterpreterError, match="only 0-dimensional arrays"):
        counted(5)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    mend_interpreter.__wrapped__()
    assert counted(5) == 10
    assert counted(0) == 0
