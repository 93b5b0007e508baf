"""`Observer` follows the calls of a model's modules in one run, and `Functions` those of torch's functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn
from torch.overrides import TorchFunctionMode

from unilinattn.host.indices import check_rows
from unilinattn.host.isolation import current_run

Frame = TypeVar("Frame")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


class Observer(Generic[Frame]):
    """Follows the calls of a model's modules in one run; a subclass makes a frame of each call.

    Attributes:
        model: the model.
        stack: the frames of the calls under way, outermost first.
    """

    sees_given_inputs = True
    """Whether calls are seen before the user's hooks change their inputs."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare for one run."""
        self.model = model
        self.stack: list[Frame] = []
        self._run: object = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Follow the calls of the current run; `isolated` removes the hooks."""
        self._run = current_run()
        for path, module in self.model.named_modules():
            enter = partial(self.enter, path)
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=self.sees_given_inputs)
            module.register_forward_hook(self.leave, with_kwargs=True)
        yield
        # Modules that run before the hooks are removed are followed no more.
        self._run = object()

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> Frame:
        """Return the frame of a call that begins."""
        raise NotImplementedError

    def entering(self, frame: Frame, module: nn.Module, inputs: Inputs) -> Inputs | None:
        """Inspect the inputs of a call; return their replacement, or None to keep them."""
        return None

    def leaving(self, frame: Frame, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        """Inspect the output of a call; return its replacement, or None to keep it."""
        return None

    def elsewhere(self) -> bool:
        """Tell whether a call is outside the observed run: in another thread or in a run inside this one."""
        return current_run() is not self._run

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Follow a call that begins: the pre-hook of every module."""
        if self.elsewhere():
            return None
        check_rows(module, (args, kwargs))
        frame = self.frame(path, module, (args, kwargs))
        self.stack.append(frame)
        return self.entering(frame, module, (args, kwargs))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Follow a call that ends: the hook of every module."""
        if self.elsewhere():
            return None
        replacement = self.leaving(self.stack[-1], module, (args, kwargs), output)
        self.stack.pop()
        return replacement


class Functions(TorchFunctionMode):
    """Passes each function of torch that is called inside, its arguments and its result through `change`."""

    def __init__(self, change: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
        """Prepare for a block; `change(function, args, kwargs, result)` returns the result or another one."""
        super().__init__()
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and return what `change` returns."""
        kwargs = kwargs or {}
        return self._change(func, args, kwargs, func(*args, **kwargs))
