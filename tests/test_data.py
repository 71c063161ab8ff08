import errno, fcntl, gzip, io, json, lzma, math, multiprocessing, os, signal, sys, time, types
from collections import Counter
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from hypothesis import given, settings, strategies as st
from longhorn_kit.lab import data
from longhorn_kit.lab.data import (
    SEPARATOR, Sampler, TokenShards, embedded_corpus_hash, embedded_documents, get_tokenizer, is_held_out,
    load_documents, load_text, prepare, split_documents, token_dtype)
from longhorn_kit.records import exclusive_lock


def documents(n, words=30):
    return [f"document {i}: " + " ".join(str(i * j) for j in range(words)) + "\n" for i in range(n)]


def write(path, n=200):
    path.write_text(SEPARATOR.join(documents(n)), encoding="utf-8")
    return str(path)


# ---- sources


@pytest.mark.parametrize("suffix, compress", [
    ("", bytes), (".gz", gzip.compress), (".xz", lzma.compress),
    (".zst", lambda text: zstandard.compress(text[:50]) + zstandard.compress(text[50:]))])
def test_every_compression_gives_the_same_documents(tmp_path, suffix, compress):
    text = SEPARATOR.join(["one\ntwo β", "three", "four\n"])
    for name in ("b.txt", "a.txt"):
        written = text.replace("\n", "\r\n") if name == "a.txt" else text
        (tmp_path / (name + suffix)).write_bytes(compress(written.encode()))
    found = list(load_documents(str(tmp_path / "*.txt*")))
    assert [text for _, text in found] == ["one\ntwo β", "three", "four\n"] * 2
    assert found[0][0].startswith("a.txt")  # sorted, so the order does not depend on the file system
    assert load_text(str(tmp_path / ("b.txt" + suffix))) == text


@pytest.mark.parametrize("source", ["missing.txt", "none/*.txt", "."])
def test_missing_sources_are_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="data source") as caught:
        prepare(source, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def json_lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_records(path, **columns):
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = json_lines(*(dict(zip(columns, row)) for row in zip(*columns.values())))
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


@pytest.mark.parametrize("name, compress", [
    ("r.jsonl", bytes), ("r.NDJSON", bytes), ("r.json", lambda b: b"\xef\xbb\xbf" + b.replace(b"\n", b"\r\n\n")),
    ("r.jsonl.gz", gzip.compress), ("r.jsonl.xz", lzma.compress), ("r.json.zst", zstandard.compress),
    ("r.parquet", None), ("hf:", bytes)])
def test_the_same_records_give_the_same_shards_whatever_holds_them(tmp_path, monkeypatch, name, compress):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [text + "β {}\n" * (i % 3) for i, text in enumerate(documents(300))]
    (tmp_path / "plain.txt").write_text(SEPARATOR.join(texts) + SEPARATOR, encoding="utf-8")
    path = tmp_path / "records" / name.replace("hf:", "rows.jsonl")
    path.parent.mkdir()
    written = [text.replace("\n", "\r\n") for text in texts]
    if compress:
        path.write_bytes(compress(json_lines(*({"id": i, "text": text} for i, text in enumerate(written)))))
    else:
        write_records(path, id=list(range(300)), text=pa.array(written).dictionary_encode())
    source = f"hf:{path.parent}" if name == "hf:" else str(path)
    found = prepare(source, cache=tmp_path / "cache", shard_tokens=5000)
    plain = prepare(str(tmp_path / "plain.txt"), cache=tmp_path / "cache", shard_tokens=5000)
    assert bytes_of(found) == bytes_of(plain)
    assert found.index["train"]["documents"] + found.index["val"]["documents"] == 300


def with_a_damaged_page():
    file = io.BytesIO()
    pq.write_table(pa.table({"text": documents(500)}), file, compression="none", use_dictionary=False)
    return file.getvalue()[:200] + b"\xff" * 500 + file.getvalue()[700:]


ZIPPED = "cannot be decompressed"


@pytest.mark.parametrize("name, content, says", [
    ("a.txt", b"", "is empty"),
    ("a.txt", b" \n\n", "is empty"),
    ("a.txt", b"abc\0def", "is not text: it contains NUL"),
    ("a.txt", "caf\xe9".encode("latin-1"), "is not UTF-8 text: byte 3"),
    ("torn.gz", gzip.compress(b"x" * 10_000, mtime=0)[:-20], ZIPPED),
    ("torn.xz", lzma.compress(os.urandom(10_000))[:-200], ZIPPED),
    ("torn.zst", zstandard.compress(os.urandom(10_000))[:-20], ZIPPED),
    ("torn-late.zst", zstandard.compress(b"whole frame") + zstandard.compress(b"x" * 10_000)[:-3], ZIPPED),
    *((f"not{end}", b"plain text", ZIPPED) for end in (".xz", ".gz", ".zst")),
    ("a.jsonl", json_lines({"text": "x"}, {"text": 7}), "line 2: column 'text' holds a value of type int, not text"),
    ("a.jsonl", json_lines({"text": ["x"]}), "line 1: column 'text' holds a value of type list, not text"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: column 'text' is not text: it holds a lone surrogate"),
    ("a.jsonl", json_lines({"body": "x", "id": 7}), "line 1 has no column 'text' or 'content'; it has body, id"),
    ("a.jsonl", json_lines({"text": "x"}, {"id": 7}), "line 2 has no column 'text' or 'content'; it has id"),
    ("a.jsonl", json_lines({"text": "x"}, {}), "line 2 has no column .*; it has none"),
    ("a.jsonl", b'{"text": "x"}\n\n{"text": "x"\n', "line 3 is not a JSON record: Expecting ',' delimiter"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', "line 2 is not a JSON record: 'utf-8'"),
    ("a.jsonl", b"[" * 10**5 + b"\n", "line 1 is not a JSON record: .*recursion"),
    ("a.json", b'[{"text": "x"}]\n', "line 1 is not a record but a JSON value of type list"),
    ("a.json", b'[\n{"text": "x"}\n]\n', "line 1 is not a JSON record"),
    *(("a.jsonl", content, "is empty") for content in (b"", b"\n \n")),
    ("a.jsonl", json_lines({"text": None}, {"text": " "}, {"text": "\0"}, {"text": "\ufeff"}), "is empty"),
    ("a.jsonl.gz", gzip.compress(json_lines({"text": "x" * 9999}), mtime=0)[:-20], ZIPPED),
    ("a.jsonl.gz", json_lines({"text": "x"}), ZIPPED),
    ("a.parquet", b"", "cannot be read as parquet: .*0 bytes"),
    ("a.parquet", b"plain text", "cannot be read as parquet: .*magic bytes"),
    ("a.parquet", with_a_damaged_page(), "cannot be read as parquet: "),
    ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "cannot be read as parquet"),
    ("a.parquet", {"text": pa.array([], pa.string())}, "is empty"),
    ("a.parquet", {"body": ["x"], "id": [7]}, "has no column 'text' or 'content'; it has body, id"),
    ("a.parquet", {"text": [7]}, "row 0: column 'text' holds a value of type int, not text"),
    ("a.parquet", {"text": [b"x", b"y"]}, "row 0: column 'text' holds a value of type bytes, not text"),
    ("a.parquet", {"text": pa.array([b"\xe9"]).view(pa.string())}, "cannot be read as parquet: 'utf-8'"),
    ("a.csv", b"id,text\n1,hello\n", "cannot be read as text"),
    ("a.TSV", b"id\ttext\n1\thello\n", "cannot be read as text"),
    ("a.csv.gz", gzip.compress(b"id,text\n1,hello\n", mtime=0), "cannot be read as text"),
    ("a.tar.xz", lzma.compress(b"plain letters"), "cannot be read as text"),
    *((f"a{end}", b"plain letters", "cannot be read as text") for end in (".arrow", ".bin", ".zip", ".npy")),
], ids=lambda value: value if isinstance(value, str) else "")
def test_bad_files_are_refused_in_one_line_that_names_file_and_place(tmp_path, name, content, says):
    if isinstance(content, dict):
        write_records(tmp_path / name, **content)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name},? {says}") as caught:
        prepare(str(tmp_path / name), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value) and not list((tmp_path / "cache").glob("*"))


def test_the_column_may_be_named_and_is_part_of_what_was_prepared(tmp_path):
    rows = [{"text": f"one {i}", "body": f"two {i}"} for i in range(200)]
    found = {}
    for name in ("a.jsonl", "a.parquet"):
        write_records(tmp_path / name, **{column: [row[column] for row in rows] for column in ("text", "body")})
        for column in ("text", "body"):
            assert [text for _, text in load_documents(str(tmp_path / name), column)] == [row[column] for row in rows]
            found[name, column] = prepare(str(tmp_path / name), cache=tmp_path / "cache", text_column=column)
        with pytest.raises(ValueError, match=f"{name}.* has no column 'title'; it has text, body"):
            prepare(str(tmp_path / name), cache=tmp_path / "cache", text_column="title")
    assert len({corpus.folder for corpus in found.values()}) == 4
    assert len({corpus.index["source_sha256"] for corpus in found.values()}) == 4
    tokens = {name: bytes_of(corpus) for name, corpus in found.items()}
    assert tokens["a.jsonl", "body"] == tokens["a.parquet", "body"] != tokens["a.jsonl", "text"]
    (found["a.jsonl", "body"].folder / "val-00000.bin").unlink()
    again = prepare(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache", text_column="body", repair=True)
    assert bytes_of(again) == bytes_of(found["a.parquet", "body"])
    with pytest.raises(ValueError, match="plain.txt is plain text and has no column 'body'"):
        prepare(write(tmp_path / "plain.txt"), cache=tmp_path / "cache", text_column="body")


def test_records_without_text_are_skipped_and_counted(tmp_path, capsys, monkeypatch):
    texts = ["one", None, " \n", "t\0wo", "", "\ufeff"]
    fake_datasets(monkeypatch, lambda *args, **options: iter([{"content": text} for text in texts]))
    files = [write_records(tmp_path / name, content=texts) for name in ("a.jsonl", "a.parquet")]
    for source in (*files, "hf:owner/code"):
        assert [text for _, text in load_documents(source)] == ["one", "two"]
        assert capsys.readouterr().err.strip().endswith("4 of 6 records have no text and were skipped")


def test_a_parquet_file_of_one_row_group_is_read_in_bounded_memory(tmp_path):
    random = np.random.default_rng(0)
    texts = [random.bytes(10_000).hex() for _ in range(2000)]
    pages = {"compression": "none", "use_dictionary": False, "write_batch_size": 16}  # small pages in one row group
    pq.write_table(pa.table({"text": texts, "other": texts}), tmp_path / "a.parquet", **pages)
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == 1
    before, most = pa.total_allocated_bytes(), 0
    for _ in load_documents(str(tmp_path / "a.parquet")):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 10_000_000


def fake_datasets(monkeypatch, load):
    module = types.ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_rows_are_streamed_and_errors_are_one_line(tmp_path, monkeypatch):
    asked = []
    def load(path, config, split, streaming, **options):
        asked.append((path, config, split, streaming, options))
        return ({"text": text} for text in documents(5) + [" "])
    fake_datasets(monkeypatch, load)
    assert [text for _, text in load_documents("hf:owner/books:small")] == documents(5)
    for name in ("a/b", "a/b:c#test", "a/b@v1", "a/b#validation@v1"):
        list(load_documents(f"hf:{name}"))
    first = {"revision": "v1"}
    assert asked == [("owner/books", "small", "train", True, {}), ("a/b", None, "train", True, {}),
                     ("a/b", "c", "test", True, {}), ("a/b", None, "train", True, first),
                     ("a/b", None, "validation", True, first)]
    with pytest.raises(ValueError, match="hf::: its name should look like"):
        list(load_documents("hf::"))
    def offline(*args, **options):
        raise ConnectionError("no route to the hub\nand more lines")
    fake_datasets(monkeypatch, offline)
    with pytest.raises(OSError, match="cannot load the dataset 'owner/books'.*no route to the hub$"):
        prepare("hf:owner/books", cache=tmp_path)
    fake_datasets(monkeypatch, lambda *args, **options: iter([{"image": 1, "label": 2}]))
    with pytest.raises(ValueError, match="no column 'text' or 'content'; it has image, label"):
        list(load_documents("hf:owner/pictures"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match="pip install datasets"):
        list(load_documents("hf:owner/books"))


def test_embedded_corpus_is_fixed_and_its_parts_share_no_document():
    names = [name for name, _ in embedded_documents()]
    assert len(names) == len(set(names)) > 300 and names == [name for name, _ in embedded_documents()]
    left_out = {"test", "tests", "tkinter", "idlelib", "lib2to3", "distutils", "site-packages"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert any(name.startswith("topics/") for name in names) and "threading.py" in names
    assert embedded_corpus_hash() == embedded_corpus_hash() and len(embedded_corpus_hash()) == 64
    parts = {"train": set(), "val": set()}
    for part, text in split_documents(embedded_documents(), by_name=True):
        assert "\r" not in text and "\0" not in text
        parts[part].add(text)
    assert len(parts["val"]) >= 10 and not parts["train"] & parts["val"]


# ---- the held-out part


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 400), st.integers(1, 50), st.integers(0, 10**6))
def test_copies_of_a_document_never_stand_on_both_sides(n, different, salt):
    texts = [f"{salt} {i % max(different, 2)}" for i in range(n)]
    parts = {"train": Counter(), "val": Counter()}
    for part, text in split_documents(((str(i), text) for i, text in enumerate(texts)), fraction=0.3):
        parts[part][text] += 1
    if len({is_held_out(text, 0.3) for text in texts}) == 2:
        assert not set(parts["train"]) & set(parts["val"]) and parts["train"] + parts["val"] == Counter(texts)
    else:  # whole documents would leave one part empty, so every document gave its end
        assert sum(parts["train"].values()) == sum(parts["val"].values()) == n


def test_a_small_share_of_many_documents_is_whole_documents(tmp_path):
    texts = [f"entry {i}" + "\na line of text" * 20 for i in range(6000)]
    assert not any(is_held_out(text, 0.0005) for text in texts[:1000])
    held = [text for text in texts if is_held_out(text, 0.0005)]
    parts = list(split_documents(enumerate(texts), fraction=0.0005))
    assert held and [text for part, text in parts if part == "val"] == held and len(parts) == len(texts)
    (tmp_path / "rows.txt").write_text("\n<|endoftext|>\n".join(texts))
    corpus = prepare(str(tmp_path / "rows.txt"), fraction=0.0005, cache=tmp_path / "cache")
    assert corpus.index["whole_documents"] and corpus.index["val"]["documents"] == len(held)


def test_few_documents_give_their_ends_and_no_character_is_lost(tmp_path):
    texts = ["line\n" * 100, "other line\n" * 50]
    pieces = list(split_documents(enumerate(texts), fraction=0.1))
    assert "".join(text for _, text in pieces) == "".join(texts)
    assert [part for part, _ in pieces] == ["train", "val"] * 2 and all(text.endswith("\n") for _, text in pieces)
    assert 0.05 < sum(len(t) for p, t in pieces if p == "val") / sum(map(len, texts)) < 0.15


def test_a_held_out_file_may_be_named(tmp_path):
    (tmp_path / "train.txt").write_text("to train on")
    (tmp_path / "val.txt").write_text("held out")
    corpus = prepare(str(tmp_path / "train.txt"), held_out=str(tmp_path / "val.txt"), cache=tmp_path / "cache")
    assert bytes(corpus.train[:]) == b"to train on\0" and bytes(corpus.val[:]) == b"held out\0"


# ---- tokenizers


@settings(max_examples=50, deadline=None)
@given(st.text().map(lambda text: text.replace("\0", "")))
def test_bytes_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    "GPT-2's two files with four merges: printable bytes stand for themselves, others follow from 256 on."
    folder = tmp_path_factory.mktemp("bpe")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    merges = [("t", "h"), ("th", "e"), (letter[32], "the"), ("i", "n")]
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    names = [letter[b] for b in printable + others] + [a + b for a, b in merges]
    ids = {name: i for i, name in enumerate(names)} | {"<|endoftext|>": 50256}
    (folder / "encoder.json").write_text(json.dumps(ids))
    return folder


def test_gpt2_from_a_folder_and_bits_per_byte_compare_tokenizers(gpt2_folder, tmp_path):
    tokenizer = get_tokenizer(f"gpt2:{gpt2_folder}")
    assert tokenizer.encode("the in the").tolist() == [257, 220, 259, 258]
    assert tokenizer.encode(" <|endoftext|>").max() < 50256  # written out it is text, not the end mark
    (tmp_path / "a.txt").write_text(SEPARATOR.join(f"text {i} the in the" for i in range(200)))
    bpe, plain = (prepare(str(tmp_path / "a.txt"), name, cache=tmp_path) for name in (f"gpt2:{gpt2_folder}", "bytes"))
    assert bpe.train.dtype == np.uint16 and bpe.index["val"]["bytes"] > bpe.index["val"]["tokens"]
    assert bpe.tokenizer.decode(bpe.train[:]).startswith("text 0 the")
    assert str(gpt2_folder) not in json.dumps(bpe.index) and bpe.train[len(bpe.train) - 1] == 50256
    for corpus in (bpe, plain):
        total_bits = 1000 / math.log(2)  # of a model that spends 1000 nats on the whole part
        assert math.isclose(corpus.bits_per_byte(1000 / len(corpus.val)) * corpus.index["val"]["bytes"], total_bits)


def test_bad_tokenizers_are_refused_in_one_line(gpt2_folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tokenizer 'words'; there are bytes, gpt2"):
        get_tokenizer("words")
    with pytest.raises(FileNotFoundError, match="vocab.bpe is missing"):
        get_tokenizer(f"gpt2:{tmp_path}")
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
    for damage in ('{"a": 0}', "[]", "{"):
        (tmp_path / "encoder.json").write_text(damage)
        with pytest.raises(ValueError, match="vocab.bpe and encoder.json beside it do not fit together .*; copy both again"):
            get_tokenizer(f"gpt2:{tmp_path}")
    (tmp_path / "encoder.json").write_bytes((gpt2_folder / "encoder.json").read_bytes())
    assert get_tokenizer(f"gpt2:{tmp_path}").encode("the").tolist() == get_tokenizer(f"gpt2:{gpt2_folder}").encode("the").tolist()
    import tiktoken
    def offline(name):
        raise ConnectionError("a long story")
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match="without a network use gpt2:FOLDER"):
        get_tokenizer("gpt2")


# ---- shards


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(-50, 50), st.integers(-50, 50),
       st.sampled_from([1, 1, 1, 2, -1]))
def test_shards_slice_like_one_array(sizes, a, b, stride):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    shards = TokenShards(np.split(whole, np.cumsum(sizes)[:-1]))
    assert np.array_equal(shards[a:b:stride], whole[a:b:stride])
    assert np.array_equal(shards[a:], whole[a:]) and len(shards) == len(whole)
    if -len(whole) <= a < len(whole):
        assert shards[a] == whole[a]
    else:
        with pytest.raises(IndexError):
            shards[a]


@pytest.mark.parametrize("size, dtype", [(256, "<u1"), (257, "<u2"), (50257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_dtype_holds_the_vocabulary(size, dtype):
    assert token_dtype(size) == np.dtype(dtype) and np.iinfo(token_dtype(size)).max >= size - 1


def test_tokens_are_those_of_the_text_however_small_the_shards(tmp_path):
    source = write(tmp_path / "a.txt")
    corpus = prepare(source, cache=tmp_path / "cache", shard_tokens=1000)
    assert len(corpus.index["train"]["shards"]) > 10 and isinstance(corpus.train.arrays[0], np.memmap)
    for part in ("train", "val"):
        expected = b"".join(t.encode() + b"\0" for p, t in split_documents(load_documents(source)) if p == part)
        assert bytes(getattr(corpus, part)[:]) == expected
        assert corpus.index[part]["tokens"] == corpus.index[part]["bytes"] == len(expected)


def bytes_of(corpus):
    return {path.name: path.read_bytes() for path in sorted(corpus.folder.glob("*.bin"))}


def in_processes(work, *arguments):
    "Run `work` in a process for each argument; returns what it put into the queue it is given, and the exit codes."
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    children = [fork.Process(target=work, args=(results, argument)) for argument in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    codes = [child.exitcode for child in children]
    return [results.get() for code in codes if code == 0], codes


def small_batches(monkeypatch, documents=7):
    monkeypatch.setattr(data, "BATCH_DOCUMENTS", documents)
    monkeypatch.setattr(data, "MARK_SECONDS", 0.0)


def at_call(monkeypatch, owner, name, call, what, before=True):
    "At that call of a function something happens, before or after its work."
    real, count = getattr(owner, name), iter(range(10**6))
    def watched(*arguments):
        now = next(count) == call
        if now and before:
            what(*arguments)
        result = real(*arguments)
        if now and not before:
            what(*arguments)
        return result
    monkeypatch.setattr(owner, name, watched)


def interrupted(monkeypatch, batches, source, **options):
    "Prepare a source, and stop before a batch is written, with something behind the mark."
    def stop(work, *batch):
        work.writers["train"].add([1, 2, 3], 3)
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_call(patch, data.Preparation, "add_batch", batches, stop)
        prepare(source, **options)


@pytest.mark.parametrize("name, batches, size, workers", [
    ("a.txt", 0, 1000, 1), ("a.txt", 1, 1 << 20, 2), ("a.txt", 1, 500, 1), ("a.txt", 4, 1000, 3),
    ("a.txt", 9, 1 << 20, 1), ("a.jsonl.gz", 4, 1000, None), ("a.parquet", 4, 1000, None)])
def test_an_interrupted_preparation_resumes_to_the_same_bytes(tmp_path, monkeypatch, name, batches, size, workers):
    small_batches(monkeypatch, 20)
    options, source = {"shard_tokens": size, "workers": workers}, str(tmp_path / name)
    texts = [text for i, text in enumerate(documents(200)) for text in (text, None)[: 1 + (i % 9 == 0)]]
    if name == "a.txt":
        write(tmp_path / name)
    else:
        write_records(tmp_path / name, body=texts)
        options |= {"text_column": "body"}
    whole = prepare(source, cache=tmp_path / "whole", **options)
    interrupted(monkeypatch, batches, source, cache=tmp_path / "cache", **options)
    left = [len(list((tmp_path / "cache").glob(name))) for name in ("*", ".*.partial/journal.json", "*/index.json")]
    assert left == [batches > 0, batches > 0, 0]
    opened, real = [], data.batches
    monkeypatch.setattr(data, "batches", lambda *arguments: opened.append(arguments) or real(*arguments))
    again = prepare(source, cache=tmp_path / "cache", **options)
    assert bytes_of(again) == bytes_of(whole) and again.index == whole.index
    assert (opened[0][1] or {"documents": 0})["documents"] == 20 * max(batches - 1, 0)  # not from the beginning
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [again.folder.name]


class Rows:
    "A streamed dataset as `datasets` has it: an iterable with a position."
    def __init__(self, n, texts=None, delay=0.0):
        self.n, self.at, self.delay, self.texts = n, 0, delay, texts or documents(n)
    def __iter__(self):
        while self.at < self.n:
            time.sleep(self.delay)
            self.at += 1
            yield {"text": self.texts[self.at - 1]}
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_killed_again_and_again_gives_the_same_shards(tmp_path, monkeypatch):
    small_batches(monkeypatch, 30)
    fake_datasets(monkeypatch, lambda *args, **options: Rows(900))
    options = {"shard_tokens": 5000, "fraction": 0.2, "workers": 2}
    whole = prepare("hf:owner/books", cache=tmp_path / "whole", **options)
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # no clean-up, no flush
    deaths = [
        (data.OpenShard, "write", 50, True),  # in the middle of a batch
        (data, "write_json", 3, True),  # everything is on the disk but the journal
        (data.OpenShard, "finish", 2, False),  # a shard has its name, and the journal does not know
        (data, "reopen", 0, False),  # while going on
        (data.OpenShard, "mark", 9, False), (data, "write_json", 4, False)]
    for death in deaths:
        with monkeypatch.context() as patch:
            at_call(patch, *death[:3], die, death[3])
            codes = in_processes(lambda *_: prepare("hf:owner/books", cache=tmp_path / "cache", **options), 0)[1]
        assert codes == [-signal.SIGKILL], death
        assert list((tmp_path / "cache").glob(".*.partial/journal.json")), death
        assert not list((tmp_path / "cache").glob("*/index.json"))
    starts, real = [], Rows.load_state_dict
    monkeypatch.setattr(Rows, "load_state_dict", lambda s, state: starts.append(state["at"]) or real(s, state))
    again = prepare("hf:owner/books", cache=tmp_path / "cache", **options)
    assert bytes_of(again) == bytes_of(whole) and len(bytes_of(whole)) > 10
    assert starts == [starts[0]] and starts[0] >= 300  # from the saved position, not from the first row


def test_the_real_library_goes_on_in_the_middle_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small_batches(monkeypatch, 40)
    folder, texts = tmp_path / "rows", documents(300)
    folder.mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in texts[100 * number : 100 * number + 100]]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines))
    interrupted(monkeypatch, 4, f"hf:{folder}", cache=tmp_path / "cache", shard_tokens=5000)
    corpus = prepare(f"hf:{folder}", cache=tmp_path / "cache", shard_tokens=5000)
    assert corpus.index["train"]["documents"] + corpus.index["val"]["documents"] == 300
    held = [text for text in texts if is_held_out(text)]
    assert bytes(corpus.val[:]) == "".join(text + "\0" for text in held).encode()
    (corpus.folder / "train-00003.bin").unlink()
    repaired = prepare(f"hf:{folder}", cache=tmp_path / "cache", shard_tokens=5000, repair=True)
    assert bytes_of(repaired) == bytes_of(prepare(f"hf:{folder}", cache=tmp_path / "other", shard_tokens=5000))


def test_a_dataset_that_changed_meanwhile_is_not_joined(tmp_path, monkeypatch):
    small_batches(monkeypatch)
    fake_datasets(monkeypatch, lambda *args, **options: Rows(300))
    interrupted(monkeypatch, 20, "hf:owner/books", cache=tmp_path)
    fake_datasets(monkeypatch, lambda *args, **options: Rows(300, texts=documents(300, words=31)))
    with pytest.raises(ValueError, match="'hf:owner/books' is no longer the text.*hf:NAME@REVISION"):
        prepare("hf:owner/books", cache=tmp_path)


@pytest.mark.parametrize("what, says", [
    ("disk", "cannot write .*No space left on device.*; what was prepared is kept"),
    ("network", "'owner/books'.*timed out; what was prepared is kept")])
def test_a_full_disk_or_a_lost_network_is_one_line_and_keeps_the_work(tmp_path, monkeypatch, what, says):
    small_batches(monkeypatch, 100)
    class Broken(Rows):
        def __iter__(self):
            for row in super().__iter__():
                if self.at == 1400:
                    raise ConnectionError("read timed out\nand more")
                yield row
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fake_datasets(monkeypatch, lambda *args, **options: Rows(1500))
    whole = prepare("hf:owner/books", cache=tmp_path / "whole", shard_tokens=50_000)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=says) as caught:
        if what == "disk":
            at_call(patch, data.OpenShard, "write", 300, full)
        else:
            fake_datasets(patch, lambda *args, **options: Broken(1500))
        prepare("hf:owner/books", cache=tmp_path / "cache", shard_tokens=50_000)
    assert "\n" not in str(caught.value) and caught.value.errno == (errno.ENOSPC if what == "disk" else None)
    assert bytes_of(prepare("hf:owner/books", cache=tmp_path / "cache", shard_tokens=50_000)) == bytes_of(whole)


def test_two_processes_that_want_one_corpus_prepare_it_once(tmp_path, monkeypatch):
    small_batches(monkeypatch)
    fake_datasets(monkeypatch, lambda *args, **options: Rows(300, delay=0.001))
    work = lambda results, _: results.put(len(prepare("hf:owner/books", cache=tmp_path).train))
    found, codes = in_processes(work, 0, 1, 2)
    assert codes == [0, 0, 0] and len(found) == 3 and len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 1  # no work in progress is left


def no_locks(monkeypatch, number):
    "Locking fails with this error, as on a file system without locks."
    def flock(*arguments):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", sorted({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}))
def test_a_file_system_without_locks_prepares_and_resumes(tmp_path, monkeypatch, capsys, number):
    small_batches(monkeypatch, 20)
    source = write(tmp_path / "a.txt")
    whole = prepare(source, cache=tmp_path / "whole")
    no_locks(monkeypatch, number)
    with exclusive_lock(tmp_path, wait=False) as alone:
        assert not alone
    interrupted(monkeypatch, 4, source, cache=tmp_path / "cache")
    partial = next((tmp_path / "cache").glob(".*.partial"))
    assert f"the file system of {partial} has no locks" in capsys.readouterr().err
    found = prepare(source, cache=tmp_path / "cache")
    assert bytes_of(found) == bytes_of(whole) and list((tmp_path / "cache").iterdir()) == [found.folder]


def test_other_errors_of_a_lock_name_the_folder(tmp_path, monkeypatch):
    no_locks(monkeypatch, errno.EIO)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught, exclusive_lock(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path) and len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("ranks", [True, False])
def test_without_locks_no_process_gets_wrong_tokens(tmp_path, monkeypatch, ranks):
    small_batches(monkeypatch)
    no_locks(monkeypatch, errno.ENOSYS)
    source, options = write(tmp_path / "a.txt", 1000), {"shard_tokens": 5000, "workers": 1}
    whole = bytes_of(prepare(source, cache=tmp_path / "whole", **options))
    def work(results, rank):
        if ranks:
            os.environ["RANK"] = str(rank)
        time.sleep(0.05 * (2 - rank))  # the first process of the run is the last to come
        try:
            results.put(bytes_of(prepare(source, cache=tmp_path / "cache", **options)) == whole)
        except (OSError, ValueError):
            results.put("refused")
    results, codes = in_processes(work, 0, 1, 2)
    found = set(results)
    assert codes == [0, 0, 0] and len(results) == 3
    assert found == {True} if ranks else found <= {True, "refused"}  # two separate runs may stop each other
    for repair in (False, False, True):  # what they left damaged is refused, and removed or made again
        try:
            again = prepare(source, cache=tmp_path / "cache", repair=repair, **options)
            break
        except ValueError as error:
            assert "start this preparation again" in str(error) or "repair=True" in str(error)
    assert bytes_of(again) == whole


def test_a_target_of_tokens_stops_behind_the_document_that_reaches_it(tmp_path, monkeypatch):
    source = write(tmp_path / "a.txt")
    everything = prepare(source, cache=tmp_path)
    some = prepare(source, cache=tmp_path, tokens=9000)
    assert 9000 <= len(some.train) < 9300 and some.folder != everything.folder
    assert bytes(some.train[:]) == bytes(everything.train[: len(some.train)]) and some.train[-1] == 0


def test_tokens_outside_the_vocabulary_are_refused(tmp_path, monkeypatch):
    class Wrong(data.ByteTokenizer):
        vocab_size = 100
    monkeypatch.setattr(data, "get_tokenizer", lambda name: Wrong())
    with pytest.raises(ValueError, match="tokenizer bytes gives token 1.., which is outside its vocabulary of 100"):
        prepare(write(tmp_path / "a.txt"), cache=tmp_path / "cache")
    monkeypatch.undo()
    corpus = prepare(write(tmp_path / "a.txt"), cache=tmp_path / "cache")
    corpus.check_vocabulary(256)
    with pytest.raises(ValueError, match=r"the data has a vocabulary of 256 tokens \(bytes\); the model has 100"):
        corpus.check_vocabulary(100)
    index = json.loads((corpus.folder / "index.json").read_text())
    (corpus.folder / "index.json").write_text(json.dumps(index | {"vocab_size": 90}))
    with pytest.raises(ValueError, match="train-00000.bin holds token 11., but the vocabulary has 90"):
        prepare(str(tmp_path / "a.txt"), cache=tmp_path / "cache", verify=True)


def test_the_index_is_what_makes_a_folder_good(tmp_path):
    source = write(tmp_path / "a.txt")
    corpus = prepare(source, cache=tmp_path / "cache")
    before = bytes(corpus.train[:])
    (corpus.folder / "index.json").unlink()  # as if killed before the last file
    (corpus.folder / "train-00000.bin").write_bytes(b"half")
    assert bytes(prepare(source, cache=tmp_path / "cache").train[:]) == before


@pytest.mark.parametrize("damage, says", [
    (lambda b: b[:-1], "is missing or has the wrong size"), (None, "is missing or has"),
    (lambda b: b[:100] + bytes([b[100] ^ 4]) + b[101:], "is damaged")])
def test_a_damaged_shard_is_found(tmp_path, damage, says):
    source = write(tmp_path / "a.txt")
    shard = prepare(source, cache=tmp_path / "cache").folder / "train-00000.bin"
    content = shard.read_bytes()
    shard.unlink()
    if damage:
        shard.write_bytes(damage(content))
    with pytest.raises(ValueError, match=f"train-00000.bin {says}.*delete the folder") as caught:
        prepare(source, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    prepare(source, cache=tmp_path / "cache", repair=True)
    assert shard.read_bytes() == content
    if damage:  # a shard that cannot come out the same is not believed
        shard.write_bytes(damage(content))
        index = json.loads((shard.parent / "index.json").read_text())
        index["train"]["shards"][0]["sha256"] = "0" * 64
        (shard.parent / "index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="train-00000.bin cannot be made again"):
            prepare(source, cache=tmp_path / "cache", repair=True)


def test_what_opening_checks(tmp_path):
    source = write(tmp_path / "a.txt")
    shard = prepare(source, cache=tmp_path / "cache").folder / "train-00000.bin"
    content, date = shard.read_bytes(), shard.stat().st_mtime_ns
    shard.write_bytes(content[:100] + b"?" + content[101:])
    os.utime(shard, ns=(date, date))  # as a failing disk does it: nothing says that the file has changed
    prepare(source, cache=tmp_path / "cache")
    prepare(source, cache=tmp_path / "cache", verify=False)
    with pytest.raises(ValueError, match="is damaged"):
        prepare(source, cache=tmp_path / "cache", verify=True)
    os.utime(shard)
    with pytest.raises(ValueError, match="is damaged"):
        prepare(source, cache=tmp_path / "cache")
    prepare(source, cache=tmp_path / "cache", verify=False)


def test_another_text_is_another_folder(tmp_path):
    source = write(tmp_path / "a.txt", 150)
    first = prepare(source, cache=tmp_path / "cache")
    for date in (None, (1, 1)):  # content counts, not the date
        os.utime(source, date)
        assert prepare(source, cache=tmp_path / "cache").folder == first.folder
    write(tmp_path / "a.txt", 151)
    others = {prepare(source, cache=tmp_path / "cache", **options).folder
              for options in ({}, {"fraction": 0.1}, {"limit": 120})}
    assert len(others | {first.folder}) == 4


# ---- the sampler


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 80), st.integers(0, 2**32), st.integers(1, 3))
def test_every_window_once_an_epoch(context, batch, extra, seed, world):
    tokens = np.arange(context + 1 + extra)
    ranks = [Sampler(tokens, context, batch, seed, rank, world) for rank in range(world)]
    n, drawn = ranks[0].windows, []
    while len(drawn) < 2 * n:
        for sampler in ranks:
            inputs, targets = sampler.next_batch()
            assert inputs.shape == targets.shape == (batch, context) and inputs.dtype == torch.int64
            assert torch.equal(inputs + 1, targets)  # neighbours in this text differ by one
            drawn += [int(row[0]) for row in inputs]
    for epoch in (drawn[:n], drawn[n : 2 * n]):
        starts = sorted(epoch) # adjacent, so no token is an input twice
        assert starts == list(range(starts[0], starts[0] + n * context, context)) and starts[-1] + context < len(tokens)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1000))
def test_position_is_restored_exactly(steps, seed):
    tokens = np.arange(100, dtype=np.uint8)
    sampler, other = Sampler(tokens, 7, 3, seed), Sampler(tokens, 7, 3, seed)
    for _ in range(steps):
        sampler.next_batch()
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    for _ in range(8):
        assert torch.equal(sampler.next_batch()[0], other.next_batch()[0])


def test_the_order_depends_on_the_seed_and_on_no_other_randomness():
    tokens = np.arange(1000)
    def order(seed):
        torch.manual_seed(np.random.randint(1000))
        sampler = Sampler(tokens, 8, 16, seed)
        return [sampler.next_batch()[0][:, 0].tolist() for _ in range(10)]
    assert order(0) == order(0) != order(1)


def test_a_sampler_refuses_a_short_text_and_a_saved_position_of_other_data():
    state = Sampler(np.arange(100), 8, 2).state_dict()
    for other in (Sampler(np.arange(101), 8, 2), Sampler(np.arange(100), 9, 2), Sampler(np.arange(100), 8, 2, seed=1)):
        with pytest.raises(ValueError, match="the saved position belongs to"):
            other.load_state_dict(state)
    Sampler(np.arange(100), 8, 4).load_state_dict(state)  # another batch size goes on in the same order
    with pytest.raises(ValueError, match="the text has 8 tokens; a context of 8 needs at least 9"):
        Sampler(np.arange(8), 8, 1)
    assert Sampler(np.arange(9), 8, 1).windows == 1


@pytest.mark.parametrize("name, value", [
    ("fraction", 1.5), ("fraction", 0), ("fraction", math.nan), ("limit", 0), ("limit", 1.5), ("tokens", -5),
    ("shard_tokens", 0), ("workers", 0), ("verify", "never")])
def test_settings_that_cannot_be_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        prepare("stdlib", cache=tmp_path, **{name: value})


@pytest.mark.parametrize("documents, tokens", [(1, 1000), (1, 100_000), (3, 1000), (3, 100_000)])
def test_a_target_of_tokens_leaves_a_held_out_part(tmp_path, documents, tokens):
    text = tmp_path / "text.txt"
    lines = "".join(f"line {i}\n" for i in range(9000))
    text.write_text("<|endoftext|>\n".join(f"text {n}\n{lines}" for n in range(documents)))
    corpus = prepare(str(text), cache=tmp_path / "cache", tokens=tokens)
    assert len(corpus.train) >= min(tokens, 80_000) and len(corpus.val) > 0


@pytest.mark.parametrize("note", ["", "[]", "[1]", "{"])
def test_a_damaged_note_of_what_was_checked_is_made_again(tmp_path, note):
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 500)
    folder = prepare(str(text), cache=tmp_path / "cache").folder
    (folder / "checked.json").write_text(note)
    assert len(prepare(str(text), cache=tmp_path / "cache").train) and json.loads((folder / "checked.json").read_text())
    (folder / "index.json").write_text(note)
    with pytest.raises(ValueError, match="delete that folder"):
        prepare(str(text), cache=tmp_path / "cache")
