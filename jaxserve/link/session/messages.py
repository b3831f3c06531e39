"""Messages that every use of a session shares; each use has a table of its own beside them."""

import msgspec


class Echo(msgspec.Struct, frozen=True, tag="echo", array_like=True):
    """Sign of life, returned by the end that accepted the connection."""

    number: int


class Bulk(msgspec.Struct, frozen=True, array_like=True):
    """Part of a frame that bytes follow (`link/bulk.py`)."""

    size: int
    """Bytes, padding included."""
    checksum: int | None
    """Checksum of the bytes; None where none was taken (`pages.checksums`)."""
