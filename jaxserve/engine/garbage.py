"""When Python looks for garbage: at start-up, and whenever the engine has nothing else to do.

A full collection visits every object, and the programs, weights and templates of a model are many:
it would delay a step by tens of milliseconds, and every process of a deployment by the slowest
(xDeepServe §4.4). What start-up leaves behind is therefore frozen, that is, never visited again,
and what serving leaves behind is collected in the pauses between requests.
"""

import gc


def freeze() -> None:
    """Collects once and exempts everything that is left; when a process is warm.

    What an earlier engine of the process left behind is not exempt any more.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def thaw() -> None:
    """Ends the exemption; called when an engine has ended."""
    gc.unfreeze()


class IdleCollection:
    """Collects once after every stretch of work. Called by the engine's loop alone."""

    def __init__(self) -> None:
        self._worked = False

    def worked(self) -> None:
        """Marks that a step has run, so there may be garbage."""
        self._worked = True

    def idle(self) -> None:
        """Collects if a step has run since the last collection; called when the loop is idle."""
        if self._worked:
            self._worked = False
            gc.collect()
