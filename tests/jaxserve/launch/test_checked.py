"""Deployments are sized for their hardware, and what is rendered passes `serve --check`."""

from pathlib import Path

import pytest

from jaxserve import serve
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import deployment_names
from jaxserve.errors import ConfigError
from jaxserve.launch.__main__ import TARGETS, main
from jaxserve.launch.checked import sized
from tests.jaxserve.launch.rendered import files_of, objects


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


@pytest.mark.nightly
@pytest.mark.parametrize("hardware", ["v5e", "v6e", "v7x", "h100", "l20"])
@pytest.mark.parametrize("name", deployment_names())
def test_what_is_rendered_passes_the_check(name: str, hardware: str, tmp_path: Path) -> None:
    """All targets render the same sizes, which pass if the command does not refuse them."""
    model, file = load_deployment(name).model, tmp_path / "deployment.yaml"
    sizes, command = set[str](), ""
    for target in TARGETS:
        given = f"--config {name} --hardware {hardware} --target {target} --leader h0"
        if text := rendered(f"{given} --model-path /models/x"):
            command = f"{given} --model-path /models/x"
            file.write_text(text)
            made = load_deployment(file)
            sizes.add(str((made.attention, made.ffn, made.cache, made.scheduler, made.lanes)))
    if command:
        assert len(sizes) == 1
        if main([*command.split(), "--write", str(tmp_path / "made")]) == 0:
            assert serve.main(["--config", str(file), "--model", model, "--check"]) == 0
