"""What a draw came to."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, HeadwayError, WeightsError
from tests.models.walk.oracle import CannotRunError


class Outcome(StrEnum):
    """EQUAL: within the tolerance, and the same greedy tokens. REFUSED: with an error that names a field. SKIPPED: transformers
    itself cannot, or its own rounding is as large. DIFFERENT and CRASHED are faults."""

    EQUAL = "equal"
    REFUSED = "refused"
    SKIPPED = "skipped"
    DIFFERENT = "different"
    CRASHED = "crashed"

    @property
    def is_fault(self) -> bool:
        return self in (Outcome.DIFFERENT, Outcome.CRASHED)


@dataclass(slots=True)
class Verdict:
    """Of one draw: ``architecture`` and ``seed`` say which."""

    architecture: str
    seed: int
    outcome: Outcome
    detail: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


def names_in(config: Mapping[str, Any]) -> set[str]:
    """Names of all fields of a config.json."""
    found = set(config)
    for value in config.values():
        if isinstance(value, Mapping):
            found |= names_in({str(key): each for key, each in value.items()})
    return found


def refusal(error: HeadwayError, config: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Whether an error tells the user which field it is for."""
    words, known = set(re.findall(r"\w+", str(error))), names_in(config)
    if isinstance(error, ConfigError):  # what the engine was asked for
        known |= {field.name for field in fields(EngineArgs)}
    if not isinstance(error, WeightsError) and words & known:
        return Outcome.REFUSED, str(error)
    return Outcome.CRASHED, f"no field is named: {type(error).__name__}: {error}"


Check = Callable[[], tuple[Outcome, str]]


def judged(
    check: Check, config: Mapping[str, Any], excuse: Callable[[], tuple[Outcome, str] | None]
) -> tuple[Outcome, str]:
    """The outcome of a check that may raise; ``excuse`` says why it would not be our fault, None: it is."""
    try:
        return check()
    except CannotRunError as error:  # of texts that only the comparison draws
        return Outcome.SKIPPED, str(error)
    except HeadwayError as error:
        found = refusal(error, config)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        found = Outcome.CRASHED, f"{type(error).__name__}: {error} ({where})"
    return (excuse() if found[0].is_fault else None) or found
