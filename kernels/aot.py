"""Compile the scan kernels ahead of time, without a GPU, with the options of their launchers.

    python kernels/aot.py  # table: kernel, target, registers, spills, shared memory
    python kernels/aot.py --target sm_90 --what portable --sass DIR
    python kernels/aot.py --what fast --out kernels/results/sm_90.json  # record for 16_speed
    python kernels/aot.py --triton 3.6.0 3.9.0  # with these releases, or all

The launchers run on meta tensors. Every launch is recorded but not executed, and then compiled for
the target (sm_80, sm_90, sm_100, gfx942). For a record (--out), the instructions of the main loop
are counted too, for the kernels in TURNS: a scheduler issues at most one warp instruction per
cycle, whatever the instruction does. The wavefronts of the memory instructions are also counted,
because a multiprocessor's four schedulers share one pipe for them.

--triton downloads one release after the other (200 to 300 MB each) into a temporary folder,
compiles with it in a separate process, and prints a line. The exit code is 1 if a kernel did not
compile.
"""

import argparse
import collections
import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ["TRITON_INTERPRET"] = "0"  # compile, even where the kit would interpret

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# kernel: (time steps per turn of the main loop, turns of the loops inside the main loop)
TURNS = {
    "_diagonal_fwd_kernel": (16, [2]),
    "_diagonal_adjoint_kernel": (8, []),
    "_diagonal_bwd_kernel": (16, [3, 0, 4]),
    "_exact_fwd_kernel": (16, []),
    "_exact_bwd_kernel": (16, []),
}
KINDS = dict(
    fp32=("FFMA", "FMUL", "FADD", "FMNMX", "FSEL"),
    special=("MUFU",),
    tensor=("HMMA",),
    shared=("LDS", "LDSM", "STS", "STSM"),
    memory=("LDG", "STG", "LDGSTS", "LDL", "STL"),
    lanes=("SHFL",),
    barrier=("BAR",),
)
OLDEST = (3, 6)  # oldest release of Triton that pyproject.toml allows
ROOT = pathlib.Path(__file__).resolve().parents[1]
MEMORY = ("STS", "LDG", "STG", "LDGSTS", "LDL", "STL")  # one wavefront per word of a lane
SELECTIVE = ("s6", "s6_time_varying", "decoupled")  # run by the fast kernels of the diagonal form
OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}


def record(launcher, **also):
    """Return every (kernel, arguments) that `launcher()` would launch.

    `also` is added to the arguments by name."""
    launches = []
    run = JITFunction.run

    def note(self, *args, grid=None, warmup=False, **kwargs):
        launches.append((self, args, kwargs | also))

    JITFunction.run = note
    try:
        launcher()
    finally:
        JITFunction.run = run
    return launches


def source(kernel, args, kwargs):
    """Return the compiler's input for one recorded launch.

    It consists of types, compile-time values, and the arguments that are divisible by 16."""
    values = dict(zip(kernel.arg_names, args)) | {
        n: v for n, v in kwargs.items() if n in kernel.arg_names
    }
    signature = {}
    constants = {}
    attrs = {}
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        if (
            param.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not param.do_not_specialize)
        ):
            signature[param.name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            divides = True
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divides = value % 16 == 0 and not param.do_not_specialize
        if divides:
            attrs[(i,)] = [["tt.divisibility", 16]]
    make = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make
    return make(kernel, signature, constants, attrs)


def build(launch, target):
    "Compile one recorded launch; return the compiled kernel and its resource use."
    kernel, args, kwargs = launch
    if target == "sm_80" and "ONE_MIN" in kwargs:
        kwargs = kwargs | dict(ONE_MIN=False)  # its launcher reads this option from the GPU
    options = {n: v for n, v in kwargs.items() if n in OPTIONS and v is not None}
    built = triton.compile(source(kernel, args, kwargs), target=TARGETS[target], options=options)
    return built, usage(built, target)


def usage(built, target):
    "Return registers, spilled bytes (NVIDIA) or registers (AMD), and bytes of shared memory."
    if target.startswith("gfx"):
        text = built.asm["amdgcn"]

        def number(key):
            return int(re.search(rf"\.{key}:\s*(\d+)", text)[1])

        return dict(
            registers=number("vgpr_count"),
            spill=number("vgpr_spill_count"),
            shared=built.metadata.shared,
        )
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(built.asm["cubin"])
        text = tool("-res-usage", path)
    registers, stack = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK"))
    return dict(registers=registers, spill=stack, shared=built.metadata.shared)


def disassemble(built):
    "Return NVIDIA machine code as (address, operation, target of a jump or None)."
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(built.asm["cubin"])
        text = tool("--dump-sass", path)
    found = []
    for address, line in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.M):
        words = re.sub(r"^@!?U?P\w+\s+", "", line).split()
        jump = re.search(r"0x([0-9a-f]+)", line) if words[0].startswith("BRA") else None
        found.append((int(address, 16), words[0], jump and int(jump[1], 16)))
    return found


def wavefronts(operation):
    """Return the fewest passes of a warp instruction through the pipe of shared memory and L1.

    A pass moves 128 bytes. Lanes that load the same address share the bytes, but the code does
    not show these lanes. So a load of 16 bytes per lane counts as two passes, and a load of 8 or 4
    bytes per lane as one."""
    name, *parts = operation.split(".")
    words = next((int(part) // 32 for part in parts if part in ("64", "128")), 1)
    if name in ("LDSM", "STSM"):
        return int(parts[-1]) if parts[-1].isdecimal() else 1
    return {"LDS": -(-words // 2), "SHFL": 1}.get(name, words if name in MEMORY else 0)


def loop_count(launch, built):
    """Count the main loop's instructions by kind, for one step of one warp's 32 channels.

    Return None for a kernel that is not in TURNS. The instructions of a channel that is spread over
    two warps count twice, because they are issued twice."""
    kernel, args, kwargs = launch
    if kernel.__name__ not in TURNS:
        return None
    names = dict(zip(kernel.arg_names, args)) | kwargs
    code = disassemble(built)
    steps, turns = TURNS[kernel.__name__]
    loops = sorted(
        ((to, at) for at, _, to in code if to is not None and to < at), key=lambda l: l[0] - l[1]
    )
    begin, end = loops[0]
    inside = sorted(l for l in loops[1:] if begin <= l[0] and l[1] <= end)
    if len(inside) != len(turns):
        raise SystemExit(
            f"aot.py: {kernel.__name__} has {len(inside)} loops in its main loop; TURNS expects "
            "otherwise"
        )
    count = collections.Counter()
    for at, operation, _ in code:
        if begin <= at <= end:
            count[operation] += next(
                (n for n, (first, last) in zip(turns, inside) if first <= at <= last), 1
            )
    scale = 32 * kwargs["num_warps"] / (names.get("BD", 32) * steps)

    def of(operations):
        return sum(n for o, n in count.items() if o.split(".")[0] in operations)

    kinds = {kind: round(scale * of(operations), 2) for kind, operations in KINDS.items()}
    total = round(scale * sum(count.values()), 2)
    passes = round(scale * sum(n * wavefronts(o) for o, n in count.items()), 2)
    return dict(
        total=total, **kinds, other=round(total - sum(kinds.values()), 2), wavefronts=passes
    )


def roundings(built, loop=False):
    """Count the sums, products and fused multiply-adds of floats in the kernel or its main loop.

    They are counted in the PTX. The assembler may fuse operations without `.rn`."""
    text = built.asm.get("ptx", "")
    if loop:
        labels = {m[1]: m.start() for m in re.finditer(r"^(\$\w+):", text, re.M)}
        jumps = ((labels[m[1]], m.end()) for m in re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", text))
        begin, end = max(jumps, key=lambda jump: jump[1] - jump[0])
        text = text[begin:end]
    return collections.Counter(re.findall(r"\b((?:fma|mul|add|sub)(?:\.\w+)*\.f32(?:x2)?)\b", text))


def unwaited(built):
    """Count the reductions and layout changes that may overlap with an asynchronous copy.

    These operations come after the main loop, without a wait for all copies. They use shared memory
    that the compiler takes from buffers after their last use, even if a copy is still filling
    them."""
    lines = built.asm["ttgir"].splitlines()
    begin = max(
        (i for i, line in enumerate(lines) if re.match(r"    (%\S+ = )?scf\.for", line)), default=0
    )
    end = next((i for i in range(begin, len(lines)) if re.match(r"    \} loc", lines[i])), 0)
    count = 0
    if any("async_copy_global_to_local" in line for line in lines[:end]):
        for line in lines[end:]:
            if "ttg.async_wait {num = 0" in line:
                break
            count += bool(re.search(r'"tt\.reduce"|ttg\.convert_layout', line))
    return count


def nan(built):
    """Count the minima and maxima of floats that (keep, drop) NaN.

    Return None for AMD, which has no separate instruction."""
    found = re.findall(r"\b(?:min|max)(\.NaN)?\.f32\b", built.asm.get("ptx", ""))
    return [found.count(".NaN"), found.count("")] if "ptx" in built.asm else None


def tool(*args):
    "Run Triton's cuobjdump."
    binary = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run(
        [str(binary), *map(str, args)], capture_output=True, text=True, check=True
    ).stdout


def inputs(
    B=8,
    T=2048,
    D=2048,
    N=16,
    dtype=torch.bfloat16,
    keys=None,
    form="diagonal",
    z=True,
    state=True,
    packed=None,
):
    "Return arguments of a scan on the meta device; `packed` sequences need B = 1."

    def new(*s, like=dtype):
        return torch.empty(s, dtype=like, device="meta")

    A = dict(s6=new(D, N, like=torch.float32), s6_time_varying=new(B, T, N)).get(form)
    return dict(
        q=new(B, T, N, like=keys or dtype),
        k=new(B, T, N, like=keys or dtype),
        x=new(B, T, D),
        b=new(B, T, D),
        bias=new(D, like=torch.float32),
        skip=new(D, like=torch.float32),
        z=new(B, T, D) if z else None,
        A=A,
        initial_state=new(packed or B, D, N, like=torch.float32) if state else None,
        cu_seqlens=new(packed + 1, like=torch.int32) if packed else None,
    )


def portable_launches(form, checkpoint_every=None, packed=None, **shape):
    "Record the launches of the portable forward and backward."
    from longhorn_kit.scan.triton.portable import portable_forward, portable_plan
    from longhorn_kit.scan.triton.portable_backward import portable_backward

    a = inputs(form=form, packed=packed, **shape)
    B, T, D = a["x"].shape
    N = a["k"].shape[-1]
    forward, backward = (
        portable_plan(form, B, T, D, N, packed, way, checkpoint_every)
        for way in ("forward", "backward")
    )

    def launch():
        out, final, ckpt = portable_forward(forward, **a)
        rest = {n: v for n, v in a.items() if n != "initial_state"}
        portable_backward(
            backward, out, final if a["initial_state"] is not None else None, ckpt, **rest
        )

    return record(launch)


def fast_launches(form, packed=None, backward=True, **shape):
    """Record the launches of a fast forward and backward.

    Without the backward, record a forward that computes only states (`read=False`) if the form has
    one."""
    from longhorn_kit.scan.triton.selective import selective_plan

    name = "diagonal" if form in SELECTIVE else form
    pages = [
        importlib.import_module(f"longhorn_kit.scan.triton.{name}{way}")
        for way in ("", "_backward")
    ]
    plan, run_forward, run_backward = (
        next(getattr(page, f"{name}_{part}") for page in pages if hasattr(page, f"{name}_{part}"))
        for part in ("plan", "forward", "backward")
    )
    a = inputs(form=form, packed=packed, **shape)
    B, T, D = a["x"].shape
    N = a["k"].shape[-1]
    if form in SELECTIVE:
        plan = functools.partial(selective_plan, form)
    if a["A"] is None:
        a.pop("A")

    only = {} if backward else dict(read=False)
    made = []
    launches = record(
        lambda: made.extend(run_forward(plan(B, T, D, N, packed), **a, **only)), way="forward"
    )
    if backward:
        rest = {n: v for n, v in a.items() if n != "initial_state"}
        launches += record(
            lambda: run_backward(plan(B, T, D, N, packed, direction="backward"), *made, **rest),
            way="backward",
        )
    return launches


def pointwise_launches():
    """Record the launches of the loss, the norm of a stream, and the scaling of keys.

    The loss has 8192 positions, the stream has width 768, and keys have 16 numbers. Backwards are
    included."""
    from longhorn_kit.scan.triton import pointwise

    def new(*s, like=torch.bfloat16):
        return torch.empty(s, dtype=like, device="meta")

    def launch():
        pointwise.cross_entropy_(
            new(8192, 50304)[:, :50257], new(8192, like=torch.int64), new(8192, like=torch.float32)
        )
        h = new(64, 1024, 768, like=torch.float32)
        weight = new(768, like=torch.float32)
        s, n, r = pointwise._add_norm(h, new(*h.shape), weight, 1e-5, torch.bfloat16)
        pointwise._add_norm_backward(n, s, s, r, weight, torch.float32, torch.bfloat16)
        k = new(64, 1024, 48 + 32)[..., 48:64]
        length = new(1, like=torch.float32)
        pointwise._to_length_backward(pointwise._to_length(k, length), k, length)

    return record(launch)


def portable_cases():
    "Yield (name, launches) of the kernels that run every recurrence."
    for form in ("diagonal", "exact", "decoupled", "s6", "s6_time_varying"):
        yield f"{form} N=16", portable_launches(form)
    for form in ("diagonal", "exact"):
        yield f"{form} N=64", portable_launches(form, N=64)
        yield f"{form} N=16 fp32", portable_launches(form, dtype=torch.float32)
    for form in ("decoupled", "s6", "s6_time_varying"):
        yield f"{form} N=64", portable_launches(form, N=64)
    for form in ("diagonal", "exact", "s6"):
        yield (
            f"{form} N=16 small",
            portable_launches(form, checkpoint_every=64),
        )  # the backward rebuilds states: mode 3
    yield "diagonal N=16 packed", portable_launches("diagonal", packed=3, B=1)
    yield "diagonal N=128", portable_launches("diagonal", N=128)
    yield "exact N=128", portable_launches("exact", N=128)


def fast_cases():
    "Yield (name, launches) of the kernels for NVIDIA GPUs."
    for form in ("diagonal", "exact"):
        yield f"fast {form}", fast_launches(form)
        yield f"fast {form} ragged", fast_launches(form, B=1, T=2001, D=2008)
        yield f"fast {form} bare", fast_launches(form, z=False, state=False)
    yield "fast exact odd T", fast_launches("exact", T=2041)
    yield "fast exact odd D", fast_launches("exact", D=2040)
    yield "fast diagonal N=32", fast_launches("diagonal", N=32)
    yield "fast diagonal N=64", fast_launches("diagonal", N=64)
    yield "fast exact N=64", fast_launches("exact", N=64)
    yield "fast exact N=128", fast_launches("exact", N=128)
    for form in (
        "exact",
        "diagonal",
        "s6",
        "decoupled",
    ):  # shapes of bench.py; the first is the default
        yield f"fast {form} S2", fast_launches(form, B=24, T=1024, D=1536)
        yield f"fast {form} S3", fast_launches(form, B=1, T=32768, D=4096)
    yield (
        "fast diagonal many",
        fast_launches("diagonal", B=64, T=1024),
    )  # programs of 128 channels
    yield "fast diagonal many ragged", fast_launches("diagonal", B=33, T=1025, D=2044)
    for form in ("diagonal", "exact"):
        yield f"fast {form} packed", fast_launches(form, packed=3, B=1, T=2001)
        yield f"fast {form} narrow", fast_launches(form, D=24)
        yield f"fast {form} D=2044", fast_launches(form, D=2044)  # copies of 8 bytes
        yield f"fast {form} D=2046", fast_launches(form, D=2046)  # copies of 4 bytes
        yield (
            f"fast {form} D=2047",
            fast_launches(form, D=2047),
        )  # copies of single elements, through registers
        yield f"fast {form} fp32", fast_launches(form, dtype=torch.float32, keys=torch.bfloat16)
    yield "fast diagonal fp16", fast_launches("diagonal", dtype=torch.float16)
    yield "fast diagonal N=128", fast_launches("diagonal", N=128)
    yield "fast diagonal N=64 segments", fast_launches("diagonal", B=1, T=2001, N=64)
    yield "fast exact N=32", fast_launches("exact", N=32)
    yield "fast exact N=32 D=2046", fast_launches("exact", D=2046, N=32)
    yield "fast exact N=64 few", fast_launches("exact", B=1, T=2041, D=520, N=64)
    for form in SELECTIVE:
        yield f"fast {form}", fast_launches(form)
        yield f"fast {form} many", fast_launches(form, B=64, T=1024)  # without segments
        yield f"fast {form} ragged", fast_launches(form, B=64, T=2001, D=2008)
        yield f"fast {form} bare", fast_launches(form, B=64, z=False, state=False)
        yield f"fast {form} N=32", fast_launches(form, B=64, N=32)
        yield f"fast {form} N=64", fast_launches(form, B=64, N=64)
        yield f"fast {form} D=2047", fast_launches(form, B=64, D=2047)
    yield "fast exact states", fast_launches("exact", backward=False)


def cases(what):
    "Yield (name, launches) of all cases to compile."
    if what in ("portable", "all"):
        yield from portable_cases()
    if what in ("fast", "all"):
        yield from fast_cases()
    if what in ("pointwise", "all"):
        yield "loss and norm", pointwise_launches()


def releases(asked):
    """Return the requested releases of Triton, or with "all" those that pip finds.

    The oldest release comes first."""
    if asked != ["all"]:
        return asked
    said = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "triton"], capture_output=True, text=True
    ).stdout
    found = re.search(r"Available versions: (.*)", said)
    if not found:
        raise SystemExit(
            "aot.py: pip cannot list the releases of Triton; name them, as in --triton 3.6.0 3.9.0"
        )
    return [v for v in found[1].split(", ")[::-1] if tuple(map(int, v.split(".")[:2])) >= OLDEST]


def with_release(version, words):
    """Run this program with another Triton and return (rows, reason for stopping or None).

    `version` is a release, or a folder that contains one."""
    with tempfile.TemporaryDirectory() as folder:
        if pathlib.Path(version).is_dir():
            here = os.path.abspath(version)
        else:
            here = folder
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "-qq",
                    "--no-deps",
                    "--no-compile",
                    "--no-cache-dir",
                    "--disable-pip-version-check",
                    "--target",
                    folder,
                    f"triton=={version}",
                ],
                check=True,
            )
        env = os.environ | dict(
            PYTHONPATH=os.pathsep.join([here, str(ROOT)]),
            TRITON_CACHE_DIR=str(pathlib.Path(folder, "cache")),
        )
        done = subprocess.run(
            [sys.executable, __file__, "--json", "--keep-going", *words],
            env=env,
            capture_output=True,
            text=True,
        )
    errors = [
        line
        for line in done.stderr.splitlines()
        if re.match(r"\w+(Error|Exception)\b|aot.py", line)
    ]
    return [json.loads(line) for line in done.stdout.splitlines()], (errors or ["it stopped"])[
        -1
    ] if done.returncode else None


def try_releases(args):
    """Compile with one release after the other; print a line per release.

    Return one dictionary per release."""
    found = []
    print("triton     compiled  failed  spilling  most spilled, bytes")
    for version in releases(args.triton):
        rows, stopped = with_release(
            version, ["--what", "fast", "--only", args.only, "--target", *args.target]
        )
        built = [row for row in rows if "error" not in row]
        failed = [
            f"{row['case']}, {row['kernel']}: {row['error']}" for row in rows if "error" in row
        ] + [stopped] * bool(stopped)
        spills = [row["spill"] for row in built if row["spill"]]
        found.append(
            dict(
                triton=version,
                compiled=len(built),
                failed=failed,
                spilling=len(spills),
                most=max(spills, default=0),
            )
        )
        print(
            f"{version:<10} {len(built):>8}  {len(failed):>6}  {len(spills):>8}  "
            f"{max(spills, default=0):>6}",
            *failed[:3],
            sep="\n  ",
            flush=True,
        )
    return found


def reported(name, launch, target, args):
    "Compile a launch and return its row."
    row = dict(case=name, kernel=launch[0].__name__, mode=launch[2].get("MODE"), target=target)
    try:
        built, used = build(launch, target)
    except Exception as error:
        if not args.keep_going:
            raise
        return row | dict(error=f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}")
    row |= dict(
        **used,
        unwaited=unwaited(built),
        nan=nan(built),
        loose=sum(n for operation, n in roundings(built).items() if ".rn" not in operation),
    )
    if args.out and not target.startswith("gfx"):
        row |= dict(way=launch[2].get("way"), instructions_per_step=loop_count(launch, built))
    if args.sass and not target.startswith("gfx"):
        args.sass.mkdir(parents=True, exist_ok=True)
        stem = f"{name.replace(' ', '_')}-{row['kernel']}-{row['mode']}-{target}"
        cubin = args.sass / f"{stem}.cubin"
        cubin.write_bytes(built.asm["cubin"])
        (args.sass / f"{stem}.sass").write_text(tool("--dump-sass", cubin))
        (args.sass / f"{stem}.ttgir").write_text(built.asm.get("ttgir", ""))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=["sm_90"], choices=list(TARGETS))
    parser.add_argument("--what", default="all", choices=["all", "portable", "fast", "pointwise"])
    parser.add_argument(
        "--only", default="", help="regular expression that the case's name must contain"
    )
    parser.add_argument("--sass", type=pathlib.Path, help="folder for the disassembly")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line instead of the table"
    )
    parser.add_argument("--out", type=pathlib.Path, help="record to write")
    parser.add_argument(
        "--triton",
        nargs="+",
        metavar="VERSION",
        help="releases to try, or folders that contain one; all: every release",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="continue after a kernel that does not compile"
    )
    args = parser.parse_args()
    rows = []
    if args.triton:
        rows = try_releases(args)
    for name, launches in cases(args.what) if not args.triton else ():
        for launch in launches if re.search(args.only, name) else ():
            for target in args.target:
                if launch[0].is_gluon() and target.startswith("gfx"):
                    continue
                row = reported(name, launch, target, args)
                rows.append(row)
                print(
                    json.dumps(row)
                    if args.json
                    else row.get("error")
                    or f"{name:<20} {row['kernel']:<20} mode {row['mode']}  {target:<7} "
                    f"registers {row['registers']:>3}  "
                    f"spilled {row['spill']:>4} B  shared {row['shared']:>6} B",
                    flush=True,
                )
    if args.out:
        write_record(args.out, rows)
    return any(row.get("failed") or "error" in row for row in rows)


def write_record(path, rows):
    "Write the rows and what they depend on, one row per line."
    from longhorn_kit.records import commit_of_kit

    about = dict(
        triton=triton.__version__,
        commit=commit_of_kit(),
        command=" ".join(["python kernels/aot.py", *sys.argv[1:]]),
        unit="instructions_per_step: warp instructions of the main loop for one step of 32 "
        "channels",
    )
    head = json.dumps(about, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    part = path.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
