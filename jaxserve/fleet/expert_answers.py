"""Answers questions of attention runtimes about the experts of an ffn runtime."""

from jaxserve.errors import EngineFailedError
from jaxserve.fleet.expert_control import Found, Look, Place, Rebalance, encode, questions
from jaxserve.model.ffn.placement import check_placement
from jaxserve.roles.expert_balancer import ExpertBalancer


def answer(balancer: ExpertBalancer, worker: str, question: bytes) -> bytes:
    """Returns the ffn runtime's answer to a question. Called from any thread but the one that
    carries actions out.

    Raises:
      msgspec.DecodeError: the bytes are no question.
    """
    asked, proposal, refused, failed = questions.decode(question), None, "", ""
    try:
        match asked:
            case Rebalance(dry_run):
                proposal = balancer.rebalance(dry_run=dry_run)
            case Place(placements):
                _place(balancer, placements)
            case Look():
                pass
    except ValueError as error:
        refused = str(error)
    except EngineFailedError as error:
        failed = str(error)
    placements = dict(balancer.placements)
    return encode(Found(worker, balancer.view(), placements, proposal, refused, failed))


def _place(balancer: ExpertBalancer, placements: dict[int, tuple[int, ...]]) -> None:
    sizes = balancer.facts.sizes
    for layer, placement in placements.items():
        if layer not in balancer.placements:
            raise ValueError(f"layer {layer} has no experts to move")
        check_placement(placement, sizes)
    balancer.place(placements)
