"""minGRU and minLSTM of minGRU-pytorch: gates that read only the current token, and positive candidates."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call import Affine, Call, padded_left, refusing
from unilinattn.mixers import DiagonalDecay
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _leak(module: object, mask: Tensor) -> str | None:
    return "its states have no mask, and read padded positions" if padded_left(mask) else None


def _extras(module: object, arguments: Mapping[str, Any]) -> int:
    """Count the outputs after the first: the last state, if it is asked for."""
    return int(bool(arguments.get("return_next_prev_hidden")))


@register_architecture(
    "minGRU_pytorch.minGRU.minGRU",
    name="min_gru",
    kind="minGRU",
    padding_leak=_leak,
    extra_outputs=_extras,
    check=refusing("prev_hidden"),
)
def min_gru(call: Call) -> Flow:
    """A gate z and a candidate g(W u) for each channel: h_t = (1 - z_t) h_{t-1} + z_t g(c_t).

    Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, "Were RNNs All We Needed?" (2024), Appendix B.3.
    """
    candidate, gate = _projections(call, 2)
    logit = gate(call.input)
    return _recurrence(call, candidate, functional.logsigmoid(-logit), functional.logsigmoid(logit))


@register_architecture(
    "minGRU_pytorch.minLSTM.minLSTM",
    name="min_lstm",
    kind="minLSTM",
    padding_leak=_leak,
    extra_outputs=_extras,
    check=refusing("prev_hidden"),
)
def min_lstm(call: Call) -> Flow:
    """Forget and input gates whose sum is one: h_t = f_t / (f_t + i_t) h_{t-1} + i_t / (f_t + i_t) g(c_t).

    Feng et al., "Were RNNs All We Needed?" (2024), Section 3.2 and Appendix B.3.
    """
    candidate, forget, enter = _projections(call, 3)
    difference = functional.logsigmoid(forget(call.input)) - functional.logsigmoid(enter(call.input))
    return _recurrence(call, candidate, functional.logsigmoid(difference), functional.logsigmoid(-difference))


def _projections(call: Call, count: int) -> list[Affine]:
    """Return the maps to the candidate and to each gate, which are rows of one matrix."""
    name = "to_hidden_and_gate" if count == 2 else "to_hidden_and_f_i_gate"
    rows = call.affine(getattr(call.host, name))
    width = rows.weight.shape[0] // count
    return [rows[part * width : (part + 1) * width] for part in range(count)]


def _recurrence(call: Call, candidate: Affine, log_decay: Tensor, log_write: Tensor) -> Flow:
    """Return h_t = exp(log_decay_t) h_{t-1} + exp(log_write_t) g(c_t), and the projection of h."""
    flow = Flow(call.input).matrix(*candidate, role="input")
    before = flow.deferred()
    half = flow.value.new_full(log_decay.shape[-1:], 0.5)
    flow.scale(lambda: _slope(before()), half, role="act")
    ones = torch.ones_like(log_decay[..., :1, None])
    flow.core(DiagonalDecay(ones, ones, log_decay[..., None], key_scale=log_write.exp()))
    if isinstance(call.module.to_out, nn.Identity):
        return flow
    return flow.matrix(*call.affine(call.host.to_out), role="output")


def _slope(x: Tensor) -> Tensor:
    """Return (g(x) - g(0)) / x of g(x) = x + 1/2 for x >= 0, else sigmoid(x), without a difference of near numbers."""
    half = torch.where(x == 0, 1.0, x) / 2
    below = half.tanh() / (4 * half)
    return torch.where(x >= 0, 1.0, below)
