"""The command-line options that select a deployment. Called by the entry points."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.config.auto import Choose
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.storage.bucket import is_url
from jaxserve.storage.hub import hub_folder

READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "path": Path}
"""Readers of an option's text that every table of options may name."""


def add_options(
    parser: argparse.ArgumentParser,
    table: Path,
    readers: Mapping[str, Callable[[str], Any]] | None = None,
) -> None:
    """Adds the options that a YAML file lists, each with the keywords of argparse, and besides:
    `read`, the name of a reader, and `group`, the title under which `--help` shows it.

    Args:
      readers: the command's own, by name.
    """
    known, groups = READERS | dict(readers or {}), dict[str, Any]()
    for name, keywords in yaml.safe_load(table.read_text(encoding="utf-8")).items():
        place: Any = parser
        if title := keywords.pop("group", ""):
            place = groups.setdefault(title, None) or parser.add_argument_group(title)
            groups[title] = place
        if "read" in keywords:
            keywords["type"] = known[keywords.pop("read")]
        place.add_argument(name, **keywords)


def add_deployment_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config, --model and --set."""
    add_options(parser, Path(__file__).with_suffix(".yaml"))


def read_deployment(
    config: str | None,
    model: str | None,
    overrides: Sequence[str] = (),
    choose: Choose | None = None,
) -> Deployment:
    """Reads the deployment of a command's `--config`, `--model` and `--set`.

    At least one of the first two is given. `choose` is passed to `load_deployment`.

    Raises:
      ConfigError: see `load_deployment`; or `model` is no folder and no model of the Hub.
    """
    if model is not None and not is_url(model):
        folder = (hub_folder(model) or Path(model)).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--model {model}: no such folder")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {model}: no config.json in it, as Hugging Face has")
        model = str(folder)
    if config is not None and model is not None:
        overrides = [*overrides, f"model={json.dumps(model)}"]
    path = model if config is None else config
    assert path is not None
    return load_deployment(path, overrides, choose=choose)


def check_timeline(folder: Path | None, deployment: Deployment) -> None:
    """Refuses a timeline of whole steps.

    Raises:
      ConfigError: one is wanted, and the deployment has no stages.
    """
    if folder is not None and deployment.topology.has("colocated"):
        raise ConfigError("--timeline: shows the stages of mode afd, and this one is colocated")
