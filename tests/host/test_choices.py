"""Models that score several texts as answers to one question: each is a sequence with one logit."""

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.tracing.models import VOCABULARY, Output
from unilinattn.errors import InputError
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import randomize

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


def multiple_choice() -> nn.Module:
    model = transformers.BertForMultipleChoice(transformers.BertConfig(**SIZES))
    return randomize(model).double().eval()


def questions() -> dict[str, Tensor]:
    ids = torch.randint(5, 50, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_each_choice_is_a_sequence_with_its_logit() -> None:
    model, inputs = multiple_choice(), questions()
    expected = model(**inputs).logits
    with left_as_found(model):
        trace = ula.trace(model, inputs)
    assert [tuple(layer.output.shape) for layer in trace.layers] == [(6, 7, 16), (6, 7, 16)]
    assert max(layer.reconstruction_error() for layer in trace.layers) < 1e-12
    torch.testing.assert_close(trace.output.logits, expected.reshape(6, 1), rtol=1e-12, atol=1e-12)
    result = ula.explain(trace, method="logit", target=-1)
    assert result.scores.shape == (6, 7)
    assert result.completeness_gap < 1e-12
    assert not result.scores[1, 5:].any()
    # A choice by itself has the same shares.
    alone = ula.explain(model, {name: x[1:, 2:] for name, x in inputs.items()}, method="logit", target=-1)
    torch.testing.assert_close(result.scores[5:], alone.scores, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["occlusion", "gradient", "rollout", "attribution"])
def test_every_kind_of_method_takes_choices(method: str) -> None:
    assert ula.explain(multiple_choice(), questions(), method=method, target=-1).scores.shape == (6, 7)


def test_ids_of_three_axes_without_a_logit_for_each_choice_are_refused() -> None:
    model, inputs = multiple_choice(), questions()
    with pytest.raises(InputError, match=r", \(batch, choice, length\) for a model that returns a logit for each"):
        ula.trace(transformers.BertModel(transformers.BertConfig(**SIZES)).eval(), inputs)
    with pytest.raises(InputError, match="labels make a loss over the choices"):
        ula.trace(model, {**inputs, "labels": torch.zeros(2, dtype=torch.long)})
    with pytest.raises(InputError, match="the model has one logit for each sequence, 0"):
        ula.explain(model, inputs, logit=2)


class Compared(nn.Module):
    """Scores a choice by all choices of its question."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 1)

    def forward(self, input_ids: Tensor) -> Output:
        scores = self.head(self.embed(input_ids).mean(2)).squeeze(-1)
        return Output(logits=scores - scores.mean(1, keepdim=True))


def test_a_choice_that_depends_on_the_others_is_refused() -> None:
    with pytest.raises(InputError, match="depends on the other choices"):
        ula.trace(Compared(), {"input_ids": questions()["input_ids"] % VOCABULARY})
