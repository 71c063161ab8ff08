"""The guide on mixers: its layer passes the checks of its command, and broken layers fail."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .partition("## Add a mixer")[2]
    .partition("\n## ")[0]
)
LAYER = textwrap.dedent(re.search(r"```python\n(.*?)```", GUIDE, re.S)[1])
BROKEN = """
from longhorn_kit.models.mixer import Mixer, register_mixer

@register_mixer("decay_ahead") # sees the future
class Ahead(Decay):
    def run(self, x, cache=None, keep_cache=False):
        y, cache = super().run(x, cache, keep_cache)
        return y + x.mean(1, keepdim=True), cache

@register_mixer("decay_narrow") # returns the wrong shape
class Narrow(Decay):
    def run(self, x, cache=None, keep_cache=False):
        y, cache = super().run(x, cache, keep_cache)
        return y[..., 1:], cache

@register_mixer("decay_forgets") # does not carry its state while it decodes
class Forgets(Decay):
    def run(self, x, cache=None, keep_cache=False):
        return super().run(x, None, keep_cache)
"""
# broken layer -> check that it fails -> start of the message
DEMANDS = {
    "ahead": {
        "changing_a_token_changes_nothing_before_it": (
            "Changing a token changes no output before it, and all outputs from there on. "
            "AssertionError: an output before the token changed"
        )
    },
    "narrow": {"shapes": "Outputs have the shape of the inputs"},
    "forgets": {
        "any_split_into_prefills_and_steps_equals_one_pass": (
            "Any split into prefills and steps (a length of zero) gives the outputs of one pass."
        ),
        "gradients_flow_through_the_cache": "Two prefills in a row have the gradients of one pass",
    },
}
RESULT = re.compile(
    r"^(PASSED|FAILED) \S+::test_(\w+)\[(?:[\w.-]+-)?(decay\w*)(?:-[\w.-]+)?\](?: - (.*))?$", re.M
)
OPTIONS = (
    "-p guide -p no:cacheprovider -q --tb=no -rfp -W ignore -o addopts="  # prints one line per test
)


def run_guides_command(folder):
    "Run the command of the guide with the layers that `guide.py` in a folder registers."
    command = shlex.split(re.search(r"`\.venv/bin/python (-m pytest .*? -k decay)`", GUIDE)[1])
    return subprocess.run(
        [sys.executable, *command, *OPTIONS.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "COLUMNS": "400"},
    )


@pytest.mark.slow
def test_the_command_of_the_guide_accepts_its_layer_and_says_what_broken_ones_lack(tmp_path):
    "Layers named decay_... are broken; the command's -k takes all of them."
    (tmp_path / "guide.py").write_text(LAYER + BROKEN)
    done = run_guides_command(tmp_path)
    passed = set()
    failures = {}
    for outcome, check, name, message in RESULT.findall(done.stdout):
        if outcome == "PASSED":
            passed.add((check, name))
        else:
            failures[check, name] = message
    assert done.returncode == 1, done.stdout
    assert not [check for check, name in failures if name == "decay"], done.stdout
    assert len([check for check, name in passed if name == "decay"]) >= 20
    for name, demands in DEMANDS.items():
        for check, demand in demands.items():
            message = failures[check, f"decay_{name}"]
            assert message.startswith(demand), (name, check, message)
    for message in failures.values():
        assert re.match(r"[A-Z][^\n]+\.", message), message
