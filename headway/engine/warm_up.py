"""What an engine does between loading weights and its first request: compile kernels, measure memory, capture graphs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from headway.core.errors import OutOfMemoryError
from headway.core.log import logger
from headway.core.params import MAX_LOGPROB_TOKEN_IDS
from headway.core.switches import PREFILL_GRAPHS, is_on
from headway.device.base import Device
from headway.engine.sizes import Sizes
from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.sample import RANDOM
from headway.models.interface import ModelSpec
from headway.runner.graphs import WHOLE_STEP_VARIANTS, DecodeGraphs, decode_shapes
from headway.runner.launch import TOKEN_VECTORS
from headway.runner.pooled_graphs import PooledGraphs, pooled_shapes
from headway.runner.prefill_graphs import PrefillGraphs, media_shapes, prefill_shapes
from headway.runner.rehearsal import rehearse
from headway.runner.runner import ModelRunner
from headway.runner.split_step import tail_variants
from headway.sampling.sampler import Variant
from headway.weights.progress import progress_bar

LAUNCHES_SECONDS = 0.9e-3
"""What launching a layer's kernels one by one takes a slow host (0.5 to 0.9 ms, measured beside H200s)."""
FLOPS = 6e14
"""Of a large product on such a card; slower ones hide launches sooner."""


class PhaseTimes:
    """How long each part of a start takes.

    Attributes:
        seconds: by name, in the order of their beginning; a phase that is entered twice is added up.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        yield
        self.seconds[name] += time.perf_counter() - start

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())


class WarmUp:
    """Makes runners ready.

    Attributes:
        device: of the runners.
        times: takes the phases "kernels", "rehearsal" and "graphs".
        progress: draw progress bars on a terminal.

    Args:
        compiler: compiles kernels; None: this process does.
    """

    def __init__(
        self, device: Device, times: PhaseTimes, progress: bool, compiler: CompilerProcess | None = None
    ) -> None:
        self.device, self.times, self.progress, self._compiler = device, times, progress, compiler
        self._sampled_len = 0  # context of the slots with which sampling has been rehearsed
        self._hashing = threading.Thread(target=_hash_compiler, name="headway-hash", daemon=True)
        if device.compiles_kernels:  # while weights are loaded
            self._hashing.start()

    def rehearse(self, runner: ModelRunner, sizes: Sizes) -> None:
        """Compile the kernels of all steps, and run the largest step there can be, which loads libraries and shows how much
        memory it takes.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        num_tokens = sizes.max_num_batched_tokens
        if not runner.device.asynchronous:  # nothing is compiled, and memory is not measured
            num_tokens = min(num_tokens, 8)
        num_rows = min(sizes.max_num_seqs, num_tokens)
        try:
            self._compile(runner, num_tokens, num_rows, sampling=sizes.max_model_len != self._sampled_len)
            self._sampled_len = sizes.max_model_len
            with self.times.phase("rehearsal"):
                rehearse(runner.device, runner.executor.body, num_tokens, num_rows, runner.executor.passes)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"a step of {num_tokens} tokens does not fit the card beside the weights; "
                "lower max_num_batched_tokens or max_num_seqs"
            ) from error

    def capture(self, runner: ModelRunner, hidden: int) -> None:
        """Capture steps of all common shapes as graphs, and let the runner replay these. After ``rehearse``.

        Args:
            hidden: ``hidden_from`` of the model; the same on all ranks, which replay the same shapes.
        """
        decode, prefill, media = _graphs(runner, hidden, with_prompts=is_on(PREFILL_GRAPHS))
        start, total = time.perf_counter(), len(decode.shapes) + len(prefill.shapes)
        passes, border = runner.executor.passes, runner.executor.body.border
        total += 0 if passes is None else passes.num_graphs
        with_spans = [media] if media is not None and media is not prefill else []
        total += sum(len(graphs.shapes) for graphs in with_spans)
        bar = progress_bar(total, "capturing CUDA graphs", show=self.progress)
        with self.times.phase("graphs"), bar as advance, torch.inference_mode():
            for graphs in (prefill, *with_spans):
                graphs.capture(lambda shape: advance(1))
            decode.capture(lambda shape: advance(1))
            if border is not None:
                border.capture(runner.device, runner.executor.body, decode.shapes)
            if passes is not None:
                passes.capture(lambda: advance(1))
        runner.use_graphs(decode, prefill, media)
        logger.info("captured %d graphs of steps and encoders in %.1f s", total, time.perf_counter() - start)

    def _compile(self, runner: ModelRunner, num_tokens: int, num_rows: int, *, sampling: bool) -> None:
        """Compile the kernels of the largest step and of those of all common shapes, where there is something to compile.

        They run without Triton's launches for that, so only the host's part of them, and torch's own kernels, have been used
        afterwards.
        """
        if not runner.device.compiles_kernels:
            return
        from headway.kernels.triton_precompile import compiling, launches_noted  # late: not every machine has Triton

        with compiling(self._compiler, self._hashing.join) as compilation:
            with self.times.phase("rehearsal"), launches_noted(compilation.add), runner.executor.body.shortened():
                rehearse(runner.device, runner.executor.body, num_tokens, num_rows, runner.executor.passes)
                _rehearse_steps(runner, sampling)
            if not compilation.num_kernels:
                return
            start = time.perf_counter()
            bar = progress_bar(compilation.num_kernels, "compiling kernels", show=self.progress)
            with self.times.phase("kernels"), bar as advance:
                compilation.finish(advance)
        seconds, kernels = time.perf_counter() - start, compilation.num_kernels
        logger.info("%d kernels, another %.1f s, %d compiled", kernels, seconds, compilation.num_compiled)


def hidden_from(spec: ModelSpec) -> int:
    """Tokens from which on a step takes a GPU longer than launching its kernels one by one takes the host."""
    layers = spec.num_layers if spec.stage is None else len(spec.stage.own)
    return int(layers * LAUNCHES_SECONDS * FLOPS / (2 * max(spec.layer_weights, 1))) + 1


def _hash_compiler() -> None:
    from headway.kernels.triton_precompile import hash_compiler  # late, as above

    hash_compiler()


def _rehearse_steps(runner: ModelRunner, sampling: bool) -> None:
    """Run steps of all common shapes; ``sampling``: not only up to their logits, which depend on the KV pool."""
    eager = [
        Variant(runner.executor.body.sampler.every_edit, flags) for flags in (0, RANDOM)
    ]  # draws of edited logits in a long step
    eager.append(Variant(max_logprobs=MAX_LOGPROB_TOKEN_IDS))
    decode, prefill, media = _graphs(runner)
    with runner.device.main.active(), torch.inference_mode():
        prefill.rehearse(eager, sampling=sampling)
        if media is not None and media is not prefill:
            media.rehearse([], sampling=False)
        decode.rehearse(eager, sampling=sampling)
        if runner.executor.body.border is not None:
            runner.executor.body.border.rehearse(runner.executor.body, decode.shapes)


def _graphs(
    runner: ModelRunner, hidden: int = sys.maxsize, *, with_prompts: bool = True
) -> tuple[DecodeGraphs, PrefillGraphs, PrefillGraphs | None]:
    """Of decode steps, of steps with prompts, and of those with pictures; None: these have none."""
    config, body, device = runner.config, runner.executor.body, runner.device
    sizes = (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, config.width)
    shapes = prefill_shapes(*sizes) if with_prompts else []
    if body.pools:  # all steps are prompts, and nothing is sampled
        if not body.model.spec.cache.groups and shapes:
            shapes = pooled_shapes(*sizes[:3])
        kinds = ([Variant()] if body.vector else []) + ([TOKEN_VECTORS] if body.token_vector else [])
        pooled = PooledGraphs(device, body.front, body.back, shapes, (), hidden, whole=kinds, hands_on=body.hands_on)
        return DecodeGraphs(device, body.front, body.back, [], []), pooled, None
    tails = tail_variants(body.sampler.every_edit)
    hands_on, decodes = body.hands_on, decode_shapes(config.max_num_seqs, config.widths)
    decode = DecodeGraphs(device, body.front, body.back, decodes, tails, hands_on=hands_on)
    tails = [*WHOLE_STEP_VARIANTS, *tails]
    vision = body.model.spec.vision
    front = body.front if vision is None or vision.sees else partial(body.front, media=True)
    prefill = PrefillGraphs(device, front, body.back, shapes, tails, hidden, hands_on=hands_on)
    if vision is None or not vision.sees or not with_prompts or config.width > 1:
        return decode, prefill, prefill if vision is not None and not vision.sees else None
    # Attention of tokens that see later ones is another kernel.
    spans = media_shapes(*sizes[:3])
    return (
        decode,
        prefill,
        PrefillGraphs(device, partial(body.front, media=True), body.back, spans, tails, hidden, hands_on=hands_on),
    )
