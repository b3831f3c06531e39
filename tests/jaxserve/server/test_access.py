"""Keys and certificates, from files to both faces."""

import dataclasses
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.config.sections import Server
from jaxserve.errors import ConfigError
from jaxserve.fleet.request_frames import has_key
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server.access import Access, ApiKeys, Tls, check_bind
from jaxserve.server.rpc import InferenceStub
from tests import golden
from tests.jaxserve.server import certificates
from tests.jaxserve.server.faces import ALICE, BOB, SECONDS, Faces, rpc_error
from tests.jaxserve.waiting import until


class TestKeys:
    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"# ours\n{ALICE}\n\n  {BOB}  \n")
        keys = ApiKeys.from_file(path)
        tenants = {keys.tenant(f"Bearer {ALICE}"), keys.tenant(f"bearer {BOB}")}
        assert len(tenants) == 2
        assert None not in tenants
        assert keys.tenant("Bearer # ours") is None
        assert ALICE not in repr(Access(keys)) + repr(vars(keys))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("# nothing\n", "the file has no key"),
            (f"{ALICE}\nshort\n", "key 2 is not 16 or more printable"),
            ("é" * 20, "key 1 is not"),
        ],
    )
    def test_wrong_files(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "keys").write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            ApiKeys.from_file(tmp_path / "keys")
        assert "short" not in str(caught.value)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"api_keys: .*nowhere cannot be read"):
            ApiKeys.from_file(tmp_path / "nowhere")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_open_address_needs_an_explicit_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host = .* --insecure-bind"):
        check_bind(host, insecure_bind=False)
    check_bind(host, insecure_bind=True)
    check_bind(host, insecure_bind=False, access=Access(ApiKeys([ALICE])))
    check_bind(host, insecure_bind=False, access=Access.from_config(Server(open=True)))
    one_sided = Tls(Path("certificate"), Path("key"))
    with pytest.raises(ConfigError, match="TLS alone keeps nobody out"):
        check_bind(host, insecure_bind=False, access=Access(tls=one_sided))
    mutual = dataclasses.replace(one_sided, client_ca=Path("ca"))
    check_bind(host, insecure_bind=False, access=Access(tls=mutual))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_bind(host, insecure_bind=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates"))


@golden.table("server/wrong_certificates.yaml")
def test_certificates_that_do_not_fit(files: Path, fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Access.from_config(Server(**{key: str(files / name) for key, name in fields.items()}))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_probes_need_no_key(locked: Faces) -> None:
    request = health_pb2.HealthCheckRequest()
    answer = health_pb2_grpc.HealthStub(locked.channel).Check(request, timeout=SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_ids_of_tenants_do_not_meet_and_only_the_owner_aborts(locked: Faces) -> None:
    locked.engine.allowed = 1
    request = pb.GenerateRequest(text="hi", request_id="key-" + "a" * 124)
    calls = []
    for key in (ALICE, BOB):
        calls.append(locked.stub.GenerateStream(request, metadata=bearer(key), timeout=SECONDS))
        assert next(calls[-1]).prompt.request_id == request.request_id
    assert locked.engine.running == 2
    assert not any(map(has_key, locked.engine._running))
    calls[1].cancel()
    until(lambda: locked.engine.running == 1)
    abort = pb.AbortRequest(request_id=request.request_id)
    code, _ = rpc_error(locked.stub.Abort, abort, metadata=bearer(BOB), timeout=SECONDS)
    assert code == "NOT_FOUND"
    assert locked.engine.running == 1
    locked.stub.Abort(abort, metadata=bearer(ALICE), timeout=SECONDS)
    assert locked.engine.wait_until_idle()


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(files: Path, mutual: bool) -> None:
    config = Server(
        tls_certificate=str(files / "server.pem"),
        tls_key=str(files / "server.key"),
        tls_client_ca=str(files / "ca.pem") if mutual else "",
    )
    both = Faces(Access.from_config(config))
    context = ssl.create_default_context(cafile=str(files / "ca.pem"))
    stranger = ssl.create_default_context(cafile=str(files / "ca.pem"))
    context.load_cert_chain(files / "client.pem", files / "client.key")
    url = f"https://{both.address}/v1/completions"
    fields = {"prompt": "hi", "stream": True}
    assert "[DONE]" in httpx.post(url, json=fields, verify=context, timeout=SECONDS).text
    if mutual:
        with pytest.raises(httpx.TransportError):
            httpx.post(url, json=fields, verify=stranger, timeout=SECONDS)
    else:
        assert httpx.post(url, json=fields, verify=stranger, timeout=SECONDS).is_success
    with pytest.raises(httpx.TransportError):
        httpx.post(url.replace("https", "http"), json=fields, timeout=SECONDS)

    root = (files / "ca.pem").read_bytes()
    own = [(files / name).read_bytes() for name in ("client.key", "client.pem")]
    for credentials, welcome in (
        (grpc.ssl_channel_credentials(root, *own), True),
        (grpc.ssl_channel_credentials(root), not mutual),
    ):
        with grpc.secure_channel(both.grpc_address, credentials) as channel:
            request = pb.GenerateRequest(text="hi")
            if welcome:
                answer = InferenceStub(channel).Generate(request, timeout=SECONDS)
                assert answer.text == "one two three"
            else:
                code, _ = rpc_error(InferenceStub(channel).Generate, request, timeout=SECONDS)
                assert code == "UNAVAILABLE"
    both.close()
