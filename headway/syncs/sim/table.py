"""The table of operations that wait, made by ``bench/syncs_rules.py`` from what a card did.

For each overload that waited for some arguments and not for others it holds a decision tree (``headway.syncs.trees``).
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Final

from headway.syncs.trees import Tree

FILE: Final = "waits.json"


@functools.cache
def load() -> tuple[dict[str, Tree], frozenset[str]]:
    """Overload -> its tree, for those that wait sometimes; and the overloads that were run and never waited."""
    data = json.loads(resources.files("headway.syncs.sim").joinpath(FILE).read_text(encoding="utf-8"))
    return data["waits"], frozenset(name for names in data["never"].values() for name in names)
