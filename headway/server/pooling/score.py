"""POST /score, and /rerank in the forms of Jina and Cohere."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.task import Task
from headway.server.errors import refuse
from headway.server.pooling.call import PoolingCall, need_task, params_of
from headway.server.pooling.protocol import RerankRequest, ScoreRequest
from headway.server.pooling.tei import embed, embed_sparse, predict, rerank_texts
from headway.server.report import new_id
from headway.server.service import Service
from headway.server.sse import encode

PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
COHERE_PATH = "/v2/rerank"


def need_scores(service: Service) -> None:
    """Raises ApiError where the model compares no texts."""
    if not service.llm.pooling_door.pooling.score_by:
        need_task(service, Task.SCORE)


async def score(service: Service, request: Request) -> Response:
    """How well texts fit together: of pairs, or of one text with many."""
    body = await service.body.read(request, ScoreRequest)
    need_scores(service)
    given = [pair for pair in PAIRS if any(getattr(body, name) is not None for name in pair)]
    if len(given) != 1 or any(getattr(body, name) is None for name in given[0]):
        raise refuse("give text_1 and text_2: texts, or lists of texts", "text_1", "missing_required_parameter")
    one, two = given[0]
    first, second = getattr(body, one), getattr(body, two)
    second = [second] if isinstance(second, str) else second
    params = params_of(body, use_activation=body.use_activation)
    call = PoolingCall(service, request, body.model, {"data_1": one, "data_2": two, "prompt": two})

    async def work() -> bytes:
        _, scores = await call.score(first, second, params, body.instruction)
        data = [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)]
        return call.listing("score-", encode(data))

    count = len(second) if isinstance(first, str) else max(len(first), len(second))
    return await call.answer(count, two, work)


async def rerank(service: Service, request: Request) -> Response:
    """Documents in the order of how well they answer a query: ``documents`` as Jina and Cohere, ``texts`` as TEI."""
    body = await service.body.read(request, RerankRequest)
    need_scores(service)
    if (body.documents is None) == (body.texts is None):
        raise refuse("give documents, or in TEI's form texts", "documents", "missing_required_parameter")
    if body.texts is not None:
        return await rerank_texts(service, request, body)
    for name in ("truncate", "truncation_direction", "raw_scores", "return_text"):
        if getattr(body, name) is not None:
            raise refuse(f"{name} goes with texts; with documents there is truncate_prompt_tokens", name)
    if body.top_n is not None and body.top_n < 1:
        raise refuse(f"top_n must be at least 1; got {body.top_n}", "top_n")
    assert body.documents is not None
    texts = [_text(number, document) for number, document in enumerate(body.documents)]
    params = params_of(body, use_activation=body.use_activation)
    call = PoolingCall(service, request, body.model, {"data_1": "query", "data_2": "documents", "prompt": "documents"})
    shows = body.return_documents if body.return_documents is not None else request.url.path != COHERE_PATH

    async def work() -> bytes:
        _, scores = await call.score(body.query, texts, params, body.instruction)
        results = []
        for number in in_order(scores)[: body.top_n]:
            result: dict[str, Any] = {"index": number, "relevance_score": scores[number]}
            if shows:
                result["document"] = {"text": texts[number]}
            results.append(result)
        units = {"search_units": 1}
        return encode(
            {
                "id": new_id("rerank-"),
                "model": call.model,
                "usage": call.usage(),
                "results": results,
                "meta": {"billed_units": units, "tokens": {"input_tokens": call.num_tokens}},
            }
        )

    return await call.answer(len(texts), "documents", work)


async def root(service: Service, request: Request) -> Response:
    """TEI's route without a name, which huggingface_hub's client posts to: as /embed, /embed_sparse, /predict or /rerank."""
    pooling, tasks = service.llm.pooling_door.pooling, service.info.tasks
    if pooling.sparse:
        return await embed_sparse(service, request)
    if Task.EMBED in tasks:
        return await embed(service, request)
    return await (predict if Task.CLASSIFY in tasks else rerank)(service, request)


def in_order(scores: list[float]) -> list[int]:
    """Numbers of the scores, the highest first; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda number: -scores[number])


def _text(number: int, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise refuse(f'documents[{number}] must be a text, or an object whose "text" is one', f"documents[{number}]")
    return text
