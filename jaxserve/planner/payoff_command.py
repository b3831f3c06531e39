"""`plan map`: its options, and what it shows. Called by `plan.py`."""

import argparse
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.planner import report
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import CostModel, load_model, model_config, model_folder
from jaxserve.planner.payoff import (
    Case,
    Mix,
    cases,
    map_rows,
    map_summary,
    map_tree,
    mixes_that_pay,
    tallies,
)
from jaxserve.planner.quantities import assumptions, prices, seconds, tokens
from jaxserve.planner.search_view import DECODE_ONLY
from jaxserve.planner.skew import Skew, read_skew
from jaxserve.planner.text import grid, json_text

PRODUCTS = ("auto", "bfloat16", "fp8", "int8")
LEGEND = (
    "the cheapest mode, its USD a million tokens, and x what AFD costs over the cheaper of EP and "
    "TP; -: nothing meets the TPOT"
)
SMALL = {
    "models": ["step3", "deepseek-v3"],
    "hardware": ["h800", "h20+h800"],
    "contexts": ["4K", "32K"],
    "tpots": ["50ms", "100ms"],
}
FULL = {
    "models": ["step3", "deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "qwen3-32b"],
    "hardware": [
        *("h20", "h100", "h200", "h800", "b200", "v5p", "v6e", "v7x"),
        *("h20+h100", "h20+h800", "h20+b200", "h200+h100", "v6e+v7x", "v5p+v6e"),
    ],
    "contexts": ["2K", "8K", "16K", "32K"],
    "tpots": ["25ms", "50ms", "100ms"],
}
"""480 cases on one kind of hardware, and 360 on two."""


def add_map(command: argparse.ArgumentParser) -> None:
    """The options."""
    add = command.add_argument
    add("--full", action="store_true", help="5 models, 8 chips and 6 mixes, 4 contexts, 3 TPOTs")
    add("--models", nargs="+", help=" ".join(SMALL["models"]))
    add("--hardware", nargs="+", metavar="NAME[+NAME]", help=" ".join(SMALL["hardware"]))
    add("--contexts", nargs="+", help=f"mean tokens of a sequence: {' '.join(SMALL['contexts'])}")
    add("--tpots", nargs="+", help=" ".join(SMALL["tpots"]))
    add("--max-devices", type=int, default=48, help="48")
    add("--jobs", type=int, default=0, help="processes: as many as there are cores")
    add("--compute", choices=PRODUCTS, default="auto", help="of matrix products")
    add("--core", choices=PRODUCTS, default="auto", help="of attention's own products")
    add("--skew", help="of the experts' popularity, as of simulate")
    add("--price", nargs="+", default=[], metavar="NAME=USD", help="a device and hour")
    add("--assume", nargs="+", default=[], metavar="NAME=VALUE", help="or `published`, `paper`")
    command.set_defaults(run=run)


class _Part(NamedTuple):
    """The cases of a model on a mix: what a process works on."""

    name: str
    model: CostModel
    mix: Mix
    contexts: list[int]
    tpots: list[float]
    formats: Formats
    assumed: Assumptions
    skew: Skew | None
    most: int

    def cases(self) -> list[Case]:
        """All of them."""
        return list(cases(*self))


def run(options: argparse.Namespace) -> int:
    """Evaluates and shows.

    Raises:
      ConfigError: an option is wrong.
    """
    for name, low, high in (("max_devices", 1, 512), ("jobs", 0, 256)):
        if not low <= (value := getattr(options, name)) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: from {low} to {high}")
    for name, values in (FULL if options.full else SMALL).items():
        setattr(options, name, getattr(options, name) or values)
    contexts = [tokens(text, "--contexts") for text in options.contexts]
    tpots = [seconds(text, "--tpots") for text in options.tpots]
    assumed = assumptions(options.assume)
    skew = read_skew(options.skew) if options.skew is not None else None
    mixes = [_mix(name, options) for name in options.hardware]
    parts = []
    for name in options.models:
        model = load_model(name, options.configs)
        _check_positions(name, contexts, options)
        for mix in mixes:
            formats, most = _formats(mix, options), options.max_devices
            parts.append(_Part(name, model, mix, contexts, tpots, formats, assumed, skew, most))
    found = _evaluate(parts, options.jobs or os.cpu_count() or 1)
    _show(options, found)
    return 0


def _evaluate(parts: Sequence[_Part], jobs: int) -> list[Case]:
    """The cases of all parts, in processes of their own if there are several."""
    found: list[Case] = []
    with contextlib.ExitStack() as stack:
        results: Iterator[list[Case]] = map(_Part.cases, parts)
        if min(jobs, len(parts)) > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(min(jobs, len(parts)), spawn)
            results = stack.enter_context(pool).map(_Part.cases, parts)
        for part, own in zip(parts, results, strict=True):
            print(f"{part.name} on {part.mix.name}", file=sys.stderr)
            found += own
    return found


def _show(options: argparse.Namespace, found: Sequence[Case]) -> None:
    """As it is asked for."""
    rows, notes = map_rows(found), [DECODE_ONLY, LEGEND, map_summary(found)]
    counted = tallies(found) if options.full else []
    pays = [
        f"{case.model} on {case.mix}, {case.context // 1024}K, {case.tpot * 1e3:g} ms: "
        f"x{ratio:.2f} of the cheapest on either alone"
        for case, ratio in mixes_that_pay(found)
    ]
    if pays:
        notes.append("mixes that pay:")
    if options.html:
        sections = [("", report.table(rows) + report.lines([*notes, *pays]))]
        sections += [(each[0][0], report.table(each)) for each in counted]
        page = report.page("Where AFD, EP and TP are the cheapest", sections)
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        print(json_text({"scope": DECODE_ONLY, "cases": map_tree(found)}))
    else:
        print("\n".join([grid(rows), "", *notes, *pays]))
        for each in counted:
            print(f"\n{grid(each)}")


def _check_positions(name: str, contexts: Sequence[int], options: argparse.Namespace) -> None:
    config = model_config(model_folder(name, options.configs))
    if config is not None and max(contexts) > config.max_positions:
        raise ConfigError(
            f"--contexts {max(contexts)}: {name} has {config.max_positions} positions"
        )


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
