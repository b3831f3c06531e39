"""What simulated devices have of a host's memory."""

from jaxserve.checkpoint.hf import read_config
from jaxserve.config.deployment import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.roles.capacity import role_bytes
from jaxserve.roles.host_memory import free_host_memory, simulated_memory


def test_what_is_free_on_the_host_and_in_the_container(tmp_path):
    assert free_host_memory(tmp_path) is not None  # no /proc: all that there is
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert free_host_memory(tmp_path) == 8_192_000
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 900000\ninactive_file 2000000\nactive_file 1000000\n")
    assert free_host_memory(tmp_path) == 4_000_000  # what was read of files is dropped first
    (group / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) == 8_192_000


def test_a_container_of_cgroup_v1(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    8000 kB\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("5000000\n")
    (group / "memory.usage_in_bytes").write_text("4000000\n")
    (group / "memory.stat").write_text(
        "inactive_file 1\ntotal_inactive_file 2000000\ntotal_active_file 1000000\n"
    )
    assert free_host_memory(tmp_path) == 4_000_000
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    assert free_host_memory(tmp_path) == 8_192_000


def test_a_role_has_what_the_other_leaves():
    deployment = load_deployment(CONFIGS / "demo.yaml", {"attention.dp": 2, "ffn.ep": 1})
    config = read_config(deployment.model)[0]
    attention, ffn = role_bytes(config, deployment)
    both = 2 * attention.total + ffn.total
    assert simulated_memory(config, deployment, {"attention": 2, "ffn": 1}, both) == {
        "attention": attention.total,
        "ffn": ffn.total,
    }
    short = simulated_memory(config, deployment, {"attention": 2, "ffn": 1}, both - 2)
    assert short == {"attention": attention.total - 1, "ffn": ffn.total - 2}
    assert simulated_memory(config, deployment, {"ffn": 1}, 1000) == {"ffn": 1000}
    assert simulated_memory(config, deployment, {"attention": 2}, None) == {"attention": None}
