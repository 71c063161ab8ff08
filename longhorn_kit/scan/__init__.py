"""The recurrences over whole sequences: reference, chunked, and the public operation."""
from .mamba import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from .mamba import mamba_inner_fn, selective_scan_fn, selective_state_update
from .op import FORMS, longhorn_scan, longhorn_step, selective_scan, selective_step
from .short_conv import causal_conv1d, causal_conv1d_step

__all__ = ["FORMS", "longhorn_scan", "longhorn_step", "selective_scan", "selective_step", "causal_conv1d",
           "causal_conv1d_step", "selective_scan_fn", "mamba_inner_fn", "causal_conv1d_fn", "causal_conv1d_update",
           "causal_conv1d_varlen_states", "selective_state_update"]
