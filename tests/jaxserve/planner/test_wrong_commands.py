"""Command lines of `plan` that are wrong: each ends with 2 and says which option is."""

import pytest

from jaxserve.plan import main

COMPILE = "compile --config step3-v6e"
SIMULATE = "simulate --config demo --hardware cpu --steps 8 --warm-up 2 --prompt 64 --output 16"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (COMPILE, "--topology is missing"),
        ("compile --topology v6e:8x8", "--config is missing"),
        (f"{COMPILE} --topology v6e:8x8 --bucket many", "--bucket 'many'"),
        (f"{COMPILE} --topology v6e:8x8 --workers 0", "--workers 0"),
        (f"{COMPILE} --topology v6e", "--topology 'v6e': expected generation:chips"),
        (f"{COMPILE} --topology v6e:8x8 --set lane=3", "did you mean 'lanes'?"),
        (f"{SIMULATE} --placed", "--placed needs --skew"),
        (f"{SIMULATE} --skew some", "--skew 'some': expected a spread"),
        (f"{SIMULATE} --prompt 8K", "--prompt 8192 and --output 16 exceed scheduler.max_length"),
        (f"{SIMULATE} --domains 0", "--domains 0: expected 1 to 64"),
        (f"{SIMULATE} --warm-up 8", "--warm-up 8: expected 0 to 7"),
        (f"{SIMULATE} --jitter much", "--jitter 'much'"),
        (f"{SIMULATE} --jitter head=1", "--jitter 'head=1'"),
        (f"{SIMULATE} --stall often", "--stall 'often'"),
        (f"{SIMULATE} --host never", "--host 'never'"),
        (f"{SIMULATE} --hardware h900", "hardware 'h900' is not known; did you mean 'h800'?"),
        (f"{SIMULATE} --calibration none.json", "none.json: No such file"),
        ("verify --config demo", "--timeline is missing"),
        ("verify --config demo --timeline nowhere", "--hardware is missing"),
        ("verify --config demo --timeline nowhere --hardware v6e", "nowhere"),
        ("verify --config demo --timeline nowhere --hardware v99", "hardware 'v99' is not known"),
        ("calibrate", "nothing to calibrate with"),
        ("calibrate --measured a.json --batches 4", "loads of a --timeline, which is missing"),
        (
            "map --contexts 64K --models qwen3-32b",
            "--contexts 65536: qwen3-32b has 40960",
        ),
        ("map --jobs 1000", "--jobs 1000: from 0 to 256"),
        ("map --max-devices 0", "--max-devices 0: from 1 to 512"),
        ("map --hardware h20+h9000", "hardware 'h9000' is not known"),
        ("estimate --config kimi-k2", "kimi-k2-h200.json: No such file"),
        ("estimate --config step3 --set lanes=2", "--set lanes=2: with --count alone"),
        # Counts of kernels that do not run would be wrong.
        (
            "estimate --count --config step3 --set attention.int8_products=[0]",
            "attention.int8_products = [0] is not counted",
        ),
        (
            "search --model qwen3-30b-a3b --hardware h800 --context 4K --tpot 50ms --drafts 2",
            "--drafts 2: qwen3-30b-a3b has no multi-token-prediction",
        ),
    ],
)
def test_the_option_is_named(capsys, command, message):
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err
