"""Reading of entries in general; what the families make of theirs is in their own tests."""

import json
import math
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoint.entries import HARMLESS, Entries, yarn_magnitude
from jaxserve.config.model import Rope, Router, Yarn
from jaxserve.errors import CheckpointError
from tests import golden

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


class TestKinds:
    """The first of several spellings, a default, and what is said of anything else."""

    @pytest.mark.parametrize(
        ("method", "value", "expected"),
        [
            ("size", 7, 7),
            ("number", 7, 7.0),
            ("number", 1e-6, 1e-6),
            ("flag", True, True),
            ("flag", False, False),
            ("section", {"a": 1}, {"a": 1}),
            ("any", [1], [1]),
            ("any", None, None),
        ],
    )
    def test_are_read(self, method: str, value: Any, expected: Any):
        entries = Entries({"name": value})
        read = getattr(entries, method)("name")
        assert (read, type(read)) == (expected, type(expected))
        entries.refuse_unread()
        assert entries.problems == []

    @pytest.mark.parametrize(
        ("method", "values", "wanted"),
        [
            ("size", [0, 7.0, True, "7"], "a whole number from 1"),
            ("number", [0, -1.5, math.inf, math.nan, False, [1.0]], "a number above 0"),
            ("flag", [1, "true"], "true or false"),
            ("section", [[], 3], "an object"),
        ],
    )
    def test_problems(self, method: str, values: list[Any], wanted: str):
        for value in values:
            entries = Entries({"name": value})
            getattr(entries, method)("name")
            assert entries.problems == [f"name = {value!r} is not {wanted}"]

    def test_missing_and_long_values(self):
        entries = Entries({"none": None, "long": "x" * 100})
        entries.size("none")
        entries.section("long")
        assert entries.problems == ["none is missing", f"long = '{'x' * 76}... is not an object"]

    def test_several_spellings(self):
        entries = Entries({"new": None, "old": 3, "older": 4})
        assert entries.size("new", "old", "older") == 3
        assert entries.size("a", "b", default=5) == 5
        entries.size("a", "b")
        assert entries.problems == ["a or b is missing"]
        # All of them are names of one thing, so none is left over.
        entries.refuse_unread()
        assert entries.problems == ["a or b is missing"]

    def test_least(self):
        assert Entries({"n": 0}).size("n", least=0) == 0
        entries = Entries({"n": 1})
        entries.size("n", least=2)
        assert entries.problems == ["n = 1 is not a whole number from 2"]

    @given(JSON, st.sampled_from(["size", "number", "flag", "section", "any", "yarn"]))
    def test_whatever_json_says_there_is_a_value_or_a_problem(self, value: Any, method: str):
        entries = Entries({"name": value, "factor": value})
        getattr(entries, method)(*[] if method == "yarn" else ["name"])
        entries.refuse_unread()
        assert all(isinstance(problem, str) for problem in entries.problems)


class TestLayers:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [([2, 0], {0, 2}), ("0, 2", {0, 2}), ("", set()), ([], set()), (["1"], {1})],
    )
    def test_spellings(self, value: Any, expected: set[int]):
        assert Entries({"layers": value}).layers("layers", (9,)) == expected
        assert Entries({}).layers("layers", (9,)) == {9}

    @pytest.mark.parametrize("value", [3, [1.5], [True], {"1": 2}, "1;2", [[1]], ["x"]])
    def test_anything_else_is_a_problem(self, value: Any):
        entries = Entries({"layers": value})
        assert entries.layers("layers", ()) == frozenset()
        assert entries.problems == [f"layers = {value!r} is not a list of layers"]


class TestOnly:
    def test_missing_or_equal(self):
        entries = Entries({"act": "silu", "bias": False, "none": None})
        entries.only("act", "silu", "swish")
        entries.only("bias", False)
        entries.only("none", 3)
        entries.only("missing", 3)
        assert entries.problems == []

    @pytest.mark.parametrize(
        ("value", "known", "wanted"),
        [
            ("gelu", ("silu", "swish"), "'silu' or 'swish'"),
            (0, (False,), "False"),
            (True, (1,), "1"),
        ],
    )
    def test_anything_else(self, value: Any, known: tuple[Any, ...], wanted: str):
        entries = Entries({"act": value})
        entries.only("act", *known)
        assert entries.problems == [f"act = {value!r} is not supported, only {wanted}"]


class TestUnread:
    def test_is_refused_by_name(self):
        entries = Entries({"b": 2, "a": "x", "c": 3, "known": 1}, ["c"])
        entries.size("known")
        entries.refuse_unread()
        assert [problem.partition(" is not known")[0] for problem in entries.problems] == [
            *("a = 'x'", "b = 2")
        ]

    @pytest.mark.parametrize("value", [None, False, {}, [], ""])
    def test_what_is_switched_off_is_fine(self, value: Any):
        entries = Entries({"sparse_attention_config": value})
        entries.refuse_unread()
        assert entries.problems == []

    @pytest.mark.parametrize("value", [0, 0.0, True, "none", [0], {"a": None}])
    def test_what_may_be_a_setting_is_not(self, value: Any):
        entries = Entries({"soft_cap": value})
        entries.refuse_unread()
        assert len(entries.problems) == 1

    def test_in_sections_too(self):
        """Harmless names are harmless at the top level alone."""
        tree = {"rope_theta": 1e4, "rope_scaling": {"type": "default", "note": 1, "dtype": "x"}}
        entries = Entries(tree, ["rope_scaling.note", "dtype"])
        entries.rope("head_dim", 8)
        (problem,) = entries.problems
        assert problem.startswith("rope_scaling.dtype = 'x' is not known")

    def test_harmless_entries(self):
        entries = Entries(dict.fromkeys(HARMLESS, 7))
        entries.refuse_unread()
        assert entries.problems == []
        mathematics = {
            *("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"),
            *("dual_chunk_attention_config", "sliding_window", "head_dim", "hidden_act"),
            *("index_topk", "quantization_config", "rms_norm_eps", "rope_theta", "swiglu_limit"),
            "tie_word_embeddings",
        }
        assert not mathematics & HARMLESS

    @given(st.text(string.ascii_lowercase + "_", min_size=1).filter(lambda n: n not in HARMLESS))
    def test_any_other_name_is_refused(self, name: str):
        entries = Entries({name: 1})
        entries.refuse_unread()
        assert len(entries.problems) == 1


def test_all_problems_in_one_message():
    entries = Entries({"a": "x", "b": -1, "d": 3})
    entries.size("a")
    entries.number("b")
    entries.flag("c")
    entries.refuse_unread()
    with pytest.raises(
        CheckpointError, match=r"^config\.json: a = 'x' .*; b = -1 .*; d = 3 is not"
    ):
        entries.raise_problems()
    Entries({}).raise_problems()


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


class TestRope:
    @pytest.mark.parametrize(
        "tree",
        [
            {"rope_theta": 500000, "rope_scaling": None},
            {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}, "rope_theta": 1},
        ],
    )
    def test_plain(self, tree: dict[str, Any]):
        entries = Entries(tree)
        assert entries.rope("head_dim", 8, interleaved=True) == Rope(theta=5e5, interleaved=True)
        entries.refuse_unread()
        assert entries.problems == []

    @pytest.mark.parametrize(
        "tree",
        [
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN}},
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", **YARN}},
        ],
    )
    def test_yarn(self, tree: dict[str, Any]):
        entries = Entries(tree)
        rope = entries.rope("head_dim", 8)
        entries.refuse_unread()
        assert entries.problems == []
        magnitude = 0.1 * math.log(4) + 1
        assert rope == Rope(
            theta=1e4, yarn=Yarn(factor=4.0, original_positions=64, magnitude=magnitude)
        )

    @pytest.mark.parametrize(
        ("entries", "magnitude"),
        [
            ({}, 1.138629436111989),
            ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
            # 1.09704 / 1.16636
            ({"mscale": 0.7, "mscale_all_dim": 1.2}, 0.940571),
            # One alone does not count.
            ({"mscale": 0.7}, 1.138629436111989),
            ({"mscale": 0.7, "mscale_all_dim": 0}, 1.138629436111989),
            ({"mscale": 0.7, "mscale_all_dim": None}, 1.138629436111989),
            ({"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.25),
        ],
    )
    def test_magnitude(self, entries: dict[str, Any], magnitude: float):
        yarn = Entries(YARN | entries).yarn()
        assert yarn.magnitude == pytest.approx(magnitude, rel=1e-5)

    def test_options(self):
        yarn = Entries(YARN | {"beta_fast": 1, "beta_slow": 2.0, "truncate": False}).yarn()
        assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (1.0, 2.0, False)

    def test_problems(self):
        """`golden/checkpoint/rope.txt` lists them."""

        def said(section: str) -> str:
            entries = Entries({"rope_theta": 1e4} | json.loads(section))
            entries.rope("head_dim", 8)
            assert entries.problems
            return "\n".join(entries.problems)

        golden.check_each("checkpoint/rope.txt", said)

    def test_odd(self):
        entries = Entries({"rope_theta": 1e4})
        entries.rope("qk_rope_head_dim", 7)
        assert entries.problems == ["qk_rope_head_dim = 7 is odd, and RoPE turns pairs"]


@pytest.mark.parametrize(
    ("factor", "mscale", "expected"),
    # m of DeepSeek-V3 and Kimi K2: with it the scores' scale is 192^-0.5 m^2.
    [(40.0, 1.0, 1.3688879), (32.0, 1.0, 1.3465736), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0)],
)
def test_yarn_magnitude(factor: float, mscale: float, expected: float):
    assert yarn_magnitude(factor, mscale) == pytest.approx(expected, rel=1e-7)


def test_routers_that_fit():
    for rule in (
        Router(experts=256, top_k=8, groups=8, top_groups=4),
        Router(experts=384, top_k=8, groups=1, top_groups=1),
        Router(experts=8, top_k=4, groups=4, top_groups=2),
        Router(experts=1, top_k=1),
    ):
        entries = Entries({})
        assert entries.router(rule, "e", "k") is rule
        assert entries.problems == []


def test_problems_of_routers():
    """`golden/checkpoint/routers.txt` lists them."""

    def said(rule: str) -> str:
        entries = Entries({})
        entries.router(Router(**json.loads(rule)), "e", "k")
        (problem,) = entries.problems
        return problem

    golden.check_each("checkpoint/routers.txt", said)
