import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, strategies
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.config.special_tokens import SpecialTokens
from jaxserve.errors import CheckpointError
from jaxserve.text.tiktoken_files import TiktokenVocabulary
from jaxserve.text.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer
from jaxserve.text.vocabulary import TokenizersVocabulary
from tests import golden
from tests.jaxserve.text import ranks

CORPUS = ["def add(a, b):\n    return a + b\n", "größer 你好 🙂 naïve café", "the quick brown fox"]


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE of 300 tokens: <s> = 0, </s> = 1, all 256 bytes, some merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece's form (Llama 2): ▁ for spaces, <0x..> for bytes, the first space stripped."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁ab", "ab", "é"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁a", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<s>",
        )
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


ENDS = SpecialTokens(bos=0, eos=frozenset({1}))
BYTE_LEVEL = Tokenizer(TokenizersVocabulary(byte_level()), ENDS)
BYTE_FALLBACK = Tokenizer(TokenizersVocabulary(byte_fallback()), ENDS)
RANKED = Tokenizer(TiktokenVocabulary(ranks.RANKS, ranks.ADDED), SpecialTokens(bos=ranks.BASE))


def write_folder(folder: Path, tokenizer, **configs: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


@golden.table("text/special_ids.yaml")
def test_special_ids_come_from_every_configuration(tmp_path, configs, bos, eos, pad) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), **configs))
    found = tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id
    assert found == (bos, set(eos), pad)
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize("text", ["a fox", "<s>a fox"])
@pytest.mark.parametrize("by", ["config", "post_processor", "both"])
def test_bos_comes_once(tmp_path: Path, by: str, text: str) -> None:
    raw = byte_level()
    if by != "config":
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    names = {"bos_token": "<s>"} | ({} if by == "post_processor" else {"add_bos_token": True})
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, raw, tokenizer_config=names))
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert ids.count(1) == 0  # a prompt does not end with eos
    assert tokenizer.decode(ids) == "a fox"


def test_no_bos_where_the_configuration_says_so(tmp_path: Path) -> None:
    raw = byte_level()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "add_bos_token": False}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, raw, tokenizer_config=names))
    assert 0 not in tokenizer.encode("a fox")


@pytest.mark.parametrize("text", ["<s>a fox", "a fox"])
def test_a_chat_prompt_gets_no_second_bos_and_none_that_its_template_left_out(text: str) -> None:
    adding = Tokenizer(TokenizersVocabulary(byte_level()), SpecialTokens(bos=0, add_bos=True))
    assert adding.encode(text, add_bos=False).count(0) == text.count("<s>")
    assert adding.encode(text).count(0) == 1


def test_a_vocabulary_may_be_smaller_than_the_models_but_not_larger(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), config={"vocab_size": 384})
    assert Tokenizer.from_folder(folder).vocab_size == 300
    write_folder(tmp_path, byte_level(), config={"text_config": {"vocab_size": 299}})
    with pytest.raises(CheckpointError, match="token ids go up to 299, but vocab_size = 299 in"):
        Tokenizer.from_folder(folder)


def test_tokens_by_their_spelling() -> None:
    assert BYTE_LEVEL.token_to_id("</s>") == 1
    assert BYTE_LEVEL.token_to_id("no such token") is None
    assert BYTE_LEVEL.special_ids == {0, 1}


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(2)
    raw.enable_padding(length=50)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, raw))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"


def test_a_lone_surrogate_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="lone surrogate at 1"):
        BYTE_LEVEL.encode("a\ud800")


def test_weights_without_a_tokenizer_leave_token_ids(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7, "vocab_size": 300}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.knows_text, tokenizer.eos_token_ids) == (False, {7})
    found = tokenizer.vocab_size, tokenizer.decode([1, 2]), tokenizer.has_text(1)
    assert found == (300, "", False)
    with pytest.raises(ValueError, match=r"no tokenizer \(tokenizer.json or"):
        tokenizer.encode("hello")
    assert BYTE_LEVEL.knows_text


def test_every_broken_file_is_listed(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "config.json").write_text('{"eos_token_id": ')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [true, -3]}')
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    for said in (
        "tokenizer.json is truncated or no tokenizer",
        "config.json is truncated or no JSON",
    ):
        assert said in str(caught.value)
    for wrong in (True, -3):
        assert f"eos_token_id {wrong} is no token id" in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file tokenizer\.json or tiktoken\.model"):
        Tokenizer.from_folder(tmp_path)
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"eos_token": "<|end|>"})
    with pytest.raises(CheckpointError, match=r"eos_token '<\|end\|>' .* is no token"):
        Tokenizer.from_folder(folder)


def deltas_of(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


CHUNKS = strategies.lists(strategies.lists(strategies.integers(0, 320), max_size=12), max_size=30)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, RANKED], ids=["bytes", "ranks"])
@given(chunks=CHUNKS)
def test_deltas_join_to_the_whole_text(tokenizer: Tokenizer, chunks: list[list[int]]) -> None:
    """Any ids at all: special ones, added and unknown ones, parts of characters."""
    everything = [token_id for chunk in chunks for token_id in chunk]
    assert "".join(deltas_of(tokenizer, chunks)) == tokenizer.decode(everything)


TEXTS = strategies.text(alphabet="你好🙂é a") | strategies.text()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, RANKED], ids=["bytes", "ranks"])
@given(text=TEXTS, size=strategies.integers(1, 5))
def test_text_streams_in_whole_characters(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text)
    deltas = deltas_of(tokenizer, [ids[start : start + size] for start in range(0, len(ids), size)])
    assert "".join(deltas) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


@given(strategies.lists(strategies.sampled_from(range(128, 256)), max_size=60))
def test_deltas_join_for_any_run_of_bytes_above_ascii(values: list[int]) -> None:
    alphabet = byte_to_token()
    ids = [alphabet[value] for value in values]
    deltas = deltas_of(BYTE_LEVEL, [[token_id] for token_id in ids])
    assert "".join(deltas) == bytes(values).decode(errors="replace") == BYTE_LEVEL.decode(ids)


def byte_to_token() -> dict[int, int]:
    """Byte → id of its token, by the byte-level alphabet of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    raw = byte_level()
    return {byte: raw.token_to_id(letter) for byte, letter in letters.items()}  # type: ignore[misc]


def test_chat_tokens_between_characters_and_inside_one() -> None:
    end, call = RANKED.token_to_id("<|im_end|>"), RANKED.token_to_id("<|tool_call_begin|>")
    ids = [*RANKED.encode("🙂"), end, *RANKED.encode("你<|tool_call_begin|>x")]
    assert deltas_of(RANKED, [[i] for i in ids]) == ["🙂", "", "你", "<|tool_call_begin|>", "x", ""]
    first, second = ranks.RANKS[b"\xf0\x9f"], ranks.RANKS[b"\x99"]
    last = ranks.RANKS[b"\x82"]
    # A special token has no bytes: the character around it is whole.
    assert deltas_of(RANKED, [[i] for i in (first, end, second, last)]) == ["", "", "", "🙂", ""]
    # One that has text cuts it.
    assert (
        "".join(deltas_of(RANKED, [[first], [call], [last]])) == "\ufffd<|tool_call_begin|>\ufffd"
    )


@given(strategies.text(alphabet="ab é你🙂", min_size=1))
def test_byte_fallback_and_leading_spaces(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text)
    assert "".join(deltas_of(BYTE_FALLBACK, [[token_id] for token_id in ids])) == text


def test_spaces_survive_special_tokens_between_words() -> None:
    ids = [261, 1, 1, 1, 261, 0, 261]  # ▁a </s>… ▁a <s> ▁a
    assert deltas_of(BYTE_FALLBACK, [[i] for i in ids]) == ["a", "", "", "", " a", "", " a", ""]


class _CountingTokenizer(Tokenizer):
    decoded = 0

    def decode(self, token_ids, *, special=False) -> str:  # type: ignore[no-untyped-def]
        self.decoded += len(token_ids)
        return super().decode(token_ids, special=special)


@pytest.mark.parametrize("token", ["a", "b\x80", "</s>"])
def test_the_cost_is_linear(token: str) -> None:
    """Even for bytes that never become a character, every id is decoded a few times only."""
    tokenizer = _CountingTokenizer(TokenizersVocabulary(byte_level()), ENDS)
    alphabet = byte_to_token()
    ids = {"a": [alphabet[97]], "b\x80": [alphabet[0x80]], "</s>": [1]}[token] * 4000
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    assert text == {"a": "a", "b\x80": "\ufffd", "</s>": ""}[token] * 4000
    assert tokenizer.decoded < 40 * 4000


def run_matcher(stops: list[str], chunks: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = []
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.finish()], None


def test_stop_strings() -> None:
    """The first to be complete wins, and the longest of a tie. One may begin within itself."""
    assert run_matcher(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run_matcher(["bc", "abc"], ["xabcd"]) == (["x"], "abc")
    assert run_matcher(["aab"], ["aa", "ab"]) == (["", "a"], "aab")
    assert run_matcher(["aabaaac"], ["aabaaabaaac"]) == (["aaba"], "aabaaac")


STOPS = strategies.lists(strategies.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


@given(STOPS, strategies.lists(strategies.text(alphabet="abc", max_size=6), max_size=12))
def test_matches_a_plain_search_whatever_the_chunks(stops: list[str], chunks: list[str]) -> None:
    text = "".join(chunks)
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    out, stop = run_matcher(stops, chunks)
    if ends:
        end, _, expected = min(ends)
        assert ("".join(out), stop) == (text[: end - len(expected)], expected)
    else:
        assert ("".join(out), stop) == (text, None)


@given(STOPS, strategies.text(alphabet="abc", max_size=30))
def test_nothing_is_held_back_longer_than_needed(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    out, stop = matcher.push(text)
    if stop is None:
        held = text[len(out) :]
        assert held == "" or any(candidate.startswith(held) for candidate in stops)
