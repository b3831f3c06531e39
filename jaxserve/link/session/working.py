"""A session of the end that listens, with a second thread that carries out the requests."""

import abc
import queue
import threading
from typing import Any

from jaxserve.link.session.served import ServedSession


class WorkingSession[Wanted](ServedSession):
    """A session of two threads: one reads requests, the other carries them out in order."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._wanted: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        """Requests to carry out; None ends the thread."""

    @abc.abstractmethod
    def _work(self) -> None:
        """Carries out the queued requests until None comes, on a thread of its own."""

    def read(self) -> None:
        """See `Session`."""
        worker = threading.Thread(target=self._work, name=f"{self._link} work", daemon=True)
        worker.start()
        try:
            super().read()
        finally:
            self.fail("closed here")
            self._wanted.put(None)
            worker.join()
