"""Opens the weights of a model's folder, converted or as the Hub has it.

A process imports the reader of its own folder only.
"""

import logging
import pkgutil
from pathlib import Path
from typing import cast

from jaxserve.checkpoint.arrays import FolderReader
from jaxserve.checkpoint.manifest import read_manifest
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.storage.mirror import local_folder

logger = logging.getLogger(__name__)

READERS = {"converted": "store:StoreCheckpoint", "Hugging Face": "hf:HFCheckpoint"}
"""File in this folder, and name in it, of the reader of each kind of model folder."""


def open_checkpoint(folder: str | Path, names: CheckpointNames) -> FolderReader:
    """Opens a folder's weights, converted or not.

    Raises:
      CheckpointError: as `HFCheckpoint` and `StoreCheckpoint` do.
    """
    kind = "converted" if read_manifest(local_folder(folder)) else "Hugging Face"
    reader = pkgutil.resolve_name(f"jaxserve.checkpoint.{READERS[kind]}")
    return cast(FolderReader, reader(folder, names))


def open_folder(deployment: Deployment, names: CheckpointNames) -> FolderReader:
    """Opens the deployment's model folder and ignores `weights.peers`: the processes of a runtime
    quantise together, so all must read the same source. Raises as `open_checkpoint`."""
    if deployment.weights.peers:
        logger.warning("weights: from storage: weights.peers is for workers of one process")
    return open_checkpoint(deployment.model, names)
