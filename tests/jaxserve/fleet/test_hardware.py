from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve.fleet import hardware
from jaxserve.fleet.hardware import detect_platform
from tests import golden
from tests.jaxserve.fleet.launched import python


def host(root: Path, devices: Sequence[str] = (), pci: Sequence[tuple[str, str]] = ()) -> Path:
    """A file system root with these files under /dev and this (vendor, class) on the PCI bus."""
    for name in ("null", *devices):
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for index, (vendor, kind) in enumerate(pci):
        folder = root / "sys/bus/pci/devices" / f"0000:00:{index:02}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    return root


@golden.table("fleet/platforms.yaml")
def test_detect_platform(tmp_path, devices, pci, environment, installed, expected):
    root = host(tmp_path, devices, pci)
    assert detect_platform(root, environment, lambda name: name in installed) == expected


def test_hardware_without_its_plugin_is_said(tmp_path, caplog):
    assert detect_platform(host(tmp_path, ["nvidia0"]), {}, lambda name: False) == "cpu"
    assert "this host has an accelerator (NVIDIA GPU), but JAX's plugin" in caplog.text
    assert ".[cuda]" in caplog.text


@pytest.mark.parametrize(("platforms", "first"), [("cpu", "cpu"), ("tpu,cpu", "tpu")])
def test_jax_platforms_comes_first(monkeypatch, platforms, first):
    monkeypatch.setattr(hardware.jax, "config", SimpleNamespace(jax_platforms=platforms))
    assert (hardware.expected_platform(), hardware.choose_platform()) == (first, first)


def test_an_installed_plugin_without_hardware_leaves_simulated_devices():
    """JAX_PLATFORMS is not set, and a module named libtpu can be imported."""
    code = golden.text("fleet/installed_plugin.txt")
    assert python(code, JAX_PLATFORMS=None) == ["cpu", 5]
