"""Which pipeline runs the lanes of a deployment. Called by `simulate.py`, `simulated_engine.py` and
`deploy_times.py`, so that all of them have the same one."""

from jaxserve.config.topology import Topology
from jaxserve.planner.colocated_lanes import Colocated, Overlapped
from jaxserve.planner.lanes import Disaggregated, Disturb, LinkMode, Note, undisturbed
from jaxserve.planner.stage_times import StageTimes


def pipeline_of(
    topology: Topology,
    times: StageTimes,
    *,
    lanes: int,
    groups: int,
    domains: int = 1,
    link: LinkMode = "duplex",
    disturb: Disturb = undisturbed,
    note: Note | None = None,
) -> Disaggregated | Colocated:
    """Makes the pipeline that runs the lanes of a deployment; the classes explain the arguments."""
    if topology.has("ffn"):
        return Disaggregated(
            layers=times.layers,
            lanes=lanes,
            groups=groups,
            domains=domains,
            link=link,
            disturb=disturb,
            note=note,
        )
    if times.overlapped:
        return Overlapped(layers=times.layers, groups=groups, disturb=disturb, note=note)
    return Colocated(layers=times.layers, lanes=lanes, groups=groups, disturb=disturb, note=note)
