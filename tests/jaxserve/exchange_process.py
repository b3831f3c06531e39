"""Greedy tokens of one model on one layout after another; as a process, for layouts that need more
devices than a test has. See `test_exchange_layouts.py`."""

import json
import sys
from pathlib import Path
from typing import Any

from jaxserve.engine.request import SamplingParams
from tests.jaxserve import layouts

PROMPTS = layouts.PROMPTS[:8]
"""Fewer than 16 DP groups: some have nothing to do."""

OUTPUT_TOKENS = 24


def tokens_of(model: Path, overrides: dict[str, Any]) -> list[list[int]]:
    """Tokens after the prompts, in FP32."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    with layouts.running(model, overrides) as engine:
        return layouts.generate(engine, PROMPTS, params)


def main() -> None:
    model, cases, written = sys.argv[1:]
    tokens = [tokens_of(Path(model), overrides) for overrides in json.loads(cases)]
    Path(written).write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
