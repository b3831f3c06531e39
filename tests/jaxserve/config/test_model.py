import msgspec
import pytest

from jaxserve.config.attention.mfa import MFA
from jaxserve.config.model import FFN, LayerKind, ModelConfig, Rope, RouterSpec

ATTENTION = MFA(q_heads=2, kv_heads=1, head_dim=4, latent=4, rope=Rope(theta=1e4))
WINDOW = msgspec.structs.replace(ATTENTION, window=4)
DENSE = LayerKind(ATTENTION, FFN(d_ff=16))
MOE = LayerKind(ATTENTION, FFN(router=RouterSpec(experts=4, top_k=2), expert_d_ff=8))


def config(layers, moe_layers):
    return of(*(MOE if layer in moe_layers else DENSE for layer in range(layers)))


def of(*decoder, **more):
    sizes = {"vocab": 100, "d_model": 8, "norm_epsilon": 1e-5, "max_positions": 64}
    return ModelConfig(**sizes, decoder=decoder, **more)


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
    assert [config(3, (1,)).layer(layer) for layer in range(3)] == [DENSE, MOE, DENSE]
    assert config(1, ()).top_k == config(1, ()).experts == 0


def test_a_window_makes_another_kind():
    kinds = [DENSE, DENSE._replace(attention=WINDOW), MOE._replace(attention=WINDOW)]
    windowed = of(*kinds)
    assert windowed.kinds() == kinds
    assert windowed.attentions() == [ATTENTION, WINDOW]
    assert windowed.runs() == [(kinds[0], 0, 1), (kinds[1], 1, 2), (kinds[2], 2, 3)]
    assert list(map(str, windowed.kinds())) == ["dense", "dense_window", "moe_window"]


def test_products_in_int8_make_another_kind():
    mixed = of(DENSE, MOE, MOE, predictors=(MOE,), modules=1).with_int8_products({1, 3})
    assert [mixed.layer(layer) for layer in range(4)] == [
        DENSE,
        MOE._replace(int8_products=True),
        MOE,
        MOE,
    ]
    assert list(map(str, mixed.kinds())) == ["dense", "moe_int8", "moe"]
    assert [(start, stop) for _, start, stop in mixed.runs()] == [(0, 1), (1, 2), (2, 3)]
