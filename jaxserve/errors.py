"""Every exception that jaxserve raises on purpose.

The lowest module of the package: every layer may raise these, and the faces (`llm.py`, `serve.py`,
`server/`) turn them into messages and status codes. It imports nothing.
"""


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""


class ConfigError(JaxserveError):
    """A model or deployment configuration is wrong; the message names the field and the value."""


class MemoryTakenError(ConfigError):
    """The host has the memory that a deployment needs, and others use it: later it may fit."""


class CheckpointError(JaxserveError):
    """A checkpoint cannot be read or does not fit the model; the message lists every problem."""


class InvalidRequestError(JaxserveError):
    """A request has a bad field; nothing else was touched.

    Args:
      field: the request field at fault, as the client spells it.
      message: what is wrong with it, with the value and the allowed range.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class OverloadedError(JaxserveError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(JaxserveError):
    """The server is draining: it finishes what runs and takes no new requests."""


class EngineFailedError(JaxserveError):
    """The engine or a process of the deployment is gone; the message says which and where."""


def exit_code(error: ConfigError | CheckpointError) -> int:
    """Exit code of a process that could not start: 75 (EX_TEMPFAIL of sysexits.h) if an unchanged
    retry may succeed, 2 if it would fail again."""
    return 75 if isinstance(error, MemoryTakenError) else 2


class StepLostError(EngineFailedError):
    """A step failed on the devices. With it the KV cache is gone, which steps are given and give
    back; the engine is not, where it can compute its requests anew."""
