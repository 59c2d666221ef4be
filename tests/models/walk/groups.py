"""The groups of architectures that a walk visits, and how each is walked."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, Final

from tests.models.walk import decoders, formed, ggufs, halves, known, others, pictured, poolers
from tests.models.walk.verdict import Outcome, Verdict
from tests.multimodal.tiny_sight import FAMILIES
from tests.weights.test_gguf_kinds import CASES

GROUPS: Final = (
    "decoders",
    "mixtures",
    "latents",
    "hybrids",
    "poolers",
    "encoder-decoders",
    "sighted",
    "forms",
    "gguf",
    "halves",
    "pictured",
)
Draw = Callable[[str, random.Random], dict[str, Any]]
Judge = Callable[[str, int, dict[str, Any]], Verdict]
_WALKS: Final[dict[str, tuple[Draw, Judge]]] = {
    "poolers": (poolers.drawn, poolers.judge),
    "gguf": (ggufs.drawn, ggufs.judge),
    "forms": (formed.drawn, formed.judge),
    "halves": (halves.drawn, halves.judge),
    "pictured": (pictured.drawn, pictured.judge),
    "encoder-decoders": (others.draw_reader, others.judge_reader),
    "sighted": (others.draw_sighted, others.judge_sighted),
}


def members(group: str) -> list[str]:
    if group == "gguf":
        return [*CASES]
    if group == "pictured":
        return [*FAMILIES]
    if group in ("forms", "halves"):
        return [
            name for each in ("decoders", "mixtures", "latents", "hybrids") for name in decoders.architectures(each)
        ]
    return poolers.architectures() if group == "poolers" else decoders.architectures(group)


def judge(group: str, architecture: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, run and compare a configuration of ``fields``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers', of odd sizes
        verdict = _WALKS.get(group, (decoders.drawn, decoders.judge))[1](architecture, seed, fields)
    why = known.reason(architecture, fields) if verdict.outcome.is_fault else ""
    if why:
        verdict.outcome, verdict.detail = Outcome.SKIPPED, why
    return verdict


def walk(group: str, architecture: str, seed: int) -> Verdict:
    """One draw of an architecture: the same for the same seed."""
    draw = _WALKS.get(group, (decoders.drawn, decoders.judge))[0]
    return judge(group, architecture, seed, draw(architecture, random.Random(f"{architecture} {seed}")))


def shrunk(group: str, verdict: Verdict) -> Verdict:
    """A faulty draw with as few fields as show the fault; sizes stay, since families' own are large."""
    outer = verdict.fields
    own = outer.get("text_config", outer)
    for name in list(own):
        if isinstance(own[name], int) and not isinstance(own[name], bool):
            continue
        less = {key: value for key, value in own.items() if key != name}
        found = judge(
            group, verdict.architecture, verdict.seed, less if own is outer else outer | {"text_config": less}
        )
        if found.outcome is verdict.outcome:
            own, outer = less, found.fields
            verdict = found
    return verdict
