"""Records, claims, exports and prepared text survive kills, damage and full disks: `make faults`.

Children are forked from one warm process."""

import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import fakes
from forks import print_to
from longhorn_kit import cli, records
from longhorn_kit.lab import run
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.ledger import ledger, ledger_html, ledger_text
from longhorn_kit.lab.data import corpus
from longhorn_kit.lab.train.checkpoint import checkpoints, read_checkpoint
from longhorn_kit.lab.train.lm import save_lm
from longhorn_kit.models import LMConfig, SequenceLM
from pictures import filled
from texts import sources

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
RESULTS = Path(__file__).parents[1] / "nbs" / "lab" / "results"


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    fake_claims = [fakes.claim(), fakes.claim("second")]
    monkeypatch.setattr(claims, "CLAIMS", fake_claims)
    monkeypatch.setattr("longhorn_kit.lab.claims.ledger.results_folder", lambda: None)
    monkeypatch.setattr(run, "engine_for", lambda *_: run.Here())
    monkeypatch.setattr(records, "commit_of_kit", lambda: None)
    fakes.errors.clear()
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def watch(folder, kill_at):
    "Count the file operations under a folder; kill this process before number `kill_at`."
    observed = [0]

    def step():
        observed[0] += 1
        if observed[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, arguments):
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
        has_path = (writes or changes) and isinstance(arguments[0], (str, bytes, os.PathLike))
        if has_path and str(folder) in os.path.abspath(os.fsdecode(arguments[0])):
            step()

    fsync = os.fsync
    exchange = records.exchange

    def counted_fsync(handle):
        step()
        fsync(handle)

    def counted_exchange(one, other):
        step()
        return exchange(one, other)

    os.fsync = counted_fsync
    records.exchange = counted_exchange
    sys.addaudithook(hook)
    return observed


def child(argv, folder, kill_at=0, limit=None):
    "Run a command in a forked process; return exit code, output, number of file operations."
    counted = os.pipe()
    screen = os.pipe()  # the limit on file sizes does not apply to a pipe
    if not (pid := os.fork()):
        code = 1
        try:
            print_to(screen[1])
            os.close(screen[1])
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            observed = watch(folder, kill_at)
            code = cli.main(argv)
            sys.stdout.flush()
            sys.stderr.flush()
            count = str(observed[0]).encode()
            os.write(counted[1], count)
        finally:
            os._exit(code)
    os.close(counted[1])
    os.close(screen[1])
    with open(screen[0]) as file:
        output = file.read()
    with open(counted[0]) as file:
        operations = int(file.read() or 0)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), output, operations


def files_in(folder):
    paths = folder.rglob("*")
    return sorted(str(path.relative_to(folder)) for path in paths)


def killed_and_resumed(argv, here, operations, between=lambda folder: None):
    "Kill a command at each of its file operations and run it again; yield its folder and output."
    for n in fakes.kills(operations):
        folder = here / f"killed{n}"
        result = child(argv(folder), folder, n)[0]
        assert result == -signal.SIGKILL
        between(folder)
        code, repeated, _ = child(argv(folder), folder)
        assert code == 0, (n, repeated)
        yield folder, repeated.replace(folder.name, "whole")
        shutil.rmtree(folder)


def stable(text):
    "Return the printed lines with scores and reports, which do not change between runs."
    lines = text.splitlines()
    return [line for line in lines if "score" in line or line.startswith("report")]


def test_reproduce_killed_at_every_file_operation(here):
    def argv(folder):
        return ["reproduce", "--out", str(folder)]

    code, output, operations = child(argv(here / "whole"), here / "whole")
    assert code == 0
    assert operations > 20

    def numbers(folder):
        return [
            records.read_record(folder / name / "laptop" / "record.json")["results"]
            for name in ("fake", "second")
        ]

    def named(folder):
        paths = folder.rglob("*.json")
        return [path for path in paths if not path.name.startswith(".")]

    def whole(folder):
        return all(map(records.read_record, named(folder)))  # files with final names

    for folder, repeated in killed_and_resumed(argv, here, operations, between=whole):
        assert numbers(folder) == numbers(here / "whole")
        assert stable(repeated) == stable(output)
        assert files_in(folder) == files_in(here / "whole")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hub"])
def test_prepare_killed_at_every_file_operation(here, monkeypatch, kind):
    source = sources(here)[kind]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(corpus, "PIECE", 10_000)
    monkeypatch.setattr(corpus, "batch_of", lambda documents: list(itertools.islice(documents, 20)))
    corpus.prepare(
        source, cache=here / "warm", workers=1
    )  # imports the modules that the children need

    def argv(folder):
        return ["prepare", source, "--cache", str(folder), "--workers", "1"]

    code, output, operations = child(argv(here / "whole"), here / "whole")
    assert code == 0
    assert operations > 30
    whole = {
        name: (here / "whole" / name).read_bytes()
        for name in files_in(here / "whole")
        if name.endswith(("bin", "index.json"))
    }
    for folder, repeated in killed_and_resumed(argv, here, operations):

        def lines(text):
            return [
                line
                for line in text[text.index("to train on") :].splitlines()
                if "checked" not in line
            ]

        assert lines(repeated) == lines(output), repeated
        assert {name: (folder / name).read_bytes() for name in whole} == whole
        assert files_in(folder) == files_in(here / "whole")


def small_model(folder, seed):
    torch.manual_seed(seed)
    SequenceLM(LMConfig(vocab_size=256, d_model=8, n_layer=1)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    "Import the modules of export and generate before the children are forked."
    folder = tmp_path_factory.mktemp("warm")
    model = small_model(folder / "model", 0)
    result = cli.main(["export", str(model), str(folder / "out")])
    assert result == 0
    assert cli.main(["generate", str(folder / "out"), "--tokens", "1"]) == 0


def writes(folder):
    "Return exit code and output of `longhorn generate` on a folder."
    return child(
        ["generate", str(folder), "--tokens", "8", "--top-k", "1", "--prompt", "a"],
        folder.parent / "generate",
    )[:2]


@pytest.mark.parametrize("swap", [True, False])
def test_export_killed_at_every_file_operation(here, warm, monkeypatch, swap):
    if not swap:  # some systems cannot swap two folders in one step
        monkeypatch.setattr(records, "exchange", lambda one, other: False)
    old = small_model(here / "old", 0)
    new = small_model(here / "new", 1)

    def argv(model, folder):
        return ["export", str(model), str(folder)]

    result = child(argv(old, here / "a" / "out"), here / "a")[0]
    assert result == 0
    shutil.copytree(here / "a", here / "b")
    text_of_old = writes(here / "b" / "out")
    out = here / "b" / "out"
    code, _, operations = child(argv(new, out), here / "b")
    text_of_new = writes(here / "b" / "out")
    assert code == 0
    assert operations > 15
    assert text_of_old[0] == text_of_new[0] == 0
    assert text_of_old != text_of_new
    result = set()
    for n in fakes.kills(operations):
        shutil.rmtree(here / "c", ignore_errors=True)
        shutil.copytree(here / "a", here / "c")
        out = here / "c" / "out"
        assert child(argv(new, out), here / "c", n)[0] == -signal.SIGKILL
        result.add(writes(here / "c" / "out"))
        assert result <= {text_of_old, text_of_new}
        out = here / "c" / "out"
        assert child(argv(new, out), here / "c")[0] == 0
        assert writes(here / "c" / "out") == text_of_new
        assert files_in(here / "c") == files_in(here / "b")
    assert result == {text_of_old, text_of_new}


def damage(path, chance):
    "Damage a file at random; return the kind of damage, and whether the file has changed."
    data = path.read_bytes()
    kind = chance.choice(["bit", "byte", "zeros", "cut", "garbage", "empty", "number"])
    digits = [i for i, byte in enumerate(data) if kind == "number" and chr(byte) in "0123456789"]
    at = chance.choice(digits or range(max(1, len(data))))
    byte = data[at : at + 1]
    rest = data[at + 1 :]
    if kind == "number" and digits:  # replace a digit by another
        byte = str((int(byte) + chance.randrange(1, 10)) % 10).encode()
    elif kind in ("bit", "byte") and data:
        byte = bytes(
            [byte[0] ^ 1 << chance.randrange(8) if kind == "bit" else chance.randrange(256)]
        )
    elif kind == "zeros":
        byte = bytes(len(data[at : at + 64]))
        rest = data[at + 64 :]
    whole = {"cut": data[:at], "garbage": chance.randbytes(200), "empty": b""}
    path.write_bytes(whole.get(kind, data[:at] + byte + rest))
    return kind, path.read_bytes() != data


def test_a_hundred_damaged_records_change_no_number(here, monkeypatch):
    monkeypatch.undo()
    chance = random.Random(39)
    whole = {
        row.comparison.label: row
        for row in ledger("none")
        if row.claim.name in ("recall", "vision", "mqar", "language")
    }
    for n in range(100):
        name = chance.choice(["recall", "vision", "language", "mqar"])
        path = here / "results" / name / "laptop.json"
        shutil.copytree(RESULTS / name, path.parent, dirs_exist_ok=True)
        kind, changed = damage(path, chance)
        rows = [
            row
            for row in ledger("none", here / "results")
            if row.claim.name == name and row.scale == "laptop"
        ]
        for row in rows:
            if row.judgement.verdict == "cannot be judged" and not row.comparison.differences:
                assert f"nbs/lab/results/{name}/laptop.json" in row.judgement.why
                assert "delete it" in row.judgement.why
                assert "\n" not in row.judgement.why
            else:
                expected = whole[row.comparison.label].judgement
                assert row.judgement == expected, (n, kind)
        assert rows
        assert changed or len(rows) > 0


@pytest.mark.parametrize("kind", ["export", "model of train-lm"])
def test_a_hundred_damaged_models_change_no_word(here, warm, kind):
    chance = random.Random(42)
    model = small_model(here / "model", 0)
    if kind == "export":
        result = child(["export", str(model), str(here / "out")], here / "out")[0]
        assert result == 0
    else:
        save_lm(SequenceLM.from_pretrained(model), "bytes", here / "out")
    good = writes(here / "out")
    reported = 0
    paths = (here / "out").rglob("*")
    files = sorted(path for path in paths if path.is_file())
    for _ in range(100):
        path = chance.choice(files)
        kept = path.read_bytes()
        kind, changed = damage(path, chance)
        code, output = writes(here / "out")
        last = output.strip().splitlines()[-1] if output.strip() else ""
        if (code, output) != good:
            assert code == 1, (path, kind, output)
            assert "Traceback" not in output, (path, kind, output)
            assert last.startswith("longhorn: error: "), (path, kind, output)
            assert path.name in last, (path, kind, last)
            assert re.search("export|restore|save|--tokenizer", last), (path, kind, last)
            reported += 1
        path.write_bytes(kept)
    assert reported > 60


def test_text_of_a_record_is_escaped_wherever_it_ends(here):
    nasty = "\x1b[31m<script>alert('&')</script>\x07"

    def poisoned(value):
        if isinstance(value, dict):
            return {name: poisoned(item) for name, item in value.items()}
        if isinstance(value, list):
            return [poisoned(item) for item in value]
        return nasty if isinstance(value, str) else value

    record = poisoned(fakes.record()) | {"experiment": "fake", "scale": "laptop"}
    path = here / "runs" / "fake" / "laptop" / "record.json"
    records.write_record(path, record)
    rows = ledger("runs")
    assert cli.main(["reproduce", "second"]) == 0
    page = (here / "runs" / "report.html").read_text(encoding="utf-8")
    for text in (ledger_text(rows), ledger_html(rows), page):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "<script>alert" not in page
    assert "<script>alert" not in ledger_html(rows)
    assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize("what", ["reproduce", "export"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(here, warm, what):
    model = small_model(here / "model", 0)
    folder = here / "out"
    argv = (
        ["reproduce", "--out", str(folder)]
        if what == "reproduce"
        else ["export", str(model), str(folder / "export")]
    )
    assert child(argv, folder)[0] == 0
    before = {
        name: (folder / name).read_bytes() for name in files_in(folder) if (folder / name).is_file()
    }
    repeated = [*argv, "--fresh"] if what == "reproduce" else argv
    for limit in (0, 100, 1000, 3000):
        code, output, _ = child(repeated, folder, limit=limit)
        if code == 0:  # the output fits
            continue
        lines = output.strip().splitlines()
        last = lines[-1]
        assert code == 1, output
        assert last.startswith("longhorn: error: "), output
        assert "File too large" in last, output
        assert "Traceback" not in output, output
        kept = {
            str(path.relative_to(folder)).replace(".previous", ""): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert what == "reproduce" or kept == before
        assert not list(folder.rglob("*.partial"))
    assert child(argv, folder)[0] == 0
    assert json.dumps(files_in(folder))


# ---- training: the same tests for every trainer

TRAINERS = {
    "train-lm": [
        "train-lm",
        "--preset",
        "laptop",
        "--d-model",
        "8",
        "--n-layer",
        "1",
        "--context",
        "16",
        "--batch-size",
        "2",
        "--steps",
        "6",
        "--warmup",
        "1",
        "--lr",
        "0.01",
        "--eval-every",
        "3",
        "--log-every",
        "1",
        "--save-every",
        "2",
        "--data",
        "text.txt",
        "--cpu",
    ],
    "train-vision": [
        "train-vision",
        "--preset",
        "digits",
        "--data",
        "images",
        "--epochs",
        "2",
        "--batch-size",
        "8",
        "--ema",
        "0.5",
        "--save-every",
        "2",
        "--cpu",
    ],
}


@pytest.fixture(params=TRAINERS)
def trainer(request, here, monkeypatch):
    "Run a command to its end; return its words, folder, output and number of file operations."
    monkeypatch.setenv("LONGHORN_CACHE", str(here / "cache"))
    (here / "cache").mkdir()  # cache of prepared text
    (here / "text.txt").write_text(
        "".join(f"{i} times {i % 7} is {i * (i % 7)}\n" for i in range(400))
    )
    filled(here / "images", 12, 3)
    words = TRAINERS[request.param]
    assert cli.main([*words, "--out", "warm"]) == 0  # imports before the children are forked
    code, output, operations = child([*words, "--out", "whole"], here / "whole")
    assert code == 0
    assert operations > 60
    return words, here / "whole", output, operations


def printed(text):
    "Return the printed lines without speeds and the name of the folder."
    text = re.sub(
        r"killed\d*|damaged\d*|whole",
        "RUN",
        re.sub(r"[\d,.]+ (tokens/s|images/s|% of the time)", "", text),
    )
    return [
        line for line in text.splitlines() if not line.startswith(("longhorn: warning", "text: "))
    ]  # text: how the tokens were checked


def outcome(folder):
    "Return metrics without speeds, the weights, and the names of all files."
    lines = [
        {
            name: value
            for name, value in line.items()
            if not name.endswith(("_per_second", "_percent"))
        }
        for line in records.read_jsonl(folder / "metrics.jsonl")
    ]
    return (
        lines,
        [path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))],
        files_in(folder),
    )


def test_training_killed_at_every_file_operation(here, trainer):
    words, whole, output, operations = trainer

    def whole_ones(folder):  # a checkpoint is listed only while all its files exist
        for path in checkpoints(folder):
            metadata, _ = read_checkpoint(path)
            result = len(list(path.iterdir()))
            expected = len(list(next((whole / "checkpoints").iterdir()).iterdir()))
            assert result == expected, path

    for folder, repeated in killed_and_resumed(
        lambda folder: [*words, "--out", folder.name], here, operations, between=whole_ones
    ):
        assert printed(repeated) == printed(output), (folder, repeated)
        assert outcome(folder) == outcome(whole), (folder, repeated)


def test_a_hundred_damaged_files_of_a_run_change_no_number(here, trainer):
    "After damage to any file, results are equal, or one sentence names the file and a remedy."
    words, whole, output, _ = trainer
    chance = random.Random(40)
    reported = 0
    went_back = 0
    for n in range(100):
        shutil.copytree(whole, folder := here / f"damaged{n}")
        cache = shutil.copytree(here / "cache", here / "kept")
        if n % 2:  # an unfinished run
            for newest in sorted(folder.glob("checkpoints/*"))[-1:]:
                shutil.rmtree(newest)
        files = sorted(
            path
            for root in (folder, here / "cache")
            for path in root.rglob("*")
            if path.is_file() and "model" not in path.parts
        )
        kind, changed = damage(path := chance.choice(files), chance)
        code, repeated, _ = child([*words, "--out", folder.name], folder)
        lines = repeated.strip().splitlines()
        last = lines[-1]
        assert "Traceback" not in repeated, (path, kind, repeated)
        if code:
            assert last.startswith("longhorn: error: "), (path, kind, last)
            assert path.name in repeated, (path, kind, last)
            assert re.search("delete|use another|restore", last), (path, kind, last)
            reported += 1
        else:
            assert printed(repeated) == printed(output), (path, kind, repeated)
            assert outcome(folder) == outcome(whole), (path, kind, repeated)
            went_back += "using the previous checkpoint" in repeated
        shutil.rmtree(folder)
        shutil.rmtree(here / "cache")
        cache.rename(here / "cache")
    assert reported > 5
    assert went_back > 10


def test_a_kill_while_a_library_writes_leaves_nothing(here, trainer, monkeypatch):
    "safetensors writes a temporary file beside its target."
    words, whole, *_ = trainer

    def killed(state, path, *_):
        Path(path).with_name(".tmpAbCdEf").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr("longhorn_kit.models.files.save_file", killed)
        patch.setattr("safetensors.torch.save_file", killed)
        patch.setattr("timm.models._hub.safetensors.torch.save_file", killed)
        result = child([*words, "--out", "killed"], here / "killed")[0]
        assert result == -signal.SIGKILL
    left = list((here / "killed").rglob(".tmpAbCdEf"))
    assert len(left) == 1
    assert left[0].parent.name.endswith(".partial")
    words_killed = [*words, "--out", "killed"]
    assert child(words_killed, here / "killed")[0] == 0
    assert files_in(here / "killed") == files_in(whole)
