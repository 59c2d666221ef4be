"""``sample``: draws one token per row.

sample(Tensor logits, Tensor slots, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,
       Tensor num_tokens, Tensor counts, Tensor count_on, Tensor repetition, Tensor frequency, Tensor presence,
       int flags) -> Tensor

    logits       f32, bf16 or f16 [N, V], not modified; NaN counts as -inf
    slots        int32 [N]; rows with a slot outside [0, S) give 0
    temperature, top_p, min_p  f32 [S]       top_k  int32 [S]; off: top_k <= 0, top_p >= 1, min_p <= 0
    seeds        int32 [S, 2] (low word, high word)        num_tokens  int32 [S], the position of the token being drawn
    counts       int16 [S, V], see count_tokens: bit 15 = in the prompt, low 15 bits = times generated
    count_on     int32 [S], 0 = the slot has no penalties and its counts are not kept
    repetition, frequency, presence  f32 [S]; 1, 0, 0 = off
    flags        host facts, a superset is allowed and never changes a token: RANDOM, TOP, MIN_P, WIDE, TWICE, PENALTIES below
    returns      int32 [N]

Penalties come first. Repetition (Keskar et al. 2019, CTRL, as in Hugging Face): the logit x of a token of the prompt or the
output becomes x / r if x > 0 else x * r. Then frequency and presence (OpenAI): x - frequency * times - presence * (times > 0),
over generated tokens. They are part of the draw, so that no float32 copy of the logits is made for them. Triton's kernel
multiplies by 1 / r, rounded twice.

temperature < 1e-5: the largest logit, lowest index on ties. Else x = logit / temperature and every filter is a
threshold on x, so that ties are kept together:

    min_p   x >= max + log(min_p)
    top_k   x >= the k-th largest
    top_p   over the tokens kept so far, renormalised: x >= the largest t with mass{x >= t} >= top_p

and the token is the argmax of x - log(E), E ~ Exponential(1) (the exponential race, i.e. Gumbel-max: Yellott 1977),
lowest index on ties. E comes from a hash of (seed, position, token) and of nothing else, so a request's tokens depend
neither on its batch nor on the device (rounding of log and exp aside). A row without any logit above -inf gives -1: there
is nothing to draw.

``filtered_logits``: what the race is run over, f32 [N, V], for who needs the distribution itself: arguments as above; x with
penalties, the temperature of rows that have one, and -inf for what the filters leave out. Torch's operations on every device.
"""

from __future__ import annotations

import torch

from headway.kernels.registry import Op
from headway.kernels.sample.reference import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE, WIDE_K, may_be_wide
from headway.kernels.sample.reference import filtered_logits as _filtered
from headway.kernels.sample.reference import sample as _reference

__all__ = ["MIN_P", "PENALTIES", "RANDOM", "TOP", "TWICE", "WIDE", "WIDE_K", "filtered_logits", "may_be_wide", "sample"]

sample = Op(
    "sample(Tensor logits, Tensor slots, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
    "Tensor num_tokens, Tensor counts, Tensor count_on, Tensor repetition, Tensor frequency, Tensor presence, int flags) "
    "-> Tensor",
    reference=_reference,
    meta=lambda logits, slots, *rest: torch.empty_like(slots, dtype=torch.int32),
    triton="headway.kernels.sample.triton:sample",
    cpu="headway.kernels.cpu.sampling_ops:sample",
)

filtered_logits = Op(
    "filtered_logits(Tensor logits, Tensor slots, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor counts, Tensor count_on, Tensor repetition, Tensor frequency, Tensor presence, int flags) -> Tensor",
    reference=_filtered,
    meta=lambda logits, *rest: torch.empty_like(logits, dtype=torch.float32),
)
