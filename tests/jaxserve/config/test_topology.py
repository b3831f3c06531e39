"""Questions about roles and runtimes, and that nobody outside `config/` compares their names."""

import ast
from pathlib import Path

import pytest

from jaxserve.config.topology import TRANSPORTS, Topology, topology_of

ROOT = Path(__file__).resolve().parents[3]
NAMES = {"afd", "colocated", "ep", "tp", *TRANSPORTS}


@pytest.mark.parametrize(
    ("topology", "roles", "crosses", "separates", "splits"),
    [
        (topology_of("afd"), ["attention", "ffn"], False, False, True),
        (topology_of("afd", "ppermute"), ["attention", "ffn"], False, False, True),
        (topology_of("afd", "pull"), ["attention", "ffn"], True, True, True),
        (topology_of("colocated"), ["colocated"], False, True, True),
        (topology_of("ep"), ["colocated"], False, True, True),
        (topology_of("tp"), ["colocated"], False, True, False),
    ],
)
def test_questions(
    topology: Topology, roles: list[str], crosses: bool, separates: bool, splits: bool
) -> None:
    assert [role for role in ("attention", "ffn", "colocated") if topology.has(role)] == roles
    assert topology.roles == (("attention", "ffn") if "ffn" in roles else ("attention",))
    assert topology.crosses_runtimes is crosses
    assert topology.separates_domains is separates
    assert topology.splits_experts is splits


def compared(text: str) -> list[int]:
    """Lines that compare a mode or a transport with a name."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            subjects = ast.unparse(node).replace("_", ".").replace("s", "").split()
            words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            named = any(word.rpartition(".")[2] in ("mode", "tranport") for word in subjects)
            if named and words & NAMES:
                found.append(node.lineno)
    return found


def test_comparisons_are_found() -> None:
    text = 'a.mode == "afd"\nlink.transport in ("pull",)\n"ep" in modes\nmode == kept\nx == "pull"'
    assert compared(text) == [1, 2, 3]


def test_nobody_outside_config_compares_a_mode_or_a_transport() -> None:
    sources = [path for room in ("jaxserve", "launch") for path in (ROOT / room).rglob("*.py")]
    outside = [path for path in sources if ROOT / "jaxserve" / "config" not in path.parents]
    assert len(outside) > 400
    found = {str(path.relative_to(ROOT)): compared(path.read_text()) for path in outside}
    assert {path: lines for path, lines in found.items() if lines} == {}
