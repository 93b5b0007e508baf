"""Select the layers, rows and tokens of a method, and check that the layers' scores can be combined."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import OptionError, StreamError, UncoveredError, nearest
from unilinattn.host.inputs import real_tokens
from unilinattn.host.logits import Logit
from unilinattn.operator.operator import MixerOperator
from unilinattn.reruns.separate import advise_pairs
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import (
    TokenStream,
    mixing_ports,
    require_one_batch,
    returned_by,
    returns_maps,
    stream_read,
    stream_written,
)
from unilinattn.tracing.trace import Target, Trace
from unilinattn.tracing.trust import require_exact


def selected_layers(trace: Trace, method: str, layers: str | int | Sequence[int | str]) -> tuple[Layer, ...]:
    """Return the layers named by the option `layers` of a method, in the order of the list.

    Raises `OptionError` for an unknown layer, and `ExactnessError` for a layer that misses the host's output.
    """
    if isinstance(layers, str):
        selection = _known(trace, method)
    else:
        selection = tuple(_named(trace, method, wanted) for wanted in ([layers] if isinstance(layers, int) else layers))
        if len(set(map(id, selection))) < len(selection):
            raise OptionError(f"{method}: layers={layers} names a layer twice; name each one once.")
    require_exact(selection)
    return selection


def stackable_layers(trace: Trace, method: str, layers: str | int | Sequence[int | str]) -> tuple[Layer, ...]:
    """Return `selected_layers`; raise `UncoveredError` if the scores of these layers cannot be stacked."""
    selection = selected_layers(trace, method, layers)
    first = streams_of(trace, selection[0])
    for layer in selection[1:]:
        if (axes := streams_of(trace, layer)) != first:
            _require_output_read(trace, method, layer)
            raise UncoveredError(
                f"{method}: the scores of {selection[0].name} ({_described(first)}) and of {layer.name} "
                f"({_described(axes)}) have different axes and cannot be stacked; layers=[...] selects layers of one "
                "kind, and compose='rollout' multiplies the layers of all streams, for the methods that have it."
            )
    return selection


def _require_output_read(trace: Trace, method: str, layer: Layer) -> None:
    """Raise `UncoveredError` for a layer that reads what an earlier one returned beside its output, such as keys."""
    if not streams_of(trace, layer)[1].layers and (returned := returned_by(layer, trace.layers)) is not None:
        raise UncoveredError(
            f"{method}: {layer.name} reads {returned[1]!r}, vectors that {returned[0].name} returned beside its "
            "output, so its map reads an earlier depth of the stream than its input; layers=[...] leaves it out."
        )


def layers_from(trace: Trace, method: str, start_layer: int | float) -> tuple[Layer, ...]:
    """Return the layers from `start_layer` on that have an operator, checked against the host's outputs.

    A number between 0 and 1 is a share of the layers.

    Raises `OptionError` if `start_layer` is beyond the last layer, and `ExactnessError` for a layer that misses the
    host's output.
    """
    count, transparent = len(trace.layers), _known(trace, method)
    first = start_layer if isinstance(start_layer, int) else int(start_layer * count)
    if first >= count:
        raise OptionError(
            f"{method}: start_layer={start_layer} leaves no layer; {trace.model} has layers 0 to {count - 1}."
        )
    selection = tuple(layer for layer in trace.layers[first:] if layer in transparent)
    require_exact(selection)
    return selection


def _known(trace: Trace, method: str) -> tuple[Layer, ...]:
    """Return the layers that are not opaque; raise `UncoveredError` if there are none."""
    layers = tuple(layer for layer in trace.layers if not layer.opaque)
    if not layers:
        raise UncoveredError(f"{method}: every layer of {trace.model} is opaque: no adapter knows any of them.")
    return layers


def composable_steps(trace: Trace, method: str, layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """Return these layers in order of execution, grouped into steps of layers that are added to the stream together.

    Raises `UncoveredError` for a layer that mixes several tensors at once, for layers in one sum that read different
    tokens, and for streams with different numbers of sequences, but for several images of one sequence.
    """
    members = set(map(id, layers))
    steps = (tuple(layer for layer in step.layers if id(layer) in members) for step in trace.steps)
    selected = [step for step in steps if step]
    for step in selected:
        first = streams_of(trace, step[0])
        for layer in step:
            if len(layer.ports) > 1:
                raise UncoveredError(_several(layer))
            _require_output_read(trace, method, layer)
            if (axes := streams_of(trace, layer)) != first:
                raise UncoveredError(
                    f"{method} multiplies the maps of layers; {layer.name} ({_described(axes)}) is added to the stream "
                    f"together with {step[0].name} ({_described(first)}), which reads other tokens."
                )
    streams = dict.fromkeys(stream for step in selected for stream in streams_of(trace, step[0]))
    advice = advise_pairs(trace)
    if advice or trace.token_shape[0] > 1 or min(stream.shape[0] for stream in streams) > 1:
        require_one_batch(tuple(streams), advice)
    return selected


def streams_of(trace: Trace, layer: Layer) -> tuple[TokenStream, TokenStream]:
    """Return the streams that a layer writes and that it reads.

    Raises `UncoveredError` for a layer that mixes several tensors.
    """
    port, _ = _only(layer)
    written = stream_written(layer, trace.layers, trace.streams)
    return written, stream_read(layer, port, trace.layers, trace.streams)


def reads_own_tokens(trace: Trace, layer: Layer) -> bool:
    """Whether a layer reads the tokens that it writes, so that a row's own token is among its keys."""
    written, read = streams_of(trace, layer)
    return written == read


def begins_stream(trace: Trace, layer: Layer) -> bool:
    """Whether a layer makes the first vectors of its stream, and is added to nothing.

    As do the merging of patches, attention pooling and the projection of patches to a text's stream. A module takes the
    output itself, or no stream can be added to it: the layer reads one tensor, of other tokens or, if no other layer is
    in its stream, of another width.
    """
    written, read = streams_of(trace, layer)
    is_first = bool(written.layers) and trace.layers[written.layers[0]].name == layer.name
    is_taken = written != read and layer.reads_its_output
    is_resized = written.shape[1] != read.shape[1]
    is_widened = len(written.layers) == 1 and layer.input.shape[-1] != layer.output.shape[-1]
    return is_first and layer.stream is None and (is_taken or is_resized or is_widened)


def stream_errors(trace: Trace, layers: Sequence[Layer], method: str, remedy: str = "") -> dict[str, float]:
    """Return the `stream_error` of each layer's step by the layer's name, without modules that contain their residual.

    Raises `StreamError`, which ends with `remedy`, if an error exceeds the rounding of the host's dtype.
    """
    errors = {}
    for layer in layers:
        step = next(step for step in trace.steps if any(layer is other for other in step.layers))
        error, allowed = step.stream_error(), step.stream_tolerance()
        if error is None:
            continue
        if not error <= allowed:
            names = " and ".join(other.name for other in step.layers)
            raise StreamError(
                f"{method}: the residual stream and the output of {names} do not add up to the next stream of "
                f"{trace.model}: the relative error is {error:.1e}, and {allowed:.0e} is accepted. The "
                f"host may have written into its stream after the layer.{remedy}"
            )
        errors[layer.name] = error
    return errors


def residual_of(trace: Trace, layer: Layer, method: str, remedy: str = "") -> Float[Tensor, "batch query out"]:
    """Return the stream that the host adds to a layer's output, zeros for one that begins a stream.

    Raises `UncoveredError`, which ends with `remedy`, if the trace found none.
    """
    if layer.residual is None and begins_stream(trace, layer):
        return torch.zeros_like(layer.output)
    if layer.residual is None:
        raise UncoveredError(
            f"{method} needs the stream that the host adds to the output of {layer.name}; {layer.no_residual}.{remedy}"
        )
    return layer.residual


def stream_groups(trace: Trace) -> list[tuple[int, ...]]:
    """Return the indices of the layers that read and return one tensor, in groups of equal axes, the largest first."""
    groups: dict[object, list[int]] = {}
    for index, layer in enumerate(trace.layers):
        if not layer.opaque and len(layer.ports) == 1 and not returns_maps(layer):
            groups.setdefault(streams_of(trace, layer), []).append(index)
    return sorted(map(tuple, groups.values()), key=len, reverse=True)


def query_rows(trace: Trace, layer: Layer, target: Target | None = None) -> Int[Tensor, "batch row"]:
    """Return the query positions to compute: all of them, or the target's position in each sequence.

    Raises `InputError` for a target out of range, and `UncoveredError` if this layer's queries are not the last
    layer's tokens, which the target counts, or those of windows.
    """
    batch, length = layer.output.shape[:2]
    if target is None:
        return torch.arange(length, device=layer.output.device).expand(batch, -1)
    if stream_written(layer, trace.layers, trace.streams) != trace.target_stream:
        raise UncoveredError(
            f"a target counts the tokens of {trace.layers[-1].name}, and {layer.name} has its queries on another "
            "stream; pass target=None and read off the row."
        )
    if trace.token_shape != (batch, length):
        raise UncoveredError(
            f"{layer.name} runs on {batch} windows of {length} tokens, and a target counts the {trace.token_shape[1]} "
            "tokens of a sequence; pass target=None and read off the row of its window."
        )
    return trace.positions(target).to(layer.output.device)[:, None]


def only_target(trace: Trace, target: Target | None, logit: Logit) -> Target | None:
    """Return the target, by default the last token if all positions have the same scalar.

    Raises `InputError` for a model without logits, unless `logit` is a function.
    """
    if not callable(logit):
        # An output without logits is refused.
        _ = trace.explained_logit.logits
    return -1 if target is None and one_scalar(trace, logit) else target


def one_scalar(trace: Trace, logit: Logit) -> bool:
    """Whether every query has the same scalar: a function of the output, or a class logit of the whole sequence."""
    return callable(logit) or (trace.explained_logit.exists and trace.explained_logit.logits.ndim == 2)


def every_position(trace: Trace) -> list[Int[Tensor, " batch"]]:
    """Return targets that reach every real position; a shorter sequence repeats its last one."""
    layer = trace.layers[-1]
    batch, length = layer.output.shape[:2]
    counts = torch.full((batch,), length, device="cpu") if layer.mask is None else layer.mask.sum(1).cpu()
    return [torch.clamp(counts - 1, max=position) for position in range(int(counts.max()))]


def key_mask(trace: Trace, layer: Layer) -> Bool[Tensor, "batch key"] | None:
    """Return the mask of a layer's real keys, None if all are real."""
    mask = stream_mask(trace, streams_of(trace, layer)[1])
    return None if mask is None else mask.to(layer.output.device)


def stream_mask(trace: Trace, stream: TokenStream) -> Bool[Tensor, "batch token"] | None:
    """Return the real tokens of a stream, None if all are real."""
    layers = layers_in(trace, stream)
    if layers:
        return layers[0].mask
    # Of a stream that no layer writes, such as the states of an encoder elsewhere, only an argument tells.
    masks = (real_tokens(trace.arguments, name) for name in ("encoder_attention_mask", "attention_mask"))
    return next((mask for mask in masks if mask is not None and tuple(mask.shape) == stream.shape), None)


def layers_in(trace: Trace, stream: TokenStream) -> list[Layer]:
    """Return the layers that read and write the tokens of a stream."""
    return [trace.layers[index] for index in stream.layers]


def real_pairs(trace: Trace, layer: Layer, rows: Int[Tensor, "batch row"]) -> Bool[Tensor, "batch row key"]:
    """Return the mask of pairs of a selected query and a key that are both real tokens."""
    keys, queries = key_mask(trace, layer), layer.mask
    if keys is None:
        keys = torch.ones(_only(layer)[1], dtype=torch.bool, device=rows.device)
    real = torch.ones_like(rows, dtype=torch.bool) if queries is None else queries.gather(1, rows)
    return real[:, :, None] & keys[:, None, :]


def gather_rows(
    scores: Float[Tensor, "batch query key"], rows: Int[Tensor, "batch row"]
) -> Float[Tensor, "batch row key"]:
    """Return the rows of each sequence at its positions in `rows`."""
    return scores.gather(1, rows.unsqueeze(-1).expand(-1, -1, scores.shape[-1]))


@dataclass(frozen=True)
class StepRows:
    """Some rows of the map of a step, whose layers read and write the same tokens.

    Attributes:
        trace: the trace.
        step: the layers of the step.
        index: the query position of each row.
    """

    trace: Trace
    step: Sequence[Layer]
    index: Int[Tensor, "batch row"]

    @property
    def layer(self) -> Layer:
        """The first layer of the step."""
        return self.step[0]

    @property
    def are_all(self) -> bool:
        """Whether every row of the map is among them."""
        return self.index.shape[1] == self.layer.output.shape[1]

    @property
    def real(self) -> Bool[Tensor, "batch row"]:
        """Whether each row is that of a real token."""
        mask = self.layer.mask
        return torch.ones_like(self.index, dtype=torch.bool) if mask is None else mask.gather(1, self.index)

    def of(self, vectors: Float[Tensor, "batch query channel"]) -> Float[Tensor, "batch row channel"]:
        """Return the vectors of the rows among those of all queries."""
        return gather_rows(vectors, self.index)


def only_port(layer: Layer) -> MixerOperator:
    """Return a layer's operator; raise `UncoveredError` if it reads several tensors, so that one map is incomplete."""
    if len(layer.ports) > 1:
        raise UncoveredError(_several(layer))
    return layer.operator


def mixing_operator(layer: Layer) -> MixerOperator:
    """Return a layer's operator, whose maps are those of the only port whose tokens it mixes.

    Other ports add to the tokens of the output, such as a residual stream. Raises `UncoveredError` for several.
    """
    _only(layer)
    return layer.operator


def _only(layer: Layer) -> tuple[str, tuple[int, int]]:
    """Return the only port whose tokens a layer mixes and its (batch, number of tokens).

    Other ports add to the tokens of the output, such as a residual stream. Builds no operator at length.
    """
    if returns_maps(layer):
        raise UncoveredError(
            f"{layer.name} returns several feature maps, and its operator gives the first one only; layers=[...] "
            "leaves it out."
        )
    ports = mixing_ports(layer)
    if len(ports) != 1:
        raise UncoveredError(_several(layer))
    return next(iter(ports.items()))


def _several(layer: Layer) -> str:
    return (
        f"{layer.name} reads several tensors ({', '.join(layer.ports)}), so one map does not describe it; its "
        "operator has `matrix(port=...)` and `contributions(port=...)`, and layers=[...] leaves it out."
    )


def _named(trace: Trace, method: str, wanted: int | str) -> Layer:
    if isinstance(wanted, str):
        names = {layer.name: layer for layer in trace.layers}
        if wanted not in names:
            raise OptionError(f"{method}: no layer {wanted!r}" + nearest(wanted, names))
        return names[wanted]
    count = len(trace.layers)
    if not -count <= wanted < count:
        raise OptionError(f"{method}: layer {wanted} is out of range; {trace.model} has layers 0 to {count - 1}.")
    return trace.layers[wanted]


def _described(axes: tuple[TokenStream, TokenStream]) -> str:
    queries, keys = axes
    source = "" if keys == queries else f" reading {keys.name!r}"
    return f"stream {queries.name!r}{source}, {queries.shape[1]} x {keys.shape[1]}"
