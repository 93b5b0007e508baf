"""Inputs that a model takes as dictionaries are those of its fields: a text's ids and mask."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.test_siamese import FIRST, SECOND, bert
from unilinattn.errors import InputError
from unilinattn.host.fields import as_called, by_field
from unilinattn.testing import relative_error

LIMIT = 1e-10
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


class Embedder(nn.Module):
    """The normed mean of a text's vectors, as the modules of sentence-transformers compute it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = bert()

    def forward(self, features: Mapping[str, Any], scale: float = 1.0) -> dict[str, Tensor]:
        states = self.encoder(input_ids=features["input_ids"], attention_mask=features.attention_mask)
        real = features["attention_mask"][..., None].to(states.last_hidden_state)
        mean = (states.last_hidden_state * real).sum(1) / real.sum(1)
        return {"sentence_embedding": functional.normalize(mean, dim=-1) * scale}


class Pair(Embedder):
    """The cosine of two texts."""

    def forward(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> Tensor:  # type: ignore[override]
        one, two = (super(Pair, self).forward(text)["sentence_embedding"] for text in (first, second))
        return (one * two).sum(-1)


def text(ids: Tensor, real: Tensor | None = None) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if real is None else real}


def first_number(out: Any) -> Tensor:
    return out["sentence_embedding"][:, 0]


@pytest.mark.parametrize("method", ["logit", "attn_lrp", "rollout", "knockout", "occlusion", "input_x_gradient"])
def test_a_padded_text_in_a_dictionary_has_the_scores_of_the_text_alone(method: str) -> None:
    model, options = Embedder().double().eval(), {} if method == "rollout" else {"logit": first_number}
    batch = ula.explain(model, {"features": text(FIRST, REAL)}, method=method, target=-1, progress=False, **options)
    single = ula.explain(model, {"features": text(FIRST[1:, :3])}, method=method, target=-1, progress=False, **options)
    assert batch.mask is not None and batch.mask.tolist() == REAL.bool().tolist()
    assert relative_error(batch.scores[1:, :3], single.scores) < LIMIT
    assert not bool(batch.scores[1, 3:].any())


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "attn_lrp", "alti", "knockout", "occlusion", "input_x_gradient"])
def test_two_dictionaries_are_two_texts(method: str) -> None:
    model, options = Pair().double().eval(), {"compose": "rollout"} if method == "alti" else {}
    encoding = transformers.BatchEncoding(text(SECOND, REAL))
    trace = ula.trace(model, {"first": text(FIRST), "second": encoding}, progress=False)
    assert not trace.warnings and {"first.input_ids", "second.attention_mask"} <= trace.arguments.keys()
    result = ula.explain(trace, method=method, progress=False, **options)
    assert result.scores.shape[-1] == 10 and bool(result.scores[..., :5].any()) and bool(result.scores[..., 5:].any())
    assert result.completeness_gap is None or result.completeness_gap < LIMIT
    if method not in ("alti", "knockout"):
        assert float(result.scores[1, 8:].abs().max()) < LIMIT


def test_errors_name_arguments_and_not_fields() -> None:
    with pytest.raises(InputError, match=r"Pair\.forward takes no argument 'third'"):
        ula.trace(Pair().eval(), {"first": text(FIRST), "second": text(SECOND), "third": text(SECOND)})
    with pytest.raises(InputError, match=r"Pair\.forward needs 'second', and the inputs have first\.input_ids"):
        ula.trace(Pair().eval(), {"first": text(FIRST)})


def test_only_dictionaries_of_tensors_are_taken_apart() -> None:
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(1, 2, 3))
    arguments = {"x": torch.ones(2), "options": {"scale": 2.0}, "states": output, "text": text(FIRST), 3: None}
    flat = by_field({name: value for name, value in arguments.items() if isinstance(name, str)})
    assert list(flat) == ["x", "options", "states", "text.input_ids", "text.attention_mask"]
    assert flat["states"] is output
    call = as_called(flat)
    assert call["text"] == arguments["text"] and call["text"].input_ids is FIRST and call["options"] == {"scale": 2.0}
    with pytest.raises(AttributeError, match="position_ids"):
        call["text"].position_ids  # noqa: B018
