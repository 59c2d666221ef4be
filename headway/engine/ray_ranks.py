"""Ray as launcher and placer of ranks (the extra ``ray``): where they run, and which GPU each gets.

Ray starts a process for each follower, which comes to the leader as one of another host does (``engine.follower``); nothing
that a step needs goes through Ray. The leader is the process that asks: it must run on a node of the cluster, whose GPU it gets
from Ray, too. Ray itself pickles what it sends between its own processes: addresses and numbers, and the ranks' secret.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.engine.rank_messages import SECRET_VARIABLE

PLACE_SECONDS: Final = 600.0
"""How long Ray may take to find room; a cluster may have to grow."""


@dataclass
class Placement:
    """Room for all ranks.

    Attributes:
        address: of the leader, for the others.
        device: of the leader.
    """

    address: str
    device: str
    _ray: Any
    _group: Any
    _gpus: int
    _tasks: list[Any] = field(default_factory=list)

    def start(self, port: int, ranks: range) -> None:
        """Begin the processes of ``ranks``, which come to ``port``."""
        secret = os.environ[SECRET_VARIABLE]
        for rank in ranks:
            where = _bundle(self._group, rank)
            task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0, scheduling_strategy=where)(follow)
            self._tasks.append(task.remote(self.address, port, rank, secret, _path()))

    def end(self) -> None:
        """Give the room back; what still runs there is killed."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                self._ray.cancel(task, force=True)


def follow(address: str, port: int, rank: int, secret: str, path: str) -> int:
    """Runs on a worker of Ray: the follower's process; its exit status. It ends with the worker."""
    command = [sys.executable, "-P", "-m", "headway.engine.follower", "far", address, str(port), str(rank)]
    environment = {**os.environ, SECRET_VARIABLE: secret, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode


def _path() -> str:
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _gpu() -> str:
    """Runs on a worker of Ray: the GPU that it was given."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


class _Holder:
    """An actor that holds the leader's GPU, so that Ray gives it to nobody else."""

    def gpu(self) -> str:
        return _gpu()


def _bundle(group: Any, rank: int) -> Any:
    strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    return strategy(placement_group=group, placement_group_bundle_index=rank)


@contextmanager
def placed(args: EngineArgs) -> Iterator[Placement]:
    """Room for all ranks of an engine, in the cluster that RAY_ADDRESS names, or else in one of this host alone.

    Raises:
        ConfigError: there is no Ray, or no room.
    """
    if ":" in args.device:
        raise ConfigError(
            f"Ray chooses the GPU of each rank, and device={args.device!r} names one; leave out its number"
        )
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend='ray' needs Ray: pip install 'headway[ray]'; or begin the ranks yourself with "
            "--nnodes, --node-rank and --master-addr"
        ) from error
    mine = not ray.is_initialized()
    if mine:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    group = None
    placement = None
    try:
        gpus = int(not args.device.startswith("cpu") and ray.cluster_resources().get("GPU", 0) > 0)
        own, address = {"CPU": 1, **({"GPU": 1} if gpus else {})}, ray.util.get_node_ip_address()
        bundles = [{**own, f"node:{address}": 0.001}, *[own] * (args.num_ranks - 1)]
        group = ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(PLACE_SECONDS):
            raise ConfigError(
                f"Ray has no room for {args.num_ranks} ranks of {own} within {PLACE_SECONDS:g} s, one of them on this node; "
                f"it has {ray.available_resources()}"
            )
        holder = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=_bundle(group, 0))(_Holder).remote()
        device = f"cuda:{ray.get(holder.gpu.remote())}" if gpus else "cpu"
        alone = len([node for node in ray.nodes() if node["Alive"]]) == 1
        placement = Placement("127.0.0.1" if alone else address, device, ray, group, gpus)
        logger.info("Ray has placed %d ranks; the leader is on %s", args.num_ranks, device)
        yield placement
    finally:
        if placement is not None:
            placement.end()
        if group is not None:
            ray.util.remove_placement_group(group)
        if mine:
            ray.shutdown()
