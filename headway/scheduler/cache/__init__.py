"""Blocks of requests: which they hold in each group of layers, which can be hit again, which are free."""
