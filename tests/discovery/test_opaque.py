"""Mixers without an adapter as opaque layers that results list; `test_discovery` refuses them."""

import pytest
import torch
from torch import nn

import unilinattn as ula
from tests.discovery.invented import INVENTED, RECURRENT, hybrid
from unilinattn.testing import left_as_found

IDS = torch.randint(30, (2, 9))


@pytest.mark.long
@pytest.mark.parametrize("name", RECURRENT)
def test_without_strict_it_is_an_opaque_layer_that_results_list(name: str) -> None:
    model = hybrid(INVENTED[name]())
    with left_as_found(model):
        trace = ula.trace(model, IDS, strict=False)
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
    model = hybrid(INVENTED["LSTM"]())
    model.backbone.layers = nn.ModuleList([model.backbone.layers[1]])
    trace = ula.trace(model, IDS, strict=False)
    with pytest.raises(ula.UnilinattnError, match="every layer of MambaForCausalLM is opaque"):
        ula.explain(trace, method="rollout")
