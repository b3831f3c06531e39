"""MiniMax-M2, M2.1 and M2.5 (`model_type` minimax_m2): their config.json and their tensors."""

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.families import Family
from jaxserve.checkpoint.source import CheckpointNames, Sources, decoder_names, per_expert
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.model import FFN, LayerKind, ModelConfig, RouterSpec


def minimax_m2_config(entries: Entries) -> ModelConfig:
    """MiniMax-M2's config.json."""
    decoder = entries.decoder()
    heads = entries.heads(decoder["d_model"], 128)
    columns = entries.size("rotary_dim", default=heads["head_dim"])
    layers, expert_d_ff = decoder.pop("layers"), decoder.pop("d_ff")
    entries.only("scoring_func", "sigmoid")
    entries.only("qk_norm_type", "per_layer")
    entries.only("shared_intermediate_size", 0)
    entries.only("attn_type_list", [1] * layers)
    for name in ("use_routing_bias", "use_qk_norm"):
        entries.only(name, True)
    for part in ("full_attention", "linear_attention", "mlp"):
        entries.only(f"layernorm_{part}_beta", 1.0, 1)
    # Sizes of a shared expert and dense layers, which the model does not have, and of prediction
    # modules, which are not loaded.
    entries.meaningless("shared_moe_mode", "mlp_intermediate_size", "use_mtp")
    entries.meaningless("num_mtp_modules", "mtp_transformer_layers")
    rule = RouterSpec(
        experts=entries.size("num_local_experts"),
        top_k=entries.size("num_experts_per_tok"),
        score="sigmoid",
        float32_logits=True,
        renormalise=True,
        bias=True,
    )
    rope = entries.rope("head_dim", heads["head_dim"], share=columns / heads["head_dim"])
    attention = GQA(**heads, rope=rope, qk_norm="columns")
    moe = FFN(router=rule, expert_d_ff=expert_d_ff)
    return ModelConfig(**decoder, decoder=(LayerKind(attention, moe),) * layers)


def minimax_m2_names(config: ModelConfig) -> CheckpointNames:
    """MiniMax-M2's tensors."""
    gate, bias = (f"block_sparse_moe.{name}" for name in ("gate", "e_score_correction_bias"))
    # Prediction modules, where files have them (`num_mtp_modules` is 3), are skipped.
    modules = (f"model.layers.{config.layers + number}." for number in range(3))
    return decoder_names(config, ffn=_experts, gate=gate, bias=bias, ignored=tuple(modules))


def _experts(config: ModelConfig, layer: str, ffn: FFN) -> Sources:
    return per_expert(config, ffn, f"{layer}block_sparse_moe.experts.", ("w1", "w3", "w2"))


MINIMAX_M2 = Family(minimax_m2_config, minimax_m2_names, "num_local_experts")
