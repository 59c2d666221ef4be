"""The server over the engine that pools without a model."""

from __future__ import annotations

from typing import Any

import pytest

from headway import AsyncLLM
from headway.api import frontend
from tests.api.pooling_core import connect, word_tokenizer


def pooling_llm(name: str, **engine: Any) -> AsyncLLM:
    """An AsyncLLM over ``tests.api.pooling_core``; the patches live while it is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "connect", connect)
        patch.setattr(frontend, "load_tokenizer", lambda args: None if args.skip_tokenizer_init else word_tokenizer())
        return AsyncLLM(name, multiprocess=False, **engine)
