"""Small faults put into the source one at a time, which the tests must go on noticing.

    python -m tests.mutants

A mutant of `mutants.jsonl` changes one operator, constant, condition or statement. The test that
noticed it (`killed`) judges it in a clone of the last commit, with the processes that it starts.
"""

import argparse
import ast
import copy
import importlib
import itertools
import json
import os
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
KEY = ("path", "function", "old", "new", "place")
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


def mutants(path: str) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Keys of a file's mutants, and its text with each; `place` counts equal texts."""
    source = (ROOT / path).read_bytes()
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    for function, tree in functions(ast.parse(source)):
        places: dict[tuple[str, str], int] = defaultdict(int)
        for node, new in mutations(tree):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            old = source[start:end].decode()
            text = source[:start] + new.encode() + source[end:]
            yield (path, function, old, new, f"{places[old, new]}"), text
            places[old, new] += 1


def judged(tree: Path, tests: list[str], seconds: float) -> str:
    """Describes the outcome of a run of these tests; "" if all pass."""
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
        os._exit(int(pytest.main([*options, *tests])))
    end = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"still running after {seconds:.0f} s"
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    said = {0: "", 1: "noticed", 5: "THE TEST IS GONE"}
    return said.get(code, f"exit code {code}: {tree}/build/log")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", default="0/1", help="1/2: every second one, from the second on")
    part, parts = map(int, parser.parse_args().part.split("/"))
    lines = (ROOT / "tests" / "mutants.jsonl").read_text().splitlines()
    listed = [mutant for mutant in map(json.loads, lines) if mutant["killed"]]
    found = dict(
        mutant for path in sorted({one["path"] for one in listed}) for mutant in mutants(path)
    )

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
    for number, mutant in enumerate(listed[part::parts]):
        path, key = tree / mutant["path"], tuple(f"{mutant[key]}" for key in KEY)
        noticed = "THE MUTANT IS GONE"
        if key in found:
            source = path.read_bytes()
            path.write_bytes(found[key])
            os.utime(path, (number, number))  # a .pyc of the one before is not valid
            noticed = judged(tree, [mutant["killed"]], 240.0)
            path.write_bytes(source)
        print(f"{number + 1}: {noticed or 'SURVIVED'}", *key[:4], sep=" | ", flush=True)
    judging = sorted({mutant["killed"] for mutant in listed[part::parts]})
    print("Without a mutant:", judged(tree, judging, 1800.0) or "none of them fails")


if __name__ == "__main__":
    main()
