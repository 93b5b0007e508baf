"""The checksum of 64-bit words in numpy, in torch and by Triton's interpreter against its definition."""

import pytest
import torch

from unilinattn.kernels.checksum import naive, tiled, triton

pytestmark = pytest.mark.usefixtures("on_a_gpu", "poisoned")


@pytest.mark.parametrize("length", [1, 2, 32767, 32768, 32769, 70000])
def test_every_form_gives_the_number_of_the_definition(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "PIECE", naive.CHUNK)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (length,), device="cpu")
    # The ends of the range, whose products wrap.
    words[:2] = torch.tensor([-(1 << 63), (1 << 63) - 1], device="cpu")[: min(2, length)]
    expected = naive.checksum(words.tolist())
    assert int(tiled.checksum(words)) == expected
    there = words.to(torch.get_default_device())
    for checksum in (tiled.in_pieces, triton.checksum):
        result = checksum(there)
        assert result.device.type == there.device.type
        assert int(result) == expected


def test_the_order_of_words_and_of_chunks_counts() -> None:
    words = torch.randint(1 << 40, (2 * naive.CHUNK,), device="cpu")
    others = words.clone()
    others[[0, 1]] = words[[1, 0]]
    turned = words.roll(naive.CHUNK)
    assert len({int(tiled.checksum(each)) for each in (words, others, turned)}) == 3
