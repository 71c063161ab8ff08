"""Test the second plan: searches request the runs that they need, and looks request seeds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhorn_kit.lab.claims.looks import (
    EXTRA,
    LOOKS,
    Looks,
    Search,
    all_looks,
    at_end,
    common_place,
    fit_growth,
    fit_tokens,
    rate_at,
    rows_of_claim,
    runs_of,
    stage_of,
    walk,
)
from longhorn_kit.lab.claims.one_pass_plan import RATES
from longhorn_kit.lab.claims.second_plan import (
    ALL_MODELS,
    LAPTOP_QUESTIONS,
    POOLS,
    QUESTIONS,
    below,
    questions_of,
)
from longhorn_kit.lab.claims.stats import PLAN_SD

SEEDS = (1, 2, 3)


def run_search(loss, count=7):
    "Run a search until it ends, with `loss(position, seed)`."
    losses = {}
    for _ in range(40):
        search = Search(losses, SEEDS, count)
        missing = [run for run in search.requested if run not in losses]
        if not missing:
            return search
        losses |= {run: loss(*run) for run in missing}
    raise AssertionError("the search does not end")


def parabola(centre, seed=0, edge=math.inf):
    generator = np.random.default_rng(seed)
    noise = generator.normal(0, PLAN_SD, (60, 4))
    return lambda position, number: (
        2.0
        if position > edge
        else 1.3 + 0.01 * (position - centre) ** 2 + noise[int(2 * position) + 10, number]
    )


@pytest.mark.parametrize(
    "position, rate", [(3, 5e-3), (0, 1.25e-3), (6, 2e-2), (3.5, 6.3e-3), (7, 3.2e-2), (-2, 5e-4)]
)
def test_rates_lie_on_the_grid_between_its_rates_and_beyond_it(position, rate):
    assert rate_at(RATES, position) == rate


@given(st.lists(st.floats(0, 10) | st.just(math.nan), min_size=11, max_size=11))
def test_walk_ends_where_both_neighbours_are_worse_or_at_the_end_of_the_extended_grid(curve):
    losses = {}
    visited, best = walk(losses, 7)
    for _ in range(12):
        if best is not None:
            break
        losses[visited[-1]] = curve[visited[-1] + EXTRA]
        visited, best = walk(losses, 7)

    def worst(position):
        return math.inf if math.isnan(losses[position]) else losses[position]

    assert visited[0] == 3
    assert set(visited) == losses.keys()
    for near in (best - 1, best + 1):
        if -EXTRA <= near < 7 + EXTRA:
            assert worst(near) >= worst(best)


@given(st.floats(0.6, 5.4), st.integers(0, 50))
def test_a_search_ends_near_the_optimum_with_three_seeds_at_the_best_rate_and_its_neighbours(
    centre, seed
):
    search = run_search(parabola(centre, seed))
    assert abs(search.best - centre) < 1.3
    assert not search.why
    places = (search.best - 1, search.best, search.best + 1)
    for position in places:
        for number in SEEDS:
            assert (position, number) in search.losses


def test_half_a_step_takes_the_place_of_a_neighbour_that_explodes():
    search = run_search(parabola(3.0, edge=3.6))
    positions = {position for position, _ in search.requested}
    assert positions == {2, 3, 3.5, 4}
    assert search.best in (2, 3, 3.5)
    assert (4, 2) not in search.requested, "one seed shows that the step diverges"
    both = run_search(parabola(3.0, edge=3.2))
    assert (3.5, 1) in both.requested, "no neighbour on this side is left"
    assert (3.5, 2) not in both.requested, "no neighbour on this side is left"


def test_a_search_moves_to_a_better_neighbour_once():
    curve = {2: 1.300, 3: 1.298, 4: 1.280, 5: 1.260, 6: 1.250}
    # the search's first seed has a low loss at position 3 by chance
    first = {2: 1.300, 3: 1.270, 4: 1.280, 5: 1.300, 6: 1.310}
    search = run_search(lambda position, seed: (first if seed == 1 else curve)[position])
    assert search.best == 4, "5 is better than 4, but the search moves at most once"


def test_a_search_that_finds_no_rate_says_why():
    assert "end of the extended grid" in run_search(parabola(12.0)).why
    lost = run_search(lambda position, seed: math.nan)
    assert (
        lost.best is None
        and lost.done()
        and "diverged" in lost.why
        or "end of the extended" in lost.why
    )


@given(st.integers(0, 30))
def test_further_losses_do_not_change_what_a_search_asked_for(seed):
    loss = parabola(3.4, seed)
    search = run_search(loss)
    more = search.losses | {
        (position, number): loss(position, number) for position in (0, 1, 5, 6) for number in SEEDS
    }
    assert Search(more, SEEDS, 7).requested == search.requested


def model(name, loss, seeds=4, seed=0, position=3, common=3, sd=PLAN_SD, why=""):
    "Return a model of a record, with losses around a parabola."
    rng = np.random.default_rng(seed)

    def at(where):
        return {
            "place": where,
            "bits_per_byte": loss + 0.004 * (where - 3) ** 2 + rng.normal(0, sd),
        }

    search = [at(where) for where in (2, 3, 4) for _ in SEEDS]
    return {
        "name": name,
        "place": None if why else position,
        "lr": 5e-3,
        "common": common,
        "why": why,
        "search": search,
        "runs": [at(position) for _ in range(seeds)],
        "one_rate": [at(common) for _ in range(seeds)],
    }


def paper(losses, **options):
    names = [planned.name for planned in POOLS["paper"].models]
    return {
        "paper": [
            model(name, loss, seed=i, **options)
            for i, (name, loss) in enumerate(zip(names, losses))
        ]
    }


def looks_at(pools, family="best rates"):
    questions = questions_of(tuple(pools))
    return Looks(pools, questions and {"one-pass": QUESTIONS["one-pass"]}, family)


def test_only_open_comparisons_ask_for_more_seeds():
    looks = looks_at(paper((1.300, 1.302, 1.330, 1.300)))
    assert looks.needs == {
        "exact N=16": 8,
        "diagonal N=16": 8,
        "Mamba N=16": 4,
        "exact N=16, key norm": 4,
    }
    sides = [judgement.side for judgement in looks.judged["one-pass"]]
    assert sides == ["ahead", "ahead", ""]
    assert not looks.done()
    decided = looks_at(paper((1.300, 1.320, 1.340, 1.300)))
    needs = set(decided.needs.values())
    assert needs == {4}
    assert decided.done()


def test_a_verdict_keeps_its_bar_when_more_seeds_come():
    first = looks_at(paper((1.300, 1.302, 1.330, 1.300))).judged["one-pass"]
    later = looks_at(paper((1.300, 1.302, 1.330, 1.300), seeds=8)).judged["one-pass"]
    pairs = zip(first[:2], later[:2])
    for before, after in pairs:
        assert before.low == after.low
        assert before.high == after.high
        assert before.verdict == after.verdict
        assert before.look == 4


def test_no_look_is_taken_before_every_model_has_its_seeds():
    pools = paper((1.3, 1.31, 1.33, 1.3))
    # a model of the pool that is in no comparison here
    pools["paper"][3]["runs"] = pools["paper"][3]["runs"][:3]
    assert looks_at(pools).judged == {}
    pools["paper"][3] |= {"why": "every learning rate of the walk diverged", "place": None}
    judged = looks_at(pools).judged["one-pass"]
    assert len(judged) == 3


def test_a_second_look_waits_for_the_first_look_of_every_claim_that_can_ask_for_more():
    pools = paper((1.300, 1.302, 1.330, 1.300), seeds=8)
    names = ("exact N=32", "diagonal N=32")
    pools["middle-state"] = [model(name, 1.3, seeds=3, seed=9 + i) for i, name in enumerate(names)]
    waiting = below("exact N=16", "exact N=32")
    questions = {
        "one-pass": QUESTIONS["one-pass"],
        "other": QUESTIONS["control"].__class__((waiting,)),
    }
    fits = Looks(pools, questions).fits["one-pass"]
    assert len(fits) == 1
    pools["middle-state"] = [model(name, 1.3, seeds=4, seed=9 + i) for i, name in enumerate(names)]
    fits = Looks(pools, questions).fits["one-pass"]
    assert len(fits) == 2


def test_a_model_without_a_rate_gives_no_verdict_and_asks_for_nothing():
    pools = paper((1.300, 1.302, 1.330, 1.300))
    pools["paper"][0] = model("exact N=16", 1.3, why="every learning rate of the walk diverged")
    looks = looks_at(pools)
    verdicts = [judgement.verdict for judgement in looks.judged["one-pass"]]
    result = verdicts[1:]
    assert result == ["cannot be judged"] * 2
    assert looks.needs["exact N=16"] == 4
    assert looks.needs["diagonal N=16"] == 4


def test_the_common_rate_is_the_best_one_for_the_mean_of_the_models():
    models = paper((1.3, 1.31, 1.33, 1.3))["paper"]
    for loss, entry in zip((0.0, 0.05, 0.0, 0.0), models):
        for run in entry["search"]:
            run["bits_per_byte"] = 1.3 + (loss if run["place"] == 3 else 0.02 * (run["place"] != 4))
    models[0]["place"] = 3
    models[1]["place"] = 4
    assert common_place(models) == (4, [])
    models[2]["search"] = [run for run in models[2]["search"] if run["place"] != 4]
    expected = (None, [(models[2]["name"], 4)])
    assert common_place(models) == expected, "a run at 4 is missing"
    models[3]["place"] = None
    assert common_place(models) == (None, []), "a search is not done"


def test_at_one_rate_a_model_whose_best_rate_is_the_common_one_is_not_run_again():
    same = model("a", 1.3, common=3)
    other = model("b", 1.3, common=4)
    assert runs_of(same, "one rate") is same["runs"]
    assert runs_of(other, "one rate") is other["one_rate"]
    exploded = model("c", 1.3, common=4)
    exploded["one_rate"][1]["bits_per_byte"] = 1.9
    pools = {
        "paper": [
            same | {"name": "exact N=16"},
            other | {"name": "diagonal N=16"},
            exploded | {"name": "Mamba N=16"},
            model("exact N=16, key norm", 1.3),
        ]
    }
    judged = looks_at(pools, "one rate").judged["one-pass"]
    words = [judgement.verdict for judgement in judged]
    assert words[:2] == ["cannot be judged"] * 2
    judged = looks_at(pools, "one rate").judged["one-pass"]
    assert "1 of 4 runs exploded" in judged[0].why


def test_stages_follow_one_another():
    pools = paper((1.300, 1.320, 1.340, 1.300))
    looks = list(all_looks(pools))
    assert looks == [(0, "best rates"), (0, "one rate")]
    pools["paper"][0]["runs"] = []
    looks = list(all_looks(pools))
    assert looks == [(0, "best rates")]
    assert [
        stage_of(pool) for pool in ("paper", "middle-state", "one-rate", "control", "laptop")
    ] == [0, 0, 1, 2, 0]


def record(pools):
    return {"settings": {"sd": PLAN_SD}, "results": {"groups": pools, "plan": {"rule": "looks"}}}


def test_rows_of_a_claim_name_their_family_and_what_is_missing():
    rows = rows_of_claim(record(paper((1.300, 1.320, 1.340, 1.300))), "one-pass")
    assert len(rows) == 6
    assert all(judgement.verdict == "holds" for _, judgement in rows)
    result = [comparison.label.endswith("one learning rate for all") for comparison, _ in rows]
    expected = [False] * 3 + [True] * 3
    assert result == expected
    comparison = rows[0][0]
    assert comparison.published == pytest.approx(0.0044)
    early = paper((1.300, 1.320, 1.340, 1.300), seeds=2)
    comparison, judgement = rows_of_claim(record(early), "one-pass")[0]
    assert judgement.verdict == "not run"
    assert judgement.why == "2 of 4 seeds so far"
    assert comparison.waits
    assert (
        rows_of_claim(record(early), "one-pass")[3][1].why
        == "its runs follow when earlier ones have ended"
    )
    assert rows_of_claim(record(early), "equal-state") == [], "its groups are not in the record"


def test_growth_with_the_context_is_read_from_the_judged_runs():
    pools = paper((1.300, 1.320, 1.340, 1.300))
    for entry, grows in zip(pools["paper"], (0.001, 0.1, 0.0, 0.0)):  # exact first
        for i, run in enumerate(entry["runs"]):
            growing = 1.0 + grows + i * 1e-4
            docs = {"documents": 3, "bits_per_byte": [1.0, 1.1, growing]}
            none = {"documents": 0, "bits_per_byte": [None] * 3}
            run["measured"] = {"by_length": {"length": [8, 64, 128], "docs": docs, "prose": none}}
    fit = fit_growth(pools["paper"][0], 4)
    expected = 0.00115 - math.log2(1.01)
    assert fit.value == pytest.approx(expected)
    rows = rows_of_claim(record(pools), "extrapolation-once")
    verdicts = [judgement.verdict for _, judgement in rows]
    assert verdicts == ["does not hold", "holds"]
    pools["paper"][0]["runs"][2]["measured"]["by_length"]["docs"]["documents"] = 0
    fit = fit_growth(pools["paper"][0], 4)
    assert fit.why == "no document reaches 16 times the context"


def curves(losses, tokens=(50, 100)):
    return {
        "why": "",
        "runs": [{"val": {"tokens": list(tokens), "all": [loss + 1, loss]}} for loss in losses],
    }


@given(
    st.lists(st.floats(1, 2), min_size=4, max_size=4),
    st.lists(st.floats(1, 2), min_size=4, max_size=4),
)
def test_saved_tokens_are_antisymmetric(a, b):
    def value(fits):
        return fits[1].value - fits[0].value

    forth = fit_tokens(curves(a), curves(b), 4)
    back = fit_tokens(curves(b), curves(a), 4)
    difference = abs(np.mean(a) - np.mean(b))
    if difference > 1e-9:
        expected = -value(back)
        assert value(forth) == pytest.approx(expected, abs=1e-6)
        result = value(forth) >= -1e-9
        expected = np.mean(a) <= np.mean(b)
        assert result == expected


def test_saved_tokens_of_straight_curves():
    flat = curves([1.0] * 4)
    higher = curves([1.5] * 4)
    first, second = fit_tokens(flat, higher, 4)
    assert second.value - first.value == pytest.approx(25.0), (
        "1.5 is reached after 75 of 100 tokens"
    )


def test_the_plan_is_complete():
    result = set().union(*(question.models() for question in QUESTIONS.values()))
    assert result == ALL_MODELS.keys()
    seeds = [
        seed
        for planned in ALL_MODELS.values()
        for seed in (*planned.search_seeds(), *planned.seeds_to_judge(16))
    ]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) > 1000
    assert at_end(-2, 7)
    assert at_end(8, 7)
    assert not at_end(7, 7)
    assert LOOKS == (4, 8, 16)
    expected_keys = questions_of(("laptop",)).keys()
    assert LAPTOP_QUESTIONS.keys() == expected_keys
