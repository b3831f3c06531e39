"""A deployment on hardware, ready to be simulated or predicted.

Called by `plan.py simulate`, `calibrate` and `verify`. It turns the keys of
`config/deployment.py` into the planner's words.
"""

from pathlib import Path
from typing import NamedTuple, cast

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import Floats, FormatName
from jaxserve.config.model import MatrixPart, held_floats
from jaxserve.config.topology import PlannedMode, Role
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.calibration import NOTHING, Calibration
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import CostModel, cost_model, load_model
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.stage_times import Rooflines
from jaxserve.planner.stages import Calculator


class Roles(NamedTuple):
    """The hardware of both roles, with the names by which it was asked for."""

    attention: Hardware
    ffn: Hardware
    names: tuple[str, str]


class Scenario(NamedTuple):
    """A deployment with everything that its predictions take."""

    deployment: Deployment
    layout: Layout
    attention: Calculator
    ffn: Calculator
    roles: Roles

    def rooflines(self, loads: ExpertLoads | None = None) -> Rooflines:
        """Returns its stage times, with these loads or with `Assumptions.imbalance`."""
        hardware = self.roles.attention, self.roles.ffn
        return Rooflines(self.layout, self.attention, self.ffn, hardware, loads)


def scenario(
    deployment: Deployment,
    model: CostModel,
    roles: Roles,
    context: int,
    assumed: Assumptions,
    measured: Calibration = NOTHING,
) -> Scenario:
    """Returns everything about a deployment. Raises ConfigError as `held_floats`.

    Args:
      model: `weights: auto` takes over the formats of its checkpoint's matrices.
      context: mean tokens of a sequence, for predictions that are not given lengths.
    """
    afd, config = deployment.topology.has("ffn"), model.config
    gather = afd and deployment.link.route == "broadcast"
    exchange = "gather" if gather else deployment.ffn.exchange

    def calculator(role: Role, part: MatrixPart, hardware: Hardware) -> Calculator:
        weights, on_cpus = getattr(deployment, role).weights, hardware.platform == "cpu"
        stored = "plain" if part in config.plain_parts else config.stored
        held = held_floats(role, weights, deployment.dtype, config.floats, on_cpus=on_cpus)
        formats = Formats(
            weights=cast(FormatName, _weights(weights, stored, held)),
            group=config.int4.group,
            zero_points=config.int4.zero_points,
            cache=deployment.cache_format,
            rope=deployment.cache.rope,
            dispatch=deployment.dispatch_format,
            expert_rows=deployment.ffn.expert_rows,
            rows=deployment.dtype,
            held=held,
            combine=deployment.link.combine,
            output=deployment.attention.dp if deployment.attention.output == "split" else 1,
        )
        return Calculator(model, context, formats, assumed, measured, exchange)

    return Scenario(
        deployment,
        layout_of(deployment, roles.names),
        calculator("attention", "attention", roles.attention),
        calculator("ffn", "experts" if config.experts else "dense", roles.ffn),
        roles,
    )


def layout_of(deployment: Deployment, names: tuple[str, str]) -> Layout:
    """The deployment's sharding in the planner's words."""
    a, f = deployment.attention, deployment.ffn
    colocated = deployment.topology.has("colocated")
    mode: PlannedMode = "afd" if not colocated else "tp" if a.dp == 1 else "ep"
    return Layout(
        mode=mode,
        attention=names[0],
        ffn=names[1],
        dp=a.dp,
        tp=a.tp,
        ep=a.dp if colocated else f.ep,
        ffn_tp=a.tp if colocated else f.tp,
        lanes=deployment.lanes,
        redundant_slots=f.redundant_slots,
        shared_ranks=f.shared_ranks,
        whole_shared=f.shared == "whole",
        instances=1 if colocated else f.instances,
        whole_steps=deployment.pipeline == "step",
        transport=deployment.link.transport,
    )


def model_of(deployment: Deployment, configs: Path) -> CostModel:
    """Returns the deployment's model. Raises ConfigError if its folder has no description, or a
    wrong one, or lacks layers that `attention.int8_products` names."""
    folder = Path(deployment.model)
    if not (folder / "config.json").is_file():
        return load_model(deployment.model, configs)
    try:
        return cost_model(read_model(deployment)[0], folder.name)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _weights(wanted: str, stored: str, held: Floats) -> str:
    """Format of matrices; `held` is that of matrices that are not quantised."""
    if wanted in ("bfloat16", "float32"):
        return held
    if wanted != "auto":
        return wanted
    return {"plain": held, "fp8_block": "fp8"}.get(stored, stored)
