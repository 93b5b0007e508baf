"""Runs of a model whose layers return constants, to find where the rest of it moves information between tokens.

Some tokens are perturbed and the others are watched. If its token-mixing layers return constants, a model computes each
token from that token only; a watched token that changes reveals a module that mixes tokens.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.call import CACHES
from unilinattn.call.attention_interface import configurations
from unilinattn.call.axes import LAST, Axes
from unilinattn.call.nested import mapped, tensors
from unilinattn.discovery.attributes import Left, leave
from unilinattn.discovery.noise import noisy, noisy_beside
from unilinattn.discovery.widened import visible
from unilinattn.host.forwards import Forward, replaced_forwards
from unilinattn.host.inputs import call_host
from unilinattn.host.module_calls import CallRecord
from unilinattn.host.observer import Functions, Inputs, Observer
from unilinattn.host.recorder import MAIN, captured, main_tensor
from unilinattn.host.run import run

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative change of a watched token by rounding (experts get other batches); 0.05 for other dtypes.

The rows of a matrix product are independent: the change is zero in nearly all models.
"""

ARBITRARY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Names of functions that return tensors without writing their elements."""

Rows = list[tuple[Float[Tensor, "first token"], Float[Tensor, "first token"]]]
"""A projection and the norm of every token, for each axis of a tensor that may be the token axis."""


@dataclass(frozen=True)
class Constant:
    """The recorded result of a call.

    Attributes:
        returned: the returned nesting, with `MAIN` in place of the output.
        output: the output.
        axes: the axis of channels of the input and of the output.
        left: the attributes that the call wrote.
    """

    returned: Any
    output: Tensor
    axes: Axes = LAST
    left: Left = field(default_factory=list)


Constants = Mapping[str, Sequence[Constant]]
"""The recorded calls of the modules that return constants, in order, by the module's path."""


def constants_of(layers: Iterable[CallRecord]) -> dict[str, list[Constant]]:
    """Return the constants that layers return, those without an output left out."""
    constants: dict[str, list[Constant]] = {}
    for layer in layers:
        if layer.output is not None:
            constants.setdefault(layer.name, []).append(Constant(layer.structure, layer.output, layer.axes, layer.left))
    return constants


@dataclass(eq=False)
class Call:
    """One call of a module in a run."""

    path: str
    number: int
    parent: "Call | None"
    calls_others: bool = False
    entered_changed: bool = False
    explained: bool = False


def _cleared(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return zeros in place of arbitrary memory, which differs between runs."""
    is_arbitrary = isinstance(result, Tensor) and getattr(func, "__name__", "") in ARBITRARY
    return result.zero_() if is_arbitrary else result


class Run(Observer[Call]):
    """One run of the model in which some modules return constants; subclasses inspect the calls of the others."""

    def __init__(self, model: nn.Module, length: int, constants: Constants) -> None:
        super().__init__(model)
        self._length, self._constants = length, constants
        self._counts: dict[str, int] = {}

    def run(self, arguments: Mapping[str, Any]) -> None:
        """Run the model, and restore it and the random number generators."""
        call, seed = partial(self.call_host, arguments), torch.get_rng_state()
        run(self.model, call, mixers=self._constant_mixers(), observer=self._followed(), seed=seed)

    @contextmanager
    def _followed(self) -> Iterator[None]:
        with self.attached(), Functions(_cleared):
            yield

    def call_host(self, arguments: Mapping[str, Any]) -> None:
        """Call the model."""
        call_host(self.model, arguments)

    def reading(self, path: str, number: int, constant: Constant, inputs: Inputs) -> None:
        """Inspect the inputs of a call that returns a constant."""

    def held_output(self, constant: Constant) -> Tensor:
        """Return a copy of a recorded output for a module that returns constants; the host may write into it."""
        return constant.output.clone()

    def other_output(self, constant: Constant, t: Tensor) -> Tensor:
        """Return what stands for another tensor that a module returns, such as its state."""
        return t

    @contextmanager
    def _constant_mixers(self) -> Iterator[None]:
        with captured(self.model), replaced_forwards(self.model, self._constant):
            yield

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> Call:
        """Count the call."""
        parent = self.stack[-1] if self.stack else None
        if parent is not None:
            parent.calls_others = True
        number = self._counts[path] = self._counts.get(path, 0) + 1
        return Call(path, number, parent)

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Follow a call that begins; the functions called here are not those of the host, which a run may inspect."""
        with torch._C.DisableTorchFunction():
            return super().enter(path, module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Follow a call that ends, unless it returned a constant."""
        if not self.elsewhere() and self.stack[-1].path in self._constants:
            self.stack.pop()
            return None
        with torch._C.DisableTorchFunction():
            return super().leave(module, args, kwargs, output)

    def _constant(self, path: str, module: nn.Module, host: Forward) -> Forward | None:
        """Return the forward of a module that returns constants."""
        constants = self._constants.get(path)
        if constants is None:
            return None

        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self._counts[path]
            constant = constants[min(number, len(constants)) - 1]
            with torch._C.DisableTorchFunction():
                self.reading(path, number, constant, (args, kwargs))
                output = self.held_output(constant)
                leave(constant.left, partial(self.other_output, constant))
            return mapped(constant.returned, lambda t: output if t is MAIN else self.other_output(constant, t))

        return forward

    def _token_tensors(self, value: Any) -> list[Tensor]:
        return [t for t in tensors(value) if _has_tokens(t, self._length)]

    def _rows(self, value: Any) -> list[Rows]:
        return [rows(t, self._length) for t in self._token_tensors(value)]


class Reference(Run):
    """The unperturbed run: records two numbers per token for each tensor that enters or leaves a module."""

    def __init__(self, model: nn.Module, length: int, constants: Constants) -> None:
        """Prepare for sequences of `length` tokens."""
        super().__init__(model, length, constants)
        self.seen: dict[tuple[str, int, str], list[Rows]] = {}

    def entering(self, frame: Call, module: nn.Module, inputs: Inputs) -> None:
        """Record the inputs."""
        self.seen[frame.path, frame.number, "in"] = self._rows(inputs)

    def leaving(self, frame: Call, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Record the output."""
        self.seen[frame.path, frame.number, "out"] = self._rows(output)


class Perturbed(Run):
    """The run in which some tokens are perturbed at their origins: embeddings and recorded outputs.

    Attributes:
        sources: paths of the modules in which watched tokens first changed, in order of execution: their inputs had not
            changed, their outputs had, and no module inside them explains it.
    """

    def __init__(
        self, model: nn.Module, constants: Constants, reference: Reference, perturbed: Bool[Tensor, " token"]
    ) -> None:
        """Prepare to perturb the tokens that are True and to watch the others."""
        super().__init__(model, len(perturbed), constants)
        self._reference, self._perturbed = reference.seen, perturbed
        self._begun = False
        self.sources: dict[str, None] = {}

    def entering(self, frame: Call, module: nn.Module, inputs: Inputs) -> Any:
        """Compare the inputs; perturb the first ones with tokens."""
        parent = frame.parent
        if self._changed((frame.path, frame.number, "in"), inputs):
            frame.entered_changed = True
            if parent is not None:
                self._explain(parent)
        if self._begun or not self._token_tensors(inputs):
            return None
        self._begun = True
        return mapped(inputs, self._noisy)

    def leaving(self, frame: Call, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        """Compare the output; perturb it if it was computed from no floating-point tensor, as by an embedding."""
        if self._changed((frame.path, frame.number, "out"), output):
            self._explain(frame)
            if frame.parent is not None:
                frame.parent.explained = True
        embeds = not frame.calls_others and not any(t.is_floating_point() for t in tensors(inputs))
        if (self._begun and not embeds) or not self._token_tensors(output):
            return None
        self._begun = True
        return mapped(output, self._noisy)

    def held_output(self, constant: Constant) -> Tensor:
        """Return the recorded output, perturbed."""
        return self._noisy(constant.output.clone())

    def other_output(self, constant: Constant, t: Tensor) -> Tensor:
        """Return another tensor of a layer, perturbed: what reads it moves with the tokens that it comes from."""
        return noisy_beside(t, constant.output, self._perturbed)

    def _explain(self, call: Call) -> None:
        """Record a call as a source, unless its inputs changed or a call inside it explains the change."""
        if not call.entered_changed and not call.explained:
            self.sources.setdefault(call.path)
        call.explained = True

    def _changed(self, key: tuple[str, int, str], value: Any) -> bool:
        before, after = self._reference.get(key, []), self._token_tensors(value)
        return any(
            changed(reference, tensor, ~self._perturbed) for reference, tensor in zip(before, after, strict=False)
        )

    def _noisy(self, t: Tensor) -> Tensor:
        return noisy(t, self._perturbed) if _has_tokens(t, self._length) else t


class Trial(Run):
    """The run that calls each suspect again, with some tokens of its input perturbed, and compares the other tokens.

    Attributes:
        mixes: by path, whether watched tokens changed; None if no tensor with tokens enters or leaves the module.
        calls: by path, the results of all calls.
    """

    def __init__(
        self, model: nn.Module, length: int, constants: Constants, suspects: Collection[str], masks: Sequence[Tensor]
    ) -> None:
        """Prepare for the suspects' paths, with one trial for each of `masks`, which are True at perturbed tokens."""
        super().__init__(model, length, constants)
        self._suspects, self._masks = suspects, masks
        self._perturbed: Tensor | None = None
        self._entered: list[Any] = []
        self.mixes: dict[str, bool | None] = {}
        self.calls: dict[str, list[Constant]] = {}

    def entering(self, frame: Call, module: nn.Module, inputs: Inputs) -> None:
        """Copy the inputs of a suspect, which may write into tensors and add keys to a cache."""
        if self._perturbed is None and frame.path in self._suspects:
            args, kwargs = mapped(inputs, torch.clone)
            caches = {name: deepcopy(kwargs[name]) for name in CACHES if name in kwargs}
            self._entered.append((args, {**kwargs, **caches}))

    def leaving(self, frame: Call, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Call a suspect again on perturbed inputs."""
        if self._perturbed is not None or frame.path not in self._suspects:
            return
        inputs, result = self._entered.pop(), main_tensor(output)
        if result is None:
            return
        returned = mapped(output, lambda t: MAIN if t is result else t)
        self.calls.setdefault(frame.path, []).append(Constant(returned, result.clone()))
        if not _has_tokens(result, self._length) or not self._token_tensors(inputs):
            self.mixes.setdefault(frame.path, None)
            return
        before = rows(result, self._length)
        moved = any(self._moves(module, inputs, before, mask) for mask in self._masks)
        self.mixes[frame.path] = bool(self.mixes.get(frame.path)) or moved

    def held_output(self, constant: Constant) -> Tensor:
        """Return the recorded output, perturbed inside a trial; some suspects have no other input with tokens."""
        if self._perturbed is None or not _has_tokens(constant.output, self._length):
            return constant.output.clone()
        return noisy(constant.output, self._perturbed)

    def _moves(self, module: nn.Module, inputs: Any, before: Rows, perturbed: Tensor) -> bool:
        counts, self._perturbed = dict(self._counts), perturbed
        args, kwargs = mapped(inputs, lambda t: noisy(t, perturbed) if _has_tokens(t, self._length) else t.clone())
        after = main_tensor(visible(module.forward)(*args, **kwargs))
        self._counts, self._perturbed = counts, None
        return after is not None and changed(before, after, ~perturbed)


MARKERS = ("bos", "eos", "pad", "sep", "cls", "mask", "unk", "start", "suppress", "boi", "eoi", "boa", "eoa")
"""Last words in the names of special ids that only mark a place, as in `decoder_start_token_id` and `boi_token_id`."""


def special_ids(model: nn.Module) -> Int[Tensor, " id"]:
    """Return the ids whose meaning configurations state, such as those of padding and of an image's place."""
    return _sorted_ids(value for _, value in _stated_ids(model))


def placeholder_ids(model: nn.Module) -> Int[Tensor, " id"]:
    """Return the ids by which a model finds where other inputs go, such as the patches of an image."""
    named = [(name.split("_")[:-2], value) for name, value in _stated_ids(model)]
    # Qwen2-VL counts the images of a text by `vision_start_token_id`.
    return _sorted_ids(value for words, value in named if "vision" in words or (words and words[-1] not in MARKERS))


def _stated_ids(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the name in a configuration and the id, for each special id."""
    for config in configurations(model):
        for name, value in vars(config).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                values = value if isinstance(value, list | tuple) else [value]
                yield from ((name, each) for each in values if isinstance(each, int))


def _sorted_ids(ids: Iterable[int]) -> Int[Tensor, " id"]:
    return torch.tensor(sorted(set(ids)), dtype=torch.long, device="cpu")


def changed(before: Rows, after: Tensor, watched: Bool[Tensor, " token"]) -> bool:
    """Tell whether watched tokens changed, for every axis of the tensor that may be the token axis."""
    allowed, watched = TOLERANCE.get(after.dtype, 0.05), watched.to(after.device)
    now = [projection(x) for x in _by_token(after, len(watched))]
    if [reference.shape for reference, _ in before] != [value.shape for value in now]:
        return False
    # Along another axis of the same length, such as channels, every entry holds perturbed tokens and so differs: the
    # token axis decides.
    return bool(now) and all(
        _differ(reference[:, watched], value[:, watched], allowed * norm[:, watched])
        for (reference, norm), value in zip(before, now, strict=True)
    )


def rows(t: Tensor, length: int) -> Rows:
    """Return two numbers per token for each axis of a tensor with `length` entries."""
    return [(projection(x), torch.linalg.vector_norm(x, dim=-1)) for x in _by_token(t, length)]


def _differ(reference: Tensor, value: Tensor, allowed: Tensor) -> bool:
    if torch.equal(reference, value):
        return False
    within = (reference - value).abs() <= allowed
    return not bool((within | (reference == value) | (reference.isnan() & value.isnan())).all())


def _by_token(t: Tensor, length: int) -> list[Float[Tensor, "first token channel"]]:
    # (2, 5, 5, 4) with 5 tokens may have them along two axes, and gives a (2, 5, 20) for each.
    tokens = [t.detach().movedim(axis, 1).flatten(2) for axis in range(1, t.ndim) if t.shape[axis] == length]
    return [x.to(torch.promote_types(t.dtype, torch.float32)) for x in tokens]


def projection(x: Float[Tensor, "first token channel"]) -> Float[Tensor, "first token"]:
    """Return one number for each token, which a change of its channels changes."""
    return x @ _weights(x.shape[-1], x.dtype, x.device)


@lru_cache(maxsize=16)
def _weights(channels: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " channel"]:
    """Return weights without a pattern that centring or a permutation of channels would cancel."""
    return torch.arange(1, channels + 1, dtype=dtype, device=device).mul_(2.399963).cos_()


def _has_tokens(t: Tensor, length: int) -> bool:
    """Tell whether a tensor is (batch, token, channel, ...); others are compared at the next module's boundary."""
    return t.is_floating_point() and t.ndim >= 3 and t.shape[1] == length and t[0, 0].numel() > 1
