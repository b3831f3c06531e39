import msgspec
import pytest

from jaxserve.config.model import ModelConfig


def config(layers, moe_layers):
    return ModelConfig(
        vocab=100,
        d_model=8,
        layers=layers,
        q_heads=2,
        kv_heads=1,
        head_dim=4,
        latent=4,
        d_ff=16,
        moe_layers=frozenset(moe_layers),
        rope_theta=1e4,
        norm_epsilon=1e-5,
        max_positions=64,
    )


@pytest.mark.parametrize(
    ("layers", "moe_layers", "runs"),
    [
        (4, (1, 2), [("dense", 0, 1), ("moe", 1, 3), ("dense", 3, 4)]),
        (3, (), [("dense", 0, 3)]),
        (2, (0, 1), [("moe", 0, 2)]),
        (4, (0, 2), [("moe", 0, 1), ("dense", 1, 2), ("moe", 2, 3), ("dense", 3, 4)]),
    ],
)
def test_runs_of_equal_layers(layers, moe_layers, runs):
    assert config(layers, moe_layers).runs() == runs


def test_kind():
    assert [config(3, (1,)).kind(layer) for layer in range(3)] == ["dense", "moe", "dense"]


def test_is_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        config(1, ()).layers = 2
    with pytest.raises(TypeError):
        ModelConfig(100, 8)
    assert msgspec.structs.asdict(config(1, ()))["top_k"] == 0
