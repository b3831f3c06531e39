"""Programs of deployments with drafts."""

from jaxserve.roles.colocated import colocated_executables
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.compilation import wanted
from jaxserve.roles.layout import Bucket
from tests.jaxserve import layouts
from tests.jaxserve.roles.building import programs_of

SIZES = [8, 64, 16, 128, 24, 96, 32, 48]


def test_every_process_compiles_in_the_order_of_the_buckets(tmp_path):
    overrides = {**layouts.COLOCATED, "speculative.method": "ngram"}
    deployment = layouts.deployment(tmp_path, overrides)
    programs = programs_of(ColocatedPrograms, deployment)
    buckets = [Bucket(tokens, 18, drafts) for tokens in SIZES for drafts in (0, 3)]
    keys = wanted(colocated_executables, programs, buckets)
    asked = [(key.name, key.bucket.tokens) for key in keys if key.name in ("resolve", "draft")]
    assert asked == [(name, tokens) for tokens in SIZES for name in ("resolve", "draft")]
