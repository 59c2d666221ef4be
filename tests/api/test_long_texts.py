"""Texts that clients make as long as they like: how little of them is looked at, and that nothing that fits is refused."""

from __future__ import annotations

import asyncio
import functools
import threading
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from headway.api import long_texts
from headway.api.long_texts import LONG_TEXT_CHARS, TextLanes, encode_bounded
from headway.api.text_stream import byte_alphabet
from headway.api.tokenizer import Tokenizer
from headway.core.errors import InvalidRequestError
from tests.examples import examples

OPTIONS = {"add_special_tokens": False}


def byte_level(
    *, split: bool = True, normalizer: Any = None, added: AddedToken | None = None, missing: bytes = b""
) -> Tokenizer:
    """Bytes, and tokens for up to 64 blanks and up to 16 times "a"."""
    vocab = {letter: i for i, (letter, byte) in enumerate(byte_alphabet().items()) if byte not in missing}
    merges = []
    for letter, longest in (("Ġ", 64), ("a", 16)):
        size = 1
        while size < longest:
            merges.append((letter * size, letter * size))
            size *= 2
            vocab[letter * size] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if added is not None:
        backend.add_tokens([added])
    return Tokenizer(backend)


def fallback_vocab() -> list[str]:
    return ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "aa", "aaaa"]


def sentencepiece_bpe(fallback: bool = True, fuse: bool = False) -> Tokenizer:
    """No pre-tokenizer; blanks are spelled; unknown characters are bytes, or <unk>."""
    vocab = {piece: i for i, piece in enumerate(fallback_vocab())}
    model = models.BPE(
        vocab=vocab,
        merges=[("▁", "a"), ("a", "a"), ("aa", "aa")],
        unk_token="<unk>",
        byte_fallback=fallback,
        fuse_unk=fuse,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Tokenizer(backend)


def unigram(fallback: bool) -> Tokenizer:
    pieces = [(piece, -1.0 - i / 100) for i, piece in enumerate(fallback_vocab())]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    vocab = {"[UNK]": 0, "a": 1, "##a": 2, "b": 3, "hello": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(backend)


SHRINKING = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes, one piece": lambda: byte_level(split=False),
    "bytes, some of which have no token": lambda: byte_level(missing=b"\x00\xc0\xc3\xff"),
    "bytes, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "bytes, NFKC and lower case": lambda: byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "bytes, a longer string becomes a shorter one": lambda: byte_level(normalizer=normalizers.Replace("aaaaaaaa", "b")),
    "bytes, an added token that takes blanks along": lambda: byte_level(added=AddedToken("<x>", lstrip=True)),
    "bytes, a long added token": lambda: byte_level(added=AddedToken("b" * 200)),
    "sentencepiece": sentencepiece_bpe,
    "sentencepiece, unknown characters one by one": lambda: sentencepiece_bpe(fallback=False),
    "unigram with bytes": lambda: unigram(True),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "strip": lambda: byte_level(normalizer=SHRINKING),
    "a pattern": lambda: byte_level(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
    "nothing": lambda: byte_level(normalizer=normalizers.Replace("a", "")),
    "fused unknown": lambda: sentencepiece_bpe(fallback=False, fuse=True),
    "unigram": lambda: unigram(False),
    "word pieces": word_piece,
}


@functools.cache
def bounded(name: str) -> Tokenizer:
    """Built once: hypothesis asks often."""
    return BOUNDED[name]()


TEXTS = st.text(st.sampled_from(" aabAＡ𝐊K가é\u0301ﷺ\n<x>\u0000"), max_size=300) | st.text(max_size=60)


@pytest.mark.parametrize("name", BOUNDED)
@examples(40)
@given(text=TEXTS, repeats=st.integers(1, 5))
def test_no_token_stands_for_more_than_the_bound(name: str, text: str, repeats: int) -> None:
    tokenizer = bounded(name)
    text = text * repeats + " " * repeats
    assert tokenizer.token_bound is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if any(each in text for each in tokenizer.blank_eaters):
        text = "".join(text.split())
    assert tokenizer.token_bound.least(text) <= len(ids)


def test_the_worst_a_normalizer_does_to_a_character() -> None:
    """All of Unicode, character by character, and Korean syllables spelled out; Python's forms are the library's."""
    texts = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert all(len(before.encode()) <= 4 * len(unicodedata.normalize(form, before).encode()) for before in texts)
    assert all(len(before.encode()) <= 4 * len(before.lower().encode()) for before in texts)
    assert normalizers.NFC().normalize_str("\u1112\u1161\u11ab") == "한"


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_text_may_vanish_there_is_no_bound(name: str) -> None:
    assert UNBOUNDED[name]().token_bound is None


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_shrinks_until_it_fits_is_served(name: str) -> None:
    """Far more characters than fit, however few tokens they are."""
    tokenizer = UNBOUNDED[name]()
    long = {
        "strip": "a" + " " * 200_000,
        "a pattern": "a" + " " * 200_000 + "a",
        "nothing": "a" * 200_000 + "b",
        "fused unknown": "字" * 200_000,
        "unigram": "字" * 200_000,
        "word pieces": "hello" + " " * 200_000 + "x" * 200_000,
    }[name]
    assert len(encode_bounded(tokenizer, long, 100, OPTIONS)) <= 4


def test_bytes_that_no_token_stands_for_count_for_nothing() -> None:
    tokenizer = byte_level(missing=b"\x04\xf1")
    assert tokenizer.token_bound is not None and tokenizer.token_bound.least("\x04" * 1000 + "a") == 1
    assert encode_bounded(tokenizer, "\x04" * 2_000_000 + "a", 100, OPTIONS) == tokenizer.encode("a", False)
    assert byte_level(missing=b"\x04", normalizer=normalizers.NFC()).token_bound is None
    assert byte_level(missing=b"\xc0\xff", normalizer=normalizers.NFC()).token_bound is not None


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_blanks_that_a_token_takes_along_count_for_nothing(normalizer: Any) -> None:
    tokenizer = byte_level(added=AddedToken("<x>", lstrip=True), normalizer=normalizer)
    for text in (" " * 2_000_000 + "<x>", "a " * 20 + " " * 2_000_000 + "<x>"):
        assert len(encode_bounded(tokenizer, text, 100, OPTIONS)) <= 41
    with pytest.raises(InvalidRequestError):
        encode_bounded(tokenizer, " " * 2_000_000 + "<x>" * 1000, 100, OPTIONS)


class Watched(Tokenizer):
    """Counts the characters it is asked to tokenise."""

    seen = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.seen += len(text)
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
@pytest.mark.parametrize("start", ["", " " * 30_000])
def test_of_what_cannot_fit_little_is_tokenised(name: str, start: str) -> None:
    """However harmless its beginning."""
    tokenizer = Watched({**BOUNDED, **UNBOUNDED}[name]().backend)
    text = start + "a b " * 500_000
    with pytest.raises(InvalidRequestError, match="max_model_len is 1001") as caught:
        encode_bounded(tokenizer, text, 1000, OPTIONS)
    assert caught.value.parameter == "prompt"
    assert tokenizer.seen <= 5 * 32_000


def test_exactly_what_fits_is_taken() -> None:
    tokenizer = byte_level()
    for most in (200, 5000):
        text = " " * (64 * most)
        assert len(encode_bounded(tokenizer, text, most, OPTIONS)) == most
        with pytest.raises(InvalidRequestError):
            encode_bounded(tokenizer, text + "b" * 64, most, OPTIONS)


def test_a_process_gives_the_same_ids_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PROCESS_CHARS", LONG_TEXT_CHARS)
    tokenizer = byte_level(normalizer=SHRINKING)

    async def main() -> None:
        lanes = TextLanes(tokenizer, 10_000)
        try:
            text = "a é 字\n" * 1000
            assert await lanes.encode(text, add_special_tokens=False) == tokenizer.encode(text, False)
            with pytest.raises(InvalidRequestError, match="max_model_len is 10001"):
                await lanes.encode("b " * 400_000, add_special_tokens=False)
            assert len(await lanes.encode("b\n" * 40_000, whole=True)) == 80_000 - 1  # stripped at its end
            with pytest.raises(InvalidRequestError, match="Unicode"):
                await lanes.encode("\ud800" * 5000)
        finally:
            lanes.close()

    asyncio.run(main())


def test_a_text_that_takes_too_much_is_refused_and_the_next_one_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "MAX_SECONDS", 0.2)
    tokenizer = byte_level(split=False)

    async def main() -> None:
        lanes = TextLanes(tokenizer, 10_000)
        try:
            with pytest.raises(InvalidRequestError, match="to tokenise; shorten"):
                await lanes.encode(" " * 8_000_000, whole=True)
            assert len(await lanes.encode("b" * 5000, whole=True)) == 5000
        finally:
            lanes.close()

    asyncio.run(main())


def test_short_texts_overtake_and_abandoned_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve clients that ask for the tokens of megabytes and leave: an honest one waits for none of them."""
    tokenizer = byte_level(split=False)

    async def main() -> None:
        lanes = TextLanes(tokenizer, 10_000)
        try:
            flood = [asyncio.create_task(lanes.encode(" " * 3_000_000, whole=True)) for _ in range(12)]
            await asyncio.sleep(0)
            assert len(await lanes.encode("b" * 5000)) == 5000
            assert not any(task.done() for task in flood)
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            async with asyncio.timeout(60):
                while lanes._processes._free < long_texts.PROCESSES:
                    await asyncio.sleep(0)
            assert lanes._pool is None or not lanes._pool._busy
        finally:
            lanes.close()

    asyncio.run(main())


def test_short_texts_are_tokenised_at_once_until_the_turn_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "INLINE_CHARS", 100)
    threads: list[bool] = []

    class Noticed(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread() is not threading.main_thread())
            return super().encode(text, add_special_tokens)

    tokenizer = Noticed(byte_level().backend)

    async def main() -> None:
        lanes = TextLanes(tokenizer, 10_000)
        try:
            for _ in range(2):  # a new turn begins anew
                await asyncio.gather(*(lanes.encode("b" * 30) for _ in range(5)))
                assert sorted(threads) == [False] * 3 + [True] * 2
                threads.clear()
        finally:
            lanes.close()

    asyncio.run(main())


def test_the_process_of_a_big_text_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PROCESS_CHARS", LONG_TEXT_CHARS)
    monkeypatch.setattr(long_texts, "BIG_CHARS", 2 * LONG_TEXT_CHARS)

    async def main() -> None:
        lanes = TextLanes(byte_level(), 100_000)
        try:
            for size, idle in ((2 * LONG_TEXT_CHARS, 1), (2 * LONG_TEXT_CHARS + 1, 0)):
                assert len(await lanes.encode("b" * size)) == size
                assert lanes._pool is not None and len(lanes._pool._idle) == idle
        finally:
            lanes.close()

    asyncio.run(main())
