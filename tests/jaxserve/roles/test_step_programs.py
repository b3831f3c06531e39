"""The order of the exchanges between the roles' programs of a whole step, as compiled."""

import re

import jax
import pytest

from jaxserve.errors import EngineFailedError
from jaxserve.mesh import Submeshes
from jaxserve.model.matrix_formats import placed
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.layout import Bucket
from jaxserve.roles.one_program import BothRolesPrograms
from jaxserve.roles.step_programs import AttentionStepPrograms, FFNStepPrograms, Union, exchanges
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import CONFIG

SLOW = pytest.mark.nightly
DENSE, MOE, ANSWER = "u32[24,64]", "u32[24,70]", "u32[24,64]"
SENT, BACK, BOTH = "{0,2},{1,3", "{2,0},{3,1", "{0,2},{2,0},{1,3},{3,1"
LAYERS = DENSE, MOE, MOE, DENSE
ORDERS = {
    1: [line for layer in LAYERS for line in (f"{layer} {SENT}", f"{ANSWER} {BACK}")],
    2: [f"{layer} {BOTH}" for layer in LAYERS for _ in "ab"] + [f"{ANSWER} {BACK}"],
    3: [f"{MOE} {SENT}", f"{ANSWER} {BACK}"] * (4 * 3 + 2),
}
"""Two lanes: a message and the answer of the turn before in one exchange, and after the last turn
its answer. Three: the message of the turn before and the answer of the one before that, and two
turns more. Layers of a kind are in a loop; exchanges inside a role do not count."""


@pytest.mark.unoptimised
@pytest.mark.parametrize("lanes", [*(pytest.param(n, marks=SLOW) for n in (1, 3)), 2])
def test_both_roles_compile_the_order_of_the_schedule(lanes):
    sizes = {"lanes": lanes, "attention.dp": 2, "ffn.tp": 2, "cache.pages": 4000}
    deployment = layouts.deployment(".", sizes)
    meshes = Submeshes(deployment)
    templates = ModelTemplates(placed(CONFIG, meshes.ffn), deployment, meshes)
    given = templates, deployment
    for program in (
        AttentionStepPrograms(*given, Union.of(meshes, 1, 0)).step(Bucket(24, 18), lanes),
        FFNStepPrograms(*given, Union.of(meshes, 1, 1)).step(24, lanes),
        BothRolesPrograms(*given, meshes).step(Bucket(1, 18), lanes),
    ):
        compiled = program.compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        # A page has 4,096 bytes; CPU programs of jax 0.11.2 copy the pool, later ones do not.
        assert jax.__version_info__ < (0, 12) or memory.temp_size_in_bytes < 4000 * 1024
        if not program.paired:
            continue
        begun = re.sub(r"= (\S+) (collective-permute)\(", r"= ((\1), \1) \2-start(", text)
        assert exchanges(text, 2) == exchanges(begun, 2) == ORDERS[lanes]  # the second as on GPUs
        with pytest.raises(EngineFailedError, match="a compiled loop has no known trip count"):
            exchanges(text.replace("known_trip_count", "turns"), 2)
