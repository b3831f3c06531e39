"""Control groups of this process: containers and systemd units limit memory and cores with them.

Called by `host_memory.py` and `host_cores.py`.
"""

from collections.abc import Iterator
from pathlib import Path


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, innermost first, of version 2 and then 1.

    Groups are in groups, as a unit in its slice. A container sees its own group as the outermost
    one, whatever the kernel calls it.

    Args:
      root: the folder that has `proc` and `sys`.
      controller: name of the controller in version 1: `memory` or `cpu`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    split = [line.split(":", 2) for line in lines]
    own = {name: path for _, names, path in split for name in names.split(",")}
    for folder in ("", controller):
        top = root / "sys/fs/cgroup" / folder
        inner = top / own.get(folder, "/").lstrip("/")
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(top))
