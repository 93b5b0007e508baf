"""minGRU for unilinattn: its forward pass once more, with `Flow` instead of tensors."""

import torch
from torch.nn import functional

import unilinattn as ula
from unilinattn.architectures import Call
from unilinattn.flow import Flow
from unilinattn.mixers import DiagonalDecay


@ula.register_architecture("mingru.MinGRU", name="mingru", kind="minGRU")
def mingru(call: Call) -> Flow:
    """A gated RNN whose gate reads the current token alone: one state a channel, which decays by 1 - z.

    Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, "Were RNNs All We Needed?" (2024).
    """
    host, weight = call.host, call.weight
    mask = call.padding_scale(call.arguments.get("mask"))
    flow = Flow(call.input).scale(mask, role="input").conv(weight(host.conv.weight), weight(host.conv.bias))

    # What the input decides is computed from the observed values: the gate, hence what each step keeps and writes.
    logit = functional.linear(flow.value, weight(host.to_gate.weight), weight(host.to_gate.bias))
    write = torch.sigmoid(logit)
    log_keep = functional.logsigmoid(-logit)
    if mask is not None:
        write, log_keep = write * mask, log_keep * mask

    # What carries the input is a chain of stages.
    flow.matrix(weight(host.to_candidate.weight), weight(host.to_candidate.bias), role="input")
    one = torch.ones_like(flow.value[..., :1, None])
    flow.core(DiagonalDecay(one, one, log_keep[..., None], key_scale=write))
    return flow.matrix(weight(host.to_output.weight), weight(host.to_output.bias), role="output")
