"""Bodies of requests to models that pool. None always means "not given"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
Input = str | list[str | int | list[TokenId]]
Positive = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
Truncate = Annotated[int, Meta(extra_json_schema={"minimum": -1})]


class Cut(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every route takes: which model, and what becomes of texts that are too long."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncation_side: Literal["left", "right"] | None = None


class EmbeddingRequest(Cut, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings: a text, texts, token ids, or lists of token ids."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    task: str | None = None


class PoolingRequest(Cut, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling: whatever the model gives, for ``task`` if it serves several."""

    input: Input
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None


class ClassifyRequest(Cut, kw_only=True, forbid_unknown_fields=True):
    """POST /classify: with ``text_pair`` pairs of texts, one for each input or all for one."""

    input: Input
    text_pair: str | list[str] | None = None
    use_activation: bool | None = None


class ScoreRequest(Cut, kw_only=True, forbid_unknown_fields=True):
    """POST /score: texts under one of three pairs of names, those of vLLM's versions."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    instruction: str | None = None
    use_activation: bool | None = None


class RerankRequest(Cut, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank: ``documents`` in the form of Jina and Cohere, or ``texts`` in that of TEI, each with its own answer."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    texts: list[str] | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None


class TeiCut(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What TEI's routes have in common."""

    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class TeiEmbedRequest(TeiCut, kw_only=True, forbid_unknown_fields=True):
    """POST /embed, and without ``normalize`` and ``dimensions`` /embed_all and /embed_sparse."""

    inputs: Input
    normalize: bool | None = None
    dimensions: Positive | None = None
    prompt_name: str | None = None


class TeiPredictRequest(TeiCut, kw_only=True, forbid_unknown_fields=True):
    """POST /predict: a text, ``[text, text]`` for a pair, or a list of lists with one or two texts."""

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None


class TeiSentences(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One text, and those it is compared with."""

    source_sentence: str
    sentences: list[str]


class TeiSimilarityRequest(TeiCut, kw_only=True, forbid_unknown_fields=True):
    """POST /similarity. TEI has what cuts texts under ``parameters``, its other routes beside ``inputs``: either will do."""

    inputs: TeiSentences
    parameters: TeiCut | None = None


KINDS = (
    EmbeddingRequest,
    PoolingRequest,
    ClassifyRequest,
    ScoreRequest,
    RerankRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiSimilarityRequest,
)
