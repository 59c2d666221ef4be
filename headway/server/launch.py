"""From a command line to a served model, and down again without losing anybody's answer.

The port is bound before the model loads, so that a taken port is found at once and /live answers; until the model is
there, every other route says 503. SIGTERM or SIGINT begins to drain: new requests get 503, open ones finish. A dead engine
answers its open requests with an error; then it is started again (``--restart``), or the server leaves with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.core.errors import ConfigError, EngineDeadError
from headway.core.log import logger
from headway.server.accepting import room_for_connections
from headway.server.app import Front, build_app
from headway.server.connection import CROWDED, server
from headway.server.door import HEALTH_PATH, LIVE_PATH, Door
from headway.server.errors import ApiError
from headway.server.lifecycle import ALIVE, Lifecycle, Phase
from headway.server.logs import Seldom
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.api.async_llm import AsyncLLM

LAST_ANSWERS_SECONDS: Final = 5.0
"""How long answers that are already decided may take to reach their clients."""
MAX_RESTART_DELAY: Final = 30.0
BACKLOG: Final = 2048
RARELY: Final = (10_000, 10, 100)
"""Garbage collection: objects made per look at the youngest, such looks per look at the next older, and so on to all."""


def serve(load: Callable[[], AsyncLLM], settings: ServerSettings, model: str = "the model") -> int:
    """Serve until a signal or the engine's end; the process's exit status.

    Args:
        load: makes the engine; runs in a thread while the port already answers, and again for every restart.
        model: what it loads, for the log.

    Raises:
        ConfigError: the port cannot be had, or open files are too few.
        HeadwayError: what ``load`` raises the first time.
    """
    room = room_for_connections(settings.max_connections)
    with _bind(settings) as listener:
        logger.info(
            "loading %s; listening on %s, where /health says when it is ready", model, _address(listener, settings)
        )
        return asyncio.run(Supervisor(load, dataclasses.replace(settings, max_connections=room)).run(listener))


def _bind(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # now, so that a taken port is found before the model is loaded
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {reason}; choose another with --host or --port"
        ) from None
    listener.setblocking(False)
    return listener


def _address(listener: socket.socket, settings: ServerSettings) -> str:
    """What to type into a browser."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _set_aside() -> None:
    """Take what there is now, which stays, out of garbage collections: they took a tenth of a second, in which no stream got
    anything. With a thousand requests open they still would, so they also become rare."""
    gc.unfreeze()  # an earlier engine's
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


class Supervisor:
    """One server: its socket stays, engines come and go behind it."""

    def __init__(self, load: Callable[[], AsyncLLM], settings: ServerSettings) -> None:
        self._load = load
        self._settings = settings
        self.lifecycle = Lifecycle()
        self._waiting = Door(self._not_ready, settings, self.lifecycle)
        self._refusing = Door(_too_many, settings, self.lifecycle)
        self._app: ASGIApp = self._waiting
        self._seldom = Seldom()
        self._signals = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: whatever stands behind the port now, for as many connections as there may be."""
        crowded = scope.get("state", {}).get(CROWDED, False) and scope["path"] != LIVE_PATH
        if crowded:
            most = self._settings.max_connections
            self._seldom.warn(f"{most} connections are open: refusing requests of others (--max-connections)")
        await (self._refusing if crowded else self._app)(scope, receive, send)

    async def _not_ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application while there is no engine."""
        phase = self.lifecycle.phase
        if scope["path"] == LIVE_PATH:
            await JSONResponse(ALIVE)(scope, receive, send)
            return
        if scope["path"] == HEALTH_PATH:
            await JSONResponse({"status": phase.value}, status_code=503)(scope, receive, send)
            return
        loading = ApiError(503, "the model is loading; try again soon", None, "loading", {"Retry-After": "5"})
        dead = ApiError(503, "the engine has stopped", None, "engine_dead")
        await (dead if phase is Phase.DEAD else loading).response()(scope, receive, send)

    async def run(self, listener: socket.socket) -> int:
        """Serve on ``listener``; see ``serve``."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = server(
            self,
            settings.max_connections,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            backlog=BACKLOG,
        )
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            return await self._supervise(listener, serving)
        finally:
            http.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1:
            if self.lifecycle.phase is Phase.READY:
                self.lifecycle.phase = Phase.DRAINING  # from here on; the drain itself begins when the loop gets to it
            logger.info("%s: draining; a second signal stops at once", signal.Signals(number).name)
            self._stop.set()
        else:
            logger.warning("%s again: stopping at once", signal.Signals(number).name)
            self._hurry.set()

    async def _supervise(self, listener: socket.socket, serving: asyncio.Task[None]) -> int:
        restarts = 0
        while True:
            llm = await self._start_engine()
            if llm is None:
                return 0
            try:
                app = build_app(llm, self._settings, self.lifecycle)
                async with app.router.lifespan_context(app):
                    _set_aside()
                    self._app = Front(app)
                    self.lifecycle.phase = Phase.READY
                    self._announce(listener)
                    if await self._either(self._stop.wait(), llm.wait_dead(), _done(serving)) != 1:
                        await self._drain(llm)
                        return 0
                    self.lifecycle.phase = Phase.DEAD
                    logger.error("the engine has stopped: %s", llm.dead_error)
                    # Their generators have raised; the error answers are on their way.
                    await self._either(self.lifecycle.idle(), asyncio.sleep(LAST_ANSWERS_SECONDS))
                    self._app = self._waiting
            finally:
                await asyncio.to_thread(llm.shutdown)
            if restarts == self._settings.restart:
                return 1
            delay = min(float(2**restarts), MAX_RESTART_DELAY)
            restarts += 1
            logger.error("starting the engine again in %g s (%d of %d)", delay, restarts, self._settings.restart)
            if await self._either(self._stop.wait(), asyncio.sleep(delay)) == 0:
                return 0
            self.lifecycle.phase = Phase.STARTING

    async def _start_engine(self) -> AsyncLLM | None:
        """A new engine; None when a signal came first. A daemon thread, since loading cannot be interrupted."""
        loop = asyncio.get_running_loop()
        made: asyncio.Future[AsyncLLM] = loop.create_future()

        def tell(llm: AsyncLLM | None, error: BaseException | None) -> None:
            if made.done():
                return
            if llm is not None:
                made.set_result(llm)
            else:
                made.set_exception(error or EngineDeadError("the engine did not start"))

        def work() -> None:
            llm, failure = None, None
            try:
                llm = self._load()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, llm, failure)

        threading.Thread(target=work, name="headway-load", daemon=True).start()
        if await self._either(self._stop.wait(), _done(made)) == 0 and not made.done():
            made.cancel()
            return None
        return await made

    def _announce(self, listener: socket.socket) -> None:
        address = _address(listener, self._settings)
        logger.info("ready on %s (a page to chat and to watch at /, the API at /v1)", address)
        if not self._settings.is_loopback and not self._settings.api_key:
            logger.warning("anybody who can reach %s can use this server: set HEADWAY_API_KEY", address)

    async def _drain(self, llm: AsyncLLM) -> None:
        """Refuse what is new, let what runs finish within the time, then end the rest with errors."""
        self.lifecycle.phase = Phase.DRAINING
        seconds = self._settings.shutdown_timeout
        if self.lifecycle.num_requests:
            logger.info("%d requests have up to %g s to finish", self.lifecycle.num_requests, seconds)
        first = await self._either(self.lifecycle.idle(), self._hurry.wait(), asyncio.sleep(seconds), llm.wait_dead())
        if first == 0:
            return
        logger.warning("ending %d open requests", self.lifecycle.num_requests)
        await asyncio.to_thread(llm.shutdown)
        await self._either(self.lifecycle.idle(), asyncio.sleep(LAST_ANSWERS_SECONDS))

    @staticmethod
    async def _either(*events: Coroutine[Any, Any, Any]) -> int:
        """Which of these ends first; the lowest number of several. The others are cancelled."""
        tasks = [asyncio.ensure_future(event) for event in events]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(i for i, task in enumerate(tasks) if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """The application for connections beyond the limit. uvicorn's own answer is plain text, which clients cannot read."""
    headers = {"Retry-After": "1", "Connection": "close"}
    error = ApiError(
        503, "too many connections are open; try again soon (--max-connections)", None, "too_many_connections", headers
    )
    await error.response()(scope, receive, send)


async def _done(future: asyncio.Future[Any]) -> None:
    await asyncio.wait([future])
