import argparse
import json
import os
import subprocess
import sys

import pytest

from jaxserve.cluster import bootstrap
from jaxserve.cluster.bootstrap import ProcessArguments
from jaxserve.errors import ConfigError
from tests.jaxserve.cluster.launched import REPOSITORY

SECRET = {"JAXSERVE_CLUSTER_TOKEN": "s3cret"}


def parse(*flags: str, **environment: str) -> ProcessArguments:
    parser = argparse.ArgumentParser()
    bootstrap.add_arguments(parser)
    return bootstrap.from_arguments(parser.parse_args(flags), environment)


def test_alone_without_flags() -> None:
    assert parse() == ProcessArguments(process_id=0, processes=1)
    assert parse().is_leader


def test_flags_come_before_the_environment() -> None:
    expected = ProcessArguments(
        process_id=1,
        processes=2,
        coordinator="10.0.0.1:1234",
        control_address="10.0.0.1:1235",
        control_bind="10.0.0.1:1235",
        token="s3cret",
    )
    flags = "--process-id 1 --processes 2 --coordinator 10.0.0.1:1234 --control 10.0.0.1:1235"
    assert parse(*flags.split(), **SECRET, JAXSERVE_PROCESS_ID="7") == expected
    environment = {
        "JAXSERVE_PROCESS_ID": "1",
        "JAXSERVE_PROCESSES": "2",
        "JAXSERVE_COORDINATOR": "10.0.0.1:1234",
        "JAXSERVE_CONTROL": "10.0.0.1:1235",
    }
    assert parse(**SECRET, **environment) == expected
    assert not expected.is_leader


def test_the_token_is_not_shown() -> None:
    arguments = ProcessArguments(processes=2, token="s3cret")
    assert repr(arguments) == "ProcessArguments(processes=2, token='…')"


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ("--processes 2", SECRET, "2 processes need --process-id (or JAXSERVE_PROCESS_ID)"),
        (
            "--processes 2 --process-id 0 --control a:1",
            SECRET,
            "2 processes need --coordinator (or JAXSERVE_COORDINATOR)",
        ),
        (
            "--processes 2 --process-id 0 --coordinator a:1",
            SECRET,
            "2 processes need --control (or JAXSERVE_CONTROL)",
        ),
        (
            "--processes 2 --process-id 0 --coordinator a:1 --control a:2",
            {},
            "2 processes need JAXSERVE_CLUSTER_TOKEN: one secret, the same for each",
        ),
        (
            "--processes 2 --process-id 0 --coordinator a --control a:2",
            SECRET,
            "--coordinator 'a': expected host:port",
        ),
        (
            "--processes 2 --process-id 0 --coordinator a:1 --control a:99999",
            SECRET,
            "--control 'a:99999': expected host:port",
        ),
        ("--processes 2 --process-id 2", {}, "--process-id 2 of --processes 2: expected 0 to 1"),
        ("", {"JAXSERVE_PROCESSES": "two"}, "JAXSERVE_PROCESSES] = 'two': expected a whole number"),
    ],
)
def test_what_is_missing_is_named(flags: str, environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*flags.split(), **environment)
    assert expected in str(error.value)


def test_slurm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": "node[007-008]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert parse("--distributed", **SECRET) == ProcessArguments(
        process_id=1,
        processes=2,
        coordinator="node007:61441",
        control_address="node007:61442",
        control_bind="node007:61442",
        local_device_ids=(0,),
        token="s3cret",
    )


def test_no_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="--distributed: no cluster found"):
        parse("--distributed", **SECRET)


def test_loopback() -> None:
    hosts = ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "10.0.0.1", "0.0.0.0", "node1"]
    assert [host for host in hosts if bootstrap.is_loopback(host)] == hosts[:5]


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
from jaxserve.cluster import bootstrap
from jaxserve.config.deployment import AttentionRole, Deployment, FFNRole
from jaxserve.errors import ConfigError
deployment = Deployment(model=".", attention=AttentionRole(dp=3), ffn=FFNRole(ep=2))
"""


def test_one_process_gets_all_devices_and_importing_starts_no_backend() -> None:
    code = """
from jax._src import xla_bridge
started = xla_bridge.backends_are_initialized()
share = bootstrap.initialise(bootstrap.ProcessArguments(), deployment)
still = xla_bridge.backends_are_initialized()
print(json.dumps([started, still, share.role, jax.device_count()]))
"""
    assert python(HEAD + code) == [False, False, "attention and ffn", 5]
    assert python(HEAD + code, JAX_NUM_CPU_DEVICES="8") == [False, False, "attention and ffn", 8]


def test_a_backend_that_runs_must_have_enough_devices() -> None:
    code = """
jax.devices()
try:
    bootstrap.initialise(bootstrap.ProcessArguments(), deployment)
    print(json.dumps("ok"))
except ConfigError as error:
    print(json.dumps(str(error)))
"""
    assert python(HEAD + code, JAX_NUM_CPU_DEVICES="5") == "ok"
    assert python(HEAD + code) == (
        "this process needs 5 CPU devices (3 attention + 2 ffn), and JAX has already started with "
        "1: create the deployment before any other use of JAX, or set JAX_NUM_CPU_DEVICES=5"
    )


def test_expected_platform_follows_jax_platforms() -> None:
    code = "print(json.dumps(bootstrap.expected_platform()))"
    assert python(HEAD + code) == "cpu"
    assert python(HEAD + code, JAX_PLATFORMS="tpu,cpu") == "tpu"
