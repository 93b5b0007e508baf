"""The length of the output's vectors, which is explained where a model returns no logits."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import unilinattn as ula
from tests.host.test_host_calls import SMALL, VISION, model_of
from unilinattn.errors import InputError, OptionError
from unilinattn.testing import promoted

LINEAR = ("logit", "lrp", "alti_logit")
"""Methods whose scores add up."""


@cache
def llama() -> nn.Module:
    return model_of("LlamaModel", "LlamaConfig", **SMALL, vocab_size=20, num_key_value_heads=2).double()


@cache
def mamba() -> nn.Module:
    return model_of(
        "MambaModel", "MambaConfig", vocab_size=20, hidden_size=8, num_hidden_layers=2, state_size=4
    ).double()


@cache
def bert() -> nn.Module:
    return model_of("BertModel", "BertConfig", **SMALL, vocab_size=20).double()


def ids(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(20, (batch, length), generator=torch.Generator().manual_seed(1))


def resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    model = model_of("ResNetModel", "ResNetConfig", **sizes).double()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}


@pytest.mark.parametrize("model", [llama, mamba, bert])
@pytest.mark.parametrize("method", LINEAR)
def test_shares_add_up_to_the_length_of_the_vector_at_the_target(model: Any, method: str) -> None:
    if (model, method) == (bert, "alti_logit"):
        pytest.skip("alti_logit does not cover models that norm the stream between layers, as BERT does")
    with promoted(), torch.no_grad():
        result = ula.explain(model(), ids(), method=method, target=[3, -1], progress=False)
        vectors = model()(ids()).last_hidden_state
    expected = vectors[[0, 1], [3, 4]].norm(dim=-1)
    torch.testing.assert_close(result.extras["logit"], expected, rtol=1e-10, atol=0)
    parts = result.scores.double().sum(1) + result.extras["bias"] + result.extras["remainder"]
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=0)
    assert result.completeness_gap < 1e-10
    assert result.extras["remainder"].abs().max() < 1e-10
    assert "the length of the vector in out.last_hidden_state at position 3 = " in repr(result)


@pytest.mark.parametrize("method", ["lrp", "attn_lrp", "occlusion", "kernel_shap", "knockout"])
def test_scores_are_those_of_the_inner_product_with_the_traced_direction(method: str) -> None:
    with torch.no_grad():
        vectors = llama()(ids()).last_hidden_state[:, 3]
    direction = vectors / vectors.norm(dim=-1, keepdim=True)
    batch = []
    for sequence in range(2):
        along = direction[sequence]
        batch.append(
            ula.explain(
                llama(),
                ids()[sequence : sequence + 1],
                method=method,
                target=3,
                logit=lambda out, along=along: (out.last_hidden_state[:, 3] * along).sum(-1),
                progress=False,
            ).scores
        )
    result = ula.explain(llama(), ids(), method=method, target=3, progress=False)
    # Each sequence has its own direction, in a batch too, and in runs of several variants of it.
    torch.testing.assert_close(result.scores, torch.cat(batch), rtol=1e-5, atol=1e-7)
    assert result.scores.abs().amax(1).min() > 1e-4


def test_without_a_target_all_vectors_but_padding_count() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = ula.explain(bert(), {"input_ids": ids(), "attention_mask": mask}, method="logit", progress=False)
    alone = ula.explain(bert(), ids()[1:, :3], method="logit", progress=False)
    torch.testing.assert_close(padded.scores[1:, :3], alone.scores, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(padded.extras["logit"][1:], alone.extras["logit"], rtol=1e-10, atol=0)
    with torch.no_grad():
        expected = bert()(ids()[1:, :3]).last_hidden_state.flatten(1).norm(dim=1)
    torch.testing.assert_close(alone.extras["logit"], expected, rtol=1e-10, atol=0)
    assert "the length of out.last_hidden_state =" in repr(alone)


@pytest.mark.long
def test_feature_maps_are_explained_whole_where_layers_cannot_be_composed() -> None:
    model, inputs = resnet()
    with pytest.warns(UserWarning, match="This is lrp of the length of out.last_hidden_state"):
        result = ula.explain(model, inputs, target=-1, progress=False)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state.flatten(1).norm(dim=1)
    torch.testing.assert_close(result.extras["logit"], expected, rtol=1e-10, atol=0)
    assert result.method == "lrp" and result.completeness_gap < 1e-10
    # The number is checked by runs with pixels replaced, not with ids.
    with pytest.raises(InputError, match="ids"):
        result.check()


def test_a_check_replaces_tokens_and_measures_the_length_along_the_direction() -> None:
    result = ula.explain(bert(), ids(1, 12), method="lrp", target=3, progress=False, check=True)
    assert result.checks is not None
    (check,) = result.checks
    assert check.name == "the length of the vector in out.last_hidden_state"
    # The vector is nowhere longer along its direction: the norm behind it has one length.
    assert check.value.top > 0 and check.value.random > 0


@pytest.mark.parametrize("method", ["gradient", "input_x_gradient", "contribution", "attribution"])
def test_methods_by_the_gradient_need_a_function(method: str) -> None:
    """The gradient of a normed vector's length is zero, and scores would be rounding."""
    with pytest.raises(InputError, match="LlamaModel returns no logits; give `logit` as a function"):
        ula.explain(llama(), ids(), method=method, target=3, progress=False)
    # The norm's weight is one for every channel, so that squares add up to the number of channels, but for `eps`.
    model = model_of("BertModel", "BertConfig", **SMALL, vocab_size=20, layer_norm_eps=1e-30).double()
    length = ula.explain(model, ids(), method="gradient", logit=lambda out: out.last_hidden_state[:, 3].norm(dim=-1))
    first = ula.explain(model, ids(), method="gradient", logit=lambda out: out.last_hidden_state[:, 3, 0])
    assert length.scores.abs().max() < 1e-9 * first.scores.abs().max()


def test_a_named_logit_and_a_probability_need_logits() -> None:
    with pytest.raises(InputError, match="returns no logits"):
        ula.explain(llama(), ids(), method="lrp", logit=3, target=-1, progress=False)
    with pytest.raises(InputError, match="returns no logits"):
        ula.explain(llama(), ids(), method="knockout", measure="log-probability", target=-1, progress=False)
    with pytest.raises(OptionError, match="unknown method"):
        ula.explain(llama(), ids(), method="lpr", target=-1, progress=False)


def test_images_of_a_vision_transformer_have_a_vector_for_each_patch() -> None:
    model = model_of("ViTModel", "ViTConfig", **VISION).double()
    image = {"pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}
    result = ula.explain(model, image, method="lrp", target=0, progress=False)
    with torch.no_grad():
        expected = model(**image).last_hidden_state[:, 0].norm(dim=-1)
    torch.testing.assert_close(result.extras["logit"], expected, rtol=1e-10, atol=0)
    assert ula.estimate(model, image, method="lrp", target=0).result > 0
