"""Gradients inside a recorded layer, through the stages that the host's run gave.

Recorded norms, activations and gates are constants. Behind those that may depend on what they scale, the derivative of
the layer is unknown, so that only stages which are linear in the host too are pulled back through.
"""

import itertools
from collections.abc import Sequence

from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, walk

FROZEN = ("act", "gate", "norm")
"""Roles of scales that may depend on the value that they scale."""


def last_projection(op: MixerOperator) -> Matrix | None:
    """Return a layer's output projection if it is the last stage, None otherwise."""
    first, *others = (chain[-1] if chain else None for chain in op.chains.values())
    if not isinstance(first, Matrix) or any(getattr(other, "weight", None) is not first.weight for other in others):
        return None
    chain = next(iter(op.chains.values()))
    outputs = [stage for stage in walk(chain) if isinstance(stage, Matrix) and stage.role == "output"]
    return first if len(outputs) == 1 and outputs[0] is first else None


def to_cores(chain: Chain, grad: Tensor, name: str) -> tuple[Tensor, ...]:
    """Return the gradients at the outputs of a chain's parallel cores, in their order, from that at its output.

    Raises `UncoveredError` for a norm, an activation or a gate behind a core that may depend on it.
    """
    for stage in reversed(chain):
        if isinstance(stage, Mix) and stage.role == "core":
            return (grad,)
        if isinstance(stage, Branch) and _has_core(stage.chains):
            inner = (to_cores(each, grad, name) for each in stage.chains if _has_core([each]))
            return tuple(itertools.chain.from_iterable(inner))
        grad = _pulled(stage, grad, name)
    return ()


def to_projection(chain: Chain, grad: Tensor, name: str) -> Tensor:
    """Return the gradient at the input of the last output projection; that at the output of a chain without one.

    Raises `UncoveredError` for a norm, an activation or a gate behind it that may depend on it.
    """
    if not any(isinstance(stage, Matrix) and stage.role == "output" for stage in walk(chain)):
        return grad
    for stage in reversed(chain):
        grad = _pulled(stage, grad, name)
        if isinstance(stage, Matrix) and stage.role == "output":
            break
    return grad


def _pulled(stage: object, grad: Tensor, name: str) -> Tensor:
    if isinstance(stage, Branch) or (isinstance(stage, Scale) and stage.role in FROZEN and stage.of_value):
        what = "sum" if isinstance(stage, Branch) else stage.role
        raise UncoveredError(
            f"{name} is recorded, and what follows its core ({what}) is a constant in its operator, so the gradient at "
            "its core is unknown. An adapter with the layer's own code gives it (docs/adding_an_architecture.md)."
        )
    adjoint: Tensor = stage.adjoint(grad)  # type: ignore[attr-defined]
    return adjoint


def _has_core(chains: Sequence[Chain]) -> bool:
    return any(stage.role == "core" and stage.mixes for chain in chains for stage in walk(chain))
