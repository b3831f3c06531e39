"""The order in which the stages of all lanes are enqueued: pure data (design, decision 3).

Each lane repeats attend, dispatch, ffn, combine, once a layer. The order is total and the same in
every process, so transfers between processes pair up. One turn gives one lane one layer:

    attend(i)  dispatch(i)  combine(previous lane)  ffn(i)

The previous lane's combine follows this lane's dispatch, so that a device that works its queue in
order has this lane's rows under way before it waits for the other side's result: with three lanes
this is Step-3's three-stage pipeline (§4.1). A lane that has left its last layer starts its next
step at its next turn, wherever the others are: lanes are not drained.
"""

from typing import Literal, NamedTuple

StageName = Literal["attend", "dispatch", "ffn", "combine", "leave"]


class Stage(NamedTuple):
    """One thing to enqueue. The driver's attend of layer 0 is the program `enter`."""

    name: StageName
    lane: int
    layer: int


class Rotation:
    """Hands out stages turn by turn; `begin` puts a lane in at layer 0.

    Yields nothing that depends on time: the sequence of `begin`s and turns fixes every stage.
    """

    def __init__(self, layers: int, lanes: int):
        self._layers = layers
        self._next_layer: dict[int, int] = {}
        self._lanes = lanes
        self._pending: Stage | None = None
        self._turn = 0
        names: list[StageName] = ["attend", "dispatch", "ffn", "combine"]
        self._stages = [
            [tuple(Stage(name, lane, layer) for name in names) for layer in range(layers)]
            for lane in range(lanes)
        ]

    @property
    def active(self) -> list[int]:
        """Lanes that are inside a step."""
        return sorted(self._next_layer)

    def begin(self, lane: int) -> None:
        """The lane starts a step."""
        if lane in self._next_layer:
            raise ValueError(f"lane {lane} is still at layer {self._next_layer[lane]} of its step")
        self._next_layer[lane] = 0

    def turn(self) -> tuple[Stage, ...]:
        """The next active lane's turn: one layer, or its leave after the last.

        A turn that ends with `leave` ends the lane's step: a boundary, at which new plans come in.
        """
        lane = self._choose()
        layer = self._next_layer[lane]
        before: tuple[Stage, ...] = ()
        between: tuple[Stage, ...] = ()
        if self._pending is not None:
            if self._pending.lane == lane:
                before = (self._pending,)
            else:
                between = (self._pending,)
        if layer == self._layers:
            del self._next_layer[lane]
            if before:
                self._pending = None
            return (*before, Stage("leave", lane, layer))
        self._next_layer[lane] = layer + 1
        attend, dispatch, ffn, self._pending = self._stages[lane][layer]
        return (*before, attend, dispatch, *between, ffn)

    def _choose(self) -> int:
        if not self._next_layer:
            raise ValueError("no lane has begun a step")
        while self._turn not in self._next_layer:
            self._turn = (self._turn + 1) % self._lanes
        lane = self._turn
        if self._next_layer[lane] < self._layers:
            self._turn = (self._turn + 1) % self._lanes
        return lane
