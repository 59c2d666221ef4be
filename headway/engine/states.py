"""How an engine stores the states of its model: in which dtype, and with which rings of inputs."""

from __future__ import annotations

import torch

from headway.core.chunks import ring_places
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.models.interface import ModelSpec
from headway.state.cache_pool import StateStorage

WRITE_BACK = 8
"""Tokens between two writes of a recurrent state where drafts need a ring (docs/hybrid.md has the arithmetic)."""


def state_storage(args: EngineArgs, spec: ModelSpec, dtype: torch.dtype, num_drafts: int) -> StateStorage:
    """How states are stored, of no slot yet.

    Args:
        dtype: the model's.

    Raises:
        ConfigError: the model does not cache what an argument is of, or the drafts need a ring that it cannot have.
    """
    layout, architecture = spec.cache, spec.architecture
    named, write_back = args.mamba_ssm_cache_dtype, args.replayssm_buffer_len
    if named != "auto" and not layout.has_states:
        raise ConfigError(
            f"mamba_ssm_cache_dtype={named!r} applies to recurrent states, and {architecture} has none; "
            "use mamba_ssm_cache_dtype='auto'"
        )
    if args.kv_cache_dtype != "auto" and not any(layout.layers) and spec.stage is None:
        raise ConfigError(f"{architecture} caches no keys and values; use kv_cache_dtype='auto'")
    if write_back and not layout.recurrent and spec.stage is None:  # other stages may have some
        raise ConfigError(
            f"replayssm_buffer_len={write_back} applies to recurrent states, and {architecture} has none; leave it out"
        )
    if write_back is None:
        write_back = WRITE_BACK if num_drafts else 0
    if layout.recurrent:
        if num_drafts and not write_back:
            raise ConfigError(
                "drafts need the ring of inputs that replayssm_buffer_len=0 turns off; leave one of them out"
            )
        if write_back and not all(part.inputs for part in layout.recurrent):
            raise ConfigError(
                f"{architecture} has recurrent states that cannot be run again from their inputs; turn speculative decoding "
                "off and leave out replayssm_buffer_len"
            )
    named_by_rings = "float32" if write_back else "auto"  # with rings a token is rounded at other times than without
    recurrent = named_by_rings if named == "auto" else named
    return StateStorage(
        0,
        dtype,
        None if recurrent == "auto" else getattr(torch, recurrent),
        drafts=num_drafts if layout.has_states else 0,
        replays=ring_places(write_back, num_drafts + 1) if layout.recurrent and write_back else 0,
    )
