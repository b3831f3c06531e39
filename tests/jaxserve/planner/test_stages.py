import math

import pytest

from jaxserve.link.message import MessageFormat
from jaxserve.model.ffn.traffic import ExchangeMesh
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.models import load_model
from jaxserve.planner.stages import Assumptions, Calculator, Formats, StageTime, blocks_met

IDEAL = Assumptions(
    compute=1,
    memory=1,
    network=1,
    stage_seconds=0,
    crossing_seconds=0,
    collective_seconds=0,
    imbalance=1,
)

H800S, ONE = ExchangeMesh(ranks=2, tensor=8, attention=16), ExchangeMesh(1, 1, 1)


def calculator(name: str = "step3", context: int = 8192, assumed: Assumptions = IDEAL, **formats):
    return Calculator(load_model(name), context, Formats(**formats), assumed)


class TestAttend:
    def test_an_ideal_layer_of_step_3_on_h800(self):
        step3 = calculator(compute="fp8")
        stage = step3.attend(step3.model.attention[0], load_hardware("h800"), 64, 1)
        cache = 64 * 8192 * (512 + 2 * 4)  # two scales a token
        weights = 2048 * 16384 + 16384 * 7168 + 7168 * (2048 + 512)
        assert stage.seconds == pytest.approx((cache + weights) / 3.35e12)
        assert stage.bound == "memory"

    def test_tensor_parallelism_cuts_the_heads_and_not_the_cache_of_one_head(self):
        step3 = calculator()
        group, h800 = step3.model.attention[0], load_hardware("h800")
        assert step3.sequence_bytes(8) == step3.sequence_bytes(1) == 61 * 8192 * 520
        assert step3.attend(group, h800, 1, 8).seconds < step3.attend(group, h800, 1, 1).seconds

    def test_grouped_heads_are_cut(self):
        qwen = calculator("qwen3-235b-a22b", cache="bfloat16")
        assert qwen.sequence_bytes(4) == 94 * 8192 * 2 * 128 * 2
        assert qwen.sequence_bytes(1) == 4 * qwen.sequence_bytes(4)
        assert qwen.sequence_bytes(8) == qwen.sequence_bytes(4)  # fewer heads than devices

    def test_formats_decide_the_rate(self):
        assert Formats().linear == "bfloat16"  # FP8 weights meet BF16 activations
        assert Formats(weights="int8").linear == "int8"
        assert Formats(weights="int8").attention == "bfloat16"
        assert Formats(compute="fp8").attention == "fp8"

    @pytest.mark.parametrize(
        ("hardware", "short", "long"),
        [("h800", 281, 791), ("h20", 438, 1452), ("a800", 531, 1484)],
    )
    def test_step_3s_layers_of_table_9_within_17_percent(self, hardware, short, long):
        """4 GPUs, 256 sequences, DP attention in BF16, GEMM in 8 bits."""
        for context, microseconds in ((8192, short), (32768, long)):
            step3 = calculator(
                context=context, assumed=Assumptions(), weights="int8", cache="bfloat16"
            )
            stage = step3.attend(step3.model.attention[0], load_hardware(hardware), 64, 1)
            assert stage.seconds * 1e6 == pytest.approx(microseconds, rel=0.17)

    @pytest.mark.parametrize(
        ("name", "tp", "measured", "predicted"),
        [
            ("step3", 1, (281, 791), (284, 818)),
            ("deepseek-v3", 1, (372, 1125), (341, 1011)),
            ("qwen3-235b-a22b", 4, (382, 1391), (442, 1511)),
        ],
    )
    def test_layers_of_table_9_on_h800_within_16_percent(self, name, tp, measured, predicted):
        for context, theirs, ours in zip((8192, 32768), measured, predicted, strict=True):
            model = calculator(
                name, context=context, assumed=Assumptions(), weights="int8", cache="bfloat16"
            )
            stage = model.attend(model.model.attention[0], load_hardware("h800"), 64 * tp, tp)
            assert round(stage.seconds * 1e6) == ours
            assert ours == pytest.approx(theirs, rel=0.16)


class TestFFN:
    def test_an_ideal_layer_of_step_3_on_16_h800(self):
        step3 = calculator(compute="fp8")
        moe = step3.model.ffn[1]
        stage = step3.ffn(moe, load_hardware("h800"), 2048, H800S)
        read = 49 * 3 * 7168 * 5120 / 16
        assert stage.work.seconds == pytest.approx(read / 3.35e12, rel=1e-6)
        assert stage.work.bound == "memory"
        # All rows reach every device: half of them over the network, an eighth a device.
        seconds = 2048 * (7 / 8 / 200e9 + 1 / 2 / 8 / 50e9)
        assert stage.spread == pytest.approx(seconds * (7168 + 128))
        assert stage.gather == pytest.approx(seconds * 7168 * 4)  # FP32 sums

    def test_a_large_batch_computes(self):
        step3 = calculator(compute="fp8")
        work = step3.ffn(step3.model.ffn[1], load_hardware("h800"), 65536, H800S).work
        assert work.bound == "compute"
        assert work.seconds == pytest.approx(2 * 65536 * 4 * 3 * 7168 * 5120 / 16 / 1.98e15)

    def test_few_tokens_meet_few_experts(self):
        step3 = calculator()
        one = step3.ffn(step3.model.ffn[1], load_hardware("h800"), 1, ONE).work.seconds
        assert one == pytest.approx(4 * 3 * 7168 * 5120 / 3.35e12)

    def test_overlap_hides_what_moves(self):
        step3 = calculator()
        parts = step3.ffn(step3.model.ffn[1], load_hardware("h800"), 2048, H800S)
        moving = parts.spread + parts.gather
        assert parts.stage(0.0).seconds == moving + parts.work.seconds
        assert parts.stage(1.0).seconds == pytest.approx(max(moving, parts.work.seconds))
        assert parts.stage(1.0).bound == "network"

    def test_ranks_of_the_shared_expert_are_a_stage_beside_the_others(self):
        """EP 9 = 8 + 1 of 256 experts: the one multiplies every row once, the others each row once
        on average; fewer of either kind, and it is they who take longer."""
        deepseek, h800 = calculator("deepseek-v3", compute="fp8"), load_hardware("h800")
        group, expert = deepseek.model.ffn[1], 3 * 7168 * 2048
        each = 2 * 65536 * expert / 1.98e15
        for ranks, shared, rows in ((9, 1, 1.0), (10, 2, 1.0), (5, 1, 2.0), (17, 1, 1.0)):
            mesh = ExchangeMesh(ranks=ranks, tensor=1, attention=16, shared=shared)
            work = deepseek.ffn(group, h800, 65536, mesh).work
            assert work.bound == "compute"
            assert work.seconds == pytest.approx(rows * each)
            held = -(-256 // (ranks - shared))
            dense = 3 * 3 * 7168 * 18432 / ranks
            assert deepseek.ffn_weights(mesh) == pytest.approx(58 * held * expert + dense)

    def test_an_all_to_all_moves_rows_to_the_ranks_that_need_them(self):
        """EP 16 on two hosts: 6.52 ranks a row, half of them on the other host."""
        deepseek = calculator("deepseek-v3")
        mesh, h800 = ExchangeMesh(ranks=16, tensor=1, attention=16), load_hardware("h800")
        group = deepseek.model.ffn[1]
        assert deepseek.exchange_kind(group, mesh) == "alltoall"
        parts = deepseek.ffn(group, h800, 2048, mesh)
        reached = 1 - math.comb(240, 8) / math.comb(256, 8)
        assert 16 * reached == pytest.approx(6.52, abs=0.005)
        seconds = 2048 / 16 * reached * (7 / 200e9 + 8 / 50e9)
        assert parts.spread == pytest.approx(seconds * (7168 + 128))
        assert parts.gather == pytest.approx(seconds * 2 * 7168)  # BF16, summed where they arrive
        gather = deepseek._replace(exchange="gather")
        assert gather.ffn(group, h800, 2048, mesh).gather > 2 * parts.gather
        # The whole shared expert on every rank: 15/16 of it more.
        more = parts.work.seconds - gather.ffn(group, h800, 2048, mesh).work.seconds
        assert more == pytest.approx(15 / 16 * 3 * 7168 * 2048 / 3.35e12)

    def test_few_attention_devices_fill_few_ffn_devices(self):
        """What arrives on one of eight devices leaves from it."""
        qwen = calculator("qwen3-235b-a22b")
        group, h100 = qwen.model.ffn[0], load_hardware("h100")
        one, eight = (
            qwen.ffn(group, h100, 512, ExchangeMesh(8, 1, attention=count)) for count in (1, 8)
        )
        assert one.spread == pytest.approx(8 * eight.spread)

    def test_colocated_tensor_parallelism_adds_up_in_fp32(self):
        qwen = calculator("qwen3-32b")
        mesh, h100 = ExchangeMesh(ranks=1, tensor=8, attention=None), load_hardware("h100")
        parts = qwen.ffn(qwen.model.ffn[0], h100, 64, mesh)
        assert parts.spread == 0.0
        assert parts.gather == pytest.approx(2 * 7 / 8 * 64 * 4 * 5120 / h100.link)

    def test_one_device_moves_nothing(self):
        qwen = calculator("qwen3-30b-a3b")
        parts = qwen.ffn(qwen.model.ffn[0], load_hardware("h200"), 64, ONE)
        assert (parts.spread, parts.gather) == (0.0, 0.0)


class TestMemory:
    """As `serve --check` computes them from the templates."""

    @pytest.mark.parametrize(
        ("name", "attention_tp", "ep", "ffn_tp", "attention", "ffn"),
        [("step3", 1, 2, 8, 14.07, 19.05), ("deepseek-v3", 1, 16, 1, 16.36, 43.51)],
    )
    def test_weights_a_device(self, name, attention_tp, ep, ffn_tp, attention, ffn):
        model = calculator(name)
        assert model.attention_weights(attention_tp) / 1e9 == pytest.approx(attention, rel=0.001)
        assert model.ffn_weights(ExchangeMesh(ep, ffn_tp, 16)) / 1e9 == pytest.approx(
            ffn, rel=0.003
        )


class TestHybrids:
    def test_minimax_holds_ten_layers_of_cache_and_seventy_of_states(self):
        minimax = calculator("minimax-m1")
        cache = 10 * 8192 * 2 * 8 * 128 * 2
        states = 70 * 64 * 128 * 128 * 4
        assert minimax.sequence_bytes(1) == cache + states
        assert calculator("minimax-m1", cache="bfloat16").sequence_bytes(1) == cache + states

    def test_a_state_is_read_and_written(self):
        minimax = calculator("minimax-m1")
        group, h800 = minimax.model.attention[1], load_hardware("h800")
        stage = minimax.attend(group, h800, 4096, 1)
        states = 4096 * 2 * 64 * 128 * 128 * 4 / 3.35e12
        linear = 2 * 4096 * 5 * 6144 * 8192 / 9.89e14
        assert stage.seconds == pytest.approx(states + linear)

    def test_llama_keeps_no_more_than_a_chunk_in_most_layers(self):
        short, long = (calculator("llama-4-maverick", context=n) for n in (8192, 32768))
        more = long.sequence_bytes(1) - short.sequence_bytes(1)
        assert more == 12 * (32768 - 8192) * 2 * 8 * 128 * 2


@pytest.mark.parametrize("dispatch", ["bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("name", ["step3", "deepseek-v3", "qwen3-30b-a3b", "qwen3-32b"])
def test_a_message_has_the_bytes_that_the_engine_packs(name, dispatch):
    planned = calculator(name, dispatch=dispatch)
    top_k = planned.model.moe.top_k if planned.model.moe else 0
    packed = MessageFormat(planned.model.d_model, top_k, dispatch)
    assert planned.dispatch_bytes() == packed.width * packed.word.itemsize


def test_messages():
    step3 = calculator()
    assert step3.dispatch_bytes() == 7168 + 128  # of which 28 are scale, ids and gates
    assert calculator(dispatch="bfloat16").dispatch_bytes() == 2 * (7168 + 128)
    assert step3.combine_bytes() == 14336
    stage = step3.cross((50e9, 25e9), 100, 100, 7168)
    assert stage == StageTime(100 * 7168 / 25e9, "network")


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.3), (7, 0.3), (20, 0.9), (40, 0.25), (9, 1.0)])
def test_blocks_of_rows_of_an_expert(tokens, share):
    """Against the binomial distribution written out."""
    expected = sum(
        math.comb(tokens, rows) * share**rows * (1 - share) ** (tokens - rows) * -(-rows // 8)
        for rows in range(tokens + 1)
    )
    assert blocks_met(tokens, share) == pytest.approx(expected)


def test_float32_rows_and_weights():
    """The demo as it is served on CPUs: everything is twice BF16."""
    model = load_model("qwen3-30b-a3b")
    sizes = []
    for name in ("bfloat16", "float32"):
        formats = Formats(weights=name, cache=name, dispatch=name, rows=name)
        one = Calculator(model, 2048, formats, Assumptions())
        group = one.model.attention[0]
        sizes.append(
            [
                one.cache_row(group, 1),
                one.combine_bytes(),
                one.attention_weights(1),
                one.ffn_weights(ONE),
            ]
        )
        assert (one.formats.linear, one.formats.attention) == (name, name)
    assert sizes[1] == [2 * size for size in sizes[0]]
    assert Formats(weights="int8", rows="float32").linear == "int8"
