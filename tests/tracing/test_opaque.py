"""Mixers without an adapter: refused, or kept as opaque layers that results list."""

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula


class LSTMMixer(nn.Module):
    """A non-linear recurrence, which has no exact linear form."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self.lstm(hidden_states)[0]


def hybrid() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=30, hidden_size=8, state_size=3, num_hidden_layers=3, pad_token_id=None, bos_token_id=None
    )
    model = transformers.MambaForCausalLM(config).eval()
    model.backbone.layers[1].mixer = LSTMMixer(8)
    return model


IDS = torch.randint(30, (2, 9))


def test_an_unknown_mixer_is_refused_with_its_path_class_and_the_remedy() -> None:
    with pytest.raises(ula.UnilinattnError) as caught:
        ula.trace(hybrid(), IDS)
    message = str(caught.value)
    assert "backbone.layers.1.mixer" in message
    assert "LSTM" in message and "its state passes a nonlinearity" in message


def test_without_strict_it_is_an_opaque_layer_that_results_list() -> None:
    trace = ula.trace(hybrid(), IDS, strict=False)
    assert [layer.kind for layer in trace.layers] == ["Mamba-1 (S6)", "opaque", "Mamba-1 (S6)"]
    opaque = trace.layers[1]
    assert opaque.opaque and opaque.name.startswith("backbone.layers.1.mixer")
    with pytest.raises(ula.UnilinattnError, match="is opaque"):
        _ = opaque.operator
    for method, options in (("raw", {}), ("rollout", {}), ("latim", {}), ("alti", {}), ("attribution", {"target": -1})):
        result = ula.explain(trace, method=method, **options)
        assert result.left_out == (opaque.name,)
        assert len(result.layers) == 2
        assert opaque.name in repr(result) and opaque.name in result.to_html()
        with pytest.raises(ula.UnilinattnError, match="is opaque"):
            ula.explain(trace, method="raw", layers=[1])


def test_a_model_with_only_opaque_layers_is_refused() -> None:
    model = hybrid()
    model.backbone.layers = nn.ModuleList([model.backbone.layers[1]])
    trace = ula.trace(model, IDS, strict=False)
    with pytest.raises(ula.UnilinattnError, match="every layer of MambaForCausalLM is opaque"):
        ula.explain(trace, method="rollout")
