"""Small texts in every format, for tests that read, prepare and train on them."""

import gzip
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from longhorn_kit.lab.data.text import SEPARATOR, holds_whole, pieces_of


def documents(n, words=30):
    texts = []
    for i in range(n):
        numbers = " ".join(str(i * j) for j in range(words))
        texts.append(f"document {i}: {numbers}\n")
    return texts


def json_lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_records(path, **columns):
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = json_lines(*(dict(zip(columns, row)) for row in zip(*columns.values())))
        content = gzip.compress(lines) if path.suffix == ".gz" else lines
        path.write_bytes(content)
    return str(path)


def split(result, **options):
    "Return the (part, text) pairs into which a preparation divides documents."
    result = list(result)
    whole = holds_whole(result, **options)
    return [piece for name, text in result for piece in pieces_of(name, text, whole, **options)]


def fake_datasets(monkeypatch, load):
    monkeypatch.setattr("datasets.load_dataset", load)


def sources(folder):
    "Write the same documents as four kinds of source."
    (folder / "rows").mkdir()
    for i in range(3):
        part = documents(300)[100 * i : 100 * i + 100]
        write_records(folder / "rows" / f"{i}.jsonl", text=part)
    text = SEPARATOR.join(documents(300))
    (folder / "a.txt").write_text(text)
    return {
        "text": str(folder / "a.txt"),
        "hub": f"hf:{folder / 'rows'}",
        "jsonl": write_records(folder / "a.jsonl.gz", text=documents(300)),
        "parquet": write_records(folder / "a.parquet", text=documents(300)),
    }


def write_bin(path, ids):
    path.parent.mkdir(exist_ok=True)
    np.asarray(ids, "<u2").tofile(path)
    return str(path)


def characters(folder, text="to be or not to be, that is the question\n" * 40, **metadata):
    "Write a text as nanoGPT's shakespeare_char does, and return its table."
    table = sorted(set(text))
    ids = [table.index(letter) for letter in text]
    write_bin(folder / "train.bin", ids[:-200]), write_bin(folder / "val.bin", ids[-200:])
    meta = {
        "vocab_size": len(table),
        "itos": dict(enumerate(table)),
        "stoi": {letter: i for i, letter in enumerate(table)},
    } | metadata
    content = pickle.dumps(meta)
    (folder / "meta.pkl").write_bytes(content)
    return table
