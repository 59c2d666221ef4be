"""A host that does not lead: it runs the followers of its ranks, and ends with the first of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Final

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.engine.rank_messages import secret

LOOK_SECONDS: Final = 0.2


def ranks_of(args: EngineArgs) -> range:
    """The ranks that run on this host."""
    each = args.num_ranks // args.nnodes
    return range(args.node_rank * each, (args.node_rank + 1) * each)


def run_node(args: EngineArgs) -> int:
    """Run this host's ranks until the leader ends them: the exit status, 0 only when all ended well.

    Raises:
        ConfigError: there is no secret, or this host leads.
    """
    if args.node_rank == 0:
        raise ConfigError("node_rank=0 leads: it serves, and takes in the ranks of other hosts")
    secret()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    children: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in ranks_of(args):
            # The secret comes by the environment: arguments show in ps.
            command = [sys.executable, "-P", "-m", "headway.engine.follower", "far"]
            command += [args.master_addr, str(args.master_port), str(rank)]
            environment = {**os.environ, "PYTHONPATH": path}
            children[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        while True:
            ended = {rank: code for rank, child in children.items() if (code := child.poll()) is not None}
            for rank, code in ended.items():
                if code:
                    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                    logger.error("rank %d %s; the others of this host are ended", rank, how)
                    return 1
            if len(ended) == len(children):
                return 0
            time.sleep(LOOK_SECONDS)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.wait()
