"""A walk over decoders: logits of one sequence cut into steps, and greedy tokens of the engine running ahead."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.engine.core import EngineCore
from headway.models.decoder import DecoderModel
from headway.models.registry import ARCHITECTURES
from tests.engine.harness import request
from tests.engine.harness import run as run_engine
from tests.models.harness import Machine
from tests.models.test_defaults import NOT_THEIRS, families
from tests.models.walk import oracle
from tests.models.walk.draw import draw, known_fields, own_fields
from tests.models.walk.rope import LONGEST, SHORTEST
from tests.models.walk.verdict import Outcome, Verdict, judged

TOLERANCE = 1e-3
LENGTH, MORE = 33, 6
LONG = 150
"""Tokens in one of four draws, as far as the model has them and its rotation does not depend on them."""
STATES = (
    "conv",
    "state_size",
    "mamba_d_state",
    "ssm_state_size",
    "linear_attn",
    "linear_conv_kernel_dim",
    "block_size",
)


def config_class_of(architecture: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[families()[architecture]]


def class_of(architecture: str) -> Any:
    """The class of its configuration, of architectures that pool, too."""
    import transformers

    return (
        config_class_of(architecture)
        if architecture in families()
        else getattr(transformers, architecture).config_class
    )


def group_of(architecture: str) -> str:
    """What an architecture is, by the fields of its configuration."""
    fields = own_fields(config_class_of(architecture))
    if "vision_config" in fields:
        return "sighted"
    if any("decoder_layers" in name for name in fields):
        return "encoder-decoders"
    if any(name in STATES or name.startswith(("mamba_", "conv_", "linear_")) for name in fields):
        return "hybrids"
    if "kv_lora_rank" in fields:
        return "latents"
    return "mixtures" if any("experts" in name for name in fields) else "decoders"


def architectures(group: str) -> list[str]:
    found = [name for name in ARCHITECTURES if name not in NOT_THEIRS]
    return [name for name in found if group_of(name) == group]


def drawn(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Fields of a configuration."""
    return draw(config_class_of(architecture), rng)


def judge(architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, run and compare."""
    import transformers

    config_class = config_class_of(architecture)
    verdict = Verdict(architecture, seed, Outcome.SKIPPED, fields=fields)
    try:
        model = oracle.build(getattr(transformers, architecture), config_class, fields, seed)
        tokens = oracle.tokens_of(seed, model.config.vocab_size, length_of(seed, model.config))
        wanted = oracle.run(model, tokens)
        with tempfile.TemporaryDirectory() as folder:
            save(model, Path(folder))
            config = known_fields(model.config, Path(folder))
            verdict.outcome, verdict.detail = judged(
                lambda: compare(model, folder, tokens, wanted), config,
                lambda: excused(model, folder, wanted, TOLERANCE, lambda each: oracle.run(each, tokens)),
            )  # fmt: skip
    except oracle.CannotRunError as error:
        verdict.detail = str(error)
    return verdict


def length_of(seed: int, config: Any) -> int:
    """Tokens of a draw's sequence."""
    values = config.to_dict()
    names = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
    has_more = all(values[name] > LONG + MORE for name in names if isinstance(values.get(name), int))
    follows = any(kind in str(values.get("rope_parameters")) for kind in ("dynamic", "longrope"))
    return LONG if seed % 4 == 3 and has_more and not follows else LENGTH


def save(model: Any, folder: Path) -> None:
    try:
        model.save_pretrained(folder)
    except Exception as error:
        raise oracle.CannotRunError(f"not saved: {type(error).__name__}: {error}") from error


def engine(folder: str, **changes: Any) -> EngineCore:
    """Steps of an odd size, two in flight."""
    sizes: dict[str, Any] = {
        "dtype": "float32", "max_model_len": LONGEST, "max_num_seqs": 3, "max_num_batched_tokens": 13, "block_size": 8,
        "kv_cache_memory_bytes": 2**26, "device": "cpu", "run_ahead": 2, "skip_tokenizer_init": True,
    }  # fmt: skip
    return build_engine(EngineArgs(model=folder, **sizes | changes), progress=False)


def compare(model: Any, folder: str, tokens: list[int], wanted: torch.Tensor) -> tuple[Outcome, str]:
    core = engine(folder, max_model_len=max(LONGEST, len(tokens) + MORE))
    try:
        ours = core._runner.executor.body.model
        assert isinstance(ours, DecoderModel)
        scale = max(1.0, float(wanted.std()))
        found = Machine(ours).in_chunks(tokens, cut(tokens))
        apart = float((found - wanted).abs().max()) if found.isfinite().all() else float("inf")
        if apart > TOLERANCE * scale:
            detail = f"logits of deviation {scale:.3g} are {apart:.3g} apart"

            def forward(each: Any) -> torch.Tensor:
                return oracle.run(each, tokens)

            if oracle.attends_otherwise(model, forward, found, TOLERANCE * scale):
                return Outcome.EQUAL, "as its other way of attending"
            return excused(model, folder, wanted, TOLERANCE * scale, forward) or (Outcome.DIFFERENT, detail)
        detail = _greedy(core, model, [tokens[: SHORTEST + 7], tokens[3 : SHORTEST + 3]], TOLERANCE * scale)
        return (Outcome.DIFFERENT, detail) if detail else (Outcome.EQUAL, "")
    finally:
        core.shutdown()


def cut(tokens: list[int]) -> list[int]:
    """Sizes of the steps that a sequence is cut into, drawn from it."""
    rng, found = random.Random(str(tokens)), list[int]()
    while sum(found) < len(tokens):
        found.append(min(rng.choice([1, 1, 2, 3, 5, 7, 8, 11, 12, 16, 31, 100]), len(tokens) - sum(found)))
    return found


def excused(
    model: Any, folder: str, wanted: torch.Tensor, tolerance: float, forward: Callable[[Any], torch.Tensor]
) -> tuple[Outcome, str] | None:
    """A difference that is not ours."""
    if folder.endswith(".gguf"):
        reason = oracle.unsteady(model, forward, tolerance)
        return (Outcome.SKIPPED, reason) if reason else None
    try:
        again = type(model).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager").eval()
        other = forward(again)
    except Exception as error:
        return Outcome.SKIPPED, f"transformers does not read what it wrote: {type(error).__name__}: {error}"
    if float((other - wanted).abs().max()) > tolerance / 4:
        return Outcome.SKIPPED, "transformers reads another model than it wrote"
    reason = oracle.unsteady(model, forward, tolerance)
    return (Outcome.SKIPPED, reason) if reason else None


def _greedy(core: EngineCore, model: Any, prompts: Sequence[list[int]], tie: float) -> str:
    """How the engine's greedy tokens differ from transformers'; "" where they do not."""
    asked = [
        request(str(n), prompt, temperature=0.0, ignore_eos=True, max_tokens=MORE) for n, prompt in enumerate(prompts)
    ]
    answers = run_engine(core, asked)
    core.check_integrity()
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for token in answers[str(number)].token_ids:
            logits = oracle.run(model, tokens)[-1]
            if float(logits.max() - logits[token]) > tie:
                return f"prompt {number}: token {token} behind {len(tokens)} tokens, not {int(logits.argmax())}"
            tokens.append(token)
        if len(tokens) != len(prompt) + MORE:
            return f"prompt {number}: {len(tokens) - len(prompt)} tokens of {MORE}"
    return ""
