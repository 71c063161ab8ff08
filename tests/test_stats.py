"""The one rule for comparisons, against SciPy's own tests and by its words."""
import dataclasses, math, pytest
from hypothesis import given, strategies as st
from scipy import stats as reference

from longhorn_kit.lab.stats import LEVEL, SEARCH, WORDS, Comparison, holm, judge, measure, show, verdict_table

VALUES = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=3, max_size=9).filter(lambda v: len(set(v)) > 1)


@given(VALUES, st.sampled_from([0.0, 0.5]))
def test_without_a_search_the_interval_and_p_value_are_those_of_the_t_test(values, margin):
    middle, low, high, p = measure(Comparison("x", tuple(values), margin=margin, searched=0))
    expected = reference.ttest_1samp(values, -margin)
    interval = reference.ttest_1samp(values, 0).confidence_interval()
    assert math.isclose(p, expected.pvalue, rel_tol=1e-6, abs_tol=1e-9)
    assert (low, high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)


@given(VALUES, st.integers(1, 4))
def test_a_search_widens_the_interval_by_its_share_of_a_variance(values, searched):
    plain, wide = (measure(Comparison("x", tuple(values), searched=b)) for b in (0, searched))
    ratio = math.sqrt(1 + len(values) * SEARCH / searched)
    assert wide[2] - wide[0] == pytest.approx(ratio * (plain[2] - plain[0])) and wide[3] >= plain[3]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_corrected_p_values_keep_their_order_and_never_shrink(values):
    corrected = holm(values)
    assert all(a <= b <= 1 for a, b in zip(values, corrected))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(corrected[a] <= corrected[b] for a, b in zip(order, order[1:]))
    assert corrected[order[0]] == min(1, len(values) * values[order[0]])


@pytest.mark.parametrize("values, options, word", [
    ((2.0, 2.1, 2.2), {}, "holds"), ((-2.0, -2.1, -2.2), {}, "does not hold"), ((2.0, -1.0, 3.0), {}, "undecided"),
    ((2.0, 2.1), {}, "undecided"), ((2.0,), {}, "cannot be judged"), ((), {}, "not run"),
    ((2.0, 2.1, 2.2), dict(doubt="edge"), "cannot be judged"), ((-0.1, -0.2, -0.1), dict(margin=0.5), "holds"),
    ((-0.7, -0.71, -0.7), dict(margin=0.5), "does not hold"), ((0.0, 0.0, 0.0), {}, "undecided"), ((1.0, 1.0, 1.0), {}, "holds")])
def test_words(values, options, word):
    found = judge([Comparison("x", values, searched=0, **options)])[0]
    assert found.verdict == word and found.n == len(values) and word in WORDS
    assert bool(found.why) == (word == "cannot be judged" or len(values) == 2)


def test_a_claim_with_many_questions_is_harder():
    clear = Comparison("x", (2.0, 3.1, 2.4), searched=0)
    one, many = judge([clear])[0], judge([clear] + [Comparison("y", (-1.0, 2.0, 0.5), searched=0)] * 9)[0]
    assert (one.verdict, many.verdict) == ("holds", "undecided") and many.p == pytest.approx(10 * one.p)
    assert (one.low, one.high) == (many.low, many.high) and "10 comparisons" in many.why
    unjudged = judge([clear] + [Comparison("y", (1.0,))] * 9)[0]
    assert unjudged.p == one.p < LEVEL, "comparisons without a verdict cost nothing"


@pytest.mark.parametrize("asked", [1, 4])
def test_equal_models_get_a_verdict_in_five_per_cent_of_claims(asked):
    import numpy as np
    rng, repeats = np.random.default_rng(0), 1000
    decided = [any(found.verdict != "undecided" for found in judge([Comparison("x", tuple(row), searched=0) for row in rng.standard_normal((asked, 5))]))
               for _ in range(repeats)]
    assert 0.03 < sum(decided) / repeats < 0.07


def test_a_table_has_the_verdicts_and_the_papers_numbers_where_there_are_any():
    ahead, even = Comparison("a above b", (1.0, 1.1, 0.9), searched=0), Comparison("a above c", (1.0, -1.0, 0.1), searched=0)
    title, header, rows = verdict_table(list(zip([ahead, even], judge([ahead, even]))))
    assert (title, header) == ("Verdicts", ["comparison", "difference [95 % interval]", "n", "verdict"])
    assert [row[0] for row in rows] == ["a above b", "a above c"] and [row[2] for row in rows] == [3, 3]
    assert rows[0][3].startswith("holds") and rows[1][3].startswith("undecided") and rows[0][1].startswith("+1.0")
    known = dataclasses.replace(ahead, published=0.5)
    _, header, rows = verdict_table(list(zip([known, even], judge([known, even]))), "Points")
    assert header[-1] == "paper" and rows[0][4] == show(0.5, known.unit) and rows[1][4] == ""
