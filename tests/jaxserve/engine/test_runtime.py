import gc
import weakref

import pytest

from jaxserve.engine.runtime import IdleCollection, freeze
from tests import garbage


class Node:
    """Something that can be garbage."""


def ring() -> weakref.ref:
    """A reference to garbage that only a collection finds."""
    one, other = Node(), Node()
    one.other, other.other = other, one
    return weakref.ref(one)


@pytest.fixture(autouse=True)
def no_collections_of_its_own(monkeypatch):
    monkeypatch.setattr(gc, "freeze", garbage.freeze)
    monkeypatch.setattr(gc, "unfreeze", garbage.unfreeze)
    gc.disable()
    yield
    gc.enable()
    garbage.exempt()  # again, what these tests have lifted


def test_freezing_collects_and_exempts_what_is_left():
    kept, ended = Node(), ring()
    kept.itself = kept
    freeze()
    assert ended() is None
    assert gc.get_freeze_count() > 1000
    reference = weakref.ref(kept)
    del kept
    gc.collect()
    assert reference() is not None, "what is frozen is not visited"
    gc.unfreeze()
    gc.collect()
    assert reference() is None


def test_collects_once_after_work():
    collection, first = IdleCollection(), ring()
    collection.idle()
    assert first() is not None
    collection.worked()
    collection.idle()
    assert first() is None
    second = ring()
    collection.idle()
    assert second() is not None
