"""A module through torch.export, with open batch and length, against itself."""

import torch
from torch.export import Dim


def assert_exported_equals_eager(module, draw, learning, most=250):  # most: nodes of the graph
    "Outputs and gradients, with `draw(B, T)` as the input; `learning`: export with gradients on."

    def first(out):
        return getattr(out, "logits", out)

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
            torch.testing.assert_close(first(exported(given)), first(module(given)))
        outs = [first(m(given)) for m in (module, exported)]
        weight = torch.randn_like(outs[0])
        grads = [
            torch.autograd.grad(
                (out * weight).sum(),
                [dict(m.named_parameters())[n] for n in names],
                materialize_grads=True,
            )
            for m, out in zip((module, exported), outs)
        ]
        for name, right, found in zip(names, *grads):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, msg=name)
