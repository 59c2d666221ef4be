"""Which block holds the KV of which token prefix.

A full block is named by a chained digest: blake2b over the parent block's digest and the block's token ids. The
digest is keyed with random bytes drawn at start, so a client cannot construct two prefixes that collide.
"""

from __future__ import annotations

import secrets
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

    def extend(self, digests: list[bytes], salt: str | None, tokens: Int32s, num_blocks: int) -> None:
        """Appends to ``digests`` until it names the first ``num_blocks`` full blocks of ``tokens`` (int32 [n])."""
        bs = self._block_size
        parent = digests[-1] if digests else self._root(salt)
        data = tokens[len(digests) * bs : num_blocks * bs].tobytes()
        width = bs * tokens.itemsize
        for start in range(0, len(data), width):
            state = self._keyed.copy()  # half the price of a new one
            state.update(parent + data[start : start + width])
            parent = state.digest()
            digests.append(parent)

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
