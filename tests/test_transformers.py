"Models in transformers give the kit's numbers: padded or not, cached or not, saved or not."

import copy
import math

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")
from longhorn_kit.models import LMConfig, SequenceLM
from longhorn_kit.models.mixer import CacheSlot, Mixer, TextMask
from longhorn_kit.models.transformers import (
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    from_transformers,
    read_mask,
    to_transformers,
)
from mixers import every_family, every_family_of_kit, every_mixer
from sweep import slow_case

# isort: split
# The kit has corrected torchvision, which transformers imports.
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

pytestmark = pytest.mark.numeric

RECURRENT = ("longhorn", "longhorn_exact", "longhorn_scalar", "mamba")
GREEDY_WITH_LOGITS = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)


def make(mixer="longhorn_exact", **options):
    torch.manual_seed(1)
    return SequenceLM(LMConfig(50, 24, 2, mixer=mixer, **options)).eval()


def padded(*lengths, side="left", seed=0):
    "Return prompts of these lengths in one batch, the mask, and the separate prompts."
    generator = torch.Generator().manual_seed(seed)
    alone = [torch.randint(50, (1, length), generator=generator) for length in lengths]
    missing = [max(lengths) - n for n in lengths]
    fill = [(n, 0) if side == "left" else (0, n) for n in missing]

    def pad(t, by, value):
        return torch.nn.functional.pad(t, by, value=value)

    padded_texts = [pad(t, by, 7) for t, by in zip(alone, fill)]
    tokens = torch.cat(padded_texts)
    masks = [pad(torch.ones_like(t), by, 0) for t, by in zip(alone, fill)]
    mask = torch.cat(masks)
    return tokens, mask, alone


@pytest.mark.parametrize(
    "mixer, options",
    [*((name, {}) for name in (*RECURRENT, "attention")), ("longhorn", dict(key_norm=True))],
)
@pytest.mark.parametrize("tied", (True, False))
def test_logits_and_gradients_are_those_of_the_kit(mixer, options, tied):
    lm = make(mixer, tie_embeddings=tied, d_mlp=32, mixer_options=options)
    hf = to_transformers(lm)
    tokens = torch.randint(50, (2, 9))
    out = hf(tokens, labels=tokens)
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    logits, loss = lm(inputs, targets)
    predicting = out.logits[:, :-1]
    assert_close(predicting, logits)
    assert_close(out.loss, loss)
    out.loss.backward()
    loss.backward()
    for name, parameter in lm.named_parameters():
        name_here = name if name.startswith("lm_head") else f"model.{name}"
        converted = hf.get_parameter(name_here)
        assert_close(converted.grad, parameter.grad, msg=name)
    assert_same_state(from_transformers(hf), lm)
    half = SequenceLM(lm.config, dtype=torch.bfloat16)
    assert_same_state(from_transformers(to_transformers(half)), half)


def assert_same_state(model, expected):
    state = model.state_dict()
    expected_state = expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
        assert state[name].dtype == value.dtype, name


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("side", ("left", "right"))
def test_a_padded_row_gives_what_it_gives_alone(mixer, side):
    hf = to_transformers(make(mixer))
    tokens, mask, alone = padded(3, 8, 3, 5, side=side)
    for keep in (True, False):
        out = hf(tokens, attention_mask=mask, use_cache=keep)
        for row, prompt in zip(range(4), alone):
            is_text = mask[row].bool()
            logits = out.logits[row][is_text]
            expected = hf(prompt).logits[0]
            assert_close(logits, expected)
    batch_layers = hf(tokens, mask).past_key_values.layers
    single_layers = hf(alone[1]).past_key_values.layers
    for layer, single in zip(batch_layers, single_layers):
        state = layer.get().S[1:2]
        expected = single.get().S
        assert_close(state, expected)


@every_family
@pytest.mark.parametrize("lengths, rows", [((4, 9, 6), 3), slow_case((3, 5), 1), ((3, 3, 5), 2)])
def test_generation_from_a_padded_batch_is_that_from_each_prompt(name, lengths, rows):
    "In transformers, generation from a padded batch gives the tokens of separate prompts."
    # with fewer rows than lengths, all rows have equal padding
    hf = to_transformers(make(name))
    lm = make(name)
    batch = padded(*lengths)
    tokens, mask, alone = (t[:rows] for t in batch)
    options = dict(max_new_tokens=7, **GREEDY_WITH_LOGITS)
    together = hf.generate(tokens, attention_mask=mask, **options)
    careless = hf.generate(tokens, attention_mask=torch.ones_like(mask), **options)
    for row, prompt in enumerate(alone):
        expected = lm.generate(prompt, 7, temperature=0)
        steps = hf.generate(prompt, **options).logits
        logits = torch.cat(steps)
        continued = together.sequences[row, max(lengths) :]
        tokens_alone = expected[0, -7:]
        assert torch.equal(continued, tokens_alone)
        of_row = torch.stack([step[row] for step in together.logits])
        assert_close(of_row, logits, rtol=1e-4, atol=1e-5)
        if prompt.shape[1] < max(lengths):
            # an untrained model generates the same tokens for any prompt, but its logits differ
            difference = careless.logits[0][row] - logits[0]
            change = difference.abs().max()
            assert change > 1e-3


def scattered(rows=5, length=14, seed=0):
    "Return a mask with zeros anywhere, a full row, an empty row, and padding on one side."
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=generator) < 0.6
    mask[0] = True
    mask[1] = False
    mask[2, :5] = False
    mask[3, 9:] = False
    return mask.long()


@every_family_of_kit
def test_padding_anywhere_gives_each_row_what_its_text_gives_alone(name):
    "Zeros in a mask are skipped: outputs and gradients are those of separate texts."
    hf = to_transformers(make(name)).double()
    tokens = torch.randint(50, (5, 20))
    mask = scattered(length=20)
    batches = []
    mixer = hf.model.blocks[0].mixer
    mixer.out_proj.register_forward_hook(lambda layer, inputs, y: batches.append(y.shape[:2]))
    mixer.register_forward_pre_hook(lambda layer, inputs: batches.append(inputs[0].shape[:2]))
    first_tokens = tokens[:, :14]
    first_mask = mask[:, :14]
    first = hf(first_tokens, attention_mask=first_mask, use_cache=True)
    cache = first.past_key_values
    then_tokens = tokens[:, 14:18]
    then_mask = mask[:, :18]
    then = hf(then_tokens, attention_mask=then_mask, past_key_values=cache)
    last_tokens = tokens[:, 18:]
    last = hf(last_tokens, past_key_values=then.past_key_values)  # without padding from here on
    expected = [(5, 14)] * 2 + [(5, 4)] * 2 + [(5, 2)] * 2
    assert batches == expected
    mask[:, 18:] = 1
    is_text = mask.bool()
    parts = [first.logits, then.logits, last.logits]
    together = torch.cat(parts, 1)
    whole = hf(tokens, attention_mask=mask).logits
    whole_text = whole[is_text]
    together_text = together[is_text]
    assert_close(whole_text, together_text)
    weight = torch.randn_like(together) * mask[..., None]
    outputs = []
    for row, text in enumerate(is_text):
        prompt = tokens[row][text][None]
        alone = hf(prompt).logits[0]
        result = together[row][text]
        assert_close(result, alone)
        weighted = alone * weight[row][text]
        outputs.append(weighted.sum())

    def gradients(value):
        return torch.autograd.grad(value, hf.parameters(), allow_unused=True)

    result = gradients((together * weight).sum())
    expected = gradients(sum(outputs))
    assert_close(result, expected)
    careless = hf(tokens, use_cache=False).logits  # the padding matters
    for row in (2, 4):
        change = (careless - together)[row][is_text[row]]
        largest = change.abs().max()
        assert largest > 1e-4


class Running(Mixer):
    "Mixer that ignores padding and sums over all tokens."

    def __init__(self, d_model):
        super().__init__(d_model)
        self.out_proj = torch.nn.Linear(d_model, d_model)

    def empty_cache(self, batch_size, device=None, dtype=None):
        return (self.zeros(device, dtype, batch_size, self.d_model),)

    def run(self, x, cache=None, keep_cache=False):
        y = x.cumsum(1) + (0 if cache is None else cache[0][:, None])
        last = y[:, -1]
        return self.out_proj(y), (last,) if keep_cache else None


@pytest.mark.parametrize("empty", (False, True))
def test_a_mixer_that_does_not_know_of_padding_gets_texts_moved_together(empty):
    mixer = Running(6)
    x = torch.randn(5, 14, 6)
    mask = scattered().bool()
    mask = mask & False if empty else mask
    slot = CacheSlot(None)
    text = TextMask.read(mask)
    kept = mixer(x, slot=slot, text=text)
    read = mixer(x, text=text)
    assert not mixer.reads_text
    for row in range(5):
        y = mixer.prefill(x[row][mask[row]][None])[0] if mask[row].any() else None
        cache = slot.after[0][row]
        state_of_text = x[row][mask[row]].sum(0)
        assert_close(cache, state_of_text)
        if y is not None:
            outputs = kept[row][mask[row]]
            assert_close(outputs, y[0])
            outputs = read[row][mask[row]]
            assert_close(outputs, y[0])


def test_a_growing_cache_that_does_not_know_of_padding_is_refused_in_one_sentence():
    class Growing(Running):
        def run(self, x, cache=None, keep_cache=False):
            return x, (x if cache is None else torch.cat([cache[0].reshape(len(x), -1, 6), x], 1),)

    mixer = Growing(6)
    mask = scattered().bool()
    with pytest.raises(
        ValueError,
        match="texts that end at different positions cannot share this mixer's growing cache",
    ):
        x = torch.randn(5, 14, 6)
        text = TextMask.read(mask)
        mixer(x, slot=CacheSlot(None), text=text)


@pytest.mark.parametrize("mixer", ("longhorn", "attention"))
def test_generation_after_padding_behind_or_inside_prompts(mixer):
    hf = to_transformers(make(mixer))
    tokens, mask, alone = padded(3, 8, 5, side="right")
    gap = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1]] * 3)
    options = dict(max_new_tokens=5, **GREEDY_WITH_LOGITS)
    with_gaps = [row[gap[0].bool()][None] for row in tokens]
    for given, texts in ((mask, alone), (gap, with_gaps)):
        for keep in (True, False):
            together = hf.generate(tokens, attention_mask=given, use_cache=keep, **options)
            logits = torch.stack(together.logits, 1)
            for row, text in enumerate(texts):
                steps = hf.generate(text, **options).logits
                (expected,) = torch.stack(steps, 1)
                assert_close(logits[row], expected, rtol=1e-4, atol=1e-5)
    hf.config.pad_token_id = 7
    hf.generation_config.pad_token_id = 7  # transformers then infers a mask from a prompt
    prompt = torch.tensor([[5, 7, 9, 3]])
    options = dict(max_new_tokens=5, do_sample=False)
    result = hf.generate(prompt, **options)
    continued = result[:, 4:]
    text = prompt[:, [0, 2, 3]]
    without_padding = hf.generate(text, **options)[:, 3:]
    assert torch.equal(continued, without_padding)


def test_padding_shows_the_last_text_token_before_it():
    hf = to_transformers(make())
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 1, 0, 1, 0]])
    out = hf(tokens, attention_mask=mask, labels=tokens, output_hidden_states=True)
    text = tokens[:, [1, 3]]
    alone = hf(text, output_hidden_states=True)
    results = (out.logits, *out.hidden_states)
    references = (alone.logits, *alone.hidden_states)
    for result, expected in zip(results, references, strict=True):
        shown = result[0, 1:]
        last_text = expected[0, [0, 0, 1, 1]]
        assert_close(shown, last_text)
        assert not result[0, 0].any()
    loss_of_text = hf(text, labels=text).loss  # label 4 follows token 2 across the gap
    labels = tokens.masked_fill(mask == 0, -100)
    loss = hf(tokens, attention_mask=mask, labels=labels).loss
    total_loss = loss_of_text + math.log(50)
    assert_close(loss * 2, total_loss)


def test_values_at_padding_that_are_not_finite_do_not_spread():
    hf = to_transformers(make())
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    rows = torch.randn(2, 3, 24)
    expected = hf(inputs_embeds=rows, attention_mask=mask).logits
    rows[mask == 0] = torch.nan
    logits = hf(inputs_embeds=rows, attention_mask=mask).logits
    assert_close(logits, expected)


def collated(texts, **options):
    "Pack texts of these lengths by transformers' collator."
    collate = DataCollatorWithFlattening(return_tensors="pt", **options)
    rows = [dict(input_ids=text[0].tolist()) for text in texts]
    return collate(rows)


def packed_row():
    "Return a row of four texts, the texts, and the texts' bounds, positions and numbers."
    _, _, texts = padded(4, 7, 1, 8)
    bounds = torch.tensor([0, 4, 11, 12, 20])
    counts = [torch.arange(text.shape[1]) for text in texts]
    positions = torch.cat(counts)[None]
    numbers = torch.repeat_interleave(torch.arange(4), bounds.diff())
    number = numbers[None]
    return torch.cat(texts, 1), texts, bounds, positions, number


@every_family
def test_packed_texts_share_no_state(name):
    "Every way to mark packed texts gives the results of separate texts."
    hf = to_transformers(make(name)).double()
    row, texts, bounds, positions, number = packed_row()
    logits = [hf(text).logits for text in texts]
    alone = torch.cat(logits, 1)
    of_queries = dict(cu_seq_lens_q=bounds.int(), max_length_q=8)
    of_keys = dict(cu_seq_lens_k=bounds.int(), max_length_k=8)
    ways = [
        dict(cu_seqlens=bounds),
        of_queries | of_keys,
        dict(seq_idx=number.int()),
        dict(position_ids=positions),
        dict(position_ids=positions + 3, seq_idx=number),
    ]
    ones = torch.ones_like(row)
    for way in ways:
        out = hf(row, **way)
        assert_close(out.logits, alone)
        assert out.past_key_values is None
        features = hf.model(row, **way).last_hidden_state
        stream = hf.model(row, attention_mask=ones, output_hidden_states=True, **way).hidden_states
        assert_close(stream[-1], features)
    positions_of_row = torch.arange(20)[None]
    one_text = hf(row, position_ids=positions_of_row).logits
    change = (one_text - alone).abs().max()
    assert change > 1e-4
    # two rows: a row starts a text too, so the second text is cut
    two = row.view(2, 10)
    expected = alone.clone()
    start = texts[1][:, :6]
    expected[:, 4:10] = hf(start).logits
    end = texts[1][:, 6:]
    expected[:, 10:11] = hf(end).logits
    expected = expected.view(2, 10, -1)
    result = hf(two, seq_idx=number.view(2, 10)).logits
    assert_close(result, expected)
    result = hf(two, position_ids=positions.view(2, 10)).logits
    assert_close(result, expected)


@every_family
def test_packed_texts_with_padding_share_no_state(name):
    "Packed texts with padding inside give the results of separate texts."
    hf = to_transformers(make(name)).double()
    row, texts, bounds, _, number = packed_row()
    mask = torch.ones(1, 20, dtype=torch.long)  # padding before one text and inside two
    mask[0, [0, 1, 6, 17, 19]] = 0
    is_text = mask.bool()
    cuts = bounds[1:-1].tolist()
    parts = is_text[0].tensor_split(cuts)
    kept = [text[:, part] for text, part in zip(texts, parts)]
    logits_alone = [hf(text).logits for text in kept]
    expected = torch.cat(logits_alone, 1)
    for way in (dict(cu_seqlens=bounds), dict(seq_idx=number)):
        logits = hf(row, attention_mask=mask, **way).logits
        assert_close(logits[is_text], expected[0])


def test_collators_that_pack_train_as_padded_rows_do():
    hf = to_transformers(make()).train()
    _, _, texts = padded(4, 7, 8)
    options = [
        {},
        dict(return_seq_idx=True),
        dict(return_flash_attn_kwargs=True),
        dict(return_flash_attn_kwargs=True, return_position_ids=False),
    ]
    sums = [hf(text, labels=text).loss * (text.shape[1] - 1) for text in texts]
    expected = sum(sums) / 16
    for option in options:
        loss = hf(**collated(texts, **option)).loss
        assert_close(loss, expected)
    hf.eval()  # evaluation keeps no cache of packed rows
    loss = hf(**collated(texts)).loss
    assert_close(loss, expected)


def test_trainer_passes_on_packed_rows_of_a_data_set(tmp_path):
    hf = to_transformers(make()).train()
    _, _, texts = padded(4, 7, 8)
    batch = collated(texts)
    row = {name: value[0] for name, value in batch.items()}
    assert "position_ids" in row
    trainer = Trainer(
        hf, TrainingArguments(tmp_path, report_to=[], use_cpu=True), train_dataset=[row]
    )
    columns = {name: value.tolist() for name, value in row.items()}
    dataset_class = pytest.importorskip("datasets").Dataset
    dataset = dataset_class.from_list([columns])
    kept = trainer._remove_unused_columns(dataset, "train")
    assert set(kept.column_names) == set(row)
    batches = trainer.get_train_dataloader()
    losses = [trainer.compute_loss(hf, batch) for batch in batches]
    expected = [hf(**collated(texts)).loss]
    assert_close(losses, expected)
    tokens = row["input_ids"][None]
    labels = row["labels"][None]
    row_as_one_text = hf(tokens, labels=labels).loss
    assert abs(losses[0] - row_as_one_text) > 1e-5


def test_position_ids_beside_padding_pack_nothing():
    hf = to_transformers(make())
    tokens, mask, _ = padded(3, 8, 5)
    counted = mask.cumsum(1) - 1
    is_padding = mask == 0
    places = counted.masked_fill(is_padding, 1)  # as transformers counts them
    out = hf(tokens, attention_mask=mask, position_ids=places, use_cache=True)
    expected = hf(tokens, attention_mask=mask).logits
    assert_close(out.logits, expected)
    more = torch.cat([mask, mask[:, :1] | 1], 1)
    step = hf(
        tokens[:, :1],
        attention_mask=more,
        position_ids=places[:, -1:] + 1,
        past_key_values=out.past_key_values,
    )
    assert step.past_key_values.get_seq_length() == 9


@pytest.mark.parametrize("count", ("columns", "text"))
def test_a_gap_in_the_mask_starts_no_text(count):
    "Positions may count all columns, as without a mask, or only the tokens of the text."
    hf = to_transformers(make())
    tokens = torch.randint(50, (5, 14))
    mask = scattered()
    places = torch.arange(14).expand(5, -1) if count == "columns" else mask.cumsum(1) - 1
    whole = hf(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits
    expected = hf(tokens, attention_mask=mask).logits
    assert_close(whole, expected)

    tokens = tokens[:1]
    mask = torch.ones_like(tokens)
    mask[0, [2, 3, 9]] = 0
    places = torch.arange(14)[None] if count == "columns" else mask.cumsum(1) - 1
    start = places[0, 7].item()
    places[:, 7:] -= start  # a second text
    logits = hf(tokens, attention_mask=mask, position_ids=places).logits
    packed = logits[mask.bool()]
    is_text = mask[0].bool()
    first = tokens[:, :7]
    one = first[:, is_text[:7]]
    second = tokens[:, 7:]
    two = second[:, is_text[7:]]
    logits_alone = [hf(one).logits[0], hf(two).logits[0]]
    expected = torch.cat(logits_alone)
    assert_close(packed, expected)


@pytest.mark.parametrize("way", ("plain", "beams", "padded", "inputs_embeds"))
@pytest.mark.parametrize("mixer", ("longhorn", "attention", "mamba2"))
def test_checkpointing_in_training_mode_generates_what_evaluation_generates(mixer, way):
    hf = to_transformers(make(mixer, dropout=0.2))
    for parameter in hf.parameters():
        if parameter.dim() == 2:
            parameter.data *= 4  # so that the tokens vary
    tokens, mask, _ = padded(4, 7, 5)
    options = dict(max_new_tokens=6, do_sample=False, num_beams=3 if way == "beams" else 1)
    inputs = dict(inputs=tokens[1:2])
    if way == "padded":
        inputs = dict(inputs=tokens, attention_mask=mask)
    if way == "inputs_embeds":
        embedded = hf.model.embedding(tokens[1:2])
        inputs = dict(inputs_embeds=embedded.detach())
    expected = hf.generate(**inputs, **options)
    hf.gradient_checkpointing_enable()
    hf.train()
    assert torch.equal(hf.generate(**inputs, **options), expected)
    # also with gradients
    cache = hf(tokens, use_cache=True).past_key_values
    assert cache.get_seq_length() == 7
    assert hf(tokens).past_key_values is None


def test_a_callback_that_samples_while_a_checkpointed_model_trains_sees_the_tokens_of_evaluation(
    tmp_path,
):
    hf = to_transformers(make(dropout=0.1))
    prompt = torch.randint(50, (1, 6))
    sampled = []

    class Sample(TrainerCallback):
        def on_step_end(self, arguments, state, control, model, **others):
            assert model.training
            assert model.is_gradient_checkpointing
            options = dict(max_new_tokens=6, **GREEDY_WITH_LOGITS)
            steps = model.generate(prompt, **options).logits
            training = torch.cat(steps)
            other = copy.deepcopy(model).eval()
            steps = other.generate(prompt, **options).logits
            evaluation = torch.cat(steps)
            sampled.append((training, evaluation))

    data = [
        dict(input_ids=torch.arange(i, i + 16) % 50, labels=torch.arange(i, i + 16) % 50)
        for i in range(8)
    ]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(hf, arguments, train_dataset=data, callbacks=[Sample()]).train()
    assert len(sampled) == 2
    for training, evaluation in sampled:
        assert_close(training, evaluation)


@pytest.mark.parametrize("reentrant", (False, True))
def test_gradients_of_a_cached_call_are_right_with_checkpointing(reentrant):
    hf = to_transformers(make()).train()
    tokens = torch.randint(50, (2, 6))

    def loss():
        prompt = tokens[:, :3]
        cache = hf(prompt, use_cache=True).past_key_values
        rest = tokens[:, 3:]
        return hf(rest, past_key_values=cache, labels=rest).loss

    parameters = hf.parameters()
    expected = torch.autograd.grad(loss(), parameters)
    hf.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    value = loss()
    result = torch.autograd.grad(value, hf.parameters())
    assert_close(result, expected)


@every_mixer
def test_the_cache_holds_plain_tuples(name):
    "The transformers cache stores plain tuples, and passes named tuples to the mixer."
    hf = to_transformers(make(name))
    tokens = torch.randint(50, (2, 6))
    cache = hf(tokens, use_cache=True).past_key_values
    for layer, block in zip(cache.layers, hf.model.blocks, strict=True):
        assert type(layer.state) is tuple
        for part in layer.state:
            assert type(part) is torch.Tensor
        expected = type(block.mixer.empty_cache(2))
        assert type(layer.get()) is expected


def test_crop_keeps_all_tokens_or_none():
    hf = to_transformers(make())
    tokens = torch.randint(50, (2, 6))
    expected = hf(tokens).logits
    # transformers counts removed tokens; older versions pass the length itself
    for keep in (0, 4):
        start = tokens[:, :4]
        cache = hf(start, use_cache=True).past_key_values
        cache.crop(keep)
        rest = tokens[:, 4:]
        result = hf(rest, past_key_values=cache).logits
        assert_close(result, expected[:, 4:])
    cache.crop(-6)
    assert cache.get_seq_length() == 0
    result = hf(tokens, past_key_values=cache).logits
    assert_close(result, expected)
    for part in (3, -1, 7, -7):
        with pytest.raises(ValueError, match=rf"crop\({part}\) would leave a part of 6 tokens"):
            cache.crop(part)


@pytest.mark.parametrize("mixer", ("longhorn", "attention"))
def test_a_row_without_a_text_disturbs_no_other(mixer):
    hf = to_transformers(make(mixer))
    tokens, mask, alone = padded(4, 6)
    mask[0] = 0
    result = hf(tokens, attention_mask=mask, use_cache=True).logits
    logits_alone = hf(alone[1]).logits
    assert_close(result[1], logits_alone[0])


def test_an_export_knows_where_a_text_ends_and_what_is_padding(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from longhorn_kit.lab.data.tokenizers import get_tokenizer
    from longhorn_kit.lab.experiments.evaluation import hf_tokenizer
    from longhorn_kit.models import LMConfig, SequenceLM
    from longhorn_kit.models.transformers import export_folder

    words = hf_tokenizer(get_tokenizer("bytes"))
    folder = export_folder(SequenceLM(LMConfig(256, 16, 1)), tmp_path / "hf", words)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).padding_side == "left"
    assert words.eos_token_id == 0
    assert words.pad_token_id == 255
    assert loaded.generation_config.eos_token_id == 0
    assert loaded.generation_config.pad_token_id == 255
    assert loaded.config.pad_token_id == 255
    model = to_transformers(make("longhorn"))
    model.generation_config.eos_token_id = [7, 9]
    export_folder(model, tmp_path / "other", words)
    assert model.generation_config.eos_token_id == [7, 9]


def test_attention_leaves_padding_out_when_it_reads_and_when_it_goes_on():
    hf = to_transformers(make("attention"))
    tokens, mask, alone = padded(3, 8, 3, 5)
    out = hf(tokens, attention_mask=mask, use_cache=True)
    more = torch.randint(50, (4, 2))
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    after = hf(more, attention_mask=longer, past_key_values=out.past_key_values).logits
    for row, prompt in enumerate(alone):
        last = more[row : row + 1]
        continued = torch.cat([prompt, last], 1)
        own = hf(continued).logits[0]
        is_text = mask[row].bool()
        logits = out.logits[row][is_text]
        assert_close(torch.cat([logits, after[row]]), own)


@pytest.mark.parametrize(
    "mixer", ("longhorn", "attention", "retnet", "rwkv6", "mamba2", "gated_deltanet")
)
def test_beams_follow_their_states(mixer):
    lm = make(mixer)
    # larger weights: the past matters more, so beams with wrong states choose other tokens
    for parameter in lm.parameters():
        parameter.data *= 3
    hf = to_transformers(lm)
    prompt = torch.randint(50, (2, 6))
    options = dict(max_new_tokens=12, num_beams=4, do_sample=False, num_return_sequences=2)
    with_cache = hf.generate(prompt, **options)
    without = hf.generate(prompt, use_cache=False, **options)
    assert torch.equal(with_cache, without)


def test_a_cache_goes_on_over_several_calls():
    hf = to_transformers(make())
    tokens = torch.randint(50, (2, 12))
    whole = hf(tokens).logits
    cache = None
    pieces = []
    for part in tokens.split((5, 1, 6), dim=1):
        out = hf(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces = pieces + [out.logits]
    result = torch.cat(pieces, 1)
    assert_close(result, whole)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("mixer", ("longhorn_exact", "attention"))
def test_a_repeated_state_goes_on_as_the_prompt_would(mixer):
    hf = to_transformers(make(mixer))
    prompts = torch.randint(50, (2, 5))
    more = torch.randint(50, (6, 2))
    cache = hf(prompts, use_cache=True).past_key_values
    cache.batch_repeat_interleave(3)
    repeated = prompts.repeat_interleave(3, 0)
    texts = torch.cat([repeated, more], 1)
    logits = hf(texts).logits
    whole = logits[:, 5:]
    result = hf(more, past_key_values=cache).logits
    assert_close(result, whole)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("way", ("whole", "padded", "packed"))
def test_gradient_checkpointing_changes_no_gradient(way, reentrant):
    hf = to_transformers(make()).train()
    tokens = torch.randint(50, (5, 14))
    more = {}
    if way == "padded":
        more = dict(attention_mask=scattered())
    if way == "packed":
        more = dict(seq_idx=scattered())
    hf(tokens, labels=tokens, **more).loss.backward()
    expected = [p.grad.clone() for p in hf.parameters()]
    hf.zero_grad()
    hf.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    hf(tokens, labels=tokens, **more).loss.backward()
    for a, p in zip(expected, hf.parameters(), strict=True):
        assert_close(p.grad, a)


def test_trainer_trains_it(tmp_path):
    hf = to_transformers(make())
    data = [
        dict(input_ids=torch.arange(i, i + 16) % 50, labels=torch.arange(i, i + 16) % 50)
        for i in range(32)
    ]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Trainer(hf, arguments, train_dataset=data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    limit = 0.8 * losses[0]
    assert losses[-1] < limit


def test_trainer_counts_every_label_once_over_parts_of_a_step(tmp_path):
    start = to_transformers(make("longhorn")).train()

    def row(i):
        tokens = torch.arange(i, i + 16) % 50
        is_prompt = torch.arange(16) < 3 * i
        return dict(input_ids=tokens, labels=torch.where(is_prompt, -100, tokens))

    def trained(parts):
        hf = copy.deepcopy(start)
        arguments = TrainingArguments(
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=4 // parts,
            learning_rate=1.0,
            gradient_accumulation_steps=parts,
            optim="sgd",
            max_grad_norm=0,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        data = [row(i) for i in range(4)]
        Trainer(hf, arguments, train_dataset=data).train()
        return hf

    whole = trained(1)
    parts = trained(4)
    state = parts.state_dict()
    expected = whole.state_dict()
    assert_close(state, expected, atol=1e-5, rtol=1e-4)
    trained_weight = whole.model.norm.weight
    initial_weight = start.model.norm.weight
    assert not torch.equal(trained_weight, initial_weight)


def test_weights_that_a_file_lacks_are_drawn_like_the_kits(tmp_path):
    hf = to_transformers(make())
    state = dict(hf.state_dict())
    for name in list(state):
        if "blocks.1" in name or name == "lm_head.weight":
            del state[name]
    hf.save_pretrained(tmp_path, state_dict=state)
    loaded = LonghornForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if "blocks.1" not in name:
            assert torch.equal(parameter, hf.get_parameter(name))
    fresh = loaded.model.blocks[1].mixer
    ones = torch.ones_like(fresh.D_skip)
    assert torch.equal(fresh.D_skip, ones)
    assert fresh.in_proj.weight.std() > 0.05


@pytest.mark.slow
def test_a_sharded_model_without_memory_draws_the_kits_weights():
    "FSDP2 can build on meta, shard, and call `to_empty` and `init_weights`."
    from torch.distributed.fsdp import fully_shard

    from pool import one_process

    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=50, d_model=32, n_layer=2)
    fresh = LonghornForCausalLM(config)
    with torch.device("meta"):
        hf = LonghornForCausalLM(config)
    with one_process() as mesh:
        for part in (*hf.model.blocks, hf):
            fully_shard(part, mesh=mesh)
        hf.to_empty(device="cpu")
        for parameter in hf.parameters():
            torch.nn.init.constant_(parameter, math.nan)
        hf.init_weights()
        drawn = {name: parameter.full_tensor() for name, parameter in hf.named_parameters()}
    for name, expected in fresh.named_parameters():
        size = expected.std(unbiased=False).item()
        std = drawn[name].std(unbiased=False).item()
        assert std == pytest.approx(size, rel=0.3), name


def test_auto_classes_know_the_model(tmp_path):
    to_transformers(make("mamba")).save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LonghornConfig)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config.mixer == "mamba"
    tokens = torch.arange(9)[None]
    logits = model(tokens).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("mixer", ("mamba", "longhorn", "gated_deltanet"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_loading_in_16_bits_keeps_the_parameters_that_stay_in_float32(mixer, dtype, tmp_path):
    options = dict(key_norm=True) if mixer == "longhorn" else {}
    lm = make(mixer, mixer_options=options)
    hf = to_transformers(lm)
    hf.save_pretrained(tmp_path / "hf")
    lm.save_pretrained(tmp_path / "lm")
    built = SequenceLM(lm.config, dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype)
    drawn = AutoModelForCausalLM.from_config(hf.config, dtype=dtype)
    parameters = built.named_parameters()
    wide = [name for name, p in parameters if p.dtype == torch.float32]
    expected = {"mamba": {"A_log", "D_skip"}, "longhorn": {"D_skip", "key_scale"}}
    kinds = {name.rpartition(".")[2] for name in wide}
    assert kinds >= expected.get(mixer, {"A_log"})
    for model in (
        SequenceLM.from_pretrained(tmp_path / "lm", dtype=dtype),
        from_transformers(loaded),
        from_transformers(drawn),
    ):
        for name, parameter in model.named_parameters():
            kept = torch.float32 if name in wide else dtype
            assert parameter.dtype == (kept), name
            is_random = "A_log" in name and mixer != "mamba"
            if name in wide and not is_random:
                assert torch.equal(parameter, lm.get_parameter(name)), name
    tokens = torch.randint(50, (1, 5))
    logits = loaded(tokens).logits
    assert torch.isfinite(logits).all()
    assert loaded.dtype == dtype


def test_sequence_classification_reads_the_last_text_token(tmp_path):
    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=50, d_model=16, n_layer=1, num_labels=3, pad_token_id=7)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokens, mask, alone = padded(3, 8, 5, side="right")
    labels = torch.tensor([0, 1, 2])
    scores = model(tokens, attention_mask=mask, labels=labels).logits
    expected = torch.cat([model(text).logits for text in alone])
    assert_close(scores, expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is LonghornForSequenceClassification
    result = loaded(tokens, attention_mask=mask).logits
    assert_close(result, scores)
    to_transformers(make()).save_pretrained(tmp_path / "lm")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm")
    assert classifier.score.weight.std() > 0.005


def test_bad_input_is_one_line():
    hf = to_transformers(make())
    attention = to_transformers(make("attention"))
    tokens, mask, _ = padded(3, 5, side="right")
    for wrong, message in (
        (
            lambda: read_mask(torch.tensor([[1, 1, 2]]), 1, 3),
            "attention_mask has values other than 0 and 1",
        ),
        (
            lambda: hf(tokens, attention_mask=mask[:1]),
            r"attention_mask has shape \(1, 5\); expected a tensor \(B, T\) with 2 rows",
        ),
        (
            lambda: attention(tokens[:1], attention_mask=mask, use_cache=False),
            r"attention_mask has shape \(2, 5\); expected .* with 1 rows",
        ),
        (
            lambda: hf(tokens, attention_mask=mask.tolist()),
            "attention_mask is list; expected a tensor",
        ),
        (lambda: hf(torch.tensor([[0, 50]])), "tokens has values from 0 to 50; expected 0 to 49"),
        (hf, "expected either"),
        (lambda: LonghornForCausalLM(LonghornConfig(mixer="rnn")), "known mixers"),
        (
            lambda: hf(tokens, past_key_values=DynamicCache()),
            "past_key_values is a DynamicCache; leave it out",
        ),
        (
            lambda: hf(tokens, past_key_values=hf(tokens[:1], use_cache=True).past_key_values),
            "has 1 rows and the tokens have 2",
        ),
        (
            lambda: hf(tokens, atention_mask=mask),
            "atention_mask is given, but Longhorn's models have no such argument",
        ),
        (lambda: hf.model(tokens, adapter_names=["a", "b"]), "adapter_names is given, but"),
        (
            lambda: hf(tokens, output_attentions=True),
            "output_attentions is given, but the mixers return no",
        ),
        (lambda: hf(tokens, token_type_ids=mask), "token_type_ids is given, but"),
        (
            lambda: hf(tokens, seq_idx=mask.float()),
            "seq_idx is torch.float32; expected an int32 or int64",
        ),
        (
            lambda: hf(tokens, position_ids=mask[:, :3]),
            r"position_ids has shape \(2, 3\); expected \(2, 5\)",
        ),
        (lambda: hf(tokens, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens ends at 5; expected 10"),
        (lambda: hf(tokens, seq_idx=mask, use_cache=True), "packed texts end in different states"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def left_padded(vocab_size=31):
    "Return a batch of texts with 4 and 7 tokens; every token of a text is a label."
    tokens = torch.randint(1, vocab_size, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return dict(input_ids=tokens, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("mixer", ["longhorn", "mamba2", "attention"])
def test_padding_predicts_every_token_alike_and_a_label_behind_it_counts(mixer):
    torch.manual_seed(0)
    config = LonghornConfig(vocab_size=31, d_model=16, n_layer=1, mixer=mixer)
    model = LonghornForCausalLM(config).eval()
    batch = left_padded()
    short = batch["input_ids"][:1, 3:]
    long = batch["input_ids"][1:]
    short_loss = model(short, labels=short).loss
    long_loss = model(long, labels=long).loss
    total = 3 * short_loss + 6 * long_loss
    for keep in (True, False):
        loss = model(**batch, use_cache=keep).loss
        expected = (total + math.log(31)) / 10
        assert_close(loss, expected)
    batch["labels"][0, 3] = -100  # ignores the label after the padding
    result = model(**batch).loss
    assert_close(result, total / 9)
    message = r"attention_mask has shape \(2, 2\); expected a tensor \(B, T\)"
    with pytest.raises(ValueError, match=message):
        model(batch["input_ids"], attention_mask=torch.ones(2, 2))


@pytest.mark.parametrize("mixer", ["llama", "longhorn", "attention"])
def test_trainer_counts_the_labels_of_a_padded_batch_that_the_loss_counts(mixer, tmp_path):
    torch.manual_seed(0)
    if mixer == "llama":
        sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=16)
        config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
        model = LlamaForCausalLM(config)
    else:
        config = LonghornConfig(vocab_size=31, d_model=16, n_layer=1, mixer=mixer)
        model = LonghornForCausalLM(config)
    batch = left_padded()
    trainer = Trainer(model, TrainingArguments(tmp_path, report_to=[], use_cpu=True))
    counted = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    result = model(**batch, num_items_in_batch=counted).loss
    assert_close(result, model(**batch).loss)


@pytest.mark.parametrize("learning", (False, True))
def test_an_exported_model_equals_the_eager_one_at_any_batch_and_length(learning):
    from exported import assert_exported_equals_eager

    torch.manual_seed(0)
    sizes = dict(vocab_size=50, d_model=32, n_layer=2)
    model = LonghornForCausalLM(LonghornConfig(**sizes, mixer="longhorn_exact", use_cache=False))

    def tokens(B, T):
        return torch.randint(0, 50, (B, T))

    assert_exported_equals_eager(model, tokens, learning)


@pytest.mark.parametrize("mixer", ("longhorn_exact", slow_case("attention"), slow_case("mamba2")))
def test_an_exported_model_takes_any_mask(mixer):
    from torch.export import Dim

    hf = to_transformers(make(mixer))
    hf.config.use_cache = False

    def batch(B, T):
        return dict(input_ids=torch.randint(50, (B, T)), attention_mask=scattered(B, T, seed=B))

    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in ("input_ids", "attention_mask")}
    example = batch(5, 9)
    exported = torch.export.export(hf, (), example, dynamic_shapes=shapes)
    program = exported.module()
    for B, T in ((5, 9), (6, 20)):
        given = batch(B, T)
        result = program(**given).logits
        expected = hf(**given).logits
        assert_close(result, expected)
        ones = torch.ones(B, T, dtype=torch.long)
        whole = given | dict(attention_mask=ones)
        result = program(**whole).logits
        expected = hf(whole["input_ids"]).logits
        assert_close(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ("longhorn", "attention"))
def test_a_compiled_graph_takes_any_mask_and_refuses_what_it_cannot_see(mixer):
    hf = to_transformers(make(mixer))
    tokens = torch.randint(50, (5, 14))
    compiled = torch.compile(hf, fullgraph=True, dynamic=False)
    for keep in (False, True):
        out = compiled(tokens, attention_mask=scattered(), use_cache=keep)
        expected = hf(tokens, attention_mask=scattered()).logits
        assert_close(out.logits, expected)
    places = torch.arange(14)[None]
    assert_close(compiled(tokens, position_ids=places, use_cache=False).logits, hf(tokens).logits)
    with pytest.raises(RuntimeError, match="position_ids packs texts; pass cu_seqlens"):
        compiled(tokens, position_ids=places % 7, use_cache=False)


@pytest.mark.slow
def test_the_exporters_of_transformers_take_a_model_with_its_cache():
    exporters = pytest.importorskip("transformers.exporters")
    hf = to_transformers(make("longhorn"))
    tokens = torch.randint(50, (2, 6))
    with torch.no_grad():
        start = tokens[:, :5]
        cache = hf(start, use_cache=True).past_key_values
    logits = hf(tokens).logits
    expected = logits[:, 5:]
    inputs = dict(
        input_ids=tokens[:, 5:],
        past_key_values=copy.deepcopy(cache),
        attention_mask=torch.ones_like(tokens),
    )
    exporter = exporters.DynamoExporter()
    config = exporters.DynamoConfig()
    program, _ = exporter.export_program(hf, inputs, config)
    assert_close(program.module()(**inputs | dict(past_key_values=cache)).logits, expected)
