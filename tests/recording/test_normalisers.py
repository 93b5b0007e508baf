"""A number for each query and head right after the core, such as a softmax's denominator, scales the core's rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn.testing import relative_error

WIDTH, HEADS, BLOCK = 16, 4, 3


class Attention(nn.Module):
    """An attention; `mix` makes the outputs of heads from the scores, minus infinity where unread, and the values."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.qkv, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, the values and the gates, (batch, head, token, ...)."""
        q, k, v, gate = (z.unflatten(2, (HEADS, -1)).transpose(1, 2) for z in (*self.qkv(x).chunk(3, -1), self.gate(x)))
        unread = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return (q @ k.mT / 2).masked_fill(unread, -torch.inf), v, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(*self.heads(x)).transpose(1, 2).flatten(2))


def divided(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return e @ v / e.sum(-1, keepdim=True)


def divided_in_place(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return (e @ v).div_(e.sum(-1, keepdim=True).clamp_min(1e-9))


def multiplied(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return e.sum(-1).reciprocal()[..., None] * (e @ v)


def by_einsum(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return torch.einsum("bhqd,bhq->bhqd", e @ v, 1 / e.sum(-1))


def by_logarithm(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    largest = scores.amax(-1, keepdim=True)
    return ((scores - largest).exp() @ v) * (largest - scores.logsumexp(-1, keepdim=True)).exp()


def after_the_order_of_tokens(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return ((e @ v).transpose(1, 2) / e.sum(-1).transpose(1, 2)[..., None]).transpose(1, 2)


def head_by_head(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return torch.stack([e[:, h] @ v[:, h] / e[:, h].sum(-1, keepdim=True) for h in range(HEADS)], 1)


def after_all_heads(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    e = scores.exp()
    return torch.stack([e[:, h] @ v[:, h] for h in range(HEADS)], 1) / e.sum(-1, keepdim=True)


def online(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Blocks of keys, with the largest score and the sum of those read before."""
    largest, total, output = (
        torch.full_like(scores[..., :1], -1e30),
        torch.zeros_like(scores[..., :1]),
        torch.zeros_like(v),
    )
    for start in range(0, scores.shape[-1], BLOCK):
        block = scores[..., start : start + BLOCK]
        new = torch.maximum(largest, block.amax(-1, keepdim=True))
        weights, decay = torch.exp(block - new), torch.exp(largest - new)
        total = total * decay + weights.sum(-1, keepdim=True)
        output = output * decay + weights @ v[:, :, start : start + BLOCK]
        largest = new
    return output / total


NORMALISED = [
    divided,
    divided_in_place,
    multiplied,
    by_einsum,
    by_logarithm,
    after_the_order_of_tokens,
    head_by_head,
    after_all_heads,
    online,
]


def attention(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attention:
    torch.manual_seed(0)
    return Attention(mix)


@pytest.mark.parametrize("mix", NORMALISED)
def test_a_softmax_that_is_normalised_after_the_sum_is_the_matrix_of_the_core(mix: Callable[..., Tensor]) -> None:
    module, x = attention(mix), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        expected = module.heads(x)[0].softmax(-1)
    assert relative_error(op.matrix("core", heads=None), expected) < LIMIT


def gated(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return scores.softmax(-1) @ v * torch.sigmoid(gate)


def normed(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    y = scores.softmax(-1) @ v
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def divided_by_its_largest(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    y = scores.softmax(-1) @ v
    return y / y.abs().amax(-1, keepdim=True)


def layer_normed(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return functional.layer_norm(scores.softmax(-1) @ v, v.shape[-1:])


def activated(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return torch.tanh(scores.softmax(-1) @ v)


@pytest.mark.parametrize("mix", [gated, normed, divided_by_its_largest, layer_normed, activated])
def test_gates_of_channels_and_functions_of_the_cores_output_stay_outside(mix: Callable[..., Tensor]) -> None:
    module, x = attention(mix), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        expected = module.heads(x)[0].softmax(-1)
    assert relative_error(op.matrix("core", heads=None), expected) < LIMIT


def test_gates_of_heads_of_one_channel_differ_by_channel() -> None:
    class Single(Attention):
        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scores, v, gate = super().heads(x)
            return scores, v[..., :1], gate[..., :1]

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(*self.heads(x)).squeeze(-1).transpose(1, 2)

    torch.manual_seed(0)
    module, x = Single(gated), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        assert relative_error(op.matrix("core", heads=None), module.heads(x)[0].softmax(-1)) < LIMIT


class Model(nn.Module):
    """A language model of one attention."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.mixer, self.head = nn.Embedding(11, WIDTH), attention(mix), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.mixer(x))


METHODS = ["raw", "rollout", "attention_grad", "transformer_attribution", "latim", "alti", "logit"]


@pytest.mark.parametrize("mix", [divided, head_by_head, online])
def test_methods_do_not_depend_on_where_the_weights_are_normalised(mix: Callable[..., Tensor]) -> None:
    def plain(scores: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return scores.softmax(-1) @ v

    traces = []
    for each in (plain, mix):
        torch.manual_seed(0)
        traces.append(ula.trace(Model(each).double().eval(), torch.arange(9)[None] % 5))
    for method in METHODS:
        expected, scores = (ula.explain(trace, method=method, target=-1).scores for trace in traces)
        assert relative_error(scores, expected) < LIMIT, method
