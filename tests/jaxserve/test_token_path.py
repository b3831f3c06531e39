"""The files between a client's request and a kernel, on the path of one token.

The path has three parts: from the HTTP application to the engine's queue, from the engine's loop to
the programs that it enqueues, and, where JAX traces a program, from there into `pallas_kernels`.
Each part is a call stack; a file counts once. Starting, loading and compiling are not on the path.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import httpx
import jax
import pytest

from jaxserve.fleet.assembly import open_model
from jaxserve.roles.attention_programs import LayerPrograms
from jaxserve.roles.colocated import ColocatedPrograms
from jaxserve.roles.compilation import Program
from jaxserve.roles.ffn import FFNPrograms
from tests.jaxserve import layouts

ROOT = Path(__file__).resolve().parents[2]
TOOL = 4
PLACES = {
    "queue": ("engine/engine.py", "Engine.submit"),
    "enqueue": ("jax/_src/stages.py", "Compiled.__call__"),
    "kernel": (f"{ROOT}/pallas_kernels/", ""),
}
"""End of each part of the path: a part of a function's file, and the beginning of its name."""


def files_of(frame: FrameType | None) -> tuple[str, ...]:
    """Source files of a call stack from its innermost frame outwards, as far as the event loop."""
    files: list[str] = []
    while frame is not None and "/asyncio/" not in (name := frame.f_code.co_filename):
        file = name.removeprefix(f"{ROOT}/")
        if file.startswith(("jaxserve/", "pallas_kernels/")) and file not in files:
            files.append(file)
        frame = frame.f_back
    kernels = [file for file in files if file.startswith("pallas_kernels/")]
    return tuple(file for file in files if file not in kernels[:-1])


@contextlib.contextmanager
def stacks() -> Iterator[dict[str, set[tuple[str, ...]]]]:
    """Notes the files of the call stack at each end of a part."""
    found: dict[str, set[tuple[str, ...]]] = {part: set() for part in PLACES}

    def on_start(code: CodeType, _: int) -> object:
        for part, (file, name) in PLACES.items():
            if file in code.co_filename and code.co_qualname.startswith(name):
                found[part].add(files_of(sys._getframe(1)))
                return None
        return sys.monitoring.DISABLE

    sys.monitoring.use_tool_id(TOOL, "path")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, on_start)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)
    try:
        yield found
    finally:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.free_tool_id(TOOL)


def programs_of(runtime) -> Iterable[Program]:
    deployment, bucket = runtime.deployment, runtime.buckets[0]
    _, _, meshes, templates, _ = open_model(deployment)
    if deployment.topology.has("colocated"):
        return [ColocatedPrograms(templates, deployment, meshes.attention).step(bucket)]
    attention = LayerPrograms(templates, deployment, meshes.attention)
    ffn = FFNPrograms(templates, deployment, meshes.ffn)
    kinds = {runtime.config.layer(layer): None for layer in range(runtime.config.layers)}
    blocks = [attention.attend(bucket, kind) for kind in kinds]
    return [*blocks, attention.leave(bucket), *(ffn.ffn(bucket, kind.ffn) for kind in kinds)]


@pytest.mark.parametrize("name", ["colocated_runtime", "afd_runtime"])
def test_a_request_reaches_every_kernel_through_few_files(name, request):
    runtime = request.getfixturevalue(name)
    programs, model = programs_of(runtime), Path(runtime.deployment.model).name
    with layouts.listening(runtime) as url, stacks() as found:
        body = {"prompt": [1, 2, 3], "max_tokens": 2, "model": model}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        for program in programs:
            jax.eval_shape(program.mapped(), *program.arguments)
    paths = [set().union(*parts) for parts in itertools.product(*found.values())]
    assert len(max(paths, key=len)) <= 14, max(paths, key=len)
