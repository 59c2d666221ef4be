"""Sparse vectors: entries of the vocabulary and their weights, of models that make them (SPLADE, BGE-M3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headway.api.pooling.requests import Floats
from headway.core.errors import InvalidRequestError
from headway.core.task import Task

if TYPE_CHECKING:
    from headway.api.pooling.door import PoolingDoor


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Attributes:
    indices: int32 [n], token ids, ascending.
    values: float32 [n], above zero.
    """

    indices: npt.NDArray[np.int32]
    values: Floats

    def dot(self, other: SparseVector) -> float:
        """The lexical match of two texts."""
        _, mine, theirs = np.intersect1d(self.indices, other.indices, assume_unique=True, return_indices=True)
        return float(self.values[mine] @ other.values[theirs])


def sparse_task(door: PoolingDoor) -> Task:
    """The task that brings sparse vectors. Raises InvalidRequestError where the model makes none."""
    if door.pooling.sparse:
        return Task.EMBED
    if door.pooling.token_weights:
        return Task.TOKEN_CLASSIFY
    served = ", ".join(task.value for task in door.info.tasks)
    missing = f": {door.pooling.missing}" if door.pooling.missing else ""
    raise InvalidRequestError(f"{door.info.model} serves {served} and makes no sparse vectors{missing}", "task")


def of_vocabulary(vector: Floats) -> SparseVector:
    """Of float32 [vocabulary] (SPLADE)."""
    indices = np.flatnonzero(vector > 0).astype(np.int32)
    return SparseVector(indices, vector[indices])


def of_tokens(weights: Floats, ids: Sequence[int], special: Collection[int]) -> SparseVector:
    """Of float32 [tokens, 1], weights of the last of ``ids`` (BGE-M3): the largest of each token, special ones left out."""
    flat = weights[:, 0]
    known = np.asarray(ids[len(ids) - len(flat) :], np.int32)
    keep = (flat > 0) & ~np.isin(known, list(special))
    indices, places = np.unique(known[keep], return_inverse=True)
    values = np.zeros(len(indices), np.float32)
    np.maximum.at(values, places, flat[keep])
    return SparseVector(indices, values)


def sparse_vectors(door: PoolingDoor, arrays: Sequence[Floats], ids: Sequence[Sequence[int]]) -> list[SparseVector]:
    """Of what the task of ``sparse_task`` brought for prompts of these token ids."""
    if door.pooling.sparse:
        return [of_vocabulary(array) for array in arrays]
    special: set[int] = set()
    if door.texts is not None:
        frame = door.texts.single
        special |= door.texts.tokenizer.special_ids | {*(frame.before + frame.after if frame is not None else ())}
    return [of_tokens(array, each, special) for array, each in zip(arrays, ids, strict=True)]
