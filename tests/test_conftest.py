"""Test the sample of long tests that CI runs."""

from conftest import one_case_per_test

CASES = {
    "kills": [f"kills[{n}]" for n in range(40)],
    "layouts": ["layouts[ddp]", "layouts[fsdp]"],
    "fuzz": ["fuzz"],
}


def test_a_sample_has_one_case_of_every_test():
    sample = one_case_per_test(CASES, "1")
    result = sorted(name.partition("[")[0] for name in sample)
    assert result == sorted(CASES)


def test_the_seed_alone_decides():
    turned = {test: names[::-1] for test, names in reversed(CASES.items())}
    samples = [
        one_case_per_test(cases, seed)
        for cases, seed in ((CASES, "1"), (turned, "1"), (CASES, "2"))
    ]
    assert samples[0] == samples[1] != samples[2]
