"""`ChosenValues`: in the code of a recorded layer, the value of each product is the one that its operator has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from unilinattn.architectures.recorded import chosen_values
from unilinattn.call.nested import mapped, tensors
from unilinattn.host.isolation import in_gradient_mode, isolated
from unilinattn.kernels.precision import full_precision
from unilinattn.recording.keys import position
from unilinattn.recording.nodes import Position
from unilinattn.rules.forms import carried
from unilinattn.rules.freezing import Freezing
from unilinattn.rules.gamma import GammaFreezing
from unilinattn.tracing.layer import Layer

Choices = Mapping[Position, Sequence[int]]
"""The operands of products that are values, by the position of the products' calls (see `chosen_values`)."""


def choices_in(layer: Layer) -> Choices:
    """Return the values of the products in a recorded layer's code."""
    with full_precision():
        return in_gradient_mode(False, partial(isolated, layer.module, lambda: chosen_values(layer.call(layer.input))))


class ChosenValues(Freezing):
    """Freezes all operands of a product but the chosen value, where there is a choice."""

    _choices: Choices = MappingProxyType({})

    @contextmanager
    def choosing(self, choices: Choices) -> Iterator[None]:
        """Follow the choices in this context."""
        before, self._choices = self._choices, choices
        try:
            yield
        finally:
            self._choices = before

    def _bilinear(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        operands = list(tensors((args, kwargs)))
        if numbers := self._values(operands):
            live = operands[numbers[-1]]
            args, kwargs = mapped((args, kwargs), lambda tensor: tensor if tensor is live else tensor.detach())
        return super()._bilinear(name, func, args, kwargs)

    def _product(self, name: str, func: Callable[..., Tensor], x: Any, other: Any) -> Tensor:
        numbers = self._values((x, other))
        if len(numbers) == 1:
            x, other = (other, x.detach()) if numbers[0] else (x, other.detach())
        return super()._product(name, func, x, other)

    def _values(self, operands: Sequence[Any]) -> Sequence[int]:
        """Return the numbers of the chosen operands of a product of several carried ones, none without a choice."""
        if not self._choices or sum(map(carried, operands)) < 2:
            return ()
        numbers = self._choices.get(position(), ())
        return numbers if all(n < len(operands) and carried(operands[n]) for n in numbers) else ()


class ChosenValuesWithGamma(ChosenValues, GammaFreezing):
    """The same by the gamma rule."""
