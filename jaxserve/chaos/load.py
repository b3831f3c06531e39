"""Clients that ask without a pause, over HTTP and gRPC, and know the right answers.

Used by `storm.py`.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import grpc
import msgspec

from jaxserve.bench.client import Client, Outcome, completion_body
from jaxserve.chaos.questions import Question
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.rpc import InferenceStub

HANG_SECONDS = 60.0
"""Time without an event after which a request counts as hanging."""
REQUEST_SECONDS = 300.0
RETRY_SECONDS = 0.25
CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long an attempt may take
    ("grpc.max_reconnect_backoff_ms", 500),
]

End = Literal["right", "wrong", "cancelled", "failed", "refused", "absent", "cut", "hung", ""]
"""failed: an error with a reason. refused: an error before anything began (429, 503; gRPC's
RESOURCE_EXHAUSTED), after which the request is sent again. absent: no process listened. cut: the
connection broke without an error. "": it runs."""
Face = Literal["http", "grpc"]


class Record(msgspec.Struct, kw_only=True):
    """One request. Times are seconds of `time.perf_counter`.

    Attributes:
      number: number of the request.
      face: the face that it was sent to.
      question: number of the question.
      wanted: when its client began to want an answer: earlier than `start` where attempts failed.
      start, finish: when it began and ended.
      arrivals: when tokens came.
      keyed: whether it has an `Idempotency-Key`, with which its client comes back.
      resumed: how often it came back.
      end: how it ended.
      why: the error, or the difference to the right answer.
    """

    number: int
    face: Face
    question: int
    wanted: float
    start: float
    finish: float = float("inf")
    arrivals: list[float] = []
    keyed: bool = False
    resumed: int = 0
    end: End = ""
    why: str = ""


class Load:
    """The clients.

    Args:
      asked, answers: questions and their right answers.
      http_address, grpc_address: addresses of the faces.
      seed: seed of the order of the questions and of cancellations.
      cancelled: part of the requests that are cancelled at a random moment.
      faces: faces that clients use in turn.
      most: requests after which no client asks any more.
    """

    def __init__(
        self,
        asked: Sequence[Question],
        answers: Sequence[Sequence[int]],
        http_address: str,
        grpc_address: str,
        seed: int,
        *,
        cancelled: float = 0.1,
        faces: Sequence[Face] = ("http", "grpc"),
        most: int = 10**9,
    ):
        self.records: list[Record] = []
        self._asked, self._answers = asked, answers
        self._http = Client(f"http://{http_address}", seconds=REQUEST_SECONDS)
        self._grpc_address = grpc_address
        self._random = random.Random(seed)
        self._cancelled, self._faces, self._most = cancelled, faces, most
        self._numbers = itertools.count()
        self.stopping = False
        self.on_request: Callable[[int], None] = lambda count: None
        """Called before each request with the number of requests so far."""

    async def run(self, clients: int) -> None:
        """Asks until `stopping`, or `most` requests; ends when all have their answers."""
        self.stopping = False
        faces = [self._faces[n % len(self._faces)] for n in range(clients)]
        # Every other client over HTTP sends keys.
        keyed = [face == "http" and n % 4 == 0 for n, face in enumerate(faces)]
        async with self._channel():
            await asyncio.gather(*map(self._client, faces, keyed))
        self._http.close()

    async def every_question(self) -> None:
        """Asks each question once over either face, one after the other."""
        async with self._channel():
            for question in range(len(self._asked)):
                for face in ("http", "grpc"):
                    await self._ask(face, question, cancel_after=None)

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[None]:
        async with grpc.aio.insecure_channel(self._grpc_address, CHANNEL) as channel:
            self._stub = InferenceStub(channel)
            yield

    async def _client(self, face: Face, keyed: bool) -> None:
        wanted = None
        while not self.stopping and len(self.records) < self._most:
            question = self._random.randrange(len(self._asked))
            cancel = None
            if self._random.random() < self._cancelled:
                cancel = self._random.randrange(self._asked[question].tokens)
            record = await self._ask(face, question, cancel, keyed, wanted)
            wanted = None
            if record.end in ("failed", "refused", "absent", "cut"):
                wanted = max([record.wanted, *record.arrivals])
                await asyncio.sleep(RETRY_SECONDS)

    async def _ask(
        self,
        face: Face,
        question: int,
        cancel_after: int | None,
        keyed: bool = False,
        wanted: float | None = None,
    ) -> Record:
        now = time.perf_counter()
        record = Record(
            number=next(self._numbers),
            face=face,
            question=question,
            wanted=now if wanted is None else wanted,
            start=now,
            keyed=keyed,
        )
        self.records.append(record)
        self.on_request(len(self.records))
        outcome = Outcome(start=now)
        asking = self._over_http if face == "http" else self._over_grpc
        task = asyncio.create_task(asking(record, outcome))
        seen, since = -1, now
        while not task.done():
            await asyncio.wait([task], timeout=0.02 if cancel_after is not None else 0.25)
            if (events := len(outcome.arrivals)) != seen:
                seen, since = events, time.perf_counter()
            hung = time.perf_counter() - since > HANG_SECONDS
            if hung or (cancel_after is not None and len(outcome.token_ids) > cancel_after):
                task.cancel()
                await asyncio.wait([task], timeout=HANG_SECONDS)
                record.end = "hung" if hung else "cancelled"
                break
        record.finish = time.perf_counter()
        record.arrivals = [outcome.start + arrival for arrival in outcome.arrivals]
        self._judge(record, outcome)
        return record

    def _judge(self, record: Record, outcome: Outcome) -> None:
        """Compares the tokens that came, also those of a request that was cancelled."""
        expected = list(self._answers[record.question])
        found = outcome.token_ids
        if found != expected[: len(found)]:
            record.end, record.why = "wrong", f"{found} instead of {expected}"
        elif record.end == "hung":
            record.why = f"{len(found)} of {len(expected)} tokens came"
        elif not record.end and outcome.error:
            record.end, record.why = how_it_failed(outcome.error), outcome.error
        elif not record.end:
            record.end = "right" if found == expected else "wrong"
            record.why = "" if found == expected else f"{len(found)} tokens of {len(expected)}"

    async def _over_http(self, record: Record, outcome: Outcome) -> None:
        question = self._asked[record.question]
        given = {"return_token_ids": True, "request_id": f"chaos-{record.number}"}
        encoded = completion_body(question.prompt, question.tokens, **given, **question.sampling)
        key = f"chaos-{record.number}" if record.keyed else ""
        while True:
            await self._http.complete(encoded, outcome, key)
            if not outcome.error:
                return
            if how_it_failed(outcome.error) == "cut":
                self._http.close()  # others that wait for use are as old
            elif how_it_failed(outcome.error) != "absent":
                return
            if not record.keyed:
                return
            await asyncio.sleep(RETRY_SECONDS)
            record.resumed += 1
            # Everything comes again, from the first token.
            outcome.token_ids.clear()
            outcome.text = outcome.error = ""

    async def _over_grpc(self, record: Record, outcome: Outcome) -> None:
        question = self._asked[record.question]
        request = pb.GenerateRequest(
            request_id=f"chaos-{record.number}",
            max_tokens=question.tokens,
            ignore_eos=True,
            **question.sampling,
        )
        if isinstance(question.prompt, str):
            request.text = question.prompt
        else:
            request.token_ids.ids.extend(question.prompt)
        call = self._stub.GenerateStream(request)
        try:
            async for message in call:
                if message.delta.token_ids:
                    outcome.arrivals.append(time.perf_counter() - outcome.start)
                    outcome.token_ids += message.delta.token_ids
        except grpc.aio.AioRpcError as error:
            outcome.error = f"gRPC {error.code().name}: {error.details()}"


def how_it_failed(error: str) -> End:
    """Tells errors that the server reported from connections that broke."""
    if error.startswith("ValueError: status 429") or "RESOURCE_EXHAUSTED" in error:
        return "refused"
    if error.startswith("ValueError: status 503"):
        return "refused"
    if error.startswith("ValueError"):
        return "failed"
    # gRPC's own words where nobody answered.
    broken = ("Socket closed", "Connection re", "recvmsg", "sendmsg", "GOAWAY")
    if error.startswith("ConnectionRefusedError") or "failed to connect" in error:
        return "absent"
    if error.startswith("gRPC UNAVAILABLE"):
        return "cut" if any(word in error for word in broken) else "refused"
    return "failed" if error.startswith("gRPC") else "cut"
