"""DeepSeek-V4 Flash and Pro (`model_type` deepseek_v4): their config.json and their tensors, whose
names are those of the released folders."""

from typing import Any

import msgspec

from jaxserve.checkpoint import source
from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.config.attention.compressed import Compressed
from jaxserve.config.model import FFN, Indexer, LayerKind, ModelConfig, Rope, RouterSpec, Streams
from pallas_kernels.activation import Activation

WINDOW, SPARSE = "sliding_attention", "compressed_sparse_attention"
ALL = "heavily_compressed_attention"
RATES = {WINDOW: 0, SPARSE: 4, ALL: 128}
"""Types of layers, and the tokens of their compressed rows."""
FIXED: dict[str, object] = {"num_key_value_heads": 1, "attention_bias": False, "n_group": 1}
FIXED |= {"topk_group": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc"}
FIXED |= {"mlp_bias": False, "norm_topk_prob": True}
"""Entries with the only value that is known."""
SPELLINGS = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.scale$", ".weight_scale_inv"),
)
"""Names that transformers 5 writes, and those of scales, as the names used here."""


def deepseek_v4_config(entries: Entries) -> ModelConfig:
    """Reads DeepSeek-V4's config.json."""
    decoder = entries.decoder(d_ff="moe_intermediate_size")
    layers, d_ff = decoder.pop("layers"), decoder.pop("d_ff")
    types, every = _types(entries, layers)
    main, compress, rope_dim = _ropes(entries)
    for name, value in FIXED.items():
        entries.only(name, value)
    windowed = Compressed(
        q_heads=entries.size("num_attention_heads"),
        q_latent=entries.size("q_lora_rank"),
        head_dim=entries.size("head_dim"),
        rope_dim=rope_dim,
        out_groups=entries.size("o_groups"),
        out_latent=entries.size("o_lora_rank"),
        rope=main,
        window=entries.size("sliding_window", least=2 * max(every[SPARSE], 1)),
    )
    indexer = Indexer(
        heads=entries.size("index_n_heads"),
        head_dim=entries.size("index_head_dim", least=rope_dim),
        top_k=entries.size("index_topk"),
        interleaved=True,
    )
    entries.multiple("num_attention_heads", windowed.q_heads, "o_groups", windowed.out_groups)
    specs = {WINDOW: windowed}
    for name, own in ((SPARSE, indexer), (ALL, None)):
        changed = {"every": every[name], "rope": compress, "indexer": own}
        specs[name] = msgspec.structs.replace(windowed, **changed)
    modules = entries.size("num_nextn_predict_layers", least=0, default=0)
    ffns = _ffns(entries, layers, d_ff, decoder)
    entries.only("expert_dtype", "fp8", "fp4")
    fp4 = entries.any("expert_dtype") == "fp4" and entries.section("quantization_config")
    return ModelConfig(
        **decoder,
        stored="mxfp4" if fp4 else "plain",
        decoder=tuple(LayerKind(specs[name], ffn) for name, ffn in zip(types, ffns, strict=False)),
        predictors=(LayerKind(windowed, ffns[-1]),) * modules,
        own_heads=True,
        streams=Streams(
            count=entries.size("hc_mult"),
            iterations=entries.size("hc_sinkhorn_iters"),
            epsilon=entries.number("hc_eps"),
        ),
    )


def _types(entries: Entries, layers: int) -> tuple[list[str], dict[str, int]]:
    """Reads the types of layers, and the tokens of a compressed row in each type."""
    rates = entries.section("compress_rates")
    every = RATES | {name: rate for name, rate in rates.items() if name in RATES}
    by_rate, ratios = {rate: name for name, rate in RATES.items()}, entries.any("compress_ratios")
    named = [by_rate.get(one, "") for one in ratios] if isinstance(ratios, list) else []
    types = entries.names("layer_types") or named
    if len(types) < layers or not {*types} <= RATES.keys():
        said = f"layer_types or compress_ratios need {layers} entries, each {' or '.join(RATES)}"
        entries.problems.append(f"{said}, or {', '.join(map(str, RATES.values()))}")
        types = [WINDOW] * layers
    sizes = every[SPARSE], every[ALL]
    fits = all(isinstance(one, int) and one > 0 for one in sizes) and sizes[0] <= RATES[SPARSE]
    if not fits or sizes[1] % sizes[0]:
        said = f"the first is no number from 1 to {RATES[SPARSE]} that divides the second"
        entries.problems.append(f"compress_rates = {rates}: {said}")
        every = RATES
    return types[:layers], every


def _ropes(entries: Entries) -> tuple[Rope, Rope, int]:
    """Reads RoPE of layers without and with compressed rows, and the number of rotated columns."""
    head_dim = entries.size("head_dim")
    parameters, scaling = entries.section("rope_parameters"), entries.section("rope_scaling")
    share = entries.any("partial_rotary_factor") or 0.0
    columns = int(head_dim * share) if isinstance(share, float) else 0
    rope_dim = entries.size("qk_rope_head_dim", least=2, default=columns or None)
    thetas = [entries.number(name) for name in ("rope_theta", "compress_rope_theta")]
    ropes = []
    for name, theta, others in zip(("main", "compress"), thetas, ({}, scaling), strict=True):
        tree = {"rope_theta": theta} | (parameters.get(name) or others)
        tree.pop("partial_rotary_factor", None)
        tree |= {"attention_factor": 1.0} | tree if "factor" in tree else {}
        inner = entries.inside("", {"rope_parameters": tree})
        ropes.append(inner.rope("qk_rope_head_dim", rope_dim, interleaved=True))
        entries.problems += inner.problems
    return ropes[0], ropes[1], rope_dim


def _ffns(entries: Entries, layers: int, d_ff: int, decoder: dict[str, Any]) -> list[FFN]:
    """Reads all FFNs, the module's last; a token's id chooses the first layers' experts."""
    kinds = entries.names("mlp_layer_types")
    hashed = kinds.count("hash_moe") if kinds else entries.size("num_hash_layers", least=0)
    if kinds:
        entries.meaningless("num_hash_layers")
        entries.only("mlp_layer_types", ["hash_moe"] * hashed + ["moe"] * (layers - hashed))
    rule = RouterSpec(
        experts=entries.size("n_routed_experts"),
        top_k=entries.size("num_experts_per_tok"),
        score="sqrtsoftplus",
        float32_logits=True,
        renormalise=True,
        scaling=entries.number("routed_scaling_factor"),
        bias=True,
    )
    bound = Activation(limit=entries.number("swiglu_limit"), clamp="before")
    shared = d_ff * entries.size("n_shared_experts", least=0)
    by_score = FFN(
        d_ff=shared, activation=bound, router=rule, expert_d_ff=d_ff, expert_activation=bound
    )
    by_token = msgspec.structs.replace(rule, bias=False, token_table=decoder["vocab"])
    first = msgspec.structs.replace(by_score, router=by_token)
    return [first if layer < hashed else by_score for layer in range(layers)] + [by_score]


def deepseek_v4_names(config: ModelConfig) -> source.CheckpointNames:
    """DeepSeek-V4's tensors."""
    d, vocab = config.d_model, config.vocab
    modules = [f"mtp.{number}." for number in range(config.modules)]
    prefixes = [*(f"layers.{layer}." for layer in range(config.layers)), *modules]
    pairs = [*zip(prefixes, config.decoder + config.predictors, strict=False)]
    return source.CheckpointNames(
        embedding={"table": source.matrix("embed.weight", vocab, d)},
        head={
            "norm": source.vector("norm.weight", d),
            "weight": source.matrix("head.weight", vocab, d),
            **_mixer(config, "streams", "hc_head_", 1),
        },
        attention=[_attention_block(config, *pair) for pair in pairs],
        ffn=[_ffn(config, *pair) for pair in pairs],
        predictions=[_module(config, prefix) for prefix in modules],
        ignored=() if modules else ("mtp.",),
        spellings=SPELLINGS,
    )


def _module(config: ModelConfig, name: str) -> source.Sources:
    """The leaves of `model.blocks.Prediction`."""
    d = config.d_model
    parts = f"{name}e_proj.weight", f"{name}h_proj.weight"
    return {
        "token_norm": source.vector(f"{name}enorm.weight", d),
        "hidden_norm": source.vector(f"{name}hnorm.weight", d),
        "projection": source.Source(parts, ((d, d),) * 2, stacked=True),
        "head.norm": source.vector(f"{name}norm.weight", d),
        **_mixer(config, "head.streams", f"{name}hc_head_", 1),
    }


def _mixer(config: ModelConfig, leaf: str, tensor: str, gains: int = 3) -> source.Sources:
    """The leaves of `model.residual`."""
    assert config.streams
    count = config.streams.count
    rows = count if gains == 1 else count * (2 + count)
    return {
        f"{leaf}.map": source.matrix(f"{tensor}fn", rows, count * config.d_model),
        f"{leaf}.base": source.vector(f"{tensor}base", rows),
        f"{leaf}.gain": source.vector(f"{tensor}scale", gains),
    }


def _attention_block(config: ModelConfig, layer: str, kind: LayerKind) -> source.Sources:
    d, sizes, router, name = config.d_model, kind.attention, kind.ffn.router, f"{layer}attn."
    assert isinstance(sizes, Compressed)
    assert router
    heads, width = sizes.q_heads * sizes.head_dim, sizes.head_dim
    groups = sizes.out_groups, sizes.out_latent, heads // sizes.out_groups
    out_down = source.matrix(f"{name}wo_a.weight", groups[0] * groups[1], groups[2])
    sources = {
        "input_norm": source.vector(f"{layer}attn_norm.weight", d),
        "post_norm": source.vector(f"{layer}ffn_norm.weight", d),
        "router.gate": source.matrix(f"{layer}ffn.gate.weight", router.experts, d),
        "attention.query_down": source.matrix(f"{name}wq_a.weight", sizes.q_latent, d),
        "attention.query_norm": source.vector(f"{name}q_norm.weight", sizes.q_latent),
        "attention.query_up": source.matrix(f"{name}wq_b.weight", heads, sizes.q_latent),
        "attention.row": source.matrix(f"{name}wkv.weight", width, d),
        "attention.row_norm": source.vector(f"{name}kv_norm.weight", width),
        "attention.sinks": source.vector(f"{name}attn_sink", sizes.q_heads),
        "attention.out_down": out_down._replace(view=source.View(groups, 0, 0, groups[0])),
        "attention.out": source.matrix(f"{name}wo_b.weight", d, groups[0] * groups[1]),
        **_mixer(config, "input_mixer", f"{layer}hc_attn_"),
        **_mixer(config, "post_mixer", f"{layer}hc_ffn_"),
    }
    table = source.matrix(f"{layer}ffn.gate.tid2eid", router.token_table, router.top_k)
    bias = source.vector(f"{layer}ffn.gate.bias", router.experts)
    sources |= {"router.table": table} if router.token_table else {"router.bias": bias}
    if sizes.every:
        sources |= _compressor(config, sizes, "attention.", name, width)
    if index := sizes.indexer:
        leaf, tensor = "attention.indexer.", f"{name}indexer."
        queries = index.heads * index.head_dim
        sources |= {
            f"{leaf}query": source.matrix(f"{tensor}wq_b.weight", queries, sizes.q_latent),
            f"{leaf}weights": source.matrix(f"{tensor}weights_proj.weight", index.heads, d),
            **_compressor(config, sizes, leaf, tensor, index.head_dim),
        }
    return sources


def _compressor(
    config: ModelConfig, sizes: Compressed, leaf: str, tensor: str, width: int
) -> source.Sources:
    """The leaves of `model.attention.compressed.Compressor`."""
    columns, name = width * (2 if sizes.indexer else 1), f"{tensor}compressor."
    maps = {"wkv": columns, "wgate": columns}
    return {
        f"{leaf}compressor.map": source.matrices(name, maps, config.d_model),
        f"{leaf}compressor.bias": source.Source((f"{name}ape",), ((sizes.every, columns),)),
        f"{leaf}compressor.norm": source.vector(f"{name}norm.weight", width),
    }


def _ffn(config: ModelConfig, layer: str, kind: LayerKind) -> source.Sources:
    sources = source.feed_forward(config, layer, kind.ffn, "ffn.", ("w1", "w3", "w2"))
    stacks = {name for name in sources if name.startswith("experts.")}
    return {name: own._replace(expert_stack=name in stacks) for name, own in sources.items()}


DEEPSEEK_V4 = Family(deepseek_v4_config, deepseek_v4_names)
