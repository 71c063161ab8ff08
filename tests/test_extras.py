"""The wheel works with only its core packages, and names the extra of every other package."""

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
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longhorn_kit import LMConfig, SequenceLM, __version__, longhorn_scan, longhorn_step
from longhorn_kit.cli.__main__ import NEEDS
from longhorn_kit.compat import NEEDS_TRITON, CellsWithoutTriton
from longhorn_kit.extras import EXTRAS, PUBLISHED, need, pip_command
from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan.op import FORMS, pick_backend
from mixers import every_matrix, every_mixer
from sweep import slow_case

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# distributions whose name is not that of their package
DISTRIBUTION = {"PIL": "pillow", "sklearn": "scikit-learn", "lm_eval": "lm-eval"}
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
CORE = ("torch", "numpy", "safetensors")
if sys.platform == "linux":
    CORE += ("triton",)


def normal(name):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def required(extra):
    "Return the distributions of an extra, and of the extras that it includes."
    names = set()
    for line in PROJECT["optional-dependencies"][extra]:
        included = re.match(r"longhorn-kit\[(.*)\]", line)
        if included is None:
            names.add(normal(line))
        else:
            names.update(*map(required, included[1].split(",")))
    return names


def test_the_table_of_extras_agrees_with_pyproject():
    for extra, packages in EXTRAS.items():
        names = {normal(DISTRIBUTION.get(name, name)) for name in packages}
        assert names <= required(extra), extra
        if extra != "book":
            assert names == required(extra), extra
    extras = {"lab", "lm", "vision", "hf", "eval", "cluster", "track", "book", "dev"}
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_versions_that_are_known_to_fail_are_left_out():
    requirements = map(Requirement, PROJECT["optional-dependencies"]["lab"])
    lab = {normal(requirement.name): requirement.specifier for requirement in requirements}
    versions = ("4.0.0", "4.8.4", "5.0.0", "5.0.3", "5.1.0", "5.2.0")
    allowed = [version for version in versions if version in lab["datasets"]]
    assert allowed == ["4.0.0", "4.8.4", "5.1.0", "5.2.0"]  # 5.0: the position of a resumed stream
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert int(pins["pillow"].split(".")[0]) < 13  # for trackio


def test_the_package_imports_only_what_an_extra_brings():
    available = {
        "torch",
        "numpy",
        "safetensors",
        "triton",
        "longhorn_kit",
        "tiktoken_ext",
        "psutil",
        "IPython",
        "matplotlib_inline",  # with tiktoken, accelerate, jupyterlab
        "torchvision",  # corrected only if installed
        *sum(EXTRAS.values(), ()),
        *sys.stdlib_module_names,
    }
    for path in (ROOT / "longhorn_kit").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"^\s*from (\w+)[\w.]* import ", text, re.M))
        for line in re.findall(r"^\s*import (.*)", text, re.M):
            modules = line.split("#")[0].split(",")
            names |= {re.match(r"\s*(\w+)", module)[1] for module in modules}
        assert path.name == "_modidx.py" or not names - available, path


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, source)
    code = "import setuptools.build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return next(source.glob("dist/*.whl"))


def applies(requirement, extras):
    "Check whether a requirement holds on this machine, for a distribution with these extras."
    if not requirement.marker:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def with_requirements(lines, visited):
    "Return the distributions that these requirements install on this machine."
    for requirement in map(Requirement, lines):
        name = normal(requirement.name)
        key = (name, *requirement.extras)
        if key in visited:
            continue
        visited.add(key)
        needs = map(Requirement, metadata.requires(name) or [])
        needs = [need for need in needs if applies(need, requirement.extras)]
        with_requirements([str(need).split(";")[0] for need in needs], visited)
    return {name for name, *_ in visited}


def environment(folder, wheel, *distributions):
    """Make an environment with the wheel and links to distributions and their requirements.

    Return its folder `bin`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in with_requirements(distributions, set()):
        distribution = metadata.distribution(name)
        lines = distribution.read_text("RECORD").splitlines()
        folders = {re.split("[/,]", line)[0] for line in lines}
        for top in folders - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install"]
    options = ["-q", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run(
        # ignored files, for example the checkout if it is in the path
        [*pip, *options, "--ignore-installed", wheel],
        check=True,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
    )
    return folder / "bin"


def run(*words, cwd, **env):
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "LONGHORN_DEBUG"):
        environment.pop(name, None)
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **env}
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("core"), wheel, *CORE)


USE = """
import sys, torch
import longhorn_kit
print(longhorn_kit.__path__[0])
from longhorn_kit import MIXERS, Longhorn, LMConfig, SequenceLM
from longhorn_kit import causal_conv1d, longhorn_scan, longhorn_step, selective_scan
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
    folder = Path(folder)
    assert folder.is_relative_to(core.parent)
    assert (folder / "py.typed").exists()
    assert not (folder / "_modidx.py").exists()
    assert message == f'a vision model needs the extra "vision": {pip_command("vision")}'


def test_without_extras_every_command_names_its_own(core, tmp_path):
    for words in ([], *([command] for command in NEEDS)):
        for helps in ([], ["--help"]):
            done = run(core / "longhorn", *words, *helps, cwd=tmp_path)
            command = words[0] if words else "longhorn"
            extra = "lab" if helps else NEEDS.get(command, "lab")
            assert done.returncode == 1
            assert done.stdout == ""
            assert done.stderr == error_without(command, extra)


def error_without(command, extra):
    return f'longhorn: error: {command} needs the extra "{extra}": {pip_command(extra)}\n'


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
from longhorn_kit.cli.__main__ import start
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
    "Run a command in a process that cannot import other packages of extras."
    hidden = {package for packages in EXTRAS.values() for package in packages} - set(EXTRAS["lab"])
    code = HIDE.replace("{packages}", repr(hidden))
    done = run(sys.executable, "-c", code, command, "--help", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert done.stdout.startswith(f"usage: longhorn {command}")
    if command == "train-vision":
        claim = run(
            *(sys.executable, "-c", code, "reproduce", "vision", "--help"),
            cwd=tmp_path,
            PYTHONPATH=str(ROOT),
        )
        hint = re.compile(r'Its settings are not shown: .* needs the extra "vision"')
        assert hint.search(" ".join(done.stdout.split()))
        assert hint.search(" ".join(claim.stdout.split()))
    if NEEDS[command] != "lab":
        done = run(sys.executable, "-c", code, command, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert done.returncode == 1
        assert done.stderr == error_without(command, NEEDS[command])


def test_hints_name_a_package_index_only_once_it_has_the_package():
    settings = (ROOT / "settings.ini").read_text()
    assert f"\npublished = {PUBLISHED}\n" in settings
    expected = 'pip install ".[lm]" in a clone of the repository'
    if PUBLISHED:
        expected = 'pip install "longhorn-kit[lm]"'
    assert pip_command("lm") == expected


@pytest.mark.parametrize(
    "module, who, extra",
    [("lab.recall", "lab", "lab"), ("lab", "lab", "lab"), ("plots", "plots", "book")],
)
def test_without_extras_a_module_names_its_own(core, tmp_path, module, who, extra):
    done = run(core / "python", "-c", f"import longhorn_kit.{module}", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f'ModuleNotFoundError: longhorn_kit.{who} needs the extra "{extra}": {pip_command(extra)}'
    )


def test_claims_are_the_same_from_the_wheel_and_the_repository(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path / "kit", "zip")
    command = (sys.executable, "-m", "longhorn_kit.cli", "claims", "--json")
    from_wheel = run(*command, cwd=tmp_path, PYTHONPATH=str(tmp_path / "kit"))
    from_repository = run(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert from_wheel.returncode == 0
    assert from_wheel.stdout == from_repository.stdout
    assert from_wheel.stdout.count('"holds"') > 5


@pytest.mark.parametrize(
    "published, base", [(False, ""), (True, "https://github.com/someone/longhorn-kit/blob/v{}/")]
)
def test_the_links_of_the_package_page_are_absolute_once_the_repository_is_published(
    tmp_path, published, base
):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "longhorn_kit/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings = (ROOT / "settings.ini").read_text()
    settings = re.sub(r"^published = .*", f"published = {published}", settings, flags=re.M)
    settings = re.sub(r"^user = .*", "user = someone", settings, flags=re.M)
    (tmp_path / "settings.ini").write_text(settings)
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    text = (tmp_path / made.stdout.split()[-1] / "METADATA").read_text()
    base = base.format(__version__)
    raw = base.replace("//github.com", "//raw.githubusercontent.com").replace("/blob", "")
    assert f"]({base}CONTRIBUTING.md)" in text
    assert f"]({raw}docs/static/film.svg)" in text
    assert f'src="{raw}docs/static/findings.svg"' in text
    assert f'srcset="{raw}docs/static/findings-narrow.svg"' in text
    if published:
        assert not re.search(r'(\]\(|src="|srcset=")(?!https?:)', text)


IMPORTS = {
    "lab": "from longhorn_kit.lab import extrapolation, language, mqar, recall, report\n"
    "report.templates()",
    "vision": "from longhorn_kit.lab import vision, vision_training\nvision.digits()",
    "hf": "from longhorn_kit.lab import evaluation\nimport longhorn_kit.models.transformers",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra, words",
    [
        ("lab", ("longhorn", "claims")),
        ("lm", ("longhorn", "train-lm", "--preset", "laptop", "--steps", "2", "--out", "run")),
        *((extra, ("python", "-c", code)) for extra, code in IMPORTS.items()),
    ],
)
def test_an_extra_brings_all_that_its_commands_import(wheel, tmp_path, extra, words):
    bin_folder = environment(tmp_path / "env", wheel, *CORE, *required(extra))
    done = run(bin_folder / words[0], *words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# --- other systems

ELSEWHERE = """
import importlib, os, pkgutil, signal, sys
from longhorn_kit.compat import mend_torchvision
mend_torchvision()
# other libraries may use what is missing below
import accelerate, datasets, matplotlib.pyplot, scipy.special, timm.data, torch, tyro
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization, modeling_layers
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
import torch.utils.benchmark
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "triton"):
    sys.modules[name] = None
FUNCTIONS = (
    "fork register_at_fork sched_getaffinity sched_setaffinity getuid geteuid uname killpg "
    "setsid statvfs getpgid wait4 mkfifo posix_fadvise getloadavg"
)
for name in FUNCTIONS.split():
    if hasattr(os, name):
        delattr(os, name)
SIGNALS = (
    "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGSTOP SIGCONT setitimer alarm"
)
for name in SIGNALS.split():
    if hasattr(signal, name):
        delattr(signal, name)
sys.platform = "win32"
for name in [name for name in sys.modules if name.startswith("longhorn_kit")]:
    del sys.modules[name]
import longhorn_kit
for module in pkgutil.walk_packages(longhorn_kit.__path__, "longhorn_kit."):
    parts = module.name.split(".")
    if "triton" not in parts[:-1] and not parts[-1].startswith("_"):
        importlib.import_module(module.name)
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


# Python runs this file at every start, so that child processes lack the same modules.
WITHOUT = """
import builtins, multiprocessing, sys
sys.modules["triton"] = None
multiprocessing.get_all_start_methods = lambda: ["spawn"]
whole = builtins.__import__
MISSING = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")

def for_the_kit(name, globals=None, *rest, **named):
    importer = (globals or {}).get("__name__", "")
    if importer.startswith("longhorn_kit") and name in MISSING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return whole(name, globals, *rest, **named)

builtins.__import__ = for_the_kit
"""


@pytest.mark.slow
def test_claims_run_in_spawned_processes_without_triton(tmp_path):
    "macOS and Windows have no Triton and no forkserver, and Windows has no fcntl."
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    longhorn = (sys.executable, "-m", "longhorn_kit.cli", "reproduce")
    shown = run(*longhorn, "--help", cwd=tmp_path, PYTHONPATH=path)
    assert shown.returncode == 0, shown.stderr
    assert "--scale" in shown.stdout, shown.stderr
    tiny = (
        "recall --tasks once --models longhorn_exact attention --pairs 4 --values 6 --steps 4 "
        "--warmup 1 --lrs 0.05 --search-seeds --seeds 0 --test-streams 4 --test-pairs 4 "
        "--points 2 --workers 2"
    )
    done = run(*longhorn, *tiny.split(), cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(next(tmp_path.glob("runs/recall/laptop*/record.json")).read_text())
    assert record["missing"] == 0
    assert set(record["results"]["tasks"]["once"]["recall"]) == {"longhorn_exact", "attention"}


# --- pages without Triton


def kernel_pages():
    "Return the pages whose cells import Triton or kernels: path -> sources of the code cells."
    imports_triton = re.compile(
        r"^(import|from) (triton|longhorn_kit\.scan\.triton\.(?!launch))", re.M
    )
    pages = {}
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        if any(map(imports_triton.search, sources)):
            pages[path] = sources
    return pages


@pytest.mark.parametrize(
    "path, sources", [pytest.param(*page, id=page[0].stem) for page in kernel_pages().items()]
)
def test_a_page_of_kernels_says_first_that_it_needs_triton(path, sources):
    exported = re.compile(r"#\| *(default_exp|export)")
    first = next(source for source in sources if not exported.match(source))
    assert re.search(r"\buse_triton\(", first), first
    assert not re.search(r"^(import|from) triton", first, re.M), first


PAGES = """
import contextlib, io, json, os, pathlib, sys
import matplotlib, torch
matplotlib.use("Agg")
sys.modules["triton"] = None
platform = sys.platform
sys.platform = "darwin" # on which the kit does not ask for Triton's interpreter
import longhorn_kit
sys.platform = platform
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
            text = "" if error else printed.getvalue()
            report.append((error and f"{type(error).__name__}: {error}", text))
    print(json.dumps(report))
"""
# solutions and other cells without a kernel, by a name that they define or call
RUN_ANYWAY = {
    "12_triton_primer": ("floor_ms",),
    "12b_triton_puzzles": ("draw_programs(",),
    "13_triton_diagonal": ("undo_error", "check_dk(dk_decoupled)", "check_chunk(best_chunk)"),
    "14_triton_exact": (
        "check_tf32(tf32)",
        "check_parts(part_errors)",
        "check_shared(solve_shared)",
        "check_dk(dk_step)",
    ),
    "17_gluon": ("both[way] = ",),
    "18_triton_step": ("check_most_tokens(most_tokens)",),
    "triton_op": (),
}
NEED_KERNELS = {  # checks and cells that need kernels
    "12_triton_primer": ("check_softplus(_softplus_kernel)", "check_sums(column_sums)"),
    "12b_triton_puzzles": ("check_copy(copy)", "check_exact_chunk(exact_chunk)"),
    "13_triton_diagonal": ("check_decoupled(decoupled)", "checkpointed(q, k, x, b, dy, *grads"),
    "14_triton_exact": ("check_chunks(by_chunks)", "y, S, kept = exact_forward"),
    "17_gluon": ("check_layout(wide_layout)", "_two_phase_kernel[("),
    "18_triton_step": ("out, state = longhorn_step(",),
    "triton_op": ("opcheck(",),
}


@pytest.mark.parametrize(
    "names",
    [
        slow_case(["18_triton_step"]),
        slow_case([name for name in RUN_ANYWAY if name != "18_triton_step"]),
    ],
    ids=["one", "rest"],
)
def test_pages_of_kernels_without_triton(names):
    "Each page prints one sentence; cells that need Triton fail with it, and all others run."
    allowed = (
        None,
        f"ModuleNotFoundError: This page {NEEDS_TRITON}.",
        f"ValueError: backend 'triton' cannot run this: it {NEEDS_TRITON}",
    )
    first_sentence = f"This page {NEEDS_TRITON}. Without"
    pages = {path: sources for path, sources in kernel_pages().items() if path.stem in names}
    done = run(sys.executable, "-c", PAGES, *pages, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(reports) == len(pages) == len(names)
    for (path, sources), report in zip(pages.items(), reports):
        starts = [printed.startswith(first_sentence) for _, printed in report]
        printing_cell = starts.index(True)
        errors = [error for error, _ in report]
        result = errors[: printing_cell + 1]
        expected = [None] * (printing_cell + 1)
        assert result == expected
        assert set(errors) <= set(allowed), errors
        for part in (*RUN_ANYWAY[path.stem], *NEED_KERNELS[path.stem]):
            of_part = [error for source, error in zip(sources, errors) if part in source]
            fails = part in NEED_KERNELS[path.stem]
            assert {error is not None for error in of_part} == {fails}, (path, part)


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
            [False, False, False],  # not the y that precedes the kernel
        ),
        (
            ["import triton.language as tl", "def f(tl): return tl", "f(3)"],
            [False, True, True],  # an argument of that name
        ),
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
    unchanged = []
    for cell in cells:
        tree = page.visit(ast.parse(cell))
        unchanged.append("no kernels here" not in ast.unparse(tree))
    assert unchanged == runs


def test_a_backend_without_triton_is_refused_with_the_same_sentence(monkeypatch):
    monkeypatch.setattr("longhorn_kit.scan.arguments.HAS_TRITON", False)
    data = [torch.randn(1, 3, size) for size in (2, 2, 4, 4)]
    with pytest.raises(ValueError, match=re.escape(NEEDS_TRITON)):
        longhorn_scan(*data, backend="triton")
    assert longhorn_scan(*data).shape == (1, 3, 4)


# --- other devices


class NoFloat64(TorchDispatchMode):
    "Mode that forbids float64 results, because Apple's GPUs have no float64."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            dtype = getattr(leaf, "dtype", None)
            assert dtype not in (torch.float64, torch.complex128), f"{func} returned {dtype}"
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
        _, loss = model(tokens, tokens)
        loss.backward()
        generated = model.generate(tokens[:, :5], 3, seed=0)
    assert generated.shape == (2, 8)
    for p in model.parameters():
        assert p.grad.isfinite().all()


@every_matrix
def test_matrix_layers_without_float64_agree_with_those_that_have_it(name, monkeypatch):
    "Summing log decays in float32 changes a layer's output little."
    torch.manual_seed(0)
    layer = build_mixer(name, 32)
    x = torch.randn(2, 150, 32)
    expected = layer(x)
    monkeypatch.setattr("longhorn_kit.scan.matrix.NO_FLOAT64", ("mps", "cpu"))
    assert_close(layer(x), expected, atol=1e-4, rtol=1e-3)


@every_mixer
def test_all_tensors_of_a_model_stay_on_its_device(name):
    "A model creates no tensor on another device, even if its device is neither CPU nor CUDA."
    model = SequenceLM(LMConfig(16, 32, 2, name)).to("meta")
    tokens = torch.zeros(2, 40, dtype=torch.int64, device="meta")
    model(tokens).sum().backward()
    logits, cache = model.step(tokens[:, 0], model.empty_cache(2))
    gradients = [parameter.grad for parameter in model.parameters()]
    results = [leaf for leaf in tree_leaves((logits, cache)) if leaf is not None]
    assert {t.device.type for t in gradients + results} == {"meta"}


@pytest.mark.parametrize("form", FORMS)
def test_a_device_that_is_no_gpu_of_cuda_gets_the_chunked_scan(form):
    q = torch.randn(1, 9, 4, device="meta")
    assert pick_backend("auto", q) == "chunked"
    out, state = longhorn_scan(q, q, q, q, form=form, output_final_state=True)
    assert out.is_meta
    assert state.is_meta
    assert longhorn_step(q[:, 0], q[:, 0], q[:, 0], q[:, 0], state, form=form)[1].is_meta


def test_models_and_the_kernels_of_a_scan_do_not_import_the_compiler():
    "torch._dynamo takes about a second. Registered operations import it, eager calls do not."
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
    "Without a GPU, the kit selects the interpreter before Triton's import; a GPU child reverts it."
    code = (
        "import glob, os, sys\nglob.glob = lambda path: {}\n{}\nimport longhorn_kit\n"
        "print(os.environ.get('TRITON_INTERPRET'))"
    )
    python = (
        "env",
        "-u",
        "TRITON_INTERPRET",
        "-u",
        "LONGHORN_KIT_INTERPRETS",
        sys.executable,
        "-c",
    )

    def interprets(gpus, first=""):
        done = run(*python, code.format(gpus, first), cwd=ROOT, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    child = "import longhorn_kit, subprocess; subprocess.run([sys.executable, '-c', {!r}]); exit()"
    assert interprets([]) == ["1"]
    assert interprets(["/dev/nvidia0"]) == ["None"]
    assert interprets([], "import triton") == ["None"]
    result = interprets([], child.format(code.format(["/dev/nvidia0"], "")))
    assert result == ["None"]
    result = interprets([], child.format(code.format([], "")))
    assert result == ["1"]
    assert interprets(["/dev/nvidia0"], "os.environ['TRITON_INTERPRET'] = '1'") == ["1"]
    late = (
        "import torch, triton\nfrom longhorn_kit import longhorn_scan\n"
        "longhorn_scan(*torch.ones(4, 1, 2, 3), backend='triton')"
    )
    done = run(*python, late, cwd=ROOT, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    cause = "q is on cpu; Triton kernels need a GPU, or TRITON_INTERPRET=1"
    assert f"ValueError: backend 'triton' cannot run this: {cause}" in done.stderr


def test_need_looks_at_the_packages_that_are_named():
    assert need("models", "vision", "timm") is None
    message = re.escape(f'train-lm needs the extra "lm": {pip_command("lm")}') + "$"
    with pytest.raises(ModuleNotFoundError, match=message) as error:
        need("train-lm", "lm", "torch", "no_such_package")
    assert error.value.name == "no_such_package"
