"""Language models: batching, masks, losses, sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


def causal_mask_built_each_step(device: str) -> Iterator[None]:
    x = torch.randn(2, 7, 16, device=device)
    yield
    mask = torch.full((7, 7), float("-inf"), device=device).triu(1)
    (x @ x.transpose(1, 2) + mask).softmax(-1) @ x


def padding_mask_from_lengths(device: str) -> Iterator[None]:
    lengths = torch.tensor([3, 5, 2], device=device)
    yield
    torch.lt(torch.arange(8, device=device)[None], lengths[:, None])


def padding_mask_to_the_longest(device: str) -> Iterator[None]:
    lengths = torch.tensor([3, 5, 2], device=device)
    yield
    torch.lt(torch.arange(lengths.max(), device=device)[None], lengths[:, None])


def next_token_loss_with_ignored_targets(device: str) -> Iterator[None]:
    logits = torch.randn(2, 6, 11, device=device, requires_grad=True)
    ids = torch.randint(0, 11, (2, 6), device=device)
    yield
    targets = ids.roll(-1, 1).masked_fill(ids == 0, -100)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).backward()


def next_token_loss_over_selected_rows(device: str) -> Iterator[None]:
    logits, ids = torch.randn(12, 11, device=device), torch.randint(0, 11, (12,), device=device)
    yield
    keep = ids != 0
    F.cross_entropy(logits[keep], ids[keep])


def perplexity_as_a_number(device: str) -> Iterator[None]:
    losses = torch.rand(5, device=device)
    yield
    float(losses.mean().exp())


def perplexity_kept_on_the_device(device: str) -> Iterator[None]:
    losses, total = torch.rand(5, device=device), torch.zeros((), device=device)
    yield
    total += losses.mean().exp()


def top_k_filter(device: str) -> Iterator[None]:
    logits = torch.randn(3, 50, device=device)
    yield
    kth = logits.topk(10).values[:, -1:]
    torch.multinomial(torch.where(logits < kth, float("-inf"), logits).softmax(-1), 1)


def top_p_filter(device: str) -> Iterator[None]:
    logits = torch.randn(3, 50, device=device)
    yield
    values, order = logits.sort(descending=True)
    drop = values.softmax(-1).cumsum(-1) - values.softmax(-1) > 0.9
    logits.scatter(1, order, values.masked_fill(drop, float("-inf"))).softmax(-1).multinomial(1)


def top_p_filter_by_rows_of_indices(device: str) -> Iterator[None]:
    logits = torch.randn(50, device=device)
    yield
    values, order = logits.sort(descending=True)
    remove = values.softmax(-1).cumsum(-1) > 0.9
    logits[order[remove]] = float("-inf")


def repetition_penalty(device: str) -> Iterator[None]:
    logits, ids = torch.randn(2, 30, device=device), torch.randint(0, 30, (2, 9), device=device)
    yield
    score = logits.gather(1, ids)
    logits.scatter_(1, ids, torch.where(score < 0, score * 1.2, score / 1.2))


def repetition_penalty_in_a_loop(device: str) -> Iterator[None]:
    logits, ids = torch.randn(1, 30, device=device), torch.randint(0, 30, (1, 9), device=device)
    yield
    for token in set(ids[0].tolist()):
        logits[0, token] /= 1.2


def stop_at_the_end_token(device: str) -> Iterator[None]:
    tokens, done = torch.randint(0, 5, (4,), device=device), torch.zeros(4, dtype=torch.bool, device=device)
    yield
    done |= tokens == 2
    if done.all():
        return


def stop_flags_stay_on_the_device(device: str) -> Iterator[None]:
    tokens, done = torch.randint(0, 5, (4,), device=device), torch.zeros(4, dtype=torch.bool, device=device)
    yield
    done |= tokens == 2
    torch.where(done, 0, tokens)


def beams_reordered(device: str) -> Iterator[None]:
    scores, cache = torch.randn(2, 4, 20, device=device), torch.randn(8, 2, 6, 4, device=device)
    yield
    _, flat = scores.flatten(1).topk(4)
    beam = flat.div(20, rounding_mode="floor") + torch.arange(0, 8, 4, device=device)[:, None]
    cache.index_select(0, beam.flatten())


def cache_written_at_a_host_position(device: str) -> Iterator[None]:
    cache, key = torch.zeros(2, 16, 8, device=device), torch.randn(2, 1, 8, device=device)
    yield
    cache[:, 5:6] = key
    cache[:, :6].sum()


def cache_written_at_a_device_position(device: str) -> Iterator[None]:
    cache, key = torch.zeros(2, 16, 8, device=device), torch.randn(2, 1, 8, device=device)
    place = torch.tensor([5], device=device)
    yield
    cache.index_copy_(1, place, key)


def cache_sliced_by_a_device_length(device: str) -> Iterator[None]:
    cache, length = torch.zeros(2, 16, 8, device=device), torch.tensor(5, device=device)
    yield
    cache[:, :length].sum()


def rotary_tables(device: str) -> Iterator[None]:
    x, place = torch.randn(2, 6, 8, device=device), torch.arange(6, device=device)
    yield
    frequency = 1.0 / 10000 ** (torch.arange(0, 4, device=device) / 4)
    angle = torch.outer(place, frequency)
    a, b = x.chunk(2, -1)
    torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def alibi_slopes_from_a_list(device: str) -> Iterator[None]:
    yield
    slopes = torch.tensor([2 ** (-8 * (i + 1) / 4) for i in range(4)], device=device)
    slopes[:, None] * torch.arange(6, device=device)


def documents_packed_by_host_offsets(device: str) -> Iterator[None]:
    ids = torch.randint(0, 9, (12,), device=device)
    yield
    [piece.sum() for piece in ids.split([3, 4, 5])]


def documents_packed_by_device_offsets(device: str) -> Iterator[None]:
    ids, ends = torch.randint(0, 9, (12,), device=device), torch.tensor([3, 7], device=device)
    yield
    torch.tensor_split(ids, ends.cpu())


def sequence_lengths_expanded(device: str) -> Iterator[None]:
    lengths = torch.tensor([2, 3, 4], device=device)
    yield
    torch.repeat_interleave(torch.arange(3, device=device), lengths)


def sequence_lengths_expanded_to_a_known_sum(device: str) -> Iterator[None]:
    lengths = torch.tensor([2, 3, 4], device=device)
    yield
    torch.repeat_interleave(torch.arange(3, device=device), lengths, output_size=9)


def last_token_of_each_row(device: str) -> Iterator[None]:
    hidden, lengths = torch.randn(3, 6, 4, device=device), torch.tensor([2, 6, 4], device=device)
    yield
    hidden[torch.arange(3, device=device), lengths - 1]


def last_token_of_each_row_by_a_host_range(device: str) -> Iterator[None]:
    hidden, lengths = torch.randn(3, 6, 4, device=device), torch.tensor([2, 6, 4], device=device)
    yield
    hidden[range(3), lengths - 1]


def last_token_of_each_row_by_a_cpu_arange(device: str) -> Iterator[None]:
    hidden, lengths = torch.randn(3, 6, 4, device=device), torch.tensor([2, 6, 4], device=device)
    yield
    hidden[torch.arange(3), lengths - 1]


def mean_pooling(device: str) -> Iterator[None]:
    hidden, mask = torch.randn(3, 6, 4, device=device), torch.ones(3, 6, device=device)
    yield
    F.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9), dim=1)


def masked_language_model_noise(device: str) -> Iterator[None]:
    ids = torch.randint(5, 50, (4, 10), device=device)
    yield
    chosen = torch.bernoulli(torch.full(ids.shape, 0.15, device=device)).bool()
    ids = torch.where(chosen, 3, ids)
    ids.masked_fill(~chosen, -100)


def masked_language_model_noise_in_place(device: str) -> Iterator[None]:
    ids = torch.randint(5, 50, (4, 10), device=device)
    yield
    chosen = torch.rand(4, 10, device=device) < 0.15
    ids[chosen] = 3
    labels = ids.clone()
    labels[~chosen] = -100


def masked_language_model_random_words(device: str) -> Iterator[None]:
    ids = torch.randint(5, 50, (4, 10), device=device)
    yield
    chosen = torch.rand(4, 10, device=device) < 0.5
    words = torch.randint(5, 50, (4, 10), device=device)
    ids[chosen] = words[chosen]


def speculative_acceptance(device: str) -> Iterator[None]:
    draft, target = torch.rand(2, 4, device=device), torch.rand(2, 4, device=device)
    yield
    accepted = (torch.rand(2, 4, device=device) < target / draft).long()
    accepted.cumprod(1).sum(1)


def speculative_acceptance_read_back(device: str) -> Iterator[None]:
    draft, target = torch.rand(2, 4, device=device), torch.rand(2, 4, device=device)
    yield
    for count in (torch.rand(2, 4, device=device) < target / draft).long().cumprod(1).sum(1):
        range(int(count))
