"""Hosts of five kinds whose mixers are explicit products alpha v, and their frozen forms with hand-placed detaches."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tests.frozen.detached import convolved
from tests.methods.hosts import HOSTS, inputs, references
from tests.methods.references import delta_map, mamba2_reference, mamba_reference
from unilinattn.testing.promote import promoted

Rule = Literal["freeze", "half"]
"""A rule of the frozen run: the gate is a constant, or gate and value get half of the relevance each."""

FIVE = ("mamba", "mamba2", "llama", "delta rule", "hybrid")


class Explicit:
    """Runs parts of a host by a rule and collects the attention matrices of its mixers.

    Under the rules of the frozen run attention matrices, scales of norms and slopes of activations are constants.
    """

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule
        self.matrices: list[Tensor] = []

    def matrix(self, alpha: Tensor) -> Tensor:
        self.matrices.append(alpha if self.rule is None else alpha.detach().requires_grad_())
        return self.matrices[-1]

    def constant(self, factor: Tensor) -> Tensor:
        return factor if self.rule is None else factor.detach()

    def silu(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.constant(x))

    def gated(self, value: Tensor, gate: Tensor) -> Tensor:
        if self.rule == "freeze":
            return value * functional.silu(gate).detach()
        product = value * self.silu(gate)
        return product / 2 + product.detach() / 2 if self.rule == "half" else product

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * x * torch.rsqrt(self.constant(x).pow(2).mean(-1, keepdim=True) + eps)

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        if type(norm).__name__ == "Qwen3NextRMSNorm":
            return self.rms(x, 1 + norm.weight, norm.eps)
        return self.rms(x, norm.weight, norm.variance_epsilon)

    def mlp(self, mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(self.gated(mlp.up_proj(x), mlp.gate_proj(x)))

    def mamba(self, mixer: Any, x: Tensor) -> Tensor:
        alpha = self.matrix(mamba_reference(mixer, x, torch.ones(x.shape[:2]))["alpha"])
        inner, gate = mixer.in_proj(x).chunk(2, -1)
        u = self.silu(convolved(inner, mixer.conv1d))
        return mixer.out_proj(self.gated(torch.einsum("beij,bje->bie", alpha, u) + mixer.D * u, gate))

    def mamba2(self, mixer: Any, x: Tensor) -> Tensor:
        alpha = self.matrix(mamba2_reference(mixer, x, torch.ones(x.shape[:2]))["alpha"])
        inner, heads = mixer.intermediate_size, mixer.num_heads
        gate, xbc, _ = mixer.in_proj(x).split([inner, mixer.conv_dim, heads], -1)
        u = self.silu(convolved(xbc, mixer.conv1d)[..., :inner]).unflatten(-1, (heads, -1))
        y = torch.einsum("bhij,bjhp->bihp", alpha, u) + mixer.D[:, None] * u
        gated = self.gated(y.flatten(2), gate)
        groups = inner // getattr(mixer.norm, "group_size", inner)
        normed = self.rms(gated.unflatten(-1, (groups, -1)), torch.ones(()), mixer.norm.variance_epsilon)
        return mixer.out_proj(mixer.norm.weight * normed.flatten(2))

    def delta(self, mixer: Any, x: Tensor) -> Tensor:
        """The gated delta rule of Qwen3-Next."""
        alpha = self.matrix(delta_map(mixer, x, torch.ones(x.shape[:2])))
        groups, heads = mixer.num_k_heads, mixer.num_v_heads
        sizes = [mixer.head_k_dim] * 2 + [mixer.value_dim // groups] * 2
        *mixed, gate = (part.flatten(2) for part in mixer.in_proj_qkvz(x).unflatten(-1, (groups, -1)).split(sizes, -1))
        value = self.silu(convolved(torch.cat(mixed, -1), mixer.conv1d))[..., -mixer.value_dim :]
        y = torch.einsum("bhij,bjhp->bihp", alpha, value.unflatten(-1, (heads, -1)))
        normed = self.rms(y, mixer.norm.weight, mixer.norm.variance_epsilon)
        return mixer.out_proj(self.gated(normed.flatten(2), gate))

    def attention(self, mixer: Any, x: Tensor, weights: Tensor) -> Tensor:
        """Softmax attention without biases, given its weights."""
        value = mixer.v_proj(x).unflatten(-1, (-1, mixer.head_dim))
        value = value.repeat_interleave(weights.shape[1] // value.shape[2], 2)
        return mixer.o_proj(torch.einsum("bhij,bjhp->bihp", self.matrix(weights), value).flatten(2))


MIXERS = {
    "MambaMixer": Explicit.mamba,
    "Mamba2Mixer": Explicit.mamba2,
    "BambaMixer": Explicit.mamba2,
    "Qwen3NextGatedDeltaNet": Explicit.delta,
}


class Detached(NamedTuple):
    """A logit of a frozen form, and gradients in it.

    Attributes:
        tokens: gradient x embedding.
        bias: the logit less the sum over tokens.
        logit: the logit.
        matrices: (alpha, its gradient) of each layer.
        depths: gradient x stream at the start of each block, (layer, batch, token).
        slopes: the gradient at the output of each layer's mixer.
    """

    tokens: Tensor
    bias: Tensor
    logit: Tensor
    matrices: list[tuple[Tensor, Tensor]]
    depths: Tensor
    slopes: list[Tensor]


def detached(name: str, rule: Rule) -> Detached:
    """Write one of `FIVE` out by a rule of the frozen run and differentiate the predicted logit of the last token."""
    model, explicit = HOSTS[name].model(), Explicit(rule)
    stream = model.get_input_embeddings()(inputs()["input_ids"]).detach().requires_grad_()
    streams, outputs = [], []
    with promoted():
        for block, reference in zip(HOSTS[name].blocks(model), references(name), strict=True):
            mixer = HOSTS[name].mixer(block)
            normed = explicit.norm(block.norm if hasattr(block, "norm") else block.input_layernorm, stream)
            streams.append(stream)
            if type(mixer).__name__ in MIXERS:
                outputs.append(MIXERS[type(mixer).__name__](explicit, mixer, normed))
            else:
                outputs.append(explicit.attention(mixer, normed, reference.alpha))
            stream = stream + outputs[-1]
            for norm, mlp in (("post_attention_layernorm", "mlp"), ("pre_ff_layernorm", "feed_forward")):
                if hasattr(block, norm):
                    stream = stream + explicit.mlp(getattr(block, mlp), explicit.norm(getattr(block, norm), stream))
        logit = model.lm_head(explicit.norm(HOSTS[name].norm(model), stream))[:, -1].max(-1).values
        count = len(streams)
        grads = torch.autograd.grad(logit.sum(), [*streams, *outputs, *explicit.matrices])
    depths = torch.stack([(g * x).sum(-1).detach() for g, x in zip(grads[:count], streams, strict=True)])
    matrices = [(alpha.detach(), g) for alpha, g in zip(explicit.matrices, grads[2 * count :], strict=True)]
    logit = logit.detach()
    return Detached(depths[0], logit - depths[0].sum(1), logit, matrices, depths, list(grads[count : 2 * count]))
