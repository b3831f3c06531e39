"""Tests left to the nightly run for their time find no fault that no other test finds."""

import json

from tests.conftest import LONG, REPOSITORY


def test_no_killer_of_a_mutant_is_left_to_the_nightly_run() -> None:
    mutants = (REPOSITORY / "tests" / "mutants.jsonl").read_text().splitlines()
    killers = {json.loads(mutant)["killed"].removeprefix("tests/") for mutant in mutants}
    names = LONG.read_text().splitlines()
    assert names == sorted(set(names))
    assert killers.isdisjoint(names)
