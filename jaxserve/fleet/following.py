"""Follows the leader in every process of a runtime but the first.

A follower has the same runtime over the same deployment as the leader (`leading.py`), and no engine
(`assembly.open_follower`). `control.py` defines the messages between the two.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import msgspec

from jaxserve.engine.runtime import Driver, Runtime
from jaxserve.fleet.control import COUNTS, MEASURED, SPANS, own_counts
from jaxserve.fleet.follower import Follower
from jaxserve.observe.probe import TAKE_SECONDS, Probe
from jaxserve.observe.recorder import Recorder
from jaxserve.roles.worker import ReadPages, WritePages

if TYPE_CHECKING:
    from jaxserve.roles.page_spread import LedPages


class Following:
    """Runs the leader's plans on a warm runtime, after telling the leader that it is ready.

    Args:
      pages: access to the pages by its number (`roles/worker.py`).
    """

    def __init__(
        self,
        runtime: Runtime,
        follower: Follower,
        recorder: Recorder | None = None,
        pages: Mapping[int, "LedPages"] = {},
    ):
        self._driver, self._follower, self._pages = runtime.driver, follower, pages
        driver = self._driver
        follower.position = lambda: position(driver)
        if recorder is not None:
            follower.answer(SPANS, lambda: _spans(recorder))
        probe = self._probe = Probe(driver, jax.process_index())
        follower.answer(MEASURED, lambda: msgspec.msgpack.encode(probe.take(TAKE_SECONDS / 2)))
        follower.answer(COUNTS, lambda: own_counts(driver.slots))
        follower.ready()

    def run(self) -> None:
        """Runs the leader's plans until it shuts the deployment down.

        Raises:
          EngineFailedError: the leader is gone or sent something invalid.
        """
        driver = self._driver
        for boundary in self._follower.boundaries():
            self._probe.turn(boundary.measured)
            for action in boundary.actions:
                if isinstance(action, ReadPages | WritePages):
                    if (pages := self._pages.get(action.access)) is not None:
                        pages.follow(action)
                elif driver.slots is not None:
                    driver.slots.carry_out(action)
            for plan in boundary.plans:
                driver.begin(plan)
            last = driver.advance().last if driver.active else None
            self._follower.completed(boundary.number, last)


def position(driver: Driver) -> str:
    """Returns the driver's position in the schedule, in words, for errors."""
    if (at := driver.position()) is None:
        return ""
    return "{} of lane {}, layer {}, step {}".format(*at)


def _spans(recorder: Recorder) -> bytes:
    recorder.flush(5.0)
    return msgspec.msgpack.encode(recorder.spans())
