"""A pseudo-random order of N numbers that is computed, not stored: a keyed permutation.

A shuffled list of the windows of 20 billion tokens would fill gigabytes on every rank. Here the
window at place p of an epoch is a function of p, of the seed and of the epoch, so any rank on any
mesh finds the windows of a step alone.

The function is a Feistel network over the next power of four (Luby and Rackoff, "How to construct
pseudorandom permutations from pseudorandom functions", 1988); it is applied again to a result that
is not below N ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
Four rounds make a permutation pseudo-random in a large domain; small domains need more.
"""

import hashlib

import numpy as np

ROUNDS = 8


def shuffled(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers, uint64, at these places of the order that seed and epoch give 0 to count - 1.

    Each number is at one place. The network's domain is less than four times as large as `count`
    (but at least 4), so a number takes fewer than four passes on average.
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    digests = [hashlib.sha256(f"{seed} {epoch} {i}".encode()).digest() for i in range(ROUNDS)]
    keys = [np.uint64(int.from_bytes(digest[:8], "little")) for digest in digests]
    numbers = feistel(np.asarray(places, np.uint64), half_bits, keys)
    outside = numbers >= count
    while outside.any():
        numbers[outside] = feistel(numbers[outside], half_bits, keys)
        outside = numbers >= count
    return numbers


def feistel(numbers: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    """Permute the numbers of 2 x half_bits bits: each round changes one half by the other half."""
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return left << half | right


def mix(x: np.ndarray) -> np.ndarray:
    """64 bits that each depend on all bits of x: the last lines of SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Products wrap.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
