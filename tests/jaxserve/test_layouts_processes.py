"""Same tokens with attention and FFN in different processes, also where M devices meet N.

As `test_layouts.py`, but with real processes joined by `jax.distributed`, step plans over the
control plane, and both transports between processes.
"""

import json

import pytest

from tests.jaxserve import layouts
from tests.jaxserve.fleet.launched import output_of
from tests.jaxserve.layouts import COLOCATED, Case, check
from tests.reference.tiny_deepseek_v4 import DEEPSEEK_V4
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_qwen3_next import QWEN3_NEXT
from tests.reference.tiny_sizes import VOCAB, TinyDeepseek

pytestmark = pytest.mark.unoptimised

SECONDS = 240


def run(model, overrides, processes, folder, *arguments):
    """Tokens, and at the end the state of the pipeline and counters of pages in host memory."""
    written = folder / "written.json"
    command = ["-m", "jaxserve.launch.local", "--processes", str(processes)]
    command += ["--module", "tests.jaxserve.layout_process"]
    command += ["--model", str(model), "--overrides", json.dumps(overrides)]
    command += ["--written", str(written), *arguments]
    output_of(*command, timeout=SECONDS)
    return json.loads(written.read_text())


@pytest.mark.multihost
def test_experts_move_between_processes(tiny_model, reference, tmp_path):
    """While requests run, from the checkpoint and from the other process, and a round of which one
    process could not read its expert moves none; three devices meet two."""
    case = Case("3A2F", 1, "alltoall", "ppermute")
    overrides = case.overrides | {"ffn.processes": 2, "ffn.redundant_slots": 1}
    overrides |= {"experts.move_gb_per_second": 10.0}
    tokens, view, _ = run(tiny_model, overrides, 3, tmp_path, "--moving")
    check(reference, tokens, case)
    assert view["experts"]["moves"] > 20


@pytest.mark.multihost
def test_domains_over_processes_give_the_colocated_tokens(tiny_model, reference, tmp_path):
    """Both attention processes have their half of both domains; the ffn process has two devices,
    so that processes of the two sides do not match one to one."""
    overrides = {"domains": 2, "lanes": 2, "attention.dp": 2, "attention.processes": 2}
    overrides |= {"ffn.processes": 1, "ffn.ep": 2}
    check(reference, run(tiny_model, overrides, 3, tmp_path)[0], "2 domains")


TWO_RANKS = {"ffn.ep": 2, "ffn.exchange": "alltoall"}
PAGES = {"cache.page_size": 32, "scheduler.page_buckets": [5]}
FEW = {"cache.pages": 24}
MODULES = {"speculative.method": "mtp", "speculative.modules": 2, "speculative.automatic": False}
DEEPSEEK = TinyModel("two modules", TinyDeepseek(num_nextn_predict_layers=2), seed=3)
STEPS = [
    (2, None, TWO_RANKS | {"lanes": 2, "speculative.method": "ngram"}),
    (2, None, FEW | {"lanes": 2, "attention.dp": 1, "attention.tp": 2, "ffn.ep": 2}),
    (2, None, {"lanes": 4, "ffn.tp": 2}),
    (4, None, TWO_RANKS | {"lanes": 3, "ffn.redundant_slots": 1}),
    (2, QWEN3_NEXT, PAGES | {"lanes": 2, "ffn.tp": 2}),
    (2, DEEPSEEK_V4, PAGES | {"lanes": 2, "ffn.tp": 2}),
    (2, DEEPSEEK, FEW | MODULES | {"lanes": 3, "ffn.tp": 2}),
]
"""Processes, a model (None: the one of `layouts.py`), and keys. With four processes each has one
device, and experts move. With few pages, requests are preempted and one is cancelled."""


@pytest.mark.nightly
@pytest.mark.multihost
@pytest.mark.parametrize(("processes", "model", "sizes"), STEPS)
def test_steps_of_one_dispatch_give_the_colocated_tokens(
    processes, model, sizes, tiny_model, reference, tmp_path
):
    """Each process plays one role. Recurrent states and open windows are replaced in the loop over
    layers and lanes, and passes of prediction modules follow it."""
    overrides = {"pipeline": "step", "attention.dp": 2, "ffn.exchange": "gather"} | sizes
    overrides |= {"experts.move_gb_per_second": 10.0}
    options = ["--crowded"] * ("cache.pages" in sizes) + ["--moving"] * (processes > 2)
    folder = model.write(tmp_path / "model") if model else tiny_model
    tokens = run(folder, overrides, processes, tmp_path, *options)[0]
    if model:
        with layouts.running(folder, PAGES | COLOCATED) as engine:
            assert tokens == layouts.generate(engine, layouts.prompts_below(VOCAB))
    else:
        check(reference, tokens, sizes)


@pytest.mark.nightly
@pytest.mark.multihost
@pytest.mark.parametrize(
    ("processes", "sizes"),
    [
        (2, COLOCATED | {"attention.tp": 2, "lanes": 2}),
        (3, {"attention.dp": 2, "attention.processes": 2, "ffn.processes": 1, "domains": 2}),
        (2, {"attention.dp": 2, "attention.processes": 2, "ffn.ep": 2, "ffn.processes": 2}),
    ],
)
def test_pages_in_host_memory_of_processes_that_share_a_mesh(
    processes, sizes, tiny_model, reference, tmp_path
):
    """The second start finds the pages that the first left in the folder."""
    overrides = FEW | sizes | {"cache.host_gb": 0.01, "cache.storage": str(tmp_path / "pages")}
    for _ in range(2):
        tokens, _, pages = run(tiny_model, overrides, processes, tmp_path, "--crowded")
        check(reference, tokens, sizes)
        assert (pages["hits"] > 0, pages["storage_errors"]) == (True, 0)
    assert pages["storage_hits"] > 20


@pytest.mark.nightly
@pytest.mark.multihost
def test_roles_that_order_their_messages_otherwise_do_not_start(tiny_model, tmp_path):
    digests = r"exchanges = (\w{16}) on process 1, .*exchanges = (?!\1)\w{16} on the leader"
    with pytest.raises(AssertionError, match=digests):
        run(tiny_model, {"pipeline": "step"}, 2, tmp_path, "--reordered")


BOTH_ROLES = [
    (4, 2, Case("2A4F", 2, "alltoall", "device_put")),
    (2, 4, Case("2A4F", 3, "gather", "ppermute")),
    (2, 4, Case("2A4F", 3, "gather", "device_put")),
]
"""Devices of either role, and the rest."""


@pytest.mark.nightly
@pytest.mark.multihost
@pytest.mark.parametrize(("attention", "ffn", "case"), BOTH_ROLES, ids=str)
def test_hosts_with_parts_of_both_roles_give_the_colocated_tokens(
    attention, ffn, case, tiny_model, reference, tmp_path
):
    """Two processes, each with half of the attention mesh and half of the ffn mesh."""
    sizes = {"attention.dp": attention, "attention.tp": 1, "ffn.ep": ffn, "ffn.tp": 1}
    overrides = case.overrides | sizes | {"attention.processes": 2, "ffn.processes": 2}
    check(reference, run(tiny_model, overrides, 2, tmp_path)[0], case)


@pytest.mark.multihost
def test_figures_of_all_processes_come_together(tiny_model, reference, tmp_path):
    """The ffn's times and the experts' tokens are the followers'."""
    case = Case("3A2F", 3, "gather", "device_put")
    tokens, view, _ = run(tiny_model, case.overrides, 2, tmp_path, "--figures")
    check(reference, tokens, case)
    assert view["missing"] == ""
    assert set(view["busy"]) == {"attend", "dispatch", "ffn", "combine"}
    assert all(0 < share <= 1 for share in view["busy"].values())
    assert {(span["stage"], span["process"]) for span in view["timeline"]} == {
        *(("attend", 0), ("combine", 0), ("dispatch", 1), ("ffn", 1))
    }
    counted = view["experts"]["expert_tokens"]
    assert sorted(counted) == ["1", "2"]
    assert all(sum(tokens) > 0 for tokens in counted.values())


@pytest.mark.matrix
@pytest.mark.multihost
@pytest.mark.parametrize("case", layouts.matrix(), ids=str)
def test_every_layout_over_two_processes_gives_the_colocated_tokens(
    case, tiny_model, reference, tmp_path
):
    check(reference, run(tiny_model, case.overrides, 2, tmp_path)[0], case)
