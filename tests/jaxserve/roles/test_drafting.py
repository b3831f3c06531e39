"""Programs of deployments with drafts."""

from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.drafting import drafting_programs
from jaxserve.roles.layout import Bucket
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of

SIZES = [8, 64, 16, 128, 24, 96, 32, 48]


def test_every_process_compiles_in_the_order_of_the_buckets(tmp_path):
    overrides = {**layouts.COLOCATED, "speculative.method": "ngram"}
    deployment = layouts.deployment(tmp_path, overrides)
    programs = programs_of(ColocatedPrograms, deployment)
    buckets = [Bucket(tokens, 18, drafts) for tokens in SIZES for drafts in (0, 3)]
    wanted = [(key.name, key.bucket.tokens) for key in drafting_programs(programs, buckets)]
    expected = [(name, tokens) for tokens in SIZES for name in ("resolve", "draft")]
    assert wanted == [*expected, ("recall", 1)]
