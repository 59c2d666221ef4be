"""Which block holds the KV of which token prefix.

A full block is named by a chained digest: blake2b over the parent block's digest and the block's token ids. The
digest is keyed with random bytes drawn at start, so a client cannot construct two prefixes that collide.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b

from headway.core.plan import Int32s

DIGEST_BYTES = 16


class PrefixIndex:
    """(group, digest) -> block and back. Owns no blocks: ``BlockPool`` tells it when one is recycled."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._key = secrets.token_bytes(32)
        self._keyed = blake2b(digest_size=DIGEST_BYTES, key=self._key)
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._digest_of: dict[int, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._digest_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digest_of

    def _root(self, salt: str | None) -> bytes:
        # No salt and the empty salt are different families.
        data = b"plain" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=b"root").digest()

    def extend(
        self,
        digests: list[bytes],
        salt: str | None,
        tokens: Int32s,
        num_blocks: int,
        marks: Sequence[tuple[int, int, bytes]] = (),
    ) -> None:
        """Appends to ``digests`` until it names the first ``num_blocks`` full blocks of ``tokens`` (int32 [n]).

        Args:
            marks: positions [start, end) that mean more than their tokens, and what: blocks with some of them are named by
            that, too.
        """
        bs = self._block_size
        parent = digests[-1] if digests else self._root(salt)
        data = tokens[len(digests) * bs : num_blocks * bs].tobytes()
        width = bs * tokens.itemsize
        for start in range(0, len(data), width):
            state = self._keyed.copy()  # half the price of a new one
            state.update(parent + data[start : start + width])
            if marks:
                state.update(_marked(marks, len(digests) * bs, bs))
            parent = state.digest()
            digests.append(parent)

    def names_of(self, key: bytes, salt: str | None, count: int) -> list[bytes]:
        """Digests of the ``count`` blocks that hold the encoder outputs named ``key``."""
        root = self._root(salt) + key
        names = []
        for number in range(count):
            state = self._keyed.copy()
            state.update(root + number.to_bytes(4, "little"))
            names.append(state.digest())
        return names

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """The block of ``group`` that holds the prefix named ``digest``."""
        return self._block_of[group].get(digest)

    def register(self, digests: list[bytes], block_ids: list[int], first: int, end: int, group: int = 0) -> None:
        """Names blocks ``first`` to ``end`` of a chain; one that already holds the same prefix keeps the name."""
        block_of = self._block_of[group]
        for index in range(first, end):
            digest = digests[index]
            if digest not in block_of:
                block_of[digest] = block_id = block_ids[index]
                self._digest_of[block_id] = (group, digest)

    def forget(self, block_id: int) -> None:
        """``block_id`` is about to hold something else."""
        group, digest = self._digest_of.pop(block_id)
        del self._block_of[group][digest]

    def clear(self) -> None:
        """No block has a name any more."""
        for block_of in self._block_of:
            block_of.clear()
        self._digest_of.clear()


def _marked(marks: Sequence[tuple[int, int, bytes]], first: int, size: int) -> bytes:
    """What the marks say of positions [first, first + size)."""
    said = [
        b"%d:%d:%d:%s" % (start - first, end - first, len(mark), mark)
        for start, end, mark in marks
        if start < first + size and end > first
    ]
    return b"".join(said)
