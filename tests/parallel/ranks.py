"""Ranks of a model that are threads of the test, with gloo between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.engine.world import World
from headway.models.decoder import DecoderModel
from headway.models.interface import Forward, Want
from headway.models.load import load_model
from headway.models.registry import read_config
from headway.parallel.keys import OwnKeys
from headway.parallel.mesh import Mesh
from headway.sampling.spread import SpreadLogits
from headway.state.batch import StepBatch
from headway.state.cache_pool import CachePool
from headway.weights import open_checkpoint
from tests.models.harness import Machine
from tests.models.tiny import MAX_LEN

SECONDS = 60.0
"""Longer than a rank may take to load its part, and to compile kernels that the other one waits for."""


def on_ranks(mesh: Mesh, work: Callable[[World], Any]) -> list[Any]:
    """What ``work`` gives on each rank of a mesh; the first error of any rank is raised."""
    keys, found, errors = OwnKeys(), [None] * mesh.size, list[BaseException]()

    def run(rank: int) -> None:
        world = World(mesh.at(rank), keys, SECONDS)
        try:
            world.connect(torch.device("cpu"))
            world.started()
            found[rank] = work(world)
        except BaseException as error:
            errors.append(error)
            world.hang_up()
        finally:
            world.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return found


def load_shard(folder: Path, world: World, *, whole_experts: bool = False) -> DecoderModel:
    """A rank's part of a checkpoint."""
    checkpoint = open_checkpoint(str(folder))
    config = world.sharded(read_config(checkpoint.config), whole_experts=whole_experts)
    device = torch.device("cpu")
    model = load_model(
        checkpoint, dtype=torch.float32, device=device, max_model_len=MAX_LEN, progress=False, seed=0, config=config
    )
    assert isinstance(model, DecoderModel)
    return model


def logits_of(
    folder: Path, mesh: Mesh, tokens: Sequence[int], sizes: Sequence[int], *, whole_experts: bool = False
) -> list[torch.Tensor]:
    """Logits [sum(sizes), V] of the sequence in steps of these sizes, on each rank of the last stage."""

    def work(world: World) -> torch.Tensor | None:
        model = load_shard(folder, world, whole_experts=whole_experts)
        part, forward = model.spec.vocabulary, model.forward

        def between(batch: StepBatch, caches: CachePool, want: Want) -> Forward:
            """What the runner does around a stage's forward pass."""
            stage = model.spec.stage
            if stage is not None and not stage.is_first:
                batch.entering = torch.empty(len(batch.input_ids), model.spec.hidden_size * model.spec.streams)
                stage.receive(batch.entering)
            given = forward(batch, caches, want)
            if stage is not None and not stage.is_last:
                stage.send(given.hidden)
            return given

        model.forward = between  # type: ignore[method-assign]
        if not world.mesh.is_last:
            width = model.config.vocab_size
            model.logits = lambda hidden: hidden.new_zeros(hidden.shape[0], width)  # type: ignore[method-assign]
        elif part is not None:
            own, spread = model.logits, SpreadLogits(part)
            model.logits = lambda hidden: spread.whole(own(hidden))  # type: ignore[method-assign]
        found = Machine(model).in_chunks(tokens, sizes)
        return found if world.mesh.is_last else None

    return [each for each in on_ranks(mesh, work) if each is not None]
