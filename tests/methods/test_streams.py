"""Methods over several streams of tokens: an encoder and a decoder, audio and text, two towers."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import unilinattn as ula
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.frozen.run import frozen
from unilinattn.testing import promoted, randomize, relative_error

pytestmark = pytest.mark.long

VOCABULARY = 19
IDS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0)
ALTI = ula.methods.Alti(compose="rollout")
LATIM = ula.methods.Latim(compose="rollout", residual=True, normalize="rows")
COMPOSED = ("rollout", ALTI, LATIM)
WEIGHTED = ("attribution", "contribution", "attention_grad", "transformer_attribution")
RUN_AGAIN = ("gradient", "input_x_gradient", "occlusion", "knockout")


def words() -> Any:
    """Return a tokenizer of the words "zero" to "three" and more, whose padding is the first id of the decoder."""
    names = ["[PAD]", "[BOS]", "[EOS]", "zero", "one", "two", "three", *(f"word{i}" for i in range(VOCABULARY - 7))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    """Run in float64 where hosts compute norms and softmax in float32."""
    with promoted():
        yield


def t5() -> nn.Module:
    config = T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, **IDS)
    config._attn_implementation = "eager"
    return T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    width = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=12, decoder_ffn_dim=12)
    return BartForConditionalGeneration(
        BartConfig(**width, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32, **IDS)
    )


def whisper() -> nn.Module:
    width = dict(d_model=8, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=12, decoder_ffn_dim=12)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    lengths = dict(max_source_positions=6, max_target_positions=16, num_mel_bins=3)
    return WhisperForConditionalGeneration(WhisperConfig(**width, **heads, **lengths, **IDS))


MODELS: dict[str, Callable[[], nn.Module]] = {"t5": t5, "bart": bart, "whisper": whisper}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def arguments(name: str, encoded: int = 6, decoded: int = 4) -> dict[str, Tensor]:
    decoder = {"decoder_input_ids": draw(2, decoded, seed=1)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0)), **decoder}
    return {"input_ids": draw(2, encoded), **decoder}


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomize(MODELS[name]().eval()).double()


@cache
def traced(name: str, encoded: int = 6, decoded: int = 4) -> ula.Trace:
    given = arguments(name, encoded, decoded)
    given = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
    return ula.trace(model_of(name), given, progress=False)


# With as many tokens on both sides the streams have the same shape.
LENGTHS = pytest.mark.parametrize("decoded", [4, 6])
HOSTS = pytest.mark.parametrize("name", MODELS)


@HOSTS
@LENGTHS
@pytest.mark.parametrize("method", ["logit", "lrp", "alti_logit"])
def test_shares_of_both_streams_add_up(name: str, decoded: int, method: str) -> None:
    trace = traced(name, 6, decoded)
    if (name, method) == ("bart", "alti_logit"):
        with pytest.raises(UncoveredError, match="norms or multiplies its residual stream"):
            ula.explain(trace, method=method, target=-1)
        return
    result = ula.explain(trace, method=method)
    assert result.sizes == {"batch": 2, "query": decoded, "key": 6 + decoded}
    assert result.streams == {"query": {"decoder": decoded}, "key": {"encoder": 6, "decoder": decoded}}
    total = result.scores.sum(-1) + result.extras["bias"] + result.extras["remainder"]
    assert relative_error(total, result.extras["logit"]) < 1e-10
    # The decoder is causal, and every token of the encoder is read.
    later = torch.ones(decoded, decoded, dtype=torch.bool).triu(1)
    assert not bool(result.select(keys="decoder").scores[:, later].any())
    read = result.select(keys="encoder").scores != 0
    # ALTI has no contribution of a token farther from the output than the output is long.
    assert bool((read.any(1) if method == "alti_logit" else read).all())
    row = ula.explain(trace, method=method, target=-1)
    assert relative_error(row.scores, result.scores[:, -1]) < 1e-10


def test_positions_of_both_streams_are_parts_of_their_tokens() -> None:
    """`embedding` counts the positions of an encoder and a decoder, and the bias counts none of them."""
    model, trace = model_of("bart"), traced("bart")
    extras = ula.explain(trace, method="logit", target=-1).extras
    assert bool((extras["embedding"] != 0).all())
    sides = (model.model.encoder, model.model.decoder)
    with torch.no_grad():
        for side in sides:
            side.embed_positions.weight.zero_()
            side.layernorm_embedding.bias.zero_()
    try:
        plain = ula.explain(model, arguments("bart"), method="logit", target=-1).extras["embedding"]
    finally:
        model_of.cache_clear()
        traced.cache_clear()
    assert not bool(plain.any())


def test_shares_of_t5_are_those_of_a_model_with_detached_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In T5 everything but softmax, the norms and relu is linear, and it has no biases."""
    model, given = model_of("t5"), arguments("t5")
    shares = frozen(traced("t5"), None).shares(-1, 5)
    table = model.get_input_embeddings()
    vectors = {name: table(ids).detach().requires_grad_() for name, ids in given.items()}
    softmax = functional.softmax

    def frozen_norm(self: nn.Module, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x * scale

    monkeypatch.setattr(functional, "softmax", lambda *args, **kwargs: softmax(*args, **kwargs).detach())
    monkeypatch.setattr(type(model.encoder.final_layer_norm), "forward", frozen_norm)
    embeds = {"inputs_embeds": vectors["input_ids"], "decoder_inputs_embeds": vectors["decoder_input_ids"]}
    logits = model(**embeds, use_cache=False).logits[:, -1, 5]
    grads = torch.autograd.grad(logits.sum(), list(vectors.values()))
    expected = torch.cat([(x * g).sum(-1) for x, g in zip(vectors.values(), grads, strict=True)], 1)
    assert relative_error(shares.tokens, expected) < 1e-12
    assert relative_error(expected.sum(1, keepdim=True), logits[:, None]) < 1e-12


@HOSTS
@LENGTHS
def test_shares_by_layer_add_up_over_both_streams(name: str, decoded: int) -> None:
    trace = traced(name, 6, decoded)
    result = ula.explain(trace, method="logit", by="layer", target=-1)
    assert relative_error(result.scores.sum(-1) + result.extras["bias"], result.extras["part"]) < 1e-10
    with pytest.raises(UncoveredError, match="several streams of tokens"):
        ula.explain(trace, method="logit", by="depth", target=-1)


def joint_map(trace: ula.Trace, layer: int, decoded: int, method: Any) -> Tensor:
    """Return a layer's map among the tokens of the encoder and those of the decoder after them."""
    result = ula.explain(trace, method=method(layer))
    slots = {"encoder": slice(0, 6), "decoder": slice(6, 6 + decoded)}
    name = result.layers[0]
    written = slots["encoder" if ".encoder." in f".{name}" else "decoder"]
    crosses = any(word in name for word in ("EncDecAttention", "encoder_attn"))
    whole = torch.eye(6 + decoded, dtype=torch.float64).repeat(2, 1, 1)
    block = result.scores[0]
    if method is raw_of:
        whole[:, written, slots["encoder"] if crosses else written] += block
        return whole
    whole[:, written, written] = torch.diag_embed(result.extras["residual"][0]) if crosses else 0
    whole[:, written, slots["encoder"] if crosses else written] += block
    return whole


def raw_of(layer: int) -> Any:
    return ula.methods.Raw(layers=[layer])


def alti_of(layer: int) -> Any:
    return ula.methods.Alti(layers=[layer])


def latim_of(layer: int) -> Any:
    return ula.methods.Latim(layers=[layer], residual=True, normalize="rows")


@HOSTS
@LENGTHS
@pytest.mark.parametrize(
    ("method", "single"), [("rollout", raw_of), (ALTI, alti_of), (LATIM, latim_of)], ids=["rollout", "alti", "latim"]
)
def test_a_composition_is_the_product_among_the_tokens_of_both(
    name: str, decoded: int, method: Any, single: Any
) -> None:
    trace = traced(name, 6, decoded)
    result = ula.explain(trace, method=method)
    expected = torch.eye(6 + decoded, dtype=torch.float64).repeat(2, 1, 1)
    for layer in range(len(trace.layers)):
        expected = joint_map(trace, layer, decoded, single) @ expected
    assert relative_error(result.scores, expected) < 1e-10
    counts = {"encoder": 6, "decoder": decoded}
    assert result.streams == {"query": counts, "key": counts}
    row = ula.explain(trace, method=method, target=-1)
    assert relative_error(row.scores, expected[:, -1]) < 1e-10
    assert row.streams == {"query": {"decoder": decoded}, "key": counts}


@HOSTS
@LENGTHS
@pytest.mark.parametrize("method", [*WEIGHTED, *RUN_AGAIN])
def test_other_methods_have_the_tokens_of_both(name: str, decoded: int, method: str) -> None:
    trace = traced(name, 6, decoded)
    row = ula.explain(trace, method=method, target=-1)
    assert row.sizes == {"batch": 2, "key": 6 + decoded} and bool((row.scores[:, :6] != 0).any())
    if method == "occlusion":
        return
    every = ula.explain(trace, method=method)
    assert every.sizes == {"batch": 2, "query": decoded, "key": 6 + decoded}
    assert relative_error(every.scores[:, -1], row.scores) < 1e-8


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.slow), "bart"])
def test_a_padded_text_has_the_shares_of_the_text_alone(name: str) -> None:
    given = arguments(name)
    given["attention_mask"] = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    alone = {"input_ids": given["input_ids"][1:, :4], "decoder_input_ids": given["decoder_input_ids"][1:]}
    for method in ("logit", ALTI, "rollout", "knockout"):
        padded = ula.explain(model_of(name), given, method=method, target=-1)
        single = ula.explain(model_of(name), alone, method=method, target=-1)
        real = padded.mask[1]
        assert real.tolist() == [True] * 4 + [False] * 2 + [True] * 4
        assert relative_error(padded.scores[1:, real], single.scores) < 1e-10
        assert not bool(padded.scores[1, ~real].any())


def test_a_token_of_the_encoder_is_knocked_out_in_all_layers_that_read_it() -> None:
    trace, model, given = traced("t5"), model_of("t5"), arguments("t5")
    result = ula.explain(trace, method="knockout", target=-1, logit=5)
    names = [layer.name for layer in trace.layers]
    encoder, cross = names[:2], [name for name in names if "EncDec" in name]
    others = [(query, 2) for query in range(6) if query != 2]
    logits = model(**given, use_cache=False).logits[:, -1, 5]
    with ula.cut(model, others, layers=encoder), ula.cut(model, [(q, 2) for q in range(4)], layers=cross):
        without = model(**given, use_cache=False).logits[:, -1, 5]
    assert relative_error(result.scores[:, 2:3], (logits - without).detach()[:, None]) < 1e-8
    with pytest.raises(OptionError, match="edges name the tokens of one stream"):
        ula.explain(trace, method="knockout", target=-1, edges=[(1, 0)])


def test_a_stream_is_selected_with_its_labels() -> None:
    tokens = [f"e{i}" for i in range(6)] + [f"d{i}" for i in range(4)]
    result = ula.explain(traced("t5"), method="rollout", tokens=[tokens, tokens])
    cross = result.select(queries="decoder", keys="encoder")
    assert cross.sizes == {"batch": 2, "query": 4, "key": 6}
    assert (cross.scores == result.scores[:, 6:, :6]).all()
    assert list(cross.tokens[0]) == tokens[:6] and list(cross.query_tokens[0]) == tokens[6:]
    with pytest.raises(OptionError, match="no stream 'encodr'; did you mean 'encoder'"):
        result.select(keys="encodr")
    with pytest.raises(InputError, match="no stream can be selected"):
        ula.explain(traced("t5"), method="raw", layers=[0]).select(keys="encoder")
    assert "key 10 (encoder 6, decoder 4)" in repr(result)
    assert "e5" in result.select(batch=0).to_html()


def test_a_saved_result_keeps_its_streams(tmp_path: Any) -> None:
    result = ula.explain(traced("bart"), method="logit", target=-1)
    loaded = ula.Attribution.load(result.save(tmp_path / "scores.safetensors"))
    assert loaded.streams == result.streams


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("method", ["logit", "rollout"])
def test_a_generated_text_is_explained_by_the_prompt_and_itself(name: str, method: str) -> None:
    result = ula.explain_generation(model_of(name), draw(1, 6), max_new_tokens=3, method=method, progress=False)
    rows = result.sizes["query"]
    assert result.streams == {"query": {"decoder": rows}, "key": {"encoder": 6, "decoder": rows + 1}}
    assert not bool(result.select(keys="decoder").scores[0].triu(1).any())
    if method == "logit":
        total = result.scores.sum(-1) + result.extras["bias"]
        assert relative_error(total, result.extras["logit"]) < 1e-6


def test_the_towers_of_a_dual_encoder_do_not_mix() -> None:
    torch.manual_seed(0)
    width = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    text = dict(**width, vocab_size=VOCABULARY, max_position_embeddings=16, eos_token_id=2)
    vision = dict(**width, image_size=6, patch_size=3)
    model = randomize(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval())
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    result = ula.explain(model, {"input_ids": draw(2, 7), "pixel_values": images}, method="alti", compose="rollout")
    assert result.streams["key"] == {"vision_model": 5, "text_model": 7}
    assert torch.allclose(result.scores.sum(-1), torch.ones(2, 12))
    assert not bool(result.select(queries="vision_model", keys="text_model").scores.any())
    assert bool((result.select(queries="vision_model", keys="vision_model").scores > 0).any())
    # The similarity of a text and an image is a function of the output, to which both streams contribute.
    shares = ula.explain(
        model,
        {"input_ids": draw(2, 7), "pixel_values": images},
        method="logit",
        logit=lambda out: out.logits_per_text.diagonal(),
    )
    assert shares.streams["key"] == {"vision_model": 5, "text_model": 7}
    assert shares.completeness_gap < 1e-4


def test_attention_pooling_begins_a_stream() -> None:
    torch.manual_seed(0)
    width = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    model = randomize(SiglipVisionModel(SiglipVisionConfig(**width, image_size=6, patch_size=3)).eval())
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    result = ula.explain(model, {"pixel_values": images}, target=-1)
    assert result.streams["key"] == {"encoder": 4, "head": 1}
    # The pooled vector is made of the patches alone.
    assert torch.allclose(result.select(keys="encoder").scores.sum(-1), torch.ones(2))
    assert not bool(result.select(keys="head").scores.any())


def test_a_text_is_read_by_the_encoder_and_the_decoder_starts() -> None:
    tokenizer = words()
    result = ula.explain(model_of("t5"), "one two three", tokenizer=tokenizer, target=-1)
    assert result.streams["key"] == {"encoder": 3, "decoder": 1}
    assert [text.strip() for text in result.tokens[0]] == ["one", "two", "three", "[PAD]"]
    with pytest.raises(InputError, match=r"no decoder_input_ids: give the ids .*the first one of a text is 0"):
        ula.trace(model_of("t5"), draw(1, 6))
    with pytest.raises(InputError, match="tokens of its decoder"):
        ula.explain(model_of("t5"), "one two three", tokenizer=tokenizer, target="two")
    generated = ula.explain_generation(model_of("t5"), "one two", tokenizer=tokenizer, max_new_tokens=2, progress=False)
    assert [text.strip() for text in generated.tokens[0]][:3] == ["one", "two", "[PAD]"]
    assert len(generated.query_tokens[0]) == 2


class Encoder(nn.Module):
    """Blocks of attention, each added to the stream."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Projector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 8)

    def forward(self, frames: Tensor) -> Tensor:
        return torch.tanh(self.linear(frames))


class Transcriber(nn.Module):
    """Four frames of a signal are merged into a vector, which is added to that of a word."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.audio = nn.Linear(3, 8), Encoder(1)
        self.projector, self.words = Projector(), nn.Embedding(VOCABULARY, 8)
        self.text, self.head = Encoder(2), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, signal: Tensor) -> dict[str, Tensor]:
        frames = self.audio(self.frames(signal))
        merged = self.projector(frames.reshape(len(frames), -1, 32))
        return {"logits": self.head(self.text(self.words(input_ids) + merged))}


def test_a_projector_of_as_many_vectors_as_the_text_is_none_of_its_blocks() -> None:
    torch.manual_seed(0)
    model = randomize(Transcriber().eval()).double()
    signal = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = ula.explain(model, {"input_ids": draw(2, 5), "signal": signal}, method="logit", target=-1)
    assert any("projector" in layer for layer in result.layers)
    assert result.sizes == {"batch": 2, "key": 5} and result.completeness_gap < 1e-10
