"""Compiles the programs of a worker ahead of time, each once, and keeps them on disk."""

import concurrent.futures
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from jaxserve.config.model import FFNKind, LayerKind
from jaxserve.progress import Progress
from jaxserve.roles.layout import Bucket
from jaxserve.roles.program import Program

logger = logging.getLogger(__name__)


class ProgramKey(NamedTuple):
    """One program of a deployment."""

    name: Literal["enter", "attend", "leave", "ffn", "load", "step", "choose", "score", "logprobs"]
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


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, private to the user, unless JAX was told where already.

    One folder a process, because JAX writes entries in place and another might read half of one.
    """
    given = jax.config.jax_compilation_cache_dir
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(given) if given else root / "jaxserve" / f"xla-{jax.__version__}"
    if jax.process_count() > 1 and not folder.name.startswith("process-"):
        folder /= f"process-{jax.process_index()}-of-{jax.process_count()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no compilation cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if not given:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
