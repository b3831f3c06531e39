"""Why no layout meets a target, and what would. Called by `plan.py search`."""

from collections.abc import Iterator, Mapping

import msgspec

from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.search import Found, Searcher
from jaxserve.planner.search_view import layout_text
from jaxserve.planner.stages import Calculator


def why_not(
    calculator: Calculator,
    attention: Mapping[str, Hardware],
    ffn: Mapping[str, Hardware],
    target: Target,
    found: Found,
) -> str:
    """Explains which bound prevents the target, and lists single changes that would meet it."""
    if found.fastest is None:
        lines = [_shortage(found, target, _mixed(attention, ffn))]
    else:
        plan = found.fastest
        name, bound = plan.slowest
        stage = sum(plan.stages[part].seconds for part in _parts(name))
        lines = [
            f"no layout reaches {target.tpot * 1e3:g} ms a token: the fastest, "
            f"{layout_text(plan)}, takes {plan.tpot * 1e3:.1f} ms with one sequence a DP group; "
            f"its {name} stage takes {stage * 1e6:.0f} µs a layer, bound by {bound}"
        ]
    changes = list(_changes(calculator, attention, ffn, target, found))
    if changes:
        lines.append("what would meet it: " + "; ".join(changes))
    else:
        lines.append("no change of one thing meets it")
    return "\n  ".join(lines)


def _parts(name: str) -> tuple[str, ...]:
    return ("dispatch", "combine") if name == "link" else (name,)


def _mixed(attention: Mapping[str, Hardware], ffn: Mapping[str, Hardware]) -> bool:
    """Whether the roles have no platform in common."""
    platforms = [{each.platform for each in role.values()} for role in (attention, ffn)]
    return not platforms[0] & platforms[1]


def _shortage(found: Found, target: Target, mixed: bool) -> str:
    if found.short is None:
        text = f"there is no layout of up to {target.max_devices} devices"
        return f"{text} of one platform: GPUs and TPUs do not serve together" if mixed else text
    layout, role, needed, there = found.short
    return (
        f"nothing fits on up to {target.max_devices} devices: the nearest layout, {layout.devices} "
        f"devices, needs {needed / 1e9:.1f} GB on each of the {role} role's (weights and one "
        f"sequence a lane) and has {there / 1e9:.1f} GB: bound by memory size"
    )


def _changes(
    calculator: Calculator,
    attention: Mapping[str, Hardware],
    ffn: Mapping[str, Hardware],
    target: Target,
    found: Found,
) -> Iterator[str]:
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
