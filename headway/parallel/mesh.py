"""Which rank does what: stages of layers, and within a stage shards of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from headway.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank's place among those that run one model together.

    Rank 0 leads: it schedules, and it is of the last stage, where tokens are drawn. So stages count from the back: ranks
    0 ... tensor - 1 are the last stage, the next ones the stage before it.

    Attributes:
        tensor: ranks that each layer is cut into.
        pipeline: stages that the layers are cut into.
        rank: this one, from 0 to tensor * pipeline - 1.
        replica, replicas: which of those that share experts, each with ranks of its own.
    """

    tensor: int = 1
    pipeline: int = 1
    rank: int = 0
    replica: int = 0
    replicas: int = 1

    @property
    def size(self) -> int:
        """Ranks of one model."""
        return self.tensor * self.pipeline

    @property
    def tensor_rank(self) -> int:
        """Which part of each layer this rank has."""
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        """Which stage this rank is of; 0 has the embedding."""
        return self.pipeline - 1 - self.rank // self.tensor

    @property
    def is_last(self) -> bool:
        """Whether tokens are drawn here."""
        return self.stage == self.pipeline - 1

    def at(self, rank: int) -> Mesh:
        """The place of another rank."""
        return replace(self, rank=rank)

    @property
    def name(self) -> str:
        """As the log has it."""
        parts = [f"rank {self.rank}"]
        if self.replicas > 1:
            parts.append(f"replica {self.replica}")
        if self.pipeline > 1:
            parts.append(f"stage {self.stage}")
        if self.tensor > 1:
            parts.append(f"part {self.tensor_rank}")
        return parts[0] if len(parts) == 1 else f"{parts[0]} ({', '.join(parts[1:])})"

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage; earlier stages have one more where they cannot all have as many.

        Raises:
            ConfigError: there are more stages than layers.
        """
        if num_layers < self.pipeline:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline} is more than the model's {num_layers} layers; lower it"
            )
        each, more = divmod(num_layers, self.pipeline)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))


def stage_starts(num_layers: int, pipeline: int, barred: Collection[int] = ()) -> list[int]:
    """The first layers of ``pipeline`` stages, rising: as even as can be where no stage begins with one of ``barred``, which is
    to have the longest stage as short as can be. Where there is no such way it is as if none were barred.

    Raises:
        ConfigError: there are more stages than layers.
    """
    even = sorted(Mesh(pipeline=pipeline, rank=rank).layers(num_layers).start for rank in range(pipeline))
    if not {*even} & {*barred}:
        return even
    ends = [end for end in range(1, num_layers + 1) if end not in barred or end == num_layers]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # where the stages so far end -> the longest, their starts
    for _ in range(pipeline):
        found = dict[int, tuple[int, list[int]]]()
        for end in ends:
            ways = [(max(longest, end - at), [*starts, at]) for at, (longest, starts) in best.items() if at < end]
            if ways:
                found[end] = min(ways)
        best = found
    return best[num_layers][1] if num_layers in best else even


def share(total: int, rank: int, size: int) -> range:
    """What ``rank`` of ``size`` has of ``total`` things: neighbours, as many as the others or one more."""
    return range(total * rank // size, total * (rank + 1) // size)
