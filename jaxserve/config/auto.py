"""Keys of a deployment with the value `auto`: chosen at the start, unless the file has a value.

The choice needs the model and the devices (`roles/sizing.py`). `load_deployment` gets a chooser in
a process that has the whole deployment to itself. Elsewhere the keys have the defaults of their
structs, because several processes may read one file and must agree. Called by `load.py`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.config.formats import FORMATS

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
    "scheduler.compile_first",
    "pipeline",
)
"""The keys, in the order in which choices are reported."""

Choose = Callable[["Deployment", frozenset[str]], Mapping[str, Any]]
"""Takes a deployment in which open keys have their structs' defaults, and the dotted keys that the
file has. Returns values for the keys of `AUTO_KEYS` that it lacks."""


def written_keys(tree: Mapping[str, Any]) -> frozenset[str]:
    """Dotted keys of a deployment's tree, of two parts at most."""
    keys = set()
    for key, value in tree.items():
        keys |= {f"{key}.{name}" for name in value} if isinstance(value, Mapping) else {key}
    return frozenset(keys)


def drop_auto(tree: dict[str, Any]) -> None:
    """Removes keys with the value `auto`, and empty lists of buckets."""
    for key in AUTO_KEYS:
        section, _, name = key.rpartition(".")
        place = tree.get(section, {}) if section else tree
        if isinstance(place, dict) and name in place and place[name] in (AUTO, []):
            del place[name]


def page_tokens(platform: str, cache_format: str, unit: int = 1) -> int:
    """Tokens of a page that suit the kernels. TPUs take an 8-bit cache in multiples of 128 rows.
    Keys and values of a page take the same number of copies at any size: 256 tokens halve the
    copies. With compressed rows a page has 512 tokens, which 128 rows of 4 tokens each stand for.

    Args:
      unit: the model's `page_unit`.
    """
    in_8_bits = 512 if unit > 1 else 256
    on_tpu = in_8_bits if FORMATS[cache_format].bits == 8 else 128
    size = {"tpu": on_tpu, "cpu": 16}.get(platform, 64)
    return -(-size // unit) * unit
