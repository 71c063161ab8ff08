"""Test the errors of `make release`, and that it tags last.

A stand-in for Python neither builds nor installs.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = """#!/bin/sh
case "$*" in (*"$FAIL"*) exit 1;; esac
case "$*" in ("-m venv "*)
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
  cp "$0" "$3/bin/longhorn";;
esac
"""
VERSION = re.search(r"^version = (.*)", (ROOT / "settings.ini").read_text(), re.M)[1]


def git(*words):
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def release(tmp_path, monkeypatch):
    (tmp_path / "kit/longhorn_kit").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "kit")
    for name in (
        "GIT_AUTHOR_NAME",
        "GIT_AUTHOR_EMAIL",
        "GIT_COMMITTER_NAME",
        "GIT_COMMITTER_EMAIL",
    ):
        monkeypatch.setenv(name, "a@example.org")
    for name in ("settings.ini", "CITATION.cff", "longhorn_kit/__init__.py"):
        shutil.copy(ROOT / name, name)
    Path("CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION} (2026-01-01)\n")
    Path(".gitignore").write_text("dist/\n")
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    git("init", "-q"), git("add", "."), git("commit", "-qm", "all")

    def run(version="", fail="nothing fails"):
        env = {**os.environ, "PYTHON": str(tmp_path / "python"), "VERSION": version, "FAIL": fail}
        done = subprocess.run(
            ["sh", str(ROOT / "tests/release.sh")], env=env, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_release_tags_only_with_version_and_only_once(release):
    assert release()[0] == 0
    assert git("tag") == ""
    status, out, _ = release(VERSION)
    assert status == 0
    assert f"git push origin v{VERSION}" in out
    assert git("cat-file", "-t", f"v{VERSION}") == "tag"
    result = git("rev-parse", f"v{VERSION}^{{}}")
    assert result == git("rev-parse", "HEAD")
    expected = (1, "", f"make release: the tag v{VERSION} exists\n")
    assert release(VERSION) == expected


@pytest.mark.parametrize(
    "file, old, new, version, message",
    [
        (
            "settings.ini",
            "status = 3",
            "status = 4",
            "",
            "the working tree has changes; commit or stash them first",
        ),
        (
            "settings.ini",
            VERSION,
            "9.9.9",
            "",
            f"has version 9.9.9, longhorn_kit/__init__.py has {VERSION}",
        ),
        ("CITATION.cff", f"version: {VERSION}", "", "", "CITATION.cff has none"),
        (
            "CHANGELOG.md",
            f"## {VERSION}",
            "## 9.9.9",
            "",
            "the first heading of CHANGELOG.md has 9.9.9",
        ),
        (
            "CHANGELOG.md",
            "2026-01-01",
            "unreleased",
            VERSION,
            f"CHANGELOG.md calls {VERSION} unreleased; write the date",
        ),
        (
            "CHANGELOG.md",
            "none",
            "",
            "9.9.9",
            f"VERSION=9.9.9, but settings.ini has version {VERSION}",
        ),
    ],
)
def test_release_refuses_in_one_sentence(release, file, old, new, version, message):
    Path(file).write_text(Path(file).read_text().replace(old, new))
    if "tree" not in message:
        git("commit", "-q", "--allow-empty", "-am", "edit")
    status, out, error = release(version)
    assert status == 1
    assert out == ""
    assert git("tag") == ""
    assert message in error
    assert error.startswith("make release: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "step", ["-m venv", "pip install", "-m build", "check --strict", "pip check", "--help", "-I -"]
)
def test_no_tag_after_a_failed_step(release, step):
    status, _, error = release(VERSION, fail=step)
    assert status == 1
    assert error.startswith("make release: ")
    assert git("tag") == ""
    assert not Path("dist").exists()
