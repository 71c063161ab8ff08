import errno
import fcntl
import gzip
import itertools
import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
import zstandard

from longhorn_kit import cli, records
from longhorn_kit.lab.data import corpus
from longhorn_kit.lab.data import text as data
from longhorn_kit.lab.data.corpus import prepare
from longhorn_kit.lab.data.text import SEPARATOR, load_documents
from longhorn_kit.lab.data.tokenizers import get_tokenizer
from longhorn_kit.records import exclusive_lock, read_json
from sweep import slow_case
from texts import (
    characters,
    documents,
    fake_datasets,
    json_lines,
    sources,
    split,
    write_bin,
    write_records,
)


def write(path, n=200):
    text = SEPARATOR.join(documents(n))
    path.write_text(text, encoding="utf-8")
    return str(path)


def bytes_of(result):
    paths = sorted(result.folder.glob("*.bin"))
    return {path.name: path.read_bytes() for path in paths}


def expected(source, **options):
    "Return the expected bytes of both parts, computed from the documents by the split's rule."
    parts = {"train.bin": b"", "val.bin": b""}
    for part, text in split(load_documents(source), by_name=source == "stdlib", **options):
        content = text.encode()
        parts[f"{part}.bin"] += content + b"\0"
    return parts


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(corpus, "PIECE", 2000)
    monkeypatch.setattr(corpus, "batch_of", lambda documents: list(itertools.islice(documents, 10)))


def in_processes(work, *arguments):
    "Run `work` in one process per argument, and return its results and the exit codes."
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    children = [fork.Process(target=work, args=(results, argument)) for argument in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    codes = [child.exitcode for child in children]
    finished = [results.get() for code in codes if code == 0]
    return finished, codes


def at_call(monkeypatch, owner, name, call, what, before=True):
    "Call `what` before or after the n-th call of a function."
    real = getattr(owner, name)
    count = iter(range(10**6))

    def watched(*arguments, **named):
        now = next(count) == call
        if now and before:
            what()
        result = real(*arguments, **named)
        if now and not before:
            what()
        return result

    monkeypatch.setattr(owner, name, watched)


def interrupted(monkeypatch, call, source, **options):
    "Raise SIGINT before a preparation saves its state for the n-th time."
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(
            patch, corpus.CorpusBuilder, "save", call, lambda: signal.raise_signal(signal.SIGINT)
        )
        prepare(source, **options)


# ---- tokens


def test_tokens_are_those_of_the_text_however_it_is_cut(tmp_path, monkeypatch):
    source = write(tmp_path / "a.txt")
    few = str(tmp_path / "few.txt")
    texts = []
    for i in range(20):
        lines = [f"{i}, line {j}\n" for j in range(99)]
        texts.append("".join(lines))
    (tmp_path / "few.txt").write_text(SEPARATOR.join(texts))
    for options in ({}, {"fraction": 0.3}):
        result = prepare(source, cache=tmp_path / "cache", **options)
        assert bytes_of(result) == expected(source, **options)
        assert isinstance(result.train, np.memmap)
    # the ends of a few documents
    result = bytes_of(prepare(few, cache=tmp_path / "cache"))
    assert result == expected(few)
    monkeypatch.setattr(corpus, "LEAST", 1)
    monkeypatch.setattr(corpus, "PIECE", 5000)
    for workers in (1, 3):
        result = prepare(source, cache=tmp_path / f"{workers}", workers=workers)
        assert bytes_of(result) == expected(source)
    for part in expected(source):
        metadata = result.index[part.removesuffix(".bin")]
        assert metadata["documents"] > 0
        assert metadata["tokens"] == metadata["bytes"]
    monkeypatch.undo()
    result = bytes_of(prepare("stdlib", cache=tmp_path / "cache"))
    assert result == expected("stdlib")
    assert (
        prepare("stdlib", cache=tmp_path / "cache").index["text_sha256"]
        == data.embedded_corpus_hash()
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_file_may_have_any_name(tmp_path):
    name = os.fsencode(tmp_path)
    text = b"a line of text\n" * 500
    folder = name + b"/b\xff\xfe"
    os.mkdir(folder)
    with open(folder + b"/\xff \x1b[31m.txt", "wb") as file:
        file.write(text)
    made = prepare(os.fsdecode(folder), cache=tmp_path / "cache")
    total = sum(made.index[part]["bytes"] for part in ("train", "val"))
    assert total > len(text)


def test_limits_and_a_named_held_out_part(tmp_path):
    source = write(tmp_path / "a.txt", 300)
    other = write(tmp_path / "b.txt", 20)
    whole = prepare(source, cache=tmp_path)
    some = prepare(source, cache=tmp_path, tokens=9000)
    assert 9000 <= len(some.train) < 9300
    assert some.folder != whole.folder
    assert some.train[-1] == 0
    start = whole.train[: len(some.train)]
    expected = bytes(start)
    assert bytes(some.train) == expected
    texts = [text for _, text in load_documents(source)]
    n_documents = some.index["train"]["documents"] + some.index["val"]["documents"]
    rest = texts[n_documents:]
    end = bytes(whole.train[len(some.train) :])
    assert end.startswith(rest[0].encode())  # the end stops before a training document
    limited = prepare(source, cache=tmp_path, limit=150)
    index = limited.index
    result = index["train"]["documents"] + limited.index["val"]["documents"]
    assert result == 150
    both = prepare(source, cache=tmp_path, val=other, limit=7)
    expected = "".join(text + "\0" for text in documents(7)).encode()
    assert bytes(both.train) == expected
    expected = "".join(text + "\0" for text in documents(20)).encode()
    assert bytes(both.val) == expected


@pytest.mark.parametrize("documents, tokens", [(1, 1000), (1, 100_000), (3, 1000), (3, 100_000)])
def test_a_target_of_tokens_leaves_a_held_out_part(tmp_path, documents, tokens):
    text = tmp_path / "text.txt"
    lines = "".join(f"line {i}\n" for i in range(9000))
    text.write_text("<|endoftext|>\n".join(f"text {n}\n{lines}" for n in range(documents)))
    result = prepare(str(text), cache=tmp_path / "cache", tokens=tokens)
    assert len(result.train) >= min(tokens, 80_000)
    assert len(result.val) > 0


@pytest.mark.parametrize(
    "name, compress",
    [
        ("r.NDJSON", bytes),
        ("r.json", lambda b: b"\xef\xbb\xbf" + b.replace(b"\n", b"\r\n\n")),
        ("r.jsonl.gz", gzip.compress),
        ("r.json.zst", zstandard.compress),
        ("r.parquet", None),
        ("hf:", bytes),
    ],
)
def test_the_same_records_give_the_same_tokens_in_any_format(tmp_path, capsys, name, compress):
    texts = [text + "β {}\n" * (i % 3) for i, text in enumerate(documents(300))]
    text = SEPARATOR.join(texts)
    (tmp_path / "plain.txt").write_text(text + SEPARATOR, encoding="utf-8")
    path = tmp_path / "records" / name.replace("hf:", "rows.jsonl")
    path.parent.mkdir()
    in_windows = [text.replace("\n", "\r\n") for text in texts]
    written = in_windows + [None]
    if compress:
        path.write_bytes(
            compress(json_lines(*({"id": i, "text": text} for i, text in enumerate(written))))
        )
    else:
        ids = list(range(301))
        texts_in_arrow = pa.array(written).dictionary_encode()
        write_records(path, id=ids, text=texts_in_arrow)
    source = f"hf:{path.parent}" if name == "hf:" else str(path)
    result = prepare(source, cache=tmp_path / "cache")
    assert bytes_of(result) == expected(str(tmp_path / "plain.txt"))
    err = capsys.readouterr().err
    assert err.count("1 of 301 records") == 1


def test_bits_per_byte_compare_tokenizers(gpt2_folder, tmp_path):
    (tmp_path / "a.txt").write_text(SEPARATOR.join(f"text {i} the in the" for i in range(200)))
    bpe, plain = (
        prepare(str(tmp_path / "a.txt"), name, cache=tmp_path)
        for name in (f"gpt2:{gpt2_folder}", "bytes")
    )
    assert bpe.train.dtype == np.uint16
    index = bpe.index["val"]
    assert index["bytes"] > index["tokens"]
    text = bpe.tokenizer.decode(bpe.train)
    assert text.startswith("text 0 the")
    assert bpe.train[-1] == bpe.tokenizer.end == 50256
    index = json.dumps(bpe.index)
    assert str(gpt2_folder) not in index
    for result in (bpe, plain):
        total_bits = 1000 / math.log(2)  # as if a model needed 1000 nats for the full part
        bits = result.bits_per_byte(1000 / len(result.val))
        assert math.isclose(bits * result.index["val"]["bytes"], total_bits)
    repeated = prepare(str(bpe.folder), f"gpt2:{gpt2_folder}")  # a prepared folder is a source
    assert repeated.folder == bpe.folder
    assert bytes_of(repeated) == bytes_of(bpe)
    with pytest.raises(
        ValueError,
        match=f"{bpe.folder} contains tokens of gpt2-.*, but the named tokenizer is bytes",
    ):
        prepare(str(bpe.folder))


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"val": "a.txt", "fraction": 0.2}, "has a held-out part; fraction=0.2 does not"),
        *(
            ({name: value}, f"{name} is {value!r}")
            for name, value in [
                ("fraction", 1.5),
                ("fraction", 0),
                ("fraction", math.nan),
                ("limit", 0),
                ("limit", 1.5),
                ("tokens", -5),
                ("workers", 0),
            ]
        ),
    ],
)
def test_impossible_settings_are_refused(tmp_path, settings, says):
    with pytest.raises(ValueError, match=says):
        prepare("stdlib", cache=tmp_path, **settings)


# ---- killed, interrupted, shared


def on_the_hub(monkeypatch, texts):
    "Make `datasets` stream a dataset of these texts."
    rows = datasets.Dataset.from_dict({"text": texts})
    fake_datasets(monkeypatch, lambda *args, **options: rows.to_iterable_dataset())


DEATHS = [  # function, call, before or after its work
    (corpus, "write_piece", 2, True),
    (corpus.CorpusBuilder, "save", 2, True),  # after a piece is read and appended
    (corpus, "write_record", 2, True),
    (corpus, "write_record", 2, False),  # before and after the state is on disk
    (corpus.CorpusBuilder, "cut_back", 1, False),  # while resuming
    (corpus, "write_index", 0, False),
    (corpus, "discard", -2, True),  # at the end
    (corpus, "put_in_place", 0, True),
    (corpus, "put_in_place", 0, False),
]


@pytest.mark.parametrize(
    "kind, tokens",
    [
        ("text", None),
        slow_case("jsonl", None),
        slow_case("parquet", None),
        ("hub", None),
        slow_case("text", 33_000),
    ],
)
def test_a_preparation_killed_again_and_again_gives_the_same_files(
    tmp_path, monkeypatch, kind, tokens
):
    source = sources(tmp_path)[kind]
    observed = []
    cache = tmp_path / "cache"

    def die():
        return os.kill(os.getpid(), signal.SIGKILL)  # no clean-up, no flush

    for owner, name, call, before in DEATHS:
        with monkeypatch.context() as patch:
            if name == "discard":  # the second to last save of the state
                patch.setattr(
                    corpus,
                    "discard",
                    lambda path: (
                        die() if path.name == "state.json" else os.system(f"rm -rf {path}")
                    ),
                )
            else:
                at_call(patch, owner, name, call, die, before)
            codes = in_processes(
                lambda results, _: results.put(
                    bool(prepare(source, cache=cache, tokens=tokens, workers=1))
                ),
                0,
            )[1]
        assert codes == [-signal.SIGKILL], name
        observed += [
            read_json(path)["train"]["tokens"] for path in cache.glob(".*.partial/state.json")
        ]
        assert len(list(cache.glob("[!.]*/index.json"))) == (
            (name, before) == ("put_in_place", False)
        )
    assert len(set(observed)) > 4
    assert observed == sorted(observed)  # it resumed after the start
    result, whole = (
        prepare(source, cache=folder, tokens=tokens) for folder in (cache, tmp_path / "whole")
    )
    folders = list(cache.iterdir())
    assert folders == [result.folder]
    assert bytes_of(result) == bytes_of(whole)
    assert (
        bytes_of(whole) == expected(str(tmp_path / "a.txt"))
        if tokens is None
        else tokens <= len(whole.train) < tokens + 300
    )
    assert result.index == whole.index
    assert {path.name for path in result.folder.iterdir()} == {
        "train.bin",
        "val.bin",
        "index.json",
        "checked.json",
    }


@pytest.mark.parametrize(
    "sent, code", [slow_case(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_processes_that_tokenise_end_with_a_stopped_parent(tmp_path, monkeypatch, sent, code):
    def endless(rows, **settings):
        (tmp_path / f"{os.getpid()}.pid").touch()
        time.sleep(60)

    monkeypatch.setattr(corpus, "LEAST", 1)
    monkeypatch.setattr(corpus, "tokenise", endless)
    words = [
        "prepare",
        write(tmp_path / "a.txt"),
        "--cache",
        str(tmp_path / "cache"),
        "--workers",
        "2",
    ]
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: sys.exit(cli.main(words)))
    child.start()

    def alive():
        return [path for path in tmp_path.glob("*.pid") if os.path.exists(f"/proc/{path.stem}")]

    end = time.monotonic() + 20
    while len(alive()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(alive()) == 2
    workers = [*(int(path.stem) for path in alive() if sent == signal.SIGINT), child.pid]
    for process in workers:
        os.kill(process, sent)  # as by Ctrl-C
    child.join()
    while alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive()
    assert child.exitcode == code


def test_a_hub_stream_resumes_from_its_position(tmp_path, monkeypatch):
    on_the_hub(monkeypatch, documents(900))
    whole = bytes_of(prepare("hf:owner/books", cache=tmp_path / "whole"))
    interrupted(monkeypatch, 20, "hf:owner/books", cache=tmp_path / "cache")
    starts = []
    real = corpus.load_documents
    monkeypatch.setattr(
        corpus,
        "load_documents",
        lambda source, column, position: starts.append(position) or real(source, column, position),
    )
    assert bytes_of(prepare("hf:owner/books", cache=tmp_path / "cache")) == whole
    assert len(starts) == 1
    assert starts[0]["row"] >= 300
    assert starts[0]["stream"]
    assert (
        prepare("hf:owner/books", cache=tmp_path / "cache", tokens=500).folder.parent
        == tmp_path / "cache"
    )
    assert (
        len(list((tmp_path / "cache").iterdir())) == 1
    )  # a run that needs fewer tokens uses the complete folder


def test_a_dataset_that_changed_meanwhile_is_not_joined(tmp_path, monkeypatch):
    on_the_hub(monkeypatch, documents(300))
    interrupted(monkeypatch, 3, "hf:owner/books", cache=tmp_path)
    on_the_hub(monkeypatch, documents(300, words=31))
    with pytest.raises(
        ValueError, match="'hf:owner/books' is no longer the text.*hf:NAME@REVISION"
    ):
        prepare("hf:owner/books", cache=tmp_path)


@pytest.mark.parametrize(
    "what, says",
    [
        ("disk", "cannot write .*partial.*No space left on device.*; the prepared part is kept"),
        ("network", "'owner/books'.*timed out; the prepared part is kept"),
        (
            "process",
            "a process that tokenises was lost .*; try fewer workers; the prepared part is kept",
        ),
    ],
)
def test_what_fails_is_one_line_and_keeps_the_work(tmp_path, monkeypatch, what, says):
    def torn(rows, every=datasets.IterableDataset.__iter__):
        yield from itertools.islice(every(rows), 1400)
        raise ConnectionError("read timed out\nand more")

    def full():
        message = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, message)

    on_the_hub(monkeypatch, documents(1500))
    monkeypatch.setattr(corpus, "PIECE", 50_000)
    whole = prepare("hf:owner/books", cache=tmp_path / "whole", workers=2)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=says) as caught:
        if what == "disk":
            at_call(patch, corpus.CorpusBuilder, "add", 1, full)
        elif what == "network":
            patch.setattr(datasets.IterableDataset, "__iter__", torn)
        else:
            at_call(patch, corpus, "write_piece", 1, lambda: patch.setattr(corpus, "LEAST", 1))
            real = corpus.tokenise
            here = os.getpid()
            patch.setattr(
                corpus,
                "tokenise",
                lambda *rows, **more: real(*rows, **more) if os.getpid() == here else os._exit(9),
            )
        prepare("hf:owner/books", cache=tmp_path / "cache", workers=2)
    assert "\n" not in str(caught.value)
    expected = errno.ENOSPC if what == "disk" else None
    assert caught.value.errno == expected
    partial = next((tmp_path / "cache").glob(".*.partial/train.bin"))
    assert partial.stat().st_size > 10_000
    result = bytes_of(prepare("hf:owner/books", cache=tmp_path / "cache"))
    assert result == bytes_of(whole)


def no_locks(monkeypatch, number):
    "Make locking fail with this error, as on a file system without locks."

    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize(
    "number", sorted({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
)
def test_a_file_system_without_locks_prepares_and_resumes(tmp_path, monkeypatch, capsys, number):
    source = write(tmp_path / "a.txt")
    no_locks(monkeypatch, number)
    interrupted(monkeypatch, 3, source, cache=tmp_path / "cache")
    partial = next((tmp_path / "cache").glob(".*.partial"))
    err = capsys.readouterr().err
    assert f"the file system of {partial} has no locks" in err
    result = prepare(source, cache=tmp_path / "cache")
    assert bytes_of(result) == expected(source)
    folders = list((tmp_path / "cache").iterdir())
    assert folders == [result.folder]


def test_other_errors_of_a_lock_name_the_folder(tmp_path, monkeypatch):
    no_locks(monkeypatch, errno.EIO)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught, exclusive_lock(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_lock_is_taken_again_if_its_folder_vanishes(tmp_path, monkeypatch):
    real = records.locked
    removed = []

    def locked(folder, wait):
        if not removed:
            removed.append(folder.rmdir())  # another process removes it between two calls
        return real(folder, wait)

    monkeypatch.setattr(records, "locked", locked)
    with exclusive_lock(tmp_path / "a") as alone:
        assert alone
        assert removed
        assert (tmp_path / "a").is_dir()


def test_without_locks_no_other_run_has_the_result_open(tmp_path, monkeypatch):
    no_locks(monkeypatch, errno.ENOSYS)
    source = write(tmp_path / "a.txt")
    publish = corpus.publish
    opened = []

    def opened_first(folder, *more):
        opened.append(os.open(folder / "train.bin", os.O_WRONLY))
        publish(folder, *more)

    monkeypatch.setattr(corpus, "publish", opened_first)
    result = prepare(source, cache=tmp_path / "cache")
    os.write(opened[0], b"overwritten")
    os.close(opened[0])
    assert bytes_of(result) == expected(source)


@pytest.mark.parametrize("separately", [slow_case("locks"), slow_case("ranks"), None])
def test_no_process_of_several_gets_wrong_tokens(tmp_path, monkeypatch, separately):
    if separately != "locks":
        no_locks(monkeypatch, errno.ENOSYS)
    source = write(tmp_path / "a.txt", 1000)

    def work(results, rank):
        if separately == "ranks":
            os.environ["RANK"] = str(rank)
        time.sleep(0.05 * (2 - rank))  # the first process arrives last
        try:
            results.put(
                bytes_of(prepare(source, cache=tmp_path / "cache", workers=1)) == expected(source)
            )
        except (OSError, ValueError):
            results.put("refused")

    results, codes = in_processes(work, 0, 1, 2)
    assert codes == [0, 0, 0]
    assert len(results) == 3
    if separately:
        assert set(results) == {True}
        folders = list((tmp_path / "cache").iterdir())
        assert len(folders) == 1  # prepared once, with no temporary files left
    assert set(results) <= {True, "refused"}  # two separate runs may refuse each other
    for _ in range(3):  # a damaged file is refused and named
        try:
            result = bytes_of(prepare(source, cache=tmp_path / "cache"))
            assert result == expected(source)
            break
        except ValueError as error:
            assert "starts over" in str(error) or "prepare it again" in str(error)
            os.system(f"rm -rf {tmp_path}/cache")


# ---- opened again


def read_bytes():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="counts through /proc")
def test_a_second_start_reads_nothing_of_the_source(tmp_path, monkeypatch):
    monkeypatch.undo()
    text = SEPARATOR.join(documents(20_000))
    (tmp_path / "a.txt").write_text(text)
    for source in ("stdlib", str(tmp_path / "a.txt")):
        read = []
        for _ in range(2):
            before = read_bytes()
            prepare(source, cache=tmp_path / "cache")
            read.append(read_bytes() - before)
        assert read[0] > 5_000_000
        assert read[1] < 100_000


def test_a_changed_source_is_another_corpus(tmp_path, monkeypatch):
    source = write(tmp_path / "a.txt", 150)
    folders = [prepare(source, cache=tmp_path / "cache").folder]
    write(tmp_path / "a.txt", 151)
    folders += [
        prepare(source, cache=tmp_path / "cache", **options).folder
        for options in ({}, {"fraction": 0.1}, {"limit": 120}, {"tokens": 5000})
    ]
    os.utime(source, (1, 1))
    folders += [prepare(source, cache=tmp_path / "cache").folder]
    records = write_records(tmp_path / "a.jsonl", text=documents(150), body=documents(150, 9))
    folders += [
        prepare(records, cache=tmp_path / "cache", text_column=column).folder
        for column in ("text", "body")
    ]
    assert len(set(folders)) == 8
    result = prepare(source, cache=tmp_path / "cache").folder
    assert result == folders[5]
    at_call(monkeypatch, corpus.CorpusBuilder, "save", 1, lambda: write(tmp_path / "a.txt", 152))
    with pytest.raises(ValueError, match="a.txt' changed while it was read; start again"):
        prepare(source, cache=tmp_path / "other")
    leftover = list((tmp_path / "other").iterdir())
    assert not leftover


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda b: b[:-1], "is missing or has the wrong size"),
        (None, "is missing or has"),
        (lambda b: b[:100] + bytes([b[100] ^ 4]) + b[101:], "is damaged"),
    ],
)
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_damaged_file_is_found(tmp_path, name, damage, says):
    source = write(tmp_path / "a.txt")
    path = prepare(source, cache=tmp_path / "cache").folder / name
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with pytest.raises(
        ValueError, match=f"{name} {says}.*delete the folder {path.parent} and prepare it"
    ) as caught:
        prepare(source, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_tokens_are_hashed_when_made_asked_for_or_of_another_date_and_otherwise_sampled(
    tmp_path, monkeypatch, capsys
):
    source = write(tmp_path / "a.txt", 2000)
    cache = {"cache": tmp_path / "cache"}
    assert prepare(source, **cache).checked == corpus.IN_FULL  # just prepared
    path = prepare(source, **cache).folder / "train.bin"
    content = path.read_bytes()
    date = path.stat().st_mtime_ns
    hashed = []
    real = corpus.stretch_sha256
    monkeypatch.setattr(
        corpus, "stretch_sha256", lambda *stretch: hashed.append(stretch) or real(*stretch)
    )

    def damaged(at):
        before = content[:at]
        after = content[at + 1 :]
        path.write_bytes(before + b"?" + after)
        os.utime(path, ns=(date, date))  # a failing disk changes neither date nor size

    between = 1024 + (len(content) - 1024) // 63 // 2  # between the first two samples
    assert prepare(source, **cache).checked == corpus.SAMPLED
    assert not hashed
    damaged(between)
    assert prepare(source, **cache).checked == corpus.SAMPLED
    assert not hashed
    with pytest.raises(ValueError, match="train.bin is damaged .its SHA-256 differs"):
        prepare(source, **cache, verify=True)
    words = ["prepare", source, "--cache", str(cache["cache"]), "--verify"]
    assert cli.main(words) == 1
    assert "damaged" in capsys.readouterr().err
    damaged(100)
    with pytest.raises(
        ValueError,
        match="train.bin is damaged .its SHA-256 differs from the index.; "
        f"delete the folder {path.parent}",
    ):
        prepare(source, **cache)
    for repeated in (lambda: path.with_name("checked.json").unlink(), lambda: os.utime(path)):
        repeated()
        with pytest.raises(ValueError, match="train.bin is damaged .its SHA-256 differs"):
            prepare(source, **cache)
    path.write_bytes(content)
    assert prepare(source, **cache, verify=True).checked == corpus.IN_FULL
    words = ["prepare", source, "--cache", str(cache["cache"])]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert f"tokenizer: bytes; {corpus.SAMPLED}" in out


@pytest.mark.parametrize("note", ["", "[]", "[1]", "{", '{"train": 3}'])
def test_a_damaged_note_is_made_again_and_a_damaged_index_is_named(tmp_path, note):
    source = write(tmp_path / "text.txt")
    folder = prepare(source, cache=tmp_path / "cache").folder
    good = (folder / "checked.json").read_text()
    (folder / "checked.json").write_text(note)
    prepare(source, cache=tmp_path / "cache")
    assert (folder / "checked.json").read_text() == good
    changed = (folder / "index.json").read_text().replace('"bytes": 1', '"bytes": 2')
    for index in (note, changed):
        (folder / "index.json").write_text(index)
        with pytest.raises(ValueError, match="index.json.*delete it and run"):
            prepare(source, cache=tmp_path / "cache")
    (folder / "index.json").unlink()  # apply the suggested remedy
    result = bytes_of(prepare(source, cache=tmp_path / "cache"))
    assert result == expected(source)


def test_a_damaged_state_is_named_and_not_believed(tmp_path, monkeypatch):
    source = write(tmp_path / "a.txt", 300)
    for name in ("train.bin", "val.bin", "state.json"):
        interrupted(monkeypatch, 5, source, cache=tmp_path / "cache", workers=1)
        partial = (tmp_path / "cache").glob(f".*.partial/{name}")
        path = next(partial)
        content = path.read_bytes()
        flipped = bytes([content[99] ^ 1])
        path.write_bytes(content[:99] + flipped + content[100:])
        with pytest.raises(ValueError, match=f"{name}.*damaged|{name} is not"):
            prepare(source, cache=tmp_path / "cache")
    result = bytes_of(prepare(source, cache=tmp_path / "cache"))
    assert result == expected(source)


# ---- nanoGPT's files


def test_a_bin_is_used_in_place(gpt2_folder, tmp_path):
    tokenizer = get_tokenizer(f"gpt2:{gpt2_folder}")
    gpt2 = f"gpt2:{gpt2_folder}"
    texts = [f"text {i} the in the\n" for i in range(400)]
    ids = [tokenizer.encode(text).tolist() + [50256] for text in texts]
    text = SEPARATOR.join(texts)
    (tmp_path / "a.txt").write_text(text)
    own = prepare(str(tmp_path / "a.txt"), gpt2, cache=tmp_path / "cache")
    for part in ("train", "val"):
        path = tmp_path / "nano" / f"{part}.bin"
        write_bin(path, getattr(own, part))
    paths = (tmp_path / "nano").iterdir()
    before = {path: path.stat().st_mtime_ns for path in paths}
    nano = tmp_path / "nano"
    for source in (nano, tmp_path / "nano" / "train.bin", own.folder):
        with pytest.raises(
            ValueError, match=f"{source} has a held-out part; fraction=0.5 does not apply"
        ):
            prepare(str(source), gpt2, cache=tmp_path / "cache", fraction=0.5)
        result = prepare(str(source), gpt2, cache=tmp_path / "cache")
        assert isinstance(result.train, np.memmap)
        assert np.array_equal(result.train, own.train)
        assert np.array_equal(result.val, own.val)
        bits = result.bits_per_byte(2.0)
        expected_bits = own.bits_per_byte(2.0)
        assert bits == expected_bits
        assert all(
            result.index[part] == {**result.index[part], **own.index[part]}
            for part in ("train", "val")
        )
    paths = (tmp_path / "nano").iterdir()
    result = {path: path.stat().st_mtime_ns for path in paths}
    assert result == before
    alone = prepare(
        write_bin(tmp_path / "alone" / "train.bin", sum(ids, [])),
        gpt2,
        cache=tmp_path,
        fraction=0.1,
    )
    every = sum(ids, [])
    expected = round(0.1 * len(every))
    assert len(alone.val) == expected
    result = [*alone.train, *alone.val]
    assert result == sum(ids, [])
    named = prepare(
        str(tmp_path / "alone" / "train.bin"),
        gpt2,
        str(tmp_path / "nano" / "val.bin"),
        cache=tmp_path,
    )
    expected = len(sum(ids, []))
    assert len(named.train) == expected
    assert np.array_equal(named.val, own.val)


def test_a_bad_bin_is_named(tmp_path):
    path = tmp_path / "nano" / "train.bin"
    cases = [
        (
            [1, 2, 300, 4],
            {},
            "has token 300, but the tokenizer bytes has 256 tokens; name the tokenizer",
        ),
        ([1, 2, 3, 4], {"limit": 3}, "contains tokens, so limit=3 does not apply"),
        ([1, 2, 3, 4], {"text_column": "body"}, "has no columns; text_column='body' does not"),
        ([1, 2, 3, 4], {"val": str(path)}, "is the training text; hold out another text"),
        (
            [1, 2, 3, 4],
            {"val": "stdlib"},
            "stdlib cannot be the held-out part of .* part, which must be a .bin file",
        ),
    ]
    for ids, options, says in cases:
        with pytest.raises(ValueError, match=says) as caught:
            prepare(write_bin(path, ids), cache=tmp_path / "cache", **options)
        assert str(path) in str(caught.value)
    corpus_of_four = prepare(write_bin(path, [1, 2, 3, 4]), cache=tmp_path / "cache")
    result = len(corpus_of_four.train)
    assert result == 3
    content = path.read_bytes()
    path.write_bytes(content + b"\1")
    with pytest.raises(
        ValueError,
        match=f"{path} has 9 bytes, but a token has 2, "
        "so the file is truncated or has integers of another width",
    ):
        prepare(str(path), cache=tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["<u4", "<i8", ">u4"])
@pytest.mark.parametrize("alone", [True, False])
def test_integers_of_another_width_are_refused(tmp_path, dtype, alone):
    for name in ("train.bin", "val.bin")[: 2 - alone]:
        numbers = np.arange(1, 101).astype(dtype)
        numbers.tofile(tmp_path / name)
    with pytest.raises(
        ValueError,
        match="train.bin has 0 at every second position, so its integers have 4 or 8 bytes; "
        "write them as np.uint16",
    ):
        prepare(str(tmp_path), cache=tmp_path / "cache")


def test_bytes_are_not_read_as_ids_of_16_bits(tmp_path):
    text = np.frombuffer(b"to be or not to be, that is the question. " * 300, np.uint8)
    text.tofile(tmp_path / "train.bin")
    with pytest.raises(
        ValueError,
        match="bytes has 256 tokens; name the tokenizer with which the file was made, "
        "and write the ids as np.uint16",
    ):
        prepare(str(tmp_path), cache=tmp_path / "cache")
    characters_of_16_bits = [chr(i) for i in range(1 << 15)]
    large = corpus.CharTokenizer(characters_of_16_bits)
    with pytest.raises(
        ValueError, match="train.bin has no token below 256, so its integers have 1 byte"
    ):
        corpus.counted(tmp_path / "train.bin", text.view("<u2"), large, 0)
    assert corpus.counted(tmp_path / "train.bin", text.astype("<u2"), large, 0)["tokens"] == len(
        text
    )


def test_a_table_of_characters_is_the_tokenizer_of_its_files(tmp_path, capsys):
    table = characters(tmp_path / "char")
    for name in ("bytes", f"chars:{tmp_path / 'char'}"):
        result = prepare(str(tmp_path / "char"), name, cache=tmp_path / "cache")
        text = result.tokenizer.decode(result.train[:14])
        assert text == "to be or not t"
        assert result.tokenizer.vocab_size == len(table) == 15
        assert result.index["train"]["documents"] == 1
        expected = result.index["val"] | {"tokens": 200, "bytes": 200}
        assert result.index["val"] == expected
        expected = result.train[:5]
        encoded = result.tokenizer.encode("to be")
        assert np.array_equal(encoded, expected)
    assert (
        f"{tmp_path / 'char' / 'train.bin'}: read as ids of the tokenizer chars"
        in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="the character 'Z' is not in the tokenizer's table of 15"):
        result.tokenizer.encode("toZ")
    with pytest.raises(ValueError, match="chars:.* has no end mark, so it cannot be used"):
        text = write(tmp_path / "a.txt")
        table = f"chars:{tmp_path / 'char'}"
        prepare(text, table, cache=tmp_path / "cache")
    greek = characters(tmp_path / "greek", "αβγ\n" * 100)
    result = prepare(str(tmp_path / "greek"), cache=tmp_path / "cache")
    assert len(greek) == 4
    assert result.index["val"]["bytes"] == 350
    text = result.tokenizer.decode([*result.train[:3], 99])
    assert text == "αβγ"
    with pytest.raises(
        ValueError,
        match="meta.pkl has a table of 4 characters, so the tokenizer must be "
        "chars:.*greek instead of chars:.*char",
    ):
        greek = str(tmp_path / "greek")
        table = f"chars:{tmp_path / 'char'}"
        prepare(greek, table, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="so the tokenizer must be chars:.*greek instead of gpt2"):
        prepare(
            str(tmp_path / "greek"), "gpt2", cache=tmp_path / "cache"
        )  # before its vocabulary is fetched
    with pytest.raises(ValueError, match="do not have the same meta.pkl in their folders"):
        prepare(
            str(tmp_path / "greek" / "train.bin"),
            val=str(tmp_path / "char" / "val.bin"),
            cache=tmp_path / "cache",
        )


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    "meta, says",
    [
        (pickle.dumps(Runs()), "posix.system; expected strings, numbers, dicts and lists"),
        (pickle.dumps({"vocab_size": np.int64(3)}), "numpy.*; expected strings"),
        *(
            (code, "posix.system; expected strings")
            for code in (b"cposix\nsystem\n(S'touch ran'\ntR.", b"(S'touch ran'\niposix\nsystem\n.")
        ),
        (b"c" + b"m" * 10**5 + b"\nx\n.", "it contains m{80}; expected"),
        (b"Pkey\n.", "it refers to other objects"),
        (b"\x80\x02\x82\x01.", "cannot be read"),
        (b"", "cannot be read"),
        (b"\x80\x04\x95" + b"\xff" * 20, "cannot be read"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "cannot be read"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "no vocab_size"),
        (pickle.dumps([1]), "no vocab_size"),
        (pickle.dumps({"vocab_size": "x"}), "no vocab_size"),
        (
            pickle.dumps({"vocab_size": 50304}),
            "a vocabulary of 50304 ids, but the tokenizer bytes has 256",
        ),
        (
            pickle.dumps({"vocab_size": 3, "itos": {0: "a", 1: "b"}}),
            "a vocab_size of 3, but 2 characters",
        ),
        *(
            (
                pickle.dumps({"vocab_size": 2, "itos": table}),
                "no table with one character per id, starting at 0; prepare the text",
            )
            for table in (
                {0: "a", 2: "b"},
                {0: "a", 1: "a"},
                {0: "a", 1: "bc"},
                {0: "a", 1: 2},
                {},
                "ab",
                dict.fromkeys(range(70_000), "a"),
            )
        ),
    ],
)
def test_a_table_that_is_none_is_refused_and_runs_no_code(tmp_path, monkeypatch, meta, says):
    monkeypatch.chdir(tmp_path)
    characters(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(meta)
    with pytest.raises(ValueError, match=f"meta.pkl.* {says}"):
        prepare(str(tmp_path), cache=tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_a_size_without_a_table_must_be_the_tokenizers(tmp_path):
    for itos in (["a", "b"], None):
        write_bin(tmp_path / "train.bin", [1, 0, 1, 1])
        (tmp_path / "meta.pkl").write_bytes(
            pickle.dumps({"vocab_size": 2 if itos else 256, "itos": itos})
        )
        assert prepare(str(tmp_path), cache=tmp_path / "cache").tokenizer.name == (
            "chars" if itos else "bytes"
        )


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_start_removes_the_pieces_of_a_killed_one(tmp_path):
    source = write(tmp_path / "a.txt", 300)

    def killed(results, _):
        corpus.write_piece = kill_this_process
        prepare(source, cache=tmp_path / "cache", workers=1)

    expected = [-signal.SIGKILL]
    assert in_processes(killed, 0)[1] == expected
    (left,) = (tmp_path / "cache").glob(".*.partial/.piece*")
    with pytest.MonkeyPatch.context() as patch:
        at_call(
            patch,
            corpus,
            "write_piece",
            0,
            lambda: patch.setattr(corpus, "seen", left.exists(), raising=False),
        )
        prepare(source, cache=tmp_path / "cache", workers=1)
        assert corpus.seen is False
