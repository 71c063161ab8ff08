"""Every number in the book's prose has a source.

The page prints it, a record contains it, or it was published. A *stated number* is one with a unit
of measurement (ms, %, times, bits per byte, ...) and at least two digits, or any decimal of three
digits or more, in a Markdown cell, the README or the index. Round words ("a factor of two", "2 %"),
powers of two and numbers of the kind "64 × 1024" are sizes, not measurements. A stated number must
agree, to all its digits, with a number in one of these places:

1. the page itself: its committed outputs, or a constant of its code;
2. for all pages except those on theory and the lab: a field of `kernels/results` that is measured
   in that unit (`forward_ms`, `scan_us`, `kept_bytes_per_x`, `scan_over_bytes`, ...);
3. the published numbers of `longhorn_kit.lab.claims.published`; for README and index also the
   ledger as it prints.

A wrong number of two digits often agrees by accident: about half of random numbers do. It is best
to print the number in the cell above it. All other numbers are listed below. `DERIVED` has the
formula that gives a number from a record, and the test checks it. `GIVEN` has the reason why no
record of ours can contain a number.
"""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

from longhorn_kit.lab.claims import published as papers
from longhorn_kit.lab.claims import registry as claims
from longhorn_kit.lab.claims.ledger import ledger
from longhorn_kit.records import read_json
from site_build import build

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "nbs/index.ipynb",
    "nbs/stable.md",  # tests/test_bench.py checks kernels/README.md
    *sorted(
        str(path.relative_to(ROOT))
        for part in ("theory", "scan", "models", "lab", "machine")
        for path in (ROOT / "nbs" / part).glob("*.ipynb")
    ),
]

NUMBER = r"(?<![\w.,/^−-])([+−-]?\d+(?:,\d{3})*(?:\.\d+)?)"
SPACE = r"[\s\u00a0\u202f$]*"
# unit as written -> (factors from a printed or recorded value, fields of a record in this unit)
UNITS = {
    r"%|per cent": ((1, 100), r"share|percent"),
    r"points": ((1, 100), "-"),
    r"ms|milliseconds": ((1,), r"_ms$|^S\d$"),
    r"µs|us|microseconds": ((1, 1e3), r"_us$"),
    r"seconds|s": ((1, 1e-3), r"seconds"),
    r"hours": ((1,), "-"),
    r"KiB": ((1, 1 / 1024), r"bytes"),
    r"kB": ((1, 1e-3), r"bytes"),
    r"MiB": ((1, 2**-20), r"bytes"),
    r"MB": ((1, 1e-6), r"bytes"),
    r"GiB": ((1, 2**-30), r"bytes"),
    r"GB": ((1, 1e-9), r"bytes"),
    r"TB/s": ((1, 1e-12), r"^bytes$"),
    r"W|watts": ((1,), r"watts"),
    r"nats|bits (?:a|per) byte|tokens/s|(?:tokens|images) (?:a|per) second": ((1,), "-"),
    r"times|×(?!\s*[\d$])": ((1,), r"_over_"),
}
# a number without a unit, of a table for example
BARE = ((1, 100), r"_ms$|_us$|^S\d$|_over_|share|per_x|error")
UNIT = "|".join(UNITS)
RANGE = rf"(?:{SPACE}±{SPACE}[\d.]+)?"
NEXT = rf"{SPACE}(?:/|,|and|or|to|by|at|and at|and by){SPACE}{NUMBER}"
LIST = re.compile(rf"{NUMBER}{RANGE}(?:{NEXT})*{SPACE}(?P<unit>{UNIT})(?![\w])")
DECIMAL = re.compile(rf"{NUMBER}(?![\w.,]*\w)")


def page_cells(page):
    "Return Markdown, code and outputs of a page as three texts."
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".md"):
        return re.sub(r"```.*?```", "", text, flags=re.S), "", ""
    prose = []
    code = []
    shown = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        (prose if cell["cell_type"] == "markdown" else code).append(source)
        for output in cell.get("outputs", []):
            for kind, data in {"text": output.get("text", ""), **output.get("data", {})}.items():
                if kind.startswith("text"):
                    shown.append("".join(data))
    return "\n\n".join(prose), "\n".join(code), "\n".join(shown)


def value_of(text):
    return float(text.replace(",", "").replace("−", "-"))


def digits(text):
    "Count the significant digits as written."
    return len(re.sub(r"[^\d]", "", text).lstrip("0"))


def is_size(text):
    "Check for a power of two: a length, a width, a number of states."
    value = abs(value_of(text))
    return value == int(value) and value > 0 and math.log2(value).is_integer()


def stated(prose):
    "Return (number, kind: of `UNITS`, as written, context) of every stated number."
    prose = re.sub(
        r"`[^`]*`|https?://\S+|\(\.*/?[\w./-]+\.ipynb[^)]*\)|arXiv[: ][\w.]+", " ", prose
    )  # code, links
    prose = re.sub(
        r"(?i)(?:python|torch|pytorch|triton)\s[\d.]+(?:(?: to|,| and) [\d.]+)*", " ", prose
    )  # versions
    prose = re.sub(r"\b(?:19|20)\d\ds\b", " ", prose)  # decades
    result = {}
    for match in LIST.finditer(prose):
        unit = match["unit"]
        kind = next(kind for pattern, kind in UNITS.items() if re.fullmatch(pattern, unit))
        start, end = match.span()
        for number in re.finditer(NUMBER, match[0]):
            if digits(number[0]) > 1 and not is_size(number[0]):
                result[start + number.start()] = (
                    number[0],
                    kind,
                    f"{number[0]} {unit}",
                    prose[max(0, start - 60) : end + 20],
                )
    for match in DECIMAL.finditer(prose):
        if "." in match[0] and digits(match[0]) > 2 and match.start() not in result:
            result[match.start()] = (
                match[0],
                BARE,
                match[0],
                prose[max(0, match.start() - 60) : match.end() + 20],
            )
    return [result[at] for at in sorted(result)]


def numbers_in(text):
    "Return every number of a text."
    text = re.sub(r"</?[a-z][^<>]*>", " ", text)  # tags of HTML, but not a plain "<"
    return {
        value_of(number)
        for number in re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?", text)
    }


def leaves(value, key=""):
    "Return (key, number) of every number in a JSON value."
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {(key, float(value))}
    parts = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = ((key, part) for part in value)
    return set().union(*(leaves(part, str(name)) for name, part in parts))


@cache
def measured():
    "Return (field, number) of the committed kernel records."
    paths = (ROOT / "kernels/results").glob("*.json")
    return frozenset().union(*(leaves(read_json(path)) for path in paths))


@cache
def published():
    "Return the published numbers of the paper and of others that the ledger quotes."
    tables = (
        papers.OPENWEBTEXT,
        papers.RECALL_INTENSIVE,
        papers.DOWNSTREAM_PERPLEXITY,
        papers.EXTRAPOLATION,
        papers.INDEPENDENT,
    )
    texts = (numbers_in(f"{claim.statement} {claim.published}") for claim in claims.CLAIMS)
    return frozenset({number for table in tables for _, number in leaves(table)}.union(*texts))


@cache
def sources(page):
    "Return the numbers that a page shows or that were published, and fields it may quote."
    _, code, shown = page_cells(page)
    lab = page.startswith("nbs/lab/")
    front = page in ("README.md", "nbs/index.ipynb")
    result = numbers_in(str(ledger("no runs"))) if front else set()
    if page == "README.md":  # tests/test_site.py checks these blocks
        result |= numbers_in("\n".join(build.readme_blocks().values()))
    return numbers_in(code) | numbers_in(
        shown
    ) | result | published(), frozenset() if lab or page.startswith("nbs/theory/") else measured()


def agrees(text, kind, page):
    "Check whether some value agrees with the stated number to all its digits."
    shown, records = sources(page)
    factors, fields = kind
    number = abs(value_of(text))
    places = len(text.partition(".")[2])
    half = 0.5 * 10**-places * (1 + 1e-9)
    values = shown | {value for field, value in records if re.search(fields, field)}
    return any(abs(abs(value) * factor - number) <= half for value in values for factor in factors)


def kernel(section, shape, form):
    "Return (forward, backward) ms of the fast kernels on the H200."
    rows = read_json(ROOT / claims.Claim.times)["rows"]
    return next(
        (row["forward_ms"], row["backward_ms"])
        for row in rows
        if (row["section"], row.get("shape"), row.get("form")) == (section, shape, form)
        and row["z"]
        and not row["state"]
    )


def exact_step(part, change, shape):
    "Return the time of one version of the exact kernels in ms, the better of two rounds."
    rows = read_json(ROOT / "kernels/results/h200_exact_steps.json")[part]
    return min(next(row[shape] for row in rows if row["change"] == change))


def small_memory(shape, form):
    "Return the extra time without stored states, in per cent."
    return 100 * (sum(kernel("memory", shape, form)) / sum(kernel("main", shape, form)) - 1)


def against_plain(section, shape, form, way):
    "Return the time of a case over the plain time at S1; way 0 is forward, 1 backward."
    words = ("plain_forward_ms", "plain_backward_ms")[
        way
    ]  # S1 of the run that measured the case, if it is an earlier run
    rows = [
        row
        for row in read_json(ROOT / claims.Claim.times)["rows"]
        if (row["section"], row.get("shape"), row.get("form")) == (section, shape, form)
    ]
    return kernel(section, shape, form)[way] / rows[0].get(words, kernel("main", "S1", form)[way])


def lead(size, first, second):
    losses = papers.OPENWEBTEXT[size]
    return losses[second] - losses[first]


def laptop_run(mixer):
    runs = read_json(ROOT / "nbs/lab/results/language/laptop.json")["results"]["runs"]
    return next(run for run in runs if run["mixer"] == mixer)


def lead_per_byte():
    "Return the paper's lead over Mamba in bits per byte, with our bytes per GPT-2 token."
    texts = read_json(ROOT / "nbs/lab/results/language/gpu.json")["results"]["domains"].values()
    bytes_per_token = sum(text["bytes"] for text in texts) / sum(text["tokens"] for text in texts)
    return lead("120M", "longhorn", "mamba") / math.log(2) / bytes_per_token


def language_cache():
    "Return the bytes of attention's cache over those of Longhorn, at the longest context."
    attention, longhorn = (
        laptop_run(mixer)["decode"]["numbers"][-1] for mixer in ("attention", "longhorn")
    )
    return attention / longhorn


def backward_counter(name):
    "Return a profiler counter of the diagonal backward with lane exchanges, in per cent."
    record = read_json(ROOT / "kernels/results/h200_diagonal_steps.json")
    return 100 * record["counters"]["backward_meetings"][name]


DERIVED = {  # page -> number as written -> formula, which must give the number
    **{page: {"0.0044 bits per byte": lead_per_byte} for page in ("README.md", "nbs/index.ipynb")},
    "nbs/machine/memory.ipynb": {"13 GB": lambda: 64 * 1024 * 50304 * 4 / 1e9},
    "nbs/machine/training.ipynb": {"5.55 nats": lambda: math.log(256)},
    "nbs/machine/language_experiment.ipynb": {"200 times": language_cache},
    "nbs/lab/36_one_pass.ipynb": {"0.013 nats": lambda: lead("120M", "longhorn", "mamba")},
    "nbs/models/20_mixer.ipynb": {
        "0.037 nats": lambda: lead("120M", "longhorn", "longhorn_scalar")
    },
    "nbs/theory/01_objective.ipynb": {
        "2.42": lambda: 0.5 * 2.2**2,
        "−1.42": lambda: 1 - 0.5 * 2.2**2,
    },
    "nbs/theory/02_closed_forms.ipynb": {
        "-11.1": lambda: -math.log(65504)
    },  # the largest number of float16
    "nbs/scan/10_reference.ipynb": {"0.75 MiB": lambda: 8 * 1536 * 16 * 4 / 2**20},
    "nbs/scan/13_triton_diagonal.ipynb": {
        "21 %": lambda: small_memory("S1", "diagonal"),
        "19 %": lambda: small_memory("S2", "diagonal"),
    },
    "nbs/machine/triton_diagonal_backward.ipynb": {
        "57 %": lambda: backward_counter("l1"),
        "72 %": lambda: backward_counter("issue_slots_busy"),
    },
    "nbs/machine/triton_exact_backward.ipynb": {
        "3.89 ms": lambda: exact_step(
            "backward_other", "bias and skip in shared memory, parts made at every use", "S3"
        )
    },
    "nbs/machine/speed_options.ipynb": {
        "1.13 times": lambda: against_plain("ragged", "S1, D=2044", "exact", 0),
        "1.20 times": lambda: against_plain("ragged", "S1, D=2044", "exact", 1),
        "0.620 ms": lambda: exact_step(
            "backward", "the version before, measured a second time", "D2044"
        ),
        "0.519 ms": lambda: exact_step(
            "backward", "sums late above 16 states; small copies get first cache", "D2044"
        ),
        "0.518 ms": lambda: exact_step(
            "backward_other",
            "small copies get first cache, others shared memory for four programs",
            "D2044",
        ),
        "1.38 times": lambda: against_plain("ragged", "S1, D=2047", "diagonal", 0),
        "1.35 times": lambda: against_plain("ragged", "S1, D=2047", "diagonal", 1),
    },
    "nbs/scan/16_speed.ipynb": {
        "2.93 times": lambda: against_plain("N", "S1, N=64", "diagonal", 1),
        "2.87 times": lambda: against_plain("N", "S1, N=64", "exact", 1),
    },
}
GIVEN = {}  # page -> number as written -> why no record contains it


def unsourced(page):
    stored = {**GIVEN.get(page, {}), **DERIVED.get(page, {})}
    return [
        (written, " ".join(context.split()))
        for text, kind, written, context in stated(page_cells(page)[0])
        if written not in stored and not agrees(text, kind, page)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_stated_number_has_a_source(page):
    missing = unsourced(page)
    assert not missing, (
        f"{page}: print these, or give their source in tests/test_prose.py:\n"
        + "\n".join(f"  {written!r} in '... {context} ...'" for written, context in missing)
    )


@pytest.mark.parametrize("page", [*GIVEN, *DERIVED])
def test_derived_numbers_are_what_their_formulas_give_and_no_exception_outlives_its_number(page):
    stands = {each for _, _, each, _ in stated(page_cells(page)[0])}
    assert {*GIVEN.get(page, {}), *DERIVED.get(page, {})} <= stands
    for written, formula in DERIVED.get(page, {}).items():
        number = re.match(NUMBER, written)[0].replace(",", "").replace("−", "-")
        zeros = len(number) - len(number.rstrip("0")) if "." not in number else 0
        half = 0.5 * 10 ** (zeros - len(number.partition(".")[2]))
        assert formula() == pytest.approx(value_of(number), abs=half * (1 + 1e-9)), written


@pytest.mark.parametrize(
    "prose, expected",
    [
        ("takes 0.18 ms, or 1.5 times as long", ["0.18 ms", "1.5 times"]),
        ("0.17 / 0.55 and 3.3 ms", ["0.17 ms", "0.55 ms", "3.3 ms"]),
        ("by 12 and by 15 points", ["12 points", "15 points"]),
        ("of $0.013$ nats", ["0.013 nats"]),
        ("$92.5 \\pm 0.4$ %", ["92.5"]),
        ("92.5 ± 0.4 %", ["92.5 %"]),
        ("1,234 tokens per second", ["1,234 tokens per second"]),
        ("costs −2.61 then", ["−2.61"]),
        ("64 × 1024 at 2 % with 128 W", []),
        ("`0.123 ms` in [x](../a/12_b.ipynb) of arXiv 2407.14207 on Python 3.11 to 3.13", []),
    ],
)
def test_what_counts_as_stated(prose, expected):
    assert [written for _, _, written, _ in stated(prose)] == expected


def test_a_wrong_number_is_found(monkeypatch):
    page = "nbs/scan/16_speed.ipynb"
    prose, code, shown = page_cells(page)
    right = f"{kernel('main', 'S1', 's6')[1]:.3f} ms"
    monkeypatch.setitem(
        globals(), "page_cells", lambda page: (prose.replace(right, "0.913 ms"), code, shown)
    )
    assert right in prose
    assert [written for written, _ in unsourced(page)] == ["0.913 ms"]
