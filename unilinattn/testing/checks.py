"""Building blocks of laws: the violation that they raise, fresh inputs, and comparisons."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.exactness import relative_error
from unilinattn.mixers import CoreMixer
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Chain, Mix, Stage
from unilinattn.testing.margins import note_margin
from unilinattn.testing.peak import peak_of
from unilinattn.testing.state import differences, model_state, process_state

GROWTH = 2.3
"""Largest growth of the bytes that a linear-time pass allocates when the length doubles."""


class LawViolation(AssertionError):
    """Raised if a law does not hold; `law` is its name, `reason` the explanation."""

    def __init__(self, law: str, reason: str) -> None:
        super().__init__(f"law {law!r} does not hold: {reason}")
        self.law, self.reason = law, reason


def require(law: str, holds: bool, message: str) -> None:
    """Raise `LawViolation` with `message` unless `holds`."""
    if not holds:
        raise LawViolation(law, message)


def require_close(
    law: str, got: Tensor, expected: Tensor, limit: float, what: str, *, scale: Tensor | None = None
) -> None:
    """Raise `LawViolation` unless two tensors have one shape and every sequence's relative error is at most `limit`.

    `scale`: the norm of each sequence by which the difference is divided; by default that of `expected`.
    """
    require(law, got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}.")
    error = relative_error(got, expected, scale=scale)
    note_margin(law, what, error, limit)
    require(law, error <= limit, f"{what}: relative error {error:.1e}, at most {limit:.0e} is accepted.")


def fresh(like: Tensor, seed: int) -> Tensor:
    """Return a standard normal tensor with the shape, dtype and device of `like`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def real_tokens(mask: Tensor | None, y: Tensor) -> Tensor:
    """Return a tensor (batch, token, channel) with zeros at padded tokens."""
    return y if mask is None else y * mask[..., None]


def variant(operator: MixerOperator, **attributes: Any) -> MixerOperator:
    """Return a copy of an operator, of the same class, with the given attributes replaced."""
    changed = copy.copy(operator)
    vars(changed).update(attributes)
    return changed


def edited(chain: Chain, edit: Callable[[Stage], Stage | None]) -> Chain:
    """Return a chain with every stage, also inside branches, replaced by `edit(stage)`; None drops the stage."""
    stages = []
    for stage in chain:
        if isinstance(stage, Branch):
            stage = replace(stage, chains=tuple(edited(inner, edit) for inner in stage.chains))
        result = edit(stage)
        if result is not None:
            stages.append(result)
    return tuple(stages)


def matrix_free(mixer: CoreMixer, law: str) -> CoreMixer:
    """Return a copy of a mixer whose `tile` and `materialize` raise `LawViolation` instead of filling the matrix."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise LawViolation(law, f"{type(mixer).__name__} fills its matrix where a pass over the sequence is needed.")

    free = copy.copy(mixer)
    vars(free).update(tile=refuse, materialize=refuse)
    return free


def without_matrices(operator: MixerOperator, law: str) -> MixerOperator:
    """Return a copy of an operator whose mixers are all `matrix_free`."""

    def edit(stage: Stage) -> Stage:
        return replace(stage, mixer=matrix_free(stage.mixer, law)) if isinstance(stage, Mix) else stage

    return variant(operator, chains={port: edited(chain, edit) for port, chain in operator.chains.items()})


def outputs(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output, in order."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    if isinstance(returned, Mapping):
        inner: Any = returned.values()
    else:
        inner = returned if isinstance(returned, (tuple, list)) else vars(returned).values()
    entries = (entry for entry in inner if isinstance(entry, (Tensor, Mapping, tuple, list)))
    return [tensor for entry in entries for tensor in outputs(entry)]


def require_linear_memory(passes: Callable[[int], Mapping[str, Callable[[], Any]]], length: int) -> None:
    """Raise `LawViolation` unless each pass allocates at most `GROWTH` times as many bytes at twice the length.

    `passes(length)` returns the passes on `length` tokens by name, see `mixer_passes` and `operator_passes`.
    """
    small, large = ({name: peak_of(run).made for name, run in passes(size).items()} for size in (length, 2 * length))
    for name, used in small.items():
        ratio = large[name] / used
        message = f"{name} allocates {ratio:.2f} times as much at {2 * length} tokens as at {length}."
        require("memory", ratio <= GROWTH, message)


def require_identity(mixed: Tensor, grad: Tensor, x: Tensor, passed: Tensor, limit: float, what: str) -> None:
    """Raise `LawViolation` unless <A x, g> = <x, A* g> for every sequence, relative to ||A x|| ||g||."""
    left, right = (mixed * grad).flatten(1).sum(1), (x * passed).flatten(1).sum(1)
    scale = mixed.flatten(1).norm(dim=1) * grad.flatten(1).norm(dim=1)
    require_close("adjoint", left[:, None], right[:, None], limit, what, scale=scale)


def require_unmoved(run: Callable[[Tensor], Tensor], value: Tensor, changed: Tensor, limit: float, what: str) -> None:
    """Raise `LawViolation` unless `run` returns the same bits for both, or close values by a Fourier transform."""
    before, after = run(value), run(changed)
    if torch.equal(before, after):
        return
    # Counting takes as long as both runs.
    require("causality", peak_of(lambda: run(value)).through_frequencies, f"{what} change what they must not.")
    scale = (value - changed).flatten(1).norm(dim=1) + before.flatten(1).norm(dim=1)
    require_close("causality", after, before, limit, f"{what} change what they must not", scale=scale)


@contextmanager
def left_as_found(model: nn.Module, law: str = "untouched") -> Iterator[None]:
    """Raise `LawViolation` if the block changes a model or the process, also if the block raises.

    Compared bit for bit: parameters, buffers and other tensors of the modules. Compared by value or identity: every
    attribute of every module, hooks and their order, attributes of the classes, `requires_grad`, gradients and
    configurations. Of the process: gradient mode and other modes, random generators, global hooks, warning filters, and
    transformers' tables of attention functions.
    """
    before, around = model_state(model), process_state()
    try:
        yield
    finally:
        for owner, changed in (
            ("the model", differences(before, model_state(model))),
            ("the process", differences(around, process_state())),
        ):
            for aspect, names in changed.items():
                raise LawViolation(law, f"{aspect} of {owner} changed: {names[:3]}.")
