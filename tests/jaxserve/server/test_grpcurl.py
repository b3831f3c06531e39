"""The real grpcurl against the server, as people call it from a shell.

`make test` puts it into build/bin once, where Go can; elsewhere these tests are skipped.
"""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import golden
from tests.jaxserve.server.faces import Faces

BUILT = Path(__file__).resolve().parents[3] / "build" / "bin" / "grpcurl"
GRPCURL = str(BUILT) if BUILT.is_file() else shutil.which("grpcurl")
SECONDS = 30

pytestmark = pytest.mark.skipif(
    GRPCURL is None,
    reason="no grpcurl: neither in build/bin (make test builds it with Go) nor PATH",
)


@pytest.fixture(scope="module")
def rig() -> Iterator[Faces]:
    rig = Faces()
    yield rig
    rig.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GRPCURL, *arguments], capture_output=True, text=True, timeout=SECONDS)


def test_what_it_prints(rig: Faces) -> None:
    """`golden/server/grpcurl.txt` lists its arguments; the fake engine writes all at once."""
    rig.engine.chunk = 100

    def said(arguments: str) -> str:
        given = shlex.split(arguments.replace("ADDRESS", rig.grpc_address))
        done = run("-plaintext", *given)
        return f"{done.returncode}\n{done.stdout}{done.stderr}"

    golden.check_each("server/grpcurl.txt", said)
