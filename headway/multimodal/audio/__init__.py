"""Recordings: decoded, resampled and turned into log-mel spectrograms, with numpy alone."""
