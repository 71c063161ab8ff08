"""Train a tiny model in less than a second: text, settings, and interruptions."""

import dataclasses
import math

import numpy as np
import torch
from torch import nn

from longhorn_kit.lab.data.text import Sampler
from longhorn_kit.lab.train.loop import train
from longhorn_kit.lab.train.recipe import TrainConfig

CONFIG = TrainConfig(
    steps=60, batch_size=4, context=8, lr=1e-2, warmup=6, eval_every=15, log_every=4, save_every=10
)


def drawn_text(seed, length):
    return np.random.default_rng(seed).integers(0, 32, length).astype(np.uint8)


TOKENS = drawn_text(0, 2000)
VAL = drawn_text(1, 204)  # 203 predictions: the last window is short


class Tiny(nn.Module):
    "Small model with dropout, which reveals a random state that was not restored."

    def __init__(self, seed=0, d=16, dropout=0.2):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, d)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(d, d)
        self.head = nn.Linear(d, 32)

    def forward(self, tokens, targets):
        embedded = self.dropout(self.embed(tokens))
        hidden = torch.tanh(self.hidden(embedded))
        logits = self.head(hidden)
        flat_logits = logits.flatten(0, 1)
        flat_targets = targets.flatten()
        return logits, nn.functional.cross_entropy(flat_logits, flat_targets)


class Interrupting(Sampler):
    "Sampler that calls `what` before its n-th batch."

    def __init__(self, at, what, **options):
        super().__init__(TOKENS, CONFIG.context, CONFIG.batch_size, **options)
        self.at = at
        self.what = what

    def next_batch(self):
        step = self.drawn // self.batch_size + 1
        if step == self.at:
            self.what()
        return super().next_batch()


def run(folder=None, tokens=TOKENS, config=CONFIG, seed=0, **options):
    return train(Tiny(seed), tokens, VAL, config, folder, quiet=True, **options)


def untimed(line):
    return {name: value for name, value in line.items() if name != "tokens_per_second"}


def curve(lines):
    return [untimed(line) for line in lines]


def failing(error):
    def what(*_, **options):
        raise error

    return what


class Masked(Sampler):
    "Sampler that ignores a different number of targets in every row."

    def next_batch(self):
        inputs, targets = super().next_batch()
        start = inputs[:, :1] % self.context
        left_out = torch.arange(self.context) < start  # at least one target is kept
        return inputs, targets.masked_fill(left_out, -100)


def language_model(**options):
    from longhorn_kit.models import LMConfig, SequenceLM

    torch.manual_seed(0)
    return SequenceLM(
        LMConfig(**dict(vocab_size=32, d_model=8, n_layer=2, mixer="attention") | options)
    )


def alone(model, tokens=TOKENS, **changes):
    "Return the metrics of a run on one process."
    return train(
        model, tokens, VAL, dataclasses.replace(CONFIG, **{"steps": 20} | changes), quiet=True
    )["history"]


def same_curves(together, alone, close=1e-4):
    steps = [line["step"] for line in together]
    expected_steps = [line["step"] for line in alone]
    assert steps == expected_steps
    for name in ("loss", "grad_norm", "lr"):
        assert np.allclose(
            [line[name] for line in together], [line[name] for line in alone], rtol=close
        )
    loss = together[-1]["val_loss"]
    expected = alone[-1]["val_loss"]
    assert math.isclose(loss, expected, rel_tol=close / 10)
