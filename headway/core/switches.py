"""Techniques that can be switched off by the environment, to see what each brings. All are on unless the variable is "0".

For comparisons (``headway bench anchors --ablations``), not for serving: without any one of them an engine is slower.
"""

from __future__ import annotations

import os
from typing import Final

EARLY_LAUNCH: Final = "HEADWAY_EARLY_LAUNCH"
"""Kernels that start before the one they wait for has ended."""
FUSED_LAYERS: Final = "HEADWAY_FUSED_LAYERS"
"""Layers whose products, norms, attention and epilogues share kernels; off: one kernel each, ``F.linear`` for products."""
PREFILL_GRAPHS: Final = "HEADWAY_PREFILL_GRAPHS"
"""Graphs of steps with prompts; off: their kernels are launched one by one."""
FAST_PREFILL: Final = "HEADWAY_FAST_PREFILL"
"""Layers behind the last that caches run for the rows' last tokens alone; off: all but the very last run for all tokens."""
PEER_REDUCE: Final = "HEADWAY_PEER_REDUCE"
"""Small exchanges between GPUs of one host through peer memory, sums fused with the norm behind them; off: NCCL alone."""
NATIVE: Final = "HEADWAY_NATIVE"
"""C kernels on a CPU; off: torch serves."""


def is_on(variable: str) -> bool:
    """Whether the technique behind this environment variable may be used; asked where an engine is built."""
    return os.environ.get(variable, "1") != "0"
