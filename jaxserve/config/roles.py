"""The long form of a deployment file: `roles:` and `links:` instead of one section for each.

Called by `load.py` on what YAML gave, before anything is checked.
"""

from collections.abc import Sequence
from typing import Any

from jaxserve.errors import ConfigError


def expand_roles(tree: dict[str, Any]) -> None:
    """Rewrites a file that lists roles and links into the form with one section for each.

    `roles:` has the sections `attention` and `ffn`, or `colocated`, and `prefill`; `links:` has
    `ffn` and `pages`. They say the same as the short form's `attention`, `ffn`, `prefill`, `link`,
    `pages` and `mode`.

    Raises:
      ConfigError: a role or link is unknown, a section appears in both forms, or the mode
        contradicts the roles.
    """
    roles = _named_sections(tree, "roles", ("attention", "ffn", "colocated", "prefill"))
    links = _named_sections(tree, "links", ("ffn", "pages"))
    others = {"prefill": roles.pop("prefill")} if "prefill" in roles else {}
    if "pages" in links:
        others["pages"] = links["pages"]
    if "colocated" in roles:
        if "attention" in roles:
            raise ConfigError("roles: attention and colocated are two ways to hold attention")
        roles["attention"] = roles.pop("colocated")
        sections, mode = roles, "colocated"
    else:
        missing = [name for name in ("attention", "ffn") if roles and name not in roles]
        if missing:
            raise ConfigError(f"roles: {missing[0]} is missing; expected attention and ffn")
        sections, mode = roles, "afd"
    if roles and tree.setdefault("mode", mode) != mode:
        raise ConfigError(f"mode = {tree['mode']}, but roles: {', '.join(roles)}")
    sections = sections | others
    if "ffn" in links:
        sections["link"] = links["ffn"]
    for name, section in sections.items():
        if name in tree:
            raise ConfigError(
                f"{name}: is there twice, as a section of its own and in "
                f"{'links' if name in ('link', 'pages') else 'roles'}"
            )
        tree[name] = section


def _named_sections(
    tree: dict[str, Any], key: str, known: Sequence[str]
) -> dict[str, dict[str, Any]]:
    sections = tree.pop(key, None) or {}
    if not isinstance(sections, dict):
        raise ConfigError(f"{key}: expected sections, got {sections!r}")
    for name in sections:
        if name not in known:
            raise ConfigError(f"unknown key {key}.{name!s}; known: {', '.join(known)}")
    return sections
