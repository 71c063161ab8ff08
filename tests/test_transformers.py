"The bridge to transformers: the same numbers as the kit's model, padded or not, cached or not, saved or not."
import copy, math

import pytest
import torch

pytest.importorskip("transformers")
from mixers import every_mixer
from sweep import slow_case
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.models.transformers import (LonghornConfig, LonghornForCausalLM, from_transformers, spans, to_transformers)
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

pytestmark = pytest.mark.numeric

RECURRENT = ("longhorn", "longhorn_exact", "longhorn_scalar", "mamba")


def make(mixer="longhorn_exact", **options):
    torch.manual_seed(1)
    return SequenceLM(LMConfig(50, 24, 2, mixer=mixer, **options)).eval()


def padded(*lengths, side="left", seed=0):
    "Prompts of these lengths in one batch, their mask, and the prompts alone."
    generator = torch.Generator().manual_seed(seed)
    alone = [torch.randint(50, (1, length), generator=generator) for length in lengths]
    fill = [(max(lengths) - n, 0) if side == "left" else (0, max(lengths) - n) for n in lengths]
    pad = lambda t, by, value: torch.nn.functional.pad(t, by, value=value)
    tokens = torch.cat([pad(t, by, 7) for t, by in zip(alone, fill)])
    mask = torch.cat([pad(torch.ones_like(t), by, 0) for t, by in zip(alone, fill)])
    return tokens, mask, alone


@pytest.mark.parametrize("mixer, options", [*((name, {}) for name in (*RECURRENT, "attention")), ("longhorn", dict(key_norm=True))])
@pytest.mark.parametrize("tied", (True, False))
def test_logits_and_gradients_are_those_of_the_kit(mixer, options, tied):
    lm = make(mixer, tie_embeddings=tied, d_mlp=32, mixer_options=options)
    hf, tokens = to_transformers(lm), torch.randint(50, (2, 9))
    out = hf(tokens, labels=tokens)
    logits, loss = lm(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(out.logits[:, :-1], logits)
    torch.testing.assert_close(out.loss, loss)
    out.loss.backward()
    loss.backward()
    for name, parameter in lm.named_parameters():
        ours = hf.get_parameter(name if name.startswith("lm_head") else f"model.{name}")
        torch.testing.assert_close(ours.grad, parameter.grad, msg=name)
    half = SequenceLM(lm.config, dtype=torch.bfloat16)
    for before, back in ((lm, from_transformers(hf)), (half, from_transformers(to_transformers(half)))):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before.state_dict().values(), back.state_dict().values(), strict=True))


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("side", ("left", "right"))
def test_a_padded_row_gives_what_it_gives_alone(mixer, side):
    hf = to_transformers(make(mixer))
    tokens, mask, alone = padded(3, 8, 3, 5, side=side)
    for keep in (True, False):
        out = hf(tokens, attention_mask=mask, use_cache=keep)
        for row, prompt in zip(range(4), alone):
            torch.testing.assert_close(out.logits[row][mask[row].bool()], hf(prompt).logits[0])
    for layer, single in zip(out.past_key_values.layers if keep else hf(tokens, mask).past_key_values.layers,
                             hf(alone[1]).past_key_values.layers):
        torch.testing.assert_close(layer.state.S[1:2], single.state.S)


@every_mixer
@pytest.mark.parametrize("lengths, rows", [((4, 9, 6), 3), slow_case((3, 5), 1), ((3, 3, 5), 2)])
def test_generation_from_a_padded_batch_is_that_from_each_prompt(name, lengths, rows):
    "In transformers, generation from a padded batch gives each prompt the tokens that it gets alone (also where all rows are padded alike: of the last batches only those are given)."
    hf, lm = to_transformers(make(name)), make(name)
    tokens, mask, alone = (t[:rows] for t in padded(*lengths))
    options = dict(max_new_tokens=7, do_sample=False, output_logits=True, return_dict_in_generate=True)
    together = hf.generate(tokens, attention_mask=mask, **options)
    careless = hf.generate(tokens, attention_mask=torch.ones_like(mask), **options)
    for row, prompt in enumerate(alone):
        own, logits = lm.generate(prompt, 7, temperature=0), torch.cat(hf.generate(prompt, **options).logits)
        assert torch.equal(together.sequences[row, max(lengths):], own[0, -7:])
        torch.testing.assert_close(torch.stack([step[row] for step in together.logits]), logits, rtol=1e-4, atol=1e-5)
        if len(prompt[0]) < max(lengths): # an untrained model says the same words whatever it has read; its logits tell
            assert (careless.logits[0][row] - logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("mixer", ("longhorn", "attention"))
def test_a_row_without_a_text_disturbs_no_other(mixer):
    hf = to_transformers(make(mixer))
    tokens, mask, alone = padded(4, 6)
    mask[0] = 0
    torch.testing.assert_close(hf(tokens, attention_mask=mask, use_cache=True).logits[1], hf(alone[1]).logits[0])


def test_an_export_knows_where_a_text_ends_and_what_is_padding(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from longhorn_kit.lab.data import get_tokenizer
    from longhorn_kit.lab.evaluation import hf_tokenizer
    from longhorn_kit.models import LMConfig, SequenceLM
    from longhorn_kit.models.transformers import export_folder
    words = hf_tokenizer(get_tokenizer("bytes"))
    folder = export_folder(SequenceLM(LMConfig(256, 16, 1)), tmp_path / "hf", words)
    again, read = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert read.padding_side == "left" and again.generation_config.eos_token_id == again.config.pad_token_id == words.eos_token_id
    mine = to_transformers(make("longhorn"))
    mine.generation_config.eos_token_id = [7, 9]
    export_folder(mine, tmp_path / "mine", words)
    assert mine.generation_config.eos_token_id == [7, 9]


def test_attention_leaves_padding_out_when_it_reads_and_when_it_goes_on():
    hf = to_transformers(make("attention"))
    tokens, mask, alone = padded(3, 8, 3, 5)
    out, more = hf(tokens, attention_mask=mask, use_cache=True), torch.randint(50, (4, 2))
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    after = hf(more, attention_mask=longer, past_key_values=out.past_key_values).logits
    for row, prompt in enumerate(alone):
        own = hf(torch.cat([prompt, more[row:row + 1]], 1)).logits[0]
        torch.testing.assert_close(torch.cat([out.logits[row][mask[row].bool()], after[row]]), own)


@pytest.mark.parametrize("mixer", ("longhorn", "attention", "retnet", "rwkv6", "mamba2", "gated_deltanet"))
def test_beams_follow_their_states(mixer):
    lm = make(mixer)
    for parameter in lm.parameters():
        parameter.data *= 3 # what came before matters, so beams with wrong states choose other tokens
    hf, prompt = to_transformers(lm), torch.randint(50, (2, 6))
    options = dict(max_new_tokens=12, num_beams=4, do_sample=False, num_return_sequences=2)
    with_cache = hf.generate(prompt, **options)
    without = hf.generate(prompt, use_cache=False, **options)
    assert torch.equal(with_cache, without)


def test_a_cache_goes_on_over_several_calls():
    hf, tokens = to_transformers(make()), torch.randint(50, (2, 12))
    whole = hf(tokens).logits
    cache, pieces = None, []
    for part in tokens.split((5, 1, 6), dim=1):
        out = hf(part, past_key_values=cache, use_cache=True)
        cache, pieces = out.past_key_values, pieces + [out.logits]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("mixer", ("longhorn_exact", "attention"))
def test_a_repeated_state_goes_on_as_the_prompt_would(mixer):
    hf, prompts, more = to_transformers(make(mixer)), torch.randint(50, (2, 5)), torch.randint(50, (6, 2))
    cache = hf(prompts, use_cache=True).past_key_values
    cache.batch_repeat_interleave(3)
    whole = hf(torch.cat([prompts.repeat_interleave(3, 0), more], 1)).logits[:, 5:]
    torch.testing.assert_close(hf(more, past_key_values=cache).logits, whole)


def test_gradient_checkpointing_changes_no_gradient():
    hf, tokens = to_transformers(make()).train(), torch.randint(50, (2, 10))
    hf(tokens, labels=tokens).loss.backward()
    expected = [p.grad.clone() for p in hf.parameters()]
    hf.zero_grad()
    hf.gradient_checkpointing_enable()
    hf(tokens, labels=tokens).loss.backward()
    for a, p in zip(expected, hf.parameters(), strict=True):
        torch.testing.assert_close(p.grad, a)


def test_trainer_trains_it(tmp_path):
    hf = to_transformers(make())
    data = [dict(input_ids=torch.arange(i, i + 16) % 50, labels=torch.arange(i, i + 16) % 50) for i in range(32)]
    arguments = TrainingArguments(tmp_path, max_steps=12, per_device_train_batch_size=8, learning_rate=1e-2,
                                  report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1)
    trainer = Trainer(hf, arguments, train_dataset=data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_trainer_counts_every_label_once_over_parts_of_a_step(tmp_path):
    start = to_transformers(make("longhorn")).train()
    row = lambda i: dict(input_ids=torch.arange(i, i + 16) % 50,
                         labels=torch.where(torch.arange(16) < 3 * i, -100, torch.arange(i, i + 16) % 50))
    def trained(parts):
        hf = copy.deepcopy(start)
        arguments = TrainingArguments(tmp_path, max_steps=1, per_device_train_batch_size=4 // parts, learning_rate=1.0,
                                      gradient_accumulation_steps=parts, optim="sgd", max_grad_norm=0, report_to=[],
                                      use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant")
        Trainer(hf, arguments, train_dataset=[row(i) for i in range(4)]).train()
        return hf
    whole, parts = trained(1), trained(4)
    for a, b, before in zip(whole.parameters(), parts.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert not torch.equal(a, before)


def test_weights_that_a_file_lacks_are_drawn_like_the_kits(tmp_path):
    hf = to_transformers(make())
    state = {name: t for name, t in hf.state_dict().items() if "blocks.1" not in name and name != "lm_head.weight"}
    hf.save_pretrained(tmp_path, state_dict=state)
    again = LonghornForCausalLM.from_pretrained(tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if "blocks.1" not in name:
            assert torch.equal(parameter, hf.get_parameter(name))
    fresh = again.model.blocks[1].mixer
    assert torch.equal(fresh.D_skip, torch.ones_like(fresh.D_skip)) and fresh.in_proj.weight.std() > 0.05


def test_auto_classes_know_the_model(tmp_path):
    to_transformers(make("mamba")).save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LonghornConfig)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model.config.mixer == "mamba"
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


def test_bad_input_is_one_line():
    hf, attention, (tokens, mask, _) = to_transformers(make()), to_transformers(make("attention")), padded(3, 5, side="right")
    for wrong, message in (
            (lambda: spans(torch.tensor([[1, 0, 1]]), 1, 3, True), "attention_mask has a gap"),
            (lambda: hf(tokens, attention_mask=mask[:1]), r"attention_mask has shape \(1, 5\); expected a tensor \(B, T\) with 2 rows"),
            (lambda: attention(tokens[:1], attention_mask=mask, use_cache=False), r"attention_mask has shape \(2, 5\); expected .* with 1 rows"),
            (lambda: hf(tokens, attention_mask=mask.tolist()), "attention_mask is list; expected a tensor"),
            (lambda: hf(torch.tensor([[0, 50]])), "tokens has values from 0 to 50; expected 0 to 49"), (hf, "expected either"),
            (lambda: LonghornForCausalLM(LonghornConfig(mixer="rnn")), "known mixers"),
            (lambda: hf(tokens, past_key_values=DynamicCache()), "past_key_values is a DynamicCache; leave it out"),
            (lambda: attention(tokens, attention_mask=mask, use_cache=True),
             "pad in front, give prompts of one length at a time, or pass use_cache=False")):
        with pytest.raises(ValueError, match=message):
            wrong()


def left_padded(vocab_size=31):
    "Two texts of 4 and 7 tokens, as a batch for `forward`; every token of a text is a label."
    tokens, mask = torch.randint(1, vocab_size, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    return dict(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))


@pytest.mark.parametrize("mixer", ["longhorn", "mamba2", "attention"])
def test_padding_predicts_every_token_alike_and_a_label_behind_it_counts(mixer):
    torch.manual_seed(0)
    model, batch = LonghornForCausalLM(LonghornConfig(vocab_size=31, d_model=16, n_layer=1, mixer=mixer)).eval(), left_padded()
    alone = [model(row[None], labels=row[None]).loss for row in (batch["input_ids"][0, 3:], batch["input_ids"][1])]
    for keep in (True, False):
        found = model(**batch, use_cache=keep).loss
        torch.testing.assert_close(found, (3 * alone[0] + 6 * alone[1] + math.log(31)) / 10)
    batch["labels"][0, 3] = -100 # whoever does not want it
    torch.testing.assert_close(model(**batch).loss, (3 * alone[0] + 6 * alone[1]) / 9)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 2\); expected a tensor \(B, T\)"):
        model(batch["input_ids"], attention_mask=torch.ones(2, 2))
    for model in (model, model.model): # packed rows would leak
        tokens = torch.arange(5)[None]
        model(tokens, position_ids=tokens)
        with pytest.raises(ValueError, match="position_ids is given, but texts packed in one row"):
            model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1]]))
        with pytest.raises(ValueError, match="seq_idx is given, but texts packed in one row"):
            model(batch["input_ids"], seq_idx=torch.zeros(2, 7))


@pytest.mark.parametrize("mixer", ["llama", "longhorn", "attention"])
def test_trainer_counts_the_labels_of_a_padded_batch_that_the_loss_counts(mixer, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2)) if mixer == "llama" else LonghornForCausalLM(
        LonghornConfig(vocab_size=31, d_model=16, n_layer=1, mixer=mixer))
    batch = left_padded()
    trainer = Trainer(model, TrainingArguments(tmp_path, report_to=[], use_cpu=True))
    counted = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    torch.testing.assert_close(model(**batch, num_items_in_batch=counted).loss, model(**batch).loss)


@pytest.mark.parametrize("learning", (False, True))
def test_an_exported_model_equals_the_eager_one_at_any_batch_and_length(learning):
    from exported import assert_exported_equals_eager
    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=50, d_model=32, n_layer=2, mixer="longhorn_exact", use_cache=False)
    assert_exported_equals_eager(LonghornForCausalLM(config), lambda B, T: torch.randint(0, 50, (B, T)), learning)
