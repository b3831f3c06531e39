"""Units that systemd accepts, whose command lines are what `serve` takes."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from jaxserve import serve
from jaxserve.fleet.arguments import from_arguments
from tests import golden
from tests.jaxserve.launch.rendered import SECRET, deployment_in, files_of
from tests.jaxserve.launch.tools import judge

FLEET = "--config demo-fleet-afd --target systemd --without-keys"
HOSTS = "--config step3-v6e --hardware v6e --target systemd --leader h0"
KEYS = "--config demo --target systemd --set server.api_keys=/etc/keys"


def started(unit: str, instance: str = "") -> Any:
    """Options that `serve` reads from a unit's command line."""
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart=").replace("%i", instance))
    assert words[:4] == ["/opt/jaxserve/bin/python", "-u", "-m", "jaxserve.serve"]
    return serve.parse(serve.parser(), words[4:])


def test_a_fleet_is_a_unit_a_role(tmp_path: Path) -> None:
    files = files_of(FLEET)
    assert set(files) == {
        "jaxserve-router.service",
        *(f"jaxserve-{kind}@.service" for kind in ("prefill", "domain", "ffn")),
        "deployment.yaml",
        "jaxserve.env",
    }
    units = [f"### {name}\n{text}" for name, text in sorted(files.items()) if "service" in name]
    golden.check("launch/units.txt", "\n".join(units))
    router = started(files["jaxserve-router.service"])
    assert (router.role, router.insecure_bind) == ("router", True)
    domain = started(files["jaxserve-domain@.service"], "1")
    assert (domain.role, domain.worker, domain.insecure_bind) == ("attention", 1, False)
    ffn = started(files["jaxserve-ffn@.service"], "127.0.0.1:9300")
    assert (ffn.role, ffn.listen) == ("ffn", "127.0.0.1:9300")
    assert deployment_in(files["deployment.yaml"], tmp_path).server.host == "0.0.0.0"


def test_hosts_are_numbered_by_their_instances() -> None:
    files = files_of(HOSTS)
    environment = dict(
        line.split("=", 1) for line in files["jaxserve.env"].splitlines() if "=" in line
    )
    process = from_arguments(started(files["jaxserve@.service"], "3"), environment | SECRET)
    assert (process.process_id, process.processes) == (3, 16)
    assert (process.coordinator, process.control_address) == ("h0:9001", "h0:9002")
    assert environment["JAXSERVE_CLUSTER_TOKEN"] == "", "nobody starts with a secret of ours"
    assert process.host_processes == 1
    files = files_of("--config step3 --hardware h800 --target systemd --leader h0")
    process = from_arguments(started(files["jaxserve@.service"], "3"), environment | SECRET)
    assert (process.process_id, process.processes, process.host_processes) == (3, 4, 8)


def test_keys_are_credentials(tmp_path: Path) -> None:
    files = files_of(KEYS)
    unit = files["jaxserve.service"]
    assert "LoadCredential=keys:/etc/keys\n" in unit
    assert started(unit).set == ["server.api_keys=%d/keys"]
    assert deployment_in(files["deployment.yaml"], tmp_path).server.api_keys == ""
    assert "LimitCORE=0\n" in unit, "a core file would hold the keys"


@pytest.mark.parametrize("command", [FLEET, HOSTS, KEYS])
def test_systemd_accepts_the_units(command: str, tmp_path: Path) -> None:
    files = files_of(f"{command} --python /bin/true")
    for name, text in files.items():
        if name.endswith(".service"):
            path = tmp_path / name.replace("@.", "@0.")
            path.write_text(text)
            judge("systemd-analyze", "verify", path)
