"""The largest steps there can be, run on padding only: to load and compile kernels, and to measure memory. Start-up only."""

from __future__ import annotations

import torch

from headway.core.ints import cdiv
from headway.core.plan import Bound
from headway.device.base import Device
from headway.kernels.sample import RANDOM
from headway.runner.encoder import rehearse_encoder
from headway.runner.encoder_passes import PassRunner
from headway.runner.launch import LaunchShape
from headway.runner.results import pack_results
from headway.runner.step_body import StepBody
from headway.sampling.draw import ALL_PATHS
from headway.sampling.sampler import BIAS_EDIT, Variant

SHORT_PROMPT = 1024
"""Tokens; a rehearsal fills a step with such prompts as well as with a single one."""


LONG_CONTEXT = 40960
"""Tokens; more pieces of a context would only take time."""


def rehearse(device: Device, body: StepBody, num_tokens: int, num_rows: int, passes: PassRunner | None = None) -> None:
    """Run steps of ``num_tokens`` in up to ``num_rows`` rows, the sampling of all features, and ``passes``. Blocks."""
    device.wait_idle()  # tables, cache and weights were filled on the default stream, which main does not follow
    config, every_edit = body.config, body.sampler.every_edit
    with device.main.active(), torch.inference_mode():
        rehearse_encoder(device, body.model, body.caches, config.max_encoder_rows)
        if passes is not None:
            passes.rehearse()
        body.packed.zero_()
        body.apply_edits(1)
        mixed = min(num_rows, num_tokens) - 1  # decode rows beside a prompt
        short = min(num_tokens, SHORT_PROMPT)
        few = min(num_rows, cdiv(num_tokens, short))
        # Long prompts may run on other kernels than short ones, many more than few, and those beside decode rows on more.
        kinds = ((1, 0, num_tokens), (few, 0, short), (num_rows, mixed, num_tokens), (num_rows, 0, num_tokens))
        for rows, decode_rows, longest in dict.fromkeys(kinds):
            exact = LaunchShape(num_tokens, rows, decode_rows, longest, config.width)
            # Steps that are halved know how many of their rows decode; graphs of others are rehearsed by themselves.
            batch = body.unpack(exact, Bound(num_tokens))
            if rows == 1 and not body.pools:  # where prompt log-probabilities are wanted; no step takes more memory
                body.row_logits(batch, body.forward(batch, only_rows=False))
            if body.border is not None:
                body.border.begin(num_tokens)
            states = body.outcome_states(batch)
            if body.border is not None:
                body.border.end(body, exact, Variant(every_edit))
        if body.model.spec.vision is not None and not body.pools:  # its kernels, and what it adds
            shape = LaunchShape(num_tokens, num_rows, mixed, num_tokens, config.width)
            body.outcome_states(body.unpack(shape, Bound(num_tokens), media=True))
        if config.has_latents:  # a prompt whose context becomes keys and values by pieces, and is as long as can be
            late = body.unpack(LaunchShape(num_tokens, 1, 0, num_tokens, config.width), Bound(config.longest_row))
            late.prefix_bound = min(config.longest_row, LONG_CONTEXT)
            body.outcome_states(late)
        most = Variant(every_edit, ALL_PATHS, config.max_logprobs)
        masks = Variant(every_edit & ~BIAS_EDIT, RANDOM)
        for variant in (Variant(), Variant(flags=ALL_PATHS), masks, most):
            pack_results(body.results[0].view(-1), body.results.shape[2], num_rows, body.back(batch, states, variant))
        body.rehearse_alignment(num_tokens)
        body.sampler.penalties.rebuild(batch.row_slots, config.max_model_len)
        body.settle(0)
    device.wait_idle()
