"""`plan map`: its options, and what it shows. Called by `plan.py`."""

import argparse
import sys

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.planner import report
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model
from jaxserve.planner.payoff import Case, Mix, cases, map_rows, map_summary, map_tree
from jaxserve.planner.quantities import assumptions, prices, seconds, tokens
from jaxserve.planner.search_view import DECODE_ONLY
from jaxserve.planner.skew import read_skew
from jaxserve.planner.text import grid, json_text

PRODUCTS = ("auto", "bfloat16", "fp8", "int8")
LEGEND = (
    "the cheapest mode, its USD a million tokens, and x what AFD costs over the cheaper of EP and "
    "TP; -: nothing meets the TPOT"
)


def add_map(command: argparse.ArgumentParser) -> None:
    """The options."""
    add = command.add_argument
    add("--models", nargs="+", default=["step3", "deepseek-v3"], help="step3 deepseek-v3")
    add("--hardware", nargs="+", default=["h800", "h20+h800"], metavar="NAME[+NAME]")
    add("--contexts", nargs="+", default=["4K", "32K"], help="mean tokens of a sequence: 4K 32K")
    add("--tpots", nargs="+", default=["50ms", "100ms"], help="50ms 100ms")
    add("--max-devices", type=int, default=48, help="48")
    add("--compute", choices=PRODUCTS, default="auto", help="of matrix products")
    add("--core", choices=PRODUCTS, default="auto", help="of attention's own products")
    add("--skew", help="of the experts' popularity, as of simulate")
    add("--price", nargs="+", default=[], metavar="NAME=USD", help="a device and hour")
    add("--assume", nargs="+", default=[], metavar="NAME=VALUE", help="or `published`, `paper`")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluates and shows.

    Raises:
      ConfigError: an option is wrong.
    """
    if not 1 <= options.max_devices <= 512:
        raise ConfigError(f"--max-devices {options.max_devices}: from 1 to 512")
    contexts = [tokens(text, "--contexts") for text in options.contexts]
    tpots = [seconds(text, "--tpots") for text in options.tpots]
    assumed = assumptions(options.assume)
    skew = read_skew(options.skew) if options.skew is not None else None
    mixes = [_mix(name, options) for name in options.hardware]
    found: list[Case] = []
    for name in options.models:
        model = load_model(name, options.configs)
        for mix in mixes:
            print(f"{name} on {mix.name}", file=sys.stderr)
            formats = _formats(mix, options)
            found += cases(
                name, model, mix, contexts, tpots, formats, assumed, skew, options.max_devices
            )
    rows, notes = map_rows(found), [DECODE_ONLY, LEGEND, map_summary(found)]
    if options.html:
        sections = [("", report.table(rows) + report.lines(notes))]
        page = report.page("Where AFD, EP and TP are the cheapest", sections)
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        print(json_text({"scope": DECODE_ONLY, "cases": map_tree(found)}))
    else:
        print("\n".join([grid(rows), "", *notes]))
    return 0


def _mix(name: str, options: argparse.Namespace) -> Mix:
    """`h800`, or `h20+h800`: attention on the one, FFN on the other."""
    attention, _, ffn = name.lower().partition("+")
    own = prices(options.price)
    first = load_hardware(attention, own, options.configs)
    second = load_hardware(ffn, own, options.configs) if ffn else first
    return Mix(name.lower(), {attention: first}, {ffn or attention: second})


def _formats(mix: Mix, options: argparse.Namespace) -> Formats:
    """FP8, or INT8 where some of the hardware has no FP8."""
    all_fp8 = all(each.stores("fp8") for each in (*mix.attention.values(), *mix.ffn.values()))
    name = "fp8" if all_fp8 else "int8"
    compute = options.compute if all_fp8 or options.compute != "fp8" else "auto"
    tree = {**dict.fromkeys(("weights", "cache", "dispatch"), name), "compute": compute}
    return msgspec.convert({**tree, "core": options.core}, Formats)
