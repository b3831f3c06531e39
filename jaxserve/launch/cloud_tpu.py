"""Cloud TPU: a script that rents slices, installs, starts and ends one runtime on all their hosts.

Called by `__main__.py`. The hosts run a systemd unit and read their number from the slice
(`--distributed`).
"""

import shlex
from pathlib import Path

from jaxserve.config.sections import SERVER_FILES
from jaxserve.errors import ConfigError
from jaxserve.launch import systemd
from jaxserve.launch.packages import lock_names, lock_text
from jaxserve.launch.settings import Places, Rendering, deployment_text, filled, host_places, placed
from jaxserve.storage.bucket import is_url

UV, PYTHON = "0.9.11", "3.12"
"""Versions of the installer of Python and of Python itself."""


def render(rendering: Rendering) -> dict[str, str]:
    """Returns the files by name.

    Raises:
      ConfigError: the deployment has several runtimes, or such TPUs are rented on GKE alone.
    """
    if len(rendering.works) > 1:
        kinds = ", ".join(work.kind for work in rendering.works)
        raise ConfigError(f"--target cloud-tpu: one runtime, and here are {kinds}; take gke-lws")
    (work,), options = rendering.works, rendering.options
    assert work.tpu is not None
    if not work.tpu.kind.slice_type:
        raise ConfigError(
            f"--target cloud-tpu: {work.hardware_name} is rented on GKE; take gke-lws"
        )
    if not options.model and not is_url(rendering.deployment.model):
        raise ConfigError("--target cloud-tpu: say --model-path, the model folder on its hosts")
    name = options.name
    nodes = [name] if work.slices == 1 else [f"{name}-{n}" for n in range(work.slices)]
    count = f'--node-id="{name}"'
    if work.slices > 1:
        count = f'--node-count={work.slices} --node-prefix="{name}"'
    deployment = placed(rendering.deployment, host_places(rendering))
    files = {key: Path(path) for key in SERVER_FILES if (path := getattr(deployment.server, key))}
    there = {key: f"/etc/{name}/{path.name}" for key, path in files.items()}
    deployment = placed(deployment, Places(files=there))
    # One host has no others to find.
    given = ["--distributed"] if work.processes > 1 else []
    script = filled(
        "tpu.sh",
        command=rendering.command,
        name=shlex.quote(name),
        nodes=" ".join(map(shlex.quote, nodes)),
        type=work.tpu.accelerator_type,
        version=work.tpu.kind.software,
        uv=UV,
        python=PYTHON,
        count=count,
        files="".join(f" {shlex.quote(str(path))}" for path in files.values()),
        installs="".join(
            f"\n      sudo install -m 0600 {shlex.quote(path.name)} /etc/$name/ &&"
            for path in files.values()
        ),
    )
    return {
        "tpu.sh": script,
        f"{name}.service": systemd.unit(deployment, work, options, given),
        "deployment.yaml": deployment_text(systemd.without_files(deployment)),
        **{lock: lock_text(lock) for lock in lock_names("tpu")},
    }
