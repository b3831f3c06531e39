"""Getting ready for domains that join."""

import pytest

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.remote.frames import Preparing, Refused
from jaxserve.link.remote.turns import Turns
from jaxserve.link.remote.work import MOST_SIZES, Preparations


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

    def warm_up(self, sizes):
        pass


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def ask(work):
    """Asks and waits for what that begins."""
    preparations = Preparations(work, Turns(lambda: False))

    def ask(pieces, rows):
        answer = preparations.ask(pieces, rows)
        for thread in list(preparations._threads.values()):
            thread.join(10)
        return answer

    return ask


def test_a_failure_is_told_and_the_next_to_ask_has_it_tried_again(work, ask):
    compiles = Preparing("compiles for messages of 2 pieces of 3, 5 rows")
    work.fails = "no space left"
    assert ask(2, [5, 3]) == compiles
    problem = "no programs for messages of 2 pieces of 3, 5 rows: OSError: no space left"
    assert ask(2, [5, 3]) == Refused(problem)
    work.fails = ""
    assert ask(2, [5, 3]) == compiles
    assert ask(2, [5, 3]) is None


def test_sizes_that_failed_leave_room_for_others(work, ask):
    work.fails = "no space left"
    ask(1, range(1, MOST_SIZES + 1))
    work.fails = ""
    assert ask(2, [7]) == Preparing("compiles for messages of 2 pieces of 7 rows")
    assert ask(2, [7]) is None
    ask(3, range(1, MOST_SIZES))
    refused = Refused("4 pieces of 1 rows: more than 128 sizes of messages")
    assert ask(4, [1]) == refused
