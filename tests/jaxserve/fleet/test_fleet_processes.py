"""A fleet of real processes, as `launch.local --fleet` starts it: over HTTP every request gets
the colocated tokens, also when a domain and a prefill worker are killed in the middle."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from pathlib import Path

import httpx
import pytest

from jaxserve.chaos.resources import sample
from jaxserve.engine.request import SamplingParams
from jaxserve.link.session.channel import dial
from jaxserve.planner import verify
from jaxserve.ports import free_port
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve import test_deepseek_v4 as v4
from tests.jaxserve.fleet.launched import started
from tests.jaxserve.layouts import OUTPUT_TOKENS, PROMPTS
from tests.jaxserve.link.remote.test_client import open_ports
from tests.jaxserve.test_fuzz import WRITERS
from tests.jaxserve.text.letters import raw_letters
from tests.jaxserve.waiting import until
from tests.reference.tiny_sizes import VOCAB

pytestmark = [pytest.mark.multihost, pytest.mark.unoptimised]

SECONDS = 300
CLIENTS, TOGETHER = 8, 3
FEW = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SYSTEM = PROMPTS[1]
"""A system prompt of eight pages and six tokens, which is computed in three chunks."""
SPREAD = {"mode": "colocated", "attention.tp": 2, "prefill.attention": {"dp": 2, "tp": 1}}
OURS, GIVEN = range(9200, 9400), range(10_000, 30_000)
"""Ports that processes choose, and those that the launcher and the tests give them."""
BEGINS = [b"", bytes(4), b"\0\0\0\x14", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
BEGINS += [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"]
SEEDED = {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.6, "top_p": 0.95}


def sharing() -> list[list[list[int]]]:
    """Prompts that begin with `SYSTEM`, several for each client, all different."""
    draw = random.Random(1)
    lengths = (17, 30, 50, 64)
    return [
        [
            SYSTEM + [draw.randrange(layouts.SIZES.vocab_size) for _ in range(draw.choice(lengths))]
            for _ in range(TOGETHER)
        ]
        for _ in range(CLIENTS)
    ]


@pytest.fixture(scope="module")
def texts(reference, colocated_runtime):
    """Greedy tokens of all prompts, drawn ones of prompt 1, and greedy ones of `sharing()`, which
    were generated one after the other."""
    with layouts.serving(colocated_runtime) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True, **SEEDED)
        drawn = layouts.ask(engine, PROMPTS[1], params).token_ids
        shared = [
            [layouts.generate(engine, [prompt], FEW)[0] for prompt in prompts]
            for prompts in sharing()
        ]
    return reference, drawn, shared


def with_tokenizer(tiny_model, folder, letters=layouts.SIZES.vocab_size):
    """Links to the files of a model, beside a tokenizer: a letter a token, as many as it has."""
    model = folder / "tiny"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    raw_letters(letters).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return model


class Client:
    """Completions over HTTP, streamed."""

    def __init__(self, address: str):
        self._http = httpx.Client(base_url=f"http://{address}", timeout=SECONDS)

    def tokens(self, prompt, count, begun=None, **options) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True, **options}
        found: list[int] = []
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        found += choice.get("token_ids") or []
                    if begun is not None and len(found) > 5:
                        begun.set()
        return found

    def several(self, prompts) -> list[list[int]]:
        """The greedy tokens of prompts that are sent together."""
        body = {"model": "tiny", "prompt": prompts, "max_tokens": FEW.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        choices = self._http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        return [choice["token_ids"] for choice in choices]

    def load(self):
        return self._http.get("/pipeline").json()["load"]

    def close(self):
        self._http.close()


@contextlib.contextmanager
def fleet(tiny_model, folder, workers, overrides, *arguments, letters=layouts.SIZES.vocab_size):
    """A running fleet whose processes of these numbers say that they are ready, and its client."""
    model = with_tokenizer(tiny_model, folder, letters)
    faces = {"server.grpc_port": 0, "server.http_port": 0}
    command = ["-m", "jaxserve.launch.local", "--fleet", "--model", str(model), *arguments]
    for key, value in (layouts.LIMITS | faces | overrides).items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    with started(command, {"JAX_PLATFORMS": "cpu"}) as run:
        address = run.wait_for(r"^\[0\] ready .* http=(\S+)", SECONDS)[1]
        for process in workers:
            run.wait_for(rf"^\[{process}\] ready ", SECONDS)
        with contextlib.closing(Client(address)) as client:
            yield run, client
        run.process.send_signal(signal.SIGTERM)
        assert run.end(SECONDS) == 0, run.output


def generate(client, prompts=PROMPTS, begun=None):
    """The greedy tokens of all prompts, asked for at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(client.tokens, prompt, OUTPUT_TOKENS, begun, temperature=0)
            for prompt in prompts
        ]
        return [one.result(SECONDS) for one in asked]


def kill_in_a_stream(client, drawn, kill, prompts=()):
    """Has `kill` end a process, by the workers' loads, while a stream runs, or greedy ones of some
    prompts, which go on."""
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        if prompts:
            stream = pool.submit(generate, client, prompts, begun)
        else:
            stream = pool.submit(client.tokens, PROMPTS[1], 60, begun, **SEEDED)
        assert begun.wait(SECONDS)
        kill(client.load()["workers"])
        assert stream.result(SECONDS) == drawn


def killer(run, *victims):
    """Returns a call for `kill_in_a_stream` that kills the busy one among these processes."""
    pids = dict(re.findall(r"process (\d): .*, pid (\d+)", run.output))

    def kill(workers):
        busy = [f"{n + 1}" for n, worker in enumerate(workers) if worker["routed"]]
        victim = next((one for one in busy if one in victims), victims[0])
        os.kill(int(pids[victim]), signal.SIGKILL)
        run.wait_for(rf"process {victim} .* ended with signal SIGKILL; it is not started")

    return kill


def roles(client, status=""):
    return [w["role"] for w in client.load()["workers"] if status in ("", w["status"])]


def check_shared_prefixes(client, admin, expected):
    """Clients ask at the same time for several prompts each, which all begin alike; then the prefix
    caches of all workers are reset, and they ask again."""
    prompts = sharing()
    for _ in range(2):
        with ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(client.several, prompts))
        wrong = [
            (number, place)
            for number, rows in enumerate(zip(found, expected, strict=True))
            for place, (tokens, right) in enumerate(zip(*rows, strict=True))
            if tokens != right
        ]
        assert wrong == []
        assert httpx.post(f"{admin}/reset_prefix_cache", json={}).json() == {"freed_pages": None}


def test_a_prefill_worker_hands_over_to_a_domain(tiny_model, reference, tmp_path):
    overrides = {"mode": "colocated", "domains": 1, "prefill.workers": 1}
    with fleet(tiny_model, tmp_path, (1, 2), overrides) as (_, client):
        assert layouts.differences(reference, generate(client)) == []
        assert roles(client) == ["prefill", "domain"]
        load = client.load()
        assert load["workers"][0]["pages_tokens"] > 250
        assert load["replays"] == 0


def test_two_prefill_workers_two_domains_and_what_is_left_of_them(tiny_model, texts, tmp_path):
    greedy, drawn, shared = texts
    # Pages of other sizes: `engine/test_hand_off.py`, and the nightly tests below.
    overrides = {"mode": "colocated", "domains": 2, "prefill.workers": 2}
    overrides |= {
        "server.admin_port": free_port(),
        "cluster.tls": str(golden.FOLDER / "tls" / "own"),
    }
    with fleet(tiny_model, tmp_path, range(1, 5), overrides) as (run, client):
        admin = f"http://127.0.0.1:{overrides['server.admin_port']}"
        check_shared_prefixes(client, admin, shared)

        # 2P2D: all prompts at once, and again, when both sides have them in their prefix caches.
        for _ in range(2):
            assert layouts.differences(greedy, generate(client)) == []
        assert client.tokens(PROMPTS[1], 60, **SEEDED) == drawn
        load = client.load()
        assert [w["role"] for w in load["workers"]] == ["prefill", "prefill", "domain", "domain"]
        assert sum(w["pages_tokens"] for w in load["workers"]) > 500
        assert load["replays"] == 0

        # The domain that has the stream is killed; then a prefill worker, too: 2P1D, 1P1D.
        for victims in (("3", "4"), ("1",)):
            kill_in_a_stream(client, drawn, killer(run, *victims))
            tokens = [client.tokens(prompt, OUTPUT_TOKENS, temperature=0) for prompt in PROMPTS[:6]]
            assert layouts.differences(greedy, tokens + greedy.tokens[6:]) == []
        assert client.load()["replays"] >= 1


@pytest.mark.nightly
def test_a_prefill_worker_stands_in_for_the_only_domain(tiny_model, texts, tmp_path):
    """The domain is killed in the middle of a stream and comes back late: until then the last
    prefill worker is one, on a page size and cache of its own before and after."""
    greedy, drawn, _ = texts
    overrides = {
        "mode": "colocated",
        "prefill.workers": 2,
        "prefill.cache": {"page_size": 16, "pages": 80},
        "fleet.least_domains": 1,
        "fleet.stand_in_seconds": 1,
    }
    late = ("--restart", "--restart-seconds", "30")
    with fleet(tiny_model, tmp_path, range(1, 4), overrides, *late) as (run, client):
        pid = run.wait_for(r"process 3: domain 0.*, pid (\d+)")[1]

        def kill(workers):
            os.kill(int(pid), signal.SIGKILL)
            run.wait_for(r"is to become a domain: 0 domains were there for", SECONDS)

        kill_in_a_stream(client, drawn, kill)
        assert layouts.differences(greedy, generate(client)) == []
        assert run.output.count("process 3: domain") == 1, "it is not back yet"
        assert roles(client) == ["prefill", "domain", "domain"]

        run.wait_for(r"is to become a prefill worker: 1 domains are there", SECONDS)
        run.wait_for(r"(?s)(^\[2\] ready .*?){3}", SECONDS)
        until(lambda: all(w["status"] == "ready" for w in client.load()["workers"]), SECONDS)
        assert layouts.differences(greedy, generate(client)) == []
        assert roles(client) == ["prefill", "prefill", "domain"]
        assert "process 2 (prefill worker 1) ended" not in run.output


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [SPREAD, {"mode": "afd", "pipeline": "step", "lanes": 2}])
def test_workers_of_two_processes_each(sizes, tiny_model, texts, tmp_path):
    """Every process takes part in what is handed over and in what goes to host memory, though both
    are in the first ones. Or each process has one role, and steps are one dispatch of it."""
    greedy, drawn, _ = texts
    overrides = sizes | {"prefill.workers": 1, "prefill.cache": {"page_size": 16, "pages": 80}}
    overrides |= {"cache.host_gb": 0.01, "cache.pages": 24}
    with fleet(tiny_model, tmp_path, (1, 3), overrides, "--processes", "2") as (_, client):
        assert layouts.differences(greedy, generate(client)) == []
        assert client.tokens(PROMPTS[1], 60, **SEEDED) == drawn
        load = client.load()
        assert roles(client) == ["prefill", "domain"]
        assert load["workers"][0]["pages_tokens"] > 250
        assert load["replays"] == 0


@pytest.mark.nightly
def test_domains_that_are_attention_workers_of_one_ffn_worker(tiny_model, texts, tmp_path):
    """A router, a prefill worker, two attention workers and an ffn worker, a runtime each. In the
    middle of a stream one of the domains becomes a prefill worker, and later is one again; then
    one is killed."""
    greedy, drawn, _ = texts
    overrides = golden.sizes("attention workers of one ffn worker")
    overrides |= {"server.admin_port": (admin := free_port())}
    with fleet(tiny_model, tmp_path, (1, 2, 3), overrides) as (run, client):
        for _ in range(2):
            assert layouts.differences(greedy, generate(client)) == []
        load = client.load()
        assert [worker["role"] for worker in load["workers"]] == ["prefill", "domain", "domain"]
        assert load["workers"][0]["pages_tokens"] > 500

        for domains, becomes in ((1, "a prefill worker"), (2, "a domain")):

            def want(workers, domains=domains, becomes=becomes):
                verify._call(f"http://127.0.0.1:{admin}", domains)
                run.wait_for(f"is to become {becomes}: 1 domains .*POST /roles", SECONDS)

            kill_in_a_stream(client, drawn, want)
            there = ["prefill"] * (3 - domains) + ["domain"] * domains
            until(lambda there=there: roles(client, "ready") == there, SECONDS)
            assert layouts.differences(greedy, generate(client)) == []
        before = client.load()["replays"]
        kill_in_a_stream(client, drawn, killer(run, "2", "3"))
        assert layouts.differences(greedy, generate(client)) == []
        assert client.load()["replays"] > before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "format"),
    [
        *(("gpt_oss", "int8"), ("deepseek_v32", "fp8"), ("glm_moe_dsa", "auto")),
        *(("deepseek_v4", "int8"), ("qwen3_next", "auto"), ("qwen3_5", "fp8")),
    ],
)
def test_requests_to_the_models_of_2026_go_on_elsewhere(family, format, tmp_path):
    """Windows, indexes, compressed rows and recurrent states of a killed domain, and then of the
    prefill worker, are made again from prompts and emitted tokens."""
    model, prompts = WRITERS[family](tmp_path / "model"), v4.sharing()
    limits = v4.LIMITS | {"cache.format": format}
    with layouts.running(model, limits) as engine:
        greedy = layouts.generate(engine, prompts)
    overrides = limits | {"domains": 2, "prefill.workers": 1}
    with fleet(model, tmp_path, (1, 2, 3), overrides, letters=VOCAB) as (run, client):
        assert generate(client, prompts) == greedy
        load = client.load()
        assert load["replays"] == 0
        assert load["workers"][0]["pages_tokens"] > 250
        for victims in (("2", "3"), ("1",)):
            kill_in_a_stream(client, greedy, killer(run, *victims), prompts)
        assert client.load()["replays"] >= 1


def send_one(port: int, token: str, seed: int) -> None:
    """Sends the beginning of a protocol with noise behind it, or noise in or outside a frame of a
    session with the right token, or half of the frame."""
    draw = random.Random(seed)
    noise = draw.randbytes(draw.randrange(1500))
    with contextlib.suppress(OSError, EOFError, AuthenticationError):
        if draw.random() < 0.4:
            channel = dial(f"127.0.0.1:{port}", token, 0.5)
            frame = channel._framing.pack(noise)
            channel._socket.sendall(draw.choice([noise, frame, frame[: len(frame) // 2]]))
            return channel.close()
        with socket.create_connection(("127.0.0.1", port), 5.0) as stranger:
            stranger.sendall(draw.choice(BEGINS) + noise)
            stranger.settimeout(draw.choice([0.001, 0.2]))
            stranger.recv(100)


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [2, 1])
def test_random_messages_at_every_open_port(processes, tiny_model, texts, tmp_path):
    """Requests get their tokens, and nothing leaks. JAX's own port of each process of several is no
    target (`test_devices.py` says why); a fleet of runtimes has none."""
    sizes = SPREAD if processes > 1 else golden.sizes("attention workers of one ffn worker")
    overrides = sizes | {"prefill.workers": 1, "cluster.ports": f"{OURS[0]}-{OURS[-1]}"}
    overrides |= {"server.grpc_port": free_port(), "server.http_port": free_port()}
    with fleet(tiny_model, tmp_path, (1,), overrides, f"--processes={processes}") as (run, client):
        assert layouts.differences(texts[0], generate(client)) == []
        pids = [int(pid) for pid in re.findall(r"process \d+: .*, pid (\d+)", run.output)]
        ports = [open_ports(pid) for pid in pids]
        ours = {port for of in ports for port in of if port in (*OURS, *GIVEN)}
        assert [len(of - ours) for of in ports] == [0] + [processes - 1] * (len(pids) - 1), ports
        environment = Path(f"/proc/{pids[0]}/environ").read_text()
        token = re.search(r"JAXSERVE_CLUSTER_TOKEN=(\w+)", environment)[1]

        def held():
            return [one for found in map(sample, pids) for one in (found.files, found.threads)]

        def settled():
            found = held()
            time.sleep(3)
            return found == held() and found

        before = []
        # The first messages are those with which pools of threads get as large as they may.
        for count in (75, 300):
            with ThreadPoolExecutor(CLIENTS) as pool, contextlib.ExitStack() as stack:
                for port in 4 * [*ours]:
                    idle = socket.create_connection(("127.0.0.1", port), SECONDS)
                    stack.callback(idle.close)
                work = enumerate(count * [*ours])
                sent = [pool.submit(send_one, port, token, seed) for seed, port in work]
                while not all(one.done() for one in sent):
                    assert layouts.differences(texts[0], generate(client)) == []
                assert [one.result() for one in sent] == [None] * len(sent)
            before = before or until(settled, SECONDS)
        most = [one + more for one, more in zip(before, len(pids) * [4, 8], strict=True)]
        until(lambda: all(map(int.__le__, held(), most)), SECONDS)
        assert layouts.differences(texts[0], generate(client)) == []
        assert [open_ports(pid) for pid in pids] == ports
        load = client.load()
        assert [worker["status"] for worker in load["workers"]] == ["ready"] * len(load["workers"])
        assert load["replays"] == 0
