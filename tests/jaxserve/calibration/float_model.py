"""A tiny model's float blocks, as a conversion reads them."""

from pathlib import Path

import numpy as np

from jaxserve.calibration.run import BlockAccess
from jaxserve.checkpoint import conversion
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import blocks_of
from jaxserve.config.model import ModelConfig


class FloatModel:
    """Blocks of a folder, and those that a calibration made in their place."""

    def __init__(self, folder: Path, modules: int = 0):
        self.config, names = read_config(folder, (), modules)
        self._model = conversion._model(folder, self.config, names, "float32", "float32")
        self._checkpoint = HFCheckpoint(folder, names)
        self._blocks = {block.name: block for block in blocks_of(names)}
        self.made: dict[str, dict[str, np.ndarray]] = {}
        self.source = BlockAccess(self.floats, self.made.__contains__, self.written)

    def floats(self, name: str) -> dict[str, np.ndarray]:
        leaves = conversion._leaves(self._model, self._checkpoint, self._blocks[name])
        return {leaf: np.asarray(array) for leaf, array in leaves.items()}

    def written(self, name: str) -> dict[str, np.ndarray]:
        return self.made.get(name) or self.floats(name)


def all_layers(config: ModelConfig) -> list[str]:
    roles = ("attention", "ffn")
    return [f"layers.{layer}.{role}" for layer in range(config.all_layers) for role in roles]
