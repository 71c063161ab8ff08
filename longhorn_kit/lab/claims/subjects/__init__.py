"""Comparisons and rows of the claims, one module per subject."""
