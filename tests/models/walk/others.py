"""A walk over models that read something beside the prompt: encoder-decoders, and the text sides of models with sight."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.core.encode import EncoderItem
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.engine.boot import build_engine
from headway.models.sighted import _TEXT_CLASSES
from tests.engine.harness import run as run_engine
from tests.engine.tiny_encoder_decoders import START, arguments, text
from tests.models.walk import oracle
from tests.models.walk.decoders import LENGTH, MORE, TOLERANCE, config_class_of, excused, save
from tests.models.walk.draw import draw, known_fields, own_fields
from tests.models.walk.rope import LONGEST
from tests.models.walk.verdict import Outcome, Verdict, judged
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_sight import VOCAB, set_sight, without_timm

Forward = Callable[[Any, list[int]], torch.Tensor]


def draw_reader(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Fields of an encoder-decoder."""
    given: dict[str, Any] = {"decoder_start_token_id": START, "forced_eos_token_id": None, "forced_bos_token_id": None}
    if architecture.startswith("Whisper"):
        given |= {"max_source_positions": rng.choice([15, 30]), "num_mel_bins": rng.choice([5, 8, 12])}
        given |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    return draw(config_class_of(architecture), rng, **given)


def judge_reader(architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """It reads a text or a recording; its decoder's log-probabilities are compared."""
    if architecture.startswith("Whisper"):
        sizes = (fields["num_mel_bins"], 2 * fields["max_source_positions"])
        frames = np.random.default_rng(seed).standard_normal(sizes).astype(np.float32)
        rows = fields["max_source_positions"]
        item = EncoderItem(kind="audio", key=b"%16d" % seed, rows=rows, sizes=sizes, data=frames.tobytes())
        inputs = {"input_features": torch.from_numpy(frames)[None]}
    else:
        source = oracle.tokens_of(seed + 99, fields["vocab_size"], (1, 7, 30)[seed % 3], least=4)
        item, inputs = text(source), {"input_ids": torch.tensor([source])}
    return _judge(architecture, seed, fields, 12, lambda model, ids: _read(model, ids, inputs), [item])


@torch.no_grad()
def _read(model: Any, ids: list[int], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    # The test's inputs may be of another dtype than a model made double.
    own = next(model.parameters()).dtype
    inputs = {name: each.to(own) if each.is_floating_point() else each for name, each in inputs.items()}
    try:
        found: torch.Tensor = model(**inputs, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    except Exception as error:
        raise oracle.CannotRunError(f"{type(error).__name__}: {error}") from error
    if not found.isfinite().all():
        raise oracle.CannotRunError("its logits are not finite")
    return found


def draw_sighted(architecture: str, rng: random.Random) -> dict[str, Any]:
    """The text side is drawn, of any family where any may stand, and the tower stays."""
    outer = config_class_of(architecture)
    config = _tower(outer, architecture.removesuffix("ForConditionalGeneration"))
    text_class = _text_class(outer, type(outer(**config).text_config), rng)
    own = draw(text_class, rng, "rope_parameters" in config["text_config"], vocab_size=VOCAB)
    own["model_type"] = text_class.model_type
    if text_class.model_type == "gemma2" and architecture.startswith("PaliGemma"):
        own["sliding_window"] = 4096  # transformers lets a prompt that sees both ways see beyond it
    old, new = config["text_config"]["hidden_size"], own["hidden_size"]

    def fitted(values: dict[str, Any]) -> dict[str, Any]:
        """Sizes that are the text side's follow it."""
        return {name: new if value == old else value for name, value in values.items()}

    return fitted(config) | {"text_config": own, "vision_config": fitted(config["vision_config"])}


def _text_class(outer: Any, own: Any, rng: random.Random) -> Any:
    """``own``, or another family's."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if outer.sub_configs["text_config"] is not AutoConfig or rng.random() < 0.4:
        return own
    return CONFIG_MAPPING[rng.choice(["gemma", "gemma2"] if own.model_type == "gemma" else list(_TEXT_CLASSES))]


def judge_sighted(architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """No picture is shown."""

    def forward(model: Any, ids: list[int]) -> torch.Tensor:
        both_ways = fields["text_config"].get("use_bidirectional_attention") is not False
        if not (architecture.startswith("PaliGemma") and both_ways):
            return oracle.run(model, ids)
        kinds = (torch.arange(len(ids)) >= LENGTH).int()[None]  # its processor says which tokens are the prompt's
        return oracle.run(model, ids, token_type_ids=kinds)

    return _judge(architecture, seed, fields, LENGTH, forward, [])


def _tower(outer: type, family: str) -> dict[str, Any]:
    """A small configuration with a tower; that of another family that has the same fields where there is no other."""
    import transformers

    for name, config in CONFIGS.values():
        if name == family:
            return config
    alike = (own_fields(getattr(transformers, f"{name}Config")).keys() for name, _ in CONFIGS.values())
    return next(config for (_, config), each in zip(CONFIGS.values(), alike) if each == own_fields(outer).keys())


def _judge(
    architecture: str, seed: int, fields: dict[str, Any], length: int, forward: Forward, media: list[EncoderItem]
) -> Verdict:
    import transformers

    verdict = Verdict(architecture, seed, Outcome.SKIPPED, fields=fields)
    try:
        with without_timm():
            model = oracle.build(getattr(transformers, architecture), config_class_of(architecture), fields, seed)
        vocab = min(model.config.get_text_config().vocab_size, 99)
        tokens = oracle.tokens_of(seed, vocab, length, least=4)
        wanted = forward(model, tokens)
        with tempfile.TemporaryDirectory() as folder:
            save(model, Path(folder))
            if architecture.startswith("Gemma3n"):
                set_sight(Path(folder), {"architecture": None})
            config = known_fields(model.config, Path(folder))
            verdict.outcome, verdict.detail = judged(
                lambda: compare(model, folder, tokens, wanted, forward, media), config,
                lambda: excused(model, folder, wanted, TOLERANCE, lambda each: forward(each, tokens)),
            )  # fmt: skip
    except oracle.CannotRunError as error:
        verdict.detail = str(error)
    return verdict


def compare(
    model: Any, folder: str, tokens: list[int], wanted: torch.Tensor, forward: Forward, media: list[EncoderItem]
) -> tuple[Outcome, str]:
    """Log-probabilities of the whole vocabulary for every token, in steps of an odd size, two in flight."""
    vocab = wanted.shape[-1]
    sees_all = "PaliGemma" in type(model).__name__  # a prompt's tokens see each other: they come in one step
    sizes = {"max_num_batched_tokens": 64 if sees_all else 25, "max_model_len": LONGEST, "kv_cache_memory_bytes": 2**27}
    args = arguments(folder, max_logprobs=vocab, run_ahead=2, **sizes)
    core = build_engine(args, progress=False)
    try:
        params = SamplingParams(
            detokenize=False,
            temperature=0.0,
            max_tokens=MORE,
            ignore_eos=True,
            logprobs=vocab - 1,
            prompt_logprobs=vocab - 1,
        )
        asked = AddRequest(
            request_id="a", prompt_token_ids=tokens, params=params, seed=0, eos_token_ids=[], media=media
        )
        answer = run_engine(core, [asked])["a"]
        core.check_integrity()
    finally:
        core.shutdown()
    if answer.error is not None:
        return Outcome.CRASHED, answer.error
    expected = forward(model, tokens + answer.token_ids[:-1])
    told = [*answer.prompt_logprobs, *answer.logprobs]
    if len(told) != len(expected):
        return Outcome.CRASHED, f"{len(told)} rows of log-probabilities, not {len(expected)}"
    tolerance = TOLERANCE * max(1.0, float(expected.std()))

    def apart(each: torch.Tensor) -> float:
        rows = torch.log_softmax(each, -1)
        pairs = zip(told, rows, strict=True)
        return max(
            float((torch.tensor(values) - row[torch.tensor(ids)]).abs().max()) for (ids, values, _), row in pairs
        )

    found = apart(expected)
    if found <= tolerance:
        return Outcome.EQUAL, ""
    sequence = tokens + answer.token_ids[:-1]
    reason = excused(model, folder, expected, tolerance, lambda each: forward(each, sequence))
    return reason or (Outcome.DIFFERENT, f"log-probabilities are {found:.3g} apart")
