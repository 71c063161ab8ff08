import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from longhorn_kit.scan.reference import reference_scan
from longhorn_kit.theory.notation import (
    SYMBOLS,
    from_official,
    shape_of,
    swap_layout,
    symbol_table,
    to_official,
)

pytestmark = pytest.mark.numeric

NAMES = ("q", "k", "x", "b", "b_bias", "D_skip", "z")


def inputs(B=2, T=5, D=3, N=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(shape_of(n, B=B, T=T, D=D, N=N), generator=g, dtype=torch.float64)
        for n in NAMES
    }


def official_recurrence(u, q, k, dt, D, t_bias, z):
    """Compute the official recurrence in its layout, one number at a time."""
    tensors = (u, q, k, dt, D, t_bias, z)
    u, q, k, dt, D, t_bias, z = (t.numpy() for t in tensors)
    batch, channels, L = u.shape
    N = k.shape[1]
    out = np.zeros_like(u)
    state = np.zeros((batch, channels, N))
    for b in range(batch):
        for d in range(channels):
            for t in range(L):
                logit = dt[b, d, t] + t_bias[d]
                beta = 1 / (1 + np.exp(-logit))
                length = sum(k[b, n, t] ** 2 for n in range(N))
                rate = beta / (1 + beta * length)
                for n in range(N):
                    key = k[b, n, t]
                    kept = (1 - rate * key**2) * state[b, d, n]
                    state[b, d, n] = kept + rate * key * u[b, d, t]
                read = sum(state[b, d, n] * q[b, n, t] for n in range(N))
                skip = D[d] * u[b, d, t]
                y = read + skip
                out[b, d, t] = y * z[b, d, t] / (1 + np.exp(-z[b, d, t]))
    return torch.from_numpy(out), torch.from_numpy(state)


@settings(max_examples=30, deadline=None)
@given(B=st.integers(0, 3), T=st.integers(0, 6), D=st.integers(1, 5), N=st.integers(1, 5))
def test_round_trip_is_the_identity_in_both_directions(B, T, D, N):
    arguments = inputs(B, T, D, N)
    official = to_official(**arguments)
    assert official["u"].shape == (B, D, T)
    assert official["k"].shape == (B, N, T)
    assert official["dt"].shape == (B, D, T)
    back = from_official(**official)
    assert list(back) == list(NAMES)
    for n in NAMES:
        assert torch.equal(back[n], arguments[n])
    round_trip = to_official(**back)
    assert list(round_trip) == ["u", "q", "k", "dt", "D", "t_bias", "z"]
    for n in official:
        assert torch.equal(round_trip[n], official[n])


@pytest.mark.parametrize("B,T,D,N", [(2, 5, 3, 4), (1, 1, 1, 1), (1, 7, 2, 7)])
def test_the_kit_and_the_official_layout_compute_the_same_scan(B, T, D, N):
    arguments = inputs(B, T, D, N, seed=1)
    out, state = reference_scan(**arguments)
    official_out, official_state = official_recurrence(**to_official(**arguments))
    assert_close(swap_layout(official_out), out)
    assert_close(official_state, state.to(official_state.dtype), rtol=1e-6, atol=1e-6)


def test_strided_inputs_and_gradients_pass_through():
    arguments = inputs()
    drawn = torch.randn(5, 2, 6, dtype=torch.float64)
    arguments["x"] = drawn.transpose(0, 1)[..., ::2].requires_grad_()
    u = to_official(**arguments)["u"]
    assert u.is_contiguous()
    expected = arguments["x"].transpose(1, 2)
    assert torch.equal(u, expected)
    weight = torch.randn(2, 3, 5, dtype=torch.float64)
    loss = (u * weight).sum()
    (grad,) = torch.autograd.grad(loss, arguments["x"])
    assert torch.equal(grad, weight.transpose(1, 2))


def test_a_shared_rate_is_spread_over_the_channels():
    arguments = inputs()
    arguments["b"] = arguments["b"][..., :1]
    dt = to_official(**arguments)["dt"]
    assert dt.shape == (2, 3, 5)
    result = dt[:, 0]
    expected = dt[:, 2]
    assert torch.equal(result, expected)
    result = dt[:, 1]
    expected = arguments["b"][..., 0]
    assert torch.equal(result, expected)


def test_optional_arguments_stay_none():
    tensors = inputs().items()
    needed = {n: t for n, t in tensors if n in ("q", "k", "x", "b")}
    official = to_official(**needed)
    assert official["D"] is None
    assert official["t_bias"] is None
    assert official["z"] is None
    assert from_official(**official)["z"] is None


@pytest.mark.parametrize(
    "convert, name",
    [(to_official, name) for name in NAMES]
    + [(from_official, name) for name in ("k", "dt", "D", "t_bias", "z")],
)
def test_the_tensor_of_the_wrong_shape_is_named(convert, name):
    given = inputs() if convert is to_official else to_official(**inputs())
    given[name] = given[name][..., :-1]
    # q and x are the tensors that the others are compared with
    with pytest.raises(
        ValueError,
        match="has shape .*expected" if name in ("q", "x") else rf"^{name} has shape .*expected",
    ):
        convert(**given)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: swap_layout(inputs()["x"][0]), "expected three dimensions"),
        (
            lambda: to_official(**{**inputs(), "x": inputs()["x"][0]}),
            r"expected \(B,T,N\) and \(B,T,D\)",
        ),
        (lambda: shape_of("foo", B=1), "no symbol 'foo'"),
        (lambda: shape_of("x", B=1, T=2), r"\(B,T,D\); missing: D"),
    ],
)
def test_what_is_missing_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_table_has_a_row_for_every_symbol_and_every_shape_uses_known_sizes():
    table = symbol_table().splitlines()
    assert len(table) == len(SYMBOLS) + 2
    counts = {row.count("|") for row in table}
    assert len(counts) == 1
    for name, symbol in SYMBOLS.items():
        assert symbol.name == name
        letters_of_shape = set(symbol.shape.replace(",", ""))
        assert letters_of_shape <= set("BTDN")
        sizes = symbol.shape.split(",")
        expected = len(sizes) * bool(symbol.shape)
        assert len(shape_of(name, B=1, T=1, D=1, N=1)) == expected


# Every letter of a numbered equation is in a table of page 00, or its page introduces it. A letter
# is introduced if it is a separate formula, or if it is alone (or with other letters, between
# commas) to the left of =, ∈, ≤, ( or ←. This must be before the equation, in it, or in the
# paragraph after it.
BOOK = Path(__file__).parents[1] / "nbs"
INDEX = re.compile(r"_(?:\{[^{}]*\}|\\?\w)|\^(?:\\top|\{[^{}]*\\top\}|[2']|\{-1\})|'")
GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|varepsilon|eta|theta|kappa|lambda|mu|sigma|omega|Delta|Lambda)\b"
)
FORMULA = re.compile(r"\$\$(.*?)\$\$|(?<!\$)\$([^$]+)\$", re.S)


def text_of(page, kinds=("markdown",)):
    text = (BOOK / page).read_text()
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] in kinds)


def letters(formula):
    "Return Greek and Latin letters of a formula, without words, indices and commands."
    words = r"\\(?:text|mathrm|operatorname|mathbb|tag|begin|end)\s*\{[^{}]*\}"
    formula = INDEX.sub(" ", re.sub(words, " ", formula))
    greek = GREEK.findall(formula)
    latin = re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", formula))
    return {*greek, *latin}


def introduced(text):
    "Return letters that are alone on the left side of a formula in a text."
    result = set()
    for pair in FORMULA.findall(text):
        for part in re.split(r"\\\\|&|\\q?quad|=:", "".join(pair)):
            part = re.sub(r"\\(?:boxed|bar|dots|partial|text\s*\{[^{}]*\}|[,;!])", " ", part)
            left, *_ = re.split(r"=|\(|\\(?:in|le|leftarrow)\b", part)
            rest = GREEK.sub("", INDEX.sub("", left))
            if not re.sub(r"[\w\s,{}.]", "", rest):
                result |= letters(left)
    return result


def strangers(text, allowed):
    "Yield (equation, letter) for letters that are neither allowed nor introduced nearby."
    for match in re.finditer(r"\$\$((?:(?!\$\$).)*\\tag\{(\w+)\}.*?)\$\$", text, re.S):
        before = text[: match.end()]
        behind = text[match.end() :].lstrip("\n")
        after, *_ = behind.split("\n\n")
        known_here = allowed | introduced(before + "\n" + after)
        for letter in sorted(letters(match[1]) - known_here):
            yield match[2], letter


def test_every_letter_of_a_numbered_equation_is_in_the_table_or_introduced_on_its_page():
    page = text_of("theory/00_notation.ipynb")
    rows = " ".join(re.findall(r"^\| (\$.*?) \|", page, re.M))
    formulas = [symbol.formula for symbol in SYMBOLS.values()]
    symbols = re.findall(r"\$(.*?)\$", rows)
    allowed = letters(" ".join([*formulas, *symbols]))
    theory = sorted((BOOK / "theory").glob("*.ipynb"))
    scans = sorted((BOOK / "scan").glob("*.ipynb"))
    pages = [*theory, *scans]
    for page in pages:
        unknown = list(strangers(text_of(page), allowed))
        assert not unknown, (
            f"{page.name}: (equation, letter) {unknown}: introduce them, or extend the table"
        )
    equation = r" $$k = \omega\eta, \tag{1}$$ with $\eta=2$."
    for text, expected in ("Let $\\omega > 0$.", ["\\omega"]), ("Take $\\omega$.", []):
        result = [letter for _, letter in strangers(text + equation, allowed)]
        assert result == expected


def test_every_entry_of_the_glossary_is_used_on_the_pages_that_it_names():
    entries = re.findall(r"^- \*\*(.+?)\*\*(.*)$", text_of("glossary.ipynb"), re.M)
    for term, line in entries:
        for page in re.findall(r"\]\(([^)]+\.ipynb)\)", line):
            text = text_of(page, ("markdown", "code"))
            assert re.search(rf"\b{re.escape(term)}", text, re.I), (
                f"{term!r} of the glossary is not used in {page}"
            )
