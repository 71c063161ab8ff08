"""Data, training, and the experiments that test the paper's claims."""
from ..extras import need

need("longhorn_kit.lab", "lab")
