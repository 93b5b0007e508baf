"""The residual stream around a layer, as a trace stores it."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unilinattn.call.axes import as_tokens
from unilinattn.host.module_calls import CallRecord


class StreamAround(NamedTuple):
    """The streams before and after a layer, the factor on its output in their sum, and the dtype of the stream."""

    entering: Tensor | None
    leaving: Tensor | None
    multiplier: float
    dtype: torch.dtype | None


_NO_STREAM = StreamAround(None, None, 1.0, None)


def stream_around(record: CallRecord, device: torch.device, dtype: torch.dtype) -> StreamAround:
    """Return the streams around a layer, less the output of another module in the same sum.

    Without such a module the stream after it is the host's tensor in its dtype, often the stream of the next layer.
    """
    site = record.site
    if site is None:
        return _NO_STREAM
    # The module may return an image, to whose tokens it is added.
    is_alike = record.output is not None and site.stream.ndim == record.output.ndim
    vectors = partial(as_tokens, batch=record.batch, axis=record.axes.output if is_alike else -1)
    entering, leaving = vectors(site.stream.detach().to(device, dtype)), vectors(site.total.detach())
    # Most hosts have no factor, and their tensor saves a copy.
    entering = entering if site.skip == 1 else site.skip * entering
    if site.other is not None:
        leaving = leaving.to(device, dtype) - site.factor * vectors(site.other.detach().to(device, dtype))
    return StreamAround(entering, leaving, site.multiplier, site.total.dtype)
