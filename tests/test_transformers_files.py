"Test exported folders with and without the kit, fine-tuning, adapters, and model cards."

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, AutoTokenizer

from longhorn_kit import __version__
from longhorn_kit.lab.data.tokenizers import get_tokenizer
from longhorn_kit.lab.experiments.evaluation import (
    export_checkpoint,
    free_word,
    hf_tokenizer,
    load_pair,
)
from longhorn_kit.lab.train.lm import train_lm
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.models.files import run_facts
from longhorn_kit.models.transformers import (
    LonghornForCausalLM,
    export_folder,
    padding_note,
    to_transformers,
)
from mixers import every_family, every_mixer

WITHOUT_KIT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "longhorn_kit":
            raise ModuleNotFoundError("No module named 'longhorn_kit'", name=name)
sys.meta_path.insert(0, Absent())
try: import torchvision
except Exception: sys.modules["torchvision"] = None # an extension built for another PyTorch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
"""


def export(folder, mixer="longhorn_exact", **options):
    torch.manual_seed(1)
    model = SequenceLM(LMConfig(256, 32, 2, mixer=mixer, **options))
    return export_folder(model, folder, hf_tokenizer(get_tokenizer("bytes")))


def outputs(folder):
    "Return logits and greedy tokens of a saved model."
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompt = torch.arange(30, 50)[None]
    logits = model(prompt).logits.detach()
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    return logits, tokens


def finetune(folder, out):
    "Train with checkpoints; resume from the first one; save both; return the folders."
    from transformers import Trainer, TrainingArguments

    data = [
        dict(input_ids=torch.arange(i, i + 16), labels=torch.arange(i, i + 16)) for i in range(16)
    ]
    options = dict(
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    starts = (("whole", None), ("resumed", f"{out}/whole/checkpoint-2"))
    for name, start in starts:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        arguments = TrainingArguments(f"{out}/{name}", max_steps=4, save_steps=2, **options)
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=start)
        model.save_pretrained(f"{out}/{name}/saved")
    return [f"{out}/whole/checkpoint-4", f"{out}/whole/saved", f"{out}/resumed/saved"]


def in_python_without_the_kit(code, tmp_path):
    "Run code; return what it assigns to `result`."
    sources = map(inspect.getsource, (outputs, finetune))
    functions = "\n".join(sources)
    path = tmp_path / "result.pt"
    script = f"{WITHOUT_KIT}\n{functions}\n{code}\ntorch.save(result, {str(path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", ({}, dict(key_norm=True)))
def test_an_export_runs_and_is_saved_again_where_the_kit_is_not_installed(options, tmp_path):
    folder = export(tmp_path / "hf", mixer_options=options)
    code = f"""
folder = {str(folder)!r}
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
AutoTokenizer.from_pretrained(folder) # a question would be an end of file here
model.save_pretrained("copy")
result = [outputs(folder), outputs("copy"), sys.modules[type(model).__module__].__file__]
"""
    original, copied, path = in_python_without_the_kit(code, tmp_path)
    module = r"longhorn_source/longhorn_kit_[0-9a-f]{16}\.models\.transformers\.py"
    assert re.fullmatch(module, path)
    expected_logits, expected_tokens = outputs(folder)
    for logits, tokens in (original, copied, outputs(tmp_path / "copy")):
        assert_close(logits, expected_logits)
        assert torch.equal(tokens, expected_tokens)
    names = ("modeling_longhorn.py", "longhorn_source.py", "config.json", "generation_config.json")
    for name in names:
        text = (folder / name).read_text()
        expected_text = (tmp_path / "copy" / name).read_text()
        assert text == expected_text, name


def other_version(folder, out):
    "Copy an export, and change the version and the norms of its code."
    shutil.copytree(folder, out)
    source = out / "longhorn_source.py"
    text = source.read_text()
    assert text.count("RMSNorm(lm.d_model, lm.norm_eps)") == 1
    text = text.replace("RMSNorm(lm.d_model, lm.norm_eps)", "RMSNorm(lm.d_model, 10.0)")
    text = text.replace(f'"{__version__}"', '"9.9.9"')
    assert text.count('"9.9.9"') == 2
    source.write_text(text)
    return out


@pytest.mark.slow
def test_two_exports_in_one_process_without_the_kit_run_each_its_own_code(tmp_path):
    one = export(tmp_path / "one")
    shutil.copytree(one, tmp_path / "same")
    two = other_version(one, tmp_path / "two")
    names = [str(path) for path in (one, two, tmp_path / "same")]
    alone = [logits_without_the_kit(name, tmp_path) for name in names[:2]]
    code = f"""
models = [AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True) for name in {names}]
versions = [sys.modules[type(model).__module__].__version__ for model in models]
logits = [model(torch.arange(30, 50)[None]).logits.detach() for model in models]
models[1].save_pretrained("copy")
shared = type(models[0]) is type(models[2])
result = [versions, shared, logits, outputs("copy")[0], "longhorn_kit" in sys.modules]
"""
    versions, shared, logits, copied, public = in_python_without_the_kit(code, tmp_path)
    assert versions == [__version__, "9.9.9", __version__]
    assert shared
    assert not public
    assert_close(logits, [*alone, alone[0]])
    assert_close(copied, alone[1])
    difference = (alone[0] - alone[1]).abs().max()
    assert difference > 1e-2
    source = (tmp_path / "copy" / "longhorn_source.py").read_text()
    assert source == (two / "longhorn_source.py").read_text()


def logits_without_the_kit(folder, tmp_path):
    return in_python_without_the_kit(f"result = outputs({folder!r})[0]", tmp_path)


@pytest.mark.slow
def test_operations_of_two_exports_stay_apart_where_a_graph_calls_them(tmp_path):
    "A second export must not replace the first one's operations, which graphs call by name."
    one = export(tmp_path / "one")
    other = other_version(one, tmp_path / "two")
    names = [str(one), str(other)]
    code = f"""
batch = dict(input_ids=torch.arange(30, 50)[None], use_cache=False)
programs = []
for name in {names}:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    programs.append(torch.export.export(model, (), batch).module())
logits = [program(**batch).logits for program in programs]
namespaces = []
for program in programs:
    targets = [str(node.target) for node in program.graph.nodes]
    namespaces.append({{t.partition(".")[0] for t in targets if "longhorn_kit" in t}})
result = [logits, namespaces]
"""
    logits, namespaces = in_python_without_the_kit(code, tmp_path)
    alone = [logits_without_the_kit(name, tmp_path) for name in names]
    assert_close(logits, alone)
    (first,) = namespaces[0]
    (second,) = namespaces[1]
    assert first != second


def test_an_installed_kit_of_another_version_warns_once_and_runs(tmp_path):
    one = export(tmp_path / "one")
    two = other_version(one, tmp_path / "two")
    message = re.escape(
        f"two was exported by longhorn-kit 9.9.9, and longhorn-kit {__version__} runs it"
    )
    with pytest.warns(UserWarning, match=message) as raised:
        model = AutoModelForCausalLM.from_pretrained(two, trust_remote_code=True)
    assert type(model) is LonghornForCausalLM
    assert len(raised) == 1
    with pytest.warns(UserWarning, match=message):
        load_pair(two)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LonghornForCausalLM.from_pretrained(one)
        load_pair(one)


@pytest.mark.slow
def test_training_and_resuming_survives_every_change_between_with_and_without_the_kit(tmp_path):
    folder = export(tmp_path / "hf")
    with_kit = finetune(folder, tmp_path / "with_kit")
    code = f"""
without_kit = finetune({str(folder)!r}, {str(tmp_path / "without_kit")!r})
result = [(name, outputs(name)) for name in {with_kit} + without_kit]
"""
    results = dict(in_python_without_the_kit(code, tmp_path))
    assert len(results) == 2 * len(with_kit)
    before, _ = outputs(folder)
    first, _ = results[with_kit[0]]
    for name, (logits, tokens) in results.items():
        expected_logits, expected_tokens = outputs(name)
        assert_close(logits, expected_logits, msg=name)
        assert torch.equal(tokens, expected_tokens), name
        assert_close(logits, first, msg=f"{name} is trained otherwise")
        change = (logits - before).abs().max()
        assert change > 0.1


@pytest.mark.parametrize(
    "targets", [["in_proj", "x_proj", "b_proj", "out_proj", "embedding"], "all-linear"]
)
@pytest.mark.parametrize("mixer", ["longhorn", "longhorn_scalar", "mamba"])
def test_adapters_reach_every_projection_and_are_saved_loaded_and_merged(mixer, targets, tmp_path):
    peft = pytest.importorskip("peft")
    if mixer == "mamba" and targets != "all-linear":
        targets = ["in_proj", "dt_proj", "embedding"]
    folder = export(tmp_path / "hf", mixer, tie_embeddings=targets == "all-linear")
    tokens = torch.arange(40, 60)[None]
    base = AutoModelForCausalLM.from_pretrained(folder)
    rows = [1, 2] if targets == "all-linear" else None
    options = dict(target_modules=targets, trainable_token_indices=rows)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    learned = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, 1e-2)
    start = adapted(tokens).logits.detach()
    named = adapted.named_parameters()
    changed = [p for name, p in named if "lora_B" in name]
    for _ in range(3):
        optimizer.zero_grad()
        adapted(tokens, labels=tokens).loss.backward()
        optimizer.step()
    expected = 2 * (2 if "dt_proj" in targets else 4)
    assert len(changed) == expected
    for p in changed:
        assert p.abs().max() > 0
    trained = adapted.eval()(tokens).logits
    change = (trained - start).abs().max()
    assert change > 1e-2
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    loaded = model.eval()
    assert_close(loaded(tokens).logits, trained)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    logits, sequence = outputs(tmp_path / "merged")
    prompt = torch.arange(30, 50)[None]
    assert_close(logits, adapted(prompt).logits, rtol=1e-4, atol=1e-5)
    expected = adapted.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(sequence, expected)


def adapted_model(mixer="longhorn", **options):
    "Return a model with two LoRA adapters that change its outputs, `default` and `other`."
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = LMConfig(64, 32, 2, mixer=mixer)
    model = to_transformers(SequenceLM(config)).eval()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["in_proj", "out_proj"],
        init_lora_weights=False,
        **options,
    )
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", config)
    return adapted.eval()


MASKS = {
    "left": [[1] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
    "right": [[1] * 6, [1, 1, 1, 0, 0, 0], [1] * 5 + [0]],
    "inside": [[1] * 6, [1, 0, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1]],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("mixer", ("longhorn", "mamba2", "attention"))
def test_each_row_of_a_padded_batch_has_its_own_adapter(mixer, keep, mask):
    adapted = adapted_model(mixer)
    tokens = torch.randint(64, (3, 6))
    mask = torch.tensor(mask)
    names = ["default", "__base__", "other"]
    batch = dict(input_ids=tokens, attention_mask=mask)
    logits = adapted(**batch, adapter_names=names, use_cache=keep).logits
    for row, name in enumerate(names):
        text = mask[row].bool()
        prompt = tokens[row][text][None]
        alone = adapted(input_ids=prompt, adapter_names=[name]).logits[0]
        assert_close(logits[row][text], alone, atol=1e-5, rtol=1e-4)
    of_default = adapted(**batch).logits
    change = (of_default[1] - logits[1]).abs().max()
    assert change > 1e-2


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("mixer", ("longhorn", "mamba2", "attention"))
def test_an_adapter_that_starts_at_an_invocation_starts_there_in_padded_rows(mixer, side):
    adapted = adapted_model(mixer, alora_invocation_tokens=[5, 9])
    mask = torch.tensor(MASKS[side])
    tokens = torch.randint(10, 64, (3, 6))
    for row in range(3):  # the adapter acts from the second token on
        positions = mask[row].nonzero()
        second_and_third = positions[1:3, 0]
        tokens[row, second_and_third] = torch.tensor([5, 9])
    with torch.no_grad():  # aLoRA writes into its inputs
        logits = adapted(input_ids=tokens, attention_mask=mask).logits
        for row in range(3):
            text = mask[row].bool()
            prompt = tokens[row][text][None]
            alone = adapted(input_ids=prompt).logits[0]
            assert_close(logits[row][text], alone, atol=1e-5, rtol=1e-4)
        with adapted.disable_adapter():
            base = adapted(input_ids=tokens, attention_mask=mask).logits
    is_first = mask.cumsum(1) == 1
    first = mask.bool() & is_first
    assert_close(logits[first], base[first])
    later = mask.bool() & ~first
    changes = (logits - base)[later].abs()
    assert changes.amax(-1).min() > 1e-3


@pytest.mark.parametrize("kind", ("PromptTuningConfig", "PromptEncoderConfig"))
@pytest.mark.parametrize("mixer", ("longhorn", "attention"))
def test_soft_prompts_stand_before_padding(mixer, kind):
    peft = pytest.importorskip("peft")
    config = LMConfig(64, 32, 2, mixer=mixer)
    model = to_transformers(SequenceLM(config)).eval()
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(model, config).eval()
    tokens = torch.randint(64, (3, 6))
    mask = torch.tensor(MASKS["left"])
    logits = tuned(input_ids=tokens, attention_mask=mask).logits
    options = dict(
        max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    together = tuned.generate(input_ids=tokens, attention_mask=mask, **options)
    for row in range(3):
        text = mask[row].bool()
        alone = tokens[row][text][None]
        parts = [tuned.get_prompt(1), model.model.embedding(alone)]
        by_hand = torch.cat(parts, 1)
        logits_by_hand = model(inputs_embeds=by_hand).logits
        expected = logits_by_hand[0, 4:]
        result = logits[row, 4:][text]
        assert_close(result, expected, atol=1e-5, rtol=1e-4)
        steps = torch.stack(together.logits, 1)[row]
        (expected,) = torch.stack(tuned.generate(input_ids=alone, **options).logits, 1)
        assert_close(steps, expected, atol=1e-5, rtol=1e-4)
    tuned.train()
    labels = tokens.masked_fill(mask == 0, -100)
    tuned(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
    for p in tuned.parameters():
        if p.requires_grad:
            largest = p.grad.abs().max()
            assert largest > 0


def test_prefix_tuning_is_refused_with_its_cause():
    peft = pytest.importorskip("peft")
    model = to_transformers(SequenceLM(LMConfig(64, 32, 2)))
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(model, config)
    message = "prefix tuning gives keys and values of attention, which a recurrent state does not"
    with pytest.raises(ValueError, match=message):
        tuned(input_ids=torch.arange(5)[None])


def test_an_adapted_model_generates_in_training_mode_with_checkpointing_as_in_evaluation():
    adapted = adapted_model()
    prompt = torch.randint(64, (2, 6))
    expected = adapted.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    adapted.gradient_checkpointing_enable()
    assert torch.equal(
        adapted.train().generate(input_ids=prompt, max_new_tokens=6, do_sample=False), expected
    )


@every_mixer
def test_adapters_on_all_linear_layers_learn_in_every_mixer(name):
    "LoRA works for every linear layer: a mixer calls layers or `split_bias`, and reads no weight."
    peft = pytest.importorskip("peft")
    model = to_transformers(SequenceLM(LMConfig(64, 32, 1, mixer=name, d_mlp=32)))
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    adapted = peft.get_peft_model(model, config)
    tokens = torch.arange(20)[None]
    adapters = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    for p in adapters.values():
        torch.nn.init.normal_(p, std=0.1)
    adapted(tokens, labels=tokens).loss.backward()
    plain = SequenceLM(model.config.lm_config())
    layers = plain.modules()
    linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    assert len(adapters) == 2 * len(linear)
    for name, p in adapters.items():
        largest = p.grad.abs().max()
        assert largest > 0, name


@every_family
def test_blocks_can_be_offloaded_to_disk(name, tmp_path):
    "A block whose weights stay on disk until its modules are called gives the same logits."
    pytest.importorskip("accelerate")
    config = LMConfig(64, 16, 2, mixer=name)
    model = to_transformers(SequenceLM(config)).eval()
    tokens = torch.arange(20)[None]
    model.save_pretrained(tmp_path / "model")
    devices = {
        "model.embedding": "cpu",
        "lm_head": "cpu",
        "model.norm": "cpu",
        "model.blocks.0": "cpu",
        "model.blocks.1": "disk",
    }
    options = dict(device_map=devices, offload_folder=tmp_path / "disk")
    offloaded = LonghornForCausalLM.from_pretrained(tmp_path / "model", **options)
    with torch.no_grad():
        expected = model(tokens).logits
        for use_cache in (False, True):
            logits = offloaded(tokens, use_cache=use_cache).logits
            assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["offloaded", "adapted"])
def test_a_tied_embedding_that_is_not_plain_is_called_to_read_out(how):
    model = SequenceLM(LMConfig(40, 16, 2)).eval()
    tokens = torch.randint(40, (2, 7))
    if how == "adapted":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["embedding"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)

    def results(model):
        empty = model.empty_cache(2, "cpu")
        step, _ = model.step(tokens[:, 0], empty)
        losses = [model.loss(tokens, tokens, chunk=chunk) for chunk in (0, 3)]
        return [model(tokens), step, *losses]

    expected = results(model)
    if how == "adapted":
        model = model.merge_and_unload()
    else:
        model = pytest.importorskip("accelerate").cpu_offload(model, "cpu")
    assert_close(results(model), expected)


def test_a_linear_layer_returns_a_tensor():
    model = SequenceLM(LMConfig(50, 32, 1, mixer="longhorn"))
    names = {layer: name for name, layer in model.named_modules()}
    returned = {}

    def note(layer, inputs, output):
        returned[names[layer]] = output

    for layer in names:
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(note)
    model(torch.arange(9)[None])
    projections = ("in_proj", "x_proj", "b_proj", "out_proj")
    expected = {f"blocks.0.mixer.{name}" for name in projections}
    assert returned.keys() == expected
    assert all(isinstance(output, torch.Tensor) for output in returned.values())


def test_padding_of_an_export_is_not_its_end_mark(tmp_path):
    "Collators remove padding from the labels, but the end of a text must remain."
    from transformers import DataCollatorForLanguageModeling

    folder = export(tmp_path / "hf")
    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = []
    for text in ("ab", "abcd"):
        ids = words(text)["input_ids"]
        texts.append({"input_ids": ids + [words.eos_token_id]})
    batch = DataCollatorForLanguageModeling(words, mlm=False)(texts)
    labels = batch["labels"].tolist()
    assert labels == [[-100, -100, 97, 98, 0], [97, 98, 99, 100, 0]]
    assert words.pad_token_id == 255
    assert words.eos_token_id == 0
    assert len(words) == 256
    for config in (model.config, model.generation_config):
        assert config.pad_token_id == 255
        assert config.eos_token_id == 0
    note = "Padding is token 255, which no text contains, and not the end mark (token 0)"
    assert note in (folder / "README.md").read_text()
    expected = [*"ÿ".encode()]
    assert words("ÿ")["input_ids"] == expected
    assert words.decode([97, 255], skip_special_tokens=True) == "a"


def test_padding_takes_a_byte_that_no_longer_token_needs():
    letters = {"ÿ": 0, "xÿ": 1, "þ": 2, "<|endoftext|>": 3}
    assert free_word(letters) == "þ"
    assert free_word({"a": 0}) is None
    words = hf_tokenizer(get_tokenizer("bytes"))
    words.pad_token = words.eos_token  # as in exports of other tools
    assert "Padding is the end mark (token 0)" in padding_note(words)
    assert padding_note(None) == ""


def test_a_card_says_what_the_run_recorded_and_nothing_else(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    run = tmp_path / "run"
    data = str(tmp_path / "text.txt")
    train_lm("laptop", "longhorn", data, run, steps=2, n_layer=1, d_model=32)
    folder = export_checkpoint(run / "model", tmp_path / "hf")
    card = (folder / "README.md").read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    config = json.loads((run / "config.json").read_text())
    record = config["attempts"][-1]
    for fact in (
        f"{last['tokens']:,} seen",
        f"{last['val_loss']:.4f} nats",
        str(record["environment"]["commit"]),
        json.loads((run / "text.json").read_text())["source"],
        "1 block of width 32",
        record["command"],
    ):
        assert fact in card, fact
    settings = json.loads((tmp_path / "hf/generation_config.json").read_text())
    result = settings["eos_token_id"]
    assert result == 0
    config = run / "model/config.json"
    text = config.read_text()
    config.write_text(text.replace('"dropout": 0.0', '"dropout": 0.5'))
    assert run_facts(run / "model") == {}  # the record belongs to another model
    folder = export(tmp_path / "bare")
    card = (folder / "README.md").read_text()
    for row in ("Tokens", "Loss", "Commit", "Data"):
        assert row not in card


def test_saving_in_a_process_with_the_kit_needs_no_file_of_the_kit_beside_it(tmp_path):
    folder = export(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model) is LonghornForCausalLM
    # as transformers does after running a folder's code
    model.register_for_auto_class("AutoModelForCausalLM")
    model.save_pretrained(tmp_path / "copy")
    paths = Path(tmp_path / "copy").iterdir()
    written = {path.name for path in paths}
    assert written == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_longhorn.py",
        "longhorn_source.py",
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc").input_ids == [97, 98, 99]
