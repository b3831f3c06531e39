"""An engine that loses steps: a device fails while a stage runs, or while its tokens are read."""

import threading

import pytest
from jax.errors import JaxRuntimeError

from jaxserve.engine import stepper
from jaxserve.engine.engine import Engine


class Losing:
    """Observer of an engine's stages that loses steps when told to.

    Attributes:
      after: number of stages, or of results, that pass before.
      times: number of failures in a row that are still to come.
    """

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch):
        self.after = self.times = 0
        self._driver, self._reader, self._where = engine.driver, engine._results._thread, ""
        self._read = stepper.step_result
        patch.setattr(stepper, "step_result", self._result)
        patch.setattr(engine.driver, "observer", self)

    def lose(self, where: str, after: int = 0, times: int = 1) -> None:
        """Fails in a "stage", with the driver's pages, or a "result", while tokens are read."""
        self._where, self.after, self.times = where, after, times

    def observe(self, *stage: object) -> None:
        """Called after each stage."""
        if self._where == "stage" and self.times and not self.after:
            for array in self._driver.kv_arrays().load():
                array.delete()
        self._fail("stage")

    def _result(self, *step):
        if threading.current_thread() is self._reader:
            self._fail("result")
        return self._read(*step)

    def _fail(self, where: str) -> None:
        if self._where == where and self.times:
            if not self.after:
                self.times -= 1
                raise JaxRuntimeError("INTERNAL: a device lost its step")
            self.after -= 1
