"""Control flow over tensors, searches, boxes, clusters, recurrent cells, transformers, files."""
# ruff: noqa: E501 - tables of calls, as their users write them

from __future__ import annotations

import functools
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn


def control_flow(device):
    from torch._higher_order_ops import associative_scan, scan

    x = torch.arange(4.0, device=device)
    first = torch.cond(x.sum() > 3, lambda t: t * 2, lambda t: t - 1, (x,))
    _, ys = scan(lambda carry, v: (carry + v, carry * v), torch.zeros((), device=device), x)
    return first, ys, associative_scan(torch.add, x, 0, combine_mode="generic")


def fibonacci_until(device):
    x, steps = torch.tensor([0, 1], device=device), 0
    while x[1] < 50:
        x = torch.stack([x[1], x.sum()])
        steps += 1
    return x, steps


def beams(device):
    table = torch.randn(7, 7).to(device).log_softmax(-1)
    ids, scores = torch.zeros(3, 1, dtype=torch.long, device=device), torch.tensor([0.0, -1e9, -1e9], device=device)
    for _ in range(4):
        total = scores[:, None] + table[ids[:, -1]]
        scores, flat = total.view(-1).topk(3)
        ids = torch.cat([ids[flat // 7], (flat % 7)[:, None]], 1)
        if (ids[:, -1] == 6).all():
            break
    return ids, scores


def nucleus(device):
    logits = torch.randn(2, 9).to(device)
    order = logits.sort(descending=True)
    cut = order.values.softmax(-1).cumsum(-1) > 0.8
    cut[:, 1:] = cut[:, :-1].clone()
    cut[:, 0] = False
    logits[cut.scatter(1, order.indices, cut)] = -float("inf")
    return torch.multinomial(logits.softmax(-1), 1), logits


def boxes(device):
    a = torch.rand(6, 4).to(device)
    b = torch.cat([a[:, :2], a[:, :2] + a[:, 2:]], 1)
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    low, high = torch.max(b[:, None, :2], b[:, :2]), torch.min(b[:, None, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(2)
    overlap = inter / (area[:, None] + area - inter)
    scores, keep = torch.rand(6).to(device), []
    order = scores.argsort(descending=True)
    while order.numel():
        i = order[0]
        keep.append(i.item())
        order = order[1:][overlap[i, order[1:]] < 0.3]
    return keep, overlap


def clusters(device):
    x = torch.randn(20, 2).to(device)
    centres = x[:3].clone()
    for _ in range(10):
        label = torch.cdist(x, centres).argmin(1)
        fresh = torch.stack([x[label == k].mean(0) if (label == k).any() else centres[k] for k in range(3)])
        if torch.allclose(fresh, centres):
            break
        centres = fresh
    return centres, label


def conjugate_gradients(device):
    a = torch.randn(5, 5).to(device)
    a, b = a @ a.T + torch.eye(5, device=device), torch.randn(5).to(device)
    x = torch.zeros_like(b)
    r = b - a @ x
    p, old = r.clone(), r @ r
    for step in range(10):  # noqa: B007
        ap = a @ p
        alpha = old / (p @ ap)
        x, r = x + alpha * p, r - alpha * ap
        new = r @ r
        if new.sqrt() < 1e-5:
            break
        p, old = r + new / old * p, new
    return x, step


def warped_pictures(device):
    x = torch.rand(1, 1, 5, 5).to(device)
    theta = torch.tensor([[[0.8, 0.1, 0.0], [0.0, 0.9, 0.1]]], device=device)
    grid = F.affine_grid(theta, (1, 1, 4, 4), align_corners=False)
    return (
        F.grid_sample(x, grid, align_corners=False), F.interpolate(x, scale_factor=2, mode="bilinear"), F.interpolate(x, (3, 3), mode="area"),
        F.interpolate(x, size=7, mode="bicubic", antialias=True), F.pad(x, (1, 1, 2, 2), mode="reflect"), F.unfold(x, 2), F.fold(F.unfold(x, 2), (5, 5), 2),
        F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), F.max_pool2d(x, 2, return_indices=True), F.max_unpool2d(*F.max_pool2d(x[..., :4, :4], 2, return_indices=True), 2),
        F.adaptive_max_pool2d(x, 2), F.lp_pool2d(x, 2, 2), F.local_response_norm(x, 2), F.gumbel_softmax(x[0, 0], hard=True).sum(1), F.one_hot(torch.tensor([0, 2], device=device)),
        F.ctc_loss(torch.randn(6, 2, 4).to(device).log_softmax(2), torch.tensor([[1, 2], [2, 3]], device=device), torch.tensor([6, 6]), torch.tensor([2, 2])),
        F.embedding_bag(torch.tensor([0, 1, 1], device=device), torch.randn(3, 2).to(device), torch.tensor([0, 2], device=device)), F.cosine_similarity(x[0, 0], x[0, 0].flip(0)),
    )  # fmt: skip


def packed_sequences(device):
    from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpad_sequence

    x, lengths = torch.randn(3, 5, 4).to(device), torch.tensor([5, 2, 3])
    found = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        cell = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1).to(device)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = cell(packed)
        padded, sizes = pad_packed_sequence(out, batch_first=True)
        padded.sum().backward()
        found += [padded, sizes, cell.weight_ih_l0.grad]
    return found, pack_sequence([x[0], x[1, :2]]).data, unpad_sequence(x, lengths, True)


def decoder_with_attention(device):
    cell, attention, out = (
        nn.LSTMCell(4, 4).to(device),
        nn.MultiheadAttention(4, 2, batch_first=True).to(device),
        nn.Linear(4, 7).to(device),
    )
    table, memory = nn.Embedding(7, 4).to(device), torch.randn(2, 3, 4).to(device)
    state = (torch.zeros(2, 4, device=device), torch.zeros(2, 4, device=device))
    ids, found = torch.zeros(2, dtype=torch.long, device=device), []
    for _ in range(4):
        state = cell(table(ids), state)
        mixed, _ = attention(state[0][:, None], memory, memory)
        ids = out(mixed[:, 0]).argmax(-1)
        found.append(ids)
        if torch.all(ids == 1):
            break
    return torch.stack(found, 1)


def transformer_with_masks(device):
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).to(device)
    src, tgt = torch.randn(2, 4, 8).to(device), torch.randn(2, 3, 8).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(3, device=device)
    pad = torch.tensor([[False, False, False, True], [False] * 4], device=device)
    out = model(src, tgt, tgt_mask=mask, src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True)
    out.sum().backward()
    with torch.no_grad():
        return out, model.eval()(src, tgt, tgt_mask=mask), model.encoder(src, src_key_padding_mask=pad)


def encoder_fast_path(device):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).to(device).eval()
    pad = torch.tensor([[False, False, True], [False, False, False]], device=device)
    with torch.inference_mode():
        return model(torch.randn(2, 3, 8).to(device), src_key_padding_mask=pad)[1]


def adaptive_softmax(device):
    model = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [3, 6]).to(device)
    x, y = torch.randn(5, 6).to(device), torch.tensor([0, 4, 9, 2, 7]).to(device)
    out, loss = model(x, y)
    loss.backward()
    return out, loss, model.log_prob(x), model.predict(x)


def written_to_files(device):
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        x = torch.rand(3, device=device)
        writer.add_scalar("loss", x.mean(), 0)
        writer.add_histogram("x", x, 0)
        return len(os.listdir(folder))


def meta_and_lazy(device):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model = model.to_empty(device=device)
    for p in model.parameters():
        nn.init.ones_(p)
    for b in model.buffers():
        nn.init.zeros_(b)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to(device)
    return model(torch.ones(4, 3, device=device)), lazy(torch.randn(4, 5).to(device))


def fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 4, device=device)
        y = nn.Linear(4, 2, device=device)(x)
        return tuple(y.shape), y.device.type


def each_activation():
    for name in (
        "relu", "relu6", "elu", "selu", "celu", "leaky_relu", "rrelu", "gelu", "silu", "mish", "hardswish", "hardtanh", "hardsigmoid", "softplus", "softsign",
        "tanhshrink", "softshrink", "hardshrink", "logsigmoid", "threshold", "prelu", "glu", "softmin", "normalize", "dropout", "alpha_dropout", "feature_alpha_dropout",
    ):  # fmt: skip
        yield name, functools.partial(_activated, name)


def _activated(name, device):
    x = torch.randn(4, 6).to(device).requires_grad_()
    more = {"threshold": (0.1, 0.0), "prelu": (torch.tensor([0.2], device=device),), "softmin": (1,)}.get(name, ())
    out = getattr(F, name)(x, *more)
    out.square().sum().backward()
    return out, x.grad
