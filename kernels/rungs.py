"""Time the teaching kernels of pages 13 and 14 on one GPU, beside the kit's fast kernels.

    python kernels/rungs.py --out kernels/results/rungs.json  # a minute
    TRITON_INTERPRET=1 python kernels/rungs.py --check  # only the checks, tiny sizes, CPU

The pages are the only source: this program runs their cells with the tag `rungs`. Every rung is
compared with the reference in float64 before it is timed, and a wrong rung is not timed. Inputs are
in bfloat16 with N = 16 and without a gate. A rung and the fast kernel are timed alternately, three
times each; both times are the smallest of three medians of triton.testing.do_bench. The time of a
backward includes the forward, for the rung and for the fast kernel.
"""

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch
import triton

import longhorn_kit  # noqa: F401, sets the interpreter's variable where there is no GPU
from longhorn_kit.records import environment, write_json
from longhorn_kit.scan.reference import reference_scan
from longhorn_kit.scan.triton.diagonal import diagonal_backward, diagonal_forward, diagonal_plan
from longhorn_kit.scan.triton.exact import exact_forward, exact_plan
from longhorn_kit.scan.triton.exact_backward import exact_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = dict(S1=(8, 2048, 2048), S3=(1, 32768, 4096))  # B, T, D
STATE = 16
EVERY = 16  # steps between two kept states
SEGMENT = 512
LIMIT = 1e-2  # relative error, with outputs in bfloat16
PAGES = dict(diagonal="13_triton_diagonal", exact="14_triton_exact")
HEADER = "import torch\nimport triton\nimport triton.language as tl\n"


def page_module(form: str):
    "Import a page's cells with the tag `rungs` from a file, because Triton reads source files."
    path = ROOT / "nbs" / "scan" / f"{PAGES[form]}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(c["source"]) for c in cells if "rungs" in c["metadata"].get("tags", ())]
    kernels = [source.partition("\nassert check_")[0] for source in sources]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="rungs-"))
    file = folder / f"rungs_{form}.py"
    file.write_text("\n\n".join([HEADER, *kernels]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(B: int, T: int, D: int, dtype: torch.dtype) -> dict:
    "Return q, k, x, b and the gradient of the outputs."
    random = torch.Generator(DEVICE).manual_seed(0)
    shapes = dict(q=(B, T, STATE), k=(B, T, STATE), x=(B, T, D), b=(B, T, D), dy=(B, T, D))
    return {
        name: torch.randn(shape, device=DEVICE, generator=random).to(dtype)
        for name, shape in shapes.items()
    }


def empty_states(x: torch.Tensor, *count: int) -> torch.Tensor:
    "Return zeros (B, *count, D, N) in float32."
    B, _, D = x.shape
    return torch.zeros(B, *count, D, STATE, device=x.device)


# ---- rungs: functions of the page's module and of the inputs, which return results by name


def one_channel(page, q, k, x, b, dy):
    y = torch.empty_like(x)
    page.by_channel(q, k, x, b, y)
    return {"y": y}


def tile_of_channels(page, q, k, x, b, dy):
    y = torch.empty_like(x)
    page.by_tile(q, k, x, b, y)
    return {"y": y}


def states_in_and_out(page, q, k, x, b, dy):
    y = torch.empty_like(x)
    kept = empty_states(x, triton.cdiv(x.shape[1], EVERY))
    page.with_states(q, k, x, b, empty_states(x), y, kept, empty_states(x), C=EVERY)
    return {"y": y}


def all_states_backward(page, q, k, x, b, dy):
    dq, dk, dx, db = (torch.empty_like(t) for t in (q, k, x, b))
    page.stored_backward(q, k, x, b, dy, dq, dk, dx, db)
    return {"q": dq, "k": dk, "x": dx, "b": db}


def checkpoint_backward(page, q, k, x, b, dy):
    dq, dk, dx, db = (torch.empty_like(t) for t in (q, k, x, b))
    page.checkpointed(q, k, x, b, dy, dq, dk, dx, db, C=EVERY)
    return {"q": dq, "k": dk, "x": dx, "b": db}


def segments(page, q, k, x, b, dy):
    y = torch.empty_like(x)
    length = SEGMENT if x.shape[1] % SEGMENT == 0 else x.shape[1] // 2
    page.segmented(q, k, x, b, empty_states(x), y, L=length)
    return {"y": y}


def step_by_step(page, q, k, x, b, dy):
    y = torch.empty_like(x)
    page.by_step(q, k, x, b, empty_states(x), y, empty_states(x))
    return {"y": y}


def chunks_with_carry(page, q, k, x, b, dy):
    y = torch.empty_like(x)
    kept = empty_states(x, triton.cdiv(x.shape[1], 16))
    page.by_chunks(q, k, x, b, empty_states(x), y, kept, empty_states(x))
    return {"y": y}


def chunk_backward(page, q, k, x, b, dy):
    dq, dk, dx, db, _ = page.gradients(q, k, x, b, dy, empty_states(x))
    return {"q": dq, "k": dk, "x": dx, "b": db}


RUNGS = [  # form, name, function, shapes
    ("diagonal", "1 one channel", one_channel, ["S1"]),
    ("diagonal", "2 a tile of channels", tile_of_channels, ["S1", "S3"]),
    ("diagonal", "3 states in and out", states_in_and_out, ["S1", "S3"]),
    ("diagonal", "4 backward, all states", all_states_backward, ["S1"]),
    ("diagonal", "5 backward, checkpoints", checkpoint_backward, ["S1", "S3"]),
    ("diagonal", "6 segments", segments, ["S1", "S3"]),
    ("exact", "1 step by step", step_by_step, ["S1", "S3"]),
    ("exact", "5 chunks with a carry", chunks_with_carry, ["S1", "S3"]),
    ("exact", "6 chunks, backward", chunk_backward, ["S1", "S3"]),
]


FAST = {
    "diagonal": (diagonal_plan, diagonal_forward, diagonal_backward),
    "exact": (exact_plan, exact_forward, exact_backward),
}


def fast_run(form: str, backward: bool, q, k, x, b, dy) -> None:
    "Run the kit's fast forward, and its backward if `backward`."
    plan, forward, pull = FAST[form]
    sizes = (*x.shape, STATE)
    _, S, kept = forward(plan(*sizes), q, k, x, b, None, None, None, None, None)
    if backward:
        backward_plan = plan(*sizes, direction="backward")
        pull(backward_plan, dy, torch.zeros_like(S), kept, q, k, x, b, None, None, None, None)


# ---- checks


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    "Return the relative error of a with respect to b; infinity if a is not finite."
    if not torch.isfinite(a).all():
        return float("inf")
    return ((a.double() - b).norm() / b.norm()).item()


def worst_error(form: str, rung, page, shape: tuple, dtype: torch.dtype) -> float:
    "Return the largest error of a rung's results, compared with the reference in float64."
    values = inputs(*shape, dtype)
    got = rung(page, **values)
    leaves = {name: values[name].double().requires_grad_() for name in "qkxb"}
    y, _ = reference_scan(*leaves.values(), form=form)
    grads = torch.autograd.grad((y * values["dy"]).sum(), list(leaves.values()))
    expected = {"y": y.detach(), **dict(zip(leaves, grads))}
    return max(relative(result, expected[name]) for name, result in got.items())


def check(forms=tuple(PAGES)) -> dict:
    "Return rung -> error of small cases; raise SystemExit if an error is too large."
    shape = (2, 64, 70) if DEVICE == "cuda" else (1, 8, 5)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    pages = {form: page_module(form) for form in forms}
    errors = {}
    for form, name, rung, _ in RUNGS:
        if form in pages:
            errors[form, name] = worst_error(form, rung, pages[form], shape, dtype)
            print(f"{form:9} {name:24} error {errors[form, name]:.1e}")
    wrong = [key for key, error in errors.items() if not error <= LIMIT]
    if wrong:
        raise SystemExit(f"wrong, so nothing is timed: {wrong}")
    return errors


# ---- times


def timed(rounds: int = 3) -> list[dict]:
    "Return one row per rung and shape, each timed alternately with the fast kernel."
    pages = {form: page_module(form) for form in PAGES}
    rows = []
    for form, name, rung, shapes in RUNGS:
        for shape in shapes:
            values = inputs(*SHAPES[shape], torch.bfloat16)
            backward = "backward" in name

            def run(rung=rung, form=form, values=values):
                rung(pages[form], **values)

            def fast(form=form, backward=backward, values=values):
                fast_run(form, backward, **values)

            times = []
            fast_times = []
            for _ in range(rounds):
                times.append(triton.testing.do_bench(run, return_mode="median"))
                fast_times.append(triton.testing.do_bench(fast, return_mode="median"))
            row = {"form": form, "rung": name, "shape": shape}
            rows.append(row | {"ms": round(min(times), 4), "fast_ms": round(min(fast_times), 4)})
            print(rows[-1])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare, without times")
    parser.add_argument("--out", type=pathlib.Path, help="file of the record")
    args = parser.parse_args()
    errors = check()
    if args.check:
        return
    if DEVICE != "cuda":
        raise SystemExit("times need a GPU; --check runs anywhere")
    rows = timed()
    record = {
        **environment(),
        "command": "python kernels/rungs.py --out " + str(args.out),
        "worst_error": {f"{form} {name}": error for (form, name), error in errors.items()},
        "rows": rows,
    }
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()
