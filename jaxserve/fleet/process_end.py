"""The end of a process, without the interpreter's own.

Once arrays have crossed between processes, an ordinary exit of the interpreter waits for JAX's
transfer server, for ever if a peer still waits for us. It also kills daemon threads where they are,
and one inside a device call, as for a step that was cut off, takes the process down with SIGABRT.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

import jax

from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError, ConfigError, JaxserveError, exit_code
from jaxserve.fleet.devices import initialise, log_devices
from jaxserve.fleet.membership import ProcessArguments

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def alone(arguments: ProcessArguments, deployment: Deployment) -> Iterator[None]:
    """Runs a block with JAX initialised, in a process that is a runtime of its own
    (`link.transport: pull`). The end of the block is the end of the process."""
    try:
        initialise(arguments, deployment)
        log_devices()
        yield
    except BaseException as error:
        log_end(error)
        end(exit_code_of(error))
    jax.distributed.shutdown()
    end(0)


def log_end(reason: str | BaseException) -> str:
    """Logs why a process ends, with the traceback of an error that is not one of ours.

    Returns:
      The reason in one line.
    """
    text = reason if isinstance(reason, str) else describe(reason)
    if isinstance(reason, Exception) and not isinstance(reason, JaxserveError):
        logger.critical("%s", text, exc_info=reason)
    else:
        logger.critical("%s", text)
    return text


def describe(error: BaseException) -> str:
    """Puts an error into one line: our own say enough, others with their type."""
    if isinstance(error, JaxserveError):
        return str(error)
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"stopped by {signal.Signals(error.code - 128).name}"
    return f"{type(error).__name__}: {error}"


def exit_code_of(reason: str | BaseException) -> int:
    """The exit code of a process that ends for this reason."""
    match reason:
        case ConfigError() | CheckpointError():
            return exit_code(reason)
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
    return 1


def end(code: int) -> NoReturn:
    """Ends this process at once, whatever its other threads are stuck in."""
    for stream in (*logging.getLogger().handlers, sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)
