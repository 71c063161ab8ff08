"""Compare the kernels of norms and losses with float64.

Also check the memory that a training step keeps for its backward.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

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
    "Return the distance from b relative to the norm of b; NaN if any number is NaN."
    exact = b.double()
    distance = (a.double() - exact).norm()
    size = exact.norm()
    return (distance / size).item()


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
    total = expected.sum()
    (gradient,) = torch.autograd.grad(total, exact)
    before = logits.clone()
    tp.cross_entropy_(logits, targets, losses, learns=False)
    assert torch.equal(logits, before)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=2e-6)
    losses.fill_(float("nan"))
    tp.cross_entropy_(logits, targets.int(), losses)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=2e-6)
    if V > 1:
        assert far(logits, gradient) < CLOSE[dtype]
    else:
        assert not logits.any()
    padding = rows[:, V:]
    assert not padding.any()


def test_a_wrong_target_and_a_wrong_logit_show():
    logits = random(4, 20)
    losses = torch.empty(4, device=DEVICE)
    logits[2, 5] = float("nan")
    logits[3] *= 3e4
    targets = torch.tensor([3, 20, 1, 2], device=DEVICE)
    tp.cross_entropy_(logits, targets, losses)
    assert losses.isnan().tolist() == [False, True, True, False]
    assert logits[3].isfinite().all()


def test_the_padding_of_the_logits_is_finite(monkeypatch):
    """Padding that was NaN does not cause NaN gradients.

    Products on AMX multiply the padding of a row by zero, and 0 x NaN is NaN."""
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
    assert len(paddings) == 1
    assert paddings[0].numel()
    assert not paddings[0].any()
    for grad in grads:
        assert grad.isfinite().all()


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
    wide = weight.double()
    logits = F.linear(h.double(), wide)
    expected = F.cross_entropy(logits, targets)
    torch._dynamo.reset()
    monkeypatch.setattr(memory, "kernels_run", always(kernels))
    run = (
        torch.compile(chunked_cross_entropy, backend="aot_eager", fullgraph=True)
        if compiled
        else chunked_cross_entropy
    )
    loss = run(h, weight, targets, chunk)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss.double(), expected, rtol=CLOSE[dtype])
    gradients = torch.autograd.grad(3 * loss, (h, weight))
    exact_gradients = torch.autograd.grad(3 * expected, (h, weight))
    for gradient, exact in zip(gradients, exact_gradients):
        assert gradient.dtype == dtype
        assert far(gradient, exact) < 2 * CLOSE[dtype]
    with torch.no_grad():  # another kernel
        result = chunked_cross_entropy(h, weight, targets, chunk)
    assert torch.allclose(result, loss, rtol=1e-6)


def test_targets_may_be_a_view_but_not_too_few(monkeypatch):
    h = random(6, 8)
    weight = random(35, 8)
    wide = torch.randint(35, (6, 3), device=DEVICE)
    monkeypatch.setattr(memory, "kernels_run", lambda *tensors: True)
    short = wide[0, :1].expand(6)
    for targets in (wide[:, 0], short):
        assert_close(
            chunked_cross_entropy(h, weight, targets, 4), F.cross_entropy(h @ weight.T, targets)
        )
    with pytest.raises(ValueError, match="5 targets for 6 features"):
        chunked_cross_entropy(h, weight, wide[:5, 0], 4)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_loss_without_targets_is_what_pytorch_says(monkeypatch, kernels):
    "Losses are NaN, with gradients of zero."
    h = random(5, 4).requires_grad_()
    weight = random(9, 4).requires_grad_()
    none = torch.full((5,), -100, device=DEVICE)
    monkeypatch.setattr(memory, "kernels_run", always(kernels))
    for loss in (chunked_cross_entropy(h, weight, none, 2), F.cross_entropy(h @ weight.T, none)):
        assert loss.isnan()
        for g in torch.autograd.grad(loss, (h, weight)):
            assert not g.any()


def test_the_operation_is_well_formed():
    args = (
        random(6, 4).requires_grad_(),
        random(9, 4).requires_grad_(),
        torch.randint(9, (6,), device=DEVICE),
    )
    operation = torch.ops.longhorn_kit.linear_cross_entropy.default
    torch.library.opcheck(operation, (*args, 4, torch.float32, True))


@pytest.mark.parametrize(
    "shape", [(3, 7, 5), (2, 9, 768), (0, 4), *map(slow_case, [(2, 64), (1, 1, 3), (3, 2050)])]
)
@pytest.mark.parametrize("dtype", CLOSE)
def test_the_stream_and_its_norm(shape, dtype):
    torch.manual_seed(2)
    h = random(*shape).requires_grad_()
    y = random(*shape, dtype=dtype).requires_grad_()
    weight = random(shape[-1]).requires_grad_()
    results = tp.add_norm(h, y, weight, 1e-5, dtype)
    s = h.double() + y.double()
    wide = weight.double()
    normed = F.rms_norm(s, shape[-1:], wide, 1e-5)
    expected = s, normed
    assert [t.dtype for t in results] == [torch.float32, dtype]
    grads = random(*shape), random(*shape, dtype=dtype)

    def gradients(outputs, chosen):
        return torch.autograd.grad(
            [outputs[i] for i in chosen],
            (h, y, weight),
            [grads[i].to(outputs[i].dtype) for i in chosen],
            retain_graph=True,
            materialize_grads=True,
        )

    for chosen in ((0, 1), (0,), (1,)):  # gradients of both results, or of one result
        pairs = zip(gradients(results, chosen), gradients(expected, chosen))
        for name, (a, b) in zip(("h", "y", "weight"), pairs):
            assert a.shape == b.shape
            limit = CLOSE[dtype] if name == "y" else 2e-6
            assert not b.any() and not a.any() or far(a, b) < limit
    if results[0].numel():
        assert far(results[0], s) < 1e-6
        assert far(results[1], normed) < CLOSE[dtype]


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
    "Keys may be views of wider rows; zeros stay zero and pass no gradient."
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
    wide = whole.detach().double()
    exact = wide.requires_grad_()  # gradients of `wide` have no intermediate rounding
    used = exact[..., room - N :]
    zero, length = lengths_of(used)
    expected = s.double() * used / length
    result = run(whole[..., room - N :], s)
    assert result.dtype is dtype
    assert result.is_contiguous()
    assert result.shape == shape
    g = random(*shape, dtype=dtype)
    dk, ds = torch.autograd.grad(result, (whole, s), g)
    exact_dk, exact_ds = torch.autograd.grad(expected, (exact, s), g.double())
    assert dk.dtype is dtype
    assert ds.dtype is torch.float32
    assert ds.shape == (1,)
    if result.numel():
        assert far(result, expected) < CLOSE[dtype]
        quotient = g.double() * expected.detach() / s.detach()
        terms = quotient.abs().sum()  # terms of the length's gradient, most of which may cancel
        assert (ds - exact_ds).abs() < 2e-6 * terms
        exact_dk = exact_dk.masked_fill(zero, 0)
        vanishes = N == 1 and not exact_dk.abs().gt(1e-6).any()
        assert vanishes or far(dk, exact_dk) < CLOSE[dtype]
        is_zero = zero[..., 0]
        assert not result[is_zero].any()
        assert not dk[is_zero].any()


def test_keys_that_are_no_numbers_show():
    k = random(4, 3)
    s = torch.ones(1, device=DEVICE)
    k[1, 0] = float("nan")
    k[2, 0] = float("inf")
    for result in (tp.to_length(k, s), mixer.to_length(k, s)):
        finite = result.isfinite().all(-1)
        assert finite.tolist() == [True, False, False, True]


def test_the_operation_of_keys_is_well_formed():
    view = random(6, 9)[:, 2:7]
    args = (view.requires_grad_(), torch.full((1,), 2.0, device=DEVICE, requires_grad=True))
    operation = torch.ops.longhorn_kit.to_length.default
    torch.library.opcheck(operation, args)


def always(value):
    "Return a function that returns a value for any arguments."
    return lambda *arguments: value


def repeats_if(on):
    "Return a stand-in for `memory.repeats`."
    return lambda x: on and torch.is_grad_enabled()


def noted(nodes, graph, _):
    "Backend that does not compile, but adds the names of a graph's operations to a set."
    nodes.update(str(node.target) for node in graph.graph.nodes)
    return make_boxed_func(graph)


def lengths_of(rows):
    "Return a mask of zero rows, and lengths of rows (1 for zero rows, whose root has no slope)."
    zero = (rows == 0).all(-1, keepdim=True)
    squares = rows.square().sum(-1, keepdim=True)
    return zero, squares.masked_fill(zero, 1).sqrt()


@pytest.fixture
def kernels_of_scans(monkeypatch):
    "Let mixers run the kernels, as on a GPU, because PyTorch's scans keep other tensors."
    for module, scan in ((mixer, "longhorn_scan"), (baselines, "selective_scan")):
        monkeypatch.setattr(module, scan, partial(getattr(module, scan), backend="triton"))


@pytest.mark.usefixtures("kernels_of_scans")
@pytest.mark.parametrize(
    "name", [slow_case("longhorn"), slow_case("longhorn_exact"), slow_case("mamba")]
)
def test_a_compiled_block_does_not_keep_the_rates(name, monkeypatch):
    "Tensors are recomputed in the backward with the same bits."
    block = Block(LMConfig(d_model=32, mixer=name)).to(DEVICE)
    h = random(1, 9, 32).requires_grad_()
    y = random(1, 9, 32)
    kept = []
    grads = []
    for on in (False, True):
        monkeypatch.setattr(memory, "repeats", repeats_if(on))
        torch._dynamo.reset()
        run = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
        out = torch.add(*run(h, y))
        saved = out.grad_fn.next_functions[0][0].saved_tensors
        kept.append(sum(t.numel() for t in saved))
        loss = out.square().sum()
        tensors = [h, *block.parameters()]
        grads.append(torch.autograd.grad(loss, tensors))
    difference = kept[0] - kept[1]
    assert difference >= 9 * (64 - 2)
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
            monkeypatch.setattr(module, "kernels_run", always(kernels))
        torch._dynamo.reset()
        nodes = set()
        note = partial(noted, nodes)
        backend = aot_autograd(fw_compiler=note, bw_compiler=note)
        run = (
            torch.compile(block, backend=backend, fullgraph=True) if compiled and kernels else block
        )
        out = torch.add(*run(h, y))
        loss = out.square().sum()
        tensors = [h, y, *block.parameters()]
        results.append([out, *torch.autograd.grad(loss, tensors)])
    assert max(map(far, *results)) < 2e-6
    if compiled:  # the compiler traces operations, including the backward
        assert {"longhorn_kit.add_norm.default", "longhorn_kit.add_norm_backward.default"} <= nodes
        assert (
            {"longhorn_kit.to_length.default", "longhorn_kit.to_length_backward.default"} <= nodes
        ) == bool(options)


@pytest.mark.usefixtures("kernels_of_scans")
@pytest.mark.parametrize("name", ["longhorn", slow_case("longhorn_exact"), slow_case("mamba")])
def test_eager_training_does_not_keep_the_rates(name, monkeypatch):
    "Other hooks, such as those of activation checkpoints, still receive all tensors."
    from torch.autograd.graph import saved_tensors_hooks

    model = mixer.build_mixer(name, 32).to(DEVICE)
    x = random(1, 9, 32)
    layer = model.dt_proj if name == "mamba" else model.b_proj
    grads = []
    used_weights = []
    linear = F.linear

    def noting(x, w, *bias):
        used_weights.append(w)
        return linear(x, w, *bias)

    monkeypatch.setattr(F, "linear", noting)
    for on in (False, True):
        monkeypatch.setattr(memory, "repeats", repeats_if(on))
        used_weights.clear()
        loss = model(x).square().sum()
        forward = len(used_weights)
        parameters = list(model.parameters())
        grads.append(torch.autograd.grad(loss, parameters))
        repeated = used_weights[forward:]
        assert len(repeated) == on
        for w in repeated:
            expected = layer.weight.data_ptr()
            assert w.data_ptr() == expected
    assert all(map(torch.equal, *grads))
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        used_weights.clear()
        loss = model(x).square().sum()
        forward = len(used_weights)
    loss.backward()
    assert len(used_weights) == forward


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
    model_on_gpu = SequenceLM(model.config).cuda()
    exact = model_on_gpu.double()
    state = {key: value.double() for key, value in model.state_dict().items()}
    exact.load_state_dict(state)
    tokens = torch.randint(301, (3, 50), device="cuda")
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    loss = exact(inputs, targets)[1]
    parameters = list(exact.parameters())
    expected = torch.autograd.grad(loss, parameters)
    norms = [b.norm() for b in expected]
    whole = torch.stack(norms).norm()

    # terms in the gradient of a single number almost cancel, so compare with the norm of all
    # gradient
    def error(a, b):
        if b.numel() > 1:
            return far(a, b)
        difference = (a.double() - b).norm()
        return (difference / whole).item()

    errors = []
    for kernels in (False, True):
        for module in (lm, memory, mixer):
            monkeypatch.setattr(module, "kernels_run", always(kernels))
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = model.loss(inputs, targets, chunk=40)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        errors.append([error(a, b) for a, b in zip(gradients, expected)])
    if bf16:
        for old, new in zip(*errors):
            assert new < 1.3 * old + 1e-3
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
    peak = torch.cuda.max_memory_allocated() - before
    limit = 1.2 * 1024 * 50304 * 2 + 6 * weight.numel() * 4
    assert peak < limit
