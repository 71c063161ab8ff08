"""Test the vision backbones: timm's checks, reversal, positions at other sizes, bad input."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune
from torch.testing import assert_close

from longhorn_kit.models import vision, vision_timm
from longhorn_kit.models.vision import SCANS, VisionLonghorn, timm
from longhorn_kit.scan.op import selective_scan
from longhorn_kit.scan.reference import reference_scan
from sweep import slow_case

pytestmark = pytest.mark.numeric

NANO = [f"{scan}_vim_nano_patch2_8" for scan in SCANS]
KINDS = [*((name, {}) for name in NANO), (NANO[0], dict(key_norm=True))]
ALL = [f"{scan}_vim_{size}" for scan in SCANS for size in vision_timm.SIZES]


def build(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **options)


def images(model, batch_size=2):
    torch.manual_seed(1)
    return torch.randn(batch_size, *model.default_cfg["input_size"])


REGISTERING = """
import sys, longhorn_kit, longhorn_kit.models
assert "timm" not in sys.modules, "the kit imports timm without need"
sys.modules["timm"] = None
try:
    import longhorn_kit.timm
except ImportError as error:
    assert ": pip install " in str(error) and "\\n" not in str(error), error
else:
    raise AssertionError("the import passes without timm")
del sys.modules["timm"]
import longhorn_kit.timm, timm
timm.create_model("longhorn_vim_nano_patch2_8")
"""


def test_one_import_registers_every_model():
    names = timm.list_models("*_vim_*", include_tags=False)
    assert set(names) >= set(ALL)
    result = len(timm.list_models("longhorn*"))
    expected = 2 * len(vision_timm.SIZES)
    assert result == expected


@pytest.mark.slow
def test_the_import_that_registers_models_says_if_timm_is_missing():
    done = subprocess.run([sys.executable, "-c", REGISTERING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name, options", [*KINDS, (NANO[0], dict(global_pool="avg", num_classes=0))]
)
def test_memory_without_values_gets_the_constructors_weights(name, options):
    "Both names reset every parameter at every call; the same seed gives the same bits."
    expected = build(name, **options)
    model = build(name, device="meta", **options).to_empty(device="cpu")
    for draw in (model.init_weights, model.reset_parameters):
        for parameter in model.parameters():
            parameter.data.fill_(math.nan)
        torch.manual_seed(0)
        draw()
        assert different(model, expected) == []
    before = copy.deepcopy(model)
    # parameters of a model with initialised layers: tokens, patch filters, head
    model.init_weights(needs_reset=False)
    changed = {n.split(".")[0] for n in different(model, before)}
    head = {"head"} if model.num_classes else set()
    assert changed == {"pos_embed", "cls_token", "patch_embed"} | head


def different(model, other):
    "Return the names of parameters whose bits differ."
    named = model.named_parameters()
    return [name for name, p in named if not torch.equal(p, other.get_parameter(name))]


def test_layers_that_are_reset_one_by_one_get_the_constructors_weights():
    "Sharded models reset modules separately; tokens, filters and head come from the model."
    expected = build(NANO[2])
    model = build(NANO[2], device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if name and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, p in expected.blocks.named_parameters():
        drawn = model.blocks.get_parameter(name)
        assert drawn.isfinite().all(), name
        std = p.std(unbiased=False).item()
        std_drawn = drawn.std(unbiased=False).item()
        assert std_drawn == pytest.approx(std, rel=0.2), name
        size = p.abs().mean().item()
        assert drawn.mean().item() == pytest.approx(p.mean().item(), abs=0.2 * size), name


def test_a_changed_model_draws_all_its_weights_again():
    model = build(NANO[0], key_norm=True)
    model.set_input_size((12, 12))
    model.reset_classifier(3, "avg")
    model.prune_intermediate_layers([1], prune_head=False)
    weight = model.blocks[0].mixer.out_proj.weight
    before = weight.std().item()
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    model.init_weights()
    for p in model.parameters():
        assert p.isfinite().all()
    weight = model.blocks[0].mixer.out_proj.weight
    result = weight.std().item()
    assert result == pytest.approx(before, rel=0.05)


def test_device_and_dtype_are_arguments_as_in_pytorch():
    plain = build(NANO[2]).state_dict()
    half = build(NANO[2], dtype=torch.bfloat16).state_dict()
    on_meta = build(NANO[2], device="meta").state_dict()
    for name, value in half.items():
        expected = plain[name].to(value.dtype)
        assert torch.equal(value, expected), name
        assert on_meta[name].is_meta, name
        result = value.dtype is torch.float32
        expected = name.endswith(("A_log", "D_skip"))
        assert result == expected, name


def test_a_pruned_convolution_computes_its_weight_anew():
    model = build(NANO[0]).eval()
    layers = []
    for block in model.blocks:
        mixer = block.mixer
        layers += [mixer.ahead.conv1d, mixer.back.conv1d]
    with torch.no_grad():
        for layer in layers:
            prune.l1_unstructured(layer, "weight", 0.5)
            layer.weight_orig += 1
        called = model(images(model))
        for layer in layers:
            prune.remove(layer, "weight")
        assert_close(called, model(images(model)))


def test_rates_in_float64_are_not_rounded():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 9, 3, dtype=torch.float64)
    x, b = torch.randn(2, 1, 9, 4, dtype=torch.float64)
    A_log = torch.randn(4, 3, dtype=torch.float64)
    D_skip = torch.ones(4, dtype=torch.float64)
    y = vision.vision_scan(q, k, x, b, None, D_skip, A_log, "mamba")
    expected = selective_scan(q, k, x, b, -A_log.exp(), None, D_skip)
    assert_close(y, expected, rtol=1e-13, atol=1e-13)


# timm's model tests, on the small models


@pytest.mark.parametrize("name, options", KINDS)
def test_forward_and_checkpointing_and_backward_to_every_parameter(name, options):
    model = build(name, num_classes=42, **options).eval()
    x = images(model)
    y = model(x)
    assert y.shape == (2, 42)
    assert not y.isnan().any()
    for chans in (1, 3, 5):
        other = build(name, in_chans=chans, **options)
        image = torch.randn(1, chans, 8, 8)
        assert other(image).shape == (1, 10)
    model.set_grad_checkpointing()
    assert torch.allclose(y, model(x), rtol=1e-4, atol=1e-5)
    model.set_grad_checkpointing(False)
    loss = model.train()(x).mean()
    loss.backward()
    result = [n for n, p in model.named_parameters() if p.grad is None]
    assert result == []


@pytest.mark.parametrize("name", NANO)
def test_default_cfg_and_classifier(name):
    model = build(name).eval()
    cfg = model.default_cfg
    weights = model.state_dict()
    assert model.num_classes > 0
    assert model.num_features > 0
    assert model.head_hidden_size > 0
    x = images(model, 1)
    features = model.forward_features(x)
    before = model.forward_head(features, pre_logits=True)
    assert features.shape == (1, 17, model.num_features)
    assert before.shape == (1, model.head_hidden_size)
    assert f"{cfg['classifier']}.weight" in weights
    assert f"{cfg['first_conv']}.weight" in weights
    assert model.get_classifier() is model.head
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert model(x).shape == before.shape
    model.reset_classifier(0, "")
    assert torch.equal(model(x), features)
    model.reset_classifier(7, "avg")
    assert model(x).shape == (1, 7)
    shape = build(name, num_classes=0)(x).shape
    assert shape == (1, model.num_features)


@pytest.mark.parametrize("name, options", [KINDS[0], *(slow_case(*kind) for kind in KINDS[1:])])
def test_scripted_traced_and_exported_models_agree(name, options):
    from timm.models import get_notrace_functions, get_notrace_modules
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    model = build(name, **options).eval()
    x = images(model)
    with torch.no_grad():
        y = model(x)
        scripted = torch.jit.script(model)
        assert torch.allclose(scripted(x), y, atol=1e-5)
        traced = torch.jit.trace(model, x)
        assert torch.allclose(traced(x), y, atol=1e-5)
        program = torch.export.export(model, (x,))
        result = program.module()(x)
        assert torch.allclose(result, y, atol=1e-5)
        options = dict(
            leaf_modules=list(get_notrace_modules()),
            param_shapes_constant=True,
            autowrap_functions=list(get_notrace_functions()),
        )
        _, nodes = get_graph_node_names(model, tracer_kwargs=options)
        traced = create_feature_extractor(model, return_nodes=[nodes[-1]], tracer_kwargs=options)
        result = traced(x)[nodes[-1]]
        assert torch.equal(result, y)


@pytest.mark.parametrize("name", NANO)
def test_features_of_every_block(name):
    model = build(name).eval()
    x = images(model, 1)
    final, kept = model.forward_intermediates(x)
    count = len(model.feature_info)
    info = timm.models.FeatureInfo(model.feature_info, count)
    assert len(kept) == len(info.channels()) == 3  # timm's tests require at least as many
    for channels, reduction, feature in zip(info.channels(), info.reduction(), kept):
        side = math.ceil(8 / reduction)
        assert feature.shape == (1, channels, side, side)
        assert not feature.isnan().any()
    assert torch.allclose(final, model.forward_features(x))
    normed = model.forward_intermediates(x, 1, norm=True, output_fmt="NLC", intermediates_only=True)
    expected = final[:, 1:]
    assert torch.allclose(normed[0], expected)
    model.set_grad_checkpointing()
    result = model.forward_intermediates(x)[0]
    assert torch.allclose(result, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ("export", "trace", "script"))
@pytest.mark.parametrize("name, options", [KINDS[-1], *(slow_case(*kind) for kind in KINDS[:-1])])
def test_exported_traced_and_scripted_models_have_the_gradients_of_eager_mode(name, options, how):
    model = build(name, **options)
    x = images(model).requires_grad_()
    loss = (model(x) ** 2).sum()
    loss.backward()
    of_parameters = {name: p.grad for name, p in model.named_parameters()}
    expected = of_parameters | {"x": x.grad}
    model.zero_grad(set_to_none=True)
    x.grad = None
    if how == "export":
        program = torch.export.export(model, (x.detach(),))
        other = program.module()
    elif how == "trace":
        example = x.detach()
        other = torch.jit.trace(model, example)
    else:
        other = torch.jit.script(model)
    loss = (other(x) ** 2).sum()
    loss.backward()
    of_parameters = {name: p.grad for name, p in other.named_parameters()}
    gradients = of_parameters | {"x": x.grad}
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        atol = 1e-5 * largest
        assert_close(gradients[name], gradient, rtol=1e-4, atol=atol)
    if how == "trace":
        message = "a scripted or traced vision model has no second derivative"
        with pytest.raises(RuntimeError, match=message):
            loss = (other(x) ** 2).sum()
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize(
    "options",
    (
        {},
        dict(global_pool="avg"),
        dict(global_pool="max"),
        dict(key_norm=True),
        dict(dynamic_img_size=True),
        slow_case(dict(scan="mamba")),
        slow_case(dict(scan="longhorn_exact")),
    ),
)
def test_an_empty_batch_gives_every_parameter_a_gradient_of_zeros(options):
    model = build(NANO[0], **options)
    scores = model(torch.zeros(0, 1, 8, 8))
    assert scores.shape == (0, 10)
    scores.sum().backward()
    named = model.named_parameters()
    result = [n for n, p in named if p.grad is None or p.grad.any()]
    assert result == []


def test_intermediates_in_every_form():
    model = build(NANO[0]).eval()
    x = images(model)
    pairs = model.forward_intermediates(
        x, [0, 2], return_prefix_tokens=True, intermediates_only=True
    )
    result = [(a.shape, b.shape) for a, b in pairs]
    expected = [((2, 64, 4, 4), (2, 1, 64))] * 2
    assert result == expected
    early = model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], pairs[0][0])
    parts = model.forward_intermediates(x, [0], output_dict=True, return_prefix_tokens=True)
    assert set(parts) == {"image_intermediates", "image_intermediates_prefix", "image_features"}
    prefix = parts["image_intermediates_prefix"][0]
    assert torch.equal(prefix, pairs[0][1])
    with pytest.raises(ValueError, match="output_fmt is 'NHWC'; expected NCHW or NLC"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_features_only_and_pruning():
    features = timm.create_model(NANO[0], features_only=True)
    result = features.feature_info.channels()
    assert result == [64, 64, 64]
    model = timm.create_model(NANO[0], features_only=True, out_indices=(0, 2))
    features = model.eval()
    outputs = features(torch.randn(1, 1, 8, 8))
    channels = features.feature_info.channels()
    assert channels == [64, 64]
    assert [o.shape[1] for o in outputs] == channels
    assert features.feature_info.reduction() == [2, 2]
    model = build(NANO[0])
    kept = model.prune_intermediate_layers(indices=[1])
    assert kept == [1]
    assert len(model.blocks) == 2
    features = model(torch.randn(1, 1, 8, 8))
    assert features.shape == (1, 17, 64)


# attributes that timm's training tools read


def test_parameter_groups():
    from timm.models import group_parameters
    from timm.optim import param_groups_weight_decay

    without_decay = build(NANO[1], key_norm=True).no_weight_decay()
    assert sum(name.endswith(".key_scale") for name in without_decay) == 6
    model = build("mamba_vim_nano_patch2_8")
    kept = model.no_weight_decay()
    assert {"cls_token", "pos_embed", "blocks.0.mixer.back.A_log"} <= kept
    names = {name.split(".")[-1] for name in kept}
    assert names == {"cls_token", "pos_embed", "A_log", "D_skip"}
    frozen, decayed = param_groups_weight_decay(model, 0.05, model.no_weight_decay())
    assert frozen["weight_decay"] == 0
    for p in decayed["params"]:
        assert p.ndim > 1
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert layers["cls_token"] == layers["patch_embed.proj.weight"] == 0
    assert layers["blocks.0.norm.weight"] == 1
    assert layers["blocks.1.norm.weight"] == 2
    assert layers["norm.weight"] == 3
    assert layers["head.weight"] == 4  # as timm groups its own ViT


def test_drop_path_and_dropout_are_off_in_evaluation():
    model = build(NANO[0], drop_path_rate=0.5, drop_rate=0.5, pos_drop_rate=0.5)
    first = model.blocks[0].drop_path
    assert isinstance(first, torch.nn.Identity)
    blocks = model.blocks[1:]
    result = [block.drop_path.drop_prob for block in blocks]
    assert result == [0.25, 0.5]
    x = images(model)
    assert not torch.equal(model(x), model(x))
    result = model.eval()(x)
    assert torch.equal(result, model(x))


# reversal and the middle


def blocks_by_hand(model, x):
    "Compute the model with explicit loops over time in float64, in both directions."
    embedded = model._pos_embed(model.patch_embed(x))
    tokens = vision.put_middle(embedded)
    for block in model.blocks:
        mixer = block.mixer
        projected = mixer.in_proj(block.norm(tokens))
        u, z = projected.chunk(2, -1)
        total = 0
        directions = ((mixer.ahead, False), (mixer.back, True))
        for part, turn in directions:
            v = u.flip(1) if turn else u
            padded = F.pad(v, (0, 0, 3, 0))
            taps = part.conv1d.weight[:, 0]  # (D,4)
            windows = [padded[:, t : t + 4] for t in range(v.shape[1])]
            convolved = torch.stack([(window * taps.T).sum(1) for window in windows], 1)
            x_ = F.silu(convolved + part.conv1d.bias)
            dt_low_rank, k, q = part.x_proj(x_).split(part.sizes, -1)
            if part.key_scale is not None:
                length = torch.sqrt((k * k).sum(-1, keepdim=True))
                k = part.key_scale * k / length
            b = dt_low_rank @ part.b_proj.weight.T
            y, _ = reference_scan(q, k, x_, b, part.b_proj.bias, part.D_skip)
            total = total + (y.flip(1) if turn else y)
        gate = F.silu(z)
        gated = total / 2 * gate
        tokens = tokens + mixer.out_proj(gated)
    normed = model.norm(tokens)
    middle = (tokens.shape[1] - 1) // 2
    return model.head(normed[:, middle])


@pytest.mark.parametrize("key_norm", (False, True))
def test_model_equals_the_written_out_equations(key_norm):
    model = build(NANO[0], key_norm=key_norm)
    model = model.double().eval()
    for name, parameter in model.named_parameters():  # the two directions have separate lengths
        if name.endswith("key_scale"):
            parameter.data += torch.randn_like(parameter)
    x = images(model).double()
    assert torch.allclose(model(x), blocks_by_hand(model, x), atol=1e-10)


def test_turned_image_and_exchanged_directions():
    "Rotating an image by 180 degrees equals exchanging the two directions."
    options = dict(embed_dim=16, depth=2, global_pool="avg", class_token=False)
    model = VisionLonghorn(8, 2, 1, 10, **options).eval()
    torch.nn.init.zeros_(model.pos_embed)
    weight = model.patch_embed.proj.weight
    turned = weight.flip(-1, -2)
    weight.data = (weight + turned) / 2  # a patch and the rotated patch give the same token
    x = torch.randn(1, 1, 8, 8)
    y = model(x)
    for block in model.blocks:
        ahead = block.mixer.ahead
        block.mixer.ahead = block.mixer.back
        block.mixer.back = ahead
    result = model(x.flip(-1, -2))
    assert torch.allclose(result, y, atol=1e-6)
    assert not torch.allclose(model(x), y, atol=1e-6)


# sizes


def test_trained_at_224_evaluated_at_384():
    model = build("longhorn_vim_tiny_patch16_224", depth=1).eval()
    checkpoint = {"model": model.state_dict()}
    larger = build("longhorn_vim_tiny_patch16_224", depth=1, img_size=384).eval()
    larger.load_state_dict(vision_timm.checkpoint_filter_fn(checkpoint, larger))
    expected = (1, 1 + 24 * 24, 192)
    assert larger.pos_embed.shape == expected
    dynamic = build("longhorn_vim_tiny_patch16_224", depth=1, dynamic_img_size=True).eval()
    dynamic.load_state_dict(model.state_dict())
    moved = build("longhorn_vim_tiny_patch16_224", depth=1).eval()
    moved.load_state_dict(model.state_dict())
    moved.set_input_size(img_size=384)
    x = torch.randn(1, 3, 384, 384)
    with torch.no_grad():
        y = larger(x)
        assert torch.allclose(dynamic(x), y, atol=1e-5)
        assert torch.allclose(moved(x), y, atol=1e-5)
        small = torch.randn(1, 3, 224, 224)
        assert torch.equal(dynamic(small), model(small))
    # the class token keeps its position
    result = larger.pos_embed[:, 0]
    expected = model.pos_embed[:, 0]
    assert torch.equal(result, expected)


def test_weights_of_a_grid_that_is_not_square_are_resized_by_the_model_alone():
    model = build(NANO[0], img_size=(4, 12))
    same = build(NANO[0], img_size=(4, 12))
    other = build(NANO[0], img_size=(12, 8))
    state = model.state_dict()
    message = "^the weights have 12 positions, which are not a square grid; .* set_input_size$"
    with pytest.raises(ValueError, match=message):
        vision_timm.checkpoint_filter_fn(state, other)
    same.load_state_dict(vision_timm.checkpoint_filter_fn(state, same))
    same.set_input_size((12, 8))
    cells = model.pos_embed[:, 1:].unflatten(1, (2, 6))
    grid = cells.permute(0, 3, 1, 2)
    resized = F.interpolate(grid, (6, 4), mode="bicubic", antialias=True)
    result = same.pos_embed[:, 1:].mT
    assert torch.allclose(result, resized.flatten(2), atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (12, 6), (2, 2), (2, 10)])
def test_any_size_and_padding(shape):
    model = build(NANO[1], dynamic_img_size=True, dynamic_img_pad=True).eval()
    scores = model(torch.randn(2, 1, *shape))
    assert scores.shape == (2, 10)
    x = torch.randn(2, 1, shape[0] - 1, shape[1])
    scores = model(x)
    result = scores.shape
    assert result == (2, 10)
    x = torch.randn(2, 1, *shape)
    final, (feature,) = model.forward_intermediates(x, 1)
    expected = (2, 64, shape[0] // 2, shape[1] // 2)
    assert feature.shape == expected


def test_weights_of_a_file_are_loaded_also_for_other_classes_and_patches(tmp_path):
    from timm.layers import resample_patch_embed

    model = build(NANO[0]).eval()
    x = images(model)
    filters = model.patch_embed.proj.weight.detach()
    state = model.state_dict()
    torch.save(state, tmp_path / "weights.pt")
    overlay = dict(file=str(tmp_path / "weights.pt"))
    pretrained = dict(pretrained=True, pretrained_cfg_overlay=overlay)
    loaded = timm.create_model(NANO[0], **pretrained).eval()
    other = timm.create_model(NANO[0], num_classes=3, **pretrained).eval()
    coarse = timm.create_model(NANO[0], patch_size=4, **pretrained).eval()
    assert torch.equal(loaded(x), model(x))
    coarse_filters = coarse.patch_embed.proj.weight
    assert coarse_filters.shape[-1] == 4
    scores = coarse(images(coarse))
    assert scores.isfinite().all()
    assert torch.allclose(coarse_filters, resample_patch_embed(filters, [4, 4]), atol=1e-6)
    assert other(x).shape == (2, 3)
    weight = other.blocks[0].mixer.in_proj.weight
    expected_weight = model.blocks[0].mixer.in_proj.weight
    assert torch.equal(weight, expected_weight)


@pytest.mark.parametrize(
    "classes, options", ((10, {}), (7, {}), (1000, {}), (10, dict(global_pool="avg", in_chans=4)))
)
@pytest.mark.parametrize("name", (NANO[0], "longhorn_vim_tiny_patch16_224"))
def test_own_weights_keep_their_classifier(name, classes, options, tmp_path):
    "Weights load as the message says; with another number of classes, the head is new."
    small = dict(depth=1, embed_dim=16, img_size=32, num_classes=classes, **options)
    trained = build(name, **small).eval()
    state = trained.state_dict()
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ValueError) as error:
        timm.create_model(name, pretrained=True)
    assert "pretrained_cfg_overlay=dict(file=PATH, num_classes=N)" in str(error.value)
    file = dict(file=str(tmp_path / "weights.pt"))
    x = torch.randn(2, trained.in_chans, 32, 32)

    def load(overlay, **options):
        options = dict(pretrained=True, pretrained_cfg_overlay=overlay) | options
        return timm.create_model(name, **options).eval()

    for overlay in (file | dict(num_classes=classes), file):
        loaded = load(overlay, **small)
        assert torch.equal(loaded(x), trained(x))
        assert loaded.pretrained_cfg["num_classes"] == classes
    other = load(file, **small | dict(num_classes=3))
    assert other(x).shape == (2, 3)
    result = other.forward_features(x)
    expected = trained.forward_features(x)
    assert torch.equal(result, expected)


# timm's requirements for models that change


def test_resizing_freezes_and_unfreezes_nothing():
    for learns in (False, True):
        model = build(NANO[0]).requires_grad_(learns)
        model.set_input_size((16, 12))
        result = {p.requires_grad for p in model.parameters()}
        assert result == {learns}
        assert model.pos_embed.shape == (1, 1 + 48, 64)


@pytest.mark.parametrize("training", (True, False))
def test_a_new_classifier_has_the_mode_of_the_model(training):
    model = build(NANO[0]).train(training)
    for classes in (3, 0):
        model.reset_classifier(classes, "avg")
        result = {module.training for module in model.modules()}
        assert result == {training}


CHANGES = {
    "size": (lambda m: m.set_input_size((16, 12)), {}),
    "patches": (lambda m: m.set_input_size((16, 16), 4), {}),
    "patches alone": (lambda m: m.set_input_size(patch_size=4), dict(dynamic_img_size=True)),
    "classes": (lambda m: m.reset_classifier(3), {}),
    "mean of the tokens": (lambda m: m.reset_classifier(3, "avg"), {}),
    "token after the mean": (lambda m: m.reset_classifier(3, "token"), dict(global_pool="avg")),
    "no classes": (lambda m: m.reset_classifier(0), {}),
    "no pool": (lambda m: m.reset_classifier(0, ""), {}),
    "fewer blocks": (lambda m: m.prune_intermediate_layers([1]), {}),
    "fewer blocks, same head": (
        lambda m: m.prune_intermediate_layers([0], prune_head=False),
        dict(global_pool="avg"),
    ),
    "no norm": (lambda m: m.prune_intermediate_layers([1], prune_norm=True), {}),
    "no norm after the mean": (lambda m: m.prune_intermediate_layers([1]), dict(global_pool="avg")),
    "all": (
        lambda m: (
            m.set_input_size((12, 12)),
            m.reset_classifier(4, "max"),
            m.prune_intermediate_layers([1], prune_head=False),
        ),
        dict(key_norm=True, in_chans=3),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_saved_and_loaded(change, tmp_path):
    from timm.models._hub import save_for_hf

    do, options = CHANGES[change]
    model = build(NANO[0], **options).eval()
    do(model)
    save_for_hf(model, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    size = model.patch_embed.img_size
    x = torch.randn(2, model.in_chans, *size)
    assert loaded.patch_embed.img_size == size
    assert loaded.global_pool == model.global_pool
    assert torch.equal(loaded(x), model(x))


def test_an_unknown_pool_is_both_errors():
    "The error is a ValueError as in the kit, and an AssertionError as in timm's models."
    message = "global_pool is 'map'; expected one of '', 'token', 'avg', 'avgmax', 'max'"
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=message):
            build(NANO[0], global_pool="map")
        with pytest.raises(error, match="global_pool is 'map'"):
            build(NANO[0]).reset_classifier(3, "map")


# bad input


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(scan="gru"), "scan is 'gru'; expected one of longhorn, longhorn_exact, mamba"),
        (dict(global_pool="map"), "global_pool is 'map'; expected one of '', 'token'"),
        (dict(class_token=False), "global_pool is 'token'; expected one of '', 'avg'"),
        (dict(key_norm=2.5), "key_norm is 2.5; expected one of True, False"),
        (dict(scan="mamba", key_norm=True), "key_norm is True; expected False with scan='mamba'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        VisionLonghorn(8, 2, 1, 10, embed_dim=16, depth=1, **options)
    with pytest.raises(ValueError, match=f"{NANO[0]} has no published weights"):
        timm.create_model(NANO[0], pretrained=True)


@pytest.mark.parametrize("name", NANO)
def test_every_adapter_of_peft_learns(name):
    peft = pytest.importorskip("peft")
    model = build(name)
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    scores = adapted(images(model))
    scores.square().sum().backward()
    for name, p in adapted.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            assert p.grad.any(), name


@pytest.mark.cuda
@pytest.mark.parametrize("name, options", KINDS)
def test_gpu_agrees_with_cpu(name, options):
    model = build(name, **options).eval()
    x = images(model)
    loss = model(x).sum()
    loss.backward()
    expected = model(x).detach()
    in_proj = model.blocks[0].mixer.in_proj
    gradient = in_proj.weight.grad.clone()
    model.zero_grad()
    scores = model.cuda()(x.cuda())
    scores.sum().backward()
    result = model(x.cuda()).cpu()
    assert torch.allclose(result, expected, atol=1e-3)
    result = in_proj.weight.grad.cpu()
    assert torch.allclose(result, gradient, rtol=1e-2, atol=1e-3)
