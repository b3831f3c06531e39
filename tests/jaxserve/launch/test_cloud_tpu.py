"""The script runs with a stand-in for `gcloud`, and its unit with the metadata of a slice."""

import os
import subprocess
from pathlib import Path

from tests import golden
from tests.jaxserve.launch.rendered import files_of, write
from tests.jaxserve.launch.test_systemd import started
from tests.jaxserve.launch.tools import judge

ONE = "--config step3-v6e --hardware v6e --target cloud-tpu --model-path /mnt/step3"
TWO = f"{ONE} --slices 2 --set server.api_keys=keys"
GCLOUD = '#!/usr/bin/env bash\necho "$*" >> calls\n[[ "$*" != *"${FAILS:-never}"* ]]\n'


def run(files: dict[str, str], folder: Path, step: str, fails: str = "never") -> list[str]:
    """The calls of `gcloud`."""
    write({**files, "gcloud": GCLOUD, "keys": "k", "calls": ""}, folder)
    judge("shellcheck", folder / "tpu.sh")
    path = f"{folder}:{os.environ['PATH']}"
    more = {"PATH": path, "ZONE": "z", "WHEEL": "j.whl", "FAILS": fails}
    command = ["bash", folder / "tpu.sh", step]
    done = subprocess.run(command, env={**os.environ, **more}, timeout=60)
    assert bool(done.returncode) == (fails != "never")
    return (folder / "calls").read_text().splitlines()


def test_one_slice_and_two(tmp_path: Path) -> None:
    one, two = files_of(ONE), files_of(TWO)
    calls = run(one, tmp_path, "create")
    for step in ("create", "start", "install"):
        calls += sorted(run(two, tmp_path, step))
    golden.check("launch/gcloud.txt", "\n".join(calls).replace(str(tmp_path), "FOLDER") + "\n")
    secret = (tmp_path / "jaxserve.env").read_text()
    assert secret.startswith("JAXSERVE_CLUSTER_TOKEN=")
    assert len(secret.strip().partition("=")[2]) == 32
    run(two, tmp_path, "start", fails="jaxserve-1")


def test_every_host_runs_the_same_command() -> None:
    options = started(files_of(ONE)["jaxserve.service"])
    assert (options.distributed, options.set) == (True, [])
    unit = files_of(TWO)["jaxserve.service"]
    assert "LoadCredential=keys:/etc/jaxserve/keys\n" in unit
    assert started(unit).set == ["server.api_keys=%d/keys"]
