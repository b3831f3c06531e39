"""Step-3's MoE layers as one program of both roles, compiled for a TPU topology: pools shared by KV pages and
experts, in words. Run: python -m tests.pallas_kernels.one_program_aot v6e:4x4 3 (or tpu7x:2x2x4)."""

import os, sys, time, re

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.experimental import topologies
from pallas_kernels.attention import paged_attention, write_rows
from pallas_kernels.quantize import QuantArray, Words, StackEntry
from pallas_kernels.grouped_matmul.dense import dense_matmul
from pallas_kernels.grouped_matmul.routed import routed_choices, combine

topo, lanes = sys.argv[1], int(sys.argv[2])
v7 = "7x" in topo
wdt = jnp.dtype(jnp.float8_e4m3fn if v7 else jnp.int8)
kdt = jnp.dtype(jnp.uint8 if v7 else jnp.int8)
rows, slots_, P0, ppseq, per = (128, 128, 8000, 32, 24) if v7 else (32, 32, 1500, 32, 12)
d, heads, hd, ff, page, runs = 7168, 64, 256, 640, 256, 2
half_layers = 28
layers = runs * half_layers
devs = list(topologies.get_topology_desc(topo, platform="tpu").devices)
n = len(devs)
N = n // 2
mesh = Mesh(np.array(devs).reshape(2, N), ("role", "x"))
pages = -(-61 * P0 // 70) * 70
unit = ff * d // 4
W = pages * page // 4 * hd  # words of a pool


def view(pool, r, width):  # int32 (R, 128) -> (entries, r, width) words, one bitcast on TPU
    return pool.reshape(-1, width // 128, 8, 128).swapaxes(1, 2).reshape(-1, r, width)


def unview(v):
    width = v.shape[-1]
    return v.reshape(-1, 8, width // 128, 128).swapaxes(1, 2).reshape(-1, 128)


def experts(pool):
    up, down = view(pool, ff // 4, d), view(pool, d // 4, ff)
    count = half_layers * per
    return [
        Words(up, wdt, 0, count),
        Words(up, wdt, count, count),
        Words(down, wdt, 2 * count, count),
    ]


def page_view(pool):
    return Words(view(pool, page // 4, hd)[:, None], kdt)


def swap(x):
    return lax.ppermute(x, "role", [(0, 1), (1, 0)])


def step(x, pools, scales, att, ffs, table, length):
    x, table, length = x[0], table[0], length[0]
    seq = jnp.arange(rows, dtype=jnp.int32)
    is_att = lax.axis_index("role") == 0

    def attend(run, l, stacks, pools, scales, h):
        (kp, vp), (ks, vs) = map(page_view, pools), scales
        one = [QuantArray(StackEntry(v, l), StackEntry(s, l), (1, 0)) for v, s in stacks]
        low = dense_matmul(h, one[0]).astype(h.dtype)
        q = dense_matmul(low[:, :2048], one[1]).astype(h.dtype).reshape(rows, heads, hd)
        new = [
            lax.bitcast_convert_type(low[:, a : a + 256].astype(wdt), kdt)[:, None]
            for a in (2048, 2304)
        ]
        at = table + (run * half_layers + l) * P0
        kp, ks = write_rows((kp, ks), (new[0], jnp.ones((rows, 1), jnp.float32)), at, seq, length)
        vp, vs = write_rows((vp, vs), (new[1], jnp.ones((rows, 1), jnp.float32)), at, seq, length)
        o, _ = paged_attention(q, kp, vp, at, seq, length, scale=1 / 16, k_scales=ks, v_scales=vs)
        out = dense_matmul(o.reshape(rows, -1).astype(h.dtype), one[2]).astype(h.dtype)
        back = lambda w: unview(w.words[:, 0])
        return (h + out), (back(kp), back(vp)), (ks, vs)

    def ffn(run, l, fscales, pools, m):
        everything = lax.all_gather(m, "x", axis=0, tiled=True)
        tokens = everything.shape[0]
        ids = (jnp.arange(tokens * 3, dtype=jnp.int32) * 7 % 48).reshape(tokens, 3)
        ids = ids - lax.axis_index("x") // 8 * per
        ids = jnp.where((ids >= 0) & (ids < per), ids, per)
        w = [QuantArray(v, s, (1, 0)) for v, s in zip(experts(pools[run]), fscales)]
        found = routed_choices(
            everything, ids, jnp.ones(ids.shape, jnp.float32), *w, window=(l * per, per), among=48
        )
        y = combine(*found, dtype=m.dtype)
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)

    def one_run(run, carry, att, fs):
        def layer(carry, l):
            hs, answers, waiting, ahead, pools, scales = carry
            hs, answers = list(hs), list(answers)
            for lane in range(lanes):
                # Both exchanges of a turn run beside the computation of the role that has sent.
                arrived = swap(waiting)  # attention's message of the turn before
                h = hs[lane] + answers[lane]
                h, pools, scales = lax.cond(
                    is_att,
                    lambda *a: attend(run, l, att, *a),
                    lambda p, s, h: (h, p, s),
                    pools,
                    scales,
                    h,
                )
                answer = swap(ahead)  # ffn's answer of the turn before
                answers[lane - 2] = answer
                sent = lax.cond(
                    is_att, lambda m, p: m, lambda m, p: ffn(run, l, fs, p, m), arrived, pools
                )
                hs[lane], waiting, ahead = h, h, sent
                hs, answers, waiting, ahead, pools, scales = lax.optimization_barrier(
                    (hs, answers, waiting, ahead, pools, scales)
                )
                hs, answers = list(hs), list(answers)
            return (tuple(hs), tuple(answers), waiting, ahead, pools, scales), None

        return lax.scan(layer, carry, jnp.arange(half_layers, dtype=jnp.int32))[0]

    zero = jnp.zeros_like(x)
    carry = (
        tuple(x + i for i in range(lanes)),
        (zero,) * lanes,
        zero,
        zero,
        tuple(p[0] for p in pools),
        tuple(s[0] for s in scales),
    )
    for run in range(runs):
        carry = one_run(run, carry, [(v[0], s[0]) for v, s in att[run]], [s[0] for s in ffs[run]])
    hs, answers, waiting, ahead, pools, scales = carry
    return (
        (jnp.stack(hs) + jnp.stack(answers))[None],
        tuple(p[None] for p in pools),
        tuple(s[None] for s in scales),
        (waiting + ahead)[None],
    )


bf, f32 = jnp.bfloat16, jnp.float32
S = lambda shape, t: jax.ShapeDtypeStruct(
    (n, *shape), t, sharding=NamedSharding(mesh, P(("role", "x")))
)
quant = lambda o, i: (S((half_layers, o, i), wdt), S((half_layers, o, 1), f32))
args = (
    S((rows, d), bf),
    (S((W // 128, 128), jnp.int32),) * 2,
    (S((pages, 1, page), f32),) * 2,
    [[quant(2560, d), quant(16384, 2048), quant(d, 16384)] for _ in range(runs)],
    [
        [
            S((half_layers * per, ff, 1), f32),
            S((half_layers * per, ff, 1), f32),
            S((half_layers * per, d, 1), f32),
        ]
        for _ in range(runs)
    ],
    S((slots_, ppseq), jnp.int32),
    S((rows,), jnp.int32),
)
spec = jax.tree.map(lambda a: P(("role", "x")), args)
f = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=P(("role", "x")), check_vma=False),
    donate_argnums=(1, 2),
)
t = time.time()
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    low = f.lower(*args)
print("lowered", round(time.time() - t, 1), flush=True)
c = low.compile()
m = c.memory_analysis()
txt = c.as_text()
open(f"one_program.hlo", "w").write(txt)
print(
    topo,
    n,
    "devices",
    wdt.name,
    lanes,
    "lanes",
    f"compiled {time.time() - t:.1f} s; args {m.argument_size_in_bytes / 1e9:.3f} GB pools {8 * W / 1e9:.3f} GB alias {m.alias_size_in_bytes / 1e9:.3f} temp {m.temp_size_in_bytes / 1e6:.1f} MB code {m.generated_code_size_in_bytes / 1e6:.1f} MB",
)
fused = set(re.findall(r"calls=%([\w.\-]+)", txt))
comp = ""
for l in txt.splitlines():
    k = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(", l)
    if l and not l.startswith(" ") and k:
        comp = k[1]
    mm = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\w+)\[([\d,]+)\](\{\S*)? ([\w\-]+)\(", l)
    if (
        mm
        and comp not in fused
        and mm[5] not in ("parameter", "get-tuple-element", "bitcast", "tuple")
    ):
        size = np.prod([int(v) for v in mm[3].split(",")], dtype=float) * {
            "s8": 1,
            "u8": 1,
            "f8e4m3fn": 1,
            "bf16": 2,
        }.get(mm[2], 4)
        if size > 16e6 and "S(" not in (mm[4] or ""):
            print("  ", comp[:30], mm[1][:40], mm[2], mm[3], mm[5], round(size / 1e6, 1), "MB")
for b in re.split(r"\n(?=%|ENTRY)", txt):
    if " conditional(" in b and "collective-permute-start" in b:
        print(
            "order:",
            " ".join(
                {
                    "collective-permute-start": "S",
                    "collective-permute-done": "D",
                    "conditional": "C",
                }[
                    re.search(
                        r"(collective-permute-start|collective-permute-done|conditional)\(", l
                    )[1]
                ]
                for l in b.splitlines()
                if re.search(
                    r" (collective-permute-start|collective-permute-done|conditional)\(", l
                )
            ),
        )
