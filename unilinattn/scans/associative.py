"""Associative scans of other packages, whose operator may be a linear recurrence h_t = a_t h_{t-1} + b_t.

The functions of a scan halve its sequence again and again, so a recorded one has as many stages as tokens and more. The
recurrence is one core mixer. JAX's `lax.associative_scan` is the model of all of them; S5 (Smith, Warrington and
Linderman, 2023, Appendix H) scans pairs (a, b) by (a_i, b_i) . (a_j, b_j) = (a_j a_i, a_j b_i + b_j).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from unilinattn.errors import UncoveredError
from unilinattn.mixers import CoreMixer, DiagonalDecay, Reversed
from unilinattn.rules.mixing_functions import register_mixing_function, register_plain_function

SMALLEST = 1e-30
"""The smallest decay: products of smaller ones are subnormal numbers in float32."""


def linear_recurrence(
    decay: Float[Tensor, "batch token channel"], drive: Float[Tensor, "batch token channel"], reverse: bool = False
) -> Float[Tensor, "batch token channel"]:
    """Return h_t = decay_t h_{t-1} + drive_t, with h = 0 before the first token; `reverse` starts at the last token."""
    decay, drive = (value.flip(1) if reverse else value for value in (decay, drive))
    state, states = torch.zeros_like(drive[:, 0]), []
    for token in range(drive.shape[1]):
        state = decay[:, token] * state + drive[:, token]
        states.append(state)
    result = torch.stack(states, 1)
    return result.flip(1) if reverse else result


@register_mixing_function("unilinattn.scans.associative.linear_recurrence", carried="drive", channelwise=True)
def diagonal(decay: Tensor, reverse: bool) -> CoreMixer:
    """A decay of each channel; its signs are those of a query and a key, whose product is that of the signs between."""
    size = decay.abs()
    # The modulus of a rotation is 1 up to rounding.
    if bool((size > 1 + 16 * torch.finfo(size.dtype).eps).any()):
        raise UncoveredError(
            f"a linear recurrence with a decay of {float(size.amax()):.3g}, and operators are written for at most 1"
        )
    decay, size = (value.flip(1) if reverse else value for value in (decay, size))
    sign = torch.where(decay < 0, -1.0, 1.0).to(decay).cumprod(1)[..., None].detach()
    mixer = DiagonalDecay(sign, sign, size.clamp(SMALLEST, 1).log()[..., None])
    return Reversed(mixer) if reverse else mixer


@register_plain_function("s5.jax_compat.associative_scan")
def along_axis(operator: Callable[..., Any], elems: Any, axis: int = 0, reverse: bool = False) -> Any:
    """The scan of s5-pytorch."""
    return scanned(operator, elems, axis, reverse)


@register_plain_function(
    "assoc_scan.assoc_scan.associative_scan", "gateloop_transformer.associative_scan.associative_scan"
)
def along_tokens(operator: Callable[..., Any], elems: Any) -> Any:
    """The scan of assoc-scan and gateloop-transformer, along the axis of tokens."""
    return scanned(operator, elems, 1, False)


@register_plain_function("torch._higher_order_ops.associative_scan.associative_scan")
def of_torch(combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, **options: Any) -> Any:
    """The scan of torch, which compiles its operator."""
    return scanned(combine_fn, xs, dim, reverse)


def scanned(operator: Callable[..., Any], elements: Any, axis: int, reverse: bool) -> Any:
    """Return an associative scan along an axis, by a linear recurrence if the operator is one, else by a loop."""
    values, structure = tree_flatten(elements)
    values = [value.movedim(axis, 0) for value in values]
    if is_recurrence(operator, values, structure):
        decay, drive = values
        results = _recurrence(decay, drive, reverse)
    else:
        results = _loop(operator, values, structure, reverse)
    return tree_unflatten([result.movedim(0, axis) for result in results], structure)


def is_recurrence(operator: Callable[..., Any], values: Sequence[Tensor], structure: Any) -> bool:
    """Tell whether an operator combines pairs (a, b) to (a_j a_i, a_j b_i + b_j), by its value for random numbers."""
    if len(values) != 2 or not all(value.is_floating_point() or value.is_complex() for value in values):
        return False
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        # Two forms of the sum round differently in bfloat16.
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like[:1].shape, dtype=dtype, generator=generator, device="cpu").to(like.device)

    (a, b), (later, more) = first, second = [[drawn(value) for value in values] for _ in range(2)]
    combined, _ = tree_flatten(operator(*(tree_unflatten(pair, structure) for pair in (first, second))))
    expected = (later * a, later * b + more)
    return len(combined) == 2 and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, atol=1e-5)
        for x, y in zip(combined, expected, strict=True)
    )


def _recurrence(decay: Tensor, drive: Tensor, reverse: bool) -> list[Tensor]:
    """Return the products of the decays, and the states, along the first axis."""

    def products(value: Tensor) -> Tensor:
        return value.flip(0).cumprod(0).flip(0) if reverse else value.cumprod(0)

    if not decay.is_complex() and not drive.is_complex():
        return [products(decay), _states(decay, drive, reverse)]
    # With a = |a| turn, the states divided by the product of all turns have real decays.
    size = decay.abs()
    turn = products(torch.where(size > SMALLEST, decay / size.clamp_min(SMALLEST), 1.0))
    turned = drive * turn.conj()
    states = torch.complex(_states(size, turned.real, reverse), _states(size, turned.imag, reverse))
    return [products(decay), states * turn]


def _states(decay: Tensor, drive: Tensor, reverse: bool) -> Tensor:
    shape = torch.broadcast_shapes(decay.shape, drive.shape)
    decay, drive = (value.expand(shape).reshape(*shape[:2], -1).movedim(0, 1) for value in (decay, drive))
    return linear_recurrence(decay, drive, reverse).movedim(1, 0).reshape(shape)


def _loop(operator: Callable[..., Any], values: Sequence[Tensor], structure: Any, reverse: bool) -> list[Tensor]:
    """Combine the first elements, then these with the next one, and so on."""
    values = [value.flip(0) for value in values] if reverse else values
    steps = [tree_unflatten([value[at : at + 1] for value in values], structure) for at in range(len(values[0]))]
    combined = [steps[0]]
    for step in steps[1:]:
        combined.append(operator(combined[-1], step))
    results = [torch.cat(column) for column in zip(*(tree_flatten(step)[0] for step in combined), strict=True)]
    return [result.flip(0) for result in results] if reverse else results
