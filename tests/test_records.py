import copy, errno, io, json, math, os, pickle, platform, resource, signal, subprocess, sys, time
from contextlib import contextmanager
from pathlib import Path
import numpy as np
import pytest
import torch
import longhorn_kit
from hypothesis import given, settings, strategies as st
from longhorn_kit.lab.records import (
    PlainProgress,
    append_jsonl,
    atomic_folder,
    commit_of_kit,
    environment,
    progress,
    read_json,
    read_jsonl,
    side_by_side,
    to_plain,
    without_machine_paths,
    write_json,
    write_jsonl,
)


@contextmanager
def files_end_at(size):
    "Every write beyond `size` bytes of a file fails with a real error of the operating system."
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
    with pytest.raises(OSError, match=r"cannot write .*record\.json: No space left on device") as caught:
        write_json(path, {"loss": 2})
    assert caught.value.errno == errno.ENOSPC and "\n" not in str(caught.value)
    assert read_json(path) == {"loss": 1} and os.listdir(tmp_path) == ["record.json"]


def test_a_write_cut_off_by_the_system_changes_nothing(tmp_path):
    path = write_json(tmp_path / "record.json", {"loss": 1})
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
    with files_end_at(2000):
        with pytest.raises(OSError, match="cannot write .*record.json: File too large"):
            write_json(path, {"numbers": list(range(5000))})
        with pytest.raises(OSError, match="cannot write .*metrics.jsonl"):
            append_jsonl(tmp_path / "metrics.jsonl", {"step": 2}, {"numbers": list(range(5000))})
        with pytest.raises(OSError, match="cannot write .*run: File too large"):
            with atomic_folder(tmp_path / "run") as new:
                (new / "a").write_text("whole")
                (new / "b").write_text("x" * 5000)
    assert read_json(path) == {"loss": 1} and (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "record.json"]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OSError, match=r"cannot write .*run/record.json: (File exists|Not a directory); what was there before is unchanged"):
        write_json(tmp_path / "run" / "record.json", {})
    assert (tmp_path / "run").read_text() == "mine"


def test_device_that_is_always_full():
    with pytest.raises(OSError, match="cannot write /dev/full: No space left"):
        append_jsonl("/dev/full", {"step": 1})


def test_folder_is_replaced_only_by_a_complete_one(tmp_path):
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "run") as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text(content)
    with pytest.raises(KeyboardInterrupt):
        with atomic_folder(tmp_path / "run") as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt
    assert (tmp_path / "run" / "deep" / "file").read_text() == "new" and os.listdir(tmp_path) == ["run"]


def test_an_error_that_is_a_message_already_is_not_wrapped(tmp_path):
    with pytest.raises(OSError, match="^the network is down$"):
        with atomic_folder(tmp_path / "run"):
            raise OSError("the network is down")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def finite(value):
    "The value as JSON must give it back."
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

    assert strict(write_json(folder / "a.json", values).read_text(encoding="utf-8")) == finite(values)
    append_jsonl(folder / "a.jsonl", *values)
    assert read_jsonl(folder / "a.jsonl") == finite(values)
    write_jsonl(folder / "a.jsonl", values[:1])
    assert read_jsonl(folder / "a.jsonl") == finite(values[:1])


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
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_the_next_line_takes_the_place_of_a_torn_one(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_jsonl(path, {"a": 1})
    for torn, left in (('{"a": 2, "lo', [1]), ('{"a": 2}', [1, 2]), ("", [1])):    # a whole line may lack its end
        path.write_text('{"a": 1}\n' + torn)
        append_jsonl(path, {"a": 3})
        assert [line["a"] for line in read_jsonl(path)] == [*left, 3]


def _write_lines(path, name):
    for i in range(400):
        append_jsonl(path, {"who": name, "i": i, "text": "x" * 3000})


def test_lines_of_several_processes_are_all_kept(tmp_path):
    import multiprocessing
    path = tmp_path / "runs.jsonl"
    path.write_text('{"who": 9, "i": 0}\n{"torn')
    writers = [multiprocessing.Process(target=_write_lines, args=(path, n)) for n in range(4)]
    [writer.start() for writer in writers]
    [writer.join() for writer in writers]
    found = [(line["who"], line["i"]) for line in read_jsonl(path)]
    assert sorted(found) == [(n, i) for n in range(4) for i in range(400)] + [(9, 0)]


def test_a_disk_without_locks_gets_its_lines(tmp_path, monkeypatch):
    import fcntl
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", none)
    append_jsonl(tmp_path / "m.jsonl", {"a": 1})
    append_jsonl(tmp_path / "m.jsonl", {"a": 2})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    path, real = tmp_path / "step", os.replace
    path.mkdir()
    (path / "old").write_text("old")
    def fails(source, target):
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="what was there before is unchanged"):
        with atomic_folder(path) as new:
            (new / "new").write_text("new")
    assert [file.name for file in path.iterdir()] == ["old"]


def test_broken_json_names_its_file(tmp_path):
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ValueError, match="r.json is not a JSON file") as caught:
        read_json(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


def test_a_missing_key_names_its_file_also_after_a_copy(tmp_path):
    write_jsonl(tmp_path / "m.jsonl", [{"step": 1}, {}])
    inner = read_json(write_json(tmp_path / "r.json", {"runs": [{"inner": {"seed": 3}}]}))["runs"][0]["inner"]
    line = read_jsonl(tmp_path / "m.jsonl")[1]
    for found, says in ((inner, "r.json"), (line, "m.jsonl, line 2")):
        for kept in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
            with pytest.raises(ValueError, match=f"key 'step' is missing in .*{says}$"):
                kept["step"]
            assert "step" not in kept and kept.get("step") is None
    assert inner == {"seed": 3} and json.dumps(inner) == '{"seed": 3}'


def test_records_hold_no_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ada"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    home, here = str(tmp_path / "home" / "ada"), os.getcwd()
    assert without_machine_paths(f"a {home}/runs b={here}/x '{home}'") == "a ~/runs b=./x '~'"
    assert without_machine_paths(f"{home}lovelace {here}er /x{here}") == f"{home}lovelace {here}er /x{here}"
    seen = json.dumps(environment())
    assert home not in seen and here not in seen
    node = platform.node()
    assert len(node) < 4 or node not in seen


def test_commit_only_from_a_checkout_of_the_kit(tmp_path):
    assert commit_of_kit(tmp_path) is None
    (tmp_path / ".git").mkdir()  # a repository, but not of the kit
    assert commit_of_kit(tmp_path) is None
    (tmp_path / "longhorn_kit").mkdir()  # looks like one, but git cannot read it
    assert commit_of_kit(tmp_path) is None


def test_commit_says_when_files_differ(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(tmp_path), *words],
            check=True,
            capture_output=True,
        )

    (tmp_path / "longhorn_kit").mkdir()
    (tmp_path / "longhorn_kit" / "a.py").write_text("1")
    git("init"), git("add", "."), git("commit", "-m", "first")
    clean = commit_of_kit(tmp_path)
    (tmp_path / "longhorn_kit" / "a.py").write_text("2")
    assert len(clean) == 12 and commit_of_kit(tmp_path) == clean + "+"


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress(3, "steps") as bar:
        for _ in range(3):
            bar.update()
            bar.set_postfix(loss=0.5)
    assert "\r" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert list(progress(range(3), "steps", every=0)) == [0, 1, 2]
    assert (
        sys.stderr.getvalue().count("\n") == 3
        and "\r" not in sys.stderr.getvalue()
        and "steps: 3/3" in sys.stderr.getvalue()
    )
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert list(progress(range(3), every=0, disable=True)) == [0, 1, 2] and sys.stderr.getvalue() == ""


def test_plain_progress_counts_on_from_where_a_run_was_resumed():
    bar = PlainProgress(total=100, desc="steps", initial=40, file=io.StringIO())
    bar.update()
    assert bar.line().startswith("steps: 41/100 (")


def threads_and_root(x):
    return torch.get_num_threads(), math.sqrt(x)


@pytest.mark.parametrize("workers", [1, 2])
def test_side_by_side_keeps_the_order_on_one_thread_each(workers):
    counted, before = [], torch.get_num_threads()
    done = lambda: counted.append(1) or 0
    found = side_by_side(threads_and_root, [(4.0,), (9.0,), (16.0,)], workers, total=3, done=done)
    assert found == [(1, 2.0), (1, 3.0), (1, 4.0)] and torch.get_num_threads() == before and (counted or workers == 1)
    with pytest.raises(ValueError, match="math domain error|nonnegative"):
        side_by_side(threads_and_root, [(4.0,), (-1.0,), (9.0,)], workers)


def until_told(folder, name):
    "A job that goes on until it is asked to stop, and then keeps what it has."
    from longhorn_kit.lab.training import noted_stop
    with noted_stop() as stop:
        Path(folder, f"{name}.begun").touch()
        while not stop.name:
            time.sleep(0.02)
        Path(folder, f"{name}.kept").touch()
        raise KeyboardInterrupt(f"{name} kept what it had")


def named(folder, ending):
    return sorted(path.stem for path in folder.glob(f"*.{ending}"))


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_side_by_side_ends_with_its_parent(tmp_path, number):
    code = ("import sys; from longhorn_kit.lab.records import side_by_side; from test_records import until_told\n"
            "if __name__ == '__main__':\n"
            "    try:\n        side_by_side(until_told, [(sys.argv[1], name) for name in 'abcd'])\n"
            "    except KeyboardInterrupt as stop:\n        print(stop)")
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], text=True,
                              stdout=subprocess.PIPE if number == signal.SIGINT else subprocess.DEVNULL, # orphans keep it open
                              env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])})
    wait_until(lambda: named(tmp_path, "begun") == ["a", "b"])
    parent.send_signal(number)
    said = parent.communicate(timeout=60)[0]
    wait_until(lambda: named(tmp_path, "kept") == ["a", "b"], 20)
    assert named(tmp_path, "begun") == ["a", "b"]
    assert number == signal.SIGKILL or said.strip() in ("a kept what it had", "b kept what it had")


def test_a_process_whose_parent_has_gone_before_it_could_look_ends():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = f"import time; from longhorn_kit.lab.records import end_with; end_with({gone.pid}); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == -signal.SIGTERM


@pytest.mark.parametrize("how, told", [
    (["script.py", "--out", "a b"], "python script.py --out 'a b'"), (["-m", "script", "x"], "python -m script x"),
    (["-c", "import script", "x"], "python -c 'import script' x")])
def test_a_recorded_command_can_be_run_again(tmp_path, how, told):
    (tmp_path / "script.py").write_text("from longhorn_kit.lab.records import command_line\nprint(command_line())\n")
    path = os.pathsep.join([str(Path(longhorn_kit.__file__).parents[1]), str(tmp_path)])
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.strip() == told, done.stderr
