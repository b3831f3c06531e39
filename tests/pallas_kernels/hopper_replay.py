"""Runs what Pallas lowers to Hopper, on the CPU: the program that ships, in NumPy, with its orders
checked.

JAX's interpreter has no products from registers, none that begin with given sums, and no wgmma that
runs beside the code that started it; so kernels are interpreted as variants. This takes the traced
kernel of the real target, runs its warpgroups in turns, and checks every access to shared memory
(`hopper_memory.py`): a wait, a fence or a meeting too few raises `Unordered`, whatever the turns.
The blocks of a cluster run beside each other, and may write into each other's memory.
What it does not see: registers, the threads within a warpgroup (but for those that load before
one arrives for all, at the barriers of a cluster), and what the compiler makes of it.
"""

import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from pallas_kernels.target import Target, use_target
from tests.pallas_kernels.hopper_memory import (
    Barriers,
    Buffer,
    GlobalArray,
    Knowledge,
    Unordered,
    Warpgroup,
)

TARGET = Target("mosaic_gpu", "NVIDIA H200")

Run = Generator[None, None, list[Any]]
"""The run of a jaxpr: yields where it has to wait, and returns the results."""


def replay(function: Callable[..., Any], *arguments: Any) -> Any:
    """Results of the function, its kernels replayed.

    Raises:
      Unordered: accesses to shared memory that nothing orders, or warpgroups wait for each other.
    """
    with use_target(TARGET):
        # A function of its own: traces are kept by function, without their target.
        traced, shape = jax.make_jaxpr(functools.partial(function), return_shape=True)(*arguments)
    flat = [np.asarray(array) for array in jax.tree.leaves(arguments)]
    with np.errstate(all="ignore"):
        consts = [np.asarray(array) for array in traced.consts]
        results = _finish(_run(traced.jaxpr, consts, flat, _Outside()))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def mutated(function: Callable[..., Any], *changes: tuple[str, str]) -> Callable[..., Any]:
    """The function with parts of its source, each of which is there once, exchanged."""
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert text.count(old) == 1, f"{function.__name__} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    space = dict(function.__globals__)
    exec(text, space)  # its own source
    return space[function.__name__]


def _finish(run: Run) -> list[Any]:
    """Returns the results of a run that never waits."""
    while True:
        try:
            next(run)
        except StopIteration as stop:
            return stop.value


class _Accumulator:
    """Sums of wgmma."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


class _Outside:
    """Where no kernel runs: `mpmd_map` starts one."""

    def mpmd_map(self, eqn: Any, *arrays: np.ndarray) -> list[np.ndarray]:
        (mesh,), (jaxpr,) = eqn.params["meshes"], eqn.params["jaxprs"]
        # What is written in place is a reference already.
        inputs = [one if isinstance(one, GlobalArray) else GlobalArray(one) for one in arrays]
        outputs = [
            GlobalArray(np.full(aval.shape, _nothing(aval.dtype), aval.dtype))
            for aval in (var.aval for var in eqn.outvars)
        ]
        for place in itertools.product(*map(range, mesh.grid)):
            cluster = _Cluster(dict(zip(mesh.grid_names, place, strict=True)), mesh)
            cluster.run(jaxpr, [*inputs, *outputs])
        return [array.data.reshape(array.shape) for array in outputs]

    def run_state(self, eqn: Any, *arrays: np.ndarray) -> Run:
        """Arrays that are references while something runs."""
        refs = [GlobalArray(array) for array in arrays]
        yield from _run(eqn.params["jaxpr"], [], refs, self)
        return [ref.data.reshape(ref.shape) for ref in refs]

    def get(self, eqn: Any, ref: GlobalArray, *leaves: Any) -> np.ndarray:
        return _values(ref, _positions(ref, eqn.params["tree"].unflatten(leaves)))

    def swap(self, eqn: Any, ref: GlobalArray, value: np.ndarray, *leaves: Any) -> np.ndarray:
        at = _positions(ref, eqn.params["tree"].unflatten(leaves))
        old = _values(ref, at)
        _put(ref, at, value)
        return old


def _nothing(dtype: Any) -> Any:
    """Content of memory before anything is written to it."""
    return np.nan if jax.numpy.issubdtype(dtype, np.floating) else 77


class _Block:
    """One block of threads."""

    def __init__(self, place: dict[str, int], mesh: Any, warpgroups: list[Warpgroup]) -> None:
        self.place, self.thread_name = place, mesh.thread_name
        self.warpgroups = warpgroups
        self.allocated: dict[int, list[Any]] = {}


class _Cluster:
    """Blocks of threads that reach each other's shared memory; mostly it is one."""

    def __init__(self, place: dict[str, int], mesh: Any) -> None:
        names, sizes = mesh.cluster_names or (), mesh.cluster or ()
        assert len(sizes) <= 1, "unknown: clusters of several axes"
        blocks, count = sizes[0] if sizes else 1, mesh.num_threads or 1
        self.warpgroups = []
        for index in range(blocks * count):
            knows = Knowledge.nothing(blocks * count)
            knows.seen[index] = 0
            self.warpgroups.append(Warpgroup(index, knows))
        self.blocks = []
        for rank in range(blocks):
            here = place | dict.fromkeys(names, rank)
            own = self.warpgroups[rank * count : (rank + 1) * count]
            self.blocks.append(_Block(here, mesh, own))
        self.bits = itertools.count()
        self.inside = {
            one.index: _Inside(self, rank, one)
            for rank, block in enumerate(self.blocks)
            for one in block.warpgroups
        }
        self.reached = Knowledge.nothing(blocks * count)
        """Accesses of any block to the memory of another."""

    def run(self, jaxpr: Any, refs: list[Any]) -> None:
        waiting = {index: _run(jaxpr, [], refs, one) for index, one in self.inside.items()}
        self._take_turns(waiting)
        for rank, block in enumerate(self.blocks):
            knows = Knowledge.nothing(len(self.warpgroups))
            for one in block.warpgroups:
                knows.join(one.knows)
            ours = [one.index for one in block.warpgroups]
            late = self.reached.seen > knows.seen
            late[ours] = False
            if late.any() or self.reached.done & ~knows.done:
                raise Unordered(f"block {rank} may have ended before others reach its memory")

    def _take_turns(self, waiting: dict[int, Run]) -> None:
        before: Any = None
        while waiting:
            for index, run in list(waiting.items()):
                try:
                    next(run)
                except StopIteration:
                    del waiting[index]
            now = [(one.now, sum(one.waits.values())) for one in self.warpgroups]
            if waiting and now == before:
                raise Unordered(f"warpgroups {sorted(waiting)} wait for ever")
            before = now


class _Inside:
    """One warpgroup of a block: the primitives of kernels."""

    def __init__(self, cluster: _Cluster, rank: int, me: Warpgroup) -> None:
        self.cluster, self.rank, self.me = cluster, rank, me
        self.block = cluster.blocks[rank]

    def axis_index(self, eqn: Any) -> np.ndarray:
        name, count = eqn.params["axis_name"], len(self.block.warpgroups)
        here = self.me.index % count if name == self.block.thread_name else self.block.place[name]
        return np.asarray(here, np.int32)

    def everywhere(self, ref: Any) -> list[Any]:
        """Counterparts of this barrier or array in all blocks of the cluster."""
        shared = [block.allocated for block in self.cluster.blocks]
        key, number = next(
            (key, number)
            for key, refs in shared[self.rank].items()
            for number, one in enumerate(refs)
            if one is ref
        )
        return [allocated[key][number] for allocated in shared]

    def reach(self, done: int = 0) -> None:
        """Note that other blocks have to be there yet."""
        if len(self.cluster.blocks) > 1:
            self.cluster.reached.seen[self.me.index] = self.me.now
            self.cluster.reached.done |= done

    def get(self, eqn: Any, ref: Any, *leaves: Any) -> np.ndarray:
        return self._load(ref, eqn.params["tree"].unflatten(leaves))

    load = get

    def swap(self, eqn: Any, ref: Any, value: np.ndarray, *leaves: Any) -> np.ndarray:
        transforms = eqn.params["tree"].unflatten(leaves)
        old = _values(ref, _positions(ref, transforms))
        self._store(ref, transforms, value)
        return old

    def store(self, eqn: Any, ref: Any, value: np.ndarray, *leaves: Any) -> list[Any]:
        self._store(ref, eqn.params["tree"].unflatten(leaves), value)
        return []

    def _load(self, ref: Any, transforms: Any) -> np.ndarray:
        if isinstance(ref, _Accumulator):
            return ref.value
        at = _positions(ref, transforms)
        if ref.shared:
            ref.read(self.me, at)
        return _values(ref, at)

    def _store(self, ref: Any, transforms: Any, value: np.ndarray) -> None:
        at = _positions(ref, transforms)
        if ref.shared:
            ref.write(self.me, at)
        _put(ref, at, value)

    def commit_smem(self, eqn: Any) -> list[Any]:
        self.me.fence()
        return []

    def barrier_arrive(self, eqn: Any, barriers: Barriers, *leaves: Any) -> list[Any]:
        assert not eqn.params.get("has_user_predicate"), "unknown: a predicate"
        index = _barrier(barriers, eqn.params["transforms_treedef"].unflatten(leaves))
        if barriers.of_cluster and self.me.loads:  # one thread arrives for all of them
            raise Unordered(f"warpgroup {self.me.index} arrives while its threads may still load")
        for one in self.everywhere(barriers) if barriers.of_cluster else [barriers]:
            one.arrive(index, self.me.knows)
        if barriers.of_cluster:
            self.reach()
        self.me.tick()
        return []

    def barrier_wait(self, eqn: Any, barriers: Barriers, *leaves: Any) -> Run:
        index = _barrier(barriers, eqn.params["transforms_treedef"].unflatten(leaves))
        while not barriers.try_wait(index, self.me):
            yield
        return []

    def copy_gmem_to_smem(self, eqn: Any, source: Any, target: Any, *rest: Any) -> list[Any]:
        barriers, *leaves = rest
        names = ("src_transforms", "dst_transforms", "barrier_transforms")
        source_at, target_at, barrier_at = _split(eqn, names, leaves, "_treedef")
        bit, at = next(self.cluster.bits), _positions(target, target_at)
        values, index = (
            _values(source, _positions(source, source_at)),
            _barrier(barriers, barrier_at),
        )
        targets, told, parts = [target], [barriers], 1
        if eqn.params["collective_axes"]:  # a half of it, or another share, for all of them
            targets, told = self.everywhere(target), self.everywhere(barriers)
            parts, share = len(targets), len(at) // len(targets)
            assert share * parts == len(at), f"{len(at)} rows for {parts} blocks"
            own = slice(self.rank * share, (self.rank + 1) * share)
            at, values = at[own], values[own]
            self.reach(1 << bit)
        barriers.arrive(index, self.me.knows, expected=parts)
        for one, barrier in zip(targets, told, strict=True):
            one.write_beside(self.me, at, bit)
            _put(one, at, values)
            barrier.deliver(index, bit)
        self.me.tick()
        return []

    def copy_smem_to_gmem(self, eqn: Any, source: Any, target: Any, *leaves: Any) -> list[Any]:
        names = ("src_transforms", "dst_transforms")
        source_at, target_at = _split(eqn, names, leaves, "_treedef")
        bit, at = next(self.cluster.bits), _positions(source, source_at)
        source.read_beside(self.me, at, bit, "a copy from it")
        self.me.stores.append(bit)
        _put(target, _positions(target, target_at), _values(source, at))
        return []

    def wait_smem_to_gmem(self, eqn: Any) -> list[Any]:
        self.me.finish(self.me.stores, eqn.params["n"])
        return []

    def wgmma_ref(self, eqn: Any, sums: _Accumulator, a: Any, b: Any, *leaves: Any) -> list[Any]:
        names = ("acc_transforms", "a_transforms", "b_transforms")
        _, a_at, b_at = _split(eqn, names, leaves, "_tree")
        bit = next(self.cluster.bits)
        factors = []
        for operand, transforms in ((a, a_at), (b, b_at)):
            if isinstance(operand, Buffer):
                at = _positions(operand, transforms)
                operand.read_beside(self.me, at, bit, "wgmma")
                operand = _values(operand, at)
            factors.append(operand.astype(np.float32))
        self.me.products.append(bit)
        product = factors[0] @ factors[1]
        sums.value = (sums.value + product).astype(sums.value.dtype)
        return []

    def wgmma_wait(self, eqn: Any) -> list[Any]:
        self.me.finish(self.me.products, eqn.params["n"])
        return []

    def wgmma_accumulator_deref(self, eqn: Any, sums: _Accumulator) -> np.ndarray:
        if (left := eqn.params["wait_n"]) is not None:
            self.me.finish(self.me.products, left)
        return sums.value

    def run_scoped(self, eqn: Any, *consts: Any) -> Run:
        jaxpr = eqn.params["jaxpr"]
        if eqn.params["collective_axes"]:  # all warpgroups of the block share it
            if id(eqn) not in self.block.allocated:
                for block in self.cluster.blocks:
                    block.allocated[id(eqn)] = self._allocate(jaxpr)
            own = self.block.allocated[id(eqn)]
        else:
            own = self._allocate(jaxpr)
        return (yield from _run(jaxpr, consts, own, self))

    def _allocate(self, jaxpr: Any) -> list[Any]:
        found: list[Any] = []
        everyone = self.cluster.warpgroups
        for number, var in enumerate(jaxpr.invars):
            aval = var.aval
            dtype = aval.inner_aval.dtype
            if "Accumulator" in type(aval).__name__:
                found.append(_Accumulator(np.zeros(aval.shape, dtype)))
            elif hasattr(dtype, "num_arrivals"):
                of_cluster = hasattr(dtype, "collective_axes")
                arrivals = dtype.num_arrivals * (len(self.cluster.blocks) if of_cluster else 1)
                found.append(Barriers(aval.shape, arrivals, len(everyone), of_cluster=of_cluster))
            else:
                name = f"array {number} {dtype}{list(aval.shape)}"
                found.append(Buffer(name, aval.shape, np.dtype(dtype), everyone))
                found[-1].data[:] = _nothing(dtype)
        return found

    def run_state(self, eqn: Any, *values: Any) -> Run:
        """Sums that begin with values; whoever reads them afterwards waits."""
        refs = [_Accumulator(value) if isinstance(value, np.ndarray) else value for value in values]
        yield from _run(eqn.params["jaxpr"], [], refs, self)
        self.me.finish(self.me.products, 0)
        return [ref.value if isinstance(ref, _Accumulator) else ref for ref in refs]


def _split(eqn: Any, names: tuple[str, ...], leaves: Any, suffix: str) -> list[Any]:
    """The transforms of several refs, whose leaves are one list."""
    found, leaves = [], list(leaves)
    for name in names:
        tree = eqn.params[name + suffix]
        count = 0 if tree is None else tree.num_leaves
        found.append(() if tree is None else tree.unflatten(leaves[:count]))
        leaves = leaves[count:]
    assert not leaves, f"unknown operands of {eqn.primitive}"
    return found


def _barrier(barriers: Barriers, transforms: Any) -> int:
    positions = np.arange(int(np.prod(barriers.shape, dtype=int))).reshape(barriers.shape)
    return int(_transformed(positions, transforms))


def _positions(ref: Any, transforms: Any) -> np.ndarray:
    """Positions of the elements in the flat array; -1: beyond it."""
    if isinstance(ref, _Accumulator):
        raise NotImplementedError("a part of an accumulator")
    return _transformed(np.arange(ref.data.size).reshape(ref.shape), transforms)


def _transformed(at: np.ndarray, transforms: Any) -> np.ndarray:
    for transform in transforms:
        kind = type(transform).__name__
        if kind == "NDIndexer":
            for axis in reversed(range(at.ndim)):
                at = _indexed(at, axis, transform.indices[axis])
        elif kind == "TransposeTransform":
            at = at.transpose(transform.permutation)
        elif kind == "ReshapeTransform":
            at = at.reshape(transform.shape)
        elif kind == "UntilingTransform":
            count = len(transform.tiling)
            outer, lead = at.ndim - count, at.ndim - 2 * count
            order = [axis for i in range(count) for axis in (lead + i, outer + i)]
            shape = [at.shape[lead + i] * at.shape[outer + i] for i in range(count)]
            at = at.transpose(*range(lead), *order).reshape(*at.shape[:lead], *shape)
        elif kind not in ("UnswizzleRef", "SwizzleTransform", "UnswizzleTransform"):
            raise NotImplementedError(kind)
    return at


def _indexed(at: np.ndarray, axis: int, index: Any) -> np.ndarray:
    size = at.shape[axis]
    if hasattr(index, "start"):
        where = int(index.start) + index.stride * np.arange(index.size)
        found = np.take(at, np.clip(where, 0, size - 1), axis)
        beyond = (where < 0) | (where >= size)
        if beyond.any():
            shape = [-1 if axis == i else 1 for i in range(at.ndim)]
            found = np.where(beyond.reshape(shape), -1, found)
        return found
    assert 0 <= int(index) < size, f"index {int(index)} of {size}"
    return np.take(at, int(index), axis)


def _values(ref: Any, at: np.ndarray) -> np.ndarray:
    """TMA reads zeros where there is nothing."""
    found = ref.data[at]
    return np.where(at < 0, np.zeros((), found.dtype), found) if (at < 0).any() else found


def _put(ref: Any, at: np.ndarray, value: Any) -> None:
    value = np.broadcast_to(np.asarray(value, ref.data.dtype), at.shape)
    real = at >= 0
    ref.data[at[real]] = value[real]


def _run(jaxpr: Any, consts: Any, arguments: Any, machine: Any) -> Run:
    values: dict[Any, Any] = {}
    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jex_core.Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        return values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name.removesuffix("_p")  # some have it in JAX 0.11
        if name in _CALLS or (name in _LOOPS and isinstance(machine, _Inside)):
            found = yield from (_CALLS | _LOOPS)[name](eqn, inputs, machine)
        elif (method := getattr(machine, name, None)) is not None:
            found = method(eqn, *inputs)
            if isinstance(found, Generator):
                found = yield from found
        elif name in _ARRAYS:
            found = _ARRAYS[name](eqn, *inputs)
        else:
            found = eqn.primitive.bind(*map(jax.numpy.asarray, inputs), **eqn.params)
        if not eqn.primitive.multiple_results:
            found = [found]
        for var, value in zip(eqn.outvars, found, strict=True):
            if hasattr(var.aval, "dtype") and isinstance(
                value, (np.ndarray, np.generic, jax.Array)
            ):
                value = np.asarray(value).astype(var.aval.dtype, copy=False)
            values[var] = value
    return [read(atom) for atom in jaxpr.outvars]


def _closed(eqn: Any, inputs: Any, machine: Any) -> Run:
    names = ("jaxpr", "call_jaxpr", "call")
    inner = next(eqn.params[name] for name in names if name in eqn.params)
    consts = getattr(inner, "consts", [])
    return (yield from _run(getattr(inner, "jaxpr", inner), consts, inputs, machine))


def _cond(eqn: Any, inputs: Any, machine: Any) -> Run:
    branches = eqn.params["branches"]
    branch = branches[int(np.clip(int(inputs[0]), 0, len(branches) - 1))]
    return (yield from _run(branch.jaxpr, branch.consts, inputs[1:], machine))


def _while(eqn: Any, inputs: Any, machine: Any) -> Run:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = inputs[: counts[0]], inputs[counts[0] : sum(counts)]
    carry = inputs[sum(counts) :]
    while True:
        (more,) = yield from _run(cond.jaxpr, cond.consts, [*of_cond, *carry], machine)
        if not more:
            return carry
        carry = yield from _run(body.jaxpr, body.consts, [*of_body, *carry], machine)


def _scan(eqn: Any, inputs: Any, machine: Any) -> Run:
    """A loop of a kernel, which has nothing but carries, as `fori_loop` makes it."""
    consts, body = len(inputs) - len(eqn.outvars), eqn.params["jaxpr"]
    fixed, carry = inputs[:consts], inputs[consts:]
    for _ in range(eqn.params["length"]):
        carry = yield from _run(body.jaxpr, body.consts, [*fixed, *carry], machine)
    return carry


_LOOPS = {"cond": _cond, "while": _while, "scan": _scan}
_CALLS = dict.fromkeys(
    ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vmap_call"), _closed
)


def _broadcast(eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape, where = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    wide = [1] * len(shape)
    for axis, size in zip(where, np.shape(x), strict=True):
        wide[axis] = size
    return np.broadcast_to(np.reshape(x, wide), shape)


def _iota(eqn: Any, *_: Any) -> np.ndarray:
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    wide = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(wide), shape)


def _convert(eqn: Any, x: np.ndarray) -> np.ndarray:
    x, dtype = np.asarray(x), eqn.params["new_dtype"]
    if jax.numpy.issubdtype(dtype, np.integer) and jax.numpy.issubdtype(x.dtype, np.floating):
        return np.trunc(np.nan_to_num(x.astype(np.float64))).astype(dtype)
    return x.astype(dtype)


def _quotient(eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Quotients of integers are rounded towards zero."""
    if not np.issubdtype(x.dtype, np.integer):
        return x / y
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def _slice(eqn: Any, x: np.ndarray) -> np.ndarray:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, starts, limits, strides))]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, *inputs: function(*inputs)


def _over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, x: function(x, axis=tuple(eqn.params["axes"]))


_ARRAYS: dict[str, Callable[..., Any]] = {
    **{
        name: _plain(getattr(np, function))
        for name, function in re.findall(
            r"(\w+):(\w+)",
            "add:add sub:subtract mul:multiply rem:fmod min:minimum max:maximum and:bitwise_and "
            "or:bitwise_or not:bitwise_not neg:negative sign:sign abs:abs round:rint exp:exp "
            "exp2:exp2 log:log log2:log2 eq:equal ne:not_equal lt:less le:less_equal gt:greater "
            "ge:greater_equal",
        )
    },
    "div": _quotient,
    "rsqrt": _plain(lambda x: 1 / np.sqrt(x)),
    "select_n": _plain(
        lambda which, *cases: np.select([which == i for i in range(len(cases))], cases)
    ),
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reduce_max": _over_axes(np.max),
    "reduce_sum": _over_axes(np.sum),
    "slice": _slice,
    "optimization_barrier": lambda eqn, *inputs: list(inputs),
    "layout_cast": _plain(lambda x: x),
}
