"""Integer arithmetic that everybody needs."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= a."""
    return cdiv(a, multiple) * multiple


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


MASK64 = 2**64 - 1


def mix64(seed: int, number: int) -> int:
    """64 well-mixed bits of (seed, number): two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014)."""
    value = seed & MASK64
    for word in (0, number):
        value = (value + word + 1) * 0x9E3779B97F4A7C15 & MASK64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK64
        value ^= value >> 31
    return value
