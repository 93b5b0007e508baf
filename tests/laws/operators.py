"""Random operators in the layouts of real layers, around a core of any structure."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.laws.structures import HEADS, Draw, Structure
from unilinattn.mixers import CoreMixer, Dense, Toeplitz
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale

WIDTH = 6
INNER = 2 * HEADS


class Parts:
    """Draws the stages of one operator."""

    def __init__(self, draw: Draw, core: CoreMixer) -> None:
        self.draw, self.core = draw, core

    def matrix(self, role: str, out: int, inside: int) -> Matrix:
        return Matrix(role, self._free(out, inside), self._free(out))

    def conv(self) -> Mix:
        taps = self._free(INNER, 4)
        return Mix("conv", Toeplitz(taps, batch=self.draw.batch, length=self.draw.length), self._free(INNER))

    def scale(self, role: str, groups: int = INNER) -> Scale:
        """Frozen factors; zero for some tokens in the extreme draws."""
        return Scale(role, self.draw.normal(groups) * (self.draw.steps(1) > 0))

    def mix(self) -> Mix:
        return Mix("core", self.core)

    def skip(self, groups: int = HEADS) -> Scale:
        return Scale("skip", self._free(1, 1, groups))

    def _free(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw.generator, dtype=torch.float64).to(self.draw.dtype)


def mamba(p: Parts) -> Chain:
    core = Branch("core", ((p.mix(),), (p.skip(),)))
    scales = p.scale("gate"), p.scale("norm", 2), Scale("norm", p.skip(INNER).scale, p._free(INNER))
    ends = p.matrix("input", INNER, WIDTH), p.matrix("output", WIDTH, INNER)
    return (p.scale("input", 1), ends[0], p.conv(), p.scale("act"), core, *scales, ends[1])


def attention(p: Parts) -> Chain:
    return p.matrix("input", INNER, WIDTH), p.mix(), p.matrix("output", 5, INNER)


def post_norm(p: Parts) -> Chain:
    inside = p.matrix("input", INNER, WIDTH), p.mix(), p.matrix("output", WIDTH, INNER)
    weight = Scale("norm", p._free(1, 1, WIDTH), p._free(WIDTH))
    return Branch("output", (inside, ())), Center("norm"), p.scale("norm", 1), weight


def centred(p: Parts) -> Chain:
    after = Center("norm", 2), p.scale("norm", 2), p.scale("gate")
    return p.matrix("input", INNER, WIDTH), p.mix(), *after, p.matrix("output", WIDTH, INNER)


def two_directions(p: Parts) -> Chain:
    back = torch.randn(p.draw.batch, HEADS, p.draw.length, p.draw.length, generator=p.draw.generator)
    backward = Mix("core", Dense(back.triu().to(p.draw.dtype)))
    each = (p.conv(), p.scale("act"), p.mix()), (p.conv(), p.scale("act"), backward, p.scale("norm", 1))
    ends = p.matrix("input", INNER, WIDTH), p.matrix("output", WIDTH, INNER)
    return ends[0], Branch("core", each), p.scale("gate"), ends[1]


def bare(p: Parts) -> Chain:
    """A fixed mixer without an input projection, such as S4D."""
    return p.mix(), p.scale("act", HEADS), p.matrix("output", WIDTH, HEADS)


LAYOUTS: dict[str, Callable[[Parts], Chain]] = {
    "mamba": mamba,
    "attention": attention,
    "post-norm": post_norm,
    "centred": centred,
    "two directions": two_directions,
    "bare": bare,
}


def operator(layout: str, structure: Structure, draw: Draw) -> MixerOperator:
    """Build an operator whose recorded output is that of the operator: the host is exact by construction."""
    parts = Parts(draw, structure.mixer(draw))
    return around({"x": LAYOUTS[layout](parts)}, {"x": draw.normal(HEADS if layout == "bare" else WIDTH)})


def around(chains: dict[str, Chain], inputs: dict[str, Tensor]) -> MixerOperator:
    """Build an operator with its output as the recorded output of the host."""
    x = next(iter(inputs.values()))
    blank = MixerOperator(chains, inputs=inputs, output=x.new_zeros(x.shape[0], x.shape[1], 1), name="layer")
    return MixerOperator(chains, inputs=inputs, output=blank.apply(inputs), name="layer")
