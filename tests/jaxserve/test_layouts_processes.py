"""Same tokens with attention and FFN in different processes, also where M devices meet N.

As `test_layouts.py`, but with real processes joined by `jax.distributed`, step plans over the
control plane, and both transports between processes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.engine.build import make_engine
from tests.jaxserve import layouts
from tests.jaxserve.layouts import Case, Reference

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 240

SPANNING = [
    (2, Case("1A1F", 3, "trampoline", "device_put")),
    (2, Case("3A2F", 2, "trampoline", "device_put")),
    (2, Case("3A2F", 1, "broadcast", "ppermute")),
    (3, Case("2A1F", 2, "trampoline", "device_put")),
]


@pytest.fixture(scope="module")
def reference(tiny_model, colocated_runtime):
    engine = make_engine(colocated_runtime, eos_token_ids=frozenset())
    engine.start()
    tokens = layouts.generate(engine)
    engine.close()
    return Reference.of(tiny_model, tokens)


def tokens_of(model, case, processes, folder, *arguments):
    written = folder / "tokens.json"
    command = [sys.executable, str(REPOSITORY / "launch" / "local.py")]
    command += ["--processes", str(processes), "--module", "tests.jaxserve.layout_process"]
    command += ["--model", str(model), "--overrides", json.dumps(case.overrides)]
    command += ["--tokens", str(written), *arguments]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return json.loads(written.read_text())


def check(tokens, reference, case, record_property):
    found = layouts.differences(reference, tokens)
    for difference in found:
        record_property("difference", f"{case}: {difference}")
    assert all(difference.allowed for difference in found), found


@pytest.mark.multihost
@pytest.mark.parametrize(("processes", "case"), SPANNING, ids=str)
def test_processes_give_the_colocated_tokens(
    processes, case, tiny_model, reference, tmp_path, record_property
):
    tokens = tokens_of(tiny_model, case, processes, tmp_path)
    check(tokens, reference, case, record_property)


@pytest.mark.multihost
def test_figures_of_all_processes_come_together(tiny_model, tmp_path):
    """The ffn's times are measured by the followers, the experts' tokens by the attention role."""
    case = Case("1A1F", 2, "trampoline", "device_put")
    view = tokens_of(tiny_model, case, 2, tmp_path, "--figures")
    assert view["missing"] == ""
    assert set(view["busy"]) == {"attend", "dispatch", "ffn", "combine"}
    assert all(0 < share <= 1 for share in view["busy"].values())
    assert {(span["stage"], span["process"]) for span in view["timeline"]} == {
        *(("attend", 0), ("combine", 0), ("dispatch", 1), ("ffn", 1))
    }
    totals = {sum(tokens) for tokens in view["expert_tokens"].values()}
    assert len(totals) == 1  # every layer has the same tokens
    assert totals.pop() > 0


@pytest.mark.matrix
@pytest.mark.multihost
@pytest.mark.parametrize("case", layouts.matrix(), ids=str)
def test_every_layout_over_two_processes_gives_the_colocated_tokens(
    case, tiny_model, reference, tmp_path, record_property
):
    tokens = tokens_of(tiny_model, case, 2, tmp_path)
    check(tokens, reference, case, record_property)
