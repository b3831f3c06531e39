"""A deployment as a drawing: the way of a request from the router to its tokens. Called by
`deploy_view.py`."""

from jaxserve.planner.deploy import Asked, Deployment
from jaxserve.planner.svg import COLOURS, Arrow, Box, diagram


def drawing(made: Deployment, asked: Asked) -> str:
    """Boxes of workers and units, with what crosses between them, as SVG."""
    fleet, demand, found = made.fleet, asked.demand, made.prediction
    worker, layout = fleet.worker, fleet.unit.layout
    a, f = fleet.unit.hardware
    blue, orange, green, grey = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[7]
    boxes = [
        Box(20, 130, 120, 90, ["router", f"{demand.rate:g} requests/s"], grey),
        Box(
            240,
            110,
            200,
            130,
            [
                f"{fleet.workers} prefill workers",
                f"each {worker.layout.devices} {worker.hardware.name}",
                f"dp {worker.layout.dp} tp {worker.layout.tp}",
                f"chunks of {worker.chunk}",
                f"busy {found.prefill_busy:.0%}",
            ],
            blue,
            fleet.workers > 1,
        ),
    ]
    arrows = [
        Arrow(140, 175, 240, 175, [f"{demand.prompt:,} tokens", f"{demand.hits:.0%} found"]),
        Arrow(440, 175, 590, 175, ["KV pages", f"{found.link_bytes / 1e9:.2f} GB/s"]),
    ]
    held = f"{found.sequences:,.0f} sequences, {found.slots_busy:.0%} of slots"
    if layout.topology.has("ffn"):
        boxes += [
            Box(
                590,
                60,
                210,
                110,
                [
                    f"{fleet.units} x attention",
                    f"each {layout.attention_devices} {a.name}",
                    f"dp {layout.dp} tp {layout.tp}, {layout.lanes} lanes",
                    held,
                ],
                orange,
                fleet.units > 1,
            ),
            Box(
                590,
                240,
                210,
                90,
                [
                    f"{fleet.units} x FFN",
                    f"each {layout.ffn_devices} {f.name}",
                    f"ep {layout.ep} tp {layout.ffn_tp}",
                ],
                green,
                fleet.units > 1,
            ),
        ]
        arrows = [
            arrows[0],
            Arrow(440, 150, 590, 130, arrows[1].labels),
            Arrow(650, 170, 650, 240, ["dispatch"]),
            Arrow(740, 240, 740, 170, ["combine"]),
        ]
        out = 115.0
    else:
        boxes.append(
            Box(
                590,
                110,
                210,
                130,
                [
                    f"{fleet.units} decode units",
                    f"each {layout.devices} {a.name}",
                    f"dp {layout.dp} tp {layout.tp}, {layout.mode}",
                    held,
                ],
                orange,
                fleet.units > 1,
            )
        )
        out = 175.0
    arrows.append(Arrow(800, out, 920, out, [f"{demand.output:,} tokens", _pace(made)]))
    spare = [
        f"{role.spare_hosts} servers of {role.hardware.name} ({role.name})"
        for role in made.roles
        if role.spare_hosts
    ]
    if spare:
        height = 26 + 18 * len(spare)
        boxes.append(Box(240, 280, 300, height, ["standing by", *spare], grey, dashed=True))
    title = f"{made.dollars:,.0f} USD an hour, TTFT {asked.ttft.text}, TPOT {asked.tpot.text}"
    return diagram(title, boxes, arrows, (940, 370))


def _pace(made: Deployment) -> str:
    return f"{made.prediction.tpot.mean * 1e3:.1f} ms each"
