"""Child processes that do dangerous work within limits, and may be killed for it.

Chat templates are rendered and grammars are tried out in such processes (`template_worker.py`,
`grammar_worker.py`); `limited_worker.py` is the program that they run. Knows nothing of either.
"""

import contextlib
import functools
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from io import BufferedIOBase
from typing import Any

from jaxserve.text import limited_worker
from jaxserve.text.limited_worker import CPU_SECONDS, STACK_BYTES, TOO_MUCH_MEMORY

ANSWER_SECONDS = 20.0
"""The longest wait for a turn, and then for an answer, by the clock on a very busy machine."""

LIMITS = {
    -signal.SIGKILL: f"it took longer than {ANSWER_SECONDS:g} s",
    -signal.SIGPROF: f"it took more than {CPU_SECONDS:g} s",
    -signal.SIGABRT: TOO_MUCH_MEMORY,
    -signal.SIGSEGV: f"it took more than {STACK_BYTES >> 10} KiB of stack: it is nested too deeply",
}
"""The limit that a process exceeded, by its return code. Native code aborts without memory;
after `ANSWER_SECONDS` this process kills."""

logger = logging.getLogger(__name__)


class LimitError(Exception):
    """The work exceeded a limit; the message says which, for the client."""


class LimitedProcess:
    """A process that starts with the first request, is replaced when it dies, and ends with this
    one. Safe for many threads, which take turns.

    Args:
      task: the module whose `answer` serves the requests; imports nothing of jaxserve.
      source: who wrote what it works on. Work of one source does not wait for another's.
    """

    def __init__(self, task: types.ModuleType, source: str):
        self._name = f"{task.__name__} for {source}"
        self._task = task
        self._lock = threading.Lock()
        self._peer: Any = None
        self._answers: Any = None
        self._end: Any = None  # while there is a process

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request.

        Raises:
          LimitError: the work exceeded a limit, and the process is replaced. Or earlier work took
            too long.
        """
        message = json.dumps(request).encode() + b"\n"
        if not self._lock.acquire(timeout=ANSWER_SECONDS):
            raise LimitError(f"it waited more than {ANSWER_SECONDS:g} s for its turn")
        try:
            return self._answer(message)
        finally:
            self._lock.release()

    def _answer(self, message: bytes) -> Any:
        try:
            if self._end is None:
                self._start()
            self._peer.sendall(message)
            if (answer := self._answers.readline()).endswith(b"\n"):
                return json.loads(answer)
            reason = "its process ended"
        except OSError as error:
            reason = f"its process does not answer: {error}"
        code = self._end and self._end()
        self._end = None
        logger.warning("%s is replaced: %s (%s)", self._name, reason, code)
        raise LimitError(LIMITS.get(code, reason))

    def _start(self) -> None:
        self._peer, theirs = socket.socketpair()
        self._peer.settimeout(ANSWER_SECONDS)
        self._answers = self._peer.makefile("rb")
        # Isolated: neither the environment nor the current folder decides what it imports.
        command = [sys.executable, "-I", str(limited_worker.__file__), str(self._task.__file__)]
        with theirs:
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env={"LC_ALL": "C.UTF-8"}
            )
        self._end = weakref.finalize(self, _end, process, self._peer, self._answers)


the_process = functools.cache(LimitedProcess)
"""The only process of a task and source."""


def _end(process: subprocess.Popen[bytes], *ends: socket.socket | BufferedIOBase) -> int:
    """Ends a process; returns its return code."""
    for end in ends:
        end.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.5)  # a dying one's own code, not SIGKILL's
    process.kill()
    return process.wait()
