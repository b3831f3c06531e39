"""Access control of both faces: addresses, API keys and certificates.

Read from `server.*` of a deployment before any port is bound. Called by `grpc.py`, `http/`,
`faces.py` and `serve.py`. Knows nothing of protocols but the header that carries a key.
"""

import hashlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.config.sections import MIN_SECRET_CHARACTERS, Server
from jaxserve.errors import ConfigError

TENANT_CHARACTERS = 12


def prefix_salt(tenant: str, asked: str) -> str:
    """The salt of cached prefixes: separates tenants, and the salts that one tenant asks for."""
    return f"{tenant}/{asked}" if tenant or asked else ""


class ApiKeys:
    """The accepted API keys, stored as digests.

    Args:
      keys: at least 16 printable ASCII characters each.

    Raises:
      ConfigError: there is no key, or one is too short or unprintable; gives its number only.
    """

    def __init__(self, keys: Sequence[str]):
        if not keys:
            raise ConfigError("server.api_keys: the file has no key")
        for number, key in enumerate(keys, start=1):
            if len(key) < MIN_SECRET_CHARACTERS or not (key.isascii() and key.isprintable()):
                raise ConfigError(
                    f"server.api_keys: key {number} is not {MIN_SECRET_CHARACTERS} or more "
                    "printable ASCII characters"
                )
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_file(cls, path: str | Path) -> "ApiKeys":
        """Reads a file of one key per line; empty lines and lines that start with # are ignored."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.api_keys: {path} cannot be read: {error}") from None
        keys = [line.strip() for line in lines]
        return cls([key for key in keys if key and not key.startswith("#")])

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of the key in an `Authorization: Bearer …` header: a prefix of its digest.

        None if the key is unknown. Takes constant time.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return digest.hex()[:TENANT_CHARACTERS]


@dataclass(frozen=True)
class Tls:
    """PEM files: the server's certificate and key, and the CA of client certificates (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """An SSL context for servers.

        Raises:
          ConfigError: the files are not a certificate and its key.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"server.tls_certificate, tls_key, tls_client_ca: {error}") from None
        return context


@dataclass(frozen=True)
class Access:
    """The credentials that clients must present; by default none.

    Attributes:
      keys: one of which clients must present.
      tls: how connections are encrypted; with a client CA, clients must present a certificate.
      open: whether an address that others can reach may do without both.
    """

    keys: ApiKeys | None = field(default=None, repr=False)
    tls: Tls | None = None
    open: bool = False

    @property
    def guarded(self) -> bool:
        """Whether strangers are kept out. TLS alone encrypts what they say."""
        return self.keys is not None or (self.tls is not None and self.tls.client_ca is not None)

    @classmethod
    def from_config(cls, server: Server) -> "Access":
        """Reads the files that the deployment names.

        Raises:
          ConfigError: a file cannot be read or is invalid, or one of a pair is not set.
        """
        keys = ApiKeys.from_file(server.api_keys) if server.api_keys else None
        if bool(server.tls_certificate) != bool(server.tls_key):
            raise ConfigError(
                "server.tls_certificate and server.tls_key: one is set without the other"
            )
        if server.tls_client_ca and not server.tls_key:
            raise ConfigError("server.tls_client_ca: needs server.tls_certificate and tls_key")
        if not server.tls_key:
            return cls(keys, open=server.open)
        client_ca = Path(server.tls_client_ca) if server.tls_client_ca else None
        tls = Tls(Path(server.tls_certificate), Path(server.tls_key), client_ca)
        tls.context()
        return cls(keys, tls, server.open)

    def tenant(self, authorization: str | None) -> str | None:
        """Returns the tenant of a key; without keys, every client is the tenant ""."""
        return "" if self.keys is None else self.keys.tenant(authorization)


def is_loopback(host: str) -> bool:
    """Whether an address or name is certainly a loopback one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_ADDRESS = re.compile(
    r"\[[0-9a-fA-F:.]+\](:\d+)?|\b[\w-]+(\.[\w-]+)*:\d{2,5}\b|\b\d{1,3}(\.\d{1,3}){3}\b"
)


def without_addresses(text: str) -> str:
    """A text for clients: addresses inside the deployment are no business of theirs."""
    return _ADDRESS.sub("…", text)


def check_bind(host: str, insecure_bind: bool, access: Access | None = None) -> None:
    """Refuses an address that others can reach where nothing keeps strangers out.

    Args:
      insecure_bind: allows it, as `server.open` does.

    Raises:
      ConfigError: `host` is not a loopback address, and neither keys nor client certificates are
        asked for.
    """
    allowed = insecure_bind or (access is not None and (access.guarded or access.open))
    if not is_loopback(host) and not allowed:
        raise ConfigError(
            f"server.host = {host!r} can be reached from elsewhere, and clients need no key (TLS "
            "alone keeps nobody out); set server.api_keys or server.tls_client_ca, use 127.0.0.1 "
            "behind a proxy, or set server.open: true or say --insecure-bind"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
