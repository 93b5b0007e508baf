"""Record the token-mixing modules of one run of a host model, with their arguments and outputs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unilinattn.call import CACHES, Captured
from unilinattn.call.axes import LAST, axes_of
from unilinattn.call.nested import mapped
from unilinattn.errors import ModelStateError
from unilinattn.host.inputs import bound_arguments, refuse_states_between, sequences_in
from unilinattn.host.masks import functions_of, masks_in
from unilinattn.host.module_calls import CallRecord, Prefix, first_tensor, tensors_in
from unilinattn.host.observer import Inputs, Observer
from unilinattn.host.products import Products
from unilinattn.host.windows import are_windows
from unilinattn.registry import UNREGISTERED, Architecture, Mark, architecture_of, list_architectures


class _Marker(Tensor):
    """A tensor that is its own copy, so that a copy of a trace has it too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Marker":
        """Return this object."""
        return self


MAIN: Tensor = torch.empty(0, device="cpu").as_subclass(_Marker)
"""Marks the place of a layer's output in the nesting that the layer returned (`CallRecord.structure`)."""


class Recorder(Observer[CallRecord]):
    """Records every call of every module while attached, and the calls of token-mixing modules as layers."""

    def __init__(
        self,
        model: nn.Module,
        *,
        opaque: Collection[str] = (),
        locate: Callable[[CallRecord, CallRecord], bool] | None = None,
        products: Products | None = None,
    ) -> None:
        """Prepare for one model; the modules at the paths `opaque` have no adapter and are recorded.

        `locate(layer, block)` is called for each layer and each finished block around it, until it returns True: it
        reads what the modules of the block exchanged. `products` are those of the linear layers that a later run
        computes again.
        """
        super().__init__(model)
        self.opaque = frozenset(opaque)
        self.layers: list[CallRecord] = []
        self._locate, self.products = locate, products
        self._batch: int | None = None
        self._masks: list[Tensor] = []
        self._recorded = list_architectures()[UNREGISTERED]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record the current run's calls of the model's modules."""
        with super().attached(), captured(self.model, self._marker):
            yield

    def on_layer(self, output: Any, result: Tensor) -> Any:
        """Called with the output of a layer and the tensor in it; returns the replacement of the output, or None."""
        return None

    def note_prefix(self, module: nn.Module, prefix: Prefix) -> None:
        """Record that an operator replaces the forward of a module during its present call, with its check."""
        frame = next(f for f in reversed(self.stack) if f.module is module)
        frame.prefix = prefix

    def _marker(self, architecture: Architecture) -> Mark:
        def mark(module: nn.Module, record: Any) -> None:
            frame = next((f for f in reversed(self.stack) if f.module is module), None)
            if frame is None or self.elsewhere():
                return
            frame.architecture = frame.architecture or architecture
            frame.outermost.seen.append(Captured(module, frame.arguments, record))

        return mark

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> CallRecord:
        """Return the record of a call, with a copy of a layer's input."""
        parent = self.stack[-1] if self.stack else None
        architecture = architecture_of(type(module)) or (self._recorded if path in self.opaque else None)
        record = CallRecord(module, path, bound_arguments(module, *inputs), parent, architecture)
        if parent is None:
            self._batch, self._masks = sequences_in(record.arguments), masks_in(record.arguments)
        if parent is not None:
            parent.children.append(record)
        # A wrapper may pass a cache to its model; the other names also pass states between layers of a host.
        refuse_states_between(module, path, record.arguments, CACHES[:2])
        if architecture is not None and (entering := record.input) is not None:
            # A host may write into its argument.
            record.entered = entering.detach().clone()
            record.masks = frozenset(functions_of(self._masks, record.arguments, entering.shape[:2]))
            if architecture is self._recorded and entering.ndim > 2:
                # Vectors along two axes are packed tokens: one vector of each sequence has no others to mix with.
                record.batch = self._batch
        return record

    def leaving(self, frame: CallRecord, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        """Complete the record of a call; of a layer, return the replacement of its output."""
        if self.products is not None and _runs_again(frame.outermost.architecture):
            self.products.record(module, inputs, output)
        frame.output = main_tensor(output)
        if frame.output is not None:
            # Other returned tensors, such as attention weights, are too large to keep.
            size = frame.output.numel()
            returned = (output,) if frame.output is output else tensors_in(output)
            frame.returned = tuple(t for t in returned if t.numel() == size)
        if frame.architecture is self._recorded and frame.input is not None and frame.output is not None:
            frame.axes = axes_of(module, frame.input, frame.output) or LAST
            if are_windows(module, inputs, frame.input, frame.output, frame.batch):
                frame.batch = None
        is_layer = frame.architecture is not None and frame.outermost is frame
        if frame.parent is not None and (frame.holds_layer or frame.architecture is not None):
            frame.parent.holds_layer = True
        self._place(frame)
        if not is_layer:
            return None
        entering = frame.input
        frame.shares_input = entering is not None and frame.parent is not None and frame.parent.input is entering
        # A host may write into the tensors that it passes on.
        if frame.entered is None and entering is not None:
            frame.entered = entering.detach().clone()
        frame.windowed = self._reads_windows(frame)
        result = frame.output
        frame.output = None if result is None else result.detach().clone()
        # Expanded zeros of one element: other values, such as attention weights, may be larger than the output.
        frame.structure = mapped(output, partial(_placeholder, result))
        self.layers.append(frame)
        if self._locate is not None and frame.parent is not None:
            frame.parent.unplaced.append(frame)
        return None if result is None else self.on_layer(output, result)

    def _reads_windows(self, layer: CallRecord) -> bool:
        """Tell whether a layer reads more sequences than the model, and a module around it as many as the model."""
        if layer.entered is None or self._batch is None or len(layer.entered) <= self._batch:
            return False
        outer = layer.parent
        while outer is not None and outer.parent is not None:
            if outer.input is not None and outer.input.ndim > 2 and len(outer.input) == self._batch:
                return True
            outer = outer.parent
        return False

    def _place(self, block: CallRecord) -> None:
        """Find the residual streams of the layers inside a finished block, then release the block's tensors."""
        locate = self._locate
        if locate is not None:
            unplaced = [layer for layer in block.unplaced if not locate(layer, block)]
            block.unplaced = []
            if block.parent is not None:
                block.parent.unplaced += unplaced
        for child in block.children:
            child.children.clear()
            child.returned = ()
            if child.architecture is None:
                child.arguments, child.output = {}, None
        if locate is None:
            block.children.clear()


class GradientRecorder(Recorder):
    """Makes every layer's output require a gradient, though the parameters require none."""

    def __init__(self, model: nn.Module, *, opaque: Collection[str]) -> None:
        super().__init__(model, opaque=opaque)
        self.outputs: list[Tensor] = []

    def on_layer(self, output: Any, result: Tensor) -> Any:
        """Record the output as a tensor that requires a gradient, and return a copy of it to the host."""
        self.layers.clear()
        leaf = result if result.requires_grad else result.detach().requires_grad_()
        self.outputs.append(leaf)
        # The host may write into the output, and a leaf must not be written into.
        copied = leaf.clone()
        return mapped(output, lambda t: copied if t is result else t)


@contextmanager
def captured(
    model: nn.Module,
    marker: Callable[[Architecture], Mark] | None = None,
    *,
    needed: Callable[[Architecture], bool] = lambda architecture: True,
) -> Iterator[None]:
    """Enter the `capture` of every architecture that has one and is `needed`, for a run of the model.

    `marker` returns the function that receives an architecture's records; by default they are discarded.
    """
    with ExitStack() as stack:
        for architecture in list_architectures().values():
            if architecture.capture is not None and needed(architecture):
                mark = (lambda module, record: None) if marker is None else marker(architecture)
                stack.enter_context(architecture.capture(model, mark))
        yield


def _runs_again(layer: Architecture | None) -> bool:
    """Tell whether a later run may call the modules inside a layer, or those outside of any."""
    return layer is None or layer.needs_capture


def _placeholder(result: Tensor | None, returned: Tensor) -> Tensor:
    """Return what stands for a returned tensor in `CallRecord.structure`; a parameter, such as a bias, stays."""
    if returned is result:
        return MAIN
    return returned if isinstance(returned, nn.Parameter) else returned.new_zeros(()).expand(returned.shape)


def main_tensor(output: Any) -> Tensor | None:
    """Return the first floating-point tensor with at least two axes in a module's output."""
    return first_tensor(output if isinstance(output, (tuple, list)) else _values(output), axes=2)


def refuse_dropout(model: nn.Module) -> None:
    """Make the rest of an isolated run raise `ModelStateError` at active dropout, if a module is in train mode."""
    if any(module.training for module in model.modules()):
        # `isolated` exits the mode: after an interrupt the mode's own exit could run too late and exit another one.
        _RefuseDropout().__enter__()


class _RefuseDropout(TorchFunctionMode):
    """Raises `ModelStateError` at the first active dropout, under which a frozen layer would explain only noise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Raise `ModelStateError` for dropout with p > 0 in training mode, and call any other function."""
        kwargs = kwargs or {}
        name, probability, training = getattr(func, "__name__", ""), 0.0, True
        if "dropout" in name:
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        elif name == "scaled_dot_product_attention":
            probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if training and probability > 0:
            raise ModelStateError(
                f"the model is in train mode and dropout with p = {probability} is active, so its layers are "
                "random; call model.eval() before tracing (or set its dropout to 0)."
            )
        return func(*args, **kwargs)


def _values(output: Any) -> list[Any]:
    # A tensor first: the check for a mapping takes longer than most others of a call.
    return list(output.values()) if not isinstance(output, Tensor) and isinstance(output, Mapping) else [output]
