"""Padding that reaches real tokens in recorded layers, found by their operators."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import WIDTH, Model, Output, ids

MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


class Attention(nn.Module):
    """Attention with a residual, which masks padding or does not."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.query, self.masks = nn.Linear(WIDTH, WIDTH), masks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.mT
        scores = scores.masked_fill(~mask[:, None], -torch.inf) if self.masks else scores
        return x + functional.softmax(scores, -1) @ x


class Padded(Model):
    """A model with a padding mask."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Output:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask.bool())
        return Output(self.head(x))


def test_an_unmasked_recorded_layer_is_named() -> None:
    inputs = {"input_ids": ids(), "attention_mask": MASK}
    with pytest.warns(UserWarning, match=r"padding reaches real tokens .*: blocks.1 \(Attention\) does not mask it"):
        ula.trace(Padded(Attention(masks=True), Attention(masks=False)).eval(), inputs, progress=False)


def test_a_masked_recorded_layer_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace = ula.trace(
            Padded(Attention(masks=True)).eval(), {"input_ids": ids(), "attention_mask": MASK}, progress=False
        )
    assert [layer.architecture for layer in trace.layers] == ["recorded"]
