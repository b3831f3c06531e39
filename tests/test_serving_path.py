"""How much code a process of each role can reach, and what none must reach.

Counted are the modules of `jaxserve` that a module imports, directly or through others, at the top
of a module or inside a function, but not under `if TYPE_CHECKING`; without `jaxserve.server` (the
faces) and without `pallas_kernels`, which is a package of its own. A line counts if it holds code:
blank lines, comments and docstrings do not.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "jaxserve.fleet.worker": 16_300,
    "jaxserve.fleet.attention_runtime": 14_100,
    "jaxserve.fleet.ffn_runtime": 11_750,
    "jaxserve.fleet.router": 5_150,
    "jaxserve.serve": 26_900,
}
"""By what a process runs: a worker of a runtime with all roles, of one role, a router; and the
command that can be any of them, with text/."""
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def source_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported_names(node)


def closure(start: str) -> dict[str, str]:
    """Source text by module, of everything of this repository that `start` can import."""
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):
            module = ".".join(parts[:end])
            path = source_of(module)
            if path is None or module in found:
                continue
            found[module] = path.read_text(encoding="utf-8")
            waiting += imported_names(ast.parse(found[module]))
    return found


def code_lines(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


SAMPLE = '''"""Title.

More."""

numbers = [  # why
    1,
]


def text():
    """A docstring."""
    # a comment
    return """a
b"""
'''


def test_code_lines() -> None:
    assert code_lines(SAMPLE) == 6


def test_imported_names() -> None:
    text = "import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d import e, f as g\n"
    assert list(imported_names(ast.parse(text))) == ["a.b", "d.e", "d.f"]


@pytest.mark.parametrize(("start", "limit"), LIMITS.items())
def test_a_role_stays_small(start: str, limit: int) -> None:
    modules = closure(start)
    assert start in modules
    server = {name for name in modules if name.split(".")[:2] == ["jaxserve", "server"]}
    path = {
        name: code_lines(text)
        for name, text in modules.items()
        if name.startswith("jaxserve") and name not in server
    }
    print(f"{len(path)} modules, {sum(path.values())} lines of code")
    assert sum(path.values()) <= limit


def test_an_attention_worker_reaches_model_and_scheduler() -> None:
    modules = closure("jaxserve.fleet.attention_runtime")
    assert {"jaxserve.engine.scheduler", "jaxserve.model.blocks"} <= set(modules)


def test_the_serving_path_needs_neither_planner_nor_benchmarks() -> None:
    packages = {".".join(name.split(".")[:2]) for name in closure("jaxserve.serve")}
    assert not packages & {"jaxserve.planner", "jaxserve.bench", "jaxserve.plan"}
    assert "pallas_kernels.bench" not in packages


def test_a_runtime_of_one_role_does_not_reach_what_only_the_other_runs() -> None:
    attention = set(closure("jaxserve.fleet.attention_runtime"))
    ffn = set(closure("jaxserve.fleet.ffn_runtime"))
    inside = {"jaxserve.link.runtime_link", "jaxserve.roles.colocated_programs"}
    assert not attention & (inside | {"jaxserve.roles.ffn_programs", "jaxserve.model.ffn.exchange"})
    assert not ffn & (inside | {"jaxserve.roles.attention_programs", "jaxserve.model.sampler"})


def test_who_hands_no_pages_over_does_not_reach_their_link() -> None:
    ends = {"jaxserve.link.pages_client", "jaxserve.link.pages_server"}
    programs = {"jaxserve.roles.page_transfer", "jaxserve.roles.page_spread"}
    assert not (ends | programs) & set(closure("jaxserve.fleet.worker"))
    assert ends | programs <= set(closure("jaxserve.fleet.pages_link"))


def test_a_worker_that_several_processes_play_reaches_no_link_to_other_weights() -> None:
    assert "jaxserve.checkpoint.peer" not in closure("jaxserve.fleet.worker")
    assert "jaxserve.checkpoint.peer" in closure("jaxserve.fleet.open")
