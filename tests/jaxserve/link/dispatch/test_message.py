import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.link.dispatch.message import AnswerFormat, MessageFormat
from jaxserve.model.message import DispatchMessage, encode_rows
from pallas_kernels.grouped_matmul.packed_sums import Unsummed
from tests import golden
from tests.pallas_kernels.quantize.definition import quantize_numpy

STORAGE = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "int8": np.int8,
}
FORMATS = list(STORAGE)


def message(
    tokens: int, d_model: int, top_k: int, dtype=np.float32, seed: int = 0
) -> DispatchMessage:
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(rng.normal(size=(tokens, d_model)).astype(dtype))
    if not top_k:
        return DispatchMessage(rows, None, None)
    experts = rng.integers(0, 2**31 - 1, (tokens, top_k)).astype(np.int32)
    gates = rng.random((tokens, top_k), np.float32)
    return DispatchMessage(rows, jnp.asarray(experts), jnp.asarray(gates))


def expected_bytes(m: DispatchMessage, rows: str) -> bytes:
    """Row by row: values, scale, expert ids, gates, little endian; zeros if tiles are filled."""
    x = np.asarray(m.tokens, np.float32)
    values, scales = (
        quantize_numpy(x, rows) if rows in ("fp8", "int8") else (x.astype(STORAGE[rows]), None)
    )
    lines = []
    for row in range(x.shape[0]):
        lines.append(values[row].tobytes())
        if scales is not None:
            lines.append(scales[row].astype("<f4").tobytes())
        if m.experts is not None:
            lines.append(np.asarray(m.experts)[row].astype("<i4").tobytes())
            lines.append(np.asarray(m.gates)[row].astype("<f4").tobytes())
        if x.shape[1] % 128 == 0:
            side = 4 * (scales is not None) + (0 if m.experts is None else 8 * m.experts.shape[1])
            lines.append(bytes(-side % (128 * np.dtype(STORAGE[rows]).itemsize)))
    return b"".join(lines)


def test_layout_of_a_row():
    def call(d_model, rows, top_k):
        form = MessageFormat(d_model, top_k, rows)
        return form.word.name, form.width

    golden.check_values("link/message_rows.txt", call, globals())


@pytest.mark.parametrize(("d_model", "width"), [(16, 16 + 4), (256, 256 + 128)])
def test_an_answer_in_int8(d_model, width):
    """Bytes as NumPy rounds them, and back; floats cross as they are."""
    m = message(5, d_model, 0)
    form, x = AnswerFormat(d_model, "int8"), np.asarray(m.tokens)
    assert (form.dtype, form.width) == (np.int8, width)
    packed = jax.jit(lambda rows: form.pack(Unsummed(rows)))(m.tokens)
    assert np.asarray(packed).tobytes() == expected_bytes(m, "int8")
    values, scales = quantize_numpy(x, "int8")
    expected = values.astype(np.float32) * scales[:, None]
    np.testing.assert_array_equal(form.total([packed], jnp.dtype(jnp.float32)), expected)
    plain = AnswerFormat(d_model, "bfloat16")
    assert (plain.dtype, plain.width) == (ml_dtypes.bfloat16, d_model)
    assert plain.pack(Unsummed(m.tokens)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("rows", FORMATS)
def test_encoded_rows_are_sent_as_they_are(rows):
    """The tokens beside them, which are others here, are not looked at."""
    form, m = MessageFormat(16, 3, rows), message(5, 16, 3)
    encoded = m._replace(tokens=jnp.full((5, 16), jnp.nan), encoded=encode_rows(m.tokens, rows))
    assert np.asarray(form.pack(encoded)).tobytes() == expected_bytes(m, rows)


@pytest.mark.parametrize(("dtype", "d_model"), [(np.float32, 24), (ml_dtypes.bfloat16, 128)])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("rows", FORMATS)
def test_unpacked_is_what_was_packed(rows, top_k, dtype, d_model):
    form, m = MessageFormat(d_model, top_k, rows), message(7, d_model, top_k, dtype)
    got = jax.jit(lambda m: form.unpack(form.pack(m), jnp.dtype(dtype)))(m)
    x = np.asarray(m.tokens, np.float32)
    if rows in ("fp8", "int8"):
        values, scales = quantize_numpy(x, rows)
        expected = (values.astype(np.float32) * scales[:, None]).astype(dtype)
    else:
        expected = x.astype(STORAGE[rows]).astype(dtype)
    assert got.tokens.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got.tokens), expected)
    if top_k:
        np.testing.assert_array_equal(got.experts, m.experts)
        np.testing.assert_array_equal(got.gates, m.gates)
    else:
        assert got.experts is got.gates is None


def test_side_fields_are_not_rounded_and_not_interpreted():
    """Any 32 bits cross as they are: negative ids, the largest, the smallest gate, NaN."""
    form = MessageFormat(4, 2, "int8")
    experts = jnp.asarray([[-1, 2**31 - 1], [0, -(2**31)]], jnp.int32)
    gates = np.asarray([[1e-45, np.nan], [-0.0, np.inf]], np.float32)
    got = form.unpack(
        form.pack(DispatchMessage(jnp.ones((2, 4)), experts, jnp.asarray(gates))),
        jnp.dtype(jnp.float32),
    )
    np.testing.assert_array_equal(got.experts, experts)
    assert np.asarray(got.gates).tobytes() == gates.tobytes()


@given(
    tokens=st.integers(1, 5),
    d_model=st.integers(1, 40).map(lambda n: 4 * n) | st.just(256),
    top_k=st.integers(0, 8),
    rows=st.sampled_from(FORMATS),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_packed_bytes(tokens, d_model, top_k, rows, seed):
    form, m = MessageFormat(d_model, top_k, rows), message(tokens, d_model, top_k, seed=seed)
    packed = np.asarray(form.pack(m))
    assert (packed.shape, packed.dtype) == ((tokens, form.width), form.word)
    assert packed.tobytes() == expected_bytes(m, rows)
