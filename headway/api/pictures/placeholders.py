"""How pictures stand in prompts: what a prompt has for one, and what the model sees in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.api.control_text import MarkedText
from headway.core.errors import InvalidRequestError
from headway.core.media import VisionInfo
from headway.multimodal.images import FIELD
from headway.multimodal.process import Tiles

Piece = int | str
"""A token by its id, or text."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A picture's tiles, their number, and rows and columns of the decoder's in each."""

    tiles: Tiles
    number: int
    rows: int
    columns: int

    @property
    def all_rows(self) -> int:
        """Of all tiles."""
        return self.number * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Placeholders:
    """One model's.

    Attributes:
        form: a key of ``_FORMS``.
        token: id that stands for each row of the decoder.
        marker: id that a prompt has for a picture.
        ends: ids around a picture; () for none.
        side: pixels of a row.
    """

    form: str
    token: int
    marker: int
    ends: tuple[int, ...]
    side: int

    @classmethod
    def of(cls, form: str, info: VisionInfo, config: Mapping[str, Any]) -> Placeholders:
        """The model's, by its config.json."""
        marker, ends = info.token, tuple[int, ...]()
        if form == "spans":
            marker = config.get("boi_token_index", 255999)
            ends = (marker, config.get("eoi_token_index", 256000))
        elif form == "wrapped":
            ends = (config.get("boi_token_id", 255999), config.get("eoi_token_id", 258882))
        return cls(form, info.token, marker, tuple(ends), info.patch * info.group)

    def pieces(self, tiles: Tiles) -> list[Piece]:
        """What stands in the prompt for a picture of these tiles."""
        count, height, width, _ = tiles.pixels.shape
        rows, columns = height // self.side, width // self.side
        return _FORMS[self.form](self, Sizes(tiles, count, rows, columns))

    def into_text(self, text: str, pictures: Sequence[list[Piece]], name: Callable[[int], str], bos: str) -> str:
        """``text`` with each marker replaced by its picture's pieces.

        Args:
            name: a token's text.
            bos: that of the token which begins a text.

        Raises:
            InvalidRequestError: there are more or fewer markers than pictures.
        """
        told = text.marked if isinstance(text, MarkedText) else str(text)
        written = ["".join(name(each) if isinstance(each, int) else each for each in pieces) for pieces in pictures]
        marker = name(self.marker)
        parts = told.split(marker)
        if self.form == "first":
            if len(parts) == 1 and written:  # the prompt may leave its markers out
                parts = [""] * len(written) + parts
            _check(len(parts) - 1, len(written), marker)
            whole = "".join(written) + bos + "".join(parts) + "\n"
        else:
            _check(len(parts) - 1, len(written), marker)
            whole = parts[0] + "".join(one + rest for one, rest in zip(written, parts[1:], strict=True))
        return MarkedText.of(whole, text.mark) if isinstance(text, MarkedText) else whole

    def into_ids(
        self, ids: list[int], pictures: Sequence[list[Piece]], encode: Callable[[str], list[int]] | None
    ) -> list[int]:
        """The same for token ids. Those that have a placeholder for each row already stay as they are.

        Raises:
            InvalidRequestError: as ``into_text``; or text must be made tokens, and there is no tokenizer.
        """
        rows = sum(each == self.token for pieces in pictures for each in pieces)
        if ids.count(self.token) == rows != len(pictures) or (self.form == "first" and self.token in ids):
            return ids
        if self.form == "first":
            ids = [self.marker] * len(pictures) + ids
        found: list[int] = []
        left = iter(pictures)
        _check(ids.count(self.marker), len(pictures), f"token {self.marker}")
        for each in ids:
            if each == self.marker:
                found += _encoded(next(left), encode)
            else:
                found.append(each)
        return found


def _encoded(pieces: list[Piece], encode: Callable[[str], list[int]] | None) -> list[int]:
    found: list[int] = []
    for each in pieces:
        if isinstance(each, int):
            found.append(each)
        elif encode is None:
            raise InvalidRequestError(
                "skip_tokenizer_init is set: prompts must have a placeholder for each feature of a picture", FIELD
            )
        else:
            found += encode(each)
    return found


def _check(markers: int, pictures: int, marker: str) -> None:
    if markers != pictures:
        raise InvalidRequestError(
            f"the prompt has {markers} image placeholders ({marker}) and {pictures} images; write one for each", FIELD
        )


def _same(self: Placeholders, sizes: Sizes) -> list[Piece]:
    return [self.token] * sizes.all_rows


def _spans(self: Placeholders, sizes: Sizes) -> list[Piece]:
    first, last = self.ends
    return ["\n\n", first, *[self.token] * sizes.all_rows, last, "\n\n"]


def _wrapped(self: Placeholders, sizes: Sizes) -> list[Piece]:
    first, last = self.ends
    return [first, *[self.token] * sizes.all_rows, last]


def _tiles(self: Placeholders, sizes: Sizes) -> list[Piece]:
    own: list[Piece] = [self.token] * (sizes.rows * sizes.columns)
    fence, whole = "<fake_token_around_image>", "<global-img>"
    if not sizes.tiles.rows:
        return [fence, whole, *own, fence]
    found: list[Piece] = []
    for row in range(1, sizes.tiles.rows + 1):
        for column in range(1, sizes.tiles.columns + 1):
            found += [fence, f"<row_{row}_col_{column}>", *own]
        found.append("\n")
    return [*found, "\n", fence, whole, *own, fence]


def _lines(self: Placeholders, sizes: Sizes) -> list[Piece]:
    line: list[Piece] = [*[self.token] * sizes.columns, "[IMG_BREAK]"]
    found = line * sizes.rows
    found[-1] = "[IMG_END]"
    return found


def _between(self: Placeholders, sizes: Sizes) -> list[Piece]:
    return ["<img>", *[self.token] * sizes.all_rows, "</img>"]


_FORMS: Mapping[str, Callable[[Placeholders, Sizes], list[Piece]]] = {
    "same": _same, "first": _same, "spans": _spans, "tiles": _tiles, "lines": _lines, "between": _between,
    "wrapped": _wrapped,
}  # fmt: skip
