"""Cells of a page as code that Triton can compile."""

import linecache


def define(source, space, name):
    "Run a source as if it came from a file, so that Triton can read its kernels."
    lines = source.splitlines(True)
    linecache.cache[name] = (len(source), None, lines, name)
    exec(compile(source, name, "exec"), space)
    return space
