"""Which part of a planned fleet is simulated. Whole plans: `test_deploy_command.py`."""

from types import SimpleNamespace

import pytest

from jaxserve.fleet.planned_fleet import _part


def fleet(workers: int, units: int, groups: int = 8, sequences: float = 100.0):
    worker = SimpleNamespace(layout=SimpleNamespace(dp=groups))
    return SimpleNamespace(worker=worker, workers=workers, units=units, sequences=sequences * units)


@pytest.mark.parametrize(
    ("made", "prefill", "decode", "whole"),
    [
        (fleet(2, 3), (2, 3), (0, 3), (2, 3)),  # small: all of it
        (fleet(80, 40), (8, 4), (0, 10), (20, 10)),
        (fleet(30, 41, sequences=128), (8, 11), (0, 8), (8, 11)),  # 30 to 41 is nearly 8 to 11
        (fleet(3, 4, sequences=2000), (3, 4), (0, 1), (3, 4)),  # no fewer have the proportion
        (fleet(9, 3, groups=64), (2, 1), (0, 3), (9, 3)),
    ],
)
def test_a_part_in_the_proportions_of_the_whole(made, prefill, decode, whole):
    found = [_part(made, part) for part in ("prefill", "decode", "whole")]
    assert found == [prefill, decode, whole]
