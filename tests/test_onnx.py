"""ONNX Runtime gives the kit's results for exported layers, steps and language models."""

import itertools

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

from longhorn_kit import LMConfig, Longhorn, SequenceLM
from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan.chunked import onnx_scan
from mixers import NAMES, OPTIONS, parts
from sweep import slow_case

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason='needs the extra "onnx"')
import onnxruntime

# the exporter warns
pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("ignore")]
QUICK = ("longhorn_exact",)
CASES = [name if name in QUICK else slow_case(name) for name in (*NAMES, *OPTIONS)]
layers = pytest.mark.parametrize("name", CASES)
OPEN = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def make(name):
    name, options = parts(name)
    torch.manual_seed(0)
    return build_mixer(name, 32, **options).eval()


def exported(module, given, folder, shapes=None):
    "Return a function of tensors that runs in ONNX Runtime."
    path = folder / "module.onnx"
    options = dict(dynamo=True, verbose=False, dynamic_shapes=shapes)
    torch.onnx.export(module, given, path, **options)
    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]

    def run(*tensors):
        arrays = [tensor.numpy() for tensor in tensors]
        outputs = session.run(None, dict(zip(names, arrays)))
        return [torch.from_numpy(output) for output in outputs]

    return run


class Step(nn.Module):
    "Decode step of a layer or model, with states as arguments and results."

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x_t, *states):
        empty = self.module.empty_cache(1)
        if not isinstance(empty, list):
            cache = type(empty)(*states)
            y_t, after = self.module.step(x_t, cache)
            return y_t, *after
        rest = list(states)
        cache = []
        for entry in empty:
            parts = rest[: len(entry)]
            cache.append(type(entry)(*parts))
            rest = rest[len(entry) :]
        y_t, after = self.module.step(x_t, cache)
        tensors = itertools.chain(*after)
        return y_t, *tensors


@torch.no_grad()
@layers
def test_a_layer_reads_any_batch_and_length(name, tmp_path):
    layer = make(name)
    example = torch.randn(2, 20, 32)
    run = exported(layer, (example,), tmp_path, (OPEN,))
    sizes = ((2, 64), (1, 1), (1, 33), (3, 2))
    for B, T in sizes:
        h = torch.randn(B, T, 32)
        (y,) = run(h)
        assert_close(y, layer(h), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@layers
def test_a_step_keeps_its_states_over_64_tokens(name, tmp_path):
    layer = make(name)
    h = torch.randn(2, 64, 32)
    start = 0
    states = layer.empty_cache(2)
    shapes = None
    if name == "attention":  # attention's states grow
        start = 3
        prompt = h[:, :start]
        states = layer.prefill(prompt)[1]
        shapes = {"x_t": None, "states": tuple({2: Dim.DYNAMIC} for _ in states)}
    token = h[:, start]
    run = exported(Step(layer), (token, *states), tmp_path, shapes)
    for t in range(start, 64):
        token = h[:, t]
        y_t, *states = run(token, *states)
    outputs = layer(h)
    expected = outputs[:, -1]
    assert_close(y_t, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "mixer", (slow_case("longhorn_exact"), slow_case("mamba2"), slow_case("attention"))
)
def test_a_language_model_reads_and_decodes(mixer, tmp_path):
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(50, 32, 2, mixer, d_mlp=48)).eval()
    tokens = torch.randint(50, (2, 64))
    example = tokens[:, :20]
    run = exported(model, (example,), tmp_path, {"tokens": OPEN})
    (logits,) = run(tokens)
    assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)
    if mixer == "attention":
        return
    states = [state for entry in model.empty_cache(2) for state in entry]
    token = tokens[:, 0]
    run = exported(Step(model), (token, *states), tmp_path)
    for token in tokens.unbind(1):
        last, *states = run(token, *states)
    logits = model(tokens)
    expected = logits[:, -1]
    assert_close(last, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_reads_one_fixed_length(tmp_path):
    layer = Longhorn(32).eval()
    h = torch.randn(2, 20, 32)
    (y,) = exported(layer, (h,), tmp_path)(h)
    assert_close(y, layer(h), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.slow
def test_a_file_does_not_grow_with_the_length(tmp_path):
    layer = Longhorn(16, form="exact").eval()
    sizes = []
    for T in (8, 256):
        example = torch.randn(1, T, 16)
        program = torch.onnx.export(layer, (example,), dynamo=True, verbose=False)
        sizes.append(len(program.model.graph))
    assert sizes[0] == sizes[1] < 60


def test_packed_sequences_are_refused():
    q = torch.randn(1, 9, 4)
    x = torch.randn(1, 9, 3)
    message = "cu_seqlens. cannot be exported to ONNX; pass each as a separate row"
    with pytest.raises(ValueError, match=message):
        state = torch.zeros(2, 3, 4)
        bounds = torch.tensor([0, 3, 9])
        onnx_scan(q, q, x, x, None, state, bounds, "diagonal")


@pytest.mark.slow
def test_the_older_exporter_is_refused(tmp_path):
    layer = Longhorn(16).eval()
    h = torch.randn(1, 9, 16)
    message = "the scans of longhorn_kit need torch.onnx.export.*dynamo=True"
    with pytest.raises(ValueError, match=message):
        torch.onnx.export(layer, (h,), tmp_path / "old.onnx", dynamo=False)


def test_other_tracers_keep_the_custom_operations():
    "torch.compile and torch.export see the kit's operations, and not their ONNX form."
    operations = torch.ops.longhorn_kit
    table = torch._decomp.decomposition_table
    assert operations.chunked_scan.default not in table
    assert operations.rotary.default not in table
    example = torch.randn(1, 9, 16)
    program = torch.export.export(Longhorn(16), (example,))
    assert any(node.target is operations.chunked_scan.default for node in program.graph.nodes)


@torch.no_grad()
@pytest.mark.parametrize("masked", (slow_case(False), slow_case(True)))
def test_a_model_of_transformers_reads_padded_rows(masked, tmp_path):
    module = "longhorn_kit.models.transformers"
    transformers = pytest.importorskip(module, reason='needs the extra "hf"')
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, d_model=32, n_layer=2)
    config = transformers.LonghornConfig(**sizes, mixer="longhorn_exact", use_cache=False)
    model = transformers.LonghornForCausalLM(config).eval()
    tokens = torch.randint(50, (3, 31))
    mask = torch.ones(3, 31, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 7:9] = 0
    given = {"input_ids": tokens}
    if masked:
        given["attention_mask"] = mask
    tensors = given.items()
    small = {name: torch.ones_like(t[:2, :20]) for name, t in tensors}
    torch.onnx.export(
        model,
        (),
        kwargs=small,
        f=tmp_path / "hf.onnx",
        dynamo=True,
        verbose=False,
        dynamic_shapes=dict.fromkeys(given, OPEN),
    )
    session = onnxruntime.InferenceSession(tmp_path / "hf.onnx")
    arrays = {name: t.numpy() for name, t in given.items()}
    logits, *_ = session.run(None, arrays)
    logits = torch.from_numpy(logits)
    expected = model(**given).logits
    if masked:
        logits = logits[mask.bool()]
        expected = expected[mask.bool()]
    assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "scan", (slow_case("longhorn"), slow_case("longhorn_exact"), slow_case("mamba"))
)
def test_a_vision_model_classifies(scan, tmp_path):
    from longhorn_kit.models.vision import timm

    torch.manual_seed(0)
    model_name = f"{scan}_vim_nano_patch2_8"
    model = timm.create_model(model_name, depth=2, global_pool="avg").eval()
    example = torch.randn(2, 1, 8, 8)
    run = exported(model, (example,), tmp_path, ({0: Dim.DYNAMIC},))
    images = torch.randn(3, 1, 8, 8)
    assert_close(run(images)[0], model(images), atol=1e-5, rtol=1e-4)
