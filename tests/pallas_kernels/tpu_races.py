"""What the race detector of interpreted TPU kernels found, whether or not this JAX raises."""

import jax
import pytest

# Where it keeps what it found, in the versions that do not raise.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def no_race():
    yield
    assert interpreter.races is None or not interpreter.races.races_found


def race_is_reported(run):
    try:
        jax.block_until_ready(run())
        return interpreter.races.races_found
    except Exception as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    finally:
        pltpu.reset_tpu_interpret_mode_state()
