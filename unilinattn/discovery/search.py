"""Find the modules outside of a model's registered layers that move information between tokens, by their behaviour.

Class names are not read. Every layer of a trace returns its recorded output, so that the rest of the model should
compute each token from that token only. A random half of the tokens is perturbed, then the other half; if a watched
token changes, a module mixes tokens.

Cost: three runs of the model without the computation of its layers, for each sequence length of its layers (an encoder
with a decoder has two), once for each model. The result is remembered until a module, a weight, a training flag or the
names of the arguments change, or an input is longer. If modules mix, about five more such runs for each of their
classes. Memory: two numbers per token for every tensor that enters or leaves a module. The user's hooks on the model
run in these runs too.

Mixing at other lengths, in other layouts and in functions is found by `tracing.completeness`, with which the search
begins and ends. Not detected: mixing of pixels without a softmax before these are token vectors.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.call.axes import channel_axis
from unilinattn.call.nested import tensors
from unilinattn.discovery.attributes import attributes_of, written
from unilinattn.discovery.candidates import mixing_modules
from unilinattn.discovery.completeness import Key, Leak, find_leak
from unilinattn.discovery.enclosing import UnregisteredMixer, alike, is_attention, is_convolution, layer_at, wrappers
from unilinattn.discovery.perturbation import Perturbed, Reference, Trial, constants_of
from unilinattn.discovery.unknown import (
    holders,
    without_adapters,
    without_layers,
)
from unilinattn.discovery.widened import is_low, widened
from unilinattn.errors import UncoveredError, UnilinattnError, UnknownArchitectureError
from unilinattn.host import substitution
from unilinattn.host.indices import checked_indices
from unilinattn.host.logits import KEEP
from unilinattn.host.module_calls import CallRecord
from unilinattn.host.recorder import Recorder
from unilinattn.host.run import run
from unilinattn.registry import list_architectures

FEWEST = 8
"""Fewest tokens of a search, which perturbs a random half of them: two of fewer tokens are too often in one half."""

DECODER = "decoder_"
"""The word with which the arguments of a decoder begin."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a call's tensors, by argument."""


@dataclass(frozen=True)
class _Answer:
    key: tuple[object, ...]
    shapes: Shapes
    mixers: tuple[tuple[str, bool, Leak | None], ...]

    def covers(self, key: tuple[object, ...], shapes: Shapes) -> bool:
        """Tell whether the answer holds for inputs of these shapes: no axis may be longer.

        A refusal may be due to the shapes, such as those of as many channels as tokens.
        """
        if key != self.key or shapes.keys() != self.shapes.keys():
            return False
        if shapes != self.shapes and any(holds for _, holds, _ in self.mixers):
            return False
        pairs = [(shape, self.shapes[name]) for name, shape in shapes.items()]
        return all(len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True)) for a, b in pairs)


_answers: "WeakKeyDictionary[nn.Module, _Answer]" = WeakKeyDictionary()


def remembered_mixers(
    model: nn.Module, arguments: Mapping[str, Any], above: int
) -> tuple[UnregisteredMixer, ...] | None:
    """Return the result of `unregistered_mixers` for this model in its present state, None if there is none yet."""
    answer = _answers.get(model)
    if answer is None or not answer.covers(state_of(model, arguments), _shapes(_shortened(arguments, above))):
        return None
    return tuple(UnregisteredMixer(path, model.get_submodule(path), holds, leak) for path, holds, leak in answer.mixers)


def unregistered_mixers(
    model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[CallRecord], above: int
) -> tuple[UnregisteredMixer, ...]:
    """Return the modules outside of the recorded layers that move information between tokens, and remember them.

    `layers` are the recorded calls of a run on `arguments`. Inputs of more than `above` tokens are cut to their first
    `PREFIX` tokens; the tokens of fewer than `FEWEST`, among which not all that mixes is seen, are repeated. The model
    and the random number generators are restored. The docstring of this file gives the cost.
    """
    examined = _shortened(arguments, above)
    mixers: tuple[UnregisteredMixer, ...] | None = None
    repeated = _repeated(examined)
    if _shapes(repeated) != _shapes(examined):
        # Other arguments, such as a mask of pairs, may fit these tokens only.
        with suppress(Exception), checked_indices(model):
            mixers, examined = _searched(model, repeated, arguments, layers), repeated
    if mixers is None:
        with checked_indices(model):
            mixers = _searched(model, examined, arguments, layers)
    answer = tuple((mixer.path, mixer.holds_layers, mixer.leak) for mixer in mixers)
    _answers[model] = _Answer(state_of(model, arguments), _shapes(examined), answer)
    return mixers


def _searched(
    model: nn.Module, examined: Mapping[str, Any], arguments: Mapping[str, Any], layers: Sequence[CallRecord]
) -> tuple[UnregisteredMixer, ...]:
    """Return the result of `_found_mixers`, from runs of a model of low precision in float32 where it takes that."""
    if is_low(model, examined):
        # A kernel, or a function of another package, may accept no other dtype than the model's.
        with suppress(Exception), widened():
            return _found_mixers(model, examined, arguments, layers)
    return _found_mixers(model, examined, arguments, layers)


def _found_mixers(
    model: nn.Module, examined: Mapping[str, Any], arguments: Mapping[str, Any], layers: Sequence[CallRecord]
) -> tuple[UnregisteredMixer, ...]:
    """Return the result of `unregistered_mixers`; `examined` are the arguments of the runs."""
    if examined is not arguments:
        layers = _layers_of(model, examined, ())
    # The module around an attention to windows of the model's sequences takes these, and is a layer in its place.
    windows = {layer.name for layer in layers if layer.windowed and is_attention(layer)}
    candidates = mixing_modules(model, examined, [layer for layer in layers if layer.name not in windows])
    paths = [*wrappers(layers), *(path for path in candidates if path not in windows)]
    convolutions = {path for path, attends in candidates.items() if not attends}
    around: set[str] = set()
    regrouped: list[Key] = []
    while True:
        if paths:
            layers = _layers_of(model, examined, paths)
        found = _Search(model, examined, layers, regrouped).run()
        # What mixes between two layers, such as the merging of patches, is a layer too if a module does it.
        more: list[str] = []
        for mixer in found:
            path = layer_at(model, mixer, layers, convolutions, around)
            same = [] if path is None else alike(model, path)
            if path is None and not layers and mixer.path and not mixer.holds_layers:
                # Once it returns constants, what reads a state or keys that it returned shows.
                same = [mixer.path]
            more += same
            # A module around convolutions, such as a pyramid of pools, mixes as they do.
            contained = {layer.name for layer in layers if path is not None and layer.name.startswith(f"{path}.")}
            of_pixels = mixer.leak is not None and is_convolution(model, mixer.leak.module)
            around.update(same if (of_pixels or contained) and contained <= convolutions | around else ())
        # Without such a module, the first layer of a stream may read several tokens of another stream as one.
        leaks = [mixer.leak for mixer in found if mixer.leak is not None and not more]
        groups = [leak.regrouped for leak in leaks if leak.regrouped is not None]
        regrouped += groups
        if not groups and set(more) <= set(paths):
            break
        # A layer around recorded ones, beside which it mixes, takes their place.
        inside = tuple(f"{path}." for path in more)
        paths = [path for path in dict.fromkeys((*paths, *more)) if not path.startswith(inside)]
    return (*(UnregisteredMixer(path, model.get_submodule(path), False) for path in paths), *found)


def _layers_of(model: nn.Module, arguments: Mapping[str, Any], recorded: Sequence[str]) -> list[CallRecord]:
    """Run the model and return the calls of its layers, those at the paths `recorded` among them."""
    recorder = Recorder(model, opaque=recorded)
    before = attributes_of(model)

    def note() -> None:
        for layer in recorder.layers:
            layer.left = written(layer.module, before)

    run(model, arguments, observer=recorder.attached(), after=note)
    return recorder.layers


def refuse(
    model: nn.Module,
    layers: Sequence[CallRecord],
    mixers: Sequence[UnregisteredMixer],
    arguments: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    """Raise `UnknownArchitectureError` for a model without layers, or with mixers that are not allowed.

    With `strict` no mixer is allowed; otherwise those that hold registered layers are not. A model without layers runs
    once more on `arguments`, to name the modules that probably mix.
    """
    refused = [mixer for mixer in mixers if mixer.holds_layers]
    if not refused and (layers or mixers):
        return
    if not refused:
        raise UnknownArchitectureError(without_layers(model, arguments))
    holds_layers = any(mixer.holds_layers for mixer in refused)
    named = holders(model, [(mixer.path, mixer.module) for mixer in refused])
    leak = refused[0].leak
    raise UnknownArchitectureError(
        without_adapters(model, named, leak, outside=refused[0].holds_layers, may_be_left_out=not holds_layers),
        named[0][0],
        [layer.name for layer in layers] + [mixer.path for mixer in mixers if not mixer.holds_layers],
    )


class _Search:
    """One search of one model on one input."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any],
        layers: Sequence[CallRecord],
        regrouped: Collection[Key],
    ) -> None:
        self._model, self._arguments, self._layers, self._regrouped = model, arguments, layers, regrouped
        self._classes = {path: type(module) for path, module in model.named_modules()}
        self._constants = constants_of(layers)
        self._holders: set[str] = set()
        for layer in layers:
            holder = layer.parent
            while holder is not None:
                self._holders.add(holder.name)
                holder = holder.parent
        self._lengths = _lengths(model, arguments, layers)
        self._mixers: dict[str, bool] = {}

    def run(self) -> tuple[UnregisteredMixer, ...]:
        """Return the outermost mixers, and the first leak that is left when they return constants.

        Raises `UncoveredError` for a model that fails on other tokens.
        """
        try:
            return self._found()
        except (UnilinattnError, torch.OutOfMemoryError):
            raise
        except (KeyError, AttributeError) as error:
            raise UncoveredError(
                f"{type(self._model).__name__} raises {type(error).__name__} ({error}) while its layers return their "
                "recorded outputs, as if one of them leaves values for later code in an attribute or a dictionary, "
                "which no operator follows. Return them instead, or register an adapter for the layer."
            ) from error
        except RuntimeError as error:
            raise UncoveredError(
                f"{type(self._model).__name__} fails on other tokens while its layers return the same vectors, as if "
                f"tokens decide how many vectors it makes, so it is unknown what else mixes them ({error})."
            ) from error

    def _found(self) -> tuple[UnregisteredMixer, ...]:
        # A model that is itself a layer has no modules outside of it.
        if "" in self._constants:
            return ()
        leak = self._leak() if self._layers else None
        if leak is None and self._layers:
            return ()
        if leak is not None and all(t.is_floating_point() for t in tensors(self._arguments) if t.ndim > 1):
            # The channels of images may be as many as tokens, and lie where tokens do.
            return (UnregisteredMixer(leak.module, self._model.get_submodule(leak.module), True, leak),)
        for length in self._lengths:
            self._search(length)
        if self._mixers:
            # They return constants now, and what holds layers is refused in any case.
            leak = None if any(self._mixers.values()) or not self._layers else self._leak()
        inside = tuple(f"{path}." for path, holds in self._mixers.items() if path and not holds)
        mixers = [
            UnregisteredMixer(path, self._model.get_submodule(path), holds)
            for path, holds in sorted(self._mixers.items(), key=lambda item: list(self._classes).index(item[0]))
            if not path.startswith(inside)
        ]
        if leak is not None:
            mixers.append(UnregisteredMixer(leak.module, self._model.get_submodule(leak.module), True, leak))
        return tuple(mixers)

    def _leak(self) -> Leak | None:
        return find_leak(self._model, self._arguments, self._layers, self._constants, self._regrouped)

    def _search(self, length: int) -> None:
        """Find sources and let those that can be layers return constants, until no watched token changes."""
        # In a random half nearly every watched token has perturbed neighbours on both sides, near and far, so mixing of
        # any reach and direction shows.
        generator = torch.Generator().manual_seed(0)
        half = torch.randperm(length, generator=generator, device="cpu") < length // 2
        acquitted: set[str] = set()
        while sources := self._sources(length, (half, ~half)) - acquitted:
            holders = {path for path in sources if path in self._holders}
            self._mixers |= dict.fromkeys(holders, True)
            suspects = self._alike(sources - holders)
            trial = Trial(self._model, length, self._constants, suspects, (half, ~half))
            trial.run(self._arguments)
            # A suspect that no tensor with tokens enters cannot be tried: the perturbed run decides.
            mixes = {p for p, mixed in trial.mixes.items() if mixed or (mixed is None and p in sources)}
            if not mixes:
                return
            self._constants |= {path: trial.calls[path] for path in mixes}
            self._mixers |= dict.fromkeys(mixes, False)
            # They stay sources, because they return no constants, and would repeat this search for ever.
            acquitted |= holders | suspects - mixes

    def _sources(self, length: int, masks: Sequence[Tensor]) -> set[str]:
        reference = Reference(self._model, length, self._constants)
        reference.run(self._arguments)
        sources: set[str] = set()
        for mask in masks:
            run = Perturbed(self._model, self._constants, reference, mask)
            run.run(self._arguments)
            sources |= run.sources.keys()
        return sources

    def _alike(self, paths: set[str]) -> set[str]:
        """Return the paths and those of other modules of the same classes, which are tried too."""
        classes = {self._classes[path] for path in paths}
        excluded = self._holders | self._constants.keys()
        return {path for path, cls in self._classes.items() if cls in classes and path not in excluded}


def _lengths(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[CallRecord]) -> list[int]:
    """Return the distinct sequence lengths above 1 of the layers' inputs, without layers of the model's inputs.

    Inputs whose second axis has channels are left out: no run here perturbs tokens along another axis.
    """
    entered = [(layer.entered, layer.axes.inputs) for layer in layers]
    if not layers:
        entered = [(x, _axis(model, x)) for x in arguments.values() if isinstance(x, Tensor)]
    lengths = dict.fromkeys(x.shape[1] for x, axis in entered if x is not None and x.ndim in (2, 3) and axis == -1)
    return [length for length in lengths if length > 1]


def _axis(model: nn.Module, x: Tensor) -> int:
    """Return the axis of channels of an argument."""
    return channel_axis(model, x.shape) or -1 if x.is_floating_point() and x.ndim == 3 else -1


def state_of(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the key of an answer: modules, their modes, switches, hooks and weights, arguments, adapters."""
    modules = dict(model.named_modules())
    forwards = {path: vars(module).get("forward") for path, module in modules.items()}
    # That of a model in a `cut` is this library's.
    forwards |= {path: None for path, f in forwards.items() if type(f).__module__.startswith("unilinattn.")}
    # A hook may mix tokens, and so may a forward of one module or the code that an attribute switches on.
    classes = tuple(
        (path, type(module), forwards[path], *module._forward_pre_hooks, *module._forward_hooks)
        for path, module in modules.items()
    )
    # Numbers may count calls.
    values = [(name, value) for module in modules.values() for name, value in vars(module).items()]
    switches = tuple([(name, x) for name, x in (*values, *arguments.items()) if isinstance(x, (bool, str))])
    parameters = [p for module in modules.values() for p in module._parameters.values() if p is not None]
    weights = tuple((id(p), p.data_ptr(), p.dtype, -1 if p.is_inference() else p._version) for p in parameters)
    return classes, switches, weights, tuple(sorted(arguments)), tuple(list_architectures())


def _shapes(arguments: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the arguments that are tensors; a batch does not matter but for being one."""
    shapes = {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, Tensor) and x.ndim > 1}
    return {name: (min(shape[0], 2), *shape[1:]) for name, shape in shapes.items()}


def _shortened(arguments: Mapping[str, Any], above: int) -> Mapping[str, Any]:
    """Return the arguments, cut to the first `PREFIX` tokens if there are more than `above`."""
    length = _length(arguments)
    if length <= above:
        return arguments
    cut = {}
    for name, value in arguments.items():
        along = isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == length
        cut[name] = value[:, : substitution.PREFIX] if along else value
    cut.pop(KEEP, None)
    return cut


def _repeated(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with each token of fewer than `FEWEST` several times, `FEWEST` or more together.

    A decoder may have fewer tokens than its encoder, such as its start alone.
    """
    lengths = {name: x.shape[1] for name, x in arguments.items() if isinstance(x, Tensor) and x.ndim in (2, 3)}
    first = _length({name: x for name, x in arguments.items() if not name.startswith(DECODER)})

    def times(name: str) -> int:
        length = lengths.get(f"{DECODER}input_ids", first) if name.startswith(DECODER) else first
        return -(-FEWEST // length) if 0 < length == lengths.get(name) else 1

    counts = {name: times(name) for name in arguments}
    return {name: x if counts[name] == 1 else x.repeat_interleave(counts[name], 1) for name, x in arguments.items()}


def _length(arguments: Mapping[str, Any]) -> int:
    """Return the largest number of tokens of an argument, 0 without."""
    # Numbers without channels are no tokens but a signal, of which a stem makes fewer tokens.
    tokens = (x for x in arguments.values() if isinstance(x, Tensor) and (x.ndim == 3 or not x.is_floating_point()))
    return max((x.shape[1] for x in tokens if x.ndim in (2, 3)), default=0)
