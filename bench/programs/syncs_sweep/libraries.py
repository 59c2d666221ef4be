"""Libraries around torch: torchvision, torchmetrics, einops, accelerate."""
# ruff: noqa: E501 - tables of calls, as their users write them

from __future__ import annotations

import functools
import re
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

MOST = 12_000_000
"""Parameters of a model, at most."""


def _fits(build):
    with torch.device("meta"):
        try:
            model = build()
        except Exception:
            return False
    return sum(p.numel() for p in model.parameters()) < MOST


def _trained(model, inputs, device):
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    out = model(*[x.to(device) for x in inputs])
    out = out if isinstance(out, torch.Tensor) else next(iter(out.values())) if isinstance(out, dict) else out[0]
    loss = out.float().square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        after = model.eval()(*[x.to(device) for x in inputs])
    after = (
        after
        if isinstance(after, torch.Tensor)
        else next(iter(after.values()))
        if isinstance(after, dict)
        else after[0]
    )
    return loss, after.float()


def each_torchvision():
    import torchvision

    families = {}
    for name in torchvision.models.list_models(torchvision.models):
        families.setdefault(re.match("[a-z]+", name)[0], []).append(name)
    for names in families.values():
        yield names[0], functools.partial(_torchvision, names)


def _torchvision(names, device):
    import torchvision

    for name in names:
        build = functools.partial(torchvision.models.get_model, name, weights=None, num_classes=5)
        if _fits(build):
            break
    else:
        raise ModuleNotFoundError("too large for a sweep")
    size = 224 if name.startswith(("vit", "swin", "maxvit")) else 299 if "inception" in name else 96
    return _trained(build(), [torch.randn(2, 3, size, size)], device)


def detection(device):
    import torchvision

    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=96, max_size=96
    ).to(device)
    images = [torch.rand(3, 96, 96).to(device), torch.rand(3, 80, 96).to(device)]
    targets = [
        {"boxes": torch.tensor([[5.0, 5.0, 50.0, 50.0]], device=device), "labels": torch.tensor([1], device=device)}
        for _ in images
    ]
    losses = model(images, targets)
    sum(losses.values()).backward()
    return losses["loss_classifier"].shape, len(model.eval()(images))


def segmentation(device):
    import torchvision

    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    )
    return _trained(model, [torch.randn(2, 3, 64, 64)], device)


def operations_on_boxes(device):
    import torchvision.ops as ops

    corner = torch.rand(8, 2).to(device) * 20
    boxes = torch.cat([corner, corner + torch.rand(8, 2).to(device) * 10 + 1], 1)
    scores = torch.rand(8).to(device)
    x = torch.randn(1, 2, 16, 16).to(device).requires_grad_()
    rois = torch.cat([torch.zeros(8, 1, device=device), boxes], 1)
    aligned = ops.roi_align(x, rois, (3, 3), 0.5)
    aligned.sum().backward()
    return (
        ops.nms(boxes, scores, 0.3), ops.batched_nms(boxes, scores, torch.tensor([0, 1] * 4, device=device), 0.3), ops.box_iou(boxes, boxes), aligned, x.grad,
        ops.roi_pool(x, rois, 2), ops.generalized_box_iou(boxes, boxes), ops.box_convert(boxes, "xyxy", "cxcywh"), ops.clip_boxes_to_image(boxes, (16, 16)),
        ops.remove_small_boxes(boxes, 5.0), ops.sigmoid_focal_loss(scores, scores.round(), reduction="mean"), ops.masks_to_boxes(torch.ones(1, 4, 4, device=device)),
        ops.stochastic_depth(x, 0.5, "row").shape, ops.deform_conv2d(x, torch.zeros(1, 18, 14, 14, device=device), torch.randn(2, 2, 3, 3).to(device)),
    )  # fmt: skip


def pictures_transformed(device):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    x = (torch.rand(3, 12, 12) * 255).to(torch.uint8).to(device)
    steps = v2.Compose(
        [v2.RandomResizedCrop(8, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2, 0.2), v2.ToDtype(torch.float32, scale=True),
         v2.Normalize([0.5] * 3, [0.5] * 3), v2.RandomErasing(1.0), v2.GaussianBlur(3)]
    )  # fmt: skip
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[1, 1, 5, 5]]), format="XYXY", canvas_size=(12, 12)).to(device)
    image = tv_tensors.Image(x)
    flipped, moved = v2.RandomHorizontalFlip(1.0)(image, boxes)
    mixed = v2.MixUp(num_classes=3)(x.float().repeat(2, 1, 1, 1), torch.tensor([0, 1], device=device))
    return (
        steps(x),
        flipped,
        moved,
        type(moved).__name__,
        mixed,
        v2.functional.rotate(x, 30),
        v2.RandAugment()(x).shape,
        v2.AutoAugment()(x).shape,
    )


def picture_grid(device):
    import torchvision.utils as utils

    x = torch.rand(4, 3, 6, 6).to(device)
    with tempfile.TemporaryDirectory() as folder:
        utils.save_image(x, f"{folder}/a.png", nrow=2)
    shown = utils.draw_bounding_boxes((x[0] * 255).to(torch.uint8), torch.tensor([[1.0, 1.0, 4.0, 4.0]], device=device))
    return utils.make_grid(x, normalize=True), shown.shape


_CLASSES = {"task": "multiclass", "num_classes": 3}


def each_metric():
    for name, options in {
        "Accuracy": _CLASSES, "Precision": _CLASSES, "Recall": _CLASSES, "F1Score": _CLASSES, "ConfusionMatrix": _CLASSES, "AUROC": _CLASSES,
        "AveragePrecision": _CLASSES, "CohenKappa": _CLASSES, "MatthewsCorrCoef": _CLASSES, "Specificity": _CLASSES, "StatScores": _CLASSES,
        "JaccardIndex": _CLASSES, "CalibrationError": _CLASSES, "ROC": _CLASSES | {"thresholds": 5}, "PrecisionRecallCurve": _CLASSES, "HingeLoss": _CLASSES,
    }.items():  # fmt: skip
        yield name, functools.partial(_classified, name, options)
    for name in (
        "MeanSquaredError", "MeanAbsoluteError", "R2Score", "PearsonCorrCoef", "SpearmanCorrCoef", "ExplainedVariance", "KendallRankCorrCoef", "ConcordanceCorrCoef",
        "MeanAbsolutePercentageError", "LogCoshError", "MeanSquaredLogError", "TweedieDevianceScore", "CosineSimilarity",
    ):  # fmt: skip
        yield name, functools.partial(_regressed, name)
    for name in ("MeanMetric", "SumMetric", "MaxMetric", "MinMetric", "CatMetric"):
        yield name, functools.partial(_aggregated, name)


def _classified(name, options, device):
    import torchmetrics

    metric = getattr(torchmetrics, name)(**options).to(device)
    for _ in range(2):
        value = metric(torch.rand(8, 3).softmax(1).to(device), torch.randint(0, 3, (8,)).to(device))
    total = metric.compute()
    metric.reset()
    return value, total


def _regressed(name, device):
    import torchmetrics

    metric = getattr(torchmetrics, name)().to(device)
    shape = (8, 3) if name == "CosineSimilarity" else (8,)
    for _ in range(2):
        metric.update(torch.rand(shape).to(device) + 0.1, torch.rand(shape).to(device) + 0.1)
    return metric.compute()


def _aggregated(name, device):
    import torchmetrics

    metric = getattr(torchmetrics, name)().to(device)
    for value in (1.0, torch.tensor([2.0, 3.0], device=device), float("nan")):
        metric.update(value)
    return metric.compute()


def metric_collections(device):
    import torchmetrics

    metrics = torchmetrics.MetricCollection([torchmetrics.Accuracy(**_CLASSES), torchmetrics.F1Score(**_CLASSES)]).to(
        device
    )
    tracker = torchmetrics.MetricTracker(metrics)
    for _ in range(2):
        tracker.increment()
        tracker.update(torch.rand(6, 3).to(device), torch.randint(0, 3, (6,)).to(device))
    return tracker.compute(), torchmetrics.functional.accuracy(
        torch.tensor([0, 1], device=device), torch.tensor([0, 2], device=device), **_CLASSES
    )


def metrics_of_pictures_and_texts(device):
    import torchmetrics

    ssim = torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0).to(device)
    psnr = torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0).to(device)
    a, b = torch.rand(2, 1, 16, 16).to(device), torch.rand(2, 1, 16, 16).to(device)
    perplexity = torchmetrics.text.Perplexity(ignore_index=-100).to(device)
    perplexity.update(torch.randn(2, 4, 7).to(device), torch.randint(0, 7, (2, 4)).to(device))
    return ssim(a, b), psnr(a, b), perplexity.compute()


def retrieval_metrics(device):
    import torchmetrics

    found = []
    for name in ("RetrievalMAP", "RetrievalMRR", "RetrievalNormalizedDCG", "RetrievalHitRate"):
        metric = getattr(torchmetrics.retrieval, name)().to(device)
        metric.update(
            torch.rand(6).to(device),
            torch.tensor([0, 1, 0, 1, 1, 0], device=device),
            indexes=torch.tensor([0, 0, 0, 1, 1, 1], device=device),
        )
        found.append(metric.compute())
    return found


def einops_everywhere(device):
    from einops import einsum, pack, rearrange, reduce, repeat, unpack
    from einops.layers.torch import Rearrange, Reduce

    x = torch.randn(2, 3, 4, 4).to(device).requires_grad_()
    model = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2), nn.Linear(12, 5), Reduce("b n d -> b d", "max")
    ).to(device)
    model(x).sum().backward()
    packed, shapes = pack([x, x[:, 0]], "b *")
    return (
        rearrange(x, "b c h w -> (b h) (c w)"), reduce(x, "b c h w -> c", "mean"), repeat(x, "b c h w -> b c h w r", r=2), einsum(x, x, "b c h w, b d h w -> b c d"),
        x.grad, unpack(packed, shapes, "b *")[1],
    )  # fmt: skip


def accelerated(device):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(3)
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.device.type == device
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(round(accelerator.gather(loss.detach()).mean().item(), 1))
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    accelerator.wait_for_everyone()
    kept = accelerator.unwrap_model(model)
    gathered, _ = accelerator.gather_for_metrics((kept(x).argmax(1), y))
    accelerator.end_training()
    return losses, gathered.shape


def offloaded(device):
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = model(torch.ones(1, 4))
    if device == "cuda":
        cpu_offload(model, execution_device=torch.device("cuda:0"))
        return expected, model(torch.ones(1, 4))
    return expected, model(torch.ones(1, 4))


def dispatched(device):
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights

    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    places = infer_auto_device_map(empty, max_memory={0: 100, "cpu": 10000} if device == "cuda" else {"cpu": 10000})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = dispatch_model(model, {"0": 0, "1": "cpu"}, main_device=0) if device == "cuda" else model
    return model(torch.ones(1, 4)), len(places) > 0
