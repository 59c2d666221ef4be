"""How pictures stand in prompts: what a prompt has for one, and what the model sees in its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.api.control_text import MarkedText
from headway.core.errors import InvalidRequestError
from headway.core.media import SoundInfo, VisionInfo
from headway.multimodal.images import FIELD
from headway.multimodal.process import Tiles

Piece = int | str
"""A token by its id, or text."""


class Shown(NamedTuple):
    """What stands for a picture or video, in place of ``marker``."""

    marker: int
    pieces: list[Piece]


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
        video: id that stands for each row of a video, and for a video in a prompt; -1: there are none.
        fences: ids around each part of a video, behind the text that says when it is; (): parts lie side by side.
        clock: that text is minutes and seconds, with blanks around it; else seconds between angle brackets.
        sound: id that stands for each row of a recording, and for a recording in a prompt; -1: there are none.
        sound_ends: ids around a recording.
    """

    form: str
    token: int
    marker: int
    ends: tuple[int, ...]
    side: int
    video: int = -1
    fences: tuple[int, ...] = ()
    clock: bool = False
    sound: int = -1
    sound_ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, form: str, info: VisionInfo, config: Mapping[str, Any], sound: SoundInfo | None = None) -> Placeholders:
        """The model's, by its config.json."""
        marker, ends = info.token, tuple[int, ...]()
        if form == "spans":
            marker = config.get("boi_token_index", 255999)
            ends = (marker, config.get("eoi_token_index", 256000))
        elif form in ("wrapped", "apart"):
            ends = (config.get("boi_token_id", 255999), config.get("eoi_token_id", 258882))
        fences = (config.get("vision_start_token_id", 151652), config.get("vision_end_token_id", 151653))
        clock = form == "wrapped"
        side = info.patch * info.group
        heard = -1 if sound is None else sound.token
        around = (config.get("boa_token_id", 256000), config.get("eoa_token_index", config.get("eoa_token_id", 258883)))
        fenced = () if not info.stamps else tuple(ends) if clock else fences
        return cls(form, info.token, marker, tuple(ends), side, info.video_token, fenced, clock, heard, around)

    def shown(self, tiles: Tiles) -> Shown:
        """``pieces``, and what they take the place of."""
        return Shown(self.marker, self.pieces(tiles))

    def of_clip(self, rows: Sequence[int], seconds: Sequence[float]) -> Shown:
        """What stands for a video whose parts come to so many rows each, and are at these times."""
        if not self.fences:
            return Shown(self.video, [self.video] * sum(rows))
        first, last = self.fences
        pieces: list[Piece] = []
        for count, time in zip(rows, seconds, strict=True):
            stamp = f"{' ' * bool(pieces)}{_on_clock(time)} " if self.clock else f"<{time:.1f} seconds>"
            pieces += [stamp, first, *[self.video] * count, last]
        return Shown(self.video, pieces)

    def of_sound(self, rows: int) -> Shown:
        """What stands for a recording that becomes so many rows."""
        first, last = self.sound_ends
        pieces: list[Piece] = [first, *[self.sound] * rows, last]
        return Shown(self.sound, ["\n\n", *pieces, "\n\n"] if self.form == "apart" else pieces)

    def pieces(self, tiles: Tiles) -> list[Piece]:
        """What stands in the prompt for a picture of these tiles."""
        count, height, width, _ = tiles.pixels.shape
        rows, columns = height // self.side, width // self.side
        return _FORMS[self.form](self, Sizes(tiles, count, rows, columns))

    def into_text(
        self, text: str, pictures: Sequence[Shown], name: Callable[[int], str], bos: str
    ) -> tuple[str, list[int]]:
        """``text`` with each marker replaced by its picture's pieces, and numbers of the pictures as they come in it.

        Args:
            name: a token's text.
            bos: that of the token which begins a text.

        Raises:
            InvalidRequestError: there are more or fewer markers than pictures.
        """
        told = text.marked if isinstance(text, MarkedText) else str(text)
        written = ["".join(name(each) if isinstance(each, int) else each for each in one.pieces) for one in pictures]
        marker = name(self.marker)
        if self.form == "first":
            parts = told.split(marker)
            if len(parts) == 1 and written:  # the prompt may leave its markers out
                parts = [""] * len(written) + parts
            _check(len(parts) - 1, len(written), marker)
            order = list(range(len(written)))
            whole = "".join(written) + bos + "".join(parts) + "\n"
        else:
            ids = {name(each): each for each in self._markers}
            if self._fenced:  # parts bring their own
                told = told.replace("".join(map(name, self._fenced)), name(self.video))
            parts = re.split(f"({'|'.join(map(re.escape, ids))})", told)
            order = self._order([ids[each] for each in parts[1::2]], pictures, name)
            parts[1::2] = [written[i] for i in order]
            whole = "".join(parts)
        return (MarkedText.of(whole, text.mark) if isinstance(text, MarkedText) else whole), order

    @property
    def _markers(self) -> tuple[int, ...]:
        return (self.marker, *(each for each in (self.video, self.sound) if each >= 0))

    @property
    def _fenced(self) -> tuple[int, ...]:
        """What templates write for a video where they put ids around it, as they do around a picture; (): its id alone."""
        return (self.fences[0], self.video, self.fences[1]) if self.fences and not self.clock else ()

    def _order(self, found: list[int], pictures: Sequence[Shown], name: Callable[[int], str]) -> list[int]:
        """Numbers of the pictures that markers ``found`` are of."""
        for marker in self._markers:
            count = sum(each.marker == marker for each in pictures)
            what = {self.video: "video", self.sound: "recording"}.get(marker, "image")
            _check(found.count(marker), count, name(marker), what)
        left = {m: iter([i for i, each in enumerate(pictures) if each.marker == m]) for m in self._markers}
        return [next(left[marker]) for marker in found]

    def into_ids(
        self, ids: list[int], pictures: Sequence[Shown], encode: Callable[[str], list[int]] | None
    ) -> tuple[list[int], list[int]]:
        """The same for token ids. Those that have a placeholder for each row already stay as they are.

        Raises:
            InvalidRequestError: as ``into_text``; or text must be made tokens, and there is no tokenizer.
        """
        kinds = {self.token, self.video, self.sound}
        rows = sum(each in kinds for picture in pictures for each in picture.pieces)
        if sum(each in kinds for each in ids) == rows != len(pictures) or (self.form == "first" and self.token in ids):
            return ids, self._order_of_rows(ids, pictures)
        if self.form == "first":
            ids = [self.marker] * len(pictures) + ids
        if self._fenced:
            ids = _joined(ids, self._fenced)
        order = self._order([each for each in ids if each in self._markers], pictures, lambda each: f"token {each}")
        found: list[int] = []
        left = iter(order)
        for each in ids:
            if each in self._markers:
                found += _encoded(pictures[next(left)].pieces, encode)
            else:
                found.append(each)
        return found, order

    def _order_of_rows(self, ids: list[int], pictures: Sequence[Shown]) -> list[int]:
        """Numbers of the pictures as ids that have all placeholders show them; those that have none are left out."""
        if self.video < 0 and self.sound < 0:
            return list(range(len(pictures)))
        of = {self.token: self.marker, self.video: self.video, self.sound: self.sound}
        of.pop(-1, None)
        left = {m: [i for i, each in enumerate(pictures) if each.marker == m] for m in self._markers}
        order, skipped = list[int](), dict.fromkeys(of, 0)
        for each in ids:
            if each in of and skipped[each]:
                skipped[each] -= 1
            elif each in of and left[of[each]]:
                order.append(left[of[each]].pop(0))
                skipped[each] = pictures[order[-1]].pieces.count(each) - 1
        return order


def _on_clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"


def _joined(ids: list[int], fenced: tuple[int, ...]) -> list[int]:
    """``ids`` with the middle one alone of three that are ``fenced``."""
    found, at = list[int](), 0
    while at < len(ids):
        whole = tuple(ids[at : at + 3]) == fenced
        found.append(fenced[1] if whole else ids[at])
        at += 3 if whole else 1
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


def _check(markers: int, pictures: int, marker: str, what: str = "image") -> None:
    if markers != pictures:
        raise InvalidRequestError(
            f"the prompt has {markers} {what} placeholders ({marker}) and {pictures} {what}s; write one for each", FIELD
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
    "same": _same, "first": _same, "spans": _spans, "apart": _spans, "tiles": _tiles, "lines": _lines, "between": _between,
    "wrapped": _wrapped,
}  # fmt: skip
