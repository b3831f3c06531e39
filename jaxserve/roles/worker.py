"""What runners and observers know of any worker."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax

from jaxserve.config.model import ModelConfig
from jaxserve.roles.layout import Bucket, StepLoad


class Step(Protocol):
    """What every worker knows of a step; a `StepPlan` says more."""

    @property
    def domain(self) -> int: ...
    @property
    def lane(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def bucket(self) -> Bucket: ...


def lane_of_all(step: Step, domains: int) -> int:
    """The step's lane among those of all domains, which alternate: lanes of equal number of all
    domains follow each other (xDeepServe §5.2)."""
    return step.lane * domains + step.domain


@functools.cache
def layers_of(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """The layers of a step in the order in which it takes them: behind the model's own those of the
    prediction modules, one a draft, the last one as often as it takes."""
    drafts = bucket.drafts if config.modules else 0
    modules = (config.layers + min(draft, config.modules - 1) for draft in range(drafts))
    return *range(config.layers), *modules


class Passed(NamedTuple):
    """A step that a worker without the head has enqueued to its end."""

    last: jax.Array
    """What the worker computes last in the step: when it is there, so is everything before."""


Stages = Iterator[Any]
"""A step on a lane: enqueues the worker's next stage each time it is asked for one, and yields what
the stage makes on the worker's mesh, if anything."""


class Observer(Protocol):
    """Notes when a stage's output is there (`observe/timeline.py`)."""

    def observe(
        self,
        stage: Any,
        lane: int,
        layer: int,
        step: int,
        result: jax.Array,
        load: StepLoad | None,
        begun: int,
        /,
    ) -> None:
        """Called right after the stage was enqueued.

        Args:
          load: of the step.
          begun: when its enqueueing began, in nanoseconds since the epoch.
        """
        ...
