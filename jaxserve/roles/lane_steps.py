"""Drives steps of which one dispatch runs all layers and lanes (`pipeline: step`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.roles.attention_programs import AttentionPrograms, Passes, pass_executables
from jaxserve.roles.compilation import Arrays, Get, compile_all, compile_steps
from jaxserve.roles.drafting import StepEnd, drafting_executables
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.sampling import sampling_executables
from jaxserve.roles.whole_steps import WholeSteps


def options(programs: AttentionPrograms, buckets: Sequence[Bucket], get: Get) -> dict[Bucket, Any]:
    """Collects the programs for the options of requests, and those that draft, of each bucket."""
    makes = sampling_executables, drafting_executables, pass_executables
    return {bucket: tuple(make(programs, bucket, get) for make in makes) for bucket in buckets}


Dispatch = tuple[Bucket, int, int]
"""Bucket, number of lanes, and the prediction module whose layer runs, from 1; 0: the model's own
layers run."""


def dispatches(deployment: Deployment) -> list[Dispatch]:
    """Lists all dispatches of a deployment, of which each has a program."""
    return [
        (bucket, lanes, module)
        for bucket in deployment_buckets(deployment)
        for lanes in range(1, 1 + deployment.lanes)
        for module in range(1 + (deployment.modules if bucket.drafts else 0))
    ]


def all_runs(config: ModelConfig) -> list[tuple[LayerKind, int, int]]:
    """Returns `ModelConfig.runs`, and then a run of one layer for each loaded prediction module."""
    modules = range(config.layers, config.all_layers)
    return config.runs() + [(config.layer(layer), layer, layer + 1) for layer in modules]


def runs_of(config: ModelConfig, runs: Sequence[Any], module: int) -> range:
    """Returns the places of a dispatch's runs among all; those of prediction modules are last."""
    own = len(runs) - config.modules
    return range(own + module - 1, own + module) if module else range(own)


class StepPipeline(WholeSteps):
    """Runs the steps of all lanes for this process's part."""

    _most = None
    executables: dict[Dispatch, jax.stages.Compiled]
    _layers: Callable[[Bucket, int, Sequence[Arrays]], Sequence[Arrays]]
    """Enqueues the layer of a prediction module, from 1, for lanes, each with x, batch and page
    table. Returns the arrays of each lane's residual stream."""

    def _compile(self, programs: Any, ends: Callable[..., Any], *weights: Any) -> None:
        """Compiles all dispatches, and the programs before and after them. `weights` are embedding,
        head, and what prediction modules have beside their layers."""
        deployment = programs.deployment
        steps = {each: programs.step(*each) for each in dispatches(deployment)}
        self.executables = compile_all(steps)
        self._ends = compile_steps(ends, programs, deployment_buckets(deployment))
        bound = ((bucket, ends[-1]) for bucket, ends in self._ends.items() if ends[-1])
        self._passes = {bucket: Passes(programs, bucket, own, weights) for bucket, own in bound}

    def _predict(self, bucket: Bucket, ends: Sequence[StepEnd]) -> list[jax.Array]:
        passes, states = self._passes[bucket], [self._passes[bucket].first(end) for end in ends]
        for number, module in enumerate(passes.modules):
            steps = [(*state[:2], end.table) for state, end in zip(states, ends, strict=True)]
            streams = zip(states, self._layers(bucket, module, steps), strict=True)
            states = [passes.next(number, state, stream) for state, stream in streams]
        return [drafts for (drafts,) in states]
