"""Padding that reaches real tokens in recorded layers, found by their operators."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import WIDTH, Model, Output, ids
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

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


def test_padding_behind_an_image_and_a_text_is_that_of_the_text() -> None:
    """GIT reads the patches of an image before its text, and attention_mask has the tokens of the text."""
    tiny = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.GitConfig(vision_config=dict(**tiny, image_size=8, patch_size=4), vocab_size=40, **tiny)
    model = randomize(transformers.GitForCausalLM(config)).eval()
    tokens, image = (
        torch.arange(3, 15).reshape(2, 6),
        torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    )
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    inputs = {"input_ids": tokens, "pixel_values": image, "attention_mask": mask}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace = ula.trace(model, inputs, progress=False)
    (length,) = {layer.output.shape[1] for layer in trace.layers if layer.architecture == "recorded"}
    alone = {"input_ids": tokens[1:, :4], "pixel_values": image[1:]}
    options: dict[str, dict[str, Any]] = {"logit": {}, "latim": {"layers": [2, 3]}, "occlusion": {}, "gradient": {}}
    for method, values in options.items():
        padded = ula.explain(trace, method=method, target=-1, progress=False, **values).scores[..., 1:2, :]
        single = ula.explain(model, alone, method=method, target=-1, progress=False, **values).scores
        assert not padded[..., length - 2 :].any()
        assert relative_error(padded[..., : length - 2], single) < 1e-4


class Prefixed(Padded):
    """A padded model with trained vectors before its tokens; it may write zeros in place of padding."""

    def __init__(self, *blocks: nn.Module, blank: bool) -> None:
        super().__init__(*blocks)
        self.prefix, self.blank = nn.Parameter(torch.randn(3, WIDTH)), blank

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Output:
        x = self.embed(input_ids)
        x = x * attention_mask[..., None] if self.blank else x
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)
        mask = torch.cat([attention_mask.new_ones(len(x), 3), attention_mask], 1)
        for block in self.blocks:
            x = block(x, mask.bool())
        return Output(self.head(x))


def test_padding_whose_vectors_do_not_move_with_its_ids_is_warned_of() -> None:
    inputs = {"input_ids": ids(), "attention_mask": MASK}
    trace = ula.trace(Prefixed(Attention(masks=True), blank=False).eval(), inputs, progress=False)
    expected = torch.cat([torch.ones(2, 3, dtype=torch.bool), MASK.bool()], 1)
    assert trace.layers[0].mask is not None and torch.equal(trace.layers[0].mask, expected)
    with pytest.warns(UserWarning, match="it is unknown which of them are padding, so a target counts padding too"):
        ula.trace(Prefixed(Attention(masks=True), blank=True).eval(), inputs, progress=False)
