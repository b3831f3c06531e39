"""Load of a step on the link between runtimes, against bytes counted by hand."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.link_load import check_link, link_load
from tests.jaxserve.roles.test_capacity import load


@pytest.mark.parametrize(
    ("attention", "ffn", "busiest"), [(1, 1, 3), (1, 2, 1.5), (1, 8, 1), (8, 8, 0.375)]
)
def test_three_domains_of_step3(attention, ffn, busiest):
    """8 x 192 x 2 rows through 61 layers: 7,168 bytes, with scale, ids and gates 7,296."""
    sizes = {"attention_processes": attention, "ffn_processes": ffn}
    places = [f"h{number}:1" for number in range(ffn)]
    found = link_load(*load("step3-fleet", link_addresses=places, **sizes))
    assert (found.there, found.back, found.busiest) == (3072 * 61 * 7296, 3072 * 61 * 7296, busiest)
    assert found.seconds == pytest.approx(busiest * 1.367e9 / 2.5e9, rel=1e-3)


def test_a_target_that_the_link_cannot_keep_is_refused():
    check_link(*load("step3-fleet"))
    assert link_load(*load("step3-domains")) is None
    problem = r"tpot_seconds 0\.05: over link.transport pull .* 2\.69 GB back .* 3\.22 s for"
    with pytest.raises(ConfigError, match=problem):
        check_link(*load("step3-fleet", fleet_tpot_seconds=0.05, link_combine="auto"))
    check_link(*load("step3-fleet", fleet_tpot_seconds=0.05), gb_per_second=100)
    check_link(*load("step3-fleet", fleet_tpot_seconds=0.05), gb_per_second=0)
