from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
from hypothesis import strategies as st

import jaxserve
from jaxserve.checkpoint.fingerprint import revision
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.sections import AttentionRole, Cluster, FFNRole, Server
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.fleet.agreement import deployment_facts
from jaxserve.fleet.bootstrap import identity
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.fleet.membership import ProcessShare, process_shares
from tests import golden
from tests.reference.tiny_step3 import write_tiny_step3


def deployment(dp: int = 1, tp: int = 1, ep: int = 1, ffn_tp: int = 1, **more: object):
    roles = {"attention": AttentionRole(dp=dp, tp=tp), "ffn": FFNRole(ep=ep, tp=ffn_tp)}
    return Deployment(**({"model": "model"} | roles | more))


@golden.table("fleet/shares.yaml")
def test_shares(layout, processes, expected):
    shares = tuple(ProcessShare(*share) for share in expected)
    assert process_shares(deployment(*layout), processes) == shares


def test_a_split_that_is_uneven_shows_the_arithmetic():
    def call(*sizes: int, **options: object) -> None:
        process_shares(deployment(*sizes, **options), 3)

    golden.check_arguments("fleet/uneven_shares.txt", ConfigError, call, {})


@hypothesis.given(
    *(st.integers(1, 6) for _ in range(4)),
    st.integers(1, 12),
    st.sampled_from(["afd", "colocated"]),
)
def test_shares_add_up_and_roles_mix_only_where_nothing_else_divides(
    dp, tp, ep, ffn_tp, processes, mode
):
    layout = deployment(dp, tp, ep, ffn_tp, mode=mode)
    try:
        shares = process_shares(layout, processes)
    except ConfigError:
        assert processes > 1
        return
    assert len(shares) == processes
    assert sum(share.devices for share in shares) == layout.devices
    assert sum(share.attention for share in shares) == layout.attention.devices
    if processes > 1 and layout.separate_splits(processes):
        assert {share.role for share in shares} <= {"attention", "ffn"}
    elif processes > 1:
        assert len(set(shares)) == 1
    assert [share.role for share in shares] == sorted(share.role for share in shares)


def test_each_process_has_its_part_of_both_roles_where_asked():
    colocated = deployment(4, 1, mode="colocated")
    for count in (1, 2):
        assert process_shares(colocated, count) == (ProcessShare(4 // count, 0),) * count
    asked = {"attention.processes": 2, "ffn.processes": 2}
    assert process_shares(deployment(8, ep=8), 2) == (ProcessShare(8, 0), ProcessShare(0, 8))
    both = load_deployment("demo", {"attention.dp": 8, "ffn.ep": 4, **asked})
    assert process_shares(both, 2) == (ProcessShare(4, 2),) * 2
    assert process_shares(both, 4) == (ProcessShare(4, 0),) * 2 + (ProcessShare(0, 2),) * 2
    assert process_shares(deployment(3, ep=3), 3) == (ProcessShare(1, 1),) * 3
    with pytest.raises(ConfigError, match=r"attention.processes 2 \+ ffn.processes 2 = 4, but"):
        process_shares(both, 3)
    uneven = {"attention.dp": 4, "ffn.ep": 6, "attention.processes": 1, "ffn.processes": 3}
    shares = process_shares(load_deployment("demo", uneven), 4)
    assert shares == (ProcessShare(4, 0), *(ProcessShare(0, 2),) * 3)


def test_identity_says_what_must_be_equal(tmp_path, monkeypatch):
    (tmp_path / "nvidia_nccl_cu13-2.29.2.dist-info").mkdir()
    metadata = tmp_path / "nvidia_nccl_cu13-2.29.2.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.29.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    here = identity(1, 2, deployment(2))
    assert (here.process_id, here.processes, here.facts["--processes"]) == (1, 2, "2")
    assert here.facts["jaxserve"] == jaxserve.__version__
    assert {"jaxserve", "jax", "jaxlib"} <= set(here.facts)
    assert here.facts["nvidia-nccl-cu13"] == "2.29.2"
    assert here.facts["attention.dp"] == "2"
    assert here.facts["link.route"] == "trampoline"


def test_digest_ignores_addresses_and_the_path_of_the_model(tmp_path):
    for name, text in (("a", "{}"), ("b", "{}"), ("c", '{"layers": 3}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    plain = deployment(model=str(tmp_path / "a"))
    elsewhere = deployment(model=str(tmp_path / "b"), server=Server(grpc_port=1))
    other = deployment(model=str(tmp_path / "c"))
    assert identity(1, 2, plain).digest == identity(0, 2, elsewhere).digest
    assert identity(1, 2, plain).digest != identity(1, 2, other).digest
    assert identity(1, 2, plain).digest != identity(1, 2, deployment(2, model=plain.model)).digest
    assert not [key for key in deployment_facts(plain) if key.startswith("server")]


@pytest.mark.parametrize("name", ["copy", "other"])
def test_followers_have_the_weights_of_the_leader(tmp_path, name):
    """A copy in another folder is the same model; a fine-tune of the same shape is refused."""
    folders = {
        "leader": write_tiny_step3(tmp_path / "leader", seed=0),
        "follower": write_tiny_step3(tmp_path / name, seed=name == "other"),
    }
    leads, follows = (identity(n, 2, load_deployment(f)) for n, f in enumerate(folders.values()))
    assert leads.digest == follows.digest
    own, theirs = (revision(folder).digest for folder in folders.values())
    cluster = Cluster(start_seconds=10, step_seconds=1.0, heartbeat_seconds=0.5)
    ends = {"token": "secret", "cluster": cluster, "on_failure": print}
    leader = Leader(leads, address="127.0.0.1:0", **ends)
    leader.start()
    follower = Follower(follows, address=leader.address, **ends)
    follower.register()
    waits = ThreadPoolExecutor(1).submit(follower.wait_warm_up, theirs)
    try:
        if name == "copy":
            leader.begin_warm_up(own)
            waits.result(10)
            return
        differ = f"weights = {theirs} on process 1, {own} on the leader"
        with pytest.raises(ConfigError, match=f"^{differ}$"):
            leader.begin_warm_up(own)
        leader.close(failure=differ, timeout=1.0)
        with pytest.raises(EngineFailedError, match=differ):
            waits.result(10)
    finally:
        for end in (follower, leader):
            end.close()
