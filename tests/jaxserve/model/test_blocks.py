"""A tiny model's logits against NumPy, by the driver alone; `test_quality.py` has the demo's."""

import dataclasses

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.checkpoint.families import architecture
from jaxserve.config.load import load_deployment
from jaxserve.config.model import Int4
from jaxserve.errors import ConfigError
from jaxserve.mesh import AbstractSubmeshes, Submeshes
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.model.ffn.block import check_ffn, expert_rows
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.step_arrays import FROM_DEVICE
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows
from pallas_kernels.lookup import from_blocks
from tests import golden
from tests.conftest import REPOSITORY
from tests.jaxserve import layouts
from tests.jaxserve.stepping import Sequences
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3

LENGTHS = (9, 1, 14)  # 24 tokens: one full step
PROMPTS = [layouts.PROMPTS[3][:9], layouts.PROMPTS[0], layouts.PROMPTS[1][:14]]


@pytest.fixture(scope="module")
def expected(tiny_model):
    """The logits after every token of every prompt."""
    model = Step3Numpy.from_folder(tiny_model)
    return [model.logits(prompt) for prompt in PROMPTS]


@pytest.fixture(params=["colocated", "afd"])
def runtime(request):
    return request.getfixturevalue(f"{request.param}_runtime")


def test_prefill_at_once(runtime, expected):
    for lane in (0, 1):
        logits = Sequences(runtime, PROMPTS, lane).step(LENGTHS)
        for index, row in logits.items():
            np.testing.assert_allclose(row, expected[index][-1], atol=1e-4)


def test_prefill_in_chunks(runtime, expected):
    sequences = Sequences(runtime, PROMPTS)
    for counts in ((5, 0, 2), (0, 0, 8), (3, 1, 1), (1, 0, 3)):
        for index, row in sequences.step(counts).items():
            np.testing.assert_allclose(row, expected[index][sequences.fed[index] - 1], atol=1e-4)
    assert sequences.fed == list(LENGTHS)


def test_a_step_takes_its_token_from_the_device(colocated_runtime, afd_runtime, tiny_model):
    """Greedy, three tokens that the host never sees before the end."""
    prompt = PROMPTS[0]
    tokens = Step3Numpy.from_folder(tiny_model).greedy(prompt, 4)
    for runtime in (colocated_runtime, afd_runtime):
        rows = [SequenceRow(3, prompt, 9, [6, 2], sample=True)]
        got = []
        for step in range(4):
            slots = runtime.deployment.scheduler.slots
            plan = plan_of_rows(0, step, runtime.buckets[-1], [rows], slots=slots)
            runtime.driver.begin(plan)
            got.append(runtime.driver.advance().sampled)
            rows = [SequenceRow(3, [FROM_DEVICE], 10 + step, [6, 2], sample=True)]
        assert [int(np.asarray(sampled)[0, 3]) for sampled in got] == tokens


def test_a_chunk_that_does_not_sample_keeps_the_lanes_last_token(colocated_runtime, tiny_model):
    """The slot keeps its token, and so do slots that take no part in the step."""
    driver, bucket = colocated_runtime.driver, colocated_runtime.buckets[-1]
    slots = colocated_runtime.deployment.scheduler.slots

    def step(rows):
        driver.begin(plan_of_rows(0, 0, bucket, [rows], slots=slots))
        return np.asarray(driver.advance().sampled)[0]

    row = SequenceRow(1, [5, 6], 2, [0], sample=True)
    first = step([row, SequenceRow(2, [7, 8, 9], 3, [1], sample=True)])
    model = Step3Numpy.from_folder(tiny_model)
    assert first[1:3].tolist() == [model.greedy([5, 6], 1)[0], model.greedy([7, 8, 9], 1)[0]]
    second = step([SequenceRow(slot=2, token_ids=[3], kv_length=1, page_ids=[2], sample=False)])
    assert second[1:3].tolist() == first[1:3].tolist()


NINE = {"ffn.ep": 9, "ffn.shared": "ranks:1"}


class TestLayoutsThatDoNotFit:
    SIZES = TinyStep3(hidden_size=48, num_attention_heads=6, share_expert_dim=96)

    def check(self, overrides, **sizes):
        config = architecture(dataclasses.replace(self.SIZES, **sizes).config())
        deployment = load_deployment(REPOSITORY, overrides)
        AttentionTemplates(config, deployment, AbstractSubmeshes(deployment))
        check_ffn(config, deployment)

    @pytest.mark.parametrize(
        "overrides",
        [
            *({"attention.tp": tp} for tp in (1, 2, 3, 6)),
            {"ffn.ep": 8, "ffn.tp": 7},
            {"ffn.ep": 12},  # more ranks than experts: some have none, or replicas
            {"ffn.redundant_slots": 2},
            {"ffn.redundant_slots": 2, **NINE},
            {"ffn.shared": "whole"},
        ],
        ids=str,
    )
    def test_those_that_fit(self, overrides):
        self.check(overrides)

    def test_ranks_of_the_shared_expert_that_have_slots_enough(self):
        self.check({**NINE, "ffn.ep": 3}, moe_num_experts=6)

    def test_refusals_name_the_field_and_the_numbers(self):
        golden.check_arguments("model/layouts.txt", ConfigError, self.check, globals())

    @pytest.mark.parametrize(
        ("weights", "rows"),
        [("fp8", "fp8"), ("int8", "int8"), ("int4", "int8"), ("auto", None), ("bfloat16", None)],
    )
    def test_formats_of_the_rows_of_experts_need_quantised_weights(self, weights, rows):
        config = architecture(self.SIZES.config())
        for wanted, expected in (("blocks", rows), ("float", rows and "float")):
            overrides = {"ffn.expert_rows": wanted, "ffn.weights": weights}
            deployment = load_deployment(REPOSITORY, overrides)
            if expected is not None:
                assert expert_rows(deployment, config) == expected
                continue
            message = f"expert_rows = {wanted} .* ffn.weights is {weights}"
            with pytest.raises(ConfigError, match=message):
                expert_rows(deployment, config)

    @golden.table("model/whole_blocks.yaml")
    def test_rows_in_blocks_need_whole_blocks(self, overrides, d_ff, field):
        config = architecture(self.SIZES.config() | {"moe_intermediate_size": d_ff})
        config = msgspec.structs.replace(config, stored="fp8_block")
        deployment = load_deployment(REPOSITORY, {"ffn.expert_rows": "blocks", **overrides})
        if field is None:
            assert expert_rows(deployment, config) == "fp8"
            return
        with pytest.raises(ConfigError, match=f"whole blocks of 128 on every device; {field}"):
            expert_rows(deployment, config)

    def test_rows_in_blocks_need_int4_groups_that_divide_them(self):
        config = msgspec.structs.replace(architecture(self.SIZES.config()), int4=Int4(group=48))
        overrides = {"ffn.expert_rows": "blocks", "ffn.weights": "int4"}
        with pytest.raises(ConfigError, match=r"groups that divide 128 columns.* have 48"):
            expert_rows(load_deployment(REPOSITORY, overrides), config)


def test_rows_out_of_blocks_are_the_tables():
    """Blocks begin at multiples of 128, but for the last one. Other rows do not count: NaN."""
    numbers = jnp.array([200, 0, 127, 128, 199, 128])
    table = jnp.full((201, 3), jnp.nan).at[numbers].set(jnp.linspace(-1.0, 1.0, 18).reshape(6, 3))
    table = table.astype(jnp.bfloat16)
    np.testing.assert_array_equal(from_blocks(table, numbers), table[numbers])


def test_templates_of_a_model_without_dense_layers():
    sizes = TinyStep3(num_hidden_layers=2, moe_layers=(0, 1))
    deployment = load_deployment(REPOSITORY)
    templates = ModelTemplates(architecture(sizes.config()), deployment, Submeshes(deployment))
    assert list(templates.ffn) == [templates.config.moe]
    ((kind, attention),) = templates.attention.items()
    assert str(kind) == "moe"
    assert "router.gate" in attention.names
