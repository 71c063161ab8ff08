"""Tests of several processes as `torchrun` starts them: two machines (here two agents) and SIGTERM to the launcher."""

import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
import pytest
from longhorn_kit.records import read_json, read_jsonl

COMMAND = ("train-lm --preset laptop --d-model 16 --n-layer 1 --context 32 --batch-size 4 --eval-every 400 --save-every 400 "
           "--data text.txt").split()


def folder_of_node(path):
    "The working folder of a machine, with a copy of the text."
    path.mkdir()
    (path / "text.txt").write_text("".join(f"{i} times {i % 7} is {i * (i % 7)}\n" for i in range(2000)))
    return path


def torchrun(node, *words):
    "A launcher in the folder of a node; each node prepares the text for itself."
    root = Path(__file__).parent.parent
    shared = dict(PYTHONPATH=str(root), LONGHORN_CACHE=str(node / "cache"), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *map(str, words)], cwd=node, env=os.environ | shared,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two_nodes(nodes, *commands):
    "Run a command on each of two nodes; their exit codes and the kit's messages."
    place = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:{free_port()} -m longhorn_kit.cli".split()
    agents = [torchrun(node, *place, *command) for node, command in zip(nodes, commands, strict=True)]
    try:
        told = [agent.communicate(timeout=60)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate() # it ends its processes
            agent.wait()
    return [agent.returncode for agent in agents], [[line for line in text.splitlines() if "longhorn: error" in line] for text in told]


@pytest.fixture
def nodes(tmp_path):
    return [folder_of_node(tmp_path / name) for name in ("one", "two")]


def files(nodes):
    return [sorted(str(path) for path in node.rglob("*") if "cache" not in path.parts) for node in nodes]


@pytest.mark.parametrize("options, other, says", [
    ("--out runs/run", "--out runs/run", r"is not the folder of process 0"), # without a shared disk
    ("--out ../runs/run", "--out ../runs/run --lr -1", "lr is -1.0"), # the other must not wait for it
])
def test_nodes_that_do_not_start_alike_are_refused_and_leave_nothing(nodes, options, other, says):
    before = files([nodes[0].parent])
    codes, told = two_nodes(nodes, *([*COMMAND, "--steps", "4", *more.split()] for more in (options, other)))
    assert 0 not in codes and files([nodes[0].parent]) == before
    assert [len(lines) for lines in told] == [1, 1] and all(says in line for lines in told for line in lines)
    if "folder" in says: # host and folder of both, whichever node has process 0
        assert all(f"{node}/runs/run on {socket.gethostname()}" in line for node in nodes for lines in told for line in lines)


def test_nodes_train_in_a_shared_folder_on_texts_of_their_own(nodes):
    nodes[1].joinpath("text.txt").rename(nodes[1] / "copy.txt") # the tokens decide, not the name
    commands = [[*COMMAND, "--steps", "4", "--out", "../run", "--data", name] for name in ("text.txt", "copy.txt")]
    assert two_nodes(nodes, *commands) == ([0, 0], [[], []])
    assert len(read_jsonl(nodes[0].parent / "run" / "metrics.jsonl")) == 4
    assert not list((nodes[0].parent / "run").glob(".start-*"))


SLOW = """
import sys, time
from longhorn_kit import cli
from longhorn_kit.lab.training import LossOnly
forward = LossOnly.forward
def slow(self, tokens, targets):
    time.sleep(float(sys.argv[1]) if self.training else 0)
    return forward(self, tokens, targets)
LossOnly.forward = slow
sys.exit(max([cli.main([*sys.argv[3:], "--out", out]) for out in sys.argv[2].split(",")]))
"""


@pytest.mark.parametrize("seconds", [0.3, pytest.param(5, marks=pytest.mark.slow), pytest.param(9.5, marks=pytest.mark.slow)])
def test_sigterm_leaves_a_checkpoint_whatever_a_step_takes(tmp_path, seconds):
    "The processes stop within two steps, not only when metrics are written, and resume to the bit."
    node = folder_of_node(tmp_path / "node")
    (node / "slow.py").write_text(SLOW)
    words = ["--nproc_per_node", 2, "--master_port", free_port(), "slow.py"]
    launcher = torchrun(node, *words, seconds, "run", *COMMAND, "--steps", 12)
    until = time.monotonic() + 60
    while not (node / "run" / "config.json").exists():
        assert launcher.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    time.sleep(seconds / 2) # in the first or second step, after its vote
    launcher.send_signal(signal.SIGTERM)
    told = launcher.communicate(timeout=60)[0]
    [checkpoint] = (node / "run" / "checkpoints").iterdir()
    step = read_json(checkpoint / "checkpoint.json")["step"]
    assert launcher.returncode == 1 and step <= 4 and f"error: stopped by SIGTERM after step {step}; run has the checkpoint" in told
    again = torchrun(node, *words, 0, "run,whole", *COMMAND, "--steps", 12)
    assert (again.communicate(timeout=60), again.returncode)[1] == 0
    resumed, whole = ([json.dumps([line["loss"], line["grad_norm"], line.get("val_loss")])
                       for line in read_jsonl(node / name / "metrics.jsonl")] for name in ("run", "whole"))
    assert resumed == whole and len(whole) == 12
    assert [attempt["from_step"] for attempt in read_json(node / "run" / "config.json")["attempts"]] == [0, step]
