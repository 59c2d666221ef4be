"""Prompts with ``multi_modal_data``: what becomes of their text or ids, and which tokens pictures stand in for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.api.pictures.sounds import Sound
from headway.core.encode import EncoderItem
from headway.core.errors import InvalidRequestError
from headway.core.messages import AddRequest, ModelInfo

if TYPE_CHECKING:
    from headway.api.killable import Job
    from headway.api.pictures.door import Picture, Pictures


def see(pictures: Pictures | None, info: ModelInfo, prompt: Mapping[str, Any], job: Job | None = None) -> list[Picture]:
    """The pictures of a prompt, prepared; it may take seconds. Raises InvalidRequestError, BusyError."""
    if pictures is None:
        raise InvalidRequestError(
            f"{info.architecture} sees no pictures; leave multi_modal_data out", "multi_modal_data"
        )
    return pictures.prepare(pictures.given(prompt["multi_modal_data"]), job)


def filled(
    pictures: Pictures, prompt: Mapping[str, Any], text: str | None, ids: list[int], seen: Sequence[Picture]
) -> tuple[dict[str, Any], bool, list[Picture]]:
    """The prompt with what stands for its pictures, whether it brings its own first token, and pictures as they come in it.

    Args:
        text, ids: of the prompt, as it was read: the one or the other.
    """
    rest = {name: value for name, value in prompt.items() if name not in ("multi_modal_data", "parse_special")}
    if text is None:
        ids, order = pictures.into_ids(ids, seen)
        return rest | {"prompt_token_ids": ids}, False, [seen[i] for i in order]
    told, order = pictures.into_text(text, seen)
    return rest | {"prompt": told}, pictures.placeholders.form == "first", [seen[i] for i in order]


def place(info: ModelInfo, children: Sequence[AddRequest], ids: list[int], media: Sequence[EncoderItem]) -> None:
    """Say which tokens the features of pictures and recordings stand in for. Raises InvalidRequestError: they do not fit."""
    if info.vision is None:
        return
    from headway.multimodal.items import find_runs

    items = list(media)
    runs = find_runs(info.vision, ids, items, info.sound)
    for child in children:
        child.media, child.runs = items, runs


def image_bytes(prompt: Mapping[str, Any]) -> int:
    """About how many bytes the images of a prompt are, and its recordings."""
    data = prompt["multi_modal_data"]
    if not isinstance(data, Mapping):
        return 2**20
    images = data.get("image")
    found = images if isinstance(images, list | tuple) else [images]
    videos = 0 if data.get("video") is None else 2**26
    sounds = data.get("audio")
    heard = sounds if isinstance(sounds, list) else [] if sounds is None else [sounds]
    found = [*found, *(each.data if isinstance(each, Sound) else each for each in heard)]
    return videos + sum(len(each) if isinstance(each, bytes) else 2**20 for each in found)
