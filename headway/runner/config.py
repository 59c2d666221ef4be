"""Sizes the runner allocates for."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.config import USUAL_THRESHOLDS


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """Sizes the runner allocates for. ``max_in_flight`` is the most steps launched and not yet collected;
    ``prompt_logits_chunk`` see ``Thresholds``; ``width`` is the most tokens of a decode row, drafts included,
    ``widths`` are the numbers there can be, rising;
    ``lookahead`` the places behind a row's last token that the drafter writes keys to; ``edits_per_row`` see
    ``CacheLayout``; ``has_states``: packed steps carry a chunk table;
    ``has_latents``: launches say how many cached tokens become keys and values;
    ``sees`` see ``VisionInfo``; ``max_encoder_rows``: most encoder outputs of a step, but for a single item that has more;
    ``num_stages`` ranks have the layers one after the other; ``halves_from``: tokens from which on steps of decode rows, and
    steps with prompts, run as two micro-batches, 0 for never;
    ``alignment``: (layer, head)s of cross-attention that tell when tokens are heard, () where nobody may ask."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int
    max_logprobs: int
    max_upload_ints: int
    max_in_flight: int
    prompt_logits_chunk: int = USUAL_THRESHOLDS.prompt_logits_chunk
    width: int = 1
    widths: tuple[int, ...] = (1,)
    lookahead: int = 0
    edits_per_row: int = 1
    has_states: bool = False
    has_latents: bool = False
    max_encoder_rows: int = 0
    sees: str = ""
    num_stages: int = 1
    halves_from: tuple[int, int] = (0, 0)
    alignment: tuple[tuple[int, int], ...] = ()

    def halves(self, tokens: int, *, only_decode: bool) -> bool:
        """Whether a step of so many tokens is to run as two micro-batches."""
        least = self.halves_from[not only_decode]
        return least > 0 and tokens >= max(least, 2)

    @property
    def longest_row(self) -> int:
        """Most tokens of a slot: drafts may lie behind the last one that a request can have."""
        return self.max_model_len + self.width - 1 + self.lookahead
