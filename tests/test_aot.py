"""Every kernel compiles without a GPU, within bounds of registers, spills and shared memory."""

import importlib.util
import json
import operator
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
import torch

from sweep import slow_case
from warm import WarmPython

ROOT = pathlib.Path(__file__).resolve().parents[1]
NVIDIA = ["sm_80", "sm_90", "sm_100"]
FAST = {
    "_diagonal_fwd_kernel",
    "_diagonal_adjoint_kernel",
    "_diagonal_bwd_kernel",
    "_exact_fwd_kernel",
    "_exact_bwd_kernel",
}
PORTABLE = {
    "_token_kernel",
    "_scan_fwd_kernel",
    "_carry_kernel",
    "_adjoint_kernel",
    "_scan_bwd_kernel",
    "_sum_kernel",
    "_rows_kernel",
}
# (registers, bytes of stack, KiB of shared memory) by number of states: the maximum over cases and
# NVIDIA targets, with a small margin. If a kernel takes all 255 registers, the stack is its bound.
BOUNDS = {
    "_diagonal_fwd_kernel": {
        16: (255, 40, 15),
        32: (176, 0, 13),
        64: (240, 0, 33),
        128: (255, 240, 41),
    },
    "_diagonal_fwd_kernel, many channels": {16: (255, 104, 35)},
    "_diagonal_adjoint_kernel": {16: (140, 0, 4), 64: (104, 16, 7)},
    "_diagonal_carry_kernel": {16: (64, 0, 0), 64: (64, 0, 0)},
    "_diagonal_bwd_kernel": {
        16: (255, 152, 31),
        32: (255, 72, 39),
        64: (255, 32, 60),
        128: (255, 72, 97),
    },
    "_exact_fwd_kernel": {
        16: (255, 0, 52),
        32: (255, 8, 29),
        64: (250, 0, 37),
        128: (255, 144, 53),
    },
    "_exact_bwd_kernel": {
        16: (255, 152, 45),
        32: (255, 352, 45),
        64: (255, 192, 36),
        128: (255, 1400, 56),
    },
    "_diagonal_fwd_kernel, another rule": {16: (255, 56, 15), 32: (248, 32, 15), 64: (255, 48, 21)},
    "_diagonal_adjoint_kernel, another rule": {16: (176, 0, 4)},
    "_diagonal_bwd_kernel, another rule": {16: (255, 40, 31), 32: (255, 16, 44), 64: (255, 40, 75)},
    "_token_kernel": {16: (40, 0, 1), 64: (40, 0, 1), 128: (40, 0, 1)},
    "_carry_kernel": {16: (40, 0, 0), 64: (40, 0, 0), 128: (40, 0, 0)},
    "_sum_kernel": {16: (68, 0, 1), 32: (68, 0, 1), 64: (68, 0, 1), 128: (68, 0, 1)},
    "_rows_kernel": {16: (64, 0, 1), 32: (64, 0, 1), 64: (64, 0, 1), 128: (64, 0, 1)},
    "_scan_fwd_kernel": {16: (255, 160, 1), 64: (255, 680, 3), 128: (255, 240, 5)},
    "_adjoint_kernel": {16: (240, 48, 3), 64: (255, 1008, 9), 128: (255, 96, 9)},
    "_scan_bwd_kernel": {16: (255, 500, 3), 64: (255, 512, 9), 128: (255, 240, 17)},
}
ODD = {  # an odd width: elements go through registers
    "_diagonal_adjoint_kernel": (144, 0, 4),
    "_diagonal_bwd_kernel": (255, 160, 31),
    "_exact_fwd_kernel": (255, 48, 52),
    "_exact_bwd_kernel": (255, 456, 37),
    "_diagonal_fwd_kernel, another rule": (224, 16, 12),
    "_diagonal_bwd_kernel, another rule": (255, 304, 31),
}
AMD = {
    "_sum_kernel": (48, 0, 1),
    "_scan_fwd_kernel": (352, 0, 9),
    "_adjoint_kernel": (376, 0, 17),
    "_scan_bwd_kernel": (512, 40, 17),
}  # AMD, of 512 registers; registers spilled


@pytest.fixture(scope="module")
def without_interpreter():
    """Return a function that runs Python code with compiled kernels and returns (output, errors).

    It does so even if the tests interpret kernels."""
    python = WarmPython(os.environ | dict(PYTHONPATH=str(ROOT), TRITON_INTERPRET="0"), ROOT)

    def run(*command):
        code, output, errors = python.run(*command)
        assert code == 0, errors[-2000:]
        return output, errors

    yield run
    python.close()


@pytest.fixture(scope="module")
def compiled(without_interpreter):
    """Return a function that returns the rows of kernels/aot.py, one per kernel and target."""

    def report(what, targets, only=""):
        output, _ = without_interpreter(
            "kernels/aot.py", "--json", "--what", what, "--only", only, "--target", *targets
        )
        return [json.loads(line) for line in output.splitlines()]

    return report


def assert_bounded(rows):
    for row in rows:
        states = int(re.search(r"N=(\d+)|$", row["case"])[1] or 16)
        amd = row["target"].startswith("gfx")
        kind = "" if "diagonal" in row["case"] else "another rule"
        if "diagonal many" in row["case"] or row["case"] == "fast diagonal S3":
            kind = "many channels"
        kernel = named if (named := f"{row['kernel']}, {kind}") in BOUNDS else row["kernel"]
        usual = AMD.get(kernel, (32, 0, 1)) if amd else BOUNDS[kernel][states]
        bound = ODD.get(kernel, usual) if row["case"].endswith("D=2047") else usual
        assert all(
            map(operator.le, (row["registers"], row["spill"], row["shared"] / 1024), bound)
        ), (row, bound)
        assert row["unwaited"] == 0, row
        assert row["loose"] == 0 or row["kernel"] in PORTABLE - {"_sum_kernel", "_rows_kernel"}, row


@pytest.mark.parametrize("targets", [slow_case(NVIDIA)])
def test_fast_kernels_compile_and_keep_what_is_no_number(compiled, targets):
    """The minimum of a logit keeps NaN.

    The minimum of a gate may drop NaN, because the gate itself is a factor. Softplus adds two
    terms, and one of them keeps NaN."""
    forms = "diagonal|exact|decoupled|s6|s6_time_varying"
    rows = compiled("fast", targets, only=f"^fast ({forms})$")
    assert_bounded(rows)
    for target in targets:
        built = [(row["case"], row["kernel"]) for row in rows if row["target"] == target]
        assert {kernel for _, kernel in built} >= FAST
        for form in ("s6", "s6_time_varying", "decoupled"):
            fast = [kernel for case, kernel in built if case == f"fast {form}" and kernel in FAST]
            assert len(fast) == 3
    for row in rows:
        keep, drop = row["nan"]
        if row["kernel"] in FAST and "s6" in row["case"]:
            assert keep == 0 < drop, row
        elif row["kernel"] == "_exact_bwd_kernel":
            assert keep == drop > 0, row
        else:
            assert drop == 0, row
            assert (keep > 0) == (row["kernel"] == "_diagonal_bwd_kernel"), row


@pytest.mark.slow
def test_portable_kernels_compile_and_keep_what_is_no_number(compiled):
    targets = [*NVIDIA, "gfx942"]
    rows = compiled("portable", targets, only="^decoupled N=16$")
    assert_bounded(rows)
    for target in targets:
        assert {r["kernel"] for r in rows if r["target"] == target} >= PORTABLE
    for row in rows:
        if row["target"] != "gfx942":
            keep, drop = row["nan"]
            assert drop == 0, row
            assert (keep > 0) == (
                row["kernel"] in ("_scan_fwd_kernel", "_adjoint_kernel", "_scan_bwd_kernel")
            ), row


@pytest.mark.parametrize("targets", [["sm_90"], slow_case(NVIDIA)])
def test_kernels_of_norms_and_losses_compile(compiled, targets):
    rows = compiled("pointwise", targets)
    assert {r["kernel"] for r in rows} == {
        "_cross_entropy_kernel",
        "_add_norm_kernel",
        "_add_norm_backward_kernel",
        "_to_length_kernel",
        "_to_length_backward_kernel",
        "_rows_kernel",
    }
    for r in rows:
        assert r["spill"] == 0
        assert r["registers"] <= (32 if r["kernel"] == "_cross_entropy_kernel" else 80)


@pytest.mark.release
@pytest.mark.parametrize(
    "what, target",
    [*(("fast", name) for name in NVIDIA), *(("portable", name) for name in (*NVIDIA, "gfx942"))],
)
def test_all_kernels_compile(compiled, what, target):
    assert_bounded(compiled(what, [target]))


@pytest.mark.release
@pytest.mark.timeout(7200)
def test_fast_kernels_compile_with_every_release_of_triton(without_interpreter, tmp_path):
    path = tmp_path / "releases.json"
    without_interpreter("kernels/aot.py", "--triton", "all", "--out", path)
    releases = json.loads(path.read_text())["rows"]
    assert len(releases) > 4
    for release in releases:
        assert release["compiled"] > 200


@pytest.mark.slow
def test_a_release_of_triton_is_tried_separately(tmp_path):
    "The installed release compiles, and a broken copy fails; local folders replace downloads."
    here = pathlib.Path(importlib.util.find_spec("triton").origin).parent
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "triton").symlink_to(here)
    (tmp_path / "broken/sitecustomize.py").write_text("""
import sys
class Moved:
    def find_spec(self, name, path=None, target=None):
        if name == "triton.experimental.gluon.language.nvidia.ampere":
            raise ImportError("moved")
sys.meta_path.insert(0, Moved())
""")
    words = [
        ROOT / "kernels/aot.py",
        "--triton",
        "whole",
        "broken",
        "--only",
        "^fast exact states$",
        "--out",
        "releases.json",
    ]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | dict(PYTHONPATH=str(ROOT), TRITON_INTERPRET="0"),
    )
    whole, broken = json.loads((tmp_path / "releases.json").read_text())["rows"]
    assert done.returncode == 1, done.stderr
    assert whole["compiled"] > 0 == len(whole["failed"]), done.stderr
    assert broken["compiled"] == 0
    assert broken["failed"] == ["ImportError: moved"]
    assert "ImportError: moved" in done.stdout


@pytest.mark.slow
def test_no_offset_of_any_kernel_passes_32_bits(without_interpreter):
    """No offset overflows with far more than 2^31 elements, and more than 2^31 blocks times rows.

    Plans and code are those of the kernels."""
    rows = [json.loads(line) for line in without_interpreter("tests/int_ranges.py")[0].splitlines()]
    assert {row["kernel"] for row in rows} >= FAST | PORTABLE | {
        "_diagonal_carry_kernel",
        "_conv_fwd_kernel",
        "_conv_bwd_kernel",
        "_step_kernel",
        "_clear_kernel",
    }
    assert not [(row["case"], row["kernel"], row["overflows"]) for row in rows if row["overflows"]]
    reached = {
        (row["kernel"], name)
        for row in rows
        for name, (far, size) in row["largest"].items()
        if far >= size - 1 > 2**31
    }
    # the reader follows these pointers to the last element, so it skipped no code
    expected = {
        "_exact_fwd_kernel": "x b z out ckpt",
        "_exact_bwd_kernel": "x b z g dx db dz dtok",
        "_diagonal_fwd_kernel": "x b z out ckpt carry",
        "_diagonal_bwd_kernel": "x b z g dx db dz dtok drate ckpt carry dA",
        "_scan_bwd_kernel": "x_ptr dx_ptr db_ptr dz_ptr dtok_ptr ckpt_ptr",
        "_sum_kernel": "dtok_ptr drate_ptr",
        "_conv_bwd_kernel": "x_ptr g_ptr dx_ptr dw_ptr",
        "_step_kernel": "state_ptr after_ptr",
        "_clear_kernel": "ptr",
    }
    for kernel, names in expected.items():
        assert {(kernel, name) for name in names.split()} <= reached, kernel


def test_another_function_of_a_rule_is_another_kernel(without_interpreter, tmp_path):
    """Triton's cache on disk must not return a kernel compiled from an older source."""
    out, _ = without_interpreter(
        "-c",
        f"""
import importlib.util, pathlib, sys
sys.path.insert(0, "kernels")
import aot
from longhorn_kit.scan.triton.diagonal_backward import DIAGONAL_RULE
TEXT = "\\n".join([
    "from triton.experimental import gluon",
    "@gluon.jit",
    "def _next(S, k, eps, x, a):",
    "    return S + (k * eps) * (",
])
def rule(folder, rest):
    path = pathlib.Path(r"{tmp_path}", folder, "rules.py")
    path.parent.mkdir()
    path.write_text(TEXT + rest)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("rules", path))
    module.__spec__.loader.exec_module(module)
    return DIAGONAL_RULE._replace(step=module._next)
kernel, args, kwargs = aot.fast_launches("diagonal")[0]
rules = [rule("one", "x - k * S)"), rule("same", "x - k * S)"), rule("other", "x + k * S)")]
print(len({{aot.source(kernel, args, kwargs | dict(RULE=r)).hash() for r in rules}}))
""",
    )
    assert out.strip() == "2"


@pytest.mark.parametrize(
    "moved, works",
    (
        ("triton.experimental.gluon.language.nvidia", "False False False"),
        ("longhorn_kit.scan.triton.exact", "True False True"),
    ),
)
def test_where_gluon_has_moved_the_portable_kernels_run_and_a_warning_says_why(
    without_interpreter, moved, works
):
    "Only the forms that need the moved part use the portable kernels."
    out, log = without_interpreter(
        "-c",
        f"""
import sys
class Moved:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("{moved}"):
            raise ImportError("moved")
sys.meta_path.insert(0, Moved())
import torch
torch.cuda.get_device_capability = lambda device: (9, 0)
from longhorn_kit.scan.triton import op as triton_op
FORMS = "diagonal", "exact", "s6"
for device in range(2):
    print(*(triton_op.fast_kernels_work(device, form, False) for form in FORMS))
""",
    )
    assert out.splitlines() == [works] * 2
    assert log.count("UserWarning") == 1
    assert re.search(
        r"portable .* with triton \S+ they cannot be imported \(ImportError: moved\)", log
    )


def test_an_unknown_triton_is_tried_once_a_form_and_not_while_a_compiler_traces(
    without_interpreter,
):
    out, log = without_interpreter(
        "-c",
        """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.get_device_capability = lambda device: (9, 0)
from longhorn_kit.scan.triton import op as triton_op
tried = []
def disagreement(device, form, wide):
    tried.append((form, wide))
    return "they are wrong" if form == "s6" else None
triton_op._disagreement = disagreement
triton_op.KNOWN_TRITON = "0.0",
ask = lambda *forms: [triton_op.fast_kernels_work(0, form, False) for form in forms]
with FakeTensorMode():
    print(ask("exact"), tried)
for _ in range(2):
    print(ask("exact", "diagonal", "s6"), tried)
""",
    )
    cached = "[False, True, False] [('diagonal', False), ('s6', False)]"
    assert out.splitlines() == ["[False] []", cached, cached]
    assert log.count("UserWarning") == 2
    assert "call one scan of form 'exact' before" in log
    assert "they are wrong" in log


@pytest.mark.parametrize(
    "form, wide, broken",
    (("exact", False, False), ("s6_given", False, False), ("diagonal", True, True)),
)
def test_a_trial_compares_fast_kernels_with_the_loop(form, wide, broken, monkeypatch):
    "On a CPU, a shorter trial runs in the kernels' emulator."
    from longhorn_kit.scan.triton import diagonal as triton_diagonal
    from longhorn_kit.scan.triton import exact as triton_exact
    from longhorn_kit.scan.triton import exact_backward as triton_exact_backward
    from longhorn_kit.scan.triton import op as triton_op
    from longhorn_kit.scan.triton import selective as triton_selective
    from longhorn_kit.scan.triton.gluon_cpu import gluon_on_cpu

    if not triton_op.INTERPRETED:
        pytest.skip("the interpreter is for machines without a GPU")
    for module in (triton_selective, triton_diagonal, triton_exact, triton_exact_backward):
        for name in {
            f"{kind}_{part}"
            for kind in ("exact", "diagonal", "selective")
            for part in ("plan", "forward", "backward")
        } & set(dir(module)):
            monkeypatch.setattr(triton_op, name, getattr(module, name), raising=False)
    if broken:
        right = triton_op.diagonal_forward
        monkeypatch.setattr(
            triton_op, "diagonal_forward", lambda *a: tuple(t * 1.1 for t in right(*a))
        )
    with gluon_on_cpu():
        result, right = triton_op._trial(form, 20, 40, 64 if wide else 16, "cpu")
        monkeypatch.setattr(triton_op, "_trial", lambda *a: (result, right))
        why = triton_op._disagreement(0, form, wide)
    assert len(result) == len(right) > 7
    assert f"'{form}' are wrong" in why if broken else why is None


def test_what_the_fast_kernels_do_not_take_is_said_once(without_interpreter):
    out, log = without_interpreter(
        "-c",
        """
import torch
from longhorn_kit.scan.triton.op import _not_taken, _portable_instead
new = lambda n, dtype=torch.bfloat16: torch.empty(1, 3, n, device="meta", dtype=dtype)
half = new(16, torch.float16)
refused = ("exact", half), ("s6", new(65))
taken = ("diagonal", half), ("exact", new(65)), ("s6_time_varying", half)
for form, k in (*refused, *taken):
    why = _not_taken(form, k, k)
    print(why)
    if why:
        _portable_instead(why), _portable_instead(why)
""",
    )
    half, own, *taken = out.splitlines()
    assert "torch.float16" in half
    assert "s6 ones" in own
    assert "N = 65" in own
    assert taken == ["None"] * 3
    assert log.count("UserWarning") == 2
    assert "keys and queries in bfloat16; got k torch.float16" in log
    assert "call under torch.autocast to bfloat16" in log


ALONE_AND_PACKED = """
import itertools, sys
sys.path.insert(0, "kernels")
from aot import SELECTIVE, build, fast_launches, roundings, torch
def versions(lengths, form, dtype, D, z):
    keys = torch.bfloat16 if form == "exact" else None
    for shape in [dict(T=T) for T in lengths] + [dict(T=2480, packed=6)]:
        for launch in fast_launches(form, B=1, D=D, dtype=dtype, keys=keys, z=z, **shape):
            name = launch[0].__name__
            pair = name == "_rows_kernel" and launch[1][2] is not None # sums of two tensors
            yield (name, launch[2].get("REVERSE") or pair), launch
FORMS = "diagonal", "exact", *SELECTIVE
"""


@pytest.mark.parametrize(
    "dtypes, widths",
    [("torch.bfloat16,", "69,"), slow_case("torch.bfloat16, torch.float32", "72, 69")],
)
def test_no_launch_of_a_sequence_alone_or_of_packed_ones_lets_the_compiler_fuse(
    without_interpreter, dtypes, widths
):
    said, _ = without_interpreter(
        "-c",
        ALONE_AND_PACKED
        + f"""
for case in itertools.product(FORMS, ({dtypes}), ({widths}), (True, False)):
    for (name, _), launch in versions((1280, 867, 33, 1), *case):
        print(*case, name, launch[2]["enable_fp_fusion"])
""",
    )
    lines = said.splitlines()
    assert len(lines) > 5 * 5 * 3 * (dtypes.count("torch") + 1), said
    for line in lines:
        assert line.endswith("False"), said


@pytest.mark.parametrize(
    "case, forms, kernels, results",
    [
        ("torch.float32, 72, True", ["exact"], "_exact_fwd_kernel", 1),
        slow_case("torch.float32, 72, True", "FORMS", "", 37),
        slow_case("torch.bfloat16, 69, False", "FORMS", "", 37),
    ],
)
def test_what_is_compiled_for_a_sequence_alone_and_for_packed_ones_rounds_alike(
    without_interpreter, case, forms, kernels, results
):
    """Kernels have the same operations, each rounded separately in the PTX.

    With ragged lengths, the exact backward has a second copy of its loop's body, for the last
    chunk. kernels: part of their names."""
    said, _ = without_interpreter(
        "-c",
        ALONE_AND_PACKED
        + f"""
for form in {forms}:
    roundings_of = {{}}
    for kernel, launch in versions((1280, 33), form, {case}):
        if {kernels!r} not in kernel[0]:
            continue
        built = build(launch, "sm_90")[0]
        ragged = launch[0].__name__ == "_exact_bwd_kernel" and launch[2]["RAGGED_T"]
        second_loop = roundings(built, loop=True) if ragged else 0
        roundings_of.setdefault(kernel, []).append((roundings(built), second_loop))
    for kernel, counts in roundings_of.items():
        rounded = all(".rn" in operation for count, _ in counts for operation in count)
        (first, _), *rest = counts
        alike = all(count == (first + loop if loop else first) for count, loop in rest)
        print(form, kernel, len(rest) > 0 and rounded and alike)
""",
    )
    lines = said.splitlines()
    assert len(lines) == results, said
    for line in lines:
        assert line.endswith("True"), said


def test_an_unknown_triton_is_tried_on_every_kind_of_fast_kernel():
    from longhorn_kit.scan.triton.diagonal import diagonal_plan
    from longhorn_kit.scan.triton.op import TRIAL

    for N in (16, 64):
        plans = [diagonal_plan(1, *TRIAL, N, None, way) for way in ("forward", "backward")]
        for p in plans:
            assert p.segmented  # carries in both directions


def test_the_kernels_of_a_backward_are_built_beside_the_first_forward(without_interpreter):
    "Meta tensors build the kernels that the backward launches, with the same options."
    out, _ = without_interpreter(
        "-c",
        """
import contextlib, sys
sys.path.insert(0, "kernels")
import aot, torch
from longhorn_kit.scan.triton import op as triton_op
torch.cuda.device = lambda device: contextlib.nullcontext()
OTHERS = "way", "HAS_DHT", "HAS_EDGE" # aot.py's backward has the gradient of a last state
def shared(options):
    return {n: v for n, v in options.items() if n not in OTHERS}
def options_of(launches):
    return [(kernel.__name__, shared(options)) for kernel, _, options in launches]
for form in ("exact", "diagonal", "s6"):
    a = aot.inputs(form=form, state=False)
    tensors = [a[n] for n in ("q", "k", "x", "b", "bias", "skip", "z", "A", "initial_state")]
    launches = aot.fast_launches(form, state=False)
    expected = options_of([launch for launch in launches if launch[2]["way"] == "backward"])
    build = lambda: triton_op._build_backward(form, form, 0, None, tensors)
    result = options_of(aot.record(build))
    assert result == expected and len(result) > 2, (result, expected)
""",
    )


def test_the_first_call_of_a_kind_builds_both(monkeypatch, tmp_path):
    from longhorn_kit.scan.triton import op as triton_op

    built = []
    monkeypatch.setattr(
        triton_op.triton.knobs.cache, "dir", str(tmp_path)
    )  # nothing was compiled before
    monkeypatch.setattr(
        triton_op,
        "_build_backward",
        lambda path, form, every, device, tensors: built.append(tensors),
    )
    monkeypatch.setattr(triton_op, "_BUILT", set())
    monkeypatch.setattr(triton_op, "traced", lambda: False)
    monkeypatch.setattr(
        type(triton_op.triton.runtime.driver),
        "active",
        types.SimpleNamespace(get_current_target=lambda: None),
    )

    class OnGPU(torch.Tensor):
        is_cuda = True

    x = torch.empty(1, 3, 8).as_subclass(OnGPU)
    tensors = (torch.empty(1, 3, 4), torch.empty(1, 3, 4), x, x[..., ::2], *[None] * 5)
    monkeypatch.setattr(triton_op, "scan_path", lambda *a: "exact")
    triton_op._backward_builder("exact", 0, tensors).join()
    assert triton_op._backward_builder("exact", 0, tensors) is None  # once
    assert (
        triton_op._backward_builder(
            "diagonal", 0, (*tensors[:2], torch.empty(1, 3, 8), *tensors[3:])
        )
        is None
    )  # on a GPU
    (made,) = built
    for t in made:
        assert t is None or t.is_meta
    assert made[3].stride() == (24, 8, 2)
    assert made[2].shape == x.shape
    (tmp_path / "hash").mkdir()
    (tmp_path / "hash" / "_exact_bwd_kernel.json").touch()  # now it was compiled
    triton_op._BUILT.clear()
    assert triton_op._backward_builder("exact", 0, tensors) is None
    assert len(built) == 1


def test_inputs_begin_where_copies_can():
    """A contiguous tensor may start anywhere.

    Examples are a packed batch without its first tokens, and a view into a flat buffer."""
    from longhorn_kit.scan.triton.gluon import _aligned, _keys

    x = torch.randn(1, 9, 2044, dtype=torch.bfloat16)[:, 1:]
    k = torch.randn(161, dtype=torch.bfloat16)[1:].view(1, 10, 16)
    for given, ready in ((x, _aligned(x, 4)), (k, _keys(k, 16))):
        assert given.is_contiguous()
        assert given.data_ptr() % 16
        assert ready.data_ptr() % 16 == 0
        assert torch.equal(given, ready)
    whole = x.clone()
    assert _aligned(whole, 4) is whole  # aligned tensors are not copied
