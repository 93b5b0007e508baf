"""The reduced map of a form against its definition."""

from types import ModuleType

import torch
from torch import Tensor

from unilinattn.kernels.reduced_map.naive import reduced_map
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.memory import parts
from unilinattn.testing import relative_error

Factors = tuple[Tensor, Tensor, Tensor]
"""Query, key and log-decay; one query may serve all heads."""


def map_error(
    form: ModuleType,
    factors: Factors,
    left: Tensor | None,
    taps: dict[int, Tensor] | None,
    rows: int,
    dtype: torch.dtype,
    **options: str,
) -> float:
    """Return the error of a form in a dtype, in blocks of `rows` rows, against the definition on the given factors."""
    query, key, decay = factors
    batch, length, heads, _ = decay.shape

    def of(tokens: slice, part: slice) -> Factors:
        each = (t[:, tokens] if t.shape[2] == 1 else t[:, tokens, part] for t in factors)
        return tuple(t.to(dtype) for t in each)

    cast = None if left is None else left.to(dtype), taps and {lag: tap.to(dtype) for lag, tap in taps.items()}
    blocks = list(form.reduced_rows(HeadMap(of, tuple(decay.shape), *cast), parts(length, rows), **options))
    assert [part.start for part, _ in blocks] == list(range(0, length, rows))
    one = decay.new_ones(batch, length, heads)
    weights = (
        one if left is None else left.expand_as(one),
        {lag: t.expand_as(one) for lag, t in (taps or {0: one}).items()},
    )
    expected = reduced_map(query.expand_as(decay), key, decay, *weights)
    return relative_error(torch.cat([block for _, block in blocks], dim=1).to(expected), expected)
