"""Puts a deployment under load, causes one fault after the other, and collects the results.

Called by `__main__.py`. `schedule.py` draws the faults, `load.py` asks and compares,
`figures.py` judges.
"""

import asyncio
import contextlib
import os
import re
import resource
import signal
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import msgspec

from jaxserve.bench.workers import BenchError
from jaxserve.chaos.deployment import Line, Process, RunningDeployment
from jaxserve.chaos.figures import Event, Found
from jaxserve.chaos.load import Face, Load
from jaxserve.chaos.proxy import Disturbance
from jaxserve.chaos.questions import Question
from jaxserve.chaos.resources import Census
from jaxserve.chaos.schedule import Fault, draw

TURN_SECONDS = 0.1
"""Period of a slow process, which is stopped for a part of each."""


@contextlib.contextmanager
def happening(fault: Fault, victim: Process, deployment: RunningDeployment) -> Iterator[None]:
    """Has the fault happen while the block runs."""
    pid = victim.pid
    match fault.kind:
        case "kill":
            os.kill(pid, signal.SIGKILL)
            yield
        case "end":
            os.kill(pid, signal.SIGTERM)
            yield
        case "stop":
            with _continued(pid):
                os.kill(pid, signal.SIGSTOP)
                yield
        case "slow":
            over = threading.Event()
            thread = threading.Thread(target=_slow, args=(pid, fault.size, over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
        case "drop" | "delay" | "corrupt":
            proxy = deployment.proxies[victim.dialled]
            proxy.disturb(cast(Disturbance, fault.how or fault.kind), fault.size)
            try:
                yield
            finally:
                proxy.disturb("")
        case "disk":
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
            try:
                yield
            finally:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        case _:
            raise ValueError(fault.kind)


@contextlib.contextmanager
def _continued(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _slow(pid: int, part: float, over: threading.Event) -> None:
    with contextlib.suppress(ProcessLookupError), _continued(pid):
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(part * TURN_SECONDS)
            os.kill(pid, signal.SIGCONT)
            over.wait((1 - part) * TURN_SECONDS)


START_SECONDS = 600.0
COME_BACK_SECONDS = 300.0
"""Time limit for the recovery from a fault; then its processes count as not come back."""
SETTLE_SECONDS = 2.0
"""Pause after the last request, before leftovers are counted."""
LOOK_SECONDS = 0.1
HEALTH_SECONDS = 2.0

_LEVEL = re.compile(r" (WARNING|ERROR|CRITICAL) ")
_TOUCHED = re.compile(r"chaos-(\d+)")


class StormPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Load and faults of a storm: the options of the same names.

    Attributes:
      seed: seed of everything that is drawn.
      faults: kinds of faults.
      together: number of processes that each fault befalls at the same moment.
      only: roles of the victims; empty: all roles.
      minutes: time after which no further fault begins.
      kills: greatest number of faults.
      clients: clients that ask at the same time.
      calm: seconds of undisturbed load at the beginning.
      pause: undisturbed seconds before each fault, beside those that are drawn.
      requests: requests after which the load ends, without any fault; None: a storm of faults.
      resets: resets of all prefix caches, evenly spread over the requests.
      cancelled: part of the requests that clients cancel.
      faces: faces that clients use in turn.
    """

    seed: int
    faults: Sequence[str]
    together: int
    only: Sequence[str]
    minutes: float
    kills: int
    clients: int
    calm: float
    pause: float
    requests: int | None
    resets: int
    cancelled: float
    faces: Sequence[Face]


class Storm:
    """One run against a deployment whose processes are all ready.

    Args:
      deployment: started with `--apart` where links are to be disturbed.
      plan: load and faults.
      asked, answers: questions and their right answers.
      admin: address of the router's admin port, where prefix caches are reset.
    """

    def __init__(
        self,
        deployment: RunningDeployment,
        plan: StormPlan,
        asked: Sequence[Question],
        answers: Sequence[Sequence[int]],
        admin: str = "",
    ):
        self._deployment, self._plan, self._admin = deployment, plan, admin
        addresses = deployment.addresses()
        self._http = addresses["http"]
        self._load = Load(
            asked,
            answers,
            self._http,
            addresses["grpc"],
            plan.seed,
            cancelled=plan.cancelled,
            faces=plan.faces,
            most=plan.requests or 10**9,
        )
        self.events: list[Event] = []
        self._late: list[str] = []
        self._faces = 0
        self._census = Census(deployment.all)
        self._over = asyncio.Event()

    async def run(self) -> Found:
        """Runs the storm, from the first question to the count of leftovers. SIGINT and SIGTERM
        end the faults; the findings up to then are kept."""
        await self._load.every_question()
        if bad := [record for record in self._load.records if record.end != "right"]:
            raise BenchError(
                f"before any fault, {len(bad)} of {len(self._load.records)} answers are not those "
                f"of a colocated engine; the first: {bad[0].end}: {bad[0].why}"
            )
        begin = time.perf_counter()
        async with self._loaded():
            await asyncio.sleep(self._plan.calm)
            calm = begin, time.perf_counter()
        await asyncio.sleep(SETTLE_SECONDS)
        before = self._census.now()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._over.set)
        async with self._loaded():
            try:
                await self._faults()
            except BenchError as error:
                self._late.append(f"the storm ended early: {error}")
        await asyncio.sleep(SETTLE_SECONDS)
        load = (_get(self._http, "/pipeline") or {"load": {}})["load"]
        return Found(
            events=self.events,
            records=self._load.records,
            calm=calm,
            before=before,
            after=self._census.now(),
            lives=self._census.lives,
            loads=self._census.loads,
            left=await asyncio.to_thread(what_is_left, self._http),
            late=self._late,
            stored=int(load.get("host_pages", {}).get("storage_hits", 0)),
        )

    async def judge(self) -> Found:
        """Asks `Plan.requests` requests, resets the prefix caches meanwhile, and breaks nothing.
        SIGINT and SIGTERM end it early; the findings up to then are kept."""

        def stop() -> None:
            self._load.stopping = True

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        places = {
            (number + 1) * (self._plan.requests or 0) // (self._plan.resets + 1)
            for number in range(self._plan.resets)
        }
        resets: list[asyncio.Task[None]] = []

        def asked(count: int) -> None:
            if count in places:
                reset = asyncio.to_thread(_post, self._admin, "/reset_prefix_cache")
                resets.append(asyncio.create_task(reset))

        self._load.on_request = asked
        begin = time.perf_counter()
        await self._load.run(self._plan.clients)
        calm = begin, time.perf_counter()
        failed = [one for one in await asyncio.gather(*resets, return_exceptions=True) if one]
        self._late += [f"a reset of the prefix caches: {error}" for error in failed]
        await asyncio.sleep(SETTLE_SECONDS)
        if found := await asyncio.to_thread(problems, self._http):
            self._late.append(f"at the end: {found}")
        load = (_get(self._http, "/pipeline") or {"load": {}})["load"]
        return Found(
            events=[],
            records=self._load.records,
            calm=calm,
            left=await asyncio.to_thread(what_is_left, self._http),
            late=self._late,
            resets=len(resets) - len(failed),
            handed=sum(worker["pages_tokens"] for worker in load.get("workers", [])),
        )

    @contextlib.asynccontextmanager
    async def _loaded(self) -> AsyncIterator[None]:
        """Has clients ask during the block. When the block ends, waits for their answers."""
        clients = asyncio.create_task(self._load.run(self._plan.clients))
        try:
            yield
        finally:
            self._load.stopping = True
            await clients

    async def _faults(self) -> None:
        begin = time.perf_counter()
        roles = self._deployment.roles()
        self._faces = len(roles.get("face", []))
        victims = {
            role: len(found) for role, found in roles.items() if role in (self._plan.only or roles)
        }
        linked = [
            role for role, found in roles.items() if found[0].dialled in self._deployment.proxies
        ]
        plan = self._plan
        for fault in draw(plan.seed, plan.faults, victims, linked, plan.together):
            over = time.perf_counter() - begin > 60.0 * plan.minutes or self._over.is_set()
            if over or fault.number >= plan.kills:
                return
            await asyncio.sleep(fault.pause + plan.pause)
            # All processes are ready: an ffn worker has its connections to all domains.
            await asyncio.to_thread(self._census.take)
            there = self._deployment.roles()
            # A process that did not come back cannot be a victim.
            if all(index < len(there.get(role, [])) for role, index in fault.victims):
                await self._one(fault, [there[role][index] for role, index in fault.victims])

    async def _one(self, fault: Fault, victims: Sequence[Process]) -> None:
        names = " and ".join(victim.name for victim in victims)
        event = Event(
            kind=fault.kind,
            roles=tuple(role for role, _ in fault.victims),
            seconds=fault.seconds,
            how=fault.how,
            size=fault.size,
            name=names,
            at=time.perf_counter(),
        )
        self.events.append(event)
        since = time.monotonic()
        watching = asyncio.create_task(asyncio.to_thread(self._watch_health, event))
        # Counted before the fault: the launcher may start a victim again at once.
        starts = [
            victim.starts + (fault.kind in ("kill", "end") and victim.role != "face")
            for victim in victims
        ]
        with contextlib.ExitStack() as faults:
            for victim in victims:
                faults.enter_context(happening(fault, victim, self._deployment))
            await asyncio.sleep(fault.seconds)
        deadline = time.monotonic() + COME_BACK_SECONDS
        while not (
            self._deployment.whole()
            and len(self._deployment.faces()) == self._faces
            and all(victim.starts >= count for victim, count in zip(victims, starts, strict=True))
            and await asyncio.to_thread(problems, self._http) == []
        ):
            if time.monotonic() > deadline:
                self._late.append(f"{names} after {fault.kind}: {self._absent()}")
                break
            if not self._deployment.alive:
                raise BenchError(f"the deployment has ended\n{self._deployment.last_words()}")
            await asyncio.sleep(LOOK_SECONDS)
        event.until = time.perf_counter()
        await watching
        self._read_lines(event, victims, since)
        seen = "nobody" if event.noticed is None else f"{event.by} after {event.noticed:.2f} s"
        whole = event.until - event.at - event.seconds
        what = " ".join([event.kind, *event.how.split(), names])
        clock = time.strftime("%H:%M:%S")
        print(f"{clock} {what}: noticed by {seen}, whole {whole:.1f} s after its end", flush=True)

    def _absent(self) -> str:
        absent = [each.name for each in self._deployment.processes.values() if not each.whole]
        return ", ".join(absent) or f"{problems(self._http)}"

    def _watch_health(self, event: Event) -> None:
        """Asks /health until it names a problem, the fault is over, or the time for it is up."""
        while not event.until and time.perf_counter() - event.at < HEALTH_SECONDS * 5:
            if problems(self._http):
                event.noticed, event.by = time.perf_counter() - event.at, "/health"
                return
            time.sleep(LOOK_SECONDS)

    def _read_lines(self, event: Event, victims: Sequence[Process], since: float) -> None:
        """Reads from the logs which process other than the victims first reported the fault, and
        which requests lost their worker."""
        lines = [line for line in list(self._deployment.lines) if line.at >= since]
        told = next((line for line in lines if self._tells(line, victims)), None)
        if told is not None and (event.noticed is None or told.at - since < event.noticed):
            event.noticed, event.by = told.at - since, self._who(told)
        for line in lines:
            if "go on elsewhere" in line.text or "is suspect" in line.text:
                event.touched += [int(number) for number in _TOUCHED.findall(line.text)]

    def _tells(self, line: Line, victims: Sequence[Process]) -> bool:
        if line.process < 0:
            # Only the service manager can report the death of a router.
            routers = [victim for victim in victims if victim.role == "router"]
            return any(f"process {router.number} " in line.text for router in routers)
        others = line.process not in {victim.number for victim in victims}
        return others and bool(_LEVEL.search(line.text))

    def _who(self, line: Line) -> str:
        if line.process < 0:
            return "the service manager"
        return f"log of {self._deployment.processes[line.process].role}"


def problems(http: str) -> list[str] | None:
    """Returns the problems that /health reports; None: no answer."""
    found = _get(http, "/health")
    return None if found is None else found.get("problems", [])


def what_is_left(http: str) -> str:
    """Names the counts that are not zero although no client asks any more."""
    load = (_get(http, "/pipeline") or {"load": {"running": "unknown"}})["load"]
    left = {name: load.get(name) for name in ("running", "waiting", "prompts", "held")}
    for worker in load.get("workers", []):
        left[f"routed_{worker['role']}_{worker['name']}"] = worker["routed"]
    return " ".join(f"{name}={value}" for name, value in left.items() if value)


def _post(http: str, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{http}{path}", method="POST", headers=headers)
    with urllib.request.urlopen(request, timeout=HEALTH_SECONDS) as answer:
        answer.read()


def _get(http: str, path: str) -> Any:
    with contextlib.suppress(OSError, ValueError):
        with urllib.request.urlopen(f"http://{http}{path}", timeout=HEALTH_SECONDS) as answer:
            return msgspec.json.decode(answer.read())
    return None
