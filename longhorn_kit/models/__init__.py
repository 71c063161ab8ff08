"""Layers and language models; `MIXERS` is the registry of layers by name."""
from . import baselines, files, matrix_mixers
from .lm import LMConfig, SequenceLM
from .mixer import MIXERS, Longhorn

__all__ = ["LMConfig", "Longhorn", "MIXERS", "SequenceLM", "baselines", "files", "matrix_mixers"]
