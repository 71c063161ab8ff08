import gzip, json, lzma, math, os, sys, types
from collections import Counter
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings, strategies as st
from longhorn_kit.lab import data
from longhorn_kit.lab.data import (
    SEPARATOR,
    Sampler,
    TokenShards,
    embedded_corpus_hash,
    embedded_documents,
    get_tokenizer,
    is_held_out,
    load_documents,
    load_text,
    prepare,
    split_documents,
    token_dtype,
)


def documents(n, words=30):
    return [f"document {i}: " + " ".join(str(i * j) for j in range(words)) + "\n" for i in range(n)]


def write(path, n=200):
    path.write_text(SEPARATOR.join(documents(n)), encoding="utf-8")
    return str(path)


def write_the(path):
    path.write_text(SEPARATOR.join(f"text {i} the in the" for i in range(200)))
    return str(path)


# ---- sources


@pytest.mark.parametrize(
    "suffix, compress",
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".zst", lambda b: zstandard.compress(b[:50]) + zstandard.compress(b[50:])),
    ],
)
def test_every_compression_gives_the_same_documents(tmp_path, suffix, compress):
    text = SEPARATOR.join(["one\ntwo β", "three", "four\n"])
    for name in ("b.txt", "a.txt"):
        (tmp_path / (name + suffix)).write_bytes(
            compress(text.replace("\n", "\r\n" if name == "a.txt" else "\n").encode())
        )
    found = list(load_documents(str(tmp_path / "*.txt*")))
    assert [text for _, text in found] == ["one\ntwo β", "three", "four\n"] * 2
    assert found[0][0].startswith("a.txt")  # sorted, so the order does not depend on the file system
    assert load_text(str(tmp_path / ("b.txt" + suffix))) == text


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n", "is empty"),
        ("nul.txt", b"abc\0def", "not text: it contains NUL"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "not UTF-8 text: byte 3"),
        ("torn.gz", gzip.compress(b"x" * 10_000)[:-20], "cannot be decompressed"),
        ("torn.xz", lzma.compress(os.urandom(10_000))[:-200], "cannot be decompressed"),
        ("not.xz", b"plain text", "cannot be decompressed"),
        ("not.gz", b"plain text", "cannot be decompressed"),
        ("not.zst", b"plain text", "cannot be decompressed"),
        ("torn.zst", zstandard.compress(os.urandom(10_000))[:-20], "cannot be decompressed"),
        (
            "torn-late.zst",
            zstandard.compress(b"whole frame") + zstandard.compress(b"x" * 10_000)[:-3],
            "cannot be decompressed",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line_that_names_them(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{says}") as caught:
        prepare(str(tmp_path / name), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value) and not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("source", ["missing.txt", "none/*.txt", "."])
def test_missing_sources_are_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="data source") as caught:
        prepare(source, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def fake_datasets(monkeypatch, load):
    module = types.ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_rows_are_streamed_and_errors_are_one_line(tmp_path, monkeypatch):
    asked = []

    def load(path, config, split, streaming):
        asked.append((path, config, split, streaming))
        return ({"text": text} for text in documents(5) + [" "])

    fake_datasets(monkeypatch, load)
    assert [text for _, text in load_documents("hf:owner/books:small")] == documents(5)
    assert asked == [("owner/books", "small", "train", True)]

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


def test_embedded_corpus_is_fixed_and_needs_nothing_split_off():
    names = [name for name, _ in embedded_documents()]
    assert len(names) == len(set(names)) > 300
    assert names == [name for name, _ in embedded_documents()]
    assert not [
        name
        for name in names
        if {"test", "tests", "tkinter", "idlelib", "lib2to3", "distutils", "site-packages"}
        & set(name.split("/"))
    ]
    assert any(name.startswith("topics/") for name in names) and "threading.py" in names
    assert all("\r" not in text and "\0" not in text for _, text in embedded_documents())
    assert embedded_corpus_hash() == embedded_corpus_hash() and len(embedded_corpus_hash()) == 64


# ---- the held-out part


def test_held_out_documents_of_the_embedded_corpus_are_not_in_the_training_part():
    parts = {"train": set(), "val": set()}
    for part, text in split_documents(embedded_documents(), by_name=True):
        parts[part].add(text)
    assert len(parts["val"]) >= 10 and not parts["train"] & parts["val"]


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


def test_few_documents_give_their_ends_and_no_character_is_lost(tmp_path):
    texts = ["line\n" * 100, "other line\n" * 50]
    pieces = list(split_documents(enumerate(texts), fraction=0.1))
    assert "".join(text for _, text in pieces) == "".join(texts)
    assert [part for part, _ in pieces] == ["train", "val"] * 2
    assert all(text.endswith("\n") for _, text in pieces)
    assert 0.05 < sum(len(t) for p, t in pieces if p == "val") / sum(map(len, texts)) < 0.15


def test_a_held_out_file_may_be_named(tmp_path):
    (tmp_path / "train.txt").write_text("to train on")
    (tmp_path / "val.txt").write_text("held out")
    corpus = prepare(
        str(tmp_path / "train.txt"), held_out=str(tmp_path / "val.txt"), cache=tmp_path / "cache"
    )
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
    (folder / "vocab.bpe").write_text(
        "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8"
    )
    names = [letter[b] for b in printable + others] + [a + b for a, b in merges]
    (folder / "encoder.json").write_text(
        json.dumps({name: i for i, name in enumerate(names)} | {"<|endoftext|>": 50256})
    )
    return folder


def test_gpt2_from_a_folder(gpt2_folder, tmp_path):
    tokenizer = get_tokenizer(f"gpt2:{gpt2_folder}")
    assert tokenizer.encode("the in the").tolist() == [257, 220, 259, 258]
    assert tokenizer.encode(" <|endoftext|>").max() < 50256  # written out it is text, not the end mark
    corpus = prepare(write_the(tmp_path / "a.txt"), tokenizer=f"gpt2:{gpt2_folder}", cache=tmp_path / "cache")
    assert corpus.train.dtype == np.uint16 and corpus.index["val"]["bytes"] > corpus.index["val"]["tokens"]
    assert corpus.tokenizer.decode(corpus.train[:]).startswith("text 0 the")
    assert str(gpt2_folder) not in json.dumps(corpus.index) and corpus.train[len(corpus.train) - 1] == 50256


def test_bad_tokenizers_are_refused_in_one_line(gpt2_folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tokenizer 'words'; there are bytes, gpt2"):
        get_tokenizer("words")
    with pytest.raises(FileNotFoundError, match="vocab.bpe is missing"):
        get_tokenizer(f"gpt2:{tmp_path}")
    for name in ("vocab.bpe", "encoder.json"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    with pytest.raises(ValueError, match="do not fit together"):
        get_tokenizer(f"gpt2:{tmp_path}")
    import tiktoken

    def offline(name):
        raise ConnectionError("a long story")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match="without a network use gpt2:FOLDER"):
        get_tokenizer("gpt2")


def test_bits_per_byte_compares_tokenizers(tmp_path, gpt2_folder):
    source = write_the(tmp_path / "a.txt")
    for name in ("bytes", f"gpt2:{gpt2_folder}"):
        corpus = prepare(source, name, cache=tmp_path / "cache")
        total_bits = 1000 / math.log(2)  # of a model that spends 1000 nats on the whole part
        assert math.isclose(
            corpus.bits_per_byte(1000 / len(corpus.val)) * corpus.index["val"]["bytes"], total_bits
        )


# ---- shards


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(-50, 50),
    st.integers(-50, 50),
    st.sampled_from([1, 1, 1, 2, -1]),
)
def test_shards_slice_like_one_array(sizes, a, b, stride):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    shards = TokenShards(np.split(whole, np.cumsum(sizes)[:-1]))
    assert (
        np.array_equal(shards[a:b:stride], whole[a:b:stride])
        and np.array_equal(shards[a:], whole[a:])
        and len(shards) == len(whole)
    )
    if -len(whole) <= a < len(whole):
        assert shards[a] == whole[a]
    else:
        with pytest.raises(IndexError):
            shards[a]


@pytest.mark.parametrize(
    "size, dtype", [(256, "<u1"), (257, "<u2"), (50257, "<u2"), (65536, "<u2"), (65537, "<u4")]
)
def test_dtype_holds_the_vocabulary(size, dtype):
    assert token_dtype(size) == np.dtype(dtype) and np.iinfo(token_dtype(size)).max >= size - 1


def test_tokens_are_those_of_the_text_however_small_the_shards(tmp_path, monkeypatch):
    source = write(tmp_path / "a.txt")
    monkeypatch.setattr(data.write_corpus, "__defaults__", (1000,))
    corpus = prepare(source, cache=tmp_path / "cache")
    expected = {
        part: b"".join(t.encode() + b"\0" for p, t in split_documents(load_documents(source)) if p == part)
        for part in ("train", "val")
    }
    assert len(corpus.index["train"]["shards"]) > 10 and isinstance(corpus.train.arrays[0], np.memmap)
    for part in ("train", "val"):
        assert bytes(getattr(corpus, part)[:]) == expected[part]
        assert corpus.index[part]["tokens"] == corpus.index[part]["bytes"] == len(expected[part])


def test_an_interrupted_preparation_leaves_nothing_that_is_taken_for_good(tmp_path, monkeypatch):
    source, real = write(tmp_path / "a.txt"), data.ShardWriter.add

    def interrupted(self, tokens, size):
        real(self, tokens, size)
        if self.summary["documents"] == 50:
            raise KeyboardInterrupt

    monkeypatch.setattr(data.ShardWriter, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, cache=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
    monkeypatch.setattr(data.ShardWriter, "add", real)
    assert prepare(source, cache=tmp_path / "cache").index["train"]["documents"] > 150


def test_the_index_is_what_makes_a_folder_good(tmp_path):
    source = write(tmp_path / "a.txt")
    corpus = prepare(source, cache=tmp_path / "cache")
    before = bytes(corpus.train[:])
    (corpus.folder / "index.json").unlink()  # as if killed before the last file
    (corpus.folder / "train-00000.bin").write_bytes(b"half")
    assert bytes(prepare(source, cache=tmp_path / "cache").train[:]) == before


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda b: b[:-1], "is missing or has the wrong size"),
        (lambda b: b[:100] + bytes([b[100] ^ 4]) + b[101:], "is damaged"),
        (None, "is missing or has"),
    ],
)
def test_a_damaged_shard_is_found(tmp_path, damage, says):
    source = write(tmp_path / "a.txt")
    shard = prepare(source, cache=tmp_path / "cache").folder / "train-00000.bin"
    content = shard.read_bytes()
    shard.unlink()
    if damage:
        shard.write_bytes(damage(content))
    with pytest.raises(
        ValueError,
        match=f"train-00000.bin {says}.*delete the folder",
    ) as caught:
        prepare(source, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_another_text_is_another_folder(tmp_path):
    source = write(tmp_path / "a.txt", 150)
    first = prepare(source, cache=tmp_path / "cache")
    assert prepare(source, cache=tmp_path / "cache").folder == first.folder
    os.utime(source, (1, 1))
    assert prepare(source, cache=tmp_path / "cache").folder == first.folder  # content counts, not the date
    write(tmp_path / "a.txt", 151)
    folders = {
        first.folder,
        prepare(source, cache=tmp_path / "cache").folder,
        prepare(source, cache=tmp_path / "cache", fraction=0.1).folder,
        prepare(source, cache=tmp_path / "cache", limit=120).folder,
    }
    assert len(folders) == 4


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
        starts = sorted(epoch)
        assert starts == list(
            range(starts[0], starts[0] + n * context, context)
        )  # adjacent, so no token is an input twice
        assert starts[-1] + context < len(tokens)


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


def test_a_saved_position_of_other_data_is_refused():
    state = Sampler(np.arange(100), 8, 2).state_dict()
    for other in (
        Sampler(np.arange(101), 8, 2),
        Sampler(np.arange(100), 9, 2),
        Sampler(np.arange(100), 8, 2, seed=1),
    ):
        with pytest.raises(ValueError, match="the saved position belongs to"):
            other.load_state_dict(state)
    Sampler(np.arange(100), 8, 4).load_state_dict(state)  # another batch size goes on in the same order


def test_text_shorter_than_the_context_is_refused():
    with pytest.raises(ValueError, match="the text has 8 tokens; a context of 8 needs at least 9"):
        Sampler(np.arange(8), 8, 1)
    assert Sampler(np.arange(9), 8, 1).windows == 1
