"""Which piece of a message goes from which device to which: pure data.

A sending program puts out `sends` arrays, one piece of each on every sending device; a receiving
program takes `receives` arrays likewise. A route is the list of edges between pieces. Any number of
attention devices meets any number of ffn devices (design, decision 5). No JAX here.
"""

import math
from typing import Literal, NamedTuple

RouteKind = Literal["trampoline", "broadcast"]


class Edge(NamedTuple):
    """One piece on its way."""

    source: int
    """Sending device, by its place in the sending mesh."""
    output: int
    """Which of the sender's arrays."""
    destination: int
    """Receiving device, by its place in the receiving mesh."""
    input: int
    """Which of the receiver's arrays."""


class Route(NamedTuple):
    """All edges of one direction."""

    senders: int
    receivers: int
    sends: int
    receives: int
    edges: tuple[Edge, ...]

    @property
    def whole(self) -> bool:
        """Device i's one array goes to device i: the message crosses as one sharded copy."""
        return self.edges == tuple(Edge(i, 0, i, 0) for i in range(self.senders))


def _split(senders: int, receivers: int) -> Route:
    """Rows in `lcm` equal pieces, contiguous on both sides: every row crosses exactly once."""
    pieces = math.lcm(senders, receivers)
    out, into = pieces // senders, pieces // receivers
    edges = tuple(Edge(p // out, p % out, p // into, p % into) for p in range(pieces))
    return Route(senders, receivers, out, into, edges)


def dispatch_route(attention: int, ffn: int, kind: RouteKind) -> Route:
    """Attention to ffn. Every attention device holds an equal share of the rows.

    trampoline: share to share (xDeepServe §4.2). broadcast: every share to every ffn device; its
    input a is the share of attention device a (Step-3 §4.1).
    """
    if kind == "trampoline":
        return _split(attention, ffn)
    edges = tuple(Edge(a, 0, f, a) for a in range(attention) for f in range(ffn))
    return Route(attention, ffn, 1, attention, edges)


def combine_route(attention: int, ffn: int, kind: RouteKind) -> Route:
    """Ffn to attention, the way back of `dispatch_route`.

    broadcast: ffn device f's output a holds its partial result of attention device a's rows, which
    arrive as input f and are summed there.
    """
    if kind == "trampoline":
        return _split(ffn, attention)
    edges = tuple(Edge(f, a, a, f) for f in range(ffn) for a in range(attention))
    return Route(ffn, attention, attention, ffn, edges)


def rounds(route: Route) -> list[list[Edge]]:
    """The edges in rounds in which every device sends at most once and receives at most once."""
    result: list[list[Edge]] = []
    for edge in route.edges:
        for group in result:
            if all(e.source != edge.source and e.destination != edge.destination for e in group):
                group.append(edge)
                break
        else:
            result.append([edge])
    return result
