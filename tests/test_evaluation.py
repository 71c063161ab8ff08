"""Run lm-eval on the kit's checkpoints: the model's numbers, repeated contexts, clear errors."""

import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

import command_line
from longhorn_kit import cli, records
from longhorn_kit.extras import pip_command
from longhorn_kit.lab.claims import published
from longhorn_kit.lab.data.tokenizers import get_tokenizer
from longhorn_kit.lab.experiments import evaluation
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.records import write_json
from sweep import slow_case

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from transformers.convert_slow_tokenizer import bytes_to_unicode


def save(folder, mixer="longhorn", vocab_size=256):
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(vocab_size, 16, 1, mixer=mixer)).eval()
    for weight in model.parameters():
        weight.data *= 3  # clear preferences
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    "Return a model of the kit, its export, and the export without a manifest."
    root = tmp_path_factory.mktemp("folders")
    save(root / "kit")
    (root / "kit" / "tokenizer.json").write_text('{"tokenizer": "bytes"}')
    evaluation.export_checkpoint(root / "kit", root / "export")
    shutil.copytree(root / "export", root / "bare", ignore=shutil.ignore_patterns("manifest.json"))
    return root / "kit"


DOCS = [
    {"text": "The cow is brown. The cow is", "right": " brown", "wrong": " blue and green"},
    {"text": "Two and two is", "right": " four", "wrong": " five"},
    {"text": "état =", "right": " 3", "wrong": " état"},
] * 2
NAMES = ["tiny_choice", "tiny_line", "tiny_whole"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    "Return three tasks of lm-eval on local documents, one per kind of request."
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "docs.json").write_text(json.dumps(DOCS))

    def write(name, kind, text, target, metrics, **more):
        task = {
            "task": f"tiny_{name}",
            "dataset_path": "json",
            "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / "docs.json")}},
            "output_type": kind,
            "doc_to_text": text,
            "doc_to_target": target,
            "metric_list": metrics,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task | more))  # JSON is YAML

    write(
        "choice",
        "multiple_choice",
        "{{text}}",
        0,
        [{"metric": "acc"}, {"metric": "acc_norm"}],
        target_delimiter="",
        doc_to_choice="{{[right, wrong]}}",
    )
    write(
        "line",
        "generate_until",
        "{{text}}",
        "{{right}}",
        [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        generation_kwargs={"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
    )
    write("whole", "loglikelihood_rolling", "", "{{text}}", [{"metric": "bits_per_byte"}])
    return folder


def value(record, task, metric, read="once"):
    return next(
        row["value"]
        for row in record["rows"]
        if (row["task"], row["metric"], row["read"]) == (task, metric, read)
    )


@torch.no_grad()
def log_probability(model, context, continuation):
    "Compute the score by hand, in nats; byte 0 precedes an empty context."
    context = context.encode() or b"\0"
    ids = continuation.encode()
    tokens = torch.tensor([[*context, *ids]])
    scores = model(tokens[:, :-1])[0]
    logits = scores.log_softmax(-1)
    last = logits[len(context) - 1 :]
    column = torch.tensor([[i] for i in ids])
    return last.gather(1, column).sum().item()


MERGES = [
    "t h",
    "th e",
    "Ġ the",
    "i n",
    "in g",
    "a n",
    "an d",
    "Ġ and",
    "c o",
    "co w",
    "Ã ©",
    "e r",
]


def test_tokenizers_are_the_same_for_transformers(tmp_path):
    letters = bytes_to_unicode().values()
    words = sorted(letters, key=lambda letter: (letter > "\xff", letter))
    merged = [pair.replace(" ", "") for pair in MERGES]
    stored = {word: i for i, word in enumerate([*words, *merged])}
    (tmp_path / "vocab.bpe").write_text(
        "#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8"
    )
    text = json.dumps(stored)
    (tmp_path / "encoder.json").write_text(text, encoding="utf-8")
    own = get_tokenizer(f"gpt2:{tmp_path}")
    plain = get_tokenizer("bytes")
    pairs = [tuple(pair.split()) for pair in MERGES]
    expected = (stored | {evaluation.END: 50256}, pairs)
    assert evaluation.vocabulary(own) == expected
    for tokenizer in (own, plain):
        reference = evaluation.hf_tokenizer(tokenizer)
        for text in (
            "the cow and the other thing",
            "  theé and\n\ncowing  ",
            "état → β 😀 日本",
            " ",
            "a\r\nb",
            "".join(map(chr, range(1, 400))),
        ):
            expected = tokenizer.encode(text).tolist()
            assert reference(text)["input_ids"] == expected
            decoded = reference.decode(tokenizer.encode(text))
            assert decoded == text
    assert len(reference) == 256
    assert reference.eos_token_id == 0


def by_the_harness(export, tasks):
    "Return the harness's results for a model."
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    with evaluation.quiet():
        return lm_eval.simple_evaluate(
            "hf",
            model_args=f"pretrained={export},trust_remote_code=True",
            device="cpu",
            tasks=NAMES,
            task_manager=manager,
            bootstrap_iters=0,
        )


def test_every_kind_of_request_gives_the_models_own_numbers(checkpoint, tasks, monkeypatch):
    model = SequenceLM.from_pretrained(checkpoint)
    record = evaluation.evaluate_checkpoint(
        checkpoint, ["tiny_choice,tiny_line", "tiny_whole"], include=tasks, read="both"
    )
    readings = (("once", lambda text: text), ("twice", lambda text: f"{text}\n{text}"))
    for read, change in readings:
        for metric, norm in (
            ("acc", lambda text: 1),
            ("acc_norm", len),
        ):  # lm-eval counts characters
            right = 0
            for doc in DOCS:
                context = change(doc["text"])
                score = log_probability(model, context, doc["right"]) / norm(doc["right"])
                other = log_probability(model, context, doc["wrong"]) / norm(doc["wrong"])
                right += score > other
            assert value(record, "tiny_choice", metric, read) == right / len(DOCS)
    nats = sum(log_probability(model, "", doc["text"]) for doc in DOCS)
    size = sum(len(doc["text"].encode()) for doc in DOCS)
    assert value(record, "tiny_whole", "bits_per_byte") == pytest.approx(
        -nats / size / math.log(2), rel=1e-5
    )
    for row in record["rows"]:
        assert row["documents"] == len(DOCS)
    assert record["parameters"] == model.num_parameters()
    monkeypatch.setattr(
        "lm_eval.evaluator.add_env_info", lambda result: None
    )  # calls pip, which takes seconds
    result = by_the_harness(checkpoint.parent / "export", tasks)
    for row in evaluation.metric_rows(result, "once"):
        expected = value(record, row["task"], row["metric"])
        assert row["value"] == pytest.approx(expected)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generated_lines_are_the_models_own(checkpoint, batch_size):
    model = SequenceLM.from_pretrained(checkpoint)
    lm = evaluation.harness_model(checkpoint, batch_size=batch_size)
    requests = [
        Instance("generate_until", {}, (doc["text"], {"until": ["\n"], "max_gen_toks": 9}), 0)
        for doc in DOCS
    ]
    readers = ((evaluation.read_twice(lm), True), (lm, False))
    for reader, repeated in readers:
        with evaluation.quiet():
            result = reader.generate_until(requests)
        for doc, line in zip(DOCS, result):
            text = f"{doc['text']}\n" * repeated + doc["text"]
            prompt = list(text.encode())
            ids = model.generate(torch.tensor([prompt]), 9, temperature=0)[
                0, len(prompt) :
            ].tolist()
            ids = ids[: ids.index(0)] if 0 in ids else ids  # the end of a document
            text = get_tokenizer("bytes").decode(ids)
            expected = text.split("\n")[0]
            assert line == expected
    result = [request.args[0] for request in requests]
    assert result == [doc["text"] for doc in DOCS]  # unchanged


def test_only_contexts_are_doubled_and_long_ones_lose_their_start(checkpoint):
    def request(kind, *words):
        return Instance(kind, {}, words, 0)

    read = evaluation.doubled(request("loglikelihood", "", "a text"))
    assert read.args == ("", "a text")

    def echo(requests):
        return [request.args for request in requests]

    twice = evaluation.read_twice(
        SimpleNamespace(loglikelihood=echo, loglikelihood_rolling=echo, generate_until=echo)
    )
    assert twice.loglikelihood_rolling([request("loglikelihood_rolling", "a text")]) == [
        ("a text",)
    ]
    requests = [request("generate_until", "x", {})]
    assert twice.generate_until(requests) == [("x\nx", {})]
    with evaluation.quiet():
        lm = evaluation.harness_model(checkpoint, context=16)
        long = request("loglikelihood", "x" * 50 + "0123456789ab", "cdef")
        (result,) = lm.loglikelihood([long])
    assert result[0] == pytest.approx(
        log_probability(SequenceLM.from_pretrained(checkpoint), "x0123456789ab", "cdef"), rel=1e-4
    )


def test_recall_tasks_of_our_own_read_the_passage(checkpoint, tmp_path, monkeypatch):
    docs = [
        {
            "context": "[DOC] [TLE] Towers [PAR] The tower is 57 m high. It stands in",
            "question": "It stands in",
            "answers": ["Pisa", "Italy"],
        },
        {"context": "A cow says moo.", "question": "The sound of a cow is", "answers": ["Moo"]},
    ]
    text = json.dumps(docs)
    (tmp_path / "docs.json").write_text(text)
    local = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "docs.json")}},
    }
    for name, task in evaluation.OWN_TASKS.items():
        monkeypatch.setitem(evaluation.OWN_TASKS, name, task | local)
    result = evaluation.find_tasks(list(evaluation.OWN_TASKS))
    prompts = [
        "Towers  The tower is 57 m high. It stands in",
        "A cow says moo. The sound of a cow is",
    ]
    assert [
        task.doc_to_text(doc) for task in result["tasks"].values() for doc in task.test_docs()
    ] == prompts * 3
    heard = []
    lm = evaluation.harness_model(checkpoint)

    def generated(requests, **options):
        heard.extend(r.args[0] for r in requests)
        return [" pisa, they say", "quack"] * 3

    lm.generate_until = generated
    expected = {(name, "contains", 0.5, 2) for name in evaluation.OWN_TASKS}
    assert {
        (row["task"], row["metric"], row["value"], row["documents"])
        for row in evaluation.run_tasks(lm, result, "twice")
    } == expected
    expected = {f"{prompt}\n{prompt}" for prompt in prompts}
    assert set(heard) == expected


def test_recall_preset_is_the_papers_table_and_means_are_over_whole_sets():
    assert tuple(evaluation.RECALL) == published.RECALL_TASKS
    assert evaluation.expand_tasks(["recall", "fda", "a, b", "a"]) == [
        *evaluation.RECALL.values(),
        "a",
        "b",
    ]
    row = {"task": "a", "read": "once", "metric": "perplexity", "value": 3.0}

    def means(*rows):
        return [
            (row["task"], row["read"], row["metric"], row["value"])
            for row in evaluation.mean_rows(list(rows))
        ]

    six = [
        row | {"task": task, "read": read, "metric": "contains", "value": i / 10}
        for read in ("once", "twice")
        for i, task in enumerate(evaluation.RECALL.values())
    ]

    def mean(read):
        return ("mean of 6 sets", read, "contains", pytest.approx(0.25))

    expected = [mean("once"), mean("twice")]
    assert means(*six) == expected
    result = means(*six[1:])
    assert result == [mean("twice")]
    assert (
        means(row)
        == means(row, row | {"metric": "acc"})
        == means(row, row | {"read": "twice"})
        == []
    )
    two = means(
        row, row | {"metric": "word_perplexity", "value": 4.0}, row | {"metric": "byte_perplexity"}
    )
    assert two == [("mean of 2 sets", "once", "perplexity", 3.5)]


def test_downstream_gives_perplexities_per_word_and_their_mean(
    checkpoint, capsys, monkeypatch, tmp_path
):
    import datasets

    words = [
        "The cow , a big one , is brown . \n It says moo ",
        "A second article \n",
        "Two and two is four",
    ]
    docs = {
        "EleutherAI/wikitext_document_level": [{"page": text} for text in words],
        "EleutherAI/lambada_openai": [{"text": text.strip()} for text in words],
    }

    def load(path, name=None, **options):
        return datasets.DatasetDict(
            {
                part: datasets.Dataset.from_list(docs[path])
                for part in ("train", "validation", "test")
            }
        )

    monkeypatch.setattr("datasets.load_dataset", load)
    assert (
        cli.main(
            [
                "eval",
                "--model",
                str(checkpoint),
                "--tasks",
                "downstream",
                "--out",
                str(tmp_path / "scores.json"),
            ]
        )
        == 0
    )
    assert (
        len(evaluation.manager_for(evaluation.expand_tasks(["downstream"]), None).all_subtasks) < 20
    )  # does not read the files of all tasks
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "scores.json").read_text())
    model = SequenceLM.from_pretrained(checkpoint)
    articles = ("The cow, a big one, is brown.\nIt says moo ", "A second article\n", words[2])
    pages = sum(log_probability(model, "", text) for text in articles)
    last = 0
    for text in words:
        context, _, word = text.strip().rpartition(" ")
        last += log_probability(model, context, " " + word)
    result = (
        value(record, "wikitext", "word_perplexity"),
        value(record, "lambada_openai", "perplexity"),
    )
    words_of_pages = sum(len(re.split(r"\s+", text)) for text in words)
    assert result == pytest.approx(
        (math.exp(-pages / words_of_pages), math.exp(-last / len(words))), rel=1e-4
    )
    assert f"mean of 2 sets once perplexity {sum(result) / 2:.4f}" in " ".join(out.split())
    assert value(record, "wikitext", "byte_perplexity") > 1  # in the record, but not in the mean


@pytest.mark.parametrize(
    "mixer",
    [
        "longhorn",
        "gla",
        *map(slow_case, ("longhorn_exact", "mamba", "attention", "retnet", "rwkv5")),
    ],
)  # equal to the official code's result
def test_exported_folder_scores_the_same(mixer, tasks, tmp_path):
    save(tmp_path / "kit", mixer)
    out = evaluation.export_checkpoint(tmp_path / "kit", tmp_path / "hf")
    assert (
        len(
            {
                str(evaluation.evaluate_checkpoint(folder, NAMES, include=tasks)["rows"])
                for folder in (tmp_path / "kit", out)
            }
        )
        == 1
    )


def test_an_export_is_whole_and_replaces_no_other_folder(checkpoint, monkeypatch, capsys):
    export = checkpoint.parent / "export"

    def contents():
        paths = export.iterdir()
        return {path.name: path.read_bytes() for path in paths}

    before = contents()

    def full(model, folder, *_):
        (folder / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longhorn_kit.models.transformers.export_folder", full)
    with pytest.raises(OSError, match="export: No space left"):
        evaluation.export_checkpoint(checkpoint, export)
    assert contents() == before
    assert "manifest.json" in before
    with pytest.raises(ValueError, match="contains other files; export to a new folder"):
        evaluation.export_checkpoint(checkpoint, checkpoint)
    monkeypatch.undo()
    status = cli.main(["export", str(checkpoint), str(export)])
    assert status == 0
    assert "from_pretrained" in capsys.readouterr().out
    assert contents() == before
    message = fails(capsys, ["export", str(checkpoint), str(checkpoint)], 2)
    assert "is the checkpoint; name another folder" in message
    assert "context is 0" in fails(
        capsys, ["export", str(checkpoint), str(checkpoint.parent / "none"), "--context", "0"]
    )


DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "not UTF-8": lambda data: b"\xff" + data[1:],
    "a list": lambda data: b"[]",
    "other words": lambda data: b'{"tokenizer": 3, "model_type": 4, "d_model": "x", "model": []}',
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("folder", ["kit", "export", "bare"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_file_is_named_with_the_remedy(checkpoint, folder, name, damage, tmp_path):
    copied = shutil.copytree(checkpoint.parent / folder, tmp_path / "model")
    path = copied / name
    content = DAMAGE[damage](path.read_bytes())
    path.write_bytes(content)
    with pytest.raises((ValueError, OSError)) as caught:
        evaluation.load_pair(path.parent)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("export it again" if folder == "export" else "restore it from a copy") in str(
        caught.value
    )


def test_a_flipped_bit_a_lost_weight_and_an_export_moved_aside_are_found(checkpoint, tmp_path):
    for name, words in (
        ("export", "is damaged; export it again"),
        ("bare", r"in .* lacks model.blocks.0.mixer.conv1d.bias; restore"),
    ):
        copied = shutil.copytree(checkpoint.parent / name, tmp_path / name)
        weights = copied / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content.replace(b"conv1d.bias", b"conv1d.bia2"))
        with pytest.raises(ValueError, match=f"model.safetensors {words}"):
            evaluation.load_pair(tmp_path / name)
    shutil.copytree(
        checkpoint.parent / "export", tmp_path / ".hf.old"
    )  # as after a killed writer had moved the file
    assert evaluation.is_export(tmp_path / "hf")
    assert evaluation.load_pair(tmp_path / "hf")


def test_a_reader_gets_one_export_whole(checkpoint, tmp_path, monkeypatch):
    from longhorn_kit.models.transformers import LonghornForCausalLM

    for name, mixer in (
        ("a", "longhorn"),
        ("b", "longhorn_exact"),
    ):  # equal shapes, so that a mixture would raise no error
        save(tmp_path / f"m{name}", mixer)
        model = SequenceLM.from_pretrained(tmp_path / f"m{name}")
        weight = model.embedding.weight.data
        weight.add_(name == "b")
        model.save_pretrained(tmp_path / f"m{name}")
        evaluation.export_checkpoint(tmp_path / f"m{name}", tmp_path / name)
    weights = {
        mixer: evaluation.load_pair(tmp_path / name)[0].model.embedding.weight.clone()
        for name, mixer in (("a", "longhorn"), ("b", "longhorn_exact"))
    }
    real = LonghornForCausalLM.__init__
    observed = []

    def built(
        self, config
    ):  # while the model is built, after its config was read and before its weights are
        real(self, config)
        observed.append(config.mixer)
        if how == "exchanged":
            records.exchange(tmp_path / "a", tmp_path / "b")
        elif len(observed) == 1:
            evaluation.export_checkpoint(tmp_path / "mb", tmp_path / "a")

    monkeypatch.setattr(LonghornForCausalLM, "__init__", built)
    for how in ("exchanged", "exported again"):
        observed.clear()
        model, words = evaluation.load_pair(tmp_path / "a")
        weight = model.model.embedding.weight
        expected = weights[model.config.mixer]
        assert torch.equal(weight, expected), how
        assert model.config._name_or_path == str(tmp_path / "a")


def test_a_folder_that_is_replaced_all_the_time_or_missing_is_named(tmp_path):
    (tmp_path / "m").mkdir()

    def replaced(path):
        write_json(tmp_path / "m" / "config.json", 1)
        raise ValueError(f"{path}/config.json is torn")

    message = f"{tmp_path / 'm'} was replaced 3 times while it was read"
    with pytest.raises(OSError, match=message):
        records.read_whole(tmp_path / "m", ("*.json",), replaced, attempts=3)

    def torn(path):
        raise ValueError(f"{path}/config.json is torn")

    with pytest.raises(ValueError, match=f"^{tmp_path / 'm'}/config.json is torn$"):
        records.read_whole(tmp_path / "m", ("*.json",), torn)
    with pytest.raises(FileNotFoundError):
        records.read_whole(tmp_path / "none", ("*.json",), lambda path: (path / "x").read_text())


@pytest.mark.parametrize("folder", ["kit", "bare"])
def test_a_billion_blocks_are_refused_before_they_are_built(checkpoint, tmp_path, folder):
    copied = shutil.copytree(checkpoint.parent / folder, tmp_path / "m")
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_layer": 10**9}))
    with pytest.raises(
        ValueError,
        match="config.json requests 1000000000 blocks, but there are .* tensors; restore it",
    ):
        evaluation.load_pair(tmp_path / "m")


def test_weights_of_the_kit_that_were_damaged_are_not_exported(checkpoint, tmp_path):
    weights = shutil.copytree(checkpoint, tmp_path / "m") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[10 + int.from_bytes(data[:8], "little")] ^= 0x40
    weights.write_bytes(data)
    for use in (
        evaluation.load_own,
        evaluation.load_pair,
        lambda folder: evaluation.export_checkpoint(folder, tmp_path / "out"),
    ):
        with pytest.raises(
            ValueError,
            match="model.safetensors is damaged: "
            "its contents do not match their SHA-256.*restore it",
        ):
            use(tmp_path / "m")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        Exception("No space left on device (os error 28)"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_is_named_whatever_a_library_raises(checkpoint, tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr("longhorn_kit.models.transformers.export_folder", full)
    with pytest.raises(
        OSError,
        match=f"^cannot write {tmp_path / 'out'}: No space left on device; "
        "the old contents are unchanged$",
    ):
        evaluation.export_checkpoint(checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_code_of_a_folder_is_not_run(checkpoint, tmp_path, monkeypatch):
    copied = shutil.copytree(checkpoint.parent / "bare", tmp_path / "foreign")
    config = copied / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"model_type": "foreign"}))
    (tmp_path / "foreign" / "modeling_longhorn.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("input() was called"))
    tokenizer = (
        shutil.copytree(checkpoint.parent / "export", tmp_path / "words") / "tokenizer_config.json"
    )
    own = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["modeling_longhorn.OwnTokenizer", None]},
    }
    settings = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(settings | own))
    (tmp_path / "words/manifest.json").unlink()
    shutil.copy(tmp_path / "foreign/modeling_longhorn.py", tmp_path / "words")
    for name in ("foreign", "words"):
        with pytest.raises(
            ValueError,
            match=f"{name} needs custom code, but longhorn never runs code from a model's folder",
        ):
            evaluation.load_pair(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def fails(capsys, argv, code=1):
    capsys.readouterr()
    words = argv if "export" in argv[:1] else ["eval", "--tasks", *argv]
    return command_line.fails(capsys, words, code)


def test_command_prints_a_table_and_writes_the_record(
    checkpoint, tasks, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "new" / "scores.json"
    rest = ["--model", str(checkpoint), "--include", str(tasks), "--limit"]
    assert (
        cli.main(
            [
                "eval",
                "--tasks",
                "tiny_choice",
                "tiny_line",
                "--read",
                "both",
                "--out",
                str(path),
                *rest,
                "2",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    rows = json.loads(path.read_text())["rows"]
    assert err == ""
    assert len(rows) == 6
    assert {row["documents"] for row in rows} == {2}
    assert out.count("tiny_choice") == 4
    last = out.splitlines()[-1]
    assert last == f"results: {path}"
    status = cli.main(["eval", "--tasks", "tiny_whole", *rest, "1"])
    assert status == 0
    assert (checkpoint / "eval-tiny_whole-once-first-1.json").is_file()
    assert not (checkpoint / "eval-tiny_whole-once.json").exists()

    def full(path, value):
        raise OSError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("longhorn_kit.records.write_json", full)
    status = cli.main(["eval", "--tasks", "tiny_choice", "--out", str(path), *rest, "2"])
    assert status == 1
    out, err = capsys.readouterr()
    shown = " ".join(out.split())
    assert "tiny_choice once acc" in shown
    assert "No space left" in err  # the scores are printed anyway


def test_what_cannot_be_evaluated_is_one_sentence(checkpoint, tasks, tmp_path, capsys, monkeypatch):
    base = ["--model", str(checkpoint), "--include", str(tasks)]
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager",
        lambda **_: SimpleNamespace(all_tasks=["tiny_choice"], all_subtasks=[]),
    )
    assert (
        fails(capsys, ["tiny_choise", *base], 2)
        == "unknown task 'tiny_choise'; did you mean tiny_choice?"
    )
    assert "lists them all" in fails(capsys, ["qqqqq", *base], 2)
    monkeypatch.undo()
    for argv, words in (
        (["--context", "0"], "context is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--limit", "0"], "limit is 0"),
        (["--shots", "-1"], "shots is -1"),
        (["--tokenizer", "words"], "words"),
        (["--out", str(tasks / "docs.json" / "x.json")], "cannot write"),
    ):
        message = fails(capsys, ["tiny_choice", *base, *argv])
        assert words in message
    assert "no task" in fails(capsys, [",", *base])
    assert "max tokens" in fails(capsys, ["tiny_line", *base, "--context", "2"])
    message = fails(capsys, ["x", "--model", str(tmp_path / "nowhere")])
    assert "nowhere does not exist" in message
    message = fails(capsys, ["x", *base, "--include", str(tmp_path / "none")])
    assert "none does not exist" in message
    assert "is a folder; name a file in it" in fails(
        capsys, ["tiny_choice", *base, "--out", str(tmp_path)], 2
    )


def test_models_data_and_extras_that_are_missing_or_wrong(
    checkpoint, tmp_path, tasks, capsys, monkeypatch
):
    def argv(name):
        return ["tiny_choice", "--include", str(tasks), "--model", str(tmp_path / name)]

    save(tmp_path / "small", vocab_size=64)
    assert "--tokenizer" in fails(capsys, argv("small"))
    message = fails(capsys, [*argv("small"), "--tokenizer", "bytes"])
    assert "has 256 tokens, but the model has 64" in message
    model = save(tmp_path / "lost")
    model.embedding.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path / "lost")
    assert "is not finite; its training diverged" in fails(capsys, argv("lost"))
    config = shutil.copytree(checkpoint, tmp_path / "unknown") / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"longhorn"', '"longhorm"'))
    assert "longhorm" in fails(capsys, argv("unknown"))

    def no_network(*args, **options):
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", no_network)
    said = fails(capsys, ["recall", "--model", str(checkpoint)])
    assert said.startswith(
        "task fda: its data cannot be loaded (ConnectionError: Couldn't reach the Hub)"
    )
    assert "network" in said
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert (
        fails(capsys, ["fda", "--model", str(checkpoint)])
        == f'evaluation needs the extra "eval": {pip_command("eval")}'
    )
