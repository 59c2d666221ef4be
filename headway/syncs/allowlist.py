"""The allow list of a program: places where waiting is right, each with its reason.

[[allow]]
at = "train.py:120"          # file:line, file:first-last, file:function, or a file alone; * and ? match. Any frame counts:
                             # the wait's own line, those of libraries below it and of callers above it
reason = "the loss is printed once per epoch"
kind = "read"                # optional
call = "Tensor.item"         # optional; * and ? match
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any, Self

from headway.syncs.errors import AllowListError
from headway.syncs.findings import Kind, Wait
from headway.syncs.places import Site


@dataclasses.dataclass
class Entry:
    """One [[allow]] of the file.

    Attributes:
        used: how many waits it covered; an unused entry is reported.
    """

    file: str
    place: str
    reason: str
    kind: str | None
    call: str
    used: int = 0

    def matches(self, wait: Wait) -> bool:
        """Whether it covers ``wait``: whether its kind, its call and a frame of its stack fit."""
        if self.kind not in (None, str(wait.kind)) or not fnmatch.fnmatchcase(wait.call, self.call):
            return False
        return self._covers(wait.site) or any(self._covers(_site(frame)) for frame in wait.stack)

    def _covers(self, site: Site) -> bool:
        path = Path(site.file).as_posix()
        if not (fnmatch.fnmatchcase(path, self.file) or fnmatch.fnmatchcase(path, "*/" + self.file)):
            return False
        if not self.place:
            return True
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", self.place)
        if numbers:
            return int(numbers[1]) <= site.line <= int(numbers[2] or numbers[1])
        function = site.function
        return fnmatch.fnmatchcase(function, self.place) or fnmatch.fnmatchcase(function.rpartition(".")[2], self.place)


def _site(frame: str) -> Site:
    """Of a line of a stack, "file:line function"."""
    place, _, function = frame.rpartition(" ")
    file, _, line = place.rpartition(":")
    return Site(file, int(line) if line.isdigit() else 0, function)


class AllowList:
    """The entries of a file, in order; the first that matches gives the reason."""

    def __init__(self, entries: list[Entry] | None = None) -> None:
        self.entries = entries or []

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file.

        Raises:
            AllowListError: unreadable, not TOML, an unknown key, or an entry without place or reason.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise AllowListError(f"{path}: {error}") from error
        unknown = set(data) - {"allow"}
        if unknown or not isinstance(data.get("allow", []), list):
            raise AllowListError(
                f"{path}: only [[allow]] tables are known, not {', '.join(sorted(unknown)) or 'allow = ...'}"
            )
        return cls([_entry(raw, f"{path}: allow number {n}") for n, raw in enumerate(data.get("allow", []), start=1)])

    def apply(self, wait: Wait) -> Wait:
        """``wait`` with the reason of the entry that covers it, if one does and it has none yet."""
        if wait.reason is not None:
            return wait
        for entry in self.entries:
            if entry.matches(wait):
                entry.used += 1
                return dataclasses.replace(wait, reason=entry.reason)
        return wait

    @property
    def unused(self) -> list[Entry]:
        """Entries that covered nothing."""
        return [entry for entry in self.entries if not entry.used]


def _entry(raw: Any, where: str) -> Entry:
    if not isinstance(raw, dict):
        raise AllowListError(f"{where} is not a table")
    unknown = set(raw) - {"at", "reason", "kind", "call"}
    if unknown:
        raise AllowListError(f"{where}: unknown key {', '.join(sorted(unknown))}")
    for key in ("at", "reason"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise AllowListError(f"{where}: no {key}")
    kind = raw.get("kind")
    if kind is not None and kind not in set(Kind):
        raise AllowListError(f"{where}: kind {kind!r} is not one of {', '.join(Kind)}")
    call = raw.get("call", "*")
    if not isinstance(call, str):
        raise AllowListError(f"{where}: call is not a string")
    file, separator, place = raw["at"].strip().rpartition(":")
    return Entry(file, place, raw["reason"], kind, call) if separator else Entry(place, "", raw["reason"], kind, call)
