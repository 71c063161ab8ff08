"""The wheel works with PyTorch, NumPy, safetensors and Triton alone, and names the extra of everything else."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longhorn_kit import LMConfig, SequenceLM, __version__, longhorn_scan, longhorn_step
from longhorn_kit.compat import NEEDS_TRITON, CellsWithoutTriton
from longhorn_kit.extras import EXTRAS, PUBLISHED, need, pip_command
from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan.op import FORMS, pick_backend
from longhorn_kit.start import NEEDS
from mixers import every_matrix, every_mixer
from sweep import slow_case

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "lm_eval": "lm-eval",
}  # those not called like their package
PARTS = (
    "pyproject.toml",
    "setup.py",
    "settings.ini",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "longhorn_kit",
    "nbs/lab/results",
    "kernels/results",
)
CORE = ("torch", "numpy", "safetensors", *["triton"] * (sys.platform == "linux"))


def normal(name):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def required(extra):
    "Names of the distributions of an extra, with those of the extras that it includes."
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        own = re.match(r"longhorn-kit\[(.*)\]", line)
        found |= set.union(*map(required, own[1].split(","))) if own else {normal(line)}
    return found


def test_the_table_of_extras_agrees_with_pyproject():
    for extra, packages in EXTRAS.items():
        names = {normal(DISTRIBUTION.get(name, name)) for name in packages}
        assert names == required(extra) if extra != "book" else names <= required(extra), extra
    assert {"lab", "lm", "vision", "hf", "eval", "cluster", "track", "book", "dev"} <= set(
        PROJECT["optional-dependencies"]
    )


def test_versions_that_are_known_to_fail_are_left_out():
    lab = {
        normal(line): Requirement(line).specifier
        for line in PROJECT["optional-dependencies"]["lab"]
    }
    taken = [
        version
        for version in ("4.0.0", "4.8.4", "5.0.0", "5.0.3", "5.1.0", "5.2.0")
        if version in lab["datasets"]
    ]
    assert taken == ["4.0.0", "4.8.4", "5.1.0", "5.2.0"]  # 5.0: the position of a resumed stream
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert int(pins["pillow"].split(".")[0]) < 13  # for trackio


def test_the_package_imports_only_what_an_extra_brings():
    known = {
        "torch",
        "numpy",
        "safetensors",
        "triton",
        "longhorn_kit",
        "tiktoken_ext",
        "psutil",
        "IPython",
        "matplotlib_inline",  # with tiktoken, accelerate, jupyterlab
        "torchvision",
        *sum(EXTRAS.values(), ()),
        *sys.stdlib_module_names,
    }  # torchvision: only mended if it is there
    for path in (ROOT / "longhorn_kit").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"^\s*from (\w+)[\w.]* import ", text, re.M))
        for line in re.findall(r"^\s*import (.*)", text, re.M):
            names |= {name.split()[0].split(".")[0] for name in line.split("#")[0].split(",")}
        assert path.name == "_modidx.py" or not names - known, path


# --- the wheel ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / part, source)
    code = "import setuptools.build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return next(source.glob("dist/*.whl"))


def with_requirements(lines, found):
    "Return the distributions that these requirements bring on this machine."
    for wanted in map(Requirement, lines):
        name = normal(wanted.name)
        if (name, *wanted.extras) not in found:
            found.add((name, *wanted.extras))
            needs = [Requirement(line) for line in metadata.requires(name) or []]
            with_requirements(
                [
                    str(r).split(";")[0]
                    for r in needs
                    if not r.marker
                    or any(r.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))
                ],
                found,
            )
    return {name for name, *_ in found}


def environment(folder, wheel, *distributions):
    "A new environment with links to the installed distributions and what they need, and the wheel; returns its folder `bin`."
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in with_requirements(distributions, set()):
        about = metadata.distribution(name)
        for top in {
            re.split("[/,]", line)[0] for line in about.read_text("RECORD").splitlines()
        } - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(about.locate_file(top))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            folder / "bin/python",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--no-compile",
            "--ignore-installed",  # such as the checkout, if it is in the path
            "--disable-pip-version-check",
            wheel,
        ],
        check=True,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
    )
    return folder / "bin"


def run(*words, cwd, **env):
    hidden = ("PYTHONPATH", "LONGHORN_DEBUG")
    env = {
        **{k: v for k, v in os.environ.items() if k not in hidden},
        "PYTHONDONTWRITEBYTECODE": "1",
        **env,
    }
    return subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("core"), wheel, *CORE)


USE = """
import sys, torch
import longhorn_kit
print(longhorn_kit.__path__[0])
from longhorn_kit import MIXERS, Longhorn, LMConfig, SequenceLM, causal_conv1d, longhorn_scan, longhorn_step, selective_scan
q, k, x, b = (torch.randn(1, 40, size, requires_grad=True) for size in (4, 4, 3, 3))
for form in ("exact", "diagonal"):
    out, state = longhorn_scan(q, k, x, b, form=form, output_final_state=True)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    layer = Longhorn(d_model=8, form=form)
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)
model = SequenceLM(LMConfig(16, 8, 1, "longhorn"))
model.save_pretrained("model")
tokens = torch.randint(16, (1, 5))
assert torch.equal(SequenceLM.from_pretrained("model")(tokens), model(tokens))
try:
    import longhorn_kit.models.vision
except ModuleNotFoundError as error:
    print(error)
"""


def test_scans_layers_and_models_need_only_the_core(core, tmp_path):
    done = run(core / "python", "-c", USE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, message = done.stdout.splitlines()
    place = Path(folder)
    assert (
        place.is_relative_to(core.parent)
        and (place / "py.typed").exists()
        and not (place / "_modidx.py").exists()
    )
    assert message == f'a vision model needs the extra "vision": {pip_command("vision")}'


def test_without_extras_every_command_names_its_own(core, tmp_path):
    for command in (*NEEDS, ""):
        for helps in ([], ["--help"]):
            done = run(core / "longhorn", *([command] * bool(command)), *helps, cwd=tmp_path)
            extra = "lab" if helps else NEEDS.get(command, "lab")
            who = command or "longhorn"
            said = f'longhorn: error: {who} needs the extra "{extra}": {pip_command(extra)}\n'
            assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


HIDE = """
import importlib.util, sys
from importlib.abc import MetaPathFinder
class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
present = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return present(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
from longhorn_kit.start import start
sys.exit(start())
"""


@pytest.mark.parametrize(
    "command",
    [
        "train-lm",
        slow_case("train-vision"),
        *map(slow_case, sorted(NEEDS.keys() - {"train-lm", "train-vision"})),
    ],
)
def test_the_help_of_every_command_needs_the_extra_lab_alone(command, tmp_path):
    "Other packages of extras are hidden from the process."
    hidden = {package for packages in EXTRAS.values() for package in packages} - set(EXTRAS["lab"])
    code = HIDE.replace("{packages}", repr(hidden))
    done = run(sys.executable, "-c", code, command, "--help", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith(f"usage: longhorn {command}")
    if command == "train-vision":
        claim = run(
            sys.executable,
            "-c",
            code,
            "reproduce",
            "vision",
            "--help",
            cwd=tmp_path,
            PYTHONPATH=str(ROOT),
        )
        for shown in (done.stdout, claim.stdout):
            assert re.search(
                r'Its settings are not shown: .* needs the extra "vision"', " ".join(shown.split())
            )
    if NEEDS[command] != "lab":
        done = run(sys.executable, "-c", code, command, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert (
            done.returncode == 1
            and done.stderr
            == f'longhorn: error: {command} needs the extra "{NEEDS[command]}": {pip_command(NEEDS[command])}\n'
        )


def test_hints_name_a_package_index_only_once_it_has_the_package():
    settings = (ROOT / "settings.ini").read_text()
    assert f"\npublished = {PUBLISHED}\n" in settings
    assert pip_command("lm") == (
        'pip install "longhorn-kit[lm]"'
        if PUBLISHED
        else 'pip install ".[lm]" in a clone of the repository'
    )


@pytest.mark.parametrize(
    "module, who, extra",
    [("lab.recall", "lab", "lab"), ("lab", "lab", "lab"), ("plots", "plots", "book")],
)
def test_without_extras_a_module_names_its_own(core, tmp_path, module, who, extra):
    done = run(core / "python", "-c", f"import longhorn_kit.{module}", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f'ModuleNotFoundError: longhorn_kit.{who} needs the extra "{extra}": {pip_command(extra)}'
    )


def test_claims_are_the_same_from_the_wheel_and_the_repository(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path / "kit", "zip")
    command = (sys.executable, "-m", "longhorn_kit.cli", "claims", "--json")
    mine, theirs = (
        run(*command, cwd=tmp_path, PYTHONPATH=str(place)) for place in (tmp_path / "kit", ROOT)
    )
    assert (
        mine.returncode == 0 and mine.stdout == theirs.stdout and mine.stdout.count('"holds"') > 5
    )


@pytest.mark.parametrize(
    "published, place", [(False, ""), (True, "https://github.com/someone/longhorn-kit/blob/v{}/")]
)
def test_the_links_of_the_package_page_are_absolute_once_the_repository_is_published(
    tmp_path, published, place
):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "longhorn_kit/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings = re.sub(
        r"^published = .*",
        f"published = {published}",
        (ROOT / "settings.ini").read_text(),
        flags=re.M,
    )
    (tmp_path / "settings.ini").write_text(
        re.sub(r"^user = .*", "user = someone", settings, flags=re.M)
    )
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    text = (tmp_path / made.stdout.split()[-1] / "METADATA").read_text()
    place = place.format(__version__)
    raw = place.replace("//github.com", "//raw.githubusercontent.com").replace("/blob", "")
    assert f"]({place}CONTRIBUTING.md)" in text and f"]({raw}docs/static/film.svg)" in text
    assert (
        f'src="{raw}docs/static/findings.svg"' in text
        and f'srcset="{raw}docs/static/findings-narrow.svg"' in text
    )
    if published:
        assert not re.search(r'(\]\(|src="|srcset=")(?!https?:)', text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra, words",
    [
        ("lab", ("longhorn", "claims")),
        (
            "lab",
            (
                "python",
                "-c",
                "from longhorn_kit.lab import extrapolation, language, mqar, recall, report; report.templates()",
            ),
        ),
        ("lm", ("longhorn", "train-lm", "--preset", "laptop", "--steps", "2", "--out", "run")),
        (
            "vision",
            (
                "python",
                "-c",
                "from longhorn_kit.lab import vision, vision_training; vision.digits()",
            ),
        ),
        (
            "hf",
            (
                "python",
                "-c",
                "from longhorn_kit.lab import evaluation; import longhorn_kit.models.transformers",
            ),
        ),
    ],
)
def test_an_extra_brings_all_that_its_commands_import(wheel, tmp_path, extra, words):
    place = environment(tmp_path / "env", wheel, *CORE, *required(extra))
    done = run(place / words[0], *words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# --- other systems --------------------------------------------------------------------------------------------------

ELSEWHERE = """
import importlib, os, pkgutil, signal, sys
from longhorn_kit.compat import mend_torchvision
mend_torchvision()
import accelerate, datasets, matplotlib.pyplot, scipy.special, timm.data, torch, tyro # they are other libraries' affair
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, initialization, modeling_layers
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.utils.benchmark
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "triton"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "uname", "killpg",
             "setsid", "statvfs", "getpgid", "wait4", "mkfifo", "posix_fadvise", "getloadavg"):
    if hasattr(os, name): delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGSTOP", "SIGCONT", "setitimer", "alarm"):
    if hasattr(signal, name): delattr(signal, name)
sys.platform = "win32"
for name in [name for name in sys.modules if name.startswith("longhorn_kit")]:
    del sys.modules[name]
import longhorn_kit
for found in pkgutil.walk_packages(longhorn_kit.__path__, "longhorn_kit."):
    parts = found.name.split(".")
    if "triton" not in parts[:-1] and not parts[-1].startswith("_"):
        importlib.import_module(found.name)
from longhorn_kit.records import exclusive_lock, read_json, write_json
from pathlib import Path
with exclusive_lock("runs"):
    write_json(Path("runs/a.json"), {"a": 1})
assert read_json("runs/a.json") == {"a": 1}
layer = longhorn_kit.Longhorn(d_model=8, form="exact")
layer(torch.randn(1, 9, 8)).sum().backward()
"""


@pytest.mark.slow
def test_the_package_imports_and_runs_without_what_only_posix_has(tmp_path):
    done = run(sys.executable, "-c", ELSEWHERE, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


# Python runs this file at every start, so that child processes lack the same things.
WITHOUT = """
import builtins, multiprocessing, sys
sys.modules["triton"] = None
multiprocessing.get_all_start_methods = lambda: ["spawn"]
whole = builtins.__import__

def for_the_kit(name, globals=None, *rest, **named):
    importer = (globals or {}).get("__name__", "")
    if importer.startswith("longhorn_kit") and name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return whole(name, globals, *rest, **named)

builtins.__import__ = for_the_kit
"""


@pytest.mark.slow
def test_claims_run_in_spawned_processes_without_triton(tmp_path):
    "macOS and Windows have no Triton and no forkserver; Windows has no fcntl either."
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    longhorn = (sys.executable, "-m", "longhorn_kit.cli", "reproduce")
    shown = run(*longhorn, "--help", cwd=tmp_path, PYTHONPATH=path)
    assert shown.returncode == 0 and "--scale" in shown.stdout, shown.stderr
    tiny = (
        "recall --tasks once --models longhorn_exact attention --pairs 4 --values 6 --steps 4 --warmup 1 --lrs 0.05 "
        "--search-seeds --seeds 0 --test-streams 4 --test-pairs 4 --points 2 --workers 2"
    )
    done = run(*longhorn, *tiny.split(), cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(next(tmp_path.glob("runs/recall/laptop*/record.json")).read_text())
    assert record["missing"] == 0 and set(record["results"]["tasks"]["once"]["recall"]) == {
        "longhorn_exact",
        "attention",
    }


# --- pages without Triton -------------------------------------------------------------------------------------------


def kernel_pages():
    "Return the pages whose cells import Triton or the kit's kernels: path -> sources of the code cells."
    pages = {}
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        if any(
            re.search(
                r"^(import|from) (triton|longhorn_kit\.scan\.triton\.(?!launch))", source, re.M
            )
            for source in sources
        ):
            pages[path] = sources
    return pages


@pytest.mark.parametrize(
    "path, sources", [pytest.param(*page, id=page[0].stem) for page in kernel_pages().items()]
)
def test_a_page_of_kernels_says_first_that_it_needs_triton(path, sources):
    first = [source for source in sources if not re.match(r"#\| *(default_exp|export)", source)][0]
    assert re.search(r"\buse_triton\(", first) and not re.search(
        r"^(import|from) triton", first, re.M
    ), first


PAGES = """
import contextlib, io, json, os, pathlib, sys
import matplotlib, torch
matplotlib.use("Agg")
sys.modules["triton"] = None
here, sys.platform = sys.platform, "darwin" # on which the kit does not ask for Triton's interpreter
import longhorn_kit
sys.platform = here
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for page in map(pathlib.Path, sys.argv[1:]):
    shell.reset()
    shell.ast_transformers.clear()
    os.chdir(page.parent)
    report = []
    for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                result = shell.run_cell("".join(cell["source"]))
            error = result.error_before_exec or result.error_in_exec
            report.append((error and f"{type(error).__name__}: {error}", "" if error else printed.getvalue()))
    print(json.dumps(report))
"""
RUN_ANYWAY = {  # solutions of exercises, and other cells that need no kernel, by a name that they define or call
    "12_triton_primer": ("floor_ms",),
    "13_triton_diagonal": ("undo_error", "check_dk(dk_decoupled)"),
    "14_triton_exact": (
        "check_parts(part_errors)",
        "check_shared(solve_shared)",
        "check_dk(dk_step)",
    ),
    "21_triton_step": ("check_most_tokens(most_tokens)",),
    "triton_op": (),
}
NEED_KERNELS = {  # checks and cells that do
    "12_triton_primer": ("check_softplus(_softplus_kernel)", "check_sums(column_sums)"),
    "13_triton_diagonal": ("check_decoupled(_decoupled_kernel)", "results = {C: checkpointed"),
    "14_triton_exact": ("_chunk_kernel[(", "y, S, kept = exact_forward"),
    "21_triton_step": ("out, state = longhorn_step(",),
    "triton_op": ("opcheck(",),
}


@pytest.mark.parametrize(
    "names",
    [["21_triton_step"], slow_case([name for name in RUN_ANYWAY if name != "21_triton_step"])],
    ids=["one", "rest"],
)
def test_pages_of_kernels_without_triton(names):
    "Each prints one sentence at its top, and what needs Triton fails with it, never deep inside; the rest of a page runs."
    pages = {path: sources for path, sources in kernel_pages().items() if path.stem in names}
    done = run(sys.executable, "-c", PAGES, *pages, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(reports) == len(pages) == len(names)
    for (path, sources), report in zip(pages.items(), reports):
        said = next(
            i
            for i, (error, printed) in enumerate(report)
            if printed.startswith(f"This page {NEEDS_TRITON}. Without")
        )
        assert all(error is None for error, _ in report[: said + 1])
        for error, _ in report:
            assert error is None or error in (
                f"ModuleNotFoundError: This page {NEEDS_TRITON}.",
                f"ValueError: backend 'triton' cannot run this: it {NEEDS_TRITON}",
            ), error

        def errors(part):
            return {
                error is not None for source, (error, _) in zip(sources, report) if part in source
            }

        assert all(errors(part) == {False} for part in RUN_ANYWAY[path.stem]), path
        assert all(errors(part) == {True} for part in NEED_KERNELS[path.stem]), path


@pytest.mark.parametrize(
    "cells, runs",
    [
        (["import triton, math\nimport os", "os.sep", "math.pi"], [False, True, False]),
        (
            [
                "import triton",
                "def f(x): return triton.cdiv(x, 2)",
                "f(3)",
                "def f(x): return x",
                "f(3)",
            ],
            [False, False, False, True, True],
        ),
        (
            ["import triton", "y = 1\ntriton.cdiv(y, 2)", "y"],
            [False, False, False],
        ),  # not the y before the kernel
        (
            ["import triton.language as tl", "def f(tl): return tl", "f(3)"],
            [False, True, True],
        ),  # an argument of that name
        (
            ["import triton", "n = triton.cdiv(3, 2)", "for n in (1, 2):\n    n + 1", "n"],
            [False, False, True, True],
        ),
        (["import triton", "n = triton.cdiv(3, 2)", "n += 1", "n"], [False, False, False, False]),
        (
            ["def f():\n    from longhorn_kit.scan.triton.op import triton_scan", "f()"],
            [False, False],
        ),
        (["with open(os.devnull) as f:\n    import triton", "f"], [False, False]),
    ],
)
def test_which_cells_need_triton(cells, runs):
    page = CellsWithoutTriton("no kernels here")
    found = []
    for cell in cells:
        tree = page.visit(ast.parse(cell))
        found.append("no kernels here" not in ast.unparse(tree))
    assert found == runs


def test_a_backend_without_triton_is_refused_with_the_same_sentence(monkeypatch):
    monkeypatch.setattr("longhorn_kit.scan.arguments.HAS_TRITON", False)
    data = [torch.randn(1, 3, size) for size in (2, 2, 4, 4)]
    with pytest.raises(ValueError, match=re.escape(NEEDS_TRITON)):
        longhorn_scan(*data, backend="triton")
    assert longhorn_scan(*data).shape == (1, 3, 4)


# --- other devices --------------------------------------------------------------------------------------------------


class NoFloat64(TorchDispatchMode):
    "Apple's GPUs have no float64: no operation may return it."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        wide = [
            t
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor) and t.dtype in (torch.float64, torch.complex128)
        ]
        assert not wide, f"{func} returned {wide[0].dtype}"
        return out


@pytest.mark.parametrize("bf16", [False, True])
@every_mixer
def test_models_need_no_float64(name, bf16, monkeypatch):
    "A float32 model computes, learns and generates without float64, which Apple's GPUs lack."
    monkeypatch.setattr("longhorn_kit.scan.matrix.NO_FLOAT64", ("mps", "cpu"))
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(16, 32, 2, name))
    tokens = torch.randint(16, (2, 40))
    with NoFloat64(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(tokens, tokens)[1].backward()
        found = model.generate(tokens[:, :5], 3, seed=0)
    assert found.shape == (2, 8) and all(p.grad.isfinite().all() for p in model.parameters())


@every_matrix
def test_matrix_layers_without_float64_agree_with_those_that_have_it(name, monkeypatch):
    "Sums of log decays in float32 change a layer's output little."
    torch.manual_seed(0)
    layer = build_mixer(name, 32)
    x = torch.randn(2, 150, 32)
    expected = layer(x)
    monkeypatch.setattr("longhorn_kit.scan.matrix.NO_FLOAT64", ("mps", "cpu"))
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-3)


@every_mixer
def test_all_tensors_of_a_model_stay_on_its_device(name):
    "A model creates no tensor on another device than its own, also if that is neither CPU nor CUDA (here: meta)."
    model = SequenceLM(LMConfig(16, 32, 2, name)).to("meta")
    tokens = torch.zeros(2, 40, dtype=torch.int64, device="meta")
    model(tokens).sum().backward()
    logits, cache = model.step(tokens[:, 0], model.empty_cache(2))
    devices = {p.grad.device.type for p in model.parameters()} | {
        t.device.type for t in tree_leaves((logits, cache)) if t is not None
    }
    assert devices == {"meta"}


@pytest.mark.parametrize("form", FORMS)
def test_a_device_that_is_no_gpu_of_cuda_gets_the_chunked_scan(form):
    q = torch.randn(1, 9, 4, device="meta")
    assert pick_backend("auto", q) == "chunked"
    out, state = longhorn_scan(q, q, q, q, form=form, output_final_state=True)
    assert (
        out.is_meta
        and state.is_meta
        and longhorn_step(q[:, 0], q[:, 0], q[:, 0], q[:, 0], state, form=form)[1].is_meta
    )


def test_models_and_the_kernels_of_a_scan_do_not_import_the_compiler():
    "torch._dynamo takes about a second. Registered operations import it, but eager calls of the kernels do not use them."
    done = run(
        sys.executable,
        "-c",
        """
import sys, torch
import longhorn_kit.scan.matrix, longhorn_kit.models
from longhorn_kit import longhorn_scan
assert "torch._dynamo" not in sys.modules, "the import of models"
data = [torch.randn(1, 5, size, requires_grad=True) for size in (4, 4, 8, 8)]
longhorn_scan(*data, form="exact", backend="triton").sum().backward()
assert data[0].grad.isfinite().all() and "torch._dynamo" not in sys.modules
""",
        cwd=ROOT,
        PYTHONPATH=str(ROOT),
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_where_triton_interprets():
    "Without a GPU, unless it was imported before; a child process that finds a GPU takes back only what the kit set."
    code = "import glob, os, sys\nglob.glob = lambda path: {}\n{}\nimport longhorn_kit\nprint(os.environ.get('TRITON_INTERPRET'))"
    python = (
        "env",
        "-u",
        "TRITON_INTERPRET",
        "-u",
        "LONGHORN_KIT_INTERPRETS",
        sys.executable,
        "-c",
    )

    def said(gpus, first=""):
        done = run(*python, code.format(gpus, first), cwd=ROOT, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    child = "import longhorn_kit, subprocess; subprocess.run([sys.executable, '-c', {!r}]); exit()"
    assert (
        said([]) == ["1"]
        and said(["/dev/nvidia0"]) == ["None"]
        and said([], "import triton") == ["None"]
    )
    assert said([], child.format(code.format(["/dev/nvidia0"], ""))) == ["None"]
    assert said([], child.format(code.format([], ""))) == ["1"]
    assert said(["/dev/nvidia0"], "os.environ['TRITON_INTERPRET'] = '1'") == ["1"]
    late = "import torch, triton\nfrom longhorn_kit import longhorn_scan\nlonghorn_scan(*torch.ones(4, 1, 2, 3), backend='triton')"
    done = run(*python, late, cwd=ROOT, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    assert (
        "ValueError: backend 'triton' cannot run this: q is on cpu, and they need a GPU, or TRITON_INTERPRET=1"
        in done.stderr
    )


def test_need_looks_at_the_packages_that_are_named():
    assert need("models", "vision", "timm") is None
    with pytest.raises(
        ModuleNotFoundError,
        match=re.escape(f'train-lm needs the extra "lm": {pip_command("lm")}') + "$",
    ) as error:
        need("train-lm", "lm", "torch", "no_such_package")
    assert error.value.name == "no_such_package"
