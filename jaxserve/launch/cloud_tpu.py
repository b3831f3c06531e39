"""Cloud TPU: a script that rents slices, installs, starts and ends one runtime on all their hosts.

Called by `__main__.py`. The hosts run a systemd unit and read their number from the slice
(`--distributed`).
"""

import shlex
from pathlib import Path

from jaxserve.config.sections import SERVER_FILES
from jaxserve.errors import ConfigError
from jaxserve.launch import systemd
from jaxserve.launch.options import Rendering, host_places
from jaxserve.launch.packages import lock_names, lock_text
from jaxserve.launch.settings import Places, deployment_text, placed
from jaxserve.storage.bucket import is_url

UV, PYTHON = "0.9.11", "3.12"
"""Versions of the installer of Python and of Python itself."""
SCRIPT = """\
#!/usr/bin/env bash
# {command}
#
#   ZONE=… ./tpu.sh create     rents what this deployment takes
#   ZONE=… ./tpu.sh install    copies WHEEL (python -m pip wheel --no-deps .) and these files, and
#                              installs packages in the locked versions
#   ZONE=… ./tpu.sh start      on all hosts at once; they find each other by the slice's metadata
#   ZONE=… ./tpu.sh logs
#   ZONE=… ./tpu.sh stop       drains
#   ZONE=… ./tpu.sh delete
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
: "${{ZONE:?where the TPUs are}}"
name={name}
nodes=({nodes})

everywhere() {{ # a command, on every host of every slice
  local node pid pids=()
  for node in "${{nodes[@]}}"; do
    gcloud compute tpus tpu-vm ssh "$node" --zone="$ZONE" --worker=all --command="$1" &
    pids+=("$!")
  done
  for pid in "${{pids[@]}}"; do wait "$pid"; done
}}
copy() {{ # files, to the home of every host
  local node
  for node in "${{nodes[@]}}"; do
    gcloud compute tpus tpu-vm scp "$@" "$node:" --zone="$ZONE" --worker=all
  done
}}

case "${{1:-}}" in
  create)
    gcloud compute tpus queued-resources create "$name" --zone="$ZONE" \\
      --accelerator-type={type} --runtime-version={version} {count}
    ;;
  install)
    umask 077
    echo "JAXSERVE_CLUSTER_TOKEN=$(openssl rand -hex 16)" > "$name.env"
    copy "${{WHEEL:?the wheel of jaxserve}}" deployment.yaml "$name.env" "$name.service"{files} \\
      serve.txt tpu.txt
    # The images of TPU VMs have Python 3.10. uv brings 3.12, where all users can read it.
    everywhere "python3 -m venv uv && uv/bin/pip install --quiet uv=={uv} &&
      sudo env UV_PYTHON_INSTALL_DIR=/opt/python uv/bin/uv venv --quiet --clear \\
        --managed-python --python {python} /opt/jaxserve &&
      sudo uv/bin/uv pip install --quiet --python /opt/jaxserve/bin/python --require-hashes \\
        --requirement tpu.txt &&
      sudo uv/bin/uv pip install --quiet --python /opt/jaxserve/bin/python --no-deps \\
        \\"$(basename "$WHEEL")\\" &&
      sudo install -D -m 0644 deployment.yaml /etc/$name/deployment.yaml &&
      sudo install -m 0600 $name.env /etc/$name/ &&{installs}
      sudo install -m 0644 $name.service /etc/systemd/system/ && rm $name.env &&
      sudo systemctl daemon-reload"
    ;;
  start) everywhere "sudo systemctl start $name" ;;
  logs) everywhere "sudo journalctl --unit=$name --lines=20 --no-pager" ;;
  stop) everywhere "sudo systemctl stop $name" ;;
  delete) gcloud compute tpus queued-resources delete "$name" --zone="$ZONE" --force ;;
  *)
    grep '^#   ' "$0" >&2
    exit 2
    ;;
esac
"""


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
    script = SCRIPT.format(
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
