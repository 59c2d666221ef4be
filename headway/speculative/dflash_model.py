"""The modules of drafters of blocks.

DFlash (arXiv 2602.06036): layers whose keys and values of earlier tokens are made from the target's hidden states, and a block
of queries, the last known token and masks behind it, that see these and each other both ways: one pass guesses the whole block.
DSpark adds to the logits of each place a bias by the token before, W2 W1[token], so that the places are drawn one by one.

Shapes: T tokens, C hidden size, r rank of the bias.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headway.core.cache import CacheLayout
from headway.core.switches import FUSED_LAYERS, is_on
from headway.models.blocks import Block
from headway.models.decoder import finalize_parts
from headway.models.interface import ModelSpec, Target
from headway.models.layers.attention import Attention
from headway.models.layers.embedding import Embedding
from headway.models.layers.forms import FormTable, Rules, rules_for
from headway.models.layers.linear import Linear
from headway.models.layers.mixer import Site
from headway.models.rope import rotation
from headway.speculative.dflash_config import DFlashConfig
from headway.speculative.draft_vocabulary import DraftVocabulary, Rows
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool


class MarkovHead(nn.Module):
    """DSpark's bias of logits by the token before.

    Args:
        vocab_size, draft_vocab: of the tokens before, and of those that are guessed.
    """

    def __init__(
        self,
        config: DFlashConfig,
        vocab_size: int,
        draft_vocab: int,
        hidden: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        rank = config.markov_rank
        self.before = Embedding(vocab_size, rank, dtype=dtype, device=device)
        self.out = Linear(rank, {"markov_w2": draft_vocab}, bias=False, dtype=dtype, device=device)
        self.gate: Linear | None = None
        if config.markov_gated:
            self.gate = Linear(hidden + rank, {"gate_proj": rank}, bias=True, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """int32 [N] the tokens before, and hidden states [N, C] -> [N, Vd]."""
        x = self.before.forward(token_ids)
        if self.gate is not None:
            x = x * torch.sigmoid(self.gate.forward(torch.cat([hidden, x], dim=1)))
        return self.out.forward(x)

    def destinations(self, prefix: str) -> dict[str, Target]:
        found = self.before.destinations(f"{prefix}markov_w1.") | self.out.destinations(prefix)
        return found if self.gate is None else found | self.gate.destinations(prefix)


class DFlashModel(nn.Module):
    """A drafter with uninitialised weights; ``speculative.dflash_load`` fills them and calls ``finalize``.

    Args:
        config: checked numbers.
        names: the tensors that the checkpoint has, which decide on what is the target's.
        embed, logits: of the target: token ids to embeddings, hidden states to logits.
        max_len: positions the rotary table covers.

    Attributes:
        spec: what it declares.
        vocabulary: the tokens it guesses.
        markov: the bias by the token before; None: there is none.
    """

    def __init__(
        self,
        config: DFlashConfig,
        names: frozenset[str],
        embed: Rows,
        logits: Rows,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self._embed = config, dtype, device, embed
        decoder = config.decoder
        hidden, vocab = decoder.hidden_size, decoder.vocab_size
        self.embedding: Embedding | None = None
        if "embed_tokens.weight" in names:
            self.embedding = Embedding(vocab, hidden, dtype=dtype, device=device)
        inputs = len(config.auxiliary) * config.target_hidden
        self.fc = Linear(inputs, {"fc": hidden}, bias=False, dtype=dtype, device=device)
        self.hidden_norm = decoder.norm.make(hidden, dtype=dtype, device=device)
        self.norm = decoder.norm.make(hidden, dtype=dtype, device=device)
        attention = decoder.blocks[0].attention
        table = rotation(attention.rope, attention.turning, max_len, device)
        site = Site(decoder.norm, hidden, table, 0, dtype, device)
        self.layers = nn.ModuleList(block.make(site) for block in decoder.blocks)
        self._blocks = [layer for layer in self.layers if isinstance(layer, Block)]
        own = "lm_head.weight" in names or config.draft_vocab != vocab
        self.vocabulary = DraftVocabulary(
            hidden, config.draft_vocab, vocab, logits, own=own, dtype=dtype, device=device
        )
        self.markov: MarkovHead | None = None
        if config.markov_rank:
            self.markov = MarkovHead(config, vocab, config.draft_vocab, hidden, dtype=dtype, device=device)
        self._forms = FormTable([], None, Rules())  # until ``finalize``
        self.spec = ModelSpec(
            architecture="DSpark" if config.markov_rank else "DFlash",
            vocab_size=vocab,
            hidden_size=hidden,
            longest_context=max_len,
            eos_token_ids=(),
            cache=CacheLayout.of([block.cache for block in decoder.blocks], max_len),
            layer_kinds=decoder.blocks,
            layer_weights=sum(block.token_weights for block in self._blocks),
            head_weights=config.draft_vocab * hidden,
        )

    def combine(self, states: Iterable[torch.Tensor]) -> torch.Tensor:
        """What of the target's states [T, C] keys and values are made from: [T, C of the drafter]."""
        return self.hidden_norm.forward(self.fc.forward(torch.cat(list(states), dim=1)))

    def remember(self, context: torch.Tensor, batch: StepBatch, caches: CachePool) -> None:
        """Write the keys and values of the step's tokens, from what ``combine`` gave for them."""
        for block, cache in zip(self._blocks, caches.layers, strict=True):
            assert isinstance(block.mixer, Attention)
            block.mixer.write_context(context, batch, cache)

    def forward(self, batch: StepBatch, caches: CachePool) -> torch.Tensor:
        """The hidden states [T, C] of blocks of queries; ``batch.ends`` says what each of them sees."""
        x = self._embed(batch.input_ids) if self.embedding is None else self.embedding.forward(batch.input_ids)
        forms = self._forms.of(len(x), False)
        stream = self._blocks[0].enter(x, forms[0])
        for block, cache, form in zip(self._blocks, caches.layers, forms, strict=True):
            stream = block.forward(stream, batch, cache, form)
        normed = stream.normed if stream.squares is None else None
        return self.norm.forward(stream.residual) if normed is None else normed

    def destinations(self) -> dict[str, Target]:
        """Where each tensor of a checkpoint goes, under the names of ``eagle_load.plain_name``."""
        found = self.fc.destinations("") | self.vocabulary.destinations()
        found |= self.hidden_norm.destinations("hidden_norm.") | self.norm.destinations("norm.")
        for i, block in enumerate(self._blocks):
            found |= block.destinations(f"layers.{i}.")
        if self.embedding is not None:
            found |= self.embedding.destinations("embed_tokens.")
        return found if self.markov is None else found | self.markov.destinations("markov_head.")

    @torch.no_grad()
    def finalize(self) -> None:
        """Called once, when the weights are in place."""
        finalize_parts(self)
        for block, following in zip(self._blocks, [*self._blocks[1:], None], strict=True):
            block.link(self.norm if following is None else following.first_norm)
        rules = rules_for(self.device, self.dtype) if is_on(FUSED_LAYERS) else Rules()
        self._forms = FormTable([block.products for block in self._blocks], None, rules)
