"""Count in row, and the channels and heads that are fitted to it."""

import torch

from evidence.theorems import (
    BITS,
    LINEAR,
    SOFTMAX,
    all_bits,
    count_in_row,
    fixed_filter,
    head_differences,
    linear_head,
    mixing,
    s6_channel,
    softmax_head,
)


def runs(bits: list[int]) -> list[int]:
    """Count in row, one bit after the other."""
    counts, run = [], 0
    for bit in bits:
        run = run + 1 if bit else 0
        counts.append(run)
    return counts


def test_one_channel_counts_ones_in_a_row_and_the_printed_one_counts_all() -> None:
    bits = all_bits()
    assert len({tuple(row) for row in bits.tolist()}) == 2**BITS
    counts = torch.tensor([runs([int(b) for b in row]) for row in bits.tolist()], dtype=torch.float64)
    assert torch.equal(count_in_row(bits), counts)
    assert torch.equal(s6_channel(bits, printed=False), counts)
    assert torch.equal(s6_channel(bits, printed=True), bits.cumsum(1))


def test_the_fits_are_least_squares() -> None:
    bits = all_bits()
    counts = count_in_row(bits)
    fits = {"filter": fixed_filter(bits, counts), "linear": linear_head(bits, counts), "mean": counts.mean()}
    errors = {name: float((fit - counts).square().mean()) for name, fit in fits.items()}
    assert errors["filter"] < errors["mean"]
    assert errors["linear"] < errors["mean"]
    # A function within reach of each is fitted to rounding.
    lag = torch.cat([torch.zeros(len(bits), 1), bits[:, :-1]], 1).double()
    torch.testing.assert_close(fixed_filter(bits, 2 * lag + 1), 2 * lag + 1)
    product = bits * bits.cumsum(1)
    torch.testing.assert_close(linear_head(bits, product), product, rtol=1e-6, atol=1e-6)


def test_a_softmax_head_finds_the_mean_of_the_bits() -> None:
    bits = all_bits()[::16]
    mean = bits.cumsum(1) / torch.arange(1, BITS + 1)
    torch.testing.assert_close(softmax_head(bits, mean), mean)


def test_a_fixed_mixer_does_not_change_and_a_selective_one_does() -> None:
    assert mixing("s4", 0) == (0, 0)
    assert mixing("mamba", 0)[0] > 0.01


def test_a_state_space_without_decay_is_a_head_without_softmax() -> None:
    differences = head_differences(1)
    assert differences[LINEAR] < 1e-10
    assert differences[SOFTMAX] > 0.1
