"""A walk over towers of pictures: their sizes and options are drawn, two pictures are shown."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headway.engine.boot import build_engine
from tests.engine.harness import run
from tests.models.walk import oracle
from tests.models.walk.decoders import TOLERANCE
from tests.models.walk.draw import known_fields, own_fields
from tests.models.walk.rules import ACTIVATIONS
from tests.models.walk.verdict import Outcome, Verdict, judged
from tests.multimodal.test_engine import info_of
from tests.multimodal.tiny_configs import CONFIGS
from tests.multimodal.tiny_sight import VOCAB, Sighted, arguments, changed, hf_inputs, hf_logits, picture, request

KEPT = re.compile(
    r"image_size|patch|merge|window|kernel|position_emb|out_hidden|projection|channels|vocab|index|dtype|dropout"
)
"""Fields that the pictures must fit, and those that mean nothing here."""
SQUARES = {"spatial_merge_size": (1, 2, 4), "num_position_embeddings": (4, 16, 49), "window_size": (8, 16, 32, 64)}
"""Geometry that may differ without another picture."""


def drawn(name: str, rng: random.Random) -> dict[str, Any]:
    """What changes in a family's tiny model, as ``tiny_sight.changed`` takes it."""
    import transformers

    family, config = CONFIGS[name]
    vision_class: Any = type(getattr(transformers, f"{family}Config")(**config).vision_config)
    heads, size, layers = rng.choice([1, 2, 3, 4]), rng.choice([4, 8, 12, 16, 20, 32]), rng.choice([1, 2, 3, 4])
    sizes = {
        "hidden_size": heads * size, "embed_dim": heads * size, "num_attention_heads": heads, "num_heads": heads,
        "num_key_value_heads": heads, "head_dim": size, "intermediate_size": rng.choice([1, 24, 33, 40, 64]),
        "num_hidden_layers": layers, "depth": layers, "mlp_ratio": rng.choice([1, 2, 3, 4]),
    }  # fmt: skip
    fields = own_fields(vision_class)
    if "embed_dim" in fields:
        del sizes["hidden_size"]
    found: dict[str, Any] = {each: value for each, value in sizes.items() if each in fields}
    for each, default in fields.items():
        if each in SQUARES and rng.random() < 0.4:
            found[each] = rng.choice(SQUARES[each])
        elif KEPT.search(each) or each in found:
            continue
        elif re.search(r"eps$", each):
            found[each] = 10.0 ** round(rng.uniform(-8, -2), 2)
        elif re.search(r"act$|activation$", each) and rng.random() < 0.4:
            found[each] = rng.choice(ACTIVATIONS)
        elif isinstance(default, bool) and rng.random() < 0.25:
            found[each] = not default
    for each in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if each in fields:
            found[each] = rng.sample(range(layers), rng.randrange(min(layers, 2) + 1))
    return {"vision_config": found} | _outer(name, layers, rng)


def _outer(name: str, layers: int, rng: random.Random) -> dict[str, Any]:
    """What a model says of the layer it takes, and of its projector."""
    found: dict[str, Any] = {}
    if name in ("llava", "mistral3", "internvl"):
        found["vision_feature_layer"] = rng.choice([-1, -2, -layers, layers, 1])
        found["projector_hidden_act"] = rng.choice(ACTIVATIONS)
    if name in ("llava", "mistral3"):
        found["multimodal_projector_bias"] = rng.random() < 0.5
    if name == "gemma3":
        found["mm_tokens_per_image"] = rng.choice([1, 4, 16, 64])
    return found


def judge(name: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, show two pictures, and compare all log-probabilities."""
    verdict = Verdict(name, seed, Outcome.SKIPPED, fields=fields)
    try:
        one = changed(name, fields)
    except Exception as error:
        verdict.detail = f"{type(error).__name__}: {error}"
        return verdict
    config = known_fields(one.model.config, Path(one.folder)) | fields["vision_config"]
    verdict.outcome, verdict.detail = judged(lambda: _compare(one), config, lambda: None)
    shutil.rmtree(one.folder)
    return verdict


def _picture(name: str, number: int) -> npt.NDArray[np.uint8]:
    """Of a size that squares of one, two and four patches make up, where the family takes any."""
    if not name.startswith(("qwen", "mistral")):
        return picture(name, number, larger=number > 1)
    return np.random.default_rng(number).integers(0, 256, (1, 16 + 16 * number, 64 - 16 * number, 3), np.uint8)


def _compare(one: Sighted) -> tuple[Outcome, str]:
    core = build_engine(arguments(one.folder, max_model_len=230), progress=False)
    try:
        info = info_of(core)
        parts = [5, _picture(one.name, 1), 7, 8, _picture(one.name, 2), 9]
        ids, given = hf_inputs(one, info, parts)
        try:
            expected = hf_logits(one, ids, len(ids), given)
        except Exception as error:
            raise oracle.CannotRunError(f"{type(error).__name__}: {error}") from error
        asked = request(info, "r", parts, max_tokens=1, logprobs=VOCAB - 1, prompt_logprobs=VOCAB - 1)
        answer = run(core, [asked])["r"]
    finally:
        core.shutdown()
    if answer.error is not None:
        return Outcome.CRASHED, answer.error
    told, scale = [*answer.prompt_logprobs, *answer.logprobs], max(1.0, float(expected.std()))
    rows = expected.log_softmax(-1)
    apart = max(
        float(np.abs(np.array(values) - row[torch.tensor(tokens)].numpy()).max())
        for (tokens, values, _), row in zip(told, rows, strict=True)
    )
    if apart <= TOLERANCE * scale:
        return Outcome.EQUAL, ""
    return Outcome.DIFFERENT, f"log-probabilities are {apart:.3g} apart"
