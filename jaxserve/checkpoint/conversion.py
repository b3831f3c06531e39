"""Converts a Hugging Face folder to Orbax checkpoints, one block at a time.

Called by `jaxserve/convert.py`. Every block is read as the engine would read it (`hf.py`), on one
CPU device, and written as an Orbax PyTree checkpoint in its own folder, atomically; a record with
the arrays' checksums follows. An interrupted conversion resumes after the blocks that are complete.
`manifest.json` is written last; without it the folder is not a checkpoint.

While a block is written the next one is read, so two blocks are in memory; the largest are the
routed experts of a layer. With a calibration (`jaxserve/calibration/`) both blocks of a layer are
made together, and nothing is read while they are.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import msgspec
import numpy as np

from jaxserve.calibration.forward import refuse_unsupported
from jaxserve.calibration.gptq import INT8, RoundingTarget
from jaxserve.calibration.run import (
    BlockAccess,
    CalibrationReport,
    CalibrationText,
    Calibrator,
    LayerReport,
)
from jaxserve.checkpoint.fingerprint import Revision
from jaxserve.checkpoint.hf import HFCheckpoint
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import (
    BLOCKS,
    CONVERSION,
    FORMAT,
    MANIFEST,
    Conversion,
    Manifest,
    StoredBlock,
    StoredLeaf,
    blocks_of,
    read_manifest,
    read_record,
)
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.stored_array import checksum_of, open_array, read_array
from jaxserve.checkpoint.tensors import list_tensors
from jaxserve.checkpoint.verification import changed, damaged, digest_of
from jaxserve.config.formats import FORMATS, FormatName, group_of, sharing
from jaxserve.config.load import load_deployment
from jaxserve.config.model import Int4, MatrixPart, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.mesh import ATTENTION_RULES, Rules, Submeshes, cached_sharding
from jaxserve.model.matrix_formats import weight_format
from jaxserve.model.module import Template
from jaxserve.model.templates import ModelTemplates
from jaxserve.storage.mirror import SCRIPTS, local_folder
from pallas_kernels.input_major import in_rows
from pallas_kernels.quantize import in_bytes

logger = logging.getLogger(__name__)

TargetFormat = FormatName | Literal["bf16"]

CALIBRATION = "calibration.json"
"""File with the report of a calibration, layer by layer."""

COPIED = (
    "*config*.json",
    "tokenizer*",
    "*.tiktoken",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "encoding_*.py",
    SCRIPTS,
    "LICENSE*",
)
"""Files that are copied beside the weights: configuration, tokenizer, chat template, licence."""


Records = dict[str, StoredLeaf]


class _Model(NamedTuple):
    """Everything needed to make a block's leaves."""

    config: ModelConfig
    names: CheckpointNames
    templates: ModelTemplates
    meshes: Submeshes

    def template(self, block: StoredBlock) -> tuple[Template, Rules]:
        """A block's template, and the rules of its mesh."""
        if block.name in ("embedding", "head"):
            return getattr(self.templates, block.name), ATTENTION_RULES
        _, layer, role = block.name.split(".")
        kind = self.config.layer(int(layer))
        if role == "prediction":
            return self.templates.prediction, ATTENTION_RULES
        if role == "attention":
            return self.templates.attention[kind], ATTENTION_RULES
        return self.templates.ffn[kind.ffn], self.meshes.ffn_rules


def convert(
    source: str | Path,
    target: str | Path,
    weights: TargetFormat | None = None,
    *,
    group: int = 128,
    calibration: CalibrationText | None = None,
    ignored: Collection[str] = (),
    on_block: Callable[[int, int, str], None] = lambda done, blocks, note: None,
    on_read: Callable[[int], None] = lambda size: None,
) -> None:
    """Converts a folder, resuming an interrupted conversion.

    Args:
      source: a Hugging Face folder, or its URL.
      target: folder for the result: missing, empty, or left by an interrupted run.
      weights: format of the matrices: 16-bit floats, or 8 bits with a scale per output channel
        (FP8 blocks stay blocks), or 4 bits in groups for FFNs, where attention stays in floats;
        None: as in the source.
      group: columns that share a scale in INT4.
      calibration: text; the matrices become INT8 by SmoothQuant and GPTQ, those of FFNs INT4, and
        `calibration.json` records the method and its errors. Needs `weights` that it can make.
      ignored: entries of config.json that the user declares irrelevant.
      on_block: called with the number of finished blocks, of all blocks, and a note on the latest.
      on_read: called with the number of bytes of every read.

    Raises:
      CheckpointError: the source is not a model folder, or the target holds something else or the
        conversion of another source, to other weights or with another calibration; or the source
        is in INT4 groups of another size.
      ConfigError: calibration does not compute all that the model's layers do.
      ValueError: `calibration` is for other weights or groups.
    """
    if calibration is not None and calibration.target != rounded_to(weights, group):
        raise ValueError(f"a calibration for {calibration.target}, the weights are {weights}")
    source, target = local_folder(source), Path(target)
    revision = Revision(source)
    config, names = _read(source, ignored, 0, weights, group)
    if calibration is not None:
        refuse_unsupported(config)
    if read_manifest(source) is not None:
        raise CheckpointError(f"{source} is converted already")
    checkpoint = HFCheckpoint(source, names)
    if not names.unloaded.keys().isdisjoint(list_tensors(source).tensors):
        config, names = _read(source, ignored, len(config.predictors), weights, group)
        checkpoint = HFCheckpoint(source, names)
    checkpoint.on_read = on_read
    dtype = _dtype(checkpoint, names, weights)
    # For 4 bits the configuration says what is in groups, and of which size.
    wanted = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8"}.get(weights or "", "auto")
    digest = "" if calibration is None else _calibration_digest(calibration)
    stored = config.stored if wanted == "auto" else weight_format(wanted, config, "experts")
    conversion = Conversion(
        FORMAT,
        revision.digest,
        stored,
        dtype,
        digest,
        int4=config.int4 if sharing(stored) == "group" else None,
        plain_parts=tuple(sorted(config.plain_parts)) if wanted == "auto" else (),
    )
    model = _model(source, config, names, dtype, wanted)
    with _alone(target):
        _prepare(target, conversion)
        files = {path.name: digest_of(path) for path in _copied(source)}
        known = None
        if (target / MANIFEST).exists():
            known = read_record(target / MANIFEST, Manifest).files
        if known == files and not list(changed(target, files)):
            blocks = len(blocks_of(names))
            on_block(blocks, blocks, "complete already")
            return
        if calibration is None:
            records = _convert_blocks(model, checkpoint, target, on_block)
        else:
            floats = _model(source, config, names, dtype, dtype)
            made = _Calibrated(model, floats, checkpoint, target, calibration)
            records = made.convert(on_block)
        for name in files:
            shutil.copyfile(source / name, target / name)
        if problems := list(changed(target, files)):
            raise CheckpointError(f"{source}: while it was converted, {'; '.join(problems)}")
        tree = json.loads((source / "config.json").read_text())
        revision.check()
        write_record(target / MANIFEST, Manifest(conversion, tree, files, records))
        (target / CONVERSION).unlink(missing_ok=True)


def rounded_to(weights: TargetFormat | None, group: int) -> RoundingTarget | None:
    """Returns the numbers that a calibration for these weights rounds to; None: no calibration
    improves such weights."""
    if weights is None or weights not in FORMATS or FORMATS[weights].products != "int8":
        return None
    if sharing(weights) == "group":
        return RoundingTarget(4, group, int8_rows=False)
    return INT8


def _read(
    source: Path, ignored: Collection[str], modules: int, weights: TargetFormat | None, group: int
) -> tuple[ModelConfig, CheckpointNames]:
    """Returns the configuration of the converted model, and the names of the source's tensors.
    Raises CheckpointError as `read_config`, or if the source has INT4 groups of another size."""
    config, names = read_config(source, ignored, modules)
    if weights is None or sharing(weights) != "group":
        return config, names
    group = group_of(weights) or group
    if config.stored == weights:
        if config.int4.group != group:
            raise CheckpointError(
                f"{source} is in INT4 already, in groups of {config.int4.group}, and not {group}"
            )
        return config, names
    parts: frozenset[MatrixPart] = frozenset(("attention",))
    made = {"stored": weights, "int4": Int4(group), "plain_parts": parts}
    return msgspec.structs.replace(config, **made), names


def _dtype(checkpoint: HFCheckpoint, names: CheckpointNames, weights: TargetFormat | None) -> str:
    """The dtype of everything that is not quantised."""
    kind = checkpoint.kind(names.embedding["table"].names[0])
    return "bfloat16" if weights == "bf16" or kind == "BF16" else "float32"


def _model(
    source: Path, config: ModelConfig, names: CheckpointNames, dtype: str, weights: str
) -> _Model:
    """The templates of one device."""
    deployment = load_deployment(
        source,
        {
            "mode": "colocated",
            "dtype": dtype,
            "attention.weights": weights,
            "ffn.weights": weights,
            # The model is only loaded, never run.
            "scheduler.slots": 1,
            "scheduler.max_length": 2,
            "scheduler.token_budget": 1,
        },
    )
    meshes = Submeshes(deployment)
    return _Model(config, names, ModelTemplates(config, deployment, meshes), meshes)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Keeps other conversions away from the target, on file systems that lock folders. Raises
    CheckpointError if another process converts to it."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is there, and not of a conversion")
    target.mkdir(parents=True, exist_ok=True)
    folder = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{target}: another process is converting to it") from None
        except OSError as error:
            logger.warning("%s cannot be locked: %s; convert to it once at a time", target, error)
        yield
    finally:
        os.close(folder)


def _prepare(target: Path, conversion: Conversion) -> None:
    """Creates the folder, or checks that it belongs to the same conversion."""
    if (target / MANIFEST).exists():
        known: Conversion | None = read_record(target / MANIFEST, Manifest).conversion
    elif (target / CONVERSION).exists():
        known = read_record(target / CONVERSION, Conversion)
    elif any(target.iterdir()):
        raise CheckpointError(f"{target} is there, and not of a conversion")
    else:
        known = None
    if known is None:
        (target / BLOCKS).mkdir()
        write_record(target / CONVERSION, conversion)
        return
    different = [
        f"{field} {getattr(known, field)}, and not {getattr(conversion, field)}"
        for field in Conversion.__struct_fields__
        if getattr(known, field) != getattr(conversion, field)
    ]
    if different:
        raise CheckpointError(f"{target} is of another conversion: {'; '.join(different)}")


def _convert_blocks(
    model: _Model, checkpoint: HFCheckpoint, target: Path, on_block: Callable[[int, int, str], None]
) -> dict[str, Records]:
    """Makes and writes every block that is missing or damaged."""
    blocks = blocks_of(model.names)
    records: dict[str, Records] = {}
    with ThreadPoolExecutor(1, "jaxserve-write") as writer:
        writing: Future[None] | None = None
        for done, block in enumerate(blocks):
            known = _finished(target, block.name)
            if known is not None:
                records[block.name] = known
                on_block(done + 1, len(blocks), f"{block.name} is there")
                continue
            leaves = _leaves(model, checkpoint, block)
            if writing is not None:
                writing.result()
            writing = writer.submit(_write, target / BLOCKS, block.name, leaves, records)
            del leaves
            on_block(done + 1, len(blocks), block.name)
        if writing is not None:
            writing.result()
    return {block.name: records[block.name] for block in blocks}


class _Calibrated:
    """A conversion whose layers are made by calibration."""

    def __init__(
        self,
        model: _Model,
        floats: _Model,
        checkpoint: HFCheckpoint,
        target: Path,
        calibration: CalibrationText,
    ):
        self._model, self._floats, self._checkpoint = model, floats, checkpoint
        self._target, self._calibration = target, calibration
        self._blocks = {block.name: block for block in blocks_of(model.names)}
        self._records: dict[str, Records] = {}
        self._path = target / CALIBRATION
        self._reports: list[LayerReport] = []
        if self._path.exists():
            self._reports = read_record(self._path, CalibrationReport).layers

    def convert(self, on_block: Callable[[int, int, str], None]) -> dict[str, Records]:
        """Makes and writes every block that is missing or damaged."""
        count = len(self._blocks)
        plain = [name for name in self._blocks if name.split(".")[-1] not in ("attention", "ffn")]
        for name in plain:
            if not self._done(name):
                leaves = _leaves(self._model, self._checkpoint, self._blocks[name])
                _write(self._target / BLOCKS, name, leaves, self._records)
            on_block(len(self._records), count, name)
        source = BlockAccess(self._read, self._done, self._written)
        made = Calibrator(self._model.config, source, self._calibration, self._report)
        for name, own in made.blocks():
            note = f"{name} is there"
            if own is not None:
                template, _ = self._model.template(self._blocks[name])
                ordered = {
                    leaf.name: jax.numpy.asarray(own[leaf.name], leaf.dtype)
                    for leaf in template.leaves
                }
                _write(self._target / BLOCKS, name, ordered, self._records)
                note = name
            on_block(len(self._records), count, note)
        return {name: self._records[name] for name in self._blocks}

    def _report(self, report: LayerReport) -> None:
        self._reports = [known for known in self._reports if known.layer != report.layer]
        self._reports.append(report)
        write_record(self._path, CalibrationReport(self._reports))

    def _read(self, name: str) -> dict[str, np.ndarray]:
        leaves = _leaves(self._floats, self._checkpoint, self._blocks[name])
        return {leaf: np.asarray(array) for leaf, array in leaves.items()}

    def _done(self, name: str) -> bool:
        known = self._records.get(name) or _finished(self._target, name)
        if known is not None:
            self._records[name] = known
        return known is not None

    def _written(self, name: str) -> dict[str, np.ndarray]:
        folder = self._target / BLOCKS / name
        return {
            leaf: read_array(open_array(folder / leaf, entry.packed))
            for leaf, entry in self._records[name].items()
        }


def _calibration_digest(calibration: CalibrationText) -> str:
    digest = hashlib.sha256(msgspec.json.encode(calibration.settings))
    digest.update(repr(calibration.sequences.shape).encode())
    digest.update(np.ascontiguousarray(calibration.sequences, np.int32).tobytes())
    return digest.hexdigest()


def _leaves(model: _Model, checkpoint: HFCheckpoint, block: StoredBlock) -> dict[str, jax.Array]:
    template, rules = model.template(block)
    mesh = model.meshes.attention
    shardings = [cached_sharding(mesh, spec) for spec in template.specs(rules)]
    leaves = zip(
        template.leaves, checkpoint.leaves(template, block.sources, shardings), strict=True
    )
    return {one.name: in_rows(leaf) if one.input_major else leaf for one, leaf in leaves}


def _write(
    folder: Path, name: str, leaves: dict[str, jax.Array], records: dict[str, Records]
) -> None:
    """Writes a block's checkpoint, then its record."""
    import orbax.checkpoint as ocp  # slow to import, and only conversions need it

    record = {
        leaf: StoredLeaf(array.shape, str(array.dtype), checksum_of([np.asarray(array)]))
        for leaf, array in leaves.items()
    }
    # Zarr keeps a byte for each 4-bit value, and two fit.
    leaves = {n: in_bytes(a) if record[n].packed else a for n, a in leaves.items()}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    arguments = ocp.args.PyTreeSave(
        leaves,
        # One file per expert or array, because readers read whole chunks.
        save_args={
            leaf: ocp.SaveArgs(shard_axes=(0,) if array.ndim > 2 else ())
            for leaf, array in leaves.items()
        },
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save((folder / name).absolute(), args=arguments, force=True)
    write_record(folder / f"{name}.json", BlockRecord(record))
    records[name] = record


def _finished(target: Path, name: str) -> Records | None:
    """A block's record if the block is complete and its checksums match, else None."""
    path = target / BLOCKS / f"{name}.json"
    if not path.exists():
        return None
    try:
        record = read_record(path, BlockRecord).leaves
    except CheckpointError:
        return None
    return None if list(damaged(target, {name: record})) else record


def _copied(source: Path) -> list[Path]:
    paths = {path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}
    return sorted(paths)


def quieten_libraries() -> None:
    """Silences Orbax, which logs every file as a warning."""
    logging.getLogger("absl").setLevel(logging.ERROR)


class BlockRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arrays of a block that was written completely."""

    leaves: dict[str, StoredLeaf]


def write_record(path: Path, record: Any) -> None:
    """Writes a record atomically."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
