"""A cosine similarity has the shares of its written-out form: in an attention, as a gate, and as an output."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula

WIDTH = 16


def cosine(form: str, first: Tensor, second: Tensor) -> Tensor:
    """The cosine of vectors in the last axis."""
    if form == "function":
        return functional.cosine_similarity(first, second, dim=-1)
    if form == "torch":
        return torch.cosine_similarity(first, second, -1)
    if form == "module":
        result: Tensor = nn.CosineSimilarity(dim=-1)(first, second)
        return result
    return (functional.normalize(first, dim=-1) * functional.normalize(second, dim=-1)).sum(-1)


class Attention(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        scores = cosine(self.form, self.query(x)[:, :, None], self.key(x)[:, None])
        result: Tensor = (4 * scores).softmax(-1) @ self.value(x)
        return result


class Model(nn.Module):
    """Attention by cosines, a gate by the cosine with a parameter, and cosines of the mean with classes or tokens."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.embedding, self.direction = nn.Embedding(31, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([Attention(form), Attention(form)])
        self.classes = nn.Parameter(torch.randn(5, WIDTH))
        self.form = form

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        x = x * cosine(self.form, x, self.direction.expand_as(x))[..., None]
        mean = x.mean(1)
        own = cosine(self.form, mean, x[:, -1])[:, None]
        return {"logits": torch.cat([cosine(self.form, mean[:, None], self.classes.expand(len(x), 5, WIDTH)), own], 1)}


def model(form: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(form).double().eval()


IDS = torch.randint(31, (2, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["function", "torch", "module"])
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "rollout", "latim"])
def test_a_cosine_has_the_scores_of_its_written_form(method: str, form: str) -> None:
    for logit in (0, 5):
        options = {} if method in ("rollout", "latim") else {"logit": logit}
        written, called = (
            ula.explain(model(each), IDS, method=method, target=-1, progress=False, **options)
            for each in ("written", form)
        )
        assert torch.allclose(called.scores, written.scores, rtol=1e-10, atol=1e-13)
        assert called.completeness_gap is None or called.completeness_gap < 1e-12


def test_the_two_vectors_of_a_cosine_share_it() -> None:
    # Class 5 is the cosine of two vectors of tokens, so that half of it is that of the mean and half of the last token.
    result = ula.explain(model("function"), IDS, method="logit", logit=5, progress=False)
    assert result.scores.any(0).all() and float(result.extras["logit"].abs().min()) > 0
    assert float((result.scores.sum(1) + result.extras["bias"] - result.extras["logit"]).abs().max()) < 1e-12
