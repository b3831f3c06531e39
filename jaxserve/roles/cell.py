"""Runs the workers of one process, stage by stage in the total order of all lanes; never waits.

A cell is an attention worker and an ffn worker of one runtime (design, words); in a process that
plays one of the two roles it holds one worker, and the other's stages are somebody else's. Every
process of the runtime takes the same steps in the same order, so the two ends of each transfer
pair up.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.link.contract import Contract
from jaxserve.link.runtime_link import RuntimeLink
from jaxserve.mesh import Submeshes, has_local_devices
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.attention import AttentionWorker, build_attention
from jaxserve.roles.capacity import token_sizes
from jaxserve.roles.ffn import FFNWorker, build_ffn
from jaxserve.roles.sampling import Finished
from jaxserve.roles.schedule import Rotation, Stage, StageName
from jaxserve.roles.weights import LeafSource
from jaxserve.roles.worker import Observer, OnLoad, Passed, Step

RunStage = Callable[[int], Any]
"""Takes the lane; enqueues what a worker does in a stage and returns what it makes, if anything."""


class Workers(NamedTuple):
    """The workers that a process plays."""

    attention: tuple[AttentionWorker, ...] = ()
    """One or none; as all sequences here, so that nobody has to ask which."""
    ffn: tuple[FFNWorker, ...] = ()

    def stages(self) -> Mapping[StageName, tuple[RunStage, ...]]:
        """Who runs something in a stage, senders before receivers."""
        attention = tuple(worker.stage for worker in self.attention)
        ffn = tuple(worker.stage for worker in self.ffn)
        return {
            "attend": attention,
            "dispatch": attention + ffn,
            "ffn": ffn,
            "combine": ffn + attention,
            "leave": ffn + attention,
        }


class Cell:
    """Enqueues the steps of all lanes on the workers of this process.

    The engine begins a step plan on a lane and calls `advance`, which enqueues stages until some
    lane has left its step, and hands that step's sampled tokens out as arrays still being computed.

    Attributes:
      observer: told of what every stage makes.
      at: the stage that was enqueued last.
    """

    def __init__(
        self, workers: Workers, rotation: Rotation, lanes: int, observer: Observer | None = None
    ):
        self._workers, self._rotation = workers, rotation
        self._stages = workers.stages()
        self._steps: list[Step | None] = [None] * lanes
        self.observer = observer
        self.at: Stage | None = None

    @property
    def active(self) -> bool:
        """Whether a lane is inside a step."""
        return bool(self._rotation.active)

    @property
    def idle_lanes(self) -> list[int]:
        """Lanes that could begin a step."""
        busy = self._rotation.active
        return [lane for lane in range(len(self._steps)) if lane not in busy]

    @property
    def on_load(self) -> OnLoad | None:
        """Told how many tokens each expert of a layer got, where this process knows."""
        return next((worker.on_load for worker in self._workers.attention), None)

    @on_load.setter
    def on_load(self, on_load: OnLoad | None) -> None:
        for worker in self._workers.attention:
            worker.on_load = on_load

    def position(self) -> tuple[str, int, int, int] | None:
        """Stage, lane, layer and step number of what was enqueued last; from any thread."""
        if self.at is None:
            return None
        step = self._steps[self.at.lane]
        return (*self.at, -1 if step is None else step.number)

    def begin(self, step: Step) -> None:
        """Starts a step on an idle lane; its stages follow in `advance`.

        With an attention worker the step is a whole `StepPlan`.
        """
        self._rotation.begin(step.lane)
        self._steps[step.lane] = step
        for attention in self._workers.attention:
            attention.begin(cast(Any, step))
        for ffn in self._workers.ffn:
            ffn.begin(step)

    def advance(self) -> Finished | Passed:
        """Enqueues stages up to and including the next `leave`, and returns what that made: with an
        attention worker a `Finished`."""
        if not self._rotation.active:
            raise ValueError("no lane has begun a step")
        stages, observer = self._stages, self.observer
        for turn in self._rotation.turns:
            for stage in turn:
                self.at = stage
                made = None
                for run in stages[stage.name]:
                    made = run(stage.lane)
                if observer is not None:
                    self._observe(observer, stage, made)
            if stage.name == "leave":
                return cast(Finished | Passed, made)
        raise AssertionError("the rotation has no end")

    def _observe(self, observer: Observer, stage: Stage, made: Any) -> None:
        step = self._steps[stage.lane]
        assert step is not None
        if isinstance(made, Finished):
            observer.observe("attend", stage.lane, stage.layer, step.number, made.sampled)
        elif isinstance(made, jax.Array):
            observer.observe(stage.name, stage.lane, stage.layer, step.number, made)


def build_cell(
    templates: ModelTemplates,
    deployment: Deployment,
    meshes: Submeshes,
    source: LeafSource,
    names: CheckpointNames,
    observer: Observer | None = None,
) -> Cell:
    """The workers of the roles that this process has devices of, and the link between them."""
    contract = Contract.of(templates.config, deployment)
    link = RuntimeLink(
        deployment.link.transport,
        contract,
        meshes.attention,
        meshes.ffn,
        token_sizes(deployment),
    )
    workers = Workers()
    if has_local_devices(meshes.attention):
        built = build_attention(templates, deployment, meshes.attention, source, names)
        workers = workers._replace(attention=(AttentionWorker(*built, link.attention),))
    if has_local_devices(meshes.ffn):
        worker = FFNWorker(*build_ffn(templates, deployment, meshes.ffn, source, names))
        worker.attach(link.ffn, token_sizes(deployment))
        workers = workers._replace(ffn=(worker,))
    rotation = Rotation(templates.config.layers, deployment.lanes)
    return Cell(workers, rotation, deployment.lanes, observer)
