import tokenizers
from tokenizers import models, processors

from jaxserve.text.vocabulary import TokenizersVocabulary
from tests import golden
from tests.jaxserve.text.letters import raw_letters


def test_letters():
    vocabulary = TokenizersVocabulary(raw_letters())
    assert (vocabulary.size, vocabulary.longest_token) == (258, 4)
    assert vocabulary.special_ids == {0, 1}
    assert vocabulary.token_to_id("</s>") == 1
    has_text = [vocabulary.has_text(token_id) for token_id in (1, 2, 257, 258)]
    assert has_text == [False, True, True, False]
    ids = vocabulary.encode("<s>é</s>")
    assert (ids[0], ids[-1], len(ids)) == (0, 1, 4)
    assert vocabulary.decode(ids) == "é"
    assert vocabulary.decode(ids[:2]) == "\ufffd"


def test_bytes_of_tokens():
    """Spellings of SentencePiece and of byte-level BPE."""
    words = {"<unk>": 0, "▁é": 1, "<0x0A>": 2, "<0x0A>▁": 3, "a": 4}
    vocabulary = TokenizersVocabulary(tokenizers.Tokenizer(models.WordLevel(words, "<unk>")))
    found = [vocabulary.token_bytes(token_id) for token_id in range(6)]
    assert found == [b"<unk>", " é".encode(), b"\n", b"<0x0A> ", b"a", b""]
    letters = TokenizersVocabulary(raw_letters())
    (id_of_a,) = letters.encode("a")
    assert [letters.token_bytes(token_id) for token_id in (1, id_of_a)] == [b"</s>", b"a"]


@golden.table("text/before_a_prompt.yaml")
def test_what_comes_before_a_prompt(template, add_bos, expected):
    raw = raw_letters()
    raw.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert TokenizersVocabulary(raw).prefix(0, add_bos) == expected
