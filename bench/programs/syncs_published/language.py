"""Language models, retrieval and alignment. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def preferences_without_a_reward_model(device: str) -> Any:
    model, kept = nn.Embedding(7, 7, device=device), torch.randn(7, 7, device=device)
    better, worse = torch.randint(0, 7, (2, 3, 5), device=device)
    gaps = []
    for ids in (better, worse):
        mine = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))
        base = kept[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))
        gaps.append(mine - base)
    loss = -F.logsigmoid(0.1 * (gaps[0] - gaps[1])).mean()
    loss.backward()
    log = {"chosen": gaps[0].mean().item(), "rejected": gaps[1].mean().item()}  # waits
    return log, model.weight.grad


def groups_of_answers_ranked(device: str) -> Any:
    answers = ["good answer", "bad", "a longer answer", "ok"]
    rewards = torch.tensor([float(len(answer)) for answer in answers], device=device)  # waits
    groups = rewards.view(2, 2)
    worth = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
    chances = torch.randn(4, 6, device=device, requires_grad=True)
    mask = torch.arange(6, device=device) < torch.randint(1, 7, (4, 1), device=device)
    ratio = (chances - chances.detach()).exp()
    loss = -(torch.min(ratio * worth[:, None], ratio.clamp(0.8, 1.2) * worth[:, None]) * mask).sum() / mask.sum()
    loss.backward()
    return chances.grad


def documents_packed_with_their_longest(device: str) -> Any:
    lengths = torch.randint(1, 5, (4,), device=device)
    borders = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = lengths.max().item()  # waits
    inside = torch.arange(longest, device=device) < lengths[:, None]
    return borders, inside.sum(1)


def drafts_accepted_by_the_host(device: str) -> Any:
    table, ids = torch.randn(8, 8, device=device), torch.zeros(1, dtype=torch.long, device=device)
    for _ in range(3):
        drafts = torch.cat([ids[-1:], torch.randint(0, 8, (3,), device=device)])
        answers = table[drafts].argmax(-1)
        right = (answers[:-1] == drafts[1:]).long().cumprod(0)
        count = int(right.sum())  # waits
        ids = torch.cat([ids, answers[: count + 1]])
    return ids


def selective_scan_by_steps(device: str) -> Any:
    x, gate = torch.randn(2, 5, 3, device=device), torch.rand(2, 5, 3, device=device)
    a, b, c = -torch.rand(3, 4, device=device), torch.randn(2, 5, 4, device=device), torch.randn(2, 5, 4, device=device)
    state, made = torch.zeros(2, 3, 4, device=device), []
    for step in range(5):
        decay = (gate[:, step, :, None] * a).exp()
        state = decay * state + (gate[:, step] * x[:, step])[..., None] * b[:, step, None]
        made.append((state * c[:, step, None]).sum(-1))
    return torch.stack(made, 1)


def tokens_sent_to_experts_by_slots(device: str) -> Any:
    x, router = torch.randn(12, 4, device=device), nn.Linear(4, 3, device=device)
    experts = torch.randn(3, 4, 4, device=device)
    gate, expert = router(x).softmax(-1).max(-1)
    chosen = F.one_hot(expert, num_classes=3)
    place = (chosen.cumsum(0) * chosen).sum(-1) - 1
    fits = place < 5
    slot = torch.where(fits, expert * 5 + place, torch.full_like(place, 15))
    packed = torch.zeros(16, 4, device=device).index_copy(0, slot, x)[:15].view(3, 5, 4)
    made = torch.cat([torch.bmm(packed, experts).view(15, 4), torch.zeros(1, 4, device=device)])
    return made[slot] * gate[:, None], (chosen.float().mean(0) * router(x).softmax(-1).mean(0)).sum() * 3


def tokens_sent_to_experts_one_by_one(device: str) -> Any:
    x, experts = torch.randn(12, 4, device=device), nn.ModuleList(nn.Linear(4, 4, device=device) for _ in range(3))
    weights, chosen = torch.randn(12, 3, device=device).softmax(-1).topk(2)
    made = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, place = torch.where(chosen == number)  # waits
        made.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return made


def experts_sorted_with_counts_on_the_host(device: str) -> Any:
    x, weight = torch.randn(12, 4, device=device), torch.randn(3, 4, 4, device=device)
    expert = torch.randint(0, 3, (12,), device=device)
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=3).tolist()  # waits
    parts = [rows @ weight[number] for number, rows in enumerate(x[order].split(counts))]
    return torch.zeros_like(x).index_copy(0, order, torch.cat(parts))


def beams_searched_until_done(device: str) -> Any:
    table, beams = torch.randn(6, 6, device=device).log_softmax(-1), torch.zeros(3, 1, dtype=torch.long, device=device)
    scores = torch.tensor([0.0, -1e9, -1e9], device=device)  # waits
    done = torch.zeros(3, dtype=torch.bool, device=device)
    while not done.all() and beams.shape[1] < 6:  # waits
        grown = scores[:, None] + table[beams[:, -1]].masked_fill(done[:, None], 0.0)
        scores, flat = grown.flatten().topk(3)
        parent, token = flat // 6, flat % 6
        beams, done = torch.cat([beams[parent], token[:, None]], 1), done[parent] | (token == 5)
    return beams, scores


def surprise_over_sliding_windows(device: str) -> Any:
    table, ids = torch.randn(9, 9, device=device), torch.randint(0, 9, (1, 20), device=device)
    total, count, before = 0.0, 0, 0
    for begin in range(0, 20, 6):
        end = min(begin + 8, 20)
        targets = ids[:, begin:end].clone()
        targets[:, : max(before - begin, 0)] = -100
        loss = F.cross_entropy(table[ids[:, begin:end]][0, :-1], targets[0, 1:], ignore_index=-100)
        fresh = end - max(before, begin)
        total, count, before = total + float(loss) * fresh, count + fresh, end  # waits
    return math.exp(total / count)


def low_rank_update_merged_and_taken_out(device: str) -> Any:
    layer = nn.Linear(4, 3, device=device)
    down, up = nn.Linear(4, 2, bias=False, device=device), nn.Linear(2, 3, bias=False, device=device)
    nn.init.zeros_(up.weight)
    x = torch.randn(5, 4, device=device)
    (layer(x) + 0.5 * up(down(F.dropout(x, 0.1)))).square().mean().backward()
    with torch.no_grad():
        up.weight.sub_(up.weight.grad)
        layer.weight += 0.5 * up.weight @ down.weight
        made = layer(x)
        layer.weight -= 0.5 * up.weight @ down.weight
    return made


def places_turned_by_complex_numbers(device: str) -> Any:
    angles = torch.outer(torch.arange(5, device=device).float(), 100.0 ** (-torch.arange(0, 4, 2, device=device) / 4))
    turn = torch.polar(torch.ones_like(angles), angles)
    q = torch.randn(2, 5, 3, 4, device=device)
    pairs = torch.view_as_complex(q.reshape(2, 5, 3, 2, 2))
    return torch.view_as_real(pairs * turn[None, :, None]).flatten(3)


def attention_by_blocks_with_a_running_maximum(device: str) -> Any:
    q, k, v = torch.randn(3, 2, 8, 4, device=device)
    most, sums, made = (
        torch.full((2, 8, 1), -1e9, device=device),
        torch.zeros(2, 8, 1, device=device),
        torch.zeros_like(q),
    )
    for begin in range(0, 8, 4):
        scores = q @ k[:, begin : begin + 4].transpose(1, 2) / 2
        ahead = torch.arange(begin, begin + 4, device=device) > torch.arange(8, device=device)[:, None]
        scores = scores.masked_fill(ahead, -1e9)
        fresh = torch.maximum(most, scores.amax(-1, keepdim=True))
        weight, fade = (scores - fresh).exp(), (most - fresh).exp()
        sums, made, most = (
            sums * fade + weight.sum(-1, keepdim=True),
            made * fade + weight @ v[:, begin : begin + 4],
            fresh,
        )
    return made / sums, F.scaled_dot_product_attention(q, k, v, is_causal=True)


def words_seen_made_few(device: str) -> Any:
    ids, table = torch.randint(0, 50, (2, 6), device=device), torch.randn(50, 3, device=device)
    kept, back = torch.unique(ids, return_inverse=True)  # waits
    return table[kept][back]


def text_marked_by_a_seeded_half(device: str) -> Any:
    table, ids = torch.randn(8, 8, device=device), [3]
    for _ in range(3):
        dice = torch.Generator(device=device).manual_seed(ids[-1] * 7 + 1)
        green = torch.randperm(8, generator=dice, device=device)[:4]
        logits = table[ids[-1]].index_add(0, green, torch.full((4,), 2.0, device=device))
        ids.append(int(logits.argmax()))  # waits
    return len(ids)


def loss_over_a_vocabulary_in_pieces(device: str) -> Any:
    hidden, head = torch.randn(6, 4, device=device, requires_grad=True), torch.randn(10, 4, device=device)
    targets, total = torch.randint(0, 10, (6,), device=device), torch.zeros((), device=device)
    for rows, wanted in zip(hidden.split(2), targets.split(2)):
        logits = rows @ head.T
        spread = logits.logsumexp(-1)
        total = total + (spread - logits.gather(1, wanted[:, None])[:, 0]).sum() + 1e-4 * spread.square().sum()
    (total / 6).backward()
    return hidden.grad


def nearest_texts(device: str) -> Any:
    store, asked = (
        F.normalize(torch.randn(20, 4, device=device), dim=1),
        F.normalize(torch.randn(2, 4, device=device), dim=1),
    )
    scores, places = (asked @ store.T).topk(3)
    texts = [[f"text {place}" for place in row] for row in places.tolist()]  # waits
    return texts, scores


def texts_embedded_in_batches(device: str) -> Any:
    model, texts, made = nn.EmbeddingBag(20, 4, device=device), ["a b", "c", "d e f g", "h i"], []
    for begin in range(0, 4, 2):
        parts = [[ord(word) % 20 for word in text.split()] for text in texts[begin : begin + 2]]
        flat = torch.tensor([number for part in parts for number in part], device=device)  # waits
        offsets = torch.tensor([0, len(parts[0])], device=device)  # waits
        with torch.inference_mode():
            made.append(F.normalize(model(flat, offsets), dim=-1))
    return torch.cat(made).cpu()  # waits


def student_of_softened_answers(device: str) -> Any:
    student, teacher = nn.Linear(4, 6, device=device), nn.Linear(4, 6, device=device)
    x, y = torch.randn(5, 4, device=device), torch.randint(0, 6, (5,), device=device)
    with torch.no_grad():
        soft = (teacher(x) / 2).log_softmax(-1)
    loss = 4 * F.kl_div((student(x) / 2).log_softmax(-1), soft, reduction="batchmean", log_target=True)
    (loss + F.cross_entropy(student(x), y, label_smoothing=0.1)).backward()
    return student.weight.grad


def pictures_and_texts_paired(device: str) -> Any:
    left, right = (F.normalize(torch.randn(4, 5, device=device, requires_grad=True), dim=-1) for _ in range(2))
    scale = torch.full((), math.log(1 / 0.07), device=device, requires_grad=True)
    logits = scale.exp().clamp(max=100) * left @ right.T
    pairs = torch.arange(4, device=device)
    (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)).div(2).backward()
    with torch.no_grad():
        scale.clamp_(0, math.log(100))
    return scale.grad


def sparse_features_found(device: str) -> Any:
    encode, decode = nn.Linear(4, 16, device=device), nn.Linear(16, 4, device=device)
    quiet = torch.zeros(16, device=device)
    for _ in range(2):
        x = torch.randn(8, 4, device=device)
        values, places = encode(x).relu().topk(3)
        code = torch.zeros(8, 16, device=device).scatter(1, places, values)
        (decode(code) - x).square().mean().backward()
        quiet = torch.where((code > 0).any(0), torch.zeros_like(quiet), quiet + 1)
    dead = (quiet > 1).sum()
    print(f"{dead} features are dead")  # waits
    return encode.weight.grad
