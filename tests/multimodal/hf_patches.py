"""Pictures and videos in patches, as models of transformers take them."""

from __future__ import annotations

from typing import Any

import torch

from headway.core.media import VisionInfo


def in_parts(videos: list[torch.Tensor], info: VisionInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Videos [frames, channels, height, width] as Qwen takes them: patches of two frames, square by square, and the grids."""
    size, merge, flat, grids = info.patch, info.group, [], []
    for each in videos:
        frames, channels, height, width = each.shape
        rows, columns = height // size, width // size
        cut = each.reshape(frames // 2, 2, channels, rows // merge, merge, size, columns // merge, merge, size)
        flat.append(cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(frames // 2 * rows * columns, -1))
        grids.append([frames // 2, rows, columns])
    return torch.cat(flat), torch.tensor(grids)


def flat(pixels: list[torch.Tensor], size: int, group: int) -> dict[str, Any]:
    """Pictures [1, channels, height, width] as Gemma 4 takes them: patches of pixels from 0 to 1, and their places."""
    patches, places = [], []
    for each in pixels:
        cut = ((each[0] + 1) / 2).unfold(1, size, size).unfold(2, size, size).permute(1, 2, 3, 4, 0)
        rows, columns = cut.shape[:2]
        patches.append(cut.reshape(rows * columns, -1))
        places.append(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1))
    most = 9 * group**2
    padded = [torch.nn.functional.pad(each, (0, 0, 0, most - len(each))) for each in patches]
    placed = [torch.nn.functional.pad(each, (0, 0, 0, most - len(each)), value=-1) for each in places]
    return {"pixel_values": torch.stack(padded), "image_position_ids": torch.stack(placed)}
