"""Random deployments and requests for `test_fuzz.py`, all of them functions of a seed.

A draw is plain data: a deployment, perhaps with a prefill worker, and a list of requests that share
system prompts. It is printed as JSON, of which one may run a part (`FUZZ_DRAW`).
"""

import random
from typing import Any

import msgspec
import yaml

from tests import golden
from tests.reference.tiny_sizes import VOCAB

LONGEST = 192
"""Tokens of the longest sequence, as `hand_offs.LIMITS` says."""
ARRAY_TOKENS = 512
"""Tokens in the page arrays of a DP group. A draw's pool has fewer pages of the same arrays: pools
of different sizes share their compiled programs."""
DEVICES = 8

MODELS: dict[str, dict[str, Any]] = yaml.safe_load(golden.text("engine/draw_models.yaml"))
"""Tiny models of all families with experts, and what each can have."""

FORMATS, RULES = yaml.safe_load(golden.text("engine/draw_options.yaml")).values()
"""Overrides by the name of a number format, and fields of `SamplingParams` by the name of a
request's rules. The formats round the same values in every layout without tensor parallelism, but
for INT8 weights (`hidden_parts.py`). Combine in INT8 does not: each rank of experts rounds its own
part of a sum."""

LAYOUTS: list[dict[str, Any]]
SPLIT: list[dict[str, Any]]
LAYOUTS, SPLIT = yaml.safe_load(golden.text("engine/draw_layouts.yaml")).values()
"""Layouts without and with tensor parallelism, which adds the terms of a sum in another order."""

CHEAP = 10
"""Seeds below this draw one of `PLANS`, so that `make test` compiles few programs."""
PLANS: list[dict[str, Any]] = yaml.safe_load(golden.text("engine/draw_plans.yaml"))


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a draw.

    Attributes:
      number: its own tokens follow from it and from the draw's seed.
      system: number of its system prompt; -1: none.
      own: number of its own tokens, which follow the system prompt.
      tokens: length of its answer.
      seed: seed of its draws; None: greedy.
      after: news of all requests together after which it is submitted.
      cancel: own news after which it is cancelled; None: never.
      emitted: tokens of its answer that another engine is said to have generated.
      tenant: salt of its cache entries.
      scores: whether the log-probabilities of its prompt are wanted, too.
      rules: key of `RULES`; "grammar": even and odd token ids in turns.
    """

    number: int
    system: int
    own: int
    tokens: int
    seed: int | None = None
    after: int = 0
    cancel: int | None = None
    emitted: int = 0
    tenant: str = ""
    scores: bool = False
    rules: str = ""


class Draw(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A deployment and its requests.

    Attributes:
      seed: seed of the tokens in the prompts.
      format: key of `FORMATS`.
      decode: overrides of the engine that gives the answers.
      prefill: overrides of the prefill worker; None: no hand-offs.
      spare: pages that each engine's pool has beyond those of the longest sequence: `(decode,
        prefill)`.
      chunk: tokens of prompts beside decoding, in a step; 0: as many as fit.
      held: prompts that the prefill worker holds at most.
      disk: whether pages in host memory go on to a folder, which both engines share.
      systems: lengths of the system prompts.
      resets: news of all requests together after which the prefix caches are reset.
      losses: likewise, after which it loses a step: even while tokens are read, odd with all pages.
      moves: likewise, after which its experts go to other ranks.
    """

    seed: int
    model: str
    format: str = "float32"
    decode: dict[str, Any]
    prefill: dict[str, Any] | None = None
    spare: tuple[int, int] = (20, 20)
    chunk: int = 0
    held: int = 64
    disk: bool = False
    systems: list[int] = []
    requests: list[Request]
    resets: list[int] = []
    losses: list[int] = []
    moves: list[int] = []

    def prompts(self) -> list[list[int]]:
        """Token ids of every request's prompt. It does not depend on the other requests."""
        systems = [_tokens(f"{self.seed} system {n}", size) for n, size in enumerate(self.systems)]
        return [
            (systems[one.system] if one.system >= 0 else [])
            + _tokens(f"{self.seed} {one.number}", one.own)
            for one in self.requests
        ]

    def text(self) -> str:
        """The draw as JSON."""
        return msgspec.json.encode(self).decode()


def read(text: str) -> Draw:
    """The draw that `Draw.text` has written."""
    return msgspec.json.decode(text, type=Draw)


def draw(seed: int) -> Draw:
    """The draw of a seed. Odd or even decides hand-offs; from `CHEAP` on families take turns."""
    rng = random.Random(f"deployment {seed}")
    faults, models = random.Random(f"faults {seed}"), [*MODELS]
    if seed < CHEAP:
        plan = PLANS[seed // 2 % len(PLANS)]
    else:
        plan = _plan(rng, models[(seed - CHEAP) // 2 % len(models)])
    hand_offs = bool(seed % 2)
    if _can_be_whole(plan["decode"]) and rng.random() < 0.6:
        plan["decode"]["pipeline"] = "step"
    for engine in plan["decode"], plan["prefill"] or {}:
        whole = engine.get("pipeline") == "step" or MODELS[plan["model"]].get("whole")
        if seed >= CHEAP and engine.get("attention.dp", 1) > 1 and not whole:
            engine["scheduler.spread"] = faults.random() < 0.5
    systems = [rng.choice((8, 16, 17, 32, 33, 40, 64, 70)) for _ in range(rng.randint(1, 3))]
    requests = _requests(rng, len(systems), rng.randint(9, 12))
    if plan.get("format", "float32") != "float32":
        # How close a sampled choice was is not known, so a rounding could not be excused.
        requests = [msgspec.structs.replace(one, seed=None) for one in requests]
    else:
        requests = [msgspec.structs.replace(one, rules=_rules(faults, one)) for one in requests]
    news = sum(one.tokens for one in requests)
    times = [sorted(faults.randrange(news) for _ in range(faults.choice((0, 1, 2)))) for _ in "lm"]
    return Draw(
        **plan | ({} if hand_offs else {"prefill": None}),
        seed=seed,
        spare=(rng.choice((0, 1, 2, 4, 20)), rng.choice((0, 1, 2, 4, 20))),
        chunk=rng.choice((0, 0, 8, 16, 24)),
        held=rng.choice((2, 4, 64)) if hand_offs else 64,
        systems=systems,
        requests=requests,
        resets=sorted(rng.choice((0, rng.randrange(news))) for _ in range(rng.choice((0, 1, 3)))),
        losses=times[0],
        moves=times[1],
    )


def _plan(rng: random.Random, model: str) -> dict[str, Any]:
    """Model, number format and the overrides of two engines."""
    has = MODELS[model]
    format = rng.choice(["float32", "float32", *FORMATS])
    speculative = _drafts(rng, ("ngram", "mtp") if "module" in has else ("ngram",))
    decode, prefill = _engine(rng, format) | speculative, _engine(rng, format)
    prefill.pop("domains", None)
    if speculative.get("speculative.method") == "mtp" or "states" in has:
        # A prediction module's entries are pages, too, so that both engines have it.
        prefill |= speculative
    for engine in decode, prefill:
        engine["cache.page_size"] = has.get("page_size", engine["cache.page_size"])
        if has.get("tier", True) and rng.random() < 0.5:
            engine["cache.host_gb"] = rng.choice((0.0001, 0.001))
    plan = {"model": model, "format": format, "decode": decode, "prefill": prefill}
    return plan | {"disk": rng.random() < 0.5}


def _drafts(rng: random.Random, methods: tuple[str, ...]) -> dict[str, Any]:
    method = rng.choice(("none", "none", *methods))
    if method == "none":
        return {}
    drafts = {"speculative.method": method, "speculative.drafts": rng.choice((1, 2))}
    return drafts | {"speculative.automatic": False}


def _engine(rng: random.Random, format: str) -> dict[str, Any]:
    """Overrides of one engine."""
    whole = format in ("wire int8", "fp8", "int8")
    overrides = dict(rng.choice(LAYOUTS if whole else LAYOUTS + SPLIT))
    overrides |= {"cache.page_size": rng.choice((8, 16, 16, 32)), "lanes": rng.choice((1, 1, 2, 3))}
    if overrides["mode"] == "colocated":
        if overrides.get("attention.dp", 1) > 1:
            overrides["ffn.exchange"] = rng.choice(("gather", "alltoall"))
        overrides["pipeline"] = rng.choice(("layer", "step"))
        return overrides
    if overrides.get("ffn.ep", 1) > 1:
        overrides["ffn.exchange"] = rng.choice(("gather", "alltoall"))
    overrides["link.transport"] = rng.choice(("device_put", "device_put", "ppermute"))
    attention = overrides.get("attention.dp", 1) * overrides.get("attention.tp", 1)
    ffn = overrides.get("ffn.ep", 1) * overrides.get("ffn.tp", 1)
    domains = rng.choice((1, 1, 2, 3))
    if domains * attention + ffn <= DEVICES:
        overrides["domains"] = domains
    return overrides


def _can_be_whole(decode: dict[str, Any]) -> bool:
    """Whether the steps of both roles could be one program."""
    shape = [decode.get(key, 1) for key in ("attention.dp", "attention.tp", "ffn.ep", "ffn.tp")]
    pairs = shape[0] * shape[1] == shape[2] * shape[3] and shape[1] in (1, shape[3])
    apart = decode.get("domains", 1) > 1 or "attention.output" in decode
    return decode["mode"] == "afd" and pairs and not apart


def _requests(rng: random.Random, systems: int, count: int) -> list[Request]:
    """Requests in bursts, of which most begin with a system prompt."""
    found: list[Request] = []
    after = 0
    while len(found) < count:
        burst, system = rng.randint(3, 6), rng.randrange(systems)
        for _ in range(burst):
            greedy = rng.random() < 0.7
            tokens = rng.choice((1, 3, 6, 10))
            found.append(
                Request(
                    number=len(found),
                    system=rng.choice((system, system, system, rng.randrange(systems), -1)),
                    own=rng.choice((1, 2, 9, 16, 31, 40, 70)),
                    tokens=tokens,
                    seed=None if greedy else rng.randrange(1000),
                    after=after,
                    cancel=rng.randrange(tokens + 1) if rng.random() < 0.15 else None,
                    emitted=rng.randrange(tokens) if rng.random() < 0.1 else 0,
                    tenant=rng.choice(("", "", "", "other")),
                    scores=rng.random() < 0.1,
                )
            )
        after += rng.choice((0, 3, 10, 40))
    return found


def _rules(rng: random.Random, one: Request) -> str:
    """A request that was stopped is not continued elsewhere."""
    some = [name for name in RULES if not (one.emitted and name == "stop")]
    return rng.choice(some) if rng.random() < 0.5 else ""


def _tokens(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(2, VOCAB) for _ in range(count)]
