"""Literal arrays. The scheduler's tests compare those of every plan with the full rows'."""

import jax
import numpy as np
import pytest

from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_arrays import (
    FROM_DEVICE,
    BatchLayout,
    LaneState,
    RulesLayout,
    rules_array,
    targets_array,
)
from jaxserve.roles.step_plan import NewSequence, SlotRules, StepPlan, words
from jaxserve.roles.written_steps import SequenceRow, plan_of_rows
from tests.jaxserve.roles.test_step_plan import PLAN


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def test_arrays_of_a_full_plan():
    arrays = LaneState(groups=2, slots=4, pages=5).step(PLAN)
    assert arrays.batch.dtype == arrays.page_table.dtype == np.int32
    assert arrays.batch.tolist() == [
        [
            *(11, 12, 13, FROM_DEVICE, 0, 0),  # token ids
            *(0, 3, 3, 4, 4),  # query start
            *(7, 0, 9, 0),  # kv length
            *(0, 0, 1, 0, 0),  # sample, spread
            *(0, 0, bits(0.5), 0),  # temperature
            *(0, 0, 40, 0),  # top_k
            *(bits(1.0), 0, bits(0.75), 0),  # top_p
            *(0, 0, bits(0.125), 0),  # min_p
            *(0, 0, -1, 0),  # seed
        ],
        [
            *(8, 0, 0, 0, 0, 0),
            *(0, 0, 1, 1, 1),
            *(0, 1, 0, 0),
            *(0, 1, 0, 0, 0),
            *(0, 0, 0, 0),
            *(0, 0, 0, 0),
            *(0, bits(1.0), 0, 0),
            *(0, 0, 0, 0),
            *(0, 0, 0, 0),
        ],
    ]
    assert arrays.page_table.tolist() == [
        [[4, 2, 0], [0, 0, 0], [5, 1, 3], [0, 0, 0]],
        [[0, 0, 0], [6, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]


def decode(rows, kv_lengths, pages=(), new=()) -> StepPlan:
    """A step of one token a row that says what is new and no more."""
    ones = np.ones(len(rows), np.int32)
    return StepPlan(
        1,
        8,
        Bucket(4, 3),
        columns=words(np.stack([np.asarray(rows), ones, np.asarray(kv_lengths), ones])),
        tokens=words(np.full(len(rows), FROM_DEVICE)),
        new_sequences=list(new),
        pages=words(np.asarray(pages, np.int32).reshape(-1, 3).T),
    )


def test_a_page_table_is_used_again_when_nobody_has_it():
    lane = LaneState(groups=2, slots=4, pages=5)
    lane.step(PLAN)
    first = lane.step(decode([2], [10])).page_table
    on_device = jax.device_put(first)  # on CPUs it may share the array's memory
    tables = {first.ctypes.data}
    del first
    for page in range(8):
        table = lane.step(decode([5], [page + 1], pages=[(5, 1, page)])).page_table
        assert table[1, 1].tolist() == [6, page, 0]
        tables.add(table.ctypes.data)
        assert lane.step(decode([5], [page + 2])).page_table is table
        anew = decode([5], [1], pages=[(5, 0, 6)], new=[NewSequence(5)])
        assert lane.step(anew).page_table[1, 1].tolist() == [6, 0, 0]
    assert len(tables) <= 3
    assert np.asarray(on_device)[1, 1].tolist() == [6, 0, 0]


def with_rules(*rules) -> StepPlan:
    """One group, three tokens a row, slots 0, 1, …; None: a row without rules."""
    rows = [
        SequenceRow(slot, [1, 2, 3], 3, [slot], sample=True, rules=one)
        for slot, one in enumerate(rules)
    ]
    return plan_of_rows(0, 0, Bucket(12, 1), [[], rows], slots=3)


def test_rules_array():
    full = SlotRules(
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        counts_from=9,
        fresh=True,
        prompt=np.asarray([3], "<u4").tobytes(),
        bias_ids=np.asarray([4, 60], "<i4").tobytes(),
        biases=np.asarray([1.0, -2.0], "<f4").tobytes(),
        allowed=np.asarray([2**32 - 1, 5], "<u4").tobytes(),
    )
    array = rules_array(with_rules(None, full, SlotRules()), groups=2, slots=3, vocab=61)
    assert array.dtype == np.int32
    fields = RulesLayout(61).fields(array)
    none, beyond = [1.0, 0.0, 0.0], 2**31 - 1

    def penalties(group, slot):
        names = ("repetition", "presence", "frequency")
        return [fields[name].view(np.float32)[group, slot, 0] for name in names]

    assert penalties(1, 1) == [1.5, -0.5, 0.25]
    assert [penalties(0, 1), penalties(1, 0), penalties(1, 2)] == [none] * 3
    assert fields["prompt_length"][1, :, 0].tolist() == [beyond, 9, beyond]
    assert fields["fresh"][1, :, 0].tolist() == [0, 1, 0]
    assert fields["masked"][1, :, 0].tolist() == [0, 1, 0]
    assert fields["token_ids"][1, 1, :3].tolist() == [4, 60, beyond]
    assert (fields["token_ids"][1, [0, 2]] == beyond).all()
    assert fields["biases"].view(np.float32)[1, 1, :3].tolist() == [1.0, -2.0, 0.0]
    assert fields["allowed"][1, 1].tolist() == [-1, 5]
    assert fields["prompt"][1, 1].tolist() == [3, 0]


def test_where_there_are_rules_the_temperature_is_among_them():
    row = SequenceRow(1, [1], 1, [0], sample=True, temperature=0.5, top_p=0.75)
    for rules, batch_temperature in ((None, 0.5), (SlotRules(fresh=True), 0.0)):
        other = SequenceRow(0, [1], 1, [0], sample=True, rules=rules)
        plan = plan_of_rows(0, 0, Bucket(4, 1), [[other, row]], slots=2)
        batch = BatchLayout(4, 2).fields(LaneState(1, 2, 1).step(plan).batch[0])
        assert batch["top_p"].view(np.float32)[1] == 0.75
        assert batch["temperature"].view(np.float32)[1] == batch_temperature
    ruled = RulesLayout(61).fields(rules_array(plan, 1, 2, 61)[0])
    assert ruled["temperature"].view(np.float32)[:, 0].tolist() == [0.0, 0.5]


def test_too_many_biases_are_refused():
    ids = np.zeros(385, "<i4").tobytes()
    plan = with_rules(SlotRules(bias_ids=ids, biases=ids))
    with pytest.raises(ValueError, match="385 biases in a slot, at most 384 fit"):
        rules_array(plan, groups=2, slots=3, vocab=61)


def test_targets_lie_where_their_tokens_do():
    rows = [
        SequenceRow(0, [1, 2], 2, [0], sample=False),
        SequenceRow(1, [3, 4, 5], 3, [1], sample=True, targets=[4, 5]),
        SequenceRow(2, [6, 7], 2, [2], sample=False, targets=[7, 8]),
    ]
    plan = plan_of_rows(0, 0, Bucket(8, 1), [rows, []], slots=3)
    assert targets_array(plan, groups=2, slots=3).tolist() == [[0, 0, 4, 5, 0, 7, 8, 0], [0] * 8]


def test_fields_of_modules_come_last():
    """3 tokens, 2 slots; the order of the others is that of `test_step_arrays.py`."""
    layout = BatchLayout(3, 2, modules=3)
    assert layout.width == 3 + 3 + 1 + 2 * 7 + 2 * 3
    assert layout.fields(np.arange(layout.width))["upcoming"].tolist() == [21, 22, 23, 24, 25, 26]


def test_rules_in_order():
    """A vocabulary of 70 tokens: bitmasks of three words."""
    layout = RulesLayout(70)
    assert layout.width == 7 + 2 * 384 + 2 * 3
    fields = layout.fields(np.arange(2 * layout.width).reshape(2, -1))
    assert fields["temperature"].tolist() == [[0], [781]]
    assert fields["masked"].tolist() == [[6], [787]]
    assert fields["token_ids"].shape == fields["biases"].shape == (2, 384)
    assert fields["allowed"][0].tolist() == [775, 776, 777]
    assert fields["prompt"][0].tolist() == [778, 779, 780]
