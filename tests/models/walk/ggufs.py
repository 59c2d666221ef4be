"""A walk over GGUF files: sizes are drawn for each kind of file that is read, and a type for each matrix."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from tests.models.tiny import TINY, Tiny, hf_model
from tests.models.walk import oracle
from tests.models.walk.decoders import LENGTH, TOLERANCE, compare, excused
from tests.models.walk.rules import divisors
from tests.models.walk.verdict import Outcome, Verdict, judged
from tests.weights.test_gguf_kinds import AS_FILES_ARE, CASES, write

Encode = Callable[[torch.Tensor], tuple[npt.NDArray[Any], Q | None]]
TYPES = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q5_1)


def drawn(case: str, rng: random.Random) -> dict[str, Any]:
    """What changes in one of the cases of ``tests/weights/test_gguf_kinds.py``."""
    own = TINY[case].config | AS_FILES_ARE.get(case, {})
    rope = own.get("rope_parameters") or {}
    partial = "partial_rotary_factor" in rope
    head_dim = rng.choice([20, 40]) if partial or "short_factor" in rope else rng.choice([8, 10, 16, 20, 32])
    heads = rng.choice([1, 2, 3, 4, 6])
    follows = own.get("head_dim", 20) == 10  # of families whose heads make up the hidden states
    hidden = heads * head_dim if follows or rng.random() < 0.3 else heads * rng.choice([8, 16, 20, 32])
    found: dict[str, Any] = {
        "vocab_size": rng.choice([61, 97, 131]), "hidden_size": hidden, "intermediate_size": rng.choice([24, 32, 56, 64]),
        "num_attention_heads": heads, "num_key_value_heads": rng.choice(divisors(heads)), "head_dim": head_dim,
        "rms_norm_eps": rng.choice([1e-3, 1e-5, 1e-6]), "tie_word_embeddings": rng.random() < 0.5 or not _unties(CASES[case]),
    }  # fmt: skip
    if "query_pre_attn_scalar" in own:
        found["query_pre_attn_scalar"] = head_dim
    if "short_factor" in rope:
        pairs = head_dim // 2
        factors = {f"{name}_factor": [round(rng.uniform(1, 3), 2) for _ in range(pairs)] for name in ("short", "long")}
        found["rope_parameters"] = rope | factors
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        found["rope_parameters"] = found.get("rope_parameters", rope) | {"rope_theta": rng.choice([500.0, 1e4, 1e6])}
    return found


def _unties(arch: str) -> bool:
    """Whether files of the kind may hold an output layer."""
    kinds = {name: i for i, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[arch], 1).get_name("lm_head") is not None


def judge(case: str, seed: int, fields: dict[str, Any]) -> Verdict:
    """Build, write with rounded weights, and compare."""
    rng = random.Random(f"gguf {case} {seed}")
    verdict = Verdict(case, seed, Outcome.SKIPPED, fields=fields)
    changes = AS_FILES_ARE.get(case, {}) | fields
    tiny = TINY[case]
    tiny = replace(tiny, family=changes.pop("family", tiny.family), config=tiny.config | changes)
    try:
        model = _model(tiny, seed)
        encode = _encoder(rng)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            tokens = oracle.tokens_of(seed, model.config.vocab_size, LENGTH)
            _write(path, CASES[case], model, encode)
            wanted = oracle.run(model, tokens)
            verdict.outcome, verdict.detail = judged(
                lambda: compare(model, str(path), tokens, wanted), changes,
                lambda: excused(model, str(path), wanted, TOLERANCE, lambda each: oracle.run(each, tokens)),
            )  # fmt: skip
    except oracle.CannotRunError as error:
        verdict.detail = str(error)
    return verdict


def _model(tiny: Tiny, seed: int) -> Any:
    try:
        model = hf_model(tiny)
        oracle.randomise(model, seed)
    except Exception as error:
        raise oracle.CannotRunError(f"{type(error).__name__}: {error}") from error
    return model


def _write(path: Path, arch: str, model: Any, encode: Encode) -> None:
    try:
        write(path, arch, model, encode)
    except AssertionError as error:  # files of the kind hold no such tensor
        raise oracle.CannotRunError(str(error)) from error


def _encoder(rng: random.Random) -> Encode:
    """Rounds a matrix in place to what a type can hold, and gives what a file has for it; vectors stay float32."""

    def encode(weight: torch.Tensor) -> tuple[npt.NDArray[Any], Q | None]:
        kind = rng.choice(TYPES)
        if weight.dim() < 2 or kind is Q.F32 or (weight.shape[-1] % 32 and kind not in (Q.F16, Q.BF16)):
            return weight.contiguous().numpy(), None
        blocks = quantize(weight.contiguous().numpy(), kind)
        weight.copy_(torch.from_numpy(np.ascontiguousarray(dequantize(blocks, kind))).view_as(weight))
        return blocks, kind

    return encode
