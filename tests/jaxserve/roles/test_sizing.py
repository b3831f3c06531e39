"""Sizes chosen for an open deployment on absent machines: numbers worked out by hand."""

from pathlib import Path

import msgspec
import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.commands.checking import chosen, named_machine, reported
from jaxserve.config.auto import AUTO_KEYS
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.fleet.sizing import Sizing
from jaxserve.roles.capacity import check_capacity
from jaxserve.roles.pipelines import role_bytes
from jaxserve.roles.sizing import UsableDevices
from tests import golden

GB = 10**9
HOST = UsableDevices("cpu", 1, 8 * GB)
TPUS = UsableDevices("tpu", 8, 30 * GB)
GPU = UsableDevices("gpu", 1, 70 * GB)
GPUS = UsableDevices("gpu", 8, 70 * GB)
PROCESSES = {"attention.processes": 2, "attention.dp": 2}


def sized(model: str, machine: UsableDevices, **overrides) -> Deployment:
    written = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_deployment(CONFIGS / "models" / model, written, choose=Sizing(machine))


def test_a_small_model_on_a_cpu():
    deployment = load_deployment(CONFIGS / "demo", choose=Sizing(HOST))
    assert (deployment.mode, deployment.dtype, deployment.devices) == ("colocated", "float32", 1)
    limits = deployment.scheduler
    assert (limits.slots, limits.max_length, limits.token_budget) == (32, 2048, 512)
    assert (limits.token_buckets, limits.page_buckets) == ([1, 8, 32, 128, 512], [128])
    assert (deployment.cache.page_size, deployment.cache.pages) == (16, 32 * 1024 // 16)


def test_cores_that_share_a_model():
    """Layers of 636 M parameters, 1.27 GB in BF16, over as many cores as there are K and V heads;
    the demo's are too small for a second core."""
    deployment = sized("qwen3-30b-a3b", UsableDevices("cpu", 16, 200 * GB))
    assert (deployment.attention.dp, deployment.attention.tp) == (1, 4)
    part = role_bytes(read_config(deployment.model)[0], deployment)[0]
    assert 4 * part.total <= 200 * GB
    demo = load_deployment(CONFIGS / "demo", choose=Sizing(UsableDevices("cpu", 16, 8 * GB)))
    assert demo.devices == 1


def test_positions_that_a_host_has_no_room_for():
    """30.5 B parameters in 2 bytes are 61.06 GB; 48 layers of 2 x 4 heads x 128 x 2 bytes make
    98,304 bytes a token, 1.572864 MB a page of 16: of 62 GB 0.83 are left, for 530 pages."""
    deployment = sized("qwen3-30b-a3b", UsableDevices("cpu", 1, 62 * GB))
    part = role_bytes(read_config(deployment.model)[0], deployment)[0]
    assert deployment.dtype == "bfloat16"
    assert deployment.cache.pages == (62 * GB - part.total + part.cache) // 1_572_864
    assert 400 < deployment.cache.pages < 540
    assert deployment.scheduler.max_length == deployment.cache.pages * 16 < 40_960
    assert deployment.scheduler.page_buckets == [deployment.cache.pages]


def test_a_dense_model_on_eight_chips():
    """8 K and V heads: tp 8 stores nothing twice, and a chip reads an eighth of the weights."""
    deployment = sized("qwen3-32b", TPUS)
    assert (deployment.mode, deployment.dtype) == ("colocated", "bfloat16")
    assert (deployment.attention.dp, deployment.attention.tp) == (1, 8)
    limits = deployment.scheduler
    assert (limits.slots, limits.max_length, limits.token_budget) == (128, 40_960, 512)
    assert limits.token_buckets == [128, 512]
    assert limits.page_buckets == [20, 80, 320]
    config = read_config(deployment.model)[0]
    check_capacity(config, deployment, {"attention": TPUS.memory, "ffn": TPUS.memory}, role_bytes)
    more = msgspec.structs.replace(deployment.cache, pages=deployment.cache.pages + 1)
    one_more = msgspec.structs.replace(deployment, cache=more)
    with pytest.raises(ConfigError, match="does not fit"):
        check_capacity(config, one_more, {"attention": TPUS.memory, "ffn": TPUS.memory}, role_bytes)


def test_kv_heads_are_not_copied():
    """4 K and V heads on 8 chips: tp 4, and experts over dp 2; latents have one head."""
    attention = sized("qwen3-30b-a3b", TPUS).attention
    assert (attention.dp, attention.tp) == (2, 4)
    attention = sized("deepseek-v3", UsableDevices("gpu", 16, 140 * GB)).attention
    assert (attention.dp, attention.tp) == (16, 1)


def test_one_device_that_the_model_is_too_large_for():
    """Nothing is chosen around it: the refusal has the numbers."""
    deployment = sized("qwen3-235b-a22b", GPU)
    assert deployment.scheduler.max_length == 40960
    config = read_config(deployment.model)[0]
    with pytest.raises(ConfigError, match=r"weights 470\.\d\d \+ KV pages"):
        check_capacity(config, deployment, {"attention": GPU.memory, "ffn": GPU.memory}, role_bytes)


@golden.table("roles/written_sizes.yaml")
def test_what_is_written_stays(overrides, expected):
    tree = msgspec.to_builtins(sized("qwen3-30b-a3b", TPUS, **overrides))
    written = {key.replace("__", "."): v for key, v in overrides.items() if v != "auto"}
    for key, value in (written | expected).items():
        section, _, name = key.rpartition(".")
        assert (tree[section] if section else tree)[name] == value, key


def test_open_sizes_fit_a_written_budget_or_written_buckets():
    """Half of the budget is left for prompts."""

    def call(machine, overrides):
        written = {f"scheduler__{key}": value for key, value in overrides.items()}
        limits = sized("qwen3-32b", machine, **written).scheduler
        return limits.slots, limits.token_budget, limits.token_buckets

    golden.check_values("roles/sizing_budgets.txt", call, globals())


@pytest.mark.parametrize(("budget", "reason"), [(64, "beyond, a CPU gains"), (63, "prompts have")])
def test_slots_of_a_cpu_say_what_limits_them(budget, reason):
    sizing = Sizing(HOST)
    load_deployment(CONFIGS / "demo", {"scheduler.token_budget": budget}, choose=sizing)
    value, why = sizing.found["scheduler.slots"]
    assert value == min(32, budget // 2)
    assert why.startswith(reason)


def test_the_longest_sequence_fits_written_page_buckets():
    """A written length is fitted by pages of a multiple of the usual size, where possible."""

    def call(machine, overrides):
        deployment = sized("qwen3-32b", machine, scheduler__page_buckets=[8], **overrides)
        assert deployment.scheduler.page_buckets == [8]
        return deployment.scheduler.max_length, deployment.cache.page_size

    golden.check_values("roles/sizing_lengths.txt", call, globals())


def test_drafts_of_all_slots_fit_a_budget_which_more_drafts_enlarge():
    """Without small steps."""
    drafts = {"speculative__method": "ngram", "speculative__drafts": 7}
    limits = sized("qwen3-32b", GPUS, scheduler__token_budget=128, **drafts).scheduler
    assert (limits.slots, limits.token_buckets) == (8, [8, 64, 128])
    limits = sized("qwen3-30b-a3b", HOST, **drafts).scheduler
    assert (limits.token_budget, limits.token_buckets) == (256, [32, 256])


@pytest.mark.parametrize("name", [p.stem for p in CONFIGS.glob("*.yaml")])
def test_shipped_deployments_are_what_their_files_say(name):
    """Whatever the machine, but for the demo's pipeline, which is chosen on CPUs."""
    for machine in (HOST, GPU, TPUS):
        sizing = Sizing(machine)
        made = msgspec.structs.replace(load_deployment(name, choose=sizing), pipeline="auto")
        assert made == msgspec.structs.replace(load_deployment(name), pipeline="auto")
        assert [*sizing.found] == ["pipeline"] * (name == "demo" and machine is HOST)


@golden.table("roles/chosen_pipelines.yaml")
def test_one_process_of_cpus_runs_whole_steps_of_the_demo(memory, overrides, expected):
    """As 1A1F in 2 x (49.6 + 8.2) MB, unless something else is written or only `layer` runs it."""
    sizing = Sizing(UsableDevices("cpu", 2, memory))
    assert load_deployment("demo", overrides, choose=sizing).pipeline == expected


@pytest.mark.parametrize("overrides", [{"domains": 2}, {"prefill.workers": 1}, PROCESSES], ids=str)
def test_processes_that_share_a_deployment_choose_nothing(overrides):
    folder = CONFIGS / "models/qwen3-32b"
    assert load_deployment(folder, overrides, choose=Sizing(HOST)) == load_deployment(
        folder, overrides
    )


def test_a_folder_that_cannot_be_read_is_left_to_whoever_loads_it(tmp_path: Path):
    assert load_deployment(tmp_path, choose=Sizing(HOST)) == load_deployment(tmp_path)


def test_hardware_that_is_named_and_not_here():
    """A host of eight v6e with 34.3 GB each, of which nine tenths are for the deployment."""
    folder, named = CONFIGS / "models/qwen3-30b-a3b", {"attention.hardware": "v6e"}
    sizing = Sizing(named_machine)
    deployment = load_deployment(folder, named, choose=sizing)
    assert (deployment.attention.dp, deployment.attention.tp) == (2, 4)
    assert (deployment.dtype, deployment.cache.page_size) == ("bfloat16", 128)
    narrow = load_deployment(folder, named | {"cache.format": "int8"}, choose=Sizing(named_machine))
    assert narrow.cache.page_size == 256  # kernels take no less than 128 there
    config = read_config(folder)[0]
    memory = {"attention": 34_300_000_000, "ffn": 34_300_000_000}
    assert reported(sizing, config, deployment) == memory
    assert role_bytes(config, deployment)[0].total <= 0.9 * 34_300_000_000
    named = [{"attention.hardware": name} for name in ("H200", "910b", "")]
    machines = [named_machine(load_deployment(folder, one)) for one in named]
    assert machines == [UsableDevices("gpu", 8, round(0.9 * 150_700_000_000)), None, None]


def test_what_a_simulated_device_may_use_is_told_where_sizes_were_chosen():
    sizing = Sizing(UsableDevices("cpu", 2, 4 * GB))
    deployment = load_deployment(CONFIGS / "demo", choose=sizing)
    config = read_config(deployment.model)[0]
    assert reported(sizing, config, deployment) == {"attention": 8 * GB}
    assert reported(Sizing(), config, deployment) == {}
    apart = load_deployment(CONFIGS / "demo", {"mode": "afd"}, choose=sizing)
    assert reported(sizing, config, apart).keys() == {"attention", "ffn"}


def test_what_was_chosen_is_told(caplog):
    sizing = Sizing(TPUS)
    load_deployment(CONFIGS / "models/qwen3-32b", {"lanes": 2}, choose=sizing)
    assert [*sizing.found, "scheduler.compile_first", "pipeline"] == list(AUTO_KEYS)  # of CPUs
    with caplog.at_level("INFO"):
        sizing.log()
    assert "mode colocated, dtype bfloat16, attention.dp 1, attention.tp 8," in caplog.text
    lines = chosen(sizing).splitlines()
    assert lines[2].split("  ", 1)[0] == "attention.dp"
    assert "8 of 8 devices, weights 8.19 GB on each, 8 K and V heads" in lines[3]
    assert "GB of weights and activations) / 4.194 MB a page" in chosen(sizing)
