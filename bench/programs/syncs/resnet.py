"""torchvision's ResNet-18: steps, an average of the weights, a checkpoint. python resnet.py DEVICE RESULT.json [TIMES]"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torchvision.transforms import v2


def main(device: str, told: Path) -> None:
    begin, worked = time.perf_counter(), time.process_time()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    pictures = v2.Normalize([0.5] * 3, [0.25] * 3)(torch.rand(32, 3, 64, 64))
    data = torch.utils.data.TensorDataset(pictures, torch.arange(32) % 10)
    losses = []
    for _ in range(2):
        right = torch.zeros((), device=device)
        for images, labels in torch.utils.data.DataLoader(data, batch_size=8, pin_memory=device == "cuda"):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            out = model(images)
            loss = F.cross_entropy(out, labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            right += (out.argmax(1) == labels).sum()
        schedule.step()
        losses.append(loss.item())
        with tempfile.NamedTemporaryFile() as file:
            state = {"model": average.state_dict(), "optimizer": optimizer.state_dict(), "right": right}
            torch.save(state, file.name)
            back = torch.load(file.name, map_location="cpu", weights_only=True)
        average.load_state_dict(back["model"])
        optimizer.load_state_dict(back["optimizer"])
    average.eval()
    with torch.inference_mode():
        best = average(pictures[:4].to(device)).argmax(1).tolist()
    seconds, processor = time.perf_counter() - begin, time.process_time() - worked
    result = [round(x, 2) for x in losses], best
    told.write_text(
        json.dumps({"seconds": seconds, "processor": processor, "torch": torch.__version__, "result": result})
    )


if __name__ == "__main__":
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 1):  # the last one's time is told
        main(sys.argv[1], Path(sys.argv[2]))
