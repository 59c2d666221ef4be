"""Products of 4-bit weights for Hopper: unpacked in registers, multiplied on tensor cores."""
