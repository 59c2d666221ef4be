"""Rotary position embeddings: reading their configuration and making the cosine and sine table.

A head's first ``rotary_dim`` dimensions are rotated in pairs (i, i + rotary_dim / 2) by position * frequency[i], with
frequency[i] = theta ** (-2 i / rotary_dim) (Su et al. 2021). The kinds below change the frequencies, to stretch the
context a model was trained on; the formulas are those of transformers' ``modeling_rope_utils``, in its order of float32
operations, because at position 100 000 one rounding of a frequency is already visible.

Two kinds depend on the length of the sequence in transformers: "dynamic" and "longrope" change the frequencies once a
sequence outgrows the original context. With a KV cache that mixes keys rotated by different frequencies, and what a
token gets would depend on how its prompt was cut into steps. Here the frequencies are those of the longest sequence the
engine admits (``max_len``), for every position of every request. So an engine whose ``max_model_len`` is within the
original context computes what transformers does; with a longer one, every sequence is computed as transformers would
compute one of ``max_model_len`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One rotary embedding, every default resolved.

    Attributes:
        kind: a key of ``ROPE_KINDS``.
        theta: base of the frequencies.
        rotary_dim: leading dimensions of a head that rotate; even.
        original_len: context the model was trained on before it was stretched.
        factor: how much longer the context becomes; 1 where the kind has none.
        attention_factor: multiplies cosines and sines.
        long_attention_factor: does so where longrope uses its ``long_factors``; None: it is the same.
        low_freq_factor, high_freq_factor: llama3's band, in turns per original context.
        beta_fast, beta_slow: yarn's band, in turns per original context.
        truncate: yarn rounds its band outwards to whole dimensions.
        short_factors, long_factors: divisors per frequency [rotary_dim / 2] (longrope); "factors" uses short_factors.
        turning: pairs that turn, of "proportional"; the others stay.
        interleaved: the checkpoint's pairs are (2 i, 2 i + 1); rows of queries and keys are put in our order at loading.
    """

    kind: str = "default"
    theta: float
    rotary_dim: int
    original_len: int
    factor: float = 1.0
    attention_factor: float = 1.0
    long_attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    turning: int = 0
    interleaved: bool = False

    def longest_context(self, max_position: int) -> int:
        """Tokens up to which it was stretched; at least ``max_position``.

        "dynamic" does not count as stretched: a longer engine would change what short sequences get, so going beyond the
        original context is the user's choice.
        """
        stretched = {"linear": max_position, "yarn": self.original_len}
        return max(max_position, int(stretched.get(self.kind, 0) * self.factor))


def check_unscaled(rope: RopeConfig) -> None:
    """That a rotation keeps the lengths of heads, as it must where norms behind it are computed ahead of it.

    Raises:
        UnsupportedModelError: it scales them.
    """
    if rope.attention_factor != 1:
        raise UnsupportedModelError(
            f"config.json: rope field attention_factor = {rope.attention_factor:g} (given, or of the type {rope.kind!r}, in "
            "rope_parameters or rope_scaling) is not implemented where norms stand behind the rotation"
        )


def no_rotation(head_dim: int, max_len: int, device: torch.device) -> torch.Tensor:
    """float32 [max_len, head_dim]: a table that leaves queries and keys as they are, to the bit."""
    half = torch.ones(max_len, head_dim // 2)
    return torch.cat([half, torch.zeros_like(half)], dim=1).to(device)


def cos_sin_table(
    rope: RopeConfig, max_len: int, device: torch.device, longest: int = 0, columns: int = 0
) -> torch.Tensor:
    """float32 [max_len, columns]: row p is (cos[columns / 2], sin[columns / 2]) of position p.

    Args:
        longest: tokens of the longest sequence, of which frequencies may depend; 0: ``max_len``.
        columns: what is beyond ``rotary_dim`` does not turn: cosines of 1 and sines of 0; 0: ``rotary_dim``.
    """
    longest = longest or max_len
    frequencies = ROPE_KINDS[rope.kind](rope, longest)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    factor = rope.attention_factor
    if rope.long_attention_factor is not None and longest > rope.original_len:
        factor = rope.long_attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * factor
    still = max(0, columns - rope.rotary_dim) // 2
    table = torch.cat([cos, cos.new_ones(max_len, still), sin, sin.new_zeros(max_len, still)], dim=1)
    return table.to(device)


def rotation(
    rope: RopeConfig | None, columns: int, max_len: int, device: torch.device, longest: int = 0
) -> torch.Tensor:
    """float32 [max_len, columns]: the table of layers with ``rope``, None for none; arguments as of ``cos_sin_table``."""
    if rope is None:
        return no_rotation(columns, max_len, device)
    return cos_sin_table(rope, max_len, device, longest, columns)


def _powers(rope: RopeConfig, theta: float) -> torch.Tensor:
    """theta ** (2 i / rotary_dim), float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return torch.pow(theta, exponents)


def _default(rope: RopeConfig, _max_len: int) -> torch.Tensor:
    return 1.0 / _powers(rope, rope.theta)


def _linear(rope: RopeConfig, _max_len: int) -> torch.Tensor:
    return _default(rope, _max_len) / rope.factor


def _dynamic(rope: RopeConfig, max_len: int) -> torch.Tensor:
    """NTK-aware base for sequences of max_len tokens; the plain one within the original context."""
    if max_len <= rope.original_len:
        return _default(rope, max_len)
    stretch = rope.factor * max_len / rope.original_len - (rope.factor - 1)
    return 1.0 / _powers(rope, rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: RopeConfig, _max_len: int) -> torch.Tensor:
    """Low frequencies divided by factor, high ones kept, a linear blend (in turns per context) between."""
    plain = _default(rope, _max_len)
    turns = rope.original_len * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeConfig, _max_len: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023): as llama3, but the blend is linear in the dimension's index."""
    powers = _powers(rope, rope.theta)

    def dimension_of(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return rope.rotary_dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # no band: a step instead of 0 / 0
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return (1 - kept) / (rope.factor * powers) + kept / powers


def _longrope(rope: RopeConfig, max_len: int) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024): searched divisors, one set within the original context and one beyond."""
    factors = rope.long_factors if max_len > rope.original_len else rope.short_factors
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(rope, rope.theta))


def _factors(rope: RopeConfig, _max_len: int) -> torch.Tensor:
    """Explicit divisors, as GGUF files store them (``rope_freqs.weight``)."""
    return 1.0 / (torch.tensor(rope.short_factors, dtype=torch.float32) * _powers(rope, rope.theta))


def _proportional(rope: RopeConfig, max_len: int) -> torch.Tensor:
    """The first pairs of a head turn as if all did, the others not at all (Gemma 4)."""
    turns = torch.arange(rope.rotary_dim // 2) < rope.turning
    return torch.where(turns, _linear(rope, max_len), 0.0)


ROPE_KINDS: Mapping[str, Callable[[RopeConfig, int], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
    "proportional": _proportional,
}

_KNOWN_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "factors"),
        *("short_mscale", "long_mscale"),
        "finetuned",  # a remark some YaRN checkpoints carry
    }
)


def read_rope(
    config: Mapping[str, Any], *, head_dim: int, max_position: int, partial: bool = False, mscales: bool = False
) -> RopeConfig:
    """The rotary embedding of a config.json, in the old form (rope_theta, rope_scaling) or the new (rope_parameters).

    Args:
        partial: the architecture knows heads of which a part rotates. Where others have the field, implementations disagree:
            some rotate whole heads.
        mscales: it knows longrope's ``short_mscale`` and ``long_mscale`` (Phi-3.5-MoE).

    Raises:
        UnsupportedModelError: an unknown kind or field, or a field that is missing or out of range.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: rope_parameters must be an object, got {given!r:.60}")
    fields = dict(given)
    for name, value in fields.items():
        if name not in _KNOWN_KEYS or isinstance(value, Mapping):
            raise UnsupportedModelError(f"config.json: rope field {name!r} = {value!r:.60} is not implemented")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"config.json: rope type {kind!r} is not implemented; {', '.join(ROPE_KINDS)} are")
    outer = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    fields = outer | {name: value for name, value in fields.items() if value is not None}

    # Rounded down, but not because 100 * 0.29 is 28.999999999999996.
    part = _number(fields, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * part + 1e-6)
    turning = rotary_dim // 2
    for name in ("short_mscale", "long_mscale"):
        if fields.get(name) is not None and not mscales:
            raise UnsupportedModelError(
                f"config.json: rope field {name} = {fields[name]!r:.60} is not implemented for this architecture"
            )
    if kind == "proportional":
        rotary_dim = head_dim
    elif part != 1 and not partial:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor = {part} is not implemented for this architecture, whose heads rotate whole"
        )
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim or (kind == "dynamic" and rotary_dim < 4):
        raise UnsupportedModelError(
            f"config.json: head_dim = {head_dim} with partial_rotary_factor = {part}: cannot rotate {rotary_dim} of the "
            f"{head_dim} dimensions of a head"
        )
    original_len = max_position
    if kind in ("llama3", "yarn", "longrope"):
        # A value beside the rope fields wins over one among them, as in transformers.
        beside = config.get("original_max_position_embeddings")
        fields["original_max_position_embeddings"] = beside or fields.get("original_max_position_embeddings")
        original_len = int(_number(fields, "original_max_position_embeddings", max_position, above=1))
    return RopeConfig(
        kind=kind,
        theta=_number(fields, "rope_theta", 10000.0, above=1),
        rotary_dim=rotary_dim,
        original_len=original_len,
        turning=turning if kind == "proportional" else 0,
        **_kind_fields(kind, fields, original_len, max_position, rotary_dim // 2),
    )


def _kind_fields(
    kind: str, fields: Mapping[str, Any], original_len: int, max_position: int, pairs: int
) -> dict[str, Any]:
    """The fields of RopeConfig that only some kinds have."""
    if kind in ("linear", "dynamic"):
        return {"factor": _number(fields, "factor")}
    if kind == "proportional":
        return {"factor": _number(fields, "factor", 1.0)}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        found = {name: _number(fields, name) for name in names}
        if found["high_freq_factor"] <= found["low_freq_factor"]:
            raise UnsupportedModelError("config.json: rope high_freq_factor must be greater than low_freq_factor")
        return found
    if kind == "yarn":
        factor = _number(fields, "factor", max_position / original_len)
        return {
            "factor": factor,
            "attention_factor": _number(fields, "attention_factor", _yarn_attention(fields, factor)),
            "beta_fast": _number(fields, "beta_fast", 32.0),
            "beta_slow": _number(fields, "beta_slow", 1.0),
            "truncate": bool(fields.get("truncate", True)),
        }
    if kind == "longrope":
        factor = _number(fields, "factor", max_position / original_len)
        attention = math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
        attention, longer = _number(fields, "attention_factor", attention), None
        if fields.get("short_mscale") is not None or fields.get("long_mscale") is not None:  # Phi-3.5-MoE's
            attention, longer = _number(fields, "short_mscale"), _number(fields, "long_mscale")
        return {
            "factor": factor,
            "attention_factor": attention,
            "long_attention_factor": longer,
            "short_factors": _divisors(fields, "short_factor", pairs),
            "long_factors": _divisors(fields, "long_factor", pairs),
        }
    return {"short_factors": _divisors(fields, "factors", pairs)} if kind == "factors" else {}


def _yarn_attention(fields: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature, 0.1 ln(factor) + 1; DeepSeek's variant is a quotient of two weighted ones."""

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return temperature(factor, _number(fields, "mscale")) / temperature(factor, _number(fields, "mscale_all_dim"))
    return temperature(factor, 1.0)


def temperature(factor: float, weight: float) -> float:
    """YaRN's, of a context that is ``factor`` times as long, in DeepSeek's variant weighted."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(fields: Mapping[str, Any], name: str, default: float | None = None, *, above: float = 0) -> float:
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
        raise UnsupportedModelError(f"config.json: rope field {name!r} must be a number > {above}, got {value!r:.60}")
    return float(value)


def _divisors(fields: Mapping[str, Any], name: str, pairs: int) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != pairs:
        raise UnsupportedModelError(f"config.json: rope field {name!r} must be a list of {pairs} numbers")
    return tuple(_number({name: value}, name) for value in values)
