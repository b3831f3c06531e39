"""`quantization_config` of released files, and what is refused of it.

`test_golden.py` has whole sections as GPTQModel and LLM Compressor write them.
"""

import json

from jaxserve.checkpoint.entries import Entries
from jaxserve.checkpoint.quantization_config import quantisation, stored_format
from tests import golden


def test_released():
    """`golden/checkpoint/packings.txt` lists sections, and how each is read.

    Scales of activations and of a cache are left unread. A section with several groups may leave
    open whose rows are quantised.
    """

    def said(section: str) -> str:
        entries = Entries({})
        found = quantisation(json.loads(section), entries)
        assert entries.problems == []
        return str(found)

    golden.check_each("checkpoint/packings.txt", said)


def test_none():
    for section in (None, {}):
        assert stored_format(Entries({"quantization_config": section})) == "plain"


def test_refused():
    """`golden/checkpoint/refused.txt` lists sections, and the problems of each."""

    def said(section: str) -> str:
        entries = Entries({})
        quantisation(json.loads(section), entries)
        assert entries.problems
        return "\n".join(sorted(entries.problems))

    golden.check_each("checkpoint/refused.txt", said)
