"""Whole deployments that others published, beside what `plan deploy` would make of them;
docs/measurements/planner.md has the same numbers.

The docstring of every comparison says which inputs are published. What was read back from published
results proves nothing: it must agree, and is called so. The others move with the rooflines, within
bounds.
"""

import msgspec
import pytest

from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.demand import Demand, Level, Requests, Spares
from jaxserve.planner.deploy import CHUNKS, Sizer
from jaxserve.planner.deploy_fleet import Asked, Chunks, DecodeUnit
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.layouts import Layout, Target
from jaxserve.planner.models import load_model
from jaxserve.planner.results import FleetResult
from jaxserve.planner.search import Pace, Searcher
from jaxserve.planner.stage_times import Rooflines
from jaxserve.planner.stages import Calculator
from tests.jaxserve.planner.making import Compared, layout

PAGE = 64
POSITIONS = 163840
DAY = 86400.0

# DeepSeek-V3/R1 inference system overview, 2025-02: 24 hours from 2025-02-27, 12:00 UTC+8.
TOKENS_IN, HITS, TOKENS_OUT = 608e9, 0.563, 168e9
NODE_IN, NODE_OUT = 73.7e3, 14.8e3
NODES, DOLLARS, CONTEXT = 226.75, 87072.0, 4989
DEEPSEEK = Assumptions(
    alltoall=True, expanded=True, overlapped=True, whole_dense=True, replicas=True
)
SPEED = 21.0
"""Tokens a second of a request: 20 to 22."""


def deepseek() -> list[Compared]:
    """DeepSeek's published day: H800 nodes of 8, prefill EP 32 (4 nodes), decode EP 144 (18).

    Published: tokens in and out, hits, EP 32 and EP 144, tokens/s of a request. Inferred: lengths
    of a request, from the mean context. Ours: rooflines, FP8 but for attention's own products;
    decoding in two batches that overlap, prefill in one. READ BACK: the first number of nodes.
    """
    in_rate, out_rate = TOKENS_IN / DAY, TOKENS_OUT / DAY
    back = in_rate / NODE_IN + out_rate / NODE_OUT
    # Mean lengths are not published. They follow from the ratio of the sums and from the mean
    # context of 4,989 tokens while outputs grow.
    output = CONTEXT / (TOKENS_IN / TOKENS_OUT + 0.5)
    demand = Demand(
        rate=out_rate / output,
        prompt=round(output * TOKENS_IN / TOKENS_OUT),
        output=round(output),
        hits=HITS,
    )
    h800 = load_hardware("h800")
    formats = Formats(cache="bfloat16", compute="fp8", core="bfloat16")
    sizer = _sizer(h800, formats, demand, DEEPSEEK)
    requests = sizer.requests
    prefill = max(
        32 / chunks.busy(requests) for chunks in _chunks(sizer, layout("ep", dp=32), h800)
    )
    node_in = prefill * float(requests.prompt.mean()) / 4
    two = layout("ep", dp=144, lanes=2)
    pace = Pace(sizer.searcher, two, requests)
    batch = pace.largest(256, 1 / SPEED)
    node_out = 8 * two.lanes * batch / pace.seconds(batch)
    nodes = in_rate / node_in + out_rate / node_out
    name = "DeepSeek's day, H800"
    return [
        Compared(name, "nodes, from the published tokens/s a node", NODES, back),
        Compared(name, "prefill tokens/s a node, hits included", NODE_IN, node_in),
        Compared(name, "decode tokens/s a node", NODE_OUT, node_out),
        Compared(name, "nodes", NODES, nodes),
        Compared(name, "USD a day at 2 USD a GPU and hour", DOLLARS, nodes * 8 * 2 * 24),
    ]


DIE = load_hardware("910c")
TTFT, TPOT, ACCEPTED = 0.9, 0.0348, 1.9
PREFILL_WORKERS = 4
LONGEST = 65536 + 2150
"""Inputs of 0 to 64K, and an output."""


def xdeepserve() -> list[Compared]:
    """xDeepServe §7.2: 4 prefill workers of 2 servers (DP 8, TP 4, EP 32), one unit of 8 (EP 128).

    Published: 13K tokens in, 2.1K out, 0 to 64K. Guessed: hits (none are published), spread 1, 1.9
    tokens a step. Ours: rooflines, attention in BF16, prompts as this engine runs them on GPUs.
    """
    own = Demand(rate=1.0, prompt=13312, output=2150, spread=1.0)
    formats = Formats(weights="int8", cache="bfloat16", dispatch="int8")
    name, found = "xDeepServe §7.2, 910C", []
    sizer = _sizer(DIE, formats, own, Assumptions(), LONGEST)
    for hits in (0.0, HITS):
        demand = msgspec.structs.replace(own, hits=hits)
        requests = demand.requests(sizer.asked.longest, PAGE)
        unit = layout("ep", "910c", dp=128)
        pace = Pace(sizer.searcher, unit, requests)
        tried = _chunks(sizer, layout("ep", "910c", dp=8, tp=4, ep=32), DIE)
        alone = min(_alone(chunks, requests) for chunks in tried)
        first = requests.prompt.mean() * sizer.searcher.calculator.handed_over
        first = float(first) / (32 * DIE.network) + 2.5 * pace.seconds(1)
        most = max(PREFILL_WORKERS * 8 / chunks.busy(requests) for chunks in tried)
        plan = sizer.searcher.evaluate(unit, 1)
        decode = DecodeUnit(plan, 256, (DIE, DIE), pace, 0.0)
        taken = decode.taken(most / ACCEPTED, float(requests.output.mean()))
        ttft, tpot = f"{TTFTS}, {hits:.0%} hits", f"{TPOTS}, {hits:.0%} hits"
        seconds = pace.seconds(max(1, round(taken))) / ACCEPTED
        found.append(Compared(name, ttft, 1e3 * TTFT, 1e3 * (alone + first)))
        found.append(Compared(name, tpot, 1e3 * TPOT, 1e3 * seconds))
    return found


def _chunks(sizer: Sizer, made: Layout, hardware: Hardware) -> list[Chunks]:
    """Prompts in chunks of all sizes in a prefill worker."""
    own = sizer.searcher.calculator
    times = Rooflines(made, own, own, (hardware, hardware))
    return [Chunks(made, times, chunk) for chunk in CHUNKS]


def _alone(chunks: Chunks, requests: Requests) -> float:
    """Mean seconds of a prompt with nothing else in the worker."""
    shares = [(number + 0.5) / 20 for number in range(20)]
    return sum(chunks.alone(*requests.quantile(share)) for share in shares) / len(shares)


def _sizer(
    hardware: Hardware,
    formats: Formats,
    demand: Demand,
    assumed: Assumptions,
    positions: int = POSITIONS,
) -> Sizer:
    levels = {"ttft": Level(95.0, 5.0), "tpot": Level(95.0, 0.05), "target": Target(tpot=0.05)}
    asked = Asked(demand=demand, positions=positions, page=PAGE, spares=Spares(), **levels)
    requests: Requests = demand.requests(asked.longest, PAGE)
    calculator = Calculator(load_model("deepseek-v3"), round(requests.context), formats, assumed)
    hosts = {"h800": hardware, "910c": hardware}
    searcher = Searcher(calculator, hosts, hosts)
    return Sizer(searcher, hosts, asked, _nothing)


def _nothing(*_: object) -> FleetResult:
    raise AssertionError("no fleet is simulated here")


TTFTS, TPOTS = (
    "TTFT ms, mean, nobody else there",
    "TPOT ms, at the most that the prefill workers carry",
)
BOUNDS = {
    "nodes, from the published tokens/s a node": (-0.001, 0.001),  # it was read back
    "prefill tokens/s a node, hits included": (-0.35, 0.35),
    "decode tokens/s a node": (-0.35, 0.35),
    "nodes": (-0.35, 0.35),
    "USD a day at 2 USD a GPU and hour": (-0.35, 0.35),
    f"{TTFTS}, 0% hits": (0.4, 0.9),  # hits and the spread of lengths are not published
    f"{TTFTS}, 56% hits": (-0.2, 0.2),
    f"{TPOTS}, 0% hits": (-0.5, -0.25),  # a third of a dispatch is explained
    f"{TPOTS}, 56% hits": (-0.5, -0.25),
}


def test_errors_of_published_deployments():
    found = {one.quantity: one for one in [*deepseek(), *xdeepserve()]}
    assert found.keys() == BOUNDS.keys()
    for quantity, (least, most) in BOUNDS.items():
        assert least < found[quantity].error < most, found[quantity]
    assert found["nodes, from the published tokens/s a node"].ours == pytest.approx(
        226.86, abs=0.01
    )
