"""The kind of mixing of each layer, measured on different inputs (HMA ACL Theorem 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import Figure, Where, draw, points
from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.errors import InputError
from unilinattn.kernels.precision import full_precision
from unilinattn.operator.stages import Matrix, Mix, Scale, Stage, walk
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

FIXED = "fixed mixing"
GATED = "fixed mixing with diagonal data control"
CONTROLLED = "data-controlled mixing"


@dataclass(frozen=True)
class LayerMixing:
    """How the maps of one layer change between inputs.

    Attributes:
        layer: name of the layer.
        mixing: largest relative change of the token mixers.
        gating: largest relative change of the gates before the output projection, the diagonal factors of the map.
        limit: largest change that is rounding.
    """

    layer: str
    mixing: float
    gating: float
    limit: float

    @property
    def kind(self) -> str:
        """The kind of mixing in HMA ACL Theorem 1."""
        return CONTROLLED if self.mixing > self.limit else GATED if self.gating > self.limit else FIXED


@dataclass(frozen=True, repr=False)
class Taxonomy:
    """The kind of mixing of each layer of a model."""

    model: str
    layers: tuple[LayerMixing, ...]

    def __repr__(self) -> str:
        """List the layers with their kinds and changes."""
        rows = [("layer", "kind", "mixing", "gating")]
        rows += [(x.layer, x.kind, f"{x.mixing:.1e}", f"{x.gating:.1e}") for x in self.layers]
        return f"Taxonomy of {self.model}\n" + aligned(rows, right=(2, 3))

    def plot(self, where: Where = None) -> Figure:
        """Draw the changes of each layer, with the limit of rounding; save them to a path or draw into given axes."""
        limit = min(x.limit for x in self.layers)
        # A logarithmic axis has no zero: changes below a thousandth of the limit are drawn there.
        series = {
            "token mixers": [max(x.mixing, limit / 1e3) for x in self.layers],
            "gates": [max(x.gating, limit / 1e3) for x in self.layers],
        }
        title = f"{self.model}: change between inputs"
        panel = points(series, title, across="layer", upwards="relative change", limit=limit)
        return draw(where, [panel], size=(4.6, 3.0))


@full_precision()
def taxonomy(trace: Trace) -> Taxonomy:
    """Measure the kind of mixing of each layer on the sequences of one trace, which are inputs of equal length.

    Mixing is fixed if every token mixer has the same matrix for all sequences, up to rounding; it has diagonal data
    control if in addition a gate before the output projection differs. Matrices are compared by their products with
    one random vector, which differ whenever the matrices do, in time linear in length for mixers with a linear pass.
    The comparison leaves out activations and norms, which mix no tokens, and gates inside or after the output
    projection, such as S4's GLU.

    Raises `InputError` for a single sequence, for padding, and for a layer whose inputs are all equal.
    Source: HMA ACL Theorem 1 and Appendix C.
    """
    batch = trace.layers[-1].output.shape[0]
    if batch < 2:
        raise InputError(f"the trace holds {batch} sequence; trace a batch of two or more different ones to compare.")
    if trace.mask is not None and not bool(trace.mask.all()):
        raise InputError("the trace holds padding; the inputs to compare need equal lengths without padding.")
    return Taxonomy(trace.model, tuple(_measure(layer) for layer in trace.layers if not layer.opaque))


def _measure(layer: Layer) -> LayerMixing:
    op = layer.operator
    if not any(_change(x) for x in op.inputs.values()):
        raise InputError(f"every sequence has the same input at {layer.name}; trace different sequences to compare.")
    stages = [stage for chain in op.chains.values() for stage in walk(chain)]
    mixing = [_change(_response(stage)) for stage in stages if isinstance(stage, Mix)]
    gating = [_change(stage.scale) for chain in op.chains.values() for stage in _gates(list(walk(chain)))]
    return LayerMixing(
        layer.name, max(mixing, default=0.0), max(gating, default=0.0), tolerance("law", layer.output.dtype)
    )


def _response(stage: Mix) -> Float[Tensor, "batch query part"]:
    """Return the product of a mixer's matrices with one random vector, real and imaginary parts side by side."""
    batch, heads, _, keys = stage.mixer.shape
    like = stage.mixer.zeros(())
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, keys, heads, 1, generator=generator, dtype=torch.float64, device="cpu").to(like)
    mixed = stage.mixer.apply(vector.expand(batch, -1, -1, -1)).flatten(2)
    return torch.view_as_real(mixed).flatten(2) if mixed.is_complex() else mixed


def _gates(stages: Sequence[Stage]) -> Iterator[Scale]:
    """Yield the gates before the first matrix of the output projection."""
    for stage in stages:
        if isinstance(stage, Matrix) and stage.role == "output":
            return
        if isinstance(stage, Scale) and stage.role == "gate":
            yield stage


def _change(values: Tensor) -> float:
    """Return the largest relative difference of the other sequences from the first."""
    others = values[1:]
    return relative_error(others, values[:1].expand_as(others)) if len(others) else 0.0
