"""A fleet of real processes, as `launch/local.py --fleet` starts it: over HTTP every request gets
the colocated tokens, also when a domain and a prefill worker are killed in the middle."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.engine.build import make_engine
from jaxserve.engine.request import SamplingParams
from tests.jaxserve import layouts
from tests.jaxserve.fleet.launched import Launched
from tests.jaxserve.layouts import OUTPUT_TOKENS, PROMPTS, Collector, Reference

pytestmark = [pytest.mark.multihost, pytest.mark.unoptimised]

SECONDS = 300
SEEDED = {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.6, "top_p": 0.95}


@pytest.fixture(scope="module")
def reference(tiny_model, colocated_runtime):
    """Greedy tokens of all prompts, and drawn ones of prompt 1."""
    engine = make_engine(colocated_runtime, eos_token_ids=frozenset())
    engine.start()
    greedy = layouts.generate(engine)
    collector = Collector()
    params = SamplingParams(max_tokens=60, ignore_eos=True, **SEEDED)
    collector.submit(engine, PROMPTS[1], params, request_id="drawn")
    drawn = collector.wait()["drawn"].token_ids
    engine.close()
    return Reference.of(tiny_model, greedy), drawn


def write_tokenizer(model):
    """A letter a token, as many as the model has."""
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {letter: number for number, letter in enumerate(letters[: layouts.SIZES.vocab_size])}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(letters[:2])
    raw.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')


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

    def pipeline(self):
        return self._http.get("/pipeline").json()

    def close(self):
        self._http.close()


def test_two_prefill_workers_two_domains_and_what_is_left_of_them(tiny_model, reference, tmp_path):
    greedy, drawn = reference
    model = tmp_path / "tiny"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    write_tokenizer(model)
    overrides = layouts.LIMITS | {
        "mode": "colocated",
        "domains": 2,
        "prefill.workers": 2,
        "prefill.cache.page_size": 16,
        "prefill.cache.pages": 80,
        "server.grpc_port": 0,
        "server.http_port": 0,
    }
    command = ["launch/local.py", "--fleet", "--model", str(model)]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    run = Launched(command, {"JAX_PLATFORMS": "cpu"})
    client = None
    try:
        address = run.wait_for(r"^\[0\] ready .* http=(\S+)", SECONDS)[1]
        for process in range(1, 5):
            run.wait_for(rf"^\[{process}\] ready ", SECONDS)
        pids = dict(re.findall(r"process (\d): .*, pid (\d+)", run.output))
        client = Client(address)

        # 2P2D: all prompts at once, and again, when both sides have them in their prefix caches.
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            for _ in range(2):
                asked = [
                    pool.submit(client.tokens, prompt, OUTPUT_TOKENS, temperature=0)
                    for prompt in PROMPTS
                ]
                tokens = [one.result(SECONDS) for one in asked]
                assert layouts.differences(greedy, tokens) == []
        assert client.tokens(PROMPTS[1], 60, **SEEDED) == drawn
        load = client.pipeline()["load"]
        assert [w["role"] for w in load["workers"]] == ["prefill", "prefill", "domain", "domain"]
        assert sum(w["pages_tokens"] for w in load["workers"]) > 500
        assert load["replays"] == 0

        # The domain that has the stream is killed; then a prefill worker, too: 2P1D, 1P1D.
        for victims in (("3", "4"), ("1",)):
            begun = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                stream = pool.submit(client.tokens, PROMPTS[1], 60, begun, **SEEDED)
                assert begun.wait(SECONDS)
                workers = client.pipeline()["load"]["workers"]
                busy = {f"{n + 1}" for n, worker in enumerate(workers) if worker["routed"]}
                victim = next(iter(busy & set(victims)), victims[0])
                os.kill(int(pids[victim]), signal.SIGKILL)
                assert stream.result(SECONDS) == drawn
            run.wait_for(rf"process {victim} .* ended with signal SIGKILL; it is not started")
            tokens = [client.tokens(prompt, OUTPUT_TOKENS, temperature=0) for prompt in PROMPTS[:6]]
            assert layouts.differences(greedy, tokens + greedy.tokens[6:]) == []
        assert client.pipeline()["load"]["replays"] >= 1
        run.process.send_signal(signal.SIGTERM)
        assert run.end(SECONDS) == 0, run.output
    finally:
        if client is not None:
            client.close()
        if run.process.poll() is None:
            run.process.kill()
            run.end(5.0)
