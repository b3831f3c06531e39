import msgspec
import pytest

from jaxserve.config.model import MFA, LayerKind, ModelConfig, Rope

DENSE, MOE = LayerKind("dense"), LayerKind("moe")


def config(layers, moe_layers):
    return ModelConfig(
        vocab=100,
        d_model=8,
        layers=layers,
        attention=MFA(q_heads=2, kv_heads=1, head_dim=4, latent=4),
        rope=Rope(theta=1e4),
        d_ff=16,
        moe_layers=frozenset(moe_layers),
        norm_epsilon=1e-5,
        max_positions=64,
    )


@pytest.mark.parametrize(
    ("layers", "moe_layers", "runs"),
    [
        (4, (1, 2), [(DENSE, 0, 1), (MOE, 1, 3), (DENSE, 3, 4)]),
        (3, (), [(DENSE, 0, 3)]),
        (2, (0, 1), [(MOE, 0, 2)]),
        (4, (0, 2), [(MOE, 0, 1), (DENSE, 1, 2), (MOE, 2, 3), (DENSE, 3, 4)]),
    ],
)
def test_runs_of_equal_layers(layers, moe_layers, runs):
    assert config(layers, moe_layers).runs() == runs


def test_kind():
    assert [config(3, (1,)).kind(layer) for layer in range(3)] == [DENSE, MOE, DENSE]
    assert config(1, ()).top_k == config(1, ()).experts == 0


def test_a_window_makes_another_kind():
    windowed = msgspec.structs.replace(config(3, (2,)), window=4, window_layers=frozenset({1, 2}))
    kinds = [LayerKind("dense"), LayerKind("dense", 4), LayerKind("moe", 4)]
    assert windowed.kinds() == kinds
    assert windowed.runs() == [(kinds[0], 0, 1), (kinds[1], 1, 2), (kinds[2], 2, 3)]
    assert list(map(str, windowed.kinds())) == ["dense", "dense_window", "moe_window"]


def test_products_in_int8_make_another_kind():
    mixed = msgspec.structs.replace(config(3, (1, 2)), int8_layers=frozenset({1, 3}), modules=1)
    assert [mixed.kind(layer) for layer in range(4)] == [DENSE, LayerKind("moe", 0, True), MOE, MOE]
    assert list(map(str, mixed.kinds())) == ["dense", "moe_int8", "moe"]
    assert [(start, stop) for _, start, stop in mixed.runs()] == [(0, 1), (1, 2), (2, 3)]
