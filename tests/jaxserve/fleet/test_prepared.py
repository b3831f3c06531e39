"""Programs that a spare compiled go to the runtime that they were compiled for."""

import pytest

from jaxserve.fleet.prepared import Prepared
from jaxserve.fleet.role_runtime import RoleRuntime

RUNTIME = RoleRuntime("config", "names", "mesh", "contract", "deployment", "ffn")


@pytest.mark.parametrize("changed", [None, "config", "mesh", "deployment", "role"])
def test_programs_compiled_in_advance_serve_an_equal_runtime_alone(changed):
    started = RUNTIME._replace(names="others", **({changed: "another"} if changed else {}))
    given = Prepared(RUNTIME, "compiled").given_to(started)
    assert given == started._replace(executables=None if changed else "compiled")
