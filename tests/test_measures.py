"""Test measurements after a run: losses of separate documents, shares of a step, equal files."""

import copy
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from longhorn_kit.lab.data.tokenizers import get_tokenizer
from longhorn_kit.lab.experiments import measures
from longhorn_kit.lab.train.lm import Texts, new_model
from longhorn_kit.models import LMConfig
from longhorn_kit.models.mixer import build_mixer
from longhorn_kit.theory.closed_forms import STEPS
from longhorn_kit.theory.exact_vs_diagonal import transition_matrix
from mixers import every_family, every_family_of_kit
from sweep import slow_case

pytestmark = pytest.mark.numeric

CONTEXT = 8
LONGEST = 16 * CONTEXT
BYTES = get_tokenizer("bytes")


def document(length, seed=0):
    generator = np.random.default_rng([length, seed])
    letters = generator.integers(97, 123, length)
    return letters.astype(np.uint8)


def joined(documents):
    "Return documents in a row, with an end mark after each."
    parts = []
    for text in documents:
        parts += [text, [0]]
    return np.concatenate(parts).astype(np.uint16)


LENGTHS = {"docs": (3, 200, 7, 127, 30, 128), "prose": (60, 10)}
LONG = {"docs": (140, 300), "prose": (127,)}


def texts(lengths=LENGTHS, long=LONG):
    domains = {}
    for name, sizes in lengths.items():
        documents = [document(size) for size in sizes]
        count = sum(sizes) + len(sizes)
        domains[name] = joined(documents), count
    long_documents = {}
    for name, sizes in long.items():
        long_documents[name] = [document(size, 1) for size in sizes]
    return Texts(SimpleNamespace(tokenizer=BYTES), domains, long_documents)


def model(mixer="longhorn_exact", layers=2):
    "Return a float64 model with weights so large that the tokens change the predictions."
    lm = new_model(LMConfig(256, 16, layers, mixer), 0).double()
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            weight *= 3 if name.endswith("proj.weight") else 1
    return lm


def alone(lm, tokens):  # (m,) -> (m-1,) nats
    "Return the losses of a document that is read separately."
    row = torch.from_numpy(np.asarray(tokens, np.int64))
    tokens = row[None]
    with torch.no_grad():
        inputs = tokens[:, :-1]
        scores_by_token = lm(inputs)
        scores = scores_by_token.transpose(1, 2)
        targets = tokens[:, 1:]
        losses = F.cross_entropy(scores, targets, reduction="none")
    return losses[0].numpy()


def all_documents():
    parts = measures.parts_of(texts(), LONGEST)
    return [tokens for documents in parts.values() for tokens in documents]


# ---- documents


def test_documents_are_read_from_an_end_mark_to_an_end_mark_and_cut():
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9], np.uint16)  # the last one was cut off
    assert [document_read.tolist() for document_read in measures.documents_of(tokens, 0)] == [
        [0, 5, 6, 0],
        [0, 7, 0],
        [0, 8, 9],
    ]
    parts = measures.parts_of(texts(), 20)
    assert list(parts) == ["docs", "prose", "docs long", "prose long"]
    lengths = [len(document_read) for document_read in parts["docs"]]
    assert lengths == [5, 21, 9, 21, 21, 21]
    assert len(parts["prose long"][0]) == 21
    result = parts["docs"][0].tolist()
    expected = [0, *document(3), 0]
    assert result == expected
    result = parts["docs long"][0].tolist()
    expected = [0, *document(140, 1)[:20]]
    assert result == expected
    names = list(measures.parts_of(texts(long={}), 20))
    assert names == ["docs", "prose"]


@every_family
def test_a_document_has_the_losses_that_it_has_alone(name):
    "Documents read in a batch, padded and in pieces, have the losses of separate documents."
    lm = model(name)
    documents = all_documents()
    for rows in (1, 5):
        losses = measures.read_documents(lm, documents, CONTEXT, rows)
        for result, tokens in zip(losses, documents):
            expected = (len(tokens) - 1,)
            assert result.shape == expected
            # stored as float32
            np.testing.assert_allclose(result, alone(lm, tokens), rtol=2e-6, atol=2e-6)


@every_family
def test_lengths_are_windows_with_a_fresh_state(name):
    "The loss at a length is that of windows of this length from a new state, on equal bytes."
    lm = model(name)
    documents = all_documents()
    losses = measures.read_documents(lm, documents, CONTEXT, 5)
    result = measures.losses_by_length(lm, documents, losses, CONTEXT, 5)
    assert result.shape == (11, 5)
    assert len(documents) == 11
    for row, tokens in zip(result, documents):
        for sum_of_losses, length in zip(row, (8, 16, 32, 64, 128)):
            if len(tokens) < 129:
                assert math.isnan(sum_of_losses)
            else:
                cuts = [
                    alone(lm, tokens[start : start + length + 1]).sum()
                    for start in range(0, 128, length)
                ]
                assert sum_of_losses == pytest.approx(sum(cuts), rel=1e-5)
    # of 128 predictions or more
    is_counted = result[:, 0] > 0
    positions = np.flatnonzero(is_counted)
    assert positions.tolist() == [1, 3, 5, 8, 9, 10]


def test_bins_hold_sums_and_counts():
    edges = measures.doubling_bins(64)
    assert edges.tolist() == [0, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    edges = measures.doubling_bins(2)
    assert edges.tolist() == [0, 1, 2, 4, 8, 16, 32]
    losses = [np.arange(1.0, 6), np.array([10.0]), np.array([])]
    edges = np.array([0, 1, 2, 4, 8])
    sums, counts = measures.binned(losses, edges)
    assert sums.tolist() == [[1, 2, 7, 5], [10, 0, 0, 0], [0, 0, 0, 0]]
    assert counts.tolist() == [[1, 1, 2, 1], [1, 0, 0, 0], [0, 0, 0, 0]]


# ---- one run


@pytest.fixture(scope="module")
def measured():
    "Return a model, the documents of its text, and the measures of these documents."
    lm = model("longhorn", layers=1)
    source = texts()
    summary, arrays = measures.measure_run(lm, source, CONTEXT, 4, False)
    return lm, measures.parts_of(source, LONGEST), summary, arrays


def mean_bits(losses):
    nats = np.concatenate(losses).mean()
    return nats / math.log(2)


def test_summaries_of_parts_against_plain_formulas(measured):
    lm, parts, summary, _ = measured
    edges = summary["positions"]
    for part, documents in parts.items():
        result = summary["parts"][part]
        losses = [alone(lm, tokens) for tokens in documents]
        lengths = np.array([len(loss) for loss in losses])
        assert result["documents"] == len(losses)
        assert result["bytes"] == lengths.sum()
        assert result["bits_per_byte"] == pytest.approx(mean_bits(losses), abs=2e-5)
        limits = (8, 16, 32, 64, 128)
        reach = [(lengths >= least).sum() for least in limits]
        assert result["reach"] == reach
        for low, high, bits in zip(edges, edges[1:], result["by_position"]):
            inside = [loss[low:high] for loss in losses]
            if sum(map(len, inside)):
                assert bits == pytest.approx(mean_bits(inside), abs=2e-5)
            else:
                assert bits is None


def test_arrays_of_parts_against_plain_formulas(measured):
    lm, parts, _, arrays = measured
    reached = []
    for part, documents in parts.items():
        losses = [alone(lm, tokens) for tokens in documents]
        size = sum(len(loss) for loss in losses)
        total = arrays[f"{part}/bytes"].sum()
        assert total == size
        for row, loss in zip(arrays[f"{part}/nats"], losses):
            total = loss.sum()
            atol = len(row) / 128 + 1e-3
            assert row.sum() == pytest.approx(total, abs=atol)
        curve = arrays[f"{part}/position_nats"]
        counts = arrays[f"{part}/position_bytes"]
        assert counts.sum() == size
        assert counts[0] == len(losses)
        first = np.mean([loss[0] for loss in losses])
        assert curve[0] == pytest.approx(first, rel=1e-5)
        count = sum(len(tokens) == LONGEST + 1 for tokens in documents)
        reached.append(count)
        shape = arrays[f"{part}/windows"].shape
        expected = (reached[-1], 5)
        assert shape == expected
    assert reached == [3, 0, 2, 1]


def test_losses_by_length_against_plain_formulas(measured):
    lm, parts, summary, _ = measured
    by_length = summary["by_length"]
    for name in ("docs", "prose"):
        every = parts[name] + parts[f"{name} long"]
        documents = [tokens for tokens in every if len(tokens) == LONGEST + 1]
        assert by_length[name]["documents"] == len(documents)
        for length, bits in zip(by_length["length"], by_length[name]["bits_per_byte"]):
            losses = []
            for tokens in documents:
                for start in range(0, LONGEST, length):
                    part = tokens[start : start + length + 1]
                    losses.append(alone(lm, part))
            assert bits == pytest.approx(mean_bits(losses), abs=1e-3)  # sums are rounded


def test_a_table_tells_how_many_documents_reach_a_length(measured):
    _, _, summary, _ = measured
    _, columns, rows = measures.reach_table(summary)
    expected = [f"{length} bytes" for length in (8, 16, 32, 64, 128)]
    assert columns[2:] == expected
    assert rows[0] == ["docs", 6, 5, 4, 3, 3, 3]


def test_a_text_without_long_documents_has_no_loss_by_length():
    summary, arrays = measures.measure_run(
        model(layers=1), texts({"prose": (60, 10)}, {}), CONTEXT, 4, False
    )
    expected = {"documents": 0, "bits_per_byte": [None] * 5}
    assert summary["by_length"]["prose"] == expected
    assert list(summary["parts"]) == ["prose"]
    assert arrays["prose/windows"].shape == (0, 5)
    last = summary["parts"]["prose"]["by_position"][-1]
    assert last is None
    bits = summary["parts"]["prose"]["bits_per_byte"]
    assert math.isfinite(bits)


def test_a_run_is_small_repeats_and_changes_nothing():
    lm = model("longhorn").float().train()
    before = copy.deepcopy(lm.state_dict())
    first, second = (measures.measure_run(lm, texts(), CONTEXT, 4, False) for _ in range(2))
    result = json.dumps(first[0])
    expected = json.dumps(second[0])
    assert result == expected
    text = json.dumps(first[0])
    expected = json.loads(text)
    assert first[0] == expected
    for name, values in first[1].items():
        assert np.array_equal(values, second[1][name])
    assert lm.training
    for block in lm.blocks:
        assert block.mixer.form == "diagonal"
    for block in lm.blocks:
        assert not block.mixer._forward_pre_hooks
    for name, value in lm.state_dict().items():
        assert torch.equal(before[name], value)
    for parameter in lm.parameters():
        assert parameter.grad is None
    for values in first[1].values():
        assert values.dtype in (np.float32, np.int32)


def test_wrong_arguments_are_named():
    lm = model(layers=1)
    source = texts()
    for wrong, message in ((dict(context=0), "context is 0"), (dict(rows=0), "rows is 0")):
        with pytest.raises(ValueError, match=message):
            measures.measure_run(
                lm, source, **{"context": CONTEXT, "rows": 4, "gpu": False} | wrong
            )
    source.corpus.tokenizer = SimpleNamespace(name="gpt2")
    with pytest.raises(ValueError, match="tokens of gpt2; only bytes"):
        measures.measure_run(lm, source, CONTEXT, 4, False)
    with pytest.raises(ValueError, match="no domain has 9 held-out tokens"):
        short = texts({"docs": (3,)}, {})
        measures.measure_run(lm, short, CONTEXT, 4, False)


# ---- keys and steps


@pytest.mark.parametrize("form", STEPS)
def test_shares_are_those_of_the_step(form):
    "Shares are what a step writes to an empty state, and what it removes along the key."
    torch.manual_seed(0)
    k = torch.randn(5, 4).double()
    beta = torch.rand(5, 3).double()
    entries = measures.entry_shares(form, k, beta)
    ones = torch.ones(5, 3).double()
    empty = torch.zeros(5, 3, 4).double()
    state = STEPS[form](empty, k, ones, beta)
    written = state * k[:, None]
    answer = written.sum(-1)
    assert_close(entries.sum(-1), answer)
    erased = entries.sum(-1) if form == "exact" else measures.erased_share(entries, k)
    for token, channel in itertools.product(range(5), range(3)):
        step_size = float(beta[token, channel])
        A = transition_matrix(STEPS[form], k[token], step_size)
        expected = 1 - A.diagonal()
        assert_close(entries[token, channel], expected)
        direction = k[token] / k[token].norm()
        expected = 1 - direction @ A @ direction
        assert_close(erased[token, channel], expected)
    zeros = torch.zeros(1, 4).double()
    shares = measures.entry_shares(form, zeros, beta[:1])
    erased = measures.erased_share(shares, zeros)
    assert (erased == 0).all()


def test_effective_entries_and_cosines():
    k = torch.tensor(
        [[1.0, 1, 1, 1], [0, 3, 0, 0], [0, 0, 0, 0], [1e-30, 1e-30, 0, 0], [2, 1, 0, 0]]
    )
    result = measures.effective_entries(k).tolist()
    assert result == pytest.approx([4, 1, 0, 2, 25 / 17])
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 70, 3, 5, generator=generator)
    signed, sizes = measures.cosines(keys)
    for gap, mean, size in zip((1, 2, 4, 8, 16, 32, 64), signed, sizes, strict=True):
        places = itertools.product(range(2), range(70 - gap), range(3))
        pairs = [
            F.cosine_similarity(keys[b, t, h], keys[b, t + gap, h], dim=0) for b, t, h in places
        ]
        expected = float(torch.stack(pairs).mean())
        assert mean == pytest.approx(expected, abs=1e-4, rel=1e-3)
        expected = float(torch.stack(pairs).abs().mean())
        assert size == pytest.approx(expected, abs=1e-4, rel=1e-3)
    signs = torch.tensor([1.0, -1]).repeat(10)
    alternating = signs[None, :, None, None] * torch.ones(1, 20, 1, 4)
    # steps that the sequence has
    expected = ([-1, 1, 1, 1, 1], [1] * 5)
    assert measures.cosines(alternating) == expected


def percentiles(values):
    quantiles = np.quantile(np.asarray(values), (0.1, 0.5, 0.9))
    return pytest.approx(quantiles, rel=2e-3)


@pytest.mark.parametrize(
    "form, rate, key_norm",
    [
        ("exact", "vector", False),
        ("diagonal", "vector", False),
        ("decoupled", "vector", False),
        ("exact", "scalar", False),
        ("diagonal", "scalar", False),
        ("exact", "vector", True),
        ("diagonal", "vector", True),
    ],
)
@torch.no_grad()
def test_percentiles_of_a_longhorn_layer(form, rate, key_norm):
    torch.manual_seed(0)
    mixer = build_mixer("longhorn", 8, d_state=4, form=form, rate=rate, key_norm=key_norm).double()
    x = 3 * torch.randn(2, 20, 8).double()
    result = measures.describe_layer(mixer, x)
    k, beta, _ = mixer.rates(x)
    norms = k.square().sum(-1, keepdim=True)
    fourth = k.pow(4).sum(-1, keepdim=True)
    share = beta * norms / (1 + beta * norms)
    assert result["squared_norm"] == percentiles(norms)
    assert result["gate"] == percentiles(beta)
    # the learnt length starts at 2
    assert not key_norm or result["squared_norm"] == [4.0, 4.0, 4.0]
    expected = percentiles(norms.square() / fourth)
    assert result["effective_entries"] == expected
    assert len(result["cosine"]) == 5
    if form == "decoupled":
        steps = beta[..., None]
        squares = k[:, :, None].square()
        entry = steps * squares / (1 + steps * squares)
        share = entry.sum(-1)
        erased = (entry * squares).sum(-1) / norms
    else:
        squares = k[:, :, None].square()
        entry = share[..., None] * squares / norms[..., None]
        erased = share if form == "exact" else share * fourth / norms.square()
    for name, values in (("written", share), ("erased", erased), ("entry", entry)):
        assert result[name] == percentiles(values), name


@pytest.mark.parametrize("name", ["mamba", "mamba_input_a"])
@torch.no_grad()
def test_percentiles_of_mamba(name):
    torch.manual_seed(0)
    mixer = build_mixer(name, 8, d_state=4).double()
    x = torch.randn(2, 20, 8).double()
    result = measures.describe_layer(mixer, x)
    _, B, inner, dt, _, _ = mixer.project(x)
    dt = F.softplus(mixer.dt_proj(dt))
    A = mixer.rates(inner)
    steps = dt[..., None]
    rates = A if A.dim() == 2 else A[:, :, None]
    kept = (steps * rates).exp()  # (B,T,D,N)
    norms = B.square().sum(-1)
    forgotten = 1 - kept
    squares = B[:, :, None].square()
    forgotten_by_key = forgotten * squares
    along = forgotten_by_key.sum(-1) / norms[..., None]
    for key, values in (
        ("squared_norm", norms),
        ("gate", dt),
        ("entry", 1 - kept),
        ("erased", along),
        ("written", dt * norms[..., None]),
    ):
        assert result[key] == percentiles(values), key


@every_family_of_kit
def test_every_layer_is_described_or_has_no_keys(name):
    "Measures of a layer with keys are finite; keys of the delta rule have length one."
    lm = model(name).float()
    summary, arrays = measures.measure_run(lm, texts(), CONTEXT, 4, False)
    layers = summary["layers"]
    assert (layers == {}) == (name == "attention")
    for rows in layers.values():
        assert len(rows) == 2
        assert np.isfinite(rows).all()
    has_keys = name.startswith(("longhorn", "mamba"))
    expected = has_keys - (name == "mamba2")
    assert ("entry" in layers) == expected
    expected = "entry" in layers or "delta" in name
    assert ("written" in layers) == expected
    if "delta" in name:
        expected = [[1.0, 1.0, 1.0]] * 2
        assert layers["squared_norm"] == expected
        assert layers["written"] == layers["erased"] == layers["gate"]
    assert (
        ("exchange" in summary)
        == ("exchange" in arrays)
        == (name in ("longhorn", "longhorn_exact", "longhorn_scalar"))
    )


def test_layers_are_described_on_their_own_inputs():
    lm = model("longhorn")
    windows = measures.sample_windows(texts(), CONTEXT)
    result = measures.describe_layers(lm, windows)
    with torch.no_grad():
        inputs = windows[:, :-1]
        h = lm.embed(inputs)
        for layer, block in enumerate(lm.blocks):
            inputs = block.norm(h)
            one = measures.describe_layer(block.mixer, inputs)
            assert one.keys() == result.keys()
            for name, values in one.items():
                assert result[name][layer] == pytest.approx(values, rel=1e-3), name
            h = block(h)


# ---- a layer replaced by the other form


def test_windows_lie_evenly_in_every_domain():
    lengths = {"docs": (100,), "prose": (20,), "notes": (2,)}
    source = texts(lengths, {})
    windows = measures.sample_windows(source, CONTEXT, 3)
    docs = source.domains["docs"][0]
    prose = source.domains["prose"][0]
    from_docs = [docs[at : at + 9].tolist() for at in (0, 46, 92)]
    from_prose = [prose[at : at + 9].tolist() for at in (0, 12)]
    expected = from_docs + from_prose
    assert windows.tolist() == expected


@pytest.mark.parametrize(
    "name, form, other",
    [
        ("longhorn", "diagonal", "exact"),
        slow_case("longhorn_exact", "exact", "diagonal"),
        slow_case("longhorn_scalar", "diagonal", "exact"),
    ],
)
def test_exchange_computes_one_layer_in_the_other_form(name, form, other):
    lm = model(name, layers=3)
    source = texts()
    summary, arrays = measures.measure_run(lm, source, CONTEXT, 4, False)
    windows = measures.sample_windows(source, CONTEXT)
    for row, layer in enumerate((None, 0, 1, 2)):
        twin = copy.deepcopy(lm)
        if layer is not None:
            twin.blocks[layer].mixer.form = other
        expected = [alone(twin, window).sum() for window in windows]
        result = arrays["exchange"][row]
        np.testing.assert_allclose(result, expected, atol=1 / 128 + 1e-4)
    exchange = summary["exchange"]
    nats = arrays["exchange"].sum(1)
    count = windows[:, 1:].numel()
    losses = nats / count / math.log(2)
    assert exchange["form"] == other
    result = [exchange["as_trained"], *exchange["exchanged"]]
    assert result == pytest.approx(losses, abs=2e-3)
    # every layer changes the loss
    different = {exchange["as_trained"], *exchange["exchanged"]}
    assert len(different) == 4


def test_forms_come_back_after_an_error(monkeypatch):
    lm = model("longhorn")
    windows = measures.sample_windows(texts(), CONTEXT)
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return np.zeros((len(windows), CONTEXT))

    monkeypatch.setattr(measures, "window_losses", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        measures.exchange_losses(lm, windows, CONTEXT, 4)
    result = [block.mixer.form for block in lm.blocks]
    assert result == ["diagonal"] * 2


# ---- files


def test_arrays_come_back_and_equal_arrays_give_equal_bytes(tmp_path):
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {
        "docs long/nats": table,
        "none": np.zeros((0, 5), np.float32),
        "bytes": np.array([1, 2], np.int32),
    }
    one, two = (measures.save_arrays(tmp_path / name, arrays) for name in ("one.npz", "two.npz"))
    assert one.read_bytes() == two.read_bytes()
    loaded = measures.load_arrays(one)
    assert list(loaded) == list(arrays)
    for name, values in arrays.items():
        assert loaded[name].dtype == values.dtype
        assert np.array_equal(loaded[name], values)


def test_a_failed_write_leaves_the_old_file_and_damage_is_named(tmp_path):
    arrays = {"x": np.ones(100)}
    path = measures.save_arrays(tmp_path / "a.npz", arrays)
    data = path.read_bytes()
    with pytest.raises(ValueError):
        objects = np.array([{}], dtype=object)
        measures.save_arrays(path, {"x": np.ones(3), "y": objects})
    assert path.read_bytes() == data
    names = [file.name for file in tmp_path.iterdir()]
    assert names == ["a.npz"]
    half = data[: len(data) // 2]
    changed = data.replace(data[60:70], b"0123456789")
    for damaged in (half, b"text", b"", changed):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.npz contains no arrays or is damaged"):
            measures.load_arrays(path)
    with pytest.raises(FileNotFoundError, match="none.npz"):
        measures.load_arrays(tmp_path / "none.npz")


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", ["longhorn", "longhorn_exact", "mamba", "gated_deltanet", "attention"]
)
def test_a_compiled_model_on_a_gpu_is_measured_like_one_on_the_cpu(name):
    lm = new_model(LMConfig(256, 64, 2, name), 0)
    expected, _ = measures.measure_run(lm, texts(), CONTEXT, 4, False)
    lm = lm.cuda()
    for block in lm.blocks:
        block.compile(dynamic=False)
    result, _ = measures.measure_run(lm, texts(), CONTEXT, 4, True)
    for part, losses in expected["parts"].items():
        assert result["parts"][part]["bits_per_byte"] == pytest.approx(
            losses["bits_per_byte"], abs=0.02
        )
    bits = expected["by_length"]["docs"]["bits_per_byte"]
    assert result["by_length"]["docs"]["bits_per_byte"] == pytest.approx(bits, abs=0.02)
    for measured, rows in expected["layers"].items():
        np.testing.assert_allclose(
            result["layers"][measured], rows, rtol=0.1, atol=0.03, err_msg=measured
        )
    if "exchange" in expected:
        assert result["exchange"]["exchanged"] == pytest.approx(
            expected["exchange"]["exchanged"], abs=0.02
        )
