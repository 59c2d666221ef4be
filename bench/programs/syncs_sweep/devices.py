"""What the device says, attention, profilers, threads, processes, storages, algorithms over tensors."""
# ruff: noqa: SLF001 - tables of calls, as their users write them

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def what_the_device_says(device):
    if device == "cuda":
        assert torch.cuda.is_available() and torch.cuda.device_count() >= 1
        torch.cuda.set_device(0)
        properties = torch.cuda.get_device_properties(0)
        assert properties.total_memory > 0 and torch.cuda.get_device_capability() >= (7, 0)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        assert torch.cuda.max_memory_allocated() >= 0 and torch.cuda.memory_allocated("cuda:0") >= 0
        free, total = torch.cuda.mem_get_info()
        assert free <= total and isinstance(torch.cuda.memory_summary(), str)
        assert isinstance(torch.cuda.get_device_name(), str) and torch.cuda.is_bf16_supported()
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
        torch.cuda.synchronize()
    with torch.device(device):
        return torch.zeros(2), torch.backends.cuda.is_built() or True


def accelerators(device):
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert accelerator.type == device
    if device == "cuda":
        torch.accelerator.synchronize()
        torch.accelerator.set_device_index(0)
    return torch.ones(2, device=accelerator)


def attention_kernels(device):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 2, 4, 8).to(device).requires_grad_() for _ in range(3))
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(4, 4, dtype=torch.bool, device=device).tril()
    other = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grouped = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    (out.sum() + grouped.sum()).backward()
    return out, other, grouped, q.grad


def flex_attention(device):
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    q, k, v = (torch.randn(1, 2, 16, 8).to(device) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device=device)
    return flex(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) * 0.1), flex(q, k, v, block_mask=mask)


def profiled(device):
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    model = nn.Linear(4, 2).to(device)
    seen = []
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=1, active=1), record_shapes=True, profile_memory=True,
        on_trace_ready=lambda p: seen.append(len(p.key_averages())),
    ) as found:  # fmt: skip
        for _ in range(2):
            with record_function("step"):
                out = model(torch.ones(1, 4, device=device))
            found.step()
    return out.shape, len(seen)


def ranges_for_a_profiler(device):
    if device == "cuda":
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.mark("here")
        with torch.cuda.nvtx.range("inner"):
            x = torch.ones(2, device=device)
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.memory._record_memory_history()
        torch.cuda.memory._snapshot()
        return x
    return torch.ones(2)


def benchmarked(device):
    from torch.utils import benchmark

    x = torch.ones(2, device=device)
    return benchmark.Timer("x + x", globals={"x": x}).timeit(3).median > 0


def threads(device):
    jobs, found = queue.Queue(), {}
    model = nn.Linear(3, 1).to(device)

    def work():
        while (item := jobs.get()) is not None:
            with torch.no_grad():
                found[item] = model(torch.full((3,), float(item), device=device)).item()

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for item in [*range(6), None, None]:
        jobs.put(item)
    for worker in workers:
        worker.join()
    return dict(sorted(found.items()))


def training_on_a_thread(device):
    from concurrent.futures import ThreadPoolExecutor

    def work():
        model = nn.Linear(3, 1).to(device)
        model(torch.ones(2, 3, device=device)).sum().backward()
        return model.weight.grad

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def modules_replicated(device):
    model = nn.DataParallel(nn.Linear(3, 2).to(device))
    return model(torch.ones(2, 3).to(device)), sorted(model.state_dict())


@contextlib.contextmanager
def _group(device):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def data_parallel(device):
    from torch.nn.parallel import DistributedDataParallel

    with _group(device):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(device)
        model = DistributedDataParallel(
            model, device_ids=[0] if device == "cuda" else None, find_unused_parameters=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with model.no_sync() if step == 0 else contextlib.nullcontext():
                model(torch.randn(4, 3).to(device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()


def data_parallel_with_hooks(device):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    with _group(device):
        model = DistributedDataParallel(nn.Linear(3, 2).to(device), static_graph=True, gradient_as_bucket_view=True)
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        model(torch.ones(4, 3, device=device)).sum().backward()
        return [p.grad for p in model.parameters()]


def synchronised_norms(device):
    with _group(device):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
        if device == "cpu":
            model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
            torch.manual_seed(0)
            nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
        model = model.to(device)
        torch.manual_seed(2)
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        out = model(torch.randn(3, 1, 2, 2).to(device))
        out.square().sum().backward()
        return out


def fully_sharded(device):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _group(device):
        model = FullyShardedDataParallel(nn.Linear(4, 2).to(device), device_id=0 if device == "cuda" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(3, 4, device=device)).square().sum()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        return loss, norm


def fully_sharded_second(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _group(device):
        mesh = init_device_mesh(device, (1,))
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = model(torch.ones(3, 4, device=device)).square().sum()
        loss.backward()
        optimizer.step()
        return loss, [p.full_tensor() for p in model.parameters()]


def sharded_tensors(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with _group(device):
        mesh = init_device_mesh(device, (1,))
        x = distribute_tensor(torch.randn(4, 4).to(device), mesh, [Shard(0)])
        y = (x @ x.t()).redistribute(mesh, [Replicate()])
        return y.to_local(), y.full_tensor(), x.sum().full_tensor()


def collectives(device):
    with _group(device):
        x = torch.arange(4.0, device=device)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, x)
        whole = torch.empty(4, device=device)
        dist.all_gather_into_tensor(whole, x)
        work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        dist.barrier()
        objects = [None]
        dist.all_gather_object(objects, {"a": 1})
        dist.reduce(x, 0)
        return x, parts, whole, objects, dist.get_world_size(), dist.get_rank()


def own_operation(device):
    @torch.library.custom_op("sweep::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(3, device=device, requires_grad=True)
    doubled(x).sum().backward()
    return x.grad


def own_library(device):
    library = torch.library.Library("sweep_own", "FRAGMENT")
    library.define("tripled(Tensor x) -> Tensor")
    library.impl("tripled", lambda x: x * 3, "CompositeExplicitAutograd")
    return torch.ops.sweep_own.tripled(torch.ones(2, device=device))


def capsules(device):
    x = torch.arange(3.0, device=device)
    y = torch.from_dlpack(x)
    z = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    return y, z, y.device.type


def storages(device):
    x = torch.arange(6.0, device=device)
    y = torch.empty(0, device=device)
    y.set_(x.untyped_storage() if device == "cpu" else x)
    z = torch.zeros(2, device=device).resize_(4).fill_(1)
    same = x.untyped_storage().data_ptr() == x[1:].untyped_storage().data_ptr()
    return y, z, same, x.as_strided((2, 2), (1, 2)), x.untyped_storage().nbytes(), x.view(torch.int32), x.data_ptr() % 4


def memory_formats(device):
    x = torch.randn(1, 2, 3, 3).to(device, memory_format=torch.channels_last)
    return (
        x.is_contiguous(memory_format=torch.channels_last),
        x.contiguous().stride(),
        nn.Conv2d(2, 2, 1).to(device, memory_format=torch.channels_last)(x),
    )


def inference(device):
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).to(device).eval()
    with torch.inference_mode():
        x = torch.randn(2, 2, 4).to(device)
        y = model(x)
        y[0] = 0
        return y, y.argmax(1).tolist(), y.is_inference(), y.softmax(-1).cpu()


def asserted(device):
    x = torch.ones(3, device=device)
    torch._assert_async(x.sum() > 0)
    torch.testing.assert_close(x, torch.ones(3, device=device))
    return torch._assert(x.shape[0] == 3, "three")


def assert_close_raises(device):
    torch.testing.assert_close(torch.ones(2, device=device), torch.zeros(2, device=device))
