"""What becomes of matrices that a GGUF file stores in blocks."""

from __future__ import annotations

import torch

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.device.base import Device
from headway.kernels.cpu.ops import available as native_kernels
from headway.models.quantized_weights import BlockUse
from headway.weights import Checkpoint


def block_use(args: EngineArgs, checkpoint: Checkpoint, dtype: torch.dtype, device: Device) -> BlockUse:
    """How the blocks of a GGUF file are multiplied, as ``EngineArgs.quantization`` and ``dtype`` say.

    Raises:
        ConfigError: quantization='gguf', and they cannot stay.
    """
    name = str(dtype).removeprefix("torch.")
    why_not = None
    if not checkpoint.in_blocks:
        why_not = f"{checkpoint.path} is not a GGUF file with weights in blocks"
    elif device.torch_device.type != "cpu" or device.asynchronous:
        why_not = f"{args.device!r} is not a CPU; GPUs hold dequantised weights"
    elif dtype not in (torch.float32, torch.bfloat16):
        why_not = f"blocks are multiplied with float32 or bfloat16, not {name}"
    elif not native_kernels():
        why_not = "the native CPU kernels are off or cannot be built here"
    if args.quantization == "gguf":
        if why_not is not None:
            raise ConfigError(f"quantization='gguf' is not possible: {why_not}; use quantization='auto'")
        return BlockUse.ROUNDED
    if why_not is None and args.quantization == "auto":
        if args.dtype == "auto":
            return BlockUse.ROUNDED
        if dtype is torch.float32:
            return BlockUse.EXACT
    if checkpoint.in_blocks:
        reason = why_not or f"quantization={args.quantization!r}, dtype={args.dtype!r}"
        logger.info("GGUF blocks are dequantised to %s: %s", name, reason)
    return BlockUse.DEQUANTIZED
