"""Parameters of a host during a run."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def constant_parameters(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model require a gradient, so that nothing is kept for the parameters' gradients."""
    live = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in live:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in live:
            parameter.requires_grad_(True)
