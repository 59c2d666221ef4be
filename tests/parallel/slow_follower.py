"""``headway.engine.follower``, but from its third step on it never comes to an end, while it says that it lives."""

from __future__ import annotations

import signal
import sys
from typing import Any

from headway.engine import follower
from headway.runner.executor import Executor

QUICK = 2
"""Steps that it runs at once. A build of the engine runs some too."""


def main(arguments: list[str]) -> int:
    """See ``follower.main``."""
    run, follow = Executor.run, follower.follow
    left: list[int] = []

    def slow(self: Executor, *given: Any) -> Any:
        if left and not left.pop():
            signal.pause()
        return run(self, *given)

    def counted(*given: Any) -> None:
        left[:] = [0, *[1] * QUICK]
        follow(*given)

    setattr(Executor, "run", slow)  # noqa: B010 - its type is another
    setattr(follower, "follow", counted)  # noqa: B010 - as above
    return follower.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
