"""The scheduler against a pretended device: any arrivals, cancels and orders of completion.

The device has no model, only memory: pages that hold what was written to them, and the last token
of every slot. A step writes its tokens, reads back everything it would attend to, and "samples" a
hash of that. Reading another tenant's tokens, or tokens at other positions, fails at once, and any
other token that is not the sequence's own gives another hash; so pages that are stale, freed too
early or shared where they should not be cannot hide. The expected tokens come from a sequential
oracle that knows nothing of pages or steps.
"""

import itertools
import zlib
from collections import Counter, deque
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.engine.stepper import PREFILL_PARAMS
from jaxserve.roles.layout import NO_TOKEN
from jaxserve.roles.step_arrays import FROM_DEVICE, REJECTED
from jaxserve.roles.written_steps import SequenceRow
from tests.jaxserve.engine.step_plans import FullScheduler
from tests.jaxserve.full_steps import FullStep

VOCABULARY = 9
EOS_IDS = frozenset({0})
NOT_SAMPLED = 10**9  # what the device returns for slots that sample nothing


def next_token(seed: int, tokens: list[int]) -> int:
    """The pretended model: depends on the seed and on every token so far, in order."""
    return zlib.crc32(repr((seed, tokens)).encode()) % VOCABULARY


def expected_output(request: Request, max_length: int) -> tuple[list[int], str, int | None]:
    """Generated tokens, finish reason and stop id of a request that runs alone."""
    tokens, params = list(request.prompt), request.params
    while True:
        generated = len(tokens) - len(request.prompt)
        if generated == params.max_tokens or len(tokens) == max_length:
            return tokens[len(request.prompt) :], "length", None
        token = next_token(request.seed, tokens)
        ends = token in params.stop_token_ids or (token in EOS_IDS and not params.ignore_eos)
        if ends and (generated >= params.min_tokens or params.grammar is not None):
            return tokens[len(request.prompt) :], "stop", token
        tokens.append(token)


class AnythingGoes:
    """A grammar whose mask says how many tokens it knows."""

    finished = False

    def __init__(self):
        self.tokens = []

    def mask(self):
        return np.asarray([1 + len(self.tokens)], np.uint32)

    def accept(self, token_id):
        self.tokens.append(token_id)


class Device:
    """Runs steps: one memory for all lanes, which run in any order against each other."""

    def __init__(self, limits: SchedulerSizes, requests: dict[str, Request]):
        self.requests = requests
        self.page_size = limits.page_size
        self.slots, self.window = limits.slots, limits.window
        self.rings = [{} for _ in range(limits.groups)]  # as `pages`, for layers with a window
        self.recurrent = limits.recurrent
        self.states = [{} for _ in range(limits.groups)]  # page -> salt, tokens fed, and drafts
        self.pages = [{} for _ in range(limits.groups)]  # (page, offset) -> (salt, position, token)
        self.last_token = {}  # (lane, group, slot) -> token
        self.length = {}  # (lane, group, slot) -> cached tokens that hold
        self.drafts = {}  # (lane, group, slot) -> what may follow its last token
        self.history = {}  # (lane, group, slot) -> position -> token, to look drafts up in
        self.accepted = 0
        self.counted = {}  # (lane, group, slot) -> positions whose tokens penalties count

    def run(self, plan: FullStep) -> list[list[int]] | list[list[list[int]]]:
        """Returns `sampled[group][slot]`, of a step with drafts `sampled[group][slot][place]`."""
        most, self.rings_of = plan.bucket.drafts, plan.rings
        sampled = [[[NOT_SAMPLED] * (1 + most) for _ in range(self.slots)] for _ in plan.groups]
        for at, start, tokens in plan.plan.said:
            said = enumerate(np.frombuffer(tokens, np.int32).tolist(), start)
            self.history.setdefault((plan.lane, *divmod(at, self.slots)), {}).update(said)
        self._exchange(plan)
        for group, rows in enumerate(plan.groups):
            for row in rows:
                home = (plan.lane, group, row.slot)
                row = self._resolved(home, row)
                self._write(group, row)
                self._count(home, row)
                tokens = self._attend(group, row)
                if self.window:
                    self._slide(group, row, plan.rings[group, row.slot].tolist())
                elif self.recurrent:
                    self._replace(group, row, tokens, plan.rings[group, row.slot])
                self.length[home] = len(tokens)
                if row.sample:
                    run = self._verify(row, tokens)
                    sampled[group][row.slot] = run + [REJECTED] * (1 + most - len(run))
                    self.last_token[home] = run[-1]
                    self.length[home] = len(tokens) - row.drafts + len(run) - 1
                    counted = self.counted.get(home, [])
                    self.counted[home] = [at for at in counted if at < self.length[home]]
                    self.drafts[home] = _guesses(row.seed, tokens[: self.length[home]] + run[-1:])
                    tokens = tokens[: self.length[home]] + run[-1:]
                if plan.plan.proposes:
                    self._look_up(home, row, tokens)
        return sampled if most else [[run[0] for run in runs] for runs in sampled]

    def _exchange(self, plan: FullStep) -> None:
        """Writes what groups feed of one prompt, and copies these pages to the other groups."""
        size = self.page_size
        for group, row in plan.spread:
            self._write(group, row)
            pages = range((row.kv_length - len(row.token_ids)) // size, -(-row.kv_length // size))
            for (other, same), at in itertools.product(plan.spread, pages):
                moves = [(self.pages, row.page_ids[at], same.page_ids[at])]
                if self.window:
                    rings = plan.rings[group, row.slot, at], plan.rings[other, same.slot, at]
                    moves.append((self.rings, *map(int, rings)))
                for cells, page, copy in moves:
                    for offset in range(size):
                        cells[other][copy, offset] = cells[group].get((page, offset))

    def _look_up(self, home: tuple[int, int, int], row: SequenceRow, tokens: list[int]) -> None:
        """Adds what the step fed and sampled, and finds everything that the sequence has said."""
        history = self.history.setdefault(home, {})
        for position in range(row.kv_length - len(row.token_ids), len(tokens)):
            history[position] = tokens[position]
        assert [history.get(position) for position in range(len(tokens))] == tokens

    def _resolved(self, home: tuple[int, int, int], row: SequenceRow) -> SequenceRow:
        """With what only the device knows."""
        known = [self.last_token.get(home), *self.drafts.get(home, [0] * 9)]
        tokens = [
            known[place] if token == FROM_DEVICE else token
            for place, token in enumerate(row.token_ids)
        ]
        length = row.kv_length
        if row.length_on_device:
            length = self.length[home] + len(tokens)
            assert row.kv_length <= length
        changed = {"token_ids": tokens, "kv_length": length}
        return SequenceRow(
            **({name: getattr(row, name) for name in row.__struct_fields__} | changed)
        )

    def _verify(self, row: SequenceRow, tokens: list[int]) -> list[int]:
        """The sampled tokens, up to the first one that is not the draft in its place."""
        run: list[int] = []
        for place in range(len(tokens) - row.drafts, len(tokens) + 1):
            run.append(next_token(row.seed, tokens[:place]))
            if place == len(tokens) or tokens[place] != run[-1]:
                return run
            self.accepted += 1
        raise AssertionError

    def break_off(self, plan: FullStep) -> None:
        """A step that is lost on its way: what it would have written is anything."""
        for group, rows in enumerate(plan.groups):
            for row in rows:
                home = (plan.lane, group, row.slot)
                self.last_token[home] = NOT_SAMPLED
                self.counted[home] = [NOT_SAMPLED]
                start, end = plan.span(group, row)
                said = self.history.get(home, {}).items()
                self.history[home] = {place: token for place, token in said if place < start}
                if row.length_on_device:
                    start = max(start, self.length[home])
                    end = len(row.page_ids) * self.page_size
                self.length[home], self.drafts[home] = -(10**6), [NOT_SAMPLED] * 9
                if self.recurrent:
                    last = start + len(row.token_ids) - row.drafts - 1
                    written = plan.rings[group, row.slot, last // self.page_size]
                    self.states[group][int(written)] = None
                for position in range(start, end):
                    cell = self._cell(row, position)
                    self.pages[group][cell] = (self._salt(row), position, NOT_SAMPLED)
                    if self.window and position < plan.span(group, row)[1]:
                        page = plan.rings[group, row.slot, position // self.page_size]
                        at = page, position % self.page_size
                        self.rings[group][at] = (self._salt(row), position, NOT_SAMPLED)

    def _salt(self, row: SequenceRow) -> str:
        return self.requests[str(row.seed)].params.cache_salt

    def _cell(self, row: SequenceRow, position: int) -> tuple[int, int]:
        return row.page_ids[position // self.page_size], position % self.page_size

    def _write(self, group: int, row: SequenceRow) -> None:
        start = row.kv_length - len(row.token_ids)
        for position, token in enumerate(row.token_ids, start):
            cell, entry = self._cell(row, position), (self._salt(row), position, token)
            self.pages[group][cell] = entry
            if self.window:
                ring = int(self.rings_of[group, row.slot, position // self.page_size])
                self.rings[group][ring, cell[1]] = entry

    def _slide(self, group: int, row: SequenceRow, page_ids: list[int]) -> None:
        """Reads what every token of the row sees in the ring."""
        start, rings = row.kv_length - len(row.token_ids), self.rings[group]
        cells = [(page_ids[p // self.page_size], p % self.page_size) for p in range(row.kv_length)]
        for position in range(max(start + 1 - self.window, 0), row.kv_length):
            found = rings.get(cells[position])
            own = self.pages[group][self._cell(row, position)]
            assert found == own, f"{row} finds {found} in its ring at {position}, not {own}"

    def _replace(self, group: int, row: SequenceRow, tokens: list[int], pages: np.ndarray) -> None:
        """Feeds tokens to the state, which has seen those before them but the last drafts."""
        start, size, states = row.kv_length - len(row.token_ids), self.page_size, self.states[group]
        salt, fed, beside = states.get(int(pages[max(start - 1, 0) // size])) or ("none", [], [])
        same = (salt, (fed + beside)[:start]) == (self._salt(row), tokens[:start])
        assert not start or (same and len(fed) <= start), f"{row} finds {salt}, {fed}, {beside}"
        end = row.kv_length - row.drafts
        states[int(pages[(end - 1) // size])] = self._salt(row), tokens[:end], tokens[end:]

    def _count(self, home: tuple[int, int, int], row: SequenceRow) -> None:
        """Every generated token that is in the cache was counted once."""
        if row.rules is None or row.rules.counts_from is None:
            return
        if row.rules.fresh:
            self.counted[home] = []
        start = max(row.rules.counts_from, row.kv_length - len(row.token_ids))
        self.counted[home] += range(start, row.kv_length)
        assert self.counted[home] == list(range(row.rules.counts_from, row.kv_length))

    def _attend(self, group: int, row: SequenceRow) -> list[int]:
        entries = [self.pages[group].get(self._cell(row, p)) for p in range(row.kv_length)]
        for position, entry in enumerate(entries):
            assert entry is not None, f"{row} attends to nothing at position {position}"
            assert entry[:2] == (self._salt(row), position), f"{row} finds {entry} at {position}"
        return [token for _, _, token in entries]


def _guesses(seed: int, tokens: list[int]) -> list[int]:
    """Drafts, most of which hold."""
    guesses: list[int] = []
    for _ in range(9):
        token = next_token(seed, [*tokens, *guesses])
        wrong = zlib.crc32(repr(("wrong", seed, tokens, guesses)).encode()) % 4 == 0
        guesses.append((token + wrong) % VOCABULARY)
    return guesses


def least_ring_pages(limits: SchedulerSizes) -> int:
    """Pages of a deployment's rings (`kv_cache.ring_pages`), those for holds included."""
    size = limits.page_size
    ring = -(-(limits.window + 2 * limits.drafts) // size) + 1
    ring += max(1, limits.prefix_cache * -(-(limits.window - 1) // size))
    chunks = 2 * limits.token_budget * (limits.groups if limits.spread else 1) // size
    return min(limits.pages, limits.lanes * (limits.slots * ring + chunks))


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what callers, the engine and the device may do at any time."""

    drafts = st.just(0)

    def __init__(self):
        super().__init__()
        self.requests: dict[str, Request] = {}  # every request ever added; the id is its seed
        self.streams: dict[str, list[int]] = {}
        self.expected: dict[str, tuple[list[int], str, int | None]] = {}
        self.ends: dict[str, TokenOutput] = {}
        self.held: dict[str, tuple[int, list[int]]] = {}  # by request: DP group and page ids
        self.invalid: set[str] = set()  # requests whose logits were no numbers, once each
        self.steps = 0

    @initialize(data=st.data())
    def start(self, data):
        slots = data.draw(st.sampled_from([3, 2, 1]), "slots")
        page_size = data.draw(st.sampled_from([2, 1, 4]), "page_size")
        max_length = data.draw(st.sampled_from([20, 13, 5, 2]), "max_length")
        longest = -(-max_length // page_size)
        drafts = data.draw(self.drafts, "drafts")
        token_budget = slots * (1 + drafts) + data.draw(st.integers(0, 5), "budget beyond slots")
        window = data.draw(st.sampled_from([0, 1, 3, 8, "states"]), "window")
        limits = SchedulerSizes(
            groups=data.draw(st.integers(1, 3), "groups"),
            lanes=data.draw(st.integers(1, 4), "lanes"),
            slots=slots,
            pages=longest
            + data.draw(st.sampled_from([*range(7), 80]), "pages beyond one sequence"),
            page_size=page_size,
            max_length=max_length,
            token_budget=token_budget,
            token_buckets=sorted({1, -(-token_budget // 2), token_budget}),
            page_buckets=sorted({-(-longest // 3), longest}),
            prefill_tokens=data.draw(st.sampled_from([0, 1, 3]), "prefill tokens"),
            step_seconds=data.draw(st.sampled_from([0.0, 4.0]), "seconds of a step"),
            prefix_cache=data.draw(st.booleans(), "prefix cache"),
            side_by_side=data.draw(st.booleans(), "side by side"),
            drafts=drafts,
            max_waiting=1000,
        )
        spread = limits.groups > 1 and window != "states" and data.draw(st.booleans(), "spread")
        limits = msgspec.structs.replace(limits, spread=spread)
        if window == "states":
            pages = slots * limits.lanes * (3 if limits.prefix_cache else 1)
            limits = msgspec.structs.replace(limits, ring_pages=pages)
        elif 0 < window < max_length:
            limits = msgspec.structs.replace(limits, window=window)
            limits = msgspec.structs.replace(limits, ring_pages=least_ring_pages(limits))
        self.limits = limits
        self.scheduler = FullScheduler(**msgspec.structs.asdict(limits))
        if drafts:
            dice = data.draw(st.randoms(use_true_random=False), "dice")
            often = data.draw(st.sampled_from([1.0, 0.5]), "how often there are drafts")
            policy = self.scheduler.draft_policy
            policy.choose = lambda *_, **__: drafts if dice.random() < often else 0
        self.device = Device(self.limits, self.requests)
        self.enqueued = [deque() for _ in range(self.limits.lanes)]  # steps the device has not run
        self.ran = [deque() for _ in range(self.limits.lanes)]  # steps and what they sampled
        self.allowed_rounds = 20

    # What callers do.

    @rule(
        count=st.integers(1, 8),
        random=st.randoms(use_true_random=False),
        longest_prompt=st.sampled_from([1, 4, 19]),
    )
    def add(self, count, random, longest_prompt):
        for _ in range(count):
            self.add_one(random, longest_prompt)

    def add_one(self, random: Random, longest_prompt: int):
        seed = len(self.requests)
        length = random.randint(1, min(longest_prompt, self.limits.max_length - 1))
        max_tokens = random.randint(1, 20)
        common = random.randint(0, length)  # so many tokens as others have
        prompt = [5] * common + [random.randrange(VOCABULARY) for _ in range(length - common)]
        request = Request(
            request_id=str(seed),
            prompt=prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=random.random() < 0.7,
                stop_token_ids=random.choice([(), (), (3,), (4, 5)]),
                min_tokens=min(random.choice([0, 0, 3]), max_tokens),
                priority=random.choice([0, 0, 0, -1, 2]),
                cache_salt=random.choice(["", "", "tenant"]),
                grammar=random.choice([None, None, AnythingGoes()]),
                presence_penalty=random.choice([0.0, 0.0, 1.0]),
            ),
            eos_token_ids=EOS_IDS,
            seed=seed,
            arrival=float(3 * seed),
            deadline=random.choice([None, None, 3.0 * seed + 4.0]),
        )
        pages = length // self.limits.page_size
        holding = [r for r, one in self.requests.items() if one.hold and self.holds(r)]
        room = len(holding) < self.limits.slots * self.limits.lanes
        if self.limits.prefix_cache and pages and room and random.random() < 0.5:
            request = msgspec.structs.replace(
                request,
                prompt=prompt[: pages * self.limits.page_size],
                params=msgspec.structs.replace(
                    PREFILL_PARAMS, cache_salt=request.params.cache_salt
                ),
                hold=True,
            )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.expected[request.request_id] = expected_output(request, self.limits.max_length)
        self.streams[request.request_id] = []
        self.allowed_rounds += 4 * (length + max_tokens)

    def holds(self, request_id: str) -> bool:
        """Whether a request that is to hold its pages runs or does."""
        return request_id in self.held or request_id not in self.ends

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.held)), "held request")
        self.scheduler.let_go(request_id)
        del self.held[request_id]
        assert self.scheduler.held(request_id) is None

    @rule()
    def reset_prefix_caches(self):
        self.scheduler.reset_prefix_caches()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.cancel_one(str(data.draw(st.integers(0, len(self.requests)), "request")))

    @rule()
    def cancel_who_waits_while_in_flight(self):
        in_flight = {
            str(row.seed)
            for group in range(self.limits.groups)
            for _, rows in self.in_flight(group)
            for row in rows
        }
        for request_id in sorted(in_flight & set(self.scheduler.waiting_ids())):
            self.cancel_one(request_id)

    def cancel_one(self, request_id: str):
        outputs = self.scheduler.cancel(request_id)
        if request_id in self.requests and request_id not in self.ends:
            assert outputs == [TokenOutput(request_id=request_id, finish_reason="cancelled")]
            self.ends[request_id] = outputs[0]
        else:
            assert outputs == []

    # What the engine and the device do.

    @rule(lane=st.integers(0, 3))
    def plan(self, lane):
        lane %= self.limits.lanes
        in_flight = len(self.enqueued[lane]) + len(self.ran[lane])
        waited = set(self.scheduler.waiting_ids())
        plan = self.scheduler.plan(lane)
        self.check_admission(waited)
        if plan is None:
            return
        assert in_flight < 2
        assert plan.lane == lane
        assert plan.number == self.steps
        self.steps += 1
        self.check_plan(plan)
        self.enqueued[lane].append(plan)

    @rule(lane=st.integers(0, 3))
    def run_on_device(self, lane):
        lane %= self.limits.lanes
        if self.enqueued[lane]:
            plan = self.enqueued[lane].popleft()
            self.ran[lane].append((plan, self.device.run(plan)))

    @rule(lane=st.integers(0, 3))
    def complete(self, lane):
        lane %= self.limits.lanes
        if not self.ran[lane]:
            self.run_on_device(lane)
        if self.ran[lane]:
            plan, sampled = self.ran[lane].popleft()
            self.scheduler.took(plan.plan, plan.plan.number % 7)  # as a machine that shakes
            for output in self.scheduler.complete(plan, StepResult(np.asarray(sampled), {}, {})):
                self.receive(output)

    @rule(lane=st.integers(0, 3), data=st.data())
    def invalid_logits(self, lane, data):
        """The oldest step gives no numbers for one of its requests, which has had that never."""
        lane %= self.limits.lanes
        if not self.ran[lane]:
            self.run_on_device(lane)
        if not self.ran[lane]:
            return
        plan, sampled = self.ran[lane][0]
        rows = [(group, row) for group, rows in enumerate(plan.groups) for row in rows]
        rows = [one for one in rows if one[1].sample and str(one[1].seed) not in self.invalid]
        if rows:
            group, row = data.draw(st.sampled_from(rows), "row without numbers")
            one = sampled[group][row.slot]
            sampled[group][row.slot] = (
                [NO_TOKEN] + [REJECTED] * (len(one) - 1) if isinstance(one, list) else NO_TOKEN
            )
            self.invalid.add(str(row.seed))
            request = self.requests[str(row.seed)]
            self.allowed_rounds += 4 * (len(request.prompt) + request.params.max_tokens)
        self.complete(lane)

    @rule(lane=st.integers(0, 3), data=st.data())
    def lose(self, lane, data):
        """A lane's steps in flight are lost, some of them after the device has run them."""
        lane %= self.limits.lanes
        steps = [*(step for step, _ in self.ran[lane]), *self.enqueued[lane]]
        if not steps:
            return
        for step in steps[data.draw(st.integers(0, len(steps)), "steps that ran") :]:
            self.device.break_off(step)
        for step in reversed(steps):
            self.scheduler.lost(step)
        self.ran[lane].clear()
        self.enqueued[lane].clear()
        self.allowed_rounds += 4 * self.limits.slots * self.limits.groups * self.limits.max_length

    @rule(rounds=st.integers(1, 8))
    def engine_loop(self, rounds):
        """The engine's usual course: every lane is one step ahead of its results."""
        for _ in range(rounds):
            for lane in range(self.limits.lanes):
                self.plan(lane)
                if len(self.enqueued[lane]) + len(self.ran[lane]) == 2:
                    self.complete(lane)

    # What must hold.

    def receive(self, output: TokenOutput):
        request_id = output.request_id
        assert request_id not in self.ends, "news of a request that has ended"
        if output.says_nothing and request_id in self.invalid:
            return
        self.streams[request_id] += output.token_ids
        tokens, reason, stop = self.expected[request_id]
        assert self.streams[request_id] == tokens[: len(self.streams[request_id])]
        assert output.token_ids or output.finish_reason, "no news"
        if output.finish_reason:
            assert self.streams[request_id] == tokens
            assert (output.finish_reason, output.stop_token_id) == (reason, stop)
            self.ends[request_id] = output
            if self.requests[request_id].hold:
                self.held[request_id] = self.scheduler.held(request_id)

    def rank(self, request_id: str) -> tuple[float, int]:
        request = self.requests[request_id]
        due = request.arrival + 10.0 + 10.0 * request.params.priority
        return min(due, request.deadline or due), request.seed

    def check_admission(self, waited: set[str]):
        """Nobody was let in past one who is due earlier."""
        waiting = [self.rank(request_id) for request_id in self.scheduler.waiting_ids()]
        assert waiting == sorted(waiting)
        admitted = [self.rank(i) for i in waited - set(self.scheduler.waiting_ids())]
        assert not admitted or not waiting or max(admitted) < min(waiting)

    def check_plan(self, plan: FullStep):
        limits = self.limits
        assert len(plan.groups) == limits.groups
        assert any(plan.groups)
        sizes = [sum(len(row.token_ids) for row in rows) for rows in plan.groups]
        drafts, rows_of_all = plan.bucket.drafts, [row for rows in plan.groups for row in rows]
        least = limits.slots if plan.plan.options and not drafts else 1
        fitting = [b for b in limits.token_buckets if b >= max(*sizes, least) and b > drafts]
        assert plan.bucket.tokens == (max if plan.spread else min)(fitting)
        assert plan.bucket.spread == bool(plan.spread)
        assert drafts == (limits.drafts if any(row.drafts for row in rows_of_all) else 0)
        pages = [-(-row.kv_length // limits.page_size) for row in rows_of_all]
        if not any(row.length_on_device for row in rows_of_all):
            assert plan.bucket.pages == min(b for b in limits.page_buckets if b >= max(pages))
        for group, rows in enumerate(plan.groups):
            slots = [row.slot for row in rows]
            assert slots == sorted(set(slots))
            assert set(slots) <= set(range(limits.slots))
            for row in rows:
                self.check_row(plan, group, row)

    def check_row(self, plan: FullStep, group: int, row: SequenceRow):
        request = self.requests[str(row.seed)]
        assert request.request_id not in self.ends, "a step for a request that has ended"
        assert row.token_ids or (group, row) in plan.spread
        first, drafts = row.token_ids[: -row.drafts or None], row.token_ids[-row.drafts or 10**9 :]
        assert FROM_DEVICE not in first or first == [FROM_DEVICE]
        assert drafts == [FROM_DEVICE] * row.drafts
        longest = min(self.limits.max_length, len(request.prompt) + request.params.max_tokens)
        certain = row.kv_length - row.drafts
        assert certain < longest
        least, most = (
            -(-tokens // self.limits.page_size)
            for tokens in (plan.span(group, row)[1], longest - 1)
        )
        assert least <= len(row.page_ids) <= most
        if not self.limits.drafts:
            assert len(row.page_ids) == least
        if row.drafts:
            assert request.params.grammar is None
        assert set(row.page_ids) <= set(range(self.limits.pages))
        self.check_rules(request, row)
        for one, others in self.in_flight(group):
            for other in others:
                shared = set(other.page_ids) & set(row.page_ids)
                same_slot = (one.lane, other.slot) == (plan.lane, row.slot)
                assert same_slot == (other.seed == row.seed) or one.spread or plan.spread
                if not same_slot:
                    assert not shared & self.written(plan, group, row)
                    assert not shared & self.written(one, group, other)

    def written(self, plan: FullStep, group: int, row: SequenceRow) -> set[int]:
        """Pages that the row writes to, and those after them."""
        return set(row.page_ids[plan.span(group, row)[0] // self.limits.page_size :])

    def check_rules(self, request: Request, row: SequenceRow):
        """A mask is of the text so far; penalties are in every step, from the first one on."""
        generated = row.kv_length - len(request.prompt)
        if request.params.grammar is not None and row.sample:
            assert row.rules is not None
            assert row.rules.allowed == (1 + generated).to_bytes(4, "little")
            assert FROM_DEVICE not in row.token_ids
        if request.params.presence_penalty:
            assert row.rules is not None
            assert row.rules.counts_from == len(request.prompt)
            start = row.kv_length - len(row.token_ids)
            assert not row.rules.fresh or start <= len(request.prompt)

    def in_flight(self, group: int):
        for lane in range(self.limits.lanes):
            for plan in [*self.enqueued[lane], *(plan for plan, _ in self.ran[lane])]:
                yield plan, plan.groups[group]

    @invariant()
    def adds_up(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        alive = len(self.requests) - len(self.ends)
        assert self.scheduler.num_running + self.scheduler.num_waiting == alive
        assert all(0 <= usage <= 1 for usage in self.scheduler.kv_usage)
        for request_id in self.held:
            self.check_held(request_id)
        for group in range(self.limits.groups):
            self.check_rings(group, self.limits, Counter())

    def check_rings(self, group: int, limits: SchedulerSizes, fed: Counter):
        """A ring has the window, and what two steps feed beside it: `kv_cache.ring_pages`."""
        if limits.recurrent:
            most = 3 if limits.prefix_cache else 1
            residents = self.scheduler.groups[group].residents()
            assert max((len(one.ring) for one in residents), default=0) <= most
            return
        for plan, rows in self.in_flight(group):
            spans = {(plan.lane, row.slot): plan.span(group, row) for row in rows}
            fed.update({key: end - start for key, (start, end) in spans.items()})
        for one in self.scheduler.groups[group].residents():
            tokens = fed[one.place.lane, one.place.row % limits.slots] - 2
            rows = limits.window + max(tokens, 2 * limits.drafts)
            assert one.suspect or len(one.ring) <= -(-rows // limits.page_size) + 1

    def check_held(self, request_id: str):
        """The held pages have the entries of the whole prompt, whatever else goes on."""
        request, (group, page_ids) = self.requests[request_id], self.held[request_id]
        size, salt = self.limits.page_size, request.params.cache_salt
        tokens = len(request.prompt)
        if self.limits.ring_pages:
            ring, page_ids = page_ids[1::2], page_ids[::2]
        if self.limits.recurrent and tokens:
            assert self.device.states[group][ring[-1]][:2] == (salt, request.prompt)
        elif self.limits.window:
            for at in range(max(tokens + 1 - self.limits.window, 0), tokens):
                found = self.device.rings[group].get((ring[at // size], at % size))
                assert found == (salt, at, request.prompt[at])
        found = [
            self.device.pages[group].get((page_id, offset))
            for page_id in page_ids
            for offset in range(size)
        ]
        assert found == [(salt, at, token) for at, token in enumerate(request.prompt)]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        rounds = 0
        for request_id in list(self.held):
            self.scheduler.let_go(request_id)
        self.held.clear()
        while self.scheduler.has_work:
            self.engine_loop(1)
            if rounds % 3 == 0 or not any(self.enqueued):
                for lane in range(self.limits.lanes):
                    self.complete(lane)
            self.adds_up()
            rounds += 1
            assert rounds <= self.allowed_rounds, "no end in sight"
            for request_id in list(self.held):
                self.scheduler.let_go(request_id)
            self.held.clear()
        assert self.scheduler.kv_usage == [0.0] * self.limits.groups
        assert self.ends.keys() == self.requests.keys()
        for lane in range(self.limits.lanes):
            assert self.scheduler.plan(lane) is None


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=50)


class DraftsMachine(SchedulerMachine):
    """The same with drafts, some of which hold."""

    drafts = st.sampled_from([3, 1, 2, 8])


class TestDrafts(DraftsMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=50)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestDraftsAtLength(DraftsMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60)
