"""Hops on a TPU slice's links between roles and inside tensor-parallel groups.

Called by `slice_layout.py`. Pure arithmetic on coordinates: knows neither JAX nor deployments.
Messages take the dimensions one after the other, the shorter way round where a dimension is a ring.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Place = tuple[int, ...]
"""Coordinates of a chip."""
HOST = (2, 2, 1)
"""Chips of a host along the dimensions, in slices of several hosts, as libtpu numbers them."""


class SliceDevice(NamedTuple):
    """A JAX device of a slice, with the attributes that meshes are made by."""

    coords: Place
    process_index: int
    device_kind: str = "TPU"
    slice_index: int = 0


class Torus(NamedTuple):
    """The links of a slice.

    Attributes:
      sizes: chips along each dimension.
      rings: whether the two ends of a dimension are joined.
    """

    sizes: Place
    rings: tuple[bool, ...]

    def devices(self, hosts: int, cores: int) -> list[SliceDevice]:
        """Returns a slice's devices host by host, as libtpu numbers them.

        Args:
          hosts: number of hosts; one has all chips.
          cores: JAX devices of a chip.
        """
        box = HOST[: len(self.sizes)] if hosts > 1 else self.sizes
        grid = tuple(size // side for size, side in zip(self.sizes, box, strict=True))
        return [
            SliceDevice(tuple(b * s + i for b, s, i in zip(at, box, inner, strict=True)), number)
            for number, at in enumerate(_places(grid))
            for inner in _places(box)
            for _ in range(cores)
        ]

    def path(self, source: Place, target: Place) -> Iterator[tuple[Place, Place]]:
        """Yields the links from one chip to another, each as its two ends."""
        here = list(source)
        for axis, size in enumerate(self.sizes):
            ahead = (target[axis] - here[axis]) % size
            forward = target[axis] > here[axis]
            if self.rings[axis]:
                forward = ahead <= size - ahead
            while here[axis] != target[axis]:
                before = tuple(here)
                here[axis] = (here[axis] + (1 if forward else -1)) % size
                yield before, tuple(here)


class Hops(NamedTuple):
    """Hops of a layout on a slice.

    Attributes:
      crossing: mean from an attention device to the ffn device that its rows go to.
      busiest: messages of a layer, one a piece, over the busiest link and direction.
      attention_group: longest hop between neighbours in the ring of an attention tp group.
      ffn_group: the same of an ffn tp group.
    """

    crossing: float
    busiest: int
    attention_group: int
    ffn_group: int

    def weighed(self, crossing_bytes: float, attention_bytes: float, ffn_bytes: float) -> float:
        """Returns bytes times hops for a row of a layer.

        Args:
          crossing_bytes: of dispatch and combine.
          attention_bytes, ffn_bytes: of the tp collectives of either role.
        """
        return (
            crossing_bytes * self.crossing
            + attention_bytes * self.attention_group
            + ffn_bytes * self.ffn_group
        )

    def __str__(self) -> str:
        return (
            f"{self.crossing:.2f} hops from attention to ffn, {self.busiest} messages on the "
            f"busiest link; longest hop in a tp group: attention {self.attention_group}, ffn "
            f"{self.ffn_group}"
        )


def count(
    torus: Torus,
    pairs: Sequence[tuple[Place, Place]],
    attention: Sequence[Sequence[Place]],
    ffn: Sequence[Sequence[Place]],
) -> Hops:
    """Counts the hops of a layout.

    Args:
      pairs: chips of an attention device and of the ffn device that its rows go to.
      attention, ffn: the tp groups of each role, in the order of their rings.
    """
    paths = [list(torus.path(*pair)) for pair in pairs]
    links = Counter(itertools.chain.from_iterable(paths))
    return Hops(
        sum(map(len, paths)) / len(paths),
        max(links.values(), default=0),
        _longest(torus, attention),
        _longest(torus, ffn),
    )


def _longest(torus: Torus, groups: Sequence[Sequence[Place]]) -> int:
    """Returns the longest hop between neighbours of a group, its two ends included."""
    return max(
        (
            len(list(torus.path(here, there)))
            for group in groups
            for here, there in itertools.pairwise([*group, group[0]])
        ),
        default=0,
    )


def _places(sizes: Place) -> Iterator[Place]:
    """Yields the places of a grid, the first dimension fastest."""
    for number in range(math.prod(sizes)):
        place = []
        for size in sizes:
            number, rest = divmod(number, size)
            place.append(rest)
        yield tuple(place)
