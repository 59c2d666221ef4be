"""``LetterBox``: carries the letters of ``parallel.dp`` between processes of one host."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque

from headway.core.seat import Seat
from headway.parallel.dp import Letter

MOST_BYTES = 64


class LetterBox:
    """One replica's: a datagram socket in the folder of its ``Seat``. Letters arrive once and in order, or their receiver has
    gone; one whose box is full gets the rest later.
    """

    def __init__(self, seat: Seat) -> None:
        self._own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._own.setblocking(False)
        self._path = self._path_of(seat, seat.rank)
        self._own.bind(self._path)
        self._waiting = {self._path_of(seat, rank): deque[bytes]() for rank in range(seat.size) if rank != seat.rank}

    @staticmethod
    def _path_of(seat: Seat, rank: int) -> str:
        return os.path.join(seat.folder, f"letters-{rank}")

    def fileno(self) -> int:
        """Readable when there are letters."""
        return self._own.fileno()

    def send(self, letter: Letter) -> None:
        """To all others; see ``Peers``."""
        data = letter.encode()
        for letters in self._waiting.values():
            letters.append(data)
        self.flush()

    def flush(self) -> None:
        """Send what found no room before."""
        for path, letters in self._waiting.items():
            while letters:
                try:
                    self._own.sendto(letters[0], path)
                except (BlockingIOError, FileNotFoundError):  # it is full, or not there yet
                    break
                except OSError:  # the replica has gone, which is found out elsewhere
                    letters.clear()
                    break
                letters.popleft()

    def receive(self) -> list[Letter]:
        """What has come."""
        found: list[Letter] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(Letter.decode(self._own.recv(MOST_BYTES)))
        return found

    def wait(self, seconds: float) -> None:
        """Until there are letters, or so long."""
        select.select([self._own], [], [], seconds)

    def close(self) -> None:
        """Nobody can write to it any more."""
        self._own.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
