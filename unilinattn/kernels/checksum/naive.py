"""The definition of the checksum, in Python's integers: the reference of the fast forms."""

from collections.abc import Sequence

CHUNK = 1 << 15
"""Words of a chunk; on a CPU they and their factors fit its second cache."""

PRIME = 0x100000001B3
"""The factor of the words before a chunk."""

FIRST, SECOND = 0x9E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""The multiplications that scatter the factors of a chunk's words (as in SplitMix64)."""

MODULUS = 1 << 64


def checksum(words: Sequence[int]) -> int:
    """Return the sum of w_k mixed(word_k) modulo 2^64 over signed words, w scattered odd numbers: their order counts.

    A word's high half is mixed into its low half: twice a float64 differs in bits above the 51st only, whose sums
    modulo 2^64 are equal for many tensors. The sum of the words before a chunk is multiplied by `PRIME`.
    """
    total = 0
    for start in range(0, len(words), CHUNK):
        total *= PRIME
        for k, word in enumerate(words[start : start + CHUNK]):
            # A shift of a signed word repeats its sign.
            total += _factor(k) * (word ^ (word >> 32))
    return _signed(total)


def _factor(k: int) -> int:
    number = _signed((k + 1) * FIRST)
    return (number ^ (number >> 31)) * SECOND | 1


def _signed(number: int) -> int:
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2
