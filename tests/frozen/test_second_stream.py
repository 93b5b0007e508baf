"""A recorded layer that returns two streams, of different widths, which later modules read."""

import torch
from torch import Tensor, nn

from unilinattn import explain, trace
from unilinattn.testing import randomize

NARROW, WIDE, LENGTH = 6, 10, 9


class Crossing(nn.Module):
    """Each stream attends to the other one, as the two branches of CrossViT do (Chen et al., 2021)."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.to_wide, self.to_narrow = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.is_frozen = is_frozen

    def forward(self, narrow: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.to_wide(narrow) @ wide.mT
        weights = scores.softmax(-1), scores.mT.softmax(-1)
        of_narrow, of_wide = (w.detach() for w in weights) if self.is_frozen else weights
        return narrow + self.to_narrow(of_narrow @ wide), wide + self.to_wide(of_wide @ narrow)


class Branches(nn.Module):
    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.embedding, self.widen = nn.Embedding(17, NARROW), nn.Linear(NARROW, WIDE)
        self.crossing = Crossing(is_frozen)
        self.head, self.wide_head = nn.Linear(NARROW, 5), nn.Linear(WIDE, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = self.embedding(input_ids)
        narrow, wide = self.crossing(tokens, self.widen(tokens))
        return self.head(narrow) + self.wide_head(wide)


def test_both_streams_carry_shares() -> None:
    model = randomize(Branches()).double().eval()
    ids = torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    result = explain(trace(model, ids, progress=False), method="logit", logit=lambda out: out[:, -1, 2], progress=False)
    assert result.completeness_gap is not None and float(result.completeness_gap) < 1e-12
    frozen = Branches(is_frozen=True).double()
    frozen.load_state_dict(model.state_dict())
    vectors = model.embedding(ids).detach().requires_grad_()
    frozen.embedding.forward = lambda _: vectors
    logits = frozen(ids)[:, -1]
    torch.testing.assert_close(logits, model(ids)[:, -1])
    (gradient,) = torch.autograd.grad(logits[:, 2].sum(), vectors)
    torch.testing.assert_close(result.scores.double(), (gradient * vectors).sum(-1).detach(), rtol=1e-10, atol=1e-10)
