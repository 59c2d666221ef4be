"""Structured output: what a text must look like, compiled to an automaton over bytes that the device follows by itself."""
