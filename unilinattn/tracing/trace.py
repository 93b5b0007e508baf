"""`trace`: run a host model once and return its token-mixing layers as exact operators."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from unilinattn.call.nested import tensors
from unilinattn.discovery.regions import Region, regional_model
from unilinattn.errors import OptionError, UncoveredError, UnknownArchitectureError
from unilinattn.host.choices import choices_as_sequences
from unilinattn.host.decoder import with_decoder_ids
from unilinattn.host.draws import States, drawing, drawn_from, generator_states
from unilinattn.host.explained import ExplainedLogit
from unilinattn.host.image import image_tokens, is_image, processed
from unilinattn.host.inputs import host_arguments, token_ids
from unilinattn.host.isolation import in_gradient_mode
from unilinattn.host.logits import Logit, plain_sizes, positions_of
from unilinattn.host.products import Products
from unilinattn.host.substitution import SUBSTITUTE_ABOVE, may_be_long
from unilinattn.host.text import NO_TEXT, Text, encoded, is_text, tokenized
from unilinattn.host.weights import Weights
from unilinattn.host.wrappers import unwrapped
from unilinattn.registry import ImageTokens
from unilinattn.tracing.agreement import call_of, compared_with_call
from unilinattn.tracing.builder import LayerBuilder
from unilinattn.tracing.copied import Copied
from unilinattn.tracing.gradient_cost import frozen_cost, gradient_cost
from unilinattn.tracing.gradients import gradient_of, shared_gradient
from unilinattn.tracing.inner_padding import padded_arguments, padded_text
from unilinattn.tracing.layer import Layer, Step, WithoutVectorsError
from unilinattn.tracing.padding import masks_of_streams, warn_of_leaks, warn_of_recorded_leaks
from unilinattn.tracing.recording import covered_run, depends_on_draws
from unilinattn.tracing.streaming import run_in_pieces
from unilinattn.tracing.token_streams import TokenStream, stream_written, token_streams
from unilinattn.tracing.towers import separate_towers

_version = cache(version)
"""Versions of packages: reading their metadata takes milliseconds."""

Target = int | Sequence[int] | Int[Tensor, " batch"]
"""A position, or one for each sequence, counted over real tokens; negative ones count from their end."""


@dataclass(eq=False, repr=False)
class Trace(Copied):
    """One run of a host model: its token-mixing layers in order of execution, and its output.

    `copy.deepcopy(trace)` copies the model too, and pickling raises `UncoveredError`: save results, and trace again.

    Attributes:
        host: the model.
        arguments: the arguments of the call, by parameter name.
        output: the model's output; at length with the logits of the last real tokens only (see `trace`).
        layers: every call of a token-mixing module.
        steps: the same layers in steps, whose layers are added to the stream in one sum.
        mask: real tokens (batch, length), None if all are real.
        weights: the checksums of the model's weights.
        opaque: the paths of the layers without an adapter, which are recorded or opaque (see `trace(strict=False)`).
        text: the text that was given as input, None for other inputs.
        warnings: a sentence for each change of the trace to the user's call that changes the output; results have them
            too (see `tracing.agreement`).
        products: the products of the run that the next one of `unilinattn.frozen` uses, None unless the trace is that
            of a call which explains the model.
        draws: the states of the random number generators before a run whose output depends on its draws, else None.
    """

    host: nn.Module
    arguments: Mapping[str, Any]
    output: Any
    layers: tuple[Layer, ...]
    steps: tuple[Step, ...]
    mask: Bool[Tensor, "batch length"] | None
    weights: Weights
    opaque: frozenset[str]
    text: Text | None = None
    warnings: tuple[str, ...] = ()
    products: Products | None = None
    draws: States | None = None

    def __repr__(self) -> str:
        """List the layers, each on a line."""
        return "\n".join([f"Trace of {self.model}: {len(self.layers)} layers", *(f"  {x!r}" for x in self.layers)])

    @property
    def model(self) -> str:
        """The model's class name."""
        return type(self.host).__name__

    @property
    def ids(self) -> Int[Tensor, "batch length"] | None:
        """The token ids of the inputs, None for other inputs and for those of two streams."""
        return token_ids(self.arguments)

    @property
    def image_tokens(self) -> ImageTokens | None:
        """Places of an image's patches and class tokens in the sequence, None for other inputs or if unknown.

        Known for the vision models of `registry.register_image_tokens`, unless another sequence has as many tokens.
        """
        shapes = [stream.shape for stream in self.streams]
        if len({*shapes}) < len(shapes):
            return None
        return image_tokens(self.host, self.arguments, {layer.output.shape[1] for layer in self.layers})

    @property
    def token_shape(self) -> tuple[int, int]:
        """(sequences, tokens) of the last layer, whose sequences may be windows of those of the inputs."""
        batch, length = self.layers[-1].output.shape[:2]
        rows = next((tensor.shape[0] for tensor in tensors(self.arguments) if tensor.ndim > 1), batch)
        windows = batch // rows if rows and batch % rows == 0 else 1
        return batch // windows, length * windows

    @property
    def versions(self) -> dict[str, str]:
        """Versions of this library, of torch and of the host's package."""
        package = type(self.host).__module__.split(".")[0]
        versions = {"unilinattn": _version("unilinattn"), "torch": torch.__version__}
        host = getattr(sys.modules.get(package), "__version__", None)
        return versions if host is None else {**versions, package: str(host)}

    @cached_property
    def streams(self) -> tuple[TokenStream, ...]:
        """The streams of tokens that the layers write, such as an encoder's and a decoder's."""
        return token_streams(self.layers)

    @property
    def target_stream(self) -> TokenStream:
        """The stream of the last layer, whose tokens a target counts."""
        return stream_written(self.layers[-1], self.layers, self.streams)

    def positions(self, target: Target) -> Int[Tensor, " batch"]:
        """Return the position in each sequence of a target, which counts real tokens.

        Raises `InputError` if a sequence has no such real token, and for a target of another type or size.
        """
        (batch, length), mask = self.token_shape, self.layers[-1].mask
        return positions_of(
            target, torch.ones(batch, length, dtype=torch.bool, device="cpu") if mask is None else mask.cpu()
        )

    @cached_property
    def explained_logit(self) -> ExplainedLogit:
        """The decision which logit is explained, for every run of the model."""
        sizes = frozenset() if self.ids is None else plain_sizes(self.host)
        return ExplainedLogit(self.output, self.arguments, self.token_shape, self.positions, self.model, sizes)

    def gradient(self, target: Target = -1, logit: Logit = None) -> tuple[Float[Tensor, "batch query out"], ...]:
        """Return the gradient of a logit of the model itself with respect to each layer's output.

        The logit is that of the model's prediction at `target`, that of a token or class id, the difference of two, or
        a scalar function of the model's output (see `Logit`). A model with one vector of logits for each sequence
        ignores `target`.

        Runs the model once more, with gradients, and restores it. Registered mixers run through their live operators:
        the same function, whose backward pass is linear in length where a host's loop is not. The backward pass
        computes the model's blocks again from their inputs, one after the other (see `host.recomputation`). A host
        that accepts `logits_to_keep` computes the logits of the target only, or all of them for a function.

        Raises `ModelStateError` if a weight changed since the trace, for weights made in inference mode and for active
        dropout, and `InputError` for a target or logit that does not fit.
        """
        return next(self.gradients([target], logit))

    def gradients(
        self, targets: Iterable[Target], logit: Logit = None
    ) -> Iterator[tuple[Float[Tensor, "batch query out"], ...]]:
        """Yield `gradient` for each target, a forward and a backward pass each.

        Nothing is kept between targets, but for the last one inside of `one_gradient`. Raises `ModelStateError` if a
        weight changes before the last one.
        """
        self.require_whole("gradients")
        for target in list(targets):
            self.weights.require_same(self.host, self.model, "this gradient would not be that of the traced model")
            compute = partial(gradient_of, self.host, self.layers, self.opaque, self.explained_logit, target, logit)
            with drawing(self.draws):
                gradient = compute() if callable(logit) else shared_gradient(self, target, logit, compute)
            yield gradient

    def require_whole(self, what: str) -> None:
        """Raise `UncoveredError` if the trace was made in pieces."""
        if any(layer.in_pieces for layer in self.layers):
            raise UncoveredError(f"{what} run the model on all tokens at once; trace without stream_to=.")

    def gradient_cost(self, logit: Logit = None) -> int:
        """Return the peak bytes of `gradient` for one target, without running the model.

        Raises `InputError` for a model without logits, unless `logit` is a function.
        """
        return gradient_cost(self.host, self.layers, self.explained_logit.elements(self.host, logit))

    def frozen_cost(self, targets: int, *, rule: str = "freeze") -> int:
        """Return the peak bytes of a frozen run for `targets` positions, without running the model."""
        elements = self.explained_logit.elements_at(targets)
        return frozen_cost(self.host, self.layers, elements, rule=rule)


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    bos: bool = False,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: bool = True,
    substitute_above: int = SUBSTITUTE_ABOVE,
    stream_to: str | Path | None = None,
) -> Trace:
    """Run a model once and return its token-mixing layers, whose exact operators are built on first access.

    The model is restored exactly, also after an exception or an interrupt: hooks, buffers, parameters, training flags
    and attention implementation. It runs without a cache, and without the wrappers of `docs/hosts.md`. Runs in several
    threads wait for each other; calls of the model from other threads are not recorded.

    A module without an adapter that mixes tokens is recorded: the functions of torch that it calls become the stages of
    its operator (see `docs/architectures.md`). Code outside of all layers that moves information between tokens is
    found by perturbing tokens: four to nine runs of the model without its layers, once for each model (see
    `tracing.completeness`). Softmax attention runs by the model's own function, or by the eager one of the host's file
    where sinks, for instance, decide its weights, and the first trace of a model and kind of input compares its output
    with that of the model as it is called, for one more run (see `tracing.agreement`).

    Above `substitute_above` tokens hosts' scans need tens of GiB. There every causal mixer runs through its operator,
    which is checked on the first 2048 tokens against the host's own forward; `prefix_error` and `reconstruction_error`
    of the layer are those of this prefix. A host that accepts `logits_to_keep` computes only the logits of each
    sequence's last real token, and one layer's operator is kept at a time.

    Memory: operators hold no copies of weights but read them in the model, also where accelerate offloads it. The trace
    holds three tensors for each layer, its input, its output and the stream: in float32 12 bytes per
    token, layer and channel; a fourth, the stream after the layer, if something is added before the next one. A running
    trace takes 4 bytes more, and about 40 per token and inner channel of the layer being computed (Mamba-1, Mamba-2).

    Args:
        model: the host model.
        inputs: a text or an image or a list of either, a tensor of ids or pixels, or a mapping of the host's keyword
            arguments. An image is a PIL image, which is converted to RGB, or a uint8 array (height, width, 3). Ids
            (batch, choice, length) of a model that returns a logit for each choice are (batch * choice) sequences, and
            an encoder-decoder that makes its decoder's ids of those of its encoder is given them. Padding that a host
            adds at the end, as Longformer does to whole windows, is added to the trace's arguments and its mask.
        tokenizer: the tokenizer of texts, such as `transformers.AutoTokenizer.from_pretrained` returns.
        processor: the processor of images: an image processor of transformers, or a callable from a PIL image to a
            tensor (channel, height, width), such as timm's `create_transform` returns.
        bos: whether the tokenizer's beginning-of-text token goes before each text that does not open with it (see
            `docs/methods/index.md`, "Attention sinks").
        dtype: dtype of the operators, at least float32; by default float32, or float64 for a float64 model.
        strict: whether to refuse modules that move information between tokens and have neither an adapter nor functions
            that can be recorded. With `strict=False` they become opaque layers without an operator: methods leave them
            out, and every result names them in `left_out`. Those that contain registered layers are refused in either
            case.
        progress: whether to show a progress bar on a terminal or in a notebook.
        substitute_above: largest number of tokens at which mixers run through the host's own forward.
        stream_to: a folder for memory-mapped files of the three tensors of each layer: the model runs on pieces of the
            tokens, and the memory is that of one piece (see `docs/memory.md`). None keeps the tensors in memory.

    Raises `UnknownArchitectureError` for a model without a token mixer, or with one outside of the modules that can be
    layers, `UncoveredError` for a module that cannot be recorded, with the function for which it cannot,
    `ModelStateError` for active dropout and for weights that are sharded or not loaded, `InputError` for inputs that do
    not fit, `OptionError` for an invalid `dtype`, `substitute_above` or `stream_to` and for a `bos` that cannot be
    added, and `UncoveredError` if an adapter does not cover a call, an operator that replaces a host's forward differs
    from it, or a layer cannot be computed in pieces.
    """
    model = unwrapped(model)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype={dtype!r}; give torch.float32, torch.float64, or None for the model's own.")
    if isinstance(substitute_above, bool) or not isinstance(substitute_above, int) or substitute_above < 1:
        raise OptionError(
            f"substitute_above={substitute_above!r}; give a positive number of tokens, such as {SUBSTITUTE_ABOVE}."
        )
    model, inputs = choices_as_sequences(model, inputs)
    text = None
    if bos and not is_text(inputs):
        raise OptionError(f"bos=True, and {NO_TEXT}")
    if processor is not None or is_image(inputs):
        inputs = processed(inputs, processor, model)
    elif is_text(inputs):
        text = encoded(inputs, tokenizer, bos=bos)
        inputs = text.arguments_for(model)
    else:
        text = tokenized(inputs, tokenizer)
    # The caller may write into the tensors before a gradient runs the model on them again.
    arguments = in_gradient_mode(False, lambda: tree_map_only(Tensor, torch.clone, host_arguments(model, inputs)))
    arguments = with_decoder_ids(model, arguments)

    def built(model: nn.Module) -> Trace:
        states = generator_states(model)
        if stream_to is None:
            recorder, output, seed = covered_run(
                model, arguments, strict=strict, progress=progress, above=substitute_above
            )
        else:
            recorder, output = run_in_pieces(
                model, arguments, stream_to, dtype, strict=strict, progress=progress, above=substitute_above
            )
        warn_of_leaks(arguments, recorder.layers)
        builder = LayerBuilder(model, arguments, dtype, masks_of_streams(model, arguments, recorder.layers))
        layers, steps = builder.build_steps(recorder.layers)
        is_whole = stream_to is None and not may_be_long(arguments, substitute_above)
        if is_whole:
            separate_towers(model, arguments, layers, seed)
        warn_of_recorded_leaks(arguments, layers)
        mask, weights = builder.mask, builder.weights
        traced = Trace(model, arguments, output, layers, steps, mask, weights, recorder.opaque, text)
        traced.products, traced.draws = recorder.products, drawn_from(states, model)
        if traced.draws is not None and is_whole and not depends_on_draws(model, arguments, traced.draws):
            traced.draws = None
        if is_whole:
            call = call_of(model, inputs, arguments, opaque=bool(recorder.opaque))
            traced.warnings = compared_with_call(model, call, arguments, output, seed)
        return traced

    seed = torch.get_rng_state()
    try:
        traced = built(model)
        longer = padded_arguments(model, arguments, traced.output, traced.layers) if stream_to is None else None
        if longer is None:
            return traced
        again = trace(model, longer, dtype=dtype, strict=strict, progress=progress, substitute_above=substitute_above)
        again.text = None if text is None else padded_text(text, longer)
        return again
    except (UncoveredError, UnknownArchitectureError) as error:
        if isinstance(error, UnknownArchitectureError) and error.path is not None:
            # What mixes outside of the layers is one too, unless it would take their place.
            with suppress(UncoveredError, UnknownArchitectureError):
                regional = regional_model(model, arguments, error.path)
                torch.set_rng_state(seed)
                if regional is not None and not _hold_any(model, error.layers, (traced := built(regional)).layers):
                    return traced
        regional = regional_model(model, arguments, error.path if isinstance(error, WithoutVectorsError) else None)
        if regional is None:
            raise
    torch.set_rng_state(seed)
    return built(regional)


def _hold_any(model: nn.Module, paths: Collection[str], layers: Sequence[Layer]) -> bool:
    """Tell whether a layer that is a part of a forward holds one of the modules at the paths."""
    modules = {id(model.get_submodule(path)) for path in paths}
    parts = (layer.module for layer in layers if isinstance(layer.module, Region))
    return any(id(inner) in modules for part in parts for inner in part.modules())
