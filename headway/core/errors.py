"""The exceptions Headway raises.

HeadwayError
├── InvalidRequestError (ValueError)     one request is wrong; says which field and how to mend it
│   └── UnknownParameterError (TypeError)   an unknown keyword
├── ConfigError (ValueError)             engine arguments contradict each other or the machine
├── ModelError                           the checkpoint cannot be served
│   ├── UnsupportedModelError            architecture or feature we do not implement
│   └── WeightsError                     a file is missing, corrupt, or names the wrong tensors
├── OutOfMemoryError                     weights or KV cache do not fit; says what would
├── BusyError                        nothing is wrong with the request, but it could not be done now: try again
├── RequestFailedError                   one request died inside the engine; the others live on
└── EngineDeadError                      the engine process or loop is gone; every open request gets this
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadwayError(Exception):
    """Base of everything Headway raises on purpose."""


class InvalidRequestError(HeadwayError, ValueError):
    """A request asks for something impossible.

    Args:
        message: what is wrong and how to mend it.
        parameter: the offending field, for OpenAI error bodies.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class UnknownParameterError(InvalidRequestError, TypeError):
    """A keyword that no part of Headway honours; the nearest known one is suggested."""

    def __init__(self, name: str, known: Iterable[str], owner: str) -> None:
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        super().__init__(f"{owner} has no parameter {name!r}{hint}", name)


class ConfigError(HeadwayError, ValueError):
    """Engine arguments that contradict each other, the model or the machine."""


class ModelError(HeadwayError):
    """The checkpoint cannot be served."""


class UnsupportedModelError(ModelError):
    """An architecture, rope scaling, activation or tensor type Headway does not implement."""


class WeightsError(ModelError):
    """A weight file is missing or corrupt, or does not hold exactly the tensors the model needs."""


class OutOfMemoryError(HeadwayError):
    """Weights or KV cache do not fit the device; the message says what would."""


class BusyError(HeadwayError):
    """The machine had no room or no time for a request with which nothing is wrong: the same one may be served later."""


class RequestFailedError(HeadwayError):
    """One request failed inside the engine. Other requests are not affected."""


class EngineDeadError(HeadwayError):
    """The engine stopped; raised to every request still open and to every later call."""
