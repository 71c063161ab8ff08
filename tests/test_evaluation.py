"""lm-eval on checkpoints of the kit: its numbers are the model's own, contexts come twice, and what cannot be done is told in one line."""
import json
import math
import os
import re

import pytest
import torch

from longhorn_kit import cli
from longhorn_kit.lab import evaluation, published
from longhorn_kit.lab.data import get_tokenizer
from longhorn_kit.models import LMConfig, SequenceLM

pytest.importorskip("lm_eval")


def save(folder, mixer="longhorn", vocab_size=256):
    torch.manual_seed(0)
    model = SequenceLM(LMConfig(vocab_size, 16, 1, mixer=mixer)).eval()
    for weight in model.parameters():
        weight.data *= 3 # clear preferences
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save(folder)
    return folder


DOCS = [{"text": "The cow is brown. The cow is", "right": " brown", "wrong": " blue and green"},
        {"text": "Two and two is", "right": " four", "wrong": " five"},
        {"text": "état =", "right": " 3", "wrong": " état"}] * 2


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    "Three tasks of lm-eval, one for each kind of request, on local documents."
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    shared = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'docs.jsonl'}}}}}\ntest_split: test\n"
    (folder / "choice.yaml").write_text(f"""task: tiny_choice
{shared}output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    (folder / "line.yaml").write_text(f"""task: tiny_line
{shared}output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""")
    (folder / "whole.yaml").write_text(f"""task: tiny_whole
{shared}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
""")
    return folder


def value(record, task, metric, read="once"):
    return next(row["value"] for row in record["rows"] if (row["task"], row["metric"], row["read"]) == (task, metric, read))


@torch.no_grad()
def log_probability(model, context, continuation):
    "By hand, in nats; byte 0 stands before an empty context."
    context, ids = context.encode() or b"\0", continuation.encode()
    tokens = torch.tensor([[*context, *ids]])
    logits = model(tokens[:, :-1])[0].log_softmax(-1)
    return logits[len(context) - 1:].gather(1, torch.tensor([[i] for i in ids])).sum().item()


# The tokenizer

@pytest.mark.parametrize("text", ["plain text\n\tand tabs", "état → β 😀 日本", " ", "a\r\nb", "".join(map(chr, range(1, 400)))])
def test_bytes_are_the_same_for_transformers(text):
    ours, theirs = get_tokenizer("bytes"), evaluation.hf_tokenizer(get_tokenizer("bytes"))
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.decode(ours.encode(text)) == text and len(theirs) == 256 and theirs.eos_token_id == 0


def merged_folder(folder):
    "A vocabulary in GPT-2's files: 256 bytes and a few merges."
    letters = evaluation.byte_characters()
    merges = ["t h", "th e", "Ġ the", "i n", "in g", "a n", "an d", "Ġ and", "c o", "co w", "Ã ©", "e r"]
    words = list(letters[i] for i in sorted(range(256), key=lambda i: (letters[i] > "\xff", letters[i])))
    words += [pair.replace(" ", "") for pair in merges] + ["<|endoftext|>"]
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
    return folder


def test_merges_are_found_again_from_the_ranks(tmp_path):
    tokenizer = get_tokenizer(f"gpt2:{merged_folder(tmp_path)}")
    words, merges = evaluation.vocabulary(tokenizer)
    told = [tuple(line.split()) for line in (tmp_path / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]]
    assert merges == told
    known = json.loads((tmp_path / "encoder.json").read_text(encoding="utf-8"))
    assert {word: words[word] for word in known if word != evaluation.END} == {w: i for w, i in known.items() if w != evaluation.END}
    theirs = evaluation.hf_tokenizer(tokenizer)
    for text in ("the cow and the other thing", "  theé and\n\ncowing  ", "thethe andand 12 é"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist() and theirs.decode(tokenizer.encode(text)) == text


# Numbers

def test_every_kind_of_request_gives_the_models_own_numbers(checkpoint, tasks):
    model = SequenceLM.from_pretrained(checkpoint)
    record = evaluation.evaluate_checkpoint(checkpoint, ["tiny_choice,tiny_line", "tiny_whole"], include=tasks, read="both")
    for read, change in (("once", lambda text: text), ("twice", lambda text: f"{text}\n{text}")):
        scores = [[log_probability(model, change(doc["text"]), doc[key]) for key in ("right", "wrong")] for doc in DOCS]
        sizes = [[len(doc[key]) for key in ("right", "wrong")] for doc in DOCS] # lm-eval counts characters
        assert value(record, "tiny_choice", "acc", read) == sum(a > b for a, b in scores) / len(DOCS)
        normed = [a / m > b / n for (a, b), (m, n) in zip(scores, sizes)]
        assert value(record, "tiny_choice", "acc_norm", read) == sum(normed) / len(DOCS)
    nats = sum(log_probability(model, "", doc["text"]) for doc in DOCS)
    size = sum(len(doc["text"].encode()) for doc in DOCS)
    assert value(record, "tiny_whole", "bits_per_byte") == pytest.approx(-nats / size / math.log(2), rel=1e-5)
    assert all(row["documents"] == len(DOCS) for row in record["rows"]) and record["parameters"] == model.num_parameters()
    json.dumps(record)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generated_lines_are_the_models_own(checkpoint, batch_size):
    from lm_eval.api.instance import Instance
    model = SequenceLM.from_pretrained(checkpoint)
    lm = evaluation.harness_model(checkpoint, batch_size=batch_size)
    requests = [Instance("generate_until", doc={}, arguments=(doc["text"], {"until": ["\n"], "max_gen_toks": 9}), idx=0)
                for doc in DOCS]
    for twice, once in ((evaluation.read_twice(lm), False), (lm, True)):
        with evaluation.quiet():
            lines = twice.generate_until(requests)
        for doc, line in zip(DOCS, lines):
            prompt = doc["text"] if once else f"{doc['text']}\n{doc['text']}"
            ids = model.generate(torch.tensor([list(prompt.encode())]), 9, temperature=0)[0, len(prompt.encode()):].tolist()
            ids = ids[:ids.index(0)] if 0 in ids else ids # the end of a document
            assert line == get_tokenizer("bytes").decode(ids).split("\n")[0]
    assert [request.args[0] for request in requests] == [doc["text"] for doc in DOCS] # left alone


def test_only_contexts_are_doubled():
    from lm_eval.api.instance import Instance
    whole = Instance("loglikelihood_rolling", doc={}, arguments=("a text",), idx=0)
    empty = Instance("loglikelihood", doc={}, arguments=("", "a text"), idx=0)
    assert evaluation.doubled(empty).args == ("", "a text")
    class Echo:
        def loglikelihood(self, requests): return [request.args for request in requests]
        loglikelihood_rolling = generate_until = loglikelihood
    twice = evaluation.read_twice(Echo())
    assert twice.loglikelihood_rolling([whole]) == [("a text",)]
    assert twice.generate_until([Instance("generate_until", doc={}, arguments=("x", {}), idx=0)]) == [("x\nx", {})]


def test_long_contexts_lose_their_beginning(checkpoint):
    from lm_eval.api.instance import Instance
    lm, model = evaluation.harness_model(checkpoint, context=16), SequenceLM.from_pretrained(checkpoint)
    with evaluation.quiet():
        found, = lm.loglikelihood([Instance("loglikelihood", doc={}, arguments=("x" * 50 + "0123456789ab", "cdef"), idx=0)])
    assert found[0] == pytest.approx(log_probability(model, "x0123456789ab", "cdef"), rel=1e-4)


# Tasks

def test_recall_preset_is_the_papers_table():
    assert tuple(evaluation.RECALL) == published.RECALL_TASKS
    assert evaluation.expand_tasks(["recall", "fda"]) == list(evaluation.RECALL.values())
    assert evaluation.expand_tasks(["a, b", "a"]) == ["a", "b"]


def test_recall_tasks_of_our_own_read_the_passage(checkpoint, tmp_path, monkeypatch):
    docs = [{"context": "[DOC] [TLE] Towers [PAR] The tower is 57 m high. It stands in", "question": "It stands in", "answers": ["Pisa", "Italy"]},
            {"context": "A cow says moo.", "question": "The sound of a cow is", "answers": ["Moo"]}]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in evaluation.OWN_TASKS.items():
        local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "docs.jsonl")}}}
        monkeypatch.setitem(evaluation.OWN_TASKS, name, task | local)
    found = evaluation.find_tasks(list(evaluation.OWN_TASKS))
    prompts = [task.doc_to_text(doc) for task in found["tasks"].values() for doc in task.test_docs()]
    assert prompts == ["Towers  The tower is 57 m high. It stands in", "A cow says moo. The sound of a cow is"] * 3
    heard = []
    lm = evaluation.harness_model(checkpoint)
    lm.generate_until = lambda requests, **options: heard.extend(r.args[0] for r in requests) or [" pisa, they say", "quack"] * 3
    rows = evaluation.run_tasks(lm, found, "twice")
    assert {(row["task"], row["metric"], row["value"], row["documents"]) for row in rows} == {
        (name, "contains", 0.5, 2) for name in evaluation.OWN_TASKS}
    assert sorted(set(heard)) == sorted(f"{prompt}\n{prompt}" for prompt in set(prompts))


def test_mean_over_the_six_only_where_all_are_there():
    rows = [{"task": task, "read": read, "metric": "contains", "value": i / 10, "stderr": None, "documents": 1}
            for read in ("once", "twice") for i, task in enumerate(evaluation.RECALL.values())]
    assert evaluation.recall_means({"rows": rows}) == pytest.approx({"once": 0.25, "twice": 0.25})
    assert evaluation.recall_means({"rows": rows[1:]}) == pytest.approx({"twice": 0.25})


WORDS = ["The cow , a big one , is brown . \n It says moo ", "A second article \n", "Two and two is four"]

def test_downstream_gives_perplexities_per_word_and_their_mean(checkpoint, capsys, monkeypatch, tmp_path):
    import datasets
    docs = {"EleutherAI/wikitext_document_level": [{"page": text} for text in WORDS], "EleutherAI/lambada_openai": [{"text": text.strip()} for text in WORDS]}
    load = lambda path, name=None, **options: datasets.DatasetDict({part: datasets.Dataset.from_list(docs[path]) for part in ("train", "validation", "test")})
    monkeypatch.setattr("datasets.load_dataset", load)
    assert cli.main(["eval", "--model", str(checkpoint), "--tasks", "downstream", "--out", str(tmp_path / "scores.json")]) == 0
    assert len(evaluation.manager_for(evaluation.expand_tasks(["downstream"]), None).all_subtasks) < 20 # not the files of all tasks
    out, record = capsys.readouterr().out, json.loads((tmp_path / "scores.json").read_text())
    model = SequenceLM.from_pretrained(checkpoint)
    plain = ["The cow, a big one, is brown.\nIt says moo ", "A second article\n", WORDS[2]]
    pages = sum(log_probability(model, "", text) for text in plain)
    last = [text.strip().rpartition(" ") for text in WORDS]
    last = sum(log_probability(model, context, " " + word) for context, _, word in last)
    expected = {"wikitext": math.exp(-pages / sum(len(re.split(r"\s+", text)) for text in WORDS)), "lambada_openai": math.exp(-last / len(WORDS))}
    assert evaluation.perplexities(record) == {"once": pytest.approx(expected, rel=1e-4)}
    mean = sum(evaluation.perplexities(record)["once"].values()) / 2
    assert f"mean of 2 sets  once  perplexity       {mean:.4f}" in out
    assert value(record, "wikitext", "byte_perplexity") > 1 # in the record, but not in the mean


def test_one_perplexity_has_no_mean():
    row = {"task": "a", "read": "once", "metric": "perplexity", "value": 3.0, "stderr": None, "documents": 1}
    table = lambda *rows: [line[0] for line in evaluation.score_table({"rows": list(rows), "parameters": 1, "lm_eval": "0"})[2]]
    assert table(row) == ["a"] and table(row, row | {"task": "b", "metric": "acc"}) == ["a", "b"]
    assert table(row, row | {"task": "b", "metric": "word_perplexity"}, row | {"task": "b", "metric": "byte_perplexity"})[-1] == "mean of 2 sets"
    assert table(row, row | {"read": "twice"}) == ["a", "a"]


# transformers and its folder

@pytest.mark.parametrize("mixer", ["longhorn", "longhorn_exact", "mamba", "attention", "retnet", "rwkv5", "gla"]) # the official code's, and exact
def test_exported_folder_scores_the_same(mixer, tasks, tmp_path):
    save(tmp_path / "kit", mixer)
    out = evaluation.export_checkpoint(tmp_path / "kit", tmp_path / "hf")
    names = ["tiny_choice", "tiny_whole", "tiny_line"]
    first, second = (evaluation.evaluate_checkpoint(folder, names, include=tasks)["rows"] for folder in (tmp_path / "kit", out))
    assert first == second


def test_an_export_is_whole_and_in_a_folder_of_its_own(tmp_path, monkeypatch):
    from longhorn_kit.models import transformers as kit
    save(tmp_path / "kit")
    out = evaluation.export_checkpoint(tmp_path / "kit", tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    def full(model, folder, words):
        (folder / "config.json").write_text("half")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(kit, "export_folder", full)
    with pytest.raises(OSError, match="hf"):
        evaluation.export_checkpoint(tmp_path / "kit", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(ValueError, match="holds other files; an export needs a folder of its own"):
        evaluation.export_checkpoint(tmp_path / "kit", tmp_path / "kit")


def test_a_model_whose_training_diverged_is_refused(tasks, tmp_path):
    model = save(tmp_path)
    next(iter(model.parameters())).data[0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not finite; its training diverged"):
        evaluation.evaluate_checkpoint(tmp_path, ["tiny_choice"], include=tasks)


def test_the_harness_own_way_to_a_model_gives_the_same(checkpoint, tasks, tmp_path, monkeypatch):
    import lm_eval
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda found: None) # asks pip, for seconds
    out = evaluation.export_checkpoint(checkpoint, tmp_path / "hf")
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    with evaluation.quiet():
        found = lm_eval.simple_evaluate("hf", model_args=f"pretrained={out},trust_remote_code=True", device="cpu",
                                        tasks=["tiny_choice", "tiny_line", "tiny_whole"], task_manager=manager, bootstrap_iters=0)
    ours = evaluation.evaluate_checkpoint(checkpoint, ["tiny_choice", "tiny_line", "tiny_whole"], include=tasks)
    key = lambda row: (row["task"], row["metric"])
    assert {key(r): r["value"] for r in evaluation.metric_rows(found, "once")} == pytest.approx({key(r): r["value"] for r in ours["rows"]})


# The command

def fails(capsys, argv, code=1):
    capsys.readouterr()
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert err.startswith("longhorn: error: ") and err.count("\n") == 1 and "Traceback" not in out + err, err
    return err.removeprefix("longhorn: error: ").strip()


def test_command_prints_a_table_and_writes_the_record(checkpoint, tasks, tmp_path, capsys):
    argv = ["eval", "--tasks", "tiny_choice", "tiny_line", "--model", str(checkpoint), "--include", str(tasks), "--read", "both",
            "--limit", "2", "--out", str(tmp_path / "new" / "scores.json")]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    record = json.loads((tmp_path / "new" / "scores.json").read_text())
    assert err == "" and len(record["rows"]) == 6 and {row["documents"] for row in record["rows"]} == {2}
    assert out.count("tiny_choice") == 4 and out.splitlines()[-1] == f"results: {tmp_path / 'new' / 'scores.json'}"
    assert cli.main(["eval", "--tasks", "tiny_whole", "--model", str(checkpoint), "--include", str(tasks), "--limit", "1"]) == 0
    assert (checkpoint / "eval-tiny_whole-once-first-1.json").is_file() and not (checkpoint / "eval-tiny_whole-once.json").exists()


def test_export_command(checkpoint, tmp_path, capsys):
    assert cli.main(["export", str(checkpoint), str(tmp_path / "hf")]) == 0
    assert "from_pretrained" in capsys.readouterr().out and (tmp_path / "hf" / "tokenizer.json").is_file()
    assert "itself" in fails(capsys, ["export", str(checkpoint), str(checkpoint)], 2)
    assert "context is 0" in fails(capsys, ["export", str(checkpoint), str(tmp_path / "none"), "--context", "0"])


def test_what_cannot_be_evaluated_is_one_line(checkpoint, tasks, tmp_path, capsys, monkeypatch):
    index = type("Index", (), {"all_tasks": ["tiny_choice"], "all_subtasks": []})
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path, include_defaults=True: index) # half a minute less
    base = ["eval", "--include", str(tasks), "--model", str(checkpoint), "--tasks"]
    assert fails(capsys, [*base, "tiny_choise"], 2) == "unknown task 'tiny_choise'; did you mean tiny_choice?"
    assert "lists them all" in fails(capsys, [*base, "qqqqq"], 2)
    monkeypatch.undo()
    assert "no task" in fails(capsys, [*base, ","])
    assert "context is 0" in fails(capsys, [*base, "tiny_choice", "--context", "0"])
    assert "batch_size is 0" in fails(capsys, [*base, "tiny_choice", "--batch-size", "0"])
    assert "max tokens" in fails(capsys, [*base, "tiny_line", "--context", "2"])
    assert "limit is 0" in fails(capsys, [*base, "tiny_choice", "--limit", "0"])
    assert "nowhere does not exist" in fails(capsys, ["eval", "--tasks", "x", "--model", str(tmp_path / "nowhere")])
    assert "does not exist" in fails(capsys, ["eval", "--tasks", "x", "--model", str(checkpoint), "--include", str(tmp_path / "none")])
    assert "invalid choice" in fails(capsys, [*base, "tiny_choice", "--read", "thrice"], 2)
    assert "words" in fails(capsys, [*base, "tiny_choice", "--tokenizer", "words"])
    (tmp_path / "file").write_text("")
    assert "cannot write" in fails(capsys, [*base, "tiny_choice", "--out", str(tmp_path / "file" / "x.json")])
    assert "is a folder; name a file in it" in fails(capsys, [*base, "tiny_choice", "--out", str(tmp_path)], 2)


def test_scores_are_printed_even_if_their_file_cannot_be_written(checkpoint, tasks, tmp_path, capsys, monkeypatch):
    def full(path, value):
        raise OSError(f"cannot write {path}: No space left on device")
    monkeypatch.setattr("longhorn_kit.records.write_json", full)
    assert cli.main(["eval", "--tasks", "tiny_choice", "--model", str(checkpoint), "--include", str(tasks), "--out", str(tmp_path / "x.json")]) == 1
    out, err = capsys.readouterr()
    assert "tiny_choice  once  acc" in out and "No space left" in err


def test_tokenizer_that_the_model_does_not_know(tmp_path, tasks, capsys):
    save(tmp_path / "small", vocab_size=64)
    argv = ["eval", "--tasks", "tiny_choice", "--include", str(tasks), "--model", str(tmp_path / "small")]
    assert "--tokenizer" in fails(capsys, argv)
    assert "has 256 tokens, the model 64" in fails(capsys, [*argv, "--tokenizer", "bytes"])


def test_checkpoint_of_an_unknown_mixer(checkpoint, tmp_path, tasks, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes().replace(b'"longhorn"', b'"longhorm"'))
    assert "longhorm" in fails(capsys, ["eval", "--tasks", "tiny_choice", "--include", str(tasks), "--model", str(tmp_path)])


def test_data_that_cannot_be_fetched(checkpoint, capsys, monkeypatch):
    def no_network(*args, **options):
        raise ConnectionError("Couldn't reach the Hub\nand more")
    monkeypatch.setattr("datasets.load_dataset", no_network)
    said = fails(capsys, ["eval", "--tasks", "recall", "--model", str(checkpoint)])
    assert said.startswith("task fda: its data cannot be loaded (ConnectionError: Couldn't reach the Hub)") and "network" in said


def test_missing_extra_is_named(checkpoint, capsys, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    monkeypatch.delitem(os.environ, "LONGHORN_DEBUG", raising=False)
    assert "pip install 'longhorn-kit[eval]'" in fails(capsys, ["eval", "--tasks", "fda", "--model", str(checkpoint)])
