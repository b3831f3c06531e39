"""Whole deployments that others published, beside what `plan deploy` would make of them.

For every figure it says which inputs are published and which were read back from the published
results, so that they prove nothing. `python -m tests.jaxserve.planner.paper_deployments` prints the
comparison, `test_paper_deployments.py` holds it.
"""

import sys
from typing import NamedTuple

import msgspec

from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.deploy import Asked, Hosts, Sizer
from jaxserve.planner.deploy_decode import DecodeUnit, Pace
from jaxserve.planner.deploy_demand import Demand, Level, Requests
from jaxserve.planner.deploy_fleet import Fleet, Prediction, predict
from jaxserve.planner.deploy_prefill import CHUNKS, PrefillWorker, capacity
from jaxserve.planner.deploy_spares import Spares
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.layouts import Layout, Target
from jaxserve.planner.models import load_model
from jaxserve.planner.search import Searcher
from jaxserve.planner.stages import Calculator
from jaxserve.planner.text import grid, json_text

PAGE = 64
POSITIONS = 163840
DAY = 86400.0


class Compared(NamedTuple):
    """One published figure and ours."""

    system: str
    quantity: str
    published: float
    planned: float
    told: str
    """Inputs, and where they are from."""

    @property
    def error(self) -> float:
        """(planned − published) / published."""
        return self.planned / self.published - 1


# DeepSeek-V3/R1 inference system overview, 2025-02: 24 hours from 2025-02-27, 12:00 UTC+8.
TOKENS_IN, HITS, TOKENS_OUT = 608e9, 0.563, 168e9
NODE_IN, NODE_OUT = 73.7e3, 14.8e3
NODES, DOLLARS, CONTEXT = 226.75, 87072.0, 4989
SPEED = 21.0
"""Tokens a second of a request: 20 to 22."""


def deepseek() -> list[Compared]:
    """DeepSeek's published day: H800 nodes of 8, prefill EP 32 (4 nodes), decode EP 144 (18)."""
    in_rate, out_rate = TOKENS_IN / DAY, TOKENS_OUT / DAY
    back = in_rate / NODE_IN + out_rate / NODE_OUT
    # Mean lengths are not published. Of prompts that are so many times as long as outputs, and a
    # mean context of 4,989 tokens while outputs grow, they follow.
    output = CONTEXT / (TOKENS_IN / TOKENS_OUT + 0.5)
    demand = Demand(
        rate=out_rate / output,
        prompt=round(output * TOKENS_IN / TOKENS_OUT),
        output=round(output),
        hits=HITS,
    )
    h800 = load_hardware("h800")
    sizer = _sizer(h800, Formats(cache="bfloat16", compute="fp8", core="bfloat16"), demand)
    requests = sizer.requests(demand)
    prefill = max(
        capacity(worker, sizer.steps(worker, demand), requests)
        for worker in (PrefillWorker(_ep("h800", 32), chunk, h800) for chunk in CHUNKS)
    )
    node_in = prefill / 4
    layout = _ep("h800", 144)
    pace = Pace(sizer.searcher, sizer.searcher.calculator, layout, (h800, h800))
    batch = pace.largest(requests, 256, 1 / SPEED)
    node_out = 8 * batch / pace.seconds(requests, batch)
    nodes = in_rate / node_in + out_rate / node_out
    name = "DeepSeek's day, H800"
    given = (
        "published: tokens in and out, hits, EP 32 and EP 144, 21 tokens/s a request; inferred: "
        f"{demand.prompt} in, {demand.output} out a request (mean context 4,989); rooflines, "
        "FP8 but for attention's own products"
    )
    read = "READ BACK: the published tokens/s a node in, the published number of nodes out"
    return [
        Compared(name, "nodes, from the published tokens/s a node", NODES, back, read),
        Compared(name, "prefill tokens/s a node, hits included", NODE_IN, node_in, given),
        Compared(name, "decode tokens/s a node", NODE_OUT, node_out, given),
        Compared(name, "nodes", NODES, nodes, given),
        Compared(name, "USD a day at 2 USD a GPU and hour", DOLLARS, nodes * 8 * 2 * 24, given),
    ]


DIE = load_hardware("910c")
TTFT, TPOT, ACCEPTED = 0.9, 0.0348, 1.9
PREFILL_WORKERS = 4


def xdeepserve() -> list[Compared]:
    """xDeepServe §7.2: 4 prefill workers of 2 servers (DP 8, TP 4), one unit of 8 (EP 128)."""
    own = Demand(rate=1.0, prompt=13312, output=2150, spread=1.0)
    sizer = _sizer(DIE, Formats(weights="int8", cache="bfloat16", dispatch="int8"), own)
    requests = sizer.requests(own)
    layout, hardware = _ep("910c", 128), (DIE, DIE)
    pace = Pace(sizer.searcher, sizer.searcher.calculator, layout, hardware)
    # The rate is not published: the one at which the unit's pace is the published one.
    batch = pace.largest(requests, 256, TPOT * ACCEPTED)
    rate = 128 * batch / TPOT / float(requests.output.mean())
    table = tuple((slots, each / ACCEPTED) for slots, each in pace.table(requests, batch))
    unit = DecodeUnit(layout, 2 * batch, hardware, table, ACCEPTED)
    name = "xDeepServe §7.2, 910C"
    read = (
        f"READ BACK: {rate:.0f} requests/s, at which the unit's TPOT is the published 34.8 ms "
        f"({batch} sequences a die, 1.9 tokens a step); so TPOT proves nothing"
    )
    found = [Compared(name, "TPOT ms", 1e3 * TPOT, 1e3 * unit.tpot(128 * batch), read)]
    for hits in (0.0, HITS):
        demand = msgspec.structs.replace(own, hits=hits)
        needed, ttft = _prefill_on_910c(sizer, unit, demand, rate)
        given = (
            f"published: 13K in, 2.1K out, 0 to 64K, DP 8 TP 4; guessed: {hits:.1%} hits (none are "
            "published), spread 1; rooflines, all attention absorbed"
        )
        found += [
            Compared(
                name, f"TTFT ms, mean, nobody else there, {hits:.0%} hits", 1e3 * TTFT, ttft, given
            ),
            Compared(
                name,
                f"prefill workers always busy, {hits:.0%} hits",
                PREFILL_WORKERS,
                needed,
                f"the rate READ BACK; {given}",
            ),
        ]
    return found


def _prefill_on_910c(
    sizer: Sizer, unit: DecodeUnit, demand: Demand, rate: float
) -> tuple[float, float]:
    """(workers that a rate keeps busy, mean TTFT of a request by itself in ms), of the best
    chunks."""
    layout = Layout(mode="ep", attention="910c", ffn="910c", dp=8, tp=4, ep=8, ffn_tp=4, lanes=1)
    requests = sizer.requests(demand)
    needed, ttft = float("inf"), float("inf")
    for chunk in CHUNKS:
        worker = PrefillWorker(layout, chunk, DIE)
        steps = sizer.steps(worker, demand)
        most = capacity(worker, steps, requests)
        needed = min(needed, rate * float(requests.prompt.mean()) / most)
        fleet = Fleet(worker, steps, PREFILL_WORKERS, unit, 1)
        alone = predict(fleet, sizer.link(worker, unit), requests, 0.1)
        if isinstance(alone, Prediction):
            ttft = min(ttft, 1e3 * alone.ttft.mean)
    return needed, ttft


def _ep(name: str, devices: int) -> Layout:
    return Layout(
        mode="ep",
        attention=name,
        ffn=name,
        dp=devices,
        tp=1,
        ep=devices,
        ffn_tp=1,
        lanes=1,
    )


def _sizer(hardware: Hardware, formats: Formats, demand: Demand) -> Sizer:
    asked = Asked(
        demand=demand,
        ttft=Level(95.0, 5.0),
        tpot=Level(95.0, 0.05),
        positions=POSITIONS,
        page=PAGE,
        target=Target(tpot=0.05),
        spares=Spares(),
    )
    requests: Requests = demand.requests(asked.longest, PAGE)
    calculator = Calculator(
        load_model("deepseek-v3"), round(requests.context), formats, Assumptions()
    )
    hosts = {"h800": hardware, "910c": hardware}
    searcher = Searcher(calculator, hosts, hosts)
    return Sizer(calculator, searcher, Hosts(hosts, hosts, hosts), asked)


def compare() -> list[Compared]:
    """All of them."""
    return [*deepseek(), *xdeepserve()]


def main() -> None:
    """Prints the comparison, for people or (`--json`) for programs."""
    found = compare()
    if "--json" in sys.argv:
        print(json_text([one._asdict() for one in found]))
        return
    rows = [["", "", "published", "planned", "error"]]
    rows += [
        [one.system, one.quantity, f"{one.published:g}", f"{one.planned:.4g}", f"{one.error:+.1%}"]
        for one in found
    ]
    print(grid(rows))
    for told in dict.fromkeys((one.system, one.told) for one in found):
        print(": ".join(told))


if __name__ == "__main__":
    main()
