"""A worker names the weights that it has loaded, whatever its folder has become meanwhile."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.checkpoint.fingerprint import Revision, forget_revisions, revision
from jaxserve.checkpoint.peer import weights_hello
from jaxserve.commands.worker_part import WorkerPart, worker_port
from jaxserve.config.deployment import Deployment
from jaxserve.errors import CheckpointError
from jaxserve.fleet.assembly import Options
from jaxserve.fleet.here import open_here
from jaxserve.fleet.worker_port import WorkerPort
from tests.jaxserve import layouts
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    forget_revisions()
    return layouts.deployment(layouts.write_model(tmp_path / "model"), {"mode": "colocated"})


def replace(deployment: Deployment) -> None:
    """Puts a fine-tune of the same shape in the place of the folder."""
    folder = Path(deployment.model)
    folder.rename(folder.with_name("old"))
    write_tiny_step3(folder, layouts.SIZES, seed=layouts.SEED + 1)


@pytest.fixture
def port(deployment: Deployment) -> Iterator[WorkerPort]:
    """The port of a worker, bound before anything is loaded."""
    part = WorkerPart("domain", "127.0.0.1:0", deployment)
    made = worker_port(deployment, part, "token", None)
    made.start()
    yield made
    made.stop(0)


def test_a_folder_that_is_replaced_after_loading(deployment: Deployment, port: WorkerPort) -> None:
    """Before the worker says which weights it has: at the end of compiling, say."""
    loaded = Revision(Path(deployment.model)).digest
    engine = open_here(deployment, Options(prepare=lambda engine: replace(deployment)))
    with contextlib.closing(engine):
        port.open(engine)
        assert port.facts is not None
        assert port.facts.weights == loaded
        assert weights_hello(deployment.model).facts["revision"] == loaded
        assert revision(deployment.model).digest == loaded
        assert Revision(Path(deployment.model)).digest != loaded


@pytest.mark.usefixtures("port")
def test_a_folder_that_is_replaced_before_loading(deployment: Deployment) -> None:
    replace(deployment)
    with pytest.raises(CheckpointError, match="was replaced by another version since this process"):
        open_here(deployment)
