"""Deadlines of the leader of a runtime of several processes."""

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.fleet.bootstrap import leader_deadlines

PULL = ["attention.runtime=a", "ffn.runtime=f", "link.transport=pull", "link.absent_seconds=50"]


@pytest.mark.parametrize(("settings", "seconds"), [([], 20), (PULL, 70)], ids=["inside", "pull"])
def test_a_step_may_wait_for_an_ffn_worker_that_begins_anew(settings, seconds) -> None:
    given = ["mode=afd", "cluster.step_seconds=20", *settings]
    if settings:
        given.append("link.addresses=['127.0.0.1:1']")
    assert leader_deadlines(load_deployment("configs/demo.yaml", given)).step_seconds == seconds
