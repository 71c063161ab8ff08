"""Compare matrix scans in float64: chunks with the loop, the loop with flash-linear-attention."""

import ast
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from fla_files import naive, ops_folder
from longhorn_kit.scan import fla, matrix
from longhorn_kit.scan.matrix import chunked_matrix_scan, matrix_scan, matrix_step
from matrix_cases import CASES, draw

pytestmark = pytest.mark.numeric


def with_gradients(t, backend, scan=matrix_scan, without=()):
    leaves = {
        name: tensor.clone().requires_grad_(name not in without) for name, tensor in t.items()
    }
    y, S = scan(**leaves, output_final_state=True, backend=backend)
    y_loss = y.square().sum()
    S_loss = S.pow(3).sum()
    loss = y_loss + S_loss
    learned = [leaf for leaf in leaves.values() if leaf.requires_grad]
    gradients = torch.autograd.grad(loss, learned)
    return y, S, *gradients


@pytest.mark.parametrize("decay, delta, bonus", CASES)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 90, 3, 6, 5))),
    strongest=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
)
def test_chunks_equal_the_loop(decay, delta, bonus, sizes, strongest):
    t = draw(decay, delta, bonus, *sizes, strongest)
    for result, expected in zip(with_gradients(t, "chunked"), with_gradients(t, "reference")):
        assert_close(result, expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("decay, delta, bonus", CASES)
@pytest.mark.parametrize("strongest", [0.1, 20.0, 1e4])
def test_float32_is_as_good_as_float32_can_be(decay, delta, bonus, strongest):
    "After a decay to zero, no overflow, no NaN and no loss of digits occurs."
    t = draw(decay, delta, bonus, T=150, N=16, P=8, strongest=strongest)
    exact = with_gradients(t, "reference")
    wide = {name: tensor.float() for name, tensor in t.items()}
    rounded = with_gradients(wide, "chunked")
    for a, b in zip(rounded, exact):
        assert a.isfinite().all()
        difference = (a - b).norm()
        size = b.norm()
        assert difference <= 2e-5 * size


@pytest.mark.parametrize("decay, delta, bonus", CASES)
@pytest.mark.parametrize("chunk", [1, 3, 16, 200])
def test_every_chunk_length_gives_the_same(decay, delta, bonus, chunk):
    t = draw(decay, delta, bonus)
    if decay == "head":
        t["log_decay"] = t["log_decay"][..., None]
    for a, b in zip(chunked_matrix_scan(**t, chunk=chunk), chunked_matrix_scan(**t, chunk=37)):
        assert_close(a, b)


@pytest.mark.parametrize("decay, delta, bonus", CASES)
def test_steps_equal_the_scan(decay, delta, bonus):
    t = draw(decay, delta, bonus, T=9)
    y, S = matrix_scan(**t, output_final_state=True)
    state = t.pop("initial_state")
    bonus = t.pop("bonus", None)
    reads = []
    for i in range(9):
        tensors = t.items()
        now = {name + "_t": tensor[:, i] for name, tensor in tensors}
        before = state.clone()
        out, after = matrix_step(**now, state=state, bonus=bonus)
        assert torch.equal(state, before)
        state = after
        reads.append(out)
    assert_close(torch.stack(reads, 1), y)
    assert_close(state, S)


def swap(*tensors):
    return (tensor.transpose(1, 2) for tensor in tensors)


def their_scan(q, k, x, log_decay=None, beta=None, bonus=None, initial_state=None, **options):
    "Return the naive operation for these arguments, unscaled, with transposed states."
    scale = q.shape[-1] ** 0.5
    scaled = q * scale
    S = initial_state.mT
    if bonus is not None:
        log_decay = torch.zeros_like(k) if log_decay is None else log_decay
        log_decay = log_decay[..., None].expand(k.shape) if log_decay.dim() == 3 else log_decay
        y, S = naive("rwkv6/recurrent_naive", "naive_recurrent_rwkv6")(
            *swap(q, k, x, log_decay), bonus, scale=1.0, initial_state=S, output_final_state=True
        )
        y = y.transpose(1, 2)
    elif beta is not None and log_decay is not None:
        y, S = naive("gated_delta_rule/naive", "naive_recurrent_gated_delta_rule")(
            scaled, k, x, beta, log_decay, initial_state=S, output_final_state=True
        )
    elif beta is not None:
        y, S = naive("delta_rule/naive", "delta_rule_recurrence")(
            *swap(scaled, k, x, beta), initial_state=S
        )
        y = y.transpose(1, 2)
    elif log_decay is not None and log_decay.dim() == 4:
        y, S = naive("gla/naive", "naive_recurrent_gla")(scaled, k, x, log_decay, S, True)
    else:
        log_decay = torch.zeros(x.shape[:3]) if log_decay is None else log_decay
        y, S = naive("simple_gla/naive", "naive_recurrent_simple_gla")(
            scaled, k, x, log_decay, initial_state=S
        )
    return y, S.mT


@pytest.mark.parametrize(
    "decay, delta, bonus", [case for case in CASES if case[:2] != ("key", True)]
)
def test_the_recurrence_is_that_of_flash_linear_attention(decay, delta, bonus):
    t = draw(decay, delta, bonus, T=70, dtype=torch.float32)
    for a, b in zip(with_gradients(t, "chunked"), with_gradients(t, None, their_scan)):
        difference = (a - b).norm()
        size = b.norm()
        assert difference <= 1e-5 * size


@pytest.mark.parametrize("decay, delta, bonus", [case for case in CASES if case[0] != "none"])
@pytest.mark.parametrize("strongest", [-float("inf"), torch.finfo(torch.float32).min, -1e16])
def test_a_state_can_be_wiped_out_at_once(decay, delta, bonus, strongest):
    t = draw(decay, delta, bonus, T=70)
    t["log_decay"][:, [0, 33]] = strongest
    t["log_decay"][:1, 50:52] = strongest
    results = with_gradients(t, "chunked", without=["log_decay"])
    references = with_gradients(t, "reference", without=["log_decay"])
    for result, expected in zip(results, references):
        assert_close(result, expected, atol=1e-8, rtol=1e-8)


def test_any_strides_and_no_tokens():
    t = draw("key", False, False, N=6)
    tensors = t.items()
    strange = {name: tensor.mT.contiguous().mT for name, tensor in tensors}
    assert not strange["q"].is_contiguous()
    assert_close(matrix_scan(**strange), matrix_scan(**t))
    empty = {}
    for name, tensor in t.items():
        rows = tensor if name == "initial_state" else tensor[:, :0]
        empty[name] = rows.clone().requires_grad_()
    for backend in ("chunked", "reference"):
        y, S = matrix_scan(**empty, output_final_state=True, backend=backend)
        assert y.shape == (2, 0, 3, 4)
        assert torch.equal(S, t["initial_state"])
        tensors = list(empty.values())
        gradients = torch.autograd.grad(y.sum(), tensors)
        for gradient, tensor in zip(gradients, empty.values()):
            assert gradient.shape == tensor.shape
            assert not gradient.any()


def test_low_precision_keeps_a_float32_state_even_under_autocast():
    t = draw("head", True, False, dtype=torch.bfloat16)
    double = {name: tensor.double() for name, tensor in t.items()}
    expected = matrix_scan(**double)
    with torch.autocast("cpu", torch.bfloat16):
        y, S = matrix_scan(**t, output_final_state=True)
    assert y.dtype is torch.bfloat16
    assert S.dtype is torch.float32
    difference = (y.double() - expected).norm()
    size = expected.norm()
    assert difference < 4e-3 * size


def test_that_kernels_are_tuned_first_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace(chunk_gla="the kernel"))
    fla._tunes_first.cache_clear()
    keys = torch.ones(1, 1, 1, 2)
    for _ in range(2):
        kernel, _ = fla.fla_kernel(keys, -keys, None, None)
        assert kernel == "the kernel"
    (line,) = caplog.messages
    assert "tunes chunk_gla when it first runs" in line


SIGNATURES = {  # function: file and the positional arguments that `fla_matrix_scan` relies on
    "chunk_gla": ("gla", "q k v g"),
    "chunk_simple_gla": ("simple_gla", "q k v g"),
    "chunk_rwkv6": ("rwkv6", "r k v w u"),
    "chunk_delta_rule": ("delta_rule", "q k v beta"),
    "chunk_gated_delta_rule": ("gated_delta_rule", "q k v g beta"),
    "chunk_kda": ("kda", "q k v g beta"),
}


def test_the_kernels_take_the_arguments_in_this_order():
    folders = ops_folder()
    for name, (folder, order) in SIGNATURES.items():
        text = (folders / folder / "chunk.py").read_text()
        tree = ast.parse(text)
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        arguments = functions[name].args.args
        names = [argument.arg for argument in arguments]
        expected = order.split()
        assert names[: len(expected)] == expected, name
        assert {"scale", "initial_state", "output_final_state"} <= set(names), name


# decay, delta rule: function, and replacement if gradients of one decay per head are wrong
ROUTES = {
    ("none", False): ("chunk_simple_gla", "chunk_simple_gla"),
    ("none", True): ("chunk_delta_rule", "chunk_delta_rule"),
    ("head", False): ("chunk_simple_gla", "chunk_gla"),
    ("head", True): ("chunk_gated_delta_rule", "chunk_kda"),
    ("key", False): ("chunk_gla", "chunk_gla"),
    ("key", True): ("chunk_kda", "chunk_kda"),
}


RATES = dict(g="log_decay", w="log_decay", beta="beta", u="bonus")  # name in fla -> name in the kit


def loop_as_kernel(name, order, called):
    "Return the loop with a kernel's arguments and states; `called` receives the kernel's name."

    def run(q, k, v, *rates, scale, initial_state, output_final_state):
        called.append(name)
        for t in (q, k, v, *rates, initial_state):
            assert t.is_contiguous()
        assert scale == 1.0
        assert output_final_state
        if name in ("chunk_gla", "chunk_kda", "chunk_rwkv6"):
            assert rates[0].shape == k.shape
        _, _, _, *letters = order.split()
        rates = {RATES[letter]: rate for letter, rate in zip(letters, rates)}
        options = dict(output_final_state=True, backend="reference")
        y, S = matrix_scan(q, k, v, **rates, initial_state=initial_state.mT, **options)
        return y, S.mT

    return run


@pytest.mark.parametrize("decay, delta, bonus", CASES)
@pytest.mark.parametrize(
    "triton, capability, wrong",
    [((3, 6, 0), 9, True), ((3, 7, 1), 9, False), ((3, 6, 0), 8, False)],
)
def test_the_kernels_are_given_the_right_arguments(
    monkeypatch, decay, delta, bonus, triton, capability, wrong
):
    "Replace the kernels by the loop, with the kernels' signatures and states (B,H,N,P)."
    monkeypatch.setattr(fla, "TRITON", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    called = []
    kernels = {name: loop_as_kernel(name, order, called) for name, (_, order) in SIGNATURES.items()}
    ops = SimpleNamespace(**kernels)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(ops=ops))
    monkeypatch.setitem(sys.modules, "fla.ops", ops)
    monkeypatch.setattr(matrix, "pick_matrix_backend", lambda backend, *tensors: backend)
    t = draw(decay, delta, bonus)
    references = with_gradients(t, "reference")
    for result, expected in zip(with_gradients(t, "fla"), references, strict=True):
        assert_close(result, expected)
    expected = ["chunk_rwkv6" if bonus else ROUTES[decay, delta][wrong]]
    assert called == expected


def test_flash_linear_attention_may_first_be_asked_for_in_compiled_code(tmp_path, monkeypatch):
    "The package is imported outside compiled code, where the import would fail for good."
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/__init__.py").write_text("")
    (tmp_path / "fla/ops.py").write_text(
        "import torch\ndef work(): return torch.ones(2) + 1\nwork()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "fla"]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    fla._fla_trouble.cache_clear()
    count = CompileCounter()
    try:
        compiled = torch.compile(lambda x: 2 * x if fla.fla_trouble() is None else x, backend=count)
        result = compiled(torch.ones(2))
        assert result.tolist() == [2, 2]
        assert count.frame_count == 1
    finally:
        fla._fla_trouble.cache_clear()
        loaded = [name for name in sys.modules if name.partition(".")[0] == "fla"]
        for name in loaded:
            del sys.modules[name]


def test_autocast_does_not_break_compiled_code():
    x = torch.randn(1, 20, 2, 4)

    def scan(x):
        return matrix_scan(x, x, x, backend="chunked")

    result = torch.compile(scan, fullgraph=True, backend="eager")(x)
    assert_close(result, scan(x))


@pytest.mark.cuda
@pytest.mark.parametrize("decay, delta, bonus", CASES)
def test_the_kernels_agree_on_a_gpu(decay, delta, bonus, N=64, P=64):
    t = {
        name: tensor.cuda()
        for name, tensor in draw(decay, delta, bonus, T=200, H=2, N=N, P=P, strongest=1.0).items()
    }
    low = {
        name: tensor.bfloat16() if name in ("q", "k", "x", "beta") else tensor.float()
        for name, tensor in t.items()
    }
    if obstacle := fla.fla_obstacle(low["q"], low["x"], low.get("beta")):
        pytest.skip(obstacle)
    tensors = low.items()
    same = {name: tensor.double() for name, tensor in tensors}
    for a, b in zip(with_gradients(low, "fla"), with_gradients(same, "chunked")):
        difference = (a - b).norm()
        size = b.norm()
        assert difference <= 0.02 * size


@pytest.mark.cuda
@pytest.mark.parametrize("delta, bonus", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("N, P", [(64, 64), (96, 192)])
def test_one_decay_a_head_agrees_as_one_a_key_on_a_gpu(monkeypatch, delta, bonus, N, P):
    "The replacement is used on every GPU, even if functions for one decay per head are right."
    monkeypatch.setattr(fla, "one_a_head_fails", lambda device: True)
    test_the_kernels_agree_on_a_gpu("head", delta, bonus, N, P)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(k=torch.zeros(2, 37, 3, 6)),
            r"k has shape \(2, 37, 3, 6\); expected \(2, 37, 3, 5\) to match q",
        ),
        (
            dict(x=torch.zeros(2, 36, 3, 4)),
            r"x has shape \(2, 36, 3, 4\); expected \(2, 37, 3, P\) to match q",
        ),
        (
            dict(log_decay=torch.zeros(2, 37)),
            r"log_decay has shape \(2, 37\); expected \(2, 37, 3\) or \(2, 37, 3, 5\)",
        ),
        (dict(beta=torch.zeros(2, 37, 1)), r"beta has shape \(2, 37, 1\); expected \(2, 37, 3\)"),
        (
            dict(initial_state=torch.zeros(2, 3, 5, 4)),
            r"initial_state has shape \(2, 3, 5, 4\); expected \(2, 3, 4, 5\)",
        ),
        (
            dict(beta=torch.zeros(2, 37, 3), bonus=torch.zeros(3, 5)),
            "bonus is given together with beta",
        ),
        (dict(q=torch.zeros(2, 37, 5)), r"q has shape \(2, 37, 5\); expected \(B, T, H, N\)"),
        (
            dict(backend="fast"),
            "backend is 'fast'; expected one of 'auto', 'fla', 'chunked', 'reference'",
        ),
        (
            dict(backend="fla"),
            "backend 'fla' cannot run this: q is on cpu, and the kernels need a GPU",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(change, message):
    t = draw("none", False, False, dtype=torch.float32) | change
    with pytest.raises(ValueError, match=message) as error:
        matrix_scan(**t)
    assert "\n" not in str(error.value)


def test_what_the_kernels_cannot_run_is_named(monkeypatch):
    q = SimpleNamespace(is_cuda=True, shape=(1, 1, 1, 64))

    def x(dtype):
        return SimpleNamespace(dtype=dtype)

    monkeypatch.setattr(fla, "fla_trouble", lambda: None)
    obstacle = fla.fla_obstacle(q, x(torch.float64), None)
    assert "not float64" in obstacle
    obstacle = fla.fla_obstacle(q, x(torch.float32), 1)
    assert "delta rule takes bfloat16" in obstacle
    obstacle = fla.fla_obstacle(q, x(torch.bfloat16), 1)
    assert obstacle is None
    assert (
        matrix.pick_matrix_backend("auto", q, x(torch.bfloat16))
        == matrix.pick_matrix_backend("auto", q, x(torch.bfloat16), 1)
        == "fla"
    )
    backend = matrix.pick_matrix_backend("auto", q, x(torch.float32))
    assert backend == "chunked"
    backend = matrix.pick_matrix_backend("fla", q, x(torch.float32))
    assert backend == "fla"
