"""Measured tiles of linear layers: those that are shipped, and those that ``headway tune`` found on this machine.

A table says for an op and a weight [N, K] which tile is the fastest for how many rows. An op that has entries for a shape is
used from the least to the largest of its rows (the entry 0 without a tile: for none); a shape without entries follows the
rules. Entries of this machine go before shipped ones, shape by shape, if they are of this card, of these versions of torch and
Triton, and of the kernels as they are now.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from headway.core.log import logger
from headway.kernels.linear_forms.card import Card

Numbers = tuple[int, ...]
"""A tile's attributes, in order."""
Key = tuple[str, int, int]
"""(op, N, K)."""
Entries = Mapping[Key, Mapping[int, Numbers]]
"""Key -> the most rows it is for -> tile."""
Source = Literal["tuned", "shipped"]
FORMAT = 1
SHIPPED = Path(__file__).with_name("hopper.json")
KERNELS = ("mid_linear", "skinny_linear", "wide_linear")
"""Folders whose sources a table belongs to."""


class Measured(NamedTuple):
    """What is known of an op for a shape.

    Attributes:
        source: "tuned" on this machine, or "shipped".
        tiles: the most rows it is for -> tile, by rows.
    """

    source: Source
    tiles: Mapping[int, Numbers]


@lru_cache(maxsize=1)
def current_device() -> torch.device:
    """The device whose table counts: the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@lru_cache(maxsize=8)
def tables(card: Card) -> tuple[tuple[Source, Entries], ...]:
    """The tables for a card, the ones that go first first. Read once in a process: nothing changes while serving."""
    found: list[tuple[Source, Entries]] = []
    tuned = _read_tuned(card)
    if tuned:
        found.append(("tuned", tuned))
    if card.capability[0] == 9:
        found.append(("shipped", shipped()))
    return tuple(found)


def measured(op: str, outputs: int, inputs: int, card: Card) -> Measured | None:
    """What was measured of ``op`` for a weight [N, K]; None: nothing."""
    for source, entries in tables(card):
        tiles = entries.get((op, outputs, inputs))
        if tiles is not None:
            return Measured(source, tiles)
    return None


@lru_cache(maxsize=1)
def shipped() -> Entries:
    """What comes with the package, measured on one H200 in bfloat16."""
    return _entries(json.loads(SHIPPED.read_text(encoding="utf-8"))["entries"])


def tuned_path(card: Card) -> Path:
    """Where this machine's table for a card is; the folder may not be there yet."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    name = re.sub(r"[^a-z0-9]+", "-", card.name.lower()).strip("-")
    return Path(root) / "headway" / "linear_forms" / f"{name}.json"


def save_tuned(card: Card, found: Mapping[Key, Mapping[int, Numbers]]) -> Path:
    """Add entries to this machine's table, or put them in the place of old ones; returns the file."""
    path = tuned_path(card)
    merged = merge(_read_tuned(card) or {}, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({**header(card), "entries": listed(merged)}, indent=1), encoding="utf-8")
    partial.replace(path)  # whoever reads meanwhile has the old one or the new one, whole
    return path


def merge(entries: Entries, found: Mapping[Key, Mapping[int, Numbers]]) -> dict[Key, dict[int, Numbers]]:
    """``entries`` with those of ``found``, which go first.

    Models share shapes, and one may use an op for more rows than another, so the rows of both are kept. That an op lost says
    nothing once another model uses it.
    """
    merged = {key: dict(tiles) for key, tiles in entries.items()}
    for key, tiles in found.items():
        both = {**merged.get(key, {}), **tiles}
        merged[key] = {rows: tile for rows, tile in both.items() if rows} or {0: ()}
    return merged


def header(card: Card) -> dict[str, Any]:
    """What must agree for a table to be used."""
    return {
        "format": FORMAT,
        "card": card.name,
        "torch": torch.__version__,
        "triton": _triton(),
        "kernels": kernels_hash(),
    }


@lru_cache(maxsize=1)
def kernels_hash() -> str:
    """Of the sources of the kernels that tables are about."""
    folder = Path(__file__).parents[1]
    paths = sorted(path for name in KERNELS for path in (folder / name).rglob("*triton*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def listed(entries: Mapping[Key, Mapping[int, Numbers]]) -> list[list[Any]]:
    """Entries as JSON has them: [op, N, K, rows, tile]."""
    return [[*key, rows, list(tile)] for key in sorted(entries) for rows, tile in sorted(entries[key].items())]


def _entries(rows: Iterable[list[Any]]) -> Entries:
    found: dict[Key, dict[int, Numbers]] = {}
    for op, outputs, inputs, most, tile in rows:
        found.setdefault((str(op), int(outputs), int(inputs)), {})[int(most)] = tuple(int(number) for number in tile)
    return MappingProxyType({key: MappingProxyType(dict(sorted(tiles.items()))) for key, tiles in found.items()})


def _read_tuned(card: Card) -> Entries | None:
    path = tuned_path(card)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        told = {key: data.get(key) for key in header(card)}
        if told != header(card):
            changed = ", ".join(key for key, value in header(card).items() if told[key] != value)
            logger.info("%s is of another %s: not used; headway tune makes it anew", path, changed)
            return None
        return _entries(data["entries"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        logger.warning("%s cannot be read and is not used: %s", path, error)
        return None


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
