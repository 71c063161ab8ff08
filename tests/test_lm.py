"""Test the language model: decoding, sampling, model files, official checkpoints."""

import contextlib
import errno
import json
import math
import os
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mambapy.mamba import MambaBlock, MambaConfig
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune
from torch.testing import assert_close

from longhorn_kit.models import LMConfig, Longhorn, SequenceLM, files, lm
from longhorn_kit.models.files import load_official_state_dict, match_parameters, official_name
from longhorn_kit.models.lm import count_parameters, document_bounds, sample
from mixers import every_family, every_mixer, rms
from pool import one_process
from rounding import bound, error
from sweep import slow_case

pytestmark = pytest.mark.numeric


def make(seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=40, d_model=16, n_layer=2)
    return SequenceLM(LMConfig(**sizes | options))


# training and decoding


@every_mixer
@settings(max_examples=4, deadline=None)
@given(
    prompt=st.integers(1, 9),
    steps=st.integers(1, 6),
    d_mlp=st.sampled_from([0, 24]),
    tied=st.booleans(),
)
def test_prompt_and_steps_equal_one_pass(name, prompt, steps, d_mlp, tied):
    "A language model's prefill and steps give the logits of one pass."
    model = make(mixer=name, d_mlp=d_mlp, tie_embeddings=tied).double()
    tokens = torch.randint(40, (2, prompt + steps))
    with torch.no_grad():
        prompt_tokens = tokens[:, :prompt]
        logits, cache = model.prefill(prompt_tokens)
        parts = [logits]
        for t in range(prompt, prompt + steps):
            logits, cache = model.step(tokens[:, t], cache)
            parts.append(logits[:, None])
        assert_close(torch.cat(parts, 1), model(tokens), atol=1e-8, rtol=1e-8)


def test_steps_can_start_from_an_empty_cache():
    model = make()
    tokens = torch.randint(40, (3, 2))
    with torch.no_grad():
        empty = model.empty_cache(3)
        logits, _ = model.step(tokens[:, 0], empty)
        expected = model(tokens)[:, 0]
        assert_close(logits, expected)
        last, _ = model.prefill(tokens, last_only=True)
        logits = model(tokens)
        expected = logits[:, -1:]
        assert_close(last, expected)


@every_mixer
def test_a_hook_on_a_mixer_or_a_block_acts_in_training_and_in_decoding(name):
    "A hook on a mixer or block changes input and output of every call, with or without a cache."
    model = make(mixer=name).eval()
    tokens = torch.randint(40, (2, 7))
    with torch.no_grad():
        whole = model(tokens)
        block = model.blocks[0]

        def thrice(part, inputs):
            return (3 * inputs[0], *inputs[1:])

        for put, act in (
            (block.mixer.register_forward_hook, lambda mixer, inputs, y: -y),
            (block.mixer.register_forward_pre_hook, thrice),
            (block.register_forward_hook, lambda block, inputs, pair: (pair[0], -pair[1])),
            (block.register_forward_pre_hook, thrice),
        ):
            hook = put(act)
            expected = model(tokens)
            start = tokens[:, :6]
            first, cache = model.prefill(start)
            expected_start = expected[:, :6]
            assert_close(first, expected_start)
            token = tokens[:, 6]
            last, _ = model.step(token, cache)
            assert_close(last, expected[:, 6], atol=1e-5, rtol=1e-5)
            assert not torch.allclose(expected, whole, atol=1e-4)
            hook.remove()


def test_an_output_layer_of_its_own_is_called():
    model = make(0, tie_embeddings=False).eval()
    other = make(1, tie_embeddings=False).eval()
    tokens = torch.randint(40, (2, 7))
    with torch.no_grad():
        whole = model(tokens)
        hook = model.lm_head.register_forward_hook(lambda layer, inputs, y: 2 * y)
        assert_close(model(tokens), 2 * whole)
        prefilled, _ = model.prefill(tokens)
        assert_close(prefilled, 2 * whole)
        expected = lm.mean_loss(2 * whole, tokens)
        for chunk in (0, 3):
            assert_close(model.loss(tokens, tokens, chunk=chunk), expected)
        hook.remove()
    for one in (model, other):
        prune.l1_unstructured(one.lm_head, "weight", 0.5)
    other.load_state_dict(model.state_dict())
    assert_close(other(tokens), model(tokens))
    for _ in range(2):  # each backward has a new graph
        other.loss(tokens, tokens, chunk=3).backward()


@every_mixer
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_linear_layers_can_be_quantised(name):
    "After PyTorch's dynamic quantisation of linear layers, a model still reads and decodes."
    model = make(mixer=name, tie_embeddings=False).eval()
    tokens = torch.randint(40, (2, 7))
    linear = {torch.nn.Linear}
    small = torch.ao.quantization.quantize_dynamic(model, linear, dtype=torch.qint8)
    with torch.no_grad():
        logits = small(tokens).flatten()
        expected = model(tokens).flatten()
        similarity = torch.cosine_similarity(logits, expected, 0)
        assert similarity > 0.95
        start_tokens = tokens[:, :6]
        _, cache = small.prefill(start_tokens)
        for start in (cache, small.empty_cache(2)):
            token = tokens[:, 6]
            logits, _ = small.step(token, start)
            assert logits.shape == (2, 40)


@every_mixer
def test_a_model_on_the_meta_device_gives_shapes(name):
    "A model on the meta device reads and decodes tokens without values."
    with torch.device("meta"):
        model = make(mixer=name)
        tokens = torch.zeros(2, 7, dtype=torch.long)
        logits, loss = model(tokens, tokens)
        _, cache = model.prefill(tokens)
        assert logits.shape == (2, 7, 40)
        assert loss.is_meta
        logits = model.step(tokens[:, 0], cache)[0]
        shape = logits.shape
        assert shape == (2, 40)


@pytest.mark.parametrize("name", ["longhorn", "longhorn_exact", "mamba", "attention"])
def test_a_long_prompt_is_read_in_pieces(name, monkeypatch):
    model = make(mixer=name)
    tokens = torch.randint(40, (2, 4100))
    sizes = []
    prefill = SequenceLM.prefill

    def noted(self, piece, *rest, **options):
        sizes.append(piece.shape[1])
        return prefill(self, piece, *rest, **options)

    monkeypatch.setattr(SequenceLM, "prefill", noted)
    result = model.eval().generate(tokens, 1, temperature=0)
    new = result[:, -1:]
    with torch.no_grad():
        logits = model(tokens)[:, -1]
    assert sizes == [4096, 4]
    chosen = logits.gather(1, new)[:, 0]
    gap = (logits.amax(-1) - chosen).max()
    assert gap < 1e-5


def test_functional_gradients_of_a_model_are_its_gradients():
    model = SequenceLM(LMConfig(vocab_size=16, d_model=16, n_layer=2))
    tokens = torch.randint(16, (2, 6))
    parameters = model.named_parameters()
    values = {name: value.detach() for name, value in parameters}
    loss = model(tokens, tokens)[1]
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, parameters)

    class Sliced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *batch):
            return None, self.model.loss(*batch, chunk=5)

    def loss(weights, module, rows):
        _, value = torch.func.functional_call(module, weights, (rows, rows))
        return value

    gradients = torch.func.grad(loss)(values, model, tokens)
    result = list(gradients.values())
    assert_close(result, list(expected))
    named = {f"model.{name}": value for name, value in values.items()}
    gradients = torch.func.grad(loss)(named, Sliced(), tokens)
    result = list(gradients.values())
    assert_close(result, list(expected))

    def loss_of_row(weights, row):
        return loss(weights, model, row[None])

    of_row = torch.func.grad(loss_of_row)
    of_rows = torch.func.vmap(of_row, (None, 0))
    per_row = of_rows(values, tokens)
    means = [gradient.mean(0) for gradient in per_row.values()]
    assert_close(means, list(expected))


def test_loss_is_the_mean_negative_log_probability_of_the_targets():
    model = make()
    tokens = torch.randint(40, (2, 7))
    targets = torch.randint(40, (2, 7))
    targets[0, 3] = -100
    targets[1, 0] = -100
    logits, loss = model(tokens, targets)
    terms = []
    rows = logits.flatten(0, 1).tolist()
    numbers = targets.flatten().tolist()
    for row, target in zip(rows, numbers):
        if target != -100:
            total = sum(map(math.exp, row))
            probability = math.exp(row[target]) / total
            terms.append(-math.log(probability))
    assert len(terms) == 12
    expected = sum(terms) / 12
    assert abs(loss.item() - expected) < 1e-5


@every_mixer
def test_bfloat16_weights_and_autocast(name):
    "In bfloat16 or under autocast, logits are near float32, and stream and loss are float32."
    model = make(mixer=name, d_mlp=24)
    tokens = torch.randint(40, (2, 9))
    plain = model(tokens)
    stream = []

    def note_dtype(block, inputs, pair):
        stream.append(pair[0].dtype)

    model.blocks[1].register_forward_hook(note_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, tokens)
    loss.backward()
    half = make(mixer=name, d_mlp=24).to(torch.bfloat16)
    half.blocks[1].register_forward_hook(note_dtype)
    # inputs, weights and results of 13 successive products are rounded, by half of eps each:
    # four of a mixer and two of an MLP, in two blocks, and the logits
    logits_of_half = half(tokens)
    limit = bound(torch.bfloat16, 13 * 3 / 2)
    assert error(logits_of_half, plain) < limit
    assert error(logits, plain) < limit
    assert loss.dtype is torch.float32, "the residual stream is float32"
    assert stream == [torch.float32] * 2, "the residual stream is float32"
    continued = half.generate(tokens, 3, temperature=0)
    assert continued.shape == (2, 12)


def test_dropout_is_for_training_alone():
    model = make(dropout=0.5, d_mlp=24)
    tokens = torch.randint(40, (1, 9))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.prefill(tokens)[0], model.prefill(tokens)[0]), (
        "decoding never drops out"
    )
    result = model.eval()(tokens)
    expected = model.prefill(tokens)[0]
    assert_close(result, expected)


@pytest.mark.parametrize("d_mlp", [0, 24])
def test_a_block_that_hands_on_an_open_sum_is_the_same_block(d_mlp):
    model = make(d_mlp=d_mlp, dropout=0.5)
    h, y = torch.randn(2, 2, 9, 16)
    torch.manual_seed(1)
    first = model.blocks[0](h + y)
    closed = model.blocks[1](first)
    torch.manual_seed(1)
    pair = model.blocks[0](h, y)
    result = sum(model.blocks[1](*pair))
    assert torch.equal(result, closed)


@pytest.mark.parametrize("sharded", (False, True))
@pytest.mark.parametrize("mixer, d_mlp, tied", [("longhorn_exact", 0, True), ("gla", 24, False)])
def test_a_model_without_memory_is_drawn_as_by_its_constructor(mixer, d_mlp, tied, sharded):
    "FSDP2 and torchtitan can build on meta, shard, and call `to_empty` and `init_weights`."

    def build():
        return SequenceLM(LMConfig(50, 32, 2, mixer, d_mlp=d_mlp, tie_embeddings=tied))

    with torch.device("meta"):
        model = build()
    with one_process() if sharded else contextlib.nullcontext() as mesh:
        if sharded:
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, math.nan)
        torch.manual_seed(4)
        model.init_weights()
        state = dict(model.state_dict())
        if sharded:
            state = {name: value.full_tensor() for name, value in state.items()}
    torch.manual_seed(4)
    fresh = build().state_dict()
    for name, value in state.items():
        assert torch.equal(value, fresh[name]), name


def test_resetting_every_submodule_of_a_model_keeps_its_scales():
    "A block or layer that is reset separately keeps the scale that the model gives it."
    model = SequenceLM(LMConfig(50, 64, 4, d_mlp=64))
    sizes = {name: value.std() for name, value in model.state_dict().items() if value.std() > 0}
    modules = (*model.modules(), model.blocks[1], model.blocks[2].mixer)
    for reset in modules:
        if hasattr(reset, "reset_parameters"):
            reset.reset_parameters()
    for name, size in sizes.items():
        ratio = model.state_dict()[name].std() / size
        assert 0.7 < ratio < 1.4, name


def test_fresh_weights_have_the_stated_sizes():
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(vocab_size=500, d_model=96, n_layer=8, d_mlp=64))
    std = model.embedding.weight.std().item()
    assert abs(std / 0.02 - 1) < 0.05
    for name, weight in model.named_parameters():
        if name.endswith(("in_proj.weight", "out_proj.weight")):
            writers = 16 if name.endswith("out_proj.weight") else 1
            reads = weight.shape[1]
            expected = 1 / math.sqrt(3 * reads * writers)
            ratio = weight.std().item() / expected
            assert abs(ratio - 1) < 0.1, name


# documents in a window


@st.composite
def token_rows(draw):
    "Return 1 to 3 rows of 1 to 9 tokens, all of one length."
    rows = draw(st.integers(1, 3))
    length = draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 2), min_size=length, max_size=length)
    return draw(st.lists(row, min_size=rows, max_size=rows))


@settings(max_examples=50, deadline=None)
@given(rows=token_rows())
def test_documents_are_cut_after_their_ends_and_at_the_ends_of_rows(rows):
    lengths = []
    for row in rows:
        digits = "".join(map(str, row))
        lengths += map(len, re.findall("[12]*0|[12]+", digits))
    bounds = document_bounds(torch.tensor(rows), 0)
    assert bounds.dtype is torch.int32
    assert bounds[0] == 0
    assert bounds.diff().tolist() == lengths


def packed_case(name, **options):
    "Return a model, tokens (3,T) of documents with 1 to 30 tokens, and the bounds."
    model = make(mixer=name, **options).double()
    tokens = torch.randint(1, 40, (3, 37))
    for row, t in ((0, 0), (0, 12), (0, 36), (1, 4), (1, 5), (2, 30)):
        tokens[row, t] = 0
    bounds = document_bounds(tokens, 0)
    assert bounds.tolist() == [0, 1, 13, 37, 42, 43, 74, 105, 111]
    return model, tokens, bounds


@every_family
def test_packed_documents_are_documents_alone(name):
    "Packed documents have the same features and gradients as separate documents."
    model, tokens, bounds = packed_case(name, d_mlp=24)
    row = tokens.view(1, -1)
    cuts = bounds[1:-1].tolist()
    documents = row.tensor_split(cuts, 1)
    features = [model.features(document) for document in documents]
    alone = torch.cat(features, 1)
    dy = torch.randn(3, 37, 16, dtype=torch.float64)
    weights = dict(model.named_parameters())

    def with_gradients(y):
        inputs = list(weights.values())
        gradients = torch.autograd.grad(y, inputs, dy)
        return {"features": y, **dict(zip(weights, gradients))}

    packed = with_gradients(model.features(tokens, bounds))
    expected = with_gradients(alone.view(3, 37, 16))
    assert_close(packed, expected, atol=1e-8, rtol=1e-8)
    _, loss = model(tokens, tokens, bounds)
    logits = F.linear(alone, model.output_matrix(alone))
    assert_close(loss, lm.mean_loss(logits, row))


@every_family
def test_nothing_crosses_a_border(name):
    "Replacing a document changes no bit of other documents, and their losses do not affect it."
    model, tokens, bounds = packed_case(name)
    embedded = []
    hook = model.embedding.register_forward_hook(lambda *args: embedded.append(args[2]))
    features = model.features(tokens, bounds).flatten(0, 1)
    hook.remove()
    for first, last in zip(bounds, bounds[1:]):
        other = tokens.clone()
        document = other.view(-1)[first:last]
        document.copy_((document + 5) % 40)
        with torch.no_grad():
            other_features = model.features(other, bounds).flatten(0, 1)
        same = (features == other_features).all(1)
        assert same[:first].all()
        assert same[last:].all()
        assert not same[first:last].any()
        loss = features[first:last].sum()
        (reached,) = torch.autograd.grad(loss, embedded, retain_graph=True)
        sizes = reached.flatten(0, 1).abs()
        reached = sizes.sum(1)
        assert reached[first:last].all()
        assert reached.count_nonzero() == last - first


# parameter counts


@pytest.mark.parametrize(
    "d_model, n_layer, mixer, millions",
    [
        (768, 24, "mamba", 129.15),
        (768, 24, "longhorn", 128.56),
        (1024, 48, "mamba", 371.54),
        (1024, 48, "longhorn", 369.97),
    ],
)
def test_published_parameter_counts(d_model, n_layer, mixer, millions):
    config = LMConfig(50304, d_model, n_layer, mixer)
    count = count_parameters(config)
    assert round(count / 1e6, 2) == millions


@every_family
@pytest.mark.parametrize("draw", [0, *map(slow_case, range(1, 6))])
def test_models_of_all_kinds_can_be_matched(name, draw):
    "A model's width or MLP can be chosen to match the size of another model within 1 %."
    rng = random.Random(f"{name} {draw}")  # a different size for every mixer
    base = rng.choice(["longhorn", "attention", "gla"])
    d_model = rng.choice([64, 96, 128])
    d_mlp = rng.choice([0, 160])
    n_layer = rng.randint(1, 4)
    target = count_parameters(LMConfig(256, d_model, n_layer, base, d_mlp=d_mlp))
    matched = match_parameters(LMConfig(256, d_model, n_layer, name, d_mlp=d_mlp), target)
    count = SequenceLM(matched).num_parameters()
    assert abs(count / target - 1) <= 0.01
    assert matched.mixer == name
    assert matched.n_layer == n_layer
    assert matched.vocab_size == 256


def test_what_fits_is_left_alone_and_what_cannot_fit_says_so():
    config = LMConfig(256, 64, 2)
    assert match_parameters(config, count_parameters(config) + 3) is config
    with pytest.raises(
        ValueError, match="no longhorn model within 1.0% of 10 parameters; nearest: "
    ):
        match_parameters(config, 10)


# Generation


@every_mixer
def test_same_seed_same_tokens(name):
    "Only the seed determines generated tokens, not the global generator."
    model = make(mixer=name)
    prompt = torch.randint(40, (2, 3))
    torch.manual_seed(1)
    first = model.generate(prompt, 12, seed=5)
    torch.manual_seed(2)
    assert torch.equal(first, model.generate(prompt, 12, seed=5)), "the global generator matters"
    other = model.generate(prompt, 12, seed=6)
    assert not torch.equal(first, other)
    tokens = list(model.stream(prompt, 12, seed=5))
    drawn = torch.stack(tokens, 1)
    expected = torch.cat([prompt, drawn], 1)
    assert torch.equal(first, expected)


def test_the_former_name_of_max_new_tokens_works_and_warns():
    model = make()
    prompt = torch.randint(40, (2, 3))
    expected = model.generate(prompt, max_new_tokens=4, seed=5)
    with pytest.warns(DeprecationWarning, match="n_new is max_new_tokens now"):
        tokens = model.generate(prompt, n_new=4, seed=5)
    assert torch.equal(tokens, expected)
    with pytest.warns(DeprecationWarning, match="n_new is max_new_tokens now"):
        drawn = list(model.stream(prompt, n_new=4, seed=5))
    result = torch.stack(drawn, 1)
    continued = expected[:, 3:]
    assert torch.equal(result, continued)


def test_greedy_is_the_best_token_at_every_step():
    model = make()
    prompt = torch.randint(40, (2, 3))
    out = model.generate(prompt, 9, temperature=0)
    for t in range(3, 12):
        prefix = out[:, :t]
        logits = model(prefix)[:, -1]
        result = out[:, t]
        expected = logits.argmax(-1)
        assert torch.equal(result, expected)
    for options in (
        dict(top_k=1, seed=0),
        dict(top_p=1e-9, seed=0),
        dict(temperature=1e-6, seed=0),
        dict(temperature=1e-40, seed=0),
    ):
        assert torch.equal(out, model.generate(prompt, 9, **options)), options
    result = model.generate(prompt.int(), 0)
    assert torch.equal(result, prompt.int())
    result = model.generate(prompt.int(), 2)
    assert result.dtype is torch.int32


@settings(max_examples=25, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=2, max_size=9, unique=True),
    k=st.integers(1, 10),
    p=st.floats(0.05, 1.0),
    temperature=st.floats(0.5, 2.0),
)
def test_tokens_are_drawn_from_the_right_set(logits, k, p, temperature):
    "Select top-k, then top-p of these, by a plain loop over sorted probabilities."
    float6 = torch.tensor(logits, dtype=torch.float64)
    scaled = float6 / 4 / temperature
    order = scaled.argsort(descending=True)
    best = order[:k].tolist()
    weights = [math.exp(scaled[i]) for i in best]
    kept = []
    mass = 0.0
    for token, weight in zip(best, weights):
        if mass >= p - 1e-6 and kept:
            break
        kept.append(token)
        mass += weight / sum(weights)
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor(logits, dtype=torch.float32) / 4
    rows = row.expand(2000, -1)
    drawn = sample(rows, temperature, k, p, generator)
    assert set(drawn.tolist()) <= set(kept)
    for token, weight in zip(kept, weights):
        total = sum(weights[: len(kept)])
        expected = weight / total
        hits = (drawn == token).float()
        share = hits.mean().item()
        reach = 5 * math.sqrt(expected / 2000)
        assert abs(share - expected) < reach + 0.002


def test_equal_logits_do_not_break_the_settings():
    flat = torch.zeros(500, 6)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(flat, 1.0, None, 1.0, generator)
    assert len(drawn.unique()) == 6
    drawn = sample(flat, 1.0, 2, None, generator)
    assert len(drawn.unique()) == 2
    drawn = sample(flat, 1.0, None, 0.5, generator)
    assert len(drawn.unique()) == 3
    expected = flat.argmax(-1)
    assert torch.equal(sample(flat, top_k=1), expected)


# Files


@pytest.mark.parametrize("tied", (True, False))
def test_round_trip(tmp_path, tied):
    from safetensors.torch import load_file

    model = make(
        mixer="longhorn_exact",
        mixer_options=dict(d_state=4),
        d_mlp=24,
        dropout=0.1,
        tie_embeddings=tied,
    )
    folder = tmp_path / "a" / "b"
    model.save_pretrained(folder)
    loaded = SequenceLM.from_pretrained(str(folder))
    assert loaded.config == model.config
    assert not loaded.training
    for parameter in loaded.parameters():
        assert parameter.requires_grad
    state = loaded.state_dict()
    expected_keys = model.state_dict().keys()
    assert state.keys() == expected_keys
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    names = os.listdir(folder)
    assert sorted(names) == ["config.json", "model.safetensors"]
    names = load_file(folder / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied
    assert "embedding.weight" in names
    count = loaded.num_parameters()
    expected = model.num_parameters()
    assert count == expected


def test_normalised_keys_belong_to_the_config_and_the_file(tmp_path):
    "With the option, a file has one more number per block, and models without it reject it."
    plain = make()
    model = make(mixer_options=dict(key_norm=True))
    assert count_parameters(model.config) == model.num_parameters() == plain.num_parameters() + 2
    with torch.no_grad():
        model.blocks[1].mixer.key_scale.fill_(3.5)
    for name, each in (("plain", plain), ("option", model)):
        each.save_pretrained(tmp_path / name)
        loaded = SequenceLM.from_pretrained(tmp_path / name)
        tokens = torch.randint(40, (2, 7))
        assert loaded.config == each.config
        assert torch.equal(loaded(tokens), each(tokens))
    scales = {f"blocks.{i}.mixer.key_scale" for i in (0, 1)}
    names = model.state_dict().keys()
    names_without = plain.state_dict().keys()
    result = names - names_without
    assert result == scales
    weights = tmp_path / "plain" / WEIGHTS
    weights.replace(tmp_path / "option" / WEIGHTS)
    with pytest.raises(ValueError, match="was saved with a config other than"):
        SequenceLM.from_pretrained(tmp_path / "option")
    state = plain.state_dict()
    official = {official_name(name): weight for name, weight in state.items()}
    with pytest.raises(ValueError, match="lacks backbone.layers.0.mixer.key_scale"):
        load_official_state_dict(official, model.config)


def test_dtype_is_kept_or_chosen(tmp_path):
    model = make().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = SequenceLM.from_pretrained(tmp_path)
    assert loaded.embedding.weight.dtype is torch.bfloat16
    chosen = SequenceLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert chosen.norm.weight.dtype is torch.float32


WEIGHTS = "model.safetensors"
CONFIG = "config.json"
DAMAGE = {
    "cut": (WEIGHTS, lambda held: held[:-100]),
    "empty": (WEIGHTS, lambda held: b""),
    "garbage": (WEIGHTS, lambda held: os.urandom(5000)),
    "json": (CONFIG, lambda held: b'{"vocab_size": '),
    "bytes": (CONFIG, lambda held: b"\xff\xfe\x00"),
    "list": (CONFIG, lambda held: b"[1, 2]"),
    "key": (CONFIG, lambda held: b'{"vocab": 12}'),
    "value": (CONFIG, lambda held: b'{"n_layer": "two"}'),
    "other config": (CONFIG, lambda held: held.replace(b'"d_model": 16', b'"d_model": 32')),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_model_names_the_file(tmp_path, how):
    make().save_pretrained(tmp_path)
    file, damage = DAMAGE[how]
    held = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(damage(held))
    assert damage(held) != held
    with pytest.raises(ValueError, match=WEIGHTS if how == "other config" else file) as error:
        SequenceLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_flipped_bit_of_a_model_is_silent(tmp_path, dtype):
    model = make().to(dtype)
    model.save_pretrained(tmp_path)
    path = tmp_path / WEIGHTS
    chance = random.Random(0)
    held = path.read_bytes()
    size = int.from_bytes(held[:8], "little")
    header = 8 + size
    in_tensors = [chance.randrange(header, len(held)) for _ in range(80)]
    in_header = range(0, header, 7)
    for at in [*in_header, *in_tensors, len(held) - 1]:
        damaged = bytearray(held)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=WEIGHTS):
            SequenceLM.from_pretrained(tmp_path)
    path.write_bytes(held)
    loaded = SequenceLM.from_pretrained(tmp_path)
    assert loaded.embedding.weight.dtype is dtype


def test_models_of_earlier_versions_without_a_digest_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    config = json.dumps(model.config.to_dict(), indent=1)
    for metadata in (None, {"format": "pt"}, {"format": "pt", "config": config}):
        save_file(state, tmp_path / WEIGHTS, metadata)
        loaded = SequenceLM.from_pretrained(tmp_path)
        assert torch.equal(loaded.embedding.weight, model.embedding.weight)


def test_a_config_of_a_billion_blocks_is_refused_before_they_are_built(tmp_path):
    from safetensors.torch import load_file, save_file

    make().save_pretrained(tmp_path)
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS)
    text = (tmp_path / CONFIG).read_text()
    settings = json.loads(text)
    (tmp_path / CONFIG).write_text(json.dumps(settings | {"n_layer": 10**9}))
    message = "tensors, too few for the 1000000000 blocks of .*config.json"
    with pytest.raises(ValueError, match=message):
        SequenceLM.from_pretrained(tmp_path)


def test_a_model_card_cannot_be_broken_by_words_of_a_record():
    command = files.as_code("longhorn --data 'a`b|c'")
    facts = {"Data": "a | b\n# c <script>\x1b[31m", "Command": command}
    card = files.model_card(LMConfig(), facts)
    assert "| Data | a \\| b # c &lt;script>\ufffd[31m |" in card
    assert "| Command | `` longhorn --data 'a`b\\|c' `` |" in card


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS, "nowhere"])
def test_a_missing_file_is_named(tmp_path, missing):
    make().save_pretrained(tmp_path)
    (tmp_path / missing).unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=missing):
        folder = tmp_path / missing if missing == "nowhere" else tmp_path
        SequenceLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("norm.weight"), "lacks norm.weight"),
        (
            lambda state: state.update(extra=torch.zeros(2)),
            "has extra, which this model does not have",
        ),
        (
            lambda state: state.update({"norm.weight": torch.zeros(3)}),
            r"norm.weight in .* has shape \(3,\); expected \(16,\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, message):
    from safetensors.torch import load_file, save_file

    make().save_pretrained(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    change(state)
    save_file(state, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=message) as error:
        SequenceLM.from_pretrained(tmp_path)
    assert WEIGHTS in str(error.value)


@pytest.mark.parametrize(
    "stop", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_save_that_breaks_off_leaves_the_old_model(tmp_path, monkeypatch, stop):
    old = make()
    old.save_pretrained(tmp_path)

    def half_a_save(state, path, metadata):
        path.write_bytes(b"half")
        raise stop

    monkeypatch.setattr(files, "save_file", half_a_save)
    with pytest.raises(type(stop)) as error:
        make(seed=1).save_pretrained(tmp_path)
    if isinstance(stop, OSError):
        assert "model.safetensors" in str(error.value)
        assert "No space left" in str(error.value)
    monkeypatch.undo()
    loaded = SequenceLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.embedding.weight, old.embedding.weight)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"], (
        "no temporary file is left"
    )


# checkpoints of the official code


def official_shapes(V, d, L, N, W=4, expand=2, mixer="longhorn"):
    "Return names and shapes of the official code's parameters."
    D = expand * d
    R = math.ceil(d / 16)
    rate = {"longhorn": "dt_head", "mamba": "dt_proj"}[mixer]
    top = "transformer."
    shapes = {
        top + "backbone.embedding.weight": (V, d),
        top + "backbone.norm_f.weight": (d,),
        top + "lm_head.weight": (V, d),
    }
    of_mixer = {
        "in_proj.weight": (2 * D, d),
        "conv1d.weight": (D, 1, W),
        "conv1d.bias": (D,),
        "x_proj.weight": (R + 2 * N, D),
        rate + ".weight": (D, R),
        rate + ".bias": (D,),
        "D": (D,),
        "out_proj.weight": (d, D),
    }
    if mixer == "mamba":
        of_mixer["A_log"] = (D, N)
    for i in range(L):
        layer = f"{top}backbone.layers.{i}."
        shapes[layer + "norm.weight"] = (d,)
        shapes |= {layer + "mixer." + name: shape for name, shape in of_mixer.items()}
    return shapes


def official_weights(seed=0, **sizes):
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in official_shapes(**sizes).items()
    }
    state["transformer.lm_head.weight"] = state["transformer.backbone.embedding.weight"]
    return state


def official_mixer(w, h, N):
    "Official Longhorn layer in float64, in its layout: channels before time, keys (B,N,T)."
    R = w["dt_head.weight"].shape[1]
    D = w["out_proj.weight"].shape[1]
    B, T, _ = h.shape
    projected = torch.einsum("ed,btd->bet", w["in_proj.weight"], h)
    u, z = projected.split(D, 1)
    padded = F.pad(u, (3, 0))
    convolved = F.conv1d(padded, w["conv1d.weight"], w["conv1d.bias"], groups=D)
    u = F.silu(convolved)
    projected = torch.einsum("ed,bdt->bet", w["x_proj.weight"], u)
    dt, k, q = projected.split([R, N, N], 1)
    projected = torch.einsum("dr,brt->bdt", w["dt_head.weight"], dt)
    bias = w["dt_head.bias"][:, None]
    dt = projected + bias
    dt = torch.sigmoid(dt)
    length = k.square().sum(1, keepdim=True)
    dt = dt / (1 + dt * length)
    x = torch.zeros(B, D, N, dtype=h.dtype)
    ys = []
    for t in range(T):
        k_t = k[..., t]
        dt_t = dt[..., t]
        forget = torch.einsum("bd,bn->bdn", dt_t, k_t.square())
        keep = 1 - forget
        write = torch.einsum("bd,bn->bdn", dt_t * u[..., t], k_t)
        x = keep * x + write
        y_t = torch.einsum("bdn,bn->bd", x, q[..., t])
        ys.append(y_t)
    skip = w["D"][:, None] * u
    y = torch.stack(ys, -1) + skip
    y = y * F.silu(z)
    return torch.einsum("ed,bdt->bte", w["out_proj.weight"], y)


def official_logits(state, tokens, L, mixer):
    w = {name.removeprefix("transformer."): tensor.double() for name, tensor in state.items()}
    h = w["backbone.embedding.weight"][tokens]
    for i in range(L):
        layer = f"backbone.layers.{i}."
        prefix = layer + "mixer."
        names = [name for name in w if name.startswith(prefix)]
        of_mixer = {name.removeprefix(prefix): w[name] for name in names}
        normed = rms(h, w[layer + "norm.weight"])
        h = h + mixer(of_mixer, normed)
    normed = rms(h, w["backbone.norm_f.weight"])
    return normed @ w["lm_head.weight"].T


def official_mamba(w, h, N):
    block = MambaBlock(MambaConfig(20, 1, d_state=N)).double()
    block.load_state_dict(w)
    return block(h)


@pytest.mark.parametrize(
    "name, layers, mixer, close",
    [("longhorn", 3, official_mixer, 1e-4), ("mamba", 2, official_mamba, 1e-3)],
)
def test_official_models_compute_the_same(name, layers, mixer, close):
    state = official_weights(V=23, d=20, L=layers, N=5, mixer=name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(23, (2, 13), generator=generator)
    model = SequenceLM(LMConfig(23, 20, layers, name, dict(d_state=5)))
    model.load_state_dict(load_official_state_dict(state, model.config))
    expected = official_logits(state, tokens, layers, lambda w, h: mixer(w, h, 5))
    assert_close(model(tokens).double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_wrappers_leave_a_prefix(prefix):
    config = LMConfig(23, 20, 2, mixer_options=dict(d_state=5))
    state = official_weights(V=23, d=20, L=2, N=5)
    removed = "" if prefix else "transformer."
    wrapped = {prefix + name.removeprefix(removed): tensor for name, tensor in state.items()}
    renamed = load_official_state_dict(wrapped, config)
    expected = state["transformer.backbone.layers.1.mixer.D"]
    assert torch.equal(renamed["blocks.1.mixer.D_skip"], expected)
    assert official_name("blocks.1.mixer.b_proj.bias") == "backbone.layers.1.mixer.dt_head.bias"


def test_untied_official_head_is_kept():
    state = official_weights(V=23, d=20, L=1, N=5)
    state["transformer.lm_head.weight"] = torch.randn(23, 20)
    options = dict(vocab_size=23, d_model=20, n_layer=1, mixer_options=dict(d_state=5))
    renamed = load_official_state_dict(state, LMConfig(**options, tie_embeddings=False))
    assert torch.equal(renamed["lm_head.weight"], state["transformer.lm_head.weight"])
    with pytest.raises(ValueError, match="differs from the embedding"):
        load_official_state_dict(state, LMConfig(**options))


NORM = "transformer.backbone.layers.1.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop(NORM), "lacks backbone.layers.1.norm.weight"),
        (
            lambda state: state.update(
                {"transformer.backbone.layers.2.norm.weight": torch.ones(20)}
            ),
            "has backbone.layers.2.norm",
        ),
        (
            lambda state: state.update({NORM: torch.ones(21)}),
            r"has shape \(21,\); expected \(20,\)",
        ),
    ],
)
def test_official_state_that_does_not_fit_is_refused(change, message):
    state = official_weights(V=23, d=20, L=2, N=5)
    change(state)
    with pytest.raises(ValueError, match=message) as error:
        load_official_state_dict(state, LMConfig(23, 20, 2, mixer_options=dict(d_state=5)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [dict(mixer="attention"), dict(mixer="longhorn_scalar"), dict(d_mlp=8)]
)
def test_official_code_has_no_such_model(options):
    with pytest.raises(ValueError, match="the official code has no"):
        load_official_state_dict({}, LMConfig(23, 20, 1, **options))


# bad input

TOKENS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda m: m(TOKENS[0]), r"tokens has shape \(3,\); expected \(B, T\)"),
        (
            lambda m: m(TOKENS.float()),
            "tokens has dtype torch.float32; expected torch.int64 or torch.int32",
        ),
        (lambda m: m(TOKENS + 40), "tokens has values from 40 to 40; expected 0 to 39"),
        (lambda m: m(TOKENS - 1), "tokens has values from -1 to -1"),
        (
            lambda m: m(TOKENS, TOKENS[:, 1:]),
            r"targets has shape \(2, 2\); expected \(2, 3\) to match tokens",
        ),
        *(
            (
                lambda m, wrong=wrong, loss=loss: loss(m, TOKENS, TOKENS + wrong),
                f"targets has the value {wrong}; expected 0 to 39, or -100",
            )
            for wrong in (77, -1)
            for loss in (lambda m, *batch: m(*batch), lambda m, *batch: m.loss(*batch, chunk=2))
        ),
        *(
            (
                lambda m, wrong=wrong, loss=loss: loss(m, TOKENS, wrong),
                f"targets is {kind}; expected integers of shape {re.escape('(2, 3)')}",
            )
            for wrong, kind in [
                (TOKENS + 0.9, "torch.float32"),
                (TOKENS > 0, "torch.bool"),
                (TOKENS.tolist(), "list"),
            ]
            for loss in (lambda m, *batch: m(*batch), lambda m, *batch: m.loss(*batch, chunk=2))
        ),
        (lambda m: m.loss(TOKENS, None), "targets is NoneType; expected integers"),
        *(
            (
                lambda m, wrong=wrong: m.step(TOKENS[:, 0], wrong(m)),
                f"cache has {count} entries; expected 2, one for each block",
            )
            for wrong, count in [
                (lambda m: m.empty_cache(2)[:1], 1),
                (lambda m: 2 * m.empty_cache(2), 4),
                (lambda m: None, 0),
            ]
        ),
        (lambda m: m.prefill(TOKENS, []), "cache has 0 entries; expected 2"),
        (
            lambda m: m.prefill(TOKENS, make(mixer="attention").empty_cache(2)),
            "cache.S is AttentionCache; expected",
        ),
        *(
            (
                lambda m, name=name, cache=cache: make(mixer=name).step(
                    TOKENS[:, 0], cache or make(mixer=name).empty_cache(3)
                ),
                message,
            )
            for name, cache, message in [
                (
                    "longhorn",
                    [None] * 2,
                    r"cache.S is NoneType; expected a tensor of shape \(B, 32, N\)",
                ),
                ("gla", [None] * 2, "cache.S is NoneType"),
                ("rwkv6", None, r"cache.S has shape \(3, 1, 16, 16\); expected \(2, 1, P, N\)"),
                ("attention", None, r"cache.k has shape \(3, 1, 0, 16\)"),
                (
                    "rwkv5",
                    make(mixer="hgrn2").empty_cache(2),
                    r"cache.past has shape \(2, 0, 0\); expected \(2, 16, 1\)",
                ),
            ]
        ),
        *(
            (
                lambda m, chunk=chunk: m.loss(TOKENS, TOKENS, chunk=chunk),
                f"chunk is {chunk}; expected an integer of at least 0",
            )
            for chunk in (-1, 1.5)
        ),
        (lambda m: m.step(TOKENS, m.empty_cache(2)), r"tokens has shape \(2, 3\); expected \(B,\)"),
        (lambda m: m.generate(TOKENS[:, :0], 2), "generation needs at least one token"),
        *(
            (lambda m, wrong=wrong: m.generate(TOKENS, **dict(max_new_tokens=2) | wrong), message)
            for wrong, message in [
                (
                    dict(max_new_tokens=-1),
                    "max_new_tokens is -1; expected an integer of at least 0",
                ),
                (dict(max_new_tokens=2.0), "max_new_tokens is 2.0; expected an integer"),
                (dict(temperature=-0.5), "temperature is -0.5; expected a number of at least 0"),
                (dict(temperature=math.nan), "temperature is nan"),
                (dict(top_k=0), "top_k is 0; expected an integer of at least 1"),
                (dict(top_p=0.0), "top_p is 0.0; expected a number above 0 and at most 1"),
                (dict(top_p=1.5), "top_p is 1.5"),
                (dict(seed="a"), "seed is 'a'"),
            ]
        ),
        *(
            (lambda m, wrong=wrong: LMConfig(**wrong), message)
            for wrong, message in [
                (dict(mixer="longhorm"), "mixer is 'longhorm'; known mixers: attention, deltanet"),
                (dict(mixer=3), "mixer is 3; expected a str"),
                (dict(vocab_size="256"), "vocab_size is '256'; expected an integer of at least 1"),
                (dict(d_model=16.0), "d_model is 16.0; expected an integer"),
                (dict(n_layer=True), "n_layer is True; expected an integer"),
                (dict(d_mlp=-4), "d_mlp is -4; expected an integer"),
                (dict(dropout=1.5), "dropout is 1.5; expected a number from 0 to 1"),
                (dict(norm_eps="small"), "norm_eps is 'small'; expected a number"),
                (dict(tie_embeddings="yes"), "tie_embeddings is 'yes'; expected a bool"),
                (dict(mixer_options=[8]), "mixer_options is of type list; expected a dict"),
            ]
        ),
        (
            lambda m: LMConfig(mixer_options=dict(rate="matrix")),
            "rate is 'matrix'; expected vector or scalar",
        ),
        (lambda m: LMConfig(mixer_options=dict(d_model=8)), "no option 'd_model'"),
        (lambda m: LMConfig(mixer_options={3: 8}), "no option '3'"),
        (
            lambda m: LMConfig(mixer="attention", mixer_options=dict(rope_base="1e4")),
            "rope_base is '1e4'; expected a number above 0",
        ),
        (
            lambda m: LMConfig(mixer="attention", d_model=15),
            "d_model is 15; rotary positions need an even size",
        ),
        (
            lambda m: LMConfig.from_dict({"vocab": 3}),
            "config has no key 'vocab'; known keys: vocab_size, d_model",
        ),
        (lambda m: match_parameters(m.config, 0), "target is 0; expected an integer of at least 1"),
    ],
)
def test_mistakes_are_told_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        wrong(make())
    assert "\n" not in str(error.value)


@every_mixer
def test_configs_survive_json(name):
    "A model's config is unchanged after a round trip through JSON."
    config = LMConfig(mixer=name, dropout=0.1, d_mlp=3)
    text = json.dumps(config.to_dict())
    result = LMConfig.from_dict(json.loads(text))
    assert result == config


def test_integers_of_numpy_are_integers():
    two = np.int64(2)
    options = dict(d_state=np.int32(3))
    model = make(d_model=np.int64(16), n_layer=two, mixer_options=options)
    json.dumps(model.config.to_dict())
    continued = model.generate(TOKENS, two, top_k=two, seed=0)
    assert continued.shape == (2, 5)
    layer = Longhorn(np.int64(16), **options)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    h = torch.ones(1, 4, 16)
    assert_close(compiled(h), layer(h))


@pytest.mark.parametrize("mixer", ("longhorn", slow_case("attention"), slow_case("mamba2")))
def test_a_model_compiles_as_one_graph_and_its_blocks_read_packed_documents(mixer):
    model, tokens, bounds = packed_case(mixer)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(tokens), model(tokens))

    def gradients():
        _, loss = model(tokens, tokens, bounds)
        parameters = list(model.parameters())
        return torch.autograd.grad(loss, parameters)

    expected = gradients()
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(dynamic=False, backend="aot_eager")
    assert_close(gradients(), expected)
