import os
from pathlib import Path

import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.sections import AttentionRole, FFNRole
from jaxserve.config.shipped import deployment_names, deployment_path, device_kind, hardware_file
from jaxserve.config.yaml_text import read_yaml
from jaxserve.errors import ConfigError
from jaxserve.fleet import devices
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.membership import ProcessShare
from tests import golden
from tests.jaxserve.fleet.launched import python

ABORT = "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"
HEAD, ASKS_BACKENDS, INITIALISES, ASKS_FLAGS = golden.text("fleet/devices.txt").split("---\n")


def test_one_process_gets_all_devices_and_importing_starts_no_backend() -> None:
    assert python(HEAD + ASKS_BACKENDS) == [False, False, "attention and ffn", 5]
    assert python(HEAD + ASKS_BACKENDS, JAX_NUM_CPU_DEVICES="8") == [
        False,
        False,
        "attention and ffn",
        8,
    ]


def test_a_backend_that_runs_must_have_enough_devices() -> None:
    assert python(HEAD + INITIALISES, JAX_NUM_CPU_DEVICES="5") == "ok"
    said = python(HEAD + INITIALISES)
    assert said.startswith("this process needs 5 CPU devices (3 attention + 2 ffn), and JAX has")
    assert said.endswith("or set JAX_NUM_CPU_DEVICES=5")
    with pytest.raises(ConfigError, match=r"needs 100 devices \(99 attention"):
        devices._set_cpu_devices(ProcessShare(99, 1), alone=True)


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


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Output of nvidia-smi on a host with cards of 80 and of 96 GiB."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 98304\necho 81920\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "NCCL_MAX_CTAS", ABORT):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def deployment(attention: float, ffn: float, mode: str = "afd") -> Deployment:
    roles = AttentionRole(memory_gb=attention), FFNRole(memory_gb=ffn)
    return Deployment(model=".", mode=mode, attention=roles[0], ffn=roles[1])


@golden.table("fleet/pools.yaml")
def test_the_pool_of_a_card_is_what_the_role_may_use(environment, share, sizes, fraction) -> None:
    devices._set_gpu_options(ProcessShare(*share), deployment(*sizes), False)
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == fraction


def test_what_the_environment_says_stays(environment) -> None:
    environment.setenv("XLA_FLAGS", "--xla_gpu_shard_autotuning=true")
    environment.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    devices._set_gpu_options(ProcessShare(1, 0), deployment(76, 76), False)
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_shard_autotuning=true"
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    assert os.environ[ABORT] == "1"
    assert os.environ["NCCL_MAX_CTAS"] == "8"


def test_a_host_that_does_not_tell_keeps_the_default(environment, caplog) -> None:
    environment.setenv("PATH", "/nowhere")
    devices._set_gpu_options(ProcessShare(1, 0), deployment(76, 76), False)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert "memory_gb: nvidia-smi failed" in caplog.text


@pytest.mark.parametrize(("processes", "several"), [(1, False), (2, False), (4, True)])
def test_processes_of_one_role_compile_without_tuning(monkeypatch, processes, several) -> None:
    """Two processes play a role each, four play attention in two and ffn in two."""
    asked = []
    monkeypatch.setattr(devices, "choose_platform", lambda: "cuda")
    monkeypatch.setattr(devices.jax.distributed, "initialize", lambda **given: None)
    monkeypatch.setattr(devices, "check_devices", lambda *given: None)
    monkeypatch.setattr(devices.jax.config, "update", lambda *given: None)
    monkeypatch.setattr(devices, "_set_gpu_options", lambda *given, several: asked.append(several))
    two = AttentionRole(dp=2), FFNRole(ep=2)
    process = ProcessArguments(processes=processes, coordinator="h:1")
    devices.initialise(process, Deployment(model=".", attention=two[0], ffn=two[1]))
    assert asked == [several]


APART = "--xla_gpu_shard_autotuning=false"
UNTUNED = f"{APART} --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


@pytest.mark.parametrize(("several", "flags"), [(False, APART), (True, UNTUNED)])
def test_no_process_waits_for_the_autotuning_of_another(environment, several, flags) -> None:
    """Nor tunes where others play its role: XLA reads its flags at the first program."""
    _, default = python(HEAD + ASKS_FLAGS, SET="0")
    given, options = python(HEAD + ASKS_FLAGS, SET="1", SEVERAL=f"{several:d}")
    _, asked = python(HEAD + ASKS_FLAGS, SET="0", XLA_FLAGS=flags)
    assert given == flags
    assert options == asked != default


@pytest.mark.parametrize("name", deployment_names())
def test_cards_of_shipped_files_have_room_for_their_pool(name: str) -> None:
    shipped = read_yaml(deployment_path(Path(name)).read_text(), name)
    for role in (shipped.get("attention", {}), shipped.get("ffn", {})):
        if device_kind(role.get("hardware", "")).startswith("NVIDIA"):
            card = hardware_file(role["hardware"])["memory_gb"]
            assert 0 < role["memory_gb"] / card < devices._LARGEST_POOL


def test_processes_with_cpu_devices_are_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange arrays over ports of JAX's, at which four zero bytes end a process."""
    monkeypatch.setattr(devices, "choose_platform", lambda: "cpu")
    monkeypatch.setattr(devices, "_set_cpu_devices", lambda *_, **__: None)
    elsewhere = ProcessArguments(process_id=1, processes=2, coordinator="192.0.2.7:9100")
    with pytest.raises(ConfigError, match=r"--coordinator 192\.0\.2\.7: on CPUs the processes"):
        devices.initialise(elsewhere, load_deployment("configs/demo.yaml"))
    found = [devices._own_loopback(host) for host in ("localhost", "::1", "127.3.2.1")]
    assert found == ["127.0.0.1", "[::1]", "127.3.2.1"]
