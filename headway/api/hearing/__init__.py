"""Transcribing: recordings of any length to texts and segments, over the same requests as ``generate``."""
