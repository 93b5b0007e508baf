"""Relative errors, and the one table of the largest that pass."""

from collections.abc import Mapping
from math import inf, isfinite
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError, nearest

Comparison = Literal["layer", "stream", "attention", "reconstruction", "unpromoted", "padding", "law"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_LIMITS: Mapping[Comparison, tuple[float, ...]] = {
    "layer": (1e-5, 1e-4, 2e-2, 5e-2),
    "stream": (2e-6, 1e-5, 2e-2, 2e-2),
    "attention": (4096 * torch.finfo(torch.float64).eps, 4096 * torch.finfo(torch.float32).eps, 0.05, 0.05),
    "reconstruction": (1e-10, 1e-5, 2e-2, 2e-2),
    "unpromoted": (2e-6,),
    "padding": (1e-10, 1e-5),
    "law": (1e-12, 1e-5),
}

TOLERANCES: Mapping[tuple[str, torch.dtype], float] = MappingProxyType(
    {(name, dtype): limit for name, limits in _LIMITS.items() for dtype, limit in zip(_DTYPES, limits, strict=False)}
)
"""Largest relative error that passes, by comparison and dtype; no argument or environment variable relaxes it.

At run time, by the dtype that the host computes in:

- `layer`: a layer's operator against the host's output, before a method uses it. About 1000 roundings in float32, 20 in
  float16 and 6 in bfloat16, whose hosts round every intermediate result. A float64 host that forces float32 inside
  (softmax, norms, scans) is allowed 100 roundings of float32.
- `stream`: the residual stream plus the layers' outputs against the host's next stream: the rounding of a sum.
- `attention`: recomputed parts of an attention layer against those of the host.

In the conformance kit:

- `reconstruction`: an operator against the host's output; in float64 the host is promoted (see `testing.promoted`).
- `unpromoted`: the same for a host that is only cast by `.double()` and keeps its forced float32.
- `padding`: a padded batch against the single sequences.
- `law`: two computations of one value with one operator.
"""


def tolerance(comparison: Comparison, dtype: torch.dtype) -> float:
    """Return the largest relative error that passes for a comparison in a dtype.

    Raises `OptionError` if the table has no such entry.
    """
    if (comparison, dtype) not in TOLERANCES:
        accepted = [f"{name} in {kind}" for name, kind in TOLERANCES]
        raise OptionError(
            f"no tolerance stands for {comparison!r} in {dtype}" + nearest(f"{comparison} in {dtype}", accepted)
        )
    return TOLERANCES[comparison, dtype]


def layer_tolerance(dtype: torch.dtype) -> float:
    """Return the largest accepted reconstruction error of a host that computes in a dtype: bfloat16's for others."""
    return TOLERANCES.get(("layer", dtype), TOLERANCES["layer", torch.bfloat16])


def relative_error(got: Tensor, expected: Tensor, *, scale: Tensor | None = None) -> float:
    """Return the largest ||got - expected|| / ||expected|| over the first axis, or infinity if an entry is not finite.

    `scale` (one number per sequence) replaces ||expected|| where cancellation makes that norm meaningless.
    """
    got, expected = got.detach(), expected.detach()
    difference = _norms(got - expected)
    reference = _norms(expected) if scale is None else scale.double()
    ratio = torch.where(difference == 0, difference, difference / reference)
    # An entry that is not finite makes the difference so, and the largest ratio.
    worst = float(ratio.amax()) if ratio.numel() else 0.0
    return worst if isfinite(worst) else inf


def _norms(vectors: Tensor) -> Float[Tensor, " row"]:
    """Return the norm of each row in float64, without a copy in that dtype."""
    wide = vectors if vectors.is_floating_point() else vectors.double()
    return torch.linalg.vector_norm(wide.flatten(1), dim=1, dtype=torch.float64)
