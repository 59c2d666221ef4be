"""The drafter of blocks: one pass over the last known token and masks behind it guesses all K tokens of a row."""

from __future__ import annotations

import torch

from headway.core.errors import ConfigError
from headway.kernels.masked_write import gather_rows
from headway.models.interface import Forward
from headway.sampling.sampler import Judge
from headway.speculative.base import Drafter, DraftHouse
from headway.speculative.chain import Chain
from headway.speculative.dflash_model import DFlashModel
from headway.state.batch import GroupBatch, StepBatch


class DFlashDrafter(Drafter):
    """Keys and values of the step's tokens are made from the target's hidden states alone, so that those of a cached prefix are
    right whatever follows. The block's own lie behind them, at the places of the tokens that it guesses, until the next step's
    tokens get theirs there.

    Raises:
        ConfigError: more tokens than a block has; or see ``chain.shared_group``.
    """

    def __init__(self, house: DraftHouse) -> None:
        assert isinstance(house.model, DFlashModel)
        model, number = house.model, house.number
        if number > model.config.most:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={number} is more than the {model.config.most} tokens that the "
                f"drafter was trained to guess at once (block_size={model.config.block_size}); lower it"
            )
        self._model, self.auxiliary = model, model.config.auxiliary
        self._more = 0 if model.config.from_anchor else 1  # tokens of a block beside those that are guessed
        self._chain, self._block_size = Chain(house, model.spec.cache, -1), house.block_size
        device, hidden = house.arena.ints.device, model.spec.hidden_size
        # The halves of a step are graphs of their own: what passes between them has a place of its own.
        self._hidden = torch.zeros(house.max_tokens, hidden, dtype=model.dtype, device=device)
        self._nothing = torch.zeros(house.max_rows, dtype=torch.int32, device=device)
        self._masks = torch.full((house.max_rows, number), model.config.mask, dtype=torch.int32, device=device)
        self._count = torch.arange(max(house.max_rows, number) + 1, dtype=torch.int32, device=device)

    def observe(self, batch: StepBatch, forward: Forward) -> None:
        """Keep what keys and values are made from."""
        self._hidden[: len(batch.input_ids)].copy_(self._model.combine(forward.auxiliary))

    def judge(self, batch: StepBatch, slots: torch.Tensor, offset: int, flags: int) -> Judge | None:
        """By the distributions, where drafts are drawn from theirs."""
        rejection = self._chain.rejection
        return None if rejection is None else rejection.judge(batch, slots, offset, flags)

    def propose(self, batch: StepBatch, flags: int) -> None:
        """A pass over a block a row; draws are one by one where they depend on those before."""
        model, chain, rows = self._model, self._chain, len(batch.row_slots)
        model.remember(self._hidden[: len(batch.input_ids)], chain.whole(batch), chain.caches)
        if batch.width == 1:
            return
        number = batch.width - 1  # K of the next step, if it is like this one
        width = number + self._more
        block = self._block(chain.link(batch, self._nothing[:rows], 0), width)
        out = model.forward(block, chain.caches).view(rows, width, -1)
        hidden = out[:, self._more :].transpose(0, 1).contiguous()  # [K, R, C]
        logits = model.vocabulary.own_logits(hidden.flatten(0, 1)).unflatten(0, (number, rows))  # [K, R, Vd]
        tokens = block.input_ids[::width].contiguous()
        for link in range(number):
            own = logits[link]
            if model.markov is not None:
                own = own + model.markov.forward(tokens, hidden[link])
            tokens = chain.draw(model.vocabulary.spread(own), batch.row_slots, link, flags)
            chain.link(batch, tokens, link + 1)

    def _block(self, first: StepBatch, width: int) -> StepBatch:
        """The step of all rows' blocks of ``width`` tokens, W: the token of ``first``, and masks. A row without places for its
        block does not go on."""
        rows, (group,) = len(first.row_slots), first.groups
        tables, size = group.block_tables, self._block_size
        positions = first.positions[:, None] + self._count[:width]  # [R, W]
        column = positions // size
        found = gather_rows(tables, first.row_slots.clamp(min=0)[:, None], column)
        live = ((first.seq_lens > 0) & (found[:, -1] > 0) & (column[:, -1] < tables.shape[1]))[:, None]
        kv_slots = torch.where(live, found * size + positions % size, -1).flatten()
        ends = torch.where(live, first.seq_lens[:, None] + (width - 1), 0)  # [R, 1]
        token_ids = torch.cat([first.input_ids[:, None], self._masks[:rows, : width - 1]], dim=1)
        starts, lens = self._count[: rows + 1] * width, ends.flatten()
        return StepBatch(
            input_ids=token_ids.flatten(),
            positions=torch.where(live, positions, 0).flatten(),
            query_start=starts,
            seq_lens=lens,
            row_slots=first.row_slots,
            logit_indices=starts[:-1],
            groups=(GroupBatch(tables, kv_slots, lens),),
            arrivals=first.arrivals,
            num_decode_rows=0,
            max_query_len=width,
            max_seq_len_bound=first.max_seq_len_bound,
            # Of one row `expand` would leave a view of stride 0, and kernels read places side by side.
            ends=ends.repeat(1, width).flatten(),
        )
