"""minGRU for unilinattn: its forward pass, with `Flow` instead of tensors."""

import torch
from torch.nn import functional

import unilinattn as ula
from unilinattn.architectures import Call
from unilinattn.mixers import DiagonalDecay
from unilinattn.operator.flow import Flow


@ula.register_architecture("mingru.MinGRU", name="mingru", kind="minGRU")
def mingru(call: Call) -> Flow:
    """A gated RNN whose gate reads only the current token: one state per channel, with decay 1 - z.

    Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, "Were RNNs All We Needed?" (2024).
    """
    host = call.host
    mask = call.padding_scale(call.arguments.get("mask"))
    flow = Flow(call.input).scale(mask, role="input").conv(*call.affine(host.conv))

    # The gate is frozen at its observed values.
    logit = call.affine(host.to_gate)(flow.value)
    write = torch.sigmoid(logit)
    log_keep = functional.logsigmoid(-logit)
    if mask is not None:
        write, log_keep = write * mask, log_keep * mask

    # The path of the input is a chain of stages.
    flow.matrix(*call.affine(host.to_candidate), role="input")
    one = torch.ones_like(flow.value[..., :1, None])
    flow.core(DiagonalDecay(one, one, log_keep[..., None], key_scale=write))
    return flow.matrix(*call.affine(host.to_output), role="output")
