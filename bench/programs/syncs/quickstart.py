"""The PyTorch quickstart on random pictures. python quickstart.py DEVICE RESULT.json [TIMES]"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class NeuralNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.stack = nn.Sequential(
            nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(self.flatten(x))  # type: ignore[no-any-return]


def main(told: Path) -> None:
    begin, worked = time.perf_counter(), time.process_time()
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
    data = TensorDataset(torch.rand(640, 1, 28, 28), torch.randint(0, 10, (640,)))
    train, test = DataLoader(data, batch_size=64), DataLoader(data, batch_size=64)
    model = NeuralNetwork().to(device)
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-1)
    for _ in range(2):
        model.train()
        for batch, (x, y) in enumerate(train):
            x, y = x.to(device), y.to(device)
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch % 5 == 0:
                print(f"loss: {loss.item():>7f}")
        model.eval()
        test_loss, correct = 0.0, 0.0
        with torch.no_grad():
            for x, y in test:
                x, y = x.to(device), y.to(device)
                pred = model(x)
                test_loss += loss_fn(pred, y).item()
                correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    with tempfile.NamedTemporaryFile() as file:
        torch.save(model.state_dict(), file.name)
        model = NeuralNetwork().to(device)
        model.load_state_dict(torch.load(file.name, weights_only=True))
    model.eval()
    with torch.no_grad():
        pred = model(data[0][0].to(device))
    result = [round(test_loss, 2), correct, int(pred[0].argmax(0))]
    seconds, processor = time.perf_counter() - begin, time.process_time() - worked
    told.write_text(
        json.dumps({"seconds": seconds, "processor": processor, "torch": torch.__version__, "result": result})
    )


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 1):  # the last one's time is told
        main(Path(sys.argv[2]))
