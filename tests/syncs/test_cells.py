"""Operations that CUDA has and the CPU has not: what stands in for them gives the values of their kin that both have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from headway.syncs.sim import cells


def test_a_synchronised_batch_norm_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = (
        torch.rand(3, dtype=torch.float64, requires_grad=True),
        torch.rand(3, dtype=torch.float64, requires_grad=True),
    )
    running = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    mine = [each.float() for each in running]
    expected = F.batch_norm(x, running[0], running[1], weight, bias, training=True, momentum=0.2, eps=1e-3)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with torch.no_grad():
        ranks = x.float().split([2, 4])
        means, invstds = map(torch.stack, zip(*(cells.norm_stats(part, 1e-3) for part in ranks), strict=True))
        counts = torch.tensor([[10.0], [20.0]])
        mean, invstd = cells.norm_gathered(ranks[0], means, invstds, mine[0], mine[1], 0.2, 1e-3, counts)
        out = torch.cat([cells.norm_applied(part, weight, bias, mean, invstd, 1e-3) for part in ranks])
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close([each.double() for each in mine], running, rtol=1e-4, atol=1e-5)
        grads = grad.float().split([2, 4])
        parts: list[Any] = [
            cells.norm_backward_sums(g, p, mean, invstd, weight, True, True, True)
            for g, p in zip(grads, ranks, strict=True)
        ]
        sums, products = (sum(part[i] for part in parts) for i in (0, 1))
        back: list[Any] = [
            cells.norm_backward(g, p, mean, invstd, weight, sums, products, torch.tensor([10, 20]))
            for g, p in zip(grads, ranks, strict=True)
        ]
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    torch.testing.assert_close(torch.cat(back).double(), x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.stack([part[2] for part in parts]).sum(0).double(), weight.grad, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        torch.stack([part[3] for part in parts]).sum(0).double(), bias.grad, rtol=1e-4, atol=1e-5
    )


def test_products_of_halves_in_full() -> None:
    a, b = torch.rand(2, 3).bfloat16(), torch.rand(3, 4).bfloat16()
    assert torch.equal(cells.CELLS["aten.mm.dtype"](a, b, torch.float32), a.float() @ b.float())
    bias = torch.rand(4).bfloat16()
    made = cells.CELLS["aten.addmm.dtype"](bias, a, b, out_dtype=torch.float32)
    assert made.dtype == torch.float32
