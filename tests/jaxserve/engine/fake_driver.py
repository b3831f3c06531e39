"""A driver without devices, for tests of the loop in which timing matters.

Every step samples, in every slot, the number of tokens its sequence has. Results stay away while
`gate` is closed, or come `pace` seconds after they were asked for.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.roles.sampling import Finished
from jaxserve.roles.step_plan import StepPlan
from tests.conftest import REPOSITORY

VOCAB = 1000


class FakeArray:
    """The part of a `jax.Array` that the results' thread needs."""

    def __init__(self, value: np.ndarray, wait: Callable[[], None]):
        self._value, self._wait = value, wait

    def copy_to_host_async(self) -> None: ...

    def addressable_data(self, index: int) -> np.ndarray:
        assert index == 0
        self._wait()
        return self._value


class FakeDriver:
    """Lanes finish in the order in which they began."""

    def __init__(self, lanes: int, groups: int, slots: int, pace: float = 0.0):
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[tuple[str, int]] = []
        """("begin", step number), ("advance", step number) and ("landed", step number)."""
        self.fault: Exception | None = None
        """Raised by the next `advance`."""
        self.result_fault: Exception | None = None
        """Raised by whoever reads the next result."""
        self._lanes, self._groups, self._slots = lanes, groups, slots
        self._pace = pace
        self._begun: list[StepPlan] = []

    def renew(self) -> bool:
        return False

    @property
    def active(self) -> bool:
        return bool(self._begun)

    @property
    def idle_lanes(self) -> list[int]:
        busy = {plan.lane for plan in self._begun}
        return [lane for lane in range(self._lanes) if lane not in busy]

    def position(self) -> tuple[str, int, int, int] | None:
        return ("attend", 0, 3, 7)

    def begin(self, plan: StepPlan) -> None:
        self.log.append(("begin", plan.number))
        self._begun.append(plan)

    def advance(self) -> Finished:
        if self.fault is not None:
            raise self.fault
        plan = self._begun.pop(0)
        self.log.append(("advance", plan.number))
        sampled = np.zeros(self._groups * self._slots, np.int32)
        sampled[plan.rows] = plan.kv_lengths % VOCAB
        sampled = sampled.reshape(self._groups, self._slots)

        def wait() -> None:
            time.sleep(self._pace)
            assert self.gate.wait(60)
            if self.result_fault is not None:
                raise self.result_fault
            self.log.append(("landed", plan.number))

        array: Any = FakeArray(sampled, wait)
        return Finished(plan, array, None, array)

    def count(self, event: str) -> int:
        return sum(name == event for name, _ in self.log)


def fake_engine(
    *,
    pace: float = 0.0,
    eos_token_ids: Sequence[int] = (),
    overrides: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Engine, FakeDriver]:
    """An engine on a fake driver, not yet started: 2 slots, 12 pages of 4 tokens, 1 s a step."""
    deployment: Deployment = load_deployment(
        REPOSITORY,
        {
            "cluster.step_seconds": 1.0,
            "cache.page_size": 4,
            "cache.pages": 12,
            "scheduler.slots": 2,
            "scheduler.max_length": 48,
            "scheduler.token_budget": 8,
            "scheduler.max_waiting": 5,
            **(overrides or {}),
        },
    )
    limits = deployment.scheduler
    sizes = SchedulerSizes.of(deployment, limits.token_buckets)
    sizes = msgspec.structs.replace(sizes, prefix_cache=False, side_by_side=False)
    scheduler = Scheduler(sizes)
    driver = FakeDriver(deployment.lanes, deployment.attention.dp, limits.slots, pace)
    engine = Engine(
        deployment,
        [scheduler],
        driver,
        vocab=VOCAB,
        eos_token_ids=frozenset(eos_token_ids),
        **options,
    )
    return engine, driver
