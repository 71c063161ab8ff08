"""Bounds of every integer that a kernel computes, from the numbers of one launch: no product or sum of 32 bits may pass 2^31.

    python tests/int_ranges.py             # one JSON object per launch: kernel, what overflows, the largest offset of every pointer

Launches of sizes that no GPU holds are recorded on meta tensors and compiled (kernels/aot.py). Then the compiler's
intermediate code is read from top to bottom with an interval for every integer.
"""

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
    return (-1 if (a < 0) != (b < 0) else 1) * (abs(a) // abs(b))


RULES = {
    "addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "muli": lambda a, b: corners(int.__mul__, a, b),
    "divsi": lambda a, b: corners(divide, a, b),
    "remsi": lambda a, b: (
        0 if a[0] >= 0 else 1 - max(map(abs, b)),
        min(a[1], max(map(abs, b)) - 1),
    ),
    "minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
}


class Reader:
    "The code of one kernel; `given`: bounds of its integer arguments, of program numbers, and of integers in memory by pointer."

    def __init__(self, text, given, programs, stored):
        self.lines = [re.sub(r"\s+loc\(.*", "", line).strip() for line in text.splitlines()]
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
                r"(%[\w:]+) = scf\.for (%\w+) = (%\w+) to (%\w+) step (%\w+)(?: iter_args\((.*?)\))?",
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
        yields = re.findall(r"%[\w#]+", self.lines[end].split(" : ")[0])
        name = results.split(":")[0]
        for j, (inside, before) in enumerate(re.findall(r"(%\w+) = (%[\w#]+)", carried)):
            for after in (inside, f"{name}#{j}", name):
                self.base.setdefault(after, self.base.get(before))
            if (
                before in self.known
            ):  # a number that is carried: a position in a ring, which stays below its size
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
                self.known[inside] = self.known[f"{name}#{j}"] = fixed or None

    def operation(self, result, kind, rest):
        types = re.findall(r"(?:\b|x)(i\d+)(?=[,>]|$)", rest.split(" : ")[-1])
        names = re.findall(r"%[\w#-]+", rest)
        args = [self.known.get(n) for n in names]
        if kind == "constant":
            if m := re.match(r"(?:dense<)?(-?\d+|true|false)>? : .*(?:\b|x)i\d+\b", rest):
                self.known[result] = (int(m[1]),) * 2 if m[1] not in ("true", "false") else (0, 1)
        elif kind == "get_program_id":
            self.known[result] = 0, self.programs - 1
        elif kind == "make_range":
            end, start = map(int, re.search(r"end = (\d+) : i32, start = (\d+)", rest).groups())
            self.known[result] = start, end - 1
        elif kind == "addptr":
            self.pointer(result, *names[:2])
        elif (
            kind == "load" and names and types and self.base.get(names[0], names[0]) in self.stored
        ):
            self.known[result] = self.stored[self.base.get(names[0], names[0])]
        elif kind in SAME:
            self.base[result], self.offset[result] = (
                self.base.get(names[0], names[0]),
                self.offset.get(names[0], (0, 0)),
            )
            self.known[result] = args[0]
        elif kind == "select" and all(args[1:3]):
            self.known[result] = min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
        elif kind in RULES and len(args) == 2 and all(args) and types:
            self.known[result] = RULES[kind](*args)
            if (
                types[0] == "i32"
                and max(-self.known[result][0] - 1, self.known[result][1]) > 2**31 - 1
            ):
                self.overflows.add(f"{result} = {kind} {rest.split(' : ')[0]}")

    def pointer(self, result, before, by):
        base = self.base.get(before, before)
        moved = self.known.get(by)
        self.base[result] = base
        if moved is None:
            self.overflows.add(f"{by} moves {base} and has no bounds")
            return
        far = tuple(map(sum, zip(self.offset.get(before, (0, 0)), moved)))
        self.offset[result] = far
        self.largest[base] = max(self.largest.get(base, 0), far[1])


def bounds(launch, text, programs, sequences, T):
    "Return what one recorded launch reads: a `Reader` that has read."
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
    return reader, {p[1:]: (far, sizes[p]) for p, far in reader.largest.items() if p in sizes}


def intermediate(source, target, options):
    "The code of a kernel after the first stage of the compiler, with its functions inlined."
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
    return str(next(iter(stages.values()))(module, {}))


def launches(aot):
    "(case, launches, number of sequences, rows of a sequence): far more elements than 2^31, blocks x rows too."
    import torch

    from longhorn_kit.scan.triton.conv import conv_backward, conv_forward
    from longhorn_kit.scan.triton.portable import clear_outside
    from longhorn_kit.scan.triton.step import launch_step

    wide = dict(B=2048, T=8192, D=8192)
    long = dict(B=1, T=2**26, D=2048)
    packed = dict(B=1, T=2**24, D=8192, packed=8)
    for name, shape in dict(wide=wide, long=long, packed=packed).items():
        sequences = shape.get("packed") or shape["B"]
        T = shape["T"]
        for form in ("diagonal", "exact", "decoupled", "s6", "s6_time_varying"):
            yield f"fast {form} {name}", aot.fast_launches(form, **shape), sequences, T
        for form in ("diagonal", "exact", "s6_time_varying"):
            yield f"portable {form} {name}", aot.portable_launches(form, **shape), sequences, T

        def new(*s, like=torch.bfloat16):
            return torch.empty(s, device="meta", dtype=like)

        x = new(shape["B"], T, shape["D"])
        w = new(shape["D"], 4)
        cu = new(9, like=torch.int32) if "packed" in shape else None
        state = new(sequences, shape["D"], 3)
        yield (
            f"convolution {name}",
            aot.record(
                lambda: (
                    conv_forward(x, w, None, state, cu, True, True),
                    conv_backward(x, state, x, w, None, state, cu, True),
                    cu is not None and clear_outside(cu, x),
                )
            ),
            sequences,
            T,
        )
    B = 2**18
    D = 8192
    N = 16
    rows = [new(B, n) for n in (N, N, D, D)]
    yield (
        "step",
        aot.record(
            lambda: launch_step(
                "exact", *rows, None, *[new(B, D, N, like=torch.float32)] * 2, None, None, rows[2]
            )
        ),
        B,
        1,
    )


def main():
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]
    import aot
    import triton

    kernel = triton.runtime.jit.JITFunction
    # what a launch calls for tensors without memory
    grids = []
    note = kernel.warmup
    kernel.warmup = lambda self, *args, grid, **options: (
        grids.append(grid[0]) or note(self, *args, grid=grid, **options)
    )
    for case, recorded, sequences, T in launches(aot):
        for launch, programs in zip(recorded, grids[-len(recorded) :], strict=True):
            options = {n: v for n, v in launch[2].items() if n in aot.OPTIONS}
            text = intermediate(aot.source(*launch), aot.TARGETS["sm_90"], options)
            reader, far = bounds(launch, text, programs, sequences, T)
            print(
                json.dumps(
                    dict(
                        case=case,
                        kernel=launch[0].__name__,
                        overflows=sorted(reader.overflows),
                        largest=far,
                    )
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
