"""Pages that are handed out and come back; in any order, also
those of prefix caches: `test_scheduler_simulation.py`."""

import pytest

from jaxserve.engine.pages import PageAllocator
from tests import golden


def test_wrong_frees_raise_and_change_nothing():
    pool = PageAllocator(4)
    pool.allocate(3)
    golden.check_arguments("engine/wrong_frees.txt", ValueError, pool.free, {})
    assert pool.free_pages == 1
    golden.check_arguments(
        "engine/wrong_owners.txt", RuntimeError, lambda owned: list(pool.integrity(owned)), {}
    )
    list(pool.integrity([[0, 1, 2]]))


@pytest.mark.parametrize("count", [0, -1])
def test_no_empty_pools_and_no_negative_requests(count):
    with pytest.raises(ValueError, match="page pool"):
        PageAllocator(count)
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        PageAllocator(1).allocate(-1)


def test_quarantine():
    pool = PageAllocator(8)
    pool.most_quarantined = 3
    first, second = pool.allocate(2), pool.allocate(2)
    pool.quarantine(first)
    assert (pool.free_pages, pool.quarantined) == (4, 2)
    list(pool.integrity([second]))
    pool.quarantine(second)
    assert (pool.free_pages, pool.quarantined) == (5, 3), "the oldest is handed out again"
    list(pool.integrity([]))
    pool.absolve([*first, *second])
    assert (pool.free_pages, pool.quarantined) == (8, 0)
    list(pool.integrity([]))


def test_low_pages_come_first_freed_ones_again_and_the_lowest_may_belong_to_nobody():
    pool = PageAllocator(3, first=1)
    assert (pool.allocate(0), pool.allocate(2), pool.allocate(2)) == ([], [1, 2], None)
    pool.free([1, 2])
    assert (pool.allocate(3), pool.free_pages) == ([1, 2, 3], 0)
    list(pool.integrity([[1, 2], [3]]))
    with pytest.raises(ValueError, match="page 0 is not in the pool of 3 pages"):
        pool.free([0])
    with pytest.raises(RuntimeError, match=r"foreign pages \[0\]"):
        list(pool.integrity([[0, 1, 2, 3]]))
