"""One run of `serve --role router`: the faces of a fleet, without JAX and without weights."""

import argparse
import logging
import time
from collections.abc import Mapping

from jaxserve.checkpoint.fingerprint import model_digest
from jaxserve.commands.life import LOOK_SECONDS, Life
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.router import RouterEngine
from jaxserve.server.choice import admin_face, network_faces
from jaxserve.storage.mirror import local_folder

WAITING_SECONDS = 30.0
"""Between two lines that say which workers are not there yet."""

logger = logging.getLogger("jaxserve.serve")


class Routing(Life):
    """A replica of the router. It waits for its first workers as long as it takes.

    Raises:
      ConfigError: the deployment has no domains to route to.
    """

    def __init__(
        self, deployment: Deployment, options: argparse.Namespace, process: ProcessArguments
    ):
        if not deployment.fleet.domains:
            raise ConfigError("fleet.domains: empty; a router needs the addresses of its workers")
        port = network_faces(deployment, options.insecure_bind, options.log_format)
        super().__init__(deployment, port, admin_face(deployment))
        model = model_digest(local_folder(deployment.model))
        self._router = RouterEngine(deployment, process.token, model)

    def _live(self, addresses: Mapping[str, str]) -> None:
        self._router.start()
        logged = time.monotonic()
        while not self._router.wait(LOOK_SECONDS):
            if time.monotonic() - logged > WAITING_SECONDS:
                logged = time.monotonic()
                for address, why in self._router.connections.absences().items():
                    logger.info("waiting for the worker at %s: %s", address, why)
        self._serve(self._router, addresses)
