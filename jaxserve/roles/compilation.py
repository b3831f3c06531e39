"""Compiles the programs of a worker ahead of time, each once."""

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax

from jaxserve.config.model import FFNKind, LayerKind
from jaxserve.progress import Progress
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Program

ProgramName = (
    Literal["enter", "attend", "leave", "ffn", "step"]
    | Literal["fetch", "insert", "count"]
    | Literal["choose", "score", "logprobs"]
    | Literal["resolve", "draft", "recall"]
    | Literal["predict", "first_pass", "again", "further"]
)


class ProgramKey(NamedTuple):
    """Names one program of a deployment."""

    name: ProgramName
    kind: LayerKind | FFNKind | None
    bucket: Bucket
    """Has 1 page if the program does not depend on pages, and 1 token if not on tokens."""


Compiled = Mapping[ProgramKey, jax.stages.Compiled]


class Get(Protocol):
    """How the executables of a step are put together: a function asks for each by its key and says
    how its program is made, so that a step's programs are listed once. The first time (`wanted`) it
    gets nothing, the second time what was compiled (`compile_steps`)."""

    def __call__(self, key: ProgramKey, make: Callable[..., Program], *arguments: Any) -> Any: ...


def wanted(steps: Callable[..., Any], *arguments: Any) -> dict[ProgramKey, Program]:
    """The programs that `steps(*arguments, get)` asks for, each made once."""
    found: dict[ProgramKey, Program] = {}

    def get(key: ProgramKey, make: Callable[..., Program], *of: Any) -> None:
        if key not in found:
            found[key] = make(*of)

    steps(*arguments, get)
    return found


Call = Callable[..., Any]
"""A compiled program's call, which takes flat, committed arguments."""


def hot_call(compiled: jax.stages.Compiled) -> Call:
    """The C++ call of a program, without the Python that it is wrapped in: a microsecond less of 15
    to 20. Private to JAX; where it is not as expected, the program itself takes its place."""
    private: Any = compiled
    try:
        if private._call is None:
            private._call = private._executable.create_cpp_call(private._params)
        return private._call or compiled
    except (AttributeError, TypeError):
        return compiled


def compile_all[Key](
    programs: Mapping[Key, Program], workers: int = 2
) -> dict[Key, jax.stages.Compiled]:
    """Compiles all programs, so many at a time; the result has their order."""
    done: dict[Key, jax.stages.Compiled] = {}
    with (
        Progress("compile", len(programs), process=jax.process_index()) as progress,
        concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool,
    ):
        futures = {pool.submit(program.compile): key for key, program in programs.items()}
        for future in concurrent.futures.as_completed(futures):
            key = futures[future]
            done[key] = future.result()
            progress.advance(note=programs[key].name)
    return {key: done[key] for key in programs}


def compile_steps[Steps](
    steps: Callable[..., Steps], *arguments: Any, others: Mapping[ProgramKey, Program] = {}
) -> tuple[Steps, Compiled]:
    """Compiles what `steps(*arguments, get)` asks for, and other programs.

    Returns:
      What `steps` makes of its executables, and everything that was compiled.
    """
    compiled = compile_all(wanted(steps, *arguments) | {**others})
    return steps(*arguments, lambda key, *_: compiled[key]), compiled
