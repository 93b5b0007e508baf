"""`run`: run a host model once, and restore the model and the process afterwards."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.host.inputs import call_host
from unilinattn.host.isolation import in_gradient_mode, isolated, with_own_random_numbers
from unilinattn.host.recorder import refuse_dropout
from unilinattn.host.wrappers import plain_run
from unilinattn.kernels.precision import unrounded_products


def run(
    model: nn.Module,
    arguments: Mapping[str, Any] | Callable[[], Any],
    *,
    gradients: bool = False,
    mixers: AbstractContextManager[object] | None = None,
    observer: AbstractContextManager[object] | None = None,
    seed: Tensor | None = None,
    after: Callable[[], object] | None = None,
) -> Any:
    """Return the output of a model on `arguments`, without compiled code, checkpoints, caches and TF32.

    Args:
        model: the host model.
        arguments: the arguments of its forward by name, or a function that runs the model.
        gradients: whether the run records a graph.
        mixers: the context in which modules compute otherwise than by the host's forwards.
        observer: the context that follows the run, such as `Observer.attached`; it is entered last.
        seed: the state of the random number generator before the run, whose draws then change no later ones.
        after: a function that is called after the run and before the model is restored, since it may run modules.

    Raises `ModelStateError` at active dropout, and the errors of `isolated` and `call_host`.
    """
    compute = arguments if callable(arguments) else partial(call_host, model, arguments)

    def inside() -> Any:
        refuse_dropout(model)
        if seed is not None:
            torch.set_rng_state(seed)
        with plain_run(model), unrounded_products(), mixers or nullcontext(), observer or nullcontext():
            output = compute()
        if after is not None:
            after()
        return output

    def whole() -> Any:
        return in_gradient_mode(gradients, lambda: isolated(model, inside))

    if seed is None:
        return whole()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return with_own_random_numbers(devices, whole)
