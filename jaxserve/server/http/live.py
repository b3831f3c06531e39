"""The page at / and /pipeline, which feeds its live view of the load and the pipeline.

The page is sent as one document (`observe/timeline_view.py`): `page.html` with its style and script
inline; its Content-Security-Policy allows only these two, by their digests, and requests to this
server. It contains no secrets, so it needs no API key; the figures behind it do.
"""

import base64
import hashlib
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from jaxserve.observe.load import EngineLoad
from jaxserve.observe.spans import AnyStage
from jaxserve.observe.timeline_view import SHARED, Bar, assembled, bars
from jaxserve.observe.view import FFNWorkerView, PipelineView, Transfers
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.layout import StepLoad
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.service import Service
from jaxserve.server.metrics import Counts, Times
from jaxserve.text.generator import TextGenerator

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_SCRIPTS = (
    *(SHARED / "page_common.js", _HERE / "page_playground.js", _HERE / "page_markdown.js"),
    *(_HERE / "page_chat.js", _HERE / "page_tokens.js", SHARED / "page_timeline.js"),
    *(_HERE / "page_live.js", _HERE / "page_events.js"),
)
"""Parts of the page's script, in order."""
MOST_ID = 24
"""Characters of a request's id that are shown."""
PAGE = assembled(_HERE / "page.html", _SCRIPTS)


class LiveRequest(msgspec.Struct, kw_only=True):
    """A request that has not ended."""

    id: str
    state: str
    """`waiting`, `prefill`, `held` (its pages wait for a domain) or `decoding`."""
    age: float
    """Seconds since its submission."""
    prompt_tokens: int
    tokens: int
    """Generated so far."""
    where: str
    """The worker of a fleet that has it; empty: this process, or none yet."""


class MeasuredSteps(msgspec.Struct, kw_only=True):
    """A sample, a window of whole steps (`PipelineView`), with its stages as bars sorted by start.

    Only completions are measured; the start of a stage is inferred from the times of its input, its
    submesh and the host. The clocks of several machines are assumed to agree.
    """

    at: float
    """Seconds of the epoch at the window's end."""
    window_seconds: float
    steps: int
    busy: dict[AnyStage, float]
    bubble: float | None
    timeline: list[Bar]
    timeline_cut: bool
    loads: list[tuple[int, int, StepLoad]]
    """Lane, step number and work of the steps."""
    transfers: dict[AnyStage, Transfers]
    missing: str
    """Names the times that are missing, but no host; empty: the sample is complete."""


class Pipeline(msgspec.Struct, kw_only=True):
    """The answer of /pipeline."""

    status: str
    model: str
    mode: str
    lanes: int
    """Number of lanes of each domain."""
    domains: int
    """Attention workers; lane i of the timeline is one of domain i modulo their number."""
    attention: str
    """Axes of the attention mesh."""
    ffn: str
    layers: int
    """Number of the model's layers, before those of prediction modules. 0: not known."""
    max_length: int
    """Tokens of prompt and output together."""
    chat: bool
    """Whether the model has a chat template."""
    time: float
    """Seconds of the epoch."""
    generated_tokens: int
    """Since the start."""
    refused: dict[str, int]
    """Requests that got an error since the start, by its code."""
    ended: dict[str, int]
    """Requests that ended since the start, by their reason."""
    latencies: dict[str, Times]
    """Times to the `first` token and `between` tokens, since the start."""
    requests: list[LiveRequest]
    """Running requests of the caller's API key, the oldest first."""
    load: EngineLoad
    ffn_workers: list[FFNWorkerView]
    """ffn workers of other runtimes that domains use."""
    experts: ExpertView | None
    """Where experts are, and what they and their ranks got; null without any."""
    measured: MeasuredSteps | None
    """Null until steps were measured, which happens only while clients ask."""


async def pipeline(service: Service, exchange: HttpExchange) -> None:
    """The load, and the steps measured last."""
    generator = service.ready()
    engine = generator.engine
    view = engine.pipeline()
    info = engine.model_info()
    counts = service.metrics.counts() if service.metrics else Counts(0, {}, {}, {})
    answer = Pipeline(
        status=engine.status,
        model=str(info["model"]),
        mode=str(info["mode"]),
        lanes=info["lanes"],
        domains=info.get("domains", 1),
        attention=str(info["attention"]),
        ffn=str(info["ffn"]),
        layers=info.get("layers", 0),
        max_length=info["max_length"],
        chat=service.template is not None,
        time=time.time(),
        generated_tokens=counts.generated,
        refused=counts.refused,
        ended=counts.ended,
        latencies=counts.times,
        requests=_requests(generator, exchange.tenant),
        load=engine.load(),
        ffn_workers=view.ffn,
        experts=view.experts,
        measured=_measured(view),
    )
    await exchange.reply(answer, headers={"Cache-Control": "no-store"})


def _requests(generator: TextGenerator, owner: str) -> list[LiveRequest]:
    places: dict[str, tuple[str, str]] = getattr(generator.engine, "whereabouts", dict)()
    found = []
    for one in generator.live_requests():
        place, worker = places.get(one.request_id, ("waiting", ""))
        state = "decoding" if one.produced else "waiting" if place == "domain" else place
        if one.owner == owner:
            found.append(
                LiveRequest(
                    id=one.request_id[:MOST_ID],
                    state=state,
                    age=time.monotonic() - one.begun,
                    prompt_tokens=len(one.prompt),
                    tokens=one.produced,
                    where=worker,
                )
            )
    return found


async def page(service: Service, exchange: HttpExchange) -> None:
    """A page to try the model and to watch the pipeline."""
    await exchange.reply(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


def _measured(view: PipelineView) -> MeasuredSteps | None:
    if view.measured_at is None:
        return None
    if view.missing:
        logger.warning("pipeline: %s", view.missing)
    start = int((view.measured_at - view.window_seconds) * 1e9)
    return MeasuredSteps(
        at=view.measured_at,
        window_seconds=view.window_seconds,
        steps=view.steps,
        busy=view.busy,
        bubble=view.bubble,
        timeline=bars(view.timeline, start),
        timeline_cut=view.timeline_cut,
        loads=list({(one.lane, one.step, one.load): 0 for one in view.timeline if one.load}),
        transfers=view.transfers,
        missing="the times of another process did not come" if view.missing else "",
    )


def policy(html: bytes) -> str:
    """The Content-Security-Policy of a page: its inline scripts and styles, and this server."""
    sources = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), html, re.S)
        )
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": policy(PAGE),
    "Cache-Control": "no-cache",
}
