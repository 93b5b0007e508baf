"""The head axis of a method's scores: the heads of its layers, and the contributions that pass through them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unilinattn.errors import OptionError, UncoveredError
from unilinattn.methods.selection import mixing_operator, only_port
from unilinattn.operator.heads import HeadContributions
from unilinattn.operator.selection import checked_heads, chosen_heads
from unilinattn.options.bases import ThroughHeads
from unilinattn.tracing.layer import Layer


@dataclass(frozen=True)
class HeadAxis:
    """The heads of a head axis, and whether a head of these layers is one channel wide."""

    heads: tuple[int, ...]
    kind: Literal["head", "channel"]


def head_axis(method: str, layers: Sequence[Layer], heads: Any, scope: str = "core") -> HeadAxis:
    """Return the axis of the heads of a scope that `heads` selects, all for None.

    Raises `UncoveredError` if the layers have different numbers of heads, and `OptionError` for heads out of range.
    """
    maps = [mixing_operator(layer).scoped_map(scope) for layer in layers]
    counts = {layer.name: scoped.heads for layer, scoped in zip(layers, maps, strict=True)}
    if len(set(counts.values())) > 1:
        first, other = layers[0], next(layer for layer in layers if counts[layer.name] != counts[layers[0].name])
        raise UncoveredError(
            f"{method}: {first.name} has {counts[first.name]} heads and {other.name} has {counts[other.name]}, so they "
            "share no head axis; pass layers=[...] with layers of one kind, or one of them."
        )
    kind: Literal["head", "channel"] = "channel" if all(scoped.width == 1 for scoped in maps) else "head"
    return HeadAxis(selected_heads(method, layers[0], heads, scope), kind)


def selected_heads(method: str, layer: Layer, heads: Any, scope: str = "core") -> tuple[int, ...]:
    """Return the heads of a layer that `heads` selects, counted from 0, all for None.

    Raises `OptionError` for heads out of range or named twice.
    """
    total = mixing_operator(layer).num_heads(scope)
    selection = heads if heads is None or isinstance(heads, int) else list(heads)
    try:
        indices = tuple(chosen_heads(checked_heads(selection, total), total))  # type: ignore[arg-type]  # no reduction
    except OptionError as error:
        raise OptionError(f"{method}, {layer.name}: {error}") from None
    if len(set(indices)) < len(indices):
        raise OptionError(f"{method}: heads={selection} names a head twice; name each one once.")
    return indices


def through_heads(options: ThroughHeads, layer: Layer) -> HeadContributions:
    """Return the contributions through heads of a layer's core, each apart if `by_head`, else summed."""
    heads = selected_heads(options.name, layer, options.heads)
    return HeadContributions.of(only_port(layer), heads, joint=not options.by_head)
