"""Builds a ``tokenizers.Tokenizer`` from the vocabulary inside a GGUF file.

Split patterns and defaults per ``tokenizer.ggml.pre`` are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headway.api.text_stream import byte_alphabet
from headway.core.errors import ModelError, UnsupportedModelError
from headway.weights.gguf_file import GgufHeader

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""``tokenizer.ggml.token_type``: 1 normal, 2 unknown, and these."""

UNKNOWN: Final = 2
SPACE: Final = "▁"

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


class PreTokenizer(NamedTuple):
    """How a byte-level vocabulary wants its text cut.

    Attributes:
        pattern: regular expression of the pieces; None: GPT-2's own.
        single_digits: every digit is cut out before the pattern applies.
        nfc: text is normalised to NFC first.
        whole_words: a piece that is a token is taken whole, without going through the merges.
        adds_bos: whether a beginning-of-sequence token is added when the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3: Final = PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}", whole_words=True, adds_bos=True)
_QWEN2: Final = PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}", nfc=True)
_QWEN35: Final = PreTokenizer(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
_DIGITS: Final = PreTokenizer(single_digits=True)
_O200K: Final = PreTokenizer(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = PreTokenizer(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    adds_bos=True,
)
PRE_TOKENIZERS: Final = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    "command-r": _DIGITS._replace(nfc=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _LLAMA3._replace(adds_bos=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": _TEKKEN,
}


def build_tokenizer(header: GgufHeader) -> Tokenizer:
    """The tokenizer described by the file's ``tokenizer.ggml.*`` keys.

    An unknown ``tokenizer.ggml.pre`` is an error, not a guess: a wrong cut changes the tokens silently.

    Raises:
        ModelError: no vocabulary, or one that contradicts itself.
        UnsupportedModelError: a kind of tokenizer or pre-tokenizer that is not built.
    """
    kind = header.get("tokenizer.ggml.model")
    tokens = header.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise ModelError(f"{header.path} holds no tokenizer; give one with tokenizer=<folder or hub name>")
    types = header.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{header.path}: {len(tokens)} tokens but {len(types)} token types")
    try:
        if kind == "gpt2":
            tokenizer, adds_bos = _byte_level(header, tokens)
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece(header, tokens, types), True
        else:
            raise UnsupportedModelError(
                f"{header.path}: tokenizer kind {kind!r} is not supported (have: gpt2, llama); "
                "give another with tokenizer=<folder or hub name>"
            )
        _add_special(header.path, tokenizer, tokens, types)
        _add_template(header, tokenizer, tokens, adds_bos)
    # tokenizers raises bare Exception on vocabularies that contradict themselves.
    except Exception as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{header.path}: the tokenizer in the file is damaged ({error})") from error
    return tokenizer


def _byte_level(header: GgufHeader, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = header.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{header.path}: pre-tokenizer {name!r} is not known (have: {', '.join(PRE_TOKENIZERS)}); "
            "give the model's own tokenizer with tokenizer=<folder or hub name>"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [_pair(header.path, merge) for merge in header.get("tokenizer.ggml.merges") or []]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    cuts: list[Any] = []
    if pre.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    prefix = bool(header.get("tokenizer.ggml.add_space_prefix", False))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts) if len(cuts) > 1 else cuts[0]
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _pair(path: Path, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelError(f"{path}: merge {merge!r} is not two tokens")
    return left, right


def _sentencepiece(header: GgufHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = header.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(f"{header.path}: a sentencepiece vocabulary needs one score per token")
    unknown = header.get("tokenizer.ggml.unknown_token_id")
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=merges_of(tokens, scores, types),
        unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    ends: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
        ends.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def merges_of(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Merges that make ranked BPE choose as sentencepiece does: the pair with the best-scored result first.

    Only normal tokens are made by merging; control, byte and unused pieces never are.
    """
    makes = {token for token, kind in zip(tokens, types) if kind in (1, USER_DEFINED)}
    ids = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types):
        if kind != 1:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in makes and right in makes:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special(path: Path, tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens become special (matched in text, left out when decoding), user-defined ones added tokens."""
    alphabet = byte_alphabet()
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def usable(token: str) -> bool:
        # An empty piece cannot be matched, and a lone byte marked as control is a converter's slip.
        return bool(token) and not (byte_level and len(token) == 1 and token in alphabet)

    def added(kind: int, special: bool) -> Iterable[AddedToken]:
        return (
            AddedToken(token, normalized=False, special=special)
            for token, this in zip(tokens, types)
            if this == kind and usable(token)
        )

    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(list(added(CONTROL, True)))
    if not byte_level:
        tokenizer.add_special_tokens(list(added(UNKNOWN, True)))
    tokenizer.add_tokens(list(added(USER_DEFINED, False)))
    if tokenizer.get_vocab_size() != size:
        raise ModelError(f"{path}: the vocabulary grew by {tokenizer.get_vocab_size() - size} special tokens")


def _add_template(header: GgufHeader, tokenizer: Tokenizer, tokens: list[str], adds_bos: bool) -> None:
    """The ids put around a prompt: ``add_bos_token`` and ``add_eos_token``, else the tokenizer kind's habit."""
    first = _named(header, tokens, "bos") if header.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    last = _named(header, tokens, "eos") if header.get("tokenizer.ggml.add_eos_token", False) else None
    around = [t for t in (first, last) if t is not None]
    if not around:
        return
    pieces = [first, "$A", last]
    pair = [first, "$A", last, first and f"{first}:1", "$B:1", last and f"{last}:1"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[p for p in pieces if p is not None],
        pair=[p for p in pair if p is not None],
        special_tokens=[(t, tokens.index(t)) for t in dict.fromkeys(around)],
    )


def _named(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    index = header.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
