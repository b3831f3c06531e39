import msgspec
import numpy as np

from jaxserve.pipeline.plan import (
    FROM_DEVICE,
    Bucket,
    SequenceRow,
    StepPlan,
    batch_array,
    page_table_array,
)

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
