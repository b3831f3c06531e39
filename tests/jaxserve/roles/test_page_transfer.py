"""Pages in the wire form, there and back, against plain indexing in NumPy."""

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.roles.attention_programs import LayerPrograms
from jaxserve.roles.colocated import ColocatedPrograms
from jaxserve.roles.layout import PageRun
from jaxserve.roles.page_programs import PageForms
from jaxserve.roles.page_spread import SpreadPages, in_own_format
from jaxserve.roles.page_transfer import PageAccess, PageTransfer
from tests.jaxserve.roles.building import programs_of
from tests.reference.catalogue import CATALOGUE

pytestmark = pytest.mark.unoptimised

PAGES = 6
PIECE = 16


class Holder:
    """Random pages of a model, as a worker has them, and as one NumPy array a layer and kind."""

    def __init__(
        self, folder, name, *, stacked=True, seed=0, imports=(), transfer=PageTransfer, **overrides
    ):
        model = CATALOGUE[name]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model.config()))
        limits = {
            "mode": "colocated" if stacked else "afd",
            "dtype": "float32",
            "cache.pages": PAGES,
            "scheduler.max_length": 16,
        }
        limits |= {key.replace("__", "."): value for key, value in overrides.items()}
        deployment = load_deployment(folder, limits)
        config, _ = read_config(folder, [])
        kind = ColocatedPrograms if stacked else LayerPrograms
        self.programs = programs_of(kind, deployment, config)
        self.layers, self.stacked = config.layers, stacked
        self.dp = deployment.attention.dp
        self.size = deployment.cache.page_size
        pieces = PageForms([PIECE], exports=True, imports=imports, convert=in_own_format)
        self.transfer = transfer(self.programs, pieces)
        shapes = self.programs.all_pages
        draw = np.random.default_rng(seed)
        sharding = self.transfer.programs.gather(PIECE).arguments[-1].sharding
        self.pages = [jax.device_put(_random(draw, shape), sharding) for shape in shapes]

    def tokens(self, run: PageRun, count: int) -> list[np.ndarray]:
        """[layers, heads, tokens, …] of every kind: what the pages hold."""
        found = []
        kinds = len(self.programs.pools[0].arrays)
        for kind in range(kinds):
            arrays = [np.asarray(page) for page in self.pages[kind::kinds]]
            layers = []
            for layer in range(self.layers):
                if self.stacked:
                    groups = arrays[0].reshape(self.dp, self.layers, PAGES, *arrays[0].shape[1:])
                    own = groups[run.group, layer]
                else:
                    own = arrays[layer].reshape(self.dp, PAGES, *arrays[layer].shape[1:])[run.group]
                rows = np.concatenate([own[page] for page in run.page_ids], axis=1)
                layers.append(rows[:, run.offset : run.offset + count])
            found.append(np.stack(layers))
        return found

    def all_pages(self) -> list[list[np.ndarray]]:
        """`tokens` of all pages of every DP group."""
        return [self.tokens(PageRun(group, range(PAGES)), 999) for group in range(self.dp)]


def assert_untouched(holder: Holder, before: list[list[np.ndarray]], into: PageRun) -> None:
    """All but the pages of a run are as they were."""
    for group, (then, now) in enumerate(zip(before, holder.all_pages(), strict=True)):
        written = into.page_ids if group == into.group else ()
        kept = [page not in written for page in range(PAGES)]
        for was, has in zip(then, now, strict=True):
            mine = np.repeat(kept, holder.size)
            np.testing.assert_array_equal(was[:, :, mine], has[:, :, mine])


def _random(draw: np.random.Generator, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    if shape.dtype == np.uint8:  # bits of FP8 without NaN
        return draw.integers(0, 0x78, shape.shape, np.uint8)
    if shape.dtype == np.int8:
        return draw.integers(-127, 128, shape.shape, np.int8)
    return draw.standard_normal(shape.shape).astype(shape.dtype)


def carry(source: Holder, run: PageRun, target: Holder, into: PageRun) -> None:
    """One piece from pages to pages, as if over a link."""
    transfer, cache_format = target.transfer, source.transfer.programs.format
    read = source.transfer.gather(source.pages, run, PIECE)
    landing = transfer.landing(into.group, PIECE, cache_format)
    assert [(a.shape, a.dtype) for a in read] == [(s.shape, s.dtype) for s in landing]
    arrived = [
        jax.device_put(np.asarray(array), shape.sharding)
        for array, shape in zip(read, landing, strict=True)
    ]
    target.pages = list(transfer.scatter(target.pages, into, PIECE, cache_format, arrived))


SOURCES = [
    ("qwen3_moe", {"attention__tp": 2, "attention__dp": 2, "cache__page_size": 4}, 1),
    ("qwen3_moe", {"attention__tp": 4, "cache__page_size": 16}, 0),
    ("deepseek_v3", {"attention__tp": 2, "cache__page_size": 8}, 0),
]
TARGETS: list[tuple[dict[str, Any], PageRun]] = [
    ({"attention__dp": 2, "cache__page_size": 8}, PageRun(1, [4, 0])),
    ({"attention__tp": 4, "cache__page_size": 16, "stacked": False}, PageRun(0, [3])),
]


@pytest.mark.parametrize(("name", "layout", "group"), SOURCES)
@pytest.mark.parametrize(("other", "into"), TARGETS)
@pytest.mark.parametrize("cache_format", ["float32", "int8"])
def test_tp_page_size_and_layout_are_each_side_s_own_affair(
    tmp_path, name, layout, group, other, into, cache_format
):
    _check_carried(tmp_path, name, layout, group, other, into, cache__format=cache_format)


@pytest.mark.parametrize(
    ("source", "target", "cache_format"),
    [(0, 0, "int8"), (1, 1, "bfloat16"), (2, 1, "fp8"), (2, 0, "float32")],
)
def test_through_one_device_of_the_mesh(tmp_path, source, target, cache_format):
    """Does in one process what meshes over several do: pages that are read come together on the
    first device, and pages that arrive there are spread."""
    (name, layout, group), (other, into) = SOURCES[source], TARGETS[target]
    options = {"transfer": SpreadPages, "cache__format": cache_format}
    holder, domain = _check_carried(tmp_path, name, layout, group, other, into, **options)
    first = jax.devices()[0]
    for transfer in (holder.transfer, domain.transfer):
        assert {*transfer.landing(0, PIECE, cache_format)[-1].sharding.device_set} == {first}


def test_latents_and_their_rotated_part(tmp_path):
    """Each in its format, whatever that of the other."""
    formats = {"cache__format": "int8", "cache__rope": "bfloat16"}
    holder, _ = _check_carried(tmp_path, *SOURCES[2], *TARGETS[0], **formats)
    source = Holder(tmp_path / "fp8", "deepseek_v3", seed=1, **formats | {"cache__format": "fp8"})
    size = {"cache__page_size": 16}
    target = Holder(tmp_path / "s", "deepseek_v3", imports=["fp8"], **formats, **size)
    carry(source, PageRun(0, [2]), target, PageRun(0, [5]))
    sent, kept = (one.tokens(PageRun(0, [page]), PIECE) for one, page in ((source, 2), (target, 5)))
    np.testing.assert_array_equal(kept[1], sent[1])
    latent = np.asarray(jax.lax.bitcast_convert_type(sent[0], "float8_e4m3fn"), np.float32)
    latent *= sent[2][..., None]
    largest = np.abs(latent).max(axis=-1, keepdims=True)
    assert np.all(np.abs(kept[0] * kept[2][..., None] - latent) <= largest / 254 * 1.01)
    assert holder.transfer.programs.token_bytes == holder.layers * (32 + 2 * 8 + 4)


def _check_carried(tmp_path, name, layout, group, other, into, **options):
    imports = [options["cache__format"]]
    source = Holder(tmp_path / "s", name, seed=1, **options, **layout)
    target = Holder(tmp_path / "t", name, seed=2, imports=imports, **options, **other)
    before = target.all_pages()
    offset = 3 if source.size == 4 else 0
    pages = [5, 1, 2, 0, 3][: -(-(PIECE + offset) // source.size)]
    run = PageRun(group, pages, offset)
    carry(source, run, target, into)
    expected = source.tokens(run, PIECE)
    heads = source.transfer.programs.heads[0]
    for sent, got in zip(expected, target.tokens(into, PIECE), strict=True):
        # Of every head one copy: where there are fewer heads than devices, several hold the same.
        ours = np.repeat(sent[:, :: max(1, sent.shape[1] // heads)], got.shape[1] // heads, axis=1)
        np.testing.assert_array_equal(got, ours)
    assert_untouched(target, before, into)
    return source, target


@pytest.mark.parametrize(
    ("sent", "kept"), list(itertools.permutations(["float32", "bfloat16", "fp8", "int8"], 2))
)
def test_formats_are_converted_where_they_arrive(tmp_path, sent, kept):
    source = Holder(tmp_path / "s", "qwen3", seed=1, cache__format=sent, cache__page_size=16)
    formats = {"cache__format": kept, "cache__page_size": 16}
    target = Holder(tmp_path / "t", "qwen3", seed=2, imports=[sent], **formats)
    run = PageRun(0, [2])
    carry(source, run, target, PageRun(0, [5]))
    values = _values(source.tokens(run, PIECE), sent)
    got = _values(target.tokens(PageRun(0, [5]), PIECE), kept)
    # The largest of a row sets the step of int8; e4m3 has three bits behind the first one.
    largest = np.abs(values).max(axis=-1, keepdims=True)
    allowed = {
        "float32": 0.0 * largest,
        "bfloat16": np.abs(values) * 2**-8,
        "fp8": np.abs(values) * 2**-4 + largest * 2**-16,
        "int8": largest / 254 * 1.01,
    }[kept]
    assert np.all(np.abs(got - values) <= allowed)


def _values(arrays: list[np.ndarray], cache_format: str) -> np.ndarray:
    kinds = arrays if cache_format in ("float32", "bfloat16") else arrays[: len(arrays) // 2]
    if cache_format == "fp8":
        kinds = [jax.lax.bitcast_convert_type(a, "float8_e4m3fn") for a in kinds]
    found = [np.asarray(array).astype(np.float32) for array in kinds]
    if cache_format in ("fp8", "int8"):
        found = [v * s[..., None] for v, s in zip(found, arrays[len(arrays) // 2 :], strict=True)]
    return np.stack(found)


def test_warm_up_writes_nothing(tmp_path):
    formats = ["float32", "int8"]
    holder = Holder(tmp_path, "deepseek_v3", cache__page_size=8, stacked=False, imports=formats)
    before = [np.asarray(page) for page in holder.pages]
    pages = holder.transfer.warm_up(holder.pages)
    for was, now in zip(before, pages, strict=True):
        np.testing.assert_array_equal(was, now)


def test_a_page_size_that_does_not_divide_the_pieces(tmp_path):
    with pytest.raises(ConfigError, match=r"cache\.page_size = 12 does not divide pieces of 16"):
        Holder(tmp_path, "qwen3", cache__page_size=12, imports=["float32"])


def test_a_run_that_ends_early_is_refused(tmp_path):
    """A page that a run lacks would be read as page 0, whichever request owns that."""
    source = Holder(tmp_path, "qwen3_moe", cache__page_size=4)
    access = PageAccess.__new__(PageAccess)
    access.transfer, access._load = source.transfer, lambda: source.pages
    with pytest.raises(ValueError, match="8 tokens wanted, 7 are in the pages, piece 16"):
        access.read(PageRun(0, [3, 5], 1), 8, PIECE)
    with pytest.raises(ValueError, match="17 tokens wanted, 20 are in the pages, piece 16"):
        access.read(PageRun(0, [1, 2, 3, 4, 5]), 17, PIECE)
    short = access.read(PageRun(0, [3, 5]), 8, PIECE)
    whole = access.read(PageRun(0, [3, 5, 5, 5]), PIECE, PIECE)
    for one, other in zip(short, whole, strict=True):
        np.testing.assert_array_equal(one, other)
