"Folders for other people: with the kit and without it, fine-tuned, with adapters, and with a card that invents nothing."
import inspect, json, os, subprocess, sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from longhorn_kit.lab.data import get_tokenizer
from longhorn_kit.lab.evaluation import export_checkpoint, hf_tokenizer
from longhorn_kit.lab.language_training import train_lm
from mixers import every_mixer
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.models.files import run_facts
from longhorn_kit.models.transformers import LonghornForCausalLM, export_folder, to_transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

WITHOUT_KIT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "longhorn_kit": raise ModuleNotFoundError("No module named 'longhorn_kit'", name=name)
sys.meta_path.insert(0, Absent())
try: import torchvision
except Exception: sys.modules["torchvision"] = None # an extension built for another PyTorch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
"""


def export(folder, mixer="longhorn_exact", **options):
    torch.manual_seed(1)
    return export_folder(SequenceLM(LMConfig(256, 32, 2, mixer=mixer, **options)), folder, hf_tokenizer(get_tokenizer("bytes")))


def outputs(folder):
    "Logits and greedy tokens of a saved model."
    model, prompt = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), torch.arange(30, 50)[None]
    return model(prompt).logits.detach(), model.generate(prompt, max_new_tokens=8, do_sample=False)


def finetune(folder, out):
    "Train with checkpoints; resume from the first one; save both; return the folders."
    from transformers import Trainer, TrainingArguments
    data = [dict(input_ids=torch.arange(i, i + 16), labels=torch.arange(i, i + 16)) for i in range(16)]
    options = dict(per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True)
    for name, start in (("whole", None), ("resumed", f"{out}/whole/checkpoint-2")):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        arguments = TrainingArguments(f"{out}/{name}", max_steps=4, save_steps=2, **options)
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=start)
        model.save_pretrained(f"{out}/{name}/saved")
    return [f"{out}/whole/checkpoint-4", f"{out}/whole/saved", f"{out}/resumed/saved"]


def in_python_without_the_kit(code, tmp_path):
    "Run code; return what it saves as `found`."
    functions = "\n".join(map(inspect.getsource, (outputs, finetune)))
    script = f"{WITHOUT_KIT}\n{functions}\n{code}\ntorch.save(found, {str(tmp_path / 'found.pt')!r})\n"
    cache = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=cache)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "found.pt")


@pytest.mark.parametrize("options", ({}, dict(key_norm=True)))
def test_an_export_runs_and_is_saved_again_where_the_kit_is_not_installed(options, tmp_path):
    folder = export(tmp_path / "hf", mixer_options=options)
    code = f"""
again = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
AutoTokenizer.from_pretrained({str(folder)!r}) # a question would be an end of file here
again.save_pretrained("again")
found = [outputs({str(folder)!r}), outputs("again"), sys.modules["longhorn_kit"].__file__]
"""
    *found, place = in_python_without_the_kit(code, tmp_path)
    assert place == "longhorn_source/longhorn_kit.py"
    for logits, tokens in (*found, outputs(tmp_path / "again")):
        torch.testing.assert_close(logits, outputs(folder)[0])
        assert torch.equal(tokens, outputs(folder)[1])
    names = ("modeling_longhorn.py", "longhorn_source.py", "config.json", "generation_config.json")
    assert all((folder / name).read_text() == (tmp_path / "again" / name).read_text() for name in names)


@pytest.mark.slow
def test_training_and_resuming_survives_every_change_between_with_and_without_the_kit(tmp_path):
    folder, ours, theirs = export(tmp_path / "hf"), tmp_path / "ours", tmp_path / "theirs"
    made = finetune(folder, ours)
    code = f"found = [(name, outputs(name)) for name in {made} + finetune({str(folder)!r}, {str(theirs)!r})]"
    found = dict(in_python_without_the_kit(code, tmp_path))
    before = outputs(folder)[0]
    for name, (logits, tokens) in found.items():
        with_kit = outputs(name)
        torch.testing.assert_close(logits, with_kit[0], msg=name)
        assert torch.equal(tokens, with_kit[1]), name
        torch.testing.assert_close(logits, found[made[0]][0], msg=f"{name} is trained otherwise")
        assert (logits - before).abs().max() > 0.1


@pytest.mark.parametrize("targets", [["in_proj", "x_proj", "b_proj", "out_proj", "embedding"], "all-linear"])
@pytest.mark.parametrize("mixer", ["longhorn", "longhorn_scalar", "mamba"])
def test_adapters_reach_every_projection_and_are_saved_loaded_and_merged(mixer, targets, tmp_path):
    peft = pytest.importorskip("peft")
    if mixer == "mamba" and targets != "all-linear":
        targets = ["in_proj", "dt_proj", "embedding"]
    folder, tokens = export(tmp_path / "hf", mixer, tie_embeddings=targets == "all-linear"), torch.arange(40, 60)[None]
    base, rows = AutoModelForCausalLM.from_pretrained(folder), [1, 2] if targets == "all-linear" else None
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, trainable_token_indices=rows, r=4))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    start, changed = adapted(tokens).logits.detach(), [p for name, p in adapted.named_parameters() if "lora_B" in name]
    for _ in range(3):
        optimizer.zero_grad()
        adapted(tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert len(changed) == 2 * (2 if "dt_proj" in targets else 4) and all(p.abs().max() > 0 for p in changed)
    trained = adapted.eval()(tokens).logits
    assert (trained - start).abs().max() > 1e-2
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(tokens).logits, trained)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    logits, sequence = outputs(tmp_path / "merged")
    prompt = torch.arange(30, 50)[None]
    torch.testing.assert_close(logits, adapted(prompt).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(sequence, adapted.generate(input_ids=prompt, max_new_tokens=8, do_sample=False))


@every_mixer
def test_adapters_on_all_linear_layers_learn_in_every_mixer(name):
    "LoRA on `all-linear` reaches every linear layer: the layer calls its layers, or `bias_apart`, and does not read their weights."
    peft = pytest.importorskip("peft")
    model = to_transformers(SequenceLM(LMConfig(64, 32, 1, mixer=name, d_mlp=32)))
    adapted, tokens = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)), torch.arange(20)[None]
    adapters = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    for p in adapters.values():
        torch.nn.init.normal_(p, std=0.1)
    adapted(tokens, labels=tokens).loss.backward()
    linear = [name for name, layer in SequenceLM(model.config.lm_config()).named_modules() if isinstance(layer, torch.nn.Linear)]
    assert len(adapters) == 2 * len(linear) and not [name for name, p in adapters.items() if not p.grad.abs().max() > 0]


@every_mixer
def test_blocks_can_be_offloaded_to_disk(name, tmp_path):
    "A block whose weights stay on disk until its modules are called gives the same logits, with a cache and without."
    pytest.importorskip("accelerate")
    model, tokens = to_transformers(SequenceLM(LMConfig(64, 16, 2, mixer=name))).eval(), torch.arange(20)[None]
    model.save_pretrained(tmp_path / "model")
    places = {"model.embedding": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.blocks.0": "cpu", "model.blocks.1": "disk"}
    other = LonghornForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    with torch.no_grad():
        for use_cache in (False, True):
            torch.testing.assert_close(other(tokens, use_cache=use_cache).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["offloaded", "adapted"])
def test_a_tied_embedding_that_is_not_plain_is_called_to_read_out(how):
    model, tokens, peft = SequenceLM(LMConfig(40, 16, 2)).eval(), torch.randint(40, (2, 7)), pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["embedding"], init_lora_weights=False)) if how == "adapted" else model
    outputs = lambda: (model(tokens), model.step(tokens[:, 0], model.empty_cache(2, "cpu"))[0], *(model.loss(tokens, tokens, chunk=n) for n in (0, 3)))
    want = outputs()
    model = pytest.importorskip("accelerate").cpu_offload(model, "cpu") if how == "offloaded" else model.merge_and_unload()
    torch.testing.assert_close(outputs(), want)


def test_a_linear_layer_returns_a_tensor():
    model = SequenceLM(LMConfig(50, 32, 1, mixer="longhorn"))
    returned = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, out, name=name: returned.update({name: out}))
    model(torch.arange(9)[None])
    assert set(returned) == {f"blocks.0.mixer.{name}" for name in ("in_proj", "x_proj", "b_proj", "out_proj")}
    assert all(isinstance(out, torch.Tensor) for out in returned.values())


def test_a_card_says_what_the_run_recorded_and_nothing_else(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    train_lm("laptop", "longhorn", str(tmp_path / "text.txt"), tmp_path / "run", steps=2, n_layer=1, d_model=32)
    card = (export_checkpoint(tmp_path / "run/model", tmp_path / "hf") / "README.md").read_text()
    last = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
    record = json.loads((tmp_path / "run/config.json").read_text())["attempts"][-1]
    for known in (f"{last['tokens']:,} seen", f"{last['val_loss']:.4f} nats", str(record["environment"]["commit"]),
                  json.loads((tmp_path / "run/text.json").read_text())["source"], "1 block of width 32", record["command"]):
        assert known in card, known
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == 0
    shape = tmp_path / "run/model/config.json"
    shape.write_text(shape.read_text().replace('"dropout": 0.0', '"dropout": 0.5'))
    assert run_facts(tmp_path / "run/model") == {} # a record of another model
    assert not any(row in (export(tmp_path / "bare") / "README.md").read_text() for row in ("Tokens", "Loss", "Commit", "Data"))


def test_saving_in_a_process_with_the_kit_needs_no_file_of_the_kit_beside_it(tmp_path):
    folder = export(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model) is LonghornForCausalLM
    model.register_for_auto_class("AutoModelForCausalLM") # as transformers does after running a folder's code
    model.save_pretrained(tmp_path / "again")
    made = {path.name for path in Path(tmp_path / "again").iterdir()}
    assert made == {"config.json", "generation_config.json", "model.safetensors", "modeling_longhorn.py", "longhorn_source.py"}
    assert AutoTokenizer.from_pretrained(folder)("abc").input_ids == [97, 98, 99]
