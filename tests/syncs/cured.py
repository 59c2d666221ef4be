"""Findings in whole programs, each before and after the cure that it is told: lines of code that leave a result in ``made``.

Drawn by chance from what ``headway syncs --simulate`` said of bench/programs/syncs_published (loops, parts, choosing,
measuring). ``tests/syncs/test_cured.py`` runs both: the first is told that cure, the second does not wait, and gives the same.
Where the cure is to ask later, or less often, the second asks in ``later``, outside of what is watched.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Cured(NamedTuple):
    """One finding."""

    cure: str
    before: str
    after: str
    later: str = ""


FINDINGS: Final = (
    Cured(
        "precomputed tables",  # a goal that is made anew
        "made = (x[:2] - torch.tensor([1.0, -1.0], device='cuda')).sign()",
        "made = (x[:2] - goal).sign()",
    ),
    Cured(
        "torch.where",  # labels of the anchors that overlap enough
        "made = labels.clone()\nmade[mask] = kinds[which[mask]] + 1",
        "made = torch.where(mask, kinds[which] + 1, labels)",
    ),
    Cured(
        "fixed-size compaction",  # places of the positive ones
        "made = (labels > 0).nonzero()[:, 0]",
        "flag = labels > 0\nplace = torch.where(flag, flag.cumsum(0) - 1, 8)\n"
        "rows = torch.zeros(9, dtype=torch.long, device='cuda').scatter_(0, place, torch.arange(8, device='cuda'))\n"
        "count = flag.sum()",
        "made = rows[:count]",
    ),
    Cured(
        "slice assignment",  # the corner of a grid
        "made = square.clone()\nmade[0, 0] = 0.0",
        "made = square.clone()\nmade[0, 0].fill_(0.0)",
    ),
    Cured(
        "log every k steps",  # a row of a table in each step
        "texts = []\nfor _ in range(4):\n    writerow = texts.append\n    writerow(f'{x.mean():.2f}')\nmade = texts[-1]",
        "total = torch.zeros((), device='cuda')\nfor _ in range(4):\n    total += x.mean()",
        "made = f'{total / 4:.2f}'",
    ),
    Cured(
        "readback ring",  # the mean of the losses so far
        "made = 0.7 * 0.0 + 0.3 * x.mean().item()",
        "slot = ring[0][:1]\nslot.copy_(x.mean()[None], non_blocking=True)\nevents[0].record()",
        "events[0].synchronize()\nmade = 0.7 * 0.0 + 0.3 * float(slot)",
    ),
    Cured(
        "index on the device",  # the rate where the loss falls fastest
        "rates = [0.1, 0.2, 0.3]\nmade = rates[int(x[:3].argmin())]",
        "made = table.index_select(0, x[:3].argmin()[None])[0]",
    ),
    Cured(
        "readback ring",  # weights that are written to a file
        "file = io.BytesIO()\ntorch.save({'x': x}, file)\nfile.seek(0)\nmade = torch.load(file, map_location='cpu')['x']",
        "ring[1].copy_(x, non_blocking=True)\nevents[1].record()",
        "file = io.BytesIO()\nevents[1].synchronize()\ntorch.save({'x': ring[1].clone()}, file)\nfile.seek(0)\n"
        "made = torch.load(file)['x']",
    ),
    Cured(
        "dense host side",  # a mask from pageable memory
        "made = host_mask.to('cuda', non_blocking=True)",
        "made = host_mask.pin_memory().to('cuda', non_blocking=True)",
    ),
    Cured(
        "pinned staging",  # batches of a loader
        "made = torch.cat([part.to('cuda') for part in DataLoader(TensorDataset(host), 4) for part in part])",
        "loader = DataLoader(TensorDataset(host), 4, pin_memory=True)\n"
        "made = torch.cat([part.to('cuda', non_blocking=True) for part in loader for part in part])",
    ),
    Cured(
        "once at start-up",  # replicas of a model
        "norm = torch.nn.BatchNorm1d(8, device='cuda')\nmade = norm(square)",
        "with syncs.allowed('made once'):\n    norm = torch.nn.BatchNorm1d(8, device='cuda')\nmade = norm(square)",
    ),
    Cured(
        "log every k steps",  # the scale of a scaler, asked in each step
        "for _ in range(3):\n    seen = scaler.get_scale()\nmade = seen",
        "for number in range(3):\n    if number % 100 == 99:\n        seen = scaler.get_scale()",
        "made = scaler.get_scale()",
    ),
    Cured(
        "rows sorted by the host",  # packed in any order
        "rows = square[:2, :, None]\n"
        "packed = rnn.pack_padded_sequence(rows, [2, 3], batch_first=True, enforce_sorted=False)\nmade = packed.data",
        "rows = square[:2].flip(0)[:, :, None]\n"
        "packed = rnn.pack_padded_sequence(rows, [3, 2], batch_first=True)\nmade = packed.data",
    ),
    Cured(
        "rows sorted by the host",  # and unpacked
        "made, _ = rnn.pad_packed_sequence(any_order, batch_first=True)\nmade = made.flip(0)",
        "made, _ = rnn.pad_packed_sequence(falling, batch_first=True)",
    ),
    Cured(
        "is_causal said",  # a decoder that looks at its mask
        "made = decoder(states, states, tgt_mask=causal)",
        "made = decoder(states, states, tgt_mask=causal, tgt_is_causal=True)",
    ),
    Cured(
        "readback ring",  # figures at the end of an epoch
        "made = {'accuracy': float(x.mean())}['accuracy']",
        "ring[0][:1].copy_(x.mean()[None], non_blocking=True)\nevents[0].record()",
        "events[0].synchronize()\nmade = float(ring[0][0])",
    ),
    Cured(
        "reduce on the device",  # the middle one of some sums
        "made = statistics.median([part.sum() for part in square[:5]])",
        "made = torch.stack([part.sum() for part in square[:5]]).median()",
    ),
    Cured(
        "assert on the device",  # a distance that cannot be
        "if x.max() > 100.0:\n    raise ValueError\nmade = x",
        "torch._assert_async(x.max() <= 100.0)\nmade = x",
    ),
    Cured(
        "wait inside an operation",  # frames aligned with words, backwards
        "leaf = x.view(4, 1, 2).log_softmax(-1).detach().requires_grad_()\n"
        "F.ctc_loss(leaf, kinds[1:2, None].clamp(max=1), [4], [1]).backward()\nmade = leaf.grad * 0",
        "made = torch.zeros(4, 1, 2, device='cuda')\nif step % 100 == 99:\n"
        "    F.ctc_loss(leaf, kinds[1:2, None].clamp(max=1), [4], [1]).backward()",
    ),
    Cured(
        "torch.where",  # an expert asked for its own rows
        "made = torch.zeros_like(square)\nmade[mask] = expert(square[mask])",
        "made = torch.where(mask[:, None], expert(square), 0.0)",
    ),
    Cured(
        "torch.where",  # the backward pass of a selection
        "leaf = x.clone().requires_grad_()\nchosen = leaf[mask].square()\nchosen.sum().backward()\nmade = leaf.grad",
        "leaf = x.clone().requires_grad_()\nchosen = torch.where(mask, leaf, 0.0).square()\n"
        "chosen.sum().backward()\nmade = leaf.grad",
    ),
    Cured(
        "torch.where",  # strangers among the rows
        "others = x[~mask]\nmade = others.max()",
        "others = torch.where(mask, -torch.inf, x)\nmade = others.max()",
    ),
    Cured(
        "torch.where",  # the hard ones of them
        "hard = x[x > x.min()]\nmade = hard.square().mean()",
        "flag = x > x.min()\nmade = torch.where(flag, x, 0.0).square().sum() / flag.sum()",
    ),
    Cured(
        "index_fill_",  # the smallest weights cut
        "made = x.clone()\norder = x.argsort()\nmade[order[:3]] = 0",
        "made = x.clone()\norder = x.argsort()\nmade.index_fill_(0, order[:3], 0)",
    ),
    Cured(
        "slice assignment",  # one of them kept
        "made = torch.zeros_like(square)\nmade[0, 0] = 1",
        "made = torch.zeros_like(square)\nmade[0, 0].fill_(1)",
    ),
    Cured(
        "log every k steps",  # a share as text
        "made = f'{mask.float().mean():.1f}'",
        "share = mask.float().mean()",
        "made = f'{share:.1f}'",
    ),
    Cured(
        "readback ring",  # what hooks have gathered
        "made = torch.stack([x.mean(), x.sum()]).numpy(force=True).sum()",
        "ring[1][:2].copy_(torch.stack([x.mean(), x.sum()]), non_blocking=True)\nevents[1].record()",
        "events[1].synchronize()\nmade = ring[1][:2].sum()",
    ),
    Cured(
        "upper bound on the host",  # adapters by those that are asked for
        "made = torch.zeros(8, device='cuda')\nfor number in kinds.sort().values.tolist():\n"
        "    made += torch.where(which == number, 1.0 + number, 0.0)",
        "made = torch.zeros(8, device='cuda')\nfor number in range(8):\n"
        "    made += torch.where(which == number, 1.0 + number, 0.0)",
    ),
)
