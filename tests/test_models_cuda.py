"""Test models on a GPU: decoding, sampling and files are the same as on the CPU."""

import pytest
import torch
from torch.testing import assert_close

from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.models.lm import document_bounds
from mixers import every_layer, parts

pytestmark = pytest.mark.cuda


def make(name):
    torch.manual_seed(0)
    mixer, options = parts(name)
    return SequenceLM(LMConfig(40, 64, 2, mixer, options, d_mlp=96))


@every_layer
def test_gpu_agrees_with_cpu_and_decodes_what_it_trains(name):
    "On a GPU, a model gives the results of the CPU, packed or not, and decodes the same tokens."
    model = make(name)
    tokens = torch.randint(40, (2, 37))
    bounds = document_bounds(tokens, 7)
    expected = model(tokens)
    packed = model(tokens, cu_seqlens=bounds)
    model = model.cuda()
    tokens = tokens.cuda()
    assert_close(model(tokens).cpu(), expected, atol=1e-4, rtol=1e-4)
    packed_on_gpu = model(tokens, cu_seqlens=bounds.cuda())
    assert_close(packed_on_gpu.cpu(), packed, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        logits, cache = model.prefill(tokens[:, :20])
        parts = [logits]
        for t in range(20, 24):
            logits, cache = model.step(tokens[:, t], cache)
            parts.append(logits[:, None])
        logits, cache = model.prefill(tokens[:, 24:], cache)
        pieces = torch.cat([*parts, logits], 1)
        assert_close(pieces, model(tokens), atol=1e-5, rtol=1e-5)


@every_layer
def test_gpu_autocast_trains(name):
    "On a GPU, autocast changes loss and gradients little, and a scan's state stays in float32."
    model = make(name).cuda()
    tokens = torch.randint(40, (2, 33), device="cuda")
    _, plain = model(tokens, tokens)
    plain.backward()
    exact = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        logits, loss = model(tokens, tokens)
        _, cache = model.prefill(tokens)
    loss.backward()
    assert abs(loss.item() - plain.item()) < 0.02
    assert loss.dtype is torch.float32
    for n, p in model.named_parameters():
        assert (p.grad - exact[n]).norm() < 0.1 * exact[n].norm() + 1e-4, n
    if hasattr(cache[0], "S"):
        assert cache[0].S.dtype is torch.float32


@every_layer
def test_gpu_generates_and_saves(name, tmp_path):
    "On a GPU, a seed determines the tokens, and a saved model loads in bfloat16."
    model = make(name).cuda()
    prompt = torch.randint(40, (2, 5), device="cuda")
    first = model.generate(prompt, 9, seed=1, top_k=10, top_p=0.9)
    assert first.is_cuda
    assert torch.equal(first, model.generate(prompt, 9, seed=1, top_k=10, top_p=0.9))
    model.save_pretrained(tmp_path)
    loaded = SequenceLM.from_pretrained(tmp_path, device="cuda", dtype=torch.bfloat16)
    assert loaded.generate(prompt, 4, temperature=0).shape == (2, 9)
