"""Reading the mixtures of a config.json: their sizes, and which layers have one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from headway.models.config import map_blocks
from headway.models.decoder import DecoderConfig
from headway.models.fields import Fields
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.moe import ExpertNames, MixtureSpec, RouterSpec


def expert_count(fields: Fields, *names: str) -> int:
    """E: the first of the fields ``names`` that is there; 0 where none is, or where it is 0 or null.

    Raises:
        UnsupportedModelError: no number of experts.
    """
    found = [name for name in names if fields.get(name) is not None]
    for name in names:
        fields.get(name)  # all of them are honoured
    return 0 if not found or fields[found[0]] == 0 else fields.count(found[0])


def read_mixture(
    fields: Fields,
    num_experts: int,
    router: RouterSpec,
    *,
    size: str = "moe_intermediate_size",
    names: ExpertNames | None = None,
    shared: int = 0,
) -> MixtureSpec:
    """A mixture of gated experts with the activation ``hidden_act``.

    Args:
        size: the field with the experts' inner width.
        names: of the experts in the checkpoint; None: the usual ones.
        shared: inner width of a gated block that every token passes besides; 0: there is none.

    Raises:
        UnsupportedModelError: sizes do not fit together.
    """
    check_router(fields, num_experts, router)
    activation = fields.with_defaults(hidden_act="silu").choice("hidden_act", ACTIVATIONS)
    return MixtureSpec(
        num_experts=num_experts,
        size=fields.count(size),
        router=router,
        activation=activation,
        names=names or ExpertNames(),
        shared=MLPSpec(size=shared, activation=activation) if shared else None,
    )


def corrected_router(fields: Fields) -> RouterSpec:
    """DeepSeek-V3's: sigmoids, corrected where experts are chosen, from some groups alone."""
    groups, kept = fields.count("n_group"), fields.count("topk_group")
    return RouterSpec(
        top_k=fields.count("num_experts_per_tok"),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=(groups, kept, 2) if groups > 1 else None,
        correction="gate.e_score_correction_bias",
    )


def check_router(fields: Fields, num_experts: int, router: RouterSpec) -> None:
    """That a token can go to as many experts.

    Raises:
        UnsupportedModelError: there are fewer, or groups do not come out even.
    """
    groups, kept, best = router.groups or (1, 1, 1)
    if num_experts % groups or not 1 <= kept <= groups or best > num_experts // groups:
        raise fields.refuse("n_group", f"of {num_experts} experts, {kept} to be chosen from, does not come out even")
    if router.top_k > num_experts // groups * kept:
        raise fields.refuse("num_experts_per_tok", f"is more than may be chosen from {num_experts} experts")


def sparse_layers(fields: Fields, num_experts: int) -> tuple[int, ...]:
    """The layers that have a mixture by Qwen's rule: every ``decoder_sparse_step``-th, but those of ``mlp_only_layers``."""
    fields = fields.with_defaults(decoder_sparse_step=1)
    layers, step = fields.count("num_hidden_layers"), fields.count("decoder_sparse_step")
    dense = fields.get("mlp_only_layers") or ()
    return tuple(i for i in range(layers) if num_experts and i not in dense and (i + 1) % step == 0)


def with_mixture(
    config: DecoderConfig, layers: Collection[int], mixture: MixtureSpec | None, name: str = ""
) -> DecoderConfig:
    """``config`` with ``mixture`` as the feed-forward part of ``layers``.

    Args:
        name: of its module in the checkpoint; "": that of the dense one.
    """
    if mixture is None or not layers:
        return config
    return map_blocks(
        config,
        lambda i, block: (
            block
            if i not in layers
            else replace(block, ffn=mixture, names=replace(block.names, ffn=name or block.names.ffn))
        ),
    )
