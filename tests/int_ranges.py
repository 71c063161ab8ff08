"""Compute bounds of every integer in a kernel, from the numbers of one launch.

No product or sum of 32 bits may exceed 2^31.

    python tests/int_ranges.py

prints one JSON object per launch: kernel, overflows, and the largest offset of every pointer.

Launches of sizes that fit on no GPU are recorded on meta tensors and compiled (kernels/aot.py).
Then the compiler's intermediate code is read from top to bottom with an interval for every integer.
"""

import functools
import json
import math
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAME = (
    "extsi",
    "trunci",
    "splat",
    "broadcast",
    "expand_dims",
    "convert_layout",
    "reshape",
    "trans",
    "index_cast",
)


def corners(f, a, b):
    values = [f(x, y) for x in a for y in b]
    return min(values), max(values)


def divide(a, b):
    sign = -1 if (a < 0) != (b < 0) else 1
    return sign * (abs(a) // abs(b))


# Bounds of a result from the bounds (low, high) of both operands.


def add(a, b):
    return a[0] + b[0], a[1] + b[1]


def subtract(a, b):
    return a[0] - b[1], a[1] - b[0]


def multiply(a, b):
    return corners(int.__mul__, a, b)


def quotient(a, b):
    return corners(divide, a, b)


def remainder(a, b):
    largest = max(map(abs, b)) - 1
    return 0 if a[0] >= 0 else -largest, min(a[1], largest)


def smaller(a, b):
    return min(a[0], b[0]), min(a[1], b[1])


def larger(a, b):
    return max(a[0], b[0]), max(a[1], b[1])


RULES = {
    "addi": add,
    "subi": subtract,
    "muli": multiply,
    "divsi": quotient,
    "remsi": remainder,
    "minsi": smaller,
    "maxsi": larger,
}


class Reader:
    "Reader of the code of one kernel."

    def __init__(
        self,
        text,
        given,  # bounds of the kernel's integer arguments
        programs,  # number of programs
        stored,  # pointer -> bounds of the integers in its memory
    ):
        lines = text.splitlines()
        self.lines = [re.sub(r"\s+loc\(.*", "", line).strip() for line in lines]
        self.known = dict(given)
        self.programs = programs
        self.stored = stored
        self.base = {}
        self.offset = {}
        self.overflows = set()
        self.largest = {}

    def read(self):
        for i, line in enumerate(self.lines):
            if m := re.match(
                r"(%[\w:]+) = scf\.for (%\w+) = (%\w+) to (%\w+) step (%\w+)"
                r"(?: iter_args\((.*?)\))?",
                line,
            ):
                self.loop(i, *m.groups()[:4], m[6] or "")
            elif m := re.match(r"scf\.for (%\w+) = (%\w+) to (%\w+)", line):
                self.turns(*m.groups())
            elif m := re.match(r"(%[\w-]+) = \"?\w+\.([\w.]+)\"? ?(.*)", line):
                self.operation(*m.groups())
        return self

    def turns(self, turn, first, last):
        if self.known.get(first) and self.known.get(last):
            self.known[turn] = (
                self.known[first][0],
                max(self.known[first][0], self.known[last][1] - 1),
            )

    def loop(self, i, results, turn, first, last, carried):
        self.turns(turn, first, last)
        depth = 0
        end = i
        while end < len(self.lines) and not (
            self.lines[end].startswith("scf.yield") and depth == 1
        ):
            depth += self.lines[end].endswith("{") - self.lines[end].startswith("}")
            end += 1
        operands = self.lines[end].split(" : ")[0]
        yields = re.findall(r"%[\w#]+", operands)
        name = results.split(":")[0]
        for j, (inside, before) in enumerate(re.findall(r"(%\w+) = (%[\w#]+)", carried)):
            for after in (inside, f"{name}#{j}", name):
                self.base.setdefault(after, self.base.get(before))
            if (
                before in self.known
            ):  # a loop-carried number is a position in a ring, which stays below the ring's size
                ring = [
                    int(v)
                    for v in re.findall(
                        r"arith\.cmpi eq, %\w+, %c(\d+)_i32", "\n".join(self.lines[i:end])
                    )
                ]
                fixed = (
                    self.known[before]
                    if yields[j] in (inside, before)
                    else ring and (0, max(ring) - 1)
                )
                bounds = fixed or None
                self.known[inside] = self.known[f"{name}#{j}"] = bounds

    def constant(self, result, rest):
        m = re.match(r"(?:dense<)?(-?\d+|true|false)>? : .*(?:\b|x)i\d+\b", rest)
        if m:
            self.known[result] = (0, 1) if m[1] in ("true", "false") else (int(m[1]),) * 2

    def arithmetic(self, result, kind, rest, args, types):
        low, high = RULES[kind](*args)
        self.known[result] = (low, high)
        if types[0] == "i32" and max(-low - 1, high) > 2**31 - 1:
            self.overflows.add(f"{result} = {kind} {rest.split(' : ')[0]}")

    def reads_stored(self, names, types):
        "Check whether integers are loaded from memory with given bounds."
        return bool(names and types) and self.base.get(names[0], names[0]) in self.stored

    def operation(self, result, kind, rest):
        types = re.findall(r"(?:\b|x)(i\d+)(?=[,>]|$)", rest.split(" : ")[-1])
        names = re.findall(r"%[\w#-]+", rest)
        args = [self.known.get(n) for n in names]
        if kind == "constant":
            self.constant(result, rest)
        elif kind == "get_program_id":
            self.known[result] = 0, self.programs - 1
        elif kind == "make_range":
            ends = re.search(r"end = (\d+) : i32, start = (\d+)", rest).groups()
            end, start = map(int, ends)
            self.known[result] = start, end - 1
        elif kind == "addptr":
            self.pointer(result, *names[:2])
        elif kind == "load" and self.reads_stored(names, types):
            pointer = self.base.get(names[0], names[0])
            self.known[result] = self.stored[pointer]
        elif kind in SAME:
            base = self.base.get(names[0], names[0])
            offset = self.offset.get(names[0], (0, 0))
            self.base[result] = base
            self.offset[result] = offset
            self.known[result] = args[0]
        elif kind == "select" and all(args[1:3]):
            low = min(args[1][0], args[2][0])
            high = max(args[1][1], args[2][1])
            self.known[result] = low, high
        elif kind in RULES and len(args) == 2 and all(args) and types:
            self.arithmetic(result, kind, rest, args, types)

    def pointer(self, result, before, by):
        base = self.base.get(before, before)
        moved = self.known.get(by)
        self.base[result] = base
        if moved is None:
            message = f"{by} moves {base} and has no bounds"
            self.overflows.add(message)
            return
        before_offset = self.offset.get(before, (0, 0))
        far = tuple(map(sum, zip(before_offset, moved)))
        self.offset[result] = far
        largest = self.largest.get(base, 0)
        self.largest[base] = max(largest, far[1])


def bounds(launch, text, programs, sequences, T):
    "Read the code of one recorded launch and return the `Reader`."
    kernel, args, kwargs = launch
    values = dict(zip(kernel.arg_names, args)) | kwargs
    given = {f"%{n}": (v, v) for n, v in values.items() if type(v) is int}
    stored = {
        f"%{n}": (0, T) if n.startswith("cu") else (0, sequences - 1)
        for n in kernel.arg_names
        if n.startswith(("cu", "owner", "seq"))
    }
    reader = Reader(text, given, programs, stored).read()
    sizes = {f"%{n}": math.prod(v.shape) for n, v in values.items() if hasattr(v, "shape")}
    largest = {p[1:]: (far, sizes[p]) for p, far in reader.largest.items() if p in sizes}
    return reader, largest


def intermediate(source, target, options):
    "Return the code of a kernel after the compiler's first stage, with functions inlined."
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    stages = {}
    context = ir.context()
    options = backend.parse_options(options)
    backend.add_stages(stages, options, source.language)
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    stage = next(iter(stages.values()))
    return str(stage(module, {}))


def on_meta(*sizes, like=None):
    "Return a meta tensor, in bfloat16 unless `like` names another dtype."
    import torch

    return torch.empty(sizes, device="meta", dtype=like or torch.bfloat16)


def convolve(shape, sequences, T):
    "Run both directions of a convolution on meta tensors."
    import torch

    from longhorn_kit.scan.triton.conv import conv_backward, conv_forward
    from longhorn_kit.scan.triton.portable import clear_outside

    x = on_meta(shape["B"], T, shape["D"])
    w = on_meta(shape["D"], 4)
    cu = on_meta(9, like=torch.int32) if "packed" in shape else None
    state = on_meta(sequences, shape["D"], 3)
    conv_forward(x, w, None, state, cu, True, True)
    conv_backward(x, state, x, w, None, state, cu, True)
    if cu is not None:
        clear_outside(cu, x)


def step(B, D, N):
    "Run a step of the exact form on meta tensors."
    import torch

    from longhorn_kit.scan.triton.step import launch_step

    q, k, x, b = (on_meta(B, n) for n in (N, N, D, D))
    state = on_meta(B, D, N, like=torch.float32)
    launch_step("exact", q, k, x, b, None, state, state, None, None, x)


def launches(aot):
    """Yield (case, launches, number of sequences, rows of a sequence).

    All have far more than 2^31 elements, and also more than 2^31 blocks x rows."""
    wide = dict(B=2048, T=8192, D=8192)
    long = dict(B=1, T=2**26, D=2048)
    packed = dict(B=1, T=2**24, D=8192, packed=8)
    for name, shape in dict(wide=wide, long=long, packed=packed).items():
        sequences = shape.get("packed") or shape["B"]
        T = shape["T"]
        for form in ("diagonal", "exact", "decoupled", "s6", "s6_time_varying"):
            recorded = aot.fast_launches(form, **shape)
            yield f"fast {form} {name}", recorded, sequences, T
        for form in ("diagonal", "exact", "s6_time_varying"):
            recorded = aot.portable_launches(form, **shape)
            yield f"portable {form} {name}", recorded, sequences, T
        recorded = aot.record(functools.partial(convolve, shape, sequences, T))
        yield f"convolution {name}", recorded, sequences, T
    B = 2**18
    yield "step", aot.record(lambda: step(B, D=8192, N=16)), B, 1


def main():
    os.environ["TRITON_INTERPRET"] = "0"
    folders = [str(ROOT / "kernels"), str(ROOT)]
    sys.path[:0] = folders
    import aot
    import triton

    kernel = triton.runtime.jit.JITFunction
    # functions that a launch calls, for meta tensors
    grids = []
    warmup = kernel.warmup

    def noted(self, *args, grid, **options):
        grids.append(grid[0])
        return warmup(self, *args, grid=grid, **options)

    kernel.warmup = noted
    for case, recorded, sequences, T in launches(aot):
        last_grids = grids[-len(recorded) :]
        for launch, programs in zip(recorded, last_grids, strict=True):
            options_of_launch = launch[2].items()
            options = {n: v for n, v in options_of_launch if n in aot.OPTIONS}
            source = aot.source(*launch)
            target = aot.TARGETS["sm_90"]
            text = intermediate(source, target, options)
            reader, far = bounds(launch, text, programs, sequences, T)
            row = dict(
                case=case,
                kernel=launch[0].__name__,
                overflows=sorted(reader.overflows),
                largest=far,
            )
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
