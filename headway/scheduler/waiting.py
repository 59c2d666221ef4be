"""The requests that own nothing yet, first come first served."""

from __future__ import annotations

from collections import OrderedDict

from headway.scheduler.request import Request


class WaitingQueue:
    """Ordered by arrival; preempted requests return to the front. Every operation but ``tokens`` is O(1)."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Request:
        return next(iter(self._queue.values()))

    def tokens(self, most: int) -> int:
        """Known tokens of all, or ``most`` where these are more."""
        total = 0
        for request in self._queue.values():
            total += len(request.tokens)
            if total >= most:
                return most
        return total

    def append(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]
