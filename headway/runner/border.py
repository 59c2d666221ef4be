"""What a stage exchanges with the other stages: hidden states on the way up, tokens and drafts on the way back.

Every exchange is queued between graphs, never captured: what comes lies where the next graph reads it, and what goes lies where
the last one wrote it. A stage's steps run one after the other on one stream, so one buffer of each kind is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway.core.ints import round_up
from headway.device.base import Device
from headway.models.interface import Forward
from headway.parallel.stage import Stage
from headway.runner.config import RunnerConfig
from headway.runner.launch import LaunchShape
from headway.runner.relay import Relay, num_told
from headway.sampling.sampler import Variant

if TYPE_CHECKING:
    from headway.runner.step_body import StepBody


class Border:
    """A stage's exchanges.

    Args:
        hidden: C, of all streams that are handed on.
        dtype: of hidden states.
        watched: layers of the model whose outputs a drafter on the last stage reads, rising: those of earlier stages are
            handed on, too.

    Attributes:
        relay: what it still has to learn; None: this stage draws the tokens.
    """

    def __init__(
        self,
        stage: Stage,
        config: RunnerConfig,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        watched: Sequence[int] = (),
    ) -> None:
        self._stage = stage
        self._came = sum(layer < stage.own.start for layer in watched)
        self._gone = 0 if stage.is_last else sum(layer < stage.own.stop for layer in watched)
        # [1 + n, T, C] of a step of T tokens: hidden states, and outputs of watched layers.
        states = (1 + max(self._came, self._gone)) * config.max_num_batched_tokens
        self._states = torch.zeros(states, hidden, dtype=dtype, device=device)
        # Rows begin at multiples of 16 bytes, on which kernels are specialised.
        drawn = num_told(config.width, config.width) * round_up(config.max_num_seqs, 4)
        self._drawn = torch.zeros(drawn, dtype=torch.int32, device=device)
        self.relay = None if stage.is_last else Relay(stage, config.width)

    def entering(self, num_tokens: int) -> torch.Tensor | None:
        """[T, C] that ``begin`` fills; None: this stage has the embedding."""
        return None if self._stage.is_first else self._states[:num_tokens]

    def keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [T, C], where ``end`` finds it."""
        return self._states[: len(hidden)].copy_(hidden)

    def joined(self, forward: Forward) -> Forward:
        """With the outputs of all watched layers so far; an earlier stage's are where ``end`` finds them."""
        tokens, auxiliary = len(forward.hidden), list[torch.Tensor]()
        for nth in range(1, 1 + self._came):
            auxiliary.append(self._states[nth * tokens : (nth + 1) * tokens])
        for nth, own in enumerate(forward.auxiliary, 1 + self._came):
            auxiliary.append(own if self._stage.is_last else self._states[nth * tokens : (nth + 1) * tokens].copy_(own))
        return Forward(forward.hidden, tuple(auxiliary))

    def drew(self, tokens: torch.Tensor, offset: int, width: int) -> None:
        """int32 [R], outcome ``offset`` of ``width``, where ``end`` finds it."""
        stride = round_up(len(tokens), 4)
        self._drawn[: width * stride].view(width, stride)[offset, : len(tokens)].copy_(tokens)

    def guessed(self, drafts: torch.Tensor, slots: torch.Tensor, width: int) -> None:
        """The rows of ``drafts`` [S, K] of ``slots`` (int32 [R]), behind ``width`` outcomes, where ``end`` finds them. All K of
        them, however many the step had: a drafter may have written more than were wanted."""
        stride, rows, number = round_up(len(slots), 4), len(slots), drafts.shape[1]
        own = drafts.index_select(0, slots.clamp(min=0))
        self._drawn[width * stride : (width + number) * stride].view(number, stride)[:, :rows].copy_(own.T)

    def begin(self, num_tokens: int) -> None:
        """Ahead of a step: take what the stage before has made of its tokens."""
        if not self._stage.is_first:
            self._stage.receive(self._states[: (1 + self._came) * num_tokens])

    def end(self, body: StepBody, shape: LaunchShape, variant: Variant) -> None:
        """Behind a step of ``shape``, padding included: hand on what it has made of its tokens, or what it has drawn and
        guessed."""
        if not self._stage.is_last:
            self._stage.send(self._states[: (1 + self._gone) * shape.tokens])
        if body.pools:  # nothing is drawn
            return
        if self.relay is None:
            self._stage.tell(self._drawn[: num_told(shape.width, body.config.width) * round_up(shape.rows, 4)])
        else:
            self.relay.note(body, shape, variant)

    def rehearse(self, body: StepBody, shapes: Sequence[LaunchShape]) -> None:
        """Run what ``capture`` will capture: nothing compiles inside a capture."""
        if self.relay is not None:
            self.relay.rehearse(body, shapes)

    def capture(self, device: Device, body: StepBody, shapes: Sequence[LaunchShape]) -> None:
        """Capture what follows decode steps of ``shapes``, from small to large."""
        if self.relay is not None:
            self.relay.capture(device, body, shapes)
