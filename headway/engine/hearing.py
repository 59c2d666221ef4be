"""What the front ends must know of a model whose decoder reads an encoder: tokens of languages, tasks and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headway.core.cache import CacheLayout
from headway.core.errors import ConfigError
from headway.core.hearing import HearingInfo
from headway.models.encoder_decoder import EncoderDecoderConfig
from headway.models.interface import AligningModel, Model, ModelConfig, ModelSpec
from headway.state.slots import ENCODER_LEN, Table
from headway.weights import Checkpoint


def refuse_drafts(config: ModelConfig, *, drafting: bool) -> None:
    """Raises ConfigError: the model cannot be run with drafts."""
    if not drafting:
        return
    if config.pooling is not None:
        raise ConfigError("an engine that pools generates nothing, so there is nothing to draft; leave drafts out")
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigError(f"{config.architecture} has an encoder, and drafts beside one are not made; leave drafts out")


def hears(spec: ModelSpec) -> bool:
    """Whether the model's decoder reads recordings."""
    return spec.encoder is not None and spec.encoder.kind == "audio" and spec.cache.cross is not None


def encoder_tables(layout: CacheLayout) -> list[Table]:
    """The slot tables of models with cross-attention."""
    return [] if layout.cross is None else [Table(ENCODER_LEN)]


def alignment_heads(model: Model, checkpoint: Checkpoint) -> tuple[tuple[int, int], ...]:
    """(layer, head) of the cross-attention that tells when words are heard: those that the model's files name, else all of the
    upper half of the layers, as Whisper's authors have it. () for models that do not hear, and for parts of one.

    Heads that the model has not are left out: distilled models keep the list of their teacher.
    """
    if not hears(model.spec):
        return ()
    layers, heads = cast(AligningModel, model).cross_heads
    named = checkpoint.generation_config.get("alignment_heads") or checkpoint.config.get("alignment_heads")
    pairs = [each for each in named if isinstance(each, list) and len(each) == 2] if isinstance(named, list) else []
    whole = [(layer, head) for layer, head in pairs if isinstance(layer, int) and isinstance(head, int)]
    found = [(layer, head) for layer, head in whole if 0 <= layer < layers and 0 <= head < heads]
    return tuple(found or [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)])


def encoder_info(spec: ModelSpec, checkpoint: Checkpoint, *, aligns: bool = False) -> dict[str, Any]:
    """Fields of ``ModelInfo``; none for models without cross-attention. ``aligns``: see ``HearingInfo``."""
    if spec.encoder is None or spec.cache.cross is None:
        return {}
    said = {**checkpoint.config, **checkpoint.generation_config}
    start = _token(said, "decoder_start_token_id")
    begins = [token for token in (start, _token(said, "forced_bos_token_id")) if token >= 0]
    found: dict[str, Any] = {
        "encoder": spec.encoder.kind,
        "decoder_start": begins,
        "max_encoder_tokens": spec.encoder.longest,
    }
    if hears(spec) and start >= 0:
        found["hearing"] = _hearing(spec, said, start)
        found["hearing"].aligns = aligns
    return found


def _hearing(spec: ModelSpec, said: Mapping[str, Any], start: int) -> HearingInfo:
    assert spec.encoder is not None
    bins, frames = spec.encoder.sizes
    languages = {str(name).strip("<|>"): token for name, token in (said.get("lang_to_id") or {}).items()}
    tasks = dict(said.get("task_to_id") or {})
    without = _token(said, "no_timestamps_token_id")
    previous = _token(said, "prev_sot_token_id")
    if previous < 0 and without >= 0:
        previous = without - 2  # its place in every vocabulary of Whisper's
    return HearingInfo(
        mel_bins=bins,
        frames=frames,
        outputs=spec.encoder.longest,
        start=start,
        end=(spec.eos_token_ids or (-1,))[0],
        previous=previous,
        no_timestamps=without,
        first_timestamp=without + 1 if without >= 0 else -1,
        no_speech=without - 1 if without >= 0 else -1,
        languages=languages,
        tasks=tasks,
        suppress=_listed(said, "suppress_tokens", spec.vocab_size),
        begin_suppress=_listed(said, "begin_suppress_tokens", spec.vocab_size),
        max_initial=_token(said, "max_initial_timestamp_index"),
    )


def _token(said: Mapping[str, Any], name: str) -> int:
    value = said.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _listed(said: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    value = said.get(name)
    return (
        [token for token in value if isinstance(token, int) and 0 <= token < vocab_size]
        if isinstance(value, list)
        else []
    )
