"""Products of maps whose rows are kept within the range of their dtype by powers of two."""

from collections.abc import Callable, Iterable
from math import sqrt

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.kernels.exponents import exponent_range, flush_, times_power_of_two
from unilinattn.memory import reserved
from unilinattn.scoring.maps import ONE_ROW

LOG2_SCALE = "log2_scale"
"""Name of the extra that holds the exponents of a product's rows, for a product beyond the range of its dtype."""
ZERO = -(2**30)
"""Exponent of a row of zeros, below that of every other row."""

Blocks = Iterable[tuple[slice, Float[Tensor, "batch row key"]]]
"""The maps of a step, in blocks of rows."""


class ScaledProduct:
    """A product of maps, multiplied step by step: row i is values_i 2**exponents_i.

    The exponents are None, and the values those of plain products, until a row leaves the range of its dtype. That step
    is then repeated with every row divided by a power of two, so that its largest entry is in [0.5, 1); entries below
    the smallest normal number are zero. Powers of two are exact, so the scaled product has the digits of the plain one.

    Attributes:
        values: (batch, row, key).
        exponents: (batch, row), or None.
    """

    def __init__(self, values: Float[Tensor, "batch row key"]) -> None:
        """Start with the identity, or with some of its rows."""
        self.values = values
        self.exponents: Int[Tensor, "batch row"] | None = None

    def left_multiply(self, linear: Callable[[Float[Tensor, "batch row key"]], Float[Tensor, "batch row key"]]) -> None:
        """Replace the rows r by r M, where `linear` multiplies rows by the map M of a step."""
        product = flush_(linear(self.values))
        if self.exponents is None and _is_outside(product):
            self._scale()
            product = flush_(linear(self.values))
        self.values = product
        if self.exponents is not None:
            self._scale()

    def add_maps(self, blocks: Callable[[], Blocks], dropped: slice | None = None) -> None:
        """Replace the product rho by (I + M) rho, where M is the sum of the maps in `blocks`.

        `dropped` are rows of I that are zero.
        """
        with reserved(self.values.nbytes, "the product of the maps of two steps", ONE_ROW):
            if self.exponents is None:
                total = self.values.clone()
                if dropped is not None:
                    total[:, dropped] = 0
                for span, block in blocks():
                    total[:, span].baddbmm_(flush_(block).to(total), self.values)
                if not _is_outside(flush_(total)):
                    self.values = total
                    return
                del total
                self._scale()
            self._multiply(blocks(), identity=True, dropped=dropped)

    def replace_by_map(self, mixing: Float[Tensor, "batch query key"]) -> None:
        """Replace the product rho by M rho, where M is `mixing`."""
        mixing = mixing.to(self.values)
        if self.exponents is None:
            product = flush_(flush_(mixing) @ self.values)
            if not _is_outside(product):
                self.values = product
                return
            self._scale()
        self._multiply([(slice(None), mixing)], identity=False)

    def take(self, rows: Int[Tensor, "batch row"]) -> None:
        """Replace each row by one of the rows."""
        self.values = self.values.gather(1, rows.unsqueeze(-1).expand_as(self.values))
        if self.exponents is not None:
            self.exponents = self.exponents.gather(1, rows)

    def write(self, rows: Int[Tensor, "batch row"], product: "ScaledProduct") -> None:
        """Replace some rows by those of another product."""
        self.values.scatter_(1, rows.unsqueeze(-1).expand(-1, -1, self.values.shape[2]), product.values.to(self.values))
        if self.exponents is None and product.exponents is not None:
            self.exponents = torch.zeros(self.values.shape[:2], dtype=torch.long, device=self.values.device)
        if self.exponents is not None:
            exponents = torch.zeros_like(rows) if product.exponents is None else product.exponents.to(rows.device)
            self.exponents.scatter_(1, rows, exponents)

    def finish(self) -> Float[Tensor, "batch row"] | None:
        """Give the values their own scale where a sequence's product fits the dtype; return the remaining exponents.

        None if every sequence fits. The rows of a sequence that does not fit are all scaled.
        """
        if self.exponents is None:
            return None
        self._scale()
        exponents = self.exponents.masked_fill(self.exponents == ZERO, 0)
        low, high = exponent_range(self.values.dtype)
        fits = ((exponents >= low) & (exponents <= high)).all(1, keepdim=True)
        self.values = times_power_of_two(self.values, (exponents * fits).unsqueeze(-1))
        self.exponents = exponents * ~fits
        return None if bool(fits.all()) else self.exponents.double()

    def _scale(self) -> None:
        """Divide each row by a power of two, so that its largest entry is in [0.5, 1)."""
        largest = _largest(self.values)
        shift = torch.frexp(largest).exponent.long().masked_fill(~largest.isfinite(), 0)
        self.values = flush_(times_power_of_two(self.values, -shift.unsqueeze(-1)))
        exponents = shift if self.exponents is None else self.exponents + shift
        self.exponents = exponents.masked_fill(largest == 0, ZERO)

    def _multiply(self, blocks: Blocks, *, identity: bool, dropped: slice | None = None) -> None:
        """Multiply scaled rows: sum_j M_ij 2**e_j values_j, each term divided by the largest M_ij 2**e_j of row i."""
        assert self.exponents is not None
        total = self.values.clone() if identity else torch.zeros_like(self.values)
        exponents = self.exponents.clone() if identity else torch.full_like(self.exponents, ZERO)
        if dropped is not None:
            total[:, dropped], exponents[:, dropped] = 0, ZERO
        for span, block in blocks:
            fraction, size = torch.frexp(block.to(total))
            size = size + self.exponents.unsqueeze(1)
            largest = size.masked_fill(fraction == 0, ZERO).amax(-1).clamp_min(ZERO)
            before, after = exponents[:, span], torch.maximum(exponents[:, span], largest)
            rows = flush_(times_power_of_two(total[:, span], (before - after).unsqueeze(-1)))
            weights = flush_(times_power_of_two(fraction, size - after.unsqueeze(-1)))
            total[:, span] = rows.baddbmm_(weights, self.values)
            exponents[:, span] = after
        self.values, self.exponents = flush_(total), exponents
        self._scale()


def _largest(values: Float[Tensor, "batch row key"]) -> Float[Tensor, "batch row"]:
    # Unlike absolute values, extremes take no memory; NaN is both.
    low, high = values.aminmax(dim=-1)
    return torch.maximum(high, -low)


def _is_outside(values: Float[Tensor, "batch row key"]) -> bool:
    """Return whether a row is not finite, or so small that its smaller entries may be subnormal."""
    largest = _largest(values)
    small = (largest > 0) & (largest < sqrt(torch.finfo(values.dtype).tiny))
    return bool((~largest.isfinite() | small).any())
