import gzip
import io
import json
import lzma
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from longhorn_kit import cli
from longhorn_kit.lab.data import text as data
from longhorn_kit.lab.data.corpus import prepare
from longhorn_kit.lab.data.text import (
    SEPARATOR,
    Sampler,
    embedded_corpus_hash,
    embedded_documents,
    file_documents,
    hold_out_long,
    is_held_out,
    load_documents,
)
from longhorn_kit.lab.data.tokenizers import get_tokenizer
from longhorn_kit.lab.train.lm import open_texts
from texts import documents, fake_datasets, json_lines, split, write_records

# ---- sources


@pytest.mark.parametrize(
    "suffix, compress",
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".zst", lambda text: zstandard.compress(text[:50]) + zstandard.compress(text[50:])),
    ],
)
def test_every_compression_gives_the_same_documents(tmp_path, suffix, compress):
    text = SEPARATOR.join(["one\ntwo β", "three", "four\n"])
    for name in ("b.txt", "a.txt"):
        written = text.replace("\n", "\r\n") if name == "a.txt" else text
        content = compress(written.encode())
        (tmp_path / (name + suffix)).write_bytes(content)
    result = list(load_documents(str(tmp_path / "*.txt*")))
    texts = [text for _, text in result]
    assert texts == ["one\ntwo β", "three", "four\n"] * 2
    assert result[0][0].startswith(
        "a.txt"
    )  # sorted, so the order does not depend on the file system
    shouted = tmp_path / f"C.TXT{suffix.upper()}"
    content = compress(text.encode())
    shouted.write_bytes(content)
    texts = [text for _, text in load_documents(str(shouted))]
    assert texts == ["one\ntwo β", "three", "four\n"]


def test_zst_archives_of_the_longest_window_and_frames_without_text_are_read(tmp_path):
    long = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)  # zstd --long=31
    pieces = zstandard.ZstdCompressor(compression_params=long).compressobj()
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"  # as in files of pzstd
    random = os.urandom(50_000)
    text = random.hex().encode()
    (tmp_path / "a.txt.zst").write_bytes(
        skippable
        + pieces.compress(text)
        + pieces.flush()
        + zstandard.compress(b"")
        + zstandard.compress(b" end")
    )
    archive = str(tmp_path / "a.txt.zst")
    documents = load_documents(archive)
    result = next(documents.__iter__())[1]
    expected = text.decode() + " end"
    assert result == expected


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt.gz", b"x" * 10**6),
        ("a.txt", b"line\n" * 10**5),
        ("a.jsonl", b'{"text": "' + b"x" * 10**6),
        ("a.txt.zst", b"x" * 10**6),
    ],
)
def test_a_document_that_is_too_long_for_the_memory_is_refused(
    tmp_path, monkeypatch, name, content
):
    monkeypatch.setattr(data, "largest_document", lambda: 10**5)
    compressions = {".gz": gzip.compress, ".zst": zstandard.compress}
    ending = name[-3:] if name.endswith("gz") else name[-4:]
    compress = compressions.get(ending, bytes)
    (tmp_path / name).write_bytes(compress(content))
    with pytest.raises(
        ValueError,
        match=f"a (line|document) of .*{name} is longer than .* GB, an eighth of the memory; "
        "separate its documents by",
    ):
        list(load_documents(str(tmp_path / name)))


def test_memory_that_runs_out_names_the_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("words")

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(data, "normalise", full)
    with pytest.raises(
        ValueError,
        match="a.txt has a document that does not fit into memory; separate its documents",
    ):
        list(load_documents(str(tmp_path / "a.txt")))
    assert 0 < data.largest_document() < 2**60


@pytest.mark.parametrize("folder", ["text [1]", "text*", "what?"])
def test_a_folder_that_exists_is_no_pattern(tmp_path, folder):
    for name, text in (
        (folder, "this one"),
        ("text 1", "another"),
        ("text", "another"),
        ("whats", "another"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
        (tmp_path / name / "train-[1].jsonl").write_text(json.dumps({"text": text}))
    for files in ("*.txt", "a.txt", "train-[[]1].jsonl", "train-[1].jsonl"):
        pattern = f"{tmp_path / folder}/{files}"
        result = [text for _, text in load_documents(pattern)]
        assert result == ["this one"]
    documents = list(load_documents(f"{tmp_path}/t*/a.txt"))
    assert len(documents) >= 2
    with pytest.raises(ValueError, match="`datasets` treats .* as a pattern; rename the folder"):
        load_documents(f"hf:{tmp_path / folder}")


def test_what_a_pattern_leaves_out_or_finds_twice_is_named_once(tmp_path, capsys):
    for name in ("a.txt", "b.txt", "more/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = f"the text of {name}\n" * 200
        (tmp_path / name).write_text(text)
    content = (tmp_path / "b.txt").read_bytes()
    compressed = gzip.compress(content)
    (tmp_path / "b.txt.gz").write_bytes(compressed)
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    prepare(str(tmp_path / "*"), cache=cache)
    lines = capsys.readouterr().err.splitlines()
    assert [
        line
        for line in lines
        if "left out 1 folder, such as" in line and line.endswith("finds files at any depth")
    ] == lines[:1]
    assert "b.txt.gz and b.txt are read; they may be the same text" in lines[1]
    assert len(lines) == 2
    documents = list(load_documents(str(tmp_path / "**" / "*.txt")))
    result = len(documents)
    assert result == 3
    assert capsys.readouterr().err == ""


def test_a_local_dataset_may_have_any_other_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "rows@v1#x:y"
    folder.mkdir()
    write_records(folder / "train-[1].jsonl", text=["one", "two"])
    texts = [text for _, text in load_documents(f"hf:{folder}")]
    assert texts == ["one", "two"]


def test_words_of_the_data_are_escaped_in_messages(tmp_path, capsys):
    (tmp_path / "a\x1b[31m.jsonl").write_text('{"\\u001b]0;title\\u0007": "x"}\n')
    pattern = str(tmp_path / "*.jsonl")
    cache = str(tmp_path / "cache")
    result = cli.main(["prepare", pattern, "--cache", cache])
    assert result == 1
    (tmp_path / "b\x1b[31m.jsonl").write_text('{"text": null}\n{"text": "x"}\n')
    list(load_documents(str(tmp_path / "b*.jsonl")))
    message = capsys.readouterr().err
    assert "\x1b" not in message
    assert "\x07" not in message
    assert message.count("\ufffd") == 4


@pytest.mark.parametrize("source", ["missing.txt", "none/*.txt", "."])
def test_missing_sources_are_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="data source") as caught:
        prepare(source, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def with_a_damaged_page():
    file = io.BytesIO()
    pq.write_table(
        pa.table({"text": documents(500)}), file, compression="none", use_dictionary=False
    )
    content = file.getvalue()
    return content[:200] + b"\xff" * 500 + content[700:]


ZIPPED = "cannot be decompressed"


@pytest.mark.parametrize(
    "name, content, says",
    [
        *(
            (f"a{end}", content, "is empty")
            for end in (".txt", ".jsonl")
            for content in (b"", b"\n \n")
        ),
        ("a.txt", b"abc\0def", "is not text: it contains NUL"),
        ("a.txt", "caf\xe9".encode("latin-1"), "is not UTF-8 text: byte 3"),
        *(
            (name, text.encode(encoding), f"is {encoding[:6].upper()}; save it as UTF-8")
            for name, text in (("a.txt", "words\n" * 9), ("a.jsonl", '{"text": "x"}\n'))
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
        ),
        (
            "a.txt.gz",
            gzip.compress("日本".encode("utf-16"), mtime=0),
            "is UTF-16; save it as UTF-8",
        ),
        ("torn.gz", gzip.compress(b"x" * 10_000, mtime=0)[:-20], ZIPPED),
        ("torn.xz", lzma.compress(os.urandom(10_000))[:-200], ZIPPED),
        ("torn.zst", zstandard.compress(os.urandom(10_000))[:-20], ZIPPED),
        ("torn-early.zst", zstandard.compress(os.urandom(10_000))[:3], ZIPPED),
        (
            "torn-late.zst",
            zstandard.compress(b"whole frame") + zstandard.compress(b"x" * 10_000)[:-3],
            ZIPPED,
        ),
        *((f"not{end}", b"plain text", ZIPPED) for end in (".xz", ".gz", ".zst")),
        (
            "a.jsonl",
            json_lines({"text": "x"}, {"text": 7}),
            "line 2: column 'text' has a value of type int, not text",
        ),
        (
            "a.jsonl",
            json_lines({"text": ["x"]}),
            "line 1: column 'text' has a value of type list, not text",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: column 'text' is not UTF-8 text: byte 0"),
        (
            "a.jsonl",
            json_lines({"body": "x", "id": 7}),
            "line 1 has no column 'text' or 'content'; it has body, id",
        ),
        (
            "a.jsonl",
            json_lines({"text": "x"}, {"id": 7}),
            "line 2 has no column 'text' or 'content'; it has id",
        ),
        ("a.jsonl", json_lines({"text": "x"}, {}), "line 2 has no column .*; it has none"),
        (
            "a.jsonl",
            b'{"text": "x"}\n\n{"text": "x"\n',
            "line 3 is not a JSON record: Expecting ',' delimiter",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "caf\xe9"}\n',
            "line 2 is not a JSON record: 'utf-8'",
        ),
        ("a.jsonl", b"[" * 10**5 + b"\n", "line 1 is not a JSON record: .*recursion"),
        ("a.json", b'[{"text": "x"}]\n', "line 1 is a JSON value of type list, not a record"),
        ("a.json", b'[\n{"text": "x"}\n]\n', "line 1 is not a JSON record"),
        (
            "a.jsonl",
            json_lines({"text": None}, {"text": " "}, {"text": "\0"}, {"text": "\ufeff"}),
            "is empty",
        ),
        ("a.jsonl.gz", gzip.compress(json_lines({"text": "x" * 9999}), mtime=0)[:-20], ZIPPED),
        ("a.jsonl.gz", json_lines({"text": "x"}), ZIPPED),
        ("a.parquet", b"", "cannot be read as parquet: .*0 bytes"),
        ("a.parquet", b"plain text", "cannot be read as parquet: .*magic bytes"),
        ("a.parquet", with_a_damaged_page(), "cannot be read as parquet: "),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "cannot be read as parquet"),
        ("a.parquet", {"text": pa.array([], pa.string())}, "is empty"),
        (
            "a.parquet",
            {"body": ["x"], "id": [7]},
            "has no column 'text' or 'content'; it has body, id",
        ),
        ("a.parquet", {"text": [7]}, "row 0: column 'text' has a value of type int, not text"),
        (
            "a.parquet",
            {"text": [b"x", b"y"]},
            "row 0: column 'text' has a value of type bytes, not text",
        ),
        (
            "a.parquet",
            {"text": pa.array([b"\xe9"]).view(pa.string())},
            "cannot be read as parquet: 'utf-8'",
        ),
        *(
            (f"a{end}", b"plain letters", "cannot be read as text")
            for end in (".csv", ".TSV", ".csv.gz", ".tar.xz", ".arrow", ".zip", ".npy")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_files_are_refused_in_one_line_that_names_file_and_place(tmp_path, name, content, says):
    if isinstance(content, dict):
        write_records(tmp_path / name, **content)
    else:
        (tmp_path / name).write_bytes(content)
    message = f"{name},? {says}"
    with pytest.raises(ValueError, match=message) as caught:
        prepare(str(tmp_path / name), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    leftover = list((tmp_path / "cache").glob("*"))
    assert not leftover


def test_the_column_may_be_named(tmp_path):
    rows = [{"text": f"one {i}", "body": f"two {i}"} for i in range(200)]
    for name in ("a.jsonl", "a.parquet"):
        texts = [row["text"] for row in rows]
        bodies = [row["body"] for row in rows]
        source = write_records(tmp_path / name, text=texts, body=bodies)
        for column in ("text", "body"):
            assert [text for _, text in load_documents(source, column)] == [
                row[column] for row in rows
            ]
        with pytest.raises(ValueError, match=f"{name}.* has no column 'title'; it has text, body"):
            list(load_documents(source, "title"))
    (tmp_path / "plain.txt").write_text("words")
    with pytest.raises(ValueError, match="plain.txt is plain text and has no column 'body'"):
        list(load_documents(str(tmp_path / "plain.txt"), "body"))


def test_records_without_text_are_skipped_and_counted(tmp_path, capsys, monkeypatch):
    texts = ["one", None, " \n", "t\0wo", "", "\ufeff"]
    fake_datasets(monkeypatch, lambda *args, **options: iter([{"content": text} for text in texts]))
    files = [write_records(tmp_path / name, content=texts) for name in ("a.jsonl", "a.parquet")]
    for source in (*files, "hf:owner/code"):
        result = [text for _, text in load_documents(source)]
        assert result == ["one", "two"]
        assert (
            capsys.readouterr().err.strip().endswith("4 of 6 records have no text and were skipped")
        )


def test_a_parquet_file_of_one_row_group_is_read_in_bounded_memory(tmp_path):
    random = np.random.default_rng(0)
    texts = [random.bytes(10_000).hex() for _ in range(2000)]
    pages = {
        "compression": "none",
        "use_dictionary": False,
        "write_batch_size": 16,
    }  # small pages in one row group
    table = pa.table({"text": texts, "other": texts})
    pq.write_table(table, tmp_path / "a.parquet", **pages)
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert metadata.num_row_groups == 1
    before = pa.total_allocated_bytes()
    most = 0
    for _ in load_documents(str(tmp_path / "a.parquet")):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 10_000_000


def test_hub_rows_are_streamed_and_errors_are_one_line(monkeypatch):
    requested = []

    def load(path, config, split, streaming, revision):
        assert streaming
        requested.append((path, config, split, revision))
        return ({"text": text} for text in documents(5) + [" "])

    fake_datasets(monkeypatch, load)
    result = [text for _, text in load_documents("hf:owner/books:small")]
    assert result == documents(5)
    for name in ("a/b", "a/b:c#test", "a/b@v1", "a/b#validation@v1"):
        list(load_documents(f"hf:{name}"))
    assert requested == [
        ("owner/books", "small", "train", None),
        ("a/b", None, "train", None),
        ("a/b", "c", "test", None),
        ("a/b", None, "train", "v1"),
        ("a/b", None, "validation", "v1"),
    ]
    with pytest.raises(ValueError, match="hf::: the name must have the form"):
        list(load_documents("hf::"))

    def offline(*args, **options):
        raise ConnectionError("no route to the hub\nand more lines")

    fake_datasets(monkeypatch, offline)
    with pytest.raises(
        OSError, match="cannot load the dataset 'owner/books'.*no route to the hub$"
    ):
        list(load_documents("hf:owner/books"))
    fake_datasets(monkeypatch, lambda *args, **options: iter([{"image": 1, "label": 2}]))
    with pytest.raises(ValueError, match="no column 'text' or 'content'; it has image, label"):
        list(load_documents("hf:owner/pictures"))


@pytest.mark.parametrize("source", ["a-*.txt", "a-*.jsonl", "hf:rows"])
def test_a_position_resumes_after_the_last_document(tmp_path, monkeypatch, source):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    texts = documents(60)
    for i in range(3):
        start = 20 * i
        part = texts[start : 20 * i + 20]
        text = SEPARATOR.join(part)
        (tmp_path / f"a-{i}.txt").write_text(text)
        for folder in (".", "rows"):
            write_records(tmp_path / folder / f"a-{i}.jsonl", text=part)
    for read in (0, 7, 20, 41, 60):
        stream = load_documents(source)
        first = [text for _, (_, text) in zip(range(read), stream)]
        position = json.loads(json.dumps(stream.position()))
        repeated = load_documents(source, position=position)
        assert first + [text for _, text in repeated] == texts


def test_embedded_corpus_is_fixed_and_its_parts_share_no_document():
    names = [name for name, _ in embedded_documents()]
    assert len(names) == len(set(names)) > 300
    assert names == [name for name, _ in embedded_documents()]
    left_out = {"test", "tests", "tkinter", "idlelib", "lib2to3", "distutils", "site-packages"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert any(name.startswith("topics/") for name in names)
    assert "threading.py" in names
    assert embedded_corpus_hash() == embedded_corpus_hash()
    assert len(embedded_corpus_hash()) == 64
    parts = {"train": set(), "val": set()}
    for part, text in split(embedded_documents(), by_name=True):
        assert "\r" not in text
        assert "\0" not in text
        parts[part].add(text)
    assert len(parts["val"]) >= 10
    assert not parts["train"] & parts["val"]


# ---- held-out part


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 400), st.integers(1, 50), st.integers(0, 10**6))
def test_copies_of_a_document_are_in_the_same_part(n, different, salt):
    texts = [f"{salt} {i % max(different, 2)}" for i in range(n)]
    parts = {"train": Counter(), "val": Counter()}
    for part, text in split(enumerate(texts), fraction=0.3):
        parts[part][text] += 1
    if len({is_held_out(text, 0.3) for text in texts}) == 2:
        shared = set(parts["train"]) & set(parts["val"])
        assert not shared
        result = parts["train"] + parts["val"]
        assert result == Counter(texts)
    else:  # with complete documents one part is empty, so the end of each document is held out
        assert sum(parts["train"].values()) == sum(parts["val"].values()) == n


def test_a_small_share_of_many_documents_is_whole_documents():
    texts = [f"entry {i}" + "\na line of text" * 20 for i in range(6000)]
    for text in texts[:1000]:
        assert not is_held_out(text, 0.0005)
    held = [text for text in texts if is_held_out(text, 0.0005)]
    parts = split(enumerate(texts), fraction=0.0005)
    assert held
    assert [text for part, text in parts if part == "val"] == held
    assert len(parts) == len(texts)


def test_few_documents_give_their_ends_and_no_character_is_lost(tmp_path):
    texts = ["line\n" * 100, "other line\n" * 50]
    pieces = split(enumerate(texts), fraction=0.1)
    result = "".join(text for _, text in pieces)
    assert result == "".join(texts)
    order = [part for part, _ in pieces]
    assert order == ["train", "val"] * 2
    for _, text in pieces:
        assert text.endswith("\n")
    assert [part for part, _ in split([(0, "word " * 2000 + "\n")], fraction=0.1)] == [
        "train",
        "val",
    ]  # each line is a text too
    held_out = sum(len(t) for p, t in pieces if p == "val")
    total = sum(map(len, texts))
    assert 0.05 < held_out / total < 0.15


# ---- long documents


def two_domains(folder, long=None):
    "Write two domains: long and blank documents, Windows newlines, a missing last end mark."
    folder.mkdir()
    long = long or {"docs": 6, "prose": 6}
    for name, suffix, compress in (("docs", "", bytes), ("prose", ".xz", lzma.compress)):
        texts = []
        for i in range(21):
            is_long = i % 3 == 0 and i < 3 * long[name]
            texts.append(f"{name} β {i}\n" * (40 if is_long else 1))
        texts.append("  ")
        text = SEPARATOR.join(texts) + "\n<|endoftext|>\r\nthe\r\nend\n"
        content = compress(text.encode())
        (folder / f"{name}.train.txt{suffix}").write_bytes(content)
        content = compress(f"{name} held out\n".encode())
        (folder / f"{name}.val.txt{suffix}").write_bytes(content)
    return folder


def read_bytes(folder, name, part):
    (path,) = folder.glob(f"{name}.{part}.txt*")
    is_packed = path.suffix == ".xz"
    return lzma.open(path).read() if is_packed else path.read_bytes()


def test_long_documents_leave_the_training_text_and_the_rest_keeps_its_bytes(tmp_path):
    source = two_domains(tmp_path / "text")
    out = tmp_path / "apart"
    (source / "vocab.bpe").write_text("a b")
    taken = hold_out_long(source, out, count=8, least=400)
    counts = {name: documents for name, (documents, _) in taken.items()}
    assert counts == {"docs": 4, "prose": 4}
    for name, (_, size) in taken.items():
        before, after, moved = (
            read_bytes(*document)
            for document in ((source, name, "train"), (out, name, "train"), (out, name, "long"))
        )
        documents = moved.split(SEPARATOR.encode())
        assert documents.pop() == b""
        assert len(documents) == 4
        assert sum(map(len, documents)) == size
        assert min(map(len, documents)) >= 400
        for text in documents:  # the rest is the text without these documents, byte for byte
            whole = text + SEPARATOR.encode()
            assert before.count(whole) == 1
            before = before.replace(whole, b"")
        assert before == after
        assert after.count(b"\r\n") == 2
        assert read_bytes(out, name, "val") == read_bytes(source, name, "val")
    assert (out / "vocab.bpe").read_text() == "a b"
    hold_out_long(source, tmp_path / "again", count=8, least=400)
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_domain_with_few_long_documents_gives_all_and_the_others_give_more(tmp_path):
    taken = hold_out_long(
        two_domains(tmp_path / "text", {"docs": 1, "prose": 6}),
        tmp_path / "apart",
        count=6,
        least=400,
    )
    counts = {name: documents for name, (documents, _) in taken.items()}
    assert counts == {"docs": 1, "prose": 5}


def test_what_cannot_be_held_out_is_named_and_leaves_nothing(tmp_path):
    source = two_domains(tmp_path / "text")
    out = tmp_path / "apart"
    for options, error, message in (
        (
            dict(count=13, least=400),
            ValueError,
            "has 12 documents of at least 400 bytes; 13 are needed",
        ),
        (dict(count=0), ValueError, "count is 0"),
        (dict(least=0), ValueError, "least is 0"),
    ):
        with pytest.raises(error, match=message):
            hold_out_long(source, out, **options)
    with pytest.raises(FileExistsError, match="text exists; name a new folder"):
        hold_out_long(source, source, count=2, least=400)
    with pytest.raises(FileNotFoundError, match="none has no file NAME.train.txt"):
        hold_out_long(tmp_path / "none", out)
    content = (source / "prose.train.txt.xz").read_bytes()
    (source / "prose.train.txt.xz").write_bytes(content[:90])
    with pytest.raises(ValueError, match="prose.train.txt.xz cannot be decompressed"):
        hold_out_long(source, out, count=2, least=400)
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["text"]
    (source / "prose.long.txt").write_text("")
    with pytest.raises(ValueError, match="already has held-out long documents"):
        hold_out_long(source, out, count=2, least=400)


def test_opened_texts_have_the_long_documents_and_name_them(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGHORN_CACHE", str(tmp_path / "cache"))
    source = two_domains(tmp_path / "text")
    out = tmp_path / "apart"
    hold_out_long(source, out, count=4, least=400)
    before = open_texts(str(source))
    after = open_texts(str(out))
    assert before.long == {}
    assert "long" not in before.summary()
    for name in ("docs", "prose"):
        documents = file_documents(out / f"{name}.long.txt.xz")
        texts = [text.encode() for _, text in documents]
        result = [bytes(document.tolist()) for document in after.long[name]]
        assert result == texts
        assert len(texts) == 2
        metadata = after.summary()["long"][name]
        assert metadata["documents"] == 2
        expected = sum(map(len, texts)) + 2
        assert metadata["bytes"] == expected
        assert len(metadata["sha256"]) == 16
    held = before.summary()["domains"]
    own = after.summary()
    assert own["domains"] == held
    corpus = before.summary()["corpus"]
    assert own["corpus"] != corpus
    held_out = sum(one["bytes"] for one in own["long"].values())
    expected = before.summary()["train_tokens"] - held_out
    assert own["train_tokens"] == expected
    hashes = {one["sha256"] for one in own["long"].values()}
    assert len(hashes) == 2  # a change of text or order changes the hash
    after.long["docs"].reverse()
    sha25 = after.summary()["long"]["docs"]["sha256"]
    assert sha25 not in hashes


# ---- tokenizers


@settings(max_examples=50, deadline=None)
@given(st.text().map(lambda text: text.replace("\0", "")))
def test_bytes_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_from_a_folder(gpt2_folder):
    tokenizer = get_tokenizer(f"gpt2:{gpt2_folder}")
    tokens = tokenizer.encode("the in the").tolist()
    assert tokens == [257, 220, 259, 258]
    tokens = tokenizer.encode(" <|endoftext|>")
    assert tokens.max() < 50256  # in a text, the end mark's characters are ordinary text
    text = "the in the α\n" * 3
    result = tokenizer.sizes[tokenizer.encode(text)].sum()
    expected = len(text.encode())
    assert result == expected
    assert tokenizer.sizes[50256] == 1


def test_bad_tokenizers_are_refused_in_one_line(gpt2_folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tokenizer 'words'; expected bytes, gpt2"):
        get_tokenizer("words")
    with pytest.raises(FileNotFoundError, match="vocab.bpe is missing"):
        get_tokenizer(f"gpt2:{tmp_path}")
    for name in ("vocab.bpe", "encoder.json"):
        content = (gpt2_folder / name).read_bytes()
        (tmp_path / name).write_bytes(content)
    for damage in ('{"a": 0}', "[]", "{"):
        (tmp_path / "encoder.json").write_text(damage)
        with pytest.raises(
            ValueError,
            match="vocab.bpe and the encoder.json in its folder do not match .*; copy both again",
        ):
            get_tokenizer(f"gpt2:{tmp_path}")
    content = (gpt2_folder / "encoder.json").read_bytes()
    (tmp_path / "encoder.json").write_bytes(content)
    tokenizer = get_tokenizer(f"gpt2:{tmp_path}")
    result = tokenizer.encode("the").tolist()
    original = get_tokenizer(f"gpt2:{gpt2_folder}")
    expected = original.encode("the").tolist()
    assert result == expected
    import tiktoken

    def offline(name):
        raise ConnectionError("a long story")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match="without a network use gpt2:FOLDER"):
        get_tokenizer("gpt2")


# ---- sampler


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 80),
    st.integers(0, 2**32),
    st.integers(1, 3),
)
def test_every_window_once_per_epoch(context, batch, extra, seed, world):
    tokens = np.arange(context + 1 + extra)
    ranks = [Sampler(tokens, context, batch, seed, rank, world) for rank in range(world)]
    n = ranks[0].windows
    drawn = []
    while len(drawn) < 2 * n:
        for sampler in ranks:
            inputs, targets = sampler.next_batch()
            assert inputs.shape == targets.shape == (batch, context)
            assert inputs.dtype == torch.int64
            assert torch.equal(inputs + 1, targets)  # adjacent tokens of this text differ by one
            drawn += [int(row[0]) for row in inputs]
    for epoch in (drawn[:n], drawn[n : 2 * n]):
        starts = sorted(epoch)  # adjacent windows use no input twice
        end = starts[0] + n * context
        expected = list(range(starts[0], end, context))
        assert starts == expected
        assert starts[-1] + context < len(tokens)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1000))
def test_position_is_restored_exactly(steps, seed):
    tokens = np.arange(100, dtype=np.uint8)
    sampler = Sampler(tokens, 7, 3, seed)
    other = Sampler(tokens, 7, 3, seed)
    for _ in range(steps):
        sampler.next_batch()
    state = json.loads(json.dumps(sampler.state_dict()))
    other.load_state_dict(state)
    for _ in range(8):
        result = sampler.next_batch()[0]
        expected = other.next_batch()[0]
        assert torch.equal(result, expected)


def test_the_order_depends_on_the_seed_and_on_no_other_randomness():
    tokens = np.arange(1000)

    def order(seed):
        torch.manual_seed(np.random.randint(1000))
        sampler = Sampler(tokens, 8, 16, seed)
        return [sampler.next_batch()[0][:, 0].tolist() for _ in range(10)]

    assert order(0) == order(0) != order(1)


def test_a_sampler_refuses_a_short_text_and_a_saved_position_of_other_data():
    sampler = Sampler(np.arange(100), 8, 2)
    state = sampler.state_dict()
    for other in (
        Sampler(np.arange(101), 8, 2),
        Sampler(np.arange(100), 9, 2),
        Sampler(np.arange(100), 8, 2, seed=1),
        Sampler(np.arange(1, 101), 8, 2),
    ):
        with pytest.raises(ValueError, match="the saved position belongs to"):
            other.load_state_dict(state)
    Sampler(np.arange(100), 8, 4).load_state_dict(
        state
    )  # another batch size continues in the same order
    with pytest.raises(ValueError, match="the text has 8 tokens; a context of 8 needs at least 9"):
        Sampler(np.arange(8), 8, 1)
    sampler = Sampler(np.arange(9), 8, 1)
    assert sampler.windows == 1


# ---- folders of texts


def test_a_folder_stands_for_its_texts_and_counts_the_other_files(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("second\n")
    content = gzip.compress(b"first\n")
    (tmp_path / "a.txt.gz").write_bytes(content)
    (tmp_path / "sub" / "c.md").write_text("third\n")
    write_records(tmp_path / "sub" / "d.jsonl", text=["fourth\n"])
    for name in ("cover.png", "back.PNG", "notes", ".git/config", ".hidden.txt"):
        (tmp_path / name).write_bytes(b"\0")
    assert [text for _, text in load_documents(str(tmp_path))] == [
        "first\n",
        "second\n",
        "third\n",
        "fourth\n",
    ]
    list(load_documents(str(tmp_path)))
    assert capsys.readouterr().err == (
        f"longhorn: warning: only texts of the folder {tmp_path} are read; "
        "left out: 2 files ('.png'), 1 file ('no ending')\n"
    )  # once


def test_a_folder_without_a_text_is_refused_with_what_it_holds(tmp_path):
    (tmp_path / "cover.png").write_bytes(b"\0")
    with pytest.raises(
        FileNotFoundError,
        match=r"is a folder without texts; expected files that end in .txt, .*; "
        r"it has 1 file \('.png'\)",
    ):
        list(load_documents(str(tmp_path)))


def test_texts_named_as_held_out_are_never_trained_on(tmp_path):
    (tmp_path / "a.train.txt").write_text("train this " * 9)
    (tmp_path / "a.val.txt").write_text("hold this out " * 9)
    corpus = prepare(str(tmp_path), cache=tmp_path / "cache")
    parts = (corpus.train, corpus.val)
    decoded = [corpus.tokenizer.decode(part) for part in parts]
    assert "train this" in decoded[0]
    assert "out" not in decoded[0]
    assert "hold this out" in decoded[1]


def test_links_are_followed_and_texts_that_come_twice_or_lead_nowhere_are_named(tmp_path, capsys):
    inside = tmp_path / "inside"
    inside.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "far.ndjson").write_text('{"text": "far"}\n')
    (inside / "a.txt").write_text("near")
    (inside / "link").symlink_to(outside)
    (inside / "circle").symlink_to(inside)
    texts = [text for _, text in load_documents(str(inside))]
    assert texts == ["near", "far"]
    assert capsys.readouterr().err == ""
    (inside / "a.txt.gz").write_bytes(gzip.compress(b"near"))
    (inside / "a.txt.xz").write_bytes(lzma.compress(b"near"))
    (inside / "a.txt").unlink()
    for source in (inside, inside / "*.[gx]z"):  # both files are compressed
        assert len(list(load_documents(str(source)))) >= 2
        assert (
            "a.txt.xz and a.txt.gz are read; they may be the same text" in capsys.readouterr().err
        )
    (inside / "b.txt").symlink_to(inside / "c.txt")
    for source in (inside, inside / "b*"):
        with pytest.raises(OSError, match="b.txt cannot be read: No such file"):
            load_documents(str(source))
    (inside / "c.txt").write_text("third")
    list(load_documents(str(inside / "[bc].txt")))
    assert "c.txt and b.txt are read; they may be the same text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "names, says",
    [
        (("train.txt", "val.txt"), ""),
        (("train.txt.gz", "val.txt"), ""),
        (("a.train.jsonl", "a.val.jsonl"), ""),
        (("train.jsonl", "val.jsonl"), ""),
        (
            ("a.train.txt", "a.val.txt", "b.txt", "a.long.txt"),
            "left out: 1 other text, such as b.txt",
        ),
        (("A.TRAIN.TXT", "A.VAL.TXT"), "A.VAL.TXT is used for training like the other texts"),
        (("a.txt", "test.txt"), "test.txt is used for training like the other texts"),
        (
            ("a-00000.parquet", "validation-00000-of-1.parquet"),
            "validation-00000-of-1.parquet is used for training like the other texts",
        ),
        (("a.txt", "interval.txt", "testing.txt"), ""),
    ],
)
def test_names_of_held_out_texts_are_obeyed_or_named(tmp_path, capsys, names, says):
    from longhorn_kit.lab.data.corpus import held_out_files

    for name in names:
        (tmp_path / name).write_bytes(b"x")
    trained, held = held_out_files(str(tmp_path), None)
    separate = held is not None
    assert separate == ("train" in names[0])
    assert not separate or [Path(held).parent.name, len(list(tmp_path.glob(Path(held).name)))] == [
        tmp_path.name,
        1,
    ]
    err = capsys.readouterr().err
    assert (says in err and err.count("\n") == 1) if says else err == ""
