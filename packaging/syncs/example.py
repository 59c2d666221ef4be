"""A training loop with three waits, for the picture in README.md."""

import torch

model = torch.nn.Linear(64, 8, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(256, 64, device="cuda"), torch.randint(0, 8, (256,), device="cuda")
for step in range(100):
    keep = x[:, 0] > 0
    loss = torch.nn.functional.cross_entropy(model(x[keep]), y[keep])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
