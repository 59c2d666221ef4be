"""How config.json describes towers and projectors, by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.models.fields import Fields
from headway.models.layers.activation import ACTIVATIONS
from headway.models.layers.mlp import MLPSpec
from headway.models.layers.norm import NormSpec
from headway.models.vision.spec import ProjectorSpec, RotationSpec, TowerNames, VisionSpec

_FC = (("fc1",), "fc2")
_SIGLIP = TowerNames(
    patch="embeddings.patch_embedding",
    position="embeddings.position_embedding.weight",
    after="post_layernorm",
    layers="encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    attention=(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj"),
)
_QWEN = TowerNames(
    patch="patch_embed.proj",
    position="pos_embed.weight",
    layers="blocks",
    norms=("norm1", "norm2"),
    attention=(("attn.qkv",), "attn.proj"),
)
_PIXTRAL = TowerNames(
    patch="patch_conv",
    before="ln_pre",
    layers="transformer.layers",
    norms=("attention_norm", "ffn_norm"),
    attention=(("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj"),
    ffn="feed_forward.",
)
_INTERN = TowerNames(
    patch="embeddings.patch_embeddings.projection",
    position="embeddings.position_embeddings",
    cls="embeddings.cls_token",
    after="layernorm",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    attention=(("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.projection_layer"),
    scales=("lambda_1", "lambda_2"),
    batched=True,
)
_GEMMA4 = TowerNames(
    patch="patch_embedder.input_proj",
    position="patch_embedder.position_embedding_table",
    layers="encoder.layers",
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    behind=("post_attention_layernorm", "post_feedforward_layernorm"),
    heads=("self_attn.q_norm", "self_attn.k_norm"),
    attention=(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"),
)


def side(fields: Fields, name: str) -> int:
    """A size that is a number, or a square of two."""
    value = fields.get(name)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise fields.refuse(name, "is not implemented: it must be a positive integer, or twice the same")
    return value


def siglip_tower(
    fields: Fields,
    projector: ProjectorSpec,
    *,
    prefix: str = "vision_tower.",
    projector_prefix: str = "multi_modal_projector.",
    group: int = 1,
) -> VisionSpec:
    """SigLIP (Zhai et al. 2023), as it is, or as Idefics3 has it. ``fields``: the vision_config."""
    fields = fields.with_defaults(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
        patch_size=16, hidden_act="gelu_pytorch_tanh", num_channels=3,
    )  # fmt: skip
    layers = fields.count("num_hidden_layers")
    patch = side(fields, "patch_size")
    positions = side(fields, "image_size") // patch
    if positions % group:
        raise fields.refuse("image_size", f"has {positions}^2 patches, of which {group}^2 each are to become one")
    return VisionSpec(
        prefix=prefix,
        names=_SIGLIP,
        hidden_size=fields.count("hidden_size"),
        num_heads=fields.count("num_attention_heads"),
        patch=patch,
        channels=fields.count("num_channels"),
        num_layers=layers,
        stored_layers=layers,
        positions=positions,
        norm=NormSpec(fields.number("layer_norm_eps", 1e-6, least=0), "layer", bias=True),
        mlp=MLPSpec(
            size=fields.count("intermediate_size"), activation=fields.choice("hidden_act", ACTIVATIONS), gated=False,
            bias=True, names=_FC,
        ),
        group=group,
        projector=projector,
        projector_prefix=projector_prefix,
    )  # fmt: skip


def clip_tower(fields: Fields, projector: ProjectorSpec, layer: int) -> VisionSpec:
    """CLIP (Radford et al. 2021), up to the outputs of ``layer``, counted as transformers' hidden_states are."""
    fields = fields.with_defaults(
        hidden_act="quick_gelu", layer_norm_eps=1e-5, patch_size=32, projection_dim=512
    )  # fmt: skip
    found = siglip_tower(fields, projector)
    names = replace(_SIGLIP, cls="embeddings.class_embedding", before="pre_layrnorm")
    return upto(replace(found, names=names, patch_bias=False), layer)


def upto(spec: VisionSpec, layer: int) -> VisionSpec:
    """The tower up to the outputs of a layer, counted as transformers' hidden_states are: 1 is what the first block gives. The
    last one's are not normalised either."""
    count = layer if layer >= 0 else spec.stored_layers + 1 + layer
    if not 1 <= count <= spec.stored_layers:
        raise UnsupportedModelError(
            f"config.json: vision_feature_layer = {layer} of a tower of {spec.stored_layers} layers"
        )
    return replace(spec, num_layers=count, last_norm=False)


def feature_layer(fields: Fields, default: int) -> int:
    """``vision_feature_layer``, of which there may be one."""
    value = fields.get("vision_feature_layer", default)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int):
        raise fields.refuse("vision_feature_layer", "is not implemented; one layer is")
    return value


def qwen25_tower(fields: Fields, out: int) -> VisionSpec:
    """Qwen2.5-VL: most blocks attend within windows."""
    fields = fields.with_defaults(
        depth=32, hidden_size=3584, hidden_act="silu", intermediate_size=3420, num_heads=16, in_channels=3,
        patch_size=14, spatial_merge_size=2, temporal_patch_size=2, window_size=112, out_hidden_size=out,
        fullatt_block_indexes=[7, 15, 23, 31],
    )  # fmt: skip
    hidden, group, norm = fields.count("hidden_size"), fields.count("spatial_merge_size"), NormSpec(1e-6)
    window = fields.count("window_size") // group // side(fields, "patch_size")
    if window < 1:
        raise fields.refuse("window_size", "is less than a merged patch")
    widths = (hidden * group**2, _out(fields, out))
    projector = ProjectorSpec(norm="ln_q", norm_spec=norm, products=("mlp.0", "mlp.2"), widths=widths)
    inner, act = fields.count("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)
    return replace(
        _qwen_tower(fields, hidden, norm, MLPSpec(size=inner, activation=act, bias=True), projector),
        names=replace(_QWEN, position=""),
        patch_bias=False,
        window=window,
        full_layers=_blocks(fields, "fullatt_block_indexes"),
    )


def qwen2_tower(fields: Fields, out: int) -> VisionSpec:
    """Qwen2-VL."""
    fields = fields.with_defaults(
        depth=32, embed_dim=1280, hidden_size=out, hidden_act="quick_gelu", mlp_ratio=4, num_heads=16, in_channels=3,
        patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
    )  # fmt: skip
    hidden, norm = fields.count("embed_dim"), NormSpec(1e-6, "layer", bias=True)
    if fields.count("hidden_size") != out:
        raise fields.refuse("hidden_size", f"must be the text model's, {out}")
    inner, act = int(hidden * fields.number("mlp_ratio")), fields.choice("hidden_act", ACTIVATIONS)
    mlp = MLPSpec(size=inner, activation=act, gated=False, bias=True, names=_FC)
    widths = (hidden * fields.count("spatial_merge_size") ** 2, out)
    projector = ProjectorSpec(norm="ln_q", norm_spec=norm, products=("mlp.0", "mlp.2"), widths=widths)
    tower = _qwen_tower(fields, hidden, norm, mlp, projector)
    return replace(tower, names=replace(_QWEN, position=""), patch_bias=False)


def qwen3_tower(fields: Fields, out: int) -> VisionSpec:
    """Qwen3-VL: a stretched table of positions, and outputs of blocks inside for the decoder's first layers."""
    fields = fields.with_defaults(
        depth=27, hidden_size=1152, hidden_act="gelu_pytorch_tanh", intermediate_size=4304, num_heads=16, in_channels=3,
        patch_size=16, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=out, num_position_embeddings=2304,
        deepstack_visual_indexes=[8, 16, 24],
    )  # fmt: skip
    hidden, group = fields.count("hidden_size"), fields.count("spatial_merge_size")
    norm, entries = NormSpec(1e-6, "layer", bias=True), fields.count("num_position_embeddings")
    positions = int(entries**0.5)
    if positions**2 != entries:
        raise fields.refuse("num_position_embeddings", "is not a square")
    widths = (hidden * group**2, _out(fields, out))
    projector = ProjectorSpec(norm="norm", norm_spec=norm, products=("linear_fc1", "linear_fc2"), widths=widths)
    behind = replace(projector, norm_behind=True)
    inner, act = fields.count("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS)
    mlp = MLPSpec(size=inner, activation=act, gated=False, bias=True, names=(("linear_fc1",), "linear_fc2"))
    return replace(
        _qwen_tower(fields, hidden, norm, mlp, projector),
        positions=positions,
        interpolates=True,
        # In the order in which the tower passes them, whatever the list's is.
        deepstack=tuple(
            (layer, f"visual.deepstack_merger_list.{i}.", behind)
            for layer, i in sorted((layer, i) for i, layer in enumerate(_blocks(fields, "deepstack_visual_indexes")))
        ),
    )


def _qwen_tower(fields: Fields, hidden: int, norm: NormSpec, mlp: MLPSpec, projector: ProjectorSpec) -> VisionSpec:
    """What the towers of Qwen2-VL, 2.5 and 3 have in common."""
    depth = fields.count("depth")
    return VisionSpec(
        prefix="visual.",
        names=_QWEN,
        hidden_size=hidden,
        num_heads=fields.count("num_heads"),
        patch=side(fields, "patch_size"),
        channels=_channels(fields),
        frames=fields.count("temporal_patch_size"),
        num_layers=depth,
        stored_layers=depth,
        rotation=_rotation(fields),
        norm=norm,
        mlp=mlp,
        group=fields.count("spatial_merge_size"),
        projector=projector,
        projector_prefix="visual.merger.",
    )


def pixtral_tower(fields: Fields, projector: ProjectorSpec, layer: int, group: int) -> VisionSpec:
    """Pixtral's: pictures of any size, rotated by rows and columns."""
    fields = fields.with_defaults(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_channels=3,
        patch_size=16, hidden_act="gelu",
    )  # fmt: skip
    layers = fields.count("num_hidden_layers")
    found = VisionSpec(
        prefix="vision_tower.",
        names=_PIXTRAL,
        hidden_size=fields.count("hidden_size"),
        num_heads=fields.count("num_attention_heads"),
        patch=side(fields, "patch_size"),
        channels=fields.count("num_channels"),
        num_layers=layers,
        stored_layers=layers,
        patch_bias=False,
        qkv_bias=False,
        out_bias=False,
        rotation=replace(_rotation(fields), alternating=True),
        norm=NormSpec(1e-5),
        mlp=MLPSpec(size=fields.count("intermediate_size"), activation=fields.choice("hidden_act", ACTIVATIONS)),
        group=group,
        projector=projector,
        projector_prefix="multi_modal_projector.",
    )
    return upto(found, layer)


def intern_tower(fields: Fields, projector: ProjectorSpec, layer: int, group: int) -> VisionSpec:
    """InternVL's."""
    fields = fields.with_defaults(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=448,
        patch_size=14, hidden_act="gelu",
    )  # fmt: skip
    for name, wanted in (
        ("use_qk_norm", False), ("norm_type", "layer_norm"), ("use_absolute_position_embeddings", True),
    ):  # fmt: skip
        if fields.get(name, wanted) != wanted:
            raise fields.refuse(name, f"is not implemented; {wanted!r} is")
    bias, mean = fields.flag("attention_bias"), fields.get("use_mean_pooling", True)
    found = siglip_tower(fields, projector, group=group)
    found = replace(found, names=_INTERN, qkv_bias=bias)
    # The norm behind all blocks is there where patches are not averaged for a classifier.
    if layer in (-1, found.stored_layers):
        return replace(found, last_norm=not mean)
    return upto(found, layer)


def gemma4_tower(fields: Fields, out: int) -> VisionSpec:
    """Gemma 4's: pictures of any shape, places by two tables and by rotation, means of squares of patches."""
    fields = fields.with_defaults(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=12, patch_size=16,
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, pooling_kernel_size=3, position_embedding_size=10240,
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0},
    )  # fmt: skip
    hidden, heads, layers = (
        fields.count(f"{name}") for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    for name, wanted in (("num_key_value_heads", heads), ("head_dim", hidden // heads), ("attention_bias", False)):
        if fields.get(name, wanted) != wanted:
            raise fields.refuse(name, f"is not implemented; {wanted!r} is")
    norm = NormSpec(fields.number("rms_norm_eps", least=0))
    standard = ("vision_tower.std_bias", "vision_tower.std_scale") if fields.flag("standardize") else None
    projector = ProjectorSpec(
        merges="mean", multiplier=hidden**0.5, standard=standard, norm="embedding_pre_projection_norm", norm_spec=norm,
        norm_behind=True, norm_stored=False, products=("embedding_projection",), widths=(out,), bias=False,
    )  # fmt: skip
    return VisionSpec(
        prefix="vision_tower.",
        names=_GEMMA4,
        hidden_size=hidden,
        num_heads=heads,
        patch=side(fields, "patch_size"),
        pixels_last=True,
        num_layers=layers,
        stored_layers=layers,
        patch_bias=False,
        positions=fields.count("position_embedding_size"),
        by_axis=True,
        rotation=replace(_rotation(fields), halves=True),
        norm=norm,
        mlp=MLPSpec(size=fields.count("intermediate_size"), activation=fields.choice("hidden_activation", ACTIVATIONS)),
        clipped=fields.flag("use_clipped_linears"),
        group=fields.count("pooling_kernel_size"),
        projector=projector,
        projector_prefix="embed_vision.",
    )


def _channels(fields: Fields) -> int:
    return 3 if fields.get("in_chans") == 3 else fields.count("in_channels")


def _blocks(fields: Fields, name: str) -> tuple[int, ...]:
    """Numbers of a tower's blocks."""
    found = fields[name]
    if found is None or not all(isinstance(each, int) and each >= 0 for each in found):
        raise fields.refuse(name, "must be a list of numbers from 0 on")
    return tuple(found)


def _out(fields: Fields, out: int) -> int:
    if fields.count("out_hidden_size") != out:
        raise fields.refuse("out_hidden_size", f"must be the text model's hidden_size, {out}")
    return out


def _rotation(fields: Fields) -> RotationSpec:
    found: Mapping[str, Any] = fields.get("rope_parameters") or {}
    kind = found.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise fields.refuse("rope_parameters", "is not implemented; axial rotation is")
    return RotationSpec(theta=float(found.get("rope_theta") or fields.get("rope_theta") or 10000.0))
