"""What of a deployment no kernel covers on the hardware that it names."""

import pytest

from jaxserve import serve
from jaxserve.checkpoint.hf import read_config
from jaxserve.config.deployment import load_deployment
from jaxserve.config.shipped import CONFIGS, device_kind
from jaxserve.engine.build import build_engine
from jaxserve.roles.kernel_coverage import kernel_gaps
from pallas_kernels import coverage
from pallas_kernels.target import Target, use_target
from tests.jaxserve import layouts


def test_device_kinds():
    names = {"h200": "NVIDIA H200", "v6e": "TPU v6 lite", "": "", "none": ""}
    assert {name: device_kind(name) for name in names} == names


def gaps(model, kinds, **overrides):
    deployment = layouts.deployment(model, overrides)
    config, _ = read_config(deployment.model, [], 0)
    return kernel_gaps(config, deployment, kinds)


@pytest.mark.parametrize("mode", ["afd", "colocated"])
def test_a_tiny_model_has_no_kernels_on_a_gpu(tiny_model, mode):
    kinds = {"attention": "NVIDIA H200"} | ({"ffn": "NVIDIA H200"} if mode == "afd" else {})
    slow, impossible = gaps(tiny_model, kinds, mode=mode)
    assert not impossible
    roles = {text.split(":")[0] for text in slow}
    assert roles == set(kinds)
    assert any("a cache in float32 (there are some for 16 and 8 bits)" in text for text in slow)
    assert any("grouped_swiglu" in text for text in slow)


def test_step3_has_all_kernels_on_hopper():
    """What `attend` takes of a batch depends on the kernels that the hardware has."""
    deployment = load_deployment(CONFIGS / "step3.yaml")
    config, _ = read_config(deployment.model, [], 0)
    assert kernel_gaps(config, deployment, {"attention": "NVIDIA H200"}) == ([], [])


def test_a_tpu_refuses_pages_that_are_too_short(tiny_model):
    _, impossible = gaps(tiny_model, {"attention": "TPU v6 lite"})
    assert impossible == [
        "attention: pages of 8 tokens, float32, width 32: on a TPU use a page_size that is a "
        "multiple of 128 (and 128 or 256 for speed)"
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_check_says_it_and_refuses_where_that_is_wanted(strict, capsys, caplog):
    sizes = ["cache.page_size=48", "scheduler.page_buckets=[64,854]", "attention.hardware=h200"]
    overrides = [*sizes, f"strict_kernels={str(strict).lower()}"]
    arguments = [word for one in overrides for word in ("--set", one)]
    config = str(CONFIGS / "qwen3-30b-a3b.yaml")
    assert serve.main(["--config", config, "--check", *arguments]) == int(strict)
    output, error = capsys.readouterr()
    said = "attention: paged_attention: no kernel on NVIDIA H200 for page_size 48"
    assert f"kernels (attention on NVIDIA H200): \n  {said}" in output
    assert error.startswith(f"jaxserve: {said}") if strict else not error
    assert not caplog.messages  # said once, where it was asked for


@pytest.mark.parametrize("strict", [False, True])
def test_a_worker_says_it_once_and_refuses_where_that_is_wanted(
    tiny_model, strict, caplog, monkeypatch
):
    """As on a GPU that has no kernels: plain XLA runs there as it does here."""
    monkeypatch.setattr(coverage, "_said", set())
    monkeypatch.setattr(coverage, "_refused", False)
    deployment = layouts.deployment(tiny_model, {"strict_kernels": strict})
    said = "paged_attention: no kernel on NVIDIA A100 for this device"
    with use_target(Target("reference", "NVIDIA A100")):
        if strict:
            with pytest.raises(NotImplementedError, match=said):
                build_engine(deployment)
            return
        build_engine(deployment).close()
    assert sum(text.startswith(said) for text in caplog.messages) == 1
