"""Compiles the programs of a worker ahead of time, each once."""

import concurrent.futures
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax

from jaxserve.config.model import FFNKind, LayerKind
from jaxserve.progress import Progress
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Program

ProgramName = (
    Literal["enter", "attend", "leave", "ffn", "step"]
    | Literal["load", "fetch", "insert", "count"]
    | Literal["choose", "score", "logprobs"]
)


class ProgramKey(NamedTuple):
    """One program of a deployment."""

    name: ProgramName
    kind: LayerKind | FFNKind | None
    bucket: Bucket
    """What does not depend on its pages has 1 of them; if not on its tokens, 1 of those, too."""


Compiled = Mapping[ProgramKey, jax.stages.Compiled]


def compile_all[Key](
    programs: Mapping[Key, Program], workers: int = 2
) -> dict[Key, jax.stages.Compiled]:
    """Compiles all programs, so many at a time."""
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
    return done
