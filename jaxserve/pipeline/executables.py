"""Every program of a deployment, compiled ahead of time: one a bucket and kind.

Built at start-up, two compilations at a time; the driver only looks them up. A process compiles
what runs on its own devices.
"""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax

from jaxserve.config.model import FFNKind, LayerKind
from jaxserve.link.transport import Transport, TransportKind, make_transport
from jaxserve.mesh import has_local_devices
from jaxserve.pipeline.sampling import SamplingExecutables
from jaxserve.programs import AFDPrograms, ColocatedPrograms, Program, sampling
from jaxserve.progress import Progress
from jaxserve.step import Bucket


class AFDExecutables(NamedTuple):
    """What a step of one bucket runs. Programs of meshes elsewhere are None."""

    enter: jax.stages.Compiled | None
    attend: dict[LayerKind, jax.stages.Compiled | None]
    leave: jax.stages.Compiled | None
    ffn: dict[FFNKind, jax.stages.Compiled | None]
    dispatch: dict[FFNKind, Transport]
    combine: Transport
    sampling: SamplingExecutables
    load: jax.stages.Compiled | None = None
    """Counts the tokens of each expert; None where there are none, or attention is elsewhere."""


class ColocatedExecutables(NamedTuple):
    """What a step of one bucket runs on one mesh."""

    step: jax.stages.Compiled | None
    sampling: SamplingExecutables


def compile_all[Key](
    programs: dict[Key, Program], workers: int = 2
) -> dict[Key, jax.stages.Compiled | None]:
    """Compiles each program that has a local device; None for the others."""
    local = {key: p for key, p in programs.items() if has_local_devices(p.mesh)}
    done: dict[Key, jax.stages.Compiled | None] = dict.fromkeys(programs)
    with (
        Progress("compile", len(local), process=jax.process_index()) as progress,
        concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool,
    ):
        futures = {pool.submit(program.compile): key for key, program in local.items()}
        for future in concurrent.futures.as_completed(futures):
            key = futures[future]
            done[key] = future.result()
            progress.advance(note=local[key].name)
    return done


class ProgramKey(NamedTuple):
    """One program of a deployment."""

    name: Literal["enter", "attend", "leave", "ffn", "load", "step", "choose", "score", "logprobs"]
    kind: LayerKind | FFNKind | None
    bucket: Bucket
    """What does not depend on its pages has 1 of them; if not on its tokens, 1 of those, too."""


def afd_programs(programs: AFDPrograms, buckets: Sequence[Bucket]) -> dict[ProgramKey, Program]:
    """Everything that steps of these buckets run."""
    first = programs.config.kind(0)
    later = {programs.config.kind(layer): None for layer in range(1, programs.config.layers)}
    wanted: dict[ProgramKey, Program] = {}
    for bucket in buckets:
        tokens = Bucket(bucket.tokens, 1)
        wanted[ProgramKey("enter", first, bucket)] = programs.enter(bucket, first)
        for kind in later:
            wanted[ProgramKey("attend", kind, bucket)] = programs.attend(bucket, kind)
        wanted[ProgramKey("leave", None, tokens)] = programs.leave(bucket)
        for ffn in programs.formats:
            wanted[ProgramKey("ffn", ffn, tokens)] = programs.ffn(bucket, ffn)
        if "moe" in programs.formats:
            wanted[ProgramKey("load", None, tokens)] = programs.load(bucket)
    return sampling_programs(programs, buckets) | wanted


def colocated_programs(
    programs: ColocatedPrograms, buckets: Sequence[Bucket]
) -> dict[ProgramKey, Program]:
    """One program a bucket, and those of sampling."""
    wanted = {ProgramKey("step", None, bucket): programs.step(bucket) for bucket in buckets}
    return wanted | sampling_programs(programs, buckets)


def sampling_programs(
    programs: AFDPrograms | ColocatedPrograms, buckets: Sequence[Bucket]
) -> dict[ProgramKey, Program]:
    """What runs after a step that has a request with options; the longest to compile first."""
    wanted = {}
    for bucket in buckets:
        tokens = Bucket(bucket.tokens, 1)
        wanted[ProgramKey("choose", None, tokens)] = sampling.choose(programs, bucket)
        wanted[ProgramKey("score", None, tokens)] = sampling.score(programs, bucket)
    wanted[ProgramKey("logprobs", None, Bucket(1, 1))] = sampling.logprobs(programs)
    return wanted


def afd_executables(
    programs: AFDPrograms, buckets: list[Bucket], transport: TransportKind
) -> dict[Bucket, AFDExecutables]:
    """Compiles all buckets. What sees no pages is shared by buckets of equal tokens."""
    compiled = compile_all(afd_programs(programs, buckets))
    first = programs.config.kind(0)
    later = {programs.config.kind(layer) for layer in range(1, programs.config.layers)}
    transports = {
        tokens: _transports(programs, Bucket(tokens, 1), transport)
        for tokens in sorted({bucket.tokens for bucket in buckets})
    }

    def bind(bucket: Bucket) -> AFDExecutables:
        tokens = Bucket(bucket.tokens, 1)
        return AFDExecutables(
            enter=compiled[ProgramKey("enter", first, bucket)],
            attend={kind: compiled[ProgramKey("attend", kind, bucket)] for kind in later},
            leave=compiled[ProgramKey("leave", None, tokens)],
            ffn={kind: compiled[ProgramKey("ffn", kind, tokens)] for kind in programs.formats},
            dispatch=transports[bucket.tokens][0],
            combine=transports[bucket.tokens][1],
            sampling=_sampling(compiled, bucket),
            load=compiled.get(ProgramKey("load", None, tokens)),
        )

    return {bucket: bind(bucket) for bucket in buckets}


def _transports(
    programs: AFDPrograms, bucket: Bucket, kind: TransportKind
) -> tuple[dict[FFNKind, Transport], Transport]:
    rows, meshes = programs.piece_rows(bucket), programs.meshes
    dispatch = {
        layer_kind: make_transport(
            kind,
            programs.dispatch,
            meshes.attention,
            meshes.ffn,
            (rows, message.width),
            message.word,
        )
        for layer_kind, message in programs.formats.items()
    }
    combine = make_transport(
        kind,
        programs.combine,
        meshes.ffn,
        meshes.attention,
        (rows, programs.config.d_model),
        programs.dtype,
    )
    return dispatch, combine


def colocated_executables(
    programs: ColocatedPrograms, buckets: list[Bucket]
) -> dict[Bucket, ColocatedExecutables]:
    """What a step of each bucket runs."""
    compiled = compile_all(colocated_programs(programs, buckets))
    return {
        bucket: ColocatedExecutables(
            compiled[ProgramKey("step", None, bucket)], _sampling(compiled, bucket)
        )
        for bucket in buckets
    }


def _sampling(
    compiled: Mapping[ProgramKey, jax.stages.Compiled | None], bucket: Bucket
) -> SamplingExecutables:
    tokens = Bucket(bucket.tokens, 1)
    return SamplingExecutables(
        choose=compiled[ProgramKey("choose", None, tokens)],
        logprobs=compiled[ProgramKey("logprobs", None, Bucket(1, 1))],
        score=compiled[ProgramKey("score", None, tokens)],
    )
