"""Pages that are handed out and come back; in any order, also
those of prefix caches: `test_scheduler_simulation.py`."""

import pytest

from jaxserve.engine.pages import PageAllocator
from tests import golden


def test_low_pages_come_first_freed_ones_again_and_never_too_few():
    pool = PageAllocator(4)
    assert (pool.allocate(0), pool.free_pages) == ([], 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.allocate(2), pool.free_pages) == (None, 1)
    pool.free([1, 2])
    assert pool.allocate(3) == [1, 2, 3]


def test_wrong_frees_raise_and_change_nothing():
    pool = PageAllocator(4)
    pool.allocate(3)
    golden.check_arguments("engine/wrong_frees.txt", ValueError, pool.free, {})
    assert pool.free_pages == 1
    golden.check_arguments("engine/wrong_owners.txt", RuntimeError, pool.check_integrity, {})
    pool.check_integrity([[0, 1, 2]])


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
    pool.check_integrity([second])
    pool.quarantine(second)
    assert (pool.free_pages, pool.quarantined) == (5, 3), "the oldest is handed out again"
    pool.check_integrity([])
    pool.absolve([*first, *second])
    assert (pool.free_pages, pool.quarantined) == (8, 0)
    pool.check_integrity([])


def test_low_pages_may_belong_to_nobody():
    pool = PageAllocator(3, first=1)
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.allocate(1), pool.free_pages) == (None, 0)
    pool.check_integrity([[1, 2], [3]])
    with pytest.raises(ValueError, match="page 0 is not in the pool of 3 pages"):
        pool.free([0])
    with pytest.raises(RuntimeError, match=r"foreign pages \[0\]"):
        pool.check_integrity([[0, 1, 2, 3]])
