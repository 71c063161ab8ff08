"""Layers and language models; `MIXERS` is the registry of layers by name."""
from . import baselines, matrix_mixers
from .lm import LMConfig, SequenceLM
from .mixer import MIXERS, Longhorn
