"""`python -m jaxserve.convert SRC DST [--weights fp8|int8|int4|mxfp4|bf16]`: a Hugging Face
folder becomes a checkpoint of Orbax arrays, which every layout restores from. `--verify DST` checks
one, or the weight files of any other folder.
`--weights int8 --calibrate TEXT` quantises by SmoothQuant and GPTQ on a text (xDeepServe §4.7), and
so does `int4`, for FFNs alone. `--int8-products DST --calibrate TEXT` measures which layers bear
attention in INT8, and writes the list that `attention.int8_products: auto` reads.

An interrupted run resumes when it is started again. Exit codes: 1 the verified checkpoint is
damaged, 2 wrong arguments, 130 Ctrl-C.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxserve.calibration.run import (
    CalibrationReport,
    CalibrationSettings,
    CalibrationText,
    LayerReport,
    cut,
)
from jaxserve.checkpoint import conversion
from jaxserve.checkpoint.conversion import CALIBRATION
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.manifest import read_record
from jaxserve.checkpoint.sensitivity import ProductLoss, measure
from jaxserve.checkpoint.verification import verify
from jaxserve.config.command_line import add_options
from jaxserve.config.formats import choices, group_of, scaled, sharing
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.progress import Progress
from jaxserve.storage.bucket import is_url
from jaxserve.storage.mirror import INT8_PRODUCTS
from jaxserve.text.tokenizer import Tokenizer

GROUP = 128
"""Columns that share a scale in INT4 unless `--group` says otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts or verifies; returns the exit code."""
    options = _parse(arguments)
    # Everything runs on the host; an accelerator may be busy serving.
    jax.config.update("jax_platforms", "cpu")
    conversion.quieten_libraries()
    try:
        if options.verify:
            return _verify(options.verify)
        if options.int8_products:
            return _int8_products(options)
        return _convert(options)
    except KeyboardInterrupt:
        print("convert: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (CheckpointError, ConfigError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m jaxserve.convert",
        description="Convert a Hugging Face folder to sharded Orbax arrays.",
    )
    made.add_argument(
        "--weights",
        choices=[*filter(scaled, choices("weights")), "bf16"],
        help="format of the matrices (FP8 blocks stay blocks in fp8; int4, mxfp4: those of FFNs, "
        "attention stays in floats); as they are if not given",
    )
    add_options(made, Path(__file__).with_suffix(".yaml"), {"count": _count})
    settings = CalibrationSettings()
    made.set_defaults(calibration_tokens=settings.tokens, expert_samples=settings.expert_samples)
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(arguments)
    alone = "verify" if options.verify is not None else "int8-products"
    folder = options.verify if options.verify is not None else options.int8_products
    if folder is None and options.target is None:
        made.error("SRC and DST are required, or --verify DST, or --int8-products DST")
    if folder is not None and options.source is not None:
        made.error(f"--{alone} takes no SRC and DST beside it")
    if options.int8_products is not None:
        if options.verify is not None or options.weights is not None:
            made.error("--int8-products measures a model as it is, without --verify and --weights")
        if options.calibrate is None:
            made.error("--int8-products needs --calibrate FILE")
        if is_url(options.int8_products):
            made.error(f"--int8-products {options.int8_products}: the list is written to a folder")
        if not 0 < options.budget < math.inf:
            made.error(f"--budget {options.budget:g}: needs a number above 0")
        return options
    if options.target is not None and is_url(options.target):
        made.error(f"DST {options.target}: a conversion is written to a folder; copy it afterwards")
    if options.calibrate is not None and not conversion.rounded_to(options.weights, GROUP):
        made.error(f"--calibrate needs --weights int8 or int4, and not {options.weights}")
    weights = options.weights or ""
    if options.group is not None and (sharing(weights) != "group" or group_of(weights)):
        made.error(f"--group needs --weights int4, and not {options.weights}")
    options.group = options.group or GROUP
    return options


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _convert(options: argparse.Namespace) -> int:
    calibration = _calibration(options) if options.calibrate is not None else None
    files = [] if is_url(options.source) else Path(options.source).glob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    with Progress("convert", 1, total_bytes=size or None) as progress:
        conversion.convert(
            options.source,
            options.target,
            options.weights,
            group=options.group,
            calibration=calibration,
            ignored=options.ignore_key,
            on_block=_counted(progress),
            on_read=lambda size: progress.advance(0, size=size),
        )
    if calibration is not None:
        for report in read_record(Path(options.target) / CALIBRATION, CalibrationReport).layers:
            _say_rounded(report, options.expert_samples)
    print(f"{options.target} is complete; serve it with --model {options.target}")
    return 0


def _calibration(options: argparse.Namespace) -> CalibrationText:
    """Returns the text as the model's tokens. Raises ConfigError for fewer than two, OSError or
    UnicodeDecodeError if it cannot be read."""
    config, _ = read_config(options.source, options.ignore_key)
    settings = CalibrationSettings(options.expert_samples, options.calibration_tokens)
    token_ids = _token_ids(options.calibrate, options.source)
    try:
        target = conversion.rounded_to(options.weights, options.group)
        assert target is not None
        return CalibrationText(settings, cut(token_ids, settings, config.max_positions), target)
    except ValueError as error:
        raise ConfigError(f"{options.calibrate}: {error}") from None


def _token_ids(file: Path, folder: str) -> list[int]:
    return Tokenizer.from_folder(folder).encode(file.read_text(encoding="utf-8"))


def _int8_products(options: argparse.Namespace) -> int:
    """Measures the layers and shows what they cost."""
    folder = options.int8_products
    config, _ = read_config(folder, options.ignore_key)
    token_ids = _token_ids(options.calibrate, folder)
    if len(token_ids) < 4:
        raise ConfigError(
            f"{options.calibrate}: {len(token_ids)} tokens; two sequences of 2 or more are needed"
        )
    # What differs between sequences says how sure a loss is.
    length = min(CalibrationSettings().sequence, len(token_ids) // 2)
    settings = CalibrationSettings(tokens=options.calibration_tokens, sequence=length)
    sequences = cut(token_ids, settings, config.max_positions)
    sequences = sequences[: max(2, settings.tokens // sequences.shape[1])]
    with Progress("sensitivity", 1) as progress:
        report = _counted(progress)
        alone, chosen = measure(folder, sequences, options.budget, report, options.ignore_key)
    print(f"{sequences.size} tokens; against products in floats with the same INT8 pages:")
    print("layer    KL, nats   perplexity, % (standard error)")
    for loss in alone:
        print(_line(f"{loss.layers[0]:5}", loss))
    if chosen is None:
        print(f"no layer is within {options.budget:g} %, two standard errors included")
    else:
        print(_line("these", chosen) + f"   {', '.join(map(str, chosen.layers))}")
    print(f"written: {Path(folder) / INT8_PRODUCTS}; serve with attention.int8_products: auto")
    return 0


def _line(name: str, loss: ProductLoss) -> str:
    return f"{name}  {loss.divergence:10.2e}   {loss.perplexity:+.4f} ({loss.noise:.4f})"


def _say_rounded(report: LayerReport, enough: int) -> None:
    """Names the experts that GPTQ had too little of."""
    if report.rounded:
        few = ", ".join(f"{expert} ({count})" for expert, count in report.rounded.items())
        print(
            f"layer {report.layer}: of {report.tokens} tokens fewer than {enough} chose expert "
            f"{few}: rounded to the nearest"
        )


def _verify(folder: str) -> int:
    with Progress("verify", 1) as progress:
        problems = verify(folder, on_block=_counted(progress))
    for problem in problems:
        print(f"convert: {folder}: {problem}", file=sys.stderr)
    if not problems:
        print(f"{folder} is whole")
    return int(bool(problems))


def _counted(progress: Progress) -> Callable[[int, int, str], None]:
    def on_block(done: int, blocks: int, note: str) -> None:
        progress.set(done, blocks, note)

    return on_block


if __name__ == "__main__":
    sys.exit(main())
