import copy
import errno
import io
import json
import math
import os
import pickle
import platform
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longhorn_kit
from longhorn_kit import records
from longhorn_kit.records import (
    FullPath,
    append_jsonl,
    atomic_folder,
    atomic_path,
    check_folder,
    check_same_settings,
    commit_of_kit,
    environment,
    exclusive_lock,
    progress,
    read_json,
    read_jsonl,
    read_record,
    tell,
    to_plain,
    without_machine_paths,
    write_json,
    write_jsonl,
    write_record,
)


@contextmanager
def files_end_at(size):
    "Make every write beyond `size` bytes of a file fail with a real system error."
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def no_space(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_full_disk_keeps_the_previous_file_and_names_it(tmp_path, monkeypatch, step):
    path = write_json(tmp_path / "record.json", {"loss": 1})
    monkeypatch.setattr(os, step, no_space)
    with pytest.raises(
        OSError, match=r"cannot write .*record\.json: No space left on device"
    ) as caught:
        write_json(path, {"loss": 2})
    assert caught.value.errno == errno.ENOSPC
    assert "\n" not in str(caught.value)
    assert read_json(path) == {"loss": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_write_cut_off_by_the_system_changes_nothing(tmp_path):
    path = write_json(tmp_path / "record.json", {"loss": 1})
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
    with files_end_at(2000):
        with pytest.raises(OSError, match="cannot write .*record.json: File too large"):
            write_json(path, {"numbers": list(range(5000))})
        with pytest.raises(OSError, match="cannot write /dev/full: No space left"):
            append_jsonl("/dev/full", {"step": 1})
        with pytest.raises(OSError, match="cannot write .*metrics.jsonl"):
            long = {"numbers": list(range(5000))}
            append_jsonl(tmp_path / "metrics.jsonl", {"step": 2}, long)
        too_large = pytest.raises(OSError, match="cannot write .*run: File too large")
        with too_large, atomic_folder(tmp_path / "run") as new:
            (new / "a").write_text("whole")
            (new / "b").write_text("x" * 5000)
    assert read_json(path) == {"loss": 1}
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "record.json"]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(
        OSError,
        match=r"cannot write .*run/record.json: (File exists|Not a directory); "
        "the old contents are unchanged",
    ):
        write_json(tmp_path / "run" / "record.json", {})
    assert (tmp_path / "run").read_text() == "mine"


def test_folder_is_replaced_only_by_a_complete_one(tmp_path):
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "run") as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text(content)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "run") as folder:
        (folder / "file").write_text("half")
        raise KeyboardInterrupt
    text = (tmp_path / "run" / "deep" / "file").read_text()
    assert text == "new"
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_files_of_a_library_get_the_rights_of_other_files(tmp_path):
    "Files are readable for others, although safetensors writes files for the owner only."
    for inside, umask, rights in (
        (True, 0o022, 0o644),
        (False, 0o022, 0o644),
        (True, 0o077, 0o600),
    ):
        before = os.umask(umask)
        try:
            with atomic_path(tmp_path / f"{inside}{umask}", inside=inside) as new:
                if not inside:
                    new.mkdir()
                file = new if inside else new / "file"
                os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        finally:
            os.umask(before)
        written = tmp_path / f"{inside}{umask}"
        result = (written if inside else written / "file").stat().st_mode & 0o777
        assert result == rights


def test_settings_are_compared_as_a_record_gives_them_back(tmp_path):
    "Labels of foreign data contain control characters, and some look like paths (/m/09x0r)."
    settings = {"classes": ("a\x1b[31m", "/m/09x0r"), "rate": 0.1, "folder": tmp_path / "data"}
    stored = read_record(write_record(tmp_path / "config.json", settings))
    check_same_settings(tmp_path, stored, settings, settings)
    with pytest.raises(
        ValueError, match="contains a run with rate=0.1, but this run has rate=0.2; use another"
    ):
        check_same_settings(tmp_path, stored, settings | {"rate": 0.2}, settings)


def test_a_message_is_one_line_without_control_characters(capsys):
    tell("  saved in \x1b]0;title\x07/a\nb")
    tell("\x1b[31m", sys.stderr)
    assert capsys.readouterr() == ("  saved in \ufffd]0;title\ufffd/a b\n", "\ufffd[31m\n")


def test_messages_name_the_final_path_and_not_the_temporary_one(tmp_path):
    with (
        pytest.raises(
            OSError, match="cannot write .*step/metrics.jsonl: File too large; the old"
        ) as caught,
        files_end_at(100),
        atomic_folder(tmp_path / "step") as new,
    ):
        write_jsonl(new / "metrics.jsonl", [{"loss": 1.5}] * 100)
    assert "partial" not in str(caught.value)
    assert os.listdir(tmp_path) == []
    problem = records.cannot_write(
        "out",
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    )
    assert (
        str(problem) == "cannot write out: No space left on device; the old contents are unchanged"
    )
    assert problem.errno == 28


def test_an_error_that_is_a_message_already_is_not_wrapped(tmp_path):
    with pytest.raises(OSError, match="^the network is down$"), atomic_folder(tmp_path / "run"):
        raise OSError("the network is down")


def containers(inner):
    "Return a strategy for JSON lists and objects of such values."
    lists = st.lists(inner, max_size=4)
    return lists | st.dictionaries(st.text(max_size=5), inner, max_size=4)


numbers = st.integers(-(2**53), 2**53) | st.floats()
plain_values = st.none() | st.booleans() | numbers | st.text()
json_values = st.recursive(plain_values, containers, max_leaves=10)


def finite(value):
    "Return the value after a round trip through JSON."
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite(item) for item in value]
    return {key: finite(item) for key, item in value.items()} if isinstance(value, dict) else value


@settings(max_examples=40, deadline=None)
@given(st.lists(json_values, min_size=1, max_size=3))
def test_values_come_back_and_the_file_is_strict_json(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("json")

    def strict(text):
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    assert strict(write_json(folder / "a.json", values).read_text(encoding="utf-8")) == finite(
        values
    )
    append_jsonl(folder / "a.jsonl", *values)
    assert read_jsonl(folder / "a.jsonl") == finite(values)
    write_jsonl(folder / "a.jsonl", values[:1])
    expected = finite(values[:1])
    assert read_jsonl(folder / "a.jsonl") == expected


def test_numbers_of_torch_and_numpy_become_plain():
    plain = to_plain(
        {
            "t": torch.tensor([1.0, math.inf]),
            "n": np.float32(0.5),
            "i": np.int64(3),
            "p": Path("a/b"),
            "d": torch.float32,
        }
    )
    assert plain == {"t": [1.0, None], "n": 0.5, "i": 3, "p": "a/b", "d": "torch.float32"}
    json.dumps(plain, allow_nan=False)


def test_torn_last_line_is_dropped_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": \xe2\x82')
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 1, is not JSON: .*recursion"):
        read_jsonl(path)
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_a_folder_that_cannot_be_swapped_is_found_beside_its_place(tmp_path, monkeypatch):
    path = tmp_path / "model"
    with atomic_folder(path) as new:
        (new / "weights").write_text("old")
    monkeypatch.setattr(records, "exchange", lambda one, other: False)
    real = os.replace
    observed = []

    def watched(source, target):
        real(source, target)
        if path in (Path(source), Path(target)):
            text = (records.recovered(path) / "weights").read_text()
            observed.append(text)

    monkeypatch.setattr(os, "replace", watched)
    with atomic_folder(path) as new:
        (new / "weights").write_text("new")
    assert observed == ["old", "new"]
    assert os.listdir(tmp_path) == ["model"]
    real(path, tmp_path / ".model.old")  # killed between the two
    with pytest.raises(KeyboardInterrupt), atomic_folder(path):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["model"]


def test_the_next_writer_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = {
        f".a.json.{records.HERE}-{gone.pid}.partial",
        f".a.json.{records.HERE}-{os.getpid()}.partial",
    }  # a lock of the kit, from an earlier container
    kept = {
        f".a.json.{records.HERE}-{os.getppid()}.partial",
        f".a.json.ffffff-{gone.pid}.partial",
        f".b.json.{records.HERE}-{gone.pid}.partial",
    }
    for name in dead | kept:
        (tmp_path / name).mkdir()
    write_json(tmp_path / "a.json", 1)
    result = set(os.listdir(tmp_path))
    assert result == kept | {"a.json"}


def test_a_folder_is_removed_in_one_step(tmp_path, monkeypatch):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "checkpoint.json").write_text("{}")
    monkeypatch.setattr(
        records.shutil, "rmtree", lambda path, **_: os.kill(0, 0)
    )  # as if killed here
    records.discard(tmp_path / "step")
    result = [path.name for path in tmp_path.iterdir()]
    expected = [records.partial_path(tmp_path / "step").name]
    assert result == expected
    monkeypatch.undo()
    write_json(tmp_path / "step", 1)  # the next writer
    assert os.listdir(tmp_path) == ["step"]


def test_a_library_that_writes_beside_its_target_leaves_nothing_outside(tmp_path):
    with records.atomic_path(tmp_path / "model.safetensors", inside=True) as path:
        (path.parent / ".tmpAbCdEf").write_text("of the library")
        path.write_text("weights")
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "weights"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("0.5", "0.6"),
        lambda text: text[:-30],
        lambda text: "",
        lambda text: "[1]",
        lambda text: text.replace("sha256", "sha512"),
        lambda text: text.replace("loss", "lost"),
        lambda text: "[" * 100000,
    ],
)
def test_a_damaged_record_is_one_sentence_with_file_and_remedy(tmp_path, damage):
    path = write_record(tmp_path / "record.json", {"loss": 0.5, "text": "a\x1b[31mb<c>"})
    assert read_record(path)["text"] == "a\ufffd[31mb<c>"
    path.write_text(damage(path.read_text()))
    text = path.read_text()
    if not text.endswith(("}\n", "]")):
        with pytest.raises(ValueError, match=r"\A.*record.json is not a JSON file.*\Z"):
            read_json(path)
    with pytest.raises(
        ValueError,
        match=r"record.json.*; restore the file, or delete it and run its command again$",
    ) as caught:
        read_record(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_folder_names_its_file(tmp_path):
    with atomic_folder(tmp_path / "model") as new:
        (new / "deep").mkdir()
        (new / "deep" / "weights").write_bytes(bytes(100))
    check_folder(tmp_path / "model", "export it again")
    for name, content in (
        ("deep/weights", b"1" * 100),
        ("deep/weights", b""),
        ("manifest.json", b"{}"),
    ):
        kept = (tmp_path / "model" / name).read_bytes()
        (tmp_path / "model" / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is damaged; export it again$"):
            check_folder(tmp_path / "model", "export it again")
        (tmp_path / "model" / name).write_bytes(kept)
    (tmp_path / "model" / "deep" / "weights").unlink()
    with pytest.raises(ValueError, match="weights is missing; export it again$"):
        check_folder(tmp_path / "model", "export it again")


def test_a_second_process_does_not_get_the_folder(tmp_path):
    code = (
        "from longhorn_kit.records import exclusive_lock\n"
        f"with exclusive_lock({str(tmp_path)!r}, wait=False): print('in')"
    )

    def second():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    with exclusive_lock(tmp_path) as alone:
        assert alone
        assert "BlockingIOError" in second().stderr
    assert second().stdout == "in\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_silent_for_short_work_away_from_a_terminal(monkeypatch, terminal):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    assert list(progress(range(3), "steps")) == [0, 1, 2]
    assert bool(shown.getvalue()) == terminal
    before = shown.getvalue()
    assert list(progress(range(3), disable=True)) == [0, 1, 2]
    assert shown.getvalue() == before


def test_a_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    path = tmp_path / "step"
    real = os.replace
    path.mkdir()
    (path / "old").write_text("old")
    monkeypatch.setattr(records, "exchange", lambda one, other: False)

    def fails(source, target):
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "replace", fails)
    unchanged = pytest.raises(OSError, match="the old contents are unchanged")
    with unchanged, atomic_folder(path) as new:
        (new / "new").write_text("new")
    names = [file.name for file in path.iterdir()]
    assert names == ["old"]


def test_a_missing_key_names_its_file_also_after_a_copy(tmp_path):
    write_jsonl(tmp_path / "m.jsonl", [{"step": 1}, {}])
    path = write_json(tmp_path / "r.json", {"runs": [{"inner": {"seed": 3}}]})
    inner = read_json(path)["runs"][0]["inner"]
    line = read_jsonl(tmp_path / "m.jsonl")[1]
    for result, says in ((inner, "r.json"), (line, "m.jsonl, line 2")):
        copies = (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result)))
        for kept in copies:
            with pytest.raises(ValueError, match=f"key 'step' is missing in .*{says}$"):
                kept["step"]
            assert "step" not in kept
            assert kept.get("step") is None
    assert inner == {"seed": 3}
    assert json.dumps(inner) == '{"seed": 3}'


def test_records_hold_no_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ada"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    home = str(tmp_path / "home" / "ada")
    here = os.getcwd()
    text = f"a {home}/runs b={here}/x '{home}'"
    assert without_machine_paths(text) == "a ~/runs b=./x '~'"
    assert (
        without_machine_paths(f"{home}lovelace {here}er /x{here}")
        == f"{home}lovelace {here}er /x{here}"
    )

    def shortened(path):
        return to_plain(to_plain(FullPath(path)))  # as in a run that resumes elsewhere

    assert shortened(f"{home}/x") == "~/x"
    assert re.fullmatch(r"\.\.\./x \([0-9a-f]{6}\)", shortened(f"{here}/x"))
    assert shortened("/a/b/x") != shortened("/a/c/x")
    observed = json.dumps(environment())
    assert home not in observed
    assert here not in observed
    node = platform.node()
    assert len(node) < 4 or node not in observed


@pytest.mark.parametrize(
    "text, short",
    [
        ("/data/users/ada/private.txt", ".../private.txt"),
        ("--data=/data/users/ada/x", "--data=.../x"),
        ("hf:/data/users/ada/x", "hf:.../x"),
        ("gpt2:/data/ada/gpt2/", "gpt2:.../gpt2"),
        ("file:///data/ada/x", "file://.../x"),
        ("cannot read /data/ada/x.txt: bad", "cannot read .../x.txt: bad"),
        ("'/data/ada/x'", "'.../x'"),
        (r"C:\Users\ada\x.txt", ".../x.txt"),
        ("/data/ä/ß/名.txt", ".../名.txt"),
        ("x/\udcff/y", "x/\ufffd/y"),
        *(
            (same, same)
            for same in (
                "https://a/b/c",
                "and/or",
                "50/50",
                "~/x/y",
                "./x/y",
                "/",
                "/data",
                "<b>x</b>",
                "3 tokens/s",
                ".../x",
            )
        ),
    ],
)
def test_of_other_absolute_paths_a_record_keeps_the_last_part(text, short):
    result = to_plain(to_plain({"a": [text]}))
    assert result == {"a": [short]}


def test_a_path_with_spaces_is_cut_whole(tmp_path):
    (tmp_path / "ada lovelace" / "my run").mkdir(parents=True)
    for end in ("my run", "*.txt"):
        assert to_plain(f"hf:{tmp_path}/ada lovelace/{end}") == f"hf:.../{end}"
        assert "ada" not in to_plain(f"cannot read {tmp_path}/ada lovelace/{end}")


def test_commit_only_from_a_checkout_of_the_kit(tmp_path):
    assert commit_of_kit(tmp_path) is None
    for name in (
        ".git",
        "longhorn_kit",
    ):  # a repository other than the kit; later like the kit, but git cannot read it
        (tmp_path / name).mkdir()
        assert commit_of_kit(tmp_path) is None


def test_commit_says_when_files_differ(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(
            ["git", *identity, "-C", str(tmp_path), *words], check=True, capture_output=True
        )

    (tmp_path / "longhorn_kit").mkdir()
    (tmp_path / "longhorn_kit" / "a.py").write_text("1")
    git("init"), git("add", "."), git("commit", "-m", "first")
    clean = commit_of_kit(tmp_path)
    (tmp_path / "longhorn_kit" / "a.py").write_text("2")
    assert len(clean) == 12
    assert commit_of_kit(tmp_path) == clean + "+"


@pytest.mark.parametrize(
    "how, printed",
    [
        (["script.py", "--out", "a b"], "python script.py --out 'a b'"),
        (["-m", "script", "x"], "python -m script x"),
        (["-c", "import script", "x"], "python -c 'import script' x"),
        (
            ["script.py", "--data", "/data/ada/b c.txt", os.path.expanduser("~/a b"), "a|b"],
            "python script.py --data '.../b c.txt' ~/'a b' 'a|b'",
        ),
    ],
)
def test_a_recorded_command_can_be_run_again(tmp_path, how, printed):
    (tmp_path / "script.py").write_text(
        "from longhorn_kit.records import command_line\nprint(command_line())\n"
    )
    package = Path(longhorn_kit.__file__).parents[1]
    path = os.pathsep.join([str(package), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, *how],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == printed, done.stderr


def test_words_of_foreign_data_cannot_control_the_terminal(capsys):
    records.warn("column \x1b]0;title\x07\nand\u202e \udcff of a\tfile\u2028x")
    assert (
        capsys.readouterr().err
        == "longhorn: warning: column \ufffd]0;title\ufffd and\ufffd \ufffd of a file\ufffdx\n"
    )
