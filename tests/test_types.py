"""Type checkers read the package's annotations, and `help()` explains every argument."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import longhorn_kit
from longhorn_kit.lab.train.loop import train
from longhorn_kit.models.vision import VisionLonghorn

ROOT = Path(__file__).parents[1]
EXPLAINED = [getattr(longhorn_kit, name) for name in longhorn_kit.__all__ if name != "MIXERS"] + [
    longhorn_kit.SequenceLM.generate,
    VisionLonghorn,
    train,
]


@pytest.mark.parametrize("thing", EXPLAINED, ids=lambda thing: thing.__qualname__)
def test_help_explains_every_argument(thing):
    text = inspect.getdoc(thing)
    lines = text[text.index("\nArguments:\n") :].splitlines()
    for name in inspect.signature(thing).parameters:
        if name != "self":
            assert any(re.search(rf"\b{name}: .*# \S", line) for line in lines), name


USER = """
from pathlib import Path
import timm
import longhorn_kit.models.vision
from longhorn_kit import LMConfig, MIXERS, SequenceLM, causal_conv1d, longhorn_step

alone = longhorn_scan(q, k, x, b, form="diagonal")
print(alone.shape, causal_conv1d(x, torch.randn(64, 4)).shape)
out_t, state = longhorn_step(q[:, 0], k[:, 0], x[:, 0], b[:, 0], state, form="exact")
y, cache = layer.prefill(y)
y_t, cache = layer.step(y[:, -1], cache)

config = LMConfig(vocab_size=256, d_model=64, n_layer=2, mixer="longhorn_exact")
model = SequenceLM(config, device="cpu", dtype=torch.float32)
tokens = torch.randint(256, (2, 32))
logits, loss = model(tokens, tokens)
loss.backward()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(model.num_parameters(), sorted(MIXERS), model.generate(tokens, 8, top_k=20, seed=0).shape)
model.eval().save_pretrained(Path("model"))
loaded = SequenceLM.from_pretrained("model")
print(loaded.generate(tokens, 8).shape)

images = torch.randn(1, 3, 8, 8)
print(timm.create_model("longhorn_vim_nano_patch2_8", num_classes=10)(images).shape)
print(longhorn_kit.models.vision.VisionLonghorn(img_size=8, patch_size=2)(images).shape)
"""
WRONG = {
    'Longhorn(d_model="wide")': '"d_model" to "Longhorn" has incompatible type "str"',
    "longhorn_scan(q, k, x, b, frm=1)": '"frm"',
    "model.generate(tokens)": '"max_new_tokens"',
    "longhorn_step(q, k, x, b, state) + 1": "__add__",
    "longhorn_kit.no": '"no"',
}


@pytest.mark.slow
def test_mypy_checks_a_users_script_against_the_installed_package(tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    packages = next(path for path in (tmp_path / "env").rglob("site-packages"))
    shutil.copytree(
        ROOT / "longhorn_kit",
        packages / "longhorn_kit",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    readme = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )[1]
    script = readme + USER + "\n".join(WRONG) + "\n"
    (tmp_path / "script.py").write_text(script)
    python = next(path for path in (tmp_path / "env").glob("*/python*") if path.stem == "python")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "script.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if "PYTHONPATH" not in name},
    )
    errors = re.findall(r"script\.py:(\d+): error: (.*)", done.stdout)
    first = script.count("\n") - len(WRONG) + 1
    lines = {int(line) for line, _ in errors}
    expected = set(range(first, first + len(WRONG)))
    assert lines == expected, done.stdout + done.stderr
    messages = [message for _, message in errors]
    for expected in WRONG.values():
        assert any(expected in message for message in messages), done.stdout
