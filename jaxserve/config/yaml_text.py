"""Reads YAML text in which no mapping has a key twice.

Called by the readers of configurations. YAML itself keeps the last of two equal keys: a second
`scheduler:` section would silently replace the first one.
"""

from typing import Any

import yaml

from jaxserve.errors import ConfigError


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Composes a mapping, and refuses a key that it has already; before merges (`<<`)."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if (before := lines.get((key.tag, name))) is not None:
                raise ConfigError(f"line {line}: key {name!r} is in line {before} already")
            lines[key.tag, name] = line
        return node


def read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text.

    Args:
      what: names the text in errors.

    Raises:
      ConfigError: it is no YAML, or a key comes twice; names the key and both lines.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is no YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{what}, {error}") from None
