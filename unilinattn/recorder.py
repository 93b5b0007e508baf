"""Runs a host model once and notes which token-mixing modules ran, with what; leaves nothing behind on the model."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unilinattn.architectures.call import Seen, package_version
from unilinattn.errors import InputError, ModelStateError, UnknownArchitectureError
from unilinattn.frames import OPAQUE, Frame, Prefix, first_tensor, place_in_stream
from unilinattn.registry import Architecture, architecture_of, architectures

_MIXER_NAME = re.compile(
    r"(attention|attn|mixer|mamba|ssm|ssd|retention|deltanet|deltarule|rwkv|lstm|gru|rnn|hyena|recurrentblock|conv)\d*$",
    re.IGNORECASE,
)
"""Class names that promise token mixing: used only to refuse a model whose mixers no adapter knows."""


class Recorder:
    """Notes every call of every module while it is attached, and which of them are token-mixing layers."""

    def __init__(self, model: nn.Module, *, strict: bool = True) -> None:
        """Prepare for one model; without `strict`, mixers that no adapter knows become opaque layers."""
        self.model = model
        self.strict = strict
        self.layers: list[Frame] = []
        self.strangers: list[Frame] = []
        self._stack: list[Frame] = []
        self._unplaced: list[Frame] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the model's modules; every hook is gone afterwards, whatever happens."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                enter = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True)
                stack.callback(enter.remove)
                leave = module.register_forward_hook(self._leave)
                stack.callback(leave.remove)
            for architecture in architectures().values():
                if architecture.capture is not None:
                    stack.enter_context(architecture.capture(self.model, self._marker(architecture)))
            yield

    def on_layer(self, output: Any, result: Tensor) -> Any:
        """Take the output of a layer that just ran, and the tensor in it; return what the host goes on with."""
        return None

    def note_prefix(self, module: nn.Module, prefix: Prefix) -> None:
        """Note that an operator runs in the place of a module that is being called, and what checked it."""
        frame = next(f for f in reversed(self._stack) if f.module is module)
        frame.prefix = prefix

    def check(self) -> None:
        """Raise `UnknownArchitectureError` if no layer was met, or if a module that looks like one is unknown."""
        unknown = [frame for frame in self.strangers if not frame.holds_layer and self.strict]
        # A convolution inside an unknown mixer is a part of it; a model's own name promises nothing.
        whole = tuple(f"{frame.name}." for frame in unknown if frame.name)
        unknown = [frame for frame in unknown if not frame.name.startswith(whole)]
        if not unknown and self.layers:
            return
        if unknown:
            cls = type(unknown[0].module)
            what = f"{unknown[0].name} is a {cls.__module__}.{cls.__qualname__}, which looks like a token mixer"
            if cls.__module__.startswith("transformers.") and "Attention" in cls.__name__:
                # All softmax attention is known by that interface; some classes joined it in later versions.
                what += f" and does not go through the attention interface in {package_version(unknown[0].module)}"
        else:
            cls, what = type(self.model), f"{type(self.model).__name__} ran no module that is a registered token mixer"
        names = {host.rsplit(".", 1)[-1] for a in architectures().values() for host in a.hosts}
        close = get_close_matches(cls.__qualname__, sorted(names), n=3, cutoff=0.5) if unknown else []
        like = f" (the nearest that are: {', '.join(close)})" if close else ""
        raise UnknownArchitectureError(
            f"{what}; no adapter is registered for it{like}. `unilinattn list` shows all. To add one, decorate a "
            "function that builds a `Flow` with `unilinattn.register_architecture('package.module.Class', name=..., "
            "kind=...)`; docs/adding_an_architecture.md shows how. Or trace with strict=False, which leaves it out."
        )

    def _marker(self, architecture: Architecture) -> Callable[[nn.Module, Any], None]:
        def mark(module: nn.Module, record: Any) -> None:
            frame = next((f for f in reversed(self._stack) if f.module is module), None)
            if frame is None:
                return
            frame.architecture = frame.architecture or architecture
            frame.outermost.seen.append(Seen(module, frame.arguments, record))

        return mark

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parent = self._stack[-1] if self._stack else None
        frame = Frame(module, name, bound_arguments(module, args, kwargs), parent, architecture_of(type(module)))
        if parent is not None:
            parent.children.append(frame)
        if frame.architecture is not None and frame.input is not None:
            # A host may write into its own argument.
            frame.entered = frame.input.detach().clone()
        self._stack.append(frame)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        frame = self._stack.pop()
        frame.output = first_tensor(output if isinstance(output, (tuple, list)) else _values(output), axes=2)
        is_layer = frame.architecture is not None and frame.outermost is frame
        if frame.outermost is frame and not is_layer and frame.output is not None and _looks_like_mixer(module):
            if self.strict or frame.holds_layer or frame.input is None:
                self.strangers.append(frame)
            else:
                frame.architecture, is_layer = OPAQUE, True
        if frame.parent is not None and (frame.holds_layer or frame.architecture is not None):
            frame.parent.holds_layer = True
        self._place(frame)
        if not is_layer:
            return None
        # A host may go on to write into what it passed around.
        if frame.entered is None and frame.input is not None:
            frame.entered = frame.input.detach().clone()
        result = frame.output
        frame.output = None if result is None else result.detach().clone()
        self.layers.append(frame)
        self._unplaced.append(frame)
        return None if result is None else self.on_layer(output, result)

    def _place(self, block: Frame) -> None:
        """Find the residual stream around the layers inside a block that ends, then let go of what the block held."""
        if block.architecture is None and block.children:
            self._unplaced = [layer for layer in self._unplaced if not place_in_stream(layer, block)]
        for child in block.children:
            child.children.clear()
            if child.architecture is None:
                child.arguments, child.output = {}, None


def _looks_like_mixer(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv1d):
        return module.kernel_size[0] > 1
    return _MIXER_NAME.search(type(module).__name__) is not None


class RefuseDropout(TorchFunctionMode):
    """Raises `ModelStateError` at the first dropout that would act: a layer frozen under noise explains nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's
        """Let everything through but a dropout with p > 0 in training mode."""
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


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers and its modules' plain attributes (states, flags) back as they were.

    Raises `ModelStateError` if the run changed a parameter.
    """
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, _version(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    parameters = [(name, p, _version(p)) for name, p in model.named_parameters()]
    try:
        yield
    finally:
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)
        for module, own in held:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, version, copy in buffers:
                if _version(buffer) != version:
                    buffer.copy_(copy)
    changed = [name for name, p, version in parameters if _version(p) != version]
    if changed:
        raise ModelStateError(
            f"running the model changed its own parameters {changed[:3]}; it cannot be traced as it is."
        )


def host_arguments(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Turn a tensor of ids or pixels, or a mapping of keyword arguments, into what the host's forward takes.

    Fills `use_cache=False` where the host has it, and `position_ids` from a left-padded mask where the host takes
    them and does not derive them itself. Raises `InputError` for anything else.
    """
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    elif isinstance(inputs, Tensor):
        given = {getattr(model, "main_input_name", None) or _first_parameter(model): inputs}
    else:
        raise InputError(
            f"inputs are a {type(inputs).__name__}; give a tensor of token ids or pixels, or a mapping of the "
            "model's keyword arguments (as a tokenizer returns it)."
        )
    _check_tensors(model, given)
    _check_ids(model, given)
    parameters = inspect.signature(model.forward).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "use_cache" in parameters or ("past_key_values" in parameters and passes_on):
        given.setdefault("use_cache", False)
    mask = given.get("attention_mask")
    derives = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
    takes_positions = "position_ids" in parameters and not derives
    if takes_positions and isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].all()):
        given.setdefault("position_ids", (mask.long().cumsum(-1) - 1).clamp_min(0))
    return given


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call by the parameters of the module's `forward`."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    arguments = dict(list(bound.arguments.items())[1:])
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            arguments.update({str(k): v for k, v in enumerate(arguments.pop(parameter.name, ()))})
    return arguments


def _check_ids(model: nn.Module, given: dict[str, Any]) -> None:
    ids = given.get("input_ids")
    if ids is None:
        return
    integer = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not integer or ids.ndim != 2:
        what = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input_ids are {what}; integer token ids of shape (batch, length) are needed.")
    if ids.shape[0] == 0 or ids.shape[1] == 0:
        raise InputError(f"input_ids have shape {tuple(ids.shape)}; at least one sequence of one token is needed.")
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", None)
    if size is not None and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise InputError(
            f"input_ids reach from {int(ids.min())} to {int(ids.max())}; the model knows ids 0 to {size - 1}."
        )


def _check_tensors(model: nn.Module, given: dict[str, Any]) -> None:
    """Refuse inputs without a number, and inputs elsewhere than a model that lies on one device as a whole."""
    places = {parameter.device for parameter in model.parameters()}
    # Packages that spread a model over devices also move its inputs.
    moved = any(hasattr(module, "_hf_hook") for module in model.modules())
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.ndim:
            continue
        if not value.numel():
            raise InputError(f"{name} has shape {tuple(value.shape)}; at least one sequence of one token is needed.")
        if len(places) == 1 and value.device not in places and not moved:
            (place,) = places
            raise InputError(
                f"{name} is on {value.device}, and {type(model).__name__} is on {place}; move one of them with "
                f".to({str(place)!r})."
            )


def _first_parameter(model: nn.Module) -> str:
    return next(iter(inspect.signature(model.forward).parameters))


def _values(output: Any) -> list[Any]:
    return list(output.values()) if isinstance(output, Mapping) else [output]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
