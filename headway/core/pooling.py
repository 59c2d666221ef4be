"""What an engine that pools gives, for the API floor: fixed at start-up, plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from headway.core.task import Task


class PoolingInfo(msgspec.Struct, kw_only=True):
    """What the vectors of an engine that pools mean, and what its texts should look like.

    The vector of a request (``RequestUpdate.pooled``, float32) has ``width`` numbers for the tasks embed, classify and score,
    and ``token_width`` numbers a token, tokens in order, for token_embed and token_classify. The engine normalises
    (``normalize``) and activates (``activation``) unless the request is ``AddRequest.raw``; cutting a vector to
    ``dimensions`` and normalising it again is the front end's.

    Attributes:
        width: numbers of a text's vector; 0: texts get none.
        token_width: numbers of a token's vector; 0: tokens get none.
        pooling_type: how a text's vector is made of its tokens': "cls", "last", "mean", "max", "weighted_mean", "mean_sqrt",
            several joined by "+", or "all" where only tokens have vectors.
        normalize: vectors of embed and token_embed have length 1.
        activation: of the numbers of classify, score and token_classify.
        labels: their names, in order; empty where the model's vectors are no scores of labels.
        sparse: a text's vector has a number for each entry of the vocabulary, most of them 0 (SPLADE).
        token_weights: a token's one number is its weight (sparse vectors of BGE-M3): of token_classify.
        token_widths: ``token_width`` of tasks that have a head of their own for tokens.
        token_embed_start: so many first tokens have no vectors (BGE-M3's first one).
        missing: what stands in the way of tasks that the model could serve, and what to do about it.
        max_length: most tokens of a text that the model was trained for, at most ``ModelInfo.max_model_len``; longer ones are
            truncated where the request asks for it, to this or less.
        truncation_side: which end of a text that is too long goes.
        lower_case: texts are to be lower-cased before they are tokenised, beside what the tokenizer does.
        num_token_types: kinds of tokens that the model knows; with 2, the second of a pair of texts is of type 1
            (``AddRequest.token_type_range``).
        prompts: name -> text to put before a text.
        default_prompt_name: the prompt of texts that come without a choice.
        include_prompt: tokens of a prompt take part in the pooling; if not, ``AddRequest.pool_start`` is their number.
        similarity: how the makers compare vectors: "cosine", "dot", "euclidean" or "manhattan".
        score_by: how the task score is served: "pair" (one request with both texts, whose vector is the score),
            "vectors" (one embed request for each text, compared by ``similarity``), "tokens" (one token_embed request for
            each text, compared by the sum of each query token's best match), or "" (not at all).
        score_template: of pairs: the whole text with "{instruction}", "{query}" and "{document}" in it; "" where the tokenizer
            joins the two texts by itself.
        score_instruction: what stands for "{instruction}" when the request has none.
        step_tag_id: rewards stand at the tokens with this id (process reward models); None: at every token.
        returned_token_ids: which of a token's numbers a process reward model is asked for; empty: all.
        matryoshka_dimensions: lengths to which vectors may be cut; empty: no length is known to be bad.
        adapters: names of the tasks that the model has adapters for; ``AddRequest.adapter`` is a place among them, from 1.
        append_eos: texts are to end with the end-of-sequence token where the tokenizer does not add it.
    """

    width: int
    token_width: int = 0
    pooling_type: str = "last"
    normalize: bool = True
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    labels: tuple[str, ...] = ()
    sparse: bool = False
    token_weights: bool = False
    token_widths: dict[str, int] = {}
    token_embed_start: int = 0
    missing: str = ""
    max_length: int
    truncation_side: Literal["left", "right"] = "right"
    lower_case: bool = False
    num_token_types: int = 1
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    include_prompt: bool = True
    similarity: str = "cosine"
    score_by: Literal["", "pair", "vectors", "tokens"] = ""
    score_template: str = ""
    score_instruction: str = ""
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    matryoshka_dimensions: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    append_eos: bool = False

    def width_by_token(self, task: Task) -> int:
        """``token_width`` of one task."""
        return self.token_widths.get(task.value, self.token_width)
