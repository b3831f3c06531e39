"""Keys of a deployment that are chosen where it starts, unless they are written: the value `auto`.

What chooses them needs the model and the devices (`roles/sizing.py`); `load_deployment` is given it
where a process has the whole deployment to itself. Elsewhere, as where several processes read one
file and must agree, they are the defaults of their structs. Called by `load.py`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config.deployment import Deployment

AUTO = "auto"

AUTO_KEYS = (
    "mode",
    "dtype",
    "attention.dp",
    "attention.tp",
    "cache.page_size",
    "cache.pages",
    "scheduler.slots",
    "scheduler.max_length",
    "scheduler.token_budget",
    "scheduler.token_buckets",
    "scheduler.page_buckets",
)
"""The keys, in the order in which what was chosen is told."""

Choose = Callable[["Deployment", frozenset[str]], Mapping[str, Any]]
"""Gets a deployment in which open keys have their structs' defaults, and the dotted keys that were
written; returns values for keys of `AUTO_KEYS` that were not."""


def written_keys(tree: Mapping[str, Any]) -> frozenset[str]:
    """The dotted keys, of two parts at most, that a deployment's tree has."""
    keys = set()
    for key, value in tree.items():
        keys |= {f"{key}.{name}" for name in value} if isinstance(value, Mapping) else {key}
    return frozenset(keys)


def drop_auto(tree: dict[str, Any]) -> None:
    """Takes the keys out that say `auto`, or with a list of buckets nothing."""
    for key in AUTO_KEYS:
        section, _, name = key.rpartition(".")
        place = tree.get(section, {}) if section else tree
        if isinstance(place, dict) and name in place and place[name] in (AUTO, []):
            del place[name]


def page_tokens(platform: str, cache_format: str) -> int:
    """Tokens of a page that suit the kernels. TPUs take an 8-bit cache in multiples of 128, and a
    page's keys and values are as many copies whatever its size: with 256 half as many a token."""
    if platform == "tpu":
        return 256 if cache_format in ("fp8", "int8") else 128
    return 16 if platform == "cpu" else 64
