"""Decides from which process a follower receives the messages for all. Called by `leader.py`."""

from collections.abc import Sequence

from jaxserve.config.topology import HOSTS_EACH


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
