"""The numbers of the ledger stay as they were (tests/ledger.json).

Kernel times were measured anew; the commits of corrected rows give the reason."""

import json
from pathlib import Path

from longhorn_kit.lab.claims.ledger import ledger, ledger_json

BEFORE = json.loads((Path(__file__).parent / "ledger.json").read_text(encoding="utf-8"))


def test_every_number_of_the_ledger_is_as_before():
    now = json.loads(ledger_json(ledger("recorded runs only")))
    current = {(row["claim"], row["scale"], row["label"]): row for row in now}
    assert len(BEFORE) == 148
    for row in BEFORE:
        here = current[row["claim"], row["scale"], row["label"]]
        assert {name: here[name] for name in row} == row
