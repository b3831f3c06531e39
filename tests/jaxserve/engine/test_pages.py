"""Pages that are handed out and come back; in any order, also
those of prefix caches: `test_scheduler_simulation.py`."""

from array import array

import pytest

from jaxserve.engine.pages import PageAllocator, PageKeys, PageNode, PrefixCache, RingPool
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


def make(pages=8, page_size=2):
    pool = PageAllocator(pages)
    return PrefixCache(pool, page_size), pool


def keys(tokens, salt=""):
    return PageKeys(salt, array("i", tokens), 2)


def put(cache, pool, tokens, salt="", path=None):
    """Publishes the full pages of a sequence; returns the path that it holds."""
    path = cache.match(keys(tokens, salt), len(tokens)) if path is None else path
    cache.acquire(path)
    for _ in range(len(path), len(tokens) // 2):
        (page_id,) = pool.allocate(1)
        assert cache.extend(path, keys(tokens, salt), page_id)
    return path


def page_ids(path):
    return [node.page_id for node in path]


def test_what_is_used_stays_and_the_longest_unused_goes_first():
    cache, pool = make(pages=5)
    first, second = put(cache, pool, [1, 2, 3, 4]), put(cache, pool, [1, 2, 5, 6])
    third = put(cache, pool, [7, 8])
    assert (page_ids(first), page_ids(second), page_ids(third)) == ([0, 1], [0, 2], [3])
    assert cache.idle == 0
    cache.release(second)
    cache.release(third)
    assert cache.idle == 2
    cache.evict(1)
    assert cache.match(keys([1, 2, 5, 6]), 4) == first[:1]
    assert pool.free_pages == 2
    cache.evict(5)
    assert pool.free_pages == 3
    assert cache.match(keys([7, 8]), 2) == []
    cache.release(first)
    assert cache.idle == 2
    cache.evict(1)
    assert cache.match(keys([1, 2, 3, 4]), 4) == first[:1], "a leaf goes before what it stands on"
    cache.evict(1)
    assert pool.free_pages == 5
    list(cache.integrity([]))


def test_a_root_goes_with_its_last_page():
    """Salts are free text: a tree that keeps one root a salt grows without bound."""
    cache, pool = make(pages=2)
    for tenant in range(2000):
        cache.release(put(cache, pool, [1, 2, 3, 4], salt=f"tenant {tenant} \ud800"))
        cache.evict(2)
    assert len(cache._roots) == 0
    path = put(cache, pool, [1, 2, 3, 4], salt="condemned")
    cache.condemn(path)
    assert (len(cache._roots), len(cache._forgotten)) == (0, 1)
    cache.release(path)
    cache.evict(2)
    assert len(cache._forgotten) == 0
    list(cache.integrity([]))


def test_integrity_names_what_is_wrong():
    def call(harm):
        cache, pool = make()
        path = put(cache, pool, [1, 2, 3, 4])
        list(cache.integrity([path]))
        harm(cache, path)
        list(cache.integrity([path]))

    golden.check_arguments("engine/wrong_cache.txt", RuntimeError, call, {})


def test_a_prefix_is_found_where_its_last_window_is_kept():
    """Pages of 2 tokens and a window of 3: the token behind a prefix reads its last page."""
    pool, rings = PageAllocator(3), RingPool(3, 0, window=3, page_size=2)
    cache, own = PrefixCache(pool, 2, rings), keys(range(7))
    path: list[PageNode] = []
    for page_id, ring in zip(pool.allocate(3), rings.allocate(3), strict=True):
        assert cache.extend(path, own, page_id, ring)
    for node, keep in zip(path, (False, False, True), strict=True):
        cache.unread(node, keep=keep)
    cache.release(path)
    found = []
    for _ in range(4):
        found.append([len(cache.match(own, tokens)) for tokens in (6, 4, 2)])
        cache.evict_rings(1)
    assert found == [[3, 2, 1], [3, 1, 1], [3, 0, 0], [0, 0, 0]]
    assert (rings.free_pages, cache.idle) == (3, 3)
    list(cache.integrity([]))
