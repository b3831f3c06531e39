"""Shared memory of a Hopper thread block, and whether what touches it is ordered.

Called by `hopper_replay.py`. JAX's interpreter takes wgmma for synchronous and knows nothing of
proxies; here each warpgroup has a vector clock, and what runs beside it (copies of TMA, wgmma) is
known to a warpgroup once it has waited for it, or has met one that has. The rules (PTX ISA, async
proxy and mbarrier):

- of two accesses to an element, one of which writes, the earlier is known to who does the later;
- what a thread wrote, TMA and wgmma see only behind a `fence.proxy.async` (`commit_smem`), of the
  writer or of a warpgroup that knows of the write.
"""

import functools
from dataclasses import dataclass, field

import numpy as np


class Unordered(AssertionError):
    """Two accesses to shared memory that nothing orders."""


@dataclass
class Knowledge:
    """Knowledge of a warpgroup, or knowledge that a barrier passes on."""

    seen: np.ndarray
    """Last known time of each warpgroup."""
    fenced: np.ndarray
    """Time up to which each warpgroup's writes are visible to TMA and wgmma."""
    done: int = 0
    """A bit for each asynchronous operation that has ended."""

    @classmethod
    def nothing(cls, warpgroups: int) -> "Knowledge":
        return cls(np.full(warpgroups, -1), np.full(warpgroups, -1))

    def copy(self) -> "Knowledge":
        return Knowledge(self.seen.copy(), self.fenced.copy(), self.done)

    def join(self, other: "Knowledge") -> None:
        self.seen = np.maximum(self.seen, other.seen)
        self.fenced = np.maximum(self.fenced, other.fenced)
        self.done |= other.done


@dataclass
class Warpgroup:
    """State of a warpgroup's interpreter besides its registers."""

    index: int
    knows: Knowledge
    products: list[int] = field(default_factory=list)
    """Bits of wgmmas that nobody waited for."""
    stores: list[int] = field(default_factory=list)
    """Bits of copies to global memory that nobody waited for."""
    waits: dict[tuple[int, int], int] = field(default_factory=dict)
    """How often it has waited, by barrier."""
    loads: bool = False
    """Whether some of its threads may still be about to load what the others have."""

    @property
    def now(self) -> int:
        return int(self.knows.seen[self.index])

    def tick(self) -> None:
        self.knows.seen[self.index] += 1

    def fence(self) -> None:
        self.knows.fenced = np.maximum(self.knows.fenced, self.knows.seen)
        self.loads = False  # its threads have met
        self.tick()

    def finish(self, running: list[int], left: int) -> None:
        """All but the last `left` of these have ended."""
        while len(running) > left:
            self.knows.done |= 1 << running.pop(0)


class Barriers:
    """An array of mbarriers.

    Attributes:
      of_cluster: who arrives, arrives in all blocks of the cluster.
    """

    def __init__(
        self, shape: tuple[int, ...], arrivals: int, warpgroups: int, *, of_cluster: bool = False
    ) -> None:
        self.shape, self.arrivals, self.of_cluster = shape, arrivals, of_cluster
        count = int(np.prod(shape, dtype=int))
        self.arrived = [0] * count
        self.missing = [0] * count  # copies that are expected; below 0: that were not yet
        self.gathered = [Knowledge.nothing(warpgroups) for _ in range(count)]
        self.phases: list[list[Knowledge]] = [[] for _ in range(count)]

    def arrive(self, index: int, knows: Knowledge, expected: int = 0) -> None:
        """An arrival, that expects so many copies more."""
        self.arrived[index] += 1
        self.missing[index] += expected
        self.gathered[index].join(knows)
        self._complete(index)

    def deliver(self, index: int, bit: int) -> None:
        """A copy is there; of what else its sender did, that says nothing."""
        self.missing[index] -= 1
        self.gathered[index].done |= 1 << bit
        self._complete(index)

    def _complete(self, index: int) -> None:
        if self.arrived[index] == self.arrivals and self.missing[index] == 0:
            self.arrived[index] = 0
            self.phases[index].append(self.gathered[index].copy())

    def try_wait(self, index: int, who: Warpgroup) -> bool:
        """Whether the phase that this warpgroup has not seen yet is complete.

        Raises:
          Unordered: so is the next one, which a wait, by parity, does not tell from this one.
        """
        key = (id(self), index)
        seen = who.waits.get(key, 0)
        phases = self.phases[index]
        if len(phases) <= seen:
            return False
        if len(phases) > seen + 1:
            raise Unordered(f"barrier {index} went on unseen by warpgroup {who.index}")
        who.knows.join(phases[seen])
        who.waits[key] = seen + 1
        return True


class Buffer:
    """An array in shared memory, and who touched its elements last.

    Attributes:
      data: flat, in the order of the allocation.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, everyone: list[Warpgroup]
    ) -> None:
        self.name, self.shape, self.shared, self._everyone = name, shape, True, everyone
        size = int(np.prod(shape, dtype=int))
        self.data = np.zeros(size, dtype)
        self._writer = np.full(size, -1)
        self._written = np.full(size, -1)
        self._copied = np.full(size, -1)  # the bit of the copy that wrote it last
        self._read = np.full((len(everyone), size), -1)
        self._readers: list[tuple[int, np.ndarray, str]] = []

    def read(self, who: Warpgroup, at: np.ndarray) -> None:
        """Loads of threads."""
        self._check_writes(who, at, "a load")
        self._read[who.index, at] = who.now
        who.loads = True

    def read_beside(self, who: Warpgroup, at: np.ndarray, bit: int, what: str) -> None:
        """TMA or wgmma reads until `bit` is done."""
        self._check_writes(who, at, what, fenced=True)
        known = functools.reduce(int.__and__, (one.knows.done for one in self._everyone))
        self._readers = [one for one in self._readers if not known >> one[0] & 1]
        mask = np.zeros(self.data.size, bool)
        mask[at] = True
        self._readers.append((bit, mask, what))

    def write(self, who: Warpgroup, at: np.ndarray) -> None:
        """Stores of threads."""
        self._check_all(who, at, "a store")
        self._writer[at], self._written[at], self._copied[at] = who.index, who.now, -1

    def write_beside(self, who: Warpgroup, at: np.ndarray, bit: int) -> None:
        """TMA writes until `bit` is done."""
        self._check_all(who, at, "a copy into it", fenced=True)
        self._writer[at], self._written[at], self._copied[at] = -1, -1, bit

    def _check_all(
        self, who: Warpgroup, at: np.ndarray, what: str, *, fenced: bool = False
    ) -> None:
        self._check_writes(who, at, what, fenced=fenced)
        read = self._read[:, at.ravel()]
        read[who.index] = -1
        late = np.flatnonzero((read > who.knows.seen[:, None]).any(axis=1))
        if late.size:
            raise Unordered(f"{self.name}: {what} while warpgroup {late[0]} may still load")
        for bit, mask, reader in self._readers:
            if not who.knows.done >> bit & 1 and mask[at].any():
                raise Unordered(f"{self.name}: {what} while {reader} may still read")

    def _check_writes(
        self, who: Warpgroup, at: np.ndarray, what: str, *, fenced: bool = False
    ) -> None:
        for bit in np.unique(self._copied[at]):
            if bit >= 0 and not who.knows.done >> int(bit) & 1:
                raise Unordered(f"{self.name}: {what} before a copy into it is known to be there")
        writer, written = self._writer[at], self._written[at]
        real = writer >= 0
        if (written[real] > who.knows.seen[writer[real]]).any():
            raise Unordered(f"{self.name}: {what} before a store of another warpgroup is known")
        if fenced and (written[real] > who.knows.fenced[writer[real]]).any():
            raise Unordered(f"{self.name}: {what} without a fence behind a store")


class GlobalArray:
    """An array in global memory, of which no order is checked."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.shared = array.shape, False
        self.data = np.array(array).reshape(-1)
