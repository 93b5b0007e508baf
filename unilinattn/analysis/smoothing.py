"""Oversmoothing: the mean cosine similarity of the tokens' features, layer by layer (HMA arXiv Appendix 0.A)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import Figure, Where, draw, lines
from unilinattn.errors import InputError, UncoveredError
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True, eq=False, repr=False)
class Oversmoothing:
    """Mean cosine similarity of two tokens of the residual stream, by model and depth.

    Attributes:
        similarity: by model, (depth, batch): before the first step of layers, and after each step.
    """

    similarity: Mapping[str, Float[Tensor, "depth batch"]]

    def __repr__(self) -> str:
        """Show the mean over sequences at the start, in the middle and at the end of each model."""
        rows: list[tuple[str, ...]] = [("model", "steps", "first", "middle", "last")]
        for name, values in self.similarity.items():
            mean = values.mean(1).tolist()
            rows.append((name, str(len(mean) - 1), *(f"{x:.3f}" for x in (mean[0], mean[len(mean) // 2], mean[-1]))))
        return "Oversmoothing\n" + aligned(rows, right=range(1, 5))

    def plot(self, where: Where = None) -> Figure:
        """Draw the mean over sequences against the relative depth (HMA arXiv Fig. 6)."""
        series = {name: values.mean(1).tolist() for name, values in self.similarity.items()}
        title = "mean cosine similarity of tokens"
        panel = lines(series, title, across="relative depth", upwards="cosine similarity")
        return draw(where, [panel], size=(4.2, 3.0))


def oversmoothing(traces: Trace | Mapping[str, Trace], *, exclude: Sequence[int] = ()) -> Oversmoothing:
    """Return the mean cosine similarity of all pairs of tokens in the residual stream, after each step of layers.

    The similarity at one depth is 2 / (n (n - 1)) sum_{i < j} cos(x_i, x_j) over the n real tokens. It is computed in
    float64 from the norm of the sum of unit vectors, in time linear in length. `exclude` are positions that do not
    count, such as that of a CLS token; negative ones count from the end of the padded sequence.

    Raises `UncoveredError` if a layer's residual stream was not found, and `InputError` for fewer than two tokens, a
    feature vector of zeros, and positions out of range.
    Source: HMA arXiv Eq. 24 (Appendix 0.A); Wang et al., "Anti-Oversmoothing in Deep Vision Transformers" (2022).
    """
    models = {traces.model: traces} if isinstance(traces, Trace) else traces
    return Oversmoothing({name: _by_depth(trace, exclude) for name, trace in models.items()})


def token_cosine(
    features: Float[Tensor, "batch token feature"], real: Bool[Tensor, "batch token"]
) -> Float[Tensor, " batch"]:
    """Return the mean cosine similarity of all pairs of real tokens of each sequence, in time linear in length.

    Raises `InputError` for a sequence with fewer than two real tokens, and for a real token whose features are zero.
    """
    count = real.sum(1)
    if bool((count < 2).any()):
        raise InputError(f"sequence {int((count < 2).nonzero()[0])} has fewer than two tokens, which make no pair.")
    size = features.double().norm(dim=-1, keepdim=True)
    if bool((real & (size.squeeze(-1) == 0)).any()):
        sequence, token = (real & (size.squeeze(-1) == 0)).nonzero()[0].tolist()
        raise InputError(f"the features of token {token} of sequence {sequence} are zero and have no direction.")
    unit = (features.double() / size).masked_fill(~real.unsqueeze(-1), 0)
    return (unit.sum(1).pow(2).sum(-1) - count) / (count * (count - 1))


def _by_depth(trace: Trace, exclude: Sequence[int]) -> Float[Tensor, "depth batch"]:
    depths: list[Tensor] = []
    for step in trace.steps:
        first, last = step.layers[0], step.layers[-1]
        before, after = _found(first.stream, first), _found(last.next_stream, last)
        real = _counted(first, exclude)
        if not depths:
            depths.append(token_cosine(before, real).cpu())
        depths.append(token_cosine(after, real).cpu())
    return torch.stack(depths)


def _found(stream: Tensor | None, layer: Layer) -> Tensor:
    if stream is None:
        raise UncoveredError(
            f"the residual stream at {layer.name} is unknown: {layer.no_residual}. Measure features that you record "
            "yourself with `token_cosine`."
        )
    return stream


def _counted(layer: Layer, exclude: Sequence[int]) -> Bool[Tensor, "batch token"]:
    batch, length = layer.output.shape[:2]
    if any(not -length <= position < length for position in exclude):
        raise InputError(f"exclude={list(exclude)} is out of range: the sequences have {length} tokens.")
    every = torch.ones(batch, length, dtype=torch.bool, device=layer.output.device)
    real = every if layer.mask is None else layer.mask.clone()
    real[:, list(exclude)] = False
    return real
