"""What crosses the socket between a ProcessClient and its engine process: typed structs, encoded with msgpack.

Nothing else is ever decoded from a socket: no pickle, no type chosen by the sender outside these unions.
"""

from __future__ import annotations

import msgspec

from headway.core import errors
from headway.core.automaton import Vocabulary
from headway.core.config import EngineArgs
from headway.core.messages import AddRequest, EngineStats, ModelInfo, StepUpdates
from headway.core.seat import Seat


class Boot(msgspec.Struct, tag=True, array_like=True):
    """First message to the engine process: build an engine with ``factory`` ("module:function") from ``args``.

    Attributes:
        log_level: show the engine's log on stderr from this level on; None when the parent shows no log either.
        log_format: "text" or "json".
        seat: which of several replicas that share experts it is.
    """

    args: EngineArgs
    factory: str
    log_level: int | None = None
    log_format: str = "text"
    seat: Seat | None = None


class Learn(msgspec.Struct, tag=True, array_like=True):
    """The bytes of the model's tokens: comes before the first request with a grammar."""

    vocabulary: Vocabulary


class Add(msgspec.Struct, tag=True, array_like=True):
    """Start these requests."""

    requests: list[AddRequest]


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Stop these requests; unknown ids are ignored (they may just have finished)."""

    request_ids: list[str]


class StatsRequest(msgspec.Struct, tag=True, array_like=True):
    """Answer with Stats on the statistics socket."""


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Leave; open requests are dropped."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The engine stands."""

    info: ModelInfo


class Updates(msgspec.Struct, tag=True, array_like=True):
    """What one iteration of the engine brought."""

    updates: StepUpdates


class Dead(msgspec.Struct, tag=True, array_like=True):
    """The engine could not start or has stopped: an exception as plain text.

    Attributes:
        kind: class name; one of ``headway.core.errors`` is raised again as that class.
        parameter: of an InvalidRequestError.
    """

    kind: str
    message: str
    parameter: str | None = None


Command = Boot | Learn | Add | Abort | StatsRequest | Shutdown
Report = Ready | Updates | Dead

encode = msgspec.msgpack.encode
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_stats: msgspec.msgpack.Decoder[EngineStats] = msgspec.msgpack.Decoder(EngineStats)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.DecodeError on anything that is not a Command."""
    return _commands.decode(data)


def decode_report(data: bytes) -> Report:
    """Raises msgspec.DecodeError on anything that is not a Report."""
    return _reports.decode(data)


def decode_stats(data: bytes) -> EngineStats:
    """Raises msgspec.DecodeError on anything that is not an EngineStats."""
    return _stats.decode(data)


def describe(error: BaseException, details: str = "") -> Dead:
    """An exception as a message; ``details`` (a traceback) is added to errors not raised on purpose."""
    message = str(error)
    if not isinstance(error, errors.HeadwayError):
        message = f"{type(error).__name__}: {message}" + (f"\n{details}" if details else "")
    return Dead(type(error).__name__, message, getattr(error, "parameter", None))


def rebuild(dead: Dead) -> errors.HeadwayError:
    """The exception again: same class if it is one of ours, EngineDeadError otherwise."""
    kind = getattr(errors, dead.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.HeadwayError)):
        return errors.EngineDeadError(dead.message)
    error = kind.__new__(kind, dead.message)
    error.args = (dead.message,)
    if isinstance(error, errors.InvalidRequestError):
        error.parameter = dead.parameter
    return error
