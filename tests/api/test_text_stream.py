"""Incremental detokenisation equals decoding everything at once."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from headway.api.gguf_tokenizer import build_tokenizer
from headway.api.text_stream import WindowStream, byte_alphabet
from headway.api.tokenizer import Tokenizer
from tests.api.tiny_tokenizers import byte_level_metadata, header, sentencepiece_metadata
from tests.examples import examples


def word_piece() -> Backend:
    words = ["[UNK]", "[CLS]", "hel", "##lo", "world", ".", ",", "'", "##s", "do"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[CLS]"])
    return backend


TOKENIZERS = {
    "byte-level": Tokenizer(build_tokenizer(header(byte_level_metadata()))),
    "sentencepiece": Tokenizer(build_tokenizer(header(sentencepiece_metadata()))),
    "sentencepiece without prefix": Tokenizer(build_tokenizer(header(sentencepiece_metadata(add_space_prefix=False)))),
    "word pieces": Tokenizer(word_piece()),
}
SMILE = "😀".encode()


def run(tokenizer: Tokenizer, ids: Sequence[int], tail: Sequence[int] = (), skip: bool = True) -> list[str]:
    stream = tokenizer.new_stream(tail, skip)
    return [*(stream.step(i) for i in ids), stream.flush()]


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    spelling = {b: c for c, b in byte_alphabet().items()}
    names = [spelling[b] if tokenizer.backend.token_to_id("<0x00>") is None else f"<0x{b:02X}>" for b in data]
    found = [tokenizer.backend.token_to_id(name) for name in names]
    return [i for i in found if i is not None]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@examples(150)
def test_any_ids(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # Half of the draws from the byte tokens' part, one beyond the vocabulary.
    size = tokenizer.vocab_size
    ids = data.draw(st.lists(st.one_of(st.integers(0, size), st.integers(min(100, size - 1), size)), max_size=20))
    assert "".join(run(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@given(text=st.text(max_size=12), cut=st.integers(0, 40))
@examples(150)
def test_prompt_and_completion_of_one_text(name: str, text: str, cut: int) -> None:
    """However valid text is cut in two, the completion is what the prompt's own text leaves out."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, completion = ids[:cut], ids[cut:]
    data = b"".join(map(tokenizer.token_bytes, prompt))
    before = codecs.getincrementaldecoder("utf-8")().decode(data)  # the characters that are whole
    if name == "sentencepiece" and prompt:
        before = before[1:]  # decoding drops the first space
    whole = tokenizer.decode(ids)
    assert whole == text
    assert "".join(run(tokenizer, completion, prompt)) == whole[len(before) :]


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_character_spread_over_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [*bytes_as_ids(tokenizer, SMILE), *tokenizer.encode("hello", add_special_tokens=False)[-1:]]
    pieces = run(tokenizer, ids)
    assert pieces[:3] == ["", "", ""]
    assert "".join(pieces).startswith("😀")
    assert "\ufffd" not in "".join(pieces)


def test_byte_level_gives_a_character_as_soon_as_it_is_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert run(tokenizer, bytes_as_ids(tokenizer, SMILE)) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_unfinished_character_is_flushed(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = bytes_as_ids(tokenizer, SMILE[:3])
    pieces = run(tokenizer, ids)
    assert pieces[:-1] == [""] * 3
    assert pieces[-1] == tokenizer.decode(ids)
    assert set(pieces[-1]) == {"\ufffd"}


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_prompt_ends_inside_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = bytes_as_ids(tokenizer, b"a" + SMILE)
    assert "".join(run(tokenizer, ids[3:], ids[:3])) == "😀"


def test_skipped_special_token_inside_a_character() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = bytes_as_ids(tokenizer, SMILE)
    with_special = [*ids[:2], 0, *ids[2:]]
    assert "".join(run(tokenizer, with_special)) == "😀" == tokenizer.decode(with_special)
    shown = "".join(run(tokenizer, with_special, skip=False))
    assert shown == tokenizer.decode(with_special, skip_special_tokens=False)
    assert "<|end|>" in shown


def test_leading_space_depends_on_the_prompt() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    word = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(run(tokenizer, word)) == "hello"
    assert "".join(run(tokenizer, word, word)) == " hello"
    assert "".join(run(tokenizer, word, [1])) == "hello"  # only <s> before it, which has no text


def test_special_token_between_words_keeps_the_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    word = tokenizer.encode("hello", add_special_tokens=False)
    assert run(tokenizer, [*word, 2, *word]) == ["hello", "", " hello", ""]


def test_ids_without_text_do_not_become_the_context() -> None:
    """Behind such an id alone a decoder that treats the start of a text differently would see a start."""
    pieces = ["x", "", " y"]
    stream = WindowStream(
        lambda ids: "".join(pieces[i] for i in ids).removeprefix(" "), lambda _: False, lambda _: None, ()
    )
    assert [stream.step(0), stream.step(1), stream.step(2), stream.flush()] == ["x", "", " y", ""]


def test_replacement_characters_are_believed_after_a_while() -> None:
    """A decoder that never stops giving U+FFFD must not hold the text back for ever."""
    stream = WindowStream(lambda ids: "\ufffd" * len(ids), lambda _: False, lambda _: None, ())
    assert any(stream.step(0) for _ in range(40))
