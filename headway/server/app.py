"""The FastAPI application over one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headway import __version__
from headway.core.errors import HeadwayError
from headway.server import metrics, openapi, page, protocol, tracing
from headway.server.chat import chat
from headway.server.completions import completions
from headway.server.door import Door
from headway.server.errors import ApiError, as_api_error, refuse
from headway.server.health import shared_health
from headway.server.hearing.routes import transcriptions, translations
from headway.server.lifecycle import ALIVE, Lifecycle, Phase
from headway.server.metrics_source import shared_source
from headway.server.pooling import openai, score, tei
from headway.server.pooling import protocol as bodies
from headway.server.pooling.call import ROUTES_OF
from headway.server.responses import responses
from headway.server.service import GONE, ClientGoneError, Service, log_error
from headway.server.settings import ServerSettings
from headway.server.throughput import ThroughputLog
from headway.server.tokens import detokenize, tokenize

if TYPE_CHECKING:
    import msgspec

    from headway.api.async_llm import AsyncLLM

Handler = Callable[[Service, Request], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

ROUTES: list[tuple[str, Handler, type[msgspec.Struct], bool]]
ROUTES = [
    ("/v1/completions", completions, protocol.CompletionRequest, True),
    ("/v1/chat/completions", chat, protocol.ChatRequest, True),
    ("/v1/responses", responses, protocol.ResponsesRequest, True),
    ("/tokenize", tokenize, protocol.TokenizeRequest, False),
    ("/detokenize", detokenize, protocol.DetokenizeRequest, False),
]
"""Path, handler, struct of the body, whether it can stream."""
AUDIO_ROUTES: list[tuple[str, Handler]]
AUDIO_ROUTES = [("/v1/audio/transcriptions", transcriptions), ("/v1/audio/translations", translations)]
"""Path and handler, of models that hear; bodies are forms."""
GENERATING = frozenset(path for path, *_ in ROUTES if path.startswith("/v1/"))
POOLING_ROUTES: list[tuple[str, Handler, type[msgspec.Struct]]]
POOLING_ROUTES = [
    ("/v1/embeddings", openai.embeddings, bodies.EmbeddingRequest),
    ("/pooling", openai.pooling, bodies.PoolingRequest),
    ("/classify", openai.classify, bodies.ClassifyRequest),
    ("/score", score.score, bodies.ScoreRequest),
    ("/v1/score", score.score, bodies.ScoreRequest),
    ("/rerank", score.rerank, bodies.RerankRequest),
    ("/v1/rerank", score.rerank, bodies.RerankRequest),
    (score.COHERE_PATH, score.rerank, bodies.RerankRequest),
    ("/embed", tei.embed, bodies.TeiEmbedRequest),
    ("/embed_all", tei.embed_all, bodies.TeiEmbedRequest),
    ("/embed_sparse", tei.embed_sparse, bodies.TeiEmbedRequest),
    ("/predict", tei.predict, bodies.TeiPredictRequest),
    ("/similarity", tei.similarity, bodies.TeiSimilarityRequest),
]
"""Path, handler, struct of the body, of models that pool."""


def build_app(llm: AsyncLLM, settings: ServerSettings, lifecycle: Lifecycle | None = None) -> FastAPI:
    """The application.

    Args:
        llm: a running engine; the app does not shut it down.
        lifecycle: shared with whoever drains and restarts; without one, the app is ready at once and for good.
    """
    lifecycle = lifecycle or Lifecycle(Phase.READY)
    service = Service(llm, settings, lifecycle)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if not service.pools:
            await service.templates.start()
        try:
            yield
        finally:
            await service.templates.close()
            if service.hearing is not None:
                service.hearing.close()
            if service.throughput is not None:
                service.throughput.close()
            end_tracing()

    app = FastAPI(
        title="Headway", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.service = service
    direct: dict[str, Endpoint] = {}
    for path, handler, kind, streams in ROUTES:
        direct[path] = endpoint = _bound(handler, service, pools=False if path in GENERATING else None)
        app.add_api_route(path, endpoint, methods=["POST"], **openapi.operation(kind, streams))
    for path, audio in AUDIO_ROUTES:
        app.add_api_route(
            path, _bound(audio, service, pools=False), methods=["POST"], **openapi.operation(streams=True)
        )
    for path, handler, kind in POOLING_ROUTES:
        endpoint = _bound(handler, service, pools=True)
        app.add_api_route(path, endpoint, methods=["POST"], **openapi.operation(kind))
        direct[path] = endpoint
    for path, handler in (("/embeddings", openai.embeddings), ("/", score.root)):
        direct[path] = endpoint = _bound(handler, service, True)
        app.add_api_route(path, endpoint, methods=["POST"], include_in_schema=False)
    if not settings.disable_log_stats:
        service.throughput = ThroughputLog(shared_source(app, llm), lifecycle, settings.log_stats_interval)
    _add_information(app, service)
    metrics.install(app, llm, settings)
    page.install(app, llm, settings)
    for route in [route for route in app.routes if isinstance(route, APIRoute) and "GET" in (route.methods or ())]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)  # as many checks ask
    app.state.direct = direct
    app.add_middleware(Direct, endpoints=direct)
    end_tracing = tracing.install(app, llm, settings)
    _add_errors(app)
    app.add_middleware(Door, settings=settings, lifecycle=lifecycle)
    if settings.allowed_origins:
        # Outside of the door: browsers send their preflight without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    made = app.openapi

    def described() -> dict[str, Any]:
        return openapi.complete(made(), bool(settings.api_key))

    app.openapi = described  # type: ignore[method-assign]
    return app


def _bound(handler: Handler, service: Service, pools: bool | None) -> Endpoint:
    """An endpoint for models that pool, for models that do not, or for all."""

    async def endpoint(request: Request) -> Response:
        if pools is not None and pools != service.pools:
            raise _wrong_model(service)
        return await handler(service, request)

    endpoint.__name__ = getattr(handler, "__name__", "endpoint")
    endpoint.__doc__ = handler.__doc__
    return endpoint


def _wrong_model(service: Service) -> ApiError:
    """What a client is told whose route is not of this kind of model."""
    name = service.names[0]
    if not service.pools:
        message = (
            f"{name} generates text and makes no embeddings or scores: use /v1/chat/completions or /v1/completions, "
        )
        return refuse(f"{message}or ask a server that runs an embedding model", "model", "model_not_supported")
    served = " and ".join(f"{task.value} ({ROUTES_OF[task]})" for task in service.info.tasks)
    message = f"{name} generates nothing, it serves {served}; for text ask a server that runs a generating model"
    return refuse(message, "model", "model_not_supported")


def _add_information(app: FastAPI, service: Service) -> None:
    """Routes that say what there is and how it is."""
    names, info = service.names, service.info
    judge = shared_health(app, service.llm, service.lifecycle)

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "headway",
            "root": names[0],
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def models() -> Response:
        """Models served: one engine, under each of its names."""
        return JSONResponse({"object": "list", "data": [model(name) for name in names]})

    async def one_model(name: str) -> Response:
        """One of them."""
        return JSONResponse(model(service.check_model(name)))

    async def health() -> Response:
        """200 while requests are taken and the engine answers; needs no key."""
        return await state()

    async def ready() -> Response:
        """As /health."""
        return await state()

    async def state() -> Response:
        found = await judge.state()
        return JSONResponse({"status": found}, status_code=200 if found == Phase.READY.value else 503)

    async def live() -> Response:
        """200 while this process answers, whatever the engine does; needs no key."""
        return JSONResponse(ALIVE)

    async def facts() -> Response:
        """The model, in the form of TEI."""
        return tei.info(service)

    async def version() -> Response:
        """Headway's version."""
        return JSONResponse({"version": __version__})

    for path, endpoint in (
        ("/v1/models", models),
        ("/v1/models/{name:path}", one_model),
        ("/health", health),
        ("/ready", ready),
        ("/live", live),
        ("/version", version),
        ("/info", facts),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], **openapi.operation())


class Front:
    """The application as a server calls it: requests that ``Direct`` takes pass the same middleware, and FastAPI's own do not.

    Args:
        app: made by ``build_app``.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app, self._paths = app, frozenset(app.state.direct)
        quick: ASGIApp = app  # never reached: each of these requests ends in ``Direct``
        for kind, args, options in reversed(app.user_middleware):
            quick = kind(quick, *args, **options)
        self._quick = quick

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        quick = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths
        await (self._quick if quick else self._app)(scope, receive, send)


class Direct:
    """Middleware before the router: POST requests with a JSON body go straight to their endpoints.

    The router tries one route after the other, and FastAPI keeps stacks for what these endpoints do not use; together they take
    as long as a short request's own work. Endpoints and errors are the same.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        posted = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if posted else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            response = _told(request, error)
        await response(scope, receive, send)


def _told(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in ``error``; raises one that was not raised on purpose."""
    if isinstance(error, ClientGoneError | ClientDisconnect):
        log_error(request.scope, GONE)
        return Response(status_code=499)  # nobody reads it; the log does
    answer = as_api_error(error)
    if answer is None:
        raise error
    log_error(request.scope, answer.code)
    return answer.response()


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's form; unexpected ones are the door's."""

    async def told(request: Request, error: Exception) -> Response:
        return _told(request, error)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    for kind in (ApiError, HeadwayError, ClientGoneError, ClientDisconnect):
        app.add_exception_handler(kind, told)
    app.add_exception_handler(HTTPException, http)
