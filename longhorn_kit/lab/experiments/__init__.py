"""Experiments that test the paper's claims, and measurements of trained models."""
