"""Same tokens with attention and FFN in different processes, also where M devices meet N.

As `test_layouts.py`, but with real processes joined by `jax.distributed`, step plans over the
control plane, and both transports between processes.
"""

import json

import pytest

from tests import golden
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


PAGES = {"cache.page_size": 32, "scheduler.page_buckets": [5]}
DEEPSEEK = TinyModel("two modules", TinyDeepseek(num_nextn_predict_layers=2), seed=3)
MODELS = {"qwen3_next": QWEN3_NEXT, "deepseek_v4": DEEPSEEK_V4, "two modules": DEEPSEEK}


@pytest.mark.nightly
@pytest.mark.multihost
@golden.table("roles/step_processes.yaml")
def test_steps_of_one_dispatch_give_the_colocated_tokens(
    processes, model, sizes, tiny_model, reference, tmp_path
):
    """Each process plays one role. Recurrent states and open windows are replaced in the loop over
    layers and lanes, and passes of prediction modules follow it."""
    overrides = {"pipeline": "step", "attention.dp": 2, "ffn.exchange": "gather"} | sizes
    overrides |= {"experts.move_gb_per_second": 10.0}
    options = ["--crowded"] * ("cache.pages" in sizes) + ["--moving"] * (processes > 2)
    folder = MODELS[model].write(tmp_path / "model") if model else tiny_model
    tokens = run(folder, overrides, processes, tmp_path, *options)[0]
    if model:
        with layouts.running(folder, PAGES | COLOCATED) as engine:
            assert tokens == layouts.generate(engine, layouts.prompts_below(VOCAB))
    else:
        check(reference, tokens, sizes)


@pytest.mark.nightly
@pytest.mark.multihost
@golden.table("roles/host_pages.yaml")
def test_pages_in_host_memory_of_processes_that_share_a_mesh(
    processes, sizes, tiny_model, reference, tmp_path
):
    """The second start finds the pages that the first left in the folder."""
    overrides = sizes | {"cache.host_gb": 0.01, "cache.storage": str(tmp_path / "pages")}
    overrides |= {"cache.pages": 24}
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


@pytest.mark.nightly
@pytest.mark.multihost
@golden.table("roles/lost_steps.yaml")
def test_a_lost_step_ends_all_processes(loses, sizes, tiny_model, tmp_path):
    """Also those that wait for a message inside a step, where ranks of the roles do not pair."""
    with pytest.raises(AssertionError, match="process 0 ended with exit code 1"):
        run(tiny_model, sizes, 2, tmp_path, "--loses", f"{loses}")


@pytest.mark.nightly
@pytest.mark.multihost
@golden.table("roles/hosts_of_both.yaml")
def test_hosts_with_parts_of_both_roles_give_the_colocated_tokens(
    attention, ffn, lanes, exchange, transport, tiny_model, reference, tmp_path
):
    """Two processes, each with half of the attention mesh and half of the ffn mesh."""
    case = Case("2A4F", lanes, exchange, transport)
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
