"""The sampler: which tokens may come, how often, and on what a draw depends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.model.sampler import (
    MAX,
    LogitRules,
    SamplerState,
    _cut_by_candidates,
    _cut_by_search,
    adjust,
    count,
    in_blocks,
    log_probabilities,
    process,
    sample_and_largest,
)
from tests import golden

VOCAB = 40
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
DTYPES = {"top_k": np.int32, "seed": np.uint32, "position": np.int32}

cut_by_candidates, cut_by_search = jax.jit(_cut_by_candidates), jax.jit(_cut_by_search)
compiled_process = jax.jit(lambda blocks, state: process(blocks, jnp.max(blocks, (1, 2)), state))


@jax.jit
def run(logits, state):
    """The tokens, of logits of the whole vocabulary."""
    return sample_and_largest(logits, state, logits.shape[1])[0]


def processed(logits, state) -> np.ndarray:
    """The logarithms of the weights that draws go by, without the padding."""
    blocks = compiled_process(in_blocks(jnp.asarray(logits)), state)
    return np.asarray(blocks).reshape(len(logits), -1)[:, : logits.shape[1]]


def columns(defaults, rows, dtypes, otherwise):
    """An array of each field, of rows that say only what differs from the defaults."""
    made = {name: [{**defaults, **row}[name] for row in rows] for name in defaults}
    return {
        name: jnp.asarray(np.asarray(values, dtypes.get(name, otherwise)))
        for name, values in made.items()
    }


def state_of(rows) -> SamplerState:
    return SamplerState(**columns(OFF, rows, DTYPES, np.float32))


def draw(logits, rows) -> list[int]:
    """One token a row."""
    return np.asarray(run(jnp.asarray(logits, jnp.float32), state_of(rows))).tolist()


@functools.cache
def random_logits(seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2.0, size=vocab).astype(np.float32)


def draws(logits, count: int, **row) -> np.ndarray:
    """`count` draws with seeds 0, 1, 2 …"""
    rows = [{**row, "seed": seed} for seed in range(count)]
    return np.asarray(draw(np.broadcast_to(logits, (count, len(logits))), rows))


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution a draw has, token by token, from the definitions."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    likeliest = p.max()
    order = np.argsort(-p, kind="stable")
    kept: set[int] = set()
    mass = p[order[: top_k or len(p)]].sum()
    before = 0.0
    for token in order[: top_k or len(p)]:
        if before >= top_p:
            break
        before += p[token] / mass
        if p[token] >= min_p * likeliest:
            kept.add(int(token))
    p[[token for token in range(len(p)) if token not in kept]] = 0.0
    return p / p.sum()


class TestGreedy:
    @pytest.mark.parametrize("vocab", [5, 128, 300, 1000])
    def test_the_first_of_the_largest(self, vocab):
        logits = np.random.default_rng(vocab).integers(-3, 4, (7, vocab)).astype(np.float32)
        expected = logits.argmax(axis=1).tolist()  # of many equal ones, too
        assert draw(logits, [{"temperature": 0.0}] * 7) == expected
        assert draw(np.full((1, vocab), -np.inf), [{"temperature": 0.0}]) == [0]

    @pytest.mark.parametrize("place", [0, 127, 299])
    def test_a_nan_gives_a_token_all_the_same(self, place):
        logits = np.zeros((2, 300), np.float32)
        logits[0, place] = np.nan
        logits[:, 200] = 1.0
        assert draw(logits, [{"temperature": 0.0}] * 2) == [299, 200]

    def test_whatever_else_is_set(self):
        row = {"temperature": 0.0, "top_k": 3, "top_p": 0.1, "min_p": 0.9, "seed": 9}
        for seed in range(20):
            logits = random_logits(seed)
            assert draw([logits], [row]) == [int(np.argmax(logits))]

    @pytest.mark.parametrize("temperature", [1e-40, 1.2e-38, 1e-37, 1e-30, 1e-6, 1e-3])
    def test_is_the_limit_of_small_temperatures(self, temperature):
        for logits in (random_logits(1), random_logits(1) - 100, random_logits(1) + 100):
            assert draw([logits], [{"temperature": temperature}]) == [int(np.argmax(logits))]


@given(
    seed=st.integers(0, 99),
    top_k=st.sampled_from([0, 1, 20, 64, 65, 500]),
    top_p=st.floats(0.05, 1),
)
@settings(max_examples=25)
def test_candidates_and_search_keep_the_smallest_set(seed, top_k, top_p):
    """1,000 tokens a row, many with equal logits; 64 candidates decide steep rows alone."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=(2, 1000)) * [[4.0], [0.5]], 1).astype(np.float32)
    scaled = in_blocks(jnp.asarray(logits - logits.max(axis=1, keepdims=True)))
    limits = np.full(2, top_k or scaled.shape[1] * 128, np.int32), np.full(2, top_p, np.float32)
    for cut in (cut_by_candidates, cut_by_search):
        for row, threshold in zip(
            np.asarray(scaled, np.float64), cut(scaled, *limits), strict=True
        ):
            values = np.sort(row[np.isfinite(row)].ravel())[::-1]
            kept = values[values >= values[(top_k or len(values)) - 1]]
            mass = np.exp(kept).sum() * top_p
            assert np.exp(values[values >= threshold]).sum() >= mass * (1 - 1e-5)
            assert np.exp(values[values > threshold]).sum() < mass * (1 + 1e-5) or top_p == 1.0
            assert threshold >= kept[-1] or (not top_k and threshold == -np.inf)


def assert_frequencies(tokens, probabilities):
    """The chi-square statistic stays below its mean and five deviations."""
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(expected))
    assert np.all(observed[expected == 0] == 0)
    often = expected >= 5
    rest_expected, rest = expected[~often].sum(), observed[~often].sum()
    statistic = np.sum((observed - expected)[often] ** 2 / expected[often])
    statistic += (rest - rest_expected) ** 2 / max(rest_expected, 1.0)
    freedom = often.sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


class TestFrequencies:
    @golden.table("model/sampled_rows.yaml")
    def test_over_seeds(self, row, vocab, count):
        """1,000 tokens are eight blocks of 128, of which the last one is not full."""
        logits = random_logits(3, vocab)
        assert_frequencies(draws(logits, count, **row), probabilities(logits, **row))

    def test_a_small_top_k_draws_the_tokens_of_a_large_one(self):
        """min_p alone decides what is kept; a top_k of at most 64 looks at 64 of 71 blocks."""
        few, every = (draws(random_logits(3, 9000), 100, min_p=0.08, top_k=k) for k in (64, 65))
        assert few.tolist() == every.tolist()

    def test_over_positions(self):
        """One request's draws are as independent as those of many."""
        logits, count = random_logits(4), 4000
        rows = [{"seed": 7, "position": position} for position in range(count)]
        tokens = draw(np.broadcast_to(logits, (count, VOCAB)), rows)
        assert_frequencies(tokens, probabilities(logits))


class TestIndependence:
    """A draw depends on its row's logits, parameters, seed and position, and on nothing else."""

    ROW = {"temperature": 0.8, "top_p": 0.9, "seed": 123, "position": 17}  # noqa: RUF012

    def crowd(self, size, rng):
        logits = rng.normal(scale=2, size=(size, VOCAB)).astype(np.float32)
        choices = {"temperature": [0.0, 0.5, 1.0], "top_k": [0, 1, 7], "top_p": [1.0, 0.5]}
        choices |= {"min_p": [0.0, 0.2], "seed": 2**32, "position": 1000}
        rows = [{n: rng.choice(v) for n, v in choices.items()} for _ in range(size)]
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

    @pytest.mark.parametrize("drawing", [[], [19], [0, 9, 18, 19], range(5), range(1, 20, 2)])
    def test_of_how_many_draw(self, drawing):
        """Few are drawn one by one, more in windows of 16 slots, which overlap at the end."""
        logits = np.stack([random_logits(seed) for seed in range(20)])
        rows = [{"temperature": float(slot in drawing), "seed": slot} for slot in range(20)]
        tokens = draw(logits, rows)
        for slot in range(20):
            if slot in drawing:
                assert tokens[slot] == draw(logits[slot][None], [rows[slot]])[0]
            else:
                assert tokens[slot] == logits[slot].argmax()

    def test_top_p_of_1_keeps_the_whole_tail_in_any_crowd(self):
        """A neighbour has the masses summed, and rounded; that must not cut this row's tail."""
        vocab = 3072
        logits = np.stack([np.linspace(0, -slope, vocab, dtype=np.float32) for slope in (2, 9, 40)])
        alone, crowd = (
            processed(logits, state_of([{"top_p": one} for one in top_p]))
            for top_p in ((1.0, 1.0, 1.0), (1.0, 0.5, 1.0))
        )
        assert np.isfinite(alone).all(axis=1).tolist() == [True, True, True]
        assert np.isfinite(crowd).all(axis=1).tolist() == [True, False, True]

    def test_another_seed_or_position_another_token(self):
        flat = np.zeros(20_000, np.float32)  # top_k = 5 keeps all, also behind the first 64 blocks
        tokens = {
            draw([flat], [{"seed": seed, "position": position, "top_k": 5}])[0]
            for seed in (0, 1, 2**31, 2**32 - 1)
            for position in (1, 2, 1000)
        }
        assert (len(tokens) >= 11, max(tokens) >= 64 * 128) == (True, True)

    def test_bfloat16_logits_are_taken_as_fp32(self):
        logits = jnp.asarray(random_logits(2), jnp.bfloat16)
        as_float32 = draw([np.asarray(logits, np.float32)], [self.ROW])
        assert np.asarray(run(logits[None], state_of([self.ROW]))).tolist() == as_float32


@given(
    seed=st.integers(0, 9),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 17, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 0.7]),
)
@settings(max_examples=60)
def test_processed_logits_are_the_logarithms_of_the_distribution(seed, **row):
    """Logits of one block and, beside a row that keeps all tokens, of three."""
    for logits, rows in (
        ([random_logits(seed)], [row]),
        ([random_logits(seed, 300), random_logits(9, 300)], [row, {}]),
    ):
        found = processed(np.stack(logits), state_of(rows))
        assert found.max(axis=1).tolist() == [0.0] * len(rows)
        expected = [probabilities(one, **how) for one, how in zip(logits, rows, strict=True)]
        np.testing.assert_allclose(jax.nn.softmax(found), expected, atol=1e-6)


def words_of(tokens, vocab=VOCAB) -> list[int]:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32).tolist()


NO_RULES = {
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "prompt_length": MAX,
    "fresh": 0,
    "masked": 0,
    "token_ids": [MAX, MAX],
    "biases": [0.0, 0.0],
    "allowed": words_of([]),
    "prompt": words_of([]),
}
FLOATS = dict.fromkeys(("repetition", "presence", "frequency", "biases"), np.float32)


def rules(*rows) -> LogitRules:
    return LogitRules(**columns(NO_RULES, rows, FLOATS, np.int32))


class TestCounts:
    """A step of 6 tokens on 2 slots: 3 of slot 0, 1 of slot 1, and 2 of padding."""

    TOKENS = np.asarray([5, 6, 5, 7, 0, 0], np.int32)
    SLOTS = np.asarray([0, 0, 0, 1, 1, 1], np.int32)
    POSITIONS = np.asarray([3, 4, 5, 9, -1, -1], np.int32)

    def run(self, before, *rows):
        made = jax.jit(count)(before, rules(*rows), self.TOKENS, self.SLOTS, self.POSITIONS)
        return np.asarray(made)

    def test_generated_tokens_count_when_they_are_fed(self):
        before = np.zeros((2, VOCAB), np.int32)
        before[:, 5] = 4
        counts = self.run(before, {"prompt_length": 4}, {"prompt_length": 10})
        expected = before.copy()
        expected[0, 6] += 1  # position 4
        expected[0, 5] += 1  # position 5
        assert counts.tolist() == expected.tolist()

    def test_a_fresh_slot_forgets_and_takes_the_prompt(self):
        before = np.full((2, VOCAB), 3, np.int32)
        fresh = {"prompt_length": 5, "fresh": 1, "prompt": words_of([1, 33, 5])}
        counts = self.run(before, fresh, {"prompt_length": 0})
        assert np.flatnonzero(counts[0]).tolist() == [1, 5, 33]
        assert (counts[0, [1, 33]] == 1 << 24).all()
        assert counts[0, 5] == (1 << 24) + 1
        assert counts[1, 7] == 4
        assert counts[1, 0] == 3, "padding counts nothing"

    def test_without_penalties_nothing_is_touched(self):
        before = np.full((2, VOCAB), 3, np.int32)
        assert self.run(before, {"fresh": 1}, {}).tolist() == before.tolist()


class TestAdjust:
    LOGITS = np.asarray([[2.0, -1.0, 0.5, -3.0] + [0.0] * (VOCAB - 4)], np.float32)

    def run(self, counts, **row):
        before = np.zeros((1, VOCAB), np.int32)
        for token, value in counts.items():
            before[0, token] = value
        return np.asarray(jax.jit(adjust)(self.LOGITS, before, rules(row)))[0]

    def test_counts_of_another_sequence_mean_nothing(self):
        assert self.run({0: 7}, repetition=1.0).tolist() == self.LOGITS[0].tolist()

    def test_a_banned_token_comes_where_nothing_else_may(self):
        row = {"masked": 1, "allowed": words_of([7]), "token_ids": [7, MAX], "biases": [-1e30, 0]}
        logits = self.run({}, **row)
        for temperature in (0.0, 1.0):
            assert draw([logits], [{"temperature": temperature}]) == [7]

    @given(seed=st.integers(0, 99))
    @settings(max_examples=30)
    def test_is_that_of_the_definitions(self, seed):
        rng = np.random.default_rng(seed)
        logits = rng.normal(scale=3, size=(3, VOCAB)).astype(np.float32)
        times = rng.integers(0, 4, (3, VOCAB)) * (rng.random((3, VOCAB)) < 0.3)
        prompt = rng.random((3, VOCAB)) < 0.2
        drawn = rng.uniform((0.5, -2, -2), (2, 2, 2), (3, 3))
        repetition, presence, frequency = drawn.T
        allowed = [sorted(rng.choice(VOCAB, 10, replace=False)) for _ in range(3)]
        expected = logits.astype(np.float64)
        for slot in range(3):
            for token in range(VOCAB):
                if prompt[slot, token] or times[slot, token]:
                    up = logits[slot, token] > 0
                    expected[slot, token] *= 1 / repetition[slot] if up else repetition[slot]
                if times[slot, token]:
                    expected[slot, token] -= presence[slot] + frequency[slot] * times[slot, token]
        expected[:, 4] += 1.5
        for slot in (0, 2):
            expected[slot, [t for t in range(VOCAB) if t not in allowed[slot]]] = -np.inf
        row = {"prompt_length": 3, "token_ids": [4, MAX], "biases": [1.5, 9.0]}
        each = [(*penalties, n != 1, words_of(allowed[n])) for n, penalties in enumerate(drawn)]
        names = "repetition", "presence", "frequency", "masked", "allowed"
        made = rules(*(row | dict(zip(names, values, strict=True)) for values in each))
        counts = (times + prompt * (1 << 24)).astype(np.int32)
        np.testing.assert_allclose(jax.jit(adjust)(logits, counts, made), expected, rtol=2e-5)


def test_log_probabilities():
    logits = np.log(np.asarray([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], np.float32)) + 7
    logs, ids, best = log_probabilities(jnp.asarray(logits), jnp.asarray([1, 2], jnp.int32), 2)
    np.testing.assert_allclose(np.exp(logs), [0.2, 0.8], rtol=1e-5)
    assert np.asarray(ids)[0].tolist() == [0, 2]
    np.testing.assert_allclose(np.exp(best)[0], [0.5, 0.3], rtol=1e-5)
    wanted = jnp.asarray([[1, 0], [1, -1]], jnp.int32)
    _, ids, best = log_probabilities(jnp.asarray(logits), wanted[:, 0], 2, wanted)
    np.testing.assert_allclose(np.exp(best), [[0.2, 0.5], [0.1, 0.1]], rtol=1e-5)
    assert np.asarray(ids)[0].tolist() == [1, 0]


class TestDividedColumns:
    """Results of devices that have only their columns each, the last one fewer."""

    def sampled(self, logits, rows, devices):
        columns = -(-logits.shape[1] // devices)
        padding = devices * columns - logits.shape[1]
        padded = np.pad(logits, ((0, 0), (0, padding)), constant_values=-np.inf)
        parts = np.stack(np.split(padded, devices, axis=1))

        def one(own):
            return sample_and_largest(own, state_of(rows), logits.shape[1])

        return [np.asarray(a) for a in jax.jit(jax.vmap(one, axis_name="tp"))(parts)]

    @pytest.mark.parametrize("devices", [2, 3])
    @pytest.mark.parametrize("random", [0, 1, 6])
    def test_the_tokens_are_those_of_all_columns(self, devices, random):
        logits = np.stack([random_logits(seed) for seed in range(8)])
        logits[1, [5, 30]] = 9.0  # the first of equals, on different devices
        rows = [{"temperature": float(row < random), "seed": row} for row in range(8)]
        tokens, largest = self.sampled(logits, rows, devices)
        assert (tokens == draw(logits, rows)).all()
        assert tokens[0, 1] == 5 or random > 1
        np.testing.assert_array_equal(largest, np.tile(logits.max(axis=1), (devices, 1)))

    def test_a_logit_that_is_no_number_is_found_by_all(self):
        logits = np.stack([random_logits(seed) for seed in range(3)])
        logits[0, 2], logits[1, 39] = np.nan, np.inf
        _, largest = self.sampled(logits, [{"temperature": 0.0}] * 3, 2)
        assert np.isfinite(largest).tolist() == [[False, False, True]] * 2
