"""Reads `quantization_config` of config.json: the format in which a folder stores its matrices.

Called by the families, to resolve a role's `auto`, and by `hf.py`, to learn how to read. Anything
unsupported is refused with the field, its value and the supported values. The section is read as
the formats' own libraries write it: DeepSeek's FP8 blocks, compressed-tensors (LLM Compressor),
GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ), and AutoRound, which packs like GPTQ or AWQ.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.packed import GPTQ_BITS, Packing
from jaxserve.config.formats import StoredFormat
from jaxserve.config.model import Int4
from jaxserve.errors import CheckpointError

SECTION = "quantization_config"
OLDER_SECTIONS = ("quantize_config.json", "quant_config.json")
"""Files in which older tools wrote this section."""
METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "auto-round", "mxfp4")


GROUPS = (32, 64, 128)
"""Group sizes (columns per scale) that the INT4 kernels support."""


class Quantisation(NamedTuple):
    """How matrices are stored."""

    stored: StoredFormat
    """Format in memory where a role's weights are `auto`. `plain` (dequantised to floats) for bits,
    group sizes and column orders that no kernel supports."""
    packing: Packing | None = None
    """Layout of the packed tensors; None: plain tensors, or FP8 blocks in DeepSeek's naming."""


def text_part(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries of the text model in a whole config.json: its `text_config` if present, else the
    whole. `quantization_config` may stand in either place.

    Raises:
      CheckpointError: `text_config` is no object.
    """
    text = tree if tree.get("text_config") is None else tree["text_config"]
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config = {text!r} is not an object")
    return {SECTION: tree.get(SECTION), **text}


def stored_format(entries: Entries) -> StoredFormat:
    """Reads the section of a whole config.json; appends problems to `entries.problems`."""
    section = entries.section(SECTION)
    return quantisation(section, entries).stored if section else "plain"


def packing_of(tree: Mapping[str, Any]) -> Packing | None:
    """How matrices are packed, from a config.json that has already been checked."""
    section = text_part(tree)[SECTION]
    return quantisation(section, Entries({})).packing if isinstance(section, Mapping) else None


def int4_of(packing: Packing) -> Int4:
    """Group size and zero points of matrices of this packing when kept in INT4."""
    return Int4(packing.group, zero_points=not packing.symmetric)


def _kept(packing: Packing) -> Quantisation:
    """Keeps matrices as INT4 if the kernels support their groups, else as floats."""
    kept = packing.bits == 4 and packing.group in GROUPS and packing.in_order
    return Quantisation("int4" if kept else "plain", packing)


def quantisation(section: Mapping[str, Any], outer: Entries) -> Quantisation:
    """Reads the section; appends problems to `outer.problems`."""
    inner = outer.inside(SECTION, section)
    method = inner.any("quant_method")
    if method is None:
        inner.problems.append(f"{SECTION}.quant_method is missing")
    inner.only("quant_method", *METHODS)
    readers = {
        None: _blocks,
        "fp8": _blocks,
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "mxfp4": _mxfp4,
    }
    found = Quantisation("plain")
    if method in readers:
        found = readers[method](inner)
        inner.refuse_unread()
    outer.problems += inner.problems
    return found


def _blocks(inner: Entries) -> Quantisation:
    """DeepSeek's FP8 blocks of 128 × 128."""
    # Without a block size, other tools mean one scale per matrix.
    if inner.any("weight_block_size") is None:
        inner.problems.append(f"{SECTION}.weight_block_size is missing")
    inner.only("weight_block_size", [128, 128])
    inner.only("fmt", "e4m3", "float8_e4m3fn")
    # Activations stay floats, whatever scheme the file states: that is more exact.
    # Scales are read in any dtype that the file has.
    inner.meaningless("activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers")
    return Quantisation("fp8_block")


def _mxfp4(inner: Entries) -> Quantisation:
    """gpt-oss's experts (`expert_stacks.py`)."""
    inner.meaningless("modules_to_not_convert", "dequantize")
    return Quantisation("mxfp4")


PROVENANCE = (
    *("meta", "provider", "autoround_version", "lm_head", "desc_act", "true_sequential"),
    *("static_groups", "damp_percent", "damp_auto_increment", "act_group_aware", "mse"),
    *("model_name_or_path", "model_file_base_name", "quantizer", "tokenizer", "dataset"),
    *("iters", "nsamples", "seqlen", "batch_size", "low_gpu_mem_usage", "pad_token_id"),
    *("enable_quanted_input", "max_input_length", "model_seqlen", "cache_block_outputs"),
    *("block_name_to_quantize", "modules_in_block_to_quantize", "modules_to_not_convert"),
    *("module_name_preceding", "module_name_preceding_first_block", "use_cuda_fp16"),
    *("use_exllama", "exllama_config", "backend", "pack_impl"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
)
"""Ignored entries of GPTQ's and AWQ's writers: how a folder was made, or which kernels to use. The
stored tensors show which modules are plain."""

TUNING = (
    *("lr", "minmax_lr", "amp", "enable_torch_compile", "enable_minmax_tuning", "scale_dtype"),
    *("enable_norm_bias_tuning", "gradient_accumulate_steps", "nblocks", "not_use_best_mse"),
    *("enable_alg_ext", "to_quant_block_names", "disable_opt_rtn", "scheme"),
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym"),
)
"""Ignored entries of AutoRound: how its rounding was found, and activation settings, which have no
effect because `act_bits` must be 16 or 32."""


MADE = (
    *("bits", "group_size", "sym", "desc_act", "mse", "damp_percent", "damp_auto_increment"),
    *("act_group_aware", "static_groups", "true_sequential", "fallback", "hessian"),
)
"""Keys allowed in a module's entry of GPTQModel's `dynamic`. Tensor shapes show bits and groups,
`g_idx` shows the column order, and zero points are always stored."""


def _gptq(inner: Entries) -> Quantisation:
    bits, group = inner.size("bits"), _group(inner)
    inner.only("bits", *GPTQ_BITS)
    _names(inner, "gptq", "gptq", "gptq_v2")
    own = _overrides(inner)
    for name, entry in own.items():
        if not isinstance(entry, Mapping) or entry.keys() - set(MADE):
            inner.problems.append(
                f"{SECTION}.dynamic.{name} = {entry!r} is not supported, only {', '.join(MADE)}"
            )
    # `desc_act` groups columns in order of activation size; `static_groups` keeps neighbours.
    in_order = inner.any("desc_act") is not True or inner.any("static_groups") is True
    symmetric = inner.any("sym") is True
    inner.meaningless("is_marlin_format", *PROVENANCE)
    inner.only("is_marlin_format", False)
    # The format "gptq" stores zero points minus one; "gptq_v2" stores them unchanged.
    layout = inner.any("checkpoint_format") or inner.any("format")
    plus = 0 if layout == "gptq_v2" else 1
    packing = Packing("gptq", bits, group, plus, symmetric, in_order, own_numbers=bool(own))
    made = [
        (entry.get("sym", symmetric), entry.get("desc_act", not in_order))
        for name, entry in own.items()
        if name not in HEAD and isinstance(entry, Mapping)
    ]
    if any(how != (symmetric, not in_order) for how in made):
        return Quantisation("plain", packing)  # no tensor's shape says of which this is so
    return _kept(packing)


def _awq(inner: Entries) -> Quantisation:
    bits, group = inner.size("bits", "w_bit"), _group(inner)
    inner.only("bits", 4)
    inner.only("version", "gemm", "GEMM")
    _names(inner, "awq", "gemm", "GEMM")
    # Symmetric matrices store zero points, too: the middle of the range.
    inner.meaningless("zero_point", "sym")
    if own := _overrides(inner):
        inner.problems.append(_own_numbers("dynamic", own))
    inner.meaningless(*PROVENANCE)
    return _kept(Packing("awq", bits, group, symmetric=False))


AUTO_ROUND: dict[str, tuple[Literal["gptq", "awq"], int]] = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptq": ("gptq", 1),
    "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}
"""AutoRound's `packing_format` -> layout, and the number to add to stored zero points (AutoRound's
`inference/backend.py`: GPTQ_FORMAT, GPTQ_FORMAT_NO_ZP and AWQ_FORMAT)."""


def _auto_round(inner: Entries) -> Quantisation:
    """AutoRound packs like GPTQ or AWQ; its columns are in order, with or without `g_idx`."""
    bits, group = inner.size("bits"), _group(inner)
    name = inner.any("packing_format")
    if name is None:
        inner.problems.append(f"{SECTION}.packing_format is missing")
    inner.only("packing_format", *AUTO_ROUND)
    layout, plus = AUTO_ROUND.get(str(name), ("gptq", 1))
    inner.only("bits", *((4,) if layout == "awq" else (4, 8, 2)))
    inner.only("data_type", "int")
    inner.only("act_bits", 16, 32)
    inner.only("super_bits", None)
    inner.only("quant_lm_head", False)
    symmetric = inner.flag("sym", default=True) and layout == "gptq"
    other = [
        name
        for name, own in inner.section("extra_config").items()
        if not (isinstance(own, Mapping) and own.get("bits") in (16, 32))
    ]
    if other:
        inner.problems.append(_own_numbers("extra_config", other))
    inner.meaningless("super_group_size", *PROVENANCE, *TUNING)
    return _kept(Packing(layout, bits, group, plus, symmetric=symmetric))


def _names(inner: Entries, method: str, *layouts: str) -> None:
    """Checks method and layout under all field names that GPTQModel and AutoRound use."""
    inner.only("method", method)
    for name in ("checkpoint_format", "format"):
        inner.only(name, *layouts)
    inner.only("pack_dtype", "int32")
    inner.only("data_type", "int")


HEAD = {"lm_head", "+:lm_head", "+:^lm_head$"}
"""GPTQModel's patterns for the head in `dynamic`. The head is kept as floats in any case."""


def _overrides(inner: Entries) -> Mapping[str, Any]:
    """Modules with their own bits or groups (GPTQModel's `dynamic`). Entries with `-:` are skipped:
    they leave modules plain, which the tensors show."""
    dynamic = inner.section("dynamic") if inner.any("dynamic") is not False else {}
    return {name: value for name, value in dynamic.items() if not name.startswith("-:")}


def _own_numbers(entry: str, modules: Iterable[str]) -> str:
    return (
        f"{SECTION}.{entry} has modules with bits or groups of their own, which is not "
        f"supported: {', '.join(sorted(modules))}"
    )


def _group(inner: Entries) -> int:
    """Columns that share a scale; 0: all."""
    value = inner.any("group_size")
    if value == -1:
        return 0
    return inner.size("group_size", "q_group_size")


FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
"""Layouts of compressed-tensors."""


def _compressed_tensors(inner: Entries) -> Quantisation:
    inner.only("quantization_status", "compressed", "frozen")
    inner.only("transform_config", {}, False)
    # The KV cache follows `cache.format` and computes its own scales.
    if inner.any("kv_cache_scheme"):
        path = f"{SECTION}.kv_cache_scheme"
        scheme = inner.inside(path, inner.section("kv_cache_scheme"))
        if scheme.size("num_bits") != 8:
            inner.problems.append(f"{path}.num_bits = {scheme.any('num_bits')!r}, expected 8")
    sparsity = inner.section("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        inner.problems.append(
            f"{SECTION}.sparsity_config.format = {sparsity['format']!r} is not supported, only "
            "'dense'"
        )
    # The tensors show which modules are plain.
    inner.meaningless("global_compression_ratio", "ignore", "version", "sparsity_config")
    groups, format = inner.section("config_groups"), inner.any("format")
    if format == "dense" and not groups:
        return Quantisation("plain", Packing("scaled", 8, 0))  # of a cache alone
    found = [_config_group(name, group, format, inner) for name, group in groups.items()]
    if not found:
        inner.problems.append(f"{SECTION}.config_groups has no groups")
        return Quantisation("plain")
    return found[0] if len(found) == 1 else _several(found)


def _several(found: Sequence[Quantisation]) -> Quantisation:
    """Chooses the format to keep among several: fewest bits (usually most weights), then smallest
    groups. Parts of layers with matrices in other formats become floats (`hf_config.py`)."""
    plain = {each.packing.layout for each in found if each.packing and each.stored == "plain"}
    # Tensors do not show whether INT8 weights expect INT8 inputs (W8A8) or float inputs.
    unkept = {"plain", "int8"} if "scaled" in plain else {"plain"}
    kept = [each for each in found if each.stored not in unkept]
    best = min(kept or found, key=lambda each: each.packing[1:3] if each.packing else (0, 0))
    packing = best.packing and best.packing._replace(own_numbers=True)
    return Quantisation(best.stored if kept else "plain", packing)


def _config_group(name: str, group: Any, whole_format: Any, inner: Entries) -> Quantisation:
    path = f"{SECTION}.config_groups.{name}"
    own = inner.inside(path, group if isinstance(group, Mapping) else {})
    # The tensors show which modules are quantised.
    own.meaningless("targets")
    weights, inputs = own.section("weights"), own.section("input_activations")
    own.only("output_activations", {})
    format = own.any("format") or whole_format
    if format not in FORMATS:
        known = " or ".join(map(repr, FORMATS))
        place = path if own.any("format") else SECTION
        inner.problems.append(f"{place}.format = {format!r} is not supported, only {known}")
        return Quantisation("plain")
    found = _scheme(own.inside(f"{path}.weights", weights), format, inner)
    if found.stored == "int8" and not inputs:
        found = found._replace(stored="plain")  # INT8 here multiplies rows in INT8
    given = own.inside(f"{path}.input_activations", inputs)
    # Inputs are quantised per token for INT8 weights, and not at all for other formats.
    given.only("dynamic", True, *(() if found.stored == "int8" else (False,)))
    own.problems += given.problems
    own.refuse_unread()
    inner.problems += own.problems
    return found


def _scheme(weights: Entries, format: Any, inner: Entries) -> Quantisation:
    """Reads `config_groups.NAME.weights`; `format` is the name of the layout."""
    kind, strategy = weights.any("type"), weights.any("strategy")
    bits, symmetric = weights.size("num_bits"), weights.flag("symmetric", default=True)
    weights.only("dynamic", False)
    in_order = weights.any("actorder") not in ("group", "dynamic", True)
    weights.meaningless("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    found = Quantisation("plain")
    if format == "pack-quantized":
        weights.only("type", "int")
        weights.only("num_bits", 4, 8, 2)
        weights.only("strategy", "group", "channel")
        weights.only("block_structure", None)
        size = weights.size("group_size") if strategy == "group" else 0
        weights.meaningless("group_size")
        found = _kept(Packing("packed", bits, size, symmetric=symmetric, in_order=in_order))
    elif kind == "float" and strategy == "block":
        weights.only("num_bits", 8)
        weights.only("block_structure", [128, 128], "128x128")
        found = Quantisation("fp8_block", Packing("fp8_block", bits, 128))
    else:
        weights.only("type", "int", "float")
        weights.only("num_bits", 8)
        weights.only("symmetric", True)
        weights.only("strategy", "channel", "tensor")
        weights.only("block_structure", None)
        weights.meaningless("group_size")
        stored: StoredFormat = "int8" if kind == "int" else "fp8"
        found = Quantisation(stored, Packing("scaled", bits, 0))
    weights.refuse_unread()
    inner.problems += weights.problems
    return found
