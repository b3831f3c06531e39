"""The child process that works on programs, expressions and grammars of strangers.

Started by `limited_process.py` with a socket as its standard input and the file of a module as its
argument. That module's `answer` serves each request. This process has no environment and may write
no file. Its memory, its stack and the processor time of an answer are limited: the system ends the
process that exceeds a limit, even inside native code. It ends when the socket is closed.

A request and its answer are JSON objects, one a line.
"""

import json
import resource
import runpy
import signal
import socket
import sys

MEMORY_BYTES = 2**29
STACK_BYTES = 2**20
"""Less than any thread of the parent has: what fits here does not overflow the stack there."""
CPU_SECONDS = 2.0
"""The most that one answer takes; an ordinary one takes a few milliseconds."""
TOO_MUCH_MEMORY = f"it took more than {MEMORY_BYTES >> 20} MiB"


def main() -> int:
    """Serves the socket at standard input until it is closed."""
    # A thread of the server may have blocked or ignored signals: its children inherit that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the server ends this process
    answer = runpy.run_path(sys.argv[1])["answer"]
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    peer = socket.socket(fileno=0)
    for line in peer.makefile("rb"):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        try:
            written = json.dumps(answer(json.loads(line)))
        except MemoryError:
            written = json.dumps({"error": TOO_MUCH_MEMORY})
        signal.setitimer(signal.ITIMER_PROF, 0)
        peer.sendall(written.encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
