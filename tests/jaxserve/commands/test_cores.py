import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.commands import cores


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of four cores with two threads each, numbered as Linux does."""
    for core in range(16):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 8 // 4}\n")
        (folder / "core_id").write_text(f"{core % 4}\n")
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


@pytest.mark.usefixtures("host")
def test_a_process_has_whole_cores_of_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [cores.cores_of(number, 4) for number in range(4)]
    assert found == [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]
    assert cores.cores_of(0, 8) == []
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: bound.append((pid, own)))
    cores.bind_task({"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x4)"})
    cores.bind_task({"SLURM_LOCALID": "3", "SLURM_TASKS_PER_NODE": "8"})
    cores.bind_task({})
    monkeypatch.setattr(os, "cpu_count", lambda: 128)  # the 16 are those that Slurm gave the task
    cores.bind_task({"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2"})
    assert bound == [(0, [4, 12, 5, 13, 6, 14, 7, 15])]


def test_a_running_process_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "LEAST_CORES", 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        count = len(os.sched_getaffinity(0))
        cores.bind(child.pid, 0, count)
        assert os.sched_getaffinity(child.pid) == set(cores.cores_of(0, count))
        child.kill()
