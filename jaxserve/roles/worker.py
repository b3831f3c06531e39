"""Names that workers share with the cell that runs them and with observers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from jaxserve.config.model import ModelConfig
from jaxserve.roles.layout import Bucket, StepLoad

if TYPE_CHECKING:  # an ffn worker in a runtime of its own has no plans
    from jaxserve.roles.step_plan import StepPlan


def lane_of_all(step: "StepPlan", domains: int) -> int:
    """Returns the step's lane among those of all domains, which alternate: lanes of equal number of
    all domains follow each other (xDeepServe §5.2)."""
    return step.lane * domains + step.domain


def modules_of(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """Returns the prediction module, counted from 1, of each pass that follows a step: one for each
    draft; the last module may come several times."""
    passes = range(1, 1 + bucket.drafts) if config.modules else ()
    return tuple(min(number, config.modules) for number in passes)


def layers_of(config: ModelConfig, bucket: Bucket) -> tuple[int, ...]:
    """Returns the layers of a step in the order in which it takes them: the model's own, then those
    of the prediction modules."""
    modules = modules_of(config, bucket)
    return *range(config.layers), *(config.layers - 1 + module for module in modules)


class Passed(NamedTuple):
    """A step that a worker without the head has enqueued to its end."""

    last: jax.Array
    """The worker's last result of the step; all others are ready before it."""


Stages = Iterator[Any]
"""Stages of a step on a lane. Each `next` enqueues the worker's next stage and yields its result on
the worker's mesh, or None."""


class Observer(Protocol):
    """Observes when a stage's output is ready (`observe/timeline.py`)."""

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
          load: work of the step.
          begun: when its enqueueing began, in nanoseconds since the epoch.
        """
