"""Parameters and bytes of the released models, against what was published and against arithmetic by
hand; what is said of a deployment that does not fit; and the share of a host's memory for simulated
devices."""

import math
import os
import re
from pathlib import Path

import msgspec
import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.commands.checking import describe, on_named_hardware
from jaxserve.config.attention.gqa import GQA
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of, load_deployment
from jaxserve.config.model import FFN, ModelConfig, Rope
from jaxserve.errors import ConfigError
from jaxserve.fleet.sizing import this_machine, usable_cores
from jaxserve.mesh import zeros_of
from jaxserve.model.ffn.traffic import ExchangeMesh
from jaxserve.roles.attention_bytes import attention_activations
from jaxserve.roles.attention_programs import LayerPrograms
from jaxserve.roles.both_roles import one_program_bytes
from jaxserve.roles.capacity import (
    RoleBytes,
    StepSizes,
    check_capacity,
    free_host_memory,
    memory_of,
    simulated_memory,
    whole_host_memory,
)
from jaxserve.roles.colocated import ColocatedPrograms
from jaxserve.roles.ffn_bytes import ffn_activations
from jaxserve.roles.pipelines import role_bytes
from jaxserve.roles.sizing import Parameters, count_parameters
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of

CONFIGS = Path(__file__).resolve().parents[3] / "configs"

COUNTS = msgspec.yaml.decode(golden.text("roles/published.yaml"))
PUBLISHED = {name: Parameters(*counts) for name, counts in COUNTS.items()}

VARIANTS = (
    *("step3-v6e", "step3-v7x", "step3-alltoall", "step3-large-batch"),
    *("step3-prefill", "step3-domains", "step3-fleet", "deepseek-v3-v7x", "qwen3-235b-v6e"),
)
"""Deployments of these models on other hardware, in other layouts, or in other parts."""


def load(name: str, **overrides) -> tuple[ModelConfig, Deployment]:
    """A released model and its deployment; `attention_dp=3` overrides attention.dp."""
    changes = {key.replace("_", ".", 1): value for key, value in overrides.items()}
    deployment = load_deployment(CONFIGS / f"{name}.yaml", changes)
    return on_named_hardware(read_config(deployment.model)[0], deployment), deployment


def by_role(name: str, **overrides) -> dict[str, RoleBytes]:
    return {part.role: part for part in role_bytes(*load(name, **overrides))}


def test_every_deployment_file_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {
        *("demo", "demo-fleet", "demo-fleet-afd"),
        *PUBLISHED,
        *VARIANTS,
    }


class TestParameters:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_as_published(self, name):
        assert count_parameters(load(name)[0]) == PUBLISHED[name]

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_as_many_as_the_checkpoint_has(self, name):
        """The tensors' names are another table than the templates."""
        _, names = read_config(CONFIGS / "models" / name)
        shapes = {}
        for block in (names.embedding, names.head, *names.attention, *names.ffn):
            for source in block.values():
                shapes |= dict(zip(source.names, source.shapes, strict=True))
        assert sum(map(math.prod, shapes.values())) == PUBLISHED[name].total
        assert sum(map(math.prod, names.unloaded.values())) == PUBLISHED[name].prediction

    def test_a_tied_head_counts_once_and_is_met(self):
        config, _ = load("qwen3-32b")
        head = 151_936 * 5120
        counted = count_parameters(msgspec.structs.replace(config, tied_head=True))
        assert counted == Parameters(32_762_123_264 - head, 31_984_210_944, 0)


class TestBytes:
    """Bytes of one device, by hand."""

    @golden.table("roles/sequences.yaml")
    def test_of_a_sequence(self, model, tokens, changes, kilobytes, megabytes):
        """Pages of this many tokens, and what a slot has besides."""
        page = changes.get("cache_page_size", 16)
        fixed = {"mode": "colocated", "dtype": "bfloat16", "lanes": 1, "cache_prefix": False}
        fixed |= {"scheduler_max_length": 131_072, "scheduler_page_buckets": [131_072 // page]}
        fixed |= {"model": str(CONFIGS / "models" / model)} | changes

        def rings_and_pages(slots, pages):
            (part,) = by_role("demo", scheduler_slots=slots, cache_pages=pages, **fixed).values()
            return part.rings, part.cache

        (few_slots, few), (slots, pages) = rings_and_pages(8, 8192), rings_and_pages(16, 16_384)
        found = (slots - few_slots) / 8 + (pages - few) / 8192 * tokens / page
        assert found / 1e6 == pytest.approx(kilobytes * tokens / 1e3 + megabytes, rel=0.05)

    def test_of_dense_weights_and_pages_in_bf16(self):
        (part,) = by_role("qwen3-32b").values()
        layer = 5120 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 25_600) // 8  # matrices, over 8 chips
        norms = 2 * 5120 + 2 * 128
        ends = 2 * 151_936 * 5120 // 8 + 5120
        assert part.weights == 2 * (64 * (layer + norms) + ends)
        assert (part.role, part.devices) == ("attention", 8)
        assert part.cache == 64 * 2 * 8000 * 64 * (1 * 128) * 2  # layers, k and v, a head a chip

    def test_of_pages_in_fp8(self):
        part = by_role("step3")["attention"]
        assert part.cache == 61 * 2 * 26_000 * 64 * (256 + 4)  # a scale a token and head

    def test_of_latents_which_every_device_of_a_group_has(self):
        alone, several = by_role("deepseek-v3"), by_role("deepseek-v3", attention_tp=4)
        assert alone["attention"].cache == 61 * 20_000 * 64 * (576 + 4)
        assert several["attention"].cache == alone["attention"].cache
        assert several["attention"].devices == 64

    def test_of_experts_in_fp8_blocks(self):
        part = by_role("deepseek-v3", ffn_exchange="alltoall")["ffn"]
        matrix = 7168 * 2048
        expert = 3 * (matrix + 4 * (7168 // 128) * (2048 // 128))
        # The all-to-all has the shared expert whole on every rank; the gather its 2048 columns over
        # 16 devices: 128 each, so blocks stay whole.
        gathered = by_role("deepseek-v3")["ffn"]
        # 18432 / 16 = 1152 = 9 blocks.
        dense = 3 * (7168 * 1152 + 4 * (7168 // 128) * 9)
        assert part.weights == 58 * (16 * expert + expert) + 3 * dense
        assert gathered.weights == 58 * (16 * expert + expert // 16) + 3 * dense

    def test_of_experts_that_no_axis_divides(self):
        """48 experts over 5 ranks: 10 slots each."""
        part = by_role("step3", ffn_ep=5, ffn_tp=1, ffn_instances=1)["ffn"]
        expert = 3 * 7168 * 5120 + 4 * (2 * 5120 + 7168)  # FP8, a scale an output channel
        shared = 3 * 7168 * 5120 + 4 * (2 * 5120 + 7168)  # whole on every device
        dense = 3 * 7168 * 3687 + 4 * (2 * 3687 + 7168)  # ceil(18432 / 5)
        assert part.weights == 56 * (10 * expert + shared) + 5 * dense

    def test_of_a_shared_expert_with_ranks_of_its_own(self):
        """Every device has one slot a layer: of a routed expert, or of the shared one."""
        sizes = {"attention_dp": 160, "attention_tp": 1, "ffn_ep": 288, "ffn_tp": 1}
        apart = by_role("deepseek-v3", **sizes, ffn_shared="ranks:32")["ffn"]
        beside = by_role("deepseek-v3", **sizes, ffn_exchange="alltoall")["ffn"]
        expert = 3 * 7168 * 2048 + 3 * 56 * 16 * 4  # with scales of blocks of 128
        assert beside.weights - apart.weights == 58 * expert
        assert apart.activations < beside.activations * 1.1

    def test_int8_takes_half_of_bf16_and_scales(self):
        plain = by_role("qwen3-235b-a22b")["ffn"].weights
        expert_outputs = 2 * 1536 + 4096
        expected = plain // 2 + 4 * 94 * 16 * expert_outputs
        assert by_role("qwen3-235b-a22b", ffn_weights="int8")["ffn"].weights == expected

    def test_of_activations(self):
        """512 tokens a chip, 2048 rows of all chips, 2 lanes; BF16, and FP32 sums."""
        parts = by_role("qwen3-30b-a3b")
        d, message = 2048, 2 * 17 * 128  # the row, 8 experts' ids and gates: whole tiles
        lane = 512 * (2 * d + message + 2 * d)
        logits = 3 * 32 * 151_936 * 4
        attend = 512 * (2 * (32 * 3 * 128 + d) + 4 * d)
        assert logits > attend
        counts = 32 * 151_936 * 4
        assert parts["attention"].activations == 2 * (lane + counts) + logits
        arriving = 512 * (message + 2 * d)
        routed = 8 * (d * (2 + 2 + 4) + 768 * (4 + 4 + 2))
        layer = 2048 * (message + d * (2 + 4) + routed)
        assert parts["ffn"].activations == 2 * arriving + layer


def test_a_loaded_prediction_module_counts_as_a_layer_with_experts():
    config, deployment = load("deepseek-v3")
    with_module = msgspec.structs.replace(config, modules=1)
    assert count_parameters(with_module) == count_parameters(config)
    longer = msgspec.structs.replace(config, decoder=config.decoder + config.predictors)
    attention, ffn = role_bytes(with_module, deployment)
    more_attention, more_ffn = role_bytes(longer, deployment)
    assert (attention.cache, ffn.weights) == (more_attention.cache, more_ffn.weights)
    # [7168, 2 · 7168] with its columns over tp, and three norms; BF16.
    beside = 2 * (2 * 7168 * 7168 // deployment.attention.tp + 3 * 7168)
    assert attention.weights == more_attention.weights + beside


class TestAgainstWhatIsAllocated:
    @pytest.mark.parametrize("layout", ["2A1F", "3A2F", "2A4F"])
    def test_shards_have_these_sizes(self, tiny_model, layout):
        overrides = layouts.LAYOUTS[layout] | {"cache.format": "int8"}
        deployment = layouts.deployment(tiny_model, overrides)
        config, _ = read_config(tiny_model)
        programs = programs_of(LayerPrograms, deployment, config)
        layers = [zeros_of(programs.pools[0].arrays) for _ in range(config.layers)]
        pages = [array for layer in layers for array in layer]
        attention, _ = role_bytes(config, deployment)
        for device in programs.mesh.devices.flat:
            shards = (shard for array in pages for shard in array.addressable_shards)
            held = sum(shard.data.nbytes for shard in shards if shard.device == device)
            assert held == attention.cache

    def test_colocated_holds_both_roles(self, tiny_model):
        config, _ = read_config(tiny_model)
        attention, ffn = role_bytes(config, layouts.deployment(tiny_model, {}))
        deployment = layouts.deployment(tiny_model, layouts.COLOCATED)
        (both,) = role_bytes(config, deployment)
        assert both.weights == attention.weights + ffn.weights
        programs = programs_of(ColocatedPrograms, deployment, config)
        pages = sum(math.prod(a.shape) * a.dtype.itemsize for a in programs.all_pages)
        assert both.cache == pages == attention.cache
        config = msgspec.structs.replace(config, platform="cpu")
        alike = one_program_bytes(config, layouts.deployment(tiny_model, {"pipeline": "step"}))
        ends = (2 * 161 * 64 + 64) * 4
        assert [part.total for part in alike] == [both.total, both.total - ends]


class TestFit:
    @pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
    def test_every_shipped_deployment_fits(self, name):
        config, deployment = load(name)
        if name in VARIANTS:
            assert count_parameters(config) == PUBLISHED[Path(deployment.model).name]
        workers = [deployment]
        if deployment.prefill.workers:
            workers.append(deployment_of(deployment, "prefill"))
        for worker in workers:
            assert memory_of(worker)["attention"] is not None
            check_capacity(config, worker, memory_of(worker), role_bytes)

    def test_says_what_is_too_much_and_what_would_fit(self):
        config, deployment = load("deepseek-v3", attention_memory_gb=60, ffn_ep=4)
        with pytest.raises(ConfigError) as refused:
            check_capacity(config, deployment, memory_of(deployment), role_bytes)
        golden.check("roles/does_not_fit.txt", f"{refused.value}\n")

    def test_an_expert_that_moves_needs_room(self):
        """DeepSeek-V3's in FP8 with a scale for every 128 x 128, read from elsewhere twice."""
        expert = 3 * (2048 * 7168 + 4 * 16 * 56)
        config, deployment = load("deepseek-v3")
        assert [part.moving for part in role_bytes(config, deployment)] == [0, expert]
        elsewhere = msgspec.structs.replace(deployment.experts, source="checkpoint")
        deployment = msgspec.structs.replace(deployment, experts=elsewhere)
        assert [part.moving for part in role_bytes(config, deployment)] == [0, 2 * expert]
        assert [part.moving for part in role_bytes(*load("deepseek-v3", ffn_ep=1))] == [0, 0]

    def test_the_pages_it_names_fit(self):
        config, deployment = load("deepseek-v3", attention_memory_gb=60, cache_pages=19_131)
        check_capacity(config, deployment, memory_of(deployment), role_bytes)

    @golden.table("roles/proposals.yaml")
    def test_what_would_help_is_proposed(self, name, changes, said):
        config, deployment = load(name, **changes)
        with pytest.raises(ConfigError, match=said):
            check_capacity(config, deployment, memory_of(deployment), role_bytes)

    @golden.table("roles/pools.yaml")
    def test_what_pools_cannot_have_is_refused(self, model, changes, said):
        changes |= {"pipeline": "step", "model": str(CONFIGS / "models" / model)}
        with pytest.raises(ConfigError, match=f"pipeline = step on TPUs: .*{said}"):
            one_program_bytes(*load("deepseek-v3-v7x", **changes))

    def test_memory_that_nobody_knows_is_not_checked(self):
        config, deployment = load("kimi-k2", attention_memory_gb=0, ffn_memory_gb=0, ffn_ep=1)
        assert memory_of(deployment) == {"attention": None, "ffn": None}
        check_capacity(config, deployment, memory_of(deployment), role_bytes)

    @pytest.mark.parametrize("written", [0, 130])
    def test_what_devices_report_counts_where_it_is_less(self, written):
        config, deployment = load("kimi-k2", attention_memory_gb=written)
        memory = memory_of(deployment, {"attention": 100 * 10**9, "ffn": 140 * 10**9})
        assert memory == {"attention": 100 * 10**9, "ffn": 130 * 10**9}
        message = r"of 100\.00 GB \(reported\) on each of the 8"
        with pytest.raises(ConfigError, match=message):
            check_capacity(config, deployment, memory, role_bytes)


class TestPasses:
    @golden.table("roles/passes.yaml")
    def test_they_have_as_many_messages_as_fit(self, memory, used, gb, said):
        """Weights and room for an expert take 38.15 GB."""
        config, deployment = load("step3-fleet", ffn_memory_gb=memory)
        check_capacity(config, deployment, memory_of(deployment), role_bytes)
        text = describe(config, deployment, memory_of(deployment))
        assert f"up to {used} messages side by side, domains = 3 (link.batching: cohort)" in text
        assert f": {gb} GB of activations a device; {said}" in text


class TestDescription:
    def test_the_table_of_released_models(self):
        """Parameters, what a token meets, and the weights of every device."""
        page = (CONFIGS.parent / "docs" / "measurements" / "serving.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| `configs/(.*)\.yaml` \| (.*) B \| (.*) B \| (.*) \|$", page, re.M)
        assert {name for name, *_ in rows} == {*PUBLISHED, "deepseek-v3-v7x", "qwen3-235b-v6e"}
        for name, total, activated, devices in rows:
            config, deployment = load(name)
            counted = PUBLISHED[Path(deployment.model).name]
            parts = role_bytes(config, deployment)
            assert total == f"{counted.total / 1e9:.2f}"
            assert activated == f"{counted.activated / 1e9:.2f}"
            numbers = re.findall(r"\d+\.\d\d", devices)
            assert numbers == [f"{part.weights / 1e9:.2f}" for part in parts]
            counts = re.match(r"(\d+)(?:A \+ (\d+)F)? ", devices)
            assert [int(count) for count in counts.groups() if count] == [p.devices for p in parts]

    def test_of_deepseek(self):
        config, deployment = load("deepseek-v3")
        said = describe(config, deployment, memory_of(deployment))
        golden.check("roles/deepseek.txt", f"{said}\n")

    def test_of_unknown_memory(self):
        config, deployment = load("qwen3-32b", attention_memory_gb=0)
        lines = describe(config, deployment, memory_of(deployment)).split("\n")
        assert lines[-2].endswith(" 25.21   ?")
        assert lines[-1] == "attention.memory_gb is not set: whether it fits is not known here"


def test_int4_takes_half_a_byte_and_its_scales():
    """Qwen3 30B has 48 layers of 128 experts; attention stays as it is."""
    plain, int4 = (by_role("qwen3-30b-a3b", ffn_weights=name) for name in ("bfloat16", "int4"))
    role = "ffn" if "ffn" in plain else "attention"
    held = 48 * 128 * 3 * 768 * 2048 // plain[role].devices
    saved = plain[role].weights - int4[role].weights
    assert saved == held * 2 - held * (0.5 + 4 / 128)


def test_a_colocated_step_arranges_the_scales_of_int4_experts():
    """48 layers of 64 experts on each of two devices, a scale for every 128 columns, in FP32."""
    sizes = {"mode": "colocated", "attention_dp": 2, "attention_tp": 1}
    plain, int4 = (
        by_role("qwen3-30b-a3b", ffn_weights=name, **sizes)["attention"] for name in ("fp8", "int4")
    )
    of_expert = 768 * 16 + 768 * 16 + 2048 * 6
    assert int4.activations - plain.activations == 3 * 4 * 48 * 64 * of_expert


def test_int4_needs_whole_groups():
    with pytest.raises(ConfigError, match=r"expert_d_ff = 768 over 64 devices: a scale for 4 col"):
        by_role("qwen3-30b-a3b", mode="afd", ffn_weights="int4", ffn_ep=1, ffn_tp=64)


STEP = StepSizes(10, 4, 3, drafts=1, d_model=16, residual=24, vocab=20, packed=18, size=2)


def test_bytes_on_an_attention_device():
    """tp 2: a lane has 10 rows of 24 numbers, 5 messages and answers, and 24 counts."""
    lane = 10 * 24 * 2 + 5 * (18 + 16 * 2)
    counts = 4 * 20 * 4
    # A layer: normed rows, 4 heads of 6 numbers, and the output in FP32.
    layer = 10 * (16 + 4 * 6) * 2 + 10 * 16 * 4
    logits = 3 * (1 + 1) * 4 * 20 * 4
    assert (layer, logits) == (1440, 1920)
    spec = GQA(q_heads=8, kv_heads=8, head_dim=2, rope=Rope(theta=1e4))
    assert attention_activations(STEP, spec, 2) == 3 * (lane + counts) + logits
    without = STEP._replace(drafts=0)
    assert attention_activations(without, spec, 2) == 3 * (lane + counts) + layer


def test_bytes_on_an_ffn_device():
    """Rows of 2 groups, in 4 pieces, at 2 devices: each lane has 2 pieces of 5 rows of a device."""
    arriving = 2 * 5 * (18 + 16 * 2)
    # A layer's 20 rows: packed, unpacked, their result in FP32, and half of 24 hidden numbers.
    layer = 20 * (18 + 16 * (2 + 4) + 12 * (2 * 4 + 2))
    kind = FFN(d_ff=24)
    step = STEP, ExchangeMesh(2, 1, 4), 2, 4, {kind: False}
    assert ffn_activations(*step) == 3 * arriving + layer
    # Messages of all lanes of two domains; passes of four. With one lane, padding in their place.
    assert ffn_activations(*step, 2, 4) == 6 * arriving + 4 * layer
    step = STEP._replace(lanes=1), *step[1:]
    assert ffn_activations(*step, 3, 4) == 4 * arriving + 4 * layer


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


@golden.table("roles/quotas.yaml")
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
