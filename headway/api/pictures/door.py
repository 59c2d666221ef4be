"""``Pictures``: prompts with pictures of one engine. Files are decoded in processes that can be killed, pictures in memory
here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from headway.api.killable import Job, Pool, TooMuchError
from headway.api.pictures.clips import Clip, make_parts, read_clips
from headway.api.pictures.placeholders import Placeholders, Shown
from headway.api.pictures.settings import read_clip_settings, read_settings
from headway.api.pictures.sound_settings import read_sound_settings
from headway.api.pictures.sounds import Sound, Sounds, read_sounds
from headway.api.pictures.worker import Boot, Reply
from headway.core.encode import EncoderItem
from headway.core.errors import ConfigError, InvalidRequestError
from headway.core.media import SoundInfo, VisionInfo
from headway.multimodal.images import FIELD, MAX_FILE_BYTES, upright
from headway.multimodal.items import make_item
from headway.multimodal.process import ImageSettings, cut

if TYPE_CHECKING:
    from PIL.Image import Image

    from headway.api.tokenizer import Tokenizer

NUM_WORKERS: Final = 2
SECONDS: Final = 10.0
"""Processor time that decoding and cutting one picture may take; the largest that are read take two."""
MEMORY_BYTES: Final = 3 * 2**30
DEFAULT_LIMITS: Final = MappingProxyType({"image": 32, "video": 4, "audio": 8})
"""Most in a prompt, unless ``EngineArgs.limit_mm_per_prompt`` says otherwise."""


class Picture(NamedTuple):
    """One picture, video or recording, prepared: what the engine gets, and what stands for it in the prompt."""

    items: list[EncoderItem]
    shown: Shown


class Pictures:
    """How prompts with pictures, videos and recordings are prepared; safe to share between threads.

    Args:
        info: of the model.
        folder: of the checkpoint, where the processor's files are; None: there are none.
        config: config.json.
        limits: most pictures, videos and recordings in a prompt, see ``DEFAULT_LIMITS``.
        sound: of the model; None: it hears nothing.
    """

    def __init__(
        self,
        info: VisionInfo,
        architecture: str,
        folder: Path | None,
        config: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        limits: Mapping[str, int] = DEFAULT_LIMITS,
        sound: SoundInfo | None = None,
    ) -> None:
        if info.longest:
            _need_pillow()
        if info.video_token >= 0 and tokenizer is not None and tokenizer.backend.id_to_token(info.video_token) is None:
            info = msgspec.structs.replace(info, video_token=-1)  # nothing in a prompt's text could stand for a video
        self.info, self._tokenizer, self.limits = info, tokenizer, limits
        self._settings: ImageSettings | None = None
        self.placeholders = Placeholders.of("apart", info, config, sound)
        if info.longest:
            self._settings, self.placeholders = read_settings(folder, architecture, info, config, sound)
        self._clips = None if info.video_token < 0 else read_clip_settings(folder, architecture, info)
        self.sounds: Sounds | None = None
        if sound is not None:
            settings, sound = read_sound_settings(folder, sound, architecture)
            self.sounds = Sounds(sound, settings)
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    @property
    def settings(self) -> ImageSettings:
        """How pictures are resized and cut, of a model that takes some."""
        assert self._settings is not None
        return self._settings

    @property
    def marker(self) -> str:
        """What a prompt's text has for a picture."""
        assert self._tokenizer is not None
        return str(self._tokenizer.backend.id_to_token(self.placeholders.marker))

    def given(self, data: object) -> list[object]:
        """What ``multi_modal_data`` has: {"image": picture or list of them, "video": see ``clips``, "audio": see ``sounds``};
        ``Clip``s come behind pictures, and ``Sound``s last.

        Raises:
            InvalidRequestError: something else, or too many.
        """
        if not isinstance(data, Mapping):
            raise InvalidRequestError(f"multi_modal_data must be a dictionary, got {type(data).__name__}", FIELD)
        for name in data:
            if name not in self.kinds:
                served = " and ".join(map(repr, self.kinds)) + (" is" if len(self.kinds) == 1 else " are")
                raise InvalidRequestError(f"multi_modal_data: {name!r:.40} is not served; {served}", FIELD)
        images = data.get("image")
        found = list(images) if isinstance(images, list | tuple) else [] if images is None else [images]
        clips, sounds = read_clips(data.get("video")), read_sounds(data.get("audio"))
        for name, many in (("image", found), ("video", clips), ("audio", sounds)):
            if len(many) > self.limits[name]:
                what = "recording" if name == "audio" else name
                raise InvalidRequestError(
                    f"the prompt has {len(many)} {what}s, and at most {self.limits[name]} are allowed; "
                    "see limit_mm_per_prompt",
                    FIELD,
                )
        return found + clips + sounds

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of what a prompt may have."""
        has = {"image": self._settings is not None, "video": self._clips is not None, "audio": self.sounds is not None}
        return tuple(name for name in has if has[name])

    def prepare(self, images: Sequence[object], job: Job | None = None) -> list[Picture]:
        """Decode, resize and cut.

        Args:
            images: bytes of files, pictures of Pillow, arrays uint8 [height, width, 3], ``Clip``s or ``Sound``s.
            job: by which another thread can give up.

        Raises:
            InvalidRequestError: one of them is damaged, too large, or none.
            BusyError: it could not be done now.
        """
        return [self._one(image, number, job) for number, image in enumerate(images)]

    def _one(self, image: object, number: int, job: Job | None) -> Picture:
        if isinstance(image, bytes | bytearray | memoryview):
            return self._from_file(bytes(image), number, job)
        if isinstance(image, Clip):
            assert self._clips is not None
            numbers = self._clips.chosen(len(image.frames))
            frames = [_picture(image.frames[each]) for each in numbers]
            parts = make_parts(self.info, frames, self._clips.images, image.fps or self._clips.fps, numbers)
            rows = [item.rows for item in parts.items]
            return Picture(parts.items, self.placeholders.of_clip(rows, parts.seconds))
        if isinstance(image, Sound):
            assert self.sounds is not None
            item = self.sounds.prepare(image, number, job)
            return Picture([item], self.placeholders.of_sound(item.rows))
        tiles = cut(_picture(image), self.settings)
        item = make_item(self.info, tiles.pixels, *self.settings.affine())
        return Picture([item], self.placeholders.shown(tiles))

    def _from_file(self, data: bytes, number: int, job: Job | None) -> Picture:
        if len(data) > MAX_FILE_BYTES:
            raise InvalidRequestError(f"image {number} has {len(data)} bytes; at most {MAX_FILE_BYTES} are read", FIELD)
        try:
            answer = self._workers().run(data, job)
        except TooMuchError as error:
            limit = f"longer than {SECONDS:g} seconds" if error.time else "too much memory"
            raise InvalidRequestError(f"preparing image {number} takes {limit}", FIELD) from None
        reply = msgspec.msgpack.decode(answer, type=Reply)
        if reply.item is None:
            raise InvalidRequestError(f"image {number}: {reply.error}", FIELD)
        return Picture([reply.item], Shown(self.placeholders.marker, reply.pieces))

    def _workers(self) -> Pool:
        with self._lock:
            if self._pool is None:
                boot = msgspec.msgpack.encode(Boot(self.info, self.settings, self.placeholders))
                self._pool = Pool(
                    "headway.api.pictures.worker", boot, NUM_WORKERS, SECONDS, MEMORY_BYTES, "preparing an image"
                )
            return self._pool

    def into_text(self, text: str, pictures: Sequence[Picture]) -> tuple[str, list[int]]:
        """The prompt's text with what stands for each picture, and their numbers as they come in it."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        bos = tokenizer.special_tokens.get("bos_token", "")
        shown = [picture.shown for picture in pictures]
        return self.placeholders.into_text(text, shown, lambda token: str(tokenizer.backend.id_to_token(token)), bos)

    def into_ids(self, ids: list[int], pictures: Sequence[Picture]) -> tuple[list[int], list[int]]:
        """The same for a prompt of token ids."""
        tokenizer = self._tokenizer
        encode = None if tokenizer is None else lambda text: tokenizer.encode(text, add_special_tokens=False)
        return self.placeholders.into_ids(ids, [picture.shown for picture in pictures], encode)

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        if self.sounds is not None:
            self.sounds.close()
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def _need_pillow() -> None:
    try:
        import PIL  # noqa: F401 - whether it is there
    except ImportError:
        raise ConfigError("pictures need Pillow: pip install 'headway[vision]'") from None


def _picture(image: object) -> Image:
    """A picture in memory, as Pillow's, the right way up as a file would be."""
    import numpy as np
    import PIL.Image

    if isinstance(image, PIL.Image.Image):
        try:
            return upright(image)
        except (OSError, SyntaxError, ValueError) as error:  # of a file that has not been read until now
            raise InvalidRequestError(f"the image is damaged ({type(error).__name__}: {error!s:.120})", FIELD) from None
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        return PIL.Image.fromarray(np.ascontiguousarray(image))
    raise InvalidRequestError(
        f"an image must be a picture of Pillow, bytes of a file, or an array uint8 [height, width, 3]; "
        f"got {type(image).__name__}",
        FIELD,
    )
