"""Deadlines of a runtime of several processes, and addresses that it waits for."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.fleet.bootstrap import leader_deadlines, unreachable
from jaxserve.link.session.channel import split_address
from jaxserve.ports import free_port

PULL = ["attention.runtime=a", "ffn.runtime=f", "link.transport=pull", "link.absent_seconds=50"]


@pytest.mark.parametrize(("settings", "seconds"), [([], 20), (PULL, 70)], ids=["inside", "pull"])
def test_a_step_may_wait_for_an_ffn_worker_that_begins_anew(settings, seconds) -> None:
    given = ["mode=afd", "cluster.step_seconds=20", *settings]
    if settings:
        given.append("link.addresses=['127.0.0.1:1']")
    assert leader_deadlines(load_deployment("configs/demo.yaml", given)).step_seconds == seconds


def test_a_port_may_open_while_it_is_tried() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert "Connection refused" in unreachable(address, 0.1)
    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(unreachable, address, 10.0)
        with socket.create_server(split_address(address)):
            assert tried.result(10) == ""
