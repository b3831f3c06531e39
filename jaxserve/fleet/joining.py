"""Decides whether the leader accepts a follower, and from which process it gets the broadcast.

Called by `leader.py`. Pure functions.
"""

from collections.abc import Mapping, Sequence

from jaxserve.config.topology import HOSTS_EACH
from jaxserve.fleet.control import Identity


def refusal(leader: Identity, follower: Identity) -> str:
    """Returns why the leader refuses this follower; empty if it accepts it."""
    if not 0 < follower.process_id < leader.processes:
        return (
            f"process id {follower.process_id} is not among the followers of {leader.processes} "
            f"processes: 1 to {leader.processes - 1}"
        )
    name = f"process {follower.process_id}"
    if follower.protocol != leader.protocol:
        return f"control protocol {follower.protocol} on {name}, {leader.protocol} on the leader"
    if follower.processes != leader.processes:
        return f"--processes {follower.processes} on {name}, {leader.processes} on the leader"
    if differences := _differences(follower.versions, leader.versions, name):
        return f"versions differ: {differences}"
    if follower.digest != leader.digest:
        differences = _differences(follower.facts, leader.facts, name)
        return (
            f"deployment digest {follower.digest} on {name}, {leader.digest} on the leader"
            f"{': ' if differences else ''}{differences}"
        )
    return ""


def _differences(follower: Mapping[str, str], leader: Mapping[str, str], name: str) -> str:
    """The first few keys with different values: `attention.dp = 2 on process 1, 3 on the …`."""
    keys = [key for key in {**leader, **follower} if follower.get(key) != leader.get(key)]
    shown = [
        f"{key} = {follower.get(key, 'absent')} on {name}, "
        f"{leader.get(key, 'absent')} on the leader"
        for key in keys[:4]
    ]
    if len(keys) > 4:
        shown.append(f"and {len(keys) - 4} more")
    return "; ".join(shown)


def parent_of(host: str, leader: str, followers: Sequence[str]) -> int | None:
    """Returns the number of the follower that hands on to the next one; None: the leader does.

    The first process of a host gets everything, and hands it on to the others there. The hosts are
    a tree below the leader's, each with at most `HOSTS_EACH` below it, so that no process has more
    to send when more hosts join.

    Args:
      host: of the one that joins.
      leader: its host.
      followers: hosts of those that have joined, in that order.
    """
    if host == leader:
        return None
    if host in followers:
        return followers.index(host)
    hosts = [each for each in dict.fromkeys(followers) if each != leader]
    above = len(hosts) // HOSTS_EACH
    return followers.index(hosts[above - 1]) if above else None
