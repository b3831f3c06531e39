"""The order in which the stages of all lanes are enqueued: pure data, tested without devices.

Each lane repeats attend, dispatch, ffn, combine, once a layer. The order is total and the same in
every process, so transfers between processes pair up. One turn gives one lane one layer:

    attend(i)  dispatch(i)  combine(previous lane)  ffn(i)

The previous lane's combine follows this lane's dispatch, so that a device that works its queue in
order has this lane's rows under way before it waits for the other side's result: with three lanes
this is Step-3's three-stage pipeline (§4.1). A lane that has left its last layer starts its next
step at its next turn, wherever the others are: lanes are not drained.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

StageName = Literal["attend", "dispatch", "ffn", "combine", "leave"]


class Stage(NamedTuple):
    """A stage of one lane to enqueue. The driver's attend of layer 0 is the program `enter`."""

    name: StageName
    lane: int
    layer: int


class Rotation:
    """Hands out stages turn by turn; `begin` puts a lane in at layer 0.

    Nothing depends on time: the sequence of `begin`s and turns fixes every stage.

    Attributes:
      turns: endless while a lane is inside a step. Each turn is the next active lane's layer, or
        its leave after the last. A turn that ends with `leave` ends the lane's step: a boundary,
        at which new plans come in.

    Args:
      gated: for an attention worker whose ffn worker lives in another runtime, which runs the ffn
        stages. Combine waits until the answer is there, so it comes as late as possible: right
        before the lane's next attend.
    """

    def __init__(self, layers: int, lanes: int, *, gated: bool = False):
        self._layers = layers
        self._lanes = lanes
        self._next_layer: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._gated = gated
        self.turns: Iterator[tuple[Stage, ...]] = self._take()

    @property
    def active(self) -> list[int]:
        """Lanes that are inside a step."""
        return sorted(self._next_layer)

    def clear(self) -> None:
        """Forgets all steps."""
        self._next_layer.clear()
        self._end.clear()
        self.turns = self._take()

    def begin(self, lane: int, passes: int = 0) -> None:
        """Starts a step on the lane; the passes of prediction modules count as further layers."""
        if lane in self._next_layer:
            raise ValueError(f"lane {lane} is still at layer {self._next_layer[lane]} of its step")
        self._next_layer[lane] = 0
        self._end[lane] = self._layers + passes

    def _take(self) -> Iterator[tuple[Stage, ...]]:
        next_layer, end, lanes = self._next_layer, self._end, self._lanes
        lane = 0
        pending: dict[int, Stage] = {}  # combines to come, by lane; one at most unless gated
        while True:
            while lane not in next_layer:
                if not next_layer:
                    raise ValueError("no lane has begun a step")
                lane = (lane + 1) % lanes
            layer, own = next_layer[lane], pending.pop(lane, None)
            if layer == end[lane]:
                del next_layer[lane]
                leave = Stage("leave", lane, layer)
                yield (leave,) if own is None else (own, leave)
                continue  # if the lane begins anew at this boundary, this is still its turn
            next_layer[lane] = layer + 1
            attend, dispatch, ffn, combine = _stages(lane, layer)
            if self._gated:  # the lane's answer has the turns of all other lanes to arrive
                yield (attend, dispatch) if own is None else (own, attend, dispatch)
            elif own is not None:
                yield own, attend, dispatch, ffn
            elif pending:
                yield attend, dispatch, pending.popitem()[1], ffn
            else:
                yield attend, dispatch, ffn
            pending[lane] = combine
            lane = (lane + 1) % lanes


@functools.cache
def _stages(lane: int, layer: int) -> tuple[Stage, Stage, Stage, Stage]:
    return (
        Stage("attend", lane, layer),
        Stage("dispatch", lane, layer),
        Stage("ffn", lane, layer),
        Stage("combine", lane, layer),
    )
