"""The gamma rule of `lrp`: relevances of models whose layers share relevance pair by pair, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import unilinattn as ula
from tests.frozen import detached, test_live_layer
from tests.frozen.detached import Steps, gpt2_model, llama_model, mamba_model, token_ids
from tests.shared import exact_trace
from unilinattn.errors import OptionError
from unilinattn.testing import promoted

GAMMA = 0.25


def shared(pairs: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sums of products over their last axis but one, with the relevance of the gamma rule.

    R_j = sum_k c'_jk / sum_i c'_ik R_k, where c' is 1.25 c for products c and biases with the sign of their sum.
    """
    z = pairs.sum(-2) + (0 if bias is None else bias)
    counted = 1 + GAMMA * (pairs * z.unsqueeze(-2) > 0)
    total = (pairs * counted).sum(-2)
    if bias is not None:
        total = total + bias * (1 + GAMMA * (bias * z > 0))
    slope = (weight * counted * (z / total).unsqueeze(-2)).detach()
    image = (x * slope).sum(-2)
    return image + (z - image).detach()


def linear(module: nn.Linear | Conv1D, x: Tensor) -> Tensor:
    weight = module.weight if isinstance(module, Conv1D) else module.weight.T
    x = x.unsqueeze(-1)
    return shared(x * weight, x, weight, module.bias)


def convolved(x: Tensor, conv: nn.Conv1d) -> Tensor:
    taps = conv.weight[:, 0].mT  # (tap, channel)
    windows = functional.pad(x.mT, (len(taps) - 1, 0)).unfold(-1, len(taps), 1).permute(0, 2, 3, 1)
    return shared(windows * taps, windows, taps, conv.bias)


def _gpt2(model: Any, x: Tensor) -> Tensor:
    return detached._frozen_gpt2(model, x, Steps([], [], []))


BY_HAND: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], str]] = {
    "mamba": (mamba_model, test_live_layer._relevant_mamba, "backbone.layers"),
    "llama": (llama_model, test_live_layer._relevant_llama, "model.layers"),
    "gpt2": (gpt2_model, _gpt2, "transformer.h"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_relevances_are_shared_pair_by_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, by_hand, blocks = BY_HAND[name]
    model = build()
    model.config._attn_implementation = "eager"
    with promoted():
        trace = ula.trace(model, token_ids(), progress=False)
        result = ula.explain(trace, method=ula.methods.Lrp(gamma=GAMMA, logit=3), target=-1)
        plain = ula.explain(trace, method=ula.methods.Lrp(logit=3), target=-1)
    assert result.completeness_gap is not None and result.completeness_gap <= 1e-12
    x = model.get_input_embeddings()(token_ids()).detach()
    if name == "gpt2":  # The constants that are added to a token's embedding are a part of its share.
        x = x + model.transformer.wpe.weight[: x.shape[1]].detach()
    x.requires_grad_()
    monkeypatch.setattr(detached, "convolved", convolved)
    for module in model.get_submodule(blocks).modules():
        if isinstance(module, nn.Linear | Conv1D):
            monkeypatch.setattr(module, "forward", partial(linear, module))
    with promoted():
        logit = by_hand(model, x)[:, 3]
    (grad,) = torch.autograd.grad(logit.sum(), x)
    expected = (grad * x).sum(-1).detach()
    size = expected.abs().max()
    assert float((result.scores - expected).abs().max() / size) <= 1e-12
    assert float((result.extras["bias"] + expected.sum(1) - logit.detach()).abs().max() / size) <= 1e-12
    assert float((plain.scores - expected).abs().max() / size) > 1e-3


def test_products_that_cancel_send_less_relevance_back() -> None:
    trace = ula.trace(mamba_model(), token_ids(), progress=False)
    sizes = [
        float(ula.explain(trace, method=ula.methods.Lrp(gamma=gamma), target=-1).extras["cancellation"].mean())
        for gamma in (0.0, 0.25, 100.0)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[0]


def test_a_backward_vision_mamba_follows_the_rule_in_both_convolutions() -> None:
    with promoted():
        trace = exact_trace(test_live_layer.HOSTS["reference/vim"])
        result = ula.explain(trace, method=ula.methods.Lrp(gamma=GAMMA))
        plain = ula.explain(trace, method=ula.methods.Lrp())
    assert result.completeness_gap is not None and result.completeness_gap <= 1e-12
    assert float((result.scores - plain.scores).abs().max()) > 1e-6


@pytest.mark.parametrize("gamma", [-0.1, float("inf"), float("nan")])
def test_a_gamma_below_zero_or_not_finite_is_refused(gamma: float) -> None:
    with pytest.raises(OptionError, match="gamma"):
        ula.methods.Lrp(gamma=gamma)
