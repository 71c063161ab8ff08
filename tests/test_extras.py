"""The wheel works with PyTorch, NumPy, safetensors and Triton alone, and names the extra of everything else."""
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
import pytest
from packaging.requirements import Requirement
from longhorn_kit import __version__
from longhorn_kit.extras import EXTRAS, need
from longhorn_kit.start import NEEDS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION = {"PIL": "pillow", "sklearn": "scikit-learn", "lm_eval": "lm-eval"} # those not called like their package
PARTS = ("pyproject.toml", "setup.py", "settings.ini", "README.md", "LICENSE", "MANIFEST.in", "longhorn_kit",
         "nbs/lab/results", "kernels/results")
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
    assert {"lab", "lm", "vision", "hf", "eval", "cluster", "track", "book", "dev"} <= set(PROJECT["optional-dependencies"])


def test_the_package_imports_only_what_an_extra_brings():
    known = {"torch", "numpy", "safetensors", "triton", "longhorn_kit", "tiktoken_ext", "psutil", "IPython", "matplotlib_inline", # with tiktoken, accelerate, jupyterlab
             "torchvision", *sum(EXTRAS.values(), ()), *sys.stdlib_module_names} # torchvision: only mended if it is there
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
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
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
            with_requirements([str(r).split(";")[0] for r in needs if not r.marker or any(
                r.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))], found)
    return {name for name, *_ in found}


def environment(folder, wheel, *distributions):
    "A new environment with links to the installed distributions and what they need, and the wheel; returns its folder `bin`."
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in with_requirements(distributions, set()):
        about = metadata.distribution(name)
        for top in {re.split("[/,]", line)[0] for line in about.read_text("RECORD").splitlines()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(about.locate_file(top))
    subprocess.run([sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "-q", "--no-deps", "--no-index", "--no-compile",
                    "--ignore-installed", # such as the checkout, if it is in the path
                    "--disable-pip-version-check", wheel], check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    return folder / "bin"


def run(*words, cwd, **env):
    hidden = ("PYTHONPATH", "LONGHORN_DEBUG")
    env = {**{k: v for k, v in os.environ.items() if k not in hidden}, "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("core"), wheel, *CORE)


USE = """
import sys, torch
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
    kit = "import longhorn_kit, pathlib; print(pathlib.Path(longhorn_kit.__file__).parent)"
    place = Path(run(core / "python", "-c", kit, cwd=tmp_path).stdout.strip())
    assert place.is_relative_to(core.parent) and (place / "py.typed").exists() and not (place / "_modidx.py").exists()
    done = run(core / "python", "-c", USE, cwd=tmp_path)
    said = 'a vision model needs the extra "vision": pip install "longhorn-kit[vision]"\n'
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_without_extras_every_command_names_its_own(core, tmp_path):
    for command in (*NEEDS, ""):
        done = run(core / "longhorn", *([command] * bool(command)), "--help", cwd=tmp_path)
        extra, who = NEEDS.get(command, "lab"), command or "longhorn"
        said = f'longhorn: error: {who} needs the extra "{extra}": pip install "longhorn-kit[{extra}]"\n'
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("module, who, extra", [
    ("lab.recall", "lab", "lab"), ("lab", "lab", "lab"), ("plots", "plots", "book")])
def test_without_extras_a_module_names_its_own(core, tmp_path, module, who, extra):
    done = run(core / "python", "-c", f"import longhorn_kit.{module}", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f'ModuleNotFoundError: longhorn_kit.{who} needs the extra "{extra}": pip install "longhorn-kit[{extra}]"')


def test_claims_are_the_same_from_the_wheel_and_the_repository(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path / "kit", "zip")
    command = (sys.executable, "-m", "longhorn_kit.cli", "claims", "--json")
    mine, theirs = (run(*command, cwd=tmp_path, PYTHONPATH=str(place)) for place in (tmp_path / "kit", ROOT))
    assert mine.returncode == 0 and mine.stdout == theirs.stdout and mine.stdout.count('"holds"') > 5


@pytest.mark.parametrize("published, place", [
    (False, ""), (True, "https://github.com/someone/longhorn-kit/blob/v{}/")])
def test_the_links_of_the_package_page_are_absolute_once_the_repository_is_published(tmp_path, published, place):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "longhorn_kit/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings = re.sub(r"^published = .*", f"published = {published}", (ROOT / "settings.ini").read_text(), flags=re.M)
    (tmp_path / "settings.ini").write_text(re.sub(r"^user = .*", "user = someone", settings, flags=re.M))
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    text = (tmp_path / made.stdout.split()[-1] / "METADATA").read_text()
    place = place.format(__version__)
    raw = place.replace("//github.com", "//raw.githubusercontent.com").replace("/blob", "")
    assert f"]({place}CONTRIBUTING.md)" in text and f"]({raw}docs/static/film.svg)" in text
    assert f'src="{raw}docs/static/findings.svg"' in text and f'srcset="{raw}docs/static/findings-narrow.svg"' in text
    if published:
        assert not re.search(r'(\]\(|src="|srcset=")(?!https?:)', text)


@pytest.mark.slow
@pytest.mark.parametrize("extra, words", [
    ("lab", ("longhorn", "claims")),
    ("lab", ("python", "-c", "from longhorn_kit.lab import extrapolation, language, mqar, recall, report; report.templates()")),
    ("lm", ("longhorn", "train-lm", "--preset", "laptop", "--steps", "2", "--out", "run")),
    ("vision", ("python", "-c", "from longhorn_kit.lab import vision, vision_training; vision.digits()")),
    ("hf", ("python", "-c", "from longhorn_kit.lab import evaluation; import longhorn_kit.models.transformers"))])
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
    if not parts[-1].startswith(("triton", "gluon", "_")):
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


def test_the_kernels_of_a_scan_do_not_import_the_compiler():
    "torch._dynamo takes about a second. Registered operations import it, but eager calls of the kernels do not use them."
    done = run(sys.executable, "-c", """
import sys, torch
from longhorn_kit import longhorn_scan
data = [torch.randn(1, 5, size, requires_grad=True) for size in (4, 4, 8, 8)]
longhorn_scan(*data, form="exact", backend="triton").sum().backward()
assert data[0].grad.isfinite().all() and "torch._dynamo" not in sys.modules
""", cwd=ROOT, PYTHONPATH=str(ROOT), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ("longhorn_kit.scan", "longhorn_kit.scan.matrix", "longhorn_kit.models"))
def test_scans_and_models_are_imported_without_the_compiler(name):
    done = run(sys.executable, "-c", f"import sys, {name}\nassert 'torch._dynamo' not in sys.modules", cwd=ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_where_triton_interprets():
    "Without a GPU, unless it was imported before; a child process that finds a GPU takes back only what the kit set."
    code = "import glob, os, sys\nglob.glob = lambda path: {}\n{}\nimport longhorn_kit\nprint(os.environ.get('TRITON_INTERPRET'))"
    python = ("env", "-u", "TRITON_INTERPRET", "-u", "LONGHORN_KIT_INTERPRETS", sys.executable, "-c")
    def said(gpus, first=""):
        done = run(*python, code.format(gpus, first), cwd=ROOT, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()
    child = "import longhorn_kit, subprocess; subprocess.run([sys.executable, '-c', {!r}]); exit()"
    assert said([]) == ["1"] and said(["/dev/nvidia0"]) == ["None"] and said([], "import triton") == ["None"]
    assert said([], child.format(code.format(["/dev/nvidia0"], ""))) == ["None"]
    assert said([], child.format(code.format([], ""))) == ["1"]
    assert said(["/dev/nvidia0"], "os.environ['TRITON_INTERPRET'] = '1'") == ["1"]
    late = "import torch, triton\nfrom longhorn_kit import longhorn_scan\nlonghorn_scan(*torch.ones(4, 1, 2, 3), backend='triton')"
    done = run(*python, late, cwd=ROOT, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    assert "ValueError: backend 'triton' cannot run this: q is on cpu, and they need a GPU, or TRITON_INTERPRET=1" in done.stderr


def test_need_looks_at_the_packages_that_are_named():
    assert need("models", "vision", "timm") is None
    with pytest.raises(ModuleNotFoundError, match=r'^train-lm needs the extra "lm": pip install "longhorn-kit\[lm\]"$') as error:
        need("train-lm", "lm", "torch", "no_such_package")
    assert error.value.name == "no_such_package"
