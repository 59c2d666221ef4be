"""Pictures in prompts, as slot tables: runs of placeholders, and where in the encoder cache the features of each begin.

Runs are written once, at admission; a run's row whenever a step is planned that reads it, for the picture may have moved
meanwhile.
"""

from __future__ import annotations

import numpy as np

from headway.core.encode import MediaRun
from headway.core.media import MAX_RUNS, RUN_WORDS, RUNS_AT
from headway.core.plan import Int32s
from headway.state.slots import Table

MEDIA, MEDIA_ROWS = "media", "media_rows"


def media_tables() -> list[Table]:
    """For models with sight; see ``kernels.media_places``."""
    return [Table(MEDIA, RUNS_AT + RUN_WORDS * MAX_RUNS), Table(MEDIA_ROWS, MAX_RUNS)]


def media_row(runs: list[MediaRun], prompt: int) -> Int32s:
    """What an admission writes of ``MEDIA``; ``prompt``: tokens that all see each other, 0 for none."""
    words = [len(runs), prompt]
    for run in runs:
        words += [run.start, run.end, run.base, run.columns, run.behind, run.late]
    return np.array(words, np.int32)
