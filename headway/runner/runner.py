"""``ModelRunner.launch``: THE device loop's body. One step, from plan to readback, without a host wait: pack, then execute."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.automaton import Vocabulary
from headway.core.plan import Bound, StepLimit, StepPlan, StepResult
from headway.device.base import Device
from headway.device.step_clock import StepClock, StepEvents
from headway.device.waits import WaitCounter
from headway.models.interface import Model
from headway.parallel.group import RankError
from headway.parallel.turns import Turns
from headway.pooling.pooler import Pooler
from headway.runner.admission import AdmissionWriter
from headway.runner.config import RunnerConfig
from headway.runner.executor import Executor, Running
from headway.runner.followers import LEARN, STEP, Followers
from headway.runner.graphs import DecodeGraphs
from headway.runner.packer import Packer
from headway.runner.prefill_graphs import PrefillGraphs
from headway.runner.step_body import StepBody
from headway.sampling.sampler import Sampler
from headway.speculative.base import Drafter
from headway.state.cache_pool import CachePool
from headway.state.slots import SlotArena


@dataclass(slots=True)
class InFlight:
    """A launched step and its plan; None where it is empty."""

    plan: StepPlan | None
    running: Running

    @property
    def events(self) -> StepEvents | None:
        """What times it; None without a device clock."""
        return self.running.events


class ModelRunner:
    """Joins the packer (host) and the executor (device) of one engine.

    Args:
        arena: slot tables; the sampler's and the core ones.
        caches: the model's.
        drafter, pooler, turns: see ``StepBody``.

    Attributes:
        packer, executor: the two halves.
        followers: ranks that run the same steps; None: this one is alone, or follows.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        sampler: Sampler,
        arena: SlotArena,
        caches: CachePool,
        config: RunnerConfig,
        drafter: Drafter | None = None,
        pooler: Pooler | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.device, self.config = device, config
        self.packer = Packer(arena, sampler, config)
        self.packer.admissions.narrow_layers = model.spec.narrow_layers
        body = StepBody(device.torch_device, model, sampler, arena, caches, config, drafter, pooler, turns)
        self.executor = Executor(device, body, config)
        self.followers: Followers | None = None

    @property
    def admissions(self) -> AdmissionWriter:
        """Prepares requests."""
        return self.packer.admissions

    @property
    def clock(self) -> StepClock:
        """Times the steps."""
        return self.executor.clock

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether no token of a prompt may be skipped because its keys are cached."""
        return self.executor.body.needs_whole_prompts

    @property
    def num_replays(self) -> int:
        """Steps that ran as a captured graph, wholly or up to their logits."""
        return self.executor.num_replays

    def use_graphs(self, decode: DecodeGraphs, prefill: PrefillGraphs, media: PrefillGraphs | None = None) -> None:
        """See ``Executor.use_graphs``."""
        self.packer.decode_bound = Bound(self.config.longest_row)  # a graph is for contexts of any length
        self.executor.use_graphs(decode, prefill, media)

    @property
    def is_lost(self) -> bool:
        """Whether a rank that its steps need has gone."""
        return self.followers is not None and self.followers.lost is not None

    def check_followers(self) -> None:
        """Raises RankError then."""
        if self.followers is not None:
            self.followers.check()

    def learn(self, vocabulary: Vocabulary) -> None:
        """Send the bytes of the vocabulary's tokens to the device, without waiting. Only the first call does anything."""
        words = self.executor.learn(vocabulary)
        if words is not None and self.followers is not None:
            self.followers.send(LEARN, words.tobytes())

    def launch(self, plan: StepPlan | None, limit: StepLimit | None = None) -> InFlight:
        """Queue one step on the device and return at once.

        The results of at most ``max_in_flight`` steps may be outstanding; a further launch is the caller's bug.

        Args:
            plan: None: an empty step.
            limit: what other replicas that run it may have in it; None: there are none.
        """
        staging = self.executor.acquire()
        if plan is None:
            assert limit is not None, "an empty step is for the sake of others"
            launch = self.packer.empty(staging.ints, limit)
        else:
            launch = self.packer.pack(plan, staging.ints, limit)
        if self.followers is not None:
            self.followers.send(STEP, launch.encode())
        try:
            running = self.executor.run(launch, staging)
        except RankError as error:
            raise error if self.followers is None else self.followers.explain(error) from error
        if plan is not None:
            self.packer.launched(plan)
        return InFlight(plan, running)

    def collect(self, step: InFlight) -> StepResult:
        """The step's result. Blocks until it has arrived: the engine's only wait.

        Raises:
            RankError: another rank has gone, so what kernels that waited for it made is worth nothing.
        """
        try:
            found = self.executor.collect(step.running)
            self.check_followers()
            return found
        except RankError as error:  # a simulated device, which computes when it is waited for
            raise error if self.followers is None else self.followers.explain(error) from error

    def waits(self) -> dict[str, WaitCounter]:
        """Every wait for the device there can be in a step, by reason."""
        return self.executor.waits()

    def release(self) -> None:
        """Drop the graphs, so that the device's memory is freed with the runner."""
        self.executor.release()
