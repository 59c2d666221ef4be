"""Kernels in Gluon for Hopper GPUs (compute capability 9.0), and their launchers."""
