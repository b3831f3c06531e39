"""Web pages of other origins: refused by browsers unless the server names them."""

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from tests.jaxserve.server.http.rig import HttpRig

PAGE = "https://page.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
CORS = ("access-control-allow-origin", "access-control-allow-methods")


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[HttpRig]:
    with contextlib.closing(HttpRig(cors_origins=[PAGE])) as rig:
        yield rig


def preflight(rig: HttpRig, origin: str) -> httpx.Response:
    return rig.client.options("/v1/chat/completions", headers={"Origin": origin, **ASK})


def test_nobody_by_default(shared: HttpRig) -> None:
    answer = shared.client.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert preflight(shared, PAGE).status_code == 405
    for response in (answer, preflight(shared, PAGE)):
        assert not any(name in response.headers for name in CORS)


def test_a_page_that_is_named(open_to_page: HttpRig) -> None:
    asked = preflight(open_to_page, PAGE)
    assert (asked.status_code, asked.headers[CORS[0]]) == (200, PAGE)
    assert "POST" in asked.headers[CORS[1]]
    assert "content-type" in asked.headers["access-control-allow-headers"]
    messages = [{"role": "user", "content": "hi"}]
    answer = open_to_page.client.post(
        "/v1/chat/completions", json={"messages": messages}, headers={"Origin": PAGE}
    )
    assert (answer.status_code, answer.headers[CORS[0]]) == (200, PAGE)
    assert "access-control-allow-credentials" not in answer.headers


def test_another_page(open_to_page: HttpRig) -> None:
    for origin in ("https://other.example", f"{PAGE}:8443", "null", PAGE.upper()):
        assert preflight(open_to_page, origin).status_code == 400
        answer = open_to_page.client.get("/v1/models", headers={"Origin": origin})
        assert CORS[0] not in answer.headers
