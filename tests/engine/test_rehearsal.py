"""Models of every family run shortened, as when an engine on a GPU starts: layers of each kind without their neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.config import EngineArgs
from headway.engine.boot import build_engine
from headway.runner.rehearsal import rehearse
from tests.latent import tiny_latents
from tests.latent.tiny_latents import LATENTS
from tests.models import tiny
from tests.models.tiny import TINY
from tests.multimodal.tiny_sight import FAMILIES, sighted
from tests.recurrent.tiny_hybrids import HYBRIDS, folder_of

ONE_OF_A_FAMILY = {case.family: name for name, case in reversed(TINY.items())}
CASES = [*ONE_OF_A_FAMILY.values(), *HYBRIDS, *FAMILIES, *LATENTS]


def folder(name: str, path: Path) -> Path:
    if name in TINY:
        return tiny.save(tiny.hf_model(TINY[name]), path)
    if name in LATENTS:
        return tiny.save(tiny_latents.hf_model(LATENTS[name]), path)
    return folder_of(name) if name in HYBRIDS else Path(sighted(name).folder)


@pytest.mark.parametrize("name", CASES)
def test_shortened(name: str, tmp_path: Path) -> None:
    arguments = EngineArgs(
        model=str(folder(name, tmp_path)), dtype="float32", device="cpu", max_model_len=32, max_num_seqs=3, block_size=16,
        kv_cache_memory_bytes=2**22, max_num_batched_tokens=32,
    )  # fmt: skip
    core = build_engine(arguments, progress=False)
    body = core._runner.executor.body
    with body.shortened():
        rehearse(core._runner.device, body, 32, 3, core._runner.executor.passes)
    core.shutdown()
