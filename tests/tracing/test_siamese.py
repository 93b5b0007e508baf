"""A module that reads several inputs in turn writes a stream for each, also if they have as many tokens."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.testing import randomize, relative_error

LIMIT = 1e-10
SIZES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
FIRST, SECOND, THIRD = torch.randint(1, 50, (3, 2, 5), generator=torch.Generator().manual_seed(0))
METHODS = ("logit", "lrp", "attn_lrp", "rollout", "alti", "latim", "knockout", "occlusion", "input_x_gradient")


def bert() -> nn.Module:
    return randomize(transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False))


def albert() -> nn.Module:
    """An encoder that calls one layer for each of its depths."""
    config = transformers.AlbertConfig(**SIZES, embedding_size=8)
    return randomize(transformers.AlbertModel(config, add_pooling_layer=False))


class Pair(nn.Module):
    """Returns the similarity of two texts by one encoder, or by two with equal weights."""

    def __init__(self, encoder: nn.Module, copies: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.other = copy.deepcopy(encoder) if copies else None

    def forward(self, first_input_ids: Tensor, second_input_ids: Tensor) -> Tensor:
        first = self.encoder(first_input_ids).last_hidden_state.mean(1)
        other = self.encoder if self.other is None else self.other
        return functional.cosine_similarity(first, other(second_input_ids).last_hidden_state.mean(1))


def traced(model: nn.Module, **inputs: Tensor) -> ula.Trace:
    return ula.trace(model.double().eval(), inputs, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("encoder", [bert, albert])
@pytest.mark.parametrize("texts", ["different", "equal", "of other lengths"])
def test_two_texts_in_one_encoder_are_those_of_two_encoders(encoder: Any, texts: str) -> None:
    second = {"different": SECOND, "equal": FIRST.clone(), "of other lengths": SECOND[:, :3]}[texts]
    inputs = {"first_input_ids": FIRST, "second_input_ids": second}
    torch.manual_seed(0)
    model = encoder()
    shared, apart = traced(Pair(model), **inputs), traced(Pair(model, copies=True), **inputs)
    for trace in (shared, apart):
        assert [stream.layers for stream in trace.streams] == [(0, 1), (2, 3)]
    for method in METHODS:
        options = {"compose": "rollout"} if method in ("alti", "latim") else {}
        one, two = (ula.explain(trace, method=method, progress=False, **options) for trace in (shared, apart))
        assert one.scores.shape[-1] == 5 + second.shape[1]
        assert relative_error(one.scores.flatten(0, -2), two.scores.flatten(0, -2)) < LIMIT, method
        assert one.scores[..., :5].any() and one.scores[..., 5:].any()
        assert one.completeness_gap is None or one.completeness_gap < LIMIT


def test_three_texts_are_three_streams() -> None:
    class Triplet(Pair):
        def forward(self, first_input_ids: Tensor, second_input_ids: Tensor, third_input_ids: Tensor) -> Tensor:
            near = super().forward(first_input_ids, second_input_ids)
            return near - super().forward(first_input_ids, third_input_ids)

    inputs = {"first_input_ids": FIRST, "second_input_ids": SECOND, "third_input_ids": THIRD}
    trace = traced(Triplet(bert()), **inputs)
    # The first text is read again for each of the others.
    assert [stream.layers for stream in trace.streams] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_layer_that_is_called_at_each_depth_continues_its_sequence() -> None:
    runs: list[int] = []
    model = albert()
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    trace = traced(model, input_ids=FIRST)
    assert [layer.tower for layer in trace.layers] == ["", ""] and len(trace.streams) == 1
