"""Steps that are written by hand name pages in both tables of a model with windows."""

from jaxserve.roles.layout import Bucket
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows


def test_pages_of_rings_lie_beside_those_of_all_tokens():
    rows = [SequenceRow(1, [7], 9, [4, 6, 2], True)]
    plan = plan_of_rows(0, 0, Bucket(1, 3), [rows], slots=2, rings=4)
    places, page_ids = [0, 1, 2, 3, 4, 5], [4, 0, 6, 2, 2, 2]
    assert plan.new_pages.tolist() == [[1] * 6, places, page_ids]
