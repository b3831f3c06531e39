"""Compile-time sizes of the Hopper kernel of paged attention, and the shared memory it takes.

Called by `mosaic_gpu.py`, which makes the plans, and by the kernel. Knows nothing of the
computation.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu_walk import BLOCK, copies
from pallas_kernels.attention.reference import Cache
from pallas_kernels.attention.tiles import GpuTiles
from pallas_kernels.mosaic_gpu import SHARED_MEMORY

ROWS = 64
"""Query rows of a warpgroup: M of a wgmma."""
TERMS = 2
"""FP8 numbers that represent a query element: the second holds what rounding to the first lost."""
OTHER_SHARED_MEMORY = 512
"""Bytes of shared memory for barriers."""
ALIGNMENT = 1024
"""Alignment of arrays in shared memory, in bytes."""
MOST_STAGES = 8
"""Most steps in the ring of one walker."""


class Sizes(NamedTuple):
    """Compile-time choices and sizes of one kernel.

    Attributes:
      warpgroups: warpgroups that compute.
      split_values: the warpgroups share their rows, and each computes half of the value columns.
      own_ranges: each warpgroup walks a range of its own, and shares nothing with the other.
      fp8_keys: keys in FP8 are multiplied as they are, by queries in two FP8 terms each.
      one_buffer: values are converted into the keys' buffer, once the keys have been multiplied.
      ranges, lanes: the grid has a thread block for every lane and `walkers` ranges.
      scale: factor of the scores.
      window: positions that a row sees, its own included; 0: all.
      v_width: width of the values; without pages of values they are the first elements of the keys.
      heads: rows of a unit for each of its tokens.
      p_in_registers: False for interpret mode, which knows wgmma only on shared memory.
      most_stages: upper limit on the steps in the ring.
    """

    warpgroups: int
    split_values: bool
    own_ranges: bool
    fp8_keys: bool
    one_buffer: bool
    ranges: int
    lanes: int
    scale: float
    window: int
    v_width: int
    heads: int
    p_in_registers: bool
    most_stages: int = GpuTiles._field_defaults["stages"]

    @property
    def has_copier(self) -> bool:
        """Whether another warpgroup issues the copies: two that compute leave no registers for
        it."""
        return self.warpgroups == 1

    @property
    def walkers(self) -> int:
        """Ranges that a thread block walks side by side."""
        return self.warpgroups if self.own_ranges else 1

    @property
    def row_groups(self) -> int:
        """Groups of 64 rows that a thread block computes at a time."""
        return 1 if self.split_values or self.own_ranges else self.warpgroups

    @property
    def least_stages(self) -> int:
        """Fewest steps in the ring. With own ranges, a slot is refilled while its step is
        multiplied."""
        return 1 if self.own_ranges else 2

    @property
    def terms(self) -> int:
        """Numbers whose sum is one element of a query."""
        return TERMS if self.fp8_keys else 1

    @property
    def columns(self) -> int:
        """Value columns that one warpgroup computes."""
        return self.v_width // self.warpgroups if self.split_values else self.v_width

    @property
    def positions(self) -> int:
        """Positions of a step that one warpgroup scores."""
        return BLOCK // self.warpgroups if self.split_values else BLOCK


def compute_dtype(pages_dtype: Any) -> Any:
    """Returns the 16-bit dtype in which pages of this dtype are multiplied."""
    if pages_dtype.itemsize == 2:
        return pages_dtype
    return jnp.dtype(jnp.bfloat16 if pages_dtype == jnp.int8 else jnp.float16)


def stages(cache: Cache, plan: Sizes) -> int:
    """Returns how many steps of a walker fit into shared memory, `most_stages` at most."""
    dtype, head_dim = cache.k_pages.dtype, cache.k_pages.shape[3]
    width = head_dim + (0 if cache.v_pages is None else plan.v_width)
    rows = plan.walkers * plan.row_groups * ROWS
    room = SHARED_MEMORY - OTHER_SHARED_MEMORY - rows * head_dim * 2
    if dtype.itemsize == 1:
        converted = max(head_dim, plan.v_width) if plan.one_buffer else width
        converted = plan.v_width if plan.fp8_keys else converted
        room -= plan.walkers * BLOCK * converted * 2
    if plan.split_values or not plan.p_in_registers:
        room -= rows * BLOCK * 2
    if plan.split_values:
        room -= ALIGNMENT
    for depth in range(min(MOST_STAGES, plan.most_stages), 0, -1):
        slots = depth * plan.walkers
        scales = -(-slots * BLOCK * 4 // ALIGNMENT) * ALIGNMENT if dtype.itemsize == 1 else 0
        scales *= 1 if cache.v_pages is None else 2
        if slots * BLOCK * width * dtype.itemsize + scales <= room:
            return depth
    return 0


def scratch_types(cache: Cache, plan: Sizes, queries_dtype: Any) -> dict[str, Any]:
    """Returns the shared memory and barriers of a thread block, by the kernel's names for them."""
    dtype, page_size, head_dim = cache.k_pages.dtype, *cache.k_pages.shape[2:]
    arrays = cache.arrays()
    walkers, slots = plan.walkers, plan.walkers * stages(cache, plan)
    buffers = walkers * plan.row_groups
    scratch: dict[str, Any] = {
        name + "_smem": plgpu.SMEM((slots, BLOCK, *array.shape[3:]), array.dtype)
        for name, array in arrays.items()
    }
    scratch |= {
        "q_smem": plgpu.SMEM((buffers * plan.terms, ROWS, head_dim), queries_dtype),
        "q_loaded": plgpu.Barrier(num_barriers=buffers, num_arrivals=plan.terms),
        "met": plgpu.Barrier(num_barriers=walkers, num_arrivals=plan.warpgroups // walkers),
    }
    # Every copy of a step arrives once. `Walk.start` therefore also copies for columns behind a
    # sequence's last page, from any page: one arrival too few, and the wait would never end. The
    # mask hides their positions.
    arrivals = len(arrays) * copies(page_size)
    if plan.own_ranges:
        kinds = [name for name in ("k", "v") if name in arrays]
        scratch |= {
            name + "_loaded": plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals // len(kinds))
            for name in kinds
        }
    else:
        scratch["loaded"] = plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals)
        scratch["released"] = plgpu.Barrier(num_barriers=slots, num_arrivals=plan.warpgroups)
    dtype_of_products = compute_dtype(dtype)
    if plan.one_buffer:
        widest = max(head_dim, plan.v_width)
        scratch["converted"] = plgpu.SMEM((walkers, BLOCK, widest), dtype_of_products)
    elif dtype.itemsize == 1:
        if not plan.fp8_keys:
            scratch["k_converted"] = plgpu.SMEM((walkers, BLOCK, head_dim), dtype_of_products)
        if "v" in arrays:
            scratch["v_converted"] = plgpu.SMEM((walkers, BLOCK, plan.v_width), dtype_of_products)
    if plan.split_values or not plan.p_in_registers:
        scratch["p_smem"] = plgpu.SMEM((buffers * ROWS, BLOCK), dtype_of_products)
    if plan.split_values:
        scratch["exchange"] = plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32)
    return scratch
