"""What an engine does beside, or instead of, generating token by token: drafts, pooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.core.speculative import SpeculativeConfig
from headway.core.task import Task
from headway.pooling.pooler import Pooler
from headway.speculative.base import Drafter
from headway.speculative.ngram import NgramDrafter
from headway.speculative.synthetic import SyntheticDrafter
from headway.state.slots import SlotArena, Table


@dataclass(frozen=True, slots=True)
class Drafts:
    """What guesses tokens ahead.

    Attributes:
        number: drafts a row, at least 1.
        drafter: makes the drafter over the engine's slot tables, for a vocabulary of so many tokens.
    """

    number: int
    drafter: Callable[[SlotArena, int], Drafter]

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> Drafts | None:
        """What ``config`` asks for; None where there is none."""
        if config is None:
            return None
        number, length = config.num_speculative_tokens, config.synthetic_acceptance_length
        if length is None:
            return cls(number, lambda arena, vocab_size: NgramDrafter(arena, number, *config.lookup))
        logger.warning(
            "SYNTHETIC ACCEPTANCE: rows bring %g tokens a step whatever the model says. For benchmarks only: what is "
            "generated is no text, its log-probabilities are of other tokens, and grammars will break",
            length,
        )

        def make(arena: SlotArena, vocab_size: int) -> Drafter:
            return SyntheticDrafter(arena, number, NgramDrafter(arena, number, *config.lookup), length, vocab_size)

        return cls(number, make)


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
    """What an engine does beside, or instead of, generating token by token.

    Raises:
        ConfigError: both.
    """

    drafts: Drafts | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if self.drafts is not None and self.pooling is not None:
            raise ConfigError(
                "an engine that pools generates nothing, so there is nothing to draft; leave one of them out"
            )

    @property
    def num_drafts(self) -> int:
        """Drafts a row."""
        return 0 if self.drafts is None else self.drafts.number
