"""Run the cluster page's commands; two launchers replace two machines, and gloo replaces NCCL."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes import kills
from longhorn_kit import cli
from longhorn_kit.records import read_json, read_jsonl
from pool import free_port
from sweep import slow_case

ROOT = Path(__file__).parents[1]
SMALL = "--d-model 16 --n-layer 1 --context 32 --batch-size 4 --eval-every 400 --save-every 400"
COMMAND = f"train-lm --preset laptop {SMALL} --data text.txt".split()


def folder_of_node(path):
    "Return the working folder of a machine, with a copy of the text."
    path.mkdir()
    (path / "text.txt").write_text(
        "".join(f"{i} times {i % 7} is {i * (i % 7)}\n" for i in range(2000))
    )
    return path


def environment(node, **more):
    bin = Path(sys.executable).parent
    return (
        os.environ
        | dict(
            PYTHONPATH=str(ROOT),
            LONGHORN_CACHE=str(node / "cache"),
            CUDA_VISIBLE_DEVICES="",
            OMP_NUM_THREADS="1",
            PATH=f"{bin}:{os.environ['PATH']}",
        )
        | more
    )


def torchrun(node, *words, **more):
    "Start a launcher in the folder of a node; each node prepares the text separately."
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        cwd=node,
        env=environment(node, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def errors_in(text):
    return [line for line in text.splitlines() if "longhorn: error" in line]


def two_nodes(nodes, *commands, processes=1):
    "Run a command on each of two nodes; return the exit codes and the kit's messages."
    launch = (
        f"--nnodes 2 --nproc_per_node {processes} --rdzv_backend c10d "
        f"--rdzv_endpoint localhost:{free_port()} -m longhorn_kit.cli"
    ).split()
    agents = [
        torchrun(node, *launch, *command) for node, command in zip(nodes, commands, strict=True)
    ]
    try:
        reported = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # the launcher ends its processes
            agent.wait()
    codes = [agent.returncode for agent in agents]
    return codes, [errors_in(text) for text in reported]


@pytest.fixture
def nodes(tmp_path):
    return [folder_of_node(tmp_path / name) for name in ("one", "two")]


def files_of(node):
    return sorted(str(path) for path in node.rglob("*") if "cache" not in path.parts)


def files(nodes):
    return [files_of(node) for node in nodes]


@pytest.mark.slow  # test_distributed tests the error messages
@pytest.mark.parametrize(
    "options, other, says",
    [
        (
            "--out runs/run",
            "--out runs/run",
            r"is not the folder of process 0",
        ),  # there is no shared disk
        (
            "--out ../runs/run",
            "--out ../runs/run --lr -1",
            "lr is -1.0",
        ),  # the other node must not wait for it
    ],
)
def test_nodes_that_do_not_start_alike_are_refused_and_leave_nothing(nodes, options, other, says):
    before = files([nodes[0].parent])
    codes, reported = two_nodes(
        nodes, *([*COMMAND, "--steps", "4", *more.split()] for more in (options, other))
    )
    assert 0 not in codes
    assert files([nodes[0].parent]) == before
    assert [len(lines) for lines in reported] == [1, 1]
    for lines in reported:
        for line in lines:
            assert says in line
    if "folder" in says:  # host and folder of both nodes; either may have process 0
        for node in nodes:
            for lines in reported:
                for line in lines:
                    assert f"{node}/runs/run on {socket.gethostname()}" in line


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["auto", "hsdp"])
def test_nodes_train_in_a_shared_folder_on_texts_of_their_own(nodes, sharding):
    "hsdp: two machines with two processes each train like one process."
    nodes[1].joinpath("text.txt").rename(nodes[1] / "copy.txt")  # tokens are compared, not names
    commands = [
        [*COMMAND, "--steps", "4", "--sharding", sharding, "--out", "../run", "--data", name]
        for name in ("text.txt", "copy.txt")
    ]
    assert two_nodes(nodes, *commands, processes=1 + (sharding == "hsdp")) == ([0, 0], [[], []])
    result = read_jsonl(nodes[0].parent / "run" / "metrics.jsonl")
    assert len(result) == 4
    assert not list((nodes[0].parent / "run").glob(".start-*"))
    assert read_json(nodes[0].parent / "run" / "config.json")["attempts"][0]["engine"][
        "sharding"
    ] == sharding.replace("auto", "ddp")
    alone = subprocess.run(
        [sys.executable, "-m", "longhorn_kit.cli", *COMMAND, "--steps", "4", "--out", "alone"],
        cwd=nodes[0],
        env=environment(nodes[0]),
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    for own, reference in zip(
        result, read_jsonl(nodes[0] / "alone" / "metrics.jsonl"), strict=True
    ):
        assert [own["loss"], own.get("val_loss", 0)] == pytest.approx(
            [reference["loss"], reference.get("val_loss", 0)], rel=1e-5
        )


SLOW = """
import os, signal, sys, time
from longhorn_kit import cli
from longhorn_kit.lab.train.recipe import LossOnly
forward, calls = LossOnly.forward, []
def slow(self, tokens, targets):
    calls.append(1)
    mark = sys.argv[2].split(",")[0] + ".killed"
    dies = sys.argv[1].startswith("die")
    if dies and self.training and os.environ["RANK"] == "1" and not os.path.exists(mark):
        if len(calls) == int(sys.argv[1][3:]):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(sys.argv[1]) if self.training and not dies else 0)
    return forward(self, tokens, targets)
LossOnly.forward = slow
sys.exit(max([cli.main([*sys.argv[3:], "--out", out]) for out in sys.argv[2].split(",")]))
"""


def curve(folder):
    return [
        json.dumps([line["loss"], line["grad_norm"], line.get("val_loss")])
        for line in read_jsonl(folder / "metrics.jsonl")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 5, 9.5])
def test_sigterm_leaves_a_checkpoint_whatever_a_step_takes(tmp_path, seconds):
    "The processes stop within two steps, even between metrics, and resume bit for bit."
    node = folder_of_node(tmp_path / "node")
    (node / "slow.py").write_text(SLOW)

    def start(*rest):
        return torchrun(
            node,
            "--nproc_per_node",
            2,
            "--master_port",
            free_port(),
            "slow.py",
            *rest,
            *COMMAND,
            "--steps",
            12,
        )

    launcher = start(seconds, "run")
    until = time.monotonic() + 300
    while not (node / "run" / "config.json").exists():
        assert launcher.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(seconds / 2)  # in the first or second step, after the vote
    launcher.send_signal(signal.SIGTERM)
    reported = launcher.communicate(timeout=300)[0]
    [checkpoint] = (node / "run" / "checkpoints").iterdir()
    step = read_json(checkpoint / "checkpoint.json")["step"]
    assert launcher.returncode == 1
    assert step <= 4
    assert f"error: stopped by SIGTERM after step {step}; run has the checkpoint" in reported
    repeated = start(0, "run,whole")
    reported = repeated.communicate(timeout=300)[0]
    assert repeated.returncode == 0, reported
    assert curve(node / "run") == curve(node / "whole")
    assert len(curve(node / "run")) == 12
    assert [
        attempt["from_step"] for attempt in read_json(node / "run" / "config.json")["attempts"]
    ] == [0, step]


@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_ten_runs_with_a_killed_process_go_on_by_themselves(tmp_path):
    "With --max-restarts, each run ends within three minutes, with undisturbed losses."
    node = folder_of_node(tmp_path / "node")
    (node / "slow.py").write_text(SLOW)
    whole = torchrun(
        node,
        "--standalone",
        "--nproc-per-node",
        2,
        "slow.py",
        0,
        "whole",
        *COMMAND,
        "--steps",
        12,
        "--save-every",
        3,
    )
    assert (whole.communicate(timeout=300), whole.returncode)[1] == 0
    for n in kills(10):
        started = time.monotonic()
        launcher = torchrun(
            node,
            *[
                "--nnodes",
                "1",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "3",
                "--rdzv-backend",
                "c10d",
                "--rdzv-id",
            ],
            n,
            "--rdzv-endpoint",
            f"localhost:{free_port()}",
            "slow.py",
            f"die{n}",
            f"run{n}",
            *COMMAND,
            "--steps",
            12,
            "--save-every",
            3,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        reported = launcher.communicate(timeout=180)[0]
        assert launcher.returncode == 0, reported
        assert (node / f"run{n}.killed").exists(), n
        result = curve(node / f"run{n}")
        assert result == curve(node / "whole"), n
        assert time.monotonic() - started < 180
        result = len(read_json(node / f"run{n}" / "config.json")["attempts"])
        assert result == 2


LEAVES = """
import glob, torch
from longhorn_kit.lab.distributed import leave
torch.distributed.init_process_group("gloo")
cycle = [torch.distributed.group.WORLD] # as a trained model holds it
cycle.append(cycle)
del cycle
torch.distributed.all_reduce(torch.ones(9))
leave()
names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
assert names and not any("gloo" in name for name in names), names
"""


@pytest.mark.slow  # test_distributed tests one process
@pytest.mark.skipif(sys.platform != "linux", reason="the threads are read from /proc")
def test_no_thread_of_the_connections_outlives_them(tmp_path):
    "No thread waits for the interpreter's lock at exit, which would abort the process."
    (tmp_path / "leaves.py").write_text(LEAVES)
    launcher = torchrun(tmp_path, "--standalone", "--nproc-per-node", 2, "leaves.py")
    reported = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0, reported


# ---- the page


def commands():
    "Return the shell commands of the page by the names in their comments."
    page = json.loads((ROOT / "nbs" / "lab" / "41_cluster.ipynb").read_text())
    text = "\n".join(
        "".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "markdown"
    )
    return {
        re.search(r"^# (.+)$", block, re.M)[1]: block
        for block in re.findall(r"^```bash\n(.+?)^```$", text, re.M | re.S)
    }


def at_toy_size(block, node):
    "Return the same command with two processes, a tiny model and existing folders."
    for pattern, own in {
        r"--nproc-per-node 8": "--nproc-per-node 2",
        r"--preset owt-\S+": f"--preset laptop {SMALL} --steps 4 --data text.txt",
        r"--gradient_accumulation_steps 5": "--gradient_accumulation_steps 1",
        r"hf:Skylion007/openwebtext": "text.txt",
        r"--tokenizer gpt2 --fraction 0.0005 --workers 16": "",
        r"/(shared|disk)": str(node),
        r"\$first:29500": f"localhost:{free_port()}",
        r"--save-seconds 300": "--save-seconds 0",
        r"--preset imagenet-vim-tiny --data \S+": "--preset digits --epochs 1 --batch-size 128",
        r"--scale gpu": "--scale laptop",
        r"--slurm slurm_partition=gpu gpus_per_node=1": "--slurm cluster=local",
        r"reproduce mqar": "reproduce recall",
        r"--workers 64": "--workers 2 --minutes 0.01",
    }.items():
        block = re.sub(pattern, own, block)
    return block


STANDS_FOR = {
    "scontrol": "#!/bin/sh\necho first; echo second\n",
    "srun": '#!/bin/sh\n"$@" & one=$!\n"$@" & two=$!\nwait $one && wait $two\n',
}  # one launcher per machine


@pytest.mark.parametrize(
    "name",
    [
        slow_case(name)
        for name in ("grid", "prepare", "one machine", "images", "two machines", "spot machine")
    ],
)
def test_every_command_of_the_page_runs(tmp_path, name):
    assert set(commands()) == {
        "prepare",
        "one machine",
        "images",
        "two machines",
        "grid",
        "spot machine",
    }
    node = folder_of_node(tmp_path / "node")
    (bin := node / "bin").mkdir()
    for program, text in STANDS_FOR.items():
        (bin / program).write_text(text)
        (bin / program).chmod(0o755)
    text = at_toy_size(commands()[name], node)
    more = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "machine[1-2]",
        "PATH": f"{bin}:{environment(node)['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-ec", text],
        cwd=node,
        env=environment(node, **more),
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = done.stdout + done.stderr
    if name == "grid":  # stopped at once; without a cluster it prints one sentence
        assert done.returncode == 1, said
        assert "the same command resumes" in said, said
    else:
        assert done.returncode == 0, said
    if name in ("one machine", "images", "two machines", "spot machine"):
        [metrics] = (
            path for path in node.rglob("metrics.jsonl") if "checkpoints" not in path.parts
        )
        sizes = read_json(metrics.parent / "config.json")["attempts"][0]["engine"]
        count = 4 if name == "two machines" else 2
        assert [line["step"] for line in read_jsonl(metrics)] == list(
            range(1, 12 if name == "images" else 5)
        )
        assert sizes["processes"] == count
        assert sizes["sharding"] == ("hsdp" if count == 4 else "ddp")
        assert sizes["device"] == "cpu"
        newest = max(
            (metrics.parent / "checkpoints").iterdir()
        )  # every process has written its share
        result = {path.name.split("_")[2] for path in newest.glob("__*.distcp")}
        expected = set(map(str, range(count)))
        assert result == expected


@pytest.mark.parametrize(
    "command", [COMMAND, ["train-vision", "--preset", "digits"]], ids=["train-lm", "train-vision"]
)
def test_accelerate_launch_starts_one_process_on_the_cpu_and_is_refused(
    tmp_path, monkeypatch, capsys, command
):
    "Run in the environment of that process; torchrun starts all processes."
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = ["--cpu", "--num_processes", "2", "--no_python", "longhorn", *command]
    started, environ = prepare_simple_launcher_cmd_env(
        _validate_launch_command(launch_command_parser().parse_args(words))[0]
    )
    assert started == ["longhorn", *command]
    assert "WORLD_SIZE" not in environ
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "--out", "run"]) == 1
    assert not list(tmp_path.iterdir())  # nothing was prepared
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert (
        "error: `accelerate launch` started only one of several requested processes; "
        "start them with `torchrun" in said[0]
    )
