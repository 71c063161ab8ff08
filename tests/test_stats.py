"""Check comparison rules against least squares, SciPy's tests, closed testing, and wording."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from longhorn_kit.lab.claims.stats import (
    FLATTEST,
    LEVEL,
    LOOKS,
    PLAN_SD,
    SEARCH,
    WORDS,
    Comparison,
    Contrast,
    Fit,
    fit_mean,
    fit_rates,
    fit_share,
    holm,
    is_open,
    judge,
    judge_looks,
    measure,
    show,
    spreads,
    verdict_table,
)

VALUES = st.lists(
    st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=3, max_size=9
).filter(lambda v: len(set(v)) > 1)


@given(VALUES, st.sampled_from([0.0, 0.5]))
def test_without_a_search_the_interval_and_p_value_are_those_of_the_t_test(values, margin):
    middle, low, high, p = measure(Comparison("x", tuple(values), margin=margin, searched=0))
    expected = reference.ttest_1samp(values, -margin)
    interval = reference.ttest_1samp(values, 0).confidence_interval()
    assert math.isclose(p, expected.pvalue, rel_tol=1e-6, abs_tol=1e-9)
    assert low == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert high == pytest.approx(interval.high, rel=1e-6, abs=1e-9)


@given(VALUES, st.integers(1, 4))
def test_a_search_widens_the_interval_by_its_share_of_a_variance(values, searched):
    plain = measure(Comparison("x", tuple(values), searched=0))
    wide = measure(Comparison("x", tuple(values), searched=searched))
    share = len(values) * SEARCH / searched
    ratio = math.sqrt(1 + share)
    width = wide[2] - wide[0]
    width_without = plain[2] - plain[0]
    assert width == pytest.approx(ratio * width_without)
    assert wide[3] >= plain[3]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_corrected_p_values_keep_their_order_and_never_shrink(values):
    corrected = holm(values)
    for a, b in zip(values, corrected):
        assert a <= b <= 1
    order = sorted(range(len(values)), key=values.__getitem__)
    for a, b in zip(order, order[1:]):
        assert corrected[a] <= corrected[b]
    smallest = values[order[0]]
    expected = min(1, len(values) * smallest)
    assert corrected[order[0]] == expected


@pytest.mark.parametrize(
    "values, options, word",
    [
        ((2.0, 2.1, 2.2), {}, "holds"),
        ((-2.0, -2.1, -2.2), {}, "does not hold"),
        ((2.0, -1.0, 3.0), {}, "undecided"),
        ((2.0, 2.1), {}, "undecided"),
        ((2.0,), {}, "cannot be judged"),
        ((), {}, "not run"),
        ((2.0, 2.1, 2.2), dict(doubt="edge"), "cannot be judged"),
        ((-0.1, -0.2, -0.1), dict(margin=0.5), "holds"),
        ((-0.7, -0.71, -0.7), dict(margin=0.5), "does not hold"),
        ((0.0, 0.0, 0.0), {}, "undecided"),
        ((1.0, 1.0, 1.0), {}, "holds"),
    ],
)
def test_words(values, options, word):
    result = judge([Comparison("x", values, searched=0, **options)])[0]
    assert result.verdict == word
    assert result.n == len(values)
    assert word in WORDS
    expected = word == "cannot be judged" or len(values) == 2
    assert bool(result.why) == expected


def test_a_claim_with_many_questions_is_harder():
    clear = Comparison("x", (2.0, 3.1, 2.4), searched=0)
    one = judge([clear])[0]
    uncertain = Comparison("y", (-1.0, 2.0, 0.5), searched=0)
    many = judge([clear] + [uncertain] * 9)[0]
    assert one.verdict == "holds"
    assert many.verdict == "undecided"
    assert many.p == pytest.approx(10 * one.p)
    assert one.low == many.low
    assert one.high == many.high
    assert "10 comparisons" in many.why
    one_run = Comparison("y", (1.0,))
    unjudged = judge([clear] + [one_run] * 9)[0]
    assert unjudged.p == one.p < LEVEL, "comparisons without a verdict cost nothing"


@pytest.mark.parametrize("questions", [1, 4])
def test_equal_models_get_a_verdict_in_five_per_cent_of_claims(questions):
    rng = np.random.default_rng(0)
    repeats = 1000
    decided = 0
    for _ in range(repeats):
        rows = rng.standard_normal((questions, 5))
        judgements = judge([Comparison("x", tuple(row), searched=0) for row in rows])
        decided += any(judgement.verdict != "undecided" for judgement in judgements)
    assert 0.03 < decided / repeats < 0.07


def test_a_table_has_the_verdicts_and_the_papers_numbers_where_there_are_any():
    ahead = Comparison("a above b", (1.0, 1.1, 0.9), searched=0)
    even = Comparison("a above c", (1.0, -1.0, 0.1), searched=0)
    judged = judge([ahead, even])
    title, header, rows = verdict_table(list(zip([ahead, even], judged)))
    assert title == "Verdicts"
    assert header == ["comparison", "difference [95 % interval]", "n", "verdict"]
    assert [row[0] for row in rows] == ["a above b", "a above c"]
    assert [row[2] for row in rows] == [3, 3]
    assert rows[0][3].startswith("holds")
    assert rows[1][3].startswith("undecided")
    assert rows[0][1].startswith("+1.0")
    published = dataclasses.replace(ahead, published=0.5)
    _, header, rows = verdict_table(
        list(zip([published, even], judge([published, even]))), "Points"
    )
    assert header[-1] == "paper"
    expected = show(0.5, published.unit)
    assert rows[0][4] == expected
    assert rows[1][4] == ""


# the rule with looks

LOSSES = st.lists(st.floats(-3, 3).map(lambda value: round(value, 3)), min_size=3, max_size=9)


def by_least_squares(x, y, flattest):
    "Return the parabola's estimate, weight, squares and degrees of freedom, by `lstsq`."
    A = np.vander(x, 3)
    coefficients, squares, *_ = np.linalg.lstsq(A, y, rcond=None)
    curvature = max(coefficients[0], flattest)
    position = -coefficients[1] / 2 / curvature
    least = 0.75 * min(x)
    most = 0.75 * max(x)
    position = min(max(position, least), most)
    at = np.array([position**2, position, 1])
    # the estimate is this combination of the losses
    weight = np.linalg.lstsq(A.T, at, rcond=None)[0]
    value = np.polyval(coefficients, position)
    variance = (weight**2).sum()
    return value, variance, squares[0], len(x) - 3


@given(LOSSES, LOSSES, LOSSES, st.sampled_from([0.5, 1.0]), st.integers(-2, 9))
def test_the_fit_is_that_of_least_squares(low, middle, high, step, best):
    search = (
        [(best - 1, loss) for loss in low]
        + [(best, loss) for loss in middle[:2]]
        + [(best + step, loss) for loss in high]
    )
    search += [(best + 2, -100.0), (best - 1.5, -100.0)]  # too far away to be used
    judged = middle[2:]
    fit = fit_rates(search, judged, best, sd=1.0)
    left = [-1.0] * len(low)
    centre = [0.0] * len(middle)
    right = [step] * len(high)
    x = left + centre + right
    value, weight, squares, df = by_least_squares(
        np.array(x), np.array(low + middle + high), FLATTEST
    )
    assert fit.value == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert fit.weight == pytest.approx(weight, rel=1e-9, abs=1e-9)
    assert fit.squares == pytest.approx(squares, rel=1e-9, abs=1e-9)
    assert fit.df == df
    assert fit.values == tuple(judged)
    assert fit.exploded == 0
    assert fit.why == ""


@pytest.mark.parametrize(
    "minimum, expected",
    [(0.0, 0.0), (0.4, 0.0), (-0.6, 0.0), (0.75, 0.0), (1.5, 2 * 0.75**2), (-2.0, 2 * 1.25**2)],
)
def test_without_noise_the_estimate_is_the_minimum_up_to_three_quarters_of_a_step(
    minimum, expected
):
    search = [(position, 2 * (position - minimum) ** 2) for position in (-1, 0, 1)]
    judged = [2 * minimum**2] * 2
    fit = fit_rates(search, judged, 0, sd=1.0)
    assert fit.value == pytest.approx(expected, abs=1e-12)
    assert fit.squares == pytest.approx(0, abs=1e-20)


def test_a_line_and_a_hill_are_read_with_the_least_curvature():
    search = [(-1, 0.06), (0, 0.0), (1, -0.06)]
    line = fit_rates(search, [0.0], 0, sd=1.0)
    # slope -0.06, curvature 0.15: 0.2 steps away
    expected = -0.06 * 0.06 / (2 * 0.15)
    assert line.value == pytest.approx(expected)
    search = [(-1, -0.9), (0, 0.0), (1, -1.1)]
    hill = fit_rates(search, [0.0], 0, sd=1.0)
    # the curvature of these losses is -1
    expected = -0.1 / 0.3 * 0.1 - (0.1 / 0.3) ** 2
    assert hill.value == pytest.approx(expected)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_neighbour_at_half_a_step_limits_the_minimum(side):
    # 2 - 2x + x² on the positive side: the minimum is at 1
    search = [(3 - side, 5.0), (3, 2.0), (3 + side / 2, 1.25)]
    fit = fit_rates(search, [2.0], 3, sd=1.0)
    expected = 2 - 2 * 0.375 + 0.375**2
    assert fit.value == pytest.approx(expected)


@pytest.mark.parametrize(
    "neighbours",
    [[(1, 0.5)] * 3, [(1, 0.5)] * 3 + [(-1, 60.0)], [(-1, math.nan), (1, math.nan)], []],
)
def test_with_fewer_than_three_rates_the_estimate_is_the_mean_at_the_best_one(neighbours):
    at_best = [0.1, -0.4, 0.3]
    judged = [0.2, 0.6, -0.1, 0.0]
    searched = [*((0, loss) for loss in at_best), *neighbours]
    fit = fit_rates(searched, judged, 0, sd=1.0)
    values = np.array(at_best + judged)
    mean = values.mean()
    assert fit.value == pytest.approx(mean)
    weight = 1 / 7 + 0.1 / 3
    assert fit.weight == pytest.approx(weight)
    squares = 6 * values.var(ddof=1)
    assert fit.squares == pytest.approx(squares)
    assert fit.df == 6
    assert fit.values == tuple(judged)
    expected = sum(not loss < 50 for _, loss in neighbours)
    assert fit.exploded == expected


@pytest.mark.parametrize("loss, exploded", [(14.9, 0), (15.1, 1), (math.nan, 1), (math.inf, 1)])
def test_an_exploded_run_at_a_neighbour_is_left_out_and_counted(loss, exploded):
    left = [(-1, 1.0)] * 3
    middle = [(0, 0.5), (0, -0.5), (0, 0.0)]
    right = [(1, 1.0)] * 2
    calm = left + middle + right
    search = [*calm, (1, loss)]
    fit = fit_rates(search, [0.0], 0, sd=1.0)
    assert fit.exploded == exploded
    assert fit.why == ""
    expected = 3 + 3 + 2 + 1 + (not exploded) - 3
    assert fit.df == expected
    assert not exploded or fit == dataclasses.replace(fit_rates(calm, [0.0], 0, sd=1.0), exploded=1)


@pytest.mark.parametrize(
    "judged, why",
    [
        ([0.0, 14.9], ""),
        ([0.0, 15.2], "1 of 4 runs exploded"),
        ([10.0, 17.0], ""),  # the mean of the lower three is 3.3
        ([0.1, math.nan], "1 of 4 runs exploded"),
        ([40.0, 41.0, 42.0], "3 of 5 runs exploded"),
        ([math.inf] * 2, "2 of 4 runs exploded"),
    ],
)
def test_an_exploded_run_at_the_best_rate_leaves_no_verdict(judged, why):
    search = [(-1, 1.0), (0, 0.1), (0, -0.1), (1, 1.0)]
    fit = fit_rates(search, judged, 0, sd=1.0)
    assert fit.why == why
    result = math.isnan(fit.value)
    assert result == bool(why)
    assert len(fit.values) == len(judged)


@pytest.mark.parametrize(
    "search, judged, exploded, why",
    [
        ([(-1, 1.0), (0, 0.0), (1, 14.0)], [0.1, 0.3], 0, ""),
        ([(-1, 16.0), (0, 0.0), (1, 2.0)], [0.1, 0.3], 1, ""),
        ([(-1, 0.06), (0, 0.0), (1, -0.06)], [0.0], 0, ""),
        ([(-1, 1.0), (0, 0.0), (1, 1.0)], [0.0, 20.0], 0, "1 of 3 runs exploded"),
    ],
)
def test_every_limit_is_in_planned_standard_deviations(search, judged, exploded, why):
    unit = fit_rates(search, judged, 0, sd=1.0)
    scaled = fit_rates(
        [(position, PLAN_SD * loss) for position, loss in search],
        [PLAN_SD * loss for loss in judged],
        0,
    )
    assert scaled.value == pytest.approx(PLAN_SD * unit.value, nan_ok=True)
    assert scaled.weight == pytest.approx(unit.weight, nan_ok=True)
    for fit in (unit, scaled):
        assert fit.exploded == exploded
        assert fit.why == why


def test_an_end_of_the_grid_and_a_missing_rate_leave_no_verdict():
    search = [(0, 0.0), (1, 1.0)]
    assert "end of the extended grid" in fit_rates(search, [0.1], 0, extended=True).why
    for fit in (fit_rates(search, [], 5), fit_mean([])):
        assert fit.why == "no run at this rate"


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=9))
def test_a_mean_has_the_standard_error_of_the_mean(values):
    fit = fit_mean(values)
    mean = np.mean(values)
    assert fit.value == pytest.approx(mean)
    assert fit.values == tuple(values)
    variance = fit.squares / fit.df * fit.weight
    result = math.sqrt(variance)
    assert result == pytest.approx(reference.sem(values), abs=1e-7)


def test_a_mean_uses_the_residuals_at_the_best_rate_but_no_run_twice():
    best = Fit(0.7, 0.1, 8.0, 10, (0.5, 0.9))
    expected = Fit(2.0, 0.5, 2.0 + 8.0, 11, (1.0, 3.0))
    assert fit_mean([1.0, 3.0], best) == expected
    assert fit_mean([0.5, 0.9], best) == dataclasses.replace(
        fit_mean([0.5, 0.9]), squares=8.0, df=10
    )
    fit = fit_mean([1.0, math.nan], best)
    assert fit.why == "1 of 2 runs exploded"


def fit_of(variance, df, why=""):
    return Fit(0.0, 1 / 4, variance * df, df, why=why)


def test_variances_are_pooled_and_shrunk():
    variances = spreads(
        {
            "a": fit_of(1.0, 10),
            "b": fit_of(2.0, 12),
            "c": fit_of(1.5, 8),
            "lost": fit_of(99.0, 9, "1 of 9 runs exploded"),
        }
    )
    pooled = (10 * 1 + 12 * 2 + 8 * 1.5) / 30
    assert variances.keys() == {"a", "b", "c"}
    variance = (6 * pooled + 10) / 16
    assert variances["a"] == pytest.approx((variance, 16))
    variance = (6 * pooled + 24) / 18
    assert variances["b"] == pytest.approx((variance, 18))


def test_the_order_of_the_models_changes_no_digit_of_a_variance():
    fits = {name: fit_of(variance, 1) for name, variance in zip("abc", (0.1, 0.2, 0.3))}
    for names in itertools.permutations(fits):
        assert spreads({name: fits[name] for name in names}) == spreads(fits)


def test_the_prior_has_no_more_weight_than_the_other_models():
    assert spreads({"alone": fit_of(2.0, 5)}) == {"alone": (2.0, 5)}
    result = spreads({"a": fit_of(2.0, 5), "b": fit_of(4.0, 2)})["a"]
    variance = (2 * 18 / 7 + 10) / 7
    assert result == pytest.approx((variance, 7))
    result = spreads({"one run": fit_of(0.0, 0)})
    expected = {"one run": (math.inf, 1)}
    assert result == expected


@pytest.mark.parametrize("df, others", [(3, 9), (10, 30), (22, 44)])
def test_a_variance_beyond_the_f_test_stays_out_of_the_pool(df, others):
    limit = reference.f.isf(0.001, df, others)
    below, above = (
        spreads(
            {"wide": fit_of(limit * share, df), "x": fit_of(1.0, others - 2), "y": fit_of(1.0, 2)}
        )
        for share in (0.999, 1.001)
    )
    assert below["wide"][1] == df + 6
    assert below["x"][0] > 1
    expected = (limit * 1.001, df)
    assert above["wide"] == pytest.approx(expected)
    assert above["x"][0] == pytest.approx(1)


def test_at_most_one_model_stays_out_of_the_pool():
    variances = spreads(
        {
            "widest": fit_of(500.0, 20),
            "wide": fit_of(100.0, 20),
            "a": fit_of(1.0, 20),
            "b": fit_of(1.0, 20),
            "c": fit_of(1.0, 20),
        }
    )
    assert variances["widest"] == (500.0, 20)
    assert variances["wide"][1] == 26
    assert variances["a"][0] > 1


OWN_GROUPS = {"A": "a", "B": "b", "C": "c", "D": "d"}  # each model has a separate variance
BELOW = (("A", -1), ("B", 1))


def judge_one(contrast, *looks, **options):
    "Return the judgement of one contrast; each model has a separate variance."
    return judge_looks([contrast], list(looks), OWN_GROUPS, **options)[0]


@given(VALUES, VALUES)
def test_two_models_of_separate_groups_are_compared_by_welchs_test(a, b):
    contrast = Contrast("A below B", BELOW, margin=0.0)
    judgement = judge_one(contrast, {"A": fit_mean(a), "B": fit_mean(b)}, level=0.03)
    expected = reference.ttest_ind(b, a, equal_var=False)
    interval = expected.confidence_interval(0.97)
    assert judgement.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)
    assert judgement.low == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert judgement.high == pytest.approx(interval.high, rel=1e-6, abs=1e-9)
    difference = np.mean(b) - np.mean(a)
    assert judgement.difference == pytest.approx(difference)
    expected = min(len(a), len(b))
    assert judgement.n == expected
    assert judgement.level == 0.03


def test_an_interaction_adds_four_variances():
    values = {
        "A": (1.0, 2.0, 4.0),
        "B": (5.0, 5.5, 7.0),
        "C": (0.0, 0.5, 3.0),
        "D": (9.0, 9.5, 9.7),
    }
    weights = (("A", -1), ("B", 1), ("C", 1), ("D", -1))
    fits = {name: fit_mean(runs) for name, runs in values.items()}
    judgement = judge_one(Contrast("interaction", weights), fits)
    parts = [reference.sem(runs) ** 2 for runs in values.values()]
    shares = sum(part**2 / 2 for part in parts)
    df = sum(parts) ** 2 / shares
    difference = sum(weight * np.mean(values[name]) for name, weight in weights)
    error = math.sqrt(sum(parts))
    reach = reference.t.isf(0.01, df) * error
    assert judgement.difference == pytest.approx(difference)
    assert judgement.low == pytest.approx(difference - reach)
    assert judgement.high == pytest.approx(difference + reach)
    assert "rank test" not in judgement.beside
    twice = Contrast("twice", (("A", -2), ("B", 2)), margin=0)
    doubled = judge_one(twice, fits)
    once = judge_one(Contrast("once", BELOW, margin=0), fits)
    assert doubled.difference == pytest.approx(2 * once.difference)
    assert doubled.low == pytest.approx(2 * once.low)
    assert doubled.p == pytest.approx(once.p)


def normal_fit(difference, weight=0.5):
    "Return a fit whose comparison with `BASE` has almost exactly a standard error of 1."
    return Fit(-difference, weight, 1e9, 10**9)


BASE = Fit(0.0, 0.5, 1e9, 10**9)


def compare_normal(differences, margin=0.0, kind="better"):
    """Judge comparisons with `BASE` that have normal p-values.

    There is one list of differences per look, in standard errors; None is missing."""
    names = [str(i) for i in range(len(differences[0]))]
    contrasts = [Contrast(name, ((name, -1), ("base", 1)), kind, margin=margin) for name in names]
    looks = []
    for look in differences:
        fits = {name: normal_fit(d) for name, d in zip(names, look) if d is not None}
        looks.append({"base": BASE} | fits)
    groups = dict.fromkeys([*names, "base"], "group")
    return judge_looks(contrasts, looks, groups, level=0.02)


def closed_test(p_values, level):
    """Return the rejected hypotheses, by Holm's procedure as a closed test.

    A hypothesis is rejected if Bonferroni's test rejects every set that contains it."""
    count = len(p_values)
    sets = []
    for size in range(1, count + 1):
        sets += itertools.combinations(range(count), size)
    falls = [True] * count
    for subset in sets:
        smallest = min(p_values[i] for i in subset)
        rejected = smallest <= level / len(subset)
        for i in subset:
            falls[i] = falls[i] and rejected
    return falls


@given(st.lists(st.floats(-4, 4), min_size=1, max_size=5))
def test_a_side_is_the_closed_test_and_its_bar_excludes_zero(differences):
    judged = compare_normal([differences])
    p_values = [2 * reference.norm.sf(abs(d)) for d in differences]
    expected = []
    for difference, falls in zip(differences, closed_test(p_values, 0.02)):
        side = "ahead" if difference > 0 else "behind"
        expected.append(side if falls else "")
    assert [judgement.side for judgement in judged] == expected
    for judgement in judged:
        decided = bool(judgement.side)
        excludes_zero = judgement.low > 0 or judgement.high < 0
        assert excludes_zero == decided
        assert (judgement.p <= 0.02) == decided


def test_the_level_of_a_bar_follows_the_step_of_the_correction():
    # p 0.92, 0.0005, 0.0037, 0.016, 0.84; steps 0.02/5, 0.02/4, 0.02/3
    judged = compare_normal([[0.1, 3.5, -2.9, 2.4, 0.2]])
    assert [judgement.side for judgement in judged] == ["", "ahead", "behind", "", ""]
    levels = [judgement.level for judgement in judged]
    expected = [0.02 / 3, 0.02 / 5, 0.02 / 4, 0.02 / 3, 0.02 / 3]
    assert levels == pytest.approx(expected)
    reach = reference.norm.isf(0.02 / 3 / 2)
    assert judged[0].low == pytest.approx(0.1 - reach, rel=1e-5)
    assert judged[0].high == pytest.approx(0.1 + reach, rel=1e-5)
    expected = 3 * 2 * reference.norm.sf(2.4)
    assert judged[3].p == pytest.approx(expected, rel=1e-5)


def test_a_decided_comparison_keeps_its_verdict_and_leaves_the_count():
    first = [3.0, 2.4, 1.0]
    second = [0.5, 2.4, 1.0]  # at the second look, the first comparison is no longer ahead
    judged = compare_normal([first, second])
    assert [(judgement.side, judgement.look) for judgement in judged] == [
        ("ahead", 4),
        ("", 0),
        ("", 0),
    ]
    expected = compare_normal([first])[0]
    assert judged[0] == expected
    assert judged[1].level == 0.02 / 2
    # p 0.0093 is significant among two, but not among three
    better = compare_normal([first, [0.5, 2.6, 1.0]])
    assert better[1].side == "ahead"
    assert better[1].look == 8
    assert better[1].level == 0.02 / 2
    judgement = compare_normal([[0.5, 2.6, 1.0]])[1]
    assert judgement.side == ""


@pytest.mark.parametrize("missing", [None, "exploded", "equal"])
def test_a_comparison_without_a_side_still_counts(missing):
    names = ["x", "y"]
    contrasts = [
        Contrast("x", (("x", -1), ("base", 1)), margin=3.0 if missing == "equal" else 0.0),
        Contrast("y", (("y", -1), ("base", 1)), margin=0.0),
    ]
    fits = {"base": BASE, "x": normal_fit(0.0), "y": normal_fit(1.0)}
    # p 0.014 is significant alone, but not among two
    last = {"base": BASE, "x": normal_fit(0.0), "y": normal_fit(2.45)}
    if missing is None:
        del fits["x"], last["x"]
    if missing == "exploded":
        fits["x"] = last["x"] = Fit(math.nan, math.nan, 0.0, 0, why="1 of 7 runs exploded")
    groups = dict.fromkeys([*names, "base"], "group")
    x, y = judge_looks(contrasts, [fits, last], groups)
    assert y.side == ""
    assert y.level == 0.02 / 2
    expected = 2 * 2 * reference.norm.sf(2.45)
    assert y.p == pytest.approx(expected, rel=1e-5)
    assert (x.verdict, x.why) == {
        None: ("not run", ""),
        "exploded": ("cannot be judged", "x: 1 of 7 runs exploded"),
        "equal": ("undecided", ""),
    }[missing]
    groups = dict.fromkeys([*names, "base"], "group")
    alone = judge_looks(contrasts[1:], [fits, last], groups)[0]
    assert alone.side == "ahead"


@pytest.mark.parametrize(
    "kind, difference, verdict, side, still_open",
    [
        ("better", 4.0, "holds", "ahead", False),
        ("better", -4.0, "does not hold", "behind", False),
        ("better", 0.1, "undecided", "equal within the margin", False),
        ("better", 1.5, "undecided", "", True),
        ("as good", 4.0, "holds", "ahead", False),
        ("as good", -4.0, "does not hold", "behind", False),
        ("as good", 0.1, "holds", "equal within the margin", False),
        ("as good", -1.5, "undecided", "", True),
    ],
)
def test_the_word_follows_from_kind_and_side(kind, difference, verdict, side, still_open):
    judgement = compare_normal([[difference]], margin=3.0, kind=kind)[0]
    assert judgement.verdict == verdict
    assert judgement.side == side
    assert judgement.look == (4 if side else 0)
    assert is_open(judgement) == still_open
    assert judgement.verdict in WORDS


def test_equal_is_read_from_the_uncorrected_interval_of_96_per_cent():
    reach = reference.norm.isf(0.02)  # one-sided
    for difference, side in (
        (reach, "equal within the margin"),
        (-reach, "equal within the margin"),
    ):
        just_less = difference - 0.001 * math.copysign(1, difference)
        inside = compare_normal([[just_less, 0.0, 0.0]], margin=2 * reach)[0]
        just_more = difference + 0.001 * math.copysign(1, difference)
        outside = compare_normal([[just_more, 0.0, 0.0]], margin=2 * reach)[0]
        assert inside.side == side
        assert outside.side == ""
        largest = max(-inside.low, inside.high)
        assert largest > 2 * reach  # its bar is corrected
    judgement = compare_normal([[3.0]], margin=9.0)[0]
    assert judgement.side == "ahead"  # also within the margin
    judgement = compare_normal([[0.0]], margin=9.0)[0]
    assert "96% interval" in judgement.beside


def test_better_and_as_good_on_one_pair_are_one_question():
    fits = {"A": normal_fit(2.4), "B": BASE}
    contrasts = [
        Contrast("better", BELOW, margin=0.0),
        Contrast("as good", BELOW, "as good", margin=0.0),
    ]
    judged = judge_looks(contrasts, [fits], dict.fromkeys("AB", "group"))
    assert [judgement.verdict for judgement in judged] == ["holds", "holds"]
    assert judged[0].level == judged[1].level == 0.02


A_RUNS = (1.0, 1.2, 1.1, 0.9)
B_RUNS = (2.0, 2.1, 1.05, 2.3)


def test_runs_are_compared_beside_the_verdict():
    fits = {"A": fit_mean(A_RUNS), "B": fit_mean(B_RUNS)}
    judgement = judge_one(Contrast("A below B", BELOW, published=0.0044), fits)
    p = reference.mannwhitneyu(A_RUNS, B_RUNS, method="exact").pvalue
    # 14 of 16 pairs
    assert (
        judgement.beside
        == f"rank test p = {p:.2g}; a fresh run of A beats one of B: 88% of pairs; "
        "the bar contains "
        "the published +0.0044"
    )
    contrast = Contrast("B below A", (("B", -1), ("A", 1)), published=9.0)
    turned = judge_one(contrast, fits)
    assert "fresh run of B beats one of A: 12%" in turned.beside
    assert "the bar excludes the published +9.0000" in turned.beside


def test_the_rank_test_is_exact():
    # 2 of 252 orders are as extreme
    fits = {"A": fit_mean((1.0, 2.0, 3.0, 4.0, 5.0)), "B": fit_mean((6.0, 7.0, 8.0, 9.0, 9.5))}
    judgement = judge_one(Contrast("A below B", BELOW), fits)
    assert f"rank test p = {2 / 252:.2g};" in judgement.beside


def test_later_data_stand_beside_a_verdict():
    a = fit_mean([1.0, 1.1, 0.9, 1.0])
    b = fit_mean([2.0, 2.1, 1.9, 2.05])
    clear = {"A": a, "B": b}
    a = fit_mean([1.0, 1.1, 0.9, 1.0] * 2)
    b = fit_mean([2.0, 2.1, 1.9, 1.0] * 2)
    more = {"A": a, "B": b}
    contrast = Contrast("A below B", BELOW)
    first, both = (judge_one(contrast, *looks) for looks in ([clear], [clear, more]))
    assert first.side == "ahead"
    assert first.look == 4
    assert dataclasses.replace(both, beside=first.beside) == first
    later = judge_one(contrast, more)
    expected = (
        first.beside
        + f"; all 8 seeds: {later.difference:+.4f} [{later.low:+.4f}, {later.high:+.4f}]"
    )
    assert both.beside == expected
    # no further seeds, so nothing is added
    stopped = judge_one(contrast, clear, clear)
    assert stopped == first
    lost = judge_one(contrast, clear, {**more, "B": fit_mean([math.nan])})
    assert lost.verdict == "holds"
    assert lost.beside.endswith("later: B: 1 of 1 runs exploded")


def test_an_open_comparison_shows_its_last_look():
    looks = [
        {"A": fit_mean([1.0, 3.0, 2.0, 2.5][:2] * n), "B": fit_mean([2.0, 3.5, 1.0, 2.2] * n)}
        for n in (1, 2)
    ]
    judgement = judge_one(Contrast("A below B", BELOW), *looks)
    assert is_open(judgement)
    assert judgement.n == 4
    contrast = Contrast("A below B", BELOW)
    expected = judge_one(contrast, *looks[1:])
    assert judgement == expected
    kept = judge_one(contrast, looks[0], {"A": looks[1]["A"]})
    assert kept.n == 2
    expected = judge_one(contrast, *looks[:1]).difference
    assert kept.difference == expected


def test_exploded_neighbours_are_named_beside_the_verdict():
    search = [(-1, 1.0), (0, 0.0), (1, 80.0)]
    fits = {"A": fit_rates(search, [0.1, 0.3, -0.2, 0.0], 0, sd=1.0), "B": fit_mean(B_RUNS)}
    assert "exploded runs of A left out: 1" in judge_one(Contrast("A below B", BELOW), fits).beside


def test_equal_models_get_a_wrong_verdict_in_about_five_per_cent_of_claims_over_three_looks():
    rng = np.random.default_rng(0)
    names = "ABCD"
    contrasts = [Contrast(name, ((name, -1), ("D", 1)), margin=1.0) for name in "ABC"]
    wrong = 0
    for _ in range(1000):
        runs = rng.standard_normal((4, 16))
        looks = []
        for n in LOOKS:
            fits = {name: fit_mean(values[:n]) for name, values in zip(names, runs)}
            looks.append({name: dataclasses.replace(fit, values=()) for name, fit in fits.items()})
        wrong += any(
            judgement.side in ("ahead", "behind")
            for judgement in judge_looks(contrasts, looks, dict.fromkeys(names, "group"))
        )
    assert 0.025 < wrong / 1000 < 0.08


@pytest.mark.parametrize(
    "wins, runs", [((7, 1), (8, 8)), ((4, 4), (4, 8)), ((0, 5), (8, 8)), ((16, 2), (16, 16))]
)
def test_shares_are_compared_by_fishers_test(wins, runs):
    shares = {}
    for name, win, n in zip("AB", wins, runs):
        outcomes = [True] * win + [False] * (n - win)
        shares[name] = fit_share(outcomes)
    contrast = Contrast("A learns more often", (("A", 1), ("B", -1)), unit="share", margin=0.1)
    judgement = judge_one(contrast, shares)
    table = [[win, n - win] for win, n in zip(wins, runs)]
    expected = reference.fisher_exact(table).pvalue
    assert judgement.p == pytest.approx(expected)
    assert judgement.n == min(runs)
    share = wins[0] / runs[0]
    other_share = wins[1] / runs[1]
    assert judgement.difference == pytest.approx(share - other_share)
    assert judgement.low < judgement.difference < judgement.high
    assert bool(judgement.side) == (judgement.p <= 0.02)
    assert "rank test" not in judgement.beside
    turned = judge_one(
        Contrast("B learns more often", (("B", 1), ("A", -1)), unit="share", margin=0.1), shares
    )
    assert turned.low == pytest.approx(-judgement.high)
    assert turned.high == pytest.approx(-judgement.low)
    assert turned.p == pytest.approx(judgement.p)


def test_the_interval_of_two_shares_is_newcombes():
    # example of Newcombe (1998)
    a = fit_share([True] * 56 + [False] * 14)
    b = fit_share([True] * 48 + [False] * 32)
    shares = {"A": a, "B": b}
    contrast = Contrast("A", (("A", 1), ("B", -1)), unit="share")
    judgement = judge_one(contrast, shares, level=0.05)
    assert judgement.low == pytest.approx(0.0524, abs=5e-5)
    assert judgement.high == pytest.approx(0.3339, abs=5e-5)


def test_impossible_plans_are_refused():
    fits = {"A": fit_mean(A_RUNS), "B": fit_mean(B_RUNS)}
    contrast = Contrast("A below B", BELOW)
    with pytest.raises(ValueError, match="the kind is 'better' or 'as good', not 'equal'"):
        Contrast("A equals B", BELOW, "equal")
    with pytest.raises(ValueError, match="4 looks were taken, but 3 are planned"):
        judge_looks([contrast], [fits] * 4, OWN_GROUPS)
    with pytest.raises(ValueError, match="'B' has no group"):
        judge_looks([contrast], [fits], {"A": "group"})
    with pytest.raises(ValueError, match="a pair of shares has the weights 1 and -1"):
        judge_looks(
            [Contrast("A", (("A", 2), ("B", -2)))],
            [{name: fit_share([True, False]) for name in "AB"}],
            OWN_GROUPS,
        )
    assert [judgement.verdict for judgement in judge_looks([contrast], [], OWN_GROUPS)] == [
        "not run"
    ]


def test_a_table_of_contrasts_has_bars_and_what_stands_beside():
    fits = {"A": fit_mean(A_RUNS), "B": fit_mean(A_RUNS)}
    contrast = Contrast("A below B", BELOW, margin=9.0)
    judgement = judge_one(contrast, fits)
    _, header, rows = verdict_table([(contrast, judgement)])
    assert header == ["comparison", "difference [bar]", "n", "verdict", "beside"]
    assert rows[0][2] == 4
    assert rows[0][3].endswith(": equal within the margin")
    assert rows[0][4] == judgement.beside
    lost = judge_one(contrast, {**fits, "B": fit_mean([math.nan])})
    assert verdict_table([(contrast, lost)])[2][0][1:] == [
        "",
        0,
        "cannot be judged: B: 1 of 1 runs exploded",
    ]
