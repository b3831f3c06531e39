"""The TPU kernel at the sizes of real models, compiled for real topologies without a TPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.dense import dense_matmul
from pallas_kernels.grouped_matmul.routed import Order, combine, routed_choices
from pallas_kernels.grouped_matmul.shapes import SHAPES
from pallas_kernels.quantize import QuantArray, StackEntry, scales_shape
from tests.pallas_kernels.gpu_aot import compiled_cases
from tests.pallas_kernels.nightly import nightly

pytestmark = pytest.mark.tpu_aot

FORMATS = {
    "bf16": (jnp.bfloat16, None),
    "fp8": (jnp.float8_e4m3fn, (1, 0)),
    "fp8_bits": (jnp.uint8, (1, 0)),
    "fp8_block": (jnp.float8_e4m3fn, (128, 128)),
    "int8": (jnp.int8, (1, 0)),
    "int4": (jnp.int4, (1, 128)),
    "int4_zeros": (jnp.int4, (1, 32)),
}


@pytest.fixture(scope="module", autouse=True)
def several_processes():
    """Test workers load libtpu at the same time, and none has a TPU to ask about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def not_cached():
    """JAX's cache takes programs for TPUs, but cannot give them back where there is no TPU."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def mesh_of(generation, shape=(1,), names=("x",)):
    pytest.importorskip("libtpu")
    topology = aot.GENERATIONS[generation].topology
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    return Mesh(np.asarray(devices[: np.prod(shape)]).reshape(shape), names)


def weight(groups, d_out, d_in, format):
    dtype, block = FORMATS[format]
    values = jax.ShapeDtypeStruct((groups, d_out, d_in), dtype)
    if block is None:
        return values
    scales = jax.ShapeDtypeStruct(scales_shape(values.shape, block), jnp.float32)
    zeros = jax.ShapeDtypeStruct(scales.shape, jnp.int8) if format.endswith("zeros") else None
    return QuantArray(values, scales, block, zeros)


def swiglu_arguments(shape, rows, format):
    up = weight(shape.groups, shape.d_ff, shape.d_model, format)
    down = weight(shape.groups, shape.d_model, shape.d_ff, format)
    x = jax.ShapeDtypeStruct((rows, shape.d_model), jnp.bfloat16)
    return x, up, up, down, jax.ShapeDtypeStruct((shape.groups,), jnp.int32)


MADE_OF_A_MESSAGE = (
    r"= (?:u8|s8|f8e4m3fn)\[{tokens},\d\d\d\d+\]\S* \S*(?:fusion|copy|slice|convert)\("
)


def message(tokens, d_model):
    """Rows in 8 bits, with what lies behind them, as they come."""
    scales = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    return QuantArray(jax.ShapeDtypeStruct((tokens, d_model + 128), jnp.uint8), scales, (1, 0))


def as_dtype(message, dtype):
    values = jax.lax.bitcast_convert_type(message.values, dtype)
    return QuantArray(values, message.scales, message.block)


def compiled(function, mesh, arguments, specs=None):
    """Compile for the devices of a mesh; specs as for `in_specs`, replicated if there are none."""
    if specs is None:
        specs = jax.tree.map(lambda _: PartitionSpec(), arguments)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, in_shardings=shardings).lower(*arguments).compile()


@pytest.mark.parametrize(
    ("generation", "name", "tokens", "format"),
    [
        ("v5e", "qwen3_235b_ep8", 512, "int8"),
        ("v6e", "qwen3_235b", 128, "bf16"),
        ("v7x", "qwen3_235b_ep8", 2048, "fp8_bits"),
        *nightly(
            ("v6e", "deepseek_v3_ep32", 2048, "fp8_block"),
            ("v5e", "deepseek_v3_ep32", 1024, "int4"),
            ("v6e", "deepseek_v3_ep32", 1024, "int4_zeros"),
            ("v7x", "deepseek_v3_ep32", 1024, "int4_zeros"),
        ),
    ],
)
def test_swiglu_of_a_model(generation, name, tokens, format):
    """Each compiles, and no weights are copied; of INT4, which is read as half a byte, scales and
    zero points are brought into the kernel's order. Others are in `test_all_cases_compile`."""
    shape = SHAPES[name]
    arguments = swiglu_arguments(shape, shape.rows(tokens), format)
    program = compiled(grouped_swiglu, mesh_of(generation), arguments)
    text, memory = program.as_text(), program.memory_analysis()
    assert "grouped_swiglu" in text
    assert "grouped_matmul" in text
    rows = arguments[0].shape[0] * (shape.d_model + shape.d_ff) * 2
    of_int4 = 3 * shape.groups * shape.d_ff * shape.d_model if format.startswith("int4") else 0
    assert memory.temp_size_in_bytes < 2 * rows + 2**24 + 0.3 * of_int4
    if of_int4:
        assert memory.argument_size_in_bytes < 0.7 * of_int4 + rows


@pytest.mark.parametrize(
    ("generation", "name", "format", "row_format", "there", "absent"),
    [
        ("v7x", "qwen3_235b_ep8", "fp8_block", "fp8", "f8e4m3fn", "bf16"),
        *nightly(
            ("v6e", "qwen3_235b_ep8", "int8", "int8", "s8", "bf16"),
            ("v6e", "step3_2a2f", "int8", "float", "bf16", "s8"),
            ("v5e", "qwen3_235b_ep8", "int4", "int8", "s8", "bf16"),
            ("v6e", "qwen3_235b_ep8", "int4_zeros", "int8", "s8", "bf16"),
            ("v7x", "qwen3_235b_ep8", "int4_zeros", "int8", "s8", "bf16"),
        ),
    ],
)
def test_hidden_rows(generation, name, format, row_format, there, absent):
    """Quantised in the epilogue, so that none are in BF16; or left as they are."""
    shape = SHAPES[name]
    arguments = swiglu_arguments(shape, 64, format)
    function = functools.partial(grouped_swiglu, row_format=row_format)
    program = compiled(function, mesh_of(generation), arguments)
    assert "grouped_swiglu" in program.as_text()
    assert f"{there}[64,{shape.d_ff}]" in program.as_text()
    assert f"{absent}[64,{shape.d_ff}]" not in program.as_text()
    if row_format == "float":  # and the weights are read in 8 bits
        assert program.memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_all_cases_compile(generation):
    """The sharded layers of the models at the sizes of decode and prefill, in every format."""
    mesh_of(generation)
    names = [case.name for case in aot.cases("grouped_matmul", generation)]
    assert list(compiled_cases("grouped_matmul", generation)) == names


@pytest.mark.parametrize("format", ["int8", *nightly("fp8", "fp8_block")])
def test_a_scan_copies_no_layer(format):
    """Of the weights of all layers; the output projection of Step-3's attention."""
    stack, rows = weight(3, 7168, 16384, format), jax.ShapeDtypeStruct((32, 16384), jnp.bfloat16)

    def layers(rows, stack):
        def layer(rows, place):
            one = jax.tree.map(lambda array: StackEntry(array, place), stack)
            return jnp.tile(dense_matmul(rows, one), (1, 3))[:, :16384].astype(rows.dtype), None

        return jax.lax.scan(layer, rows, jnp.arange(3))[0]

    program = compiled(layers, mesh_of("v6e"), (rows, stack))
    assert "grouped_matmul" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.parametrize(("d_out", "d_in"), [(461, 512), *nightly((461, 7168), (7168, 461))])
def test_a_width_that_no_tile_divides(d_out, d_in):
    """Kimi K2's dense layer over 40 devices: 18432 / 40 columns, rounded up."""
    rows, stack = jax.ShapeDtypeStruct((31, d_in), jnp.bfloat16), weight(1, d_out, d_in, "int8")
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack)
    assert "grouped_matmul" in compiled(dense_matmul, mesh_of("v6e"), (rows, one)).as_text()


@pytest.mark.parametrize(("d_out", "d_in"), [(7168, 16384), *nightly((576, 7168))])
def test_one_weight_for_all_rows(d_out, d_in):
    """Projections of attention, on two devices: no weights are copied, and XLA plans nothing."""
    mesh = mesh_of("v7x", (2,), ("tp",))
    rows = jax.ShapeDtypeStruct((128, d_in), jnp.bfloat16)
    stack = weight(1, d_out, d_in, "fp8_block")
    of_rows, of_weights = PartitionSpec(None, "tp"), PartitionSpec(None, "tp")
    specs = (of_rows, QuantArray(of_weights, of_weights, stack.block))
    arguments = (rows, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stack))

    def sums(rows, weights):
        return jax.lax.psum(dense_matmul(rows, weights), "tp")

    mapped = jax.shard_map(sums, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    program = compiled(mapped, mesh, arguments, specs)
    text = program.as_text()
    assert "grouped_matmul" in text
    assert " while(" not in text
    assert program.memory_analysis().temp_size_in_bytes < 2**23


@pytest.mark.parametrize(
    ("generation", "name", "format", "tokens", "sorted_by_xla"),
    [
        ("v6e", "step3_2a2f", "int8", 512, False),
        ("v7x", "deepseek_v3_ep32", "fp8_block", 2048, False),
        *nightly(
            ("v6e", "qwen3_235b_ep8", "int4_zeros", 64, False),
            ("v6e", "deepseek_v3_ep32", "int8", 2048, True),
        ),
    ],
)
def test_tokens_go_to_experts_and_back(generation, name, format, tokens, sorted_by_xla):
    """Gathers and copies alone do it: rows are not added up one by one, nor sorted before they are
    multiplied, unless that is less than fetching them for each tile of columns."""
    shape = SHAPES[name]
    x, *weights, _ = swiglu_arguments(shape, tokens, format)
    choices = jax.ShapeDtypeStruct((tokens, shape.top_k), jnp.int32)
    gates = jax.ShapeDtypeStruct(choices.shape, jnp.float32)
    narrow = None
    if format.startswith(("int8", "fp8")) and generation != "v5e":
        dtype = jnp.int8 if format == "int8" else jnp.float8_e4m3fn
        narrow = message(tokens, shape.d_model)
    arguments = (x, choices, gates, *weights, narrow)

    def routed(*arguments):
        *others, narrow = arguments
        return combine(*routed_choices(*others, narrow=narrow and as_dtype(narrow, dtype)))

    text = compiled(routed, mesh_of(generation), arguments).as_text()
    assert "grouped_swiglu" in text
    assert not re.search(r"= b?f(?:16|32)\[\d+,\d+\]\S* \S*scatter", text)
    assert f"f32[{tokens * shape.top_k},{shape.d_model}]" not in text
    # XLA sorts pieces of 256 rows; only results in BF16 have the shape of sorted rows as well.
    width = (x if narrow is None else narrow.values).shape[1]
    pieces = re.search(rf"= \w+\[256,{width}\]\S* \S*(?:gather|fusion)\(", text)
    assert (pieces is not None) == sorted_by_xla
    if narrow is not None:
        assert not re.search(MADE_OF_A_MESSAGE.format(tokens=tokens), text)


@pytest.mark.nightly
def test_sums_of_rows_are_rounded_where_they_are_made():
    """The shared expert's are, too: XLA has no sums in FP32."""
    tokens, top_k, d = 512, 3, 7168
    row = jax.ShapeDtypeStruct((tokens * top_k, d), jnp.bfloat16)
    base = jax.ShapeDtypeStruct((tokens, d), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((tokens, top_k), jnp.float32)
    place = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    here = jax.ShapeDtypeStruct((tokens, top_k), jnp.bool)
    arguments = (row, gates, place, here, base)

    def total(rows, gates, place, here, base):
        order = Order(jnp.zeros(rows.shape[0], jnp.int32), place, here, jnp.zeros(1, jnp.int32))
        return combine(rows, gates, order, base=base, dtype=jnp.bfloat16)

    text = compiled(total, mesh_of("v7x"), arguments).as_text()
    assert "combine_rows" in text
    assert f"f32[{tokens},{d}]" not in text


@pytest.mark.nightly
@pytest.mark.parametrize(("generation", "dtype"), [("v6e", jnp.int8), ("v7x", jnp.float8_e4m3fn)])
def test_a_message_is_read_as_it_came(generation, dtype):
    """Products of all its rows do so, too: XLA neither cuts nor converts it."""
    tokens, d_in, d_out = 512, 7168, 320
    one = weight(1, d_out, d_in, "int8" if dtype == jnp.int8 else "fp8")
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), one)
    rows = jax.ShapeDtypeStruct((tokens, d_in), jnp.bfloat16)
    arguments = (rows, one, message(tokens, d_in))

    def product(rows, weights, narrow):
        return dense_matmul(rows, weights, as_dtype(narrow, dtype))

    text = compiled(product, mesh_of(generation), arguments).as_text()
    assert "grouped_matmul" in text
    assert not re.search(MADE_OF_A_MESSAGE.format(tokens=tokens), text)


@pytest.mark.nightly
def test_a_token_is_quantised_once():
    """Choices of rows are not quantised; the kernel quantises the hidden rows of each choice."""
    shape, tokens = SHAPES["step3_2a2f"], 512
    _, *weights, sizes = swiglu_arguments(shape, 8, "int8")
    x = jax.ShapeDtypeStruct((tokens, shape.d_model), jnp.bfloat16)
    source = jax.ShapeDtypeStruct((tokens * shape.top_k,), jnp.int32)
    arguments = (x, *weights, sizes, source)

    def picked(*arguments):
        return grouped_swiglu(*arguments[:-1], source=arguments[-1], zero_padding=False)

    text = compiled(picked, mesh_of("v6e"), arguments).as_text()
    assert f"s8[{tokens},{shape.d_model}]" in text
    assert f"s8[{tokens * shape.top_k},{shape.d_model}]" not in text
    assert f"s8[{tokens * shape.top_k},{shape.d_ff}]" in text
    assert f"bf16[{tokens * shape.top_k},{shape.d_ff}]" not in text


def test_float16_is_not_a_type_of_tpus():
    rows = jax.ShapeDtypeStruct((8, 128), jnp.float16)
    weights = jax.ShapeDtypeStruct((2, 128, 128), jnp.float16)
    arguments = (rows, weights, jax.ShapeDtypeStruct((2,), jnp.int32))
    with pytest.raises(NotImplementedError, match="use bfloat16 or float32"):
        compiled(grouped_matmul, mesh_of("v6e"), arguments)
