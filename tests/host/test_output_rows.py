"""Rows of the output and of the stream: logits that are not those of the layers' tokens, and vectors that are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.host.test_host_calls import SMALL, VISION, ids, model_of
from tests.tracing.models import Block, Model, added
from unilinattn.errors import ExactnessError, InputError, UncoveredError
from unilinattn.host.inputs import call_host
from unilinattn.host.logits import positions_of
from unilinattn.registry import Architecture, overridden
from unilinattn.testing import TOLERANCES

GEMMA = dict(
    SMALL,
    num_hidden_layers=4,
    num_key_value_heads=1,
    head_dim=4,
    global_head_dim=4,
    vocab_size=20,
    vocab_size_per_layer_input=20,
    hidden_size_per_layer_input=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
NANO = {**GEMMA, "intermediate_size": [8] * 4, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2}


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCES["layer", torch.float32] * expected.abs().max())


class Plain(Model):
    """A model whose output is a dictionary, or one number for each sequence."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__(Block(added))
        self.read = read

    def forward(self, ids: Tensor) -> Any:
        return self.read(super().forward(ids).logits)


def test_a_dictionary_with_logits_is_an_output_with_logits() -> None:
    torch.manual_seed(0)
    model = Plain(lambda logits: {"logits": logits})
    inputs = torch.randint(9, (2, 5))
    result = ula.explain(model, inputs, method="logit", target=-1, progress=False)
    logit = model(inputs)["logits"][:, -1].amax(-1).double()
    close(result.scores.double().sum(1) + result.extras["bias"], logit.detach())
    assert ula.explain(model, inputs, method="occlusion", target=-1, progress=False).scores.shape == (2, 5)


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"logits": value}])
def test_one_number_for_each_sequence_is_one_logit(wrap: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = Plain(lambda logits: wrap(logits[:, -1, 4]))
    inputs = torch.randint(9, (2, 5))
    result = ula.explain(model, inputs, method="logit", progress=False)
    assert result.method == "logit"
    with torch.no_grad():
        expected = Model.forward(model, inputs).logits[:, -1, 4].double()
    close(result.scores.double().sum(1) + result.extras["bias"], expected)
    with pytest.raises(InputError, match="logit 1 is out of range: the model has one logit for each sequence, 0"):
        ula.explain(model, inputs, logit=1, progress=False)


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: (value, None)])
@pytest.mark.parametrize("method", ["logit", "occlusion", "gradient", "attribution"])
def test_a_tensor_with_a_logit_for_each_id_has_logits(wrap: Callable[[Tensor], Any], method: str) -> None:
    torch.manual_seed(0)
    model = Plain(wrap).double()
    inputs = torch.randint(9, (2, 5))
    assert ula.explain(model, inputs, target=-1, progress=False).method == "lrp"
    result = ula.explain(model, inputs, method=method, target=-1, progress=False)
    entry = Plain(lambda logits: {"logits": logits}).double()
    entry.load_state_dict(model.state_dict())
    expected = ula.explain(entry, inputs, method=method, target=-1, progress=False)
    torch.testing.assert_close(result.scores, expected.scores, rtol=0, atol=0)
    assert method != "logit" or result.completeness_gap < 1e-12


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            lambda logits: logits[..., :8],
            r"\(2, 5, 8\) that it returns would be logits if its last axis had one for each",
        ),
        (
            lambda logits: (logits[:1], None),
            r"have 2 sequences of 5 tokens.* such as lambda out: out\[0\]\[:, -1, 0\]",
        ),
        (lambda logits: logits[:1], r"such as lambda out: out\[:, -1, 0\]"),
    ],
)
def test_another_tensor_has_no_logits_and_the_error_names_its_shape(
    read: Callable[[Tensor], Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ula.explain(Plain(read), torch.randint(9, (2, 5)), logit=1, target=-1, progress=False)


def yolos() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {**VISION, "image_size": [8, 8], "num_detection_tokens": 3, "num_labels": 2}
    # With one block the model has a parameter without elements.
    return model_of("YolosForObjectDetection", "YolosConfig", **sizes), {"pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "attn_lrp", "gradient", "occlusion"])
def test_a_target_names_a_row_of_logits_that_are_not_those_of_tokens(method: str) -> None:
    model, inputs = yolos()
    trace = ula.trace(model, inputs, progress=False)
    options = {"measure": "logit"} if method == "attn_lrp" else {}
    result = ula.explain(trace, method=method, target=[1, -1], logit=2, progress=False, **options)
    assert "the logit 2 in row 1, 2 in row 2" in repr(result)
    for sequence, row in enumerate((1, 2)):
        image = {"pixel_values": inputs["pixel_values"][sequence : sequence + 1]}
        named = ula.explain(model, image, method=method, logit=lambda out, row=row: out.logits[:, row, 2], **options)
        torch.testing.assert_close(named.scores[0], result.scores[sequence], rtol=1e-3, atol=1e-5)


def test_the_prediction_of_a_row_of_logits_is_explained_by_its_log_odds() -> None:
    model, inputs = yolos()
    result = ula.explain(model, inputs, target=1, progress=False)
    with torch.no_grad():
        logits = model(**inputs).logits[:, 1].double()
    best = logits.amax(-1)
    expected = best - (logits.exp().sum(-1) - best.exp()).log()
    assert result.method == "lrp"
    close(result.extras["logit"], expected)
    parts = result.scores.double().sum(1) + result.extras["bias"] + result.extras["remainder"]
    close(parts, result.extras["logit"])
    assert "log-odds of logit" in repr(result)
    with pytest.raises(InputError, match="target 3 is out of range: sequence 0 has 3 real positions"):
        ula.explain(model, inputs, target=3, progress=False)


@pytest.mark.parametrize("method", ["knockout", "attribution"])
def test_methods_that_read_rows_of_tokens_need_a_function_for_other_logits(method: str) -> None:
    model, inputs = yolos()
    trace = ula.trace(model, inputs, progress=False)
    # Position 1 exists among both, and means another token.
    with pytest.raises(InputError, match=r"logits of shape \(2, 3, 3\), and its layers have 2 sequences of 8 tokens"):
        ula.explain(trace, method=method, target=1, progress=False)
    result = ula.explain(trace, method=method, logit=lambda out: out.logits[:, 0, 1], target=-1, progress=False)
    assert result.scores.shape == (2, 8)


def musicgen() -> nn.Module:
    sizes = dict(hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=20, num_codebooks=2)
    return model_of("MusicgenForCausalLM", "MusicgenDecoderConfig", **sizes)


OF_CODEBOOKS = partial(lambda out: out.logits[::2, -1, 3])


@pytest.mark.parametrize(
    ("method", "logit"),
    [("logit", None), ("gradient", None), ("knockout", None), ("knockout", OF_CODEBOOKS)],
)
def test_a_model_that_changes_the_batch_is_refused(method: str, logit: Any) -> None:
    # Two codebooks are two rows of ids, whose embeddings are summed.
    trace = ula.trace(musicgen(), torch.randint(20, (4, 5)), progress=False)
    with pytest.raises((InputError, UncoveredError), match=r"\(4, 5|4 rows of ids|no embedding module"):
        ula.explain(trace, method=method, target=-1, logit=logit, progress=False)


def test_the_gradient_of_a_function_is_that_at_the_sums_of_the_embeddings_of_codebooks() -> None:
    model, ids = musicgen().double(), torch.randint(20, (4, 5))
    result = ula.explain(model, ids, method="gradient", logit=OF_CODEBOOKS, target=-1, progress=False)
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        entered.append(args[0].detach().requires_grad_())
        return (entered[0], *args[1:]), kwargs

    model.model.decoder.layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    (slopes,) = torch.autograd.grad(OF_CODEBOOKS(model(ids)).sum(), entered)
    assert result.scores.shape == (2, 5)
    assert torch.allclose(result.scores, slopes.abs().sum(-1), rtol=1e-6)


@pytest.mark.parametrize("logit", [lambda out: 3.0, lambda out: None, lambda out: out.logits[:, -1]])
def test_a_function_without_one_number_for_each_sequence_is_refused(logit: Any) -> None:
    trace = ula.trace(model_of("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=20), ids(), progress=False)
    with pytest.raises(InputError, match=r"the function `logit` returned .* for 2 sequences"):
        ula.explain(trace, method="logit", logit=logit, progress=False)


@pytest.mark.parametrize("method", ["logit", "attribution"])
def test_a_function_that_does_not_depend_on_the_model_is_refused(method: str) -> None:
    trace = ula.trace(model_of("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=20), ids(), progress=False)
    with pytest.raises(UncoveredError, match="does not depend on"):
        ula.explain(trace, method=method, logit=lambda out: out.logits[:, -1].argmax(-1), progress=False)


@pytest.mark.long
def test_a_classifier_that_accepts_logits_to_keep_computes_all_of_them() -> None:
    model = model_of("BioGptForSequenceClassification", "BioGptConfig", **SMALL, vocab_size=20, num_labels=3)
    trace = ula.trace(model, ids(), progress=False)
    result = ula.explain(trace, method="logit", target=-1, progress=False)
    close(result.scores.double().sum(1) + result.extras["bias"], trace.output.logits.amax(-1).double())
    assert ula.explain(trace, method="occlusion", target=-1, progress=False).scores.shape == (2, 5)


@pytest.mark.long
@pytest.mark.parametrize(("name", "settings"), [("Gemma4", GEMMA), ("Gemma3n", NANO)])
def test_gradients_of_layers_that_read_the_keys_of_earlier_layers(name: str, settings: dict[str, Any]) -> None:
    model = model_of(f"{name}ForCausalLM", f"{name}TextConfig", **settings)
    outputs: list[Tensor] = []
    modules = [layer.self_attn for layer in model.model.layers]
    hooks = [module.register_forward_hook(lambda module, args, out: outputs.append(out[0])) for module in modules]
    logit = model(ids(), use_cache=False).logits[:, -1].amax(-1).sum()
    for hook in hooks:
        hook.remove()
    expected = torch.autograd.grad(logit, outputs)
    for gradient, reference in zip(ula.trace(model, ids(), progress=False).gradient(-1), expected, strict=True):
        close(gradient, reference)


@pytest.mark.parametrize(
    ("name", "settings", "inputs", "tokens"),
    [
        (
            "ASTForAudioClassification",
            dict(SMALL, patch_size=4, frequency_stride=4, time_stride=4, num_mel_bins=8, max_length=12),
            {"input_values": torch.randn(2, 12, 8)},
            8,
        ),
        (
            "WhisperForAudioClassification",
            dict(d_model=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8, num_mel_bins=6)
            | dict(max_source_positions=5, is_encoder_decoder=False),
            {"input_features": torch.randn(2, 6, 10)},
            5,
        ),
    ],
)
@pytest.mark.parametrize("method", ["logit", "occlusion"])
def test_keys_are_the_tokens_of_the_layers(
    name: str, settings: dict[str, Any], inputs: dict[str, Tensor], tokens: int, method: str
) -> None:
    config = {"ASTForAudioClassification": "ASTConfig", "WhisperForAudioClassification": "WhisperConfig"}[name]
    result = ula.explain(model_of(name, config, **settings), inputs, method=method, target=-1, progress=False)
    assert result.scores.shape == (2, tokens)
    assert method == "occlusion" or result.completeness_gap < TOLERANCES["layer", torch.float32]


@pytest.mark.long
@pytest.mark.skipif(transformers.__version__ == "5.6.2", reason="transformers 5.6.2 has no VideoPrism")
def test_layers_of_several_batches_have_shares_but_no_composition() -> None:
    sizes = {**SMALL, "image_size": 8, "tubelet_size": [1, 4, 4], "num_frames": 2, "num_spatial_layers": 1}
    model = model_of("VideoPrismVisionModel", "VideoPrismVisionConfig", **sizes, num_temporal_layers=1)
    trace = ula.trace(model, {"pixel_values_videos": torch.randn(2, 2, 3, 8, 8)}, progress=False)
    result = ula.explain(trace, method="logit", logit=lambda out: out.last_hidden_state[..., 0].sum(1), progress=False)
    assert result.method == "logit" and result.scores.shape == (2, 8)
    assert result.completeness_gap is not None and result.completeness_gap < 1e-4
    with pytest.raises(
        UncoveredError, match=r"different numbers of sequences \(spatial_layers 4 x 4, temporal_layers 8 x 2"
    ):
        ula.explain(trace, method="rollout", progress=False)


def test_a_scalar_that_is_zero_for_every_input_is_refused() -> None:
    # The sum of the channels behind a layer norm without parameters.
    model = model_of("ViTModel", "ViTConfig", **VISION)
    trace = ula.trace(model, {"pixel_values": torch.randn(2, 3, 8, 8)}, progress=False)
    with pytest.raises(ExactnessError, match=r"the scalar is zero up to rounding: terms of .* add up to"):
        ula.explain(trace, method="logit", logit=lambda out: out.last_hidden_state.sum((1, 2)), progress=False)


@contextmanager
def busy(model: nn.Module, mark: Any) -> Iterator[None]:
    """A capture whose hooks call functions of torch."""
    hooks = [
        m.register_forward_pre_hook(lambda m, args: print(end=str(torch.ones(3).sum())[:0])) for m in model.modules()
    ]
    yield
    for hook in hooks:
        hook.remove()


def test_functions_that_hooks_call_do_not_move_the_tokens() -> None:
    model = model_of("ViTForImageClassification", "ViTConfig", **VISION)
    trace = ula.trace(model, {"pixel_values": torch.randn(2, 3, 8, 8)}, progress=False)
    expected = ula.explain(trace, target=-1, progress=False).scores

    def build(call: Any) -> Any:
        raise AssertionError("no module has this adapter")

    with overridden(Architecture("busy", "busy", (), "", build, capture=busy)):
        close(ula.explain(trace, target=-1, progress=False).scores, expected)


class Prefixed(Model):
    """A model that puts tokens before those of its ids, and computes the logits of some positions only."""

    def forward(self, input_ids: Tensor, logits_to_keep: Any = 0) -> Any:
        x = self.embed(torch.cat([torch.tensor([[1, 2, 3]]).expand(len(input_ids), -1), input_ids], 1))
        for block in self.blocks:
            x = block(x)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return {"logits": self.head(x[:, keep])}


def test_positions_of_logits_count_the_tokens_of_the_layers() -> None:
    torch.manual_seed(0)
    model = Prefixed(Block(added))
    trace = ula.trace(model, {"input_ids": torch.randint(9, (2, 5))}, progress=False)
    arguments, computed = trace.explained_logit.arguments(model, [-1])
    assert computed is not None and computed.tolist() == [7]
    close(call_host(model, arguments)["logits"][:, 0], trace.output["logits"][:, -1])


class Summed(nn.Module):
    """Adds up all earlier tokens; it has no adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Cached(Model):
    """A model that attends to later tokens too if it fills a cache."""

    def __init__(self) -> None:
        super().__init__(Block(added, Summed()))
        self.config: Any = SimpleNamespace(use_cache=True)

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> Any:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        logits = super().forward(input_ids).logits
        return {"logits": logits + logits.mean(1, keepdim=True) if use_cache else logits}


def test_an_output_that_depends_on_the_cache_is_refused() -> None:
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(9, (2, 5))}
    with pytest.raises(InputError, match="Pass use_cache=False to explain the model without it"):
        ula.trace(Cached(), inputs, progress=False)
    assert ula.trace(Cached(), {**inputs, "use_cache": False}, progress=False).layers


def test_targets_count_the_real_tokens_of_each_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        real = torch.rand(4, 9, generator=generator) < 0.6
        real[:, 4] = True
        counts = real.sum(1).tolist()
        targets = [int(torch.randint(-count, count, (), generator=generator)) for count in counts]
        expected = [real[row].nonzero().flatten().tolist()[target] for row, target in enumerate(targets)]
        assert positions_of(targets, real).tolist() == expected
        assert positions_of(-1, real).tolist() == [row.nonzero().max().item() for row in real]
