"""What an engine whose model pools does, from what the model says of itself; and what it tells the front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from headway.core.config import EngineArgs
from headway.core.pooling import PoolingInfo
from headway.core.task import Task
from headway.engine.extras import Pooling
from headway.models.encoder import EncoderModel
from headway.models.interface import Model
from headway.pooling.spec import PoolingSpec
from headway.pooling.text import TextPooler, pooling_tables
from headway.state.slots import SlotArena, Table
from headway.weights import Checkpoint
from headway.weights.sentence import SentenceFiles

RERANKER_TEMPLATE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
RERANKER_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen3's rerankers were trained with (their model card)."""


def pooling_of(model: Model, spec: PoolingSpec) -> Pooling:
    """The pooling of a model that gives no logits."""
    chunked = not model.spec.cache.is_empty

    def tables(hidden: int) -> list[Table]:
        return pooling_tables(spec, model.head_width if spec.head_first else hidden, chunked=chunked)

    def pooler(arena: SlotArena, hidden: int) -> TextPooler:
        own = model.token_logits if isinstance(model, EncoderModel) and spec.token_parts else None
        return TextPooler(arena, spec, hidden, model.logits, model.head_width, chunked=chunked, token_head=own)

    return Pooling(spec.tasks(), pooler, tables)


def pooling_info(args: EngineArgs, model: Model, checkpoint: Checkpoint, max_model_len: int) -> PoolingInfo | None:
    """What the front end must know; None where the model generates."""
    spec = model.spec.pooling
    if spec is None:
        return None
    files, config, settings = checkpoint.sentence or SentenceFiles(), checkpoint.config, args.pooler_config or {}
    tasks = spec.tasks()
    answers = config.get("classifier_from_token") is not None or files.score_tokens is not None
    template = RERANKER_TEMPLATE if answers and model.spec.architecture.startswith("Qwen3") else ""
    dimensions = config.get("matryoshka_dimensions")
    return PoolingInfo(
        width=0 if spec.by_token else model.head_width,
        token_width=model.head_width if any(task.by_token for task in tasks) else 0,
        pooling_type="all" if spec.by_token else "+".join(spec.methods),
        normalize=spec.normalize,
        activation=cast(Any, spec.activation),
        labels=spec.labels,
        token_weights=(Task.TOKEN_CLASSIFY, 1) in spec.token_parts,
        token_widths={task.value: size for task, size in spec.token_parts},
        token_embed_start=int(bool(spec.token_parts)),
        missing=checkpoint.token_heads.pickled,
        sparse=spec.kind == "sparse",
        max_length=min(files.max_length or max_model_len, max_model_len),
        lower_case=files.lower_case,
        num_token_types=model.spec.num_token_types,
        prompts=_instructions(config) | dict(files.prompts),
        adapters=model.spec.adapters,
        default_prompt_name=files.default_prompt_name,
        include_prompt=files.include_prompt,
        similarity=files.similarity,
        score_by=_score_by(tasks),
        score_template=template,
        score_instruction=RERANKER_INSTRUCTION if template else "",
        step_tag_id=settings.get("step_tag_id"),
        returned_token_ids=tuple(settings.get("returned_token_ids") or ()),
        matryoshka_dimensions=tuple(dimensions) if isinstance(dimensions, list) else (),
    )


def _instructions(config: Mapping[str, Any]) -> dict[str, str]:
    """What stands in front of texts by the task that an adapter is for, as Jina v3's config.json has it."""
    listed = config.get("task_instructions")
    return {str(name): str(text) for name, text in listed.items()} if isinstance(listed, Mapping) else {}


def _score_by(tasks: tuple[Task, ...]) -> Literal["", "pair", "vectors", "tokens"]:
    if Task.SCORE in tasks:
        return "pair"
    if Task.EMBED in tasks:
        return "vectors"
    return "tokens" if Task.TOKEN_EMBED in tasks else ""
