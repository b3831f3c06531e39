import json
import os
import subprocess
import sys

import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet import devices
from jaxserve.fleet.membership import ProcessShare
from tests.jaxserve.fleet.launched import REPOSITORY


def python(code: str, **environment: str) -> dict[str, object]:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


HEAD = """
import json, jax
from jaxserve.fleet import devices
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.config.deployment import AttentionRole, Deployment, FFNRole
from jaxserve.errors import ConfigError
deployment = Deployment(model=".", attention=AttentionRole(dp=3), ffn=FFNRole(ep=2))
"""


def test_one_process_gets_all_devices_and_importing_starts_no_backend() -> None:
    code = """
from jax._src import xla_bridge
started = xla_bridge.backends_are_initialized()
share = devices.initialise(ProcessArguments(), deployment)
still = xla_bridge.backends_are_initialized()
print(json.dumps([started, still, share.role, jax.device_count()]))
"""
    assert python(HEAD + code) == [False, False, "attention and ffn", 5]
    assert python(HEAD + code, JAX_NUM_CPU_DEVICES="8") == [False, False, "attention and ffn", 8]


def test_a_backend_that_runs_must_have_enough_devices() -> None:
    code = """
jax.devices()
try:
    devices.initialise(ProcessArguments(), deployment)
    print(json.dumps("ok"))
except ConfigError as error:
    print(json.dumps(str(error)))
"""
    assert python(HEAD + code, JAX_NUM_CPU_DEVICES="5") == "ok"
    assert python(HEAD + code) == (
        "this process needs 5 CPU devices (3 attention + 2 ffn), and JAX has already started with "
        "1: create the deployment before any other use of JAX, or set JAX_NUM_CPU_DEVICES=5"
    )


@pytest.mark.parametrize(
    ("share", "there"), [((1, 0), 4), ((0, 1), 4), ((3, 0), 4), ((2, 2), 2), ((0, 4), 0)]
)
def test_devices_must_be_exactly_the_share(share: tuple[int, int], there: int) -> None:
    attention, ffn = share
    expected = (
        rf"process 1 has {there} devices, and its share of the layout is {attention + ffn} "
        rf"\({attention} attention \+ {ffn} ffn\)"
    )
    with pytest.raises(ConfigError, match=expected):
        devices.check_devices(ProcessShare(attention, ffn), 1, there)
    devices.check_devices(ProcessShare(attention, ffn), 1, attention + ffn)
