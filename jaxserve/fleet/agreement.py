"""Lists the facts that processes of a deployment must agree on before they compute together.

Called where processes introduce themselves: `bootstrap.py`, `role_runtime.py` and `pages_link.py`.
"""

from collections.abc import Mapping

import msgspec

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.config.deployment import Deployment


def deployment_facts(deployment: Deployment) -> dict[str, str]:
    """Returns everything that all processes must agree on when they join, one dotted key a value.

    The model counts by the digest of its config.json, not by its path, which may differ from host
    to host. The addresses of the network faces concern the leader alone.
    """
    facts: dict[str, str] = {}

    def flatten(tree: Mapping[str, object], prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, Mapping):
                flatten(value, f"{prefix}{name}.")
            else:
                facts[f"{prefix}{name}"] = str(value)

    tree = msgspec.to_builtins(deployment)
    del tree["server"]
    tree["model"] = revision(deployment.model).model
    flatten(tree, "")
    return facts
