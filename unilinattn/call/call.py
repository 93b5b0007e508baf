"""`Call`: one call of a host's token-mixing module, the argument of an adapter."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from typing import Any, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call.axes import LAST, Axes
from unilinattn.call.stored import Stored, matrix_of
from unilinattn.errors import UncoveredError

MASKING = "apply_mask_to_padding_states"
"""The function in the file of a host's class that sets padded tokens to zero."""


CACHES = ("cache_params", "past_key_values", "past_key_value", "layer_past", "cache", "state", "padding_cache")
"""Names of arguments with the states of earlier tokens in models and layers; operators neither read nor write them."""

GENERAL = ("cache", "state")
"""Those of `CACHES` that may also name a tensor of the input, such as the joint angles of a robot."""

BASIS = 4096
"""Unit vectors that pass through a wrapped linear layer at once."""


def is_cache(name: str, value: Any) -> bool:
    """Tell whether an argument of a model stands for states of earlier tokens, by its name and by what it is.

    The states of several layers are an object or nested; a tensor with a name of `GENERAL` is an input.
    """
    return name in CACHES and not (name in GENERAL and isinstance(value, Tensor))


@dataclass(frozen=True)
class Captured:
    """A record that an architecture's `capture` made inside a layer, with the module and the arguments of its call."""

    module: nn.Module
    arguments: Mapping[str, Any]
    record: Any


@dataclass(frozen=True)
class Call:
    """One call of a host's module, with its input in the dtype that the operator computes in.

    Attributes:
        module: the host's module, unchanged.
        name: its path in the model.
        arguments: the arguments of its `forward`, by parameter name.
        input: its first tensor argument, (batch, length, channel).
        output: its output, None before the module has run.
        seen: the records that the architecture's `capture` made during this call.
        axes: the axes of channels in the arguments and in the host's output, of which `input` and `output` are vectors.
        masks: names of arguments that are functions of the model's padding mask, which depends on no vector of a token.
    """

    module: nn.Module
    name: str
    arguments: Mapping[str, Any]
    input: Float[Tensor, "batch length channel"]
    output: Float[Tensor, "batch query out"] | None = None
    seen: tuple[Captured, ...] = ()
    axes: Axes = LAST
    masks: frozenset[str] = frozenset()

    @property
    def host(self) -> "Host":
        """A view of the module, whose missing attributes raise an error that names the package's version."""
        return Host(self.module, self.name)

    @overload
    def tensor(self, given: Tensor) -> Tensor: ...

    @overload
    def tensor(self, given: None) -> None: ...

    def tensor(self, given: Tensor | None) -> Tensor | None:
        """Return a parameter or an argument in the operator's dtype and on its device; None stays None.

        A complex tensor gets the complex dtype of that precision. With gradients enabled the result stays in the
        graph; otherwise it is a copy, so that later changes of the model's weights do not reach the operator.
        """
        if given is None:
            return None
        dtype = self.input.dtype.to_complex() if given.is_complex() else self.input.dtype
        live = torch.is_grad_enabled()
        # A tensor made in inference mode passes no gradients; its copy does.
        moved = given.to(device=self.input.device, dtype=dtype, copy=not live or given.is_inference())
        return moved if live else moved.detach()

    def stored(self, weight: Tensor) -> Stored:
        """Return a weight matrix (out, in) of the model for a stage, which holds no copy of it.

        It is cast to the operator's dtype and device at each use. With gradients enabled the result of a use stays in
        the graph.
        """
        return Stored(weight if torch.is_grad_enabled() else weight.detach(), self.input)

    def affine(self, layer: Any) -> "Affine":
        """Return the map of a linear layer, with the weight as `stored` returns it and the bias as `tensor` does.

        The weight of a convolution or a norm, which is small, is a tensor, None in a norm without one.
        """
        weight: Any = layer.weight
        is_matrix = weight is not None and weight.ndim == 2
        return Affine(self.stored(weight) if is_matrix else self.tensor(weight), self.tensor(layer.bias))

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
    """A view of a module whose missing attributes raise `UncoveredError` with the attribute and the version."""

    def __init__(self, module: nn.Module, name: str) -> None:
        """Wrap `module`, whose path in the model is `name`."""
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> Any:
        """Return the module's attribute; a linear layer comes with its effective weight (see `linear_layer`).

        Raises `UncoveredError` if this version of the host has no such attribute.
        """
        try:
            value = getattr(self._module, attribute)
            return linear_layer(value, self._module) if isinstance(value, nn.Module) else value
        except AttributeError:
            raise UncoveredError(
                f"{self._name} ({type(self._module).__name__}) has no attribute {attribute!r} in "
                f"{package_version(self._module)}: that version changed the host. Use a version that the "
                "coverage table lists, or register an adapter for this one."
            ) from None


def refusing(*options: str) -> Callable[[Call], None]:
    """Return the `check` of an adapter that does not cover calls with these options."""
    return lambda call: call.refuse(*options)


@dataclass(frozen=True)
class Affine:
    """The map x -> weight x + bias: callable on x, sliced by rows of the weight, unpacked into weight and bias."""

    weight: Float[Tensor, "out *in"] | Stored
    bias: Float[Tensor, " out"] | None

    def __call__(self, x: Float[Tensor, "*axes in"]) -> Float[Tensor, "*axes out"]:
        """Return weight x + bias."""
        return functional.linear(x, matrix_of(self.weight), self.bias)

    def __getitem__(self, rows: slice) -> "Affine":
        """Return the map to the outputs `rows`."""
        return Affine(self.weight[rows], None if self.bias is None else self.bias[rows])

    def __iter__(self) -> Iterator[Any]:
        """Yield the weight, then the bias or None."""
        yield from (self.weight, self.bias)


def linear_layer(module: nn.Module, host: nn.Module) -> Any:
    """Return a part of a host unchanged, except for a wrapped or quantised linear layer: its weight and bias.

    Adapters such as LoRA add to a layer's product, and quantised layers store their weight in another format. Both are
    affine maps of their input, so the unit vectors and the zero vector give weight and bias exactly. A layer of the
    host's own package is returned unchanged. The layer's hooks are not called, because they may record their inputs.
    """
    features = getattr(module, "in_features", None)
    if not isinstance(features, int) or is_plain(module, host):
        return module
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    basis = torch.eye(features, dtype=like.dtype, device=like.device)
    zero = module.forward(torch.zeros_like(basis[:1]))
    columns = [module.forward(rows) - zero for rows in basis.split(BASIS)]
    bias = zero[0] if bool((zero != 0).any()) else None
    return Affine(torch.cat(columns).mT.contiguous(), bias)


def is_plain(module: nn.Module, host: nn.Module) -> bool:
    """Whether a module runs the forward of torch or of the host's package on a weight stored as an ordinary tensor."""
    public = type(module).forward is nn.Linear.forward or _package(module) == _package(host)
    return public and "forward" not in vars(module) and type(getattr(module, "weight", None)) in (Tensor, nn.Parameter)


def _package(module: nn.Module) -> str:
    return type(module).__module__.split(".")[0]


def package_version(module: nn.Module) -> str:
    """Return "package version" of the package that a module's class comes from."""
    package = _package(module)
    number = getattr(sys.modules.get(package), "__version__", None) or _installed_version(package)
    return f"{package} {number or 'of unknown version'}"


@cache
def _installed_version(package: str) -> str | None:
    """Return the version of the distribution that has a package, None if no distribution has it."""
    names = packages_distributions().get(package)
    return version(names[0]) if names else None


def host_function(module: nn.Module, name: str) -> Any:
    """Return a function of the file that defines a module's class or one of its ancestors.

    Raises `UncoveredError` if no such file has it.
    """
    function = _beside(module, name)
    if function is None:
        raise UncoveredError(
            f"no function {name!r} is defined in the file of {type(module).__qualname__} in {package_version(module)}."
        )
    return function


def masks_by_function(module: nn.Module) -> bool:
    """Tell whether a host masks padding by a function of its file, as Mamba's relatives do in transformers >= 5.17.

    transformers < 5.17 has other code for these hosts, which differs in more than the mask.
    """
    return _beside(module, MASKING) is not None


def padded_left(mask: Bool[Tensor, "batch length"]) -> bool:
    """Tell whether padding precedes real tokens; in a causal layer padding after them reaches none."""
    return bool((~mask[:, :-1] & mask[:, 1:]).any())


def unmasked_leak(module: nn.Module, mask: Bool[Tensor, "batch length"]) -> str | None:
    """Describe how padding leaks if a causal host's function does not mask it, as older ones for a single sequence."""
    apply = _beside(module, MASKING)
    if apply is None or not padded_left(mask):
        return None
    if torch.equal(apply(torch.ones(*mask.shape, 1, device="cpu"), mask.long())[..., 0], mask.float()):
        return None
    return f"{type(module).__name__} of {package_version(module)} does not mask a batch of {len(mask)}"


def projection_leak(module: nn.Module, mask: Bool[Tensor, "batch length"]) -> str | None:
    """Describe how padding leaks if a convolution reads masked tokens after a projection with a bias."""
    bias = getattr(module, "in_proj").bias  # noqa: B009  a Module's attributes have no type
    if bias is not None and padded_left(mask):
        return "its input projection has a bias, which the convolution reads at padded positions"
    return unmasked_leak(module, mask)


def _beside(module: nn.Module, name: str) -> Any:
    files = (sys.modules.get(ancestor.__module__) for ancestor in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)
