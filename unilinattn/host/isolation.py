"""Run a host model, one run at a time, and restore the model and the process afterwards.

A run attaches hooks, replaces forwards, swaps weights and fills process-wide tables. `Found.restore` undoes all of this
by comparison with a snapshot taken before the first change. It does not depend on the changes that were made, so a run
may be interrupted anywhere by Ctrl-C, and so may the restoration: it is idempotent and called twice.
"""

import threading
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar, copy_context
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from unilinattn import progress
from unilinattn.call import attention_interface as interface
from unilinattn.call.entries import Entries
from unilinattn.errors import ModelStateError, UncoveredError

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

LOCK = threading.RLock()
"""Lock of a run under hooks, some of whose replacements are process-wide: a second thread waits.

A thread acquires it once, so that `release` can be repeated; a run inside a run does not acquire it again.
"""

_run: ContextVar[object] = ContextVar("unilinattn.run", default=None)


def isolated(model: nn.Module, run: Callable[[], Result]) -> Result:
    """Return `run()` and restore the model and the process to their state before it, also after an exception.

    Restores attributes, parameters, buffers, submodules and hooks of every module, their configurations, transformers'
    attention tables, the gradient mode, torch function modes and context variables. A second thread waits.

    Raises `ModelStateError` if the run wrote into a parameter.
    """

    def inside() -> Result:
        _run.set(object())
        return run()

    def restored() -> Result:
        snapshot = Found(model)
        result = finished(lambda: copy_context().run(inside), snapshot.restore)
        snapshot.require_same_parameters()
        return result

    def locked() -> Result:
        LOCK.acquire()
        return restored()

    return restored() if owned() else finished(locked, release)


def owned() -> bool:
    """Tell whether this thread holds the lock."""
    # No public method of the lock tells; threading.Condition calls this one too.
    is_owned: bool = LOCK._is_owned()  # type: ignore[attr-defined]
    return is_owned


def release() -> None:
    """Release the lock if this thread holds it; may be interrupted and repeated."""
    if owned():
        LOCK.release()


def current_run() -> object:
    """Return a token of the isolated run that calls this function, None outside a run and in other threads."""
    return _run.get()


def outside_host(call: Callable[[], Result]) -> Result:
    """Return `call()`, for which the context variables of other packages have their defaults.

    transformers keeps the hidden states of a running model in one: what calls a module of that model once more, inside
    the run, would add to them.
    """
    context = Context()
    for variable, value in copy_context().items():
        if variable.name.startswith("unilinattn."):
            context.run(variable.set, value)
    return context.run(call)


def in_gradient_mode(enabled: bool, compute: Callable[[], Result]) -> Result:
    """Return `compute()` with gradients enabled or disabled and inference mode off; restore both, also if interrupted.

    Tensors made by `compute` can be used anywhere. No context manager sets the modes: after an interrupt its end could
    run as late as the release of the traceback, and change the modes of that moment.
    """
    before = torch.is_grad_enabled()

    def run() -> Result:
        torch.set_grad_enabled(enabled)
        return compute()

    def outside_inference() -> Result:
        with torch.inference_mode(False):
            return run()

    outermost = outside_inference if torch.is_inference_mode_enabled() else run
    if enabled:
        return with_gradients(lambda: finished(outermost, lambda: torch.set_grad_enabled(before)))
    return finished(outermost, lambda: torch.set_grad_enabled(before))


def with_gradients(compute: Callable[[], Result]) -> Result:
    """Return `compute()`; raise `UncoveredError` if the model writes over what its gradient needs."""
    try:
        return compute()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UncoveredError(
            "the model writes in place into a tensor that its gradient needs, so it has no gradient. Write out of "
            "place, such as state = state * decay instead of state.mul_(decay)."
        ) from error


def runs_in_gradient_mode(enabled: bool) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function whose calls run `in_gradient_mode`."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return in_gradient_mode(enabled, lambda: function(*args, **kwargs))

        return run

    return decorate


def with_own_random_numbers(devices: Iterable[torch.device], compute: Callable[[], Result]) -> Result:
    """Return `compute()` and restore the random number generators of the CPU and of the CUDA `devices`."""
    before, others = torch.get_rng_state(), [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(before)
        for device, state in others:
            torch.cuda.set_rng_state(state, device)

    return finished(compute, restore)


def seed_generators(seed: int, model: nn.Module) -> None:
    """Seed the random number generators that a run of a model may use: those of all devices, or of the CPU.

    `torch.manual_seed` queues a call, with its stack, for each kind of device that is not initialised.
    """
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    (torch.default_generator.manual_seed if on_cpu else torch.manual_seed)(seed)


def finished(run: Callable[[], Result], restore: Callable[[], object]) -> Result:
    """Return `run()` and complete an idempotent `restore()`, also if Ctrl-C interrupts either of them.

    The interrupt can arrive on the line that calls `restore` or inside it, so a second call follows. A second interrupt
    during the restoration, which takes milliseconds, may end it early.
    """
    try:
        try:
            return run()
        finally:
            restore()
    finally:
        restore()


class Found:
    """A snapshot of a model and of the process at construction, which it can restore."""

    def __init__(self, model: nn.Module) -> None:
        """Take the snapshot, which copies buffers and other tensors that are not parameters."""
        modules = list(model.modules())
        objects = [vars(owner) for owner in (*modules, *interface.configurations(model))]
        objects.append(progress.scope())
        self._objects = [(attributes, dict(attributes)) for attributes in objects]
        values = {id(value): value for attributes in objects for value in attributes.values()}
        containers: list[Any] = [value for value in values.values() if isinstance(value, (dict, list, set))]
        # Most of a module's ten tables of hooks are empty.
        self._empty = [container for container in containers if not container]
        self._containers = [(each, _copy(each)) for each in (*filter(None, containers), interface.chosen)]
        values |= {id(buffer): buffer for module in modules for buffer in module._buffers.values()}
        copied = [t for t in values.values() if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        # Kernels of norms write their running statistics and do not count it.
        uncounted = {id(buffer) for module in modules if module.training for buffer in module._buffers.values()}
        versions = [None if id(tensor) in uncounted else _version(tensor) for tensor in copied]
        self._tensors = [(t, version, t.detach().clone()) for t, version in zip(copied, versions, strict=True)]
        self._parameters = [(name, p, _version(p)) for name, p in model.named_parameters()]
        self._entries = Entries(interface.tables())
        self._gradients = torch.is_grad_enabled()
        self._modes = len(_get_current_function_mode_stack())
        self._restored = False

    def restore(self) -> None:
        """Restore everything that differs from the snapshot; may be interrupted and repeated."""
        if self._restored:
            return
        torch.set_grad_enabled(self._gradients)
        while len(_get_current_function_mode_stack()) > self._modes:
            _pop_mode()
        self._entries.put_back()
        for attributes, before in self._objects:
            _restore_mapping(attributes, before)
        for container in filter(None, self._empty):
            container.clear()
        for container, copy in self._containers:
            _restore(container, copy)
        in_gradient_mode(False, self._restore_tensors)
        self._restored = True

    def _restore_tensors(self) -> None:
        for tensor, version, copy in self._tensors:
            # Inference tensors have no version counter.
            if not torch.equal(tensor, copy) if version is None else _version(tensor) != version:
                tensor.copy_(copy)

    def require_same_parameters(self) -> None:
        """Raise `ModelStateError` if a parameter changed since the snapshot, which has no copy to restore it from."""
        changed = [name for name, p, version in self._parameters if _version(p) != version]
        if changed:
            raise ModelStateError(
                f"running the model changed its own parameters {changed[:3]}; such a model cannot be traced. If it "
                "sets them up in its first call, as S4 does, call it once before the trace."
            )


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else set(container)


def _restore(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        _restore_mapping(container, before)
    elif isinstance(container, list):
        if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
            container[:] = before
    elif container != before:
        container.difference_update(container - before)
        container.update(before)


def _restore_mapping(mapping: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore a dictionary's keys, values and order, key by key, so that a module stays usable meanwhile."""
    for key in [key for key in mapping if key not in before]:
        del mapping[key]
    for key, value in before.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value
    if list(mapping) != list(before):
        for key, value in before.items():
            del mapping[key]
            mapping[key] = value


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
