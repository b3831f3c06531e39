"""Reading of entries in general; what the families make of theirs is in their own tests."""

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.checkpoint.entries import HARMLESS, Entries, yarn_magnitude
from jaxserve.config.model import RouterSpec
from jaxserve.errors import CheckpointError
from tests import golden

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def test_what_is_read_and_what_is_said_of_anything_else():
    """`golden/checkpoint/entries.txt` lists calls, the values, and all problems after that."""

    def said(line: str) -> str:
        call, _, tree = line.partition(" of ")
        entries = Entries(eval(tree, globals()), ["known"])
        value = eval(f"entries.{call}", {"entries": entries})
        entries.refuse_unread()
        return "\n".join([repr(value), *entries.problems])

    golden.check_each("checkpoint/entries.txt", said)


@given(JSON, st.sampled_from(["size", "number", "flag", "section", "any", "yarn"]))
def test_whatever_json_says_there_is_a_value_or_a_problem(value: Any, method: str):
    entries = Entries({"name": value, "factor": value})
    getattr(entries, method)(*[] if method == "yarn" else ["name"])
    entries.refuse_unread()
    assert all(isinstance(problem, str) for problem in entries.problems)


def test_entries_that_are_passed_over_in_sections_have_their_path():
    tree = {"rope_theta": 1e4, "rope_scaling": {"type": "default", "note": 1}}
    entries = Entries(tree, ["rope_scaling.note"])
    entries.rope("head_dim", 8)
    entries.refuse_unread()
    assert entries.problems == []


def test_harmless_entries():
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
def test_any_other_name_is_refused(name: str):
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


def test_magnitude():
    def call(entries: dict[str, Any]) -> float:
        return round(Entries(YARN | entries).yarn().magnitude, 6)

    golden.check_values("checkpoint/magnitudes.txt", call, globals())


def test_problems_of_rope():
    """`golden/checkpoint/rope.txt` lists them."""

    def said(section: str) -> str:
        entries = Entries({"rope_theta": 1e4} | json.loads(section))
        entries.rope("head_dim", 8)
        assert entries.problems
        return "\n".join(entries.problems)

    golden.check_each("checkpoint/rope.txt", said)


def test_yarn_magnitude():
    """Used by DeepSeek-V3 and Kimi K2: it makes the scale of scores 192^-0.5 m^2."""
    golden.check_values("checkpoint/yarn_magnitudes.txt", yarn_magnitude, {})


def test_routers_that_fit():
    for rule in (
        RouterSpec(experts=256, top_k=8, groups=8, top_groups=4),
        RouterSpec(experts=384, top_k=8, groups=1, top_groups=1),
        RouterSpec(experts=8, top_k=4, groups=4, top_groups=2),
        RouterSpec(experts=1, top_k=1),
    ):
        entries = Entries({})
        entries.router(rule, "e", "k")
        assert entries.problems == []


def test_problems_of_routers():
    """`golden/checkpoint/routers.txt` lists them."""

    def said(rule: str) -> str:
        entries = Entries({})
        entries.router(RouterSpec(**json.loads(rule)), "e", "k")
        (problem,) = entries.problems
        return problem

    golden.check_each("checkpoint/routers.txt", said)
