"""Helpers of tests that fork."""

import os
import sys


def print_to(handle):
    "Let this process print into a pipe: Python's streams, and what a library writes itself."
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
