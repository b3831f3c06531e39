from jaxserve.fleet.leader import HOSTS_EACH, parent_of
from tests import golden


@golden.table("fleet/parents.yaml")
def test_parents(host: str, followers: list[str], expected: int | None) -> None:
    assert parent_of(host, "a", followers) == expected


def test_nobody_hands_on_to_more_hosts_than_a_few_however_many_there_are() -> None:
    hosts = [f"host{number}" for number in range(1, 400)]
    parents = [parent_of(host, "host0", hosts[:at]) for at, host in enumerate(hosts)]
    assert parents[:9] == [None] * 8 + [0]
    assert all(parent is None or parent < at for at, parent in enumerate(parents))
    most = max(map(parents.count, set(parents)))
    assert most == HOSTS_EACH == 8

    def depth(at: int | None) -> int:
        return 0 if at is None else 1 + depth(parents[at])

    assert max(map(depth, range(399))) == 3
