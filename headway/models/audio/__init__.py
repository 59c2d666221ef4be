"""Towers that hear: spectrograms of recordings to rows of a decoder's input."""
