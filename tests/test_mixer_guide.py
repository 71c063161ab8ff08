"""The contributing guide on mixers: its layer passes the checks of the command that it names, and broken layers read what is wrong."""

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
PLUGIN = (
    "from typing import NamedTuple\nimport torch\nfrom torch import nn\nfrom longhorn_kit.models.mixer import Mixer, register_mixer\n"
    + textwrap.dedent(re.search(r"```python\n(.*?)```", GUIDE, re.S)[1])
    + """
class Broken(Decay):
    def run(self, x, cache=None, keep_cache=False):
        return self.spoil(x, *super().run(x, None if self.forgets else cache, keep_cache))
    forgets = False

@register_mixer("decay_ahead") # sees the future
class Ahead(Broken):
    def spoil(self, x, y, cache): return y + x.mean(1, keepdim=True), cache

@register_mixer("decay_narrow") # returns the wrong shape
class Narrow(Broken):
    def spoil(self, x, y, cache): return y[..., 1:], cache

@register_mixer("decay_forgets") # does not carry its state while it decodes
class Forgets(Broken):
    forgets = True
    def spoil(self, x, y, cache): return y, cache
"""
)
DEMANDS = {
    "ahead": {
        "changing_a_token_changes_nothing_before_it": "Changing a token changes no output before it, and all outputs from there on. "
        "AssertionError: an output before the token changed"
    },
    "narrow": {"shapes": "Outputs have the shape (B,T,d_model) of the inputs"},
    "forgets": {
        "any_split_into_prefills_and_steps_equals_one_pass": "Any split into prefills and steps (a length of zero stands for a `step`) "
        "gives the outputs of one pass: the cache carries the whole state.",
        "gradients_flow_through_the_cache": "Two prefills in a row have the gradients of one pass",
    },
}


@pytest.mark.slow
def test_the_command_of_the_guide_accepts_its_layer_and_says_what_broken_ones_lack(tmp_path):
    "Layers named decay_... are broken; the command's -k takes all of them."
    (tmp_path / "guide.py").write_text(PLUGIN)
    command = shlex.split(re.search(r"`\.venv/bin/python (-m pytest .*? -k decay)`", GUIDE)[1])
    options = [
        "-p",
        "guide",
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=no",
        "-rfp",
        "-W",
        "ignore",
        "-o",
        "addopts=",
    ]
    done = subprocess.run(
        [sys.executable, *command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "400"},
    )
    found = {
        (kind, check, name): says
        for kind, check, name, says in re.findall(
            r"^(PASSED|FAILED) \S+::test_(\w+)\[(?:[\w.-]+-)?(decay\w*)(?:-[\w.-]+)?\](?: - (.*))?$",
            done.stdout,
            re.M,
        )
    }
    assert done.returncode == 1, done.stdout
    assert not [key for key in found if key[0] == "FAILED" and key[2] == "decay"], done.stdout
    assert len({check for kind, check, name in found if (kind, name) == ("PASSED", "decay")}) >= 20
    for name, demands in DEMANDS.items():
        for check, demand in demands.items():
            assert found["FAILED", check, f"decay_{name}"].startswith(demand), (name, check, found)
    assert all(
        re.match(r"[A-Z][^\n]+\.", says) for (kind, *_), says in found.items() if kind == "FAILED"
    )
