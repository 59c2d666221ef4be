"""A GPT of nanoGPT's form trains on bytes. python nanogpt.py DEVICE RESULT.json [TIMES]"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, BLOCK, HEADS, LAYERS = 128, 96, 64, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


def rate(step: int, steps: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / 5) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def main(device: str, told: Path) -> None:
    begin, worked = time.perf_counter(), time.process_time()
    torch.manual_seed(1337)
    data = torch.tensor(list(Path(torch.__file__).read_bytes()[:20_000])) % VOCABULARY
    pick = torch.Generator().manual_seed(1)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(data) - BLOCK - 1, (8,), generator=pick)
        x = torch.stack([data[i : i + BLOCK] for i in at])
        y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in at])
        if device == "cuda":
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x.to(device), y.to(device)

    model = GPT()
    model.to(device)
    groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
    settings = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(settings, lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, enabled=False)
    losses, steps = [], 20
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        for _ in range(2):
            with torch.amp.autocast(device_type=device, dtype=torch.bfloat16):
                loss = model(*batch()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0:
            losses.append(loss.item() * 2)
    seconds, processor = time.perf_counter() - begin, time.process_time() - worked
    told.write_text(
        json.dumps(
            {
                "seconds": seconds,
                "processor": processor,
                "torch": torch.__version__,
                "result": [round(x, 1) for x in losses],
            }
        )
    )


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 1):  # the last one's time is told
        main(sys.argv[1], Path(sys.argv[2]))
