"""Drafters: what guesses tokens ahead, on the device alone."""
