"""Sockets to listen on: ports, Unix sockets, and HTTP over one."""

import socket
import stat
from pathlib import Path

import httpx
import pytest

from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.server.grpc import GrpcServer
from jaxserve.server.http.server import HttpServer
from jaxserve.server.listener import bind_unix
from tests.jaxserve.server.http.rig import SECONDS, HttpRig


@pytest.mark.parametrize("face", [GrpcServer, HttpServer])
def test_a_port_in_use_is_a_clear_error(face: type[GrpcServer | HttpServer]) -> None:
    """The port belongs to another program, or to a server of the same kind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"_port: cannot listen on 127.0.0.1:{port}"):
            face(Server(grpc_port=port, http_port=port)).start()
    first = face(Server(grpc_port=0, http_port=0))
    port = int(first.start().rpartition(":")[2])
    with pytest.raises(ConfigError, match="in use"):
        face(Server(grpc_port=port, http_port=port)).start()
    first.stop(0)


def test_http_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    rig = HttpRig(http_socket=str(path), host="0.0.0.0")  # the host is not listened on
    assert rig.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://here", timeout=SECONDS) as client:
        answer = client.post("/v1/completions", json={"prompt": "hi"})
        assert answer.json()["choices"][0]["text"] == "one two three"
        with pytest.raises(ConfigError, match=r"server.http_socket: cannot listen on .*in use"):
            bind_unix(str(path), "server.http_socket")
    rig.close()
    assert not path.exists()


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    bind_unix(path, "key").close()
    with bind_unix(path, "key") as bound:
        assert bound.family == socket.AF_UNIX


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind_unix(str(path), "key")
    assert path.read_text() == "text"
    for wrong in (str(tmp_path / "no" / "folder"), str(tmp_path / ("x" * 120))):
        with pytest.raises(ConfigError, match="key: cannot listen on"):
            bind_unix(wrong, "key")
