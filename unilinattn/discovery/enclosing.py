"""Which module around what mixes tokens is a layer: the one that takes tokens and returns them.

Names of classes are not read.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from unilinattn.call.axes import POOLS
from unilinattn.discovery.completeness import Leak
from unilinattn.discovery.unknown import holder, is_basic, only_moves, rearranges
from unilinattn.host.module_calls import CallRecord
from unilinattn.registry import UNREGISTERED

ATTENTION = "attention"
"""Name of the adapter of softmax attention, which reads the vectors that are recorded with what is around it."""


@dataclass(frozen=True)
class UnregisteredMixer:
    """A module without an adapter that moves information between tokens.

    `holds_layers` says that registered layers run inside it, so that it cannot become an opaque layer.
    """

    path: str
    module: nn.Module
    holds_layers: bool
    leak: Leak | None = None


def wrappers(layers: Sequence[CallRecord]) -> list[str]:
    """Return the paths of modules that add their input to the output of an attention, and norm the sum, as BERT's does.

    Without a sum outside of it, the module around the attention is the layer.
    """
    wrapped = (layer for layer in layers if layer.site is None and layer.shares_input and layer.parent is not None)
    names = dict.fromkeys(layer.parent.name for layer in wrapped if is_attention(layer) and layer.parent is not None)
    return [name for name in names if name and not name.rpartition(".")[2].isdigit()]


def is_attention(layer: CallRecord) -> bool:
    """Tell whether a layer has the adapter of softmax attention."""
    return layer.architecture is not None and layer.architecture.name == ATTENTION


def layer_at(
    model: nn.Module,
    mixer: UnregisteredMixer,
    layers: Sequence[CallRecord],
    convolutions: Collection[str],
    around: Collection[str],
) -> str | None:
    """Return the path of the module around a leak that takes tokens and returns them; None if it holds layers.

    It may hold `convolutions` and one other layer that can be recorded with it. Where it holds more, a convolution, a
    pool or a norm in it is the layer, or else the module, if it holds only convolutions and modules `around` some.
    """
    if mixer.leak is None:
        return _around(model, mixer, layers)
    path = leaf = mixer.leak.module
    recorded = {x.name for x in layers if _may_be_a_part(x)}
    while path and is_basic(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    inside = {layer.name for layer in layers if layer.name == path or layer.name.startswith(f"{path}.")}
    is_possible = path and path not in inside and inside <= recorded
    if is_possible and len(inside - set(convolutions)) < 2:
        return path
    if is_convolution(model, leaf) and leaf not in recorded:
        return leaf
    return path if is_possible and inside <= {*convolutions, *around} else None


def is_convolution(model: nn.Module, path: str) -> bool:
    """Tell whether the module at a path is a convolution, a pool or a norm over pixels."""
    kinds = (nn.modules.conv._ConvNd, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm, *POOLS)
    return isinstance(model.get_submodule(path), kinds)


def _around(model: nn.Module, mixer: UnregisteredMixer, layers: Sequence[CallRecord]) -> str | None:
    """Return the path of the module that is a layer in place of a mixer and of the recorded layers in it, if any.

    It is a mixer that mixes tokens outside of these layers too, such as one that shifts them before an attention, or
    the module that calls a mixer which only rearranges axes. Around several attentions with an adapter it is no layer.
    """
    path = holder(model, mixer.path, mixer.module, rearranges)[0] if only_moves(mixer.module) else mixer.path
    if not path or (path == mixer.path and not mixer.holds_layers):
        return None
    inside = [layer for layer in layers if layer.name == path or layer.name.startswith(f"{path}.")]
    return path if all(map(_may_be_a_part, inside)) and sum(map(is_attention, inside)) < 2 else None


def _may_be_a_part(layer: CallRecord) -> bool:
    """Tell whether a layer can be recorded with what is around it: it has no adapter, or softmax attention's."""
    return is_attention(layer) or (layer.architecture is not None and layer.architecture.name == UNREGISTERED)


def alike(model: nn.Module, path: str) -> list[str]:
    """Return the path of a module, and those of modules like it in other blocks of the same lists.

    They are of its class, and the modules in them are of the classes of those in it. A convolution of single tokens is
    not like one of several.
    """

    def kind(path: str, module: nn.Module) -> tuple[Any, ...]:
        inner = [(type(each).__qualname__, _has_taps(each)) for each in module.modules()]
        return [name for name in path.split(".") if not name.isdigit()], inner

    cls, wanted = type(model.get_submodule(path)), kind(path, model.get_submodule(path))
    return [other for other, module in model.named_modules() if type(module) is cls and kind(other, module) == wanted]


def _has_taps(module: nn.Module) -> bool:
    """Tell whether a module has a kernel of more than one entry."""
    size = getattr(module, "kernel_size", 1)
    return prod(size if isinstance(size, tuple) else (size,)) > 1
