import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocations and frees, against lists of owned pages."""

    def __init__(self):
        super().__init__()
        self.pool = PageAllocator(13)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = 13 - sum(map(len, self.owned))
        page_ids = self.pool.allocate(count)
        if count > free:
            assert page_ids is None
        else:
            assert page_ids is not None
            assert len(page_ids) == count
            self.owned.append(page_ids)

    @rule(data=st.data())
    def free(self, data):
        if self.owned:
            self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(data=st.data())
    def free_in_parts(self, data):
        if self.owned:
            page_ids = self.owned.pop()
            middle = data.draw(st.integers(0, len(page_ids)))
            self.pool.free(page_ids[middle:])
            self.owned.append(page_ids[:middle])

    @invariant()
    def adds_up(self):
        self.pool.check_integrity(self.owned)
        assert self.pool.free_pages == 13 - sum(map(len, self.owned))


class TestPool(PoolMachine.TestCase):
    settings = settings(max_examples=50)


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
