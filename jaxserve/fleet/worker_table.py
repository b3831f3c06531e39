"""All workers of a role as a table of columns: a thousand are compared in tens of microseconds.

Used by `placement.py`, which says which rows are out of date. Pure NumPy.
"""

from collections.abc import Callable, Mapping

import numpy as np

from jaxserve.fleet.routed import Worker

COLUMNS = {
    "suspect": np.bool_,
    "reserved": np.bool_,
    "full_until": np.float64,
    "count": np.int64,
    "slots": np.int64,
    "tokens": np.int64,
    "taken": np.float64,
    "pace": np.float64,
    "work": np.float64,
    "speed": np.float64,
    "weights": np.int64,
}
"""Types by name. `weights` numbers the digests of checkpoints."""


class WorkerTable:
    """The workers of one role, in the order in which they came.

    Args:
      taken: tokens of a worker's cache that requests take.
      weights: number of a worker's weights.
    """

    def __init__(self, taken: Callable[[Worker], float], weights: Callable[[Worker], int]):
        self.workers: list[Worker] = []
        self.rows: dict[str, int] = {}
        """Name of a worker → its row."""
        self._taken, self._weights = taken, weights
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(0, kind) for name, kind in COLUMNS.items()
        }
        self._changed: set[str] = set()

    def __getitem__(self, column: str) -> np.ndarray:
        """[workers] of that name."""
        return self._columns[column]

    def join(self, worker: Worker) -> None:
        """Appends a worker."""
        self.rows[worker.name] = len(self.workers)
        self.workers.append(worker)
        self._columns = {
            key: np.append(old, old.dtype.type()) for key, old in self._columns.items()
        }
        self._changed.add(worker.name)

    def leave(self, worker: Worker) -> None:
        """Removes a worker; the others keep their order."""
        row = self.rows[worker.name]
        del self.workers[row]
        self.rows = {worker.name: place for place, worker in enumerate(self.workers)}
        self._columns = {key: np.delete(old, row) for key, old in self._columns.items()}
        self._changed.discard(worker.name)

    def changed(self, worker: Worker) -> None:
        """Notes that a worker's row is out of date."""
        if worker.name in self.rows:
            self._changed.add(worker.name)

    def usable(self, now: float) -> np.ndarray:
        """[workers]: which of them may get requests; brings all rows up to date."""
        columns = self._columns
        for name in self._changed:
            row = self.rows[name]
            worker = self.workers[row]
            columns["suspect"][row], columns["reserved"][row] = worker.suspect, worker.reserved
            columns["full_until"][row], columns["count"][row] = worker.full_until, worker.count
            columns["slots"][row], columns["tokens"][row] = worker.facts.slots, worker.facts.tokens
            columns["taken"][row], columns["pace"][row] = self._taken(worker), worker.pace
            columns["work"][row], columns["speed"][row] = worker.work, worker.speed
            columns["weights"][row] = self._weights(worker)
        self._changed.clear()
        return ~columns["suspect"] & (columns["full_until"] <= now)

    def of(self, hits: Mapping[str, int]) -> tuple[list[int], np.ndarray]:
        """Rows of the workers that are here, and what they have."""
        found = {self.rows[name]: tokens for name, tokens in hits.items() if name in self.rows}
        return [*found], np.fromiter(found.values(), np.int64, len(found))
