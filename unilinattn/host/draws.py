"""Random numbers that a host draws: each later run of a traced model draws those of its trace."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

States = Mapping[torch.device, Tensor]
"""The states of the random number generators of devices."""

_states: ContextVar[States | None] = ContextVar("unilinattn.draws", default=None)


def generator_states(model: nn.Module) -> dict[torch.device, Tensor]:
    """Return the states of the generators from which a model may draw: the CPU's and those of its CUDA devices."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    others = {device: torch.cuda.get_rng_state(device) for device in devices}
    return {torch.device("cpu"): torch.get_rng_state(), **others}


def drawn_from(before: States, model: nn.Module) -> States | None:
    """Return the states `before` a run if the run drew random numbers, else None."""
    after = generator_states(model)
    return None if all(torch.equal(state, after[device]) for device, state in before.items()) else before


@contextmanager
def drawing(states: States | None) -> Iterator[None]:
    """Let each call of a host inside begin with these states of the generators; None changes nothing."""
    token = _states.set(states if states is not None else _states.get())
    try:
        yield
    finally:
        _states.reset(token)


@contextmanager
def same_draws() -> Iterator[None]:
    """Begin the call of a host inside with the states of `drawing`, and restore the generators after it."""
    states = _states.get()
    if states is None:
        yield
        return
    before = {device: _state(device) for device in states}
    try:
        _set(states)
        yield
    finally:
        _set(before)


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set(states: States) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
