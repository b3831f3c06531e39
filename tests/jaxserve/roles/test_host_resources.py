"""Share of a host's memory for simulated devices."""

import os
from pathlib import Path

import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.fleet.sizing import this_machine, usable_cores
from jaxserve.roles.host_resources import free_host_memory, simulated_memory, whole_host_memory
from jaxserve.roles.role_bytes import role_bytes

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


@pytest.mark.parametrize(
    ("own", "quotas", "cores"),
    [
        *((POD, [quota], cores) for quota, cores in ((200000, 2), (250000, 2), (50000, 1))),
        *((POD, [quota], 64) for quota in ("max", 9900000)),  # no more than the affinity
        (POD, [800000, 400000], 4),  # the group's, and of the one around it
        ("", [200000], 2),  # a container sees its own group as the outermost
    ],
)
def test_quotas_of_version_2(own: str, quotas: list[int | str], cores: int, tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 64
    group = in_group(tmp_path, f"0::/{own}\n", own)
    for place, quota in zip((group, group.parent), quotas, strict=False):
        (place / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("-1", 64)])
def test_a_quota_of_version_1(quota: str, cores: int, tmp_path: Path) -> None:
    line = f"4:memory:/other\n3:cpu,cpuacct:/{POD}\n"
    group = in_group(tmp_path, line, f"cpu/{POD}")
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_devices_of_a_cpu_are_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.fleet.sizing.usable_cores", lambda: 2)
    assert (this_machine().platform, this_machine().devices) == ("cpu", 2)


def test_what_is_free_on_the_host(tmp_path):
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert free_host_memory(tmp_path) == pages * size  # no /proc: all that there is
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert free_host_memory(tmp_path) == 8_192_000


UNIT = "system.slice/jaxserve-domain@0.service"


def in_unit(root, version=2):
    """This process in a unit of a slice, on a host of 9,216,000 bytes with 8,192,000 free."""
    line = {1: f"12:pids:/else\n4:memory:/{UNIT}\n0::/x\n", 2: f"0::/{UNIT}\n"}[version]
    group = in_group(root, line, f"memory/{UNIT}" if version == 1 else UNIT)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    return group


def limit(group, size, used, name="memory.max", files=0):
    (group / name).write_text(f"{size}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used}\ninactive_file {files}\nactive_file 0\n")


def test_a_systemd_unit(tmp_path):
    group = in_unit(tmp_path)
    assert (free_host_memory(tmp_path), whole_host_memory(tmp_path)) == (8_192_000, 9_216_000)
    limit(group, 6_000_000, 1_000_000, files=200_000)
    assert (free_host_memory(tmp_path), whole_host_memory(tmp_path)) == (5_200_000, 6_000_000)
    limit(group, 4_000_000, 1_000_000, "memory.high")  # where it is slowed down
    assert (free_host_memory(tmp_path), whole_host_memory(tmp_path)) == (3_000_000, 4_000_000)
    limit(group.parent, 3_500_000, 1_500_000)  # the slice, with another unit
    assert (free_host_memory(tmp_path), whole_host_memory(tmp_path)) == (2_000_000, 3_500_000)
    for name in ("memory.max", "memory.high"):
        (group / name).write_text("max\n")
    assert free_host_memory(tmp_path) == 2_000_000
    limit(group.parents[2], 1, 1)  # outside of the control groups' file system
    assert free_host_memory(tmp_path) == 2_000_000


def test_a_systemd_unit_of_cgroup_v1(tmp_path):
    group = in_unit(tmp_path, version=1)
    (group / "memory.limit_in_bytes").write_text("6000000\n")
    (group / "memory.usage_in_bytes").write_text("1000000\n")
    (group / "memory.stat").write_text(
        "inactive_file 1\ntotal_inactive_file 60000\ntotal_active_file 40000\n"
    )
    assert (free_host_memory(tmp_path), whole_host_memory(tmp_path)) == (5_100_000, 6_000_000)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert free_host_memory(tmp_path) == 8_192_000


def test_a_container_that_has_the_kernels_name_of_its_group(tmp_path):
    """The process's own group is mounted as the outermost one."""
    top = in_unit(tmp_path).parents[1]
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods/pod1/abc\n")
    limit(top, 5_000_000, 1_000_000)
    assert free_host_memory(tmp_path) == 4_000_000


def test_a_role_has_what_the_other_leaves():
    deployment = load_deployment(CONFIGS / "demo.yaml", {"attention.dp": 2, "ffn.ep": 1})
    config = read_config(deployment.model)[0]
    attention, ffn = role_bytes(config, deployment)
    both = 2 * attention.total + ffn.total
    assert simulated_memory(config, deployment, {"attention": 2, "ffn": 1}, both, role_bytes) == {
        "attention": attention.total,
        "ffn": ffn.total,
    }
    short = simulated_memory(config, deployment, {"attention": 2, "ffn": 1}, both - 2, role_bytes)
    assert short == {"attention": attention.total - 1, "ffn": ffn.total - 2}
    assert simulated_memory(config, deployment, {"ffn": 1}, 1000, role_bytes) == {"ffn": 1000}
    assert simulated_memory(config, deployment, {"attention": 2}, None, role_bytes) == {
        "attention": None
    }
