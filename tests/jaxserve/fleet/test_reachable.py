import socket
from concurrent.futures import ThreadPoolExecutor

from jaxserve.fleet.bootstrap import unreachable
from jaxserve.link.session.channel import split_address
from jaxserve.ports import free_port


def test_a_port_may_open_while_it_is_tried() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert "Connection refused" in unreachable(address, 0.1)
    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(unreachable, address, 10.0)
        with socket.create_server(split_address(address)):
            assert tried.result(10) == ""
