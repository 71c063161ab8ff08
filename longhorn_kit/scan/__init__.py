"""The recurrences over whole sequences: reference, chunked, and the public operation."""
from .op import FORMS, longhorn_scan, longhorn_step, selective_scan, selective_step
from .short_conv import causal_conv1d, causal_conv1d_step

__all__ = ["FORMS", "longhorn_scan", "longhorn_step", "selective_scan", "selective_step", "causal_conv1d",
           "causal_conv1d_step"]
