"""POST /v1/embeddings, /pooling and /classify."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from headway.api.pooling.requests import Floats
from headway.core.task import Task
from headway.server.errors import refuse
from headway.server.pooling.call import PoolingCall, inputs_of, need_task, numbers, params_of, written
from headway.server.pooling.protocol import ClassifyRequest, EmbeddingRequest, PoolingRequest
from headway.server.service import Service
from headway.server.sse import encode

NAMES: Final = {"prompt": "input", "pooling_task": "task"}


async def embeddings(service: Service, request: Request) -> Response:
    """A vector for each text, as OpenAI's API gives it."""
    body = await service.body.read(request, EmbeddingRequest)
    need_task(service, Task.EMBED)
    if service.llm.pooling_door.pooling.sparse:
        raise refuse(f"{service.names[0]} makes sparse vectors: use /embed_sparse", "model", "model_not_supported")
    prompts = inputs_of(body.input, "input")
    more = {name: getattr(body, name) for name in ("dimensions", "normalize", "prompt_name", "task")}
    params = params_of(body, **more)
    call = PoolingCall(service, request, body.model, NAMES)

    def write(number: int, array: Floats) -> bytes:
        vector = numbers(array, body.encoding_format)
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (number, vector)

    async def work() -> bytes:
        _, arrays = await call.pool(prompts, params, Task.EMBED)
        return call.listing("embd-", await written(arrays, write))

    return await call.answer(len(prompts), "input", work)


async def pooling(service: Service, request: Request) -> Response:
    """Whatever the model gives: a list of numbers for each text, or for each of its tokens."""
    body = await service.body.read(request, PoolingRequest)
    task = service.info.tasks[0] if body.task is None else Task(body.task)
    need_task(service, task)
    prompts = inputs_of(body.input, "input")
    more = {name: getattr(body, name) for name in ("dimensions", "normalize", "use_activation", "prompt_name")}
    params = params_of(body, **more)
    call = PoolingCall(service, request, body.model, NAMES)

    def write(number: int, array: Floats) -> bytes:
        shape = b',"shape":' + encode(array.shape) if body.encoding_format == "base64" else b""
        vector = numbers(array, body.encoding_format)
        return b'{"index":%d,"object":"pooling","data":%b%b}' % (number, vector, shape)

    async def work() -> bytes:
        _, arrays = await call.pool(prompts, params, task)
        return call.listing("pool-", await written(arrays, write))

    return await call.answer(len(prompts), "input", work)


async def classify(service: Service, request: Request) -> Response:
    """The most likely label of each text, and the numbers of all."""
    body = await service.body.read(request, ClassifyRequest)
    need_task(service, Task.CLASSIFY)
    prompts = inputs_of(body.input, "input")
    count = max(len(prompts), len(body.text_pair)) if isinstance(body.text_pair, list) else len(prompts)
    params = params_of(body, use_activation=body.use_activation)
    call = PoolingCall(service, request, body.model, NAMES)
    labels = service.llm.pooling_door.pooling.labels

    def write(number: int, array: Floats) -> bytes:
        probs = array.tolist()  # host: numpy
        found = {"index": number, "label": label_name(labels, int(array.argmax())), "probs": probs}
        return encode({**found, "num_classes": len(array)})

    async def work() -> bytes:
        if body.text_pair is None:
            _, arrays = await call.pool(prompts, params, Task.CLASSIFY)
        else:
            arrays = await call.pairs(body.input, body.text_pair, params)
        return call.listing("classify-", await written(arrays, write))

    return await call.answer(count, "input", work)


def label_name(labels: tuple[str, ...], number: int) -> str:
    """The name of a label; as transformers names those without one."""
    return labels[number] if number < len(labels) else f"LABEL_{number}"
