"""Random command lines and calls with a seed: each works, or fails with one sentence.

python -m pytest tests/test_fuzz.py -m slow     # some cases, in a minute (make test-all)
python -m pytest tests/test_fuzz.py -m release  # 500 command lines and 500 calls, in ten minutes
"""

import functools
import os
import random
import re
import resource
import select
import shlex
import signal
import sys
import time
import traceback

import numpy as np
import pytest
import torch

from forks import print_to
from longhorn_kit import cli
from longhorn_kit.models import MIXERS, LMConfig, SequenceLM
from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.scan import causal_conv1d, longhorn_scan, longhorn_step

PART = 40
ALL = 500
MEMORY = 6 << 30
NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "7",
    "1e3",
    "2.5",
    "nan",
    "inf",
    "-inf",
    "1e-400",
    str(2**31),
    str(2**63),
    str(10**30),
    "abc",
    "",
    "True",
    "None",
    "0x10",
]
TEXTS = [
    "",
    " ",
    "no/such/file",
    "/dev/null",
    ".",
    "..",
    "a b",
    "\u00e4\u200b",
    "x" * 5000,
    "--",
    "hf:",
    "hf:no/such",
    "stdlib",
    "bytes",
    "gpt2",
    "longhorn",
    "mamba",
]


def forked(work, limit):  # work() -> exit code; prints to the screen
    "Run in a forked process; return (exit code or None after `limit` seconds, output, seconds)."
    screen = os.pipe()
    start = time.monotonic()
    if not (pid := os.fork()):
        code = 99
        try:
            os.setsid()
            print_to(screen[1])
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            # OpenMP's threads do not survive a fork: waiting for a second thread would never end
            torch.set_num_threads(1)
            code = work()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)
    os.close(screen[1])
    said = b""
    over = False
    while select.select([screen[0]], [], [], max(0, limit - (time.monotonic() - start)))[0]:
        if not (more := os.read(screen[0], 65536)):
            break
        said += more
    else:
        over = True
        os.killpg(pid, signal.SIGKILL)
    os.close(screen[0])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if over else code, said.decode(errors="replace"), time.monotonic() - start


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory):
    "Make a folder with texts and a trained model."
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_text("The cat sat on the mat. A dog sees a bird.\n\n" * 400)
    (folder / "text.jsonl").write_text('{"text": "one two three"}\n' * 300)
    torch.manual_seed(0)
    from longhorn_kit.lab.train.lm import save_lm

    save_lm(SequenceLM(LMConfig(256, 16, 1, "longhorn")), "bytes", folder / "model")
    return folder


def base_commands(folder):
    small = shlex.split("--steps 2 --batch-size 2 --context 16 --d-model 8 --n-layer 1 --cpu")
    digits = shlex.split("train-vision --preset digits --epochs 1 --batch-size 600 --cpu")
    train = ["train-lm", "--preset", "laptop", "--data", f"{folder}/text.txt", "--out", "{out}"]
    return [
        [*train, *small],
        ["prepare", f"{folder}/text.jsonl", "--cache", "{out}"],
        ["generate", f"{folder}/model", "--tokens", "3"],
        ["export", f"{folder}/model", "{out}"],
        [*digits, "--out", "{out}"],
        ["claims", "--out", "{out}"],
    ]


FLAGS = {
    "train-lm": "steps batch-size context d-model n-layer gradient-accumulation-steps lr "
    "min-lr-ratio warmup weight-decay beta1 beta2 clip ema precision seed eval-every log-every "
    "save-every save-seconds save-total-limit loss-chunk fraction pad-vocab sizes dropout val "
    "mixer preset data tokenizer sharding decay out",
    "prepare": "tokenizer val fraction text-column workers limit tokens cache",
    "generate": "prompt tokens temperature top-k top-p seed tokenizer",
    "export": "tokenizer context",
    "train-vision": "preset batch-size lr epochs warmup-epochs img-size drop-path smoothing mixup "
    "cutmix auto-augment repeats workers seed model data init-from crop-pct",
    "claims": "out json",
}


def command(rng, folder, out):
    "Return a command line with one to three odd flags or words."
    words = [
        word.format(out=out) if "{out}" in word else word
        for word in rng.choice(base_commands(folder))
    ]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.8:
            words += [
                f"--{rng.choice(FLAGS[words[0]].split())}",
                rng.choice(rng.choice((NUMBERS, NUMBERS, TEXTS))),
            ]
        elif kind < 0.9 and len(words) > 2:
            words.pop(rng.randrange(1, len(words)))
        else:
            words.insert(rng.randrange(1, len(words) + 1), rng.choice(TEXTS))
    return words


def problem_of(code, said, seconds):
    "Return the fault in a command's exit code and output, or None."
    if code is None:
        return "hangs"
    if code < 0:
        return "ends by a signal"
    if "Traceback (most recent" in said:
        return "traceback"
    if code and seconds > 20:
        return "slow refusal"
    if code and not said.strip():
        return "fails without a word"
    return None


def check_commands(folder, tmp_path, seeds):
    bad = []
    os.chdir(tmp_path)  # some commands write into the current folder
    for seed in seeds:
        rng = random.Random(seed)
        words = command(rng, folder, tmp_path / f"out{seed}")
        os.environ["LONGHORN_CACHE"] = str(tmp_path / "cache")
        code, said, seconds = forked(functools.partial(cli.main, words), 90)
        problem = problem_of(code, said, seconds)
        if problem:
            shown = " ".join(map(repr, words))[:300]
            end = f"(code {code}, {seconds:.1f} s)"
            bad.append(f"seed {seed}: {problem} {end}: longhorn {shown}\n    {said[-600:]}")
    assert not bad, f"{len(bad)} of {len(seeds)}:\n" + "\n".join(bad)


ODD = [
    None,
    [],
    [1.0],
    "x",
    3,
    2.5,
    float("nan"),
    True,
    {},
    np.zeros(3),
    torch.zeros(()),
    torch.zeros(0),
    torch.zeros(2, 5, 4, dtype=torch.int64),
    torch.zeros(2, 5, 4, dtype=torch.complex64),
    torch.zeros(2, 5, 4, dtype=torch.float16),
    torch.zeros(2, 5, 4, dtype=torch.float64),
    torch.zeros(2, 5, 4, dtype=torch.bool),
    torch.zeros(2, 5),
    torch.zeros(1, 1, 1),
    torch.zeros(2, 5, 4, device="meta"),
    torch.zeros(2, 5, 2**20).expand(2, 5, 2**20),
    -1,
    2**40,
    "exact",
    "auto",
]


def call(rng):
    "Return (name, function without arguments) of a call with one or two odd arguments."

    def T(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.randrange(9)))

    kind = rng.randrange(7)
    if kind < 3:
        function, given = [
            (
                longhorn_scan,
                dict(
                    q=T(2, 5, 4),
                    k=T(2, 5, 4),
                    x=T(2, 5, 3),
                    b=T(2, 5, 3),
                    form=rng.choice(("exact", "diagonal")),
                ),
            ),
            (longhorn_step, dict(q=T(2, 4), k=T(2, 4), x=T(2, 3), b=T(2, 3), state=T(2, 3, 4))),
            (causal_conv1d, dict(x=T(2, 5, 3), weight=T(3, 4), bias=T(3))),
        ][kind]
        more = (
            "b_bias",
            "D_skip",
            "z",
            "initial_state",
            "output_final_state",
            "cu_seqlens",
            "backend",
            "checkpoint",
            "form",
        )
        for _ in range(rng.choice((1, 1, 2))):
            given[rng.choice([*given] + [name for name in more if kind == 0])] = rng.choice(ODD)
        return (
            f"{function.__name__}({ {n: describe(v) for n, v in given.items()} })",
            lambda: function(**given),
        )
    if kind < 5:
        mixer = rng.choice(sorted(MIXERS))
        given = rng.choice(ODD)
        return f"{mixer}(16)({describe(given)})", lambda: build_mixer(mixer, 16)(given)
    if kind == 5:
        name = rng.choice(
            (
                "vocab_size",
                "d_model",
                "n_layer",
                "mixer",
                "d_mlp",
                "dropout",
                "tie_embeddings",
                "mixer_options",
                "norm_eps",
            )
        )
        value = rng.choice(ODD)
        return f"LMConfig({name}={describe(value)})", lambda: SequenceLM(
            LMConfig(**dict(vocab_size=9, d_model=8, n_layer=1) | {name: value})
        )
    given = rng.choice(ODD)
    return f"SequenceLM(...)({describe(given)})", lambda: SequenceLM(LMConfig(9, 8, 1))(given)


def describe(value):
    return (
        f"{value.dtype} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)[:60]
    )


def tried(name, function):
    "Return 0 for a result, or for one sentence that names the fault, and 3 otherwise."
    try:
        function()
    except (ValueError, TypeError, NotImplementedError) as error:
        said = str(error)
        if (
            "\n" in said.strip()
            or not said.strip()
            or re.search(
                r"linear\(\)|addmm|NoneType.* has|has no attribute|expected scalar type|mat1", said
            )
        ):
            print(f"{name}: {type(error).__name__}: {said[:300]}")
            return 3
    return 0


def check_calls(seeds):
    bad = []
    for seed in seeds:
        name, function = call(random.Random(seed))
        code, said, seconds = forked(functools.partial(tried, name, function), 20)
        if code != 0 or seconds > 5:
            end = said.strip()[-300:]
            bad.append(f"seed {seed}: code {code}, {seconds:.1f} s, {name[:200]}\n    {end}")
    assert not bad, f"{len(bad)} of {len(seeds)}:\n" + "\n".join(bad)


@pytest.mark.slow
def test_some_command_lines(fuzz_folder, tmp_path):
    check_commands(fuzz_folder, tmp_path, range(PART))


@pytest.mark.slow
def test_some_calls():
    check_calls(range(2 * PART))


@pytest.mark.release
@pytest.mark.timeout(3000)
def test_all_command_lines(fuzz_folder, tmp_path):
    check_commands(fuzz_folder, tmp_path, range(ALL))


@pytest.mark.release
@pytest.mark.timeout(3000)
def test_all_calls():
    check_calls(range(ALL))
