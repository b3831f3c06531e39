"""Reads config.json and file headers of a Hugging Face folder: the architecture, the number
formats, and the names of the tensors. `hf.py` reads the tensors. Families are known only through
their table.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import get_args

import msgspec

from jaxserve.checkpoint.expert_stacks import ExpertStack, join_stacks
from jaxserve.checkpoint.families import FAMILIES, architecture, family_of
from jaxserve.checkpoint.manifest import MANIFEST, read_manifest
from jaxserve.checkpoint.packed import PackedTensor, Packing, join_parts
from jaxserve.checkpoint.quantization_config import (
    OLDER_SECTIONS,
    SECTION,
    int4_of,
    packing_of,
    text_part,
)
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.tensors import DTYPES, READABLE, Tensor, list_tensors
from jaxserve.config.formats import FORMATS, Floats, StoredFormat, group_of, sharing
from jaxserve.config.model import Int4, MatrixPart, ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.storage.mirror import local_folder, weight_files

FLOATS = "bias", "attention.gate", "attention.rates", "dense.share", ".weights", ".map"
"""Ends of names of leaves that are floats whatever the files have."""


def read_config(
    folder: str | Path, ignored: Collection[str] = (), modules: int = 0
) -> tuple[ModelConfig, CheckpointNames]:
    """Reads the architecture from a folder's config.json, and derives the names of its tensors.

    A converted folder (`store.py`) has a config.json, too; its manifest then gives the formats.

    Args:
      ignored: entries of config.json that the user declares irrelevant.
      modules: multi-token-prediction modules to load.

    Raises:
      ConfigError: the model has fewer modules.
      CheckpointError: no such folder or file, not JSON, an unknown family, or entries that are
        missing or of a wrong type (one message lists all).
    """
    path = local_folder(folder) / "config.json"
    try:
        tree = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"no model at {folder}: {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: not an object but {type(tree).__name__}")
    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not known; known: {', '.join(FAMILIES)}"
        )
    family, text = family_of(model_type), text_part(tree)
    if not text[SECTION]:
        for name in OLDER_SECTIONS:  # of AutoGPTQ and llm-awq
            if (path.parent / name).is_file():
                raise CheckpointError(f"{path} has no {SECTION}, and there is {name}: put it there")
    try:
        config = architecture(tree, ignored)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if modules > len(config.predictors):
        raise ConfigError(
            f"speculative.modules = {modules}, but the model has {len(config.predictors)} modules "
            "of multi-token prediction (num_nextn_predict_layers)"
        )
    config = msgspec.structs.replace(config, modules=modules)
    manifest = read_manifest(path.parent)
    if manifest is not None:
        if manifest.config != tree:
            raise CheckpointError(f"{path} is not what {MANIFEST} says was converted")
        done = manifest.conversion
        config = msgspec.structs.replace(
            config,
            stored=done.weights,
            int4=done.int4 or Int4(),
            plain_parts=frozenset(done.plain_parts),
            floats="bfloat16" if done.dtype == "bfloat16" else "float32",
        )
        return config, family.names(config)
    names = family.names(config)
    tensors, _ = join_stacks(names.renamed(_listed(path.parent)), names)
    if config.stored != "plain":
        packing, groups = packing_of(tree), sharing(config.stored) == "group"
        own = Int4(group_of(config.stored) or config.int4.group)
        config = msgspec.structs.replace(
            config,
            int4=int4_of(packing) if packing and groups else own,
            plain_parts=_plain_parts(tensors, names, config.stored, packing),
        )
    made: frozenset[str] = frozenset()  # leaves that are dequantised if not stored as floats
    if text[SECTION]:
        parts = get_args(MatrixPart) if config.stored == "plain" else config.plain_parts
        made = frozenset(("table", "weight", *parts))
    return msgspec.structs.replace(config, floats=_floats(tensors, names, made)), names


def _listed(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files. Empty if the folder has no weights or they are broken:
    opening the checkpoint then reports the error."""
    try:
        return list_tensors(folder).tensors if weight_files(folder) else {}
    except CheckpointError:
        return {}


def _floats(there: Mapping[str, Tensor], names: CheckpointNames, made: frozenset[str]) -> Floats:
    """Computes `ModelConfig.floats`: `bfloat16` only if all float matrices are stored in BF16.
    Routers are small and do not count. Dequantised matrices (leaves of `made` without a float
    tensor) need FP32."""
    floats = {name: tensor.kind for name, tensor in there.items() if tensor.kind in READABLE}
    kinds = {
        floats.get(name, "made")
        for sources in (names.embedding, names.head, *names.attention, *names.ffn)
        for leaf, source in sources.items()
        if not leaf.startswith("router.")
        for name, shape in source.tensors.items()
        if len(shape) > 1
        if name in floats or leaf.partition(".")[0] in made
    }
    return "bfloat16" if kinds == {"BF16"} else "float32"


def _plain_parts(
    there: Mapping[str, Tensor],
    names: CheckpointNames,
    stored: StoredFormat,
    packing: Packing | None,
) -> frozenset[MatrixPart]:
    """Returns the parts of a layer with at least one matrix that the files keep as floats, or in a
    format other than `stored`; only experts are in MXFP4. Biases, head gates, per-head matrices of
    latents and others of `FLOATS` always stay floats and do not count."""
    known: dict[str, MatrixPart] = {part: part for part in get_args(MatrixPart)}
    sources = [
        (known[part], source)
        for table in (*names.attention, *names.ffn)
        for leaf, source in table.items()
        if (part := leaf.partition(".")[0]) in known
        if source.view is None and not leaf.endswith(FLOATS)
    ]
    tensors: Mapping[str, Tensor | PackedTensor] = there
    if packing and packing.own_numbers:
        matrices = {name: shape for _, s in sources for name, shape in s.tensors.items()}
        tensors = join_parts(there, matrices, packing)[0]
    only_stacks = group_of(stored) > 0
    return frozenset(
        part
        for part, source in sources
        if (only_stacks and not source.expert_stack)
        or any(
            len(shape) > 1 and name in tensors and not _is_kept(tensors[name], stored, packing)
            for name, shape in source.tensors.items()
        )
    )


def _is_kept(
    tensor: Tensor | PackedTensor | ExpertStack, stored: StoredFormat, packing: Packing | None
) -> bool:
    """Whether this matrix can be kept in memory in the format `stored`."""
    if not isinstance(tensor, PackedTensor):
        several = packing is not None and packing.own_numbers
        return tensor.kind not in READABLE and (sharing(stored) == "block" or not several)
    own = tensor.packing
    if packing is None or sharing(stored) != "group":
        kept = sharing(stored) == "channel" and own.layout == "scaled"
        return kept and DTYPES[tensor.values.kind].name == FORMATS[stored].dtype
    alike = (own.symmetric, own.in_order) == (packing.symmetric, packing.in_order)
    return alike and own.is_int4(tensor.shape[1], packing.group)
