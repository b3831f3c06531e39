"""Hostile requests to a server in this process, with a fake engine that follows grammars."""

import os
import subprocess
from subprocess import PIPE

import pytest

from jaxserve.chaos import hostile
from jaxserve.config.sections import Server
from jaxserve.server.grpc import GrpcServer
from tests import golden
from tests.jaxserve.server.http.rig import HttpRig


@pytest.mark.parametrize(
    "number", [4, pytest.param(500, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_a_server_survives_hostile_requests(number, capsys):
    rig = HttpRig(request_templates=True)
    face = GrpcServer(Server(grpc_port=0))
    grpc_address = face.start()
    face.open(rig.generator)
    try:
        arguments = ["--http", rig.address, "--grpc", grpc_address, "--pid", str(os.getpid())]
        code = hostile.main([*arguments, "--number", str(number), "--warm-up", str(number)])
    finally:
        face.stop(0)
        rig.close()
    assert (code, capsys.readouterr().err) == (0, "")


def test_what_a_process_holds():
    held = []
    with open(os.devnull, "rb") as file:  # in processes of its own: other tests' end in this one
        for files in [(), (file.fileno(),)]:
            with subprocess.Popen(["cat"], stdin=PIPE, stdout=PIPE, pass_fds=files) as cat:
                cat.stdin.write(b"\n")
                cat.stdin.flush()
                assert cat.stdout.readline() == b"\n"  # all libraries are loaded
                held.append(hostile.Held.of(cat.pid))
                cat.stdin.close()
    before, more = held
    assert (more.files, more.threads, more.processes) == (before.files + 1, 1, 1)
    assert before.within(more)
    assert not more.within(before)
    assert hostile.Held.of(2**22 + 1) == hostile.Held()


def test_what_is_wrong():
    """`golden/chaos/statuses.txt` lists kinds of requests with the status of their answers."""
    golden.check_values("chaos/statuses.txt", hostile.wrong, vars(hostile))
