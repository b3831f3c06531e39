import msgspec
import numpy as np
import pytest

from jaxserve.pipeline.plan import (
    FROM_DEVICE,
    Bucket,
    SequenceRow,
    SlotRules,
    StepPlan,
    batch_array,
    page_table_array,
    rules_array,
    targets_array,
)
from jaxserve.step import BatchLayout, RulesLayout

PLAN = StepPlan(
    lane=1,
    number=7,
    bucket=Bucket(tokens=6, pages=3),
    groups=[
        [
            # The second chunk of a prompt, more to come.
            SequenceRow(slot=0, token_ids=[11, 12, 13], kv_length=7, page_ids=[4, 2], sample=False),
            # A decode token that the host has not seen.
            SequenceRow(
                slot=2,
                token_ids=[FROM_DEVICE],
                kv_length=9,
                page_ids=[5, 1, 3],
                sample=True,
                temperature=0.5,
                top_k=40,
                top_p=0.75,
                min_p=0.125,
                seed=2**32 - 1,
            ),
        ],
        [],
    ],
)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def test_batch_array():
    expected = [
        [
            *(11, 12, 13, FROM_DEVICE, 0, 0),  # token ids
            *(0, 3, 3, 4, 4),  # query start
            *(7, 0, 9, 0),  # kv length
            *(0, 0, 1, 0),  # sample
            *(0, 0, bits(0.5), 0),  # temperature
            *(0, 0, 40, 0),  # top_k
            *(bits(1.0), 0, bits(0.75), 0),  # top_p
            *(0, 0, bits(0.125), 0),  # min_p
            *(0, 0, -1, 0),  # seed
        ],
        [0] * (6 + 5 + 4 * 7),
    ]
    batch = batch_array(PLAN, slots=4)
    assert batch.dtype == np.int32
    assert batch.tolist() == expected


def test_page_table_array():
    table = page_table_array(PLAN, slots=4)
    assert table.dtype == np.int32
    assert table.tolist() == [
        [[4, 2, 0], [0, 0, 0], [5, 1, 3], [0, 0, 0]],
        [[0, 0, 0]] * 4,
    ]


def test_a_full_step():
    rows = [
        SequenceRow(slot=slot, token_ids=[slot], kv_length=1, page_ids=[slot], sample=True)
        for slot in range(4)
    ]
    plan = StepPlan(0, 0, Bucket(4, 1), [rows])
    fields = batch_array(plan, 4)[0]
    assert fields[:4].tolist() == [0, 1, 2, 3]
    assert fields[4:9].tolist() == [0, 1, 2, 3, 4]


def test_survives_the_wire():
    data = msgspec.msgpack.encode(PLAN)
    assert msgspec.msgpack.decode(data, type=StepPlan) == PLAN


def with_rules(*rules) -> StepPlan:
    """One group, three tokens a row, slots 0, 1, …; None: a row without rules."""
    rows = [
        SequenceRow(slot, [1, 2, 3], 3, [slot], sample=True, rules=one)
        for slot, one in enumerate(rules)
    ]
    return StepPlan(0, 0, Bucket(12, 1), [[], rows])


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
    array = rules_array(with_rules(None, full, SlotRules()), slots=3, vocab=61)
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
    for rules, where in ((None, "batch"), (SlotRules(fresh=True), "rules")):
        other = SequenceRow(0, [1], 1, [0], sample=True, rules=rules)
        plan = StepPlan(0, 0, Bucket(4, 1), [[other, row]])
        batch = BatchLayout(4, 2).fields(batch_array(plan, 2)[0])
        ruled = RulesLayout(61).fields(rules_array(plan, 2, 61)[0])
        assert batch["top_p"].view(np.float32)[1] == 0.75
        assert batch["temperature"].view(np.float32)[1] == (0.5 if where == "batch" else 0.0)
        assert ruled["temperature"].view(np.float32)[1, 0] == 0.5


def test_too_many_biases_are_refused():
    ids = np.zeros(385, "<i4").tobytes()
    with pytest.raises(ValueError, match="385 biases in a slot, at most 384 fit"):
        rules_array(with_rules(SlotRules(bias_ids=ids, biases=ids)), slots=1, vocab=61)


def test_targets_lie_where_their_tokens_do():
    rows = [
        SequenceRow(0, [1, 2], 2, [0], sample=False),
        SequenceRow(1, [3, 4, 5], 3, [1], sample=True, targets=[4, 5]),
        SequenceRow(2, [6, 7], 2, [2], sample=False, targets=[7, 8]),
    ]
    plan = StepPlan(0, 0, Bucket(8, 1), [rows, []])
    assert targets_array(plan).tolist() == [[0, 0, 4, 5, 0, 7, 8, 0], [0] * 8]


def test_what_a_plan_asks_for():
    def asks(**fields):
        row = SequenceRow(0, [1], 1, [0], **{"sample": True, **fields})
        plan = StepPlan(0, 0, Bucket(8, 1), [[], [row]])
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
        return plan.has_rules, plan.has_logprobs, plan.has_targets

    assert asks() == (False, False, False)
    assert asks(rules=SlotRules(allowed=b"abcd")) == (True, False, False)
    assert asks(logprobs=0) == (False, True, False)
    assert asks(logprobs=0, sample=False) == (False, False, False)
    assert asks(targets=[5]) == (False, False, True)
