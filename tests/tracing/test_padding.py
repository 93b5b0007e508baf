"""Padding that reaches real tokens in recorded layers, found by their operators."""

import warnings
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import WIDTH, Model, Output, ids
from unilinattn.errors import UncoveredError
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("side", ["attention_mask", "decoder_attention_mask"])
def test_padding_of_a_recorded_cross_attention_is_that_of_the_stream_it_reads(side: str) -> None:
    config = transformers.MvpConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
        bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = randomize(transformers.MvpForConditionalGeneration(config)).eval()
    tokens = torch.arange(3, 15).reshape(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    name = side.replace("attention_mask", "input_ids")
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens + 5, side: mask}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        padded = ula.explain(model, inputs, target=-1, progress=False).scores[1]
    alone = {key: value[1:] for key, value in inputs.items() if key != side}
    single = ula.explain(model, {**alone, name: alone[name][:, :4]}, target=-1, progress=False).scores
    start = 0 if side == "attention_mask" else 6
    assert not padded[start + 4 : start + 6].any()
    assert relative_error(torch.cat([padded[: start + 4], padded[start + 6 :]])[None], single) < 1e-4


class Reading(nn.Module):
    """Cross attention that does not mask the padding of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return functional.softmax(self.query(x) @ memory.mT, -1) @ memory


class Reader(Model):
    """A model that reads a memory with padding."""

    def forward(self, input_ids: Tensor, memory: Tensor, encoder_attention_mask: Any = None) -> Output:
        x = self.embed(input_ids)
        return Output(self.head(x + self.blocks[0](x, memory)))


def test_an_unmasked_memory_is_named() -> None:
    memory = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    inputs = {"input_ids": ids(), "memory": memory, "encoder_attention_mask": mask}
    with pytest.warns(UserWarning, match=r"padding reaches real tokens .*: blocks.0 \(Reading\) does not mask it"):
        ula.trace(Reader(Reading()).eval(), inputs, progress=False)


class Encoder(nn.Module):
    """Torch's encoder, which in eval mode removes padded tokens between its layers, or one that computes so itself."""

    def __init__(self, nested: bool, computes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.encoder, self.computes = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), computes

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.computes:
            x = torch._nested_tensor_from_mask(x, attention_mask.bool())
            for layer in self.encoder.layers:
                x = layer(x)
            return cast(Tensor, self.head(x.to_padded_tensor(0.0)))
        return cast(Tensor, self.head(self.encoder(x, src_key_padding_mask=attention_mask == 0)))


@pytest.mark.long
@pytest.mark.parametrize("method", ["rollout", "lrp", "attribution", "gradient", "knockout", "occlusion"])
def test_torchs_encoder_is_traced_with_its_padding(method: str) -> None:
    inputs = {"input_ids": ids(batch=2), "attention_mask": MASK}
    model = Encoder(nested=True).eval()
    result = ula.explain(model, inputs, method=method, target=-1, progress=False)
    plain = ula.explain(Encoder(nested=False).eval(), inputs, method=method, target=-1, progress=False)
    assert torch.equal(result.scores, plain.scores)
    assert not result.scores[0, 5:].any() and result.scores[0, :5].any()
    assert model.encoder.use_nested_tensor


def test_nested_tensors_of_a_host_are_refused() -> None:
    inputs = {"input_ids": ids(batch=2), "attention_mask": MASK}
    with pytest.raises(UncoveredError, match="nested tensors"):
        ula.trace(Encoder(nested=True, computes=True).eval(), inputs)
