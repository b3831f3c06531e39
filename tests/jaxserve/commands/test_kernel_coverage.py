"""Parts of a deployment that no kernel covers on the hardware that it names."""

import pytest

from jaxserve import serve
from jaxserve.checkpoint.hf_config import read_config
from jaxserve.commands.kernel_coverage import PLATFORMS, kernel_gaps
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS, device_kind
from jaxserve.fleet.assembly import open_engine
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


@pytest.mark.parametrize(("model", "cache"), [("step3", "fp8"), ("deepseek-v3.2", "bfloat16")])
def test_hopper_has_all_kernels(model, cache):
    """The batch fields that `attend` takes depend on the hardware's kernels."""
    overrides = {"model": str(CONFIGS / "models" / model), "cache.format": cache}
    deployment = load_deployment(CONFIGS / "step3.yaml", overrides)
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
    sizes = ["cache.page_size=48", "scheduler.page_buckets=[64,854]"]
    hardware = ["attention.hardware=h200", "ffn.hardware=h200"]
    overrides = [*sizes, *hardware, f"strict_kernels={str(strict).lower()}"]
    arguments = [word for one in overrides for word in ("--set", one)]
    config = str(CONFIGS / "qwen3-30b-a3b.yaml")
    assert serve.main(["--config", config, "--check", *arguments]) == int(strict)
    output, error = capsys.readouterr()
    said = "attention: paged_attention: no kernel on NVIDIA H200 for page_size 48"
    assert f"kernels (attention on NVIDIA H200, ffn on NVIDIA H200): \n  {said}" in output
    assert error.startswith(f"jaxserve: {said}") if strict else not error
    assert not caplog.messages  # said once, where it was asked for


def checked(folder, capsys, *settings):
    """Output of `--check` about kernels for the tiny model, exit code and refusals included."""
    arguments = [word for one in settings for word in ("--set", one)]
    code = serve.main(["--model", str(folder), "--check", "--set", "mode=colocated", *arguments])
    output, error = capsys.readouterr()
    return output[output.index("\nkernels (") + 1 :].splitlines(), code, error


def test_check_without_hardware_says_it_of_every_platform(tiny_model, capsys):
    sizes = ["cache.page_size=128", "cache.pages=8", "scheduler.page_buckets=[8]"]
    lines, code, error = checked(tiny_model, capsys, "dtype=bfloat16", *sizes)
    assert lines[0].startswith("kernels (no hardware is named; attention.hardware, one of ")
    assert [line.split(":")[0].strip() for line in lines[1:]] == list(PLATFORMS)
    assert "paged_attention" in lines[1]  # of widths that no kernel of GPUs has
    assert (code, error) == (0, "")


def test_strict_without_hardware_refuses_what_no_platform_covers(tiny_model, capsys):
    _, code, error = checked(tiny_model, capsys, "cache.page_size=8", "strict_kernels=true")
    assert code == 1
    assert error.startswith("jaxserve: strict_kernels: none of NVIDIA H200, TPU v5 lite, TPU v6 ")


def test_check_takes_attentions_hardware_for_the_ffn_and_says_what_it_does_not_know(
    tiny_model, capsys
):
    arguments = ["--model", str(tiny_model), "--check", "--set", "mode=afd"]
    assert serve.main([*arguments, "--set", "attention.hardware=910b"]) == 0
    said = "kernels (attention on 910b, ffn on 910b): \n  attention: nothing is known of it\n  ffn:"
    assert said in capsys.readouterr().out


@pytest.mark.unoptimised
@pytest.mark.parametrize("strict", [False, True])
def test_a_worker_says_it_once_and_refuses_where_that_is_wanted(
    tiny_model, strict, caplog, monkeypatch
):
    """On a GPU without kernels plain XLA runs, as it does here."""
    monkeypatch.setattr(coverage, "_said", set())
    monkeypatch.setattr(coverage, "_refused", False)
    deployment = layouts.deployment(tiny_model, {"strict_kernels": strict})
    said = "paged_attention: no kernel on NVIDIA A100 for this device"
    with use_target(Target("reference", "NVIDIA A100")):
        if strict:
            with pytest.raises(NotImplementedError, match=said):
                open_engine(deployment)
            return
        open_engine(deployment).close()
    assert sum(text.startswith(said) for text in caplog.messages) == 1
