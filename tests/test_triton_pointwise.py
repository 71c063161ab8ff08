"""The kernels of norms and losses against float64, and what a training step keeps for its backward."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from longhorn_kit.models import LMConfig, SequenceLM, baselines, lm, mixer
from longhorn_kit.models import recompute as memory
from longhorn_kit.models.lm import Block
from longhorn_kit.models.recompute import chunked_cross_entropy
from sweep import slow_case

tp = pytest.importorskip("longhorn_kit.scan.triton.pointwise", reason="Triton is not installed")

pytestmark = pytest.mark.numeric

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"
CLOSE = {
    torch.float32: 2e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 3e-3 if GPU else 6e-3,
}  # the interpreter truncates bfloat16


def far(a, b):
    "The distance from b, relative to its norm; NaN if any number is."
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    "M, V, room",
    [slow_case(7, 50257, 50304), (3, 17, 32), (1, 1, 1), (5, 8191, 8191), (2, 9000, 9008)],
)
@pytest.mark.parametrize("dtype", CLOSE)
def test_losses_and_gradients_of_logits(M, V, room, dtype):
    torch.manual_seed(M)
    rows = (8 * random(M, room)).to(dtype)
    logits = rows[:, :V]
    targets = torch.randint(V, (M,), device=DEVICE)
    losses = torch.empty(M, device=DEVICE)
    targets[1::3] = -100
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    before = logits.clone()
    tp.cross_entropy_(logits, targets, losses, learns=False)
    assert torch.equal(logits, before) and torch.allclose(
        losses.double(), expected, rtol=1e-5, atol=2e-6
    )
    losses.fill_(float("nan"))
    tp.cross_entropy_(logits, targets.int(), losses)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=2e-6)
    assert far(logits, gradient) < CLOSE[dtype] if V > 1 else not logits.any()
    assert not rows[:, V:].any()


def test_a_wrong_target_and_a_wrong_logit_show():
    logits = random(4, 20)
    losses = torch.empty(4, device=DEVICE)
    logits[2, 5], logits[3] = float("nan"), 3e4 * logits[3]
    tp.cross_entropy_(logits, torch.tensor([3, 20, 1, 2], device=DEVICE), losses)
    assert losses.isnan().tolist() == [False, True, True, False] and logits[3].isfinite().all()


def test_the_padding_of_the_logits_is_finite(monkeypatch):
    """Products on AMX multiply the padding of a row by zero, and 0 x NaN is NaN: memory that
    held NaN before gave NaN gradients."""
    write = memory.cross_entropy_
    empty = torch.Tensor.new_empty
    paddings = []

    def look(logits, *rest):
        write(logits, *rest)
        paddings.append(logits._base[:, 35:])

    monkeypatch.setattr(memory, "kernels_run", lambda *tensors: False)
    monkeypatch.setattr(memory, "cross_entropy_", look)
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda *args, **options: empty(*args, **options).fill_(float("nan")),
    )
    h = random(21, 8, dtype=torch.bfloat16)
    weight = random(35, 8, dtype=torch.bfloat16)
    targets = torch.randint(35, (21,), device=DEVICE)
    grads = torch.func.grad(
        lambda h, weight: chunked_cross_entropy(h, weight, targets, 100), (0, 1)
    )(h, weight)
    assert len(paddings) == 1 and paddings[0].numel() and not paddings[0].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("chunk", [slow_case(1), 8, slow_case(100)])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    "compiled, kernels",
    [(False, True), slow_case(True, True), slow_case(False, False), (True, False)],
)
def test_the_loss_of_features(chunk, dtype, compiled, kernels, monkeypatch):
    torch.manual_seed(1)
    h = random(21, 8, dtype=dtype).requires_grad_()
    weight = random(35, 8, dtype=dtype).requires_grad_()
    targets = torch.randint(35, (21,), device=DEVICE)
    targets[::4] = -100
    expected = F.cross_entropy(F.linear(h.double(), weight.double()), targets)
    torch._dynamo.reset()
    monkeypatch.setattr(memory, "kernels_run", lambda *tensors: kernels)
    run = (
        torch.compile(chunked_cross_entropy, backend="aot_eager", fullgraph=True)
        if compiled
        else chunked_cross_entropy
    )
    found = run(h, weight, targets, chunk)
    assert found.dtype == torch.float32 and torch.allclose(
        found.double(), expected, rtol=CLOSE[dtype]
    )
    for ours, exact in zip(
        torch.autograd.grad(3 * found, (h, weight)), torch.autograd.grad(3 * expected, (h, weight))
    ):
        assert ours.dtype == dtype and far(ours, exact) < 2 * CLOSE[dtype]
    with torch.no_grad():
        assert torch.allclose(
            chunked_cross_entropy(h, weight, targets, chunk), found, rtol=1e-6
        )  # another kernel


def test_targets_may_be_a_view_but_not_too_few(monkeypatch):
    h = random(6, 8)
    weight = random(35, 8)
    wide = torch.randint(35, (6, 3), device=DEVICE)
    monkeypatch.setattr(memory, "kernels_run", lambda *tensors: True)
    for targets in (wide[:, 0], wide[0, :1].expand(6)):
        torch.testing.assert_close(
            chunked_cross_entropy(h, weight, targets, 4), F.cross_entropy(h @ weight.T, targets)
        )
    with pytest.raises(ValueError, match="5 targets for 6 features"):
        chunked_cross_entropy(h, weight, wide[:5, 0], 4)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_loss_without_targets_is_what_pytorch_says(monkeypatch, kernels):
    "Not a number, with gradients of zero."
    h = random(5, 4).requires_grad_()
    weight = random(9, 4).requires_grad_()
    none = torch.full((5,), -100, device=DEVICE)
    monkeypatch.setattr(memory, "kernels_run", lambda *tensors: kernels)
    for loss in (chunked_cross_entropy(h, weight, none, 2), F.cross_entropy(h @ weight.T, none)):
        assert loss.isnan() and not any(g.any() for g in torch.autograd.grad(loss, (h, weight)))


def test_the_operation_is_well_formed():
    args = (
        random(6, 4).requires_grad_(),
        random(9, 4).requires_grad_(),
        torch.randint(9, (6,), device=DEVICE),
    )
    torch.library.opcheck(
        torch.ops.longhorn_kit.linear_cross_entropy.default, (*args, 4, torch.float32, True)
    )


@pytest.mark.parametrize(
    "shape", [(3, 7, 5), (2, 9, 768), (0, 4), *map(slow_case, [(2, 64), (1, 1, 3), (3, 2050)])]
)
@pytest.mark.parametrize("dtype", CLOSE)
def test_the_stream_and_its_norm(shape, dtype):
    torch.manual_seed(2)
    h = random(*shape).requires_grad_()
    y = random(*shape, dtype=dtype).requires_grad_()
    weight = random(shape[-1]).requires_grad_()
    found = tp.add_norm(h, y, weight, 1e-5, dtype)
    s = h.double() + y.double()
    expected = s, F.rms_norm(s, shape[-1:], weight.double(), 1e-5)
    assert [t.dtype for t in found] == [torch.float32, dtype]
    grads = random(*shape), random(*shape, dtype=dtype)
    for wanted in ((0, 1), (0,), (1,)):  # gradients of both results, or of one
        ours, exact = (
            torch.autograd.grad(
                [part[i] for i in wanted],
                (h, y, weight),
                [grads[i].to(part[i].dtype) for i in wanted],
                retain_graph=True,
                materialize_grads=True,
            )
            for part in (found, expected)
        )
        for name, a, b in zip(("h", "y", "weight"), ours, exact):
            assert a.shape == b.shape and (
                not b.any() and not a.any() or far(a, b) < (CLOSE[dtype] if name == "y" else 2e-6)
            )
    if found[0].numel():
        assert far(found[0], s) < 1e-6 and far(found[1], expected[1]) < CLOSE[dtype]


@pytest.mark.parametrize(
    "shape, room",
    [
        ((3, 7, 5), 9),
        ((2, 64), 64),
        ((0, 4), 6),
        slow_case((1, 1, 1), 3),
        slow_case((2, 9, 16), 40),
        slow_case((130, 33), 33),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", CLOSE)
def test_keys_of_one_length(shape, room, compiled, dtype):
    "From views of wider rows; zeros stay zero and pass no gradient."
    torch.manual_seed(3)
    torch._dynamo.reset()
    whole = random(*shape[:-1], room, dtype=dtype)
    s = torch.full((1,), -1.7, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        whole.flatten(0, -2)[1::3] = 0
    whole.requires_grad_()
    run = (
        torch.compile(tp.to_length, backend="aot_eager", fullgraph=True)
        if compiled
        else tp.to_length
    )
    N = shape[-1]
    exact = whole.detach().double().requires_grad_()  # its gradients are not rounded on the way
    zero = (exact[..., room - N :] == 0).all(-1, keepdim=True)
    length = (
        exact[..., room - N :].square().sum(-1, keepdim=True).masked_fill(zero, 1).sqrt()
    )  # no root of zero
    found = run(whole[..., room - N :], s)
    expected = s.double() * exact[..., room - N :] / length
    assert found.dtype is dtype and found.is_contiguous() and found.shape == shape
    g = random(*shape, dtype=dtype)
    dk, ds = torch.autograd.grad(found, (whole, s), g)
    exact_dk, exact_ds = torch.autograd.grad(expected, (exact, s), g.double())
    assert dk.dtype is dtype and ds.dtype is torch.float32 and ds.shape == (1,)
    if found.numel():
        assert far(found, expected) < CLOSE[dtype]
        terms = (
            (g.double() * expected.detach() / s.detach()).abs().sum()
        )  # of the length's gradient: most of it may cancel
        assert (ds - exact_ds).abs() < 2e-6 * terms
        exact_dk = exact_dk.masked_fill(zero, 0)
        assert N == 1 and not exact_dk.abs().gt(1e-6).any() or far(dk, exact_dk) < CLOSE[dtype]
        assert not found[zero[..., 0]].any() and not dk[zero[..., 0]].any()


def test_keys_that_are_no_numbers_show():
    k = random(4, 3)
    s = torch.ones(1, device=DEVICE)
    k[1, 0] = float("nan")
    k[2, 0] = float("inf")
    for found in (tp.to_length(k, s), mixer.to_length(k, s)):
        assert found.isfinite().all(-1).tolist() == [True, False, False, True]


def test_the_operation_of_keys_is_well_formed():
    args = (
        random(6, 9)[:, 2:7].requires_grad_(),
        torch.full((1,), 2.0, device=DEVICE, requires_grad=True),
    )
    torch.library.opcheck(torch.ops.longhorn_kit.to_length.default, args)


@pytest.fixture
def kernels_of_scans(monkeypatch):
    "Mixers run the kernels, as on a GPU: PyTorch's scans keep other tensors."
    for module, scan in ((mixer, "longhorn_scan"), (baselines, "selective_scan")):
        monkeypatch.setattr(module, scan, partial(getattr(module, scan), backend="triton"))


@pytest.mark.usefixtures("kernels_of_scans")
@pytest.mark.parametrize(
    "name", [slow_case("longhorn"), slow_case("longhorn_exact"), slow_case("mamba")]
)
def test_a_compiled_block_does_not_keep_the_rates(name, monkeypatch):
    "They come back in the backward, with the same bits."
    block = Block(LMConfig(d_model=32, mixer=name)).to(DEVICE)
    h = random(1, 9, 32).requires_grad_()
    y = random(1, 9, 32)
    kept = []
    grads = []
    for on in (False, True):
        monkeypatch.setattr(memory, "repeats", lambda x: on and torch.is_grad_enabled())
        torch._dynamo.reset()
        out = torch.add(
            *torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)(h, y)
        )
        kept.append(sum(t.numel() for t in out.grad_fn.next_functions[0][0].saved_tensors))
        grads.append(torch.autograd.grad(out.square().sum(), [h, *block.parameters()]))
    assert kept[0] - kept[1] >= 9 * (64 - 2)
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "name, options",
    [
        slow_case("longhorn", {}),
        ("longhorn_exact", dict(key_norm=True)),
        slow_case("attention", {}),
    ],
)
def test_a_block_with_the_kernels_is_the_block_without_them(name, options, compiled, monkeypatch):
    torch.manual_seed(0)
    block = Block(LMConfig(d_model=32, mixer=name, mixer_options=options, d_mlp=48)).to(DEVICE)
    h = random(2, 9, 32).requires_grad_()
    y = random(2, 9, 32).requires_grad_()
    results = []
    for kernels in (False, True):
        for module in (lm, memory, mixer):
            monkeypatch.setattr(module, "kernels_run", lambda *tensors: kernels)
        torch._dynamo.reset()
        nodes = set()

        def note(graph, _):
            return nodes.update(str(node.target) for node in graph.graph.nodes) or make_boxed_func(
                graph
            )

        backend = aot_autograd(fw_compiler=note, bw_compiler=note)
        run = (
            torch.compile(block, backend=backend, fullgraph=True) if compiled and kernels else block
        )
        out = torch.add(*run(h, y))
        results.append([out, *torch.autograd.grad(out.square().sum(), [h, y, *block.parameters()])])
    assert max(map(far, *results)) < 2e-6
    if compiled:  # the compiler sees operations, in the backward too
        assert {"longhorn_kit.add_norm.default", "longhorn_kit.add_norm_backward.default"} <= nodes
        assert (
            {"longhorn_kit.to_length.default", "longhorn_kit.to_length_backward.default"} <= nodes
        ) == bool(options)


@pytest.mark.usefixtures("kernels_of_scans")
@pytest.mark.parametrize("name", ["longhorn", slow_case("longhorn_exact"), slow_case("mamba")])
def test_eager_training_does_not_keep_the_rates(name, monkeypatch):
    "Other hooks, as those of activation checkpoints, are not hidden: they see all tensors."
    from torch.autograd.graph import saved_tensors_hooks

    model = mixer.build_mixer(name, 32).to(DEVICE)
    x = random(1, 9, 32)
    layer = model.dt_proj if name == "mamba" else model.b_proj
    grads = []
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, *bias: seen.append(w) or linear(x, w, *bias))
    for on in (False, True):
        monkeypatch.setattr(memory, "repeats", lambda x: on and torch.is_grad_enabled())
        seen.clear()
        loss = model(x).square().sum()
        forward = len(seen)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
        again = seen[forward:]
        assert len(again) == on and all(w.data_ptr() == layer.weight.data_ptr() for w in again)
    assert all(map(torch.equal, *grads))
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        seen.clear()
        loss = model(x).square().sum()
        forward = len(seen)
    loss.backward()
    assert len(seen) == forward


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name, options, d_mlp",
    [
        ("longhorn", {}, 0),
        ("longhorn_exact", {}, 0),
        ("longhorn_exact", dict(key_norm=True), 0),
        ("attention", {}, 96),
        ("mamba", {}, 0),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gpu_training_with_the_kernels_is_training_without_them(
    name, options, d_mlp, bf16, tied, monkeypatch
):
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(301, 64, 2, name, options, d_mlp=d_mlp, tie_embeddings=tied)).cuda()
    exact = SequenceLM(model.config).cuda().double()
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    tokens = torch.randint(301, (3, 50), device="cuda")
    expected = torch.autograd.grad(
        exact(tokens[:, :-1], tokens[:, 1:])[1], list(exact.parameters())
    )
    whole = torch.stack([b.norm() for b in expected]).norm()

    # in the gradient of a single number nearly everything cancels: it is compared with the whole
    # gradient
    def error(a, b):
        return far(a, b) if b.numel() > 1 else ((a.double() - b).norm() / whole).item()

    errors = []
    for kernels in (False, True):
        for module in (lm, memory, mixer):
            monkeypatch.setattr(module, "kernels_run", lambda *tensors: kernels)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:], chunk=40)
        errors.append(
            [
                error(a, b)
                for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), expected)
            ]
        )
    if bf16:
        assert all(new < 1.3 * old + 1e-3 for old, new in zip(*errors))
    else:
        assert max(errors[1]) < 2e-5


@pytest.mark.cuda
def test_gpu_the_loss_needs_a_slice_of_logits():
    h = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50257, 64, device="cuda", requires_grad=True)
    targets = torch.randint(50257, (8192,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        chunked_cross_entropy(h, weight, targets, 1024).backward()
    assert (
        torch.cuda.max_memory_allocated() - before < 1.2 * 1024 * 50304 * 2 + 6 * weight.numel() * 4
    )
