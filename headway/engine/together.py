"""What an engine of several ranks, or of steps in halves, cannot do; refused before anything is begun."""

from __future__ import annotations

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.seat import Seat
from headway.engine.extras import Extras
from headway.models.interface import ModelSpec


def refuse_together(args: EngineArgs, extras: Extras, seat: Seat | None = None) -> None:
    """Raises ConfigError for what an engine of several ranks, or a replica that shares experts, cannot do."""
    if seat is not None:
        _refuse_shared(args, extras)
    if args.node_rank:
        raise ConfigError("node_rank > 0 is for `headway serve` on the hosts that follow; host 0 has the engine")
    if args.num_ranks == 1:
        return
    drafts = extras.drafts
    if extras.pooling is not None or (drafts is not None and args.speculative_config is None):
        raise ConfigError("drafters and poolers that are handed in cannot be handed on to other ranks; run on one")
    if args.quantization == "gguf" and args.tensor_parallel_size > 1:
        raise ConfigError("quantization='gguf' insists on blocks, which cannot be cut into columns; use 'auto'")


def _refuse_shared(args: EngineArgs, extras: Extras) -> None:
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            "stages of several replicas that share experts would wait for each other in turn; leave out "
            "pipeline_parallel_size, or enable_expert_parallel"
        )
    if extras.drafts is not None and (extras.drafts.load is not None or args.speculative_config is None):
        raise ConfigError(
            "a drafter with a model of its own runs steps that other replicas do not; draft with method 'ngram', or leave out "
            "enable_expert_parallel"
        )
    if extras.drafts is not None and args.enable_dbo:
        raise ConfigError(
            "enable_dbo cuts rows of drafts, which have different lengths, into halves that may be as large as the step, and "
            "replicas that share experts would exchange as much for each half as for the whole; leave out enable_dbo, the "
            "drafter, or enable_expert_parallel"
        )


def refuse_halves(args: EngineArgs, spec: ModelSpec, *, shares: bool) -> None:
    """Raises ConfigError where the steps of a model cannot be cut; ``shares``: other replicas run them, too."""
    if not args.enable_dbo:
        return
    if spec.cache.is_empty:
        raise ConfigError(
            f"enable_dbo cuts steps at any token, and {spec.architecture} takes texts whole, whose tokens see later ones; "
            "leave it out"
        )
    if shares and spec.vision is not None and spec.vision.sees:
        raise ConfigError(
            f"enable_dbo leaves steps whole whose tokens see later ones, as those of pictures in {spec.architecture} do, and "
            "replicas that share experts do not know that of each other; leave out enable_dbo, or enable_expert_parallel"
        )
