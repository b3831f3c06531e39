"""Getting ready for domains that join."""

from unittest.mock import Mock

import pytest

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.remote.work import MOST_SIZES, Preparations
from jaxserve.link.session.hello import Refusal


class Work:
    """Compiles what it is asked for, unless it `fails`."""

    def __init__(self) -> None:
        self.fails = ""
        self.compiled: set[MessageSize] = set()

    def ready(self, sizes):
        return self.compiled.issuperset(sizes)

    def compile(self, sizes):
        if self.fails:
            raise OSError(self.fails)
        self.compiled.update(sizes)

    def warm_up(self, sizes): ...


@pytest.fixture
def ask():
    """Asks, waits for what that begins, and returns the refusal and whether to come back."""
    preparations = Preparations(work := Work(), Mock(between=lambda action: action() or 0.0))

    def ask(pieces, rows, together=1):
        try:
            return preparations.ask(pieces, rows, together)
        except Refusal as refusal:
            return str(refusal), refusal.later
        finally:
            for thread in list(preparations._threads.values()):
                thread.join(10)

    ask.work = work
    return ask


def test_a_failure_is_told_and_the_next_to_ask_has_it_tried_again(ask):
    compiles = "compiles for messages of 2 pieces of 3, 5 rows", True
    ask.work.fails = "no space left"
    assert ask(2, [5, 3]) == compiles
    problem = "no programs for messages of 2 pieces of 3, 5 rows: OSError: no space left"
    assert ask(2, [5, 3]) == (problem, False)
    ask.work.fails = ""
    assert ask(2, [5, 3]) == compiles
    assert ask(2, [5, 3]) is None


def test_sizes_that_failed_leave_room_for_others(ask):
    ask.work.fails = "no space left"
    ask(1, range(1, MOST_SIZES + 1))
    ask.work.fails = ""
    assert ask(2, [7]) == ("compiles for messages of 2 pieces of 7 rows", True)
    assert ask(2, [7]) is None
    ask(3, range(1, MOST_SIZES))
    assert ask(4, [1]) == ("4 pieces of 1 rows: more than 128 sizes of messages", False)


def test_a_domain_beside_others_needs_programs_for_their_messages_together(ask):
    ask(2, [3, 5])
    assert ask(2, [3, 5], together=3) == ("compiles for messages of 2 pieces of 3, 5 rows", True)
    assert ask.work.compiled == {MessageSize(2, rows, n) for rows in (3, 5) for n in (1, 2, 4)}
    assert ask(2, [3, 5], together=4) is None
