"""`Call`: one call of a host's token-mixing module, as an adapter sees it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unilinattn.errors import UncoveredError

MASKING = "apply_mask_to_padding_states"
"""The function beside a host's class that sets padded tokens to zero."""


@dataclass(frozen=True)
class Seen:
    """What an architecture's `capture` saw inside a layer: in which module, with which arguments, and what."""

    module: nn.Module
    arguments: Mapping[str, Any]
    record: Any


@dataclass(frozen=True)
class Call:
    """What a host's module was called with, in the dtype that the operator computes in.

    Attributes:
        module: the host's module, as it is.
        name: its path in the model.
        arguments: what its `forward` was given, by parameter name.
        input: its first tensor, (batch, length, channel).
        output: what it returned, None where it is not known yet.
        seen: what the architecture's `capture` saw during this call.
    """

    module: nn.Module
    name: str
    arguments: Mapping[str, Any]
    input: Float[Tensor, "batch length channel"]
    output: Float[Tensor, "batch query out"] | None = None
    seen: tuple[Seen, ...] = ()

    @property
    def host(self) -> "Host":
        """The module, whose missing attributes raise an error that names the package's version."""
        return Host(self.module, self.name)

    def cast(self, tensor: Tensor | None) -> Tensor | None:
        """Bring a parameter or an argument to the operator's dtype and device; None stays None."""
        return None if tensor is None else self.weight(tensor)

    def weight(self, tensor: Tensor) -> Tensor:
        """Bring a parameter that the host always has to the operator's dtype and device.

        A complex one goes to the complex dtype of that precision. It stays in the graph only where gradients are on;
        elsewhere it is a copy, so that an operator stays what it is when the model's weights change.
        """
        dtype = self.input.dtype.to_complex() if tensor.is_complex() else self.input.dtype
        live = torch.is_grad_enabled()
        moved = tensor.to(device=self.input.device, dtype=dtype, copy=not live)
        return moved if live else moved.detach()

    def padding_scale(self, mask: Tensor | None) -> Float[Tensor, "batch length 1"] | None:
        """Return the factors that the host's own `apply_mask_to_padding_states` puts on padding, None for no mask.

        A host without that function multiplies by the mask.
        """
        if mask is None:
            return None
        ones, mask = torch.ones_like(self.input[..., :1]), mask.to(self.input.device)
        apply = _beside(self.module, MASKING)
        return ones * mask[..., None] if apply is None else apply(ones, mask)

    def refuse(self, *options: str) -> None:
        """Raise `UncoveredError` if the host was called with one of these options, which its adapter does not cover."""
        for option in options:
            if self.arguments.get(option) is not None:
                raise UncoveredError(
                    f"{self.name} ({type(self.module).__name__}) was called with {option!r}, which its adapter does "
                    "not cover; trace the model without it."
                )


class Host:
    """A view of a module that explains which attribute is missing, and in which version."""

    def __init__(self, module: nn.Module, name: str) -> None:
        """Look at a module of that path."""
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> Any:
        """Return the module's attribute; raise `UncoveredError` if this version of the host has none."""
        try:
            return getattr(self._module, attribute)
        except AttributeError:
            raise UncoveredError(
                f"{self._name} ({type(self._module).__name__}) has no attribute {attribute!r} in "
                f"{package_version(self._module)}: the host was changed there. Use a version that the "
                "coverage table lists, or register an adapter for this one."
            ) from None


def package_version(module: nn.Module) -> str:
    """Return "package version" of the package that a module's class comes from."""
    package = type(module).__module__.split(".")[0]
    return f"{package} {getattr(sys.modules.get(package), '__version__', 'of unknown version')}"


def host_function(module: nn.Module, name: str) -> Any:
    """Return a function that stands in the file of a module's class or of one of its ancestors.

    Raises `UncoveredError` if none has it.
    """
    found = _beside(module, name)
    if found is None:
        raise UncoveredError(
            f"no function {name!r} stands beside {type(module).__qualname__} in {package_version(module)}."
        )
    return found


def masks_by_function(module: nn.Module) -> bool:
    """Tell whether a host masks padding by a function of its file, as Mamba's relatives do since transformers 5.17.

    Their code was rewritten then: what they did before differs in more than that.
    """
    return _beside(module, MASKING) is not None


def padded_left(mask: Bool[Tensor, "batch length"]) -> bool:
    """Tell whether padding stands before real tokens: what stands after them reaches none in a causal layer."""
    return bool((~mask[:, :-1] & mask[:, 1:]).any())


def unmasked_leak(module: nn.Module, mask: Bool[Tensor, "batch length"]) -> str | None:
    """Tell how padding leaks where a causal host's own function does not mask it: older ones skip a single sequence."""
    apply = _beside(module, MASKING)
    if apply is None or not padded_left(mask):
        return None
    if torch.equal(apply(torch.ones(*mask.shape, 1), mask.long())[..., 0], mask.float()):
        return None
    return f"{type(module).__name__} of {package_version(module)} does not mask a batch of {len(mask)}"


def projection_leak(module: nn.Module, mask: Bool[Tensor, "batch length"]) -> str | None:
    """Tell how padding leaks where a convolution reads what a biased projection makes of masked tokens."""
    bias = getattr(module, "in_proj").bias  # noqa: B009  a Module's attributes have no type
    if bias is not None and padded_left(mask):
        return "its input projection has a bias, which the convolution reads at padded positions"
    return unmasked_leak(module, mask)


def _beside(module: nn.Module, name: str) -> Any:
    files = (sys.modules.get(ancestor.__module__) for ancestor in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)
