"""Layers whose attention multiplies in INT8: the deployment's own list, or the measured list.

`convert --int8-products` (`jaxserve/checkpoint/sensitivity.py`) writes the measured list beside the
weights. Called when a model is opened, and when the processes of a runtime compare what they read.
"""

from typing import Any

import msgspec

from jaxserve.checkpoint.fingerprint import revision
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import read_record
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.storage.mirror import INT8_PRODUCTS, local_folder


class Int8Products(msgspec.Struct, frozen=True):
    """Result of a measurement, as stored beside the weights."""

    weights: str
    """Digest of the checkpoint that was measured (`Revision.digest`)."""
    layers: list[int]
    """Layers that may multiply in INT8."""
    measured: Any
    """Measured losses, for human readers; the program does not use them."""


def read_model(deployment: Deployment) -> tuple[ModelConfig, CheckpointNames]:
    """Reads a deployment's model with `read_config` and marks the layers that multiply in INT8.

    Raises:
      ConfigError, CheckpointError: as `read_config` and `with_int8_products`.
    """
    config, names = read_config(deployment.model, deployment.ignored_model_keys, deployment.modules)
    return with_int8_products(config, deployment), names


def with_int8_products(config: ModelConfig, deployment: Deployment) -> ModelConfig:
    """Marks the layers that `attention.int8_products` names.

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
    """The deployment with `attention.int8_products: auto` replaced by the measured list.

    Raises:
      ConfigError: the list is missing, or was measured on other weights.
      CheckpointError: the list cannot be read.
    """
    if deployment.attention.int8_products != "auto":
        return deployment
    path, digest = local_folder(deployment.model) / INT8_PRODUCTS, revision(deployment.model).digest
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
