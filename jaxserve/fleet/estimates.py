"""What a router expects: how long prompts take, how long outputs get, when the first token comes.

Learnt from what workers did, as moving averages. Called by `coordinator.py`; pure.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.errors import OverloadedError
from jaxserve.fleet.routed import Routed, Worker

WEIGHT = 0.1
"""Of the newest measurement in a moving average."""
FIRST_OUTPUT = 128.0
"""Tokens that an output is expected to have before any has ended."""


class Estimates:
    """Of one router.

    Args:
      deployment: `prefill.quadratic_tokens` and the targets in `fleet`.
    """

    def __init__(self, deployment: Deployment):
        self._quadratic = deployment.prefill.quadratic_tokens
        self._fleet = deployment.fleet
        self._output = FIRST_OUTPUT
        self._speed = 1.0  # of any prefill worker

    def cost(self, length: int, cached: int) -> float:
        """Of a prompt whose first tokens are cached: in tokens, with attention's quadratic part."""
        return length - cached + (length**2 - cached**2) / self._quadratic

    def began(self, worker: Worker, cost: float, now: float) -> None:
        """A prefill worker gets a prompt."""
        if not worker.work:
            worker.busy_since = now
        worker.work += cost

    def computed(self, worker: Worker, cost: float, now: float) -> None:
        """It has computed one."""
        self.dropped(worker, cost)
        seconds = now - worker.busy_since
        worker.busy_since = now
        if seconds > 0:
            speed = cost / seconds
            worker.speed += WEIGHT * (speed - worker.speed) if worker.speed else speed
            self._speed += WEIGHT * (speed - self._speed) if self._speed != 1.0 else speed

    def dropped(self, worker: Worker, cost: float) -> None:
        """It need not compute one any more."""
        worker.work = max(0.0, worker.work - cost)

    def seconds(self, worker: Worker, cost: float) -> float:
        """How long a prefill worker takes; one that has not computed anything yet, like others."""
        return cost / (worker.speed or self._speed)

    def speeds(self, speeds: np.ndarray) -> np.ndarray:
        """Those of prefill workers, where 0 is not known yet."""
        return np.where(speeds > 0, speeds, self._speed)

    def paced(self, worker: Worker, seconds: float) -> None:
        """A domain took so long between two tokens of a request."""
        worker.pace += WEIGHT * (seconds - worker.pace) if worker.pace else seconds

    def ended(self, tokens: int) -> None:
        """An output had so many tokens."""
        self._output += WEIGHT * (tokens - self._output)

    def promised(self, request: Routed) -> int:
        """Tokens that a request will take of a domain's cache."""
        more = max(self._output, len(request.emitted) + 1.0)
        return len(request.job.prompt) + int(min(request.job.max_tokens, more))

    def taken(self, worker: Worker) -> float:
        """Tokens of a domain's cache that requests take: this router's and, by what the domain
        says, those of others."""
        if not worker.others:
            return float(worker.promised)
        usage = sum(worker.load.kv_usage) / max(1, len(worker.load.kv_usage))
        others = usage * worker.facts.tokens * worker.others / max(1, worker.count)
        return worker.promised + others

    def wait(self, worker: Worker) -> float:
        """Seconds that a request waits at a domain until it gets a slot."""
        ahead = worker.count - worker.facts.slots + 1
        return max(0, ahead) * self._output * worker.pace / worker.facts.slots

    def check(self, prefill: Worker | None, cost: float, domains: Sequence[Worker]) -> None:
        """Raises OverloadedError, with the estimate, where a target would be missed.

        What is not known yet counts as no time.
        """
        if not domains:
            return
        domain = min(domains, key=lambda worker: (self.wait(worker), worker.pace))
        first = self.wait(domain) + domain.pace
        if prefill is not None and prefill.speed:
            first += self.seconds(prefill, prefill.work + cost)
        target = self._fleet.ttft_seconds
        if target and first > target:
            raise OverloadedError(
                f"the first token is expected after {first:.2f} s, and fleet.ttft_seconds = "
                f"{target:g}",
                retry_after_s=first - target,
            )
        target, pace = self._fleet.tpot_seconds, min(worker.pace for worker in domains)
        if target and pace > target and all(worker.count for worker in domains):
            raise OverloadedError(
                f"a token is expected to take {pace:.3f} s, and fleet.tpot_seconds = {target:g}",
                retry_after_s=self._output * pace,
            )
