"""From a deployment to a warm runtime: buckets, warm-up, end ids, and errors before any work."""

import json
import re

import numpy as np
import pytest

from jaxserve.engine.runtime import warm_up, warm_up_plans
from jaxserve.errors import CheckpointError, ConfigError, MemoryTakenError, exit_code
from jaxserve.fleet.assembly import build_runtime, open_engine
from jaxserve.observe.probe import Probe
from jaxserve.roles.layout import Bucket, deployment_buckets
from jaxserve.roles.step_arrays import FROM_DEVICE
from tests import golden
from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised


class TestErrorsBeforeAnythingIsLoaded:
    @pytest.fixture(autouse=True)
    def nothing_is_compiled_or_read(self, monkeypatch):
        def never(*arguments, **options):
            raise AssertionError("too late")

        monkeypatch.setattr("jaxserve.roles.compilation.Program.compile", never)
        monkeypatch.setattr("jaxserve.checkpoint.hf.HFCheckpoint.leaves", never)

    def test_too_few_devices(self, tiny_model):
        message = "layout attention.dp 8 x attention.tp 1 + ffn.ep 1 x ffn.tp 1 = 9 devices, but"
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_runtime(layouts.deployment(tiny_model, {"attention.dp": 8}))

    def test_no_model(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"no model at .*none: config\.json: No such"):
            build_runtime(layouts.deployment(tmp_path, {"model": str(tmp_path / "none")}))

    def test_missing_tensors(self, tmp_path):
        folder = layouts.write_model(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
        with pytest.raises(CheckpointError, match=r"11 problems:\n  missing model\.layers\.4\."):
            build_runtime(layouts.deployment(folder, {}))

    def test_too_little_memory(self, tiny_model):
        small = layouts.deployment(tiny_model, {"attention.memory_gb": 0.001})
        message = r"= 0\.0018 GB of 0\.0010 GB \(attention\.memory_gb\) on each of the 1 attention"
        with pytest.raises(ConfigError, match=message):
            build_runtime(small)

    @pytest.mark.parametrize(
        ("limit", "refused", "message"),
        [
            (10**6, ConfigError, r"of 0\.0010 GB \(reported"),
            (10**9, AssertionError, "too late"),
            (None, AssertionError, "too late"),
        ],
    )
    def test_the_memory_that_devices_report(self, tiny_model, limit, refused, message, monkeypatch):
        monkeypatch.setattr("jaxserve.roles.capacity.memory_limit", lambda device: limit)
        with pytest.raises(refused, match=message):
            build_runtime(layouts.deployment(tiny_model, {}))

    @golden.table("fleet/memory_of_simulated_devices.yaml")
    def test_the_memory_that_simulated_devices_share(
        self, tiny_model, overrides, free, message, monkeypatch
    ):
        """Unless the deployment says what they may use."""
        monkeypatch.setattr("jaxserve.roles.capacity.free_host_memory", lambda: free)
        refused = ConfigError if message != "too late" else AssertionError
        with pytest.raises(refused, match=message):
            build_runtime(layouts.deployment(tiny_model, overrides))

    @pytest.mark.parametrize(
        ("whole", "refused"), [(10**6, ConfigError), (10**9, MemoryTakenError)]
    )
    def test_memory_that_others_have(self, tiny_model, whole, refused, monkeypatch):
        """A later start may find it free; what the host has not it will never have."""
        monkeypatch.setattr("jaxserve.roles.capacity.free_host_memory", lambda: 10**6)
        monkeypatch.setattr("jaxserve.roles.capacity.whole_host_memory", lambda: whole)
        with pytest.raises(ConfigError, match=r"of 0\.0003 GB \(reported") as error:
            build_runtime(layouts.deployment(tiny_model, {}))
        assert type(error.value) is refused
        assert exit_code(error.value) == {ConfigError: 2, MemoryTakenError: 75}[refused]

    def test_a_model_that_is_too_short(self, tiny_model):
        longer = {"scheduler.max_length": 4096, "scheduler.page_buckets": [512], "cache.pages": 512}
        with pytest.raises(ConfigError, match="beyond the model's 2048 positions"):
            build_runtime(layouts.deployment(tiny_model, longer))


class TestWarmUp:
    def test_every_bucket_on_every_lane(self, afd_runtime):
        plan, other = warm_up_plans(afd_runtime)
        assert (plan.lane, other.lane) == (0, 1)
        assert plan.bucket == other.bucket == Bucket(24, 18)
        assert (plan.rows.tolist(), plan.token_ids.tolist()) == ([0], [FROM_DEVICE])
        assert (plan.kv_lengths.tolist(), plan.sample_counts.tolist()) == ([1], [1])
        assert plan.new_pages.T.tolist() == [[0, 0, 160]], "past the pool: nothing is written"

    def test_leaves_the_driver_idle(self, afd_runtime, colocated_runtime):
        for runtime in (afd_runtime, colocated_runtime):
            assert not runtime.driver.active
            assert runtime.driver.idle_lanes == [0, 1]


class TestBuckets:
    """Sizes are rounded up, so that all attention devices get equal shares."""

    @pytest.mark.parametrize(
        ("overrides", "tokens"),
        [
            (layouts.COLOCATED, [5, 7, 22]),
            ({"attention.dp": 3, "ffn.ep": 2}, [5, 7, 22]),
            (layouts.LAYOUTS["2A4F"], [6, 8, 22]),
        ],
        ids=str,
    )
    def test_token_sizes(self, overrides, tokens, tiny_model):
        limits = {"scheduler.token_budget": 22, "scheduler.token_buckets": [5, 7, 22]}
        limits |= {"scheduler.page_buckets": [9, 18]}
        buckets = deployment_buckets(layouts.deployment(tiny_model, limits | overrides))
        assert buckets == [Bucket(size, pages) for size in tokens for pages in (9, 18)]


class TestEndIds:
    def test_bad_ones_are_met_before_the_model_is_loaded(self, tmp_path, monkeypatch):
        (tmp_path / "config.json").write_text('{"eos_token_id": true}')
        monkeypatch.setattr("jaxserve.fleet.assembly.build_runtime", None)
        with pytest.raises(CheckpointError, match="eos_token_id True is no token id"):
            open_engine(layouts.deployment(tmp_path, {}))


def test_warm_up_measures_as_a_client_that_watches(afd_runtime, monkeypatch):
    turned = []
    monkeypatch.setattr(Probe, "turn", lambda _, on: turned.append(on))
    warm_up(afd_runtime)
    assert turned == [True, False]


def test_logits_have_a_column_for_every_token_and_no_more(colocated_runtime):
    colocated_runtime.driver.begin(warm_up_plans(colocated_runtime)[0])
    finished = colocated_runtime.driver.advance()
    assert np.asarray(finished.logits).shape == (5, 161)


@pytest.mark.parametrize(
    ("layout", "tensor", "value", "block"),
    [
        (layouts.COLOCATED, "model.layers.1.self_attn.o_proj.weight", np.nan, "layers.1.attention"),
        ({"mode": "afd"}, "model.layers.0.mlp.down_proj.weight", np.inf, "layers.0.ffn"),
    ],
)
def test_a_block_whose_weights_give_no_numbers_is_named(tmp_path, layout, tensor, value, block):
    folder = layouts.write_damaged_model(tmp_path, tensor, (0, 0), value)
    with pytest.raises(CheckpointError, match=rf"logits are not finite, nor are {block}$"):
        open_engine(layouts.deployment(folder, layout))
