"""Checkpoints: where a model's files are, what configuration they describe, and their tensors by name.

Reads safetensors and GGUF, nothing else: no pickle, no code from model repositories.
The names load on first use: a process that only wants a tokenizer's files finds them without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from headway.weights import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
