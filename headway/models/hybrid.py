"""What models that mix attention and layers with states have in common: which layer is which, and Mamba-2 in their words."""

from __future__ import annotations

from collections.abc import Sequence

from headway.models.fields import Fields
from headway.models.layers.mamba import Mamba2Spec
from headway.models.mamba import check_groups, read_limits, read_state_dtype

ATTENTION, STATE = "full_attention", "linear_attention"
_NAMES = {
    ATTENTION: ATTENTION, "attention": ATTENTION, STATE: STATE, "mamba": STATE, "conv": STATE, "linear": STATE,
    "mamba2": STATE,
}  # fmt: skip


def kinds_of(fields: Fields, otherwise: Sequence[str], *names: str) -> tuple[str, ...]:
    """Per layer ``ATTENTION`` or ``STATE``: what the first of the fields ``names`` that is there says, else ``otherwise``.

    Raises:
        UnsupportedModelError: another kind, or not one for each layer.
    """
    name = next((name for name in names if fields.get(name) is not None), "")
    kinds = tuple(fields[name]) if name else tuple(otherwise)
    unknown = [kind for kind in kinds if kind not in _NAMES]
    if unknown:
        raise fields.refuse(name, f"has {unknown[0]!r}, which is not implemented")
    layers = fields.count("num_hidden_layers")
    if len(kinds) != layers:
        raise fields.refuse(name, f"names {len(kinds)} layers, num_hidden_layers={layers}")
    return tuple(_NAMES[kind] for kind in kinds)


def check_activation(fields: Fields, kinds: Sequence[str]) -> None:
    """That convolutions of layers with states, which have the activation ``hidden_act`` behind them, have the one that is
    implemented.

    Raises:
        UnsupportedModelError: they have another.
    """
    if STATE in kinds and fields.with_defaults(hidden_act="silu")["hidden_act"] not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "is not implemented in layers with states; silu is")


def refuse_tied(fields: Fields) -> None:
    """Of families that have an output layer whatever ``tie_word_embeddings`` says, to some implementations.

    Raises:
        UnsupportedModelError: it says that there is none.
    """
    if fields.flag("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", "is not implemented; false is")


def read_mamba2(
    fields: Fields, *, inner: int, norm: str = "gate first", out_bias: str = "mamba_proj_bias"
) -> Mamba2Spec:
    """A Mamba-2 mixer from fields that begin with ``mamba_``.

    Args:
        inner: channels.
        norm: see ``Mamba2Spec``.
        out_bias: the field that says whether the product out has a bias.

    Raises:
        UnsupportedModelError: sizes do not fit together.
    """
    heads, groups = fields.count("mamba_n_heads"), fields.count("mamba_n_groups")
    size = fields.get("mamba_d_head")
    size = inner // heads if size in (None, "auto") else fields.count("mamba_d_head")
    if heads * size != inner:
        raise fields.refuse("mamba_n_heads", f"times mamba_d_head={size} must be {inner}, the mixer's channels")
    check_groups(heads, groups)
    return Mamba2Spec(
        num_heads=heads,
        head_dim=size,
        state_size=fields.count("mamba_d_state"),
        num_groups=groups,
        taps=fields.count("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias"),
        out_bias=fields.flag(out_bias),
        conv_bias=fields.flag("mamba_conv_bias"),
        limits=read_limits(fields),
        norm=norm,
        norm_eps=fields.number("rms_norm_eps", least=0),
        state_dtype=read_state_dtype(fields),
    )
