"""The dashboard shows what a server measures: every metric of it, and no other."""

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.link.pages.source import PagesLoad
from jaxserve.observe.load import EngineLoad, WorkerLoad
from jaxserve.server.metrics import Metrics
from tests.jaxserve.server.http.rig import HttpRig
from tests.jaxserve.text.fake_engine import FakeEngine, pipeline_view

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "launch" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
RULES = Path(__file__).parents[2] / "launch" / "prometheus-rules.yaml"
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
NAME = re.compile(r"jaxserve:\w+")
PLAN = '# TYPE jaxserve:plan_error gauge\njaxserve:plan_error{stage="ffn"} 0.3\n'
"""What `plan verify --listen` serves."""


@pytest.fixture(scope="module")
def exposition():
    """Metrics of a router's server that has served something, lately measured."""
    workers = [
        WorkerLoad(name="p:1", role="prefill", status="ready"),
        WorkerLoad(name="d:1", role="domain", status="ready"),
    ]
    own = FakeEngine.load

    def load(engine: FakeEngine) -> EngineLoad:
        return msgspec.structs.replace(
            own(engine), workers=workers, hand_offs=PagesLoad(), losses={"domain": {"silent": 1}}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "load", load)
        rig = HttpRig()
    rig.engine.view = msgspec.structs.replace(pipeline_view(24), measured_at=time.time())
    rig.complete()
    rig.refused(temperature=3)
    yield rig.client.get("/metrics").text
    rig.close()


def samples(exposition: str) -> dict[str, set[str]]:
    """Family → the names that its samples may have."""
    suffixes = {
        "counter": ("_total",),
        "histogram": ("_bucket", "_sum", "_count"),
        "summary": ("_sum", "_count"),
    }
    return {
        family.name: {family.name + s for s in suffixes.get(family.type, ("",))}
        for family in text_string_to_metric_families(exposition)
        if not family.name.endswith("_created")  # when a series began: a counter's own matter
    }


def test_every_metric_it_names_exists(exposition: str) -> None:
    found = set().union(*samples(exposition).values())
    for expression in EXPRESSIONS:
        names = set(NAME.findall(expression))
        assert names, expression
        assert names <= found, expression


def test_alerts_read_metrics_and_labels_that_exist(exposition: str) -> None:
    loop = Metrics("m")
    loop.watch_loop(FakeEngine([]))
    text = exposition + loop.text().decode() + PLAN
    found, labels = (
        set().union(*samples(text).values()),
        {*re.findall(r'(\w+)="', text), "instance"},
    )
    rules = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    assert len(rules) == 11
    for rule in rules:
        assert set(NAME.findall(rule["expr"])) <= found, rule["alert"]
        assert set(re.findall(r"labels\.(\w+)", f"{rule['annotations']}")) <= labels
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_metric_of_ours_is_in_it(exposition: str) -> None:
    named = set(NAME.findall(" ".join(EXPRESSIONS)))
    shown = {family for family, names in samples(exposition).items() if names & named}
    assert {name for name in samples(exposition) if name.startswith("jaxserve:")} == shown
    assert len(shown) >= 22


def test_labels_it_groups_by_exist(exposition: str) -> None:
    labels = set(re.findall(r'(\w+)="', exposition))
    wanted = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(PANELS)))
    wanted |= set(re.findall(r"by \((\w+)\)", " ".join(EXPRESSIONS)))
    assert wanted <= labels


def test_the_grid() -> None:
    """Panels lie within 24 columns and not on each other."""
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        mine = set(itertools.product(columns, rows))
        assert columns.stop <= 24
        assert not mine & cells
        cells |= mine
