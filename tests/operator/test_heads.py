"""Contributions through heads of hand-made layers: refusals, and stages after the core that mix its heads."""

import pytest
import torch
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.mixers import Dense
from unilinattn.operator import MixerOperator
from unilinattn.operator.heads import HeadContributions
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale

LENGTH, CHANNELS, HEADS = 5, 6, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operator(chain: Chain) -> MixerOperator:
    x = random(2, LENGTH, 4)
    return MixerOperator({"x": chain}, inputs={"x": x}, output=torch.zeros(2, LENGTH, 4, dtype=x.dtype), name="layer")


def core(seed: int = 0) -> Chain:
    into, out = Matrix("input", random(CHANNELS, 4, seed=seed)), Matrix("output", random(4, CHANNELS, seed=seed + 1))
    return (into, Mix("core", Dense(random(2, HEADS, LENGTH, LENGTH, seed=seed + 2).tril())), out)


def test_a_sum_of_cores_with_projections_has_no_heads() -> None:
    summed = operator((Branch("core", (core(), core(7))),))
    with pytest.raises(UncoveredError, match="layer sums several cores with projections of their own"):
        HeadContributions.of(summed, [0], joint=False)
    around = HeadContributions.of(operator((Branch("core", (core(), ())),)), [0, 1, 2], joint=True)
    x = around.operator.inputs["x"]
    torch.testing.assert_close(around.around(), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("together", [True, False])
def test_a_centring_after_the_core_is_split_if_it_can_be(groups: int, together: bool) -> None:
    """Groups of 6, 3 and 2 channels: those of two channels are heads, the others mix channels of several heads."""
    into, mix, out = core()
    scale = Scale("norm", random(2, LENGTH, CHANNELS, seed=9))
    layer = operator((into, mix, Center("norm", groups), scale, out))
    split = HeadContributions.of(layer, [0, 2], joint=together)
    form = split.pairwise()
    assert form is not None and isinstance(mix, Mix) and isinstance(into, Matrix) and isinstance(out, Matrix)
    values = torch.einsum(
        "bhij,bjhp->bhijp", mix.mixer.tile(), (layer.inputs["x"] @ into.weight.T).unflatten(2, (3, 2))
    )
    expected = []
    for head in (0, 2):
        alone = torch.zeros(2, LENGTH, LENGTH, CHANNELS, dtype=torch.float64)
        alone[..., 2 * head : 2 * head + 2] = values[:, head]
        grouped = alone.unflatten(-1, (groups, -1))
        centred = (grouped - grouped.mean(-1, keepdim=True)).flatten(-2) * scale.scale[:, :, None]
        expected.append(centred @ out.weight.T)
    vectors = torch.stack(expected, 1).sum(1, keepdim=True) if together else torch.stack(expected, 1)
    index = torch.arange(LENGTH).expand(2, -1)
    for tiles in (split.tiles(form, 2.0, 4), split.rows(index, slice(0, LENGTH), 2.0, "exact")):
        norms = torch.zeros(2, split.count, LENGTH, LENGTH, dtype=torch.float64)
        for part, tile in tiles:
            norms[:, part, tile.rows, tile.cols] = tile.norms(1.0)
        torch.testing.assert_close(norms, 2 * vectors.abs().sum(-1), rtol=0, atol=1e-12)
