"""Gradients inside a recorded layer, through the stages that the host's run gave.

Recorded norms, activations and gates are constants. The derivative of the layer is pulled back through the stages which
are linear in the host too, and through norms of channels, whose derivative is known. Behind activations, and gates that
may depend on what they scale, it is unknown.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage, walk

FROZEN = ("act", "gate", "norm")
"""Roles of scales that may depend on the value that they scale."""


def last_projection(op: MixerOperator) -> Matrix | None:
    """Return a layer's output projection if it is the last stage, None otherwise."""
    first, *others = (chain[-1] if chain else None for chain in op.chains.values())
    if not isinstance(first, Matrix) or any(getattr(other, "matrix", None) is not first.matrix for other in others):
        return None
    chain = next(iter(op.chains.values()))
    outputs = [stage for stage in walk(chain) if isinstance(stage, Matrix) and stage.role == "output"]
    return first if len(outputs) == 1 and outputs[0] is first else None


def to_cores(op: MixerOperator, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients at the outputs of the first port's parallel cores, in their order, from that at the output.

    Raises `UncoveredError` for what follows a core and may depend on it, but for norms.
    """
    return _to_cores(op.chains[op.ports[0]], _read(op), grad, op.name)


def _to_cores(chain: Chain, x: Tensor | None, grad: Tensor, name: str) -> tuple[Tensor, ...]:
    for stage, entering in reversed(list(zip(chain, _entering(chain, x), strict=True))):
        if isinstance(stage, Mix) and stage.role == "core":
            return (grad,)
        if isinstance(stage, Branch) and _has_core(stage.chains):
            inner = (_to_cores(each, entering, grad, name) for each in stage.chains if _has_core([each]))
            return tuple(itertools.chain.from_iterable(inner))
        grad = _pulled(stage, entering, grad, name)
    return ()


def to_projection(op: MixerOperator, grad: Tensor) -> Tensor:
    """Return the gradient at the input of the last output projection; that at the output of a chain without one.

    Raises `UncoveredError` for what follows it and may depend on it, but for norms.
    """
    chain = op.chains[op.ports[0]]
    return _to_projection(chain, _read(op), grad, op.name) if _projects(chain) else grad


def _to_projection(chain: Chain, x: Tensor | None, grad: Tensor, name: str) -> Tensor:
    for stage, entering in reversed(list(zip(chain, _entering(chain, x), strict=True))):
        if isinstance(stage, Branch):
            projecting = [each for each in stage.chains if _projects(each)]
            if len(projecting) == 1:
                return _to_projection(projecting[0], entering, grad, name)
        grad = _pulled(stage, entering, grad, name)
        if isinstance(stage, Matrix) and stage.role == "output":
            break
    return grad


def _projects(chain: Chain) -> bool:
    return any(isinstance(stage, Matrix) and stage.role == "output" for stage in walk(chain))


def _read(op: MixerOperator) -> Tensor | None:
    """Return the input of an operator with norms and one port; the values behind several ports are sums over them."""
    ((port, chain), *others) = op.chains.items()
    has_norms = any(isinstance(stage, Scale) and stage.norm_of is not None for stage in walk(chain))
    return op.inputs[port] if has_norms and not others else None


def _entering(chain: Chain, x: Tensor | None) -> Iterator[Tensor | None]:
    """Yield the input of each stage on the observed input `x`."""
    for stage in chain:
        yield x
        x = None if x is None else stage.apply(x)


def _pulled(stage: Stage, x: Tensor | None, grad: Tensor, name: str) -> Tensor:
    """Return the gradient at the input `x` of a stage."""
    may_depend = isinstance(stage, Scale) and stage.role in FROZEN and stage.of_value
    if not may_depend and not isinstance(stage, Branch):
        return stage.adjoint(grad)
    n = stage.norm_of if isinstance(stage, Scale) else None
    if isinstance(stage, Scale) and x is not None and n is not None and n * stage.scale.shape[-1] == x.shape[-1]:
        # The factor s = (sum of squares / n + constant)^(-1/2) of x has the gradient -s^3 x / n.
        along = (x * grad).unflatten(2, (-1, n)).sum(-1)
        return stage.adjoint(grad) - replace(stage, factor=stage.scale**3 * along / n).adjoint(x)
    what = "sum" if isinstance(stage, Branch) else stage.role
    raise UncoveredError(
        f"{name} is recorded, and what follows its core ({what}) is a constant in its operator, so the gradient at its "
        "core is unknown. An adapter with the layer's own code gives it (docs/adding_an_architecture.md)."
    )


def _has_core(chains: Sequence[Chain]) -> bool:
    return any(stage.role == "core" and stage.mixes for chain in chains for stage in walk(chain))
