"""A walk over models that pool: vectors of all tokens, or scores, of texts of several lengths."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.core.task import Task
from headway.models.encoder_config import SUFFIXES
from headway.models.purpose import DECODER_SUFFIXES
from headway.models.registry import ARCHITECTURES, ENCODERS
from tests.engine.tiny_encoders import engine, message, run
from tests.models.walk import oracle
from tests.models.walk.decoders import TOLERANCE, excused, save
from tests.models.walk.draw import draw, known_fields
from tests.models.walk.rope import LONGEST, SHORTEST
from tests.models.walk.verdict import Outcome, Verdict, judged

TYPES = (2, 9)
"""Positions of tokens of the second type."""


def architectures() -> list[str]:
    """Encoders with each ending, and decoders that are no longer decoders, as far as transformers has them."""
    import transformers

    stems = [(stem, tuple(SUFFIXES)) for stem in ENCODERS]
    for name in ARCHITECTURES:
        stem = name.removesuffix("ForCausalLM")
        text_alone = hasattr(transformers, f"{stem}TextModel") and hasattr(transformers, f"{stem}TextConfig")
        stems += [(f"{stem}Text" if text_alone else stem, tuple(DECODER_SUFFIXES))] if stem != name else []
    names = [stem + suffix for stem, suffixes in stems for suffix in suffixes]
    return [name for name in names if hasattr(transformers, name)]


def drawn(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Fields of a configuration."""
    given: dict[str, Any] = {"pad_token_id": rng.choice([0, 0, 1, 2])}
    if not architecture.endswith("Model"):
        given["num_labels"] = rng.choice([1, 1, 2, 3, 5])
        problems = [None, None, "regression", "multi_label_classification"]
        given["problem_type"] = rng.choice(problems + ["single_label_classification"] * (given["num_labels"] > 1))
    import transformers

    return draw(getattr(transformers, architecture).config_class, rng, **given)


def judge(architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, run and compare."""
    import transformers

    model_class = getattr(transformers, architecture)
    verdict = Verdict(architecture, seed, Outcome.SKIPPED, fields=fields)
    try:
        model = oracle.build(model_class, model_class.config_class, fields, seed)
        texts = _texts(seed, model.config)
        wanted = [_expected(model, text, seed) for text in texts]
        with tempfile.TemporaryDirectory() as folder:
            save(model, Path(folder))
            config = known_fields(model.config, Path(folder))
            verdict.outcome, verdict.detail = judged(
                lambda: compare(model, folder, texts, wanted, seed), config,
                lambda: excused(model, folder, wanted[-1], TOLERANCE, lambda each: _expected(each, texts[-1], seed)),
            )  # fmt: skip
    except oracle.CannotRunError as error:
        verdict.detail = str(error)
    return verdict


def _texts(seed: int, config: Any) -> list[list[int]]:
    """Where frequencies depend on a text's length, long ones alone."""
    by_length = "longrope" in str(config.to_dict().get("rope_parameters"))
    lengths = (SHORTEST, 20, 33, 13) if by_length else (1, 7, 20, 33)
    return [oracle.tokens_of(seed + i, config.vocab_size, length, least=5) for i, length in enumerate(lengths)]


def _inputs(model: Any, text: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Types of tokens, in every other draw."""
    if seed % 2 or (getattr(model.config, "type_vocab_size", 0) or 0) < 2:
        return {}
    start, end = TYPES
    return {"token_type_ids": torch.tensor([[int(start <= i < end) for i in range(len(text))]])}


@torch.no_grad()
def _expected(model: Any, text: list[int], seed: int) -> torch.Tensor:
    """float [...], logits, or hidden states of all tokens."""
    inputs = _inputs(model, text, seed)
    try:
        if type(model).__name__.endswith(("Classification", "Model")) is False:
            model = model.base_model
        made = model(torch.tensor([text]), **inputs)
    except Exception as error:
        raise oracle.CannotRunError(f"{type(error).__name__}: {error}") from error
    found: torch.Tensor = (made.logits if hasattr(made, "logits") else made.last_hidden_state)[0].float()
    if not found.isfinite().all():
        raise oracle.CannotRunError("what it gives is not finite")
    return found


def activated(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """As transformers' pipelines do."""
    problem, single = config.problem_type, logits.shape[-1] == 1
    if problem == "regression":
        return logits
    return logits.sigmoid() if single or problem == "multi_label_classification" else logits.softmax(-1)


def compare(
    model: Any, folder: str, texts: list[list[int]], wanted: list[torch.Tensor], seed: int
) -> tuple[Outcome, str]:
    name = type(model).__name__
    task = Task.TOKEN_EMBED
    changes: dict[str, Any] = {
        "max_model_len": LONGEST,
        "run_ahead": 2,
        "runner": "pooling",
        "skip_tokenizer_init": True,
    }
    if name.endswith("SequenceClassification"):
        task = Task.CLASSIFY
    elif name.endswith("TokenClassification"):
        task = Task.TOKEN_CLASSIFY
    else:
        changes["pooler_config"] = {"pooling_type": "all", "normalize": False}
    core = engine(folder, **changes)
    try:
        types = TYPES if _inputs(model, texts[-1], seed) else (0, 0)
        if types[1] and core.info.pooling is not None and core.info.pooling.num_token_types < 2:
            return Outcome.DIFFERENT, "the model has types of tokens, and none are known here"
        asked = []
        for i, text in enumerate(texts):
            span = (min(types[0], len(text)), min(types[1], len(text)))
            span = span if span[0] < span[1] else (0, 0)
            asked.append(message(f"{i}", text, task, token_type_range=span, raw=True))
            if task is Task.CLASSIFY:
                asked.append(message(f"{i}!", text, task, token_type_range=span))
        found = run(core, asked)
    finally:
        core.shutdown()
    for i, expected in enumerate(wanted):
        got = torch.from_numpy(np.array(found[f"{i}"])).view(expected.shape)
        scale = TOLERANCE * max(1.0, float(expected.abs().mean()))
        if not float((got - expected).abs().max()) <= scale:
            detail = f"text {i} of {len(texts[i])} tokens: {float((got - expected).abs().max()):.3g} apart"
            forward = lambda each: _expected(each, texts[i], seed)  # noqa: B023, E731
            if oracle.attends_otherwise(model, forward, got, scale):
                continue
            reason = oracle.unsteady(model, forward, scale)
            return (Outcome.SKIPPED, reason) if reason else (Outcome.DIFFERENT, detail)
        if task is Task.CLASSIFY:
            scores = torch.from_numpy(np.array(found[f"{i}!"])).view(expected.shape)
            if not float((scores - activated(expected, model.config)).abs().max()) <= scale:
                return (
                    Outcome.DIFFERENT,
                    f"text {i}: scores of problem {model.config.problem_type} are activated otherwise",
                )
    return Outcome.EQUAL, ""
