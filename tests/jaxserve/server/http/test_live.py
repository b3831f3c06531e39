"""The page in a headless Chromium: what a visitor does with it, and what it may not do.

The engine is a fake one, so that what is shown is known; the page, its headers and the server are
real. Nothing may be asked of another host, and the console must stay clean.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from jaxserve.observe.load import DraftCounts, WorkerLoad
from jaxserve.observe.spans import Span
from jaxserve.observe.view import FFNWorkerView, PipelineView
from jaxserve.server.access import Access, ApiKeys
from jaxserve.server.http.live import PAGE, policy
from tests import golden
from tests.browser import launched, needs_browser, sync_api
from tests.jaxserve.server.http.rig import HttpRig, Make
from tests.jaxserve.text.fake_engine import pipeline_view
from tests.jaxserve.text.letters import ids_of

pytestmark = needs_browser

KEY = "key-of-alice-0123456789"
MILLISECONDS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, make_rig: Make) -> Iterator[Open]:
    """Opens the page of a rig; afterwards there must be no error and no stranger."""
    contexts, problems, asked = [], [], []

    def visit(rig: HttpRig, expected_errors: str = "$^", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(MILLISECONDS)

        def note(text: str) -> None:
            if not re.search(expected_errors, text):
                problems.append(text)

        page.on("console", lambda m: note(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append((rig.url, request.url)))
        page.goto(f"{rig.url}/")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []
    own_urls = [(f"{own}/", f"blob:{own}/", "data:,") for own, _ in asked]
    assert [u for (_, u), own in zip(asked, own_urls, strict=True) if not u.startswith(own)] == []
    assert all(KEY not in url and "?" not in url for _, url in asked)


def shows(page: Any, place: str, text: str | re.Pattern[str]) -> None:
    """Waits until a place has this text. (Waiting by script is what the page's policy forbids.)"""
    expect(page.locator(f"#{place}")).to_have_text(text)


def expect(locator: Any) -> Any:
    sync_api.expect.set_options(MILLISECONDS)
    return sync_api.expect(locator)


def output(page: Any) -> str:
    return page.locator("#output").inner_text()


def run(page: Any, ends: str = "stop") -> None:
    """Presses Run, and waits until the answer has ended in this way."""
    page.get_by_role("button", name="Run").click()
    shows(page, "progress", re.compile(f"{ends}$"))


def test_a_completion_streams(rig, visit):
    """Text of the stream is no markup."""
    written = "one t<img src=x onerror=alert(1)>"
    rig.engine.script = ids_of(written)
    rig.engine.allowed = 5
    page = visit(rig)
    page.get_by_label("Prompt", exact=True).fill("hi")
    page.get_by_role("button", name="Run").click()
    shows(page, "output", "one t")
    assert page.get_by_role("button", name="Run").is_disabled()
    rig.engine.allowed = None
    shows(page, "progress", re.compile("stop$"))
    assert output(page) == written
    assert page.locator("#output img").count() == 0
    assert f"{len(written)} tokens" in page.locator("#progress").inner_text()
    (params,) = rig.engine.params
    assert (params.max_tokens, params.temperature, params.logprobs) == (128, 0.6, 5)


def test_it_can_be_cancelled_and_the_engine_hears_it(rig, visit):
    rig.engine.allowed = 5
    page = visit(rig)
    page.get_by_role("button", name="Run").click()
    shows(page, "output", "one t")
    page.keyboard.press("Escape")
    shows(page, "progress", re.compile("stopped$"))
    assert rig.engine.wait_until_idle()
    assert len(rig.engine.cancelled) == 1
    assert output(page) == "one t"
    rig.engine.allowed = None
    page.keyboard.press("Control+Enter")  # and it can be run again
    shows(page, "progress", re.compile("stop$"))
    assert output(page) == "one two three"


def test_probabilities_on_hover_and_by_keyboard(rig, visit):
    page = visit(rig)
    run(page)
    page.locator("#output .token").first.hover()
    tip = page.get_by_role("tooltip")
    first = rig.complete(logprobs=5, max_tokens=1).json()["choices"][0]["logprobs"]
    chance = 100 * 2.718281828 ** first["token_logprobs"][0]
    assert f"o{chance:.1f} %" in tip.inner_text().replace("\n", "")
    assert tip.locator("div").count() == len(first["top_logprobs"][0])
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    page.locator("#output").focus()
    page.keyboard.press("End")
    assert page.locator(".token.chosen").inner_text() == "e"
    assert tip.is_visible()


def test_a_wrong_field_shows_what_the_server_says(rig, visit):
    page = visit(rig, "400 ")
    for value in ("7", "warm"):
        page.get_by_label("temperature").fill(value)
        page.get_by_role("button", name="Run").click()
        number: Any = int(value) if value == "7" else value
        said = rig.refused(temperature=number)["message"]
        shows(page, "error", said)
        assert page.get_by_label("temperature").get_attribute("aria-invalid") == "true"
    assert rig.engine.prompts == []


def test_a_conversation(make_rig, visit):
    rig = make_rig(max_length=500)
    page = visit(rig)
    page.get_by_role("tab", name="Chat").click()
    message = page.get_by_label("Message", exact=True)
    for turn in ("hello", "again"):
        message.fill(turn)
        page.get_by_role("button", name="Run").click()
        expect(message).to_have_value("")
    shown = page.locator(".turn .body").all_inner_texts()
    assert shown == ["hello", "one two three", "again", "one two three"]
    prompt = rig.generator.tokenizer.decode(rig.engine.prompts[1])
    assert "[user]hello[assistant]one two three[user]again[assistant]" in prompt
    # It is there when the page comes back, the key is not, and it can be forgotten.
    page.get_by_label("API key").fill(KEY)
    page.get_by_text("System prompt and tools").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.reload()
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator(".turn")).to_have_count(4)
    message.fill("third")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".turn")).to_have_count(6)
    expect(message).to_have_value("")
    prompt = rig.generator.tokenizer.decode(rig.engine.prompts[2])
    assert prompt.endswith("[user]again[assistant]one two three[user]third[assistant]")
    assert "[system]Be brief.[user]hello" in prompt
    assert KEY not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    page.get_by_role("button", name="Clear conversation").click()
    assert page.locator(".turn").count() == 0
    assert page.get_by_label("System prompt").input_value() == ""
    assert page.evaluate("localStorage.length") == 0


MARKDOWN = golden.text("server/answer.md")


def test_an_answer_in_markdown_has_no_markup_of_its_own(make_rig, visit):
    rig = make_rig(MARKDOWN)
    page = visit(rig, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message", exact=True).fill("**mine** <i>too</i>")
    page.get_by_label("max_tokens").fill("500")
    run(page)
    shown = page.locator(".turn.assistant .markdown")
    tags = [
        *("h4", "em", "strong", "code", "p", "ol", "ul", "li"),
        *("table", "th", "td", "blockquote", "pre"),
    ]
    texts = {tag: shown.locator(tag).all_inner_texts() for tag in tags}
    golden.check("server/markdown.json", texts)
    assert shown.locator("b, i, a, script, img").count() == 0
    assert page.locator(".turn.user .body").inner_text() == "**mine** <i>too</i>"
    page.locator(".turn.assistant").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    page.get_by_label("Markdown").uncheck()
    assert page.locator(".turn.assistant .body").inner_text() == MARKDOWN
    assert page.locator(".turn.assistant .token").first.is_visible()


def test_reasoning_and_calls_are_folded_and_a_call_gets_its_result(make_rig, visit):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
    rig = make_rig(f"<think>\nHm.\n</think>\n\nWait.\n{call}", max_length=500)
    page = visit(rig)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_text("System prompt and tools").click()
    page.get_by_label("Message", exact=True).fill("hi")
    page.get_by_label("Tools").fill("[{]")
    page.get_by_role("button", name="Run").click()
    shows(page, "error", re.compile("^tools: "))
    assert page.get_by_label("Tools").get_attribute("aria-invalid") == "true"
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "weather"}}]')
    run(page, "tool_calls")
    answer = page.locator(".turn.assistant")
    assert answer.locator("summary").all_inner_texts() == ["Reasoning", "Call of weather"]
    assert not answer.locator("details pre").first.is_visible()
    assert not answer.locator("details pre").last.is_visible()
    answer.get_by_text("Reasoning").click()
    answer.get_by_text("Call of weather").click()
    assert answer.locator("details pre").first.inner_text().strip() == "Hm."
    assert json.loads(answer.locator("details pre").last.inner_text()) == {"city": "x"}
    page.get_by_label("Result of weather").fill("sunny")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator("#prompt")).to_have_value("")
    assert "[assistant]Wait.\n[tool]sunny[" in rig.generator.tokenizer.decode(rig.engine.prompts[1])


def test_a_stopped_answer_stays_in_the_conversation(rig, visit):
    rig.engine.allowed = 3
    page = visit(rig, viewport={"width": 390, "height": 800})
    page.get_by_role("tab", name="Chat").click()
    assert not page.get_by_label("temperature").is_visible()  # folded on a phone
    page.get_by_label("Message", exact=True).fill("hi")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".turn.assistant .body")).to_have_text("one")
    page.get_by_role("button", name="Stop").click()
    shows(page, "progress", re.compile("stopped$"))
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.get_by_role("tab", name="Completion").click()
    page.get_by_role("tab", name="Chat").click()
    assert page.locator(".turn .body").all_inner_texts() == ["hi", "one"]
    conversation, message = (page.locator(f"#{id}").bounding_box() for id in ("output", "prompt"))
    assert conversation["y"] + conversation["height"] <= message["y"]


def test_no_chat_without_a_template(make_rig, visit):
    rig = make_rig(template=None)
    page = visit(rig)
    expect(page.get_by_role("tab", name="Chat")).to_be_disabled()
    assert page.get_by_text("no chat: the model has no template").is_visible()


def test_the_live_view_moves_while_a_request_runs(rig, visit):
    page = visit(rig)
    page.get_by_text("no step measured yet").wait_for()
    rig.engine.pace, rig.engine.allowed = 0.05, 3
    rig.engine.view = pipeline_view(24)
    page.get_by_role("button", name="Run").click()
    shows(page, "running", "1")
    expect(page.locator("#timeline title")).to_have_count(24)
    assert "2 steps in 24 ms, measured" in page.locator("#window").inner_text()
    for place, text in (
        (
            "verdict",
            "2 requests wait: for their turn. ffn waits 50 %: attention is the longer side.",
        ),
        ("kv", "domain 0 25 % domain 1 75 %"),
        ("bubble", "25 %"),
        ("transfer", "150 µs"),
    ):
        assert page.locator(f"#{place}").inner_text().split() == text.split()
    assert page.locator("#experts rect").count() == 4
    assert "× 2.00 of the mean" in page.locator("#layer-note").inner_text()
    page.get_by_label("Layer", exact=True).select_option("2")
    assert "× 2.50 of the mean" in page.locator("#layer-note").inner_text()
    rig.engine.view = pipeline_view(48)
    rig.engine.allowed = None
    shows(page, "window", re.compile("48 ms"))
    shows(page, "running", "0")
    assert page.get_by_label("Layer", exact=True).input_value() == "2"


@pytest.mark.nightly
def test_a_row_for_each_resource_and_what_they_mean(rig, visit):
    """Two lanes of three layers, of which the last is a pass of the drafts; nothing runs now."""
    rig.engine.layers = 2
    rig.engine.view = pipeline_view(24)
    page = visit(rig)
    titles = page.locator("#timeline title")
    expect(titles).to_have_count(24)
    assert titles.first.text_content() == "attention, layer 0, lane 0, step 7: 1.0 ms"
    assert titles.last.text_content() == "combine ↑, drafts, pass 1, lane 1, step 7: 1.0 ms"
    assert page.locator("#timeline rect.track").count() == 4
    names = page.locator("#timeline > text").all_text_contents()[:4]
    assert names == ["attention 75 %", "dispatch ↓ 5.0 %", "ffn 50 %", "combine ↑ 4.0 %"]
    places = {name: {box["y"] for box in boxes_of(page, name)} for name in ("attention", "ffn")}
    assert [len(found) for found in places.values()] == [1, 1]
    assert places["attention"] != places["ffn"]
    assert page.locator("#timeline .layer").all_text_contents()[:3] == ["0", "0", "0"]
    words = page.locator("#lanes span").all_inner_texts()
    assert words[:2] == ["lane 0", "lane 1"]
    assert re.search(r"no steps for \d+ days", page.locator("#window").inner_text())
    assert "stale" in page.locator("#bubble").get_attribute("class")
    *spans, late = (view := pipeline_view(48)).timeline
    late = msgspec.structs.replace(late, start_ns=late.end_ns)
    rig.engine.view = msgspec.structs.replace(view, timeline=[*spans, late])
    expect(page.locator("#lanes")).to_contain_text("4.2 % of the stages were not seen to end")
    assert titles.last.text_content().endswith("step 7: too short to be told")


def boxes_of(page: Any, name: str) -> list[dict[str, float]]:
    boxes = page.locator("#timeline g", has=page.locator(f"title:text('{name},')")).locator("rect")
    return [box.bounding_box() for box in boxes.all()]


@pytest.mark.nightly
def test_the_timeline_is_zoomed_and_frozen_and_no_stage_sets_its_scale(rig, visit):
    """Four steps of which each takes 2 ms, but the last, whose attention took 100 ms."""
    ms, spans = 1_000_000, []
    for step, length in enumerate((1, 1, 1, 100)):
        begin = (1_700_000_000_000 + 2 * step) * ms
        ends = [begin + length * ms, begin + (length + 1) * ms]
        for stage, start, end in (("attend", begin, ends[0]), ("ffn", *ends)):
            spans.append(Span(stage, 0, 0, step, start, end, 0, start))
    view = PipelineView(measured_at=1_700_000_000.107, window_seconds=0.107, timeline=spans)
    rig.engine.view = view
    page = visit(rig)
    shows(page, "shown", "4.0 ms of 107 ms")
    expect(page.locator("#timeline .layer")).to_have_text(["0"] * 4)
    page.get_by_role("button", name="Fit").click()
    shows(page, "shown", "107 ms of 107 ms")
    page.get_by_role("button", name="+", exact=True).click()
    shows(page, "shown", "54 ms of 107 ms")
    page.locator("#timeline").press("+")
    shows(page, "shown", "27 ms of 107 ms")
    page.get_by_label("freeze").check()
    rig.engine.view = msgspec.structs.replace(view, measured_at=1_700_000_001.0)
    shows(page, "window", re.compile("^frozen, "))
    shows(page, "shown", "27 ms of 107 ms")
    page.get_by_label("freeze").uncheck()
    shows(page, "window", re.compile("^0 steps in 107 ms"))


@pytest.mark.nightly
def test_the_timeline_can_be_saved(rig, visit):
    page = visit(rig)
    page.get_by_text("no step measured yet").wait_for()
    assert page.get_by_role("button", name="Save JSON").is_disabled()
    rig.engine.view = pipeline_view(24)
    expect(page.locator("#timeline title")).to_have_count(24)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save JSON").click()
    assert saved.value.suggested_filename == "timeline-2023-11-14T22-13-20-024Z.json"
    found = json.loads(Path(saved.value.path()).read_text(encoding="utf-8"))
    assert (found["model"], found["steps"], found["window_seconds"]) == ("fake", 2, 0.024)
    second = {"stage": "attend", "lane": 1, "layer": 0, "step": 7}
    assert found["timeline"][1] == second | {"start_us": 1000, "end_us": 2000}
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save SVG").click()
    assert saved.value.suggested_filename.endswith(".svg")
    picture = ElementTree.parse(saved.value.path()).getroot()
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    assert len(picture.findall("svg:g/svg:title", namespace)) == 24
    fills = {rect.get("fill") for rect in picture.iterfind(".//svg:rect", namespace)}
    assert {"rgb(47, 109, 179)", "rgb(217, 119, 6)"} < fills


@pytest.mark.nightly
def test_drafts_and_workers_by_role(rig, visit):
    rig.engine.drafts = DraftCounts(runs=100, drafted=200, accepted=[80, 50])
    rig.engine.workers = [
        WorkerLoad(name="a:1", role="domain", status="ready", running=3, kv_usage=[0.2]),
        WorkerLoad(name="b:1", role="prefill", status="ready", held=1, kv_usage=[0.1, 0.3]),
        WorkerLoad(name="c:1", role="domain", status="suspect", why="silent", kv_usage=[0.4]),
    ]
    worker = FFNWorkerView(name="e:1", passes=7, rows=70, places=4)
    rig.engine.view = PipelineView(ffn=[worker])
    page = visit(rig)
    shows(page, "drafts-note", "2.30 tokens a step and sequence, since the start")
    held = page.locator("#drafts").inner_text().split("\n")
    assert [text for text in held if text] == ["draft 1 held", "80 %", "draft 2 held", "50 %"]
    rows = page.locator("#fleet tbody tr").all()
    assert [row.locator("td").all_inner_texts() for row in rows] == [
        ["prefill", "b:1", "ready", "0", "0", "", "1 held, 0 tokens handed over"],
        ["attention", "a:1", "ready", "3", "0", "", ""],
        ["attention", "c:1", "suspect: silent", "0", "0", "", ""],
        ["ffn", "e:1", "ready", "–", "–", "–", "7 passes"],
    ]
    assert page.locator("#kv > .small").all_inner_texts() == ["a:1", "20 %", "c:1", "40 %"]
    counts = {"passes": 9, "rows": 100, "messages": 3, "places": 8, "left_behind": 2}
    rig.engine.view = PipelineView(ffn=[msgspec.structs.replace(worker, misjudged=0.25, **counts)])
    text = r"^15 rows of 1.5 of 2.0 messages a pass, 2 left behind, arrivals ± 250.0 ms, \d"
    expect(page.locator("#fleet td").last).to_have_text(re.compile(text))


@pytest.mark.nightly
def test_requests_times_and_refusals(rig, visit):
    page = visit(rig)
    shows(page, "first", "– p50 · – p99")
    with rig.streaming(request_id="mine"):
        cells = page.locator("#requests tbody td")
        age = re.compile(r"^\d+ s$")
        expect(cells).to_have_text([re.compile("^mine"), "decoding", age, "3", "3", "here"])
        rig.refused(temperature=7)
        shows(page, "refused", "1")
        assert page.locator("#refused").get_attribute("title") == "invalid_value: 1"
        shows(page, "first", re.compile(r"^[\d.]+ ms p50 · [\d.]+ ms p99$"))
        expect(page.locator("#first-curve path")).to_have_count(2)
    expect(page.locator("#requests tbody tr")).to_have_count(0)


def test_the_key_stays_in_headers(make_rig, visit):
    rig = make_rig(access=Access(ApiKeys([KEY])))
    page = visit(rig, "401 ")
    page.get_by_text("the API key is missing or wrong").first.wait_for()
    page.get_by_role("button", name="Run").click()
    shows(page, "error", re.compile("API key"))
    assert page.evaluate("document.activeElement.id") == "key"
    page.get_by_label("API key").fill(KEY)
    run(page)
    shows(page, "status", "ready")
    assert page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])") == "[{},{}]"
    assert page.evaluate("document.cookie") == ""


@pytest.mark.nightly
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_sticks_out_and_text_is_no_markup(make_rig, visit, width):
    text = "<img src=x onerror=alert(1)>"
    rig = make_rig(text)
    rig.engine.view = pipeline_view(24)
    page = visit(rig, viewport={"width": width, "height": 900}, color_scheme="dark")
    page.get_by_role("button", name="Run").click()
    shows(page, "output", text)
    expect(page.locator("#timeline title").first).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_policy_allows_the_page_and_nothing_else(shared):
    headers = shared.client.get("/").headers
    assert headers["content-security-policy"] == policy(PAGE)
    directives = dict(part.strip().split(" ", 1) for part in policy(PAGE).split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", directives["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", directives["style-src"])
    assert "unsafe" not in policy(PAGE)
    assert headers["content-type"] == "text/html; charset=utf-8"


def test_the_page_asks_for_nothing_from_elsewhere():
    """The page's text has no address but that of the SVG namespace."""
    assert set(re.findall(rb"(?:https?:)?//[\w.]+/", PAGE)) == {b"http://www.w3.org/"}
    assert b"innerHTML" not in PAGE
    assert b"style=" not in PAGE  # the policy would forbid it


def test_figures(rig):
    rig.engine.view = pipeline_view(24)
    rig.complete()
    answer = rig.client.get("/pipeline")
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert (found["model"], found["mode"], found["chat"]) == ("fake", "afd", True)
    assert (found["generated_tokens"], found["ended"]) == (13, {"stop": 1})
    assert found["load"]["kv_usage"] == [0.25, 0.75]
    measured = found["measured"]
    assert measured["timeline"][1] == ["attend", 1, 0, 7, 1000, 2000, None]
    assert measured["transfers"] == {"dispatch": [10, 0.002], "combine": [10, 0.001]}
    assert found["experts"]["expert_tokens"] == {"1": [4, 0, 2, 2], "2": [1, 1, 1, 5]}


def test_the_page_is_package_data():
    """The page is found beside the module, wherever that was installed."""
    pyproject = (Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    packed = pyproject.partition("[tool.setuptools.package-data]")[2].partition("#")[0]
    assert all(f'"*.{suffix}"' in packed for suffix in ("html", "css", "js"))
