"""Kernels in Triton and Gluon, and the operations that launch them."""
