"""Models that draw random numbers: a trace has those of one call, and every later run of it draws them again."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.testing import promoted
from unilinattn.testing.hosts import randomize

IDS = torch.tensor([[3, 5, 2, 7, 1], [4, 0, 6, 8, 2]])


class Noisy(nn.Module):
    """Attention to tokens with noise; `noise` takes the place of draws."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 9)
        self.noise: Tensor | None = None

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        noise = torch.randn(x.shape[1:], dtype=x.dtype) if self.noise is None else self.noise
        x = x * (1 + noise / 3)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    "method", ["logit", "lrp", "attn_lrp", "knockout", "occlusion", "attribution", "input_x_gradient", "rollout"]
)
def test_methods_explain_the_draws_of_the_trace(method: str) -> None:
    ids = IDS[:1] if method in ("knockout", "occlusion") else IDS
    model, fixed = Noisy().double().eval(), Noisy().double().eval()
    torch.manual_seed(7)
    fixed.noise = torch.randn(5, 8, dtype=torch.float64)
    torch.manual_seed(7)
    traced = ula.trace(model, ids, progress=False)
    following = torch.rand(3)
    expected = ula.explain(fixed, ids, method=method, target=-1, progress=False)
    for seed in (1, 2):
        torch.manual_seed(seed)
        result = ula.explain(traced, method=method, target=-1, progress=False)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))
        assert torch.allclose(result.scores, expected.scores, rtol=1e-10, atol=1e-14)
        assert result.completeness_gap is None or result.completeness_gap < 1e-12
    torch.manual_seed(7)
    model(ids)
    assert torch.equal(torch.rand(3), following)


@pytest.mark.parametrize("method", ["occlusion", "knockout"])
def test_a_sequence_of_a_batch_does_not_run_by_itself_under_other_draws(method: str) -> None:
    with pytest.raises(UncoveredError, match=r"draws random numbers.*one sequence at a time"):
        ula.explain(Noisy().eval(), IDS, method=method, target=-1, progress=False)


def test_a_check_replaces_tokens_under_the_same_draws() -> None:
    model, fixed = Noisy().double().eval(), Noisy().double().eval()
    torch.manual_seed(7)
    fixed.noise = torch.randn(5, 8, dtype=torch.float64)
    torch.manual_seed(7)
    checks: list[Any] = [
        ula.explain(each, IDS[:1], method="lrp", target=-1, progress=False).check(2, draws=3) for each in (model, fixed)
    ]
    assert checks[0] == checks[1]


@pytest.mark.parametrize("method", ["occlusion", "knockout"])
def test_draws_that_nothing_reads_are_none(method: str) -> None:
    """BART and others draw a number for each layer that training may leave out."""
    model, fixed = Noisy().double().eval(), Noisy().double().eval()
    model.noise = fixed.noise = torch.randn(5, 8, dtype=torch.float64)
    model.register_forward_hook(lambda *_: torch.rand([]) and None)
    traced = ula.trace(model, IDS, progress=False)
    assert traced.draws is None and ula.trace(Noisy().eval(), IDS, progress=False).draws is not None
    result, expected = (
        ula.explain(each, method=method, target=-1, progress=False)
        for each in (traced, ula.trace(fixed, IDS, progress=False))
    )
    assert torch.equal(result.scores, expected.scores)


def test_draws_decide_how_many_tensors_a_model_returns() -> None:
    class Several(Noisy):
        def forward(self, input_ids: Tensor) -> Any:
            logits = super().forward(input_ids)
            return {"logits": logits, **({"more": logits * 2} if float(torch.rand([])) < 0.5 else {})}

    assert ula.trace(Several().eval(), IDS, progress=False).draws is not None


def test_a_layer_that_draws_has_no_operator() -> None:
    class Inside(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Shuffled()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.mixer(self.embedding(input_ids)))

    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x[:, torch.randperm(x.shape[1])]

    with pytest.raises(UncoveredError, match="draws random numbers"):
        ula.explain(Inside().eval(), IDS, method="logit", target=-1, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "occlusion"])
def test_a_masked_autoencoder_masks_the_patches_of_its_trace(method: str) -> None:
    """ViTMAE draws the patches that it masks, and returns a loss before its pixels."""
    sizes = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2
    )
    decoder = dict(decoder_hidden_size=8, decoder_intermediate_size=8, decoder_num_hidden_layers=1)
    config = transformers.ViTMAEConfig(**sizes, **decoder, decoder_num_attention_heads=2, mask_ratio=0.5)
    model = randomize(transformers.ViTMAEForPreTraining(config).double().eval())
    torch.manual_seed(5)
    with promoted():
        traced = ula.trace(model, torch.randn(1, 3, 8, 8, dtype=torch.float64), progress=False)
        first, second = (ula.explain(traced, method=method, target=3, progress=False) for _ in range(2))
    assert first.scores.shape == (1, 9) and torch.equal(first.scores, second.scores)
    assert bool((first.scores != 0).all())
    assert first.completeness_gap is None or first.completeness_gap < 1e-12
