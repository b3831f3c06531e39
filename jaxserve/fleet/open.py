"""A running engine on this process's own devices. Called by `llm.py` and the bench.

Importing this module starts no JAX backend.
"""

import atexit
import functools
import threading
from typing import TYPE_CHECKING, Any

from jaxserve.config.deployment import Deployment

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


def open_engine(deployment: Deployment, *, token: str = "", **options: Any) -> "Engine":
    """A running engine on the devices of this process; `options` as `build_engine` takes them.

    Args:
      token: that workers in `weights.peers` want.

    Raises:
      ConfigError, CheckpointError: the layout or the model does not fit.
    """
    # Only now: these imports load JAX.
    from jaxserve.checkpoint.peer import open_weights
    from jaxserve.engine.build import build_engine
    from jaxserve.fleet.arguments import ProcessArguments
    from jaxserve.fleet.devices import initialise

    opened, thread = threading.Event(), threading.current_thread()
    _opening[thread] = opened
    try:
        initialise(ProcessArguments(), deployment)
        source = functools.partial(open_weights, token=token)
        engine = build_engine(deployment, open_source=source, **options)
        if engine.status == "starting":
            engine.start()
        return engine
    finally:
        _opening.pop(thread, None)
        opened.set()


EXIT_SECONDS, LAST_SECONDS = 60.0, 10.0
"""For an engine to be built, and for the thread that asked for it to let go of it."""
_opening: dict[threading.Thread, threading.Event] = {}


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
