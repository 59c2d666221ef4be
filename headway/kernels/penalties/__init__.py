"""``penalties``: repetition, frequency and presence penalties from the counts on the device.

penalties(Tensor(a!) logits, Tensor slots, Tensor counts, Tensor count_on, Tensor repetition, Tensor frequency,
          Tensor presence) -> ()

    logits      f32 [N, V], in place         slots  int32 [N]; rows with a slot outside [0, S) stay untouched
    counts      int16 [S, V], see count_tokens: bit 15 = in the prompt, low 15 bits = times generated
    count_on    int32 [S], 0 = the slot has no penalties and its counts are not kept
    repetition, frequency, presence  f32 [S]; 1, 0, 0 = off

Repetition (Keskar et al. 2019, CTRL, as in Hugging Face): a token of the prompt or the output gets x / r if x > 0
else x * r. Then frequency and presence (OpenAI): x - frequency * times - presence * (times > 0), over generated tokens.
"""

from __future__ import annotations

from headway.kernels.penalties.reference import penalties as _reference
from headway.kernels.registry import Op

penalties = Op(
    "penalties(Tensor(a!) logits, Tensor slots, Tensor counts, Tensor count_on, Tensor repetition, Tensor frequency, "
    "Tensor presence) -> ()",
    reference=_reference,
    meta=lambda *args: None,
    triton="headway.kernels.penalties.triton:penalties",
    cpu="headway.kernels.cpu.sampling_ops:penalties",
)
