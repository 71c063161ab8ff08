"""Helpers of tests that fork."""

import os
import sys


def print_to(handle):
    "Redirect this process's output to a pipe, for Python's streams and for native libraries."
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
