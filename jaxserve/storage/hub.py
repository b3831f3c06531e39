"""Models of the Hugging Face Hub, by their id: `Qwen/Qwen3-30B-A3B` in place of a folder.

`huggingface_hub` downloads them to its own cache and finds them there the next time; its variables
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply.
"""

import re
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.storage.mirror import SMALL, WEIGHTS

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_folder(name: str) -> Path | None:
    """Downloads a model that is named by its id, unless it is in the cache already.

    Args:
      name: what stands in place of a folder; files and folders on this host take precedence.

    Returns:
      The folder in the cache of the Hub; None if the name is no id.

    Raises:
      ConfigError: no model with this id can be downloaded; the message has the Hub's reason.
    """
    path = Path(name)
    if not _ID.fullmatch(name) or path.exists() or path.parent.is_dir() or path.suffix == ".yaml":
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*SMALL, WEIGHTS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{name}: no such folder, and its download from the Hugging Face Hub failed: {reason}"
        ) from None
