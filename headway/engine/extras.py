"""What an engine does beside, or instead of, generating token by token: drafts, pooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.core.errors import ConfigError
from headway.core.task import Task
from headway.engine.drafts import Drafts
from headway.engine.world import World
from headway.parallel.mesh import Mesh
from headway.pooling.pooler import Pooler
from headway.state.slots import SlotArena, Table


@dataclass(frozen=True, slots=True)
class Pooling:
    """What an engine that pools does.

    Attributes:
        tasks: what requests may want, all of which pool.
        pooler: makes the pooler over the engine's slot tables, for hidden states of so many numbers.
        tables: slot tables that it needs, for hidden states of so many numbers.
    """

    tasks: tuple[Task, ...]
    pooler: Callable[[SlotArena, int], Pooler]
    tables: Callable[[int], list[Table]] = lambda hidden: []


@dataclass(frozen=True, slots=True)
class Extras:
    """What an engine does beside, or instead of, generating token by token, and with whom.

    Attributes:
        world: the ranks that run the model together with this one.

    Raises:
        ConfigError: drafts and pooling.
    """

    drafts: Drafts | None = None
    pooling: Pooling | None = None
    world: World = field(default_factory=lambda: World(Mesh()))

    def __post_init__(self) -> None:
        if self.drafts is not None and self.pooling is not None:
            raise ConfigError(
                "an engine that pools generates nothing, so there is nothing to draft; leave one of them out"
            )

    @property
    def lookahead(self) -> int:
        """Places behind a row's last token that the drafter writes keys to."""
        return 0 if self.drafts is None else self.drafts.lookahead

    @property
    def embeds(self) -> bool:
        """Whether the drafter reads the model's embedding."""
        return self.drafts is not None and self.drafts.embeds

    @property
    def num_drafts(self) -> int:
        """Drafts a row."""
        return 0 if self.drafts is None else self.drafts.number
