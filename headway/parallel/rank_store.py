"""The keys as torch's process groups want them. Imported late: there are builds of torch without them."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from headway.parallel.keys import Keys, wait_for


class RankStore(Store):
    """The keys as torch wants them."""

    def __init__(self, keys: Keys, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._keys, self._seconds, self._check = keys, seconds, check

    def set(self, key: str, value: str | bytes) -> None:
        self._keys.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return wait_for(self._keys, key, self._seconds, self._check)

    def add(self, key: str, value: int) -> int:
        return self._keys.add(key, value)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        for key in keys:
            wait_for(self._keys, key, seconds, self._check)

    def check(self, keys: list[str]) -> bool:
        return all(self._keys.get(key) is not None for key in keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._seconds = timeout.total_seconds()
