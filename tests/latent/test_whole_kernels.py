"""A model with an indexer whose kernels are Triton's, not their references, in steps that cut its text anywhere; and how far
rounding takes it from float32, beside how far it takes transformers."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.head_linear import head_linear
from headway.kernels.mla_decode import mla_decode
from headway.kernels.mla_index import index_scores, index_topk, index_write
from headway.kernels.mla_prefill import mla_gather, mla_prefill
from headway.kernels.mla_write import mla_write
from headway.kernels.testing import interpreter_loops
from tests.latent.test_models import TOLERANCE
from tests.latent.tiny_latents import LATENTS, LENGTH, VOCAB, folder_of, hf_model, ours, pair
from tests.models.harness import DEVICE, Machine

pytestmark = pytest.mark.usefixtures("interpreted_quickly")
KERNELS = (head_linear, mla_decode, index_scores, index_topk, index_write, mla_gather, mla_prefill, mla_write)
OWN_ERRORS = 1.5
"""Of transformers' own mean error in bfloat16."""


@pytest.mark.parametrize(
    "sizes",
    [[3, 10, 1, 6], *(pytest.param(each, marks=pytest.mark.soak) for each in ([3, 20, 1, 9, 37], [LENGTH]))],
    ids=str,
)
def test_kernels_choose_what_transformers_does(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tokens are seen: the second step begins where all still are, and ends where some are chosen."""
    for op in KERNELS:
        monkeypatch.setattr(op, "_cpu_impl", op.implementation("cuda"))
    monkeypatch.setattr("headway.core.latents.SHORT_ROW", 4)
    monkeypatch.setattr("headway.core.latents.SMALL_STEP", 4)
    case = pair("v3.2")
    with interpreter_loops():
        logits = Machine(case.model).in_chunks(case.tokens[: sum(sizes)], sizes)
    torch.testing.assert_close(logits, case.logits[: sum(sizes)], **TOLERANCE)


@pytest.mark.parametrize("name", ["v3.2", "glm-dsa-shared"])
def test_rounding_takes_it_no_further_than_transformers(name: str) -> None:
    """In bfloat16 some other tokens are chosen, here as there: float32 says how far that leads."""
    kind, folder = type(hf_model(LATENTS[name])), folder_of(name)
    exact, rounded = (
        kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(DEVICE).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = ours(name, torch.bfloat16)
    mine, theirs = [], []
    for seed in range(6):
        tokens = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
        text = torch.tensor([tokens], device=DEVICE)
        with torch.no_grad():
            wanted, other = (each(text, use_cache=False).logits[0].float().cpu() for each in (exact, rounded))
        mine.append((Machine(model).in_chunks(tokens, [30, 1, 39]) - wanted).abs())
        theirs.append((other - wanted).abs())
    found, own = float(torch.cat(mine).mean()), float(torch.cat(theirs).mean())
    assert own > 0.0 and found < OWN_ERRORS * own, (found, own)
