"""The routes of Hugging Face's text-embeddings-inference (TEI)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headway import __version__
from headway.api.pooling.requests import Floats
from headway.api.pooling.sparse import sparse_task, sparse_vectors
from headway.core.task import Task
from headway.server.errors import refuse
from headway.server.pooling.call import PoolingCall, inputs_of, need_task, numbers, tei_params, written
from headway.server.pooling.protocol import (
    RerankRequest,
    TeiCut,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiSimilarityRequest,
)
from headway.server.service import Service
from headway.server.sse import encode

NAMES = {"prompt": "inputs", "truncate_prompt_tokens": "truncate"}


async def embed(service: Service, request: Request) -> Response:
    """A vector for each text, of length 1 unless ``normalize`` is false."""
    body = await service.body.read(request, TeiEmbedRequest)
    need_task(service, Task.EMBED)
    normalize = True if body.normalize is None else body.normalize
    return await _vectors(service, request, body, Task.EMBED, normalize=normalize, dimensions=body.dimensions)


async def embed_all(service: Service, request: Request) -> Response:
    """A vector for each token of each text."""
    body = await service.body.read(request, TeiEmbedRequest)
    need_task(service, Task.TOKEN_EMBED)
    return await _vectors(
        service, request, body, Task.TOKEN_EMBED, normalize=body.normalize, dimensions=body.dimensions
    )


async def _vectors(service: Service, request: Request, body: TeiEmbedRequest, task: Task, **more: Any) -> Response:
    prompts = inputs_of(body.inputs, "inputs")
    params = tei_params(body, prompt_name=body.prompt_name, **more)
    call = PoolingCall(service, request, None, NAMES)

    async def work() -> bytes:
        _, arrays = await call.pool(prompts, params, task)
        return await written(arrays, lambda number, array: numbers(array, None))

    return await call.answer(len(prompts), "inputs", work)


async def embed_sparse(service: Service, request: Request) -> Response:
    """Weights of entries of the vocabulary for each text."""
    body = await service.body.read(request, TeiEmbedRequest)
    for name in ("normalize", "dimensions"):
        if getattr(body, name) is not None:
            raise refuse(f"{name} applies to dense vectors; leave it out", name)
    door = service.llm.pooling_door
    task = sparse_task(door)
    prompts = inputs_of(body.inputs, "inputs")
    params = tei_params(body, prompt_name=body.prompt_name)
    call = PoolingCall(service, request, None, NAMES)

    async def work() -> bytes:
        group, arrays = await call.pool(prompts, params, task)

        def write(number: int, array: Floats) -> bytes:
            [found] = sparse_vectors(door, [array], [group.messages[number].prompt_token_ids])
            pairs = zip(found.indices.tolist(), found.values.tolist())  # host: numpy
            return encode([{"index": index, "value": value} for index, value in pairs])

        return await written(arrays, write)

    return await call.answer(len(prompts), "inputs", work)


async def predict(service: Service, request: Request) -> Response:
    """Labels of a text with their scores, the highest first; lists of these for a list of lists."""
    body = await service.body.read(request, TeiPredictRequest)
    need_task(service, Task.CLASSIFY, Task.SCORE)
    inputs, single = _sequences(body.inputs)
    pairs = [len(each) == 2 for each in inputs]
    labels = service.llm.pooling_door.pooling.labels
    params = tei_params(body, use_activation=False if body.raw_scores else None)
    call = PoolingCall(service, request, None, dict.fromkeys(("prompt", "text_pair", "data_1", "data_2"), "inputs"))
    if not all(pairs):
        need_task(service, Task.CLASSIFY)
    if len(set(pairs)) == 2:
        raise refuse("inputs mixes texts with pairs of texts; send them apart", "inputs")

    async def work() -> bytes:
        if pairs[0] and Task.SCORE not in service.info.tasks:
            arrays = await call.pairs([a for a, _ in inputs], [b for _, b in inputs], params)
            rows = [array.tolist() for array in arrays]  # host: numpy
        elif pairs[0]:
            _, scores = await call.score([a for a, _ in inputs], [b for _, b in inputs], params, None)
            rows = [[score] for score in scores]
        else:
            _, arrays = await call.pool([each[0] for each in inputs], params, Task.CLASSIFY)
            rows = [array.tolist() for array in arrays]  # host: numpy
        found = [_predictions(row, labels) for row in rows]
        return encode(found[0] if single else found)

    return await call.answer(len(inputs), "inputs", work)


def _sequences(given: str | list[str | list[str]]) -> tuple[list[list[str]], bool]:
    """Lists of one text or two, and whether there is one that was not in a list."""
    if isinstance(given, str):
        return [[given]], True
    texts = [item for item in given if isinstance(item, str)]
    if texts and len(texts) == len(given) and len(given) <= 2:
        return [texts], True
    found = [[item] if isinstance(item, str) else item for item in given]
    if not found or texts or any(len(each) not in (1, 2) for each in found):
        raise refuse(
            'inputs must be a text, a pair ["a", "b"], or a list of lists with one text or two, as in [["a"], ["b"]]',
            "inputs",
        )
    return found, False


def _predictions(row: list[float], labels: tuple[str, ...]) -> list[dict[str, Any]]:
    names = [labels[i] if i < len(labels) else f"LABEL_{i}" for i in range(len(row))]
    found = [{"score": score, "label": name} for score, name in zip(row, names, strict=True)]
    return sorted(found, key=lambda each: -float(each["score"]))


async def similarity(service: Service, request: Request) -> Response:
    """How near sentences are to one sentence."""
    body = await service.body.read(request, TeiSimilarityRequest)
    need_task(service, Task.EMBED)
    names = {"data_1": "inputs.source_sentence", "data_2": "inputs.sentences", "prompt": "inputs.sentences"}
    call = PoolingCall(service, request, None, names)
    for name in TeiCut.__struct_fields__ if body.parameters is not None else ():
        if getattr(body, name) is not None:
            raise refuse(f"{name} belongs inside parameters, which the request has", name)
    params = tei_params(body.parameters or body)

    async def work() -> bytes:
        inputs = body.inputs
        _, scores = await call.score(inputs.source_sentence, inputs.sentences, params, None)
        return encode(scores)

    return await call.answer(len(body.inputs.sentences), "inputs.sentences", work)


async def rerank_texts(service: Service, request: Request, body: RerankRequest) -> Response:
    """/rerank with ``texts``: a list of indices and scores, the highest first."""
    for name in ("documents", "top_n", "return_documents"):
        if getattr(body, name) is not None:
            raise refuse(f"{name} goes with documents; with texts there is return_text", name)
    texts = body.texts or []
    cut = TeiCut(truncate=body.truncate, truncation_direction=body.truncation_direction)
    activation = False if body.raw_scores else body.use_activation
    call = PoolingCall(service, request, body.model, {"data_1": "query", "data_2": "texts", "prompt": "texts"})

    async def work() -> bytes:
        params = tei_params(cut, use_activation=activation)
        _, scores = await call.score(body.query, texts, params, body.instruction)
        ranked = sorted(range(len(scores)), key=lambda number: -scores[number])
        shown = [{"index": n, "score": scores[n], **({"text": texts[n]} if body.return_text else {})} for n in ranked]
        return encode(shown)

    return await call.answer(len(texts), "texts", work)


def info(service: Service) -> Response:
    """What TEI's clients ask before they send texts."""
    known, door, settings = service.info, service.llm.pooling_door, service.settings
    pooling = door.pooling
    labels = {str(number): name for number, name in enumerate(pooling.labels)}
    numbers_of = {name: int(number) for number, name in labels.items()}
    if Task.SCORE in known.tasks:
        kind: dict[str, Any] = {"reranker": {"id2label": labels, "label2id": numbers_of}}
    elif Task.CLASSIFY in known.tasks:
        kind = {"classifier": {"id2label": labels, "label2id": numbers_of}}
    else:
        kind = {"embedding": {"pooling": "splade" if pooling.sparse else pooling.pooling_type}}
    return JSONResponse(
        {
            "model_id": service.names[0],
            "model_sha": None,
            "model_dtype": known.dtype,
            "model_type": kind,
            "prompts": sorted(pooling.prompts),
            "tasks": [task.value for task in known.tasks],
            "max_concurrent_requests": service.lifecycle.capacity,
            "max_input_length": known.max_model_len,
            "max_batch_tokens": None,
            "max_batch_requests": known.max_num_seqs,
            "max_client_batch_size": settings.max_inputs,
            "auto_truncate": False,
            "version": __version__,
        }
    )
