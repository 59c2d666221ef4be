"""Floor 1: who runs in the next step. Integers and numpy only; never a tensor."""

from headway.scheduler.one_pass import OnePassScheduler
from headway.scheduler.scheduler import Scheduler

__all__ = ["OnePassScheduler", "Scheduler"]
