"""What one H200 gave at best: the floors of the benchmarks here."""

BYTES_PER_US = 4.44e6
"""A plain reduction; ``headway bench anchors`` has the same in its ``figures.json``."""
FLOPS_PER_US = 790e6
"""The best of cuBLAS's products in 16 bits."""
