"""Latent vectors of a model that read the tokens of its input: the tokens are keys, the latent vectors constants."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.testing import promoted, relative_error
from unilinattn.testing.hosts import randomize


def perceiver(positions: int) -> Any:
    sizes = dict(d_model=8, d_latents=12, num_latents=5, num_blocks=1, num_self_attends_per_block=2)
    heads = dict(num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=8, v_channels=12)
    config = transformers.PerceiverConfig(**sizes, **heads, vocab_size=20, max_position_embeddings=positions)
    torch.manual_seed(0)
    return randomize(transformers.PerceiverForMaskedLM(config).double().eval())


@pytest.mark.long
@pytest.mark.parametrize("positions", [7, 9])
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "occlusion", "input_x_gradient"])
def test_the_ids_that_latent_vectors_read_have_scores(method: str, positions: int) -> None:
    """The decoder returns a vector for each of the positions, which may be as many as ids."""
    model, ids = perceiver(positions), torch.tensor([[3, 5, 2, 7, 1, 4, 6], [2, 8, 9, 5, 5, 0, 1]])

    def explained(ids: torch.Tensor) -> ula.Attribution:
        return ula.explain(model, ids, method=method, logit=lambda out: out["logits"][:, 2, 4], progress=False)

    with promoted():
        result, first = explained(ids), explained(ids[:1])
    assert result.scores.shape == (2, 7) and bool((result.scores != 0).all())
    assert relative_error(result.scores[:1], first.scores) < 1e-9
    assert result.completeness_gap is None or result.completeness_gap < 1e-10


class Queries(nn.Module):
    """Zeros with learned positions, as DETR's queries, that mix among themselves and read the tokens."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.positions, self.weights = nn.Parameter(torch.zeros(1, 3, 8)), weights
        self.among, self.over = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        zeros = tokens.new_zeros(len(tokens), 3, 8)
        queries = zeros + self.among(zeros + self.positions, zeros + self.positions, zeros)[0] + self.positions
        logits: torch.Tensor = self.head(self.over(queries, tokens, tokens, need_weights=self.weights)[0].mean(1))
        return logits


@pytest.mark.parametrize("method", ["logit", "lrp"])
def test_queries_are_constants_in_the_rules_of_functions(method: str) -> None:
    """A layer that returns its weights runs by the rules, where a constant with a tangent cannot be multiplied."""
    torch.manual_seed(0)
    tokens, results = torch.randn(2, 6, 8, dtype=torch.float64), []
    state = randomize(Queries(True)).double().state_dict()
    for weights in (True, False):
        model = Queries(weights).double().eval()
        model.load_state_dict(state)
        results.append(ula.explain(model, tokens, method=method, progress=False))
    assert all(result.completeness_gap < 1e-10 for result in results)
    # By the rules weights of attention are factors, as in an operator.
    assert relative_error(results[0].scores, results[1].scores) < 1e-10
    # Of the keys the three queries are constants.
    assert results[0].scores.ne(0).tolist() == [[False] * 3 + [True] * 6] * 2
