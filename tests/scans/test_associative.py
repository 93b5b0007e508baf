"""Associative scans of packages: linear recurrences as one core mixer, other operators by their definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from s5.jax_compat import associative_scan
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan as scan_of_torch
from torch.utils._pytree import tree_flatten

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.mixers import CoreMixer
from unilinattn.operator.stages import Mix, walk
from unilinattn.scans.associative import diagonal, is_recurrence, linear_recurrence
from unilinattn.testing import check_architecture, randomize
from unilinattn.tracing.layer import Layer

WIDTH, HEADS = 12, 3


def combine(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    return second[0] * first[0], second[0] * first[1] + second[1]


@torch.jit.script
def scripted(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return second[0] * first[0], torch.addcmul(second[1], second[0], first[1])


def signed(mixer: "Recurrent", x: Tensor) -> Tensor:
    return associative_scan(combine, (torch.tanh(mixer.decay(x)), mixer.drive(x)), axis=1)[1]


def backwards(mixer: "Recurrent", x: Tensor) -> Tensor:
    pair = torch.sigmoid(mixer.decay(x)), mixer.drive(x)
    return associative_scan(scripted, pair, axis=1)[1] + associative_scan(scripted, pair, axis=1, reverse=True)[1]


def rotated(mixer: "Recurrent", x: Tensor) -> Tensor:
    decay = torch.polar(torch.sigmoid(mixer.decay(x)), mixer.drive(x))
    return associative_scan(combine, (decay, mixer.drive(x) + 0j), axis=1)[1].real


def turned(mixer: "Recurrent", x: Tensor) -> Tensor:
    """Rotations, whose modulus is 1, and a decay of zero at every fifth token."""
    decay = torch.exp(1j * mixer.decay(x)) * (torch.arange(x.shape[1]) % 5 != 0)[:, None]
    return associative_scan(combine, (decay, mixer.drive(x) + 0j), axis=1)[1].real


def shared(mixer: "Recurrent", x: Tensor) -> Tensor:
    decay, drive = (project(x).unflatten(2, (HEADS, -1)) for project in (mixer.decay, mixer.drive))
    return associative_scan(combine, (torch.sigmoid(decay[..., :1]), drive), axis=1)[1].flatten(2)


def heads_in_the_batch(mixer: "Recurrent", x: Tensor, outer: bool = False) -> Tensor:
    def split(values: Tensor) -> Tensor:
        heads = values.unflatten(2, (HEADS, -1)).movedim(2, 0 if outer else 1)
        return heads.flatten(0, 1)

    states = associative_scan(combine, (torch.sigmoid(split(mixer.decay(x))), split(mixer.drive(x))), axis=1)[1]
    sizes = (HEADS, len(x)) if outer else (len(x), HEADS)
    return states.unflatten(0, sizes).movedim(0 if outer else 1, 2).flatten(2)


def heads_before_the_batch(mixer: "Recurrent", x: Tensor) -> Tensor:
    return heads_in_the_batch(mixer, x, outer=True)


def with_a_highest_gate(mixer: "Recurrent", x: Tensor) -> Tensor:
    """A scan whose operator is a maximum decides a gate."""
    decay = torch.sigmoid(mixer.decay(x))
    (highest,) = associative_scan(lambda first, second: (torch.maximum(first[0], second[0]),), (decay,), axis=1)
    return highest.detach() * associative_scan(combine, (decay, mixer.drive(x)), axis=1)[1]


class Recurrent(nn.Module):
    """A mixer whose states are those of a scan."""

    def __init__(self, scan: Callable[["Recurrent", Tensor], Tensor]) -> None:
        super().__init__()
        self.decay, self.drive, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scan = scan

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.scan(self, x))


class Language(nn.Module):
    """A language model of one block."""

    def __init__(self, scan: Callable[[Recurrent, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.mixer, self.head = nn.Embedding(31, WIDTH), Recurrent(scan), nn.Linear(WIDTH, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.embedding(input_ids)
        return self.head(stream + self.mixer(stream))


def model(scan: Callable[[Recurrent, Tensor], Tensor]) -> nn.Module:
    return randomize(Language(scan).eval())


def ids(length: int = 23) -> Tensor:
    return torch.randint(31, (2, length), generator=torch.Generator().manual_seed(0))


def mixers(layer: Layer) -> list[CoreMixer]:
    stages = [stage for chain in layer.operator.chains.values() for stage in walk(chain)]
    return [stage.mixer for stage in stages if isinstance(stage, Mix)]


SCANS = (signed, backwards, rotated, turned, shared, heads_in_the_batch, heads_before_the_batch, with_a_highest_gate)


@pytest.mark.long
@pytest.mark.parametrize("scan", SCANS)
def test_a_recurrence_is_exact(scan: Callable[[Recurrent, Tensor], Tensor]) -> None:
    check_architecture(model(scan), ids())


@pytest.mark.parametrize("scan", SCANS[:-1])
def test_its_stages_do_not_grow_with_the_length(scan: Callable[[Recurrent, Tensor], Tensor]) -> None:
    def structures(length: int) -> list[str]:
        return [mixer.structure for mixer in mixers(ula.trace(model(scan), ids(length), progress=False).layers[0])]

    assert structures(11) == structures(67)
    assert all(structure.endswith("diagonal decay") for structure in structures(11))


def test_the_scan_of_torch_is_one_core_mixer() -> None:
    def scan(mixer: Recurrent, x: Tensor) -> Tensor:
        pair = torch.sigmoid(mixer.decay(x)), mixer.drive(x)
        states: Tensor = scan_of_torch(combine, pair, 1, combine_mode="generic")[1]
        return states

    layer = ula.trace(model(scan), ids(), progress=False).layers[0]
    assert layer.reconstruction_error() < 1e-6
    assert len(mixers(layer)) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_the_definition_is_the_scan_of_the_package(reverse: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    decay, drive = torch.randn(2, 2, 9, 3, generator=generator, dtype=torch.float64)
    expected = associative_scan(combine, (decay, drive), axis=1, reverse=reverse)[1]
    torch.testing.assert_close(linear_recurrence(decay, drive, reverse), expected)


def test_a_recurrence_in_bfloat16_is_told_from_other_operators() -> None:
    pair = [torch.rand(9, 2, 300).bfloat16() for _ in range(2)]
    structure = tree_flatten(pair)[1]
    assert is_recurrence(combine, pair, structure) and is_recurrence(scripted, tuple(pair), tree_flatten((0, 0))[1])
    for operator in (
        lambda first, second: (second[0] * first[0], second[0] * first[1].abs() + second[1]),
        lambda first, second: (second[0] + first[0], second[0] * first[1] + second[1]),
        lambda first, second: (second[0] * first[0], first[0] * second[1] + first[1]),
    ):
        assert not is_recurrence(operator, pair, structure)


def test_a_growing_state_is_refused() -> None:
    def scan(mixer: Recurrent, x: Tensor) -> Tensor:
        return associative_scan(combine, (1 + mixer.decay(x) ** 2, mixer.drive(x)), axis=1)[1]

    with pytest.raises(UncoveredError, match="a linear recurrence with a decay of"):
        ula.trace(model(scan), ids(), progress=False)


def test_a_decay_of_one_up_to_rounding_is_one() -> None:
    decay = torch.full((1, 9, 4), 1 + 2 * torch.finfo(torch.float32).eps)
    assert torch.equal(diagonal(decay, reverse=False).materialize(), torch.ones(9, 9).tril().expand(1, 4, 9, 9))


def test_a_vanishing_decay_forgets() -> None:
    def scan(mixer: Recurrent, x: Tensor) -> Tensor:
        decay = torch.sigmoid(mixer.decay(x)) * (torch.arange(x.shape[1]) % 5 != 0)[:, None]
        return associative_scan(combine, (decay, mixer.drive(x)), axis=1)[1]

    layer = ula.trace(model(scan), ids(), progress=False).layers[0]
    assert layer.reconstruction_error() < 1e-6
    assert float(layer.operator.matrix("core", heads=None)[..., 5:, :5].abs().amax()) < 1e-20
