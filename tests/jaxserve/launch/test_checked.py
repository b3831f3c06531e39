"""Deployments are sized for their hardware, and what is rendered passes `serve --check`."""

from pathlib import Path

import pytest

from jaxserve.commands.checking import check
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import deployment_names
from jaxserve.errors import ConfigError
from jaxserve.launch import checked
from jaxserve.launch.__main__ import TARGETS, main
from jaxserve.launch.checked import sized
from tests import golden
from tests.jaxserve.launch.rendered import deployment_in, files_of, objects


def test_sizes_follow_the_hardware() -> None:
    """31 of 34.3 GB of a v6e are 77.3 of 85.5 of an H100, and pages fill what is left."""
    given = load_deployment("qwen3-30b-a3b")
    made = sized(given, "h100")
    assert (made.attention.hardware, made.ffn.hardware) == ("h100", "h100")
    assert (made.attention.memory_gb, made.ffn.memory_gb) == (77.3, 77.3)
    assert (given.cache.pages, made.cache.pages) == (3600, 11779)
    assert sized(given, "v6e") == given
    # No more pages than all sequences can fill, and prefill workers have their own.
    assert sized(load_deployment("step3-v6e"), "h100").cache.pages == 32 * 3 * 64
    fleet = sized(load_deployment("step3-prefill"), "h200")
    assert (fleet.cache.pages, fleet.prefill.cache["pages"]) == (58867, 16384)


def rendered(command: str) -> str:
    """The deployment file that a command renders; empty where its target refuses."""
    try:
        files = files_of(command)
    except ConfigError:
        return ""
    for name, text in files.items():
        if name.endswith("deployment.yaml"):
            return text
    (text,) = (text for name, text in files.items() if name != "autoscale.yaml")
    return str(objects(text)["ConfigMap", "jaxserve"]["data"]["deployment.yaml"])


SIZES = ("mode", "dtype", "lanes", "attention", "ffn", "cache", "scheduler", "prefill")


@pytest.mark.nightly
@pytest.mark.parametrize("hardware", ["v6e", "v7x", "h100"])
@pytest.mark.parametrize("name", deployment_names())
def test_what_is_rendered_was_checked(name: str, hardware: str, tmp_path: Path, monkeypatch):
    """All targets render the sizes that pass `serve --check`, or the command refuses them."""
    seen, sizes, command = [], [], ""
    monkeypatch.setattr(checked, "check", lambda given: seen.append(given) or check(given))
    for target in TARGETS.keys() - {"image"}:
        given = f"--config {name} --hardware {hardware} --target {target} --leader h0"
        if text := rendered(f"{given} --model-path /models/x"):
            command = f"{given} --model-path /models/x"
            try:
                made = checked.assumed_on(deployment_in(text, tmp_path), hardware)
            except ConfigError:  # a TPU slice cannot run it
                assert main([*command.split(), "--target", target]) == 2
                continue
            sizes.append([getattr(made, key) for key in SIZES])
    if command and main([*command.split(), "--write", str(tmp_path / "made")]) == 0:
        (one,) = seen
        assert sizes == [[getattr(one, key) for key in SIZES]] * len(sizes)


def test_each_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """`golden/launch/refused.txt` lists deployments and images that a target cannot start."""

    def said(command: str) -> str:
        assert main(["--config", *command.split()]) == 2
        return capsys.readouterr().err

    golden.check_each("launch/refused.txt", said)
