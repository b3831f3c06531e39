import json
from io import BytesIO

import msgspec
import numpy as np
import pytest

from jaxserve.observe import timeline_view
from jaxserve.observe.spans import Span
from jaxserve.observe.view import PipelineView
from jaxserve.plan import main
from jaxserve.planner.assumptions import measured_speed
from jaxserve.planner.lanes import step_seconds
from jaxserve.planner.measurements import read_spans
from jaxserve.planner.models import load_model
from jaxserve.planner.stage_times import StepTimes
from jaxserve.roles.layout import StepLoad
from jaxserve.server.http.live import _measured
from tests import golden
from tests.jaxserve.planner import published
from tests.jaxserve.planner.published import token_cost

FORMATS = ["attention.weights=fp8", "ffn.weights=fp8", "cache.format=fp8", "link.dispatch=fp8"]
"""A shipped deployment of two lanes on TPUs, all in BF16."""
STAGE = {"device_kind": "TPU v6 lite", "op": "attend", "model": "qwen3-30b-a3b"}
POINT = STAGE | {"batch": 64, "context": 4096, "format": "int8"}
MICROSECONDS = {"attend": 200, "dispatch": 40, "ffn": 300, "combine": 50}


def qwen(trace, *settings):
    """Options that name the deployment, these settings of it, and a trace."""
    given = [word for each in (*FORMATS, *settings) for word in ("--set", each)]
    return ["--config", "qwen3-30b-a3b", "--hardware", "v6e", *given, "--timeline", str(trace)]


@pytest.fixture
def trace(tmp_path):
    """Six steps of two lanes; every stage takes what MICROSECONDS says."""
    spans, at, load = [], 0, StepLoad(64, 16, 512, 512, 512 * 2048, 512 * 2048)
    for step in range(12):
        for layer in range(48):
            for stage, duration in MICROSECONDS.items():
                end = at + duration * 1000
                spans.append(Span(stage, step % 2, layer, step, at, end, 0, 0, load))
                at = end
        spans.append(Span("attend", step % 2, 48, step, at, at + 9_000_000, 0, 0, load))
        at += 9_000_000
    timeline_view.write(tmp_path / "trace", spans)
    return tmp_path / "trace"


def timed_step(number, load, kinds, clock, spans):
    """A step of one lane whose stages take what a formula says."""
    for layer, (_, moe) in enumerate(kinds):
        for stage in ("attend", "dispatch", "ffn", "combine"):
            duration = {
                "attend": 50 + 2 * load.bucket_tokens * load.bucket_pages + 70 * (not layer),
                "dispatch": 20 + load.bucket_tokens,
                "ffn": 80 + 3 * load.bucket_tokens + moe * 20 * load.sequences,
                "combine": 25 + load.bucket_tokens,
            }[stage]
            end = clock + duration * 1000
            spans.append(Span(stage, 0, layer, number, clock, end, 0, 0, load))
            clock = end
    end = clock + 400_000
    spans.append(Span("attend", 0, len(kinds), number, clock, end, 0, 0, load))
    return end


def demo_trace(folder, loads):
    """The demo's layers: the first and the last are dense."""
    kinds = [(0, 0), (0, 1), (0, 1), (0, 1), (0, 0)]
    spans, clock = [], 1_000_000
    for number in range(4 * len(loads)):
        tokens, pages, sequences, context = loads[number // 4]
        load = StepLoad(tokens, pages, sequences, sequences, sequences * context, 0)
        clock = timed_step(number, load, kinds, clock, spans)
    timeline_view.write(folder, spans)
    return str(folder)


def test_calibrated_at_some_loads_and_judged_at_others(capsys, tmp_path):
    """Stages that are sums of what fits know are predicted exactly where nothing was measured."""
    on_cpu = ["--config", "demo", "--set", "lanes=1", "--hardware", "cpu"]
    measured = [(16, 16, 4, 250), (64, 16, 16, 250), (16, 64, 4, 1000), (64, 64, 16, 1000)]
    held_out = [(32, 32, 8, 500), (16, 16, 4, 250)]
    asked = ["--timeline", demo_trace(tmp_path / "a", measured), "--write", str(tmp_path / "c")]
    assert main(["calibrate", *on_cpu, *asked, "--json"]) == 0
    fits = json.loads(capsys.readouterr().out)
    assert {(one["stage"], one["layers"]) for one in fits} == {
        *(("enter", 0), ("attend", 0), ("dispatch", 0), ("ffn", 0), ("ffn", 1)),
        *(("combine", 0), ("leave", 0)),
    }
    asked = ["--timeline", demo_trace(tmp_path / "b", held_out)]
    asked += ["--calibration", str(tmp_path / "c")]
    assert main(["verify", *on_cpu, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(one["held_out"] for one in found) == len(found) / 2 == 8
    for one in found:
        assert one["error"] == pytest.approx(0.0, abs=0.04), one
    assert main(["verify", *on_cpu, *asked]) == 0
    printed = capsys.readouterr().out
    assert "stages held out within 15%: 7 of 7" in printed
    assert "stages within 15%: 14 of 14" in printed
    assert "steps held out within 10%: 1 of 1" in printed
    assert "steps within 10%: 2 of 2" in printed
    assert "loads that were not calibrated with: 1 of 2" in printed


def test_another_model_s_trace(capsys, trace):
    asked = ["verify", "--config", "configs/qwen3-32b.yaml", "--timeline", str(trace)]
    assert main([*asked, "--hardware", "v6e"]) == 2
    assert "a colocated deployment" in capsys.readouterr().err


@pytest.mark.parametrize(("cache", "experts"), [("fp8", "fp8"), ("bfloat16", "int8")])
def test_a_trace_makes_predictions_what_was_measured(capsys, trace, tmp_path, cache, experts):
    """Whatever the formats of the roles and of the cache."""
    kept = tmp_path / "measured.json"
    common = qwen(trace, f"cache.format={cache}", f"ffn.weights={experts}")
    assert main(["calibrate", *common, "--write", str(kept)]) == 0
    assert "worst error" in capsys.readouterr().out
    assert main(["verify", *common, "--calibration", str(kept), "--json"]) == 0
    for one in json.loads(capsys.readouterr().out):
        if one["name"] != "step":  # its lanes take turns, instead of hiding each other
            assert one["error"] == pytest.approx(0.0, abs=1e-3), one


def test_measurements_are_collected(capsys, tmp_path):
    kept, bench = tmp_path / "kept.json", tmp_path / "bench.json"
    for batch in (64, 128):
        bench.write_text(json.dumps([POINT | {"batch": batch, "seconds": batch * 1e-5}]))
        assert main(["calibrate", "--measured", str(bench), "--write", str(kept)]) == 0
    assert [one["batch"] for one in json.loads(kept.read_text())] == [64, 128]
    html = tmp_path / "fit.html"
    capsys.readouterr()
    assert main(["calibrate", "--measured", str(kept), "--json", "--html", str(html)]) == 0
    (fit,) = json.loads(capsys.readouterr().out)
    assert (fit["stage"], fit["points"]) == ("attend", 2)
    assert fit["hardware"] == "TPU v6e (Trillium)"
    assert html.read_text(encoding="utf-8").count("<table>") == 2


def test_a_calibration_changes_a_search(capsys, tmp_path):
    bench = tmp_path / "slow.json"
    bench.write_text(json.dumps([POINT | {"seconds": 1.0}]))
    asked = ["search", "--model", "qwen3-30b-a3b", "--context", "4K", "--max-devices", "4"]
    asked += ["--hardware", "v6e", "--tpot", "50ms"]
    assert main(asked) == 0
    assert main([*asked, "--calibration", str(bench)]) == 1
    assert "its attend stage takes" in capsys.readouterr().err


def times(enter: float = 3.0, host: float = 0.0) -> StepTimes:
    """Three layers."""
    attend, ffn = np.array([[enter], [1.0], [1.0]]), np.array([2.0, 1.0, 1.0])
    return StepTimes(attend, np.full(3, 0.5), ffn, np.full(3, 0.25), 4.0, host)


def test_lanes_hide_each_other_s_stages_and_the_first_attend_is_charged_to_each():
    one = step_seconds(times(), 1, 1)
    three = step_seconds(times(), 3, 1)
    busy = 3 + 2 + 4  # of attention, a lane
    assert 3 * busy <= three < 3 * one
    assert step_seconds(times(enter=4.0), 3, 1) == pytest.approx(three + 3)


@pytest.mark.parametrize(
    ("host", "lanes", "seconds"),
    [(0.0, 1, 3 + 2 * 1 + 3 * 0.75 + 4 + 4), (10.0, 1, 15.25), (20.0, 1, 20.0), (20.0, 2, 40.0)],
)
def test_the_host_enqueues_a_step_while_devices_run_the_one_before(host, lanes, seconds):
    """A step of one lane is the sum of its stages; the lanes share the host."""
    assert step_seconds(times(host=host), lanes, 1) == pytest.approx(seconds)


def test_a_running_server_that_parts_from_its_plan(trace, capsys, tmp_path, monkeypatch):
    """An alarm for all that is off by more than a quarter, with what was measured there for steps
    alone, whose lanes do not overlap, and the attention devices that its times ask for."""
    times = [1.0, 1.0, 2.0] * 2  # what was measured before it asks is left out

    def answer(asked, timeout: float) -> BytesIO:
        if asked.full_url == "http://else/pipeline":
            return BytesIO(b"[]")
        view = PipelineView(
            measured_at=times.pop(0), window_seconds=1.0, timeline=read_spans(trace)
        )
        return BytesIO(msgspec.json.encode({"measured": _measured(view)}))

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    asked = [word for word in qwen(trace) if word not in ("--timeline", str(trace))]
    assert main(["verify", *asked, "--url", "http://here/"]) == 1
    said = capsys.readouterr()
    assert "ALARM: ffn takes 300 µs, planned" in said.err
    assert "attention devices beside 4 for the FFN; by the analytic rule" in said.out
    measured = ["--calibration", str(tmp_path / "measured.json")]
    assert main(["calibrate", *qwen(trace), "--write", measured[1]]) == 0
    assert main(["verify", *asked, "--url", "http://here", *measured]) == 1
    assert capsys.readouterr().err == "ALARM: step takes 74640 µs, planned 46690\n"
    assert not times
    assert main(["verify", *asked, "--url", "http://else"]) == 2
    assert "--url http://else: Expected `object`" in capsys.readouterr().err


def test_all_printed_numbers_but_three_agree():
    """2 / 3600 / 1.98e15 = 2.806e-19: that one does not follow from the paper's own numbers."""
    golden.check("planner/tables.txt", published.tables())


def test_what_others_measured():
    """Most were fitted to nothing; vLLM, v7x and GLM-5 are the slowest of whole systems."""
    rows = published.predicted()
    golden.check("planner/world.txt", published.systems(rows))
    again = "python -m tests.jaxserve.planner.published writes it anew; review the difference"
    found, stored = published.speeds(rows), measured_speed()
    for mode, speed in {"all": found.systems, **found.modes}.items():
        kept = stored.systems if mode == "all" else stored.modes[mode]
        assert speed == pytest.approx(kept, abs=1e-3), again
    assert found.systems == pytest.approx((26, 0.619, 0.892, 1.196), abs=1e-3)
    layers = [ours / one.measured for one, ours in rows if one.name.startswith("attention layer")]
    assert len(layers) == 16
    assert max(abs(ratio - 1) for ratio in layers) <= 0.26
    for one, _ in rows:
        assert one.source.startswith("https://")
        assert one.given
        assert one.taken


def test_an_indexer_reads_all_keys_and_attention_the_chosen_rows():
    cost = token_cost(load_model("deepseek-v3.2"), 131072)
    assert cost.cache_bytes == 61 * (2048 * 576 + 131072 * 128)
    assert cost.attention_flops == 61 * (4 * 128 * 576 * 2048 + 2 * 64 * 128 * 131072)


def test_compressed_attention_reads_its_window_and_rows_of_several_tokens():
    cost, context = token_cost(load_model("deepseek-v4-flash"), 131072), 131072
    rows = 43 * 128 + 21 * 512 + 20 * context // 128
    assert cost.cache_bytes == rows * 512 + 21 * context // 4 * 128
    assert cost.attention_flops == 4 * 64 * 512 * rows + 21 * 2 * 64 * 128 * context // 4
    assert cost.attention_flops == pytest.approx(16.1e9, rel=0.01)
