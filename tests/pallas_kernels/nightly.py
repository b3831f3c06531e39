"""Marks of cases."""

from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Cases of `parametrize` that `make nightly` alone has; a tuple holds several arguments."""
    tuples = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in tuples]
