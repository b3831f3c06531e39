from jaxserve.bench.machine import hardware_text
from jaxserve.planner.hardware import load_hardware


def test_what_is_measured_becomes_hardware(tmp_path):
    found = {"bfloat16": 2e11, "float32": 1e11, "read": 2e10, "sent": 1.5e9, "memory": 24e9}
    path = tmp_path / "mine.yaml"
    path.write_text(hardware_text("A chip", "2026-11-22T10:00", 2, found, 0.05), encoding="utf-8")
    mine = load_hardware(str(path))
    assert (mine.platform, mine.pads, mine.price) == ("cpu", True, 0.05)
    assert (mine.flops("float32"), mine.flops("bfloat16")) == (1e11, 2e11)
    assert (mine.bandwidth, mine.link, mine.memory) == (20e9, 1.5e9, 12e9)
    assert mine.sources["memory_gb_s"].startswith("python -m jaxserve.bench machine, A chip, 2026")
