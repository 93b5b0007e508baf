"""The reduced map of scalar decays on a GPU: scores of each group times the reduced map of its decays."""

from collections.abc import Iterable, Iterator
from functools import partial

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from unilinattn.kernels.groups import repeat_groups
from unilinattn.kernels.reduced_map import triton as decayed
from unilinattn.kernels.reduced_map.dense import Taps
from unilinattn.kernels.reduced_map.tiled import HeadMap
from unilinattn.kernels.scalar_map.tiled import of_group
from unilinattn.kernels.scan.memories import Scalar


def scalar_rows(
    memory: Scalar,
    left: Float[Tensor, "#batch #length channel"] | None = None,
    taps: Taps | None = None,
    *,
    blocks: Iterable[slice],
) -> Iterator[Float[Tensor, "batch row key"]]:
    """Yield blocks of rows, in any order, of sum_c left_ic sum_lag alpha_h(c)[i, j + lag] tap_lag[j + lag, c]."""
    query, key, log_decay, key_scale = memory
    batch, length, groups, _ = query.shape
    weights: dict[int, Tensor | None] = {0: None} if taps is None else dict(taps)
    width = max([log_decay.shape[2], *(t.shape[2] for t in (left, *weights.values()) if t is not None)]) // groups
    for rows in blocks:
        total = query.new_zeros(batch, rows.stop - rows.start, length)
        for group in range(groups):
            scores = query[:, rows, group] @ key[:, :, group].mT
            decay, scale = (
                repeat_groups(t.unflatten(2, (groups, -1))[:, :, group], width) for t in (log_decay, key_scale)
            )
            factors, shape = partial(_decays, decay, scale), (batch, length, width, 1)
            for lag, tap in weights.items():
                reading, writing = (of_group(weight, group, groups) for weight in (left, tap))
                landing = None if writing is None else {0: writing}
                ((_, decays),) = decayed.reduced_rows(HeadMap(factors, shape, reading, landing), [rows])
                total += functional.pad((scores * decays)[..., lag:], (0, min(lag, length)))
        yield total


def held_elements(rows: int, shape: tuple[int, int, int, int], channels: int) -> int:
    """Return the elements that `scalar_rows` holds for blocks of `rows` rows, the block included.

    `shape` is (batch, length, heads, state) of one group.
    """
    batch, length, heads, _ = shape
    inner = max(channels, heads)
    return 4 * batch * min(rows, length) * length + decayed.held_elements(rows, (batch, length, inner, 1))


def _decays(decay: Tensor, scale: Tensor, tokens: slice, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and log-decay (batch, token, head, 1) of a map of decays."""
    written = scale[:, tokens, heads].unsqueeze(-1)
    return written.new_ones(()).expand_as(written), written, decay[:, tokens, heads].unsqueeze(-1)
