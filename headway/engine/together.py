"""What an engine of several ranks, or of steps in halves, cannot do; refused before anything is begun."""

from __future__ import annotations

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.engine.extras import Extras
from headway.models.interface import ModelSpec


def refuse_together(args: EngineArgs, extras: Extras) -> None:
    """Raises ConfigError for what an engine of several ranks cannot do."""
    if args.enable_expert_parallel:
        raise ConfigError(
            "enable_expert_parallel deals out experts over ranks, which is not there; leave it out, and set data_parallel_size "
            "for replicas of a mixture"
        )
    if args.node_rank:
        raise ConfigError("node_rank > 0 is for `headway serve` on the hosts that follow; host 0 has the engine")
    if args.num_ranks == 1:
        return
    drafts = extras.drafts
    if drafts is not None and drafts.load is not None:
        raise ConfigError(
            "a drafter with a model of its own runs on one rank; draft with method 'ngram', or leave out tensor_parallel_size "
            "and pipeline_parallel_size"
        )
    if drafts is not None and args.pipeline_parallel_size > 1:
        raise ConfigError(
            "drafts are verified where they are read, which stages are not; leave out pipeline_parallel_size"
        )
    if extras.pooling is not None or (drafts is not None and args.speculative_config is None):
        raise ConfigError("drafters and poolers that are handed in cannot be handed on to other ranks; run on one")
    if args.quantization == "gguf" and args.tensor_parallel_size > 1:
        raise ConfigError("quantization='gguf' insists on blocks, which cannot be cut into columns; use 'auto'")


def refuse_halves(args: EngineArgs, spec: ModelSpec) -> None:
    """Raises ConfigError where the steps of a model cannot be cut."""
    if not args.enable_dbo:
        return
    reasons = {
        "takes texts whole": spec.cache.is_empty,
        "has states, whose chunk tables are the whole step's": spec.cache.has_states,
        "caches latents, whose kernels are chosen by the whole step": spec.cache.has_latents,
        "has an encoder, whose outputs belong to whole rows": spec.encoder is not None or spec.cache.cross is not None,
    }
    for why in (why for why, holds in reasons.items() if holds):
        raise ConfigError(f"enable_dbo cuts steps at any token, and {spec.architecture} {why}; leave it out")
