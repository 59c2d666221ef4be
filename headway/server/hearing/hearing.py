"""What the routes of models that hear share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from headway.api.hearing.decoding import AudioDecoder
from headway.api.hearing.transcriber import Transcriber
from headway.multimodal.audio.decode import RATE
from headway.server.decode import Body
from headway.server.errors import ApiError
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer
    from headway.core.messages import ModelInfo


BYTES_AN_HOUR: Final = 3600 * 4 * RATE
MAX_HELD_BYTES: Final = 10 * BYTES_AN_HOUR
"""Of all recordings that are being transcribed, decoded: 2.3 GB."""


class Hearing:
    """Of one server.

    Attributes:
        body: reads forms.
        decoder: makes samples of files.
        transcriber: asks the model.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None, settings: ServerSettings) -> None:
        together = settings.max_bodies_bytes
        self.body = Body(settings.max_audio_bytes, settings.max_json_depth, together, "--max-audio-bytes")
        self.decoder = AudioDecoder(settings.max_audio_seconds)
        self.transcriber = Transcriber(info, tokenizer)
        self._held = 0

    @contextlib.contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Hold the samples of a recording: a small file may be of a long one, so what bounds files does not bound these.

        Raises:
            ApiError: 503, others hold too much.
        """
        if self._held and self._held + num_bytes > MAX_HELD_BYTES:
            message = f"recordings of {MAX_HELD_BYTES // BYTES_AN_HOUR} hours are being transcribed; try again"
            raise ApiError(503, message, None, "busy", {"Retry-After": "5"})
        self._held += num_bytes
        try:
            yield
        finally:
            self._held -= num_bytes

    def close(self) -> None:
        """End the processes."""
        self.decoder.close()
