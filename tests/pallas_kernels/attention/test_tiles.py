"""Default tiles of the TPU kernel: by heads, widths and dtypes, and the memory that they take."""

import functools
import itertools
import math
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import GENERATIONS
from pallas_kernels.attention import attention_places, mosaic_tpu, paged_attention
from pallas_kernels.attention.mosaic_tpu_memory import VMEM_BYTES, call_of
from pallas_kernels.attention.reference import Cache
from pallas_kernels.attention.shapes import MANY_KV_HEADS, SHAPES, AttentionShape
from pallas_kernels.attention.tiles import TpuTiles
from pallas_kernels.target import Target, use_target
from pallas_kernels.tuned import use_tiles
from tests import golden
from tests.pallas_kernels.shapes import V6E, shape

PAGE_SIZE, COLUMNS = 128, 64
DTYPES = (jnp.bfloat16, jnp.int8, jnp.uint8, jnp.float32)


def arguments(sizes, dtype, *, decode=False):
    """Queries, keys, values, and where the tokens are."""
    sequences, tokens = (64, 64) if decode else (4, 2048)
    floats = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    place = (64, sizes.kv_heads, PAGE_SIZE)
    keys = shape(*place, sizes.head_dim, dtype=dtype)
    values = None if sizes.shared else shape(*place, sizes.v_width, dtype=dtype)
    integers = ((sequences, COLUMNS), (tokens,), (tokens,))
    where = (shape(*each, dtype=jnp.int32) for each in integers)
    return shape(tokens, sizes.q_heads, sizes.head_dim, dtype=floats), keys, values, *where


def call(sizes, dtype, *, decode=False):
    queries, keys, values, table, *_ = arguments(sizes, dtype, decode=decode)
    return call_of(queries, Cache(keys, values, None, None, sizes.v_width), table)


def scales(keys, values):
    """Scales of pages in 8 bits, as options."""
    if keys.dtype.itemsize != 1:
        return {}
    of_keys = shape(*keys.shape[:3], dtype=jnp.float32)
    return {"k_scales": of_keys, "v_scales": None if values is None else of_keys}


@pytest.mark.parametrize(
    "kind", [*(about.device_kind for about in GENERATIONS.values()), "TPU v99"]
)
def test_measured_shapes_have_the_measured_tiles(kind):
    for sizes, dtype, decode in itertools.product(SHAPES.values(), DTYPES[:3], (True, False)):
        assert call(sizes, dtype, decode=decode).tiles(kind) == TpuTiles(2048, 256, 1024)


def test_tiles_of_many_kv_heads():
    def tiles(name, dtype, decode):
        sizes = MANY_KV_HEADS.get(name, name)
        return tuple(call(sizes, dtype, decode=decode).tiles("TPU v6 lite"))

    golden.check_values("pallas_kernels/attention_tiles.txt", tiles, globals())


def test_a_chunk_multiplies_no_padding_and_reads_keys_once_for_many_tokens():
    """Rows of a token and KV head, and tokens that share a read of the cache."""
    for name, rows, tokens in (
        ("qwen3-8b", 4, 128),
        ("qwen3-32b", 8, 64),
        ("16 heads x 128", 1, 256),
    ):
        one = call(MANY_KV_HEADS[name], jnp.bfloat16)
        cut = one.cut(one.tiles("TPU v6 lite"))
        assert (one.group, cut.item_tokens, cut.tile * one.group) == (rows, tokens, 256)


def test_the_estimate_never_exceeds_the_memory():
    refused = {}
    for heads, width, dtype, decode, group in itertools.product(
        range(1, 65), (64, 128, 192, 256, 576), DTYPES, (True, False), (1, 8)
    ):
        one = call(AttentionShape(heads * group, heads, width, width), dtype, decode=decode)
        try:
            tiles = one.tiles("TPU v6 lite")
        except NotImplementedError:
            refused.setdefault((width, jnp.dtype(dtype).name), heads)
        else:
            assert one.need(tiles).total() <= VMEM_BYTES
    # From these numbers of KV heads on, one page of 128 tokens is too large.
    assert refused == {
        (192, "float32"): 59,
        (256, "float32"): 47,
        (576, "bfloat16"): 37,
        (576, "float32"): 21,
        (576, "int8"): 46,
        (576, "uint8"): 46,
    }


SHAPES_OF_ALL_KINDS = [*SHAPES.values(), *MANY_KV_HEADS.values(), AttentionShape(64, 64, 128, 128)]


@pytest.fixture
def no_body(monkeypatch):
    """Kernels whose body is left out: tracing that of 64 heads takes seconds."""
    monkeypatch.setattr(mosaic_tpu, "Kernel", lambda *refs: Mock())


@pytest.mark.usefixtures("no_body")
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float32])
def test_the_estimate_holds_the_buffers_of_the_kernel(dtype, decode, monkeypatch):
    """All that `_call` allocates, padded to register tiles; the rest is for temporaries."""
    allocated = 0

    def allocate(place, dtype, make=mosaic_tpu.pltpu.VMEM):
        nonlocal allocated
        *outer, rows, width = place
        size = jnp.dtype(dtype).itemsize
        rows, width = -(-rows * size // 32) * 32, -(-width // 128) * 128
        allocated += math.prod(outer) * rows * width
        return make(place, dtype)

    monkeypatch.setattr(mosaic_tpu.pltpu, "VMEM", allocate)
    for sizes in SHAPES_OF_ALL_KINDS:
        queries, keys, values, *where = arguments(sizes, dtype, decode=decode)
        allocated = 0
        attend = functools.partial(
            paged_attention, scale=1.0, v_width=sizes.v_width * sizes.shared, with_lse=True
        )
        with use_target(V6E):
            jax.eval_shape(attend, queries, keys, values, *where, **scales(keys, values))
        one = call(sizes, dtype, decode=decode)
        need = one.need(one.tiles(V6E.device_kind))
        assert allocated == need.fetched + need.items
        assert need.temporaries >= 2 * 2**20


@pytest.mark.usefixtures("no_body")
@pytest.mark.parametrize("decode", [True, False])
def test_places_are_cut_by_the_tiles_of_the_kernel(decode, monkeypatch):
    find = mosaic_tpu.item_places
    largest = []

    def noted(*arguments, **options):
        largest.append(options["largest"])
        return find(*arguments, **options)

    monkeypatch.setattr(mosaic_tpu, "item_places", noted)
    for sizes, dtype in itertools.product(SHAPES_OF_ALL_KINDS, DTYPES):
        target = Target("mosaic_tpu", "TPU7x")
        queries, keys, values, *where = arguments(sizes, dtype, decode=decode)
        v_width = sizes.v_width * sizes.shared
        attend = functools.partial(paged_attention, scale=1.0, v_width=v_width)
        places = functools.partial(attention_places, queries, keys, values, v_width=v_width)
        with use_target(target):
            jax.eval_shape(attend, queries, keys, values, *where, **scales(keys, values))
            jax.eval_shape(places, *where)
        kernel, of_places = largest[-2:]
        assert kernel == of_places
    assert len(largest) == 2 * len(SHAPES_OF_ALL_KINDS) * len(DTYPES)
    assert set(largest) == ({1} if decode else {8, 16, 32, 64, 128, 256})


def test_heads_that_do_not_fit_are_named_with_their_bytes():
    message = (
        "paged_attention with 64 query heads and 64 KV heads, widths 576 and 576, bfloat16 pages "
        "of 128 tokens takes 99508224 bytes of VMEM with its smallest tiles, at most 58720256 fit: "
        "use smaller pages, or divide the heads among more devices"
    )
    attend = functools.partial(paged_attention, scale=1.0)
    with use_target(V6E), pytest.raises(NotImplementedError) as raised:
        jax.eval_shape(attend, *arguments(AttentionShape(64, 64, 576, 576), jnp.bfloat16))
    assert str(raised.value) == message


@pytest.mark.usefixtures("no_body")
def test_one_given_field_leaves_the_others_as_they_are():
    """Items of 1,024 rows are less than a tile of 256 rows of each of 8 heads."""
    attend = functools.partial(paged_attention, scale=1.0, tiles={"block_tokens": 512})
    with use_target(V6E):
        out, _ = jax.eval_shape(attend, *arguments(MANY_KV_HEADS["qwen3-8b"], jnp.bfloat16))
    assert out.shape == (2048, 32, 128)


def test_tuned_tiles_that_do_not_fit_are_an_error():
    one = call(MANY_KV_HEADS["qwen3-8b"], jnp.bfloat16)
    name = "paged_attention chunk heads 32/8 widths 128/128 bfloat16"
    with use_tiles({name: {"tile_rows": 128}}):
        assert one.tiles("TPU v6 lite") == TpuTiles(512, 128, 4096)
    message = "block_tokens 4096 takes 67108864 bytes of VMEM, item_rows 4096 takes"
    with use_tiles({name: {"block_tokens": 4096}}), pytest.raises(ValueError, match=message):
        one.tiles("TPU v6 lite")
