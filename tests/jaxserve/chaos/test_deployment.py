"""Roles and addresses of the launcher's processes."""

from jaxserve.chaos.deployment import _STARTED, role_of
from tests import golden


@golden.table("chaos/roles.yaml")
def test_roles(name, role):
    assert role_of(name) == role


def test_where_a_process_listens():
    line = "process 1: prefill worker 0, pid 7, listens on 1:2 for 1:3, pages on 1:4 for 1:5"
    names = ("number", "name", "pid", "listens", "dialled", "pages", "pages_dialled")
    found = _STARTED.search(line)
    assert [found[name] for name in names] == [
        *("1", "prefill worker 0", "7", "1:2", "1:3", "1:4", "1:5")
    ]
    for left in (", listens on 1:2 for 1:3", ""):
        found = _STARTED.search(f"process 1: prefill worker 0, process 1, pid 7{left}")
        assert found["name"] == "prefill worker 0, process 1"
        assert found["pages"] is None
