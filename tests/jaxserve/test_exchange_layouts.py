"""Same tokens whichever exchange moves the rows of the experts: `gather` and `alltoall`, with FFN
devices of their own and colocated, against the NumPy model.

What takes more than the eight simulated devices of a test runs in `exchange_process.py`.
"""

import itertools
import json
from typing import Any

import pytest
import yaml

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.model.ffn.traffic import exchange_of
from tests import golden
from tests.jaxserve import exchange_process, layouts
from tests.jaxserve.exchange_process import OUTPUT_TOKENS, PROMPTS
from tests.jaxserve.fleet.launched import output_of
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

TABLES = yaml.safe_load(golden.text("roles/exchange_layouts.yaml"))
EIGHT: dict[str, dict[str, Any]] = TABLES["eight"]
"""Layouts of up to eight devices."""
MORE: dict[str, dict[str, Any]] = TABLES["more"]
"""Layouts of more."""

BY_DEFAULT = {("2A, EP 3 x TP 2, whole", "gather"), ("4A, EP 4, two instances", "alltoall")}
"""Instances and whole shared experts, each with one exchange. `test_sixteen_ranks` is colocated and
has ranks without experts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Step-3 with enough experts for 16 ranks, of which the last have none."""
    sizes = TinyStep3(
        vocab_size=161, moe_intermediate_size=33, share_expert_dim=42, moe_num_experts=20
    )
    return write_tiny_step3(tmp_path_factory.mktemp("experts"), sizes, seed=layouts.SEED)


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of the NumPy model; none depends on the last digits of a logit."""
    numpy_model = Step3Numpy.from_folder(model)
    return [numpy_model.greedy(prompt, OUTPUT_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=[pytest.mark.matrix] * (case not in BY_DEFAULT))
        for case in itertools.product(EIGHT, ("gather", "alltoall"))
    ],
)
def test_up_to_eight_devices(name, kind, model, expected):
    assert exchange_process.tokens_of(model, EIGHT[name] | {"ffn.exchange": kind}) == expected


def run(model, cases: list[dict[str, Any]], folder) -> list[list[list[int]]]:
    """The tokens of every case, from a process with as many devices as the largest needs."""
    written = folder / "written.json"
    arguments = ["-m", "tests.jaxserve.exchange_process", str(model), json.dumps(cases)]
    output_of(*arguments, str(written), timeout=400, JAX_NUM_CPU_DEVICES="18")
    return json.loads(written.read_text())


def test_sixteen_ranks(model, expected, tmp_path):
    """All that 16 ranks of FFN devices have more is in the matrix, below."""
    assert run(model, [MORE["colocated EP 16"] | {"ffn.exchange": "alltoall"}], tmp_path) == [
        expected
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("name", MORE)
def test_every_layout_of_more_devices(name, model, expected, tmp_path):
    cases = [MORE[name] | {"ffn.exchange": kind} for kind in ("gather", "alltoall")]
    assert run(model, cases, tmp_path) == [expected] * 2


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (EIGHT["colocated EP 8"], "alltoall"),
        (MORE["1A, EP 16"], "alltoall"),
        ({"ffn.ep": 2}, "gather"),  # a token has experts on almost every rank
        ({"ffn.tp": 8}, "gather"),
        ({"ffn.ep": 16, "link.route": "broadcast"}, "gather"),
        ({"ffn.ep": 16, "ffn.exchange": "gather"}, "gather"),
    ],
)
def test_auto_takes_what_moves_less(layout, kind, model):
    config, _ = read_config(str(model), [])
    assert exchange_of(config, layouts.deployment(model, layout)) == kind
