"""Questions about roles and runtimes, and that nobody outside `config/` compares their names."""

import ast
from pathlib import Path

from jaxserve.config.topology import BETWEEN, INSIDE, topology_of
from tests import golden

ROOT = Path(__file__).resolve().parents[3]
NAMES = {"afd", "colocated", "ep", "tp", *INSIDE, *BETWEEN}
BOTH, ONE = ["attention", "ffn"], ["colocated"]


@golden.table("config/topologies.yaml")
def test_questions(mode, transport, workers, crosses, separates, splits):
    one = topology_of(mode, transport)
    assert [role for role in (*BOTH, *ONE) if one.has(role)] == workers
    assert one.roles == (("attention", "ffn") if "ffn" in workers else ("attention",))
    questions = one.crosses_runtimes, one.separates_domains, one.splits_experts
    assert questions == (crosses, separates, splits)


def compared(text: str, subjects: tuple[str, ...], names: set[str]) -> list[int]:
    """Lines that compare something called like a subject with one of the names."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            words = ast.unparse(node).replace("_", ".").split()
            constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            if names & constants and any(w.rpartition(".")[2] in subjects for w in words):
                found.append(node.lineno)
    return found


def test_nobody_outside_config_compares_a_mode_or_a_transport():
    subjects = ("mode", "modes", "transport", "transports")
    text = 'a.mode == "afd"\nlink.transport in ("pull",)\n"ep" in modes\nmode == kept\nx == "pull"'
    assert compared(text, subjects, NAMES) == [1, 2, 3]
    sources = [path for room in ("jaxserve", "launch") for path in (ROOT / room).rglob("*.py")]
    outside = [path for path in sources if ROOT / "jaxserve" / "config" not in path.parents]
    assert len(outside) > 400
    assert [str(path) for path in outside if compared(path.read_text(), subjects, NAMES)] == []
