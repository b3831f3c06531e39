"""The layout of a step's int32 arrays: its batch array, and the rules of its requests.

Shared by the programs that read the arrays and by `step_arrays.py`, which fills them. Pure shapes:
no JAX.
"""

from typing import Any

import msgspec

from jaxserve.roles.layout import MAX_BIASES

FROM_DEVICE = -1
"""Stands for a value that only the device knows. As the first token id of a row: the token that its
slot sampled last. As a later token id: the draft that follows it. As a KV length: the length after
the slot's steps so far."""

REJECTED = -3
"""Returned by a step with drafts in place of all tokens behind the first wrong draft."""

SAMPLER_FIELDS = 5
"""Words for each slot in the batch array's sampler block: temperature to seed."""


class BatchLayout(msgspec.Struct, frozen=True):
    """Where each field of a step lies in a DP group's row of the batch array.

    The batch array is int32 `[dp, width]`; its fields, in order: `token_ids[tokens]`,
    `query_start[slots + 1]`, `kv_length[slots]`, `sample[slots]`, and per slot the sampler's
    temperature, top_k, top_p, min_p and seed (floats and the uint32 seed as raw bits).
    Slots without tokens in this step have an empty query range. `sample` is the number of a slot's
    last tokens after which one is sampled: 0, 1, or 1 + its drafts. With prediction modules
    `upcoming[slots * modules]` follows: the prompt tokens behind a slot's last one, -1 where they
    are unknown.
    """

    tokens: int
    slots: int
    modules: int = 0

    @property
    def width(self) -> int:
        return self.tokens + (self.slots + 1) + (2 + SAMPLER_FIELDS + self.modules) * self.slots

    def fields(self, row: Any) -> dict[str, Any]:
        """Cuts one row (NumPy or JAX, shape `[width]`) into its named fields."""
        sizes = {
            "token_ids": self.tokens,
            "query_start": self.slots + 1,
            "kv_length": self.slots,
            "sample": self.slots,
            "temperature": self.slots,
            "top_k": self.slots,
            "top_p": self.slots,
            "min_p": self.slots,
            "seed": self.slots,
            "upcoming": self.slots * self.modules,
        }
        return _cut(row, sizes)


class RulesLayout(msgspec.Struct, frozen=True):
    """Layout of a slot's row in the rules array.

    The rules array is int32 `[dp, slots, width]`. It exists only for steps in which some request
    has rules (penalties, biases, banned or allowed tokens). Such a step has its temperatures here,
    and 0 in the batch array, so that each token is drawn once, after the rules. Floats and bitmasks
    are raw bits; bit t % 32 of word t // 32 of a bitmask stands for token t.
    """

    vocab: int

    @property
    def words(self) -> int:
        """Words of a bitmask over the vocabulary."""
        return -(-self.vocab // 32)

    @property
    def width(self) -> int:
        return sum(self._sizes().values())

    def fields(self, rows: Any) -> dict[str, Any]:
        """Cuts rows (NumPy or JAX, shape `[..., width]`) into named fields `[..., size]`."""
        return _cut(rows, self._sizes())

    def _sizes(self) -> dict[str, int]:
        return {
            "temperature": 1,
            "repetition": 1,
            "presence": 1,
            "frequency": 1,
            "prompt_length": 1,
            "fresh": 1,
            "masked": 1,
            "token_ids": MAX_BIASES,
            "biases": MAX_BIASES,
            "allowed": self.words,
            "prompt": self.words,
        }


def _cut(rows: Any, sizes: dict[str, int]) -> dict[str, Any]:
    fields, start = {}, 0
    for name, size in sizes.items():
        fields[name] = rows[..., start : start + size]
        start += size
    return fields
