"""Rendered objects are what their schemas say, and start processes that fit together."""

import subprocess

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.fleet.membership import process_shares
from jaxserve.launch.__main__ import main
from jaxserve.launch.settings import deployment_text
from tests import golden
from tests.jaxserve.launch.rendered import (
    container_of,
    deployment_in,
    files_of,
    objects,
    process_of,
)
from tests.jaxserve.launch.schemas import needs_schemas, problems

V6E = "--config step3-v6e --hardware v6e --target gke-lws"
FLEET = "--config step3-prefill --target kubernetes"
PULL = "--config demo-fleet-afd --target kubernetes"
EVERY = golden.text("launch/kubernetes.txt").splitlines()
HOSTS = EVERY[-3]


@needs_schemas
@pytest.mark.parametrize("command", EVERY)
def test_objects_are_what_their_schemas_say(command: str) -> None:
    for text in files_of(command).values():
        for tree in objects(text).values():
            assert problems(tree) == []


@needs_schemas
def test_the_schemas_find_what_is_wrong() -> None:
    (text,) = files_of(V6E).values()
    tree = objects(text)["LeaderWorkerSet", "jaxserve"]
    tree["spec"]["replicas"] = "one"
    group = tree["spec"]["leaderWorkerTemplate"]
    group["leaderTemplate"]["spec"]["containers"][0]["readynessProbe"] = {}
    found = "\n".join(problems(tree))
    assert "readynessProbe" in found
    assert '"one" is not of type' in found


SECTIONS = ("attention", "ffn", "link", "cache", "scheduler", "lanes", "prefill", "pages")


def test_the_group_of_a_slice_is_one_runtime(tmp_path) -> None:
    (text,) = files_of(V6E).values()
    made = objects(text)
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    given = load_deployment("step3-v6e")
    assert [getattr(read, key) for key in SECTIONS] == [getattr(given, key) for key in SECTIONS]
    group = made["LeaderWorkerSet", "jaxserve"]["spec"]["leaderWorkerTemplate"]
    variables = {"WORKER_INDEX": "3", "GROUP_SIZE": "16", "LEADER_ADDRESS": "j-0.j"}
    cluster = {f"LWS_{key}": value for key, value in variables.items()}
    for name in ("leaderTemplate", "workerTemplate"):
        container = container_of(group[name])
        options, process = process_of(container, **cluster)
        assert options.config == "/etc/jaxserve/deployment.yaml"
        assert (process.process_id, process.processes, process.is_leader) == (3, 16, False)
        assert (process.coordinator, process.control_address) == ("j-0.j:9001", "j-0.j:9002")
        assert process.control_bind == "[::]:9002"
        shares = {share.devices for share in process_shares(read, process.processes)}
        assert shares == {int(container["resources"]["limits"]["google.com/tpu"])}
        assert group[name]["spec"]["terminationGracePeriodSeconds"] == 5 + 30 + 25


def test_a_fleet_is_a_workload_a_role(tmp_path) -> None:
    files = files_of(FLEET)
    for name, text in files.items():
        golden.check(f"launch/fleet-{name}", text)
    made = objects(files["kubernetes.yaml"])
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    assert read.fleet.registry == "kubernetes"
    assert read.fleet.prefill == ["jaxserve-prefill-leaders:9100"]
    assert read.fleet.domains == ["jaxserve-domain-leaders:9100"]
    prefill = made["LeaderWorkerSet", "jaxserve-prefill"]["spec"]["leaderWorkerTemplate"]
    container = container_of(prefill["workerTemplate"])
    options, process = process_of(container, POD_IP="10.0.0.7")
    assert (process.role, process.processes, options.listen) == ("prefill", 1, "10.0.0.7:9100")
    domain = made["LeaderWorkerSet", "jaxserve-domain"]["spec"]["leaderWorkerTemplate"]
    cluster = {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "d-0.d"}
    container = container_of(domain["leaderTemplate"])
    options, process = process_of(container, POD_IP="10.0.0.8", **cluster)
    assert (process.role, process.is_leader, process.processes) == ("decode", True, 4)
    router = made["Deployment", "jaxserve-router"]["spec"]["template"]
    options, process = process_of(container_of(router))
    assert (process.role, options.insecure_bind) == ("router", False)
    clients = made["Service", "jaxserve-api"]["spec"]["selector"]
    assert clients == router["metadata"]["labels"]
    workers = {tree["metadata"]["name"] for (kind, _), tree in made.items() if "Leader" in kind}
    scaled = objects(files["autoscale.yaml"]).values()
    assert {tree["spec"]["scaleTargetRef"]["name"] for tree in scaled} == workers


def test_attention_workers_find_their_ffn_worker(tmp_path) -> None:
    made = objects(files_of(PULL)["kubernetes.yaml"])
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    assert read.link.addresses == ["jaxserve-ffn-0.jaxserve-ffn:9000"]
    ffn = made["LeaderWorkerSet", "jaxserve-ffn"]["spec"]["leaderWorkerTemplate"]
    given = {"POD_IP": "10.0.0.9", "WORKER": "1"}
    options, process = process_of(container_of(ffn["workerTemplate"]), **given)
    assert (process.role, options.listen, process.worker) == ("ffn", "10.0.0.9:9000", 1)
    domain = made["LeaderWorkerSet", "jaxserve-domain"]["spec"]
    assert domain["replicas"] == 2
    container = container_of(domain["leaderWorkerTemplate"]["workerTemplate"])
    assert process_of(container, POD_IP="10.0.0.9")[1].role == "attention"


def test_every_process_of_an_ffn_worker_listens_for_rows(tmp_path) -> None:
    made = objects(files_of(HOSTS)["kubernetes.yaml"])
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    hosts = ["jaxserve-ffn-0", "jaxserve-ffn-0-1", "jaxserve-ffn-1", "jaxserve-ffn-1-1"]
    assert read.link.addresses == [f"{host}.jaxserve-ffn:9000" for host in hosts]
    ffn = made["LeaderWorkerSet", "jaxserve-ffn"]["spec"]
    assert (ffn["replicas"], ffn["leaderWorkerTemplate"]["size"]) == (2, 2)
    follower = container_of(ffn["leaderWorkerTemplate"]["workerTemplate"])
    assert {"name": "worker", "containerPort": 9000} in follower["ports"]
    cluster = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "f-0.f"}
    options, process = process_of(follower, POD_IP="10.0.0.9", WORKER="1", **cluster)
    assert (options.listen, process.control_address) == ("10.0.0.9:9000", "f-0.f:9002")
    assert (process.role, process.process_id, process.processes) == ("ffn", 1, 2)


@pytest.mark.parametrize("name", ["demo", "step3-fleet", "step3-prefill", "kimi-k2"])
def test_a_deployment_survives_being_written(name: str, tmp_path) -> None:
    given = load_deployment(CONFIGS / f"{name}.yaml")
    assert deployment_in(deployment_text(given), tmp_path) == given


def test_a_bucket_is_mounted_where_models_are() -> None:
    (text,) = files_of(f"{V6E} --models-bucket weights").values()
    assert "PersistentVolumeClaim" not in text
    group = objects(text)["LeaderWorkerSet", "jaxserve"]["spec"]["leaderWorkerTemplate"]
    pod = group["workerTemplate"]
    assert pod["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "models")
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "weights"


def test_certificates_are_mounted_in_every_container(tmp_path) -> None:
    """`cluster.tls` has a Secret of its own; Compose mounts the folder beside its file."""
    given = "--set=cluster.tls=certificates"
    text = files_of(f"{FLEET} {given}")["kubernetes.yaml"]
    assert "--from-file=ca.crt --from-file=tls.crt --from-file=tls.key" in text
    data = objects(text)["ConfigMap", "jaxserve"]["data"]
    folder = deployment_in(data["deployment.yaml"], tmp_path).cluster.tls
    # A router, a domain of one pod, and prefill workers of leaders and others.
    assert text.count("secretName: jaxserve-tls") == text.count(f"mountPath: {folder}\n") == 4
    compose = files_of(f"--config demo-fleet --target docker {given}")["compose.yaml"]
    assert compose.count(f"- ./tls:{folder}:ro") == 3


@pytest.mark.parametrize(("image", "flagged"), [("a/b:1", 1), (f"a/b@sha256:{'0c' * 32}", 0)])
def test_an_image_without_a_digest_is_flagged(image: str, flagged: int) -> None:
    text = files_of(f"{FLEET} --image {image}")["kubernetes.yaml"]
    assert text.count("# a tag may come to name another image: --image NAME@sha256") == flagged
    assert f"image: {image}\n" in text


def test_files_are_written(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--config demo-fleet --model gs://b/m --target kubernetes"
    assert main([*small.split(), "--write", str(tmp_path / "new")]) == 0
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {"kubernetes.yaml", "autoscale.yaml"}
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("jaxserve: not checked: gs://b/m cannot be read here")
    head = (tmp_path / "new" / "kubernetes.yaml").read_text().splitlines()[0]
    assert head == f"# python -m jaxserve.launch {small}"
    assert main([*small.split(), "--write", "/dev/null/x"]) == 2
    assert "--write /dev/null/x: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "count"), [("--config step3 --hardware h100 --target kubernetes", 2), (V6E, 0)]
)
def test_a_process_a_gpu_where_a_runtime_has_both_roles(command: str, count: int) -> None:
    """In the templates of the leader and of the others."""
    (text,) = files_of(command).values()
    assert (text.count("--host-processes=8\n"), text.count("--host-processes")) == (count, count)


def test_options_of_a_cluster_with_gpus() -> None:
    """Network cards need locked memory, and so root. Only given labels of nodes are required."""
    golden.check("launch/options-kubernetes.yaml", files_of(EVERY[-2])["kubernetes.yaml"])


def test_each_role_takes_nodes_with_its_kind_of_gpu() -> None:
    required = files_of(EVERY[2])["kubernetes.yaml"].split("requiredDuringScheduling")[1:]
    products = [text.split("values:\n")[1].split()[1] for text in required]
    assert products == ["NVIDIA-H20", "NVIDIA-H800", "NVIDIA-A800-SXM4-80GB"]


def test_privileged_pods_lock_memory() -> None:
    """The shell raises the limit and hands on the arguments."""
    (text,) = files_of(f"{V6E} --privileged").values()
    group = objects(text)["LeaderWorkerSet", "jaxserve"]["spec"]["leaderWorkerTemplate"]
    container = container_of(group["workerTemplate"])
    shell, flag, script, *rest = container["command"]
    assert container["securityContext"]["privileged"]
    script = script.replace("ulimit -l unlimited", "true").replace("python -u -m", "echo")
    done = subprocess.run(
        [shell, flag, script, *rest, "a b", "c"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "jaxserve.serve a b c\n"
