"""Typed, strict reading of a config.json. Used by the families; knows none of them.

Problems are collected and reported together. Every entry must be read, or be known to be irrelevant
to the text model's mathematics: ignoring an unknown entry could silently produce wrong tokens.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.config.model import Llama3, Rope, RouterSpec, Yarn
from jaxserve.errors import CheckpointError

HARMLESS = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path
    auto_map use_cache initializer_range bos_token_id eos_token_id pad_token_id sep_token_id
    unk_token_id decoder_start_token_id attention_dropout hidden_dropout resid_dropout
    embd_dropout output_attentions output_hidden_states output_scores output_router_logits
    return_dict return_dict_in_generate aux_loss_alpha seq_aux router_aux_loss_coef
    router_jitter_noise pretraining_tp ep_size problem_type id2label label2id task_specific_params
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder gradient_checkpointing use_bfloat16
    torchscript pruned_heads finetuning_task tokenizer_class prefix suppress_tokens
    begin_suppress_tokens forced_bos_token_id forced_eos_token_id _attn_implementation
    attn_implementation _attn_implementation_autoset unsloth_version unsloth_fixed _commit_hash
    tf_legacy_loss max_length min_length max_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences remove_invalid_values exponential_decay_length_penalty
    """.split()  # noqa: SIM905  (a list of them is three pages long)
)
"""Entries that do not affect inference: provenance, training, token ids, and the generation
defaults that old tools stored here."""


class Entries:
    """The entries of a config.json; keeps track of which ones were read.

    Args:
      tree: the entries; null counts as missing.
      ignored: names that the user declares irrelevant, as `section.name` within a section.
      section: name of the section that `tree` is; empty: the top level.
    """

    def __init__(self, tree: Mapping[str, Any], ignored: Collection[str] = (), section: str = ""):
        self._prefix = f"{section}." if section else ""
        self._ignored = frozenset(ignored)
        self._tree = {name: value for name, value in tree.items() if value is not None}
        self._unread = {name for name in self._tree if f"{self._prefix}{name}" not in ignored}
        if not section:
            self._unread -= HARMLESS
        self.problems: list[str] = []

    def size(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """The first of these entries that is present, as an integer."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return self._wrong(name, value, f"a whole number from {least}", least)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of these entries that is present, as a positive number."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            return self._wrong(name, value, "a number above 0", 1.0)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean entry."""
        _, value = self._first((name,), default)
        if not isinstance(value, bool):
            return self._wrong(name, value, "true or false", False)
        return value

    def names(self, name: str) -> list[str]:
        """A list of strings; empty where it is missing."""
        _, value = self._first((name,), [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return self._wrong(name, value, "a list of names", [])
        return value

    def section(self, name: str) -> dict[str, Any]:
        """An entry that is a JSON object; empty where it is missing."""
        _, value = self._first((name,), {})
        if not isinstance(value, Mapping):
            return self._wrong(name, value, "an object", {})
        return dict(value)

    def layers(self, name: str, default: Collection[int]) -> frozenset[int]:
        """Layer indices, from a list or a comma-separated string."""
        _, value = self._first((name,), default)
        items = value.split(",") if isinstance(value, str) else value
        try:
            if isinstance(items, Mapping) or any(isinstance(n, bool | float) for n in items):
                raise TypeError
            return frozenset(int(item) for item in items if str(item).strip())
        except (TypeError, ValueError):
            return self._wrong(name, value, "a list of layers", frozenset())

    def any(self, name: str) -> Any:
        """The raw entry, or None."""
        return self._first((name,), None)[1]

    def only(self, name: str, *values: Any) -> None:
        """Reports a problem if the entry is present with a value other than the supported ones."""
        _, value = self._first((name,), values[0])
        if not any(value == known and type(value) is type(known) for known in values):
            said = f"{self._prefix}{name} = {_short(value)} is not supported"
            self.problems.append(f"{said}, only {' or '.join(map(repr, values))}")

    def meaningless(self, *names: str) -> None:
        """Marks entries as irrelevant in this family."""
        self._unread -= set(names)

    def rope(
        self, name: str, dimensions: int, *, interleaved: bool = False, share: float | None = None
    ) -> Rope:
        """RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

        Args:
          name, dimensions: the entry that gives the number of dimensions, and its value.
          share: share of the dimensions that are rotated, unless a section says otherwise; None:
            the family rotates all of them.
        """
        parameters, scaling = self.section("rope_parameters"), self.section("rope_scaling")
        section = "rope_scaling" if scaling else "rope_parameters"
        inner = Entries({**parameters, **scaling}, self._ignored, section)
        theta = (inner if "rope_theta" in parameters else self).number("rope_theta")
        self.meaningless("rope_theta")
        kind = inner.any("rope_type") or inner.any("type") or "default"
        # Tokens of text have one position for all sections of a model that sees images.
        inner.meaningless("type", "rope_type", "mrope_section", "mrope_interleaved")
        columns = dimensions
        if share is None:
            inner.only("partial_rotary_factor", 1.0, 1)
        else:
            columns = int(dimensions * inner.number("partial_rotary_factor", default=share))
        yarn = inner.yarn() if kind == "yarn" else None
        llama3 = inner.llama3() if kind == "llama3" else None
        if kind not in ("default", "yarn", "llama3"):
            said = f"{section} = {_short(scaling or {'rope_type': kind})} is not supported"
            self.problems.append(f"{said}, only yarn and llama3")
            inner.problems.clear()
        else:
            inner.refuse_unread()
        self.problems += inner.problems
        if dimensions % 2 or columns % 2 or not 0 < columns <= dimensions:
            said = f"{name} = {dimensions}: RoPE cannot turn {columns} columns of it in pairs"
            self.problems.append(said)
        part = columns % dimensions
        return Rope(theta=theta, yarn=yarn, llama3=llama3, interleaved=interleaved, columns=part)

    def yarn(self) -> Yarn:
        """The entries of a `rope_scaling` of type yarn."""
        factor = self.number("factor")
        magnitude = yarn_magnitude(factor, 1.0)
        mscale, of_all = self._mscale("mscale"), self._mscale("mscale_all_dim")
        if mscale and of_all:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, of_all)
        return Yarn(
            factor=factor,
            original_positions=self.size("original_max_position_embeddings"),
            beta_fast=self.number("beta_fast", default=32.0),
            beta_slow=self.number("beta_slow", default=1.0),
            truncate=self.flag("truncate", default=True),
            magnitude=self.number("attention_factor", default=magnitude),
        )

    def llama3(self) -> Llama3:
        """The entries of a `rope_scaling` of type llama3."""
        return Llama3(
            factor=self.number("factor"),
            original_positions=self.size("original_max_position_embeddings"),
            low=self.number("low_freq_factor"),
            high=self.number("high_freq_factor"),
        )

    def decoder(self, d_ff: str = "intermediate_size") -> dict[str, Any]:
        """Reads the entries that all decoders have, as fields of `ModelConfig`, and `layers` and
        `d_ff`, of which a family makes its layers.

        Args:
          d_ff: name of the entry with an FFN's width.
        """
        return {
            "vocab": self.size("vocab_size"),
            "d_model": self.size("hidden_size"),
            "layers": self.size("num_hidden_layers"),
            "d_ff": self.size(d_ff),
            "norm_epsilon": self.number("rms_norm_eps"),
            "max_positions": self.size(
                "max_position_embeddings", "max_position_embedding", "max_seq_len"
            ),
            "tied_head": self.flag("tie_word_embeddings"),
        }

    def heads(self, d_model: int, head_dim: int = 0) -> dict[str, Any]:
        """Reads the sizes of grouped-query attention, as fields of `GQA`.

        Args:
          head_dim: where the file does not say it; 0: d_model, divided by the query heads.
        """
        heads = self.size("num_attention_heads")
        return {
            "q_heads": heads,
            "kv_heads": self.size("num_key_value_heads", "num_attention_groups", default=heads),
            "head_dim": self.size("head_dim", least=2, default=head_dim or d_model // heads),
        }

    def _mscale(self, name: str) -> float:
        return 0.0 if self.any(name) in (None, 0) else self.number(name)

    def router(self, rule: RouterSpec, experts: str, top_k: str) -> None:
        """Checks that a router's sizes are consistent; `experts` and `top_k` are the entries'
        names."""
        if not 1 <= rule.top_k <= rule.experts:
            self.problems.append(f"{top_k} = {rule.top_k} of {experts} = {rule.experts}")
        size = rule.experts // rule.groups
        if rule.experts and rule.groups > 1 and (rule.experts % rule.groups or size < 2):
            said = f"n_group = {rule.groups} does not cut {rule.experts} experts"
            self.problems.append(f"{said} into equal groups of at least 2")
        elif rule.top_groups > rule.groups or rule.top_groups * size < rule.top_k <= rule.experts:
            said = f"topk_group = {rule.top_groups} of {rule.groups} groups of {size} experts"
            self.problems.append(f"{said} cannot hold {rule.top_k} experts a token")

    def multiple(self, name: str, size: int, of: str, part: int) -> None:
        """Reports a problem unless the first entry's size is a multiple of the second one's."""
        if size % part:
            self.problems.append(f"{name} = {size} is no multiple of {of} = {part}")

    def inside(self, section: str, tree: Mapping[str, Any]) -> "Entries":
        """The entries of a section, with what the user declares irrelevant there."""
        return Entries(tree, self._ignored, section)

    def refuse_unread(self) -> None:
        """Reports every entry that was never read, except features that are switched off."""
        for name in sorted(self._unread):
            value = self._tree[name]
            if value is not False and value not in ({}, [], ""):
                said = f"{self._prefix}{name} = {_short(value)} is not known"
                self.problems.append(f"{said}, and might change what the model computes")

    def raise_problems(self) -> None:
        """Raises CheckpointError if there is a problem."""
        if self.problems:
            raise CheckpointError("config.json: " + "; ".join(self.problems))

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        self._unread -= set(names)
        for name in names:
            if name in self._tree:
                return name, self._tree[name]
        return " or ".join(names), default

    def _wrong[Value](self, name: str, value: Any, wanted: str, instead: Value) -> Value:
        """Records a problem and returns `instead`, so that reading can continue."""
        said = "is missing" if value is None else f"= {_short(value)} is not {wanted}"
        self.problems.append(f"{self._prefix}{name} {said}")
        return instead


def yarn_magnitude(factor: float, mscale: float) -> float:
    """The factor that YaRN applies to queries and keys (§3.4; DeepSeek's `mscale`)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
