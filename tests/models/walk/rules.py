"""How a field of a configuration is drawn, by its name: the words that families use for the same thing, not families."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

KEEP: Final = object()
"""The family's default stays."""
ACTIVATIONS: Final = (
    "silu", "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "relu2", "mish",
    "gelu_accurate", "gelu_python",
)  # fmt: skip
IDLE: Final = re.compile(
    r"add_cross_attention|dropout|pdrop|layerdrop|initializer|init_|_init|jitter|aux_loss|use_cache|output_router|return_dict|num_logits_to_keep"
    r"|router_z|gradient|classifier_proj|spec_augment|^mask_|use_weighted|use_mamba_kernels|use_mambapy|associative_scan"
    r"|use_mem_eff|pretraining_tp|_token_id|_token_index|tokenizer|^problem_type|cache_dtype|^dt_|time_step_m|time_step_floor"
    r"|a_log_m|dt_m|residual_in_fp32|softmax_in_fp32|slow_but_exact|reorder_and|summary|rescale_prenorm|overlap|median"
    r"|suppress|forced|^mtp|mtp_|nextn|^is_encoder_decoder|^init|(?<!attn)_config$|sparse_pred|deterministic|repad|^type$"
)
"""Fields that mean nothing to a forward pass, or that a test sets itself. They keep their defaults."""


@dataclass(slots=True)
class Shape:
    """The sizes that others must fit, drawn first.

    Attributes:
        rng: of the draw.
        fields: of the configuration's class, by name and by its standard name.
        default: of the class, by name.
        layers, heads, kv_heads, head_dim, hidden, vocab, inner: as everywhere.
        grouped: experts come in groups.
        experts, chosen, groups, chosen_groups: of a mixture.
        choices: of fields that their class lets have few values.
        kinds: of layers by field, as far as the family's defaults show them.
        expand, state_heads, state_width: of recurrent layers whose heads make up ``expand`` times the hidden size.
        key_heads: of a gated delta rule.
    """

    rng: random.Random
    fields: frozenset[str]
    default: dict[str, Any]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    inner: int
    experts: int
    chosen: int
    grouped: bool
    groups: int
    chosen_groups: int
    choices: dict[str, tuple[Any, ...]]
    kinds: dict[str, tuple[str, ...]]
    expand: int
    state_heads: int
    state_width: int
    key_heads: int

    def sometimes(self, chance: float = 0.35) -> bool:
        return self.rng.random() < chance

    def pick(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def scaled(self, value: float) -> float:
        """A number of the same kind as ``value``, unlike it."""
        return round((value or 1.0) * self.rng.uniform(0.4, 1.8), 3)

    def layers_of(self, values: Sequence[str]) -> list[str]:
        """A kind for each layer; all of one kind, or in turns, more often than chance would have it."""
        way = self.rng.random()
        if way < 0.15:
            return [self.rng.choice(list(values))] * self.layers
        if way < 0.3:
            return [values[(i + 1) % len(values)] for i in range(self.layers)]
        return [self.rng.choice(list(values)) for _ in range(self.layers)]

    def some_layers(self) -> list[int]:
        return sorted(self.rng.sample(range(self.layers), self.rng.randrange(self.layers + 1)))


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


Rule = Callable[[Shape, str], Any]


def _default(_shape: Shape, _name: str) -> Any:
    return KEEP


def _default_or(*values: Any, chance: float = 0.5) -> Rule:
    return lambda shape, _name: shape.pick(*values) if shape.sometimes(chance) else KEEP


def _window(shape: Shape, name: str) -> Any:
    none = shape.default[name] is None or not any("sliding" in kind for kind in shape.kinds.get("layer_types", ()))
    return None if none and shape.sometimes(0.3) else shape.pick(1, 2, 3, 5, 6, 7, 8, 9, 16, 33, 40, 41, 4096)


def _kinds(shape: Shape, name: str) -> Any:
    found = shape.kinds.get(name, ())
    if name == "indexer_types":
        others = shape.layers_of(("full", "shared"))
        return [shape.pick("full", "full", "full", others[0]), *others[1:]] if shape.sometimes(0.7) else KEEP
    return shape.layers_of(found) if found and shape.sometimes(0.85) else KEEP


def _shared(shape: Shape, name: str) -> Any:
    return shape.pick(0, 1, 2, 3) if shape.default[name] is not None or shape.sometimes(0.8) else None


def _head_dim(shape: Shape, name: str) -> Any:
    if "num_attention_heads" not in shape.fields:  # heads of states
        return shape.state_width
    follows = shape.default[name] is None and shape.head_dim * shape.heads == shape.hidden
    return None if follows and shape.sometimes() else shape.head_dim


def _cap(shape: Shape, _name: str) -> Any:
    return shape.pick(None, 0.5, 1.5, 4.0, 30.0, 50.0)


def _attention(shape: Shape, _name: str) -> Any:
    """MPT's, whose names are its own."""
    found: dict[str, Any] = {"clip_qkv": shape.pick(0.8, None), "softmax_scale": shape.pick(None, 0.3, 1.0)}
    found |= {
        "alibi_bias_max": shape.pick(1, 4, 8, 16),
        "qk_ln": shape.sometimes(0.1),
        "alibi": not shape.sometimes(0.1),
    }
    return {name: value for name, value in found.items() if shape.sometimes(0.5)} if shape.sometimes(0.7) else KEEP


def _chosen_groups(shape: Shape, name: str) -> Any:
    return shape.chosen_groups if shape.default[name] is not None or shape.grouped else KEEP


def _pattern_lists(shape: Shape, name: str) -> Any:
    """Lists of one number for each layer, or of some layers' numbers."""
    if not shape.sometimes(0.5):
        return KEEP
    if name == "no_rope_layers":
        return [shape.pick(0, 1) for _ in range(shape.layers)]
    if name == "activation_sparsity_pattern":
        return [shape.pick(0.0, 0.5, 0.9) for _ in range(shape.layers)]
    return shape.some_layers()


def _multipliers(shape: Shape, name: str) -> Any:
    return [shape.scaled(1.0) for _ in range(2 if name.startswith("mlp") else 5)] if shape.sometimes() else KEEP


RULES: Final[tuple[tuple[str, Rule], ...]] = (
    (r"vocab_size_per_layer_input", lambda s, _: s.vocab + (s.pick(0, 3) if "attention_k_eq_v" in s.fields else s.pick(0, -7))),
    (r"vocab_size", lambda s, _: s.vocab),
    (r"hidden_size_per_layer_input", _default_or(0, 1, 4, 8, 9, chance=1)),
    (r"word_embed_proj_dim", lambda s, _: s.pick(None, s.hidden, s.hidden, 12, 20)),
    (r"embedding_size", lambda s, _: s.pick(s.hidden, 12, 20)),
    (r"hidden_size", lambda s, _: s.hidden),
    (r"decoder_layers|num_decoder_layers", _default_or(1, 2, 3, chance=1)),
    (r"encoder_layers|num_hidden_layers|num_layers", lambda s, _: s.layers),
    (r"decoder_attention_heads", lambda s, _: s.rng.choice(divisors(s.hidden)[:4])),
    (r"encoder_attention_heads|num_attention_heads", lambda s, _: s.heads),
    (r"use_bidirectional_attention", lambda s, _: s.pick(True, False) if s.sometimes(0.15) else KEEP),
    (r"num_key_value_heads|num_kv_heads", lambda s, _: s.kv_heads),
    (r"num_global_key_value_heads", lambda s, _: s.pick(None, *divisors(s.heads))),
    (r"qk_nope_head_dim", _default_or(1, 3, 4, 6, 8, 11, 12, 32, 64, chance=1)),
    (r"qk_rope_head_dim", _default_or(2, 4, 6, 8, 10, 16, 32, chance=1)),
    (r"v_head_dim", _default_or(1, 4, 5, 6, 8, 10, 13, 32, 48, chance=1)),
    (r"qk_head_dim", _default),
    (r"kv_lora_rank", _default_or(1, 6, 12, 16, 20, 33, 64, 96, chance=1)),
    (r"q_lora_rank", lambda s, n: s.pick(*([None] * (s.default[n] is None or s.sometimes(0.2))), 1, 5, 12, 17, 48)),
    (r"index_n_heads", _default_or(16, 24, 33, chance=1)),  # the scores of a few tie
    (r"index_head_dim", _default_or(8, 10, 12, 16, chance=1)),
    (r"index_topk", _default_or(1, 4, 7, 16, 33, 64, 2048, chance=1)),
    (r"global_head_dim", lambda s, _: s.pick(4, 8, 12, 16, 24, 64)),
    (r"head_dim|d_kv", _head_dim),
    (r"attention_head_size", lambda s, _: s.pick(KEEP, s.head_dim)),
    (r"pooler_hidden_size", lambda s, _: s.pick(KEEP, s.hidden, 12)),
    (r"full_attention_interval|global_attn_every_n_layers|index_topk_freq", _default_or(1, 2, 3, 9, chance=0.8)),
    (r"index_skip_topk_offset", _default_or(0, 1, 2, 3)),
    (r"n_inner|ffn_hidden_size", lambda s, n: None if s.default[n] is None and s.sometimes() else s.inner),
    (r"(moe_)?shared_(expert_)?intermediate_size", _default_or(1, 8, 12, 20, 31, 64, chance=1)),
    (r"moe_latent_size", _default_or(None, 5, 12, chance=1)),
    (r"moe_intermediate_size|expert_ffn_hidden_size", _default_or(1, 8, 12, 24, 31, 64, chance=1)),
    (r"intermediate_size_mlp|intermediate_size|hidden_dim|ffn_dim|d_ff|(en|de)coder_ffn_dim", lambda s, _: s.inner),
    (r"max_position_embeddings|max_seq_len|max_target_positions|n_positions", _default_or(40, 96, 128, 200, 4096, chance=1)),
    (r"original_max_position_embeddings", _default_or(8, 40, 64, chance=1)),
    (r"top_k_experts|num_experts_per_tok|num_experts_per_token", lambda s, n: s.chosen),
    (r"moe_num_shared_experts|n_shared_experts|num_shared_experts", _shared),
    (r"zero_expert_num", _default_or(0, 1, 3, 8, chance=1)),
    (r"(n_routed_|moe_num_|num_local_)?experts|num_experts|n_routed_experts", lambda s, n: s.experts),
    (r"n_group|num_expert_group", lambda s, n: s.groups if s.default[n] is not None or s.grouped else KEEP),
    (r"topk_group", _chosen_groups),
    (r"topk_method", lambda s, _: "group_limited_greedy" if s.grouped else "greedy"),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", lambda s, _: s.rng.randrange(s.layers + 1)),
    (r"moe_layer_end_index", _default_or(-1, 0, 1, 2, 5)),
    (r"dim_model_base", lambda s, _: s.pick(s.hidden, 8, 16, 256)),
    (r"moe_layer_interval|decoder_sparse_step|interleave_moe_layer_step", _default_or(1, 2, 3, 7)),
    (r"(attn|expert)_layer_period", lambda s, _: s.pick(1, 2, 3, 8)),
    (r"(attn|expert)_layer_offset", lambda s, _: s.pick(0, 1, 2)),
    (r"no_rope_layer_interval", _default_or(1, 2, 3, 4, 9, chance=1)),
    (r"sliding_window_pattern", _default_or(1, 2, 3, 6, chance=0.7)),
    (r"layer_types|mlp_layer_types|layers_block_type|indexer_types", _kinds),
    (r"no_rope_layers|activation_sparsity_pattern|mlp_only_layers|moe_layers|full_attn_idxs", _pattern_lists),
    (r"num_kv_shared_layers", lambda s, _: s.rng.randrange(max(1, s.layers - 2))),
    (r"max_window_layers", lambda s, _: s.rng.randrange(s.layers + 1)),
    (r"local_attention", _default_or(2, 4, 6, 8, 16, 128, chance=1)),
    (r"sliding_window", _window),
    (r"attention_chunk_size", _default_or(1, 3, 4, 6, 8, 33, 4096, chance=1)),
    (r"query_pre_attn_scalar", _default_or(1, 5, 7, 16, 24, 256, chance=1)),
    (r".*softcapping", _cap),
    (r"clip_qkv", _default_or(None, 0.7, 2.0, 8.0, chance=1)),
    (r"attn_config", _attention),
    (r"expansion_ratio", _default_or(4, 2, chance=0.2)),
    (r"(ssm|mlp)_multipliers", _multipliers),
    (r"altup_num_inputs", _default_or(1, 2, 3, 4, chance=1)),
    (r"altup_active_idx", _default_or(0, 0, 1, chance=1)),
    (r"altup_coef_clip", _default_or(0.5, 1.0)),
    (r"laurel_rank|adapter_rank", _default_or(1, 3, 4, 8, 64, chance=1)),
    (r"floor_scale", _default_or(3, 5, 8, chance=1)),
    (r"attn_scale", _default_or(0.2, 0.4)),
    (r"rotary_dim", lambda s, _: s.rng.randrange(2, s.head_dim + 1, 2) if s.head_dim >= 2 else KEEP),
    (r"mamba_d_ssm", lambda s, _: s.state_heads * s.state_width),
    (r"mamba_expand|expand", lambda s, _: s.expand),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|num_heads", lambda s, _: s.state_heads),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", lambda s, n: s.state_width),
    (r"mamba_d_state|state_size|ssm_state_size", _default_or(1, 2, 3, 5, 6, 8, 16, 24, 64, 100, 128, chance=1)),
    (r"mamba_n_groups|mamba_ngroups|n_groups", lambda s, _: s.rng.choice(divisors(s.state_heads))),
    (r"mamba_d_conv|conv_kernel|conv_L_cache|linear_conv_kernel_dim", _default_or(1, 2, 3, 4, 4, 5, 7, chance=1)),
    (r"mamba_dt_rank|time_step_rank", _default_or("auto", 1, 3, 7, 40, chance=1)),
    (r"chunk_size|mamba_chunk_size|block_size", _default_or(1, 4, 7, 8, 16, 32, 256, chance=1)),
    (r"time_step_limit", lambda s, _: s.pick((0.0, float("inf")), (0.001, 0.5), (0.1, 1.0)) if s.sometimes() else KEEP),
    (r"linear_num_key_heads", lambda s, _: s.key_heads),
    (r"linear_num_value_heads", lambda s, _: s.key_heads * s.pick(1, 2, 3, 4, 8)),
    (r"linear_num_heads", lambda s, _: s.key_heads),
    (r"linear_(key|value)_head_dim|linear_head_dim", _default_or(1, 4, 6, 8, 12, 32, 64, chance=1)),
    (r"num_mem_blocks", _default_or(1, 2, 3, 5)),
    (r"block_multiple_of", _default_or(4, 8, chance=1)),
    (r"relative_attention_num_buckets", _default_or(2, 4, 8, 12, 40)),
    (r"relative_attention_max_distance", _default_or(8, 20, 40, 128, chance=1)),
    (r"feed_forward_proj", _default_or("relu", "gelu", "gated-gelu", "gated-silu", "gated-relu")),
    (r"type_vocab_size", _default_or(1, 2, 3, chance=1)),
    (r"num_ln_in_parallel_attn", _default_or(None, 1, 2)),
    (r"position_embedding_type", _default_or("rope", "nope", None) ),
    (r"rope_parameters", _default),
    (r"num_hidden_groups", lambda s, _: s.rng.choice(divisors(s.layers))),
    (r"inner_group_num", _default_or(1, 2)),
    (r"classifier_pooling", _default_or("mean", "late", "bos")),
    (r"relative_attention", lambda s, _: s.sometimes(0.8)),
    (r"pos_att_type", _default_or([], ["c2p"], ["p2c"], ["p2c", "c2p"], "c2p|p2c", chance=1)),
    (r"max_relative_positions", _default_or(-1, 8, 20, chance=1)),
    (r"position_buckets", _default_or(-1, 4, 8, chance=1)),
    (r"norm_rel_ebd", _default_or("none", "layer_norm", chance=1)),
    (r"tie_word_embeddings", lambda s, n: not s.default[n] if s.sometimes() else KEEP),
)  # fmt: skip
"""(field, how it is drawn): the first that matches the name, or the standard name, of a field."""

_COMPILED: Final = tuple((re.compile(pattern), rule) for pattern, rule in RULES)


def matches(name: str, standard: Sequence[str]) -> str:
    """The pattern of the rule that a field is drawn by; "": by none of them."""
    if IDLE.search(name):
        return ""
    found = (pattern for each in (name, *standard) for pattern, _ in _COMPILED if pattern.fullmatch(each))
    return next((pattern.pattern for pattern in found), "")


def draw_field(shape: Shape, name: str, standard: Sequence[str]) -> Any:
    """A value, or ``KEEP``. Names that no rule knows are drawn by what their default is."""
    if IDLE.search(name):
        return KEEP
    if name in shape.choices:
        return shape.pick(*shape.choices[name]) if shape.sometimes(0.4) else KEEP
    for each in (name, *standard):
        for pattern, rule in _COMPILED:
            if pattern.fullmatch(each):
                return rule(shape, name)
    default = shape.default[name]
    if isinstance(default, bool):
        return not default if shape.sometimes(0.3) else KEEP
    if isinstance(default, str) and re.search(r"act$|_act_|activation|hidden_act|act_fn", name):
        return shape.pick(*ACTIVATIONS) if shape.sometimes(0.15) else KEEP
    if re.search(r"eps(ilon)?$|norm_min", name):
        return 10.0 ** round(shape.rng.uniform(-12 if shape.sometimes(0.2) else -7, -2), 2)
    if re.search(r"multiplier|scal|factor|alpha|beta|limit|divisor", name) and isinstance(default, int | float):
        return shape.scaled(float(default)) if shape.sometimes() else KEEP
    if default is None and re.search(r"_bias$|^use_|^is_", name):
        return shape.pick(None, True, False)
    return KEEP
