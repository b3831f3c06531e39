"""Cores that a container or a systemd unit has, whatever the host has."""

import os
from pathlib import Path

import pytest

from jaxserve.fleet.sizing import this_machine
from jaxserve.roles.host_cores import usable_cores

POD = "kubepods.slice/pod1/abc"


@pytest.fixture(autouse=True)
def host_of_64_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def in_group(root: Path, line: str, folder: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    group = root / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    return group


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 64
    group = in_group(tmp_path, f"0::/{POD}\n", POD)
    (group / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == 64


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000", 2), ("250000", 2), ("50000", 1), ("9900000", 64)]
)
def test_a_quota_of_version_2(quota: str, cores: int, tmp_path: Path) -> None:
    group = in_group(tmp_path, f"0::/{POD}\n", POD)
    (group / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_cores(tmp_path) == cores


def test_the_least_of_a_group_and_those_around_it(tmp_path: Path) -> None:
    group = in_group(tmp_path, f"0::/{POD}\n", POD)
    (group / "cpu.max").write_text("800000 100000\n")
    (group.parent / "cpu.max").write_text("400000 100000\n")
    assert usable_cores(tmp_path) == 4


def test_a_container_sees_its_own_group_as_the_outermost(tmp_path: Path) -> None:
    group = in_group(tmp_path, "0::/\n", "")
    (group / "cpu.max").write_text("200000 100000\n")
    assert usable_cores(tmp_path) == 2


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("-1", 64)])
def test_a_quota_of_version_1(quota: str, cores: int, tmp_path: Path) -> None:
    line = f"4:memory:/other\n3:cpu,cpuacct:/{POD}\n"
    group = in_group(tmp_path, line, f"cpu/{POD}")
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_devices_of_a_cpu_are_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.roles.host_cores.usable_cores", lambda: 2)
    assert (this_machine().platform, this_machine().devices) == ("cpu", 2)
