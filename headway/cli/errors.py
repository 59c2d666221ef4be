"""Errors as one clean line: exit status 2 for what the user can mend, 1 for the rest."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from headway.core.errors import EngineDeadError, HeadwayError, RequestFailedError


def clean_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator for commands. ``HEADWAY_DEBUG=1`` shows tracebacks."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except HeadwayError as error:
            fail(error, 1 if isinstance(error, (EngineDeadError, RequestFailedError)) else 2)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of our output has gone (headway generate | head): no error of ours.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            fail(error, 1)

    return run


def fail(error: Exception, status: int) -> None:
    """Print ``error`` and leave."""
    if os.environ.get("HEADWAY_DEBUG") == "1":
        raise error
    ours = isinstance(error, HeadwayError)
    text = str(error) if ours else f"internal error: {type(error).__name__}: {error} (HEADWAY_DEBUG=1 shows where)"
    typer.echo(f"headway: {' '.join(text.split())}", err=True)
    raise typer.Exit(status) from None


def set_up_logging(verbose: bool) -> None:
    """Show what the engine decides (``verbose``), or only warnings."""
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("headway").setLevel(logging.INFO if verbose else logging.WARNING)
