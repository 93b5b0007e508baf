"""Numbers of tensors in one run and their changes in others, for the check that tokens do not mix outside of layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.discovery.perturbation import projection

Shape = tuple[int, int]
"""(batch, tokens) of a stream."""

LINES, LONGEST, SAMPLE = 64, 1 << 12, 1 << 10
"""Compared lines of attention scores, entries of a line, and elements of a tensor between modules."""

RARE = 0.05
"""Share of the lines of scores that may follow different halves by chance, such as those of a router."""

MASKED = 9e3
"""Magnitude above which a score is a mask."""


@dataclass
class Entry:
    """Numbers of a tensor in the unperturbed run, and their changes when each half is perturbed.

    Attributes:
        values: the numbers.
        size: their magnitude, to which changes are relative.
        accepted: the largest relative change by rounding.
        shape: the shape of the tensor.
        changes: the relative change of each number, for each half.
    """

    values: Tensor
    size: Tensor
    accepted: float
    shape: tuple[int, ...]
    changes: list[Tensor] = field(default_factory=list)

    def compare(self, number: int, values: Tensor) -> None:
        """Record the changes of the run `number`.

        A tensor of another shape, and one that a run did not make, such as those of an expert, count as unchanged.
        """
        self.changes += [torch.zeros_like(self.values)] * (number - len(self.changes))
        if values.shape != self.values.shape:
            return
        change = (values - self.values).abs() / self.size.clamp_min(torch.finfo(self.size.dtype).tiny)
        same = (values == self.values) | (values.isnan() & self.values.isnan())
        self.changes.append(change.masked_fill(same, 0).nan_to_num(nan=torch.inf))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the changes of each pair of halves."""
        return list(zip(self.changes[::2], self.changes[1::2], strict=False))

    def moved_by_both(self) -> list[int]:
        """Return the numbers of the runs of those pairs of which both runs changed a number at all."""
        numbers = range(0, 2 * len(self.pairs()), 2)
        moving = [n for n in numbers if self.changes[n].any() and self.changes[n + 1].any()]
        return [number for n in moving for number in (n, n + 1)]

    @property
    def mixed(self) -> bool:
        """Whether both halves of a stream move one number."""
        return any(bool(((a > self.accepted) & (b > self.accepted)).any()) for a, b in self.pairs())

    @property
    def over_tokens(self) -> bool:
        """Whether numbers along the last axis follow different halves: much one of them, and the other not at all."""
        return any(self._differ(*pair) for pair in self.pairs())

    def _differ(self, first: Tensor, second: Tensor) -> bool:
        # Between both limits are small changes, by tokens far away, which may be above one limit by chance.
        much, little = self.accepted**0.5, self.accepted / 100
        by_first, by_second = first > much, second > much
        only_first, only_second = by_first & (second <= little), by_second & (first <= little)
        apart = (by_first.any(-1) & only_second.any(-1)) | (by_second.any(-1) & only_first.any(-1))
        return bool(apart.sum() > RARE * (by_first | by_second).any(-1).sum())

    def of_other_tokens(self, halves: Mapping[Shape, Bool[Tensor, "batch token"]]) -> bool:
        """Whether a token moves with tokens of its stream in the other half."""
        for (shape, half), (first, second) in zip(halves.items(), self.pairs(), strict=False):
            if self._is_stream(shape, half, first):
                half = half.to(first.device)
                first, second = first * ~half, second * half
                if bool(((first > self.accepted) | (second > self.accepted)).any()):
                    return True
        return False

    def of_several_tokens(self, halves: Mapping[Shape, Bool[Tensor, "batch token"]]) -> bool:
        """Whether a token moves with both halves of another stream."""
        pairs = zip(halves.items(), self.pairs(), strict=False)
        return any(
            bool(((first > self.accepted) & (second > self.accepted)).any())
            for (shape, half), (first, second) in pairs
            if not self._is_stream(shape, half, first)
        )

    def _is_stream(self, shape: Shape, half: Tensor, change: Tensor) -> bool:
        return shape == self.shape[:2] and half.shape == change.shape


def _argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs[name]


def _scores(args: Any, kwargs: Any) -> Tensor:
    """Return the operand of a softmax with the axis of its sum last."""
    x: Tensor = _argument(args, kwargs, 0, "input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return x.movedim(dim if isinstance(dim, int) else -1, -1)


def _projected(keys: Float[Tensor, "*batch key channel"]) -> Float[Tensor, "*batch key"]:
    return projection(keys.detach().to(torch.promote_types(keys.dtype, torch.float32)))


ATTENTION: Mapping[str, Callable[[Any, Any], Tensor]] = {
    "softmax": _scores,
    "scaled_dot_product_attention": lambda args, kwargs: _projected(_argument(args, kwargs, 1, "key")),
    "flex_attention": lambda args, kwargs: _projected(_argument(args, kwargs, 1, "key")),
    "multi_head_attention_forward": lambda args, kwargs: _projected(_argument(args, kwargs, 1, "key").movedim(0, -2)),
    "_native_multi_head_attention": lambda args, kwargs: _projected(_argument(args, kwargs, 1, "key")),
    "_transformer_encoder_layer_fwd": lambda args, kwargs: _projected(_argument(args, kwargs, 0, "src")),
}
"""For each function of torch that attends: its scores, or a number for each key, with the axis of the keys last."""


def lines(x: Float[Tensor, "*batch key"]) -> tuple[Tensor, Tensor]:
    """Return some lines of scores, and the size of their finite entries."""
    lines = x.reshape(-1, x.shape[-1])
    lines = lines[:: len(lines) // LINES + 1, :LONGEST].clone()
    # A host masks a pair by -10,000 or by a number of larger magnitude.
    scores = lines.abs().masked_fill(lines.abs() > MASKED, 0)
    return lines, lines.abs() + scores.mean(-1, keepdim=True)


def rows(
    x: Float[Tensor, "*batch token channel"],
) -> tuple[Float[Tensor, "batch token"], Float[Tensor, "batch token"]]:
    """Return a projection and the norm of each token; packed ones, (token, channel), are one sequence."""
    vectors = x[None] if x.ndim == 2 else x.flatten(1, -2)
    return projection(vectors), torch.linalg.vector_norm(vectors, dim=-1)


def sample(x: Float[Tensor, "*axes"]) -> tuple[Float[Tensor, " element"], Float[Tensor, ""]]:
    """Return some elements, and their root mean square."""
    elements = torch.take(x, _places(x.numel()).to(x.device))
    finite = torch.where(elements.abs() < 1e30, elements, torch.zeros_like(elements))
    return elements, finite.square().mean().sqrt()


def elements(x: Float[Tensor, "*axes"]) -> tuple[Float[Tensor, " element"], Float[Tensor, ""]]:
    """Return all elements, and their root mean square."""
    return x.flatten(), x.square().mean().sqrt()


@lru_cache(maxsize=64)
def _places(count: int) -> Int[Tensor, " element"]:
    if count <= SAMPLE:
        return torch.arange(count, device="cpu")
    return torch.randint(count, (SAMPLE,), generator=torch.Generator().manual_seed(0), device="cpu")
