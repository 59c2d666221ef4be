"""What a model is for: generating, or vectors; from its architecture, the files beside it, and what the user says.

In order of precedence: the user's ``pooler_config``; sentence-transformers' files; the architecture with its config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headway.core.errors import ConfigError, UnsupportedModelError
from headway.core.task import Task
from headway.models.blocks import BlockSpec
from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig
from headway.models.encoder import EncoderConfig
from headway.models.encoder_config import read_activation, read_labels
from headway.models.fields import Fields
from headway.models.heads import HeadLayer, HeadSpec, Outputs
from headway.pooling.spec import METHODS, Kind, PoolingSpec
from headway.weights.checkpoint import NO_HEADS
from headway.weights.sentence import SentenceFiles
from headway.weights.token_heads import VECTORS, WEIGHTS, TokenHeads

DECODER_SUFFIXES: Final[Mapping[str, str]] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForRewardModel": "reward",
    "ForProcessRewardModel": "reward",
    "BidirectionalModel": "embed",
    "Model": "embed",
}
"""Ends of decoders' architectures, beside ForCausalLM -> what such a model gives."""
_AVERAGES: Final = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last", "max": "max"}
_SETTINGS: Final = ("pooling_type", "normalize", "activation", "step_tag_id", "returned_token_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What the user says, and what lies beside the model.

    Attributes:
        runner, convert, pooler_config: see ``EngineArgs``.
        sentence: sentence-transformers' files, None for none.
        folder: where a tokenizer.json may lie.
        token_heads: files of heads for tokens.
    """

    runner: str = "auto"
    convert: str = "auto"
    pooler_config: Mapping[str, Any] | None = None
    sentence: SentenceFiles | None = None
    folder: Path | None = None
    token_heads: TokenHeads = NO_HEADS

    @property
    def pools(self) -> bool:
        """Whether a model that could generate is for vectors."""
        if self.runner != "auto":
            return self.runner == "pooling"
        return self.sentence is not None or self.convert in ("embed", "classify") or self.pooler_config is not None


def kind_of_decoder(architecture: str) -> str | None:
    """What a decoder gives whose architecture has this name; None: it generates."""
    if architecture.endswith("LMHeadModel"):  # GPT-2's
        return None
    return next((kind for suffix, kind in DECODER_SUFFIXES.items() if architecture.endswith(suffix)), None)


def adapted(config: DecoderConfig | EncoderConfig, fields: Fields, wish: Wish) -> DecoderConfig | EncoderConfig:
    """The configuration of a model that gives what it is for.

    Args:
        config: as the architecture read it.

    Raises:
        ConfigError: the model cannot do what the user says.
        UnsupportedModelError: its files ask for something that is not implemented.
    """
    if wish.runner == "generate" and (config.outputs is not None or kind_of_decoder(config.architecture)):
        raise ConfigError(f"{config.architecture} does not generate; use runner='pooling' or 'auto'")
    if isinstance(config, DecoderConfig):
        kind = kind_of_decoder(config.architecture)
        if config.outputs is None:
            if kind is None and not wish.pools:
                return config
            config = _decoder(config, fields, wish, kind)
    elif wish.convert == "classify" and config.outputs.pooling.kind == "embed":
        raise ConfigError(f"{config.architecture} has no classifier; use convert='auto' or 'embed'")
    outputs = config.outputs
    assert outputs is not None
    if wish.sentence is not None:
        outputs = _with_sentence(outputs, wish.sentence, config.hidden_size)
    if wish.token_heads.files:
        if not isinstance(config, EncoderConfig) or outputs.pooling.kind != "embed" or outputs.head.layers:
            listed = ", ".join(f"{name}.safetensors" for name in wish.token_heads.files)
            raise UnsupportedModelError(f"{listed}: only encoders that give vectors as they are have such heads")
        outputs = _with_token_heads(outputs, wish.token_heads)
    return replace(config, outputs=replace(outputs, pooling=_with_settings(outputs.pooling, wish.pooler_config or {})))


def _texts_both_ways(fields: Fields) -> bool:
    """Whether texts are seen both ways: Gemma 4 says "all", or "vision" for pictures alone."""
    value = fields.get("use_bidirectional_attention")
    return value == "all" or (value != "vision" and fields.flag("use_bidirectional_attention"))


def _decoder(config: DecoderConfig, fields: Fields, wish: Wish, kind: str | None) -> DecoderConfig:
    """A decoder that pools."""
    halved = _texts_both_ways(fields)  # Gemma 3 counts both sides of the window together
    if fields.get("is_causal") is False or halved or config.architecture.endswith("BidirectionalModel"):
        if halved and config.architecture.startswith(("Gemma2", "Gemma4")):
            raise fields.refuse(
                "use_bidirectional_attention", "is not implemented: transformers' ways of attending disagree"
            )
        config = map_blocks(config, lambda _, block: _both_ways(block, halved))
    answers = fields.get("classifier_from_token")
    tokens = wish.sentence.score_tokens if wish.sentence is not None else None
    if answers is not None:
        tokens = _tokens_of(answers, wish.folder)
    wanted = kind or ("classify" if wish.convert == "classify" or tokens is not None else "embed")
    if wanted == "embed":
        method = _AVERAGES.get(str(fields.get("pooling") or "last"))
        if method is None:
            raise fields.refuse("pooling", f"is not implemented; {', '.join(_AVERAGES)} are")
        return replace(config, outputs=Outputs(pooling=PoolingSpec(kind="embed", methods=(method,), normalize=True)))
    if wanted == "reward":
        sizes = (
            HeadLayer(name="score.0", size=config.hidden_size, activation="relu"),
            HeadLayer(name="score.2", size=0),
        )
        return replace(config, outputs=_scores(fields, "token_classify", sizes, "none"))
    if tokens is not None:
        return replace(config, outputs=_answers(config, tokens))
    if wanted == "token_classify":
        return replace(config, outputs=_scores(fields, "token_classify", (HeadLayer(name="score", size=0),)))
    return replace(config, outputs=_scores(fields, "classify", (HeadLayer(name="score", size=0, bias=False),)))


def _both_ways(block: BlockSpec, halved: bool) -> BlockSpec:
    window = block.attention.window
    spec = block.attention
    if spec.chunk or spec.sinks or spec.slopes or spec.flex or spec.shared_with is not None:
        raise UnsupportedModelError(
            "config.json: chunked attention, sinks, ALiBi and shared keys are implemented for causal decoders alone; "
            "use the model causally"
        )
    return replace(
        block, mixer=replace(block.attention, causal=False, window=window // 2 + 1 if window and halved else window)
    )


def _scores(fields: Fields, kind: Kind, layers: tuple[HeadLayer, ...], activation: str | None = None) -> Outputs:
    """A classifier behind a decoder."""
    labels = read_labels(fields)
    layers = tuple(layer if layer.size else replace(layer, size=len(labels)) for layer in layers)
    methods = ("last",) if kind == "classify" else ("all",)
    chosen = read_activation(fields, len(labels)) if activation is None else activation
    return Outputs(
        pooling=PoolingSpec(kind=kind, methods=methods, activation=chosen, labels=labels), head=HeadSpec(layers=layers)
    )


def _answers(config: DecoderConfig, tokens: tuple[int, int | None]) -> Outputs:
    """A reranker that answers with one token or another: the logit of the one, less that of the other."""
    wanted, other = tokens
    rows = (wanted,) if other is None else (other, wanted)
    for token in rows:
        if not 0 <= token < config.vocab_size:
            raise UnsupportedModelError(f"token {token}, whose logit is a score, is not in the vocabulary")
    layer = HeadLayer(
        name=config.names.head, size=len(rows), bias=False, rows=rows, rows_of=config.vocab_size,
        tied=config.tie_word_embeddings,
    )  # fmt: skip
    pooling = PoolingSpec(kind="classify", methods=("last",), activation="sigmoid", labels=("LABEL_0",))
    return Outputs(pooling=pooling, head=HeadSpec(layers=(layer,), contrast=other is not None))


def _tokens_of(answers: Any, folder: Path | None) -> tuple[int, int | None]:
    """Ids of the two answers, the negative one first, given as ids or as tokens of the model's tokenizer."""
    if not isinstance(answers, list) or len(answers) not in (1, 2):
        raise ConfigError(f"classifier_from_token must be a list of one or two tokens; got {answers!r:.80}")
    ids = []
    for answer in answers:
        found = answer if isinstance(answer, int) else _vocabulary(folder).get(answer)
        if found is None:
            raise ConfigError(f"classifier_from_token: {answer!r:.60} is not a token of the model; give its id")
        ids.append(int(found))
    return (ids[0], None) if len(ids) == 1 else (ids[1], ids[0])


def _vocabulary(folder: Path | None) -> Mapping[Any, int]:
    """Token -> id, of a tokenizer.json; empty where there is none that says so."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {token: i for i, (token, _) in enumerate(found)}


def _with_sentence(outputs: Outputs, files: SentenceFiles, hidden: int) -> Outputs:
    """What sentence-transformers' modules make of the hidden states."""
    spec = outputs.pooling
    if spec.kind != "embed":
        return outputs
    if files.sparse:
        found = outputs.sparse()
        if found is None:
            raise UnsupportedModelError("SpladePooling needs the output layer of a masked language model (ForMaskedLM)")
        return found
    methods = files.methods or ("all",)
    size = hidden * (1 if methods == ("all",) else len(methods))
    layers = []
    for dense in files.dense:
        if dense.inputs != size:
            raise UnsupportedModelError(f"{dense.folder} takes {dense.inputs} numbers, and there are {size}")
        size = dense.outputs
        layers.append(HeadLayer(name=f"{dense.folder}.linear", size=size, activation=dense.activation, bias=dense.bias))
    pooling = replace(spec, kind="embed", methods=methods, normalize=files.normalize)
    return Outputs(pooling=pooling, head=HeadSpec(layers=tuple(layers)))


def _with_token_heads(outputs: Outputs, heads: TokenHeads) -> Outputs:
    """Vectors and weights of tokens beside the vectors of texts (BGE-M3)."""
    sizes = {VECTORS: (Task.TOKEN_EMBED, heads.vectors), WEIGHTS: (Task.TOKEN_CLASSIFY, 1)}
    parts = tuple(sizes[name] for name in heads.files)
    specs = tuple(HeadSpec(layers=(HeadLayer(name=name, size=sizes[name][1]),)) for name in heads.files)
    return replace(outputs, pooling=replace(outputs.pooling, token_parts=parts), token_heads=specs)


def _with_settings(spec: PoolingSpec, settings: Mapping[str, Any]) -> PoolingSpec:
    """What the user says of pooling."""
    unknown = sorted({*settings} - {*_SETTINGS})
    if unknown:
        raise ConfigError(f"pooler_config has {unknown[0]!r:.60}; known are {', '.join(_SETTINGS)}")
    if "pooling_type" in settings:
        methods = tuple(str(settings["pooling_type"]).lower().split("+"))
        if not {*methods} <= {*METHODS} or (len(methods) > 1 and {*methods} & {"all", "step"}):
            raise ConfigError(
                f"pooler_config: pooling_type must be one of {', '.join(METHODS)}, or several vectors joined by +; got "
                f"{settings['pooling_type']!r:.60}"
            )
        spec = replace(spec, methods=methods)
        if spec.by_token:
            spec = replace(spec, token_parts=())
    for name, allowed in (("normalize", (True, False)), ("activation", ("none", "sigmoid", "softmax"))):
        if name in settings:
            if settings[name] not in allowed:
                raise ConfigError(f"pooler_config: {name} must be one of {allowed}; got {settings[name]!r:.60}")
            spec = replace(spec, **{name: settings[name]})
    return spec
