"""Rendered objects are what their schemas say, and start processes that fit together."""

import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.fleet.membership import process_shares
from jaxserve.launch.__main__ import main
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
EVERY = [
    V6E,
    FLEET,
    PULL,
    "--config demo --target kubernetes --without-keys --models-claim=",
    "--config qwen3-32b --hardware v6e --target gke-lws --cache-claim shared",
    "--config step3-v7x --hardware v7x --target gke-lws",
    "--config qwen3-235b-a22b --hardware h100 --target kubernetes "
    "--set server.tls_certificate=c.pem --set server.tls_key=k.pem",
    "--config step3-v6e --hardware v6e --target gke-jobset",
    "--config step3-v6e --hardware v6e --target gke-jobset --slices 2 --models-bucket weights",
    "--config step3-v7x --hardware v7x --target gke-jobset --without-keys",
]


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
    pod = tree["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    pod["containers"][0]["readynessProbe"] = {}
    tree["spec"]["replicas"] = "one"
    tree["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Sometimes"
    found = "\n".join(problems(tree))
    for part in ("readynessProbe", '"one" is not of type', '"Sometimes" is not one of'):
        assert part in found
    service = objects(text)["Service", "jaxserve-api"]
    service["spec"]["ports"][0]["targetport"] = 1
    assert "targetport" in "\n".join(problems(service))


def test_the_group_of_a_slice_is_one_runtime(tmp_path) -> None:
    (text,) = files_of(V6E).values()
    made = objects(text)
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    assert read.model == "/models/step3"
    assert read.server.api_keys == "/run/secrets/jaxserve/api-keys"
    assert (read.server.host, read.server.follower_http_port) == ("0.0.0.0", 8000)
    given = load_deployment("step3-v6e")
    assert [getattr(read, key) for key in _SECTIONS] == [getattr(given, key) for key in _SECTIONS]
    group = made["LeaderWorkerSet", "jaxserve"]["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (16, "RecreateGroupOnPodRestart")
    variables = {"WORKER_INDEX": "3", "GROUP_SIZE": "16", "LEADER_ADDRESS": "j-0.j"}
    for name in ("leaderTemplate", "workerTemplate"):
        container = container_of(group[name])
        cluster = {f"LWS_{key}": value for key, value in variables.items()}
        options, process = process_of(container, **cluster)
        assert options.config == "/etc/jaxserve/deployment.yaml"
        assert (process.process_id, process.processes, process.is_leader) == (3, 16, False)
        assert (process.coordinator, process.control_address) == ("j-0.j:8476", "j-0.j:8477")
        assert process.control_bind == "[::]:8477"
        shares = {share.devices for share in process_shares(read, process.processes)}
        assert shares == {int(container["resources"]["limits"]["google.com/tpu"])}
        pod = group[name]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 5 + 30 + 25
        assert pod["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
            "cloud.google.com/gke-tpu-topology": "8x8",
        }
        probed = {container[each]["httpGet"]["path"] for each in container if "Probe" in each}
        assert probed == {"/health", "/ready"}
    service = made["Service", "jaxserve-api"]["spec"]
    assert service["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert [port["port"] for port in service["ports"]] == [8000, 50051]


_SECTIONS = ("attention", "ffn", "link", "cache", "scheduler", "lanes", "prefill", "pages")


def test_a_fleet_is_a_workload_a_role(tmp_path) -> None:
    files = files_of(FLEET)
    made = objects(files["kubernetes.yaml"])
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    assert read.fleet.registry == "kubernetes"
    assert read.fleet.prefill == ["jaxserve-prefill-leaders:9100"]
    assert read.fleet.domains == ["jaxserve-domain-leaders:9100"]
    assert {name for kind, name in made if kind == "LeaderWorkerSet"} == {
        *("jaxserve-prefill", "jaxserve-domain")
    }
    prefill = made["LeaderWorkerSet", "jaxserve-prefill"]["spec"]
    assert (prefill["replicas"], prefill["leaderWorkerTemplate"]["size"]) == (4, 1)
    container = container_of(prefill["leaderWorkerTemplate"]["workerTemplate"])
    options, process = process_of(container, POD_IP="10.0.0.7")
    assert (process.role, process.processes, options.listen) == ("prefill", 1, "10.0.0.7:9100")
    assert container["readinessProbe"]["tcpSocket"] == {"port": "worker"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    domain = made["LeaderWorkerSet", "jaxserve-domain"]["spec"]
    assert (domain["replicas"], domain["leaderWorkerTemplate"]["size"]) == (1, 4)
    cluster = {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "d-0.d"}
    leader = container_of(domain["leaderWorkerTemplate"]["leaderTemplate"])
    options, process = process_of(leader, POD_IP="10.0.0.8", **cluster)
    assert (process.role, process.is_leader, process.processes) == ("decode", True, 4)
    for kind in ("prefill", "domain"):
        service = made["Service", f"jaxserve-{kind}-leaders"]["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"] == {
            "leaderworkerset.sigs.k8s.io/name": f"jaxserve-{kind}",
            "leaderworkerset.sigs.k8s.io/worker-index": "0",
        }
    router = made["Deployment", "jaxserve-router"]["spec"]
    options, process = process_of(container_of(router["template"]))
    assert (process.role, options.insecure_bind) == ("router", False)
    clients = made["Service", "jaxserve-api"]["spec"]["selector"]
    assert clients == router["template"]["metadata"]["labels"]
    scaled = objects(files["autoscale.yaml"])
    targets = {tree["spec"]["scaleTargetRef"]["name"] for tree in scaled.values()}
    assert targets == {"jaxserve-prefill", "jaxserve-domain"}


def test_attention_workers_find_their_ffn_worker(tmp_path) -> None:
    made = objects(files_of(PULL)["kubernetes.yaml"])
    read = deployment_in(made["ConfigMap", "jaxserve"]["data"]["deployment.yaml"], tmp_path)
    assert read.link.addresses == ["jaxserve-ffn-0.jaxserve-ffn:9000"]
    ffn = made["LeaderWorkerSet", "jaxserve-ffn"]["spec"]["leaderWorkerTemplate"]
    options, process = process_of(container_of(ffn["workerTemplate"]), POD_IP="10.0.0.9")
    assert (process.role, options.listen) == ("ffn", "10.0.0.9:9000")
    domain = made["LeaderWorkerSet", "jaxserve-domain"]["spec"]
    assert domain["replicas"] == 2
    container = container_of(domain["leaderWorkerTemplate"]["workerTemplate"])
    assert process_of(container, POD_IP="10.0.0.9")[1].role == "attention"


@pytest.mark.parametrize("name", ["demo", "step3-fleet", "step3-prefill", "kimi-k2"])
def test_a_deployment_survives_being_written(name: str, tmp_path) -> None:
    from jaxserve.launch.settings import deployment_text

    given = load_deployment(CONFIGS / f"{name}.yaml")
    assert isinstance(given, Deployment)
    assert deployment_in(deployment_text(given), tmp_path) == given


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "--config demo --target gke-lws",
            "is for a tpu, and attention.hardware and ffn.hardware are missing (whole); write v5e, "
            "v5p, v6e or v7x there, or say it with --hardware",
        ),
        (
            "--config demo --target slurm",
            "is for a gpu, and attention.hardware and ffn.hardware are missing (whole); write a800",
        ),
        (
            "--config demo-fleet --target gke-lws",
            "is for a tpu, and attention.hardware is missing (prefill)",
        ),
        (
            "--config step3 --target gke-jobset",
            "is for a tpu, and attention.hardware and ffn.hardware = h800 (whole); write v5e",
        ),
        (
            "--config step3-v6e --hardware v6e --target gke-lws --set ffn.ep=2",
            "48 chips of v6e: there are slices of 1, 4, 8, 16, 32, 64, 128, 256",
        ),
        (
            "--config step3 --hardware h100 --target kubernetes --set attention.dp=12 "
            "--set ffn.instances=1",
            "28 devices do not fill hosts of 8 NVIDIA H100 SXM",
        ),
        (
            "--config step3-fleet --target kubernetes --set ffn.ep=16",
            "ffn: 16 devices in one process, but a host",
        ),
        (
            "--config demo --target kubernetes --set server.http_port=-1",
            "server.http_port = -1: probes need a port of HTTP",
        ),
        ("--config demo-fleet --hardware v6e --target gke-jobset", "take gke-lws"),
        ("--config demo --target kubernetes --models-bucket weights", "only GKE mounts buckets"),
        ("--config demo-fleet --target kubernetes --slices 2", "of this deployment each worker"),
        ("--config step3 --hardware h100 --target kubernetes --slices 2", "only TPUs come in"),
        ("--config step3-v6e --hardware v6e --target gke-lws --slices 2", "take gke-jobset"),
        ("--config step3-v6e --hardware v6f --target gke-lws", "did you mean 'v6e'"),
        ("--config demo --target kubernetes --slices 0", "--slices 0: expected 1 or more"),
        ("--config demo --target kubernetes --name My_Model", "--name 'My_Model': needs 1 to 40"),
        (f"--config demo --target systemd --name {'a' * 41}", "needs 1 to 40 of a-z"),
        ("--config demo --target docker --image=", "--image '': is no image"),
        (
            f"{V6E} --models-bucket gs://weights",
            "--models-bucket 'gs://weights': is a bucket's name alone",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(
    command: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert expected in capsys.readouterr().err


def test_a_bucket_is_mounted_where_models_are() -> None:
    (text,) = files_of(f"{V6E} --models-bucket weights").values()
    assert "PersistentVolumeClaim" not in text
    group = objects(text)["LeaderWorkerSet", "jaxserve"]["spec"]["leaderWorkerTemplate"]
    pod = group["workerTemplate"]
    assert pod["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "models")
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "weights"


@pytest.mark.parametrize(("image", "flagged"), [("a/b:1", 1), (f"a/b@sha256:{'0c' * 32}", 0)])
def test_an_image_without_a_digest_is_flagged(image: str, flagged: int) -> None:
    text = files_of(f"{FLEET} --image {image}")["kubernetes.yaml"]
    assert (
        text.count("# a tag may come to name another image: --image NAME@sha256:DIGEST") == flagged
    )
    assert f"image: {image}\n" in text


def test_files_are_written(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLEET.split(), "--write", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        *("kubernetes.yaml", "autoscale.yaml")
    }
    assert capsys.readouterr().out == ""
    head = (tmp_path / "new" / "kubernetes.yaml").read_text().splitlines()[0]
    assert head == f"# python -m jaxserve.launch {FLEET}"
    assert main([*FLEET.split(), "--write", "/dev/null/x"]) == 2
    assert "--write /dev/null/x: Not a directory" in capsys.readouterr().err


def test_a_process_a_gpu_where_a_runtime_has_both_roles() -> None:
    def given(command: str) -> list[str]:
        (text,) = files_of(command).values()
        pods = [tree["spec"] for (kind, _), tree in objects(text).items() if "Leader" in kind]
        return [
            word
            for pod in pods
            for word in container_of(pod["leaderWorkerTemplate"]["workerTemplate"])["args"]
            if word.startswith("--host-processes")
        ]

    gpus = "--config step3 --hardware h100 --target kubernetes"
    assert given(gpus) == ["--host-processes=8"]
    assert given(V6E) == []


def test_hardware_of_the_command_replaces_the_files(capsys):
    """On H100s nothing asks for the TPUs that the file names."""
    assert main(["--config", "qwen3-30b-a3b", "--hardware", "h100", "--target", "kubernetes"]) == 0
    rendered = capsys.readouterr().out
    assert "hardware: h100" in rendered
    assert "v6e" not in rendered
    assert "google.com/tpu" not in rendered
