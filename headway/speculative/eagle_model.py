"""EAGLE heads: one layer or few over the target's hidden states and the embedding of the token that followed.

EAGLE-1: x = fc(embedding | hidden), then Llama's layers, the first without a norm before attention and none behind the last;
the result stands for the target's next hidden state, and the target's output layer reads it.
EAGLE-3: hidden = fc(several layers), attention reads norm(embedding) | norm(hidden), and the head has an output layer of its
own, often of the most frequent tokens only. What is carried on is the residual before the last norm.

Shapes: T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headway.attention.paged import PagedAttention
from headway.core.cache import CacheLayout
from headway.models.blocks import BlockSpec
from headway.models.interface import ModelSpec, Target
from headway.models.layers.embedding import Embedding
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import MLP
from headway.models.layers.norm import Norm, NormSpec, RMSNorm
from headway.models.rope import cos_sin_table
from headway.speculative.draft_vocabulary import DraftVocabulary, Rows
from headway.speculative.eagle_config import EagleConfig
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool, LayerCache


class EagleLayer(nn.Module):
    """A layer of a head.

    Args:
        inputs: of attention: C, or twice that.
        first_norm: whether there is a norm before attention.
    """

    def __init__(
        self,
        spec: BlockSpec,
        norm: NormSpec,
        hidden: int,
        inputs: int,
        max_len: int,
        *,
        first_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        mixer = spec.attention
        assert mixer.rope is not None
        self.cos_sin, self.eps = cos_sin_table(mixer.rope, max_len, device), norm.eps
        rows, kv_rows = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        parts = {"q_proj": rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv = Linear(inputs, parts, bias=mixer.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(rows, {"o_proj": hidden}, bias=mixer.out_bias, dtype=dtype, device=device)
        self.attend = PagedAttention(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.head_dim**-0.5,
        )
        self.input_norm: Norm | None = norm.make(hidden, dtype=dtype, device=device) if first_norm else None
        self.hidden_norm: Norm | None = norm.make(hidden, dtype=dtype, device=device) if inputs > hidden else None
        self.after_norm = norm.make(hidden, dtype=dtype, device=device)
        self.mlp = MLP(spec.mlp, hidden, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, batch: StepBatch, cache: LayerCache) -> torch.Tensor:
        """Attention over x [T, inputs], then the feed-forward block; adds to the residual [T, C], in place, and returns it."""
        heads = self.attend(self.qkv.forward(x), batch, cache, self.cos_sin, None, None, self.eps)
        y = self.after_norm.add(self.out.forward(heads), residual)
        return residual.add_(self.mlp.down.forward(self.mlp.act(self.mlp.gate_up.forward(y))))

    def destinations(self, prefix: str) -> dict[str, Target]:
        attention = f"{prefix}self_attn."
        found = self.qkv.destinations(attention) | self.out.destinations(attention)
        found |= self.mlp.destinations(f"{prefix}mlp.")
        norms = {
            "input_layernorm": self.input_norm,
            "hidden_norm": self.hidden_norm,
            "post_attention_layernorm": self.after_norm,
        }
        for name, norm in norms.items():
            if norm is not None:
                found |= norm.destinations(f"{prefix}{name}.")
        return found


class EagleModel(nn.Module):
    """A head with uninitialised weights; ``speculative.eagle_load`` fills them and calls ``finalize``.

    Args:
        config: checked numbers.
        names: the tensors that the checkpoint has, which decide on what is the target's.
        embed, logits: of the target: token ids to embeddings, hidden states to logits.
        max_len: positions the rotary tables cover.

    Attributes:
        spec: what it declares.
        auxiliary: layers of the target that it reads; () for EAGLE-1, which reads the last hidden states.
        vocabulary: the tokens it guesses.
    """

    def __init__(
        self,
        config: EagleConfig,
        names: frozenset[str],
        embed: Rows,
        logits: Rows,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.auxiliary = config.auxiliary
        decoder, hidden = config.decoder, config.decoder.hidden_size
        self._embed = embed
        self.embedding: Embedding | None = None
        if "embed_tokens.weight" in names:
            self.embedding = Embedding(decoder.vocab_size, hidden, dtype=dtype, device=device)
        fused = len(config.auxiliary) * config.target_hidden if config.third else 2 * hidden
        self.fc = Linear(fused, {"fc": hidden}, bias="fc.bias" in names, dtype=dtype, device=device)
        inputs = 2 * hidden if config.third else hidden
        self.layers = nn.ModuleList(
            EagleLayer(
                spec, decoder.norm, hidden, inputs, max_len,
                first_norm=config.third or i > 0, dtype=dtype, device=device,
            )
            for i, spec in enumerate(decoder.blocks)
        )  # fmt: skip
        self.norm: Norm | None = decoder.norm.make(hidden, dtype=dtype, device=device) if config.third else None
        own = config.third and ("lm_head.weight" in names or config.draft_vocab != decoder.vocab_size)
        self.vocabulary = DraftVocabulary(
            hidden, config.draft_vocab, decoder.vocab_size, logits, own=own, dtype=dtype, device=device
        )
        layout = CacheLayout.of([spec.attention.cache for spec in decoder.blocks], max_len)
        self.spec = ModelSpec(
            architecture="EAGLE-3" if config.third else "EAGLE-1",
            vocab_size=decoder.vocab_size,
            hidden_size=hidden,
            longest_context=max_len,
            eos_token_ids=(),
            cache=layout,
            layer_kinds=decoder.blocks,
            layer_weights=sum(parameter.numel() for parameter in self.layers.parameters()),
            head_weights=config.draft_vocab * hidden,
        )

    def combine(self, states: Iterable[torch.Tensor]) -> torch.Tensor:
        """What of the target's states [T, C] goes in: [T, C of the head]."""
        if not self.config.third:
            return next(iter(states))
        return self.fc.forward(torch.cat(list(states), dim=1))

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, batch: StepBatch, caches: CachePool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass; writes the step's keys and values into ``caches``.

        Args:
            token_ids: int32 [T], the tokens behind those of the hidden states.
            hidden: [T, C], of ``combine``, or what the pass before carried on.

        Returns:
            [T, C] for ``logits``, and [T, C] to carry on.
        """
        embedded = self._embed(token_ids) if self.embedding is None else self.embedding.forward(token_ids)
        if self.config.third:
            return self._third(embedded, hidden, batch, caches)
        stream = self.fc.forward(torch.cat([embedded, hidden], dim=1))
        for layer, cache in zip(self.layers, caches.layers, strict=True):
            assert isinstance(layer, EagleLayer)
            x = stream.clone() if layer.input_norm is None else layer.input_norm.forward(stream)
            stream = layer.forward(x, stream, batch, cache)
        return stream, stream

    def _third(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: StepBatch, caches: CachePool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (layer,) = self.layers
        assert isinstance(layer, EagleLayer)
        assert layer.input_norm is not None and layer.hidden_norm is not None and self.norm is not None
        normed = layer.hidden_norm.forward(hidden)
        x = torch.cat([layer.input_norm.forward(embedded), normed], dim=1)
        residual = normed if self.config.norm_before_residual else hidden.clone()
        stream = layer.forward(x, residual, batch, caches.layers[0])
        return self.norm.forward(stream), stream

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V] over the target's vocabulary; -inf for tokens that the head cannot guess."""
        return self.vocabulary.spread(self.vocabulary.own_logits(hidden))

    def destinations(self) -> dict[str, Target]:
        """Where each tensor of a checkpoint goes, under the names of ``eagle_load``."""
        found = self.fc.destinations("")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EagleLayer)
            found |= layer.destinations(f"layers.{i}.")
        if self.embedding is not None:
            found |= self.embedding.destinations("embed_tokens.")
        if self.norm is not None:
            found |= self.norm.destinations("norm.")
        return found | self.vocabulary.destinations()

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place."""
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm):
                module.finalize()
