"""Measurements after a run: losses are those of a document read alone, shares are those of a step, files repeat to the byte."""

import copy
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longhorn_kit.lab.data.text import get_tokenizer
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
    return np.random.default_rng([length, seed]).integers(97, 123, length).astype(np.uint8)


def joined(documents):
    return np.concatenate([part for text in documents for part in (text, [0])]).astype(np.uint16)


def texts(
    lengths={"docs": (3, 200, 7, 127, 30, 128), "prose": (60, 10)},
    long={"docs": (140, 300), "prose": (127,)},
):
    documents = {name: [document(length) for length in each] for name, each in lengths.items()}
    apart = {name: [document(length, 1) for length in each] for name, each in long.items()}
    domains = {
        name: (joined(each), sum(map(len, each)) + len(each)) for name, each in documents.items()
    }
    return Texts(SimpleNamespace(tokenizer=BYTES), domains, apart)


def model(mixer="longhorn_exact", layers=2):
    "A model in float64, with larger weights than at the start, so that what is read changes what is predicted."
    lm = new_model(LMConfig(256, 16, layers, mixer), 0).double()
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            weight *= 3 if name.endswith("proj.weight") else 1
    return lm


def alone(lm, tokens):  # (m,) -> (m-1,) nats
    tokens = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    with torch.no_grad():
        return F.cross_entropy(lm(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")[
            0
        ].numpy()


# ---- documents


def test_documents_are_read_from_an_end_mark_to_an_end_mark_and_cut():
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9], np.uint16)  # the last one was cut off
    assert [found.tolist() for found in measures.documents_of(tokens, 0)] == [
        [0, 5, 6, 0],
        [0, 7, 0],
        [0, 8, 9],
    ]
    parts = measures.parts_of(texts(), 20)
    assert list(parts) == ["docs", "prose", "docs long", "prose long"]
    assert [len(found) for found in parts["docs"]] == [5, 21, 9, 21, 21, 21] and len(
        parts["prose long"][0]
    ) == 21
    assert parts["docs"][0].tolist() == [0, *document(3), 0] and parts["docs long"][0].tolist() == [
        0,
        *document(140, 1)[:20],
    ]
    assert list(measures.parts_of(texts(long={}), 20)) == ["docs", "prose"]


@every_family
def test_a_document_has_the_losses_that_it_has_alone(name):
    "Documents of any length read side by side, padded and in pieces, have the losses of each read alone."
    lm = model(name)
    documents = [found for part in measures.parts_of(texts(), LONGEST).values() for found in part]
    for rows in (1, 5):
        losses = measures.read_documents(lm, documents, CONTEXT, rows)
        for found, tokens in zip(losses, documents):
            assert found.shape == (len(tokens) - 1,)
            np.testing.assert_allclose(
                found, alone(lm, tokens), rtol=2e-6, atol=2e-6
            )  # stored as float32


@every_family
def test_lengths_are_windows_with_a_fresh_state(name):
    "The loss at a length is that of windows of this length, each read from a fresh state, on the same bytes."
    lm = model(name)
    documents = [found for part in measures.parts_of(texts(), LONGEST).values() for found in part]
    losses = measures.read_documents(lm, documents, CONTEXT, 5)
    found = measures.losses_by_length(lm, documents, losses, CONTEXT, 5)
    assert found.shape == (11, 5) and len(documents) == 11
    for row, tokens in zip(found, documents):
        for sum_of_losses, length in zip(row, (8, 16, 32, 64, 128)):
            if len(tokens) < 129:
                assert math.isnan(sum_of_losses)
            else:
                cuts = [
                    alone(lm, tokens[start : start + length + 1]).sum()
                    for start in range(0, 128, length)
                ]
                assert sum_of_losses == pytest.approx(sum(cuts), rel=1e-5)
    assert np.flatnonzero(found[:, 0] > 0).tolist() == [
        1,
        3,
        5,
        8,
        9,
        10,
    ]  # of 128 predictions or more


def test_bins_hold_sums_and_counts():
    assert measures.doubling_bins(64).tolist() == [0, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert measures.doubling_bins(2).tolist() == [0, 1, 2, 4, 8, 16, 32]
    losses = [np.arange(1.0, 6), np.array([10.0]), np.array([])]
    sums, counts = measures.binned(losses, np.array([0, 1, 2, 4, 8]))
    assert sums.tolist() == [[1, 2, 7, 5], [10, 0, 0, 0], [0, 0, 0, 0]]
    assert counts.tolist() == [[1, 1, 2, 1], [1, 0, 0, 0], [0, 0, 0, 0]]


# ---- one run


def test_summary_and_arrays_against_plain_formulas():
    lm = model("longhorn", layers=1)
    source = texts()
    summary, arrays = measures.measure_run(lm, source, CONTEXT, 4, False)
    parts = measures.parts_of(source, LONGEST)
    every = {part: [alone(lm, tokens) for tokens in found] for part, found in parts.items()}
    reached = {}
    for part, losses in every.items():
        found = summary["parts"][part]
        lengths = [len(loss) for loss in losses]
        assert (
            found["documents"] == len(losses)
            and found["bytes"] == sum(lengths) == arrays[f"{part}/bytes"].sum()
        )
        assert found["bits_per_byte"] == pytest.approx(
            np.concatenate(losses).mean() / math.log(2), abs=2e-5
        )
        assert found["reach"] == [
            sum(length >= least for length in lengths) for least in (8, 16, 32, 64, 128)
        ]
        for low, high, bits in zip(
            summary["positions"], summary["positions"][1:], found["by_position"]
        ):
            inside = np.concatenate([loss[low:high] for loss in losses])
            assert (
                bits is None
                if not len(inside)
                else bits == pytest.approx(inside.mean() / math.log(2), abs=2e-5)
            )
        for row, loss in zip(arrays[f"{part}/nats"], losses):
            assert row.sum() == pytest.approx(loss.sum(), abs=len(row) / 128 + 1e-3)
        curve = arrays[f"{part}/position_nats"]
        counts = arrays[f"{part}/position_bytes"]
        assert counts.sum() == found["bytes"] and counts[0] == len(losses)
        assert curve[0] == pytest.approx(np.mean([loss[0] for loss in losses]), rel=1e-5)
        reached[part] = [tokens for tokens in parts[part] if len(tokens) == LONGEST + 1]
        assert arrays[f"{part}/windows"].shape == (len(reached[part]), 5)
    assert [len(found) for found in reached.values()] == [3, 0, 2, 1]
    for name in ("docs", "prose"):
        documents = reached[name] + reached[f"{name} long"]
        found = summary["by_length"][name]
        assert found["documents"] == len(documents)
        for length, bits in zip(summary["by_length"]["length"], found["bits_per_byte"]):
            losses = [
                alone(lm, tokens[at : at + length + 1])
                for tokens in documents
                for at in range(0, LONGEST, length)
            ]
            assert bits == pytest.approx(
                np.concatenate(losses).mean() / math.log(2), abs=1e-3
            )  # sums are rounded
    title, columns, rows = measures.reach_table(summary)
    assert columns[2:] == [f"{length} bytes" for length in (8, 16, 32, 64, 128)] and rows[0] == [
        "docs",
        6,
        5,
        4,
        3,
        3,
        3,
    ]


def test_a_text_without_long_documents_has_no_loss_by_length():
    summary, arrays = measures.measure_run(
        model(layers=1), texts({"prose": (60, 10)}, {}), CONTEXT, 4, False
    )
    assert summary["by_length"]["prose"] == {"documents": 0, "bits_per_byte": [None] * 5}
    assert list(summary["parts"]) == ["prose"] and arrays["prose/windows"].shape == (0, 5)
    assert summary["parts"]["prose"]["by_position"][-1] is None and math.isfinite(
        summary["parts"]["prose"]["bits_per_byte"]
    )


def test_a_run_is_small_repeats_and_changes_nothing():
    lm = model("longhorn").float().train()
    before = copy.deepcopy(lm.state_dict())
    first, second = (measures.measure_run(lm, texts(), CONTEXT, 4, False) for _ in range(2))
    assert json.dumps(first[0]) == json.dumps(second[0]) and first[0] == json.loads(
        json.dumps(first[0])
    )
    assert all(np.array_equal(values, second[1][name]) for name, values in first[1].items())
    assert lm.training and all(block.mixer.form == "diagonal" for block in lm.blocks)
    assert all(not block.mixer._forward_pre_hooks for block in lm.blocks)
    assert all(torch.equal(before[name], value) for name, value in lm.state_dict().items())
    assert all(parameter.grad is None for parameter in lm.parameters())
    assert all(values.dtype in (np.float32, np.int32) for values in first[1].values())


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
        measures.measure_run(lm, texts({"docs": (3,)}, {}), CONTEXT, 4, False)


# ---- keys and steps


@pytest.mark.parametrize("form", STEPS)
def test_shares_are_those_of_the_step(form):
    "Shares are what a step writes into an empty memory, and what its transition takes from a state along the key."
    torch.manual_seed(0)
    k = torch.randn(5, 4).double()
    beta = torch.rand(5, 3).double()
    entries = measures.entry_shares(form, k, beta)
    ones = torch.ones(5, 3).double()
    empty = torch.zeros(5, 3, 4).double()
    answer = (STEPS[form](empty, k, ones, beta) * k[:, None]).sum(-1)
    torch.testing.assert_close(entries.sum(-1), answer)
    erased = entries.sum(-1) if form == "exact" else measures.erased_share(entries, k)
    for token, channel in itertools.product(range(5), range(3)):
        A = transition_matrix(STEPS[form], k[token], float(beta[token, channel]))
        torch.testing.assert_close(entries[token, channel], 1 - A.diagonal())
        direction = k[token] / k[token].norm()
        torch.testing.assert_close(erased[token, channel], 1 - direction @ A @ direction)
    zeros = torch.zeros(1, 4).double()
    assert (measures.erased_share(measures.entry_shares(form, zeros, beta[:1]), zeros) == 0).all()


def test_effective_entries_and_cosines():
    k = torch.tensor(
        [[1.0, 1, 1, 1], [0, 3, 0, 0], [0, 0, 0, 0], [1e-30, 1e-30, 0, 0], [2, 1, 0, 0]]
    )
    assert measures.effective_entries(k).tolist() == pytest.approx([4, 1, 0, 2, 25 / 17])
    keys = torch.randn(2, 70, 3, 5, generator=torch.Generator().manual_seed(0))
    signed, sizes = measures.cosines(keys)
    for gap, mean, size in zip((1, 2, 4, 8, 16, 32, 64), signed, sizes, strict=True):
        pairs = [
            F.cosine_similarity(keys[b, t, h], keys[b, t + gap, h], dim=0)
            for b, t, h in itertools.product(range(2), range(70 - gap), range(3))
        ]
        assert mean == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-4, rel=1e-3)
        assert size == pytest.approx(float(torch.stack(pairs).abs().mean()), abs=1e-4, rel=1e-3)
    alternating = torch.tensor([1.0, -1]).repeat(10)[None, :, None, None] * torch.ones(1, 20, 1, 4)
    assert measures.cosines(alternating) == (
        [-1, 1, 1, 1, 1],
        [1] * 5,
    )  # steps that the sequence has


def percentiles(values):
    return pytest.approx(np.quantile(np.asarray(values), (0.1, 0.5, 0.9)), rel=2e-3)


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
    found = measures.describe_layer(mixer, x)
    k, beta, _ = mixer.rates(x)
    norms = k.square().sum(-1, keepdim=True)
    fourth = k.pow(4).sum(-1, keepdim=True)
    share = beta * norms / (1 + beta * norms)
    assert found["squared_norm"] == percentiles(norms) and found["gate"] == percentiles(beta)
    assert not key_norm or found["squared_norm"] == [4.0, 4.0, 4.0]  # the learnt length starts at 2
    assert (
        found["effective_entries"] == percentiles(norms.square() / fourth)
        and len(found["cosine"]) == 5
    )
    if form == "decoupled":
        entry = (
            beta[..., None]
            * k[:, :, None].square()
            / (1 + beta[..., None] * k[:, :, None].square())
        )
        share = entry.sum(-1)
        erased = (entry * k[:, :, None].square()).sum(-1) / norms
    else:
        entry = share[..., None] * k[:, :, None].square() / norms[..., None]
        erased = share if form == "exact" else share * fourth / norms.square()
    for name, values in (("written", share), ("erased", erased), ("entry", entry)):
        assert found[name] == percentiles(values), name


@pytest.mark.parametrize("name", ["mamba", "mamba_input_a"])
@torch.no_grad()
def test_percentiles_of_mamba(name):
    torch.manual_seed(0)
    mixer = build_mixer(name, 8, d_state=4).double()
    x = torch.randn(2, 20, 8).double()
    found = measures.describe_layer(mixer, x)
    _, B, inner, dt, _, _ = mixer.project(x)
    dt = F.softplus(mixer.dt_proj(dt))
    A = mixer.rates(inner)
    kept = (dt[..., None] * (A if A.dim() == 2 else A[:, :, None])).exp()  # (B,T,D,N)
    norms = B.square().sum(-1)
    along = ((1 - kept) * B[:, :, None].square()).sum(-1) / norms[..., None]
    for key, values in (
        ("squared_norm", norms),
        ("gate", dt),
        ("entry", 1 - kept),
        ("erased", along),
        ("written", dt * norms[..., None]),
    ):
        assert found[key] == percentiles(values), key


@every_family_of_kit
def test_every_layer_is_described_or_has_no_keys(name):
    "A layer with keys is described by finite numbers; keys of the delta rule have length one; attention has nothing."
    lm = model(name).float()
    summary, arrays = measures.measure_run(lm, texts(), CONTEXT, 4, False)
    layers = summary["layers"]
    assert (layers == {}) == (name == "attention")
    assert all(len(rows) == 2 and np.isfinite(rows).all() for rows in layers.values())
    assert ("entry" in layers) == name.startswith(("longhorn", "mamba")) - (name == "mamba2")
    assert ("written" in layers) == ("entry" in layers or "delta" in name)
    if "delta" in name:
        assert (
            layers["squared_norm"] == [[1.0, 1.0, 1.0]] * 2
            and layers["written"] == layers["erased"] == layers["gate"]
        )
    assert (
        ("exchange" in summary)
        == ("exchange" in arrays)
        == (name in ("longhorn", "longhorn_exact", "longhorn_scalar"))
    )


def test_layers_are_described_on_their_own_inputs():
    lm = model("longhorn")
    windows = measures.sample_windows(texts(), CONTEXT)
    found = measures.describe_layers(lm, windows)
    with torch.no_grad():
        h = lm.embed(windows[:, :-1])
        for layer, block in enumerate(lm.blocks):
            one = measures.describe_layer(block.mixer, block.norm(h))
            assert one.keys() == found.keys()
            for name, values in one.items():
                assert found[name][layer] == pytest.approx(values, rel=1e-3), name
            h = block(h)


# ---- one layer in the other form


def test_windows_lie_evenly_in_every_domain():
    source = texts({"docs": (100,), "prose": (20,), "notes": (2,)}, {})
    windows = measures.sample_windows(source, CONTEXT, 3)
    docs = source.domains["docs"][0]
    prose = source.domains["prose"][0]
    assert windows.tolist() == [docs[at : at + 9].tolist() for at in (0, 46, 92)] + [
        prose[at : at + 9].tolist() for at in (0, 12)
    ]


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
        np.testing.assert_allclose(arrays["exchange"][row], expected, atol=1 / 128 + 1e-4)
    found = summary["exchange"]
    losses = arrays["exchange"].sum(1) / windows[:, 1:].numel() / math.log(2)
    assert found["form"] == other and [found["as_trained"], *found["exchanged"]] == pytest.approx(
        losses, abs=2e-3
    )
    assert len({found["as_trained"], *found["exchanged"]}) == 4  # every layer changes the loss


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
    assert [block.mixer.form for block in lm.blocks] == ["diagonal"] * 2


# ---- files


def test_arrays_come_back_and_equal_arrays_give_equal_bytes(tmp_path):
    arrays = {
        "docs long/nats": np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros((0, 5), np.float32),
        "bytes": np.array([1, 2], np.int32),
    }
    one, two = (measures.save_arrays(tmp_path / name, arrays) for name in ("one.npz", "two.npz"))
    assert one.read_bytes() == two.read_bytes()
    found = measures.load_arrays(one)
    assert list(found) == list(arrays)
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype and np.array_equal(found[name], values)


def test_a_failed_write_leaves_the_old_file_and_damage_is_named(tmp_path):
    path = measures.save_arrays(tmp_path / "a.npz", {"x": np.ones(100)})
    data = path.read_bytes()
    with pytest.raises(ValueError):
        measures.save_arrays(path, {"x": np.ones(3), "y": np.array([{}], dtype=object)})
    assert path.read_bytes() == data and [file.name for file in tmp_path.iterdir()] == ["a.npz"]
    for damaged in (data[: len(data) // 2], b"text", b"", data.replace(data[60:70], b"0123456789")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.npz holds no arrays or is damaged"):
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
    found, _ = measures.measure_run(lm, texts(), CONTEXT, 4, True)
    for part, losses in expected["parts"].items():
        assert found["parts"][part]["bits_per_byte"] == pytest.approx(
            losses["bits_per_byte"], abs=0.02
        )
    assert found["by_length"]["docs"]["bits_per_byte"] == pytest.approx(
        expected["by_length"]["docs"]["bits_per_byte"], abs=0.02
    )
    for measured, rows in expected["layers"].items():
        np.testing.assert_allclose(
            found["layers"][measured], rows, rtol=0.1, atol=0.03, err_msg=measured
        )
    if "exchange" in expected:
        assert found["exchange"]["exchanged"] == pytest.approx(
            expected["exchange"]["exchanged"], abs=0.02
        )
