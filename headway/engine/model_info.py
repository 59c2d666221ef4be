"""What the API floor is told of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.config import EngineArgs
from headway.core.messages import ModelInfo
from headway.core.task import Task
from headway.engine.hearing import alignment_heads, encoder_info
from headway.engine.pooling import pooling_info
from headway.engine.sight import vision_info
from headway.engine.sizes import Sizes, kv_tokens
from headway.runner.admission import MAX_EOS_IDS

if TYPE_CHECKING:
    from headway.engine.boot import Loaded

_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_info(args: EngineArgs, loaded: Loaded, sizes: Sizes) -> ModelInfo:
    """Of the model that is loaded, in these sizes."""
    generation = loaded.checkpoint.generation_config
    eos = generation.get("eos_token_id")
    eos_ids = [eos] if isinstance(eos, int) else list(eos or loaded.model.spec.eos_token_ids)
    defaults = {name: float(generation[name]) for name in _GENERATION_FIELDS if generation.get(name) is not None}
    heads = alignment_heads(loaded.model, loaded.checkpoint)
    return ModelInfo(
        model=args.model,
        architecture=loaded.model.spec.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_cache_dtype=str(loaded.kv_dtype).removeprefix("torch."),
        device=str(loaded.device.torch_device),
        vocab_size=loaded.model.spec.vocab_size,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_logprobs=sizes.max_logprobs,
        eos_token_ids=[token for token in eos_ids if 0 <= token < loaded.model.spec.vocab_size][:MAX_EOS_IDS],
        generation_defaults=defaults if args.generation_config == "auto" else {},
        num_kv_tokens=kv_tokens(sizes, loaded.model.spec.cache),
        notes=list(loaded.device.notes),
        tasks=(Task.GENERATE,) if loaded.extras.pooling is None else loaded.extras.pooling.tasks,
        vision=vision_info(loaded.model.spec, sizes),
        sound=None if loaded.model.spec.pooling is not None else loaded.model.spec.sound,
        pooling=pooling_info(args, loaded.model, loaded.checkpoint, sizes.max_model_len),
        **encoder_info(loaded.model.spec, loaded.checkpoint, aligns=bool(heads)),
    )
