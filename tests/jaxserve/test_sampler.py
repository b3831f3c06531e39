"""The sampler: which tokens may come, how often, and on what a draw depends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampler import SamplerState, _threshold, sample

VOCAB = 40
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
DTYPES = {"top_k": np.int32, "seed": np.uint32, "position": np.int32}

run = jax.jit(sample)


def draw(logits, rows) -> list[int]:
    """One token a row; a row says only what differs from `OFF`."""
    columns = {
        name: np.asarray([{**OFF, **row}[name] for row in rows], DTYPES.get(name, np.float32))
        for name in OFF
    }
    state = SamplerState(**{name: jnp.asarray(column) for name, column in columns.items()})
    return np.asarray(run(jnp.asarray(logits, jnp.float32), state)).tolist()


@functools.cache
def random_logits(seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2.0, size=vocab).astype(np.float32)


def draws(logits, count: int, **row) -> np.ndarray:
    """`count` draws with seeds 0, 1, 2 …, 500 a call."""
    logits = np.broadcast_to(logits, (500, len(logits)))
    tokens = [
        draw(logits, [{**row, "seed": start + i} for i in range(500)])
        for start in range(0, count, 500)
    ]
    return np.asarray(tokens).ravel()[:count]


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution a draw has, token by token, from the definitions."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    likeliest = p.max()
    order = np.argsort(-p, kind="stable")
    kept: set[int] = set()
    mass = p[order[: top_k or len(p)]].sum()
    before = 0.0
    for rank, token in enumerate(order):
        if top_k and rank >= top_k:
            break
        if before >= top_p:
            break
        before += p[token] / mass
        if p[token] >= min_p * likeliest:
            kept.add(int(token))
    p[[token for token in range(len(p)) if token not in kept]] = 0.0
    return p / p.sum()


class TestGreedy:
    def test_takes_the_largest_and_the_first_of_equals(self):
        logits = [[0.0, 3.0, 1.0, 3.0], [-5.0, -9.0, -6.0, -5.5]]
        assert draw(logits, [{"temperature": 0.0}] * 2) == [1, 0]

    def test_whatever_else_is_set(self):
        row = {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.9, "seed": 9}
        for seed in range(20):
            logits = random_logits(seed)
            assert draw([logits], [row]) == [int(np.argmax(logits))]

    def test_among_rows_that_draw(self):
        logits = np.stack([random_logits(seed) for seed in range(8)])
        rows = [{"temperature": 0.0 if slot % 2 else 1.5, "seed": slot} for slot in range(8)]
        tokens = draw(logits, rows)
        assert tokens[1::2] == logits.argmax(axis=1)[1::2].tolist()

    @pytest.mark.parametrize("temperature", [1e-40, 1.2e-38, 1e-37, 1e-30, 1e-6, 1e-3])
    def test_is_the_limit_of_small_temperatures(self, temperature):
        for logits in (random_logits(1), random_logits(1) - 100, random_logits(1) + 100):
            assert draw([logits], [{"temperature": temperature}]) == [int(np.argmax(logits))]


class TestSupport:
    """Which tokens come at all."""

    LOGITS = np.log(np.asarray([0.05, 0.4, 0.15, 0.3, 0.1], np.float32))

    @pytest.mark.parametrize(
        ("row", "tokens"),
        [
            ({}, {0, 1, 2, 3, 4}),
            ({"top_k": 1}, {1}),
            ({"top_k": 2}, {1, 3}),
            ({"top_k": 5}, {0, 1, 2, 3, 4}),
            ({"top_k": 2**31 - 1}, {0, 1, 2, 3, 4}),
            ({"top_p": 1e-6}, {1}),
            ({"top_p": 0.39}, {1}),
            ({"top_p": 0.41}, {1, 3}),
            ({"top_p": 0.69}, {1, 3}),
            ({"top_p": 0.71}, {1, 2, 3}),
            ({"top_p": 0.94}, {1, 2, 3, 4}),
            ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
            ({"min_p": 1.0}, {1}),
            ({"min_p": 0.76}, {1}),
            ({"min_p": 0.74}, {1, 3}),
            ({"min_p": 0.3}, {1, 2, 3}),
            # top_p counts the mass of what top_k left: 0.4 / 0.7 = 0.57.
            ({"top_k": 2, "top_p": 0.5}, {1}),
            ({"top_k": 2, "top_p": 0.6}, {1, 3}),
            ({"top_k": 3, "min_p": 0.5}, {1, 3}),
            ({"top_p": 0.9, "min_p": 0.3}, {1, 2, 3}),
            # Temperature comes first: 2 flattens, 0.5 sharpens.
            ({"temperature": 2.0, "min_p": 0.7}, {1, 3}),
            ({"temperature": 0.5, "min_p": 0.3}, {1, 3}),
        ],
    )
    def test_literal(self, row, tokens):
        assert set(draws(self.LOGITS, 1000, **row)) == tokens

    @given(
        seed=st.integers(0, 9),
        temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 2, 5, 17, VOCAB, 1000]),
        top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 0.01]),
        min_p=st.sampled_from([0.0, 0.02, 0.2, 0.7]),
    )
    @settings(max_examples=60)
    def test_is_that_of_the_definitions(self, seed, temperature, top_k, top_p, min_p):
        logits = random_logits(seed)
        row = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        allowed = probabilities(logits, **row)
        tokens = draws(logits, 500, **row)
        assert np.all(allowed[tokens] > 0)
        # What should come 12 times in 500 draws comes at least once.
        assert set(np.flatnonzero(allowed > 0.024)) <= set(tokens.tolist())


class TestFrequencies:
    @pytest.mark.parametrize(
        "row",
        [
            {},
            {"temperature": 0.7},
            {"temperature": 1.8, "top_k": 12},
            {"top_p": 0.8},
            {"min_p": 0.1},
            {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        ],
    )
    def test_over_seeds(self, row):
        """4000 draws: the chi-square statistic stays below its mean and five deviations."""
        count = 4000
        logits = random_logits(3)
        expected = probabilities(logits, **row) * count
        observed = np.bincount(draws(logits, count, **row), minlength=VOCAB)
        assert np.all(observed[expected == 0] == 0)
        often = expected >= 5
        rest_expected, rest = expected[~often].sum(), observed[~often].sum()
        statistic = np.sum((observed - expected)[often] ** 2 / expected[often])
        statistic += (rest - rest_expected) ** 2 / max(rest_expected, 1.0)
        freedom = often.sum()
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)

    def test_over_positions(self):
        """One request's draws are as independent as those of many."""
        logits, count = random_logits(4), 4000
        rows = [{"seed": 7, "position": position} for position in range(count)]
        tokens = draw(np.broadcast_to(logits, (count, VOCAB)), rows)
        expected = probabilities(logits) * count
        observed = np.bincount(tokens, minlength=VOCAB)
        often = expected >= 5
        statistic = np.sum((observed - expected)[often] ** 2 / expected[often])
        assert statistic < often.sum() + 5 * np.sqrt(2 * often.sum())


class TestIndependence:
    """A draw depends on its row's logits, parameters, seed and position, and on nothing else."""

    ROW = {"temperature": 0.8, "top_p": 0.9, "seed": 123, "position": 17}  # noqa: RUF012

    def crowd(self, size, rng):
        logits = rng.normal(scale=2, size=(size, VOCAB)).astype(np.float32)
        rows = [
            {
                "temperature": float(rng.choice([0.0, 0.5, 1.0])),
                "top_k": int(rng.choice([0, 1, 7])),
                "top_p": float(rng.choice([1.0, 0.5])),
                "min_p": float(rng.choice([0.0, 0.2])),
                "seed": int(rng.integers(2**32)),
                "position": int(rng.integers(1000)),
            }
            for _ in range(size)
        ]
        return logits, rows

    @pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
    def test_of_neighbours_slot_and_batch_size(self, size):
        rng = np.random.default_rng(size)
        for row in (self.ROW, {"seed": 5}, {"seed": 5, "top_k": 4}, {"seed": 6, "min_p": 0.1}):
            alone = draw([random_logits(1)], [row])[0]
            for slot in range(0, size, max(1, size // 4)):
                logits, rows = self.crowd(size, rng)
                logits[slot], rows[slot] = random_logits(1), row
                assert draw(logits, rows)[slot] == alone

    def test_top_p_of_1_keeps_the_whole_tail_in_any_crowd(self):
        """A neighbour has the masses summed, and rounded; that must not cut this row's tail."""
        vocab = 3072
        logits = np.stack([np.linspace(0, -slope, vocab, dtype=np.float32) for slope in (2, 9, 40)])
        alone = _threshold(jnp.asarray(logits), self.state(top_p=(1.0, 1.0, 1.0)))
        crowd = _threshold(jnp.asarray(logits), self.state(top_p=(1.0, 0.5, 1.0)))
        assert np.all(np.asarray(alone) <= logits[:, -1])
        assert np.all(np.asarray(crowd)[[0, 2]] <= logits[[0, 2], -1])

    def state(self, top_p):
        columns = {
            name: np.full(3, value, DTYPES.get(name, np.float32)) for name, value in OFF.items()
        }
        return SamplerState(**{**columns, "top_p": np.asarray(top_p, np.float32)})

    def test_same_seed_and_position_same_token(self):
        logits = random_logits(2)
        assert len({draw([logits], [self.ROW])[0] for _ in range(3)}) == 1

    def test_another_seed_or_position_another_token(self):
        flat = np.zeros(1000, np.float32)
        tokens = {
            draw([flat], [{"seed": seed, "position": position}])[0]
            for seed in (0, 1, 2**31, 2**32 - 1)
            for position in (1, 2, 1000)
        }
        assert len(tokens) >= 11

    def test_bfloat16_logits_are_taken_as_fp32(self):
        logits = jnp.asarray(random_logits(2), jnp.bfloat16)
        as_float32 = draw([np.asarray(logits, np.float32)], [self.ROW])
        state = SamplerState(
            **{
                name: jnp.asarray([{**OFF, **self.ROW}[name]], DTYPES.get(name, np.float32))
                for name in OFF
            }
        )
        assert np.asarray(run(logits[None], state)).tolist() == as_float32
