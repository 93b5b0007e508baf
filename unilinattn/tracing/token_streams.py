"""`TokenStream`: the tokens of one sequence of a model, such as those of an encoder or of a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn

from unilinattn.call.nested import tensors, unlisted
from unilinattn.errors import UncoveredError
from unilinattn.host.recorder import MAIN
from unilinattn.operator.stages import walk
from unilinattn.tracing.layer import Layer

OWN = "x"
"""Port of a layer's own input."""


@dataclass(frozen=True)
class TokenStream:
    """Tokens that some layers write, or that a layer reads and none writes.

    Attributes:
        name: the part of the layers' paths that tells the stream from the others ("encoder"), or the port.
        shape: (batch, length).
        layers: the indices of the layers whose outputs are these tokens, in order of execution.
    """

    name: str
    shape: tuple[int, int]
    layers: tuple[int, ...]

    def count(self, batch: int) -> int:
        """Return the number of tokens of each of `batch` sequences: of a single one, those of all its images."""
        return self.shape[0] * self.shape[1] // batch


def token_streams(layers: Sequence[Layer]) -> tuple[TokenStream, ...]:
    """Return the streams of a trace's layers, in order of their first layers.

    Layers of different numbers of sequences or tokens write different streams. Of equal numbers they do if the trace
    told their `Layer.tower` apart, or if they lie in different parts of the model, and a layer of one part reads as
    many tokens of another tensor than its input, as a decoder does that is as long as its encoder.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    crossed = {tuple(layer.output.shape[:2]) for layer in layers if _reads_as_many_others(layer, layers)}
    for index, layer in enumerate(layers):
        shape = tuple(layer.output.shape[:2])
        tower = tower_of(layer.name) if shape in crossed else layer.tower
        groups.setdefault((shape, tower), []).append(index)
    names = _names([[layers[index].name for index in group] for group in groups.values()])
    streams = zip(names, groups.items(), strict=True)
    return tuple(TokenStream(name, key[0], tuple(group)) for name, (key, group) in streams)  # type: ignore[arg-type]


def stream_written(layer: Layer, layers: Sequence[Layer], streams: Sequence[TokenStream]) -> TokenStream:
    """Return the stream whose tokens are a layer's output."""
    index = _index(layer, layers)
    return next(stream for stream in streams if index in stream.layers)


def stream_read(layer: Layer, port: str, layers: Sequence[Layer], streams: Sequence[TokenStream]) -> TokenStream:
    """Return the stream whose tokens a port of a layer reads; one of the port's name if no earlier layer writes it."""
    index = _index(layer, layers)
    written, shape = stream_written(layer, layers, streams), layer.ports[port]
    if port == OWN and shape == written.shape:
        return written
    # Of several, the one that was written last: a decoder reads the last layer of its encoder.
    earlier = [s for s in streams if s is not written and s.shape == shape and s.layers[0] < index]
    if earlier:
        return max(earlier, key=lambda s: max(i for i in s.layers if i < index))
    return TokenStream(port, shape, ())


def streams_read(layers: Sequence[Layer]) -> tuple[TokenStream, ...]:
    """Return the streams that the layers read, those of a trace in order and then those that no layer writes.

    Raises `UncoveredError` if they have different numbers of sequences.
    """
    streams = token_streams(layers)
    read = {stream_read(layer, port, layers, streams): None for layer in layers for port in layer.ports}
    ordered = (*(s for s in streams if s in read), *(s for s in read if s not in streams))
    return require_one_batch(ordered)


def require_one_batch(streams: tuple[TokenStream, ...], advice: str = "") -> tuple[TokenStream, ...]:
    """Return streams; raise `UncoveredError`, with `advice` at its end, if they have different numbers of sequences."""
    if len({stream.shape[0] for stream in streams}) > 1:
        sizes = ", ".join(f"{s.name} {s.shape[0]} x {s.shape[1]}" for s in streams)
        raise UncoveredError(
            f"the streams of tokens have different numbers of sequences ({sizes}), so their tokens are not those of "
            f"one sequence{advice}."
        )
    return streams


def key_slots(streams: Sequence[TokenStream], batch: int) -> dict[TokenStream, slice]:
    """Return the keys of each stream's tokens in scores whose keys are the tokens of one stream after the other."""
    ends = list(accumulate(stream.count(batch) for stream in streams))
    return {stream: slice(end - stream.count(batch), end) for stream, end in zip(streams, ends, strict=True)}


def mixing_ports(layer: Layer) -> dict[str, tuple[int, int]]:
    """Return the ports whose tokens a layer mixes, and their (batch, length); others add to the output's own tokens."""
    ports = layer.ports
    if len(ports) > 1:
        chains = layer.operator.chains
        ports = {port: shape for port, shape in ports.items() if any(stage.mixes for stage in walk(chains[port]))}
    return ports


def others_returned(layer: Layer) -> list[Tensor]:
    """Return what stands for the numbers that a layer's module returned beside its output, but for weights."""
    returned = (x for x in tensors(layer.structure) if x is not MAIN and not isinstance(x, nn.Parameter))
    return [x for x in returned if x.is_floating_point()]


def returned_by(layer: Layer, layers: Sequence[Layer]) -> tuple[Layer, str] | None:
    """Return an earlier layer, and the port of this one that reads what it returned beside its output; None if none.

    Such vectors are tokens of the layer's stream at an earlier depth.
    """
    arguments, earlier = unlisted(layer.arguments), layers[: _index(layer, layers)]
    shapes = {port: value.shape for port in layer.ports if isinstance(value := arguments.get(port), Tensor)}
    sources = ((source, port) for port in shapes if port != OWN for source in reversed(earlier))
    return next((each for each in sources if any(x.shape == shapes[each[1]] for x in others_returned(each[0]))), None)


def returns_maps(layer: Layer) -> bool:
    """Tell whether a layer returned several feature maps of an image, of which its output is the first."""
    batch, tokens = layer.output_shape[0], layer.output.shape[1]
    maps = (x for x in others_returned(layer) if x.ndim == len(layer.output_shape) == 4 and len(x) == batch)
    # Attention weights, (batch, head, query, key), are no map; those of windows have other numbers of sequences.
    return any(x.shape[2] != tokens for x in maps)


def _index(layer: Layer, layers: Sequence[Layer]) -> int:
    # By name: a layer may be a copy of one of the trace, with the stages that follow it.
    return next(index for index, other in enumerate(layers) if other.name == layer.name)


def _reads_as_many_others(layer: Layer, layers: Sequence[Layer]) -> bool:
    """Whether a layer reads other tokens than its input that are as many as those that it writes."""
    shape = tuple(layer.output.shape[:2])
    towers = {tower_of(other.name) for other in layers if tuple(other.output.shape[:2]) == shape}
    # Ports are asked for only where it matters: they take the operator.
    return len(towers) > 1 and any(port != OWN and read == shape for port, read in mixing_ports(layer).items())


def tower_of(name: str) -> str:
    """Return the path of the list of modules around a layer, or of the module around it."""
    path = name.partition("#")[0].split(".")
    count = next((number for number, name in enumerate(path) if name.isdigit()), len(path) - 1)
    return ".".join(path[:count])


def _names(groups: Sequence[Sequence[str]]) -> list[str]:
    """Return a short name for each group of paths: their common part, without what all groups have in common."""
    prefixes = [_common([name.partition("#")[0].split(".")[:-1] for name in group]) for group in groups]
    shared = len(_common(prefixes)) if len(prefixes) > 1 else 0
    names: list[str] = []
    for prefix in prefixes:
        distinct = prefix[shared : shared + 1] or prefix[-1:]
        if distinct and distinct[0].isdigit() and shared:
            distinct = prefix[shared - 1 : shared + 1]
        name = ".".join(distinct) or "tokens"
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the first parts that all paths have."""
    first = min(paths, key=len)
    count = next((i for i, name in enumerate(first) if any(path[i] != name for path in paths)), len(first))
    return list(first[:count])
