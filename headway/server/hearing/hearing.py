"""What the routes of models that hear share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.api.hearing.decoding import AudioDecoder
from headway.api.hearing.transcriber import Transcriber
from headway.server.decode import Body
from headway.server.settings import ServerSettings

if TYPE_CHECKING:
    from headway.api.tokenizer import Tokenizer
    from headway.core.messages import ModelInfo


class Hearing:
    """Of one server.

    Attributes:
        body: reads forms.
        decoder: makes samples of files.
        transcriber: asks the model.
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer | None, settings: ServerSettings) -> None:
        self.body = Body(settings.max_audio_bytes, settings.max_json_depth, settings.max_bodies_bytes)
        self.decoder = AudioDecoder(settings.max_audio_seconds)
        self.transcriber = Transcriber(info, tokenizer)

    def close(self) -> None:
        """End the processes."""
        self.decoder.close()
