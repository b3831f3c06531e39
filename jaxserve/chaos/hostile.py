"""`python -m jaxserve.chaos.hostile --http ADDRESS --grpc ADDRESS --pid PID`: hostile requests.

Sends grammars, schemas, templates and bodies that are made to end or to stall a server, over both
faces, to a server that is running on this host without keys. `server.request_templates` should be
true. Meanwhile ordinary requests go on. Exit code 0: every request was answered in time and not
with an error of the server, and afterwards the server's processes have no descriptor, thread or
child process more than before.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import msgspec

from jaxserve.bench.report import Measure, Part, count, percentile, publish
from jaxserve.chaos import hostile_requests
from jaxserve.config.command_line import add_options
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.rpc import InferenceStub

AT_ONCE = 8
"""Hostile requests."""
ANSWER_SECONDS = 45.0
"""The longest time to an answer."""
SETTLE_SECONDS = 20.0
MAX_TOKENS = 8
HANG_UP = -1
"""Instead of a status: the connection was closed without an answer."""
GENERATE = "/jaxserve.v1.Inference/Generate"
SERVER_ERRORS = ("UNKNOWN", "INTERNAL", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED")
"""Codes of gRPC that no answer may have."""

Send = Callable[[], Awaitable[int | str]]
"""Sends a request and returns its status."""


# --------------------------------------------------------------------------------- clients


async def over_http(address: str, request: bytes, whole: bool = True) -> int:
    """Sends bytes; returns the status.

    Args:
      address: host:port.
      request: bytes to send unchanged.
      whole: False: the request may be incomplete, so hang up rather than wait for the answer.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(request)
        if not whole:
            writer.write_eof()
        line = await reader.readline()
        while await reader.read(2**20):
            pass
        return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else HANG_UP
    except OSError:  # such as ENOTCONN: the server has hung up first
        return HANG_UP
    finally:
        writer.close()


def http_request(path: str, body: str) -> bytes:
    """Encodes a request whose connection ends with its answer."""
    data = body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def over_grpc(call: Awaitable[Any]) -> str:
    """Returns the name of the code of a call."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def http_kinds(address: str, rng: Random) -> dict[str, Callable[[], Send]]:
    """Kind → function that makes a request over HTTP."""

    def completion(form: str) -> Send:
        body = f'{{"prompt":"hi","max_tokens":{MAX_TOKENS},"structured_outputs":{form}}}'
        return lambda: over_http(address, http_request("/v1/completions", body))

    def grammar() -> Send:
        name, value = hostile_requests.grammar(rng)
        return completion(json.dumps({name: value}))

    def chat() -> Send:
        body = json.dumps({"max_tokens": MAX_TOKENS, **hostile_requests.chat(rng)})
        return lambda: over_http(address, http_request("/v1/chat/completions", body))

    def body() -> Send:
        request = hostile_requests.body(rng)
        return lambda: over_http(address, request, whole=False)

    return {
        "http grammars": grammar,
        "http schemas": lambda: completion('{"json":' + hostile_requests.schema(rng) + "}"),
        "http templates": chat,
        "http bodies": body,
    }


def grpc_kinds(channel: grpc.aio.Channel, rng: Random) -> dict[str, Callable[[], Send]]:
    """Kind → function that makes a request over gRPC, which has no templates."""
    stub = InferenceStub(channel)
    raw: Any = channel.unary_unary(GENERATE)

    def constrained(**form: Any) -> Send:
        asked = pb.StructuredOutputs(**form)
        request = pb.GenerateRequest(text="hi", max_tokens=MAX_TOKENS, structured_outputs=asked)
        return lambda: over_grpc(stub.Generate(request, timeout=2 * ANSWER_SECONDS))

    def grammar() -> Send:
        name, value = hostile_requests.grammar(rng)
        return constrained(**{name: pb.Choices(texts=value) if name == "choice" else value})

    def body() -> Send:
        request = hostile_requests.message(rng)
        return lambda: over_grpc(raw(request, timeout=2 * ANSWER_SECONDS))

    return {
        "grpc grammars": grammar,
        "grpc schemas": lambda: constrained(json=hostile_requests.schema(rng)),
        "grpc bodies": body,
    }


def wrong(kind: str, status: int | str) -> bool:
    """True if the server must not answer with this status."""
    if isinstance(status, int):
        return status >= 500 or (status == HANG_UP and kind != "http bodies")
    return status in SERVER_ERRORS


# ---------------------------------------------------------------------------------- the run


class Held(msgspec.Struct, frozen=True):
    """Resources of a process and its descendants."""

    files: int = 0
    threads: int = 0
    processes: int = 0

    @classmethod
    def of(cls, pid: int) -> "Held":
        """Counts now; a process that ends meanwhile holds nothing."""
        folder = Path("/proc", f"{pid}")
        try:
            files = len(list((folder / "fd").iterdir()))
            tasks = list((folder / "task").iterdir())
        except OSError:
            return cls()
        children = []
        for task in tasks:
            with contextlib.suppress(OSError):  # the thread has ended since
                children += (task / "children").read_text().split()
        below = [cls.of(int(child)) for child in children]
        return cls(
            files + sum(one.files for one in below),
            len(tasks) + sum(one.threads for one in below),
            1 + sum(one.processes for one in below),
        )

    def within(self, other: "Held") -> bool:
        """True if no count is more than that of `other`."""
        own, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return all(one <= most for one, most in zip(own, others, strict=True))


class Run:
    """One run against a server.

    Attributes:
      statuses: kind → status → number of answers.
      longest: kind → seconds of the slowest answer.
      failed: descriptions of wrong answers.
      waits: seconds that each ordinary request took.
    """

    def __init__(self, options: argparse.Namespace):
        self.statuses: dict[str, Counter[int | str]] = {}
        self.longest: dict[str, float] = {}
        self.failed: list[str] = []
        self.waits: list[float] = []
        self._options = options

    async def measure(self) -> Part:
        """Sends everything and builds the report."""
        warm_up, seed = self._options.warm_up, self._options.seed
        await self._every_process()
        await self._send(warm_up, Random(f"warm-up {seed}"))
        before = await self._settled(None)
        self.statuses, self.longest, self.waits = {}, {}, []
        bystander = asyncio.create_task(self._bystander())
        await self._send(self._options.number, Random(seed))
        bystander.cancel()
        await asyncio.wait([bystander])
        if not bystander.cancelled():
            self.failed.append(f"ordinary requests: {bystander.exception()!r}")
        after = await self._settled(before)
        return self._part(before, after)

    async def _send(self, number: int, rng: Random) -> None:
        async with grpc.aio.insecure_channel(self._options.grpc) as channel:
            kinds = http_kinds(self._options.http, rng) | grpc_kinds(channel, rng)
            for kind, make in kinds.items():
                limit = asyncio.Semaphore(AT_ONCE)
                # Made in order, so that a seed makes the same requests however fast they go.
                made = [make() for _ in range(number)]
                await asyncio.gather(*(self._one(kind, send, limit) for send in made))

    async def _one(self, kind: str, send: Send, limit: asyncio.Semaphore) -> None:
        async with limit:
            start = time.monotonic()
            try:
                async with asyncio.timeout(2 * ANSWER_SECONDS):
                    status = await send()
            except TimeoutError:
                status = "no answer"
                self.failed.append(f"{kind}: no answer in {2 * ANSWER_SECONDS:g} s")
            seconds = time.monotonic() - start
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)
        self.statuses.setdefault(kind, Counter())[status] += 1
        if wrong(kind, status):
            self.failed.append(f"{kind}: {status}")

    async def _ordinary(self, path: str = "/v1/completions", **fields: Any) -> None:
        start = time.monotonic()
        body = json.dumps({"max_tokens": MAX_TOKENS, **fields})
        status = await over_http(self._options.http, http_request(path, body))
        if status != 200:
            raise RuntimeError(f"an ordinary request has status {status}")
        self.waits.append(time.monotonic() - start)

    async def _bystander(self) -> None:
        while True:
            await self._ordinary(prompt="hi")
            await asyncio.sleep(0.05)

    async def _every_process(self) -> None:
        """Makes the server start its processes for templates and grammars again, if they ended."""
        await self._ordinary("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        new = "".join(random.choices("abcdefgh", k=20))  # not one that is kept
        await self._ordinary(prompt="hi", structured_outputs={"regex": f"({new}){{1,9}}"})

    async def _settled(self, most: Held | None) -> Held:
        """Counts the server's resources once they no longer change, or are within `most`."""
        await self._every_process()
        deadline = time.monotonic() + SETTLE_SECONDS
        held = Held.of(self._options.pid)
        while time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            last, held = held, Held.of(self._options.pid)
            if held == last if most is None else held.within(most):
                break
        return held

    def _part(self, before: Held, after: Held) -> Part:
        measures = []
        for kind, statuses in self.statuses.items():
            counts = ", ".join(f"{number} × {status}" for status, number in statuses.most_common())
            name = f"{kind} ({counts}): longest"
            measures.append(Measure(name, self.longest[kind], "s", ANSWER_SECONDS))
        measures.append(Measure("wrong answers", len(self.failed), "", 0))
        measures.append(
            Measure(f"{len(self.waits)} ordinary requests: longest", max(self.waits), "s")
        )
        measures.append(Measure("ordinary requests: p50", percentile(self.waits, 50), "s"))
        for name, earlier in msgspec.structs.asdict(before).items():
            measures.append(Measure(f"{name} ({earlier})", getattr(after, name), "", earlier))
        return Part("hostile", "hostile requests", measures, sorted(set(self.failed))[:20])


def main(arguments: Sequence[str] | None = None) -> int:
    """Sends hostile requests and prints the results; returns the exit code."""
    made = argparse.ArgumentParser(
        prog="python -m jaxserve.chaos.hostile",
        description="Hostile requests to a server on this host.",
    )
    add_options(made, Path(__file__).with_suffix(".yaml"), {"count": count})
    options = made.parse_args(arguments)
    return publish("hostile", _measured(Run(options)), options)


def _measured(run: Run) -> Iterator[Part]:
    yield asyncio.run(run.measure())


if __name__ == "__main__":
    sys.exit(main())
