"""Reads a deployment from its YAML file, with overrides, and checks it.

The file may have `roles:` and `links:` in place of one section for each; that long form is turned
into the short one before anything is checked. Overrides are dotted keys from the command line
(`--set attention.dp=3`) or from Python (`overrides={"attention.dp": 3}`). An unknown key is an
error that names the nearest known one. Called by the entry points; a process that already has its
`Deployment` needs nothing of this.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from jaxserve.config.auto import Choose, drop_auto, written_keys
from jaxserve.config.checks import FORMAT_KEYS, complete, refuse_formats
from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import choices
from jaxserve.config.sections import SERVER_FILES
from jaxserve.config.shipped import deployment_names, deployment_path
from jaxserve.config.yaml_text import read_yaml
from jaxserve.errors import ConfigError
from jaxserve.storage.bucket import is_url
from jaxserve.storage.hub import hub_folder


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


def load_deployment(
    path: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    choose: Choose | None = None,
) -> Deployment:
    """Reads a deployment file and applies dotted overrides.

    Args:
      path: the YAML file, the name of one that comes with jaxserve (`demo`), or a model folder,
        its URL or its id on the Hugging Face Hub (then every other field has its default).
      overrides: `{"attention.dp": 3}` or `["attention.dp=3"]`; the latter's values are YAML.
      choose: chooses values for the keys that are `auto` (`auto.py`); None takes the defaults.

    Raises:
      ConfigError: the file is missing, a key is unknown (names the nearest one), a value is out
        of range, or sizes do not fit each other.
    """
    model = str(path) if is_url(path) else "."
    found = Path() if is_url(path) else deployment_path(Path(path))
    path = found if found.exists() else hub_folder(str(path)) or found
    try:
        text = "" if path.is_dir() else path.read_text()
    except FileNotFoundError:
        known = ", ".join(deployment_names())
        raise ConfigError(
            f"deployment file {path}: No such file or directory; by name there are {known}"
        ) from None
    except OSError as error:
        raise ConfigError(f"deployment file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"deployment file {path} is no text: {error}") from None
    tree = read_yaml(text, f"deployment file {path}") or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"deployment file {path}: expected keys, got {type(tree).__name__}")
    base = path if path.is_dir() else path.parent
    if path.is_dir():
        tree["model"] = model
    if isinstance(tree.get("model"), str) and not is_url(tree["model"]):
        tree["model"] = str((base / tree["model"]).resolve())
    for section, keys in {"server": SERVER_FILES, "cluster": ("tls",)}.items():
        given = tree.get(section)
        if isinstance(given, dict):
            for key in keys:
                if isinstance(given.get(key), str) and given[key]:
                    given[key] = str((base / given[key]).resolve())
    for key, value in _override_items(overrides):
        set_key(tree, key, value)
    expand_roles(tree)
    _check_keys(tree, Deployment, "")
    drop_auto(tree)
    deployment = _converted(tree)
    if choose is not None:
        for key, value in choose(deployment, written_keys(tree)).items():
            set_key(tree, key, value)
        deployment = _converted(tree)
    deployment = complete(deployment)
    if deployment.prefill.workers:
        prefill = deployment_of(deployment, "prefill")  # refuses what does not fit
        if prefill.cache.rope != deployment.cache.rope:
            raise ConfigError(
                f"prefill.cache.rope = {prefill.cache.rope}, but cache.rope = "
                f"{deployment.cache.rope}: pages are handed over in arrays of the same widths"
            )
        apart = deployment.topology.crosses_runtimes
        needed = deployment.attention.devices if apart else deployment.devices
        if deployment.fleet.least_domains and prefill.devices < needed:
            raise ConfigError(
                f"fleet.least_domains = {deployment.fleet.least_domains}: a domain needs {needed} "
                f"devices, a prefill worker that were to stand in for one has {prefill.devices}"
            )
        if deployment.fleet.rebalance_roles and prefill.devices != needed:
            raise ConfigError(
                f"fleet.rebalance_roles = true: a domain has {needed} devices, a prefill worker "
                f"{prefill.devices}, and each must be able to become the other"
            )
    return deployment


def _converted(tree: Mapping[str, Any]) -> Deployment:
    try:
        deployment = msgspec.convert(tree, Deployment)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(error, tree)) from None
    refuse_formats(deployment)
    return deployment


def _explained(error: msgspec.ValidationError, tree: Any) -> str:
    """Returns the error with the key's name and its value in front, and with its choices if it has
    any."""
    problem, _, place = str(error).partition(" - at `$.")
    if not place:
        return f"deployment: {problem}"
    struct: Any = Deployment
    for part in re.findall(r"[^.`\[\]]+", place):
        if isinstance(tree, Mapping):
            tree, struct = tree[part], getattr(struct, "__annotations__", {}).get(part)
        elif part.isdecimal():
            tree = tree[int(part)]
    if problem.startswith("Invalid enum"):
        use = FORMAT_KEYS.get((*place.rstrip("`").split("."),), "")
        offered = [name for name in _choices(struct) if not use or name in ("auto", *choices(use))]
        problem = f"expected one of {', '.join(filter(None, offered))}"
    return f"{place.rstrip('`')} = {tree!r}: {problem[0].lower()}{problem[1:]}"


def _choices(annotation: Any) -> list[str]:
    """Returns the strings that a type allows."""
    if isinstance(annotation, str):
        return [annotation]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def deployment_of(deployment: Deployment, role: str) -> Deployment:
    """Returns the deployment that one worker of a role runs.

    Args:
      deployment: the whole fleet's.
      role: `prefill`, whose workers have a deployment of their own without the rest of the fleet;
        or any other role.

    Raises:
      ConfigError: a key below `prefill` is wrong, or does not fit the rest; names the key.
    """
    prefill = deployment.prefill
    if role != "prefill":
        return deployment
    tree = msgspec.to_builtins(deployment)
    tree |= {"domains": 1, "fleet": {}, "prefill": {}}
    if prefill.mode == "colocated" and deployment.topology.has("ffn"):
        tree |= {"link": {}, "pipeline": "auto"}
    if prefill.mode:
        tree["mode"] = prefill.mode
    if prefill.lanes:
        tree["lanes"] = prefill.lanes
    if not prefill.scheduler.keys().isdisjoint(("slots", "token_budget")):
        tree["scheduler"]["token_buckets"] = []  # derived anew
    if "max_length" in prefill.scheduler or "page_size" in prefill.cache:
        tree["scheduler"]["page_buckets"] = []
    for name in PREFILL_SECTIONS:
        tree[name] |= getattr(prefill, name)
    try:
        _check_keys(tree, Deployment, "")
        return complete(_converted(tree))
    except ConfigError as error:
        raise ConfigError(f"prefill: {str(error).removeprefix('deployment: ')}") from None


PREFILL_SECTIONS = ("attention", "ffn", "link", "cache", "scheduler")
"""Sections in which a prefill worker may have keys of its own."""


def _override_items(overrides: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    items = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text!r}: expected key=value, as in attention.dp=3")
        items.append((key.strip(), read_yaml(value, f"--set {text!r}: {value!r}")))
    return items


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets a value in its section, which is made if it is missing."""
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {dotted}: {parent} is a value, not a section")
    tree[last] = value


def _check_keys(tree: Mapping[Any, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in known:
            everything = known_keys()
            inside = f".{next(iter(value))}" if isinstance(value, Mapping) and value else ""
            near = difflib.get_close_matches(f"{prefix}{key}{inside}", everything, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown key {prefix}{key!s}{hint}")
        section = known[key]
        if isinstance(section, type) and issubclass(section, msgspec.Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key}: expected a section, got {value!r}")
            _check_keys(value, section, f"{prefix}{key}.")


def known_keys(struct: type[msgspec.Struct] = Deployment, prefix: str = "") -> list[str]:
    """Lists the dotted keys of the deployment file, with sections expanded."""
    keys = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys += known_keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(f"{prefix}{field.name}")
    return keys
