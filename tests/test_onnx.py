"""Layers, steps and language models as ONNX files, computed by ONNX Runtime, against the kit itself."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from longhorn_kit import LMConfig, Longhorn, SequenceLM
from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan.chunked import onnx_scan
from mixers import NAMES, OPTIONS, parts
from sweep import slow_case

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason='needs the extra "onnx"')
import onnxruntime

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),
]  # the exporter's own warnings
QUICK = ("longhorn_exact",)
layers = pytest.mark.parametrize(
    "name", [name if name in QUICK else slow_case(name) for name in (*NAMES, *OPTIONS)]
)
OPEN = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def make(name):
    name, options = parts(name)
    torch.manual_seed(0)
    return build_mixer(name, 32, **options).eval()


def exported(module, given, folder, shapes=None):
    "Return a function of tensors that ONNX Runtime computes."
    torch.onnx.export(
        module, given, folder / "module.onnx", dynamo=True, verbose=False, dynamic_shapes=shapes
    )
    session = onnxruntime.InferenceSession(folder / "module.onnx")
    names = [given.name for given in session.get_inputs()]
    return lambda *tensors: [
        torch.from_numpy(out)
        for out in session.run(None, dict(zip(names, [t.numpy() for t in tensors])))
    ]


class Step(nn.Module):
    "A decode step of a layer or of a model, whose states are arguments and results."

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x_t, *states):
        empty = self.module.empty_cache(1)
        several = isinstance(empty, list)
        left = list(states)
        entries = []
        for entry in empty if several else [empty]:
            entries.append(type(entry)(*(left.pop(0) for _ in entry)))
        y_t, after = self.module.step(x_t, entries if several else entries[0])
        return y_t, *(state for entry in (after if several else [after]) for state in entry)


@torch.no_grad()
@layers
def test_a_layer_reads_any_batch_and_length(name, tmp_path):
    layer = make(name)
    run = exported(layer, (torch.randn(2, 20, 32),), tmp_path, (OPEN,))
    for B, T in ((2, 64), (1, 1), (1, 33), (3, 2)):
        h = torch.randn(B, T, 32)
        (y,) = run(h)
        torch.testing.assert_close(y, layer(h), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@layers
def test_a_step_keeps_its_states_over_64_tokens(name, tmp_path):
    layer = make(name)
    h = torch.randn(2, 64, 32)
    start = 0
    states = layer.empty_cache(2)
    shapes = None
    if name == "attention":  # its states grow
        start = 3
        states = layer.prefill(h[:, :start])[1]
        shapes = {"x_t": None, "states": tuple({2: Dim.DYNAMIC} for _ in states)}
    run = exported(Step(layer), (h[:, start], *states), tmp_path, shapes)
    for t in range(start, 64):
        y_t, *states = run(h[:, t], *states)
    torch.testing.assert_close(y_t, layer(h)[:, -1], atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "mixer", (slow_case("longhorn_exact"), slow_case("mamba2"), slow_case("attention"))
)
def test_a_language_model_reads_and_decodes(mixer, tmp_path):
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(50, 32, 2, mixer, d_mlp=48)).eval()
    tokens = torch.randint(50, (2, 64))
    (logits,) = exported(model, (tokens[:, :20],), tmp_path, {"tokens": OPEN})(tokens)
    torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)
    if mixer == "attention":
        return
    states = [state for entry in model.empty_cache(2) for state in entry]
    run = exported(Step(model), (tokens[:, 0], *states), tmp_path)
    for token in tokens.unbind(1):
        last, *states = run(token, *states)
    torch.testing.assert_close(last, model(tokens)[:, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_reads_one_fixed_length(tmp_path):
    layer = Longhorn(32).eval()
    h = torch.randn(2, 20, 32)
    (y,) = exported(layer, (h,), tmp_path)(h)
    torch.testing.assert_close(y, layer(h), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.slow
def test_a_file_does_not_grow_with_the_length(tmp_path):
    layer = Longhorn(16, form="exact").eval()
    sizes = []
    for T in (8, 256):
        program = torch.onnx.export(layer, (torch.randn(1, T, 16),), dynamo=True, verbose=False)
        sizes.append(len(program.model.graph))
    assert sizes[0] == sizes[1] < 60


def test_packed_sequences_are_refused():
    q = torch.randn(1, 9, 4)
    x = torch.randn(1, 9, 3)
    with pytest.raises(
        ValueError, match="cu_seqlens. cannot be exported to ONNX; read each as a separate row"
    ):
        onnx_scan(q, q, x, x, None, torch.zeros(2, 3, 4), torch.tensor([0, 3, 9]), "diagonal")


@pytest.mark.slow
def test_the_older_exporter_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="the scans of longhorn_kit need torch.onnx.export.*dynamo=True"
    ):
        torch.onnx.export(
            Longhorn(16).eval(), (torch.randn(1, 9, 16),), tmp_path / "old.onnx", dynamo=False
        )


def test_other_tracers_keep_the_custom_operations():
    "Fake tensors, torch.compile and torch.export know the kit's operations, with gradients, and not their ONNX form."
    operations = torch.ops.longhorn_kit
    assert (
        not {operations.chunked_scan.default, operations.rotary.default}
        & torch._decomp.decomposition_table.keys()
    )
    program = torch.export.export(Longhorn(16), (torch.randn(1, 9, 16),))
    assert any(node.target is operations.chunked_scan.default for node in program.graph.nodes)


@torch.no_grad()
@pytest.mark.parametrize("masked", (slow_case(False), slow_case(True)))
def test_a_model_of_transformers_reads_padded_rows(masked, tmp_path):
    transformers = pytest.importorskip(
        "longhorn_kit.models.transformers", reason='needs the extra "hf"'
    )
    torch.manual_seed(0)
    config = transformers.LonghornConfig(
        vocab_size=50, d_model=32, n_layer=2, mixer="longhorn_exact", use_cache=False
    )
    model = transformers.LonghornForCausalLM(config).eval()
    tokens = torch.randint(50, (3, 31))
    mask = torch.ones(3, 31, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 7:9] = 0
    given = {"input_ids": tokens} | ({"attention_mask": mask} if masked else {})
    small = {name: torch.ones_like(t[:2, :20]) for name, t in given.items()}
    torch.onnx.export(
        model,
        (),
        kwargs=small,
        f=tmp_path / "hf.onnx",
        dynamo=True,
        verbose=False,
        dynamic_shapes=dict.fromkeys(given, OPEN),
    )
    out, *_ = onnxruntime.InferenceSession(tmp_path / "hf.onnx").run(
        None, {name: t.numpy() for name, t in given.items()}
    )
    read = mask.bool() if masked else torch.ones_like(mask, dtype=torch.bool)
    torch.testing.assert_close(
        torch.from_numpy(out)[read], model(**given).logits[read], atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "scan", (slow_case("longhorn"), slow_case("longhorn_exact"), slow_case("mamba"))
)
def test_a_vision_model_classifies(scan, tmp_path):
    from longhorn_kit.models.vision import timm

    torch.manual_seed(0)
    model = timm.create_model(f"{scan}_vim_nano_patch2_8", depth=2, global_pool="avg").eval()
    run = exported(model, (torch.randn(2, 1, 8, 8),), tmp_path, ({0: Dim.DYNAMIC},))
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(run(images)[0], model(images), atol=1e-5, rtol=1e-4)
