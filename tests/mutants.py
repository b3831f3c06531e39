"""Small faults put into the source one at a time, to see which of them the tests notice.

    python -m pytest -p tests.reach --reach build/reach
    python -m tests.mutants --draw 300 --seed 0     # new ones
    python -m tests.mutants                         # those of tests/mutants.jsonl that were killed

A mutant changes one operator, constant, condition or statement of a function that tests reach. A
clone of the last commit judges it, with the processes that tests start: by the test that killed it
before, the file named after its module, then the quickest that reach it, up to `--seconds` of them.
"""

import argparse
import ast
import copy
import importlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.jsonl"
KEY = ("path", "function", "old", "new", "place")
ROOMS = ("engine", "roles", "link", "fleet", "model", "checkpoint", "text")
MARKS = "not (nightly or corpus or vllm or matrix or gpu or gpu_aot or tpu_aot or hf)"
SWAPS = dict(
    re.findall(
        r"(\w+):(\w+)",
        "Lt:LtE LtE:Lt Gt:GtE GtE:Gt Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is In:NotIn NotIn:In "
        "Add:Sub Sub:Add Mult:Add Div:Mult FloorDiv:Mult Mod:FloorDiv And:Or Or:And",
    )
)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        inner = {ast.FunctionDef: ".<locals>.", ast.ClassDef: "."}.get(type(node))
        yield from functions(node, f"{prefix}{node.name}{inner}" if inner else prefix)


def mutations(function: ast.FunctionDef) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """(what is replaced, its new text); nested functions and text are left out."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node: Any = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.JoinedStr | ast.ClassDef):
            continue
        waiting += ast.iter_child_nodes(node)
        operator = getattr(node, "op", None) or next(iter(getattr(node, "ops", ())), None)
        match node:
            case ast.Compare(ops=[_]) | ast.BinOp() | ast.BoolOp():
                if swap := SWAPS.get(type(operator).__name__):
                    changed = copy.copy(node)
                    changed.op, changed.ops = getattr(ast, swap)(), [getattr(ast, swap)()]
                    yield node, f"({ast.unparse(changed)})"
            case ast.Constant(value=bool() | int() | float() as value):
                yield node, str(not value if isinstance(value, bool) else value + 1)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield test, f"(not ({ast.unparse(test)}))"
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield value, "None"
            case ast.Expr(value=ast.Call()) | ast.Raise():
                yield node, "pass"


def mutants(reached: set[str]) -> Iterator[dict[str, Any]]:
    """All of them; `place` counts those with the same texts within a function."""
    for path in sorted(path for room in ROOMS for path in (ROOT / "jaxserve" / room).rglob("*.py")):
        source, name = path.read_bytes(), str(path.relative_to(ROOT))
        starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        for function, tree in functions(ast.parse(source)):
            places: dict[tuple[str, str], int] = defaultdict(int)
            for node, new in mutations(tree) if f"{name}:{function}" in reached else ():
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                old = source[start:end].decode()
                text = source[:start] + new.encode() + source[end:]
                values = (name, function, old, new, places[old, new], text)
                yield dict(zip((*KEY, "text"), values, strict=True))
                places[old, new] += 1


def judged(tree: Path, tests: list[str], seconds: float) -> str:
    """The id of the first test that fails; "" where none does."""
    first = tree / "build" / "first"
    first.write_text("")
    if not (child := os.fork()):
        os.setsid()
        os.chdir(tree)
        log = os.open(tree / "build" / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for module in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[module]
        options = ["-xq", "-m", MARKS, "-o", "addopts=--import-mode=importlib", "--timeout=150"]
        code = pytest.main([*options, *tests], [First(first)])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            first.write_text(first.read_text() or f"exit code {int(code)}")
        os._exit(0)
    end = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"still running after {seconds:.0f} s"
        time.sleep(0.05)
    return first.read_text() or ("pytest itself failed" if ended[1] else "")


class First:
    """Writes down the first test that fails."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(self.path.read_text() or report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def judges(mutant: dict[str, Any], tests: list[dict[str, Any]], seconds: float) -> list[str]:
    """The test files that judge a mutant, in their order."""
    room, stem = os.path.split(mutant["path"])
    first = [mutant["killed"].split("::")[0], f"tests/{room}/test_{stem}"]

    def place(test: dict[str, Any]) -> tuple[int, float]:
        file: str = test["file"]
        near = 2 if os.path.dirname(file) == f"tests/{room}" else 3
        return first.index(file) if file in first else near, test["seconds"]

    name = f"{mutant['path']}:{mutant['function']}"
    able = [test for test in tests if name in test["reaches"] or test["file"] in first]
    # Files that are newer than the map.
    known = {test["file"] for test in tests}
    new = {f"tests/{room}/{path.name}" for path in (ROOT / "tests" / room).glob("test_*.py")}
    able += [{"file": file, "seconds": 3.0} for file in sorted(new - known)]
    able.sort(key=place)
    spent = [0.0, *itertools.accumulate(test["seconds"] for test in able)]
    return [test["file"] for test, before in zip(able, spent, strict=False) if before < seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--reach", type=Path, default=ROOT / "build" / "reach")
    parser.add_argument("--draw", type=int, default=0, help="draw so many new mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40, help="of tests for each mutant")
    parser.add_argument("--part", default="0/1", help="1/2: every second one, from the second on")
    options = parser.parse_args()
    tests = [json.loads(path.read_text()) for path in options.reach.iterdir()]
    tests = [test for test in tests if (ROOT / test["file"]).exists()]
    found = {
        tuple(mutant[key] for key in KEY): mutant["text"]
        for mutant in mutants({name for test in tests for name in test["reaches"]})
    }
    if options.draw:
        drawn = random.Random(options.seed).sample(sorted(found), options.draw)
        listed = [dict(zip(KEY, key, strict=True), killed="?") for key in drawn]
    else:
        listed = [json.loads(line) for line in LIST.read_text().splitlines()]
    part, parts = map(int, options.part.split("/"))

    tree = ROOT / "build" / f"mutants-{part}"
    subprocess.run(["rm", "-rf", tree], check=True)
    subprocess.run(
        ["git", "-c", "advice.detachedHead=false", "clone", "-q", "--shared", ROOT, tree],
        check=True,
    )
    (tree / "build").mkdir(exist_ok=True)
    (tree / "build" / "jax_cache").symlink_to(ROOT / "build" / "jax_cache")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # The children find what they all import, as tests/conftest.py would have it.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tree / "build" / "jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    for module in ("jax", "jax.experimental.pallas", "grpc", "httpx"):
        importlib.import_module(module)
    assert not judged(tree, ["tests/test_lock.py"], 200), f"{tree}/build/log"
    result = tree.with_suffix(".jsonl")
    with result.open("w") as lines:
        for number, mutant in enumerate(m for m in listed[part::parts] if m["killed"]):
            path, key = tree / mutant["path"], tuple(mutant[key] for key in KEY)
            killed = "gone"
            if key in found:
                source = path.read_bytes()
                path.write_bytes(found[key])
                os.utime(path, (number, number))  # a .pyc of the one before is not valid
                able = judges(mutant, tests, options.seconds)
                killed = judged(tree, able, 6 * options.seconds)
                path.write_bytes(source)
            lines.write(json.dumps(mutant | {"killed": killed}) + "\n")
            lines.flush()
            print(f"{number + 1}: {killed or 'SURVIVED'}", *key[:4], sep=" | ", flush=True)

    judging = {line["killed"] for line in map(json.loads, result.read_text().splitlines())}
    judging = {test for test in judging if "::" in test}
    print("Without a mutant:", judged(tree, sorted(judging), 1800) or "none of them fails")


if __name__ == "__main__":
    main()
