"""Which layers' attention multiplies in INT8: the deployment's list, or the one that was measured.

`convert --int8-products` (`jaxserve/checkpoint/sensitivity.py`) writes the latter beside the
weights. Called by what opens a model, and where the processes of a runtime compare what they read.
"""

from typing import Any

import msgspec

from jaxserve.checkpoint.fingerprint import weights_digest
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import read_record
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.storage.mirror import INT8_PRODUCTS, local_folder


class Int8Products(msgspec.Struct, frozen=True):
    """What a measurement found."""

    weights: str
    """Digest of the checkpoint that was measured (`fingerprint.weights_digest`)."""
    layers: list[int]
    """That may multiply in INT8."""
    measured: Any
    """What that costs, for people."""


def read_model(deployment: Deployment) -> tuple[ModelConfig, CheckpointNames]:
    """The model of a deployment as `read_config` knows it, with the layers that multiply in INT8.

    Raises:
      ConfigError, CheckpointError: as `read_config` and `with_int8_products`.
    """
    config, names = read_config(deployment.model, deployment.ignored_model_keys, deployment.modules)
    return with_int8_products(config, deployment), names


def with_int8_products(config: ModelConfig, deployment: Deployment) -> ModelConfig:
    """The model with the layers that `attention.int8_products` names.

    Raises:
      ConfigError: the cache is not in INT8; the model has no such layer; or as `listed`.
      CheckpointError: as `listed`.
    """
    wanted = listed(deployment).attention.int8_products
    layers = frozenset() if wanted == "none" else frozenset(map(int, wanted))
    if layers and FORMATS[deployment.cache_format].products != "int8":
        raise ConfigError(
            f"attention.int8_products = {wanted} multiplies with keys and values as INT8 pages "
            f"have them, but cache.format = {deployment.cache.format} is {deployment.cache_format}"
        )
    if layers and max(layers) >= config.layers:
        raise ConfigError(
            f"attention.int8_products = {wanted}: layers of this model are 0 to {config.layers - 1}"
        )
    return config.with_int8_products(layers)


def listed(deployment: Deployment) -> Deployment:
    """The deployment with the list that was measured in place of `auto`.

    Raises:
      ConfigError: the list is missing, or is of other weights.
      CheckpointError: it cannot be read.
    """
    if deployment.attention.int8_products != "auto":
        return deployment
    path, digest = local_folder(deployment.model) / INT8_PRODUCTS, weights_digest(deployment.model)
    if not path.is_file():
        raise ConfigError(
            f"attention.int8_products = auto: there is no {path}; python -m jaxserve.convert "
            f"--int8-products {deployment.model} --calibrate FILE writes it"
        )
    found = read_record(path, Int8Products)
    if found.weights != digest:
        raise ConfigError(
            f"attention.int8_products = auto: {path} is of the weights {found.weights}, and here "
            f"are {digest}"
        )
    attention = msgspec.structs.replace(deployment.attention, int8_products=found.layers)
    return msgspec.structs.replace(deployment, attention=attention)
