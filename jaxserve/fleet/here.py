"""An engine in a process that does not live for it: that of `LLM`.

Such a process may end while a daemon thread builds the engine, and serves nothing else.
"""

import atexit
import threading
from typing import TYPE_CHECKING

from jaxserve.config.deployment import Deployment
from jaxserve.fleet.assembly import DEFAULTS, Options, open_engine

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

EXIT_SECONDS, LAST_SECONDS = 60.0, 10.0
"""Seconds to wait at the interpreter's end for an engine to be built, and for its thread."""
_opening: dict[threading.Thread, threading.Event] = {}


def open_here(deployment: Deployment, options: Options = DEFAULTS) -> "Engine":
    """Opens a running engine on the devices of this process, which serves nothing else (`LLM`).

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
    """
    from jaxserve.fleet.devices import initialise
    from jaxserve.fleet.membership import ProcessArguments

    opened, thread = threading.Event(), threading.current_thread()
    _opening[thread] = opened
    try:
        initialise(ProcessArguments(), deployment)
        return open_engine(deployment, options)
    finally:
        _opening.pop(thread, None)
        opened.set()


@atexit.register
def _wait() -> None:
    """Waits for engines that daemon threads are building: the interpreter would abort when it ends
    around a thread that loads or compiles. Then ends them, as their module does with others."""
    if waited := dict(_opening):
        for opened in waited.values():
            opened.wait(EXIT_SECONDS)
        from jaxserve.engine.engine import close_all

        close_all()
        for thread in waited:
            thread.join(LAST_SECONDS)
