"""A walk over the outer forms of checkpoints, see ``forms``: the logits are those of the model that was rounded and saved."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import HeadwayError, WeightsError
from tests.models.walk import oracle
from tests.models.walk.decoders import LENGTH, TOLERANCE, compare, config_class_of, excused, save
from tests.models.walk.draw import draw, known_fields, own_fields
from tests.models.walk.forms import QUANTISED, reshaped, rounded
from tests.models.walk.verdict import Outcome, Verdict, judged


def drawn(architecture: str, rng: random.Random) -> dict[str, Any]:
    """Fields of a configuration."""
    return draw(config_class_of(architecture), rng)


def judge(architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, save, read again, write in another form, and compare."""
    import transformers

    rng = random.Random(f"form {architecture} {seed}")
    verdict = Verdict(architecture, seed, Outcome.SKIPPED, fields=fields)
    model_class = getattr(transformers, architecture)
    with tempfile.TemporaryDirectory() as place:
        plain, other = Path(place) / "plain", Path(place) / "other"
        try:
            model = oracle.build(model_class, config_class_of(architecture), fields, seed)
            save(model, plain)
            tokens = oracle.tokens_of(seed, model.config.vocab_size, LENGTH)
            if not torch.allclose(oracle.run(_again(model_class, plain), tokens), oracle.run(model, tokens), atol=1e-4):
                raise oracle.CannotRunError("transformers reads another model than it wrote")
            told = rounded(plain, model, rng)
            model = _again(model_class, plain)
            wanted = oracle.run(model, tokens)
            told += ", " + reshaped(plain, other, model, rng)
            _same_configuration(model.config, other)
        except oracle.CannotRunError as error:
            verdict.detail = str(error)
            return verdict

        def check() -> tuple[Outcome, str]:
            if seed % 8 == 7:
                return _quantised(str(other), rng, lambda folder: compare(model, folder, tokens, wanted))
            try:
                return compare(model, str(other), tokens, wanted)
            except WeightsError as error:
                if "stacked" in told:  # as they are in memory: no release has such names, and all are listed
                    return Outcome.REFUSED, str(error)
                raise

        verdict.outcome, detail = judged(
            check, known_fields(model.config, other),
            lambda: excused(model, str(plain), wanted, TOLERANCE, lambda each: oracle.run(each, tokens)),
        )  # fmt: skip
        verdict.detail = f"[{told}] {detail}"
    return verdict


def _again(model_class: Any, folder: Path) -> Any:
    try:
        ways = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": "float32"}
        return model_class.from_pretrained(folder, **ways).eval()
    except Exception as error:
        raise oracle.CannotRunError(f"not read again: {type(error).__name__}: {error}") from error


def _same_configuration(config: Any, folder: Path) -> None:
    """That transformers understands the other spelling as it does its own."""
    try:
        other = type(config).from_pretrained(folder)
    except Exception as error:
        raise oracle.CannotRunError(f"spelled otherwise: {type(error).__name__}: {error}") from error
    mine, theirs = (dict(getattr(each, "rope_parameters", None) or {}) for each in (config, other))
    theirs.pop("type", None)  # the older name is kept beside the newer
    if mine != theirs:
        raise oracle.CannotRunError(f"spelled otherwise, {mine} is {theirs}")
    told, again = config.to_dict(), other.to_dict()
    config_class: Any = type(config)
    apart = [
        name for name in own_fields(config_class) if name != "rope_parameters" and told.get(name) != again.get(name)
    ]
    if apart:
        raise oracle.CannotRunError(f"spelled otherwise, {', '.join(apart)} mean something else")


def _quantised(folder: str, rng: random.Random, compare: Any) -> tuple[Outcome, str]:
    """A configuration that says weights are quantised, beside weights that are not, is refused by name."""
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": rng.choice(QUANTISED)}))
    try:
        compare(folder)
    except HeadwayError as error:
        if "quantization_config" in str(error):
            return Outcome.REFUSED, str(error)
        raise
    return Outcome.DIFFERENT, "quantization_config is not read"
