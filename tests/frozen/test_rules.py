"""Which factor of a product is frozen: token-wise modules in a model, against forms detached by hand, in float64.

Shares and biases add up whichever factor is frozen, so completeness cannot tell these rules apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

from tests.frozen.gates import CASES, INNER
from tests.tracing.models import VOCABULARY, WIDTH, Block, Model, TokenWise, added, ids
from unilinattn.errors import UncoveredError
from unilinattn.frozen.passes import FREEZE, HALF
from unilinattn.frozen.run import frozen
from unilinattn.frozen.shares import Shares
from unilinattn.testing import relative_error, tolerance
from unilinattn.tracing.trace import Trace, trace

Rule = Literal["freeze", "half"]

EXACT = tolerance("law", torch.float64)
LOGIT = 3
RULES: tuple[Rule, ...] = ("freeze", "half")


class Gated(nn.Module):
    """A feed-forward module with three projections, whose product `mix` computes."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.other = (nn.Linear(WIDTH, INNER) for _ in range(3))
        self.down = nn.Linear(INNER, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mix(self.gate(x), self.up(x), self.other(x)))


class Causal(Model):
    def forward(self, ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=super().forward(ids).logits)


def built(*blocks: nn.Module) -> Any:
    torch.manual_seed(0)
    return Causal(*blocks).double().eval()


def with_mixer(first: nn.Module) -> tuple[Any, Trace]:
    """Return a model of a token-wise module and a block with a mixer, and its trace."""
    torch.manual_seed(0)
    model = built(first, Block(added))
    return model, trace(model, ids())


@cache
def gated(name: str) -> tuple[Any, Trace]:
    torch.manual_seed(0)
    return with_mixer(Gated(CASES[name].live))


def by_hand(model: Any, traced: Trace, form: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens' shares, the bias and the logit of the last token, where `form` is the first module."""
    embedded = model.embed(ids()).detach().requires_grad_()
    x = form(embedded)
    logit = model.head(x + traced.layers[0].operator.apply(x))[:, -1, LOGIT]
    (grad,) = torch.autograd.grad(logit.sum(), embedded)
    tokens = (grad * embedded).sum(-1).detach()
    return tokens, logit.detach() - tokens.sum(1), logit.detach()


def check(shares: Shares, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    tokens, bias, logit = expected
    assert relative_error(shares.value[:, None], logit[:, None]) <= EXACT
    assert relative_error(shares.tokens, tokens) <= EXACT
    assert relative_error(shares.bias[:, None], bias[:, None], scale=shares.size) <= EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_products_freeze_the_factor_of_the_definition(name: str, rule: Rule) -> None:
    model, traced = gated(name)
    block, form = model.blocks[0], getattr(CASES[name], rule)

    def detached(x: Tensor) -> Tensor:
        return x + block.down(form(block.gate(x), block.up(x), block.other(x)))

    check(frozen(traced, rule=FREEZE if rule == "freeze" else HALF).shares(-1, LOGIT), by_hand(model, traced, detached))


def test_products_of_equal_rank_are_noted_and_others_are_not() -> None:
    for name, noted in {"three factors": False, "silu": False, "silu written out and tanh": True}.items():
        run = frozen(gated(name)[1])
        assert run.shared == ({"mul"} if noted else frozenset())


SMALL = 1e-8
NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # With small vectors the smallest denominator counts.
    "rms norm without eps": (
        lambda x: functional.rms_norm(SMALL * x, (WIDTH,)),
        lambda x: SMALL * x * torch.rsqrt((SMALL * x).square().mean(-1, True) + torch.finfo(x.dtype).eps).detach(),
    ),
    "l1": (
        lambda x: functional.normalize(x, p=1, dim=-1),
        lambda x: x / x.abs().sum(-1, True).detach(),
    ),
    "l3": (
        lambda x: functional.normalize(x, p=3.0, dim=-1),
        lambda x: x / (x.abs() ** 3).sum(-1, True).pow(1 / 3).detach(),
    ),
    "maximum": (
        lambda x: functional.normalize(x, p=torch.inf, dim=-1),
        lambda x: x / x.abs().amax(-1, True).detach(),
    ),
    "smallest norm": (
        lambda x: functional.normalize(SMALL * x, dim=-1, eps=1e-6),
        lambda x: SMALL * x / 1e-6,
    ),
    "batch norm": (
        lambda x: functional.batch_norm(x.mT, *STATISTICS, *STATISTICS, eps=0.5).mT,
        lambda x: (x - STATISTICS[0]) / (STATISTICS[1] + 0.5).sqrt() * STATISTICS[0] + STATISTICS[1],
    ),
}
STATISTICS = torch.linspace(0.2, 1.4, 2 * WIDTH, dtype=torch.float64).unflatten(0, (2, WIDTH))


@pytest.mark.parametrize("name", NORMS)
def test_norms_divide_by_the_frozen_norm_of_the_definition(name: str) -> None:
    live, form = NORMS[name]
    model, traced = with_mixer(TokenWise(live))
    check(frozen(traced).shares(-1, LOGIT), by_hand(model, traced, form))


def without_first(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 0] = 0
    return x


@pytest.mark.parametrize(
    "block",
    [
        lambda block, x: block.mixer(x) - x,
        lambda block, x: torch.rsub(x, block.mixer(x)),
        lambda block, x: torch.add(block.mixer(x), x, alpha=2),
        lambda block, x: x.clone().mul_(2) + block.mixer(x),
        lambda block, x: 2 * x + block.mixer(x),
        lambda block, x: without_first(x) + block.mixer(x),
    ],
    ids=["subtracted", "subtracted from", "factor", "in place", "product", "written"],
)
def test_a_stream_with_another_factor_is_not_the_residual_stream(block: Any) -> None:
    run = frozen(trace(built(Block(added), Block(block)), ids()))
    run.complete_shares(-1, LOGIT)
    with pytest.raises(UncoveredError, match="norms or multiplies its residual stream between its layers"):
        run.unembedding(-1, LOGIT)


@pytest.mark.parametrize(
    "block",
    [
        lambda block, x: x - block.mixer(x),
        lambda block, x: torch.add(x, block.mixer(x), alpha=2),
        lambda block, x: block.mixer(x).add_(x),
        lambda block, x: x.to(torch.float64).clone().sub_(block.mixer(x)),
        lambda block, x: torch.empty_like(x).copy_(x).add_(block.mixer(x)),
    ],
    ids=["less", "factor of the output", "added in place", "subtracted in place", "copied"],
)
def test_sums_on_the_stream_are_the_residual_stream(block: Any) -> None:
    run = frozen(trace(built(Block(added), Block(block)), ids()))
    last = run.unembedding(-1, LOGIT)
    parts = (last.stream * last.gradient).sum((1, 2)) + last.bias + last.remainder
    assert relative_error(parts[:, None], last.value[:, None]) <= EXACT
    assert torch.equal(last.gradient[:, :-1], torch.zeros_like(last.gradient[:, :-1]))


@dataclass
class WithOffset:
    """Logits, and constants beside them."""

    logits: Tensor
    offset: Tensor


class Offset(nn.Module):
    """A model that returns constants beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(Block(added))
        self.offset = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, ids: Tensor) -> WithOffset:
        return WithOffset(self.model(ids).logits, self.offset.expand(len(ids), -1))


def test_constants_of_the_output_are_biases() -> None:
    torch.manual_seed(0)
    model = Offset().double().eval()
    offset = model.offset.detach()
    run = frozen(trace(model, ids()))
    plain = run.shares(-1, LOGIT)

    def moved(output: Any) -> Tensor:
        return output.logits[:, -1, LOGIT] + 3 * output.offset[:, LOGIT]

    shares = run.shares(-1, moved)
    assert torch.equal(shares.tokens, plain.tokens) and not shares.bias.requires_grad
    assert torch.allclose(shares.bias, plain.bias + 3 * offset[LOGIT], rtol=EXACT)
    assert float((shares.remainder / shares.size).abs().max()) <= EXACT
    assert torch.allclose(run.bias_by_source(-1, moved)[""], 3 * offset[LOGIT], rtol=EXACT)
    # The first-order part of a square is twice its value.
    squared = run.shares(-1, lambda output: output.logits[:, -1, LOGIT] + output.offset.square().sum(-1))
    assert torch.allclose(squared.bias, plain.bias + 2 * offset.square().sum(), rtol=EXACT)
    assert torch.allclose(squared.remainder, -offset.square().sum(), rtol=EXACT)
