"""Says why no layout meets a target: the bound that prevents it, and single changes that would meet
it. Called by `plan search` and `deploy`.
"""

from collections.abc import Iterator

import msgspec

from jaxserve.planner.layouts import Target
from jaxserve.planner.search import Found, Searcher
from jaxserve.planner.stages import Calculator


def why_not(searcher: Searcher, target: Target, found: Found) -> str:
    """Explains which bound prevents the target, and lists single changes that would meet it."""
    if plan := found.fastest:
        name, bound = plan.slowest
        parts = ("dispatch", "combine") if name == "link" else (name,)
        stage = sum(plan.stages[part].seconds for part in parts)
        text = (
            f"no layout reaches {target.tpot * 1e3:g} ms a token: the fastest, "
            f"{plan.layout.text}, takes {plan.tpot * 1e3:.1f} ms with one sequence a DP group; "
            f"its {name} stage takes {stage * 1e6:.0f} µs a layer, bound by {bound}"
        )
    elif found.short:
        layout, role, needed, there = found.short
        text = (
            f"nothing fits on up to {target.max_devices} devices: the nearest layout, "
            f"{layout.devices} devices, needs {needed / 1e9:.1f} GB on each of the {role} role's "
            f"(weights and one sequence a lane) and has {there / 1e9:.1f} GB: bound by memory size"
        )
    else:
        text = f"there is no layout of up to {target.max_devices} devices"
        text += f": {searcher.memory.refused}" if searcher.memory.refused else ""
        attention, ffn = (
            {one.platform for one in role.values()} for role in (searcher.attention, searcher.ffn)
        )
        if attention.isdisjoint(ffn):
            text += " of one platform: GPUs and TPUs do not serve together"
    changes = "; ".join(_changes(searcher, target, found))
    advice = f"what would meet it: {changes}" if changes else "no change of one thing meets it"
    return f"{text}\n  {advice}"


def _changes(searcher: Searcher, target: Target, found: Found) -> Iterator[str]:
    calculator, attention, ffn = searcher.calculator, searcher.attention, searcher.ffn

    def meets(calculator: Calculator, target: Target) -> bool:
        return Searcher(calculator, attention, ffn).feasible(target)

    for factor in (2, 4, 8):
        more = target.max_devices * factor
        if more <= 512 and meets(calculator, msgspec.structs.replace(target, max_devices=more)):
            yield f"up to {more} devices"
            break
    formats = calculator.formats
    for field in ("weights", "cache"):
        if getattr(formats, field) == "bfloat16":
            stored = all(h.stores("fp8") for h in (*attention.values(), *ffn.values()))
            name = "fp8" if stored else "int8"
            smaller = msgspec.structs.replace(formats, **{field: name})
            if meets(calculator._replace(formats=smaller), target):
                yield f"{field} in {name}"
    context = calculator.context
    while context > 256:
        context //= 2
        if meets(calculator._replace(context=context), target):
            yield f"a context of {context:,}"
            break
    if found.fastest is not None:
        yield f"a TPOT of {found.fastest.tpot * 1e3:.1f} ms"
