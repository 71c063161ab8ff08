"""Copy the tree, for tests that apply a guide to the copy.

The module also runs the checks of form of `make test`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORM = (  # of `make test`: tests/run.sh
    "ruff format -q --check",
    "ruff check -q",
    "python -m pytest -q --tb=short -o addopts= -p no:cacheprovider tests/test_house.py",
)


def private_folders():
    "Return the hidden folders of this checkout that git ignores."
    listing = "git ls-files --others --ignored --exclude-standard --directory"
    done = subprocess.run(listing.split(), cwd=ROOT, capture_output=True, text=True)
    return [name.rstrip("/") for name in done.stdout.splitlines() if name.startswith(".")]


def copy_of_the_tree(folder):
    "Copy the tree, with links to this environment for `make`, and return the path of the copy."
    left_out = (".git", ".venv", "runs", "build", "dist", "node_modules", "_site", "_build")
    caches = ("__pycache__", ".*_cache", ".ipynb_checkpoints")
    ignored = shutil.ignore_patterns(*left_out, *caches, *private_folders())
    copy = folder / "kit"
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (copy / ".venv" / path.name).symlink_to(path)
    for stamp in (".lab", ".installed"):  # newer than all prerequisites
        (copy / ".venv" / stamp).unlink(missing_ok=True)
        (copy / ".venv" / stamp).touch()
    return copy


def run_in(kit, command):
    "Run a shell command in a copy of the tree; imports prefer the copy's package."
    environment = os.environ | {"PYTHONPATH": f"{kit.parent}:{kit}", "COLUMNS": "400"}
    return subprocess.run(
        command, shell=True, cwd=kit, capture_output=True, text=True, env=environment, timeout=900
    )


def assert_form(kit):
    "Check that format, lint and `test_house.py` accept a copy of the tree."
    for command in FORM:
        done = run_in(kit, f".venv/bin/{command}")
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
