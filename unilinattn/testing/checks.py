"""What laws are made of: the violation they raise, fresh inputs, and counters of what an operation did."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unilinattn.mixers import CoreMixer
from unilinattn.operator import MixerOperator
from unilinattn.stages import Branch, Chain, Mix, Stage
from unilinattn.testing.tolerances import relative_error

GROWTH = 2.3
"""Largest factor by which what a linear-time pass allocates grows when the length doubles."""


class LawViolation(AssertionError):
    """A law does not hold; `law` is its name, `reason` says why."""

    def __init__(self, law: str, reason: str) -> None:
        super().__init__(f"law {law!r} does not hold: {reason}")
        self.law, self.reason = law, reason


def require(law: str, holds: bool, message: str) -> None:
    """Raise `LawViolation` unless the condition holds."""
    if not holds:
        raise LawViolation(law, message)


def require_close(
    law: str, got: Tensor, expected: Tensor, limit: float, what: str, *, scale: Tensor | None = None
) -> None:
    """Raise `LawViolation` unless two tensors have one shape and agree to a relative error, sequence by sequence."""
    require(law, got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}.")
    error = relative_error(got, expected, scale=scale)
    require(law, error <= limit, f"{what}: relative error {error:.1e}, at most {limit:.0e} is accepted.")


def fresh(like: Tensor, seed: int) -> Tensor:
    """Draw a normal tensor of the same shape, dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def variant(operator: MixerOperator, **attributes: Any) -> MixerOperator:
    """Return a copy of an operator, of the same class, with some of its attributes replaced."""
    changed = copy.copy(operator)
    vars(changed).update(attributes)
    return changed


def edited(chain: Chain, edit: Callable[[Stage], Stage | None]) -> Chain:
    """Return a chain with every stage outside branches and inside them replaced by `edit(stage)`, None to drop it."""
    kept = []
    for stage in chain:
        if isinstance(stage, Branch):
            stage = replace(stage, chains=tuple(edited(inner, edit) for inner in stage.chains))
        result = edit(stage)
        if result is not None:
            kept.append(result)
    return tuple(kept)


def matrix_free(mixer: CoreMixer, law: str) -> CoreMixer:
    """Return a copy of a mixer whose `tile` and `materialize` raise `LawViolation` instead of filling the matrix."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise LawViolation(law, f"{type(mixer).__name__} fills its matrix where a pass over the sequence is needed.")

    free = copy.copy(mixer)
    vars(free).update(tile=refuse, materialize=refuse)
    return free


def without_matrices(operator: MixerOperator, law: str) -> MixerOperator:
    """Return a copy of an operator none of whose mixers can fill its matrix."""

    def edit(stage: Stage) -> Stage:
        return replace(stage, mixer=matrix_free(stage.mixer, law)) if isinstance(stage, Mix) else stage

    return variant(operator, chains={port: edited(chain, edit) for port, chain in operator.chains.items()})


def outputs(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors in what a model returned, in order."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    if isinstance(returned, Mapping):
        inner: Any = returned.values()
    else:
        inner = returned if isinstance(returned, (tuple, list)) else vars(returned).values()
    parts = (part for part in inner if isinstance(part, (Tensor, Mapping, tuple, list)))
    return [tensor for part in parts for tensor in outputs(part)]


class Operations(TorchDispatchMode):
    """Counts, while it is entered, the operations that run and the bytes of every new tensor.

    Bytes are added up and never subtracted: what is linear here is linear at its peak, and in time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Run the operation and note it."""
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = {_storage(t): t.untyped_storage().nbytes() for t in tree_leaves(result) if isinstance(t, Tensor)}
        self.bytes += sum(size for storage, size in made.items() if storage not in known)
        return result

    @property
    def through_frequencies(self) -> bool:
        """Whether a Fourier transform ran, so that every output was touched by every input, up to rounding."""
        return any("fft" in name for name in self.names)


def require_linear_memory(passes: Callable[[int], Mapping[str, Callable[[], Any]]], length: int) -> None:
    """Raise `LawViolation` unless each pass allocates at most `GROWTH` times as much at twice the length.

    `passes(length)` gives the passes by name for that many tokens, see `mixer_passes` and `operator_passes`.
    """
    small, large = (
        {name: operations(run).bytes for name, run in passes(size).items()} for size in (length, 2 * length)
    )
    for name, used in small.items():
        ratio = large[name] / used
        message = f"{name} allocates {ratio:.2f} times as much at {2 * length} tokens as at {length}."
        require("memory", ratio <= GROWTH, message)


def operations(run: Callable[[], Any]) -> Operations:
    """Run a function without gradients and return what it did."""
    with torch.no_grad(), Operations() as counted:
        run()
    return counted


def require_identity(mixed: Tensor, grad: Tensor, x: Tensor, passed: Tensor, limit: float, what: str) -> None:
    """Raise `LawViolation` unless <A x, g> = <x, A* g>, each sequence's two numbers relative to the norms in them."""
    left, right = (mixed * grad).flatten(1).sum(1), (x * passed).flatten(1).sum(1)
    scale = mixed.flatten(1).norm(dim=1) * grad.flatten(1).norm(dim=1)
    require_close("adjoint", left[:, None], right[:, None], limit, what, scale=scale)


def require_unmoved(run: Callable[[Tensor], Tensor], given: Tensor, changed: Tensor, limit: float, what: str) -> None:
    """Raise `LawViolation` unless `run` returns the same bits for both, or nearly so through a Fourier transform."""
    before, after = run(given), run(changed)
    if operations(lambda: run(given)).through_frequencies:
        scale = (given - changed).flatten(1).norm(dim=1) + before.flatten(1).norm(dim=1)
        require_close("causality", after, before, limit, f"{what} change what they must not", scale=scale)
    else:
        require("causality", torch.equal(before, after), f"{what} change what they must not.")


@contextmanager
def left_as_found(model: nn.Module, law: str = "untouched") -> Iterator[None]:
    """Raise `LawViolation` if the block, however it ends, changes anything about a model.

    Compared bit for bit: parameters and buffers, and whether they are the same tensors; compared as they are: hooks,
    `requires_grad`, gradients, training flags, forward methods, attention implementations.
    """
    before = _state(model)
    try:
        yield
    finally:
        after = _state(model)
        for aspect, old in before.items():
            new = after[aspect]
            changed = [name for name in {**old, **new} if not _same(old.get(name), new.get(name))]
            require(law, not changed, f"{aspect} of the model changed: {changed[:3]}.")


def _state(model: nn.Module) -> Mapping[str, dict[str, Any]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = dict(model.named_modules())
    configs = {name: getattr(module, "config", None) for name, module in modules.items()}
    return {
        "tensors": {name: t.detach().clone() for name, t in tensors.items()},
        "identity": {name: id(t) for name, t in tensors.items()},
        "requires_grad": {name: t.requires_grad for name, t in tensors.items()},
        "gradients": {name: None if t.grad is None else t.grad.clone() for name, t in tensors.items()},
        "training flags": {name: module.training for name, module in modules.items()},
        "hooks": {name: _hooks(module) for name, module in modules.items()},
        "forward methods": {name: vars(module).get("forward") for name, module in modules.items()},
        "attention implementation": {n: getattr(c, "_attn_implementation", None) for n, c in configs.items()},
    }


def _hooks(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(value) for name, value in vars(module).items() if name.endswith("_hooks")}


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.dtype == after.dtype and torch.equal(before, after)
    return type(before) is type(after) and before == after


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
