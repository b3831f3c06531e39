"""How long requests wait for one of several servers. Called by `deploy_prefill.py` and `deploy.py`.

Poisson arrivals and any spread of service times (M/G/c), by the approximation of Allen and Cunneen:
an M/M/c queue's waiting times the mean of the squared variations of arrivals (1) and of services.
Those that wait at all wait exponentially long, so that percentiles follow and not means alone.
"""

from typing import NamedTuple

import numpy as np

MOST = 0.999
"""Share of the time that servers may be busy; above it the queue counts as without an end."""


class Waiting(NamedTuple):
    """Of a queue.

    Attributes:
      chance: that a request waits.
      mean: seconds, of those that wait.
      busy: share of the time that a server is busy.
    """

    chance: float
    mean: float
    busy: float

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Seconds that so many requests wait."""
        waits = random.random(count) < self.chance
        return waits * random.exponential(1.0, count) * self.mean


NONE = Waiting(0.0, 0.0, 0.0)


def waiting(rate: float, service: np.ndarray, servers: int) -> Waiting | None:
    """Of requests at so many a second; None: they are too many.

    Args:
      service: seconds of one server, of equally likely requests.
    """
    mean = float(service.mean())
    busy = rate * mean / servers
    if busy >= MOST:
        return None
    if busy <= 0:
        return NONE
    variation = float(service.var()) / mean**2
    chance = erlang_c(rate * mean, servers)
    return Waiting(chance, (1 + variation) / 2 * mean / (servers * (1 - busy)), busy)


def erlang_c(load: float, servers: int) -> float:
    """The chance that all servers are busy (Erlang's formula C).

    Args:
      load: services that begin a second times their mean seconds, below `servers`.
    """
    blocked = 1.0  # formula B of none, one, two, … servers
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))
