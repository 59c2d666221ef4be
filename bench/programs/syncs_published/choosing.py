"""Choosing: tokens, actions, beams, drafts, boxes, paths. A line that waits ends in ``# waits``; no other line waits."""

from __future__ import annotations

import heapq
import math
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import nn


class _Cache:
    """Keys and values of a fixed length, written at positions that the device knows."""

    def __init__(self, rows: int, length: int, width: int, device: str) -> None:
        self.keys, self.values = (torch.zeros(rows, length, width, device=device) for _ in range(2))
        self.places = torch.arange(length, device=device)

    def write(self, place: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.keys.index_copy_(1, place, key)
        self.values.index_copy_(1, place, value)
        return self.keys, self.values, self.places <= place[-1]


def tokens_decoded_from_a_fixed_cache(device: str) -> Any:
    table, mix = torch.randn(11, 6, device=device), torch.randn(3, 6, 6, device=device) / 3
    cache, place = _Cache(2, 8, 6, device), torch.zeros(1, dtype=torch.long, device=device)
    token, made = torch.ones(2, 1, dtype=torch.long, device=device), []
    for _ in range(5):
        x = table[token]
        q, k, v = (x @ part for part in mix)
        keys, values, mask = cache.write(place, k, v)
        x = x + F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None])
        token = (x @ table.T).argmax(-1)
        made.append(token)
        place += 1
    return torch.cat(made, 1).cpu()  # waits


def tokens_decoded_until_all_have_ended(device: str) -> Any:
    table, end = torch.randn(7, 7, device=device), 6
    ids, alive = torch.zeros(3, 1, dtype=torch.long, device=device), torch.ones(3, dtype=torch.long, device=device)
    table[:, end] += 0.5
    for _ in range(6):
        token = table[ids[:, -1]].argmax(-1)
        token = token * alive + end * (1 - alive)
        ids = torch.cat([ids, token[:, None]], -1)
        alive = alive.mul(token.ne(end).long())
        if alive.max() == 0:  # waits
            break
    return ids


def nucleus_by_hand(device: str) -> Any:
    logits = torch.randn(3, 12, device=device) * 2
    ordered, index = logits.sort(descending=True)
    gone = ordered.softmax(-1).cumsum(-1) > 0.8
    gone[..., 1:] = gone[..., :-1].clone()
    gone[..., 0] = 0
    logits[gone.scatter(1, index, gone)] = -float("inf")
    logits[:, index[0, :2]] = 0.5  # waits
    chosen = torch.multinomial(logits.softmax(-1), 2)
    return chosen.shape, logits.isinf().any()


def nucleus_of_one_row_by_hand(device: str) -> Any:
    logits = torch.randn(12, device=device)
    ordered, index = logits.sort(descending=True)
    keep = int((ordered.softmax(0).cumsum(0) < 0.8).sum()) + 1  # waits
    chosen = index[:keep][torch.multinomial(ordered[:keep].softmax(0), 1)]
    return 0 <= chosen.item() < 12  # waits


def punished_tokens_and_their_neighbours(device: str) -> Any:
    logits, seen = torch.randn(2, 9, device=device), torch.randint(0, 9, (2, 5), device=device)
    scores = logits.gather(1, seen)
    logits.scatter_(1, seen, torch.where(scores > 0, scores / 1.3, scores * 1.3))
    counts = torch.zeros_like(logits).scatter_add_(1, seen, torch.ones_like(seen, dtype=torch.float))
    logits -= 0.2 * counts + 0.1 * (counts > 0)
    logits[:, 0] = -float("inf")
    logits[0, 1] = -float("inf")  # waits
    logits[:, [2, 3]] = -float("inf")  # waits
    return logits


def beams_kept_in_a_heap(device: str) -> Any:
    table = torch.randn(6, 6, device=device).log_softmax(-1)
    beams = [(0.0, [0])]
    for _ in range(3):
        last = torch.tensor([ids[-1] for _, ids in beams], device=device)  # waits
        scores, tokens = table[last].topk(2, dim=-1)
        grown = []
        for (before, ids), row, choice in zip(beams, scores.tolist(), tokens.tolist()):  # waits
            grown += [(before + score, [*ids, token]) for score, token in zip(row, choice)]
        beams = heapq.nlargest(3, grown)
    return [ids for _, ids in beams]


def beams_kept_on_the_device(device: str) -> Any:
    table, width, vocabulary = torch.randn(6, 6, device=device).log_softmax(-1), 3, 6
    ids = torch.zeros(2, width, 1, dtype=torch.long, device=device)
    scores = torch.full((2, width), -1e9, device=device)
    scores[:, 0] = 0.0
    for _ in range(3):
        flat = (scores[..., None] + table[ids[..., -1]]).flatten(1)
        scores, place = flat.topk(width, dim=-1)
        parent = torch.div(place, vocabulary, rounding_mode="floor")
        ids = ids.gather(1, parent[..., None].expand(-1, -1, ids.shape[-1]))
        ids = torch.cat([ids, (place % vocabulary)[..., None]], -1)
    return ids, scores


def drafts_accepted_by_chance(device: str) -> Any:
    target, draft = (torch.randn(7, 7, device=device).softmax(-1) for _ in range(2))
    here, taken = torch.zeros((), dtype=torch.long, device=device), 0
    for _ in range(2):
        tokens, where = [], here
        for _ in range(3):
            where = torch.multinomial(draft[where], 1).squeeze()  # waits
            tokens.append(where)
        before = torch.stack([here, *tokens[:-1]])
        guesses = torch.stack(tokens)
        ratio = target[before, guesses] / draft[before, guesses]
        accepted = (torch.rand(3, device=device) < ratio).long().cumprod(0)
        count = accepted.sum()
        here = torch.cat([here[None], guesses]).gather(0, count[None]).squeeze(0)
        taken += int(count)  # waits
    return 0 <= taken <= 6


def drafts_accepted_without_asking(device: str) -> Any:
    table, ids = torch.randn(8, 8, device=device), torch.zeros(2, 12, dtype=torch.long, device=device)
    lengths, steps = torch.ones(2, dtype=torch.long, device=device), torch.arange(4, device=device)
    for _ in range(2):
        last = ids.gather(1, lengths[:, None] - 1)
        drafts = torch.cat([last, torch.randint(0, 8, (2, 3), device=device)], 1)
        answers = table[drafts].argmax(-1)
        count = (answers[:, :-1] == drafts[:, 1:]).long().cumprod(1).sum(1)
        ids.scatter_(1, lengths[:, None] + steps, answers)
        lengths += count + 1
    return lengths, torch.where(torch.arange(12, device=device) < lengths[:, None], ids, -1)


def rollout_with_a_gaussian_policy(device: str) -> Any:
    actor, critic = nn.Linear(3, 2, device=device), nn.Linear(3, 1, device=device)
    spread = nn.Parameter(torch.zeros(2, device=device))
    state, chances, values, rewards = torch.randn(4, 3, device=device), [], [], []
    for _ in range(3):
        policy = td.Independent(td.Normal(actor(state), spread.exp()), 1)  # waits
        action = policy.rsample().detach()
        chances.append(policy.log_prob(action))  # waits
        values.append(critic(state)[:, 0])
        rewards.append(-action.square().sum(-1))
        state = torch.cat([state[:, 1:], action.mean(1, keepdim=True)], 1)
    total, losses = torch.zeros(4, device=device), []
    for chance, value, reward in zip(reversed(chances), reversed(values), reversed(rewards)):
        total = reward + 0.9 * total
        losses.append(F.mse_loss(value, total) - (chance * (total - value.detach())).mean())
    torch.stack(losses).sum().backward()
    return actor.weight.grad, spread.grad


def rollout_that_trusts_its_parameters(device: str) -> Any:
    actor, log = nn.Linear(3, 2, device=device), torch.zeros(2, device=device, requires_grad=True)
    old = td.Normal(torch.zeros(4, 2, device=device), torch.ones(4, 2, device=device), validate_args=False)
    state = torch.randn(4, 3, device=device)
    for _ in range(2):
        new = td.Normal(actor(state), log.exp().expand(4, 2), validate_args=False)
        action = new.rsample()
        ratio = (new.log_prob(action) - old.log_prob(action)).sum(-1)
        loss = ratio.mean() + 0.1 * td.kl_divergence(new, old).sum(-1).mean() - 0.01 * new.entropy().mean()
        loss.backward()
    return log.grad


def actions_sampled_by_the_library(device: str) -> Any:
    mean, spread = torch.zeros(4, 2, device=device), torch.full((4, 2), 0.5, device=device)
    noise = td.Normal(mean, spread, validate_args=False).sample()  # waits
    coins = td.Bernoulli(logits=noise, validate_args=False).sample()
    kinds = td.OneHotCategorical(logits=noise, validate_args=False).sample()  # waits
    beta = td.Beta(spread + 1, spread + 1, validate_args=False).rsample()
    return coins.shape, kinds.sum(-1), beta.shape


def turns_of_a_world_on_the_device(device: str) -> Any:
    place, goal = torch.zeros(6, 2, device=device), torch.tensor([1.0, -1.0], device=device)  # waits
    length, finished = torch.zeros(6, dtype=torch.long, device=device), torch.zeros((), device=device)
    for _ in range(4):
        place = place + 0.5 * (goal - place).sign() * torch.rand(6, 2, device=device)
        done = (place - goal).norm(dim=-1) < 0.3
        length = torch.where(done, 0, length + 1)
        place = torch.where(done[:, None], torch.zeros_like(place), place)
        finished += done.sum()
    return place, length, finished


def bandit_that_grows_curious(device: str) -> Any:
    worth, counts, sums = (torch.linspace(0, 1, 5, device=device), *torch.zeros(2, 5, device=device))
    for step in range(1, 9):
        bound = sums / counts.clamp(min=1e-6) + (2 * math.log(step + 1) / counts.clamp(min=1e-6)).sqrt()
        arm = bound.argmax()
        reward = worth[arm]  # waits
        counts[arm] += 1  # waits
        sums.index_add_(0, arm[None], reward[None])
    return counts


def boxes_kept_greedily(device: str) -> Any:
    corner, size = torch.rand(12, 2, device=device), torch.rand(12, 2, device=device) * 0.5
    boxes, order = torch.cat([corner, corner + size], 1), torch.rand(12, device=device).argsort(descending=True)
    area, kept = size.prod(1), []
    while order.numel() > 0:
        best = order[0]
        kept.append(best)
        low = torch.maximum(boxes[order[1:], :2], boxes[order[:1], :2])
        high = torch.minimum(boxes[order[1:], 2:], boxes[order[:1], 2:])
        both = (high - low).clamp(min=0).prod(1)
        overlap = both / (area[order[1:]] + area[order[:1]] - both)
        order = order[1:][overlap <= 0.3]  # waits
    return torch.stack(kept)


def boxes_kept_by_a_matrix(device: str) -> Any:
    corner, size = torch.rand(10, 2, device=device), torch.rand(10, 2, device=device) * 0.5
    scores, order = torch.rand(10, device=device).sort(descending=True)
    boxes = torch.cat([corner, corner + size], 1)[order]
    low, high = (
        fn(boxes[:, None, at], boxes[None, :, at])
        for fn, at in ((torch.maximum, slice(2)), (torch.minimum, slice(2, 4)))
    )
    both, area = (high - low).clamp(min=0).prod(-1), (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    overlap = (both / (area[:, None] + area - both)).triu(1)
    decay = ((1 - overlap) / (1 - overlap.amax(0)[:, None]).clamp(min=1e-6)).amin(0)
    return scores * decay


def anchors_given_to_boxes(device: str) -> Any:
    overlap, kinds = torch.rand(9, 3, device=device), torch.arange(3, device=device)
    best, which = overlap.max(1)
    labels = torch.full((9,), -1, dtype=torch.long, device=device)
    labels[best < 0.4] = 0
    positive = best >= 0.6
    labels[positive] = kinds[which[positive]] + 1  # waits
    labels[overlap.argmax(0)] = kinds + 1
    picked = torch.nonzero(labels > 0).squeeze(1)  # waits
    picked = picked[torch.randperm(picked.numel(), device=device)[:2]]
    return labels, picked.numel()


def precision_over_ranks(device: str) -> Any:
    scores, right = torch.rand(20, device=device), torch.rand(20, device=device) < 0.4
    hits = right[scores.argsort(descending=True)].float().cumsum(0)
    precision = hits / torch.arange(1, 21, device=device)
    recall = hits / hits[-1].clamp(min=1)
    ceiling = precision.flip(0).cummax(0).values.flip(0)
    at = torch.linspace(0, 1, 11, device=device)
    place = torch.searchsorted(recall, at).clamp(max=19)
    return ceiling[place].mean()


def cheapest_path_through_a_grid(device: str) -> Any:
    cost = torch.rand(4, 5, device=device)
    total = torch.full((5, 6), float("inf"), device=device)
    total[0, 0] = 0.0  # waits
    for row in range(4):
        for column in range(5):
            before = torch.min(total[row, column], torch.min(total[row, column + 1], total[row + 1, column]))
            total[row + 1, column + 1] = cost[row, column] + before
    row, column, path = 4, 5, []
    while row > 0 and column > 0:
        path.append((row, column))
        steps = torch.stack([total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]])
        step = int(steps.argmin())  # waits
        row, column = row - (step != 2), column - (step != 1)
    return total[-1, -1], len(path) >= 5
