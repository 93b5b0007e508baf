"""Chains of stages as products of dense matrices: the reference of the law `dense`."""

from collections.abc import Mapping
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage


def dense_sum(chains: Mapping[str, Chain], inputs: Mapping[str, Tensor]) -> Float[Tensor, "batch query output"]:
    """Return the sum over ports of the chains' outputs by `dense_run`."""
    total = sum(dense_run(chain, inputs[port]) for port, chain in chains.items())
    assert isinstance(total, Tensor)
    return total


def dense_run(chain: Chain, x: Float[Tensor, "batch key input"]) -> Float[Tensor, "batch query output"]:
    """Apply the stages of a chain, biases included, each multiplied out as a dense matrix."""
    for stage in chain:
        x = _dense(stage, x)
    return x


@singledispatch
def _dense(stage: Stage, x: Tensor) -> Tensor:
    return stage.apply(x)


@_dense.register
def _(stage: Matrix, x: Tensor) -> Tensor:
    return torch.einsum("oi,bli->blo", stage.weight, x) + (0 if stage.bias is None else stage.bias)


@_dense.register
def _(stage: Scale, x: Tensor) -> Tensor:
    channels = x.shape[2] // stage.scale.shape[2]
    return x * stage.scale.repeat_interleave(channels, dim=2) + (0 if stage.bias is None else stage.bias)


@_dense.register
def _(stage: Mix, x: Tensor) -> Tensor:
    value = x.unflatten(2, (stage.mixer.heads, -1))
    mixed = torch.einsum("bhij,bjhp->bihp", stage.mixer.materialize(), value).flatten(2)
    return mixed + (0 if stage.bias is None else stage.bias)


@_dense.register
def _(stage: Branch, x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for chain in stage.chains:
        total = total + dense_run(chain, x)
    return total
