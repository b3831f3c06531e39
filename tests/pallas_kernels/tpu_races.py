"""Findings of the race detector of interpreted TPU kernels, whether or not this JAX raises."""

import jax
import pytest

# Where it keeps what it found, in the versions that do not raise (0.11): of the last kernel alone.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax.experimental.pallas import tpu as pltpu

_earlier = False
"""Whether races were found in kernels before the last one."""


def _of_a_kernel(**given):
    global _earlier
    _earlier = _found()
    return RaceDetectionState(**given)


def _found():
    return _earlier or (interpreter.races is not None and interpreter.races.races_found)


interpreter.RaceDetectionState = _of_a_kernel


def _forget():
    global _earlier
    _earlier = False
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def no_race():
    _forget()
    yield
    assert not _found()


def race_is_reported(run):
    _forget()
    try:
        jax.block_until_ready(run())
        return _found()
    except Exception as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    finally:
        _forget()


def check_wait(monkeypatch, run, kernel, module, wait):
    """Leaving out a wait of a module is a race, where copies of the kernel happen at once."""
    eager = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    monkeypatch.setattr(kernel, "INTERPRET", eager)
    assert not race_is_reported(run)
    monkeypatch.setattr(module, wait, lambda *_: None)
    assert race_is_reported(run)
