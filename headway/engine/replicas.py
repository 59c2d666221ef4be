"""``ReplicaClient``: replicas of one model behind one door. Each is an engine of its own; where they share the experts of a
mixture they agree on the size of their steps (``engine.accord``), else on nothing. A request goes where its prefix lies, unless
that replica has much more to do than another."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import msgspec

from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.errors import EngineDeadError
from headway.core.histogram import Histogram
from headway.core.log import logger
from headway.core.messages import AddRequest, EngineStats, ModelInfo, Update, ended_by
from headway.core.seat import Seat
from headway.engine.client import EngineClient

PREFIX_TOKENS: Final = 64
"""Prefixes are compared in pieces of so many tokens."""
MOST_PIECES: Final = 32
"""Of each prompt so many pieces are remembered."""
REMEMBERED: Final = 65536
"""Pieces, of all prompts."""
MORE_LOAD: Final = 4
"""Requests by which a replica may be ahead of the idlest one and still get what its cache knows; or a quarter more."""


RANK_ERROR: Final = "RankError"
REASON_SECONDS: Final = 2.0
"""How long a replica that blames another waits for what that one says."""


class Router:
    """Chooses a replica for each request. Plain numbers; one thread at a time.

    Attributes:
        loads: open requests of each replica.
    """

    def __init__(self, number: int) -> None:
        self.loads = [0] * number
        self._where: OrderedDict[int, int] = OrderedDict()
        self._next = 0

    def route(self, request: AddRequest) -> int:
        """The replica for ``request``, which counts as open from now on."""
        pieces = _pieces(request)
        known: dict[int, int] = {}
        for depth, piece in enumerate(pieces, 1):
            replica = self._where.get(piece)
            if replica is None:
                break
            known[replica] = depth
        idlest = self._idlest()
        chosen = max(known, key=known.__getitem__, default=idlest)
        if self.loads[chosen] > self.loads[idlest] + max(MORE_LOAD, self.loads[idlest] // 4):
            chosen = idlest
        for piece in pieces:
            self._where[piece] = chosen
            self._where.move_to_end(piece)
        while len(self._where) > REMEMBERED:
            self._where.popitem(last=False)
        self.loads[chosen] += 1
        return chosen

    def _idlest(self) -> int:
        """The one with the fewest requests; of equals each in turn."""
        number = len(self.loads)
        self._next = (self._next + 1) % number
        return min(range(number), key=lambda nth: (self.loads[nth], (nth - self._next) % number))

    def done(self, replica: int) -> None:
        """One of its requests has ended."""
        self.loads[replica] -= 1


def _pieces(request: AddRequest) -> list[int]:
    """A number for each leading run of whole pieces of the prompt; a salt of its own has numbers of its own."""
    ids, found = request.prompt_token_ids, []
    running = hash(getattr(request, "cache_salt", None))
    for start in range(0, min(len(ids), MOST_PIECES * PREFIX_TOKENS) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
        running = hash((running, *ids[start : start + PREFIX_TOKENS]))
        found.append(running)
    return found


class _State:
    """What the threads of a ReplicaClient share; knows nothing of it, so that they do not keep it alive."""

    def __init__(self, clients: list[EngineClient]) -> None:
        self.clients = clients
        self.changed = threading.Condition()
        self.updates: list[Update] = []
        self.router = Router(len(clients))
        self.where: dict[str, int] = {}
        self.dead: str | None = None
        self.closing = False
        for nth in range(len(clients)):
            threading.Thread(target=self._pump, args=(nth,), name=f"headway-replica-{nth}", daemon=True).start()

    def _pump(self, nth: int) -> None:
        while True:
            try:
                updates = self.clients[nth].poll()
            except EngineDeadError as error:
                self._died(nth, error)
                return
            with self.changed:
                for name in [name for update in updates for name in ended_by(update)]:
                    self.forget(name)
                self.updates += updates
                self.changed.notify_all()

    def _died(self, nth: int, error: EngineDeadError) -> None:
        with self.changed:
            if RANK_ERROR in str(error):  # it has found another one missing, which may say better why
                self.changed.wait_for(lambda: self.dead is not None or self.closing, REASON_SECONDS)
            if self.dead is None and not self.closing:
                self.dead = f"replica {nth} of {len(self.clients)}: {error}"
                logger.error("%s; the others are stopped", self.dead)
            self.changed.notify_all()

    def forget(self, request_id: str) -> int | None:
        """The request has ended; gives the replica it was on. Under ``changed``."""
        replica = self.where.pop(request_id, None)
        if replica is not None:
            self.router.done(replica)
        return replica

    def check(self) -> None:
        if self.dead is not None or self.closing:
            raise EngineDeadError(self.dead or "the engine is shut down")

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        close_all(self.clients)


class ReplicaClient:
    """Several engines as one; see ``EngineClient`` for the methods. The first that dies ends all of them.

    Args:
        make: starts one engine; its seat is where replicas share experts.
    """

    info: ModelInfo

    def __init__(self, args: EngineArgs, make: Callable[[EngineArgs, Seat | None], EngineClient]) -> None:
        number, seats = args.data_parallel_size, list[Seat | None]()
        if args.enable_expert_parallel:
            folder = tempfile.mkdtemp(prefix="headway-seats-")  # of mode 0700
            self._folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            seats += [Seat(nth, number, folder) for nth in range(number)]
        seats = seats or [None] * number
        with ThreadPoolExecutor(number) as pool:
            begun = [pool.submit(make, each, seat) for each, seat in zip(replica_args(args), seats, strict=True)]
        errors = [error for each in begun if (error := each.exception()) is not None]
        clients = [each.result() for each in begun if each.exception() is None]
        if errors:
            close_all(clients)
            raise next((each for each in errors if RANK_ERROR not in f"{type(each).__name__} {each}"), errors[0])
        self.info = _together([each.info for each in clients])
        self._state = state = _State(clients)
        self._finalizer = weakref.finalize(self, state.close)

    def learn(self, vocabulary: Vocabulary) -> None:
        for client in self._state.clients:
            client.learn(vocabulary)

    def add(self, requests: list[AddRequest]) -> None:
        state, groups = self._state, dict[int, list[AddRequest]]()
        with state.changed:
            state.check()
            for request in requests:
                replica = state.router.route(request)
                state.where[request.request_id] = replica
                groups.setdefault(replica, []).append(request)
        for replica, group in groups.items():
            state.clients[replica].add(group)

    def abort(self, request_ids: list[str]) -> None:
        state, groups = self._state, dict[int, list[str]]()
        with state.changed:
            state.check()
            for request_id in request_ids:
                replica = state.forget(request_id)
                if replica is not None:
                    groups.setdefault(replica, []).append(request_id)
        for replica, group in groups.items():
            state.clients[replica].abort(group)

    def poll(self, timeout: float | None = None) -> list[Update]:
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.updates or state.dead is not None or state.closing, timeout)
            if state.dead is not None or not state.updates:
                state.check()
            updates, state.updates = state.updates, []
        return updates

    def has_work(self) -> bool:
        with self._state.changed:
            return bool(self._state.where or self._state.updates)

    def stats(self) -> EngineStats:
        self._state.check()
        return added([client.stats() for client in self._state.clients])

    def processor_seconds(self) -> float | None:
        clients = self._state.clients
        found = [seconds for client in clients if (seconds := client.processor_seconds()) is not None]
        return sum(found) if len(found) == len(clients) else None

    def close(self) -> None:
        self._finalizer()


def close_all(clients: Sequence[EngineClient]) -> None:
    """Close them at the same time: each may take a while."""
    with ThreadPoolExecutor(max(len(clients), 1)) as pool:
        for each in [pool.submit(client.close) for client in clients]:
            with contextlib.suppress(Exception):
                each.result()


def replica_args(args: EngineArgs) -> list[EngineArgs]:
    """The arguments of each replica: GPUs in order, one for each of its ranks."""
    kind, _, number = args.device.partition(":")
    if kind == "auto":
        import torch  # late: clients are made before anything slow is imported

        kind = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for nth in range(args.data_parallel_size):
        device = "cpu" if kind == "cpu" else f"{kind}:{int(number or 0) + nth * args.num_ranks}"
        if args.distributed_executor_backend == "ray" and args.num_ranks > 1:
            device = args.device  # Ray chooses the GPUs
        found.append(replace(args, data_parallel_size=1, device=device))
    return found


def _together(infos: Sequence[ModelInfo]) -> ModelInfo:
    """What the door must know of all of them."""
    return msgspec.structs.replace(
        infos[0],
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        num_kv_tokens=sum(info.num_kv_tokens for info in infos),
        max_model_len=min(info.max_model_len for info in infos),
        notes=[*infos[0].notes, f"{len(infos)} replicas"],
    )


_MEANS: Final = ("kv_cache_usage",)
_MOST: Final = ("run_ahead",)


def added(each: Sequence[EngineStats]) -> EngineStats:
    """The figures of several engines as one's: counts are added up, shares averaged; each one's stay in ``replicas``."""
    values = {}
    for name in EngineStats.__struct_fields__:
        found = [getattr(stats, name) for stats in each]
        if name in _MEANS:
            values[name] = sum(found) / len(found)
        elif name in _MOST:
            values[name] = max(found)
        elif name == "has_device_clock":
            values[name] = all(found)
        elif name == "replicas":
            values[name] = list(each)
        else:
            values[name] = _sum(found)
    return EngineStats(**values)


def _sum(found: Sequence[object]) -> object:
    first = found[0]
    if isinstance(first, int | float):
        return sum(each for each in found if isinstance(each, int | float))
    if isinstance(first, Histogram):
        return _histogram([each for each in found if isinstance(each, Histogram) and each.bounds])
    if isinstance(first, dict):
        total: dict[str, float] = {}
        for each in found:
            for key, value in each.items() if isinstance(each, dict) else ():
                total[key] = total.get(key, 0) + value
        return total
    if isinstance(first, list):
        lists = [each for each in found if isinstance(each, list)]
        if all(isinstance(value, int) for each in lists for value in each):
            longest = max(map(len, lists))
            return [sum(each[nth] for each in lists if nth < len(each)) for nth in range(longest)]
        return [value for each in lists for value in each]
    return first


def _histogram(found: Sequence[Histogram]) -> Histogram:
    if not found:
        return Histogram()
    counts = [sum(column) for column in zip(*(each.counts for each in found), strict=True)]
    return Histogram(found[0].bounds, counts, sum(each.total for each in found))
