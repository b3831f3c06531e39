import math

import msgspec
import numpy as np
import pytest

from jaxserve.link.dispatch.message import MessageFormat
from jaxserve.model.ffn.traffic import ExchangeMesh
from jaxserve.planner import models
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import known_hardware, load_hardware
from jaxserve.planner.models import FFNLayers, cost_model, load_model
from jaxserve.planner.stage_times import attend
from jaxserve.planner.stages import Calculator, StageTime
from pallas_kernels.target import target_of
from tests import golden
from tests.jaxserve.planner import making
from tests.jaxserve.planner.making import H100, H800

ONES = dict.fromkeys(("compute", "memory", "network", "imbalance"), 1)
NOUGHTS = ("stage_seconds", "crossing_seconds", "pull_seconds", "collective_seconds", "hop_seconds")
IDEAL = Assumptions(**ONES, **dict.fromkeys(NOUGHTS, 0))

H800S, ONE = ExchangeMesh(ranks=2, tensor=8, attention=16), ExchangeMesh(1, 1, 1)


def calculator(name: str = "step3", context: int = 8192, assumed: Assumptions = IDEAL, **formats):
    return making.calculator(name, context, assumed, **formats)


class TestAttend:
    def test_an_ideal_layer_of_step_3_on_h800(self):
        step3 = calculator(compute="fp8")
        stage = attend(step3, step3.model.attention[0], H800, 1, 64)
        cache = 64 * 8192 * (512 + 2 * 4)  # two scales a token
        weights = 2048 * 16384 + 16384 * 7168 + 7168 * (2048 + 512)
        weights += 4 * (16384 + 7168 + 2048 + 512) + 2 * 2048  # a scale a channel, and a norm
        assert stage.seconds == pytest.approx((cache + weights) / 3.35e12)
        assert stage.bound == "memory"

    def test_tensor_parallelism_cuts_the_heads_and_not_the_cache_of_one_head(self):
        step3 = calculator()
        group = step3.model.attention[0]
        assert step3.cache_row(group, 8) == step3.cache_row(group, 1) == 520
        assert attend(step3, group, H800, 8, 1).seconds < attend(step3, group, H800, 1, 1).seconds

    def test_grouped_heads_are_cut(self):
        qwen = calculator("qwen3-235b-a22b", cache="bfloat16")
        rows = [qwen.cache_row(qwen.model.attention[0], tp) for tp in (1, 4, 8)]
        assert rows == [2048, 512, 512]  # at last fewer heads than devices

    def test_formats_decide_the_rate(self):
        golden.check_values("planner/formats.txt", lambda value: value, globals())

    def test_few_query_heads_are_padded_to_the_products_tile(self):
        """16 query heads a KV head over 4 GPUs, and 64 rows of wgmma: 4 times the FLOPs."""
        qwen, h20 = calculator("qwen3-235b-a22b", cache="bfloat16"), load_hardware("h20")
        group = qwen.model.attention[0]
        assert models.tile_padding(group, h20.tile_rows, 4, 1) == 4
        assert models.tile_padding(group, 64, 4, 4) == 1  # a sequence's drafts fill the tile
        assert list(models.tile_padding(group, 64, 4, np.array([1, 3, 512]))) == [4, 4 / 3, 1]
        assert models.tile_padding(group, load_hardware("v6e").tile_rows, 4, 1) == 1
        stage = attend(qwen, group, h20, 4, 256)
        core = 4 * 4 * 256 * 8192 * 16 * 128 / 148e12
        linear = 2 * 256 * 4096 * (2 * 8192 + 2 * 512) / 4 / 148e12
        moving = 2 * 3 / 4 * 256 * 4096 * 2 / 450e9
        assert stage.seconds == pytest.approx(core + linear + moving)

    def test_latent_attention_does_not_mix_positions(self):
        group = load_model("deepseek-v3").attention[0]
        assert group.spec.pair_flops == 2 * 128 * (576 + 512)
        assert load_model("step3").attention[0].spec.pair_flops == 4 * 64 * 256

    @pytest.mark.parametrize(("name", "faster"), [("v5e", 1.38), ("v6e", 1.15), ("h800", 1.0)])
    def test_products_in_int8_are_as_fast_as_their_kernel(self, name, faster):
        """Many query heads, four tokens of each, on few cached numbers: the products decide."""
        config = load_model("deepseek-v3").config.with_int8_products(range(3, 61))
        model = cost_model(config, "deepseek-v3")
        plain, int8 = model.attention
        assert (plain.layers, int8.layers) == (3, 58)
        assert int8 == plain._replace(layers=58, int8_products=True)
        assert not model.modules[0][0].int8_products
        made = Calculator(model, 8192, Formats(weights="int8", cache="int8"), IDEAL)
        hardware = load_hardware(name)
        slow, fast = (attend(made, each, hardware, 1, 512, 4).seconds for each in (plain, int8))
        # Ten pairs within the four tokens run on expanded keys.
        pairs = 512 * (4 * 8190.5 - 10) * models.tile_padding(plain, hardware.tile_rows, 1, 4)
        products = pairs * plain.spec.pair_flops / hardware.flops("bfloat16")
        assert slow - fast == pytest.approx(products * (1 - 1 / faster), rel=1e-6)


class TestImbalance:
    def test_chance_alone(self):
        """The largest of 128 draws lies 2.6 spreads above the mean."""
        assert models.busiest_by_chance(128, 1024) == pytest.approx(1 + 2.59 / 32, abs=0.001)
        random = np.random.default_rng(0)
        draws = random.multinomial(128 * 1024, np.full(128, 1 / 128), 200).max(1) / 1024
        assert models.busiest_by_chance(128, 1024) == pytest.approx(draws.mean(), rel=0.005)
        assert models.busiest_by_chance(8, 1e-6) == 8

    def test_an_all_to_all_waits_for_the_busiest_rank(self):
        calm = calculator("deepseek-v3")._replace(exchange="alltoall")
        group, mesh = calm.model.ffn[1], ExchangeMesh(ranks=32, tensor=1, attention=None)
        even = calm.ffn(group, H800, 4096, mesh)
        uneven = calm.ffn(group, H800, 4096, mesh, busiest=1.5)
        assert uneven.spread == pytest.approx(1.5 * even.spread)
        assert uneven.gather == pytest.approx(1.5 * even.gather)


class TestFFN:
    def test_an_ideal_layer_of_step_3_on_16_h800(self):
        step3 = calculator(compute="fp8")
        moe = step3.model.ffn[1]
        stage = step3.ffn(moe, H800, 2048, H800S)
        read = 49 * 3 * 7168 * 5120 / 16
        assert stage.work.seconds == pytest.approx(read / 3.35e12, rel=1e-6)
        assert stage.work.bound == "memory"
        # All rows reach every device: half of them over the network, an eighth a device.
        seconds = 2048 * (7 / 8 / 200e9 + 1 / 2 / 8 / 50e9)
        assert stage.spread == pytest.approx(seconds * (7168 + 128))
        assert stage.gather == pytest.approx(seconds * 7168 * 2)  # parts of sums in BF16

    def test_few_tokens_meet_few_experts(self):
        step3 = calculator()
        one = step3.ffn(step3.model.ffn[1], H800, 1, ONE)
        assert one.work.seconds == pytest.approx(4 * 3 * 7168 * 5120 / 3.35e12)
        assert (one.spread, one.gather) == (0.0, 0.0), "one device moves nothing"

    def test_overlap_hides_what_moves(self):
        step3 = calculator()
        parts = step3.ffn(step3.model.ffn[1], H800, 2048, H800S)
        moving = parts.spread + parts.gather
        assert parts.stage(0.0).seconds == moving + parts.work.seconds
        assert parts.stage(1.0).seconds == pytest.approx(max(moving, parts.work.seconds))
        assert parts.stage(1.0).bound == "network"

    def test_ranks_of_the_shared_expert_are_a_stage_beside_the_others(self):
        """EP 9 = 8 + 1 of 256 experts: the one multiplies every row once, the others each row once
        on average; fewer of either kind, and it is they who take longer."""
        deepseek = calculator("deepseek-v3", compute="fp8")
        group, expert = deepseek.model.ffn[1], 3 * 7168 * 2048
        each = 2 * 65536 * expert / 1.98e15
        for ranks, shared, rows in ((9, 1, 1.0), (10, 2, 1.0), (5, 1, 2.0), (17, 1, 1.0)):
            mesh = ExchangeMesh(ranks=ranks, tensor=1, attention=16, shared=shared)
            work = deepseek.ffn(group, H800, 65536, mesh).work
            assert work.bound == "compute"
            assert work.seconds == pytest.approx(rows * each)

    def test_an_all_to_all_moves_rows_to_the_ranks_that_need_them(self):
        """EP 16 on two hosts: 6.52 ranks a row, half of them on the other host."""
        deepseek = calculator("deepseek-v3", assumed=msgspec.structs.replace(IDEAL, alltoall=True))
        mesh = ExchangeMesh(ranks=16, tensor=1, attention=16)
        group = deepseek.model.ffn[1]
        assert deepseek.exchange_kind(group, mesh, H800) == "alltoall"
        parts = deepseek.ffn(group, H800, 2048, mesh)
        reached = 1 - math.comb(240, 8) / math.comb(256, 8)
        assert 16 * reached == pytest.approx(6.52, abs=0.005)
        seconds = 2048 / 16 * reached * 8 / 50e9  # NVLink's seven are there sooner
        assert parts.spread == pytest.approx(seconds * (7168 + 128))
        assert parts.gather == pytest.approx(seconds * 2 * 7168)  # BF16, summed where they arrive
        gather = deepseek._replace(exchange="gather")
        assert gather.ffn(group, H800, 2048, mesh).gather > parts.gather
        # The whole shared expert on every rank: 15/16 of it more.
        more = parts.work.seconds - gather.ffn(group, H800, 2048, mesh).work.seconds
        assert more == pytest.approx(15 / 16 * 3 * 7168 * 2048 / 3.35e12)

    @pytest.mark.parametrize(
        ("ranks", "there", "back"),
        [(16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
    )
    def test_deepeps_low_latency_kernels_within_20_percent(self, ranks, there, back):
        """DeepEP, docs/legacy.md: 128 rows a H800, FP8 there, BF16 back. (Of EP 8, within a host,
        half is explained: 47 of 77 µs.)"""
        assumed = Assumptions(imbalance=1)
        deepseek = calculator("deepseek-v3", assumed=assumed)._replace(exchange="alltoall")
        mesh = ExchangeMesh(ranks=ranks, tensor=1, attention=None)
        parts = deepseek.ffn(deepseek.model.ffn[1], H800, 128 * ranks, mesh)
        assert parts.spread * 1e6 == pytest.approx(there, rel=0.2)
        assert parts.gather * 1e6 == pytest.approx(back, rel=0.2)

    def test_few_attention_devices_fill_few_ffn_devices(self):
        """Bytes that arrive on one of eight devices leave from it."""
        qwen = calculator("qwen3-235b-a22b")
        group = qwen.model.ffn[0]
        one, eight = (
            qwen.ffn(group, H100, 512, ExchangeMesh(8, 1, attention=count)) for count in (1, 8)
        )
        assert one.spread == pytest.approx(8 * eight.spread)

    def test_colocated_tensor_parallelism_adds_up_in_bf16(self):
        qwen = calculator("qwen3-32b")
        mesh = ExchangeMesh(ranks=1, tensor=8, attention=None)
        parts = qwen.ffn(qwen.model.ffn[0], H100, 64, mesh)
        assert parts.spread == 0.0
        assert parts.gather == pytest.approx(2 * 7 / 8 * 64 * 2 * 5120 / H100.link)


class TestHybrids:
    def test_minimax_reads_and_writes_seventy_states(self):
        minimax = calculator("minimax-m1", cache="bfloat16")
        group = minimax.model.attention[0]
        stage = attend(minimax, group, H800, 1, 4096)
        states = 4096 * 2 * 64 * 128 * 128 * 4 / 3.35e12
        linear = 2 * 4096 * 6144 * (5 * 8192 + 2 * 64) / 9.89e14
        assert stage.seconds == pytest.approx(states + linear)

    def test_llama_sees_no_more_than_a_chunk_in_most_layers(self):
        groups = load_model("llama-4-maverick").attention
        assert [(group.layers, group.spec.window) for group in groups] == [(12, 0), (36, 8192)]


@pytest.mark.parametrize("dispatch", ["bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("name", ["step3", "deepseek-v3", "qwen3-30b-a3b", "qwen3-32b"])
def test_a_message_has_the_bytes_that_the_engine_packs(name, dispatch):
    planned = calculator(name, dispatch=dispatch)
    top_k = planned.model.moe.top_k if planned.model.moe else 0
    packed = MessageFormat(planned.model.d_model, top_k, dispatch)
    assert planned.dispatch_bytes() == packed.width * packed.word.itemsize


def test_messages():
    step3 = calculator()
    assert step3.combine_bytes() == 14336
    afd, slower = making.layout("afd", dp=16, ep=2, ffn_tp=8), load_hardware("a800")
    there, back = step3.crossings(afd, H800, slower, 100)
    assert there == StageTime(100 * step3.dispatch_bytes() / slower.network, "network")
    assert back.seconds == pytest.approx(100 * 14336 / slower.network)
    for hosts in (1, 2):  # each of them a process of the ffn worker
        apart = msgspec.structs.replace(afd, ep=hosts, transport="pull")
        there, _ = step3.crossings(apart, H800, slower, 100)
        assert there.seconds == pytest.approx(1600 * step3.dispatch_bytes() / (hosts * 2.5e9))
    chips = making.layout("afd", "v6e", dp=32, ep=32)
    there, _ = step3.crossings(chips, *[load_hardware("v6e")] * 2, 100)
    assert there.seconds == pytest.approx(32 * 100 * step3.dispatch_bytes() / 800e9)


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.3), (7, 0.3), (20, 0.9), (40, 0.25), (9, 1.0)])
def test_blocks_of_rows_of_an_expert(tokens, share):
    """Against the binomial distribution written out."""
    expected = sum(
        math.comb(tokens, rows) * share**rows * (1 - share) ** (tokens - rows) * -(-rows // 8)
        for rows in range(tokens + 1)
    )
    assert models.blocks_met(tokens, share) == pytest.approx(expected)


@golden.table("planner/expert_products.yaml")
def test_products_of_experts(hardware, formats, products):
    assert Formats(**formats).experts(load_hardware(hardware)) == products


def test_gpus_with_kernels_are_those_of_the_kernels():
    gpus = [load_hardware(name) for name in known_hardware()]
    gpus = [each for each in gpus if each.platform == "gpu"]
    for one in gpus:
        kernels = target_of("gpu", one.device_kinds[0]).backend == "mosaic_gpu"
        assert one.is_hopper == kernels, one.name
    assert sum(one.is_hopper for one in gpus) == 4


def test_experts_on_cpus_read_float_weights_once():
    """8 experts, 2 chosen by each of 16 tokens: nearly all are met, and 32 rows are multiplied; in
    8 bits blocks of 8 rows of one expert."""
    group = FFNLayers(layers=1, experts=8, top_k=2, expert_d_ff=512, shared_d_ff=0)
    one = calculator("qwen3-30b-a3b", weights="float32", rows="float32")
    cpu = load_hardware("cpu")
    expert = 3 * one.model.d_model * 512
    met = 8 * (1 - (6 / 8) ** 16)
    floats = max(4 * met * expert / cpu.bandwidth, 2 * 32 * expert / cpu.flops("float32"))
    assert one.ffn(group, cpu, 16, ONE).work.seconds == pytest.approx(floats)
    blocks = 8 * models.blocks_met(16, 2 / 8)
    in_8_bits = calculator("qwen3-30b-a3b", weights="int8")
    times = blocks * expert / cpu.bandwidth, 2 * 8 * blocks * expert / cpu.flops("int8")
    assert in_8_bits.ffn(group, cpu, 16, ONE).work.seconds == pytest.approx(max(times))


def test_narrow_wires_and_caches():
    """DeepSeek's answers in INT8 with a scale, in whole tiles; latents of 512 with a scale, and 64
    rotated values in BF16."""
    formats = Formats(cache="int8", rope="bfloat16", combine="int8")
    one = Calculator(load_model("deepseek-v3"), 4096, formats, Assumptions())
    assert one.combine_bytes() == 7168 + 128
    assert one.cache_row(one.model.attention[0], 4) == 512 + 4 + 2 * 64
    assert formats.of("combine") == "int8"
