"""The factors of decayed memories: `Diagonal`, with a decay for each coordinate, and `Scalar`, with one per head."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Inexact
from torch import Tensor

from unilinattn.kernels.groups import of_heads

ALL = slice(None)


class Diagonal(NamedTuple):
    """S_t = exp(g_t) S_{t-1} + k_t s_t v_t^T, read as y_t = S_t^T q_t; the state is zero before a reset.

    Attributes:
        query, key: q and k; each group serves consecutive heads.
        log_decay: g, or with `rate` the steps that multiply it.
        key_scale: s, one by default.
        rate: the log-decay of a step of one.
        reset: where a segment begins.
    """

    query: Inexact[Tensor, "batch length groupq state"]
    key: Inexact[Tensor, "batch length groupk state"]
    log_decay: Inexact[Tensor, "batch length head staten"]
    key_scale: Inexact[Tensor, "batch length head"] | None = None
    rate: Inexact[Tensor, "head state"] | None = None
    reset: Bool[Tensor, "batch length"] | None = None

    def at(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, scaled key and log-decay of some tokens and heads, which broadcast.

        Their axes are (batch, token, head, state). The log-decay is -inf where a segment begins.
        """
        total = self.log_decay.shape[2]
        query, key = (of_heads(factor[:, tokens], heads, total) for factor in (self.query, self.key))
        decay = self.log_decay[:, tokens, heads]
        if self.key_scale is not None:
            key = key * self.key_scale[:, tokens, heads, None]
        if self.rate is not None:
            decay = decay * self.rate[heads]
        if self.reset is not None:
            decay = decay.masked_fill(self.reset[:, tokens, None, None], -torch.inf)
        return query, key, decay


class Scalar(NamedTuple):
    """The same memory with one decay for all coordinates of a head.

    Attributes:
        query, key: q and k; each group serves consecutive heads.
        log_decay: g.
        key_scale: s.
    """

    query: Inexact[Tensor, "batch length group state"]
    key: Inexact[Tensor, "batch length group state"]
    log_decay: Inexact[Tensor, "batch length head"]
    key_scale: Inexact[Tensor, "batch length head"]

    def scaled(
        self, value: Inexact[Tensor, "batch length head channel"]
    ) -> Inexact[Tensor, "batch length head channel"]:
        """Return values, or what is read for them, times the scale of their keys."""
        return value * self.key_scale.unsqueeze(-1)
