"""Compare a module with its torch.export, which has open batch and length."""

import torch
from torch.export import Dim
from torch.testing import assert_close


def assert_exported_equals_eager(module, draw, learning, most=250):  # most: nodes of the graph
    "Compare outputs and gradients for `draw(B, T)`; `learning`: export with gradients on."

    def first(out):
        return getattr(out, "logits", out)

    def gradients(loss, model):
        parameters = dict(model.named_parameters())
        tensors = [parameters[n] for n in names]
        return torch.autograd.grad(loss, tensors, materialize_grads=True)

    with torch.set_grad_enabled(learning):
        program = torch.export.export(
            module, (draw(2, 9),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        )
    exported = program.module()
    names = [n for n, p in module.named_parameters()]
    assert len(program.graph.nodes) <= most
    for B, T in ((2, 9), (3, 40), (5, 33)):
        given = draw(B, T)
        with torch.no_grad():
            assert_close(first(exported(given)), first(module(given)))
        expected = first(module(given))
        result = first(exported(given))
        weight = torch.randn_like(expected)
        expected_gradients = gradients((expected * weight).sum(), module)
        result_gradients = gradients((result * weight).sum(), exported)
        for name, right, gradient in zip(names, expected_gradients, result_gradients):
            assert_close(gradient, right, rtol=1e-4, atol=1e-5, msg=name)
