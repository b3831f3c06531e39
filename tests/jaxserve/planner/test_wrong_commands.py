"""Command lines of `plan` that are wrong."""

import pytest

from jaxserve.plan import main
from tests import golden

COMPILE = "compile --config step3-v6e"
SIMULATE = "simulate --config demo --hardware cpu --steps 8 --warm-up 2 --prompt 64 --output 16"
WRONG = [
    COMPILE,
    "compile --topology v6e:8x8",
    f"{COMPILE} --topology v6e:8x8 --bucket many",
    f"{COMPILE} --topology v6e:8x8 --workers 0",
    f"{COMPILE} --topology v6e",
    f"{COMPILE} --topology v6e:8x8 --set lane=3",
    f"{SIMULATE} --placed",
    f"{SIMULATE} --skew some",
    f"{SIMULATE} --prompt 8K",
    f"{SIMULATE} --domains 0",
    f"{SIMULATE} --warm-up 8",
    f"{SIMULATE} --jitter much",
    f"{SIMULATE} --jitter head=1",
    f"{SIMULATE} --stall often",
    f"{SIMULATE} --host never",
    f"{SIMULATE} --hardware h900",
    f"{SIMULATE} --calibration none.json",
    "verify --config demo",
    "verify --config demo --timeline nowhere",
    "verify --config demo --timeline nowhere --hardware v6e",
    "verify --config demo --timeline nowhere --hardware v99",
    "calibrate",
    "calibrate --measured a.json --batches 4",
    "map --contexts 64K --models qwen3-32b",
    "map --jobs 1000",
    "map --max-devices 0",
    "map --hardware h20+h9000",
    "estimate --config kimi-k2",
    "estimate --config step3 --set lanes=2",
    "estimate --count --config step3 --set attention.int8_products=[0]",
    "search --model qwen3-30b-a3b --hardware h800 --context 4K --tpot 50ms --drafts 2",
]


def test_each_is_told_with_its_option(capsys: pytest.CaptureFixture[str]):
    """`golden/planner/wrong.txt` has what is said of each."""
    told = []
    for command in WRONG:
        assert main(command.split()) == 2
        told.append(f"{command}\n    {capsys.readouterr().err}")
    golden.check("planner/wrong.txt", "\n".join(told))
